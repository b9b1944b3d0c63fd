/* Device communicators: GIN between ranks of this machine, by the engine of net/. The engine decides when
 * data move and when a signal is raised; this file moves them, between window memory that all ranks have
 * mapped. A thread for each device communicator goes on with its requests, as NCCL's proxy does. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm_internal.h"
#include "net/net_engine.h"

enum { MAX_CONTEXTS = 8, MAX_IDS = 1 << 20, PARTS = 5 };

/* A request under way; its number is ep_net_op_t.local. Its data are copied in parts, out of order, some of
 * them as late as may be. */
typedef struct {
  ep_net_request_t *request; /* NULL: free */
  uint64_t *counter;
  bool whole;
} transfer_t;

typedef struct ep_gin {
  struct ep_gin *next;
  ncclComm_t comm;
  int numContexts, numSignals, numCounters, stride;
  void *signalMemory;
  ncclWindow_t signals; /* [context][signal] */
  uint64_t *counters;   /* [context][counter] */
  pthread_mutex_t lock;
  pthread_cond_t changed;
  pthread_t thread;
  ep_net_engine_t *engine;
  transfer_t *transfers;
  size_t numTransfers, numUnderWay;
  bool ends, failed;
} gin_t;

bool epGinEnabled(void) {
  const char *text = getenv("NCCL_GIN_ENABLE");
  return !text || strcmp(text, "0") != 0;
}

/* ---- What the engine asks for. Offsets of its operations are addresses in this process. ---- */

static void copyParts(const ep_net_op_t *op, int first) {
  uint64_t part = (op->bytes + PARTS - 1) / PARTS;
  for (int i = PARTS - 1 - first; i >= 0; i -= 2) {
    uint64_t at = (uint64_t)i * part;
    if (at >= op->bytes) continue;
    memcpy((char *)(uintptr_t)op->remoteOffset + at, (const char *)(uintptr_t)op->localOffset + at,
           op->bytes - at < part ? op->bytes - at : part);
  }
}

/* Its memory is still there. */
static bool hasMemory(const gin_t *g, int rank) {
  uint32_t state = atomic_load(&epCommEntry(g->comm, rank)->state);
  return state == EP_RANK_THERE || state == EP_RANK_FAILED;
}

static int moveData(void *self, const ep_net_op_t *op, uint64_t *ticket, char *why) {
  (void)why;
  *ticket = 0;
  if (!hasMemory(self, op->peer)) return 0;
  copyParts(op, 1);
  return 1;
}

static ep_net_reach_t reachOf(void *self, const ep_net_op_t *op, uint64_t ticket) {
  gin_t *g = self;
  transfer_t *t = &g->transfers[op->local];
  (void)ticket;
  if (!t->whole && !hasMemory(g, op->peer)) return EP_NET_MOVING;
  if (!t->whole) copyParts(op, 0);
  t->whole = true;
  return EP_NET_PLACED;
}

static int raiseSignal(void *self, const ep_net_op_t *op, char *why) {
  (void)why;
  if (!hasMemory(self, op->peer)) return 0;
  atomic_fetch_add((_Atomic uint64_t *)(uintptr_t)op->signalOffset, op->add);
  return 1;
}

/* ---- The thread ---- */

static void failGin(gin_t *g, const char *why) { /* locked */
  g->failed = true;
  epCommSetAsync(g->comm, ncclSystemError, why);
}

static void complete(gin_t *g) {
  for (size_t i = 0; i < g->numTransfers; i++) {
    transfer_t *t = &g->transfers[i];
    if (!t->request || !epNetEngineTest(t->request)) continue;
    if (t->counter) atomic_fetch_add((_Atomic uint64_t *)t->counter, 1);
    t->request = NULL;
    g->numUnderWay--;
  }
}

static void noticeGone(gin_t *g) {
  for (int r = 0; r < g->comm->numRanks; r++)
    if (r != g->comm->rank && !epCommPeerThere(g->comm, r)) epNetEngineGone(g->engine, r);
}

static void step(gin_t *g, int64_t now) {
  char why[EP_NET_WHY] = "";
  if (epNetEngineProgress(g->engine, now, why)) failGin(g, why);
  complete(g);
}

/* At the end what is under way still goes out, for a second at most. */
static bool goesOn(const gin_t *g, int64_t now, int64_t endedAt) {
  if (g->failed) return !g->ends;
  return !g->ends || (g->numUnderWay && now - endedAt < 1000000000);
}

static void *progress(void *self) {
  gin_t *g = self;
  int64_t looked = 0, endedAt = 0;
  pthread_mutex_lock(&g->lock);
  for (;;) {
    int64_t now = (int64_t)epMonotonicNs();
    if (g->ends && !endedAt) endedAt = now;
    if (!goesOn(g, now, endedAt)) break;
    if (g->failed || !g->numUnderWay) {
      pthread_cond_wait(&g->changed, &g->lock);
      continue;
    }
    if (now - looked > 20000000) {
      looked = now;
      noticeGone(g);
    }
    step(g, now);
    pthread_mutex_unlock(&g->lock);
    usleep(20);
    pthread_mutex_lock(&g->lock);
  }
  pthread_mutex_unlock(&g->lock);
  return NULL;
}

/* ---- Kernels' side ---- */

static char *memoryAt(gin_t *g, ncclWindow_t window, int rank, uint64_t offset, uint64_t bytes) {
  if (!window || atomic_load(&window->magic) != EP_WINDOW_MAGIC || window->comm != g->comm)
    return NULL;
  if (offset > window->sizes[rank] || bytes > window->sizes[rank] - offset) return NULL;
  return window->bases[rank] + offset;
}

static transfer_t *freeTransfer(gin_t *g) {
  for (size_t i = 0; i < g->numTransfers; i++)
    if (!g->transfers[i].request) return &g->transfers[i];
  size_t more = g->numTransfers + 64;
  transfer_t *grown = realloc(g->transfers, more * sizeof *grown);
  if (!grown) return NULL;
  memset(grown + g->numTransfers, 0, 64 * sizeof *grown);
  g->transfers = grown;
  transfer_t *first = &grown[g->numTransfers];
  g->numTransfers = more;
  return first;
}

static bool isRight(const gin_t *g, const trefoil_host_put_t *p) {
  return p->context >= 0 && p->context < g->numContexts && p->peer >= 0 &&
         p->peer < g->comm->numRanks && (p->peer - g->comm->rank) % g->stride == 0 &&
         p->signal >= -1 && p->signal < g->numSignals && p->counter >= -1 &&
         p->counter < g->numCounters;
}

static int post(gin_t *g, const trefoil_host_put_t *p, char *why) {
  int me = g->comm->rank;
  if (!isRight(g, p))
    return epNetFail(why, "rank %d: no put to rank %d with signal %d and counter %d in context %d",
                     me, p->peer, p->signal, p->counter, p->context);
  char *from = memoryAt(g, p->from, me, p->fromOffset, p->bytes);
  char *to = memoryAt(g, p->to, p->peer, p->toOffset, p->bytes);
  if (!from || !to)
    return epNetFail(why, "rank %d: a put of %llu bytes to rank %d is outside its window", me,
                     (unsigned long long)p->bytes, p->peer);
  transfer_t *t = freeTransfer(g);
  if (!t) return epNetFail(why, "no memory for requests to rank %d", p->peer);
  ep_net_op_t op = {.kind = EP_NET_PUT, .peer = p->peer, .bytes = p->bytes};
  op.local = (uint32_t)(t - g->transfers);
  op.localOffset = (uintptr_t)from;
  op.remoteOffset = (uintptr_t)to;
  op.hasSignal = p->signal >= 0;
  op.strong = p->strong;
  op.add = p->add;
  if (op.hasSignal) {
    size_t index = (size_t)p->context * (size_t)g->numSignals + (size_t)p->signal;
    op.signalOffset = (uintptr_t)(g->signals->bases[p->peer] + 8 * index);
  }
  t->whole = false;
  t->counter = p->counter < 0 ? NULL : g->counters + p->context * g->numCounters + p->counter;
  if (epNetEnginePost(g->engine, p->context, &op, (int64_t)epMonotonicNs(), &t->request, why))
    return -1;
  g->numUnderWay++;
  return 0;
}

void trefoilHostGinPut(void *gin, const trefoil_host_put_t *put) {
  gin_t *g = gin;
  char why[EP_NET_WHY] = "";
  pthread_mutex_lock(&g->lock);
  if (!g->failed && post(g, put, why)) failGin(g, why);
  pthread_cond_signal(&g->changed);
  pthread_mutex_unlock(&g->lock);
}

uint64_t trefoilHostGinSignal(void *gin, int context, int signal) {
  gin_t *g = gin;
  const char *at = g->signals->bases[g->comm->rank];
  return atomic_load((const _Atomic uint64_t *)(const void *)at + context * g->numSignals + signal);
}

uint64_t trefoilHostGinCounter(void *gin, int context, int counter) {
  gin_t *g = gin;
  return atomic_load((_Atomic uint64_t *)g->counters + context * g->numCounters + counter);
}

/* ---- Making and ending ---- */

static void freeGin(gin_t *g) {
  if (g->signals) ncclCommWindowDeregister(g->comm, g->signals);
  ncclMemFree(g->signalMemory);
  epNetEngineDestroy(g->engine);
  free(g->counters);
  free(g->transfers);
  pthread_cond_destroy(&g->changed);
  pthread_mutex_destroy(&g->lock);
  free(g);
}

/* Its memory stays until the communicator ends: peers may still have something on its way to it. */
static void stopGin(gin_t *g) {
  pthread_mutex_lock(&g->lock);
  g->ends = true;
  pthread_cond_signal(&g->changed);
  pthread_mutex_unlock(&g->lock);
  pthread_join(g->thread, NULL);
}

void epGinsFree(ncclComm_t comm) {
  for (gin_t *g = comm->gins; g; g = g->next)
    if (!g->ends) stopGin(g);
  uint32_t there = EP_RANK_THERE;
  if (comm->gins)
    atomic_compare_exchange_strong(&epCommEntry(comm, comm->rank)->state, &there,
                                   EP_RANK_DESTROYED);
  while (comm->gins) {
    gin_t *g = comm->gins;
    comm->gins = g->next;
    freeGin(g);
  }
}

static gin_t *newGin(ncclComm_t comm, const ncclDevCommRequirements_t *reqs) {
  gin_t *g = calloc(1, sizeof *g);
  if (!g) return NULL;
  int contexts = reqs->ginContextCount < 1 ? 1 : reqs->ginContextCount;
  g->comm = comm;
  g->numContexts = contexts < MAX_CONTEXTS ? contexts : MAX_CONTEXTS;
  g->numSignals = reqs->ginSignalCount;
  g->numCounters = reqs->ginCounterCount;
  g->stride = reqs->ginConnectionType == NCCL_GIN_CONNECTION_RAIL ? comm->lsaSize : 1;
  pthread_mutex_init(&g->lock, NULL);
  pthread_cond_init(&g->changed, NULL);
  g->counters = calloc((size_t)g->numContexts * (size_t)g->numCounters + 1, sizeof *g->counters);
  return g;
}

static ncclResult_t startEngine(gin_t *g, const char *func) {
  ep_net_settings_t settings;
  ep_net_link_t link = {g, moveData, reachOf, raiseSignal};
  char why[EP_NET_WHY] = "";
  int first;
  EP_NCCL_CHECK(epNetSettings(getenv, &settings, why) == 0, ncclInvalidUsage, "%s: %s", func, why);
  EP_NCCL_CHECK(
      epNetEngineCreate(&settings, link, g->comm->rank, g->comm->numRanks, &g->engine, why) == 0 &&
          epNetEngineContexts(g->engine, g->numContexts, &first, why) == 0,
      ncclSystemError, "%s: %s", func, why);
  return ncclSuccess;
}

static ncclResult_t startGin(gin_t *g, const char *func) {
  size_t signals = (size_t)g->numContexts * (size_t)g->numSignals + 1, bytes = 8 * signals;
  EP_NCCL_CHECK(g->counters, ncclSystemError, "%s: out of memory", func);
  EP_NCCL_TRY(startEngine(g, func));
  EP_NCCL_TRY(ncclMemAlloc(&g->signalMemory, bytes));
  memset(g->signalMemory, 0, bytes);
  /* Symmetric: ranks that require different numbers of signals get an error. */
  EP_NCCL_TRY(ncclCommWindowRegister(g->comm, g->signalMemory, bytes, &g->signals,
                                     NCCL_WIN_COLL_SYMMETRIC));
  EP_NCCL_CHECK(!pthread_create(&g->thread, NULL, progress, g), ncclSystemError, "%s: no thread",
                func);
  return ncclSuccess;
}

static ncclResult_t checkRequirements(ncclComm_t comm, const ncclDevCommRequirements_t *r,
                                      const char *func) {
  EP_NCCL_CHECK(r && r->magic == NCCL_API_MAGIC && r->size == sizeof *r, ncclInvalidArgument,
                "%s: set reqs to NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER", func);
  bool others = r->resourceRequirementsList || r->teamRequirementsList || r->lsaMultimem ||
                r->barrierCount || r->lsaBarrierCount || r->railGinBarrierCount ||
                r->worldGinBarrierCount || r->lsaLLA2ABlockCount || r->cftBarrierCount;
  EP_NCCL_CHECK(!others, ncclInvalidUsage,
                "%s: the host runtime has GIN's signals and counters alone, no barriers, buffers "
                "or multicast",
                func);
  EP_NCCL_CHECK(r->ginSignalCount >= 0 && r->ginSignalCount <= MAX_IDS && r->ginCounterCount >= 0 &&
                    r->ginCounterCount <= MAX_IDS,
                ncclInvalidArgument, "%s: %d signals and %d counters, each must be in [0, %d]",
                func, r->ginSignalCount, r->ginCounterCount, MAX_IDS);
  bool gin = r->ginConnectionType != NCCL_GIN_CONNECTION_NONE;
  EP_NCCL_CHECK(gin || (!r->ginSignalCount && !r->ginCounterCount), ncclInvalidArgument,
                "%s: signals or counters, but ginConnectionType is NCCL_GIN_CONNECTION_NONE", func);
  EP_NCCL_CHECK(r->ginConnectionType != NCCL_GIN_CONNECTION_CUSTOM_STRIDE, ncclInvalidUsage,
                "%s: ginConnectionType is NONE, FULL or RAIL in the host runtime", func);
  EP_NCCL_CHECK(!gin || comm->hasGin, ncclInvalidUsage, "%s: NCCL_GIN_ENABLE was 0 on some rank",
                func);
  return ncclSuccess;
}

ncclResult_t ncclDevCommCreate(ncclComm_t comm, const ncclDevCommRequirements_t *reqs,
                               ncclDevComm_t *outDevComm) {
  const char *func = "ncclDevCommCreate";
  EP_NCCL_TRY(epCommUsable(comm, func));
  EP_NCCL_CHECK(outDevComm, ncclInvalidArgument, "%s: outDevComm is NULL", func);
  EP_NCCL_CHECK(!epInGroup(), ncclInvalidUsage, "%s was called inside a group", func);
  EP_NCCL_TRY(checkRequirements(comm, reqs, func));
  ncclDevComm_t made = {.magic = NCCL_API_MAGIC, .version = NCCL_VERSION_CODE};
  made.rank = comm->rank;
  made.nRanks = comm->numRanks;
  made.lsaRank = comm->rank % comm->lsaSize;
  made.lsaSize = comm->lsaSize;
  if (reqs->ginConnectionType != NCCL_GIN_CONNECTION_NONE) {
    gin_t *g = newGin(comm, reqs);
    EP_NCCL_CHECK(g, ncclSystemError, "%s: out of memory", func);
    ncclResult_t result = startGin(g, func);
    if (result != ncclSuccess) {
      freeGin(g);
      return result;
    }
    g->next = comm->gins;
    comm->gins = g;
    comm->freeGins = epGinsFree;
    made.gin = g;
  }
  *outDevComm = made;
  return ncclSuccess;
}

ncclResult_t ncclDevCommDestroy(ncclComm_t comm, const ncclDevComm_t *devComm) {
  const char *func = "ncclDevCommDestroy";
  EP_NCCL_TRY(epCommGet(comm, func));
  EP_NCCL_CHECK(devComm && devComm->magic == NCCL_API_MAGIC, ncclInvalidArgument,
                "%s: %p is not a device communicator", func, (const void *)devComm);
  if (!devComm->gin) return ncclSuccess;
  gin_t *g = comm->gins;
  while (g && (g != devComm->gin || g->ends)) g = g->next;
  EP_NCCL_CHECK(g, ncclInvalidArgument, "%s: not a live device communicator of this communicator",
                func);
  stopGin(g);
  return ncclSuccess;
}
