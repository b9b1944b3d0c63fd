/* Rows per (src, dst), counted in the routing alone; docs/spec.md, section P.
 *
 * Dispatch moves a token once to every rank that has an expert of it. HT across nodes, and LL by
 * rails, moves it once to every other node instead, to the rank p on the source's rail there, and p
 * passes it on.
 * Combine walks the same ways back, except that LL expert-major's exact sum brings back one row per
 * (token, k). */
#include "ref/place.h"

#include "plan/error.h"

typedef struct traffic {
  const trefoil_shape_t *s;
  int combine;
  int64_t *rows;
} traffic_t;

/* A row towards the experts, or back. */
static void count(const traffic_t *t, int from, int to) {
  int src = t->combine ? to : from, dst = t->combine ? from : to;
  t->rows[(int64_t)src * t->s->numRanks + dst]++;
}

/* Is k the first of the row that names the k-th expert's group of `size` experts? */
static bool isFirst(const int32_t *row, int k, int64_t size) {
  for (int j = 0; j < k; j++) {
    if (row[j] >= 0 && row[j] / size == row[k] / size) return false;
  }
  return true;
}

static void countToken(const traffic_t *t, const trefoil_case_t *c, int origin,
                       const int32_t *row) {
  int L = trefoilExpertsPerRank(t->s), G = t->s->ranksPerNode;
  bool perEntry = t->combine && c->mode == TREFOIL_LL_EXPERT_MAJOR &&
                  (!c->combinePartial || c->quant == TREFOIL_QUANT_NVFP4);
  bool byRails = epIsHt(c) || (c->rails && !t->combine);
  for (int k = 0; k < t->s->topk; k++) {
    if (row[k] < 0) continue;
    int d = row[k] / L, node = d / G;
    if (!perEntry && !isFirst(row, k, L)) continue;
    if (!byRails || node == origin / G) {
      count(t, origin, d);
      continue;
    }
    int p = node * G + origin % G;
    if (isFirst(row, k, (int64_t)L * G)) count(t, origin, p);
    count(t, p, d);
  }
}

trefoil_result_t trefoilRefTraffic(const trefoil_case_t *c, int combine, int64_t *rows) {
  EP_TRY(trefoilCaseCheck(c));
  EP_CHECK(rows, TREFOIL_INVALID_ARGUMENT, "rows is NULL");
  const trefoil_shape_t *s = &c->routing.shape;
  traffic_t t = {.s = s, .combine = combine, .rows = rows};
  for (int64_t i = 0; i < (int64_t)s->numRanks * s->numRanks; i++) rows[i] = 0;
  for (int src = 0; src < s->numRanks; src++) {
    for (int64_t i = 0; i < c->routing.numTokens[src]; i++) {
      countToken(&t, c, src, epRoutingRow(c, src, i));
    }
  }
  return TREFOIL_OK;
}
