// Waits until no put is under way, over NCCL's GIN.
#include "kernels/net/net_drain.h"
#include "kernels/common/start.cuh"
#include "kernels/net/gin.cuh"

extern "C" {
#include "plan/error.h"
}

// A thread for each peer of one block.
static __global__ void drainKernel(const __grid_constant__ ep_net_port_t port, uint64_t timeoutNs,
                                   int *late) {
  const Net<GinWire> net(port);
  const int peer = (int)threadIdx.x;
  const uint64_t began = clockNs();
  if (peer == 0) *late = 0;
  __syncthreads();
  while (!net.isIdle(peer)) {
    if (clockNs() - began > timeoutNs) {
      *late = 1 + peer;
      break;
    }
    __nanosleep(1000);
  }
}

extern "C" trefoil_result_t epNetDrain(const ep_net_port_t *port, uint64_t timeoutNs, int *late,
                                       void *cudaStream) {
  EP_CHECK(port && late, TREFOIL_INVALID_ARGUMENT, "an argument is NULL");
  const cudaError_t error = epStart(drainKernel, 1, (unsigned)port->numRanks,
                                    (cudaStream_t)cudaStream, *port, timeoutNs, late);
  EP_CHECK(error == cudaSuccess, TREFOIL_SYSTEM_ERROR, "the launch failed: %s",
           cudaGetErrorString(error));
  return TREFOIL_OK;
}
