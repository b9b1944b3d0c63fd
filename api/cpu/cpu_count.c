/* Bytes per destination (trefoil/device.h). Rows move by pull, so the reader counts: it adds
 * the row's bytes to a word of the source's control block, which is its own
 * (EP_ARRAY_BYTES, [source][reader]), before the `taken` number. Whether a row counts depends on what was on
 * when the sender's operation was called; that travels with the rows. So a
 * source that has seen `taken` up to its last operation has all of its counts.
 *
 * What was counted is what was moved: nothing here looks at the plan. */
#include <time.h>

#include "api/cpu/cpu.h"
#include "trefoil/device.h"

trefoil_result_t epCpuCountBytes(ncclEpGroup_t group, int on) {
  ep_cpu_group_t *g = epCpu(group);
  atomic_store(&g->counting, on);
  if (on) g->counted = 1;
  return TREFOIL_OK;
}

static uint64_t *unpublished(const ep_op_t *op, int r) {
  return &op->g->peers[r].bytesNow[op->arenaIdx][op->kind == EP_KIND_COMBINE];
}

void epForgetTaken(const ep_op_t *op) {
  for (int r = 0; r < op->g->R; r++) *unpublished(op, r) = 0;
}

/* An addition in one piece: operations of the two arenas may run side by side. */
void epPublishTaken(const ep_op_t *op) {
  ep_array_t array = EP_ARRAY_BYTES + (op->kind == EP_KIND_COMBINE);
  for (int r = 0; r < op->g->R; r++) {
    uint64_t bytes = *unpublished(op, r);
    if (!bytes) continue;
    atomic_fetch_add_explicit(epWordOf(op, r, array, op->g->me), bytes, memory_order_release);
    *unpublished(op, r) = 0;
  }
}

/* ---- reading: until all that was sent is taken ------------------------------------------------- */

typedef struct wait {
  ep_op_t op; /* the arena's last of its kind */
  uint64_t deadlineNs;
  int late; /* the rank that did not come */
} wait_t;

/* A rank that was given up, or left out of the operation, owes nothing. */
static int isTaken(wait_t *w, int r, ep_array_t array, int i, uint64_t no) {
  const struct timespec pause = {0, 20000};
  const ep_word_t *word = epWordOf(&w->op, r, array, i);
  while (epLoad(word) < no) {
    if (!epOwesReading(&w->op, r, w->op.no)) return 1;
    w->late = r;
    if (atomic_load(&w->op.g->failed) || epMonotonicNs() > w->deadlineNs) return 0;
    nanosleep(&pause, NULL);
  }
  return 1;
}

/* High throughput's combine: an origin of this node takes from here itself; for another node the rank
 * of its rail does, which then gives the node's sum to the origin. */
static int isCombineTaken(wait_t *w, int origin) {
  ep_cpu_group_t *g = w->op.g;
  int node = g->me / g->G, rail = g->me % g->G, arena = w->op.arenaIdx;
  uint64_t seq = g->peers[origin].ringSeq[arena];
  if (origin / g->G == node) return isTaken(w, origin, EP_ARRAY_OWN_TAKEN, g->me, seq);
  int p = node * g->G + origin % g->G, ring = origin / g->G * g->G + rail;
  if (!isTaken(w, p, EP_ARRAY_RELAY_TAKEN, ring, seq)) return 0;
  return origin % g->G != rail || isTaken(w, origin, EP_ARRAY_OWN_TAKEN, g->me, seq);
}

static int isAllTaken(wait_t *w) {
  ep_cpu_group_t *g = w->op.g;
  int isCombine = w->op.kind == EP_KIND_COMBINE, ht = epIsHt(g->group);
  for (int r = 0; r < g->R; r++) {
    ep_array_t array = isCombine ? EP_ARRAY_OWN_TAKEN : EP_ARRAY_DISPATCH_TAKEN;
    int taken = isCombine && ht ? isCombineTaken(w, r) : isTaken(w, r, array, g->me, w->op.no);
    if (!taken) return 0;
  }
  return 1;
}

static trefoil_result_t awaitTaken(ep_cpu_group_t *g, ep_kind_t kind) {
  uint64_t now = epMonotonicNs(), timeout = g->group->timeoutNs;
  wait_t w = {.deadlineNs = timeout < INT64_MAX - now ? now + timeout : INT64_MAX};
  for (int a = 0; a < 2; a++) {
    if (!g->arenas[a].ready) continue;
    w.op = (ep_op_t){
        .g = g, .a = &g->arenas[a], .arenaIdx = a, .kind = kind, .no = g->arenas[a].ops[kind]};
    EP_CHECK(isAllTaken(&w), TREFOIL_REMOTE_ERROR,
             "ncclEpReadBytes: rank %d has not taken what rank %d sent to it", w.late, g->me);
  }
  return TREFOIL_OK;
}

trefoil_result_t epCpuReadBytes(ncclEpGroup_t group, int kind, uint64_t *bytes, int reset,
                                cudaStream_t stream) {
  ep_cpu_group_t *g = epCpu(group);
  int isCombine = kind == NCCL_EP_KIND_COMBINE;
  EP_CHECK(g->counted, TREFOIL_INVALID_USAGE,
           "ncclEpReadBytes: this group never counted; call ncclEpCountBytes(group, 1) first, or "
           "set NCCL_EP_COUNT_BYTES=1");
  cudaError_t error = cudaStreamSynchronize(stream);
  EP_CHECK(error == cudaSuccess, TREFOIL_INVALID_USAGE, "the stream is not usable: %s",
           cudaGetErrorString(error));
  EP_TRY(awaitTaken(g, isCombine ? EP_KIND_COMBINE : EP_KIND_DISPATCH));
  const ep_word_t *counts = epArray(g->peers[g->me].control, g->R, EP_ARRAY_BYTES + isCombine, 0);
  for (int r = 0; r < g->R; r++) {
    uint64_t all = epLoad(&counts[r]);
    bytes[r] = all - g->peers[r].bytesBase[isCombine];
    if (reset) g->peers[r].bytesBase[isCombine] = all;
  }
  return TREFOIL_OK;
}
