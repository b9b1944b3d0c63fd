/* A run: replays both operations on a fabric with one of the engines and puts the floors beside. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "plan/error.h"
#include "sim/engine.h"
#include "sim/resource_loads.h"

#define SIMGRID_MOVES ((int64_t)1 << 11) /* under a second of SimGrid; AUTO takes queues above */
enum { DEFAULT_TIMEOUT_S = 600 };

/* ---- One operation ----------------------------------------------------------------------------- */

typedef struct one {
  const trefoil_sim_t *sim;
  const trefoil_sim_run_t *run;
  const ep_replay_t *replay;
  ep_fabric_t fabric;
  ep_loads_t loads;
  ep_timing_t timing;
  ep_fs_t zero; /* the earliest call */
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
  double limit = o->run->timeoutS > 0 ? o->run->timeoutS : DEFAULT_TIMEOUT_S;
  if (out->engine == TREFOIL_ENGINE_SIMGRID) {
    EP_TRY(epSimGridRun(o->replay, &o->fabric, s, limit, &o->timing));
  } else if (out->engine == TREFOIL_ENGINE_FAIR) {
    EP_TRY(epFairRun(o->replay, &o->fabric, limit, &o->timing, &out->numFlows, &out->numUnlike));
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

static trefoil_result_t fillFloor(one_t *o) {
  const trefoil_sim_t *sim = o->sim;
  trefoil_sim_op_t *out = o->out;
  ep_floor_t least = epFloor(&o->loads, &o->fabric, &sim->shape);
  EP_CHECK((double)least.time < EP_LONGEST_FS, TREFOIL_INVALID_ARGUMENT,
           "the operation would take over %.0f minutes", EP_LONGEST_FS / EP_FS_PER_US / 6e7);
  out->floorUs = toUs(o, least.time);
  out->floorKind = least.kind;
  out->floorIndex = least.index;
  EP_TRY(epPortLoads(o->replay, &sim->shape, o->run->cluster->gpusPerNic, &out->loads));
  return trefoilClosedForm(o->run->cluster, sim->workload.mode, &out->loads, &out->closedForm);
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
  EP_TRY(fillFloor(o));
  EP_TRY(prepareTiming(o));
  o->out->engine = chooseEngine(o);
  o->out->chunkTokens = o->replay->chunkTokens;
  o->out->numTransfers = o->replay->numSegments;
  EP_TRY(runEngine(o));
  EP_TRY(fillLinks(o));
  return fillSpans(o);
}

static trefoil_result_t simulateOp(const trefoil_sim_t *sim, const trefoil_sim_run_t *run,
                                   trefoil_op_t op, trefoil_sim_op_t *out) {
  one_t o = {.sim = sim, .run = run, .replay = &sim->replay[op], .out = out};
  EP_TRY(epFabricBuild(&o.fabric, sim, run, op));
  o.zero = o.fabric.called;
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
  EP_CHECK((unsigned)run->engine <= TREFOIL_ENGINE_FAIR, TREFOIL_INVALID_ARGUMENT,
           "engine %d: must be in [0, %d]", (int)run->engine, TREFOIL_ENGINE_FAIR);
  EP_CHECK(run->engine != TREFOIL_ENGINE_SIMGRID || trefoilSimHasSimGrid(), TREFOIL_INVALID_USAGE,
           "this build has no SimGrid (libsimgrid-dev): use the engine of queues");
  trefoil_sim_result_t made;
  memset(&made, 0, sizeof made);
  trefoil_result_t code = simulateOp(sim, run, TREFOIL_OP_DISPATCH, &made.op[0]);
  if (code == TREFOIL_OK) code = simulateOp(sim, run, TREFOIL_OP_COMBINE, &made.op[1]);
  if (code != TREFOIL_OK) {
    epSimForget(&made.op[0]);
    epSimForget(&made.op[1]);
    return code;
  }
  epSimForget(&sim->last.op[0]);
  epSimForget(&sim->last.op[1]);
  sim->last = *result = made;
  return TREFOIL_OK;
}
