/* One operation of a script as a call of the C API: descriptors from shapes and places. */
#include "validate/check_rank.h"

#include "plan/error.h"

#include <string.h>

ncclEpLayout_t epLayoutOf(trefoil_mode_t mode) {
  return mode == TREFOIL_LL_RANK_MAJOR ? NCCL_EP_LAYOUT_RANK_MAJOR
         : mode == TREFOIL_HT_FLAT     ? NCCL_EP_LAYOUT_FLAT
                                       : NCCL_EP_LAYOUT_EXPERT_MAJOR;
}

typedef struct tensors {
  ncclEpTensor_t t[EP_NUM_TENSORS];
  size_t sizes[EP_NUM_TENSORS][3];
} tensors_t;

static void makeTensors(ep_check_rank_t *rank, const ep_check_case_t *c, const ep_check_op_t *op,
                        tensors_t *ts) {
  for (int i = 0; i < EP_NUM_TENSORS; i++) {
    if (op->region[i] < 0) continue;
    ep_check_dims_t d;
    epTensorDims(c, op, (ep_tensor_id_t)i, rank->rank, &d);
    size_t offset = c->regions[op->region[i]].offset;
    memcpy(ts->sizes[i], d.sizes, sizeof d.sizes);
    ts->t[i] = NCCL_EP_TENSOR_INIT;
    ts->t[i].ndim = d.ndim;
    ts->t[i].datatype = (ncclDataType_t)d.dtype;
    ts->t[i].sizes = ts->sizes[i];
    ts->t[i].data = (uint8_t *)rank->image + offset;
    if (d.bytes == 0 && (op->payloadKey & 4)) ts->t[i].data = NULL;
    int windowed = rank->window && (i == EP_T_IN_TOKENS || i == EP_T_OUT_TOKENS ||
                                    i == EP_T_IN_SCALES || i == EP_T_OUT_SCALES);
    if (!windowed) continue;
    ts->t[i].win_hdl = rank->window;
    ts->t[i].win_offset = offset;
    if (op->payloadKey & 8) ts->t[i].data = NULL; /* the window says where */
  }
}

static ncclEpTensor_t *get(const ep_check_op_t *op, tensors_t *ts, ep_tensor_id_t id) {
  return op->region[id] < 0 ? NULL : &ts->t[id];
}

static ncclEpHandle_t *handleOf(ep_check_rank_t *rank, const ep_check_case_t *c,
                                const ep_check_op_t *op) {
  return c->freshHandle ? &rank->fresh : &rank->handles[op->handle];
}

static ncclEpHandleConfig_t handleConfig(const ep_check_handle_t *h) {
  ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
  config.dispatch_output_per_expert_alignment = h->alignment;
  return config;
}

static trefoil_result_t callUpdate(ep_check_rank_t *rank, const ep_check_case_t *c,
                                   const ep_check_op_t *op, tensors_t *ts) {
  ncclEpHandle_t *handle = handleOf(rank, c, op);
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  info.expert_counters = get(op, ts, EP_T_EXPERT_COUNTERS);
  info.expert_offsets = get(op, ts, EP_T_EXPERT_OFFSETS);
  info.recv_total_counter = get(op, ts, EP_T_TOTAL);
  const ncclEpLayoutInfo_t *pass = c->group->highThroughput && op->wantCounters ? &info : NULL;
  if (c->freshHandle && !*handle) {
    const ep_check_handle_t *h = &c->group->handles[op->handle];
    ncclEpHandleConfig_t config = handleConfig(h);
    rank->doing = "ncclEpCreateHandle";
    EP_TRY_EP(rank, rank->lib->ncclEpCreateHandle(handle, rank->epGroup, epLayoutOf(h->mode),
                                                  &ts->t[EP_T_IDX], pass, &config, rank->stream));
    return TREFOIL_OK;
  }
  rank->doing = "ncclEpUpdateHandle";
  EP_TRY_EP(rank, rank->lib->ncclEpUpdateHandle(*handle, &ts->t[EP_T_IDX], pass, rank->stream));
  return TREFOIL_OK;
}

static trefoil_result_t callDispatch(ep_check_rank_t *rank, const ep_check_case_t *c,
                                     const ep_check_op_t *op, tensors_t *ts) {
  static const ncclEpDispQuant_t recipes[] = {
      [TREFOIL_QUANT_NONE] = NCCL_EP_DISP_QUANT_NONE,
      [TREFOIL_QUANT_CALLER] = NCCL_EP_DISP_QUANT_FWD,
      [TREFOIL_QUANT_E4M3] = NCCL_EP_DISP_QUANT_DS_FP8E3M4,
  };
  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
  in.tokens = get(op, ts, EP_T_IN_TOKENS);
  in.topk_weights = get(op, ts, EP_T_IN_WEIGHTS);
  in.scales = get(op, ts, EP_T_IN_SCALES);
  out.tokens = get(op, ts, EP_T_OUT_TOKENS);
  out.topk_weights = get(op, ts, EP_T_OUT_WEIGHTS);
  out.scales = get(op, ts, EP_T_OUT_SCALES);
  out.topk_idx = get(op, ts, EP_T_OUT_IDX);
  info.expert_counters = get(op, ts, EP_T_EXPERT_COUNTERS);
  info.src_rank_counters = get(op, ts, EP_T_SOURCE_COUNTERS);
  info.recv_topk_idx_kind = op->globalIds         ? NCCL_EP_EXPERT_ID_GLOBAL
                            : op->payloadKey & 16 ? NCCL_EP_EXPERT_ID_LOCAL
                                                  : NCCL_EP_EXPERT_ID_AUTO;
  int needInfo = op->globalIds || info.expert_counters || info.src_rank_counters;
  config.send_only = (unsigned)op->sendOnly;
  config.round_scales = (unsigned)op->roundScales;
  config.pass_direction = op->backward ? NCCL_EP_BWD_PASS : NCCL_EP_FWD_PASS;
  config.quant_recipe = recipes[op->quant];
  int plain = !op->sendOnly && !op->backward && op->quant == TREFOIL_QUANT_NONE;
  rank->doing = "ncclEpDispatch";
  EP_TRY_EP(rank, rank->lib->ncclEpDispatch(
                      *handleOf(rank, c, op), &in, &out, needInfo ? &info : NULL,
                      plain && (op->payloadKey & 32) ? NULL : &config, rank->stream));
  return TREFOIL_OK;
}

static trefoil_result_t callCombine(ep_check_rank_t *rank, const ep_check_case_t *c,
                                    const ep_check_op_t *op, tensors_t *ts) {
  ncclEpCombineInputs_t in = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t out = NCCL_EP_COMBINE_OUTPUTS_INIT;
  ncclEpCombineConfig_t config = NCCL_EP_COMBINE_CONFIG_INIT;
  in.tokens = get(op, ts, EP_T_IN_TOKENS);
  in.topk_weights = get(op, ts, EP_T_IN_WEIGHTS);
  in.scales = get(op, ts, EP_T_IN_SCALES);
  out.tokens = get(op, ts, EP_T_OUT_TOKENS);
  out.topk_weights = get(op, ts, EP_T_OUT_WEIGHTS);
  config.send_only = (unsigned)op->sendOnly;
  config.pass_direction = op->backward ? NCCL_EP_BWD_PASS : NCCL_EP_FWD_PASS;
  config.quant_recipe =
      op->quant == TREFOIL_QUANT_NVFP4 ? NCCL_EP_COMB_QUANT_NVFP4 : NCCL_EP_COMB_QUANT_NONE;
  int plain = !op->sendOnly && !op->backward && op->quant == TREFOIL_QUANT_NONE;
  rank->doing = "ncclEpCombine";
  EP_TRY_EP(rank, rank->lib->ncclEpCombine(*handleOf(rank, c, op), &in, &out,
                                           plain && (op->payloadKey & 32) ? NULL : &config,
                                           rank->stream));
  return TREFOIL_OK;
}

static trefoil_result_t callMask(ep_check_rank_t *rank, const ep_check_case_t *c,
                                 const ep_check_op_t *op, tensors_t *ts) {
  const ep_library_t *lib = rank->lib;
  if (op->kind == EP_OP_MASK_UPDATE) {
    int mask[EP_MAX_RANKS], R = c->group->shape.numRanks;
    for (int q = 0; q < R; q++) mask[q] = c->active[rank->rank * R + q];
    rank->doing = "ncclEpMaskUpdate";
    EP_TRY_EP(rank, lib->ncclEpMaskUpdate(rank->epGroup, mask, rank->stream));
    memset(mask, 0x55, sizeof mask); /* read during the call only */
  } else if (op->kind == EP_OP_MASK_QUERY) {
    rank->doing = "ncclEpMaskQuery";
    EP_TRY_EP(rank, lib->ncclEpMaskQuery(rank->epGroup, ts->t[EP_T_MASK].data, rank->stream));
  } else {
    rank->doing = "ncclEpMaskClean";
    EP_TRY_EP(rank, lib->ncclEpMaskClean(rank->epGroup, rank->stream));
  }
  return TREFOIL_OK;
}

trefoil_result_t epCallOp(ep_check_rank_t *rank, const ep_check_case_t *c,
                          const ep_check_op_t *op) {
  tensors_t ts;
  if (rank->place) atomic_store(&rank->place->op, (int)(op - c->ops));
  if (c->group->isGrad) return epGradCall(rank, c, op);
  makeTensors(rank, c, op, &ts);
  switch (op->kind) {
  case EP_OP_UPDATE:
    return callUpdate(rank, c, op, &ts);
  case EP_OP_DISPATCH:
    return callDispatch(rank, c, op, &ts);
  case EP_OP_COMBINE:
    return callCombine(rank, c, op, &ts);
  case EP_OP_COMPLETE:
    rank->doing = "ncclEpComplete";
    EP_TRY_EP(rank, rank->lib->ncclEpComplete(*handleOf(rank, c, op), NULL, rank->stream));
    return TREFOIL_OK;
  case EP_OP_SYNC:
    rank->doing = "cudaStreamSynchronize";
    EP_TRY_CUDA(rank, rank->lib->cudaStreamSynchronize(rank->stream));
    return TREFOIL_OK;
  default:
    return callMask(rank, c, op, &ts);
  }
}
