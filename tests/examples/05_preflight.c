/* Asking before allocating: does this configuration run, and how much memory will it take?
 *
 * ncclEpPreflight needs no communicator and no GPU. Here it first refuses a row size that high
 * throughput mode cannot take, names the nearest legal one, and then gives the bytes, which the
 * group really made afterwards confirms. */
#include "example.h"

#include <string.h>

enum { numRanks = 2, topk = 8 };

static ncclEpGroupConfig_t configure(unsigned rowBytes) {
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
  config.num_experts = 256;
  config.max_dispatch_tokens_per_rank = 64;
  config.max_recv_tokens_per_rank = 64 * numRanks;
  config.max_token_bytes = rowBytes;
  return config;
}

static void confirm(int rank, int ranks, ncclComm_t comm) {
  ncclEpGroupConfig_t config = configure(7168 * 2);
  ncclEpPreflight_t need = NCCL_EP_PREFLIGHT_INIT;
  size_t bytes = 0;
  ncclEpGroup_t group;
  EP(ncclEpPreflight(&config, NCCL_EP_LAYOUT_FLAT, NULL, topk, ranks, ranks, &need));
  EP(ncclEpCreateGroup(&group, comm, &config));
  EP(ncclEpHandleMemSize(group, NCCL_EP_LAYOUT_FLAT, NULL, &bytes, topk));
  if (bytes != need.handle_device_bytes)
    STOP("rank %d: a handle takes %zu bytes, preflight said %zu", rank, bytes,
         need.handle_device_bytes);
  EP(ncclEpGroupDestroy(group));
}

int main(void) {
  ncclEpGroupConfig_t config = configure(7168 * 2 + 4);
  ncclEpPreflight_t need = NCCL_EP_PREFLIGHT_INIT;
  EP(ncclEpPreflight(&config, NCCL_EP_LAYOUT_FLAT, NULL, topk, numRanks, numRanks, &need));
  if (need.supported) STOP("rows of %u bytes should not be supported", config.max_token_bytes);
  printf("%s\n  the limit is on %s, the nearest legal value is %llu\n", need.reason, need.limit,
         need.nearest);
  if (strcmp(need.limit, "max_token_bytes") != 0 || need.nearest % 16) STOP("not what we expected");

  config.max_token_bytes = (unsigned)need.nearest;
  EP(ncclEpPreflight(&config, NCCL_EP_LAYOUT_FLAT, NULL, topk, numRanks, numRanks, &need));
  if (!need.supported) STOP("the nearest legal value is refused: %s", need.reason);
  printf("group: %zu bytes on the device, %zu shared, %zu on the host; handle: %zu, %zu, %zu\n",
         need.group_device_bytes, need.group_shared_bytes, need.group_host_bytes,
         need.handle_device_bytes, need.handle_shared_bytes, need.handle_host_bytes);
  runRanks(numRanks, confirm);
  return 0;
}
