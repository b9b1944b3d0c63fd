/* From arrays to a trace. Every size is checked against the data that is really there before
 * anything is allocated by it: a file of a few bytes can make no large trace. */
#include "plan/trace_import.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plan/error.h"
#include "plan/trace_object.h"

typedef struct import {
  const ep_trace_parts_t *parts;
  trefoil_trace_hints_t hints;
  trefoil_shape_t shape;
  int64_t numTokens;
  int numSteps;
  int64_t *offsets; /* [steps, R + 1] */
} import_t;

/* value = what the file states, what the hint says, or fallback (0: needed). */
static trefoil_result_t merge(const import_t *m, const char *what, const int64_t *sources,
                              int64_t *value) {
  int64_t stated = sources[0], hinted = sources[1], fallback = sources[2];
  EP_CHECK(!stated || !hinted || stated == hinted, TREFOIL_INVALID_ARGUMENT,
           "%s: states %lld %s, but %lld are asked for", m->parts->name, (long long)stated, what,
           (long long)hinted);
  *value = stated ? stated : hinted ? hinted : fallback;
  EP_CHECK(*value, TREFOIL_INVALID_ARGUMENT, "%s: does not state the number of %s: say it",
           m->parts->name, what);
  return TREFOIL_OK;
}

/* Agrees with the file's own statement, if it makes one. */
static trefoil_result_t agree(const import_t *m, const char *what, int64_t stated, int64_t found) {
  EP_CHECK(!stated || stated == found, TREFOIL_INVALID_ARGUMENT,
           "%s: its metadata states %lld %s, its arrays have %lld", m->parts->name,
           (long long)stated, what, (long long)found);
  return TREFOIL_OK;
}

static trefoil_result_t checkRange(const import_t *m, const char *what, int64_t value,
                                   int64_t most) {
  EP_CHECK(value >= 1 && value <= most, TREFOIL_INVALID_ARGUMENT,
           "%s: %lld %s: must be in [1, %lld]", m->parts->name, (long long)value, what,
           (long long)most);
  return TREFOIL_OK;
}

static trefoil_result_t setSizes(import_t *m, int64_t numSteps, int64_t numRanks) {
  EP_TRY(checkRange(m, "steps", numSteps, INT32_MAX));
  EP_TRY(checkRange(m, "ranks", numRanks, TREFOIL_MAX_RANKS));
  EP_TRY(agree(m, "ranks", m->parts->numRanks, numRanks));
  EP_TRY(agree(m, "steps", m->parts->numSteps, numSteps));
  EP_CHECK(!m->hints.numRanks || m->hints.numRanks == numRanks, TREFOIL_INVALID_ARGUMENT,
           "%s: has %lld ranks, but %d are asked for", m->parts->name, (long long)numRanks,
           m->hints.numRanks);
  m->numSteps = (int)numSteps;
  m->shape.numRanks = (int)numRanks;
  m->offsets = calloc((size_t)numSteps * ((size_t)numRanks + 1), sizeof *m->offsets);
  EP_CHECK(m->offsets, TREFOIL_SYSTEM_ERROR, "out of memory for the offsets of %lld steps",
           (long long)numSteps);
  return TREFOIL_OK;
}

static trefoil_result_t takeOffsets(import_t *m) {
  const ep_npy_t *o = m->parts->offsets;
  EP_CHECK(o->numDims <= 2 && o->numItems > 0, TREFOIL_INVALID_ARGUMENT,
           "%s: offsets must be [steps, ranks + 1]", m->parts->name);
  EP_TRY(setSizes(m, o->numDims == 2 ? o->dims[0] : 1, o->dims[o->numDims - 1] - 1));
  EP_TRY(epNpyInts("offsets", o, m->offsets));
  trefoil_result_t result =
      epTraceCheckOffsets(m->offsets, m->numSteps, m->shape.numRanks, m->numTokens);
  if (result != TREFOIL_OK) return epFail(result, "%s: %s", m->parts->name, trefoilLastError());
  return TREFOIL_OK;
}

/* Blocks of perRank tokens each. */
static void cutEvenly(import_t *m, int64_t perRank) {
  int R = m->shape.numRanks;
  for (int64_t i = 0; i < (int64_t)m->numSteps * (R + 1); i++) {
    m->offsets[i] = (i / (R + 1) * R + i % (R + 1)) * perRank;
  }
}

static trefoil_result_t cutByShape(import_t *m) {
  const ep_npy_t *idx = m->parts->idx;
  const int64_t *dims = idx->dims + (idx->numDims == 4);
  EP_CHECK(idx->numItems > 0, TREFOIL_INVALID_ARGUMENT, "%s: an array with no tokens",
           m->parts->name);
  EP_TRY(setSizes(m, idx->numDims == 4 ? idx->dims[0] : 1, dims[0]));
  cutEvenly(m, dims[1]);
  return TREFOIL_OK;
}

/* "512 rows cannot be cut alike over 7 ranks: 1, 2, 4, 8, ... ranks can" */
static trefoil_result_t failUneven(const import_t *m, int64_t R) {
  char can[160] = "";
  int found = 0;
  for (int64_t r = 1; r <= TREFOIL_MAX_RANKS && r <= m->numTokens; r++) {
    size_t used = strlen(can);
    if (m->numTokens % r) continue;
    if (++found <= 16)
      snprintf(can + used, sizeof can - used, "%s%lld", used ? ", " : "", (long long)r);
  }
  return epFail(TREFOIL_INVALID_ARGUMENT,
                "%s: topk_idx: %lld rows cannot be cut alike over %lld ranks; %s%s ranks can, and "
                "any number with an array offsets",
                m->parts->name, (long long)m->numTokens, (long long)R, can,
                found > 16 ? ", ..." : "");
}

static trefoil_result_t cutByHints(import_t *m) {
  int64_t R, perRank = m->hints.tokensPerRank, numSteps = 1;
  EP_TRY(merge(m, "ranks", (int64_t[]){m->parts->numRanks, m->hints.numRanks, 0}, &R));
  EP_TRY(checkRange(m, "ranks", R, TREFOIL_MAX_RANKS));
  EP_CHECK(m->numTokens > 0, TREFOIL_INVALID_ARGUMENT, "%s: topk_idx has no rows", m->parts->name);
  if (perRank) {
    EP_CHECK(perRank > 0 && perRank <= TREFOIL_MAX_TOKENS && m->numTokens % (R * perRank) == 0,
             TREFOIL_INVALID_ARGUMENT,
             "%s: %lld rows are not a number of steps of %lld ranks with %lld tokens each",
             m->parts->name, (long long)m->numTokens, (long long)R, (long long)perRank);
    numSteps = m->numTokens / (R * perRank);
  } else {
    if (m->numTokens % R) return failUneven(m, R);
    perRank = m->numTokens / R;
  }
  EP_TRY(setSizes(m, numSteps, R));
  cutEvenly(m, perRank);
  return TREFOIL_OK;
}

static trefoil_result_t takeShape(import_t *m) {
  const ep_trace_parts_t *p = m->parts;
  int64_t G, E, N, most = 1, R = m->shape.numRanks;
  for (int64_t i = 0; i < (int64_t)m->numSteps * (R + 1); i++) {
    if (i % (R + 1) == 0) continue;
    if (m->offsets[i] - m->offsets[i - 1] > most) most = m->offsets[i] - m->offsets[i - 1];
  }
  EP_TRY(merge(m, "ranks per node",
               (int64_t[]){p->ranksPerNode, m->hints.ranksPerNode, R % 8 ? R : 8}, &G));
  EP_TRY(merge(m, "experts", (int64_t[]){p->numExperts, m->hints.numExperts, 0}, &E));
  EP_TRY(
      merge(m, "tokens a rank may have", (int64_t[]){p->maxTokens, m->hints.maxTokens, most}, &N));
  EP_TRY(checkRange(m, "ranks per node", G, R));
  EP_TRY(checkRange(m, "experts", E, TREFOIL_MAX_EXPERTS));
  m->shape.ranksPerNode = (int)G;
  m->shape.numExperts = (int)E;
  m->shape.maxTokens = N;
  return trefoilShapeCheck(&m->shape);
}

static trefoil_result_t fill(const import_t *m, trefoil_trace_t *t) {
  memcpy((void *)t->offsets, m->offsets,
         (size_t)m->numSteps * ((size_t)m->shape.numRanks + 1) * sizeof *m->offsets);
  EP_TRY(epNpyInts32("topk_idx", m->parts->idx, (int32_t *)t->topkIdx));
  if (t->topkWeights)
    EP_TRY(epNpyFloats("topk_weights", m->parts->weights, (float *)t->topkWeights));
  EP_TRY(epTraceSetProvenance(t, m->parts->provenance));
  return epTraceFinish(t);
}

static trefoil_result_t checkArrays(import_t *m) {
  const ep_npy_t *idx = m->parts->idx, *w = m->parts->weights;
  EP_CHECK(idx->numDims >= 2, TREFOIL_INVALID_ARGUMENT,
           "%s: topk_idx must be [T, K], [R, B, K] or [steps, R, B, K]", m->parts->name);
  EP_CHECK(idx->kind != 'f', TREFOIL_INVALID_ARGUMENT,
           "%s: topk_idx: holds floats, but integers are wanted here", m->parts->name);
  int64_t K = idx->dims[idx->numDims - 1];
  EP_TRY(checkRange(m, "entries of a row", K, TREFOIL_MAX_TOPK));
  EP_TRY(agree(m, "entries of a row", m->parts->topk, K));
  m->shape.topk = (int)K;
  m->numTokens = idx->numItems / K;
  if (!w) return TREFOIL_OK;
  int same = w->numDims == idx->numDims &&
             !memcmp(w->dims, idx->dims, (size_t)idx->numDims * sizeof *idx->dims);
  EP_CHECK(same, TREFOIL_INVALID_ARGUMENT, "%s: topk_weights and topk_idx differ in shape",
           m->parts->name);
  EP_CHECK(w->kind == 'f' && w->itemBytes >= 4, TREFOIL_INVALID_ARGUMENT,
           "%s: topk_weights: float32 or float64 is wanted here", m->parts->name);
  return TREFOIL_OK;
}

static trefoil_result_t import(import_t *m, trefoil_trace_t **made) {
  EP_TRY(checkArrays(m));
  if (m->parts->offsets) {
    EP_TRY(takeOffsets(m));
  } else if (m->parts->idx->numDims > 2) {
    EP_TRY(cutByShape(m));
  } else {
    EP_TRY(cutByHints(m));
  }
  EP_TRY(takeShape(m));
  EP_TRY(epTraceNew(made, &m->shape, m->numSteps, m->numTokens, m->parts->weights != NULL));
  trefoil_result_t result = fill(m, *made);
  if (result != TREFOIL_OK) return epFail(result, "%s: %s", m->parts->name, trefoilLastError());
  return TREFOIL_OK;
}

trefoil_result_t epTraceImport(const trefoil_trace_t **trace, const ep_trace_parts_t *parts,
                               const trefoil_trace_hints_t *hints) {
  import_t m = {.parts = parts};
  if (hints) m.hints = *hints;
  trefoil_trace_t *made = NULL;
  trefoil_result_t result = import(&m, &made);
  free(m.offsets);
  if (result != TREFOIL_OK) {
    trefoilTraceDestroy(made);
    return result;
  }
  *trace = made;
  return TREFOIL_OK;
}
