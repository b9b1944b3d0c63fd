/* ncclEpDispatch: every rule on its tensors, then the backend. */
#include <string.h>

#include "api/object.h"
#include "api/range.h"

typedef struct dispatch_args {
  ncclEpHandle_t h;
  ncclEpGroup_t g;
  ncclEpDispatchInputs_t in;
  ncclEpDispatchOutputs_t out;
  ncclEpLayoutInfo_t info;
  int hasInfo;
  ncclEpDispatchConfig_t config;
  size_t R, L, N;
  int64_t eagerCount; /* HT eager: slots that arrive; else -1 */
  cudaStream_t stream;
  ep_ranges_t *ranges;
  ep_view_t tokens, scales, outTokens, outScales;
} dispatch_args_t;

static trefoil_result_t copyStructs(dispatch_args_t *a, const ncclEpDispatchInputs_t *in,
                                    const ncclEpDispatchOutputs_t *out,
                                    const ncclEpLayoutInfo_t *info,
                                    const ncclEpDispatchConfig_t *config) {
  EP_TRY(
      epCopyStruct(&a->in, in, EP_STRUCT(ncclEpDispatchInputs_t, NCCL_EP_DISPATCH_INPUTS_V1_SIZE)));
  EP_TRY(epCopyStruct(&a->out, out,
                      EP_STRUCT(ncclEpDispatchOutputs_t, NCCL_EP_DISPATCH_OUTPUTS_V1_SIZE)));
  a->hasInfo = info != NULL;
  if (info) {
    EP_TRY(
        epCopyStruct(&a->info, info, EP_STRUCT(ncclEpLayoutInfo_t, NCCL_EP_LAYOUT_INFO_V1_SIZE)));
  }
  if (config) {
    EP_TRY(epCopyStruct(&a->config, config,
                        EP_STRUCT(ncclEpDispatchConfig_t, NCCL_EP_DISPATCH_CONFIG_V1_SIZE)));
  }
  EP_CHECK((unsigned)a->config.pass_direction <= 1, TREFOIL_INVALID_ARGUMENT,
           "config.pass_direction is %d; must be 0 (forward) or 1 (backward)",
           (int)a->config.pass_direction);
  EP_CHECK((unsigned)a->config.quant_recipe <= 2, TREFOIL_INVALID_ARGUMENT,
           "config.quant_recipe is %d; must be 0 to 2", (int)a->config.quant_recipe);
  EP_CHECK((unsigned)a->info.recv_topk_idx_kind <= 2, TREFOIL_INVALID_ARGUMENT,
           "layout_info->recv_topk_idx_kind is %d; must be 0 to 2",
           (int)a->info.recv_topk_idx_kind);
  return TREFOIL_OK;
}

static trefoil_result_t checkOrder(const dispatch_args_t *a) {
  ncclEpHandle_t h = a->h;
  int backward = a->config.pass_direction == NCCL_EP_BWD_PASS;
  EP_CHECK(!backward || epIsHt(a->g), TREFOIL_INVALID_USAGE,
           "ncclEpDispatch: pass_direction is backward; low latency has only the forward pass");
  EP_CHECK(
      h->pending == EP_PENDING_NONE, TREFOIL_INVALID_USAGE,
      "ncclEpDispatch: the handle's send_only operation is pending; call ncclEpComplete first");
  EP_CHECK(a->g->numPending < 2, TREFOIL_INVALID_USAGE,
           "ncclEpDispatch: two send_only operations of the group are in flight; complete one "
           "first");
  return epCheckRouted(h, "ncclEpDispatch", a->stream);
}

static int isCaller(const dispatch_args_t *a) {
  return a->config.quant_recipe == NCCL_EP_DISP_QUANT_FWD;
}

static int isE4m3(const dispatch_args_t *a) {
  return a->config.quant_recipe == NCCL_EP_DISP_QUANT_DS_FP8E3M4;
}

#define FP8_DTYPES    (EP_DTYPE(ncclFloat8e4m3) | EP_DTYPE(ncclFloat8e5m2))
#define CALLER_TOKENS (EP_DTYPES_SUM | FP8_DTYPES | EP_DTYPE(ncclFloat4x2))
#define CALLER_SCALES (EP_DTYPES_SUM | FP8_DTYPES | EP_DTYPE(ncclUint8))

static trefoil_result_t checkInputTokens(dispatch_args_t *a) {
  ep_tensor_rule_t rule = {.name = "inputs->tokens", .ndim = 2};
  rule.sizes[0] = (size_t)a->h->routed.numTokens;
  rule.sizes[1] = EP_ANY;
  rule.dtypes = isCaller(a) ? CALLER_TOKENS : isE4m3(a) ? EP_DTYPE(ncclBfloat16) : EP_DTYPES_SUM;
  rule.alignment = isCaller(a) ? 16 : 0;
  EP_TRY(epViewTensor(a->ranges, a->in.tokens, &rule, &a->tokens));
  EP_CHECK(a->tokens.sizes[1] > 0, TREFOIL_INVALID_ARGUMENT, "inputs->tokens: sizes[1] is 0");
  if (!isCaller(a)) {
    const char *why = "only NCCL_EP_DISP_QUANT_FWD takes the caller's scales";
    EP_TRY(epCheckAbsent(a->in.scales, "inputs->scales", why));
    EP_CHECK(isE4m3(a) || !a->config.round_scales, TREFOIL_INVALID_ARGUMENT,
             "config.round_scales is %u, but config.quant_recipe asks for no scales; recipes are "
             "NCCL_EP_DISP_QUANT_DS_FP8E3M4, whose scales it rounds, and NCCL_EP_DISP_QUANT_FWD",
             a->config.round_scales);
    return TREFOIL_OK;
  }
  EP_CHECK(!a->config.round_scales, TREFOIL_INVALID_ARGUMENT,
           "config.round_scales is %u; must be 0 with NCCL_EP_DISP_QUANT_FWD",
           a->config.round_scales);
  ep_tensor_rule_t scales = {.name = "inputs->scales",
                             .ndim = 2,
                             .sizes = {a->tokens.sizes[0], EP_ANY},
                             .alignment = 16,
                             .dtypes = CALLER_SCALES};
  EP_TRY(epViewTensor(a->ranges, a->in.scales, &scales, &a->scales));
  EP_CHECK(a->tokens.rowBytes % 16 == 0, TREFOIL_INVALID_ARGUMENT,
           "inputs->tokens: a row has %zu bytes; must be a multiple of 16", a->tokens.rowBytes);
  EP_CHECK(a->scales.rowBytes > 0 && a->scales.rowBytes % 16 == 0, TREFOIL_INVALID_ARGUMENT,
           "inputs->scales: a row has %zu bytes; must be a positive multiple of 16",
           a->scales.rowBytes);
  return TREFOIL_OK;
}

/* Bytes of a token as it travels, against the group's bound. */
static trefoil_result_t checkBytes(const dispatch_args_t *a) {
  size_t limit = a->g->limits.maxTokenBytes, width = a->tokens.sizes[1];
  size_t bytes = a->tokens.rowBytes + a->scales.rowBytes;
  if (isE4m3(a)) {
    EP_CHECK(!epIsHt(a->g), TREFOIL_INVALID_ARGUMENT,
             "config.quant_recipe is DS_FP8E3M4, which is low latency's; high throughput takes "
             "NONE or FWD");
    EP_CHECK(width % 512 == 0, TREFOIL_INVALID_ARGUMENT,
             "inputs->tokens: sizes[1] is %zu; DS_FP8E3M4 takes multiples of 512", width);
    bytes = width + width / 32;
  }
  EP_CHECK(bytes <= limit, TREFOIL_INVALID_ARGUMENT,
           "inputs->tokens: a token with its scales has %zu bytes; max_token_bytes is %zu", bytes,
           limit);
  return TREFOIL_OK;
}

static void slotDims(const dispatch_args_t *a, ep_tensor_rule_t *rule) {
  if (epIsHt(a->g)) {
    rule->ndim = 2;
    rule->atLeast = 1;
    rule->sizes[0] = a->eagerCount >= 0 ? (size_t)a->eagerCount : a->g->limits.maxRecv;
    return;
  }
  int expertMajor = a->h->mode == TREFOIL_LL_EXPERT_MAJOR;
  rule->ndim = 3;
  rule->sizes[0] = expertMajor ? a->L : a->R;
  rule->sizes[1] = expertMajor ? a->R * a->N : a->N;
}

static trefoil_result_t checkOutputTokens(dispatch_args_t *a) {
  ep_tensor_rule_t rule = {
      .name = "outputs->tokens", .alignment = isCaller(a) ? 16 : 0, .written = 1};
  rule.dtypes = isE4m3(a) ? EP_DTYPE(ncclFloat8e4m3) : EP_DTYPE(a->tokens.dtype);
  slotDims(a, &rule);
  rule.sizes[rule.ndim - 1] = a->tokens.sizes[1];
  EP_TRY(epViewTensor(a->ranges, a->out.tokens, &rule, &a->outTokens));
  if (!isCaller(a) && !isE4m3(a)) {
    return epCheckAbsent(a->out.scales, "outputs->scales", "nothing is quantised");
  }
  ep_tensor_rule_t scales = {
      .name = "outputs->scales", .alignment = isCaller(a) ? 16 : 0, .written = 1};
  scales.dtypes = isE4m3(a) ? EP_DTYPE(ncclFloat32) : EP_DTYPE(a->scales.dtype);
  scales.ndim = rule.ndim;
  memcpy(scales.sizes, a->outTokens.sizes, sizeof scales.sizes);
  scales.sizes[rule.ndim - 1] = isE4m3(a) ? a->tokens.sizes[1] / 128 : a->scales.sizes[1];
  EP_TRY(epViewTensor(a->ranges, a->out.scales, &scales, &a->outScales));
  EP_CHECK(!epIsHt(a->g) || a->outTokens.windowed == a->outScales.windowed,
           TREFOIL_INVALID_ARGUMENT,
           "outputs->tokens and outputs->scales: windows for both or for neither");
  return TREFOIL_OK;
}

static trefoil_result_t checkZeroCopy(const dispatch_args_t *a) {
  if (a->g->limits.zeroCopy != NCCL_EP_ZERO_COPY_ON) return TREFOIL_OK;
  if (epIsHt(a->g)) {
    EP_CHECK(a->outTokens.windowed, TREFOIL_INVALID_ARGUMENT,
             "outputs->tokens: zero_copy ON needs a window (win_hdl)");
    return TREFOIL_OK;
  }
  EP_CHECK(a->h->mode == TREFOIL_LL_RANK_MAJOR, TREFOIL_INVALID_ARGUMENT,
           "zero_copy ON: low-latency dispatch takes only the rank-major layout");
  EP_CHECK(a->g->numRanks == a->g->ranksPerNode, TREFOIL_INVALID_ARGUMENT,
           "zero_copy ON: low-latency dispatch needs all ranks in one NVLink domain; there are %d",
           a->g->numRanks / a->g->ranksPerNode);
  EP_CHECK(!isE4m3(a), TREFOIL_INVALID_ARGUMENT, "zero_copy ON does not go with DS_FP8E3M4");
  EP_CHECK(a->outTokens.windowed || a->outScales.windowed, TREFOIL_INVALID_ARGUMENT,
           "zero_copy ON needs a window (win_hdl) on outputs->tokens or outputs->scales");
  return TREFOIL_OK;
}

static trefoil_result_t checkNoTopk(const dispatch_args_t *a, const char *why) {
  EP_TRY(epCheckAbsent(a->in.topk_weights, "inputs->topk_weights", why));
  EP_TRY(epCheckAbsent(a->out.topk_weights, "outputs->topk_weights", why));
  return epCheckAbsent(a->out.topk_idx, "outputs->topk_idx", why);
}

static trefoil_result_t viewInputWeights(const dispatch_args_t *a, ep_dispatch_call_t *call) {
  ep_tensor_rule_t rule = {.name = "inputs->topk_weights",
                           .ndim = 2,
                           .sizes = {a->tokens.sizes[0], (size_t)a->h->routed.topk},
                           .dtypes = EP_DTYPE(ncclFloat32)};
  ep_view_t v;
  EP_TRY(epViewTensor(a->ranges, a->in.topk_weights, &rule, &v));
  call->topk = a->h->routed.topk;
  call->hasWeights = 1;
  call->weights = v.data; /* NULL is fine for zero rows */
  return TREFOIL_OK;
}

static trefoil_result_t viewOutputTopk(const dispatch_args_t *a, ep_dispatch_call_t *call) {
  int ht = epIsHt(a->g), flat = a->h->mode != TREFOIL_HT_EXPERT_MAJOR;
  size_t topk = (size_t)call->topk;
  ep_tensor_rule_t rule = {
      .name = "outputs->topk_weights", .written = 1, .dtypes = EP_DTYPE(ncclFloat32)};
  if (ht) {
    rule.ndim = flat ? 2 : 1;
    rule.atLeast = 1;
    rule.sizes[0] = a->eagerCount > 0 ? (size_t)a->eagerCount : 0;
    rule.sizes[1] = topk;
  } else {
    rule.ndim = 3;
    rule.sizes[0] = a->R;
    rule.sizes[1] = a->N;
    rule.sizes[2] = topk;
  }
  ep_view_t v;
  EP_TRY(epViewTensor(a->ranges, a->out.topk_weights, &rule, &v));
  int64_t weightRows = ht ? (int64_t)v.sizes[0] : v.rows;
  EP_CHECK(!ht || (v.sizes[0] == 0) == (a->outTokens.rows == 0), TREFOIL_INVALID_ARGUMENT,
           "outputs->tokens has %lld rows and outputs->topk_weights %zu; both or neither may be "
           "empty",
           (long long)a->outTokens.rows, v.sizes[0]);
  call->out.weights = v.data;
  call->out.topkRows = weightRows;
  if (ht && !flat) {
    return epCheckAbsent(a->out.topk_idx, "outputs->topk_idx",
                         "expert-major zones tell the expert");
  }
  rule.name = "outputs->topk_idx";
  rule.dtypes = EP_DTYPE(ht ? ncclInt64 : ncclInt32);
  EP_TRY(epViewTensor(a->ranges, a->out.topk_idx, &rule, &v));
  EP_CHECK(!ht || v.rows == weightRows, TREFOIL_INVALID_ARGUMENT,
           "outputs->topk_idx has %lld rows and outputs->topk_weights %lld; must be equal",
           (long long)v.rows, (long long)weightRows);
  call->out.idx = v.data;
  return TREFOIL_OK;
}

static trefoil_result_t checkTopk(const dispatch_args_t *a, ep_dispatch_call_t *call) {
  if (a->h->mode == TREFOIL_LL_EXPERT_MAJOR) {
    return checkNoTopk(a, "low-latency expert-major weighs at ncclEpCombine");
  }
  if (call->backward) return checkNoTopk(a, "the backward pass carries tokens only");
  EP_TRY(viewInputWeights(a, call));
  return viewOutputTopk(a, call);
}

static trefoil_result_t checkCounters(const dispatch_args_t *a, ep_dispatch_call_t *call) {
  unsigned int32 = EP_DTYPE(ncclInt32);
  if (a->h->mode == TREFOIL_LL_EXPERT_MAJOR) {
    EP_CHECK(a->hasInfo && a->info.expert_counters, TREFOIL_INVALID_ARGUMENT,
             "layout_info->expert_counters is %s; low-latency expert-major needs it",
             a->hasInfo ? "NULL" : "missing: layout_info is NULL");
    return epViewCounter(a->ranges, a->info.expert_counters, "layout_info->expert_counters", a->L,
                         int32, &call->expertCounters);
  }
  if (a->h->mode == TREFOIL_LL_RANK_MAJOR && a->hasInfo) {
    return epViewCounter(a->ranges, a->info.src_rank_counters, "layout_info->src_rank_counters",
                         a->R, int32, &call->srcRankCounters);
  }
  return TREFOIL_OK;
}

static trefoil_result_t findEagerCount(dispatch_args_t *a) {
  a->eagerCount = -1;
  if (!epIsHt(a->g) || a->g->limits.maxRecv) return TREFOIL_OK;
  return epBackend.receivedCount(a->h, a->stream, &a->eagerCount);
}

static void fillCall(const dispatch_args_t *a, ep_dispatch_call_t *call) {
  call->numTokens = (int64_t)a->tokens.sizes[0];
  call->sendOnly = a->config.send_only && !epIsHt(a->g);
  call->roundScales = a->config.round_scales != 0;
  call->globalIds = a->info.recv_topk_idx_kind == NCCL_EP_EXPERT_ID_GLOBAL;
  call->quant = isCaller(a) ? EP_QUANT_CALLER : isE4m3(a) ? EP_QUANT_E4M3 : EP_QUANT_NONE;
  call->dtype = (trefoil_dtype_t)a->tokens.dtype;
  call->width = (int64_t)a->tokens.sizes[1];
  call->inputRowBytes = a->tokens.rowBytes;
  call->tokenBytes = a->outTokens.rowBytes;
  call->scaleBytes = a->outScales.rowBytes;
  call->tokens = a->tokens.data;
  call->scales = a->scales.data;
  call->out.tokens = a->outTokens.data;
  call->out.scales = a->outScales.data;
  call->out.rows = a->outTokens.rows;
  if (a->tokens.windowed) {
    call->tokensWindow = a->in.tokens->win_hdl;
    call->tokensOffset = a->in.tokens->win_offset;
  }
  if (a->scales.windowed) {
    call->scalesWindow = a->in.scales->win_hdl;
    call->scalesOffset = a->in.scales->win_offset;
  }
  if (a->outTokens.windowed) {
    call->out.tokensWindow = a->out.tokens->win_hdl;
    call->out.tokensOffset = a->out.tokens->win_offset;
  }
  if (a->outScales.windowed) {
    call->out.scalesWindow = a->out.scales->win_hdl;
    call->out.scalesOffset = a->out.scales->win_offset;
  }
}

static trefoil_result_t dispatch(dispatch_args_t *a) {
  a->g = a->h->group;
  a->R = (size_t)a->g->numRanks;
  a->L = (size_t)trefoilExpertsPerRank(&a->h->sizing.config.shape);
  a->N = a->g->limits.maxTokens;
  ep_ranges_t ranges;
  epRangesBegin(&ranges, a->g, "ncclEpDispatch");
  a->ranges = &ranges;
  ep_dispatch_call_t call;
  memset(&call, 0, sizeof call);
  call.backward = a->config.pass_direction == NCCL_EP_BWD_PASS;
  EP_TRY(checkOrder(a));
  EP_TRY(checkInputTokens(a));
  EP_TRY(checkBytes(a));
  EP_TRY(checkCounters(a, &call));
  EP_TRY(epCheckDeferred(a->g));
  EP_TRY(findEagerCount(a));
  EP_TRY(checkOutputTokens(a));
  EP_TRY(checkZeroCopy(a));
  EP_TRY(checkTopk(a, &call));
  if (a->g->checkTensors) EP_TRY(epRangeCheckHandle(a->ranges, a->h));
  fillCall(a, &call);
  EP_TRY(epBackend.dispatch(a->h, &call, a->stream));
  a->h->isDispatched = 1;
  if (call.sendOnly) {
    a->h->pending = EP_PENDING_DISPATCH;
    a->g->numPending++;
  }
  return TREFOIL_OK;
}

ncclResult_t ncclEpDispatch(ncclEpHandle_t handle, const ncclEpDispatchInputs_t *inputs,
                            const ncclEpDispatchOutputs_t *outputs,
                            const ncclEpLayoutInfo_t *layout_info,
                            const ncclEpDispatchConfig_t *config, cudaStream_t stream) {
  EP_RANGE();
  dispatch_args_t a;
  memset(&a, 0, sizeof a);
  a.h = handle;
  a.stream = stream;
  trefoil_result_t result = epCheckHandle(handle, "ncclEpDispatch");
  if (result == TREFOIL_OK) result = copyStructs(&a, inputs, outputs, layout_info, config);
  if (result == TREFOIL_OK) result = dispatch(&a);
  return (ncclResult_t)result;
}
