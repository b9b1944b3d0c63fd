/* The ABI, asserted at compile time: included by a C99 and a C++17 source. */
#include "nccl_ep.h"

#include <stddef.h>

#define JOIN2(a, b)             a##b
#define JOIN(a, b)              JOIN2(a, b)
#define ASSERT(cond)            typedef char JOIN(assertion_, __LINE__)[(cond) ? 1 : -1]
#define AT(type, field, offset) ASSERT(offsetof(type, field) == (offset))

ASSERT(NCCL_EP_MAJOR == 0 && NCCL_EP_MINOR == 2 && NCCL_EP_PATCH == 0);
ASSERT(NCCL_EP_VERSION_CODE == 200 && NCCL_EP_API_VERSION == 2 && NCCL_EP_AUTO == 0);
ASSERT(NCCL_EP_MAGIC == 0xC00FFFEEu && NCCL_EP_TENSOR_MAGIC == 0xCAFECAFEu);
ASSERT(ncclFloat4x2 == (ncclDataType_t)12);

ASSERT(NCCL_EP_ALGO_LOW_LATENCY == 0 && NCCL_EP_ALGO_HIGH_THROUGHPUT == 1);
ASSERT(NCCL_EP_LAYOUT_UNSET == 0 && NCCL_EP_LAYOUT_EXPERT_MAJOR == 1);
ASSERT(NCCL_EP_LAYOUT_RANK_MAJOR == 2 && NCCL_EP_LAYOUT_FLAT == 3);
ASSERT(NCCL_EP_FWD_PASS == 0 && NCCL_EP_BWD_PASS == 1);
ASSERT(NCCL_EP_OVERFLOW_AUTO == 0 && NCCL_EP_OVERFLOW_TRAP == 1 && NCCL_EP_OVERFLOW_DROP == 2);
ASSERT(NCCL_EP_ZERO_COPY_AUTO == 0 && NCCL_EP_ZERO_COPY_OFF == 1 && NCCL_EP_ZERO_COPY_ON == 2);
ASSERT(NCCL_EP_EXPERT_ID_AUTO == 0 && NCCL_EP_EXPERT_ID_LOCAL == 1);
ASSERT(NCCL_EP_EXPERT_ID_GLOBAL == 2);
ASSERT(NCCL_EP_DISP_QUANT_NONE == 0 && NCCL_EP_DISP_QUANT_FWD == 1);
ASSERT(NCCL_EP_DISP_QUANT_DS_FP8E3M4 == 2);
ASSERT(NCCL_EP_COMB_QUANT_NONE == 0 && NCCL_EP_COMB_QUANT_NVFP4 == 1);
ASSERT(sizeof(ncclEpAlgorithm_t) == 4 && sizeof(ncclEpLayout_t) == 4);
ASSERT(sizeof(ncclEpPassDir_t) == 4 && sizeof(ncclEpOverflowPolicy_t) == 4);
ASSERT(sizeof(ncclEpZeroCopyMode_t) == 4 && sizeof(ncclEpExpertIdKind_t) == 4);
ASSERT(sizeof(ncclEpDispQuant_t) == 4 && sizeof(ncclEpCombQuant_t) == 4);

ASSERT(sizeof(ncclEpTensor_t) == 48 && NCCL_EP_TENSOR_V1_SIZE == 48);
AT(ncclEpTensor_t, size, 0);
AT(ncclEpTensor_t, magic, 4);
AT(ncclEpTensor_t, ndim, 8);
AT(ncclEpTensor_t, datatype, 12);
AT(ncclEpTensor_t, data, 16);
AT(ncclEpTensor_t, win_hdl, 24);
AT(ncclEpTensor_t, win_offset, 32);
AT(ncclEpTensor_t, sizes, 40);

ASSERT(sizeof(ncclEpTensorAllocConfig_t) == 8 && NCCL_EP_TENSOR_ALLOC_CONFIG_V1_SIZE == 8);
ASSERT(sizeof(ncclEpCompleteConfig_t) == 8 && NCCL_EP_COMPLETE_CONFIG_V1_SIZE == 8);

ASSERT(sizeof(ncclEpGroupConfig_t) == 112 && NCCL_EP_GROUP_CONFIG_SIZE == 112);
ASSERT(NCCL_EP_GROUP_CONFIG_V1_SIZE == 96 && NCCL_EP_GROUP_CONFIG_V2_SIZE == 112);
AT(ncclEpGroupConfig_t, version, 8);
AT(ncclEpGroupConfig_t, algorithm, 12);
AT(ncclEpGroupConfig_t, num_experts, 16);
AT(ncclEpGroupConfig_t, max_dispatch_tokens_per_rank, 20);
AT(ncclEpGroupConfig_t, max_recv_tokens_per_rank, 24);
AT(ncclEpGroupConfig_t, max_token_bytes, 28);
AT(ncclEpGroupConfig_t, rdma_buffer_size, 32);
AT(ncclEpGroupConfig_t, num_qp_per_rank, 40);
AT(ncclEpGroupConfig_t, num_channels, 44);
AT(ncclEpGroupConfig_t, max_num_sms, 48);
AT(ncclEpGroupConfig_t, alloc, 56);
AT(ncclEpGroupConfig_t, enable_mask, 80);
AT(ncclEpGroupConfig_t, timeout_ns, 88);
AT(ncclEpGroupConfig_t, zero_copy, 96);
AT(ncclEpGroupConfig_t, overflow_policy, 100);
AT(ncclEpGroupConfig_t, num_topk, 104);
AT(ncclEpGroupConfig_t, padding_v2, 108);
AT(ncclEpAllocConfig_t, alloc_fn, 0);
AT(ncclEpAllocConfig_t, free_fn, 8);
AT(ncclEpAllocConfig_t, context, 16);
ASSERT(sizeof(ncclEpAllocConfig_t) == 24);

ASSERT(sizeof(ncclEpLayoutInfo_t) == 48 && NCCL_EP_LAYOUT_INFO_V1_SIZE == 40);
ASSERT(NCCL_EP_LAYOUT_INFO_V2_SIZE == 48);
AT(ncclEpLayoutInfo_t, expert_counters, 8);
AT(ncclEpLayoutInfo_t, src_rank_counters, 16);
AT(ncclEpLayoutInfo_t, expert_offsets, 24);
AT(ncclEpLayoutInfo_t, recv_total_counter, 32);
AT(ncclEpLayoutInfo_t, recv_topk_idx_kind, 40);
AT(ncclEpLayoutInfo_t, padding_v2, 44);

ASSERT(sizeof(ncclEpDispatchInputs_t) == 32 && NCCL_EP_DISPATCH_INPUTS_V1_SIZE == 32);
AT(ncclEpDispatchInputs_t, tokens, 8);
AT(ncclEpDispatchInputs_t, topk_weights, 16);
AT(ncclEpDispatchInputs_t, scales, 24);
ASSERT(sizeof(ncclEpDispatchOutputs_t) == 40 && NCCL_EP_DISPATCH_OUTPUTS_V1_SIZE == 40);
AT(ncclEpDispatchOutputs_t, tokens, 8);
AT(ncclEpDispatchOutputs_t, topk_weights, 16);
AT(ncclEpDispatchOutputs_t, scales, 24);
AT(ncclEpDispatchOutputs_t, topk_idx, 32);
ASSERT(sizeof(ncclEpCombineInputs_t) == 32 && NCCL_EP_COMBINE_INPUTS_V1_SIZE == 24);
ASSERT(NCCL_EP_COMBINE_INPUTS_V2_SIZE == 32);
AT(ncclEpCombineInputs_t, tokens, 8);
AT(ncclEpCombineInputs_t, topk_weights, 16);
AT(ncclEpCombineInputs_t, scales, 24);
ASSERT(sizeof(ncclEpCombineOutputs_t) == 24 && NCCL_EP_COMBINE_OUTPUTS_V1_SIZE == 24);
AT(ncclEpCombineOutputs_t, tokens, 8);
AT(ncclEpCombineOutputs_t, topk_weights, 16);
ASSERT(sizeof(ncclEpHandleConfig_t) == 16 && NCCL_EP_HANDLE_CONFIG_V1_SIZE == 16);
AT(ncclEpHandleConfig_t, dispatch_output_per_expert_alignment, 8);
ASSERT(sizeof(ncclEpDispatchConfig_t) == 24 && NCCL_EP_DISPATCH_CONFIG_V1_SIZE == 20);
ASSERT(NCCL_EP_DISPATCH_CONFIG_V2_SIZE == 24);
AT(ncclEpDispatchConfig_t, send_only, 8);
AT(ncclEpDispatchConfig_t, round_scales, 12);
AT(ncclEpDispatchConfig_t, pass_direction, 16);
AT(ncclEpDispatchConfig_t, quant_recipe, 20);
ASSERT(sizeof(ncclEpCombineConfig_t) == 20 && NCCL_EP_COMBINE_CONFIG_V1_SIZE == 16);
ASSERT(NCCL_EP_COMBINE_CONFIG_V2_SIZE == 20);
AT(ncclEpCombineConfig_t, send_only, 8);
AT(ncclEpCombineConfig_t, pass_direction, 12);
AT(ncclEpCombineConfig_t, quant_recipe, 16);

/* Each initialiser: size and magic; the group's version too; all else zero. */
static int initialisersAreRight(void) {
  ncclEpTensor_t tensor = NCCL_EP_TENSOR_INIT;
  ncclEpGroupConfig_t group = NCCL_EP_GROUP_CONFIG_INIT;
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  ncclEpDispatchInputs_t dispatchIn = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t dispatchOut = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpCombineInputs_t combineIn = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t combineOut = NCCL_EP_COMBINE_OUTPUTS_INIT;
  ncclEpHandleConfig_t handle = NCCL_EP_HANDLE_CONFIG_INIT;
  ncclEpDispatchConfig_t dispatch = NCCL_EP_DISPATCH_CONFIG_INIT;
  ncclEpCombineConfig_t combine = NCCL_EP_COMBINE_CONFIG_INIT;
  ncclEpCompleteConfig_t complete = NCCL_EP_COMPLETE_CONFIG_INIT;
  ncclEpTensorAllocConfig_t alloc = NCCL_EP_TENSOR_ALLOC_CONFIG_INIT;
  int right = tensor.size == 48 && tensor.magic == NCCL_EP_TENSOR_MAGIC && tensor.ndim == 0 &&
              tensor.data == 0 && tensor.win_hdl == 0 && tensor.sizes == 0;
#define SET(s, bytes) right = right && (s).size == (bytes) && (s).magic == NCCL_EP_MAGIC
  SET(group, 112);
  SET(info, 48);
  SET(dispatchIn, 32);
  SET(dispatchOut, 40);
  SET(combineIn, 32);
  SET(combineOut, 24);
  SET(handle, 16);
  SET(dispatch, 24);
  SET(combine, 20);
  SET(complete, 8);
  SET(alloc, 8);
  right = right && group.version == 2 && group.num_experts == 0 && group.timeout_ns == 0 &&
          group.alloc.alloc_fn == 0 && group.num_topk == 0;
  right = right && NCCL_EP_HAS_FIELD(&group, ncclEpGroupConfig_t, num_topk);
  group.size = NCCL_EP_GROUP_CONFIG_V1_SIZE;
  right = right && !NCCL_EP_HAS_FIELD(&group, ncclEpGroupConfig_t, zero_copy);
  return right && NCCL_EP_HAS_FIELD(&group, ncclEpGroupConfig_t, timeout_ns);
}
