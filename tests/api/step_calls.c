/* The C API's calls of a step: tensors described as a user would. */
#include <stdio.h>
#include <string.h>

#include "step.h"

static int isHt(const step_case_t *c) {
  return c->mode == TREFOIL_HT_FLAT || c->mode == TREFOIL_HT_EXPERT_MAJOR;
}

ncclEpGroupConfig_t stepGroupConfig(const step_case_t *c, int numRanks) {
  (void)numRanks;
  ncclEpGroupConfig_t g = NCCL_EP_GROUP_CONFIG_INIT;
  g.algorithm = isHt(c) ? NCCL_EP_ALGO_HIGH_THROUGHPUT : NCCL_EP_ALGO_LOW_LATENCY;
  g.num_experts = (unsigned)c->numExperts;
  g.max_dispatch_tokens_per_rank = (unsigned)c->maxTokens;
  g.max_recv_tokens_per_rank = isHt(c) ? (unsigned)c->maxRecv : 0;
  g.max_token_bytes = (unsigned)(c->width * 2 + (c->quant == TREFOIL_QUANT_CALLER ? 32 : 0));
  g.num_topk = isHt(c) ? (unsigned)c->topk : 0;
  g.overflow_policy = c->drop ? NCCL_EP_OVERFLOW_DROP : NCCL_EP_OVERFLOW_AUTO;
  g.timeout_ns = 20000000000u;
  if (c->maxSms) g.max_num_sms = c->maxSms;
  return g;
}

ncclEpLayout_t stepLayout(const step_case_t *c) {
  static const ncclEpLayout_t layouts[] = {NCCL_EP_LAYOUT_EXPERT_MAJOR, NCCL_EP_LAYOUT_RANK_MAJOR,
                                           NCCL_EP_LAYOUT_FLAT, NCCL_EP_LAYOUT_EXPERT_MAJOR};
  return layouts[c->mode];
}

ncclEpHandleConfig_t stepHandleConfig(const step_case_t *c) {
  ncclEpHandleConfig_t h = NCCL_EP_HANDLE_CONFIG_INIT;
  h.dispatch_output_per_expert_alignment = c->alignment;
  return h;
}

typedef struct shaped {
  ncclEpTensor_t tensor;
  size_t sizes[3];
} shaped_t;

static ncclEpTensor_t *shape(shaped_t *s, void *data, ncclDataType_t dtype, unsigned ndim,
                             int64_t a, int64_t b, int64_t c) {
  s->sizes[0] = (size_t)a;
  s->sizes[1] = (size_t)b;
  s->sizes[2] = (size_t)c;
  s->tensor = (ncclEpTensor_t){NCCL_EP_TENSOR_INIT_INLINE, .ndim = ndim, .datatype = dtype,
                               .data = data, .sizes = s->sizes};
  return &s->tensor;
}

/* A tensor of slots: LL [L, R*N, x] or [R, N, x], HT [slots, x]. */
static ncclEpTensor_t *slotShape(step_data_t *d, shaped_t *s, void *data, ncclDataType_t dtype,
                                 int64_t last) {
  const step_case_t *c = d->c;
  if (isHt(c)) return shape(s, data, dtype, 2, d->slots, last, 0);
  if (c->mode == TREFOIL_LL_EXPERT_MAJOR) {
    return shape(s, data, dtype, 3, d->L, d->R * c->maxTokens, last);
  }
  return shape(s, data, dtype, 3, d->R, c->maxTokens, last);
}

int stepUpdate(step_data_t *d, ncclEpHandle_t handle, cudaStream_t stream) {
  const step_case_t *c = d->c;
  shaped_t idx, counters, offsets, total;
  shape(&idx, c->wideIds ? (void *)d->wide : (void *)d->idx[d->me],
        c->wideIds ? ncclInt64 : ncclInt32, 2, d->numTokens[d->me], c->topk, 0);
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  info.expert_counters = shape(&counters, d->counters, ncclInt64, 1, d->L, 0, 0);
  info.recv_total_counter = shape(&total, d->total, ncclInt64, 1, 1, 0, 0);
  info.expert_offsets = shape(&offsets, d->offsets, ncclInt64, 1, d->L, 0, 0);
  return ncclEpUpdateHandle(handle, &idx.tensor, isHt(c) ? &info : NULL, stream) == ncclSuccess;
}

int stepDispatch(step_data_t *d, ncclEpHandle_t handle, cudaStream_t stream) {
  const step_case_t *c = d->c;
  int64_t B = d->numTokens[d->me], K = c->topk;
  shaped_t in, inScales, inWeights, out, outScales, outWeights, outIdx, counters, sources;
  ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  int e4m3 = c->quant == TREFOIL_QUANT_E4M3, caller = c->quant == TREFOIL_QUANT_CALLER;
  inputs.tokens = shape(&in, d->tokens[d->me], ncclBfloat16, 2, B, c->width, 0);
  outputs.tokens = slotShape(d, &out, d->outTokens, e4m3 ? ncclFloat8e4m3 : ncclBfloat16, c->width);
  if (caller) inputs.scales = shape(&inScales, d->scales[d->me], ncclUint8, 2, B, 32, 0);
  if (caller) outputs.scales = slotShape(d, &outScales, d->outScales, ncclUint8, 32);
  if (e4m3) outputs.scales = slotShape(d, &outScales, d->outScales, ncclFloat32, c->width / 128);
  if (c->mode != TREFOIL_LL_EXPERT_MAJOR && !c->backward) {
    inputs.topk_weights = shape(&inWeights, d->weights[d->me], ncclFloat32, 2, B, K, 0);
    outputs.topk_weights = c->mode == TREFOIL_HT_EXPERT_MAJOR
                               ? shape(&outWeights, d->outWeights, ncclFloat32, 1, d->slots, 0, 0)
                               : slotShape(d, &outWeights, d->outWeights, ncclFloat32, K);
    if (c->mode != TREFOIL_HT_EXPERT_MAJOR) {
      outputs.topk_idx = slotShape(d, &outIdx, d->outIdx, isHt(c) ? ncclInt64 : ncclInt32, K);
    }
  }
  info.expert_counters = shape(&counters, d->counters32, ncclInt32, 1, d->L, 0, 0);
  info.src_rank_counters = shape(&sources, d->sources32, ncclInt32, 1, d->R, 0, 0);
  info.recv_topk_idx_kind = c->globalIds ? NCCL_EP_EXPERT_ID_GLOBAL : NCCL_EP_EXPERT_ID_AUTO;
  config.quant_recipe = caller ? NCCL_EP_DISP_QUANT_FWD
                        : e4m3 ? NCCL_EP_DISP_QUANT_DS_FP8E3M4
                               : NCCL_EP_DISP_QUANT_NONE;
  config.round_scales = (unsigned)c->roundScales;
  config.send_only = (unsigned)c->sendOnly;
  config.pass_direction = c->backward ? NCCL_EP_BWD_PASS : NCCL_EP_FWD_PASS;
  return ncclEpDispatch(handle, &inputs, &outputs, &info, &config, stream) == ncclSuccess;
}

int stepCombine(step_data_t *d, ncclEpHandle_t handle, cudaStream_t stream) {
  const step_case_t *c = d->c;
  int64_t B = d->numTokens[d->me], K = c->topk;
  shaped_t in, out, scales, inWeights, outWeights;
  ncclEpCombineInputs_t inputs = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t outputs = NCCL_EP_COMBINE_OUTPUTS_INIT;
  ncclEpCombineConfig_t config = NCCL_EP_COMBINE_CONFIG_INIT;
  inputs.tokens = slotShape(d, &in, d->expertRows[d->me], ncclBfloat16, c->width);
  outputs.tokens = shape(&out, d->combined, ncclBfloat16, 2, B, c->width, 0);
  if (c->combineQuant == TREFOIL_QUANT_NVFP4) {
    inputs.scales = slotShape(d, &scales, d->slotScales[d->me], ncclFloat32, 1);
    config.quant_recipe = NCCL_EP_COMB_QUANT_NVFP4;
  }
  if (c->mode == TREFOIL_LL_EXPERT_MAJOR) {
    outputs.topk_weights = shape(&outWeights, d->weights[d->me], ncclFloat32, 2, B, K, 0);
  }
  if (c->backward) {
    inputs.topk_weights =
        c->mode == TREFOIL_HT_FLAT
            ? slotShape(d, &inWeights, d->slotWeights[d->me], ncclFloat32, K)
            : shape(&inWeights, d->slotWeights[d->me], ncclFloat32, 1, d->slots, 0, 0);
    outputs.topk_weights = shape(&outWeights, d->combinedWeights, ncclFloat32, 2, B, K, 0);
  }
  config.send_only = (unsigned)c->sendOnly;
  config.pass_direction = c->backward ? NCCL_EP_BWD_PASS : NCCL_EP_FWD_PASS;
  return ncclEpCombine(handle, &inputs, &outputs, &config, stream) == ncclSuccess;
}

static const char *compare(const char *name, const void *got, const void *want, size_t bytes,
                           size_t rowBytes) {
  const uint8_t *a = got, *b = want;
  for (size_t i = 0; i < bytes; i++) {
    if (a[i] == b[i]) continue;
    static _Thread_local char text[200];
    snprintf(text, sizeof text, "%s: row %zu, byte %zu: got 0x%02x, want 0x%02x", name,
             i / rowBytes, i % rowBytes, a[i], b[i]);
    return text;
  }
  return "";
}

#define SAME(...)                                                                                  \
  do {                                                                                             \
    const char *diff = compare(__VA_ARGS__);                                                       \
    if (*diff) return diff;                                                                        \
  } while (0)

static const char *compareCounters(step_data_t *d) {
  const step_case_t *c = d->c;
  size_t L = (size_t)d->L;
  if (isHt(c)) {
    SAME("recv_total_counter", d->total, d->wantTotal, 8, 8);
    SAME("expert_counters", d->counters, d->wantCounters, L * 8, 8);
    SAME("expert_offsets", d->offsets, d->wantOffsets, L * 8, 8);
    return "";
  }
  for (int i = 0; i < d->L && c->mode == TREFOIL_LL_EXPERT_MAJOR; i++) {
    if (d->counters32[i] != d->wantCounters[i]) return "expert_counters differ";
  }
  for (int i = 0; i < d->R && c->mode == TREFOIL_LL_RANK_MAJOR; i++) {
    if (d->sources32[i] != d->wantSources[i]) return "src_rank_counters differ";
  }
  return "";
}

const char *stepCompareDispatch(step_data_t *d) {
  const step_case_t *c = d->c;
  size_t row = c->quant == TREFOIL_QUANT_E4M3 ? (size_t)c->width : (size_t)c->width * 2;
  size_t scale = c->quant == TREFOIL_QUANT_CALLER ? 32
                 : c->quant == TREFOIL_QUANT_E4M3 ? (size_t)c->width / 128 * 4
                                                  : 0;
  size_t slots = (size_t)d->slots, K = (size_t)c->topk;
  size_t perRow = c->mode == TREFOIL_HT_EXPERT_MAJOR ? 1 : K;
  const char *counters = compareCounters(d);
  if (*counters) return counters;
  SAME("tokens", d->outTokens, d->wantTokens, slots * row, row);
  if (scale) SAME("scales", d->outScales, d->wantScales, slots * scale, scale);
  if (c->mode == TREFOIL_LL_EXPERT_MAJOR || c->backward) return "";
  SAME("topk_weights", d->outWeights, d->wantWeights, slots * perRow * 4, perRow * 4);
  size_t idBytes = isHt(c) ? 8 : 4;
  if (c->mode != TREFOIL_HT_EXPERT_MAJOR) {
    SAME("topk_idx", d->outIdx, d->wantIdx, slots * K * idBytes, K * idBytes);
  }
  return "";
}

const char *stepCompareCombine(step_data_t *d) {
  const step_case_t *c = d->c;
  size_t B = (size_t)d->numTokens[d->me], row = (size_t)c->width * 2;
  SAME("combined", d->combined, d->wantCombined, B * row, row);
  if (c->backward) {
    size_t weightRow = (size_t)c->topk * 4;
    SAME("combined weights", d->combinedWeights, d->wantCombinedWeights, B * weightRow, weightRow);
  }
  return "";
}
