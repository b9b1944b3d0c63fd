/* A2SGD on the CPU behind trefoil/a2sgd.h: a step is a host function on the stream. It stores this rank's
 * means into every rank's exchange memory, then the number of the step, waits for those of the others, and
 * moves the elements, all by the reference's functions. A synchronisation goes through the parameters in
 * chunks: a rank copies its own into its exchange memory, and averages when all have.
 *
 * Exchange memory, of each rank: [2][R] words, the step that rank r's means are of; with a syncPeriod
 * [2][R] words of chunks and a stamp; [2][R][groups][2] means; [2] chunks of this rank's parameters; all by
 * parity of the number. Those of number e take the place of those of e - 2, which their reader is through
 * with: its word of e - 1 is here. A rank that has masked this one does not wait for it: the stamp, its
 * number before it writes over a chunk, tells. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "api/cpu/cpu_group.h"
#include "api/cpu/cpu_round.h"
#include "api/grad_object.h"
#include "plan/clock.h"
#include "ref/grad.h"
#include "trefoil_host.h"

#define LOOK_NS     5000000ull /* between looks at the peer's life */
#define CHUNK_BYTES 65536      /* of parameters */

typedef struct grad_record grad_record_t;
typedef struct cpu_grad {
  struct trefoil_grad_gpu head;
  trefoil_grad_config_t config; /* with sizes of its own */
  int64_t *sizes;
  int device;
  size_t groups, chunkBytes; /* chunkBytes: 0 = no synchronisation */
  char *exchange;
  ncclWindow_t window;
  char **peers;          /* [R] exchange memory */
  _Atomic int *active;   /* [R] */
  float *means;          /* [R][groups][2], of one step */
  uint64_t epoch;        /* of the step at work */
  uint64_t chunk, syncs; /* likewise: chunks and synchronisations are counted through all */
  ep_grad_loss_t loss;
  _Atomic int isLost;
  grad_record_t *records; /* captured: graphs may be launched until the object goes */
} cpu_grad_t;

/* What was queued: a step, a synchronisation, or a mask. */
struct grad_record {
  void (*run)(grad_record_t *r);
  cpu_grad_t *g;
  grad_record_t *next;
  int isCaptured;
  const void *grad;
  void *update; /* of a synchronisation: the parameters */
  int64_t period;
  int active[]; /* of a mask: [R] */
};

static size_t numWords(const cpu_grad_t *g) {
  size_t of = 2 * (size_t)g->head.numRanks;
  return g->chunkBytes ? 2 * of + 1 : of;
}
static size_t meansBytes(const cpu_grad_t *g) {
  return g->groups * 2 * sizeof(float);
}
static size_t exchangeBytes(const cpu_grad_t *g) {
  return numWords(g) * sizeof(ep_word_t) +
         2 * ((size_t)g->head.numRanks * meansBytes(g) + g->chunkBytes);
}
/* Rank `from`'s place in a rank's exchange memory. */
static size_t placeOf(const cpu_grad_t *g, int from) {
  return (size_t)(g->epoch & 1) * (size_t)g->head.numRanks + (size_t)from;
}
static ep_word_t *wordOf(const cpu_grad_t *g, int at, int from) {
  return (ep_word_t *)(void *)g->peers[at] + placeOf(g, from);
}
static char *meansOf(const cpu_grad_t *g, int at, int from) {
  return g->peers[at] + numWords(g) * sizeof(ep_word_t) + placeOf(g, from) * meansBytes(g);
}
static ep_word_t *chunkWordOf(const cpu_grad_t *g, int at, int from) {
  size_t R = (size_t)g->head.numRanks;
  return (ep_word_t *)(void *)g->peers[at] + (2 + (g->chunk & 1)) * R + (size_t)from;
}
static ep_word_t *stampOf(const cpu_grad_t *g, int at) {
  return (ep_word_t *)(void *)g->peers[at] + numWords(g) - 1;
}
static char *chunkOf(const cpu_grad_t *g, int at) {
  return g->peers[at] + exchangeBytes(g) - (1 + (g->chunk & 1)) * g->chunkBytes;
}

/* What decides sizes. */
static trefoil_result_t measure(cpu_grad_t *g, const trefoil_grad_config_t *c) {
  trefoil_grad_sizes_t sizes;
  EP_TRY(trefoilGradSizes(c, &sizes));
  g->groups = (size_t)sizes.groups;
  g->chunkBytes = sizes.syncBytes < CHUNK_BYTES ? (size_t)sizes.syncBytes : CHUNK_BYTES;
  return TREFOIL_OK;
}

trefoil_result_t epCpuGradSizes(const trefoil_grad_config_t *c, int numSms, size_t *exchange,
                                size_t *scratch) {
  cpu_grad_t g = {.head = {.numRanks = c->numWorkers}};
  (void)numSms;
  EP_TRY(measure(&g, c));
  *exchange = exchangeBytes(&g);
  *scratch = (size_t)c->numWorkers * meansBytes(&g);
  return TREFOIL_OK;
}

/* ---- words ----------------------------------------------------------------------------------- */

/* How a wait for a rank's word ends. */
typedef enum { CAME, GONE, LEFT_BEHIND } came_t;

static came_t awaitRank(cpu_grad_t *g, int rank, const ep_word_t *word, uint64_t number,
                        uint64_t *waitedNs) {
  uint64_t since = epMonotonicNs(), look = since;
  for (int spins = epNumSpins();; spins--) {
    uint64_t found = epLoad(word), now = epMonotonicNs();
    *waitedNs = now - since;
    if (found == number) return CAME;
    if (found > number) return LEFT_BEHIND;
    if (spins > 0) {
      epSpinPause();
      continue;
    }
    if (*waitedNs >= g->head.timeoutNs) return GONE;
    if (now - look >= LOOK_NS && trefoilHostPeerAlive(g->head.comm, rank) == 0) {
      if (epLoad(word) != number) return GONE;
      continue;
    }
    if (now - look >= LOOK_NS) look = now;
    uint64_t left = g->head.timeoutNs - *waitedNs;
    const void *lowHalf = word;
    epFutexWait(lowHalf, (uint32_t)found, left < LOOK_NS ? left : LOOK_NS, EP_FUTEX_SHARED);
  }
}

static int isActive(const cpu_grad_t *g, int rank) {
  return rank == g->head.rank || atomic_load(&g->active[rank]);
}

static void post(ep_word_t *word, uint64_t number) {
  epStore(word, number);
  const void *lowHalf = word;
  epFutexWake(lowHalf, EP_FUTEX_SHARED);
}

/* 0: without masks a rank was lost; `what` says in what. */
static int receiveWords(cpu_grad_t *g, ep_word_t *(*of)(const cpu_grad_t *, int, int),
                        uint64_t number, ep_grad_loss_t what) {
  for (int r = 0; r < g->head.numRanks; r++) {
    if (!isActive(g, r)) continue;
    if (awaitRank(g, r, of(g, g->head.rank, r), number, &what.waitedNs) == CAME) continue;
    if (g->head.enableMask) {
      atomic_store(&g->active[r], 0);
      continue;
    }
    what.rank = r;
    g->loss = what;
    atomic_store(&g->isLost, 1);
    return 0;
  }
  return 1;
}

/* ---- a step ---------------------------------------------------------------------------------- */

static void sendMeans(cpu_grad_t *g, const float *own) {
  for (int r = 0; r < g->head.numRanks; r++) {
    if (!isActive(g, r)) continue;
    memcpy(meansOf(g, r, g->head.rank), own, meansBytes(g));
    post(wordOf(g, r, g->head.rank), g->epoch);
  }
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
  if (!receiveWords(g, wordOf, g->epoch, (ep_grad_loss_t){.number = g->epoch})) return;
  trefoil_grad_config_t c = g->config;
  c.numWorkers = gatherMeans(g, &worker);
  (void)trefoilGradFromMeans(&c, worker, g->means, r->grad, r->update);
}

/* ---- a synchronisation ----------------------------------------------------------------------- */

/* The mean over the ranks that this one regards as active, in the order of ranks. */
static void averageChunk(cpu_grad_t *g, int64_t count, void *params) {
  const void *in[TREFOIL_GRAD_MAX_WORKERS];
  void *out[TREFOIL_GRAD_MAX_WORKERS];
  trefoil_grad_config_t c = g->config;
  const ep_grad_group_t all = {0, count, 0};
  c.numWorkers = 0;
  for (int r = 0; r < g->head.numRanks; r++) {
    if (!isActive(g, r)) continue;
    in[c.numWorkers] = chunkOf(g, r);
    out[c.numWorkers++] = params;
  }
  epGradMeanOf(&c, &all, in, out);
}

/* Whether a rank has gone on without this one, and may have written over its chunk: it is masked. */
static int isLeftBehind(cpu_grad_t *g) {
  int isBehind = 0;
  atomic_thread_fence(memory_order_seq_cst);
  for (int r = 0; r < g->head.numRanks; r++) {
    if (!isActive(g, r) || epLoad(stampOf(g, r)) <= g->chunk + 1) continue;
    atomic_store(&g->active[r], 0);
    isBehind = 1;
  }
  return isBehind;
}

/* 0: a rank was lost. */
static int syncChunk(cpu_grad_t *g, int64_t first, int64_t count, void *params) {
  g->chunk++;
  epStore(stampOf(g, g->head.rank), g->chunk);
  atomic_thread_fence(memory_order_seq_cst);
  memcpy(chunkOf(g, g->head.rank), params, (size_t)count * trefoilDtypeBytes(g->head.dtype));
  for (int r = 0; r < g->head.numRanks; r++)
    if (isActive(g, r)) post(chunkWordOf(g, r, g->head.rank), g->chunk);
  const ep_grad_loss_t what = {.isSync = 1, .number = g->syncs, .item = first};
  if (!receiveWords(g, chunkWordOf, g->chunk, what)) return 0;
  do averageChunk(g, count, params);
  while (isLeftBehind(g));
  return 1;
}

static void runSync(grad_record_t *r) {
  cpu_grad_t *g = r->g;
  size_t each = trefoilDtypeBytes(g->head.dtype);
  int64_t most = (int64_t)(g->chunkBytes / each), n = g->head.elements;
  if (atomic_load(&g->isLost)) return;
  if (r->period && (!g->epoch || g->epoch % (uint64_t)r->period)) return;
  g->syncs++;
  for (int64_t i = 0; i < n; i += most) {
    char *at = (char *)r->update + (size_t)i * each;
    if (!syncChunk(g, i, n - i < most ? n - i : most, at)) return;
  }
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

trefoil_result_t epCpuGradSync(struct trefoil_grad_gpu *head, int64_t period, void *params,
                               cudaStream_t stream) {
  grad_record_t *r = newRecord((cpu_grad_t *)head, runSync);
  EP_CHECK(r, TREFOIL_SYSTEM_ERROR, "out of memory: a queued operation");
  r->update = params;
  r->period = period;
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
  for (int r = 0; r < head->numRanks; r++) active[r] = atomic_load(&g->active[r]);
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
  EP_TRY(measure(g, c));
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
  ncclResult_t result = ncclMemAlloc(&p, exchangeBytes(g));
  if (result != ncclSuccess) return epNcclFailed("trefoilGradGpuCreate: shared memory", result);
  memset(p, 0, numWords(g) * sizeof(ep_word_t));
  g->exchange = p;
  return TREFOIL_OK;
}

/* All ranks are here; registering ends on all or fails on all. */
static trefoil_result_t share(cpu_grad_t *g) {
  ncclResult_t result =
      ncclCommWindowRegister(g->head.comm, g->exchange, exchangeBytes(g), &g->window, 0);
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
