/* Redundant experts: each entry of a trace takes one of the physical copies of its expert. */
#include "trefoil/trace.h"

#include <stdlib.h>
#include <string.h>

#include "plan/error.h"
#include "plan/philox.h"
#include "plan/trace_object.h"

/* Copies of expert e: e, e + E, ... below physical; one of them, each alike. Entry i alone fixes
 * which, so that a row does not depend on how many others there are. */
static void choose(const trefoil_trace_t *from, int physical, uint64_t seed, int32_t *out) {
  int E = from->shape.numExperts;
  for (int64_t i = 0; i < from->numTokens * from->shape.topk; i++) {
    int32_t e = from->topkIdx[i];
    if (e < 0) {
      out[i] = -1;
      continue;
    }
    int copies = (physical - e + E - 1) / E;
    ep_philox_t p = epPhilox(seed, (uint32_t)i, (uint32_t)((uint64_t)i >> 32), 0, UINT32_MAX);
    out[i] = e + E * (int32_t)((uint64_t)p.word[0] * (uint32_t)copies >> 32);
  }
}

static trefoil_result_t fill(trefoil_trace_t *t, const trefoil_trace_t *from, uint64_t seed) {
  size_t offsets = (size_t)t->numSteps * ((size_t)t->shape.numRanks + 1);
  memcpy((void *)t->offsets, from->offsets, offsets * sizeof *t->offsets);
  choose(from, t->shape.numExperts, seed, (int32_t *)t->topkIdx);
  if (from->topkWeights) {
    memcpy((void *)t->topkWeights, from->topkWeights,
           (size_t)(t->numTokens * t->shape.topk) * sizeof *t->topkWeights);
  }
  EP_TRY(epTraceSetProvenance(t, from->provenance));
  return epTraceFinish(t);
}

trefoil_result_t trefoilTraceCopies(const trefoil_trace_t **trace, const trefoil_trace_t *from,
                                    int physicalExperts, uint64_t seed) {
  EP_CHECK(trace && from, TREFOIL_INVALID_ARGUMENT, "the %s is NULL",
           trace ? "trace to copy from" : "trace's out-parameter");
  EP_CHECK(physicalExperts >= from->shape.numExperts && physicalExperts <= TREFOIL_MAX_EXPERTS,
           TREFOIL_INVALID_ARGUMENT,
           "%d physical experts: must be at least the trace's %d and at most %d", physicalExperts,
           from->shape.numExperts, TREFOIL_MAX_EXPERTS);
  trefoil_shape_t shape = from->shape;
  shape.numExperts = physicalExperts;
  trefoil_trace_t *t;
  EP_TRY(epTraceNew(&t, &shape, from->numSteps, from->numTokens, from->topkWeights != NULL));
  trefoil_result_t result = fill(t, from, seed);
  if (result != TREFOIL_OK) {
    trefoilTraceDestroy(t);
    return result;
  }
  *trace = t;
  return TREFOIL_OK;
}
