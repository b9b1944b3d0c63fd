/* Memory by the libraries' own sizing tables. Left out are slot tables in device memory for very large
 * numbers of experts and tokens, which depend on the launch, and the room for inputs that high throughput
 * copies with a max_num_sms of 1 to 24. */
#include "cli/memory_need.h"

#include "api/gpu/gpu_sizing.h"
#include "plan/error.h"

#include <stdio.h>
#include <string.h>

static size_t maxRowBytes(const trefoil_predict_spec_t *spec) {
  size_t d = spec->dispatchRowBytes, c = spec->combineRowBytes;
  return ((d > c ? d : c) + 15) / 16 * 16;
}

static int isLl(const trefoil_predict_spec_t *spec) {
  return spec->mode == TREFOIL_LL_EXPERT_MAJOR || spec->mode == TREFOIL_LL_RANK_MAJOR;
}

/* Takes a column of the sizing table; 0: why says why not. */
static int take(memory_need_t *need, trefoil_result_t result, const ep_sizing_t *table) {
  if (result == TREFOIL_OK)
    memcpy(need->totals, table->totals, sizeof need->totals);
  else
    snprintf(need->why, sizeof need->why, "%s", trefoilLastError());
  return result == TREFOIL_OK;
}

void memoryNeed(const trefoil_predict_spec_t *spec, const trefoil_shape_t *shape,
                int64_t maxReceived, memory_need_t *need) {
  *need = (memory_need_t){.known = 1, .library = "gpu"};
  uint64_t rows = (uint64_t)shape->numRanks * (uint64_t)shape->maxTokens;
  if (spec->mode == TREFOIL_LL_EXPERT_MAJOR) rows *= (uint64_t)trefoilExpertsPerRank(shape);
  if (!isLl(spec)) rows = (uint64_t)maxReceived;
  need->outputBytes = rows * spec->dispatchRowBytes;
  ep_sizing_t table;
  ep_sizing_config_t config = {.backend = EP_BACKEND_GPU,
                               .mode = spec->mode,
                               .shape = *shape,
                               .maxTokenBytes = maxRowBytes(spec)};
  if (take(need, epGpuTable(&config, 0, &table), &table)) return;
  config.anyRanks = shape->numRanks > EP_LL_GPU_MAX_RANKS;
  need->library = "gpu-formula";
  if (config.anyRanks && take(need, epGpuTable(&config, 0, &table), &table)) return;
  config.backend = EP_BACKEND_CPU;
  need->library = "cpu";
  need->known = take(need, epSizing(&config, &table), &table);
}
