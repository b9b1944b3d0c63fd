/* Checks a routing: counts, ranges, and that no token names an expert twice.
 *
 * A bitmap over the experts holds the experts of one row; a row is set, then cleared, so the whole
 * check costs two visits of each entry. Up to 8192 experts the bitmap lies on the stack. */
#include "trefoil/shape.h"

#include <stdlib.h>

#include "plan/error.h"

enum { STACK_WORDS = 128 };

typedef struct row_at {
  int rank;
  int64_t token;
  const int32_t *row;
} row_at_t;

static trefoil_result_t failDuplicate(const row_at_t *at, int k) {
  int first = 0;
  while (at->row[first] != at->row[k]) first++;
  return epFail(
      TREFOIL_INVALID_ARGUMENT,
      "rank %d, token %lld: expert %d is named twice, at k = %d and k = %d; each expert may "
      "appear once in a row (-1 marks an unused entry)",
      at->rank, (long long)at->token, at->row[k], first, k);
}

static trefoil_result_t checkRow(const trefoil_shape_t *s, const row_at_t *at, uint64_t *seen) {
  for (int k = 0; k < s->topk; k++) {
    int32_t e = at->row[k];
    if (e == -1) continue;
    EP_CHECK(e >= 0 && e < s->numExperts, TREFOIL_INVALID_ARGUMENT,
             "rank %d, token %lld, k = %d: expert %d is outside [0, %d) and not -1", at->rank,
             (long long)at->token, k, e, s->numExperts);
    uint64_t bit = (uint64_t)1 << (e & 63);
    if (seen[e >> 6] & bit) return failDuplicate(at, k);
    seen[e >> 6] |= bit;
  }
  for (int k = 0; k < s->topk; k++) {
    if (at->row[k] >= 0) seen[at->row[k] >> 6] = 0;
  }
  return TREFOIL_OK;
}

static trefoil_result_t checkRows(const trefoil_routing_t *r, uint64_t *seen) {
  for (int rank = 0; rank < r->shape.numRanks; rank++) {
    for (int64_t t = 0; t < r->numTokens[rank]; t++) {
      row_at_t at = {rank, t, r->topkIdx[rank] + t * r->shape.topk};
      EP_TRY(checkRow(&r->shape, &at, seen));
    }
  }
  return TREFOIL_OK;
}

static trefoil_result_t checkCounts(const trefoil_routing_t *r) {
  for (int rank = 0; rank < r->shape.numRanks; rank++) {
    int64_t n = r->numTokens[rank];
    EP_CHECK(n >= 0 && n <= r->shape.maxTokens, TREFOIL_INVALID_ARGUMENT,
             "rank %d has %lld tokens: must be in [0, %lld], the most tokens a rank may dispatch",
             rank, (long long)n, (long long)r->shape.maxTokens);
    EP_CHECK(n == 0 || r->topkIdx[rank], TREFOIL_INVALID_ARGUMENT,
             "rank %d has %lld tokens but its topk_idx is NULL", rank, (long long)n);
  }
  return TREFOIL_OK;
}

trefoil_result_t trefoilRoutingCheck(const trefoil_routing_t *r) {
  EP_CHECK(r, TREFOIL_INVALID_ARGUMENT, "the routing is NULL");
  EP_TRY(trefoilShapeCheck(&r->shape));
  EP_CHECK(r->numTokens && r->topkIdx, TREFOIL_INVALID_ARGUMENT, "the routing's %s is NULL",
           r->numTokens ? "topkIdx" : "numTokens");
  EP_TRY(checkCounts(r));
  size_t words = ((size_t)r->shape.numExperts + 63) / 64;
  uint64_t onStack[STACK_WORDS] = {0};
  uint64_t *seen = words <= STACK_WORDS ? onStack : calloc(words, sizeof *seen);
  EP_CHECK(seen, TREFOIL_SYSTEM_ERROR, "out of memory: %zu bytes", words * sizeof *seen);
  trefoil_result_t result = checkRows(r, seen);
  if (seen != onStack) free(seen);
  return result;
}
