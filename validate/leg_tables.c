/* What reference, plan and simulator say, as tables. */
#include "validate/legs.h"

#include "trefoil/ref.h"

#include "plan/error.h"

#include <string.h>

enum { MAX_SPANS = 1 << 20 };

trefoil_result_t epLegReference(const trefoil_sim_workload_t *work, ep_leg_table_t *table) {
  int R = table->numRanks;
  int64_t rows[EP_MAX_RANKS * EP_MAX_RANKS];
  trefoil_case_t c = {
      .routing = *work->routing, .mode = work->mode, .width = 16, .dtype = TREFOIL_BF16};
  c.combinePartial = work->combinePartial && work->mode == TREFOIL_LL_EXPERT_MAJOR;
  c.rails = work->variant == TREFOIL_VARIANT_RAILS;
  for (int op = 0; op < 2; op++) {
    EP_TRY(trefoilRefTraffic(&c, op == TREFOIL_OP_COMBINE, rows));
    size_t rowBytes = op == TREFOIL_OP_COMBINE ? work->combineRowBytes : work->dispatchRowBytes;
    uint64_t *at = table->bytes + epLegAt(table, op, 0, 0);
    for (int i = 0; i < R * R; i++) at[i] = (uint64_t)rows[i] * rowBytes;
  }
  return TREFOIL_OK;
}

trefoil_result_t epLegPlan(const trefoil_sim_workload_t *work, ep_leg_table_t *table) {
  for (int op = 0; op < 2; op++) {
    trefoil_plan_config_t config = {.mode = work->mode,
                                    .op = (trefoil_op_t)op,
                                    .variant = work->variant,
                                    .combinePartial = work->combinePartial,
                                    .chunkTokens = work->chunkTokens};
    config.rowBytes = op == TREFOIL_OP_COMBINE ? work->combineRowBytes : work->dispatchRowBytes;
    trefoil_plan_t *plan = NULL;
    trefoil_transfer_t x;
    EP_TRY(trefoilPlanCreate(&plan, work->routing, &config));
    while (trefoilPlanNext(plan, &x)) {
      uint64_t *at = table->bytes + epLegAt(table, op, x.tier, x.phase);
      at[x.src * table->numRanks + x.dst] += (uint64_t)x.rows * x.rowBytes;
    }
    trefoilPlanDestroy(plan);
  }
  return TREFOIL_OK;
}

/* ---- Simulator ---------------------------------------------------------------------------------- */

/* A card a GPU, so that a network port is a rank's; SMs that cost something, so that every resource is
 * a stage of its own. */
static const trefoil_cluster_t cluster = {.name = "of the validation",
                                          .gpusPerNode = EP_MAX_RANKS,
                                          .maxGpus = EP_MAX_RANKS,
                                          .gpusPerNic = 1,
                                          .nvlinkGbPerS = 350,
                                          .nicGbPerS = 50,
                                          .netLatencyUs = 5,
                                          .llFixedUs = 3,
                                          .htFixedUs = 10};

/* What an engine has issued and ended, and by no other time than its operation's. A transfer that
 * never moved keeps its start far in the future. */
static void addSpans(const trefoil_sim_op_t *o, int op, ep_leg_table_t *table) {
  for (int64_t i = 0; i < o->numSpans; i++) {
    const trefoil_sim_span_t *s = &o->spans[i];
    int isDone = s->startUs <= s->endUs && s->endUs <= o->us * (1 + 1e-9) + 1e-6;
    uint64_t *at = table->bytes + epLegAt(table, op, s->tier, s->phase);
    if (isDone) at[s->src * table->numRanks + s->dst] += s->bytes;
  }
}

static void addLinks(const trefoil_sim_op_t *o, int op, ep_leg_table_t *table) {
  static const int ports[TREFOIL_NUM_RESOURCES] = {
      [TREFOIL_RESOURCE_NVLINK_OUT] = 1 + EP_LEG_NVLINK_OUT,
      [TREFOIL_RESOURCE_NVLINK_IN] = 1 + EP_LEG_NVLINK_IN,
      [TREFOIL_RESOURCE_NIC_OUT] = 1 + EP_LEG_NIC_OUT,
      [TREFOIL_RESOURCE_NIC_IN] = 1 + EP_LEG_NIC_IN};
  for (int i = 0; i < o->numLinks; i++) {
    const trefoil_sim_link_t *l = &o->links[i];
    int port = ports[l->kind] - 1;
    if (port >= 0 && l->index < table->numRanks)
      table->ports[epLegPortAt(table, op, port) + (size_t)l->index] += l->bytes;
  }
}

static trefoil_result_t fillSimulated(const trefoil_sim_workload_t *work, trefoil_engine_t engine,
                                      ep_leg_table_t *table) {
  trefoil_costs_t costs;
  trefoil_sim_t *sim = NULL;
  trefoil_sim_result_t result;
  EP_TRY(trefoilCostsIdeal(&costs, &cluster, work->mode));
  for (int op = 0; op < 2; op++) costs.op[op].sendRowNs = costs.op[op].receiveRowNs = 100;
  EP_TRY(trefoilSimCreate(&sim, work));
  trefoil_sim_run_t run = {
      .cluster = &cluster, .costs = &costs, .engine = engine, .maxSpans = MAX_SPANS};
  trefoil_result_t code = trefoilSimRun(sim, &run, &result);
  for (int op = 0; op < 2 && code == TREFOIL_OK; op++) {
    addSpans(&result.op[op], op, table);
    addLinks(&result.op[op], op, table);
  }
  table->hasPorts = 1;
  trefoilSimDestroy(sim);
  return code;
}

trefoil_result_t epLegQueues(const trefoil_sim_workload_t *work, ep_leg_table_t *table) {
  return fillSimulated(work, TREFOIL_ENGINE_QUEUES, table);
}
trefoil_result_t epLegSimGrid(const trefoil_sim_workload_t *work, ep_leg_table_t *table) {
  return fillSimulated(work, TREFOIL_ENGINE_SIMGRID, table);
}

int epLegsOfBuild(ep_leg_t legs[EP_MAX_LEGS], int simGridEvery) {
  int n = 0;
  legs[n++] = (ep_leg_t){"routing", epLegRouting, 0, 1};
  legs[n++] = (ep_leg_t){"reference", epLegReference, 1, 1};
  legs[n++] = (ep_leg_t){"plan", epLegPlan, 0, 1};
  legs[n++] = (ep_leg_t){"queues", epLegQueues, 0, 1};
  if (trefoilSimHasSimGrid()) legs[n++] = (ep_leg_t){"simgrid", epLegSimGrid, 0, simGridEvery};
  return n;
}
