/* The simulator's calls: a simulation holds the transfers of both operations; a run replays them on a
 * fabric with one of the engines and puts the bounds beside. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "plan/error.h"
#include "sim/engine.h"
#include "sim/resource_loads.h"

#define MAX_MOVES     ((int64_t)1 << 23) /* of one operation, before chunks are doubled */
#define SIMGRID_MOVES ((int64_t)1 << 11) /* under a second of SimGrid; AUTO takes queues above */
enum { DEFAULT_CHUNK_TOKENS = 64, DEFAULT_TIMEOUT_S = 600 };

const char *trefoilEngineName(trefoil_engine_t engine) {
  switch (engine) {
  case TREFOIL_ENGINE_AUTO:
    return "auto";
  case TREFOIL_ENGINE_SIMGRID:
    return "simgrid";
  case TREFOIL_ENGINE_QUEUES:
    return "queues";
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

static void forgetOp(trefoil_sim_op_t *op) {
  free((void *)op->finishUs);
  free((void *)op->links);
  free((void *)op->spans);
  memset(op, 0, sizeof *op);
}

void trefoilSimDestroy(trefoil_sim_t *sim) {
  if (!sim) return;
  for (int op = 0; op < 2; op++) {
    forgetOp(&sim->last.op[op]);
    epReplayFree(&sim->replay[op]);
  }
  free(sim->numTokens);
  free(sim);
}

/* ---- One operation ----------------------------------------------------------------------------- */

typedef struct one {
  const trefoil_sim_t *sim;
  const trefoil_sim_run_t *run;
  const ep_replay_t *replay;
  ep_fabric_t fabric;
  ep_loads_t loads;
  ep_timing_t timing;
  ep_fs_t zero; /* the earliest start without the fixed part */
  trefoil_sim_op_t *out;
} one_t;

static double toUs(const one_t *o, ep_fs_t t) {
  return (double)(t - o->zero) / EP_FS_PER_US;
}

static double wallSeconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static trefoil_engine_t chooseEngine(const one_t *o) {
  if (o->run->engine != TREFOIL_ENGINE_AUTO) return o->run->engine;
  int isQuick = trefoilSimHasSimGrid() && o->replay->numMoves <= SIMGRID_MOVES;
  return isQuick ? TREFOIL_ENGINE_SIMGRID : TREFOIL_ENGINE_QUEUES;
}

static trefoil_result_t runEngine(one_t *o) {
  trefoil_sim_op_t *out = o->out;
  const trefoil_shape_t *s = &o->sim->shape;
  double begin = wallSeconds();
  if (out->engine == TREFOIL_ENGINE_SIMGRID) {
    double limit = o->run->timeoutS > 0 ? o->run->timeoutS : DEFAULT_TIMEOUT_S;
    EP_TRY(epSimGridRun(o->replay, &o->fabric, s, limit, &o->timing));
  } else {
    EP_TRY(epQueuesRun(o->replay, &o->fabric, &o->timing));
  }
  EP_TRY(epFinishFlags(o->replay, &o->fabric, s, o->timing.finish));
  out->wallS = wallSeconds() - begin;
  double *finishUs = malloc((size_t)s->numRanks * sizeof *finishUs);
  EP_CHECK(finishUs, TREFOIL_SYSTEM_ERROR, "out of memory for %d ranks", s->numRanks);
  out->finishUs = finishUs;
  out->numRanks = s->numRanks;
  ep_fs_t first = INT64_MAX, last = 0;
  for (int r = 0; r < s->numRanks; r++) {
    ep_fs_t t = o->timing.finish[r];
    finishUs[r] = toUs(o, t);
    if (t < first) first = t;
    if (t > last) last = t;
  }
  out->us = toUs(o, last);
  out->firstUs = toUs(o, first);
  return TREFOIL_OK;
}

static trefoil_result_t fillBounds(one_t *o) {
  const trefoil_sim_t *sim = o->sim;
  trefoil_sim_op_t *out = o->out;
  ep_lower_bound_t bound = epLowerBound(&o->loads, &o->fabric, &sim->shape);
  EP_CHECK((double)bound.time < EP_LONGEST_FS, TREFOIL_INVALID_ARGUMENT,
           "the operation would take over %.0f minutes", EP_LONGEST_FS / EP_FS_PER_US / 6e7);
  out->boundUs = toUs(o, bound.time);
  out->boundKind = bound.kind;
  out->boundIndex = bound.index;
  EP_TRY(epPortLoads(o->replay, &sim->shape, o->run->cluster->gpusPerNic, &out->loads));
  return trefoilBound(o->run->cluster, sim->workload.mode, &out->loads, &out->closedForm);
}

static trefoil_result_t fillLinks(one_t *o) {
  int n = 0;
  for (int k = 0; k < TREFOIL_NUM_RESOURCES; k++) {
    for (int i = 0; i < o->fabric.count[k]; i++) n += o->loads.rows[k][i] > 0;
  }
  trefoil_sim_link_t *links = calloc((size_t)n + 1, sizeof *links);
  EP_CHECK(links, TREFOIL_SYSTEM_ERROR, "out of memory for %d links", n);
  o->out->links = links;
  for (int k = 0; k < TREFOIL_NUM_RESOURCES; k++) {
    for (int i = 0; i < o->fabric.count[k]; i++) {
      int64_t rows = o->loads.rows[k][i];
      if (rows == 0) continue;
      trefoil_sim_link_t *link = &links[o->out->numLinks++];
      link->kind = (trefoil_resource_t)k;
      link->index = i;
      link->bytes = (uint64_t)rows * o->replay->rowBytes;
      link->busyUs = (double)(rows * o->fabric.row[k][i]) / EP_FS_PER_US;
      link->share = o->out->us > 0 ? link->busyUs / o->out->us : 0;
    }
  }
  return TREFOIL_OK;
}

static int compareSpans(const void *a, const void *b) {
  const trefoil_sim_span_t *x = a, *y = b;
  if (x->startUs != y->startUs) return x->startUs < y->startUs ? -1 : 1;
  if (x->src != y->src) return x->src < y->src ? -1 : 1;
  return x->dst < y->dst ? -1 : x->dst > y->dst;
}

static trefoil_result_t fillSpans(one_t *o) {
  int64_t n = o->timing.moves ? o->timing.numTimes : 0;
  o->out->leftOutSpans = o->replay->numMoves - n;
  if (n == 0) return TREFOIL_OK;
  trefoil_sim_span_t *spans = calloc((size_t)n, sizeof *spans);
  EP_CHECK(spans, TREFOIL_SYSTEM_ERROR, "out of memory for %lld spans", (long long)n);
  o->out->spans = spans;
  o->out->numSpans = n;
  for (int64_t i = 0; i < n; i++) {
    const ep_move_t *m = &o->replay->moves[i];
    const ep_move_times_t *t = &o->timing.moves[i];
    spans[i] = (trefoil_sim_span_t){.phase = m->phase,
                                    .chunk = m->chunk,
                                    .origin = m->origin,
                                    .src = m->src,
                                    .dst = m->dst,
                                    .tier = m->tier,
                                    .rows = m->rows,
                                    .bytes = (uint64_t)m->rows * o->replay->rowBytes,
                                    .startUs = toUs(o, t->start),
                                    .sentUs = toUs(o, t->sent),
                                    .endUs = toUs(o, t->end)};
  }
  qsort(spans, (size_t)n, sizeof *spans, compareSpans);
  return TREFOIL_OK;
}

static trefoil_result_t prepareTiming(one_t *o) {
  int64_t n = o->run->maxSpans < o->replay->numMoves ? o->run->maxSpans : o->replay->numMoves;
  EP_CHECK(n >= 0, TREFOIL_INVALID_ARGUMENT, "%lld spans: must not be negative", (long long)n);
  o->timing.finish = calloc((size_t)o->sim->shape.numRanks, sizeof *o->timing.finish);
  o->timing.numTimes = n;
  if (n > 0) o->timing.moves = calloc((size_t)n, sizeof *o->timing.moves);
  EP_CHECK(o->timing.finish && (n == 0 || o->timing.moves), TREFOIL_SYSTEM_ERROR,
           "out of memory for %lld spans", (long long)n);
  for (int64_t i = 0; i < n; i++) o->timing.moves[i].start = INT64_MAX;
  return TREFOIL_OK;
}

static trefoil_result_t runOp(one_t *o) {
  EP_TRY(epLoadsCount(&o->loads, o->replay, &o->fabric));
  EP_TRY(fillBounds(o));
  EP_TRY(prepareTiming(o));
  o->out->engine = chooseEngine(o);
  o->out->chunkTokens = o->replay->chunkTokens;
  o->out->numTransfers = o->replay->numPieces;
  EP_TRY(runEngine(o));
  EP_TRY(fillLinks(o));
  return fillSpans(o);
}

static trefoil_result_t simulateOp(const trefoil_sim_t *sim, const trefoil_sim_run_t *run,
                                   trefoil_op_t op, trefoil_sim_op_t *out) {
  one_t o = {.sim = sim, .run = run, .replay = &sim->replay[op], .out = out};
  EP_TRY(epFabricBuild(&o.fabric, sim, run, op));
  o.zero = o.fabric.start[0];
  for (int r = 1; r < o.fabric.numRanks; r++) {
    if (o.fabric.start[r] < o.zero) o.zero = o.fabric.start[r];
  }
  o.zero -= o.fabric.fixed;
  trefoil_result_t result = runOp(&o);
  epFabricFree(&o.fabric);
  epLoadsFree(&o.loads);
  free(o.timing.finish);
  free(o.timing.moves);
  return result;
}

trefoil_result_t trefoilSimRun(trefoil_sim_t *sim, const trefoil_sim_run_t *run,
                               trefoil_sim_result_t *result) {
  EP_CHECK(sim && run && result, TREFOIL_INVALID_ARGUMENT, "the %s is NULL",
           !sim   ? "simulation"
           : !run ? "run"
                  : "output");
  EP_CHECK((unsigned)run->engine <= TREFOIL_ENGINE_QUEUES, TREFOIL_INVALID_ARGUMENT,
           "engine %d: must be in [0, %d]", (int)run->engine, TREFOIL_ENGINE_QUEUES);
  EP_CHECK(run->engine != TREFOIL_ENGINE_SIMGRID || trefoilSimHasSimGrid(), TREFOIL_INVALID_USAGE,
           "this build has no SimGrid (libsimgrid-dev): use the engine of queues");
  trefoil_sim_result_t made;
  memset(&made, 0, sizeof made);
  trefoil_result_t code = simulateOp(sim, run, TREFOIL_OP_DISPATCH, &made.op[0]);
  if (code == TREFOIL_OK) code = simulateOp(sim, run, TREFOIL_OP_COMBINE, &made.op[1]);
  if (code != TREFOIL_OK) {
    forgetOp(&made.op[0]);
    forgetOp(&made.op[1]);
    return code;
  }
  forgetOp(&sim->last.op[0]);
  forgetOp(&sim->last.op[1]);
  sim->last = *result = made;
  return TREFOIL_OK;
}

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
  for (int64_t i = 0; i < r->numPieces; i++) {
    const ep_move_t *m = epMoveOf(r, i);
    if ((phase >= 0 && m->phase != phase) || (tier >= 0 && m->tier != tier)) continue;
    bytes[(size_t)m->src * R + (size_t)m->dst] += (uint64_t)epRowsOf(r, i) * r->rowBytes;
  }
  return TREFOIL_OK;
}
