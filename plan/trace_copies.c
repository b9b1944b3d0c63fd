/* Redundant experts: each entry of a trace takes one of the physical copies of its expert. */
#include "trefoil/trace.h"

#include <stdlib.h>
#include <string.h>

#include "plan/error.h"
#include "plan/philox.h"
#include "plan/trace_object.h"

/* Which physical experts are copies of which expert: of e those at [first[e], first[e + 1]). */
typedef struct copies {
  int *first, *physical;
} copies_t;

/* One of the copies, each alike. Entry i alone fixes which, so that a row does not depend on how
 * many others there are. */
static void choose(const trefoil_trace_t *from, const copies_t *of, uint64_t seed, int32_t *out) {
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

static trefoil_result_t fill(trefoil_trace_t *t, const trefoil_trace_t *from, const copies_t *of,
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

/* ---- Where copies are ---- */

/* Expert e has e, e + E, ... below physical. */
static void inTurn(int experts, int physical, const copies_t *of) {
  for (int e = 0, n = 0; e < experts; e++) {
    of->first[e] = n;
    for (int p = e; p < physical; p += experts) of->physical[n++] = p;
    of->first[e + 1] = n;
  }
}

/* An expert's share of the load: what one copy has. */
typedef struct share {
  double load;
  int expert, copies;
} share_t;

static int busierFirst(const void *a, const void *b) {
  const share_t *x = a, *y = b;
  if (x->load != y->load) return x->load > y->load ? -1 : 1;
  return x->expert - y->expert;
}

/* Entries of each expert in all steps. */
static void measure(const trefoil_trace_t *from, share_t *shares) {
  for (int e = 0; e < from->shape.numExperts; e++) shares[e] = (share_t){0, e, 1};
  for (int64_t i = 0; i < from->numTokens * from->shape.topk; i++)
    if (from->topkIdx[i] >= 0) shares[from->topkIdx[i]].load += 1;
}

/* Turns the loads into those of a copy. */
static void replicate(share_t *shares, int experts, int more) {
  for (; more > 0; more--) {
    share_t *most = shares;
    for (int e = 1; e < experts; e++)
      if (shares[e].load > most->load) most = &shares[e];
    most->load *= (double)most->copies / (most->copies + 1);
    most->copies++;
  }
}

typedef struct rank {
  double load;
  int used, last; /* slots, and the expert that was placed here last */
} rank_t;

/* The least load with room; without a copy of this expert if one is left. */
static int rankFor(const rank_t *ranks, int R, int room, int expert) {
  int found = -1;
  for (int r = 0; r < R; r++) {
    if (ranks[r].used == room) continue;
    int has = ranks[r].last == expert, had = found >= 0 && ranks[found].last == expert;
    if (found < 0 || has < had || (has == had && ranks[r].load < ranks[found].load)) found = r;
  }
  return found;
}

static void place(share_t *shares, int experts, rank_t *ranks, int R, int room,
                  const copies_t *of) {
  of->first[0] = 0;
  for (int e = 0; e < experts; e++) of->first[e + 1] = of->first[e] + shares[e].copies;
  for (int r = 0; r < R; r++) ranks[r] = (rank_t){0, 0, -1};
  qsort(shares, (size_t)experts, sizeof *shares, busierFirst);
  for (int i = 0; i < experts; i++) {
    int e = shares[i].expert;
    for (int j = 0; j < shares[i].copies; j++) {
      int r = rankFor(ranks, R, room, e);
      of->physical[of->first[e] + j] = r * room + ranks[r].used++;
      ranks[r].load += shares[i].load;
      ranks[r].last = e;
    }
  }
}

static trefoil_result_t byLoad(const trefoil_trace_t *from, int physical, const copies_t *of) {
  int E = from->shape.numExperts, R = from->shape.numRanks;
  EP_CHECK(physical % R == 0, TREFOIL_INVALID_ARGUMENT,
           "%d physical experts by load: must be a multiple of the %d ranks", physical, R);
  share_t *shares = malloc((size_t)E * sizeof *shares);
  rank_t *ranks = malloc((size_t)R * sizeof *ranks);
  trefoil_result_t result = TREFOIL_SYSTEM_ERROR;
  if (shares && ranks) {
    measure(from, shares);
    replicate(shares, E, physical - E);
    place(shares, E, ranks, R, physical / R, of);
    result = TREFOIL_OK;
  }
  free(shares);
  free(ranks);
  return result == TREFOIL_OK ? result
                              : epFail(result, "out of memory for the loads of %d experts", E);
}

/* ---- Traces with copies ---- */

static trefoil_result_t make(const trefoil_trace_t **trace, const trefoil_trace_t *from,
                             int physical, const copies_t *of, uint64_t seed) {
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

static trefoil_result_t withCopies(const trefoil_trace_t **trace, const trefoil_trace_t *from,
                                   int physical, uint64_t seed, int isByLoad) {
  EP_CHECK(trace && from, TREFOIL_INVALID_ARGUMENT, "the %s is NULL",
           trace ? "trace to copy from" : "trace's out-parameter");
  int E = from->shape.numExperts;
  EP_CHECK(physical >= E && physical <= TREFOIL_MAX_EXPERTS, TREFOIL_INVALID_ARGUMENT,
           "%d physical experts: must be at least the trace's %d and at most %d", physical, E,
           TREFOIL_MAX_EXPERTS);
  copies_t of;
  of.first = malloc(((size_t)E + 1 + (size_t)physical) * sizeof *of.first);
  EP_CHECK(of.first, TREFOIL_SYSTEM_ERROR, "out of memory for %d physical experts", physical);
  of.physical = of.first + E + 1;
  trefoil_result_t result = TREFOIL_OK;
  if (isByLoad) {
    result = byLoad(from, physical, &of);
  } else {
    inTurn(E, physical, &of);
  }
  if (result == TREFOIL_OK) result = make(trace, from, physical, &of, seed);
  free(of.first);
  return result;
}

trefoil_result_t trefoilTraceCopies(const trefoil_trace_t **trace, const trefoil_trace_t *from,
                                    int physicalExperts, uint64_t seed) {
  return withCopies(trace, from, physicalExperts, seed, 0);
}

trefoil_result_t trefoilTracePlaced(const trefoil_trace_t **trace, const trefoil_trace_t *from,
                                    int physicalExperts, uint64_t seed) {
  return withCopies(trace, from, physicalExperts, seed, 1);
}
