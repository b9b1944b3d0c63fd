/* The sizing table with what depends on the launch: slot tables in device memory. */
#include "api/gpu/gpu.h"

/* Of the largest row that the group allows; 0 for all but very large E * N. */
static size_t scratchBytes(const ep_sizing_config_t *config) {
  const trefoil_shape_t *s = &config->shape;
  int rankMajor = config->mode == TREFOIL_LL_RANK_MAJOR;
  ep_ll_group_t group = {.numRanks = s->numRanks,
                         .numExperts = s->numExperts,
                         .numLocal = trefoilExpertsPerRank(s),
                         .maxTokens = (int)s->maxTokens,
                         .numSms = EP_GPU_MAX_SMS};
  ep_ll_handle_t handle = {.numTopk = s->topk,
                           .rankMajor = rankMajor,
                           .sum = rankMajor ? EP_LL_SUM_RANKS : EP_LL_SUM_EXACT};
  return epLlDispatchScratch(&group, &handle, config->maxTokenBytes);
}

trefoil_result_t epGpuSizing(const ep_sizing_config_t *config, ep_sizing_t *out) {
  EP_TRY(trefoilShapeCheck(&config->shape));
  int ht = config->mode == TREFOIL_HT_FLAT || config->mode == TREFOIL_HT_EXPERT_MAJOR;
  return epGpuTable(config, ht ? 0 : scratchBytes(config), out);
}
