/* Laws of any sensible answer: more bytes, slower ports and longer ways never help; names of ranks do
 * not matter. First come, first served can in principle be faster with a slower port (another segment
 * then comes first), so laws about single ports are of SimGrid's flows and of cases without waiting
 * chunks; for the whole fabric they hold for both engines. */
#include "trefoil/trace.h"

#include "sim_world.h"

static const trefoil_cluster_t cluster = {.name = "laws",
                                          .gpusPerNode = 4,
                                          .maxGpus = 1024,
                                          .gpusPerNic = 1,
                                          .nvlinkGbPerS = 350,
                                          .nicGbPerS = 50,
                                          .netLatencyUs = 8.4,
                                          .llFixedUs = 3.4,
                                          .htFixedUs = 10.9,
                                          .nodesPerLeaf = 2,
                                          .leafOversubscription = 1};

typedef struct sample {
  const trefoil_trace_t *trace;
  trefoil_routing_t routing;
  trefoil_sim_workload_t workload;
} sample_t;

static int makeSample(sample_t *s, int i) {
  trefoil_trace_spec_t spec = {.numSteps = 1, .seed = (uint64_t)i, .skew = 0.8, .ragged = 0.5};
  spec.popularity = i / 4 % 2 ? TREFOIL_POPULARITY_ZIPF : TREFOIL_POPULARITY_UNIFORM;
  spec.shape = (trefoil_shape_t){16, 4, 64, 4, 24};
  if (trefoilTraceGenerate(&s->trace, &spec) != TREFOIL_OK) return 0;
  trefoilTraceRouting(s->trace, 0, &s->routing);
  s->workload = (trefoil_sim_workload_t){.routing = &s->routing,
                                         .mode = (trefoil_mode_t)(i % 4),
                                         .chunkTokens = 8,
                                         .dispatchRowBytes = 4096,
                                         .combineRowBytes = 4096};
  return 1;
}

typedef struct times {
  double us[2];
} times_t;

static times_t runOn(const sample_t *s, const trefoil_sim_run_t *run) {
  trefoil_sim_t *sim = NULL;
  trefoil_sim_result_t r;
  times_t t = {{-1, -1}};
  if (trefoilSimCreate(&sim, &s->workload) == TREFOIL_OK &&
      trefoilSimRun(sim, run, &r) == TREFOIL_OK) {
    t = (times_t){{r.op[0].us, r.op[1].us}};
  }
  trefoilSimDestroy(sim);
  CHECK(t.us[0] > 0, "%s", trefoilLastError());
  return t;
}

enum { SAMPLES = 8 };
#define FOR_EACH_ENGINE(e) for (int e = firstEngine(); e <= TREFOIL_ENGINE_QUEUES; e++)

/* after >= before - slack of it, both operations */
static void checkNotFaster(times_t before, times_t after, double slack, const char *what, int i,
                           int e) {
  for (int op = 0; op < 2; op++) {
    CHECK(after.us[op] >= before.us[op] * (1 - slack), "%s, sample %d, %s, op %d: %.9g -> %.9g us",
          what, i, trefoilEngineName((trefoil_engine_t)e), op, before.us[op], after.us[op]);
  }
}

TEST(more_of_everything_takes_longer) {
  for (int i = 0; i < SAMPLES; i++) {
    sample_t s;
    REQUIRE(makeSample(&s, i), "%s", trefoilLastError());
    FOR_EACH_ENGINE(e) {
      trefoil_cluster_t c = cluster;
      trefoil_sim_run_t run = {.cluster = &c, .engine = (trefoil_engine_t)e};
      times_t plain = runOn(&s, &run);
      sample_t big = s;
      big.workload.dispatchRowBytes = big.workload.combineRowBytes = 8192;
      checkNotFaster(plain, runOn(&big, &run), 0, "twice the bytes", i, e);
      c.nicGbPerS /= 2, c.nvlinkGbPerS /= 2;
      checkNotFaster(plain, runOn(&s, &run), 0, "half of all rates", i, e);
      /* twice the bytes at half the rates are four times the time, latency and fixed time apart */
      times_t four = runOn(&big, &run);
      c = cluster;
      for (int op = 0; op < 2; op++) {
        CHECK(four.us[op] < 4 * plain.us[op], "sample %d: %.9g of %.9g", i, four.us[op],
              plain.us[op]);
      }
      c.netLatencyUs += 3;
      checkNotFaster(plain, runOn(&s, &run), 0, "a longer way", i, e);
      c = cluster;
      c.llFixedUs += 1, c.htFixedUs += 1;
      times_t fixed = runOn(&s, &run);
      for (int op = 0; op < 2; op++) {
        CHECK(NEAR(fixed.us[op], plain.us[op] + 1), "fixed time is added: %.9g -> %.9g",
              plain.us[op], fixed.us[op]);
      }
    }
    trefoilTraceDestroy(s.trace);
  }
}

TEST(one_slower_part_takes_longer) {
  static const trefoil_change_t changes[] = {{TREFOIL_CHANGE_NIC_RATE, 5, 0.3},
                                             {TREFOIL_CHANGE_RAIL_RATE, 1, 0.5},
                                             {TREFOIL_CHANGE_NVLINK_RATE, 6, 0.1},
                                             {TREFOIL_CHANGE_START_US, 3, 9},
                                             {TREFOIL_CHANGE_RAIL_FAIL, 2, 0}};
  for (int i = 0; i < SAMPLES; i++) {
    sample_t s;
    REQUIRE(makeSample(&s, i), "%s", trefoilLastError());
    FOR_EACH_ENGINE(e) {
      trefoil_sim_run_t run = {.cluster = &cluster, .engine = (trefoil_engine_t)e};
      times_t plain = runOn(&s, &run);
      for (size_t k = 0; k < sizeof changes / sizeof *changes; k++) {
        run.changes = &changes[k];
        run.numChanges = 1;
        checkNotFaster(plain, runOn(&s, &run), 0.01, "a slower part", i, e);
      }
      run.numChanges = 0;
      run.startSkewUs = 4; /* counted from the first rank's start */
      run.seed = (uint64_t)i;
      times_t skewed = runOn(&s, &run);
      checkNotFaster(plain, skewed, 0.01, "skewed starts", i, e);
      times_t latest = {{plain.us[0] + 4, plain.us[1] + 4}};
      checkNotFaster(skewed, latest, 0.01, "no more than the skew", i, e);
      run.seed += 1000;
      times_t other = runOn(&s, &run);
      CHECK(other.us[0] != skewed.us[0], "sample %d: another seed, the same skew", i);
      run.startSkewUs = 0;
      run.oversubscription = 2;
      times_t two = runOn(&s, &run);
      checkNotFaster(plain, two, 0.01, "2:1", i, e);
      run.oversubscription = 4;
      checkNotFaster(two, runOn(&s, &run), 0.01, "4:1", i, e);
    }
    trefoilTraceDestroy(s.trace);
  }
}

/* ---- Names do not matter ------------------------------------------------------------------------ */

/* The routing after rank r is called to[r]: its tokens and its experts go with it. */
static int relabel(const sample_t *from, const int *to, sample_t *out, int32_t **memory) {
  const trefoil_shape_t *s = &from->routing.shape;
  int R = s->numRanks, L = trefoilExpertsPerRank(s);
  size_t each = (size_t)(s->maxTokens * s->topk);
  static int64_t counts[64];
  static const int32_t *rows[64];
  *memory = malloc((size_t)R * each * sizeof **memory);
  for (int r = 0; r < R; r++) {
    int32_t *row = *memory + (size_t)to[r] * each;
    counts[to[r]] = from->routing.numTokens[r];
    rows[to[r]] = row;
    for (int64_t j = 0; j < from->routing.numTokens[r] * s->topk; j++) {
      int32_t e = from->routing.topkIdx[r][j];
      row[j] = e < 0 ? -1 : to[e / L] * L + e % L;
    }
  }
  *out = *from;
  out->routing.numTokens = counts;
  out->routing.topkIdx = rows;
  out->workload.routing = &out->routing;
  return 1;
}

static void checkRelabelled(const sample_t *s, const int *to, trefoil_engine_t engine,
                            double within, int i) {
  sample_t other;
  int32_t *memory = NULL;
  relabel(s, to, &other, &memory);
  trefoil_cluster_t flat = cluster; /* leaves have names too */
  flat.nodesPerLeaf = 0;
  trefoil_sim_run_t run = {.cluster = &flat, .engine = engine};
  times_t a = runOn(s, &run), b = runOn(&other, &run);
  for (int op = 0; op < 2; op++) {
    CHECK(fabs(a.us[op] - b.us[op]) <= within * a.us[op],
          "sample %d, mode %d, %s, op %d: %.9g and %.9g us", i, (int)s->workload.mode,
          trefoilEngineName(engine), op, a.us[op], b.us[op]);
  }
  free(memory);
}

/* Nodes round the ring: the queues' order of equals goes round with them, to the bit in LL. */
TEST(ranks_renamed_round_the_ring) {
  for (int i = 0; i < SAMPLES; i++) {
    sample_t s;
    REQUIRE(makeSample(&s, i), "%s", trefoilLastError());
    int to[16];
    for (int r = 0; r < 16; r++) to[r] = (r + 4 * (1 + i % 3)) % 16;
    int isLl = s.workload.mode <= TREFOIL_LL_RANK_MAJOR;
    checkRelabelled(&s, to, TREFOIL_ENGINE_QUEUES, isLl ? 0 : 0.03, i);
    if (trefoilSimHasSimGrid()) checkRelabelled(&s, to, TREFOIL_ENGINE_SIMGRID, 1e-9, i);
    trefoilTraceDestroy(s.trace);
  }
}

/* Any renaming that keeps nodes: LL's flows do not see it. Queues may serve equals in another order,
 * and HT's streams hand in the rows of different origins in another order. */
TEST(ranks_renamed_at_will) {
  static const int nodes[] = {2, 0, 3, 1}, places[] = {1, 3, 2, 0};
  for (int i = 0; i < SAMPLES; i++) {
    sample_t s;
    REQUIRE(makeSample(&s, i), "%s", trefoilLastError());
    int to[16];
    for (int r = 0; r < 16; r++) to[r] = nodes[r / 4] * 4 + places[r % 4];
    checkRelabelled(&s, to, TREFOIL_ENGINE_QUEUES, 0.03, i);
    int isLl = s.workload.mode <= TREFOIL_LL_RANK_MAJOR;
    if (trefoilSimHasSimGrid()) {
      checkRelabelled(&s, to, TREFOIL_ENGINE_SIMGRID, isLl ? 1e-9 : 0.01, i);
    }
    trefoilTraceDestroy(s.trace);
  }
}

TEST_MAIN()
