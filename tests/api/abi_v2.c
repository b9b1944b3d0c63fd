/* Version 2 of the interface, frozen. */
#include "abi_declarations.h"

#define VERSION 2
typedef struct {
  unsigned size, magic, version;
  int algorithm;
  unsigned num_experts, max_dispatch_tokens_per_rank, max_recv_tokens_per_rank, max_token_bytes;
  unsigned long rdma_buffer_size;
  unsigned num_qp_per_rank, num_channels, max_num_sms;
  void *alloc[3];
  unsigned enable_mask;
  uint64_t timeout_ns;
  int zero_copy, overflow_policy;
  unsigned num_topk;
  unsigned char padding_v2[4];
} group_config_t;
typedef struct {
  unsigned size, magic;
  tensor_t *expert_counters, *src_rank_counters, *expert_offsets, *recv_total_counter;
  int recv_topk_idx_kind;
  unsigned char padding_v2[4];
} layout_info_t;
typedef struct {
  unsigned size, magic, send_only, round_scales;
  int pass_direction, quant_recipe;
} dispatch_config_t;
typedef struct {
  unsigned size, magic;
  tensor_t *tokens, *topk_weights, *scales;
} combine_inputs_t;
typedef struct {
  unsigned size, magic, send_only;
  int pass_direction, quant_recipe;
} combine_config_t;

#include "abi_program.h"

int abiV2(ncclComm_t comm, cudaStream_t stream);
int abiV2(ncclComm_t comm, cudaStream_t stream) {
  if (sizeof(group_config_t) != 112 || sizeof(layout_info_t) != 48) return -3;
  if (sizeof(dispatch_config_t) != 24 || sizeof(combine_config_t) != 20) return -4;
  return runProgram(comm, stream);
}
