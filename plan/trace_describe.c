/* What a trace's routing looks like, in a few numbers. */
#include "trefoil/trace.h"

#include <stdlib.h>
#include <string.h>

#include "plan/error.h"

typedef struct counts {
  int64_t *experts;   /* [E] entries */
  int64_t *ranks;     /* [R] rows of all steps */
  int64_t *stepRanks; /* [R] rows of this step */
  int64_t *stamp;     /* [R + nodes] serial of the token that was counted last */
  int64_t serial;
  int64_t usedTokens, tokenRanks, tokenNodes;
} counts_t;

static int compareCounts(const void *a, const void *b) {
  int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
  return (x > y) - (x < y);
}

/* Gini coefficient; sorts the values. G = sum_i (2i - n - 1) x_i / (n sum x), x ascending, i from 1:
 * 0 if all are equal, (n - 1) / n if one has everything. */
static double gini(int64_t *x, int n) {
  qsort(x, (size_t)n, sizeof *x, compareCounts);
  double weighted = 0, sum = 0;
  for (int i = 0; i < n; i++) {
    weighted += (2.0 * (i + 1) - n - 1) * (double)x[i];
    sum += (double)x[i];
  }
  return sum > 0 ? weighted / (n * sum) : 0;
}

static double maxOverMean(const int64_t *x, int n, int *where) {
  double sum = 0;
  *where = 0;
  for (int i = 0; i < n; i++) {
    sum += (double)x[i];
    if (x[i] > x[*where]) *where = i;
  }
  return sum > 0 ? (double)x[*where] * n / sum : 0;
}

static void countToken(const trefoil_shape_t *s, int src, const int32_t *row, counts_t *c,
                       trefoil_trace_stats_t *stats) {
  int64_t serial = ++c->serial, ranksBefore = c->tokenRanks;
  for (int k = 0; k < s->topk; k++) {
    if (row[k] < 0) continue;
    stats->numEntries++;
    c->experts[row[k]]++;
    int rank = trefoilRankOfExpert(s, row[k]), node = trefoilNodeOf(s, rank);
    int sameNode = node == trefoilNodeOf(s, src);
    if (c->stamp[rank] == serial) continue;
    c->stamp[rank] = serial;
    c->tokenRanks++;
    c->stepRanks[rank]++;
    *(rank == src ? &stats->rowsSelf : sameNode ? &stats->rowsNvlink : &stats->rowsNet) += 1;
    if (c->stamp[s->numRanks + node] == serial) continue;
    c->stamp[s->numRanks + node] = serial;
    c->tokenNodes++;
    stats->rowsNetOnce += !sameNode;
  }
  c->usedTokens += c->tokenRanks > ranksBefore;
}

static void countStep(const trefoil_routing_t *r, counts_t *c, trefoil_trace_stats_t *stats) {
  memset(c->stepRanks, 0, (size_t)r->shape.numRanks * sizeof *c->stepRanks);
  for (int src = 0; src < r->shape.numRanks; src++) {
    int64_t n = r->numTokens[src];
    stats->numTokens += n;
    stats->emptyRanks += n == 0;
    if (n < stats->minTokens) stats->minTokens = n;
    if (n > stats->maxTokens) stats->maxTokens = n;
    for (int64_t t = 0; t < n; t++) {
      countToken(&r->shape, src, r->topkIdx[src] + t * r->shape.topk, c, stats);
    }
  }
  for (int rank = 0; rank < r->shape.numRanks; rank++) c->ranks[rank] += c->stepRanks[rank];
}

static void finish(const trefoil_shape_t *s, counts_t *c, trefoil_trace_stats_t *stats) {
  stats->maxOverMeanExperts = maxOverMean(c->experts, s->numExperts, &stats->hottestExpert);
  stats->giniExperts = gini(c->experts, s->numExperts);
  stats->maxOverMeanRanks = maxOverMean(c->ranks, s->numRanks, &stats->hottestRank);
  stats->giniRanks = gini(c->ranks, s->numRanks);
  if (c->usedTokens == 0) return;
  stats->ranksPerToken = (double)c->tokenRanks / (double)c->usedTokens;
  stats->nodesPerToken = (double)c->tokenNodes / (double)c->usedTokens;
}

trefoil_result_t trefoilTraceDescribe(const trefoil_trace_t *trace, int step,
                                      trefoil_trace_stats_t *stats) {
  EP_CHECK(trace && stats, TREFOIL_INVALID_ARGUMENT, "the %s is NULL", trace ? "output" : "trace");
  EP_CHECK(step < trace->numSteps, TREFOIL_INVALID_ARGUMENT, "step %d: the trace has %d", step,
           trace->numSteps);
  const trefoil_shape_t *s = &trace->shape;
  size_t E = (size_t)s->numExperts, R = (size_t)s->numRanks, nodes = R / (size_t)s->ranksPerNode;
  int64_t *memory = calloc(E + 3 * R + nodes, sizeof *memory);
  EP_CHECK(memory, TREFOIL_SYSTEM_ERROR, "out of memory to describe a trace");
  counts_t c = {memory, memory + E, memory + E + R, memory + E + 2 * R, 0, 0, 0, 0};
  trefoil_trace_stats_t found = {.minTokens = INT64_MAX, .worstStep = -1};
  int first = step < 0 ? 0 : step, end = step < 0 ? trace->numSteps : step + 1;
  for (int i = first; i < end; i++) {
    trefoil_routing_t routing;
    (void)trefoilTraceRouting(trace, i, &routing);
    countStep(&routing, &c, &found);
    int where;
    double worst = maxOverMean(c.stepRanks, s->numRanks, &where);
    if (found.worstStep >= 0 && worst <= found.worstMaxOverMeanRanks) continue;
    found.worstMaxOverMeanRanks = worst;
    found.worstStep = i;
  }
  finish(s, &c, &found);
  free(memory);
  *stats = found;
  return TREFOIL_OK;
}
