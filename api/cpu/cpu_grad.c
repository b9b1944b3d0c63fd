/* A2SGD on the CPU behind trefoil/a2sgd.h: a step is a host function on the stream. It stores this rank's
 * means into every rank's exchange memory, then the number of the step, waits for those of the others, and
 * moves the elements, all by the reference's functions.
 *
 * Exchange memory, of each rank: [2][R] words, the step that rank r's means are of, and [2][R][groups][2]
 * means, by parity of the step. Those of step e take the place of those of e - 2, which their reader is
 * through with: its means of e - 1 are here. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "api/cpu/cpu_group.h"
#include "api/cpu/cpu_round.h"
#include "api/grad_object.h"
#include "plan/clock.h"
#include "trefoil_host.h"

#define LOOK_NS 5000000ull /* between looks at the peer's life */

typedef struct grad_record grad_record_t;
typedef struct cpu_grad {
  struct trefoil_grad_gpu head;
  trefoil_grad_config_t config; /* with sizes of its own */
  int64_t *sizes;
  int device;
  size_t groups;
  char *exchange;
  ncclWindow_t window;
  char **peers;        /* [R] exchange memory */
  _Atomic int *active; /* [R] */
  float *means;        /* [R][groups][2], of one step */
  uint64_t epoch;      /* of the step at work */
  ep_grad_loss_t loss;
  _Atomic int isLost;
  grad_record_t *records; /* captured: graphs may be launched until the object goes */
} cpu_grad_t;

/* What was queued: a step, or a mask. */
struct grad_record {
  void (*run)(grad_record_t *r);
  cpu_grad_t *g;
  grad_record_t *next;
  int isCaptured;
  const void *grad;
  void *update;
  int active[]; /* of a mask: [R] */
};

static size_t wordsBytes(const cpu_grad_t *g) {
  return 2 * (size_t)g->head.numRanks * sizeof(ep_word_t);
}
static size_t meansBytes(const cpu_grad_t *g) {
  return g->groups * 2 * sizeof(float);
}
/* Rank `from`'s place in a rank's exchange memory. */
static size_t placeOf(const cpu_grad_t *g, int from) {
  return (size_t)(g->epoch & 1) * (size_t)g->head.numRanks + (size_t)from;
}
static ep_word_t *wordOf(const cpu_grad_t *g, int at, int from) {
  return (ep_word_t *)(void *)g->peers[at] + placeOf(g, from);
}
static char *meansOf(const cpu_grad_t *g, int at, int from) {
  return g->peers[at] + wordsBytes(g) + placeOf(g, from) * meansBytes(g);
}

static size_t exchangeBytes(int64_t groups, int numRanks) {
  return 2 * (size_t)numRanks * (sizeof(ep_word_t) + (size_t)groups * 2 * sizeof(float));
}

trefoil_result_t epCpuGradSizes(const trefoil_grad_config_t *c, int numSms, size_t *exchange,
                                size_t *scratch) {
  trefoil_grad_sizes_t sizes;
  (void)numSms;
  EP_TRY(trefoilGradSizes(c, &sizes));
  *exchange = exchangeBytes(sizes.groups, c->numWorkers);
  *scratch = (size_t)c->numWorkers * (size_t)sizes.groups * 2 * sizeof(float);
  return TREFOIL_OK;
}

/* ---- a step ---------------------------------------------------------------------------------- */

/* How a wait for a rank's means ends. */
typedef enum { CAME, GONE, LEFT_BEHIND } came_t;

static came_t awaitRank(cpu_grad_t *g, int rank, uint64_t *waitedNs) {
  const ep_word_t *word = wordOf(g, g->head.rank, rank);
  uint64_t since = epMonotonicNs(), look = since;
  for (int spins = epNumSpins();; spins--) {
    uint64_t found = epLoad(word), now = epMonotonicNs();
    *waitedNs = now - since;
    if (found == g->epoch) return CAME;
    if (found > g->epoch) return LEFT_BEHIND;
    if (spins > 0) {
      epSpinPause();
      continue;
    }
    if (*waitedNs >= g->head.timeoutNs) return GONE;
    if (now - look >= LOOK_NS && trefoilHostPeerAlive(g->head.comm, rank) == 0) {
      if (epLoad(word) != g->epoch) return GONE;
      continue;
    }
    if (now - look >= LOOK_NS) look = now;
    uint64_t left = g->head.timeoutNs - *waitedNs;
    const void *lowHalf = word;
    epFutexWait(lowHalf, (uint32_t)found, left < LOOK_NS ? left : LOOK_NS, EP_FUTEX_SHARED);
  }
}

static int isActive(const cpu_grad_t *g, int rank) {
  return atomic_load(&g->active[rank]);
}

static void sendMeans(cpu_grad_t *g, const float *own) {
  for (int r = 0; r < g->head.numRanks; r++) {
    if (!isActive(g, r)) continue;
    ep_word_t *word = wordOf(g, r, g->head.rank);
    memcpy(meansOf(g, r, g->head.rank), own, meansBytes(g));
    epStore(word, g->epoch);
    const void *lowHalf = word;
    epFutexWake(lowHalf, EP_FUTEX_SHARED);
  }
}

/* 0: without masks a rank was lost. */
static int receiveMeans(cpu_grad_t *g) {
  for (int r = 0; r < g->head.numRanks; r++) {
    uint64_t waited;
    if (!isActive(g, r) || awaitRank(g, r, &waited) == CAME) continue;
    if (g->head.enableMask) {
      atomic_store(&g->active[r], 0);
      continue;
    }
    g->loss = (ep_grad_loss_t){r, waited, g->epoch, 0};
    atomic_store(&g->isLost, 1);
    return 0;
  }
  return 1;
}

/* The means of the ranks that this one regards as active, in the order of ranks. */
static int gatherMeans(cpu_grad_t *g, int *worker) {
  int n = 0;
  for (int r = 0; r < g->head.numRanks; r++) {
    if (!isActive(g, r)) continue;
    if (r == g->head.rank) *worker = n;
    memcpy((char *)g->means + (size_t)n++ * meansBytes(g), meansOf(g, g->head.rank, r),
           meansBytes(g));
  }
  return n;
}

static void runStep(grad_record_t *r) {
  cpu_grad_t *g = r->g;
  int worker = 0;
  if (atomic_load(&g->isLost)) return;
  g->epoch++;
  (void)trefoilGradTwoMeans(&g->config, r->grad, g->means);
  sendMeans(g, g->means);
  if (!receiveMeans(g)) return;
  trefoil_grad_config_t c = g->config;
  c.numWorkers = gatherMeans(g, &worker);
  (void)trefoilGradFromMeans(&c, worker, g->means, r->grad, r->update);
}

static void runMask(grad_record_t *r) {
  for (int q = 0; q < r->g->head.numRanks; q++) atomic_store(&r->g->active[q], r->active[q] != 0);
}

/* ---- the queue ------------------------------------------------------------------------------- */

static void runRecord(void *argument) {
  grad_record_t *r = argument;
  int isCaptured = r->isCaptured;
  r->run(r);
  if (!isCaptured) free(r);
}

/* NULL: out of memory. */
static grad_record_t *newRecord(cpu_grad_t *g, void (*run)(grad_record_t *)) {
  grad_record_t *r = calloc(1, sizeof *r + (size_t)g->head.numRanks * sizeof(int));
  if (!r) return NULL;
  r->run = run;
  r->g = g;
  return r;
}

/* Takes the record, also on failure. */
static trefoil_result_t queue(grad_record_t *r, cudaStream_t stream) {
  trefoil_result_t result = epIsCapturing(stream, &r->isCaptured);
  if (result == TREFOIL_OK && r->isCaptured) {
    r->next = r->g->records;
    r->g->records = r;
  }
  int isOwned = r->isCaptured;
  if (result == TREFOIL_OK) {
    cudaError_t error = cudaLaunchHostFunc(stream, runRecord, r);
    if (error == cudaSuccess) return TREFOIL_OK;
    result =
        epFail(TREFOIL_SYSTEM_ERROR, "cannot queue on the stream: %s", cudaGetErrorString(error));
  }
  if (!isOwned) free(r);
  return result;
}

trefoil_result_t epCpuGradStep(struct trefoil_grad_gpu *head, const void *grad, void *update,
                               cudaStream_t stream) {
  if (head->elements == 0) return TREFOIL_OK;
  grad_record_t *r = newRecord((cpu_grad_t *)head, runStep);
  EP_CHECK(r, TREFOIL_SYSTEM_ERROR, "out of memory: a queued operation");
  r->grad = grad;
  r->update = update;
  return queue(r, stream);
}

trefoil_result_t epCpuGradSetMask(struct trefoil_grad_gpu *head, const int *active,
                                  cudaStream_t stream) {
  grad_record_t *r = newRecord((cpu_grad_t *)head, runMask);
  EP_CHECK(r, TREFOIL_SYSTEM_ERROR, "out of memory: a queued operation");
  memcpy(r->active, active, sizeof *active * (size_t)head->numRanks);
  return queue(r, stream);
}

trefoil_result_t epCpuGradGetMask(struct trefoil_grad_gpu *head, int *active, cudaStream_t stream) {
  const cpu_grad_t *g = (const cpu_grad_t *)head;
  cudaError_t error = cudaStreamSynchronize(stream);
  EP_CHECK(error == cudaSuccess, TREFOIL_SYSTEM_ERROR, "trefoilGradGpuGetMask: %s",
           cudaGetErrorString(error));
  for (int r = 0; r < head->numRanks; r++) active[r] = isActive(g, r);
  return TREFOIL_OK;
}

int epCpuGradLost(const struct trefoil_grad_gpu *head, ep_grad_loss_t *loss) {
  const cpu_grad_t *g = (const cpu_grad_t *)head;
  if (!atomic_load(&g->isLost)) return 0;
  *loss = g->loss;
  return 1;
}

/* ---- the object ------------------------------------------------------------------------------ */

static trefoil_result_t allocate(cpu_grad_t *g, const trefoil_grad_config_t *c) {
  size_t R = (size_t)g->head.numRanks, sizes = sizeof *g->sizes * (size_t)c->numTensors;
  trefoil_grad_sizes_t counts;
  EP_TRY(trefoilGradSizes(c, &counts));
  g->groups = (size_t)counts.groups;
  g->sizes = malloc(sizes + 1);
  g->peers = calloc(R, sizeof *g->peers);
  g->active = malloc(R * sizeof *g->active);
  g->means = malloc(R * meansBytes(g) + 1);
  EP_CHECK(g->sizes && g->peers && g->active && g->means, TREFOIL_SYSTEM_ERROR,
           "trefoilGradGpuCreate: out of memory");
  if (sizes) memcpy(g->sizes, c->sizes, sizes);
  g->config = *c;
  g->config.sizes = g->sizes;
  for (size_t r = 0; r < R; r++) atomic_init(&g->active[r], 1);
  return TREFOIL_OK;
}

/* Alone. */
static trefoil_result_t allocateExchange(cpu_grad_t *g) {
  void *p = NULL;
  ncclResult_t result = ncclMemAlloc(&p, exchangeBytes((int64_t)g->groups, g->head.numRanks));
  if (result != ncclSuccess) return epNcclFailed("trefoilGradGpuCreate: shared memory", result);
  memset(p, 0, wordsBytes(g));
  g->exchange = p;
  return TREFOIL_OK;
}

/* All ranks are here; registering ends on all or fails on all. */
static trefoil_result_t share(cpu_grad_t *g) {
  size_t bytes = exchangeBytes((int64_t)g->groups, g->head.numRanks);
  ncclResult_t result = ncclCommWindowRegister(g->head.comm, g->exchange, bytes, &g->window, 0);
  if (result != ncclSuccess) return epNcclFailed("trefoilGradGpuCreate: window", result);
  for (int r = 0; r < g->head.numRanks; r++) {
    void *p = NULL;
    result = trefoilHostPeerPointer(g->window, 0, r, &p);
    if (result != ncclSuccess) return epNcclFailed("trefoilGradGpuCreate: a peer's window", result);
    g->peers[r] = p;
  }
  return TREFOIL_OK;
}

trefoil_result_t epCpuGradOpen(struct trefoil_grad_gpu *head, const trefoil_grad_config_t *c,
                               const trefoil_grad_gpu_options_t *o, uint64_t hash) {
  cpu_grad_t *g = (cpu_grad_t *)head;
  ep_notice_t notice = {.call = EP_CALL_GRAD_CREATE, .groupId = hash};
  int perNode;
  (void)o;
  EP_TRY(epCpuRanks(head->comm, "trefoilGradGpuCreate", &head->rank, &head->numRanks, &perNode));
  EP_TRY(epGradCheckRanks(c, head->numRanks, perNode));
  ncclResult_t result = ncclCommCuDevice(head->comm, &g->device);
  if (result != ncclSuccess) return epNcclFailed("trefoilGradGpuCreate: comm", result);
  EP_TRY(allocate(g, c));
  EP_TRY(allocateExchange(g));
  EP_TRY(epCpuBarrierRound(head->comm, head->numRanks, head->timeoutNs, &notice));
  return share(g);
}

/* Where not all have left, a rank may still store into this one's memory: then it stays. */
void epCpuGradClose(struct trefoil_grad_gpu *head) {
  cpu_grad_t *g = (cpu_grad_t *)head;
  ep_notice_t notice = {.call = EP_CALL_GRAD_DESTROY};
  uint64_t limitNs = head->timeoutNs;
  int before = g->device;
  cudaGetDevice(&before);
  cudaSetDevice(g->device);
  cudaDeviceSynchronize();
  cudaSetDevice(before);
  if (atomic_load(&g->isLost) && limitNs > 1000000000u) limitNs = 1000000000u;
  trefoilHostCallBegin(head->comm);
  if (epCpuBarrierRound(head->comm, head->numRanks, limitNs, &notice) == TREFOIL_OK) return;
  g->window = NULL;
  g->exchange = NULL;
}

void epCpuGradRelease(struct trefoil_grad_gpu *head) {
  cpu_grad_t *g = (cpu_grad_t *)head;
  for (grad_record_t *r = g->records, *next; r; r = next) {
    next = r->next;
    free(r);
  }
  if (g->window) ncclCommWindowDeregister(head->comm, g->window);
  if (g->exchange) ncclMemFree(g->exchange);
  free(g->sizes);
  free(g->peers);
  free(g->active);
  free(g->means);
}

size_t epCpuGradBytes(void) {
  return sizeof(cpu_grad_t);
}
