/* Version 1 of the interface, frozen. */
#include "abi_declarations.h"

#define VERSION 1
typedef struct {
  unsigned size, magic, version;
  int algorithm;
  unsigned num_experts, max_dispatch_tokens_per_rank, max_recv_tokens_per_rank, max_token_bytes;
  unsigned long rdma_buffer_size;
  unsigned num_qp_per_rank, num_channels, max_num_sms;
  void *alloc[3];
  unsigned enable_mask;
  uint64_t timeout_ns;
} group_config_t;
typedef struct {
  unsigned size, magic;
  tensor_t *expert_counters, *src_rank_counters, *expert_offsets, *recv_total_counter;
} layout_info_t;
typedef struct {
  unsigned size, magic, send_only, round_scales;
  int pass_direction;
} dispatch_config_t;
typedef struct {
  unsigned size, magic;
  tensor_t *tokens, *topk_weights;
} combine_inputs_t;
typedef struct {
  unsigned size, magic, send_only;
  int pass_direction;
} combine_config_t;

#include "abi_program.h"

int abiV1(ncclComm_t comm, cudaStream_t stream);
int abiV1(ncclComm_t comm, cudaStream_t stream) {
  if (sizeof(group_config_t) != 96 || sizeof(layout_info_t) != 40) return -3;
  if (sizeof(dispatch_config_t) != 20 || sizeof(combine_config_t) != 16) return -4;
  return runProgram(comm, stream);
}
