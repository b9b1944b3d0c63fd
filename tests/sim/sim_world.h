/* Small worlds whose times can be worked out by hand: an NVLink row takes 100 ns, a network row
 * 200 ns, an NVLink way 0.5 us, a network way 5 us, an LL operation 3 us, an HT operation 10 us. */
#ifndef TREFOIL_TESTS_SIM_WORLD_H
#define TREFOIL_TESTS_SIM_WORLD_H

#include <math.h>

#include "trefoil/sim.h"

#include "test.h"

enum { WORLD_RANKS = 64, WORLD_TOKENS = 64, WORLD_ROW_BYTES = 10000 };

/* One expert a rank and K = 1, so a token for expert e is a row to rank e. */
typedef struct world {
  trefoil_cluster_t cluster;
  trefoil_costs_t costs;
  trefoil_routing_t routing;
  int64_t numTokens[WORLD_RANKS];
  int32_t idx[WORLD_RANKS][WORLD_TOKENS];
  const int32_t *rows[WORLD_RANKS];
  trefoil_sim_workload_t workload;
  trefoil_sim_run_t run;
  trefoil_change_t changes[4];
} world_t;

static inline void worldInit(world_t *w, int numRanks, int ranksPerNode, trefoil_mode_t mode) {
  memset(w, 0, sizeof *w);
  w->cluster = (trefoil_cluster_t){.name = "by hand",
                                   .gpusPerNode = ranksPerNode,
                                   .maxGpus = numRanks,
                                   .gpusPerNic = 1,
                                   .nvlinkGbPerS = 100,
                                   .nicGbPerS = 50,
                                   .netLatencyUs = 5,
                                   .llFixedUs = 3,
                                   .htFixedUs = 10};
  trefoilCostsIdeal(&w->costs, &w->cluster, mode);
  w->costs.nvlinkLatencyNs = 500;
  w->routing.shape = (trefoil_shape_t){numRanks, ranksPerNode, numRanks, 1, WORLD_TOKENS};
  for (int r = 0; r < numRanks; r++) w->rows[r] = w->idx[r];
  w->routing.numTokens = w->numTokens;
  w->routing.topkIdx = w->rows;
  w->workload = (trefoil_sim_workload_t){.routing = &w->routing,
                                         .mode = mode,
                                         .dispatchRowBytes = WORLD_ROW_BYTES,
                                         .combineRowBytes = WORLD_ROW_BYTES};
  w->run = (trefoil_sim_run_t){.cluster = &w->cluster, .costs = &w->costs, .changes = w->changes};
}

/* n more tokens of rank `from` for the expert of rank `to`. */
static inline void worldSend(world_t *w, int from, int to, int n) {
  for (int i = 0; i < n; i++) w->idx[from][w->numTokens[from]++] = to;
}

static inline void worldChange(world_t *w, trefoil_change_kind_t kind, int index, double factor) {
  w->changes[w->run.numChanges++] = (trefoil_change_t){kind, index, factor};
}

/* Runs with an engine; the simulation stays for its arrays. NULL where it failed. */
static inline trefoil_sim_t *worldRun(world_t *w, trefoil_engine_t engine,
                                      trefoil_sim_result_t *result) {
  trefoil_sim_t *sim = NULL;
  w->run.engine = engine;
  if (trefoilSimCreate(&sim, &w->workload) != TREFOIL_OK) return NULL;
  if (trefoilSimRun(sim, &w->run, result) == TREFOIL_OK) return sim;
  trefoilSimDestroy(sim);
  return NULL;
}

static inline int firstEngine(void) {
  return TREFOIL_ENGINE_SIMGRID + !trefoilSimHasSimGrid();
}

/* Both engines, to a nanosecond of a hundred (SimGrid adds up seconds in doubles). */
#ifndef WORLD_NEAR_US
#define WORLD_NEAR_US 1e-5
#endif
#define NEAR(us, wanted) (fabs((us) - (wanted)) < WORLD_NEAR_US)
#define CHECK_US(w, op_, wanted)                                                                   \
  do {                                                                                             \
    for (int e_ = firstEngine(); e_ <= TREFOIL_ENGINE_QUEUES; e_++) {                              \
      trefoil_sim_result_t r_;                                                                     \
      trefoil_sim_t *s_ = worldRun((w), (trefoil_engine_t)e_, &r_);                                \
      REQUIRE(s_, "%s", trefoilLastError());                                                       \
      CHECK(NEAR(r_.op[op_].us, (wanted)), "%s: %.9g us, worked out %.9g",                         \
            trefoilEngineName(r_.op[op_].engine), r_.op[op_].us, (double)(wanted));                \
      CHECK(r_.op[op_].engine == (trefoil_engine_t)e_, "engine %d", (int)r_.op[op_].engine);       \
      CHECK(r_.op[op_].floorUs <= (wanted) + 1e-5, "floor %.9g", r_.op[op_].floorUs);              \
      trefoilSimDestroy(s_);                                                                       \
    }                                                                                              \
  } while (0)

#endif
