/* Names that CUDA 12's header gives to functions (cudaGetDeviceProperties_v2 for cudaGetDeviceProperties),
 * with CUDA 12's parameters and structs, for programs compiled with it. */
#include <string.h>

#include "host_internal.h"

/* struct cudaDeviceProp of CUDA 12. */
typedef struct {
  char name[256];
  cudaUUID_t uuid;
  char luid[8];
  unsigned int luidDeviceNodeMask;
  size_t totalGlobalMem, sharedMemPerBlock;
  int regsPerBlock, warpSize;
  size_t memPitch;
  int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3], clockRate;
  size_t totalConstMem;
  int major, minor;
  size_t textureAlignment, texturePitchAlignment;
  int deviceOverlap, multiProcessorCount, kernelExecTimeoutEnabled, integrated, canMapHostMemory;
  int computeMode, textureSizes[40]; /* maxTexture1D to maxSurfaceCubemapLayered */
  size_t surfaceAlignment;
  int concurrentKernels, ECCEnabled, pciBusID, pciDeviceID, pciDomainID, tccDriver;
  int asyncEngineCount, unifiedAddressing, memoryClockRate, memoryBusWidth, l2CacheSize;
  int persistingL2CacheMaxSize, maxThreadsPerMultiProcessor, streamPrioritiesSupported;
  int globalL1CacheSupported, localL1CacheSupported;
  size_t sharedMemPerMultiprocessor;
  int regsPerMultiprocessor, managedMemory, isMultiGpuBoard, multiGpuBoardGroupID;
  int hostNativeAtomicSupported, singleToDoublePrecisionPerfRatio, pageableMemoryAccess;
  int concurrentManagedAccess, computePreemptionSupported, canUseHostPointerForRegisteredMem;
  int cooperativeLaunch, cooperativeMultiDeviceLaunch;
  size_t sharedMemPerBlockOptin;
  int pageableMemoryAccessUsesHostPageTables, directManagedMemAccessFromHost;
  int maxBlocksPerMultiProcessor, accessPolicyMaxWindowSize;
  size_t reservedSharedMemPerBlock;
  int hostRegisterSupported, sparseCudaArraySupported, hostRegisterReadOnlySupported;
  int timelineSemaphoreInteropSupported, memoryPoolsSupported, gpuDirectRDMASupported;
  unsigned int gpuDirectRDMAFlushWritesOptions;
  int gpuDirectRDMAWritesOrdering;
  unsigned int memoryPoolSupportedHandleTypes;
  int deferredMappingCudaArraySupported, ipcEventSupported, clusterLaunch, unifiedFunctionPointers;
  int reserved[63];
} prop12_t;
_Static_assert(sizeof(prop12_t) == 1032, "as in CUDA 12.9");
_Static_assert(offsetof(prop12_t, surfaceAlignment) == 568, "as in CUDA 12.9");
_Static_assert(offsetof(prop12_t, clusterLaunch) == 772, "as in CUDA 12.9");

#pragma GCC visibility push(default)

cudaError_t cudaGetDeviceProperties_v2(prop12_t *prop, int device);
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                        unsigned long long *id, cudaGraph_t *graph,
                                        const cudaGraphNode_t **dependencies,
                                        size_t *numDependencies);
__typeof__(cudaStreamGetCaptureInfo_v2) cudaStreamGetCaptureInfo_v2_ptsz;
__typeof__(cudaStreamGetCaptureInfo) cudaStreamGetCaptureInfo_v3, cudaStreamGetCaptureInfo_v3_ptsz;
__typeof__(cudaStreamUpdateCaptureDependencies) cudaStreamUpdateCaptureDependencies_v2,
    cudaStreamUpdateCaptureDependencies_v2_ptsz;
__typeof__(cudaMemPrefetchAsync) cudaMemPrefetchAsync_v2, cudaMemPrefetchAsync_v2_ptsz;
__typeof__(cudaEventElapsedTime) cudaEventElapsedTime_v2;

#pragma GCC visibility pop

#define SAME(field) old.field = p.field
static void convert(const struct cudaDeviceProp *from, prop12_t *to) {
  struct cudaDeviceProp p = *from;
  prop12_t old;
  memset(&old, 0, sizeof old);
  memcpy(old.name, p.name, sizeof old.name);
  SAME(uuid), SAME(totalGlobalMem), SAME(sharedMemPerBlock), SAME(regsPerBlock), SAME(warpSize);
  SAME(memPitch), SAME(maxThreadsPerBlock), SAME(totalConstMem), SAME(major), SAME(minor);
  memcpy(old.maxThreadsDim, p.maxThreadsDim, sizeof old.maxThreadsDim);
  memcpy(old.maxGridSize, p.maxGridSize, sizeof old.maxGridSize);
  SAME(textureAlignment), SAME(multiProcessorCount), SAME(canMapHostMemory);
  SAME(concurrentKernels), SAME(pciDeviceID), SAME(asyncEngineCount), SAME(unifiedAddressing);
  SAME(memoryBusWidth), SAME(l2CacheSize), SAME(maxThreadsPerMultiProcessor);
  SAME(streamPrioritiesSupported), SAME(sharedMemPerMultiprocessor), SAME(regsPerMultiprocessor);
  SAME(managedMemory), SAME(hostNativeAtomicSupported), SAME(concurrentManagedAccess);
  SAME(canUseHostPointerForRegisteredMem), SAME(cooperativeLaunch), SAME(sharedMemPerBlockOptin);
  SAME(maxBlocksPerMultiProcessor), SAME(reservedSharedMemPerBlock), SAME(hostRegisterSupported);
  SAME(memoryPoolsSupported), SAME(clusterLaunch);
  *to = old;
}

cudaError_t cudaGetDeviceProperties_v2(prop12_t *prop, int device) {
  struct cudaDeviceProp now;
  EP_CUDA_CHECK(prop, cudaErrorInvalidValue, "cudaGetDeviceProperties: prop is NULL");
  EP_CUDA_TRY(cudaGetDeviceProperties(&now, device));
  convert(&now, prop);
  (void)cudaDeviceGetAttribute(&prop->clockRate, cudaDevAttrClockRate, device);
  (void)cudaDeviceGetAttribute(&prop->memoryClockRate, cudaDevAttrMemoryClockRate, device);
  (void)cudaDeviceGetAttribute(&prop->deviceOverlap, cudaDevAttrGpuOverlap, device);
  return cudaSuccess;
}

#define MINE(stream) ((stream) ? (stream) : cudaStreamPerThread)

cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                        unsigned long long *id, cudaGraph_t *graph,
                                        const cudaGraphNode_t **dependencies,
                                        size_t *numDependencies) {
  return cudaStreamGetCaptureInfo(stream, status, id, graph, dependencies, NULL, numDependencies);
}

cudaError_t cudaStreamGetCaptureInfo_v2_ptsz(cudaStream_t stream,
                                             enum cudaStreamCaptureStatus *status,
                                             unsigned long long *id, cudaGraph_t *graph,
                                             const cudaGraphNode_t **dependencies,
                                             size_t *numDependencies) {
  return cudaStreamGetCaptureInfo(MINE(stream), status, id, graph, dependencies, NULL,
                                  numDependencies);
}

cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                        unsigned long long *id, cudaGraph_t *graph,
                                        const cudaGraphNode_t **dependencies,
                                        const cudaGraphEdgeData **edgeData,
                                        size_t *numDependencies) {
  return cudaStreamGetCaptureInfo(stream, status, id, graph, dependencies, edgeData,
                                  numDependencies);
}

cudaError_t cudaStreamGetCaptureInfo_v3_ptsz(cudaStream_t stream,
                                             enum cudaStreamCaptureStatus *status,
                                             unsigned long long *id, cudaGraph_t *graph,
                                             const cudaGraphNode_t **dependencies,
                                             const cudaGraphEdgeData **edgeData,
                                             size_t *numDependencies) {
  return cudaStreamGetCaptureInfo(MINE(stream), status, id, graph, dependencies, edgeData,
                                  numDependencies);
}

cudaError_t cudaStreamUpdateCaptureDependencies_v2(cudaStream_t stream, cudaGraphNode_t *nodes,
                                                   const cudaGraphEdgeData *edges, size_t count,
                                                   unsigned int flags) {
  return cudaStreamUpdateCaptureDependencies(stream, nodes, edges, count, flags);
}

cudaError_t cudaStreamUpdateCaptureDependencies_v2_ptsz(cudaStream_t stream, cudaGraphNode_t *nodes,
                                                        const cudaGraphEdgeData *edges,
                                                        size_t count, unsigned int flags) {
  return cudaStreamUpdateCaptureDependencies(MINE(stream), nodes, edges, count, flags);
}

cudaError_t cudaMemPrefetchAsync_v2(const void *devPtr, size_t count,
                                    struct cudaMemLocation location, unsigned int flags,
                                    cudaStream_t stream) {
  return cudaMemPrefetchAsync(devPtr, count, location, flags, stream);
}

cudaError_t cudaMemPrefetchAsync_v2_ptsz(const void *devPtr, size_t count,
                                         struct cudaMemLocation location, unsigned int flags,
                                         cudaStream_t stream) {
  return cudaMemPrefetchAsync(devPtr, count, location, flags, MINE(stream));
}

cudaError_t cudaEventElapsedTime_v2(float *ms, cudaEvent_t start, cudaEvent_t end) {
  return cudaEventElapsedTime(ms, start, end);
}
