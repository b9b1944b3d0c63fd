/* Questions about the machine: links between devices, how many blocks fit, the driver, the profiler. */
#include <cuda_profiler_api.h>

#include "host_internal.h"

cudaError_t cudaDeviceGetP2PAttribute(int *value, enum cudaDeviceP2PAttr attr, int srcDevice,
                                      int dstDevice) {
  EP_CUDA_CHECK(value && (int)attr >= 1 && (int)attr <= 5, cudaErrorInvalidValue,
                "cudaDeviceGetP2PAttribute: value is NULL, or there is no attribute %d", (int)attr);
  int num = epNumDevices();
  EP_CUDA_CHECK(srcDevice >= 0 && srcDevice < num && dstDevice >= 0 && dstDevice < num &&
                    srcDevice != dstDevice,
                cudaErrorInvalidDevice,
                "cudaDeviceGetP2PAttribute: %d and %d are not two devices of [0, %d)", srcDevice,
                dstDevice, num);
  *value = attr == cudaDevP2PAttrAccessSupported || attr == cudaDevP2PAttrNativeAtomicSupported;
  return cudaSuccess;
}

struct cudaChannelFormatDesc cudaCreateChannelDesc(int x, int y, int z, int w,
                                                   enum cudaChannelFormatKind f) {
  struct cudaChannelFormatDesc desc = {x, y, z, w, f};
  return desc;
}

/* ---- Occupancy: by threads, registers as from cudaFuncGetAttributes, and shared memory ---- */

static cudaError_t deviceFigures(const void *func, int blockSize, struct cudaDeviceProp *prop,
                                 int *most, const char *name) {
  struct cudaFuncAttributes attributes;
  EP_CUDA_CHECK(epHasLauncher(), cudaErrorNotSupported,
                "%s is not implemented by the host runtime: no kernels without a launcher", name);
  EP_CUDA_TRY(cudaFuncGetAttributes(&attributes, func));
  EP_CUDA_TRY(cudaGetDeviceProperties(prop, epCurrentDevice()));
  EP_CUDA_CHECK(blockSize > 0 && blockSize <= prop->maxThreadsPerBlock, cudaErrorInvalidValue,
                "%s: blocks of %d threads", name, blockSize);
  int threads = (blockSize + prop->warpSize - 1) / prop->warpSize * prop->warpSize;
  int byThreads = prop->maxThreadsPerMultiProcessor / threads;
  int byRegisters = prop->regsPerMultiprocessor / (attributes.numRegs * threads);
  *most = byThreads < byRegisters ? byThreads : byRegisters;
  if (*most > prop->maxBlocksPerMultiProcessor) *most = prop->maxBlocksPerMultiProcessor;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *numBlocks, const void *func,
                                                                   int blockSize,
                                                                   size_t dynamicSMemSize,
                                                                   unsigned int flags) {
  const char *name = "cudaOccupancyMaxActiveBlocksPerMultiprocessor";
  struct cudaDeviceProp prop;
  int most;
  EP_CUDA_CHECK(numBlocks && flags <= 1, cudaErrorInvalidValue,
                "%s: numBlocks is NULL, or flags are 0x%x", name, flags);
  EP_CUDA_TRY(deviceFigures(func, blockSize, &prop, &most, name));
  size_t bySharedMem =
      dynamicSMemSize > prop.sharedMemPerBlockOptin
          ? 0
          : prop.sharedMemPerMultiprocessor / (dynamicSMemSize + prop.reservedSharedMemPerBlock);
  *numBlocks = bySharedMem < (size_t)most ? (int)bySharedMem : most;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *numBlocks, const void *func,
                                                          int blockSize, size_t dynamicSMemSize) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(numBlocks, func, blockSize,
                                                                dynamicSMemSize, 0);
}

cudaError_t cudaOccupancyAvailableDynamicSMemPerBlock(size_t *dynamicSmemSize, const void *func,
                                                      int numBlocks, int blockSize) {
  const char *name = "cudaOccupancyAvailableDynamicSMemPerBlock";
  struct cudaDeviceProp prop;
  int most;
  EP_CUDA_CHECK(dynamicSmemSize, cudaErrorInvalidValue, "%s: dynamicSmemSize is NULL", name);
  EP_CUDA_TRY(deviceFigures(func, blockSize, &prop, &most, name));
  EP_CUDA_CHECK(numBlocks > 0 && numBlocks <= most, cudaErrorInvalidValue,
                "%s: %d blocks, of which %d fit", name, numBlocks, most);
  size_t bytes =
      prop.sharedMemPerMultiprocessor / (size_t)numBlocks - prop.reservedSharedMemPerBlock;
  *dynamicSmemSize = bytes < prop.sharedMemPerBlockOptin ? bytes : prop.sharedMemPerBlockOptin;
  return cudaSuccess;
}

/* ---- The driver API, of which there is nothing ---- */

static cudaError_t noEntryPoint(const char *symbol, void **funcPtr,
                                enum cudaDriverEntryPointQueryResult *driverStatus,
                                const char *name) {
  EP_CUDA_CHECK(symbol && funcPtr, cudaErrorInvalidValue, "%s: symbol or funcPtr is NULL", name);
  *funcPtr = NULL;
  if (driverStatus) *driverStatus = cudaDriverEntryPointSymbolNotFound;
  return epCudaFail(cudaErrorSymbolNotFound, "%s: the host runtime has no driver API, so no %s",
                    name, symbol);
}

cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **funcPtr, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *driverStatus) {
  (void)flags;
  return noEntryPoint(symbol, funcPtr, driverStatus, "cudaGetDriverEntryPoint");
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **funcPtr,
                                             unsigned int cudaVersion, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *driverStatus) {
  (void)cudaVersion, (void)flags;
  return noEntryPoint(symbol, funcPtr, driverStatus, "cudaGetDriverEntryPointByVersion");
}

cudaError_t cudaProfilerStart(void) {
  return cudaSuccess;
}

cudaError_t cudaProfilerStop(void) {
  return cudaSuccess;
}
