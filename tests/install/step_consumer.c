/* A consumer of the C API alone, with the host runtime's headers: asks what a group would take. */
#include <stdio.h>
#include <nccl_ep.h>

int main(void) {
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  ncclEpPreflight_t need = NCCL_EP_PREFLIGHT_INIT;
  int version = 0, devices = 0;
  config.algorithm = NCCL_EP_ALGO_LOW_LATENCY;
  config.num_experts = 256;
  config.max_dispatch_tokens_per_rank = 128;
  config.max_token_bytes = 7168 * 2;
  if (ncclEpGetVersion(&version) || cudaGetDeviceCount(&devices)) return 1;
  if (ncclEpPreflight(&config, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, 8, 8, 8, &need)) {
    puts(ncclEpGetLastError());
    return 1;
  }
  printf("version %d, %d devices, supported %d, %zu bytes shared\n", version, devices,
         need.supported, need.group_shared_bytes);
  return version != NCCL_EP_VERSION_CODE || !need.supported || devices < 1;
}
