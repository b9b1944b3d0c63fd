/* Input that makes no sense: a result code and a sentence that says what; and what becomes of a SimGrid
 * process that does not end well. */
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sim_world.h"
#include "trefoil/trace.h"

#define CHECK_REFUSED(w, wanted)                                                                   \
  do {                                                                                             \
    trefoil_sim_result_t r_;                                                                       \
    memset(&r_, 0x5a, sizeof r_);                                                                  \
    trefoil_sim_result_t before_ = r_;                                                             \
    trefoil_sim_t *s_ = worldRun((w), TREFOIL_ENGINE_QUEUES, &r_);                                 \
    CHECK(!s_, "not refused: " wanted);                                                            \
    CHECK(strstr(trefoilLastError(), wanted), "\"%s\" is not in: %s", wanted, trefoilLastError()); \
    CHECK(memcmp(&before_, &r_, sizeof r_) == 0, "the result was touched");                        \
    trefoilSimDestroy(s_);                                                                         \
  } while (0)

static void initSome(world_t *w) {
  worldInit(w, 4, 2, TREFOIL_LL_EXPERT_MAJOR);
  worldSend(w, 0, 3, 5);
}

TEST(impossible_topology) {
  world_t w;
  initSome(&w);
  w.cluster.nicGbPerS = 0;
  CHECK_REFUSED(&w, "cluster by hand has no network, but 4 ranks with 2 a node need one");
  initSome(&w);
  w.cluster.gpusPerNode = 1;
  CHECK_REFUSED(&w, "2 ranks a node do not fit cluster by hand with 1 GPUs a node");
  initSome(&w);
  w.run.oversubscription = 2;
  CHECK_REFUSED(&w, "one switch and no leaves: it cannot be oversubscribed");
  w.run.oversubscription = -1;
  CHECK_REFUSED(&w, "oversubscription -1: must be in (0, 1000]");
  initSome(&w);
  w.cluster.gpusPerNic = 0;
  CHECK_REFUSED(&w, "must be positive");
  initSome(&w);
  w.run.cluster = NULL;
  CHECK_REFUSED(&w, "the cluster is NULL");
}

TEST(changes_of_what_is_not_there) {
  world_t w;
  initSome(&w);
  worldChange(&w, TREFOIL_CHANGE_NIC_RATE, 4, 0.5);
  CHECK_REFUSED(&w, "network port 4: must be in [0, 4), or -1 for all");
  w.changes[0] = (trefoil_change_t){TREFOIL_CHANGE_RAIL_FAIL, 2, 0};
  CHECK_REFUSED(&w, "rail 2: must be in [0, 2)");
  w.changes[0] = (trefoil_change_t){TREFOIL_CHANGE_SM_RATE, 1, 0};
  CHECK_REFUSED(&w, "the rate of rank 1 times 0: must be in [1e-6, 1e6]");
  w.changes[0] = (trefoil_change_t){TREFOIL_CHANGE_START_US, 1, NAN};
  CHECK_REFUSED(&w, "rank 1 is late by nan us");
  w.changes[0] = (trefoil_change_t){(trefoil_change_kind_t)99, 1, 1};
  CHECK_REFUSED(&w, "change 99 is not one of the 7 kinds");
  w.changes[0] = (trefoil_change_t){TREFOIL_CHANGE_RAIL_FAIL, -1, 0};
  CHECK_REFUSED(&w, "every network port of node 0 is down: one must be left");
}

TEST(costs_out_of_range) {
  world_t w;
  initSome(&w);
  w.costs.numSms = 0;
  CHECK_REFUSED(&w, "costs: 0 SMs: must be in [1, 4096]");
  initSome(&w);
  w.costs.op[1].sendRowNs = -1;
  CHECK_REFUSED(&w, "costs: sendRowNs -1 of combine: must be in [0, 1e9]");
  initSome(&w);
  w.costs.netLatencyNs = NAN;
  CHECK_REFUSED(&w, "costs: netLatencyNs nan");
  initSome(&w);
  w.costs.op[1].forwardShare = 1;
  CHECK_REFUSED(&w, "costs: forwardShare 1 of combine: must be in [0, 1)");
  initSome(&w);
  w.costs.op[0].sendShare = 1;
  CHECK_REFUSED(&w, "costs: sendShare 1 of dispatch: must be in [0, 1)");
  initSome(&w);
  w.costs.op[0].wholeSmsFrom = 1.5;
  CHECK_REFUSED(&w, "costs: wholeSmsFrom 1.5 of dispatch: must be in [0, 1]");
  initSome(&w);
  w.costs.op[1].pullPortShare = 1.5;
  CHECK_REFUSED(&w, "costs: pullPortShare 1.5 of combine: must be in [0, 1]");
  initSome(&w);
  w.costs.op[0].stageGbPerS = -1;
  CHECK_REFUSED(&w, "costs: stageGbPerS -1 of dispatch: must be in [0, 1e9]");
  initSome(&w);
  w.costs.nvlinkBackShare = -0.5;
  CHECK_REFUSED(&w, "costs: nvlinkBackShare -0.5: must be in [0, 1)");
  initSome(&w);
  w.costs.op[1].announceUs = -1;
  CHECK_REFUSED(&w, "costs: announceUs -1 of combine");
  initSome(&w);
  w.costs.nicGbPerS = 1e-9; /* 50 s and more a row */
  w.costs.netMessageNs = 1e9;
  w.workload.dispatchRowBytes = w.workload.combineRowBytes = (size_t)1 << 30;
  CHECK_REFUSED(&w, "would take over");
}

TEST(workloads_out_of_range) {
  world_t w;
  initSome(&w);
  w.workload.dispatchRowBytes = 0;
  CHECK_REFUSED(&w, "0 bytes of a dispatch row");
  initSome(&w);
  w.workload.mode = (trefoil_mode_t)9;
  CHECK_REFUSED(&w, "mode 9 is not one of the 4 modes");
  initSome(&w);
  w.idx[0][2] = 4;
  CHECK_REFUSED(&w, "rank 0, token 2, k = 0: expert 4 is outside [0, 4) and not -1");
  initSome(&w);
  w.workload.chunkTokens = -1;
  CHECK_REFUSED(&w, "-1 tokens of a chunk");
  CHECK(trefoilSimCreate(NULL, &w.workload) == TREFOIL_INVALID_ARGUMENT, "%s", trefoilLastError());
  trefoil_sim_t *sim = NULL;
  CHECK(trefoilSimCreate(&sim, NULL) == TREFOIL_INVALID_ARGUMENT && !sim, "a NULL workload");
}

TEST(engines_that_are_not_there) {
  world_t w;
  initSome(&w);
  trefoil_sim_t *sim = NULL;
  trefoil_sim_result_t r;
  REQUIRE(trefoilSimCreate(&sim, &w.workload) == TREFOIL_OK, "%s", trefoilLastError());
  w.run.engine = (trefoil_engine_t)7;
  CHECK(trefoilSimRun(sim, &w.run, &r) == TREFOIL_INVALID_ARGUMENT, "engine 7");
  if (!trefoilSimHasSimGrid()) {
    w.run.engine = TREFOIL_ENGINE_SIMGRID;
    CHECK(trefoilSimRun(sim, &w.run, &r) == TREFOIL_INVALID_USAGE &&
              strstr(trefoilLastError(), "libsimgrid-dev"),
          "%s", trefoilLastError());
  }
  trefoilSimDestroy(sim);
}

TEST(simgrid_in_too_little_time) {
  if (!trefoilSimHasSimGrid()) SKIP("no SimGrid in this build");
  world_t w;
  worldInit(&w, 64, 8, TREFOIL_LL_EXPERT_MAJOR);
  for (int r = 0; r < 64; r++) {
    for (int t = 0; t < 64; t++) worldSend(&w, r, (r * 7 + t * t) % 64, 1);
  }
  w.run.timeoutS = 0.02; /* it takes over a second */
  trefoil_sim_result_t r;
  trefoil_sim_t *sim = worldRun(&w, TREFOIL_ENGINE_SIMGRID, &r);
  CHECK(!sim && strstr(trefoilLastError(), "SimGrid did not finish within 0.02 s"), "%s",
        trefoilLastError());
  trefoilSimDestroy(sim);
  /* and the next one is not harmed */
  initSome(&w);
  sim = worldRun(&w, TREFOIL_ENGINE_SIMGRID, &r);
  CHECK(sim && NEAR(r.op[0].us, 3 + 5 + 5 * 0.2), "%s", trefoilLastError());
  trefoilSimDestroy(sim);
}

/* A process that may use one second of processor time simulates; its SimGrid is killed for using more.
 * Writes the sentence. */
static void simulateWithinASecond(int fd) {
  trefoil_trace_spec_t spec = {.numSteps = 1, .seed = 1};
  spec.shape = (trefoil_shape_t){96, 8, 256, 8, 128};
  const trefoil_trace_t *trace = NULL;
  trefoil_routing_t routing;
  world_t w;
  worldInit(&w, 16, 8, TREFOIL_LL_EXPERT_MAJOR);
  trefoil_sim_result_t r;
  const struct rlimit second = {1, 1};
  int isReady = setrlimit(RLIMIT_CPU, &second) == 0 &&
                trefoilTraceGenerate(&trace, &spec) == TREFOIL_OK &&
                trefoilTraceRouting(trace, 0, &routing) == TREFOIL_OK;
  w.workload.routing = &routing;
  trefoil_sim_t *sim = isReady ? worldRun(&w, TREFOIL_ENGINE_SIMGRID, &r) : NULL;
  const char *said = sim ? "it was quick enough" : trefoilLastError();
  _exit(write(fd, said, strlen(said)) < 0);
}

TEST(simgrid_that_dies) {
  if (!trefoilSimHasSimGrid()) SKIP("no SimGrid in this build");
  int fds[2];
  char said[512] = "";
  REQUIRE(pipe(fds) == 0, "no pipe");
  pid_t pid = fork();
  if (pid == 0) simulateWithinASecond(fds[1]);
  close(fds[1]);
  ssize_t n = read(fds[0], said, sizeof said - 1);
  close(fds[0]);
  waitpid(pid, NULL, 0);
  CHECK(n > 0 && strstr(said, "SimGrid's process died of signal"), "it said: %s", said);
}

TEST_MAIN()
