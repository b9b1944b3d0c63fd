/* The trace object: one block of copies, and for each step the pointers that make a routing. */
#include "trefoil/trace.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "plan/error.h"
#include "plan/trace_object.h"

typedef struct object {
  trefoil_trace_t shown; /* first: the public pointer is the object's */
  int64_t *counts;       /* [steps, R] */
  const int32_t **rows;  /* [steps, R] */
} object_t;

trefoil_result_t epTraceNew(trefoil_trace_t **trace, const trefoil_shape_t *shape, int numSteps,
                            int64_t numTokens, int withWeights) {
  size_t steps = (size_t)numSteps, R = (size_t)shape->numRanks;
  size_t entries = (size_t)numTokens * (size_t)shape->topk;
  object_t *o = calloc(1, sizeof *o);
  EP_CHECK(o, TREFOIL_SYSTEM_ERROR, "out of memory for a trace");
  int64_t *offsets = calloc(steps * (R + 1), sizeof *offsets);
  int32_t *idx = calloc(entries + 1, sizeof *idx);
  float *weights = withWeights ? calloc(entries + 1, sizeof *weights) : NULL;
  o->shown = (trefoil_trace_t){*shape, numSteps, numTokens, offsets, idx, weights, NULL};
  o->counts = calloc(steps * R, sizeof *o->counts);
  o->rows = calloc(steps * R, sizeof *o->rows);
  if (!offsets || !idx || (withWeights && !weights) || !o->counts || !o->rows) {
    trefoilTraceDestroy(&o->shown);
    return epFail(TREFOIL_SYSTEM_ERROR, "out of memory for a trace of %lld tokens",
                  (long long)numTokens);
  }
  *trace = &o->shown;
  return TREFOIL_OK;
}

trefoil_result_t epTraceSetProvenance(trefoil_trace_t *trace, const char *provenance) {
  char *copy = strdup(provenance ? provenance : "{}");
  EP_CHECK(copy, TREFOIL_SYSTEM_ERROR, "out of memory for a trace's provenance");
  free((void *)trace->provenance);
  trace->provenance = copy;
  return TREFOIL_OK;
}

void trefoilTraceDestroy(const trefoil_trace_t *trace) {
  if (!trace) return;
  object_t *o = (object_t *)trace;
  free((void *)o->shown.offsets);
  free((void *)o->shown.topkIdx);
  free((void *)o->shown.topkWeights);
  free((void *)o->shown.provenance);
  free(o->counts);
  free(o->rows);
  free(o);
}

trefoil_result_t epTraceCheckOffsets(const int64_t *offsets, int numSteps, int numRanks,
                                     int64_t numTokens) {
  int64_t at = 0;
  for (int step = 0; step < numSteps; step++) {
    const int64_t *row = offsets + (int64_t)step * (numRanks + 1);
    EP_CHECK(row[0] == at, TREFOIL_INVALID_ARGUMENT,
             "step %d: its first offset is %lld, but %lld rows come before it", step,
             (long long)row[0], (long long)at);
    for (int r = 0; r < numRanks; r++) {
      EP_CHECK(row[r + 1] >= row[r], TREFOIL_INVALID_ARGUMENT,
               "step %d, rank %d: offsets descend from %lld to %lld", step, r, (long long)row[r],
               (long long)row[r + 1]);
    }
    at = row[numRanks];
  }
  EP_CHECK(numTokens < 0 || at == numTokens, TREFOIL_INVALID_ARGUMENT,
           "the offsets end at %lld, but topk_idx has %lld rows", (long long)at,
           (long long)numTokens);
  return TREFOIL_OK;
}

static trefoil_result_t checkWeights(const trefoil_trace_t *t) {
  int K = t->shape.topk;
  for (int64_t i = 0; t->topkWeights && i < t->numTokens * K; i++) {
    EP_CHECK(isfinite(t->topkWeights[i]), TREFOIL_INVALID_ARGUMENT,
             "topk_weights: row %lld, k = %d is %g: weights must be finite", (long long)(i / K),
             (int)(i % K), (double)t->topkWeights[i]);
  }
  return TREFOIL_OK;
}

/* Fills the pointers of all steps and checks every routing. */
trefoil_result_t epTraceFinish(trefoil_trace_t *trace) {
  object_t *o = (object_t *)trace;
  int R = trace->shape.numRanks;
  EP_TRY(checkWeights(trace));
  for (int step = 0; step < trace->numSteps; step++) {
    const int64_t *offsets = trace->offsets + (int64_t)step * (R + 1);
    for (int r = 0; r < R; r++) {
      o->counts[(int64_t)step * R + r] = offsets[r + 1] - offsets[r];
      o->rows[(int64_t)step * R + r] = trace->topkIdx + offsets[r] * trace->shape.topk;
    }
    trefoil_routing_t routing;
    EP_TRY(trefoilTraceRouting(trace, step, &routing));
    trefoil_result_t result = trefoilRoutingCheck(&routing);
    if (result != TREFOIL_OK) return epFail(result, "step %d: %s", step, trefoilLastError());
  }
  return TREFOIL_OK;
}

static trefoil_result_t copyContents(trefoil_trace_t *t, const trefoil_trace_t *from) {
  size_t entries = (size_t)t->numTokens * (size_t)t->shape.topk;
  memcpy((void *)t->offsets, from->offsets,
         (size_t)t->numSteps * ((size_t)t->shape.numRanks + 1) * sizeof *from->offsets);
  if (entries) memcpy((void *)t->topkIdx, from->topkIdx, entries * sizeof *from->topkIdx);
  if (entries && from->topkWeights) {
    memcpy((void *)t->topkWeights, from->topkWeights, entries * sizeof *from->topkWeights);
  }
  EP_TRY(epTraceSetProvenance(t, from->provenance));
  return epTraceFinish(t);
}

trefoil_result_t trefoilTraceCreate(const trefoil_trace_t **trace,
                                    const trefoil_trace_t *contents) {
  EP_CHECK(trace && contents, TREFOIL_INVALID_ARGUMENT, "the %s is NULL",
           trace ? "contents" : "trace's out-parameter");
  EP_TRY(trefoilShapeCheck(&contents->shape));
  EP_CHECK(contents->numSteps >= 1 && contents->offsets, TREFOIL_INVALID_ARGUMENT,
           contents->offsets ? "%d steps: must be at least 1" : "the offsets of %d steps are NULL",
           contents->numSteps);
  int R = contents->shape.numRanks;
  EP_TRY(epTraceCheckOffsets(contents->offsets, contents->numSteps, R, -1));
  int64_t numTokens = contents->offsets[(int64_t)contents->numSteps * (R + 1) - 1];
  EP_CHECK(numTokens == 0 || contents->topkIdx, TREFOIL_INVALID_ARGUMENT,
           "the trace has %lld tokens but its topkIdx is NULL", (long long)numTokens);
  trefoil_trace_t *made;
  EP_TRY(epTraceNew(&made, &contents->shape, contents->numSteps, numTokens,
                    contents->topkWeights != NULL));
  trefoil_result_t result = copyContents(made, contents);
  if (result != TREFOIL_OK) {
    trefoilTraceDestroy(made);
    return result;
  }
  *trace = made;
  return TREFOIL_OK;
}

trefoil_result_t trefoilTraceRouting(const trefoil_trace_t *trace, int step,
                                     trefoil_routing_t *routing) {
  EP_CHECK(trace && routing, TREFOIL_INVALID_ARGUMENT, "the %s is NULL",
           trace ? "routing" : "trace");
  EP_CHECK(step >= 0 && step < trace->numSteps, TREFOIL_INVALID_ARGUMENT,
           "step %d: the trace has %d", step, trace->numSteps);
  const object_t *o = (const object_t *)trace;
  int64_t first = (int64_t)step * trace->shape.numRanks;
  *routing = (trefoil_routing_t){trace->shape, o->counts + first, o->rows + first};
  return TREFOIL_OK;
}

const float *trefoilTraceWeights(const trefoil_trace_t *trace, int step, int rank) {
  if (!trace || !trace->topkWeights || step < 0 || step >= trace->numSteps) return NULL;
  if (rank < 0 || rank >= trace->shape.numRanks) return NULL;
  int64_t row = trace->offsets[(int64_t)step * (trace->shape.numRanks + 1) + rank];
  return trace->topkWeights + row * trace->shape.topk;
}
