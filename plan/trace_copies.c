/* Redundant experts: each entry of a trace takes one of the physical copies of its expert. */
#include "trefoil/trace.h"

#include <stdlib.h>
#include <string.h>

#include "plan/error.h"
#include "plan/philox.h"
#include "plan/place_copies.h"
#include "plan/trace_object.h"

/* One of the copies, each alike. Entry i alone fixes which, so that a row does not depend on how
 * many others there are. */
static void choose(const trefoil_trace_t *from, const ep_copies_t *of, uint64_t seed,
                   int32_t *out) {
  for (int64_t i = 0; i < from->numTokens * from->shape.topk; i++) {
    int32_t e = from->topkIdx[i];
    if (e < 0) {
      out[i] = -1;
      continue;
    }
    uint32_t n = (uint32_t)(of->first[e + 1] - of->first[e]);
    ep_philox_t p = epPhilox(seed, (uint32_t)i, (uint32_t)((uint64_t)i >> 32), 0, UINT32_MAX);
    out[i] = of->physical[of->first[e] + (int)((uint64_t)p.word[0] * n >> 32)];
  }
}

static trefoil_result_t fill(trefoil_trace_t *t, const trefoil_trace_t *from, const ep_copies_t *of,
                             uint64_t seed) {
  size_t offsets = (size_t)t->numSteps * ((size_t)t->shape.numRanks + 1);
  memcpy((void *)t->offsets, from->offsets, offsets * sizeof *t->offsets);
  choose(from, of, seed, (int32_t *)t->topkIdx);
  if (from->topkWeights) {
    memcpy((void *)t->topkWeights, from->topkWeights,
           (size_t)(t->numTokens * t->shape.topk) * sizeof *t->topkWeights);
  }
  EP_TRY(epTraceSetProvenance(t, from->provenance));
  return epTraceFinish(t);
}

/* Expert e has e, e + E, ... below physical. */
static void inTurn(int experts, int physical, const ep_copies_t *of) {
  for (int e = 0, n = 0; e < experts; e++) {
    of->first[e] = n;
    for (int p = e; p < physical; p += experts) of->physical[n++] = p;
    of->first[e + 1] = n;
  }
}

/* ---- Traces with copies ---- */

static trefoil_result_t make(const trefoil_trace_t **trace, const trefoil_trace_t *from,
                             int physical, const ep_copies_t *of, uint64_t seed) {
  trefoil_shape_t shape = from->shape;
  shape.numExperts = physical;
  trefoil_trace_t *t;
  EP_TRY(epTraceNew(&t, &shape, from->numSteps, from->numTokens, from->topkWeights != NULL));
  trefoil_result_t result = fill(t, from, of, seed);
  if (result != TREFOIL_OK) {
    trefoilTraceDestroy(t);
    return result;
  }
  *trace = t;
  return TREFOIL_OK;
}

/* byLoad NULL: in turn. */
static trefoil_result_t withCopies(const trefoil_trace_t **trace, const trefoil_trace_t *from,
                                   int physical, uint64_t seed, const trefoil_placement_t *byLoad) {
  EP_CHECK(trace && from, TREFOIL_INVALID_ARGUMENT, "the %s is NULL",
           trace ? "trace to copy from" : "trace's out-parameter");
  int E = from->shape.numExperts;
  EP_CHECK(physical >= E && physical <= TREFOIL_MAX_EXPERTS, TREFOIL_INVALID_ARGUMENT,
           "%d physical experts: must be at least the trace's %d and at most %d", physical, E,
           TREFOIL_MAX_EXPERTS);
  ep_copies_t of;
  of.first = malloc(((size_t)E + 1 + (size_t)physical) * sizeof *of.first);
  EP_CHECK(of.first, TREFOIL_SYSTEM_ERROR, "out of memory for %d physical experts", physical);
  of.physical = of.first + E + 1;
  trefoil_result_t result = TREFOIL_OK;
  if (byLoad) {
    result = epPlaceCopies(from, byLoad, &of);
  } else {
    inTurn(E, physical, &of);
  }
  if (result == TREFOIL_OK) result = make(trace, from, physical, &of, seed);
  free(of.first);
  return result;
}

trefoil_result_t trefoilTraceCopies(const trefoil_trace_t **trace, const trefoil_trace_t *from,
                                    int physicalExperts, uint64_t seed) {
  return withCopies(trace, from, physicalExperts, seed, NULL);
}

trefoil_result_t trefoilTracePlaced(const trefoil_trace_t **trace, const trefoil_trace_t *from,
                                    const trefoil_placement_t *how) {
  EP_CHECK(how, TREFOIL_INVALID_ARGUMENT, "the placement is NULL");
  return withCopies(trace, from, how->physicalExperts, how->seed, how);
}
