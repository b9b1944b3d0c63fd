/* Our own solver of fair flows against SimGrid, which shares them one by one: every rank's end and every
 * transfer's times, with even and skewed routing, late ranks, slow and failed ports, leaves, SMs that limit
 * and flows of others. And the solver alone against what max-min fairness means. */
#include "sim/engine.h"
#include "sim/fair_share.h"

#include <math.h>
#include <time.h>

#include "trefoil/trace.h"

#include "test.h"
#include "tests/plan/cases.h"

/* ---- Against SimGrid --------------------------------------------------------------------------- */

typedef struct setting {
  const char *cluster;
  trefoil_mode_t mode;
  int numRanks;
  int64_t numTokens;
  double zipf, skewUs;
  int limited; /* SMs take part */
  trefoil_change_t change;
  trefoil_flow_t flow; /* to the same rank: none */
} setting_t;

enum { MOST_RANKS = 256 };

typedef struct both {
  trefoil_cluster_t cluster;
  trefoil_costs_t costs;
  const trefoil_trace_t *trace;
  trefoil_routing_t routing;
  trefoil_sim_t *sim;
  trefoil_sim_run_t run;
} both_t;

static void limitSms(trefoil_costs_t *costs) {
  costs->numSms = 20;
  for (int op = 0; op < 2; op++) {
    costs->op[op].sendGbPerSPerSm = costs->op[op].receiveGbPerSPerSm = 20;
  }
}

static void openBoth(both_t *b, const setting_t *s) {
  memset(b, 0, sizeof *b);
  REQUIRE(trefoilClusterLoad(&b->cluster, s->cluster) == TREFOIL_OK, "%s", trefoilLastError());
  trefoil_trace_spec_t spec = {.numSteps = 1, .seed = 1, .skew = s->zipf};
  int ofNode = trefoilRanksPerNode(s->numRanks, b->cluster.gpusPerNode);
  spec.shape = (trefoil_shape_t){s->numRanks, ofNode, 256, 8, s->numTokens};
  if (s->zipf > 0) spec.popularity = TREFOIL_POPULARITY_ZIPF;
  REQUIRE(trefoilTraceGenerate(&b->trace, &spec) == TREFOIL_OK, "%s", trefoilLastError());
  REQUIRE(trefoilTraceRouting(b->trace, 0, &b->routing) == TREFOIL_OK, "%s", trefoilLastError());
  trefoil_sim_workload_t w = {
      .routing = &b->routing, .mode = s->mode, .dispatchRowBytes = 14336, .combineRowBytes = 14336};
  REQUIRE(trefoilSimCreate(&b->sim, &w) == TREFOIL_OK, "%s", trefoilLastError());
  REQUIRE(trefoilCostsIdeal(&b->costs, &b->cluster, s->mode) == TREFOIL_OK, "%s",
          trefoilLastError());
  if (s->limited) limitSms(&b->costs);
  b->run = (trefoil_sim_run_t){.cluster = &b->cluster,
                               .costs = &b->costs,
                               .startSkewUs = s->skewUs,
                               .changes = &s->change,
                               .numChanges = s->change.factor > 0,
                               .flows = &s->flow,
                               .numFlows = s->flow.from != s->flow.to};
}

static void closeBoth(both_t *b) {
  trefoilSimDestroy(b->sim);
  trefoilTraceDestroy(b->trace);
}

static void near(const setting_t *s, const char *what, int64_t i, ep_fs_t fair, ep_fs_t simgrid) {
  /* SimGrid ends a flow when a picosecond of it is left, and with flows of others the errors add up */
  double most = s->flow.from != s->flow.to ? 5e5 : 1 + 1e-9 * (double)simgrid;
  CHECK(fabs((double)(fair - simgrid)) <= most,
        "%s, %d ranks, mode %d: %s %lld: %lld fs, SimGrid %lld", s->cluster, s->numRanks,
        (int)s->mode, what, (long long)i, (long long)fair, (long long)simgrid);
}

static void compareTimes(const setting_t *s, const ep_timing_t *fair, const ep_timing_t *simgrid) {
  for (int r = 0; r < s->numRanks; r++) near(s, "rank", r, fair->finish[r], simgrid->finish[r]);
  for (int64_t i = 0; i < fair->numTimes; i++) {
    near(s, "start of transfer", i, fair->moves[i].start, simgrid->moves[i].start);
    near(s, "end of transfer", i, fair->moves[i].end, simgrid->moves[i].end);
  }
}

static void compareOp(both_t *b, const setting_t *s, int op, int64_t *numFlows,
                      int64_t *numUnlike) {
  const ep_replay_t *replay = &b->sim->replay[op];
  ep_fabric_t fabric;
  REQUIRE(epFabricBuild(&fabric, b->sim, &b->run, (trefoil_op_t)op) == TREFOIL_OK, "%s",
          trefoilLastError());
  ep_timing_t times[2];
  for (int i = 0; i < 2; i++) {
    times[i].finish = calloc((size_t)s->numRanks, sizeof *times[i].finish);
    times[i].numTimes = replay->numMoves;
    times[i].moves = calloc((size_t)replay->numMoves + 1, sizeof *times[i].moves);
  }
  REQUIRE(epSimGridRun(replay, &fabric, &b->sim->shape, 600, &times[0]) == TREFOIL_OK, "%s",
          trefoilLastError());
  REQUIRE(epFairRun(replay, &fabric, 600, &times[1], numFlows, numUnlike) == TREFOIL_OK, "%s",
          trefoilLastError());
  compareTimes(s, &times[1], &times[0]);
  for (int i = 0; i < 2; i++) {
    free(times[i].finish);
    free(times[i].moves);
  }
  epFabricFree(&fabric);
}

static void compareBoth(const setting_t *s, int64_t *numFlows, int64_t *numUnlike) {
  both_t b;
  openBoth(&b, s);
  for (int op = 0; op < 2; op++) compareOp(&b, s, op, numFlows, numUnlike);
  closeBoth(&b);
}

#define LL TREFOIL_LL_EXPERT_MAJOR
#define HT TREFOIL_HT_FLAT

TEST(as_simgrid) {
  static const trefoil_change_t slow = {TREFOIL_CHANGE_NIC_RATE, 3, 0.4},
                                late = {TREFOIL_CHANGE_START_US, 5, 40},
                                down = {TREFOIL_CHANGE_NIC_FAIL, 2, 1};
  static const trefoil_flow_t copy = {.from = 0, .to = 9, .startUs = 20, .endUs = 60};
  const setting_t settings[] = {
      {"dgx-h100", LL, 8, 128, 0, 0, 1, {0}, {0}},
      {"dgx-h100", LL, 16, 128, 1, 5, 0, {0}, {0}},
      {"dgx-h100", LL, 16, 128, 0, 0, 1, late, {0}},
      {"dgx-h100-4to1", LL, 32, 64, 0.5, 0, 1, slow, {0}},
      {"h100-single-rail", LL, 32, 128, 0, 0, 0, {0}, {0}},
      {"dgx-h100", LL, 64, 32, 0, 0, 1, {0}, {0}},
      {"dgx-h100", LL, 16, 128, 0, 2, 0, {0}, copy},
      {"dgx-h100", HT, 8, 256, 0, 3, 1, {0}, {0}},
      {"dgx-h100", HT, 16, 512, 1, 0, 1, late, {0}},
      {"dgx-h100", HT, 16, 512, 0, 1, 0, down, {0}},
      {"dgx-h100-2to1", HT, 32, 256, 0, 5, 1, slow, {0}},
      {"h100-single-rail", HT, 32, 256, 1, 3, 0, {0}, {0}},
      {"dgx-h100", HT, 64, 128, 0, 3, 1, {0}, {0}},
      {"dgx-h100", HT, 16, 512, 0, 2, 1, {0}, copy},
  };
  if (!trefoilSimHasSimGrid()) SKIP("no SimGrid in this build");
  for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
    int64_t numFlows = 0, numUnlike = 0;
    compareBoth(&settings[i], &numFlows, &numUnlike);
    CHECK(numFlows > 0 && numUnlike <= numFlows, "%lld flows, %lld unlike", (long long)numFlows,
          (long long)numUnlike);
  }
}

/* Eight ranks of a node share a port and nothing else, so their flows to another node are alike; with SMs
 * that limit, each crosses its own rank's. */
TEST(what_is_alike_is_one) {
  setting_t s = {"h100-single-rail", LL, 16, 128, 0, 0, 0, {0}, {0}};
  int64_t numFlows, numUnlike;
  if (!trefoilSimHasSimGrid()) SKIP("no SimGrid in this build");
  compareBoth(&s, &numFlows, &numUnlike);
  CHECK(numFlows == 256, "%lld flows", (long long)numFlows);
  CHECK(numUnlike == 2 + 2 * 8 * 7, "%lld unlike flows", (long long)numUnlike);
  s.limited = 1;
  compareBoth(&s, &numFlows, &numUnlike);
  CHECK(numUnlike == numFlows, "%lld of %lld", (long long)numUnlike, (long long)numFlows);
}

/* ---- In time ----------------------------------------------------------------------------------- */

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void runInTime(const setting_t *s, double most) {
  both_t b;
  openBoth(&b, s);
  double begin = seconds();
  trefoil_sim_result_t r;
  b.run.engine = TREFOIL_ENGINE_FAIR;
  REQUIRE(trefoilSimRun(b.sim, &b.run, &r) == TREFOIL_OK, "%s", trefoilLastError());
  double took = seconds() - begin;
  CHECK(took < most, "%d ranks, mode %d: %.1f s, at most %.1f", s->numRanks, (int)s->mode, took,
        most);
  CHECK(r.op[0].us >= r.op[0].floorUs, "%.9g us, floor %.9g", r.op[0].us, r.op[0].floorUs);
  CHECK(r.op[0].numFlows > 0 && r.op[0].numUnlike <= r.op[0].numFlows, "%lld flows as %lld",
        (long long)r.op[0].numFlows, (long long)r.op[0].numUnlike);
  closeBoth(&b);
}

TEST(in_time) {
  setting_t ll = {"dgx-h100", LL, 256, 128, 0, 0, 0, {0}, {0}};
  setting_t ht = {"dgx-h100", HT, 64, 4096, 0, 0, 1, {0}, {0}};
  runInTime(&ll, 60);
  runInTime(&ht, 20);
}

TEST(gives_up_when_told) {
  setting_t s = {"dgx-h100", LL, 128, 128, 0, 0, 1, {0}, {0}};
  both_t b;
  trefoil_sim_result_t r;
  openBoth(&b, &s);
  b.run.engine = TREFOIL_ENGINE_FAIR;
  b.run.timeoutS = 1e-3;
  CHECK(trefoilSimRun(b.sim, &b.run, &r) == TREFOIL_SYSTEM_ERROR, "an answer");
  CHECK(strstr(trefoilLastError(), "fair flows did not finish within 0.001 s"), "%s",
        trefoilLastError());
  closeBoth(&b);
}

/* ---- The solver alone -------------------------------------------------------------------------- */

enum { RESOURCES = 24, BUNDLES = 120 };

static double usedOf(const ep_share_t *s, int p, double *highest) {
  double used = 0;
  *highest = 0;
  for (int b = 0; b < s->numBundles; b++) {
    for (int k = 0; k < EP_SHARE_USES; k++) {
      if (s->uses[b * EP_SHARE_USES + k] != p || s->weight[b] == 0) continue;
      used += s->weight[b] * epShareRate(s, b);
      if (epShareRate(s, b) > *highest) *highest = epShareRate(s, b);
    }
  }
  return used;
}

/* Max-min fair: nothing is over its capacity, and every flow crosses a full resource on which no flow has
 * more. */
static void checkFair(const ep_share_t *s, uint64_t seed) {
  double used[RESOURCES], highest[RESOURCES];
  for (int p = 0; p < RESOURCES; p++) {
    used[p] = usedOf(s, p, &highest[p]);
    CHECK(used[p] <= s->capacity[p] * (1 + 1e-9), "seed %llu: resource %d: %.12g of %.12g",
          (unsigned long long)seed, p, used[p], s->capacity[p]);
  }
  for (int b = 0; b < s->numBundles; b++) {
    int isHeld = s->weight[b] == 0;
    for (int k = 0; k < EP_SHARE_USES && !isHeld; k++) {
      int p = s->uses[b * EP_SHARE_USES + k];
      isHeld = p >= 0 && used[p] >= s->capacity[p] * (1 - 1e-9) &&
               epShareRate(s, b) >= highest[p] * (1 - 1e-9);
    }
    CHECK(isHeld, "seed %llu: bundle %d could have more than %.12g", (unsigned long long)seed, b,
          epShareRate(s, b));
  }
}

static void drawUses(ep_share_t *s, int b, uint64_t *state) {
  int32_t *uses = s->uses + b * EP_SHARE_USES, n = 1 + (int32_t)randomBelow(state, 4);
  for (int k = 0; k < EP_SHARE_USES; k++) uses[k] = -1;
  for (int k = 0; k < n; k++) uses[k] = (int32_t)(k * 6 + (int)randomBelow(state, 6));
}

TEST(max_min_fair) {
  for (uint64_t seed = 1; seed <= 60; seed++) {
    uint64_t state = seed * 77;
    ep_share_t s;
    REQUIRE(epShareAllocate(&s, RESOURCES, BUNDLES), "no memory");
    for (int p = 0; p < RESOURCES; p++) s.capacity[p] = 1 + (double)randomBelow(&state, 1000) / 7;
    for (int b = 0; b < BUNDLES; b++) drawUses(&s, b, &state);
    REQUIRE(epShareStart(&s), "no memory");
    for (int b = 0; b < BUNDLES; b++) epShareSetWeight(&s, b, 1 + (int)randomBelow(&state, 4));
    for (int step = 0; step < 200; step++) {
      epShareSolve(&s);
      checkFair(&s, seed);
      int b = (int)randomBelow(&state, BUNDLES);
      int comes = randomBelow(&state, 8) == 0;
      epShareSetWeight(&s, b, comes ? 3 : s.weight[b] / 2);
      if (randomBelow(&state, 32) == 0) {
        s.capacity[randomBelow(&state, RESOURCES)] *= 0.9;
        epShareForget(&s);
      }
    }
    epShareFree(&s);
  }
}

TEST_MAIN()
