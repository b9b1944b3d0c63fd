/* Generated routing. Every number is drawn by its position: Philox over (token, rank, step, what),
 * keyed by the seed, so any row can be made alone and none depends on the others.
 *
 * Experts have integer weights; a draw picks a point below their sum and finds the expert by binary
 * search in the running sums. A row draws without replacement: an expert drawn before is drawn
 * again, a bounded number of times, then the point is taken among the weights that are left, by
 * a walk over all experts. Both give the same distribution. Where the weights that are left are all
 * zero the rest of the row is unused. */
#include "trefoil/trace.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "plan/error.h"
#include "plan/philox.h"
#include "plan/trace_object.h"

enum {
  DRAW_EXPERT,
  DRAW_UNUSED,
  DRAW_WEIGHT,
  DRAW_COUNT,
  DRAW_ORDER,
  DRAW_EMPTY,
  DRAW_GROUP,
  DRAW_MASKED
};
enum { MAX_TRIES = 32, WEIGHT_BITS = 20 };

typedef struct generator {
  const trefoil_trace_spec_t *spec;
  double *weights; /* [E] */
  uint64_t *sums;  /* [E + 1] running sums of the experts' weights */
  int32_t *order;  /* [max(E, R)] scratch */
  char *isOpen;    /* [numGroups] scratch: the row's groups */
} generator_t;

/* 64 random bits at a position; n counts the draws of one kind. */
static uint64_t draw(const generator_t *g, int kind, int step, int rank, int64_t token, int n) {
  ep_philox_t p = epPhilox(g->spec->seed, (uint32_t)token, (uint32_t)rank, (uint32_t)step,
                           (uint32_t)kind << 28 | (uint32_t)n);
  return (uint64_t)p.word[0] << 32 | p.word[1];
}
static double toUnit(uint64_t bits) {
  return (double)(bits >> 11) * 0x1p-53;
}
static uint64_t toBelow(uint64_t bits, uint64_t n) {
  return (uint64_t)((unsigned __int128)bits * n >> 64);
}

/* A seeded order of n things, the same for the whole trace (step -1) or of one step. */
static void shuffle(const generator_t *g, int kind, int step, int n) {
  for (int i = 0; i < n; i++) g->order[i] = i;
  for (int i = n - 1; i > 0; i--) {
    int j = (int)toBelow(draw(g, kind, step, 0, i, 0), (uint64_t)i + 1);
    int32_t kept = g->order[i];
    g->order[i] = g->order[j];
    g->order[j] = kept;
  }
}

static void weighExperts(generator_t *g) {
  const trefoil_trace_spec_t *s = g->spec;
  int E = s->shape.numExperts;
  shuffle(g, DRAW_ORDER, -1, E);
  for (int i = 0; i < E; i++) {
    int e = s->popularity == TREFOIL_POPULARITY_ZIPF ? g->order[i] : i;
    int isHot = s->popularity == TREFOIL_POPULARITY_HOT_EXPERT
                    ? e == s->hot
                    : s->popularity == TREFOIL_POPULARITY_HOT_RANK &&
                          trefoilRankOfExpert(&s->shape, e) == s->hot;
    g->weights[e] = isHot ? s->skew : 1.0;
    if (s->popularity == TREFOIL_POPULARITY_ZIPF) g->weights[e] = pow(i + 1, -s->skew);
  }
  g->sums[0] = 0;
  for (int e = 0; e < E; e++) { /* in parts of 2^-20: E * 1e6 * 2^20 stays below 2^61 */
    g->sums[e + 1] = g->sums[e] + (uint64_t)llround(ldexp(g->weights[e], WEIGHT_BITS));
  }
}

static int findExpert(const generator_t *g, uint64_t point) {
  if (g->spec->popularity == TREFOIL_POPULARITY_UNIFORM) return (int)(point >> WEIGHT_BITS);
  int low = 0, high = g->spec->shape.numExperts - 1; /* sums[e] <= point < sums[e + 1] */
  while (low < high) {
    int middle = low + (high - low) / 2;
    if (g->sums[middle + 1] <= point) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

static int isDrawn(const int32_t *row, int k, int32_t expert) {
  for (int j = 0; j < k; j++) {
    if (row[j] == expert) return 1;
  }
  return 0;
}

static int groupOf(const generator_t *g, int32_t expert) {
  return expert / (g->spec->shape.numExperts / g->spec->numGroups);
}
static uint64_t groupWeight(const generator_t *g, int group) {
  int size = g->spec->shape.numExperts / g->spec->numGroups;
  return g->sums[(group + 1) * size] - g->sums[group * size];
}
static int isClosed(const generator_t *g, int32_t expert) {
  return g->spec->numGroups > 0 && !g->isOpen[groupOf(g, expert)];
}

/* The group of a point in the sum of the weights of those that are not open yet; -1: all weigh 0. */
static int drawGroupAmongRest(const generator_t *g, uint64_t bits) {
  uint64_t rest = 0;
  for (int i = 0; i < g->spec->numGroups; i++) rest += g->isOpen[i] ? 0 : groupWeight(g, i);
  uint64_t point = toBelow(bits, rest);
  for (int i = 0; i < g->spec->numGroups && rest > 0; i++) {
    if (g->isOpen[i]) continue;
    if (point < groupWeight(g, i)) return i;
    point -= groupWeight(g, i);
  }
  return -1;
}

/* The groups that a row's experts may be of. */
static void openGroups(const generator_t *g, int step, int rank, int64_t token) {
  const trefoil_trace_spec_t *s = g->spec;
  memset(g->isOpen, 0, (size_t)s->numGroups);
  for (int i = 0; i < s->topkGroups; i++) {
    int group = drawGroupAmongRest(g, draw(g, DRAW_GROUP, step, rank, token, i));
    if (group >= 0) g->isOpen[group] = 1;
  }
}

/* One expert among those not in row[0, k): the point's place in the sum of their weights. */
static int32_t drawAmongRest(const generator_t *g, const int32_t *row, int k, uint64_t bits) {
  uint64_t rest = g->sums[g->spec->shape.numExperts];
  for (int i = 0; i < g->spec->numGroups; i++) rest -= g->isOpen[i] ? 0 : groupWeight(g, i);
  for (int j = 0; j < k; j++) {
    if (row[j] >= 0) rest -= g->sums[row[j] + 1] - g->sums[row[j]];
  }
  if (rest == 0) return -1;
  uint64_t point = toBelow(bits, rest);
  for (int32_t e = 0; e < g->spec->shape.numExperts; e++) {
    if (isClosed(g, e) || isDrawn(row, k, e)) continue;
    uint64_t w = g->sums[e + 1] - g->sums[e];
    if (point < w) return e;
    point -= w;
  }
  return -1;
}

static void drawRow(const generator_t *g, int step, int rank, int64_t token, int32_t *row) {
  const trefoil_trace_spec_t *s = g->spec;
  int n = 0;
  if (s->numGroups > 0) openGroups(g, step, rank, token);
  for (int k = 0; k < s->shape.topk; k++) {
    row[k] = -1;
    if (s->unusedFraction > 0 &&
        toUnit(draw(g, DRAW_UNUSED, step, rank, token, k)) < s->unusedFraction) {
      continue;
    }
    uint64_t all = g->sums[s->shape.numExperts], bits = 0;
    int32_t expert = -1;
    for (int tries = 0; tries < MAX_TRIES && all > 0 && expert < 0; tries++) {
      bits = draw(g, DRAW_EXPERT, step, rank, token, n++);
      expert = findExpert(g, toBelow(bits, all));
      if (isClosed(g, expert) || isDrawn(row, k, expert)) expert = -1;
    }
    if (expert < 0) {
      expert = drawAmongRest(g, row, k, draw(g, DRAW_EXPERT, step, rank, token, n++));
    }
    row[k] = expert;
  }
}

static void drawWeights(const generator_t *g, int step, int rank, int64_t token, const int32_t *row,
                        float *weights) {
  double sum = 0;
  int K = g->spec->shape.topk;
  for (int k = 0; k < K; k++) {
    weights[k] =
        row[k] < 0 ? 0.0f : (float)(0.05 + toUnit(draw(g, DRAW_WEIGHT, step, rank, token, k)));
    sum += weights[k];
  }
  for (int k = 0; k < K && sum > 0; k++) weights[k] = (float)(weights[k] / sum);
}

/* Tokens of all ranks of a step. */
static void countTokens(const generator_t *g, int step, int64_t *counts) {
  const trefoil_trace_spec_t *s = g->spec;
  int isLow = s->burstPeriod > 0 && step % s->burstPeriod != 0;
  double full = (double)s->shape.maxTokens * (isLow ? s->burstLow : 1.0);
  for (int r = 0; r < s->shape.numRanks; r++) {
    double u = toUnit(draw(g, DRAW_COUNT, step, r, 0, 0));
    counts[r] = (int64_t)ceil(full * (1.0 - s->ragged * u));
  }
  if (s->numEmptyRanks == 0) return;
  shuffle(g, DRAW_EMPTY, step, s->shape.numRanks);
  for (int i = 0; i < s->numEmptyRanks; i++) counts[g->order[i]] = 0;
}

#define IN_RANGE(field, what, low, high)                                                           \
  EP_CHECK(s->field >= (low) && s->field <= (high), TREFOIL_INVALID_ARGUMENT,                      \
           what " %.10g: must be in [%.10g, %.10g]", (double)s->field, (double)(low),              \
           (double)(high))

/* What the trace would take, against the memory that this machine has. */
static trefoil_result_t checkMemory(const trefoil_trace_spec_t *s) {
  double ranks = (double)s->numSteps * s->shape.numRanks;
  double entries = ranks * (double)s->shape.maxTokens * s->shape.topk;
  double bytes = entries * (s->withWeights ? 8 : 4) + (ranks + s->numSteps) * 32;
  double there = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
  EP_CHECK(bytes <= there || there <= 0, TREFOIL_INVALID_ARGUMENT,
           "%d steps of %d ranks with %lld tokens each take %.1f GB, but this machine has %.1f GB",
           s->numSteps, s->shape.numRanks, (long long)s->shape.maxTokens, bytes * 1e-9,
           there * 1e-9);
  return TREFOIL_OK;
}

static trefoil_result_t checkSpec(const trefoil_trace_spec_t *s) {
  EP_CHECK(s, TREFOIL_INVALID_ARGUMENT, "the specification is NULL");
  EP_TRY(trefoilShapeCheck(&s->shape));
  EP_CHECK((unsigned)s->popularity <= TREFOIL_POPULARITY_HOT_RANK, TREFOIL_INVALID_ARGUMENT,
           "popularity %d: must be in [0, %d]", (int)s->popularity, TREFOIL_POPULARITY_HOT_RANK);
  EP_CHECK(s->shape.topk <= s->shape.numExperts, TREFOIL_INVALID_ARGUMENT,
           "top-%d of %d experts: each expert may be in a row once, so top-k is in [1, %d]",
           s->shape.topk, s->shape.numExperts, s->shape.numExperts);
  EP_CHECK(s->seed <= INT64_MAX, TREFOIL_INVALID_ARGUMENT, "seed %llu: must be in [0, %lld]",
           (unsigned long long)s->seed, (long long)INT64_MAX);
  IN_RANGE(numSteps, "steps", 1, 1 << 24);
  if (s->popularity == TREFOIL_POPULARITY_ZIPF) IN_RANGE(skew, "skew", 0, 16);
  if (s->popularity >= TREFOIL_POPULARITY_HOT_EXPERT) IN_RANGE(skew, "skew", 0, 1e6);
  if (s->popularity == TREFOIL_POPULARITY_HOT_EXPERT)
    IN_RANGE(hot, "hot expert", 0, s->shape.numExperts - 1);
  if (s->popularity == TREFOIL_POPULARITY_HOT_RANK)
    IN_RANGE(hot, "hot rank", 0, s->shape.numRanks - 1);
  EP_TRY(checkMemory(s));
  IN_RANGE(ragged, "ragged", 0, 1);
  IN_RANGE(numEmptyRanks, "empty ranks", 0, s->shape.numRanks);
  IN_RANGE(burstPeriod, "burst period", 0, 1 << 24);
  IN_RANGE(burstLow, "burst low", 0, 1);
  IN_RANGE(unusedFraction, "share of unused entries", 0, 1);
  IN_RANGE(numMasked, "masked entries", 0, s->shape.maxTokens * s->shape.topk);
  IN_RANGE(numGroups, "groups", 0, s->shape.numExperts);
  if (s->numGroups == 0) return TREFOIL_OK;
  IN_RANGE(topkGroups, "groups of a row", 1, s->numGroups);
  int E = s->shape.numExperts, most = s->topkGroups * (E / s->numGroups);
  EP_CHECK(E % s->numGroups == 0 && s->shape.topk <= most, TREFOIL_INVALID_ARGUMENT,
           "%d groups of %d experts: must divide them, and %d groups must hold top-%d",
           s->numGroups, E, s->topkGroups, s->shape.topk);
  return TREFOIL_OK;
}

/* numMasked of a rank's entries become -1, each set of them alike: an entry is taken with the chance
 * masked entries left / entries left. */
static trefoil_result_t maskEntries(const generator_t *g, int step, int rank, int64_t numTokens,
                                    int32_t *idx) {
  int64_t masked = g->spec->numMasked, entries = 0;
  int K = g->spec->shape.topk;
  if (masked == 0) return TREFOIL_OK;
  for (int64_t i = 0; i < numTokens * K; i++) entries += idx[i] >= 0;
  EP_CHECK(masked <= entries, TREFOIL_INVALID_ARGUMENT,
           "%lld masked entries: rank %d has %lld in step %d", (long long)masked, rank,
           (long long)entries, step);
  for (int64_t i = 0; i < numTokens * K && masked > 0; i++) {
    if (idx[i] < 0) continue;
    uint64_t bits = draw(g, DRAW_MASKED, step, rank, i / K, (int)(i % K));
    if (toBelow(bits, (uint64_t)entries--) >= (uint64_t)masked) continue;
    idx[i] = -1;
    masked--;
  }
  return TREFOIL_OK;
}

static trefoil_result_t fillRank(const generator_t *g, int step, int rank, int64_t first,
                                 int64_t numTokens, trefoil_trace_t *t) {
  int K = t->shape.topk;
  int32_t *idx = (int32_t *)t->topkIdx + first * K;
  float *weights = (float *)t->topkWeights;
  for (int64_t token = 0; token < numTokens; token++)
    drawRow(g, step, rank, token, idx + token * K);
  EP_TRY(maskEntries(g, step, rank, numTokens, idx));
  for (int64_t token = 0; weights && token < numTokens; token++)
    drawWeights(g, step, rank, token, idx + token * K, weights + (first + token) * K);
  return TREFOIL_OK;
}

static trefoil_result_t fillTrace(const generator_t *g, trefoil_trace_t *t) {
  int R = t->shape.numRanks;
  for (int step = 0; step < t->numSteps; step++) {
    const int64_t *offsets = t->offsets + (int64_t)step * (R + 1);
    for (int rank = 0; rank < R; rank++) {
      int64_t first = offsets[rank], numTokens = offsets[rank + 1] - first;
      EP_TRY(fillRank(g, step, rank, first, numTokens, t));
    }
  }
  return epTraceFinish(t);
}

static trefoil_result_t describeSpec(const trefoil_trace_spec_t *s, trefoil_trace_t *t) {
  static const char *const names[] = {"uniform", "zipf", "hot-expert", "hot-rank"};
  char provenance[512], groups[64] = "", masked[48] = "";
  if (s->numGroups > 0)
    snprintf(groups, sizeof groups, ", \"groups\": %d, \"topk_groups\": %d", s->numGroups,
             s->topkGroups);
  if (s->numMasked > 0)
    snprintf(masked, sizeof masked, ", \"masked\": %lld", (long long)s->numMasked);
  snprintf(
      provenance, sizeof provenance,
      "{\"generator\": \"%s\", \"seed\": %llu, \"skew\": %.17g, \"hot\": %d, \"ragged\": %.17g, "
      "\"empty_ranks\": %d, \"burst_period\": %d, \"burst_low\": %.17g, "
      "\"unused_fraction\": %.17g%s%s}",
      names[s->popularity], (unsigned long long)s->seed, s->skew, s->hot, s->ragged,
      s->numEmptyRanks, s->burstPeriod, s->burstLow, s->unusedFraction, groups, masked);
  return epTraceSetProvenance(t, provenance);
}

static trefoil_result_t generate(generator_t *g, int64_t *offsets, trefoil_trace_t **trace) {
  const trefoil_trace_spec_t *s = g->spec;
  int R = s->shape.numRanks;
  weighExperts(g);
  int64_t at = 0;
  for (int step = 0; step < s->numSteps; step++) {
    int64_t *row = offsets + (int64_t)step * (R + 1);
    countTokens(g, step, row);
    for (int r = 0; r <= R; r++) {
      int64_t count = r < R ? row[r] : 0;
      row[r] = at;
      at += count;
    }
  }
  EP_TRY(epTraceNew(trace, &s->shape, s->numSteps, at, s->withWeights));
  memcpy((void *)(*trace)->offsets, offsets,
         (size_t)s->numSteps * ((size_t)R + 1) * sizeof *offsets);
  EP_TRY(describeSpec(s, *trace));
  return fillTrace(g, *trace);
}

trefoil_result_t trefoilTraceGenerate(const trefoil_trace_t **trace,
                                      const trefoil_trace_spec_t *spec) {
  EP_CHECK(trace, TREFOIL_INVALID_ARGUMENT, "the trace's out-parameter is NULL");
  EP_TRY(checkSpec(spec));
  int E = spec->shape.numExperts, R = spec->shape.numRanks;
  generator_t g = {.spec = spec};
  g.weights = calloc((size_t)E, sizeof *g.weights);
  g.sums = calloc((size_t)E + 1, sizeof *g.sums);
  g.order = calloc((size_t)(E > R ? E : R), sizeof *g.order);
  g.isOpen = calloc((size_t)spec->numGroups + 1, 1);
  int64_t *offsets = calloc((size_t)spec->numSteps * ((size_t)R + 1), sizeof *offsets);
  trefoil_trace_t *made = NULL;
  trefoil_result_t result = TREFOIL_SYSTEM_ERROR;
  if (g.weights && g.sums && g.order && g.isOpen && offsets) {
    result = generate(&g, offsets, &made);
  } else {
    epFail(result, "out of memory for a generator of %d steps", spec->numSteps);
  }
  free(g.weights);
  free(g.sums);
  free(g.order);
  free(g.isOpen);
  free(offsets);
  if (result != TREFOIL_OK) {
    trefoilTraceDestroy(made);
    return result;
  }
  *trace = made;
  return TREFOIL_OK;
}
