/* Device communicators of the host runtime: what is asked for, puts and signals by the engine of net/, its
 * settings, a rank that is gone. */
#include <stddef.h>
#include <string.h>

#include "host_ranks.h"
#include "trefoil_host.h"

#define OK(call)                                                                                   \
  do {                                                                                             \
    ncclResult_t got = (call);                                                                     \
    REQUIRE(got == ncclSuccess, "%s: %d %s", #call, got, ncclGetLastError(NULL));                  \
  } while (0)

_Static_assert(sizeof(ncclDevComm_t) == 248 && offsetof(ncclDevComm_t, lsaSize) == 24, "NCCL 2.32");
_Static_assert(sizeof(ncclDevCommRequirements_t) == 120 &&
                   offsetof(ncclDevCommRequirements_t, ginConnectionType) == 72 &&
                   offsetof(ncclDevCommRequirements_t, ginType) == 100,
               "NCCL 2.32");

enum { BYTES = 1 << 16, ROUNDS = 40 };

typedef struct {
  ncclComm_t comm;
  ncclWindow_t window;
  ncclDevComm_t dev;
  uint64_t *memory; /* [sent by this rank | received from rank r]: words */
} rank_t;

static ncclDevCommRequirements_t requirements(void) {
  ncclDevCommRequirements_t r = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  r.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
  r.ginContextCount = 2;
  r.ginSignalCount = 3;
  r.ginCounterCount = 1;
  return r;
}

static void openRank(rank_t *me, int rank, int numRanks, const ncclUniqueId *id,
                     const ncclDevCommRequirements_t *reqs) {
  void *memory;
  OK(ncclCommInitRank(&me->comm, numRanks, *id, rank));
  OK(ncclMemAlloc(&memory, BYTES));
  memset(memory, 0, BYTES);
  me->memory = memory;
  OK(ncclCommWindowRegister(me->comm, memory, BYTES, &me->window, 0));
  OK(ncclDevCommCreate(me->comm, reqs, &me->dev));
}

static void closeRank(rank_t *me) {
  OK(ncclDevCommDestroy(me->comm, &me->dev));
  CHECK(ncclDevCommDestroy(me->comm, &me->dev) == ncclInvalidArgument, "destroyed twice");
  OK(ncclCommDestroy(me->comm));
  OK(ncclMemFree(me->memory));
}

static uint64_t awaitSignal(rank_t *me, int context, int signal, uint64_t least) {
  for (int i = 0; i < 200000; i++) {
    uint64_t value = trefoilHostGinSignal(me->dev.gin, context, signal);
    if (value >= least) return value;
    usleep(100);
  }
  return 0;
}

static trefoil_host_put_t putTo(const rank_t *me, int peer, uint64_t to, uint64_t from,
                                uint64_t bytes) {
  trefoil_host_put_t p = {.peer = peer, .to = me->window, .from = me->window, .bytes = bytes};
  p.toOffset = to;
  p.fromOffset = from;
  p.signal = p.counter = -1;
  return p;
}

/* Eight unsignalled puts of 256 bytes a round to the next rank, then one with a strong signal. */
static void strongBody(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  rank_t me;
  ncclDevCommRequirements_t reqs = requirements();
  int next = (rank + 1) % numRanks, before = (rank + numRanks - 1) % numRanks;
  (void)arg;
  openRank(&me, rank, numRanks, id, &reqs);
  uint64_t *in = me.memory + 4096;
  for (uint64_t round = 1; round <= ROUNDS; round++) {
    for (int i = 0; i < 9 * 32; i++) me.memory[i] = round * 1000 + (uint64_t)rank;
    for (int i = 0; i < 9; i++) {
      trefoil_host_put_t p = putTo(&me, next, 32768 + (uint64_t)i * 256, (uint64_t)i * 256, 256);
      p.context = 1;
      p.counter = 0;
      p.signal = i == 8 ? 2 : -1;
      p.strong = 1;
      p.add = 5;
      trefoilHostGinPut(me.dev.gin, &p);
    }
    REQUIRE(awaitSignal(&me, 1, 2, round * 5) == round * 5, "round %d", (int)round);
    for (int i = 0; i < 9 * 32; i++)
      REQUIRE(in[i] == round * 1000 + (uint64_t)before, "round %d, word %d: %llu", (int)round, i,
              (unsigned long long)in[i]);
    while (trefoilHostGinCounter(me.dev.gin, 1, 0) < round * 9) usleep(10);
    /* The next rank has read this round before its memory is written again. */
    trefoil_host_put_t p = putTo(&me, before, 0, 0, 0);
    p.context = 1;
    p.signal = 1;
    p.add = 1;
    trefoilHostGinPut(me.dev.gin, &p);
    REQUIRE(awaitSignal(&me, 1, 1, round) == round, "round %d", (int)round);
  }
  CHECK(trefoilHostGinSignal(me.dev.gin, 0, 2) == 0, "another context's signal");
  OK(ncclCommGetAsyncError(me.comm, &(ncclResult_t){0}));
  closeRank(&me);
}

static void withDelays(void (*run)(void)) {
  setenv("TREFOIL_NET_LATENCY_NS", "50000", 1);
  setenv("TREFOIL_NET_JITTER_NS", "400000", 1);
  setenv("TREFOIL_NET_REORDER_PPM", "300000", 1);
  setenv("TREFOIL_NET_REORDER_NS", "900000", 1);
  run();
  unsetenv("TREFOIL_NET_LATENCY_NS");
  unsetenv("TREFOIL_NET_JITTER_NS");
  unsetenv("TREFOIL_NET_REORDER_PPM");
  unsetenv("TREFOIL_NET_REORDER_NS");
}

static void threads(void) {
  runThreads(3, strongBody, NULL);
}

TEST(strong_signals_between_threads) {
  threads();
  withDelays(threads);
}

static void processes(void) {
  runProcesses(3, strongBody, NULL);
}

TEST(strong_signals_between_processes) {
  withDelays(processes);
}

static void wrongBody(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  rank_t me;
  ncclDevCommRequirements_t reqs = requirements();
  ncclCommProperties_t props = NCCL_COMM_PROPERTIES_INITIALIZER;
  ncclResult_t error;
  int which = *(int *)arg;
  openRank(&me, rank, numRanks, id, &reqs);
  OK(ncclCommQueryProperties(me.comm, &props));
  CHECK(props.ginType == NCCL_GIN_TYPE_PROXY && props.railedGinType == NCCL_GIN_TYPE_PROXY,
        "GIN %d", props.ginType);
  CHECK(me.dev.rank == rank && me.dev.nRanks == numRanks, "rank %d", me.dev.rank);
  trefoil_host_put_t p = putTo(&me, 1 - rank, 0, 0, 16);
  if (which == 0) p.toOffset = BYTES - 8;
  if (which == 1) p.signal = 3;
  if (which == 2) p.context = 2;
  if (which == 3) p.peer = numRanks;
  if (which == 4) p.to = (ncclWindow_t)me.memory;
  trefoilHostGinPut(me.dev.gin, &p);
  OK(ncclCommGetAsyncError(me.comm, &error));
  CHECK(error == ncclSystemError, "wrong put %d: %d", which, error);
  closeRank(&me);
}

TEST(wrong_puts_fail_the_communicator) {
  for (int which = 0; which < 5; which++) runThreads(2, wrongBody, &which);
}

static void refusedBody(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  ncclComm_t comm;
  ncclDevComm_t dev;
  ncclDevCommRequirements_t r = requirements();
  (void)arg;
  OK(ncclCommInitRank(&comm, numRanks, *id, rank));
  r.worldGinBarrierCount = 1;
  CHECK(ncclDevCommCreate(comm, &r, &dev) == ncclInvalidUsage, "barriers");
  r = requirements();
  r.ginConnectionType = NCCL_GIN_CONNECTION_NONE;
  CHECK(ncclDevCommCreate(comm, &r, &dev) == ncclInvalidArgument, "signals without GIN");
  r.ginSignalCount = r.ginCounterCount = 0;
  OK(ncclDevCommCreate(comm, &r, &dev));
  CHECK(!dev.gin, "GIN without being asked for");
  OK(ncclDevCommDestroy(comm, &dev));
  r = requirements();
  r.ginSignalCount = rank ? 3 : 4;
  CHECK(ncclDevCommCreate(comm, &r, &dev) == ncclInvalidArgument, "ranks differ");
  r = requirements();
  setenv("TREFOIL_NET_RAILS", "none", 1);
  CHECK(ncclDevCommCreate(comm, &r, &dev) == ncclInvalidUsage, "settings");
  CHECK(strstr(ncclGetLastError(comm), "TREFOIL_NET_RAILS"), "%s", ncclGetLastError(comm));
  unsetenv("TREFOIL_NET_RAILS");
  OK(ncclCommDestroy(comm));
}

TEST(what_is_refused) {
  setenv("NCCL_LSA_TEAM_SIZE", "1", 1);
  runProcesses(2, refusedBody, NULL);
  unsetenv("NCCL_LSA_TEAM_SIZE");
}

static void offBody(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  ncclComm_t comm;
  ncclDevComm_t dev;
  ncclCommProperties_t props = NCCL_COMM_PROPERTIES_INITIALIZER;
  ncclDevCommRequirements_t r = requirements();
  (void)arg;
  OK(ncclCommInitRank(&comm, numRanks, *id, rank));
  CHECK(ncclDevCommCreate(comm, &r, &dev) == ncclInvalidUsage, "GIN is off");
  OK(ncclCommQueryProperties(comm, &props));
  CHECK(props.ginType == NCCL_GIN_TYPE_NONE && !props.deviceApiSupport, "GIN is off");
  OK(ncclCommDestroy(comm));
}

TEST(communicators_made_while_gin_is_off_have_none) {
  setenv("NCCL_GIN_ENABLE", "0", 1);
  setenv("NCCL_LSA_TEAM_SIZE", "1", 1);
  runThreads(2, offBody, NULL);
  unsetenv("NCCL_LSA_TEAM_SIZE");
  unsetenv("NCCL_GIN_ENABLE");
}

/* Rank 1 leaves; what goes to it fails rank 0's communicator with a sentence that names it. */
static void goneBody(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  rank_t me;
  ncclDevCommRequirements_t reqs = requirements();
  (void)arg;
  openRank(&me, rank, numRanks, id, &reqs);
  if (rank == 1) {
    closeRank(&me);
    return;
  }
  while (trefoilHostPeerAlive(me.comm, 1) == 1) usleep(1000);
  trefoil_host_put_t p = putTo(&me, 1, 0, 0, 16);
  trefoilHostGinPut(me.dev.gin, &p);
  ncclResult_t error = ncclSuccess;
  for (int i = 0; i < 5000 && error == ncclSuccess; i++, usleep(1000))
    OK(ncclCommGetAsyncError(me.comm, &error));
  CHECK(error == ncclSystemError, "error %d", error);
  closeRank(&me);
}

TEST(a_rank_that_has_left) {
  runThreads(2, goneBody, NULL);
}

TEST_MAIN()
