// The Wire over NCCL's GIN, compiled for GPUs with all of NCCL's backends: proxy, GDAKI and the others.
// check_net_verbs.py reads what ptxas says of it. The kernels are the tests' own.
#include "kernels/net/gin.cuh"
#include "tests/kernels/net_work.cuh"

#include <cstddef>

// Else what is read of registers and stack says nothing of GDAKI.
#ifdef __CUDA_ARCH__
static_assert(NCCL_GIN_BACKEND_MASK_ALL >> (unsigned)NCCL_NET_DEVICE_GIN_PROXY & 1 &&
                  NCCL_GIN_BACKEND_MASK_ALL >> (unsigned)NCCL_NET_DEVICE_GIN_GDAKI & 1,
              "kernels have the code of both");
#endif

// What host/include/nccl_device.h says of these.
static_assert(sizeof(ncclDevComm) == 248 && offsetof(ncclDevComm, lsaSize) == 24, "NCCL's layout");
static_assert(sizeof(ncclDevCommRequirements_t) == 120 &&
                  offsetof(ncclDevCommRequirements_t, ginConnectionType) == 72 &&
                  offsetof(ncclDevCommRequirements_t, ginType) == 100,
              "NCCL's layout");

template __global__ void netWorkKernel<GinWire>(const __grid_constant__ NetWork);

__global__ void putKernel(const __grid_constant__ ep_net_port_t port, int *posted) {
  const Net<GinWire> net(port);
  *posted = net.putSignal<NetSignal::WEAK>(1, 0, 0, 4096, 0, 1);
}

__global__ void strongKernel(const __grid_constant__ ep_net_port_t port, int *posted) {
  const Net<GinWire> net(port);
  *posted = net.putSignal<NetSignal::STRONG>(1, 0, 0, 4096, 0, 1);
}

__global__ void readKernel(const __grid_constant__ ep_net_port_t port, uint64_t *value) {
  *value = Net<GinWire>(port).readSignal(3);
}
