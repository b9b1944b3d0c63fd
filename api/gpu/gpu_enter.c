/* The group's device is current between Enter and Leave; then the one from before. */
#include "api/gpu/gpu.h"

trefoil_result_t epGpuEnter(const ep_gpu_group_t *g, int *before) {
  EP_CUDA(cudaGetDevice(before));
  if (*before != g->device) EP_CUDA(cudaSetDevice(g->device));
  return TREFOIL_OK;
}

void epGpuLeave(const ep_gpu_group_t *g, int before) {
  if (before != g->device) cudaSetDevice(before);
}
