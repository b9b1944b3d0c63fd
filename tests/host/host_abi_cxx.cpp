/* The facts hold in C++, and the typed allocators compile. */
#include "abi_facts.h"
#include <nccl_device.h>
#include <trefoil_host.h>

static_assert(sizeof(ncclCommProperties_t) == 152, "as in NCCL 2.32");
static_assert(offsetof(ncclCommProperties_t, nLsaTeams) == 40, "as in NCCL 2.32");

cudaError_t typedAllocators(float **device, double **pinned);

cudaError_t typedAllocators(float **device, double **pinned) {
  cudaMemPool_t pool;
  cudaError_t error = cudaDeviceGetDefaultMemPool(&pool, 0);
  if (error == cudaSuccess) error = cudaMallocAsync(device, 64, pool, cudaStreamPerThread);
  if (error == cudaSuccess) error = cudaMallocFromPoolAsync(device, 64, pool, cudaStreamPerThread);
  if (error == cudaSuccess) error = cudaMalloc(device, 64);
  return error == cudaSuccess ? cudaMallocHost(pinned, 64) : error;
}
