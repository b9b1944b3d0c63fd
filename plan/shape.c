/* The shape of a group: limits and names. */
#include "trefoil/shape.h"

#include "plan/error.h"

trefoil_result_t trefoilShapeCheck(const trefoil_shape_t *s) {
  EP_CHECK(s, TREFOIL_INVALID_ARGUMENT, "the shape is NULL");
  EP_CHECK(s->numRanks >= 1 && s->numRanks <= TREFOIL_MAX_RANKS, TREFOIL_INVALID_ARGUMENT,
           "%d ranks: must be in [1, %d]", s->numRanks, TREFOIL_MAX_RANKS);
  EP_CHECK(s->ranksPerNode >= 1 && s->numRanks % s->ranksPerNode == 0, TREFOIL_INVALID_ARGUMENT,
           "%d ranks per node: must be at least 1 and divide the %d ranks", s->ranksPerNode,
           s->numRanks);
  EP_CHECK(s->numExperts >= 1 && s->numExperts <= TREFOIL_MAX_EXPERTS, TREFOIL_INVALID_ARGUMENT,
           "%d experts: must be in [1, %d]", s->numExperts, TREFOIL_MAX_EXPERTS);
  EP_CHECK(s->topk >= 1 && s->topk <= TREFOIL_MAX_TOPK, TREFOIL_INVALID_ARGUMENT,
           "top-%d: must be in [1, %d]", s->topk, TREFOIL_MAX_TOPK);
  EP_CHECK(s->maxTokens >= 1 && s->maxTokens <= TREFOIL_MAX_TOKENS, TREFOIL_INVALID_ARGUMENT,
           "at most %lld tokens per rank: must be in [1, %lld]", (long long)s->maxTokens,
           (long long)TREFOIL_MAX_TOKENS);
  return TREFOIL_OK;
}

const char *trefoilModeName(trefoil_mode_t mode) {
  switch (mode) {
  case TREFOIL_LL_EXPERT_MAJOR:
    return "ll-expert-major";
  case TREFOIL_LL_RANK_MAJOR:
    return "ll-rank-major";
  case TREFOIL_HT_FLAT:
    return "ht-flat";
  case TREFOIL_HT_EXPERT_MAJOR:
    return "ht-expert-major";
  }
  return "unknown";
}
