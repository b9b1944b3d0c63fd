/* What is replayed is what the plan says and what the reference counts; no engine is faster than the
 * bound; the engines agree; the same seed gives the same answer to the bit. On random routings. */
#include "trefoil/ref.h"
#include "trefoil/trace.h"

#include "sim_world.h"
#include "tests/plan/cases.h"

static const trefoil_cluster_t cluster = {.name = "random",
                                          .gpusPerNode = 8,
                                          .maxGpus = 1024,
                                          .gpusPerNic = 1,
                                          .nvlinkGbPerS = 350,
                                          .nicGbPerS = 50,
                                          .netLatencyUs = 8.4,
                                          .llFixedUs = 3.4,
                                          .htFixedUs = 10.9};

typedef struct drawn {
  random_case_t c;
  trefoil_sim_workload_t workload;
  trefoil_cluster_t cluster;
  trefoil_costs_t costs;
  trefoil_sim_run_t run;
  trefoil_change_t changes[2];
} drawn_t;

static double randomUpTo(uint64_t *state, double most) {
  return (double)randomBelow(state, 1 << 20) * most / (1 << 20);
}

static void drawCosts(drawn_t *d, uint64_t *state) {
  d->costs.numSms = 1 + (int)randomBelow(state, 40);
  d->costs.op[0].forwardShare = d->costs.op[1].forwardShare = randomUpTo(state, 0.9);
  d->costs.nvlinkLatencyNs = randomUpTo(state, 1000);
  d->costs.netMessageNs = randomUpTo(state, 300);
  d->costs.rowsPerMessage = randomUpTo(state, 8);
  for (int op = 0; op < 2; op++) {
    d->costs.op[op].tokenNs = randomUpTo(state, 2000);
    d->costs.op[op].sendRowNs = randomUpTo(state, 3000);
    d->costs.op[op].sendGbPerSPerSm = randomUpTo(state, 40);
    d->costs.op[op].receiveRowNs = randomUpTo(state, 3000);
    d->costs.op[op].signalNs = randomUpTo(state, 50);
  }
}

/* A routing with several nodes half of the time, costs half of the time, changes now and then. */
static void draw(drawn_t *d, uint64_t seed) {
  uint64_t state = seed;
  memset(d, 0, sizeof *d);
  randomCase(&d->c, &state);
  d->workload = (trefoil_sim_workload_t){.routing = &d->c.routing,
                                         .mode = (trefoil_mode_t)randomBelow(&state, 4),
                                         .variant = (trefoil_variant_t)randomBelow(&state, 3),
                                         .combinePartial = (int)randomBelow(&state, 2),
                                         .chunkTokens = (int)randomBelow(&state, 9),
                                         .dispatchRowBytes = 1 + (size_t)randomBelow(&state, 16000),
                                         .combineRowBytes = 1 + (size_t)randomBelow(&state, 16000)};
  d->cluster = cluster;
  d->cluster.gpusPerNic = 1 + (int)randomBelow(&state, 2);
  d->cluster.nodesPerLeaf = (int)randomBelow(&state, 3);
  d->cluster.railLeaves = (int)randomBelow(&state, 2);
  d->cluster.leafOversubscription = 1 + (double)randomBelow(&state, 4);
  trefoilCostsIdeal(&d->costs, &d->cluster, d->workload.mode);
  if (randomBelow(&state, 2)) drawCosts(d, &state);
  d->run = (trefoil_sim_run_t){.cluster = &d->cluster, .costs = &d->costs, .seed = seed};
  if (randomBelow(&state, 3) == 0) d->run.startSkewUs = 5;
  d->run.changes = d->changes;
  if (randomBelow(&state, 3)) return;
  int R = d->c.routing.shape.numRanks;
  d->changes[0] = (trefoil_change_t){TREFOIL_CHANGE_START_US, (int)randomBelow(&state, R), 3};
  d->changes[1] = (trefoil_change_t){TREFOIL_CHANGE_SM_RATE, (int)randomBelow(&state, R), 0.5};
  d->run.numChanges = 2;
}

static int sameTraffic(const drawn_t *d, const trefoil_sim_t *sim, trefoil_op_t op) {
  size_t R = (size_t)d->c.routing.shape.numRanks;
  trefoil_plan_config_t config = {.mode = d->workload.mode,
                                  .op = op,
                                  .variant = d->workload.variant,
                                  .combinePartial = d->workload.combinePartial,
                                  .chunkTokens = d->workload.chunkTokens};
  config.rowBytes = op ? d->workload.combineRowBytes : d->workload.dispatchRowBytes;
  trefoil_plan_t *plan = NULL;
  uint64_t *planned = malloc(R * R * sizeof *planned), *replayed = malloc(R * R * sizeof *replayed);
  int same = trefoilPlanCreate(&plan, &d->c.routing, &config) == TREFOIL_OK;
  for (int phase = -1; phase < TREFOIL_NUM_PHASES && same; phase++) {
    same = trefoilPlanTraffic(plan, phase, planned) == TREFOIL_OK &&
           trefoilSimTraffic(sim, op, phase, -1, replayed) == TREFOIL_OK &&
           memcmp(planned, replayed, R * R * sizeof *planned) == 0;
  }
  /* by tier: the pairs of a tier and no others */
  trefoilPlanTraffic(plan, -1, planned);
  for (int tier = 0; tier < TREFOIL_NUM_TIERS && same; tier++) {
    trefoilSimTraffic(sim, op, -1, tier, replayed);
    for (size_t p = 0; p < R * R; p++) {
      int src = (int)(p / R), dst = (int)(p % R), G = d->c.routing.shape.ranksPerNode;
      int of = src == dst ? TREFOIL_TIER_SELF
                          : (src / G == dst / G ? TREFOIL_TIER_NVLINK : TREFOIL_TIER_NET);
      same &= replayed[p] == (of == tier ? planned[p] : 0);
    }
  }
  trefoilPlanDestroy(plan);
  free(planned);
  free(replayed);
  return same;
}

static int sameAsReference(const drawn_t *d, const trefoil_sim_t *sim, trefoil_op_t op) {
  size_t R = (size_t)d->c.routing.shape.numRanks;
  trefoil_case_t c = {.routing = d->c.routing, .mode = d->workload.mode, .width = 8};
  c.dtype = TREFOIL_BF16;
  c.combinePartial = d->workload.combinePartial && c.mode == TREFOIL_LL_EXPERT_MAJOR;
  c.rails = d->workload.variant == TREFOIL_VARIANT_RAILS;
  uint64_t *replayed = malloc(R * R * sizeof *replayed);
  int64_t *rows = malloc(R * R * sizeof *rows);
  int same = trefoilRefTraffic(&c, op == TREFOIL_OP_COMBINE, rows) == TREFOIL_OK &&
             trefoilSimTraffic(sim, op, -1, -1, replayed) == TREFOIL_OK;
  size_t bytes = op ? d->workload.combineRowBytes : d->workload.dispatchRowBytes;
  for (size_t p = 0; p < R * R; p++) same &= replayed[p] == (uint64_t)rows[p] * bytes;
  free(replayed);
  free(rows);
  return same;
}

TEST(bytes_are_the_plans_and_the_references) {
  for (uint64_t seed = 1; seed <= 300; seed++) {
    drawn_t d;
    draw(&d, seed);
    trefoil_sim_t *sim = NULL;
    REQUIRE(trefoilSimCreate(&sim, &d.workload) == TREFOIL_OK, "%s", trefoilLastError());
    for (int op = 0; op < 2; op++) {
      CHECK(sameTraffic(&d, sim, (trefoil_op_t)op), "seed %llu op %d", (unsigned long long)seed,
            op);
      if (d.workload.variant == TREFOIL_VARIANT_PER_EXPERT) continue; /* not the reference's */
      CHECK(sameAsReference(&d, sim, (trefoil_op_t)op), "seed %llu op %d", (unsigned long long)seed,
            op);
    }
    trefoilSimDestroy(sim);
    freeCase(&d.c);
  }
}

/* Bytes over links, summed by kind, against the closed form's walk of the plan. */
static void checkLinks(const drawn_t *d, const trefoil_sim_op_t *op, trefoil_op_t which,
                       uint64_t seed) {
  trefoil_plan_config_t config = {.mode = d->workload.mode,
                                  .op = which,
                                  .variant = d->workload.variant,
                                  .combinePartial = d->workload.combinePartial,
                                  .chunkTokens = d->workload.chunkTokens};
  config.rowBytes = which ? d->workload.combineRowBytes : d->workload.dispatchRowBytes;
  trefoil_plan_t *plan = NULL;
  REQUIRE(trefoilPlanCreate(&plan, &d->c.routing, &config) == TREFOIL_OK, "%s", trefoilLastError());
  trefoil_port_loads_t loads;
  REQUIRE(trefoilPortLoads(plan, &d->c.routing.shape, d->cluster.gpusPerNic, &loads) == TREFOIL_OK,
          "%s", trefoilLastError());
  trefoilPlanDestroy(plan);
  CHECK(memcmp(&loads, &op->loads, sizeof loads) == 0, "seed %llu", (unsigned long long)seed);
  uint64_t sum[TREFOIL_NUM_RESOURCES] = {0}, most[TREFOIL_NUM_RESOURCES] = {0};
  for (int i = 0; i < op->numLinks; i++) {
    const trefoil_sim_link_t *l = &op->links[i];
    sum[l->kind] += l->bytes;
    if (l->bytes > most[l->kind]) most[l->kind] = l->bytes;
    CHECK(l->busyUs <= op->us + 1e-6, "seed %llu: %s %d is busy %.9g of %.9g us",
          (unsigned long long)seed, trefoilResourceName(l->kind), l->index, l->busyUs, op->us);
  }
  CHECK(sum[TREFOIL_RESOURCE_NVLINK_OUT] == loads.totalBytes[TREFOIL_TIER_NVLINK] &&
            sum[TREFOIL_RESOURCE_NVLINK_IN] == loads.totalBytes[TREFOIL_TIER_NVLINK] &&
            sum[TREFOIL_RESOURCE_NIC_OUT] == loads.totalBytes[TREFOIL_TIER_NET] &&
            sum[TREFOIL_RESOURCE_NIC_IN] == loads.totalBytes[TREFOIL_TIER_NET],
        "seed %llu", (unsigned long long)seed);
  CHECK(most[TREFOIL_RESOURCE_NIC_IN] == loads.maxBytes[TREFOIL_PORT_NIC_IN], "seed %llu",
        (unsigned long long)seed);
}

static void checkRun(const drawn_t *d, trefoil_engine_t engine, uint64_t seed) {
  trefoil_sim_t *sim = NULL;
  trefoil_sim_result_t r;
  trefoil_sim_run_t run = d->run;
  run.engine = engine;
  run.maxSpans = 100000;
  REQUIRE(trefoilSimCreate(&sim, &d->workload) == TREFOIL_OK, "%s", trefoilLastError());
  REQUIRE(trefoilSimRun(sim, &run, &r) == TREFOIL_OK, "seed %llu: %s", (unsigned long long)seed,
          trefoilLastError());
  for (int op = 0; op < 2; op++) {
    const trefoil_sim_op_t *o = &r.op[op];
    CHECK(o->us >= o->floorUs - 1e-6, "seed %llu %s op %d: %.9g us is below the floor %.9g",
          (unsigned long long)seed, trefoilEngineName(engine), op, o->us, o->floorUs);
    CHECK(o->us < 20 * o->floorUs, "seed %llu %s op %d: %.9g us, floor %.9g",
          (unsigned long long)seed, trefoilEngineName(engine), op, o->us, o->floorUs);
    checkLinks(d, o, (trefoil_op_t)op, seed);
    uint64_t bytes = 0;
    for (int64_t i = 0; i < o->numSpans; i++) {
      const trefoil_sim_span_t *s = &o->spans[i];
      bytes += s->bytes;
      double way = s->tier == TREFOIL_TIER_NVLINK ? d->costs.nvlinkLatencyNs * 1e-3
                   : s->tier == TREFOIL_TIER_NET  ? d->cluster.netLatencyUs
                                                  : 0;
      CHECK(s->startUs <= s->sentUs && s->sentUs + way <= s->endUs + 1e-6,
            "seed %llu %s op %d: issued at %.9g, sent at %.9g, there at %.9g, a way of %.9g us",
            (unsigned long long)seed, trefoilEngineName(engine), op, s->startUs, s->sentUs,
            s->endUs, way);
      CHECK(s->endUs <= o->us + 1e-6, "seed %llu %s op %d: there at %.9g of %.9g us",
            (unsigned long long)seed, trefoilEngineName(engine), op, s->endUs, o->us);
    }
    uint64_t all = o->loads.totalBytes[0] + o->loads.totalBytes[1] + o->loads.totalBytes[2];
    CHECK(bytes == all && o->leftOutSpans == 0, "seed %llu: spans of %llu bytes",
          (unsigned long long)seed, (unsigned long long)bytes);
  }
  trefoilSimDestroy(sim);
}

TEST(queues_keep_the_bound) {
  for (uint64_t seed = 1; seed <= 300; seed++) {
    drawn_t d;
    draw(&d, seed);
    checkRun(&d, TREFOIL_ENGINE_QUEUES, seed);
    freeCase(&d.c);
  }
}

TEST(simgrid_keeps_the_bound) {
  if (!trefoilSimHasSimGrid()) SKIP("no SimGrid in this build");
  for (uint64_t seed = 1; seed <= 100; seed++) {
    drawn_t d;
    draw(&d, seed);
    checkRun(&d, TREFOIL_ENGINE_SIMGRID, seed);
    freeCase(&d.c);
  }
}

/* ---- Balanced routing: the engines agree -------------------------------------------------------- */

typedef struct uniform {
  const trefoil_trace_t *trace;
  trefoil_routing_t routing;
  trefoil_sim_t *sim;
} uniform_t;

static int makeUniform(uniform_t *u, trefoil_mode_t mode, int numRanks, int64_t tokens) {
  trefoil_trace_spec_t spec = {.numSteps = 1, .seed = 5};
  spec.shape = (trefoil_shape_t){numRanks, trefoilRanksPerNode(numRanks, 8), 256, 8, tokens};
  u->sim = NULL;
  if (trefoilTraceGenerate(&u->trace, &spec) != TREFOIL_OK) return 0;
  trefoilTraceRouting(u->trace, 0, &u->routing);
  trefoil_sim_workload_t w = {
      .routing = &u->routing, .mode = mode, .dispatchRowBytes = 14336, .combineRowBytes = 14336};
  return trefoilSimCreate(&u->sim, &w) == TREFOIL_OK;
}
static void freeUniform(uniform_t *u) {
  trefoilSimDestroy(u->sim);
  trefoilTraceDestroy(u->trace);
}

TEST(engines_agree_on_balanced_routing) {
  if (!trefoilSimHasSimGrid()) SKIP("no SimGrid in this build");
  static const struct {
    trefoil_mode_t mode;
    int ranks;
    int64_t tokens;
    double within; /* of SimGrid's time */
  } cases[] = {{TREFOIL_LL_EXPERT_MAJOR, 8, 128, 0.03},  {TREFOIL_LL_EXPERT_MAJOR, 16, 128, 0.03},
               {TREFOIL_LL_EXPERT_MAJOR, 32, 128, 0.02}, {TREFOIL_HT_FLAT, 8, 512, 0.01},
               {TREFOIL_HT_FLAT, 16, 512, 0.05},         {TREFOIL_HT_FLAT, 32, 256, 0.05}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    uniform_t u;
    REQUIRE(makeUniform(&u, cases[i].mode, cases[i].ranks, cases[i].tokens), "%s",
            trefoilLastError());
    double us[2][2];
    for (int e = 0; e < 2; e++) {
      trefoil_sim_run_t run = {.cluster = &cluster,
                               .engine = e ? TREFOIL_ENGINE_QUEUES : TREFOIL_ENGINE_SIMGRID};
      trefoil_sim_result_t r;
      REQUIRE(trefoilSimRun(u.sim, &run, &r) == TREFOIL_OK, "%s", trefoilLastError());
      for (int op = 0; op < 2; op++) us[e][op] = r.op[op].us;
    }
    for (int op = 0; op < 2; op++) {
      double off = us[1][op] / us[0][op] - 1;
      printf("%s, %d ranks, %lld tokens, %s: SimGrid %.3f us, queues %+.2f %%\n",
             trefoilModeName(cases[i].mode), cases[i].ranks, (long long)cases[i].tokens,
             op ? "combine" : "dispatch", us[0][op], 100 * off);
      CHECK(fabs(off) <= cases[i].within, "case %zu op %d: %.3f %%", i, op, 100 * off);
    }
    freeUniform(&u);
  }
}

TEST(same_seed_same_bits) {
  for (uint64_t seed = 400; seed < 440; seed++) {
    drawn_t d;
    draw(&d, seed);
    for (int e = firstEngine(); e <= TREFOIL_ENGINE_QUEUES; e++) {
      trefoil_sim_result_t r[2];
      trefoil_sim_t *sim[2] = {NULL, NULL};
      d.run.engine = (trefoil_engine_t)e;
      for (int i = 0; i < 2; i++) {
        REQUIRE(trefoilSimCreate(&sim[i], &d.workload) == TREFOIL_OK &&
                    trefoilSimRun(sim[i], &d.run, &r[i]) == TREFOIL_OK,
                "%s", trefoilLastError());
      }
      for (int op = 0; op < 2; op++) {
        size_t bytes = (size_t)r[0].op[op].numRanks * sizeof(double);
        CHECK(memcmp(r[0].op[op].finishUs, r[1].op[op].finishUs, bytes) == 0, "seed %llu %s op %d",
              (unsigned long long)seed, trefoilEngineName((trefoil_engine_t)e), op);
      }
      trefoilSimDestroy(sim[0]);
      trefoilSimDestroy(sim[1]);
    }
    freeCase(&d.c);
  }
}

/* A thousand ranks, token by token: all bytes are there, and balanced routing is near the bound. */
TEST(a_thousand_ranks) {
  static const struct {
    trefoil_mode_t mode;
    int64_t tokens;
  } cases[] = {{TREFOIL_LL_EXPERT_MAJOR, 128}, {TREFOIL_HT_FLAT, 256}};
  for (int i = 0; i < 2; i++) {
    trefoil_trace_spec_t spec = {.numSteps = 1, .seed = 5};
    spec.shape = (trefoil_shape_t){1024, 8, 1024, 8, cases[i].tokens};
    drawn_t d = {.cluster = cluster};
    const trefoil_trace_t *trace;
    REQUIRE(trefoilTraceGenerate(&trace, &spec) == TREFOIL_OK, "%s", trefoilLastError());
    trefoilTraceRouting(trace, 0, &d.c.routing);
    d.workload = (trefoil_sim_workload_t){.routing = &d.c.routing,
                                          .mode = cases[i].mode,
                                          .dispatchRowBytes = 7392,
                                          .combineRowBytes = 14336};
    trefoil_sim_t *sim = NULL;
    trefoil_sim_run_t run = {.cluster = &d.cluster};
    trefoil_sim_result_t r;
    REQUIRE(trefoilSimCreate(&sim, &d.workload) == TREFOIL_OK &&
                trefoilSimRun(sim, &run, &r) == TREFOIL_OK,
            "%s", trefoilLastError());
    for (int op = 0; op < 2; op++) {
      const trefoil_sim_op_t *o = &r.op[op];
      CHECK(o->engine == TREFOIL_ENGINE_QUEUES, "engine %d", (int)o->engine);
      CHECK(o->us >= o->floorUs && o->us <= 1.05 * o->floorUs, "%.9g us, floor %.9g", o->us,
            o->floorUs);
      checkLinks(&d, o, (trefoil_op_t)op, 5);
    }
    trefoilSimDestroy(sim);
    trefoilTraceDestroy(trace);
  }
}

TEST_MAIN()
