/* ncclEpCombine: every rule on its tensors, then the backend. */
#include <string.h>

#include "api/object.h"
#include "api/range.h"

typedef struct combine_args {
  ncclEpHandle_t h;
  ncclEpGroup_t g;
  ncclEpCombineInputs_t in;
  ncclEpCombineOutputs_t out;
  ncclEpCombineConfig_t config;
  cudaStream_t stream;
  int backward, nvfp4;
  int64_t eagerCount; /* HT eager: slots that arrived; else -1 */
  ep_ranges_t *ranges;
  ep_view_t tokens, outTokens;
} combine_args_t;

static trefoil_result_t copyStructs(combine_args_t *a, const ncclEpCombineInputs_t *in,
                                    const ncclEpCombineOutputs_t *out,
                                    const ncclEpCombineConfig_t *config) {
  if (config) {
    EP_TRY(epCopyStruct(&a->config, config,
                        EP_STRUCT(ncclEpCombineConfig_t, NCCL_EP_COMBINE_CONFIG_V1_SIZE)));
  }
  EP_CHECK((unsigned)a->config.quant_recipe <= 1, TREFOIL_INVALID_ARGUMENT,
           "config.quant_recipe is %d; must be 0 or 1", (int)a->config.quant_recipe);
  a->nvfp4 = a->config.quant_recipe == NCCL_EP_COMB_QUANT_NVFP4;
  EP_CHECK(!a->nvfp4 || !epIsHt(a->g), TREFOIL_INVALID_USAGE,
           "config.quant_recipe is NVFP4, which is low latency's; high throughput takes NONE");
  EP_CHECK(!a->nvfp4 || epBackend.combineNvfp4, TREFOIL_INVALID_USAGE,
           "config.quant_recipe is NVFP4, which this device has no hardware for");
  EP_TRY(
      epCopyStruct(&a->in, in, EP_STRUCT(ncclEpCombineInputs_t, NCCL_EP_COMBINE_INPUTS_V1_SIZE)));
  EP_TRY(epCopyStruct(&a->out, out,
                      EP_STRUCT(ncclEpCombineOutputs_t, NCCL_EP_COMBINE_OUTPUTS_V1_SIZE)));
  EP_CHECK((unsigned)a->config.pass_direction <= 1, TREFOIL_INVALID_ARGUMENT,
           "config.pass_direction is %d; must be 0 (forward) or 1 (backward)",
           (int)a->config.pass_direction);
  a->backward = a->config.pass_direction == NCCL_EP_BWD_PASS;
  return TREFOIL_OK;
}

static trefoil_result_t checkOrder(const combine_args_t *a) {
  ncclEpHandle_t h = a->h;
  EP_CHECK(!a->backward || epIsHt(a->g), TREFOIL_INVALID_USAGE,
           "ncclEpCombine: pass_direction is backward; low latency has only the forward pass");
  EP_CHECK(h->pending == EP_PENDING_NONE, TREFOIL_INVALID_USAGE,
           "ncclEpCombine: the handle's send_only operation is pending; call ncclEpComplete first");
  EP_CHECK(a->g->numPending < 2, TREFOIL_INVALID_USAGE,
           "ncclEpCombine: two send_only operations of the group are in flight; complete one "
           "first");
  return epCheckRouted(h, "ncclEpCombine", a->stream);
}

static void slotDims(const combine_args_t *a, ep_tensor_rule_t *rule) {
  size_t R = (size_t)a->g->numRanks, N = a->g->limits.maxTokens;
  if (epIsHt(a->g)) {
    rule->ndim = 2;
    rule->atLeast = 1;
    rule->sizes[0] = a->eagerCount >= 0 ? (size_t)a->eagerCount : a->g->limits.maxRecv;
    return;
  }
  int expertMajor = a->h->mode == TREFOIL_LL_EXPERT_MAJOR;
  rule->ndim = 3;
  rule->sizes[0] = expertMajor ? (size_t)trefoilExpertsPerRank(&a->h->sizing.config.shape) : R;
  rule->sizes[1] = expertMajor ? R * N : N;
}

static trefoil_result_t checkTokens(combine_args_t *a) {
  ep_tensor_rule_t rule = {.name = "inputs->tokens"};
  rule.dtypes = a->nvfp4 ? EP_DTYPE(ncclBfloat16) : EP_DTYPES_SUM;
  slotDims(a, &rule);
  rule.sizes[rule.ndim - 1] = EP_ANY;
  EP_TRY(epViewTensor(a->ranges, a->in.tokens, &rule, &a->tokens));
  size_t width = a->tokens.sizes[rule.ndim - 1];
  EP_CHECK(width > 0, TREFOIL_INVALID_ARGUMENT, "inputs->tokens: sizes[%u] is 0", rule.ndim - 1);
  EP_CHECK(a->tokens.rowBytes <= a->g->limits.maxTokenBytes, TREFOIL_INVALID_ARGUMENT,
           "inputs->tokens: a row has %zu bytes; max_token_bytes is %u", a->tokens.rowBytes,
           a->g->limits.maxTokenBytes);
  EP_CHECK(!a->nvfp4 || width % 16 == 0, TREFOIL_INVALID_ARGUMENT,
           "inputs->tokens: a row has %zu elements; NVFP4 takes multiples of 16", width);
  int ht = epIsHt(a->g);
  EP_CHECK(!ht || a->g->limits.zeroCopy != NCCL_EP_ZERO_COPY_ON || a->tokens.windowed,
           TREFOIL_INVALID_ARGUMENT, "inputs->tokens: zero_copy ON needs a window (win_hdl)");
  ep_tensor_rule_t out = {.name = "outputs->tokens",
                          .ndim = 2,
                          .written = 1,
                          .sizes = {(size_t)a->h->routed.numTokens, width},
                          .dtypes = EP_DTYPE(a->tokens.dtype)};
  return epViewTensor(a->ranges, a->out.tokens, &out, &a->outTokens);
}

static trefoil_result_t checkScales(const combine_args_t *a, ep_combine_call_t *call) {
  if (!a->nvfp4) {
    return epCheckAbsent(a->in.scales, "inputs->scales", "nothing is quantised");
  }
  ep_tensor_rule_t rule = {.name = "inputs->scales",
                           .ndim = 3,
                           .sizes = {a->tokens.sizes[0], a->tokens.sizes[1], 1},
                           .dtypes = EP_DTYPE(ncclFloat32)};
  ep_view_t v;
  EP_TRY(epViewTensor(a->ranges, a->in.scales, &rule, &v));
  call->slotScales = v.data;
  return TREFOIL_OK;
}

/* [B, K] f32 next to the output: read in LL expert-major, written in HT backward. */
static trefoil_result_t viewTokenWeights(const combine_args_t *a, float **out) {
  ep_tensor_rule_t rule = {.name = "outputs->topk_weights",
                           .ndim = 2,
                           .written = a->backward,
                           .sizes = {a->outTokens.sizes[0], (size_t)a->h->routed.topk},
                           .dtypes = EP_DTYPE(ncclFloat32)};
  ep_view_t v;
  EP_TRY(epViewTensor(a->ranges, a->out.topk_weights, &rule, &v));
  *out = v.data;
  return TREFOIL_OK;
}

static trefoil_result_t viewSlotWeights(const combine_args_t *a, ep_combine_call_t *call) {
  int flat = a->h->mode == TREFOIL_HT_FLAT;
  ep_tensor_rule_t rule = {.name = "inputs->topk_weights",
                           .ndim = flat ? 2 : 1,
                           .atLeast = 1,
                           .sizes = {a->eagerCount > 0 ? (size_t)a->eagerCount : 0, EP_ANY},
                           .dtypes = EP_DTYPE(ncclFloat32)};
  EP_CHECK(a->out.topk_weights, TREFOIL_INVALID_ARGUMENT, "outputs->topk_weights is NULL");
  if (flat) rule.sizes[1] = a->out.topk_weights->sizes[1];
  ep_view_t v;
  EP_TRY(epViewTensor(a->ranges, a->in.topk_weights, &rule, &v));
  EP_CHECK((v.sizes[0] == 0) == (a->tokens.rows == 0), TREFOIL_INVALID_ARGUMENT,
           "inputs->tokens has %lld rows and inputs->topk_weights %zu; both or neither may be "
           "empty",
           (long long)a->tokens.rows, v.sizes[0]);
  call->slotWeights = v.data;
  call->slotWeightRows = (int64_t)v.sizes[0];
  return TREFOIL_OK;
}

static trefoil_result_t checkWeights(const combine_args_t *a, ep_combine_call_t *call) {
  float *weights = NULL;
  if (a->backward) {
    EP_TRY(viewTokenWeights(a, &call->outWeights));
    return viewSlotWeights(a, call);
  }
  EP_TRY(epCheckAbsent(a->in.topk_weights, "inputs->topk_weights",
                       "only the backward pass takes weights per slot"));
  if (a->h->mode != TREFOIL_LL_EXPERT_MAJOR) return TREFOIL_OK;
  EP_TRY(viewTokenWeights(a, &weights));
  call->weights = weights;
  return TREFOIL_OK;
}

static trefoil_result_t findEagerCount(combine_args_t *a) {
  a->eagerCount = -1;
  if (!epIsHt(a->g) || a->g->limits.maxRecv) return TREFOIL_OK;
  return epBackend.receivedCount(a->h, a->stream, &a->eagerCount);
}

static trefoil_result_t combine(combine_args_t *a) {
  ep_ranges_t ranges;
  epRangesBegin(&ranges, a->g, "ncclEpCombine");
  a->ranges = &ranges;
  ep_combine_call_t call;
  memset(&call, 0, sizeof call);
  EP_TRY(checkOrder(a));
  EP_TRY(epCheckDeferred(a->g));
  EP_TRY(findEagerCount(a));
  EP_TRY(checkTokens(a));
  EP_TRY(checkScales(a, &call));
  EP_TRY(checkWeights(a, &call));
  if (a->g->checkTensors) EP_TRY(epRangeCheckHandle(a->ranges, a->h));
  call.numTokens = (int64_t)a->outTokens.sizes[0];
  call.backward = a->backward;
  call.topk = call.weights || call.outWeights ? a->h->routed.topk : 0;
  call.sendOnly = a->config.send_only && !epIsHt(a->g);
  call.quant = a->nvfp4 ? EP_QUANT_NVFP4 : EP_QUANT_NONE;
  call.dtype = (trefoil_dtype_t)a->tokens.dtype;
  call.width = (int64_t)a->outTokens.sizes[1];
  call.tokens = a->tokens.data;
  call.tokensWindow = a->in.tokens->win_hdl;
  call.tokensOffset = a->in.tokens->win_offset;
  call.rows = a->tokens.rows;
  call.out = a->outTokens.data;
  EP_CHECK(epIsHt(a->g) || a->h->isDispatched, TREFOIL_INVALID_USAGE,
           "ncclEpCombine: no ncclEpDispatch on this handle since its ncclEpUpdateHandle; low "
           "latency learns there which rows go back to whom");
  EP_TRY(epBackend.combine(a->h, &call, a->stream));
  if (call.sendOnly) {
    a->h->pending = EP_PENDING_COMBINE;
    a->g->numPending++;
  }
  return TREFOIL_OK;
}

ncclResult_t ncclEpCombine(ncclEpHandle_t handle, const ncclEpCombineInputs_t *inputs,
                           const ncclEpCombineOutputs_t *outputs,
                           const ncclEpCombineConfig_t *config, cudaStream_t stream) {
  EP_RANGE();
  combine_args_t a;
  memset(&a, 0, sizeof a);
  a.h = handle;
  a.stream = stream;
  trefoil_result_t result = epCheckHandle(handle, "ncclEpCombine");
  if (result == TREFOIL_OK) {
    a.g = handle->group;
    result = copyStructs(&a, inputs, outputs, config);
  }
  if (result == TREFOIL_OK) result = combine(&a);
  return (ncclResult_t)result;
}
