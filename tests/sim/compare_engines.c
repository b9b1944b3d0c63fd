/* Both engines on the same transfers, at every size that SimGrid can do.
 *
 *   compare_engines [MOST_RANKS [SETTING]]
 *
 * LL with 128 tokens, HT with 512, DeepSeek-V3's rows, dgx-h100. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trefoil/sim.h"
#include "trefoil/trace.h"

typedef struct setting {
  const char *name;
  trefoil_mode_t mode;
  int64_t tokens;
  double zipf;
  int limited; /* SMs take part */
} setting_t;

static const setting_t settings[] = {
    {"LL", TREFOIL_LL_EXPERT_MAJOR, 128, 0, 0}, {"LL, Zipf 1", TREFOIL_LL_EXPERT_MAJOR, 128, 1, 0},
    {"HT", TREFOIL_HT_FLAT, 512, 0, 0},         {"HT, Zipf 1", TREFOIL_HT_FLAT, 512, 1, 0},
    {"HT, 20 SMs", TREFOIL_HT_FLAT, 512, 0, 1},
};

static int fail(void) {
  fprintf(stderr, "%s\n", trefoilLastError());
  return 1;
}

static int compare(const trefoil_cluster_t *cluster, const setting_t *s, int numRanks) {
  trefoil_trace_spec_t spec = {.numSteps = 1, .seed = 1, .skew = s->zipf};
  spec.shape = (trefoil_shape_t){numRanks, trefoilRanksPerNode(numRanks, cluster->gpusPerNode), 256,
                                 8, s->tokens};
  if (s->zipf > 0) spec.popularity = TREFOIL_POPULARITY_ZIPF;
  const trefoil_trace_t *trace;
  trefoil_routing_t routing;
  if (trefoilTraceGenerate(&trace, &spec) || trefoilTraceRouting(trace, 0, &routing)) return fail();
  trefoil_sim_workload_t w = {
      .routing = &routing, .mode = s->mode, .dispatchRowBytes = 14336, .combineRowBytes = 14336};
  trefoil_sim_t *sim;
  if (trefoilSimCreate(&sim, &w)) return fail();
  trefoil_costs_t costs;
  if (trefoilCostsIdeal(&costs, cluster, s->mode)) return fail();
  if (s->limited) {
    costs.numSms = 20;
    for (int op = 0; op < 2; op++) {
      costs.op[op].sendGbPerSPerSm = costs.op[op].receiveGbPerSPerSm = 20;
    }
  }
  trefoil_sim_result_t r;
  double us[2][2], wall[2][2], bound[2];
  for (int e = 0; e < 2; e++) {
    trefoil_sim_run_t run = {.cluster = cluster,
                             .costs = &costs,
                             .engine = (trefoil_engine_t)(TREFOIL_ENGINE_SIMGRID + e),
                             .timeoutS = 3600};
    if (trefoilSimRun(sim, &run, &r)) return fail();
    for (int op = 0; op < 2; op++) {
      us[e][op] = r.op[op].us;
      wall[e][op] = r.op[op].wallS;
      bound[op] = r.op[op].floorUs;
    }
  }
  for (int op = 0; op < 2; op++) {
    printf("| %s | %d | %s | %.2f | %.2f | %+.2f %% | %.2f | %.2f s | %.3f s |\n", s->name,
           numRanks, op ? "combine" : "dispatch", us[0][op], us[1][op],
           100 * (us[1][op] / us[0][op] - 1), bound[op], wall[0][op], wall[1][op]);
  }
  fflush(stdout);
  trefoilSimDestroy(sim);
  trefoilTraceDestroy(trace);
  return 0;
}

int main(int argc, char **argv) {
  if (!trefoilSimHasSimGrid()) {
    printf("skipped: no SimGrid in this build\n");
    return 77;
  }
  int most = argc > 1 ? atoi(argv[1]) : 32;
  trefoil_cluster_t cluster;
  if (trefoilClusterLoad(&cluster, "dgx-h100")) return fail();
  printf("| | ranks | | SimGrid, us | queues, us | apart | bound, us | SimGrid took | queues |\n"
         "|---|---|---|---|---|---|---|---|---|\n");
  for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
    if (argc > 2 && strcmp(argv[2], settings[i].name)) continue;
    for (int ranks = 8; ranks <= most; ranks *= 2) {
      if (compare(&cluster, &settings[i], ranks)) return 1;
    }
  }
  return 0;
}
