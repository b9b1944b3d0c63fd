/* Masks: the ranks that this rank regards as active, in device memory; all in stream order, all of it may be
 * captured. MaskClean needs no round: operations are numbered alike on all ranks, and the first one
 * after it waits for the ranks that have not cleaned yet (docs/gpu.md). */
#include "api/gpu/gpu.h"
#include "api/gpu/gpu_device.h"

static trefoil_result_t set(ncclEpGroup_t group, uint64_t active, cudaStream_t stream) {
  ep_gpu_group_t *g = epGpu(group);
  int before;
  EP_TRY(epGpuEnter(g, &before));
  trefoil_result_t result = epGpuSetMask(g->ll.mask, active, g->R, stream);
  epGpuLeave(g, before);
  return result;
}

trefoil_result_t epGpuMaskQuery(ncclEpGroup_t group, int *deviceMask, cudaStream_t stream) {
  ep_gpu_group_t *g = epGpu(group);
  int before;
  EP_TRY(epGpuEnter(g, &before));
  cudaError_t error = cudaMemcpyAsync(deviceMask, g->ll.mask, (size_t)g->R * sizeof(int),
                                      cudaMemcpyDefault, stream);
  epGpuLeave(g, before);
  EP_CHECK(error == cudaSuccess, TREFOIL_SYSTEM_ERROR, "ncclEpMaskQuery: %s",
           cudaGetErrorString(error));
  return TREFOIL_OK;
}

trefoil_result_t epGpuMaskUpdate(ncclEpGroup_t group, const int *hostMask, cudaStream_t stream) {
  uint64_t active = 0;
  for (int r = 0; r < group->numRanks; r++) active |= (uint64_t)(hostMask[r] != 0) << r;
  return set(group, active, stream);
}

trefoil_result_t epGpuMaskClean(ncclEpGroup_t group, cudaStream_t stream) {
  return set(group, ~0ull, stream);
}
