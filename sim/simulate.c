/* A simulation: the transfers of both operations, from a routing. */
#include <stdlib.h>
#include <string.h>

#include "plan/error.h"
#include "sim/replay.h"

#define MAX_MOVES ((int64_t)1 << 23) /* of one operation, before chunks are doubled */
enum { DEFAULT_CHUNK_TOKENS = 64 };

const char *trefoilEngineName(trefoil_engine_t engine) {
  switch (engine) {
  case TREFOIL_ENGINE_AUTO:
    return "auto";
  case TREFOIL_ENGINE_SIMGRID:
    return "simgrid";
  case TREFOIL_ENGINE_QUEUES:
    return "queues";
  case TREFOIL_ENGINE_FAIR:
    return "fair";
  }
  return "unknown";
}

const char *trefoilResourceName(trefoil_resource_t kind) {
  static const char *const names[TREFOIL_NUM_RESOURCES] = {"send",      "forward", "nvlink-out",
                                                           "nvlink-in", "nic-out", "leaf-up",
                                                           "leaf-down", "nic-in",  "receive"};
  return (unsigned)kind < TREFOIL_NUM_RESOURCES ? names[kind] : "unknown";
}

/* ---- Creation ---------------------------------------------------------------------------------- */

/* At most as many transfers as (chunk, rank it reaches) and (chunk, node). */
static int64_t mostMoves(const trefoil_routing_t *r, int64_t chunkTokens) {
  const trefoil_shape_t *s = &r->shape;
  int64_t targets = s->numRanks, entries = chunkTokens * s->topk;
  int64_t each = (targets < entries ? targets : entries);
  int64_t nodes = s->numRanks / s->ranksPerNode;
  each += nodes < entries ? nodes : entries;
  int64_t sum = 0;
  for (int i = 0; i < s->numRanks; i++) {
    sum += (r->numTokens[i] + chunkTokens - 1) / chunkTokens * each;
  }
  return sum;
}

static int chooseChunk(const trefoil_sim_workload_t *w) {
  if (w->mode != TREFOIL_HT_FLAT && w->mode != TREFOIL_HT_EXPERT_MAJOR) return 0;
  if (w->chunkTokens > 0) return w->chunkTokens;
  int64_t chunk = DEFAULT_CHUNK_TOKENS;
  while (mostMoves(w->routing, chunk) > MAX_MOVES && chunk < ((int64_t)1 << 30)) chunk *= 2;
  return (int)chunk;
}

static trefoil_result_t checkWorkload(const trefoil_sim_workload_t *w) {
  EP_CHECK(w && w->routing, TREFOIL_INVALID_ARGUMENT, "the %s is NULL", w ? "routing" : "workload");
  EP_CHECK(w->chunkTokens >= 0, TREFOIL_INVALID_ARGUMENT,
           "%d tokens of a chunk: must be positive, or 0 for the default", w->chunkTokens);
  size_t bytes[2] = {w->dispatchRowBytes, w->combineRowBytes};
  for (int op = 0; op < 2; op++) {
    EP_CHECK(bytes[op] >= 1 && bytes[op] <= (size_t)1 << 30, TREFOIL_INVALID_ARGUMENT,
             "%zu bytes of a %s row: must be in [1, 2^30]", bytes[op],
             op == TREFOIL_OP_DISPATCH ? "dispatch" : "combine");
  }
  return trefoilRoutingCheck(w->routing);
}

static trefoil_result_t build(trefoil_sim_t *sim, const trefoil_sim_workload_t *w) {
  size_t R = (size_t)sim->shape.numRanks;
  sim->numTokens = malloc(R * sizeof *sim->numTokens);
  EP_CHECK(sim->numTokens, TREFOIL_SYSTEM_ERROR, "out of memory for %zu ranks", R);
  memcpy(sim->numTokens, w->routing->numTokens, R * sizeof *sim->numTokens);
  int chunk = chooseChunk(w);
  for (int op = 0; op < 2; op++) {
    EP_TRY(epReplayBuild(&sim->replay[op], w, (trefoil_op_t)op, chunk));
  }
  return TREFOIL_OK;
}

trefoil_result_t trefoilSimCreate(trefoil_sim_t **sim, const trefoil_sim_workload_t *workload) {
  EP_CHECK(sim, TREFOIL_INVALID_ARGUMENT, "the simulation's out-parameter is NULL");
  EP_TRY(checkWorkload(workload));
  trefoil_sim_t *made = calloc(1, sizeof *made);
  EP_CHECK(made, TREFOIL_SYSTEM_ERROR, "out of memory for a simulation");
  made->workload = *workload;
  made->workload.routing = NULL;
  made->shape = workload->routing->shape;
  trefoil_result_t result = build(made, workload);
  if (result != TREFOIL_OK) {
    trefoilSimDestroy(made);
    return result;
  }
  *sim = made;
  return TREFOIL_OK;
}

void epSimForget(trefoil_sim_op_t *op) {
  free((void *)op->finishUs);
  free((void *)op->links);
  free((void *)op->spans);
  memset(op, 0, sizeof *op);
}

void trefoilSimDestroy(trefoil_sim_t *sim) {
  if (!sim) return;
  for (int op = 0; op < 2; op++) {
    epSimForget(&sim->last.op[op]);
    epReplayFree(&sim->replay[op]);
  }
  free(sim->numTokens);
  free(sim);
}

/* ---- What was replayed ------------------------------------------------------------------------- */

trefoil_result_t trefoilSimTraffic(const trefoil_sim_t *sim, trefoil_op_t op, int phase, int tier,
                                   uint64_t *bytes) {
  EP_CHECK(sim && bytes, TREFOIL_INVALID_ARGUMENT, "the %s is NULL", sim ? "output" : "simulation");
  EP_CHECK(op == TREFOIL_OP_DISPATCH || op == TREFOIL_OP_COMBINE, TREFOIL_INVALID_ARGUMENT,
           "operation %d is neither dispatch (0) nor combine (1)", (int)op);
  EP_CHECK(phase < TREFOIL_NUM_PHASES && tier < TREFOIL_NUM_TIERS, TREFOIL_INVALID_ARGUMENT,
           "phase %d, tier %d: must be below %d and %d, or negative for all", phase, tier,
           TREFOIL_NUM_PHASES, TREFOIL_NUM_TIERS);
  const ep_replay_t *r = &sim->replay[op];
  size_t R = (size_t)sim->shape.numRanks;
  memset(bytes, 0, R * R * sizeof *bytes);
  for (int64_t i = 0; i < r->numSegments; i++) {
    const ep_move_t *m = epMoveOf(r, i);
    if ((phase >= 0 && m->phase != phase) || (tier >= 0 && m->tier != tier)) continue;
    bytes[(size_t)m->src * R + (size_t)m->dst] += (uint64_t)epRowsOf(r, i) * r->rowBytes;
  }
  return TREFOIL_OK;
}
