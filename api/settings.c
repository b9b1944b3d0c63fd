/* Settings that all ranks must have alike, compared at group creation. Hints, the timeout, the
 * debug log and the allocator may differ; so may fields that the algorithm ignores. */
#include <string.h>

#include "api/object.h"

enum {
  ALGORITHM,
  EXPERTS,
  TOKENS,
  BYTES,
  MASK,
  ZERO_COPY,
  RECV,
  OVERFLOW_POLICY,
  TOPK,
  PER_NODE,
  LL_COMBINE,
  LL_DISPATCH,
  NUM_FIELDS
};

static const char *const names[NUM_FIELDS] = {
    [ALGORITHM] = "algorithm",
    [EXPERTS] = "num_experts",
    [TOKENS] = "max_dispatch_tokens_per_rank",
    [BYTES] = "max_token_bytes",
    [MASK] = "enable_mask",
    [ZERO_COPY] = "zero_copy",
    [RECV] = "max_recv_tokens_per_rank",
    [OVERFLOW_POLICY] = "overflow_policy (AUTO is TRAP)",
    [TOPK] = "num_topk",
    [PER_NODE] = "ranks per node (NCCL_LSA_TEAM_SIZE)",
    [LL_COMBINE] = "NCCL_EP_LL_COMBINE (0 exact, 1 partial)",
    [LL_DISPATCH] = "NCCL_EP_LL_DISPATCH (0 mesh, 1 rails)",
};

void epSettingsOf(const struct ncclEpGroup *g, ep_settings_t *out) {
  memset(out, 0, sizeof *out);
  uint64_t *v = out->values;
  v[ALGORITHM] = g->limits.algorithm;
  v[EXPERTS] = g->limits.numExperts;
  v[TOKENS] = g->limits.maxTokens;
  v[BYTES] = g->limits.maxTokenBytes;
  v[ZERO_COPY] = g->limits.zeroCopy;
  v[PER_NODE] = (uint64_t)g->ranksPerNode;
  if (epIsHt(g)) {
    v[RECV] = g->limits.maxRecv;
    v[OVERFLOW_POLICY] =
        g->limits.overflowPolicy ? g->limits.overflowPolicy : NCCL_EP_OVERFLOW_TRAP;
    v[TOPK] = g->limits.numTopk;
  } else {
    v[MASK] = g->limits.enableMask;
    v[LL_COMBINE] = (uint64_t)g->llPartial;
    v[LL_DISPATCH] = (uint64_t)g->llRails;
  }
}

trefoil_result_t epSettingsCompare(const ep_settings_t *all, int numRanks) {
  for (int field = 0; field < NUM_FIELDS; field++) {
    for (int r = 1; r < numRanks; r++) {
      unsigned long long a = all[0].values[field], b = all[r].values[field];
      EP_CHECK(a == b, TREFOIL_INVALID_ARGUMENT,
               "ncclEpCreateGroup: %s differs: %llu on rank 0, %llu on rank %d; must be equal",
               names[field], a, b, r);
    }
  }
  return TREFOIL_OK;
}
