/* The GPU library's memory comes from the layouts of kernels/, which need no CUDA: exchange memory,
 * control memory, handle memory. Left out are the library's own words beside them, a few kB, and slot
 * tables for very large numbers of experts and tokens, which depend on the launch. */
#include "cli/memory_need.h"

#include "kernels/ht/ht.h"
#include "kernels/ll/ll.h"
#include "plan/error.h"

#include <stdio.h>
#include <string.h>

static size_t maxRowBytes(const trefoil_predict_spec_t *spec) {
  size_t d = spec->dispatchRowBytes, c = spec->combineRowBytes;
  return ((d > c ? d : c) + 15) / 16 * 16;
}

static trefoil_result_t ofLowLatency(const trefoil_predict_spec_t *spec,
                                     const trefoil_shape_t *shape, memory_need_t *need) {
  ep_ll_config_t config = {.numRanks = shape->numRanks,
                           .numExperts = shape->numExperts,
                           .maxTopk = shape->topk,
                           .maxTokens = shape->maxTokens,
                           .maxTokenBytes = maxRowBytes(spec),
                           .partial = 1};
  ep_ll_layout_t at;
  EP_TRY(epLlLayout(&config, &at));
  need->totals[0][EP_MEMORY_SHARED] = at.bytes;
  need->totals[0][EP_MEMORY_DEVICE] = EP_LL_CONTROL_BYTES;
  need->totals[1][EP_MEMORY_DEVICE] = epLlHandleBytes(&config, shape->topk);
  return TREFOIL_OK;
}

static trefoil_result_t ofHighThroughput(const trefoil_predict_spec_t *spec,
                                         const trefoil_shape_t *shape, memory_need_t *need) {
  ep_ht_config_t config = {.numRanks = shape->numRanks,
                           .numExperts = shape->numExperts,
                           .maxTopk = shape->topk,
                           .maxTokens = shape->maxTokens,
                           .maxTokenBytes = maxRowBytes(spec)};
  ep_ht_layout_t at;
  EP_TRY(epHtLayout(&config, &at));
  need->totals[0][EP_MEMORY_SHARED] = at.bytes;
  need->totals[0][EP_MEMORY_DEVICE] = EP_HT_CONTROL_BYTES + epHtScratchBytes(&config);
  need->totals[1][EP_MEMORY_DEVICE] = epHtHandleBytes(&config, shape->topk);
  return TREFOIL_OK;
}

static int isLl(const trefoil_predict_spec_t *spec) {
  return spec->mode == TREFOIL_LL_EXPERT_MAJOR || spec->mode == TREFOIL_LL_RANK_MAJOR;
}

static int ofGpuLibrary(const trefoil_predict_spec_t *spec, const trefoil_shape_t *shape,
                        memory_need_t *need) {
  if (shape->ranksPerNode < shape->numRanks) {
    snprintf(need->why, sizeof need->why, "the GPU library's kernels stay within a node");
    return 0;
  }
  trefoil_result_t result =
      isLl(spec) ? ofLowLatency(spec, shape, need) : ofHighThroughput(spec, shape, need);
  if (result != TREFOIL_OK) snprintf(need->why, sizeof need->why, "%s", trefoilLastError());
  return result == TREFOIL_OK;
}

void memoryNeed(const trefoil_predict_spec_t *spec, const trefoil_shape_t *shape,
                int64_t maxReceived, memory_need_t *need) {
  *need = (memory_need_t){.known = 1, .library = "gpu"};
  uint64_t rows = (uint64_t)shape->numRanks * (uint64_t)shape->maxTokens;
  if (spec->mode == TREFOIL_LL_EXPERT_MAJOR) rows *= (uint64_t)trefoilExpertsPerRank(shape);
  if (!isLl(spec)) rows = (uint64_t)maxReceived;
  need->outputBytes = rows * spec->dispatchRowBytes;
  if (ofGpuLibrary(spec, shape, need)) return;
  need->library = "cpu";
  memset(need->totals, 0, sizeof need->totals);
  const ep_sizing_config_t config = {.backend = EP_BACKEND_CPU,
                                     .mode = spec->mode,
                                     .shape = *shape,
                                     .maxTokenBytes = maxRowBytes(spec)};
  ep_sizing_t table;
  need->known = epSizing(&config, &table) == TREFOIL_OK;
  if (need->known) {
    memcpy(need->totals, table.totals, sizeof need->totals);
  } else {
    snprintf(need->why, sizeof need->why, "%s", trefoilLastError());
  }
}
