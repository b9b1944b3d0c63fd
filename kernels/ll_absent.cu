// The wire of words (lane.cuh): before its first operation, and after a launch that was given up, a
// rank's places for rows must all say that nothing has come.
#include "kernels/device/absent.cuh"
#include "kernels/device/start.cuh"
#include "kernels/ll.h"

extern "C" {
#include "plan/error.h"
}

#include <cuda_runtime.h>

namespace {

__global__ void absentKernel(char *rows, size_t bytes) {
  for (size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * 16; i < bytes;
       i += (size_t)gridDim.x * blockDim.x * 16) {
    storeSys(rows + i, absent());
  }
}

} // namespace

extern "C" trefoil_result_t epLlClearRows(const ep_ll_group_t *group, void *cudaStream) {
  EP_CHECK(group, TREFOIL_INVALID_ARGUMENT, "group is NULL");
  for (int kind = 0; kind < 2; kind++) {
    if (!(group->words >> kind & 1)) continue;
    const cudaError_t e =
        epStart(absentKernel, group->numSms, 512, (cudaStream_t)cudaStream,
                group->peers[group->rank] + group->at.rows[kind], 2 * group->at.half[kind]);
    EP_CHECK(e == cudaSuccess, TREFOIL_SYSTEM_ERROR, "the launch failed: %s",
             cudaGetErrorString(e));
  }
  return TREFOIL_OK;
}
