/* The names of programs that are built for the per-thread default stream: stream 0 is the calling thread's.
 * Those without a stream (cudaMemcpy_ptds) are beside their functions. */
#include "host_internal.h"

#pragma GCC visibility push(default)

#define MINE(stream) ((stream) ? (stream) : cudaStreamPerThread)
#define PER_THREAD(name, parameters, ...)                                                          \
  __typeof__(name) name##_ptsz;                                                                    \
  cudaError_t name##_ptsz parameters {                                                             \
    return name(__VA_ARGS__);                                                                      \
  }

PER_THREAD(cudaMemcpyAsync,
           (void *dst, const void *src, size_t count, enum cudaMemcpyKind kind, cudaStream_t s),
           dst, src, count, kind, MINE(s))
PER_THREAD(cudaMemcpy2DAsync,
           (void *dst, size_t dpitch, const void *src, size_t spitch, size_t width, size_t height,
            enum cudaMemcpyKind kind, cudaStream_t s),
           dst, dpitch, src, spitch, width, height, kind, MINE(s))
PER_THREAD(cudaMemcpyToSymbolAsync,
           (const void *symbol, const void *src, size_t count, size_t offset,
            enum cudaMemcpyKind kind, cudaStream_t s),
           symbol, src, count, offset, kind, MINE(s))
PER_THREAD(cudaMemcpyFromSymbolAsync,
           (void *dst, const void *symbol, size_t count, size_t offset, enum cudaMemcpyKind kind,
            cudaStream_t s),
           dst, symbol, count, offset, kind, MINE(s))
PER_THREAD(cudaMemcpy3DAsync, (const struct cudaMemcpy3DParms *p, cudaStream_t s), p, MINE(s))
PER_THREAD(cudaMemcpy3DPeerAsync, (const struct cudaMemcpy3DPeerParms *p, cudaStream_t s), p,
           MINE(s))
PER_THREAD(cudaMemsetAsync, (void *ptr, int value, size_t count, cudaStream_t s), ptr, value, count,
           MINE(s))
PER_THREAD(cudaMemset2DAsync,
           (void *ptr, size_t pitch, int value, size_t width, size_t height, cudaStream_t s), ptr,
           pitch, value, width, height, MINE(s))
PER_THREAD(cudaMemset3DAsync,
           (struct cudaPitchedPtr ptr, int value, struct cudaExtent extent, cudaStream_t s), ptr,
           value, extent, MINE(s))
PER_THREAD(cudaMemPrefetchAsync,
           (const void *ptr, size_t count, struct cudaMemLocation to, unsigned int flags,
            cudaStream_t s),
           ptr, count, to, flags, MINE(s))
PER_THREAD(cudaMallocAsync, (void **ptr, size_t size, cudaStream_t s), ptr, size, MINE(s))
PER_THREAD(cudaMallocFromPoolAsync, (void **ptr, size_t size, cudaMemPool_t pool, cudaStream_t s),
           ptr, size, pool, MINE(s))
PER_THREAD(cudaFreeAsync, (void *ptr, cudaStream_t s), ptr, MINE(s))
PER_THREAD(cudaStreamGetPriority, (cudaStream_t s, int *priority), MINE(s), priority)
PER_THREAD(cudaStreamGetFlags, (cudaStream_t s, unsigned int *flags), MINE(s), flags)
PER_THREAD(cudaStreamGetDevice, (cudaStream_t s, int *device), MINE(s), device)
PER_THREAD(cudaStreamGetId, (cudaStream_t s, unsigned long long *id), MINE(s), id)
PER_THREAD(cudaStreamSynchronize, (cudaStream_t s), MINE(s))
PER_THREAD(cudaStreamQuery, (cudaStream_t s), MINE(s))
PER_THREAD(cudaStreamWaitEvent, (cudaStream_t s, cudaEvent_t event, unsigned int flags), MINE(s),
           event, flags)
PER_THREAD(cudaStreamAddCallback,
           (cudaStream_t s, cudaStreamCallback_t callback, void *data, unsigned int flags), MINE(s),
           callback, data, flags)
PER_THREAD(cudaLaunchHostFunc, (cudaStream_t s, cudaHostFn_t fn, void *data), MINE(s), fn, data)
PER_THREAD(cudaEventRecord, (cudaEvent_t event, cudaStream_t s), event, MINE(s))
PER_THREAD(cudaEventRecordWithFlags, (cudaEvent_t event, cudaStream_t s, unsigned int flags), event,
           MINE(s), flags)
PER_THREAD(cudaStreamBeginCapture, (cudaStream_t s, enum cudaStreamCaptureMode mode), MINE(s), mode)
PER_THREAD(cudaStreamEndCapture, (cudaStream_t s, cudaGraph_t *graph), MINE(s), graph)
PER_THREAD(cudaStreamIsCapturing, (cudaStream_t s, enum cudaStreamCaptureStatus *status), MINE(s),
           status)
PER_THREAD(cudaStreamGetCaptureInfo,
           (cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id,
            cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
            size_t *count),
           MINE(s), status, id, graph, nodes, edges, count)
PER_THREAD(cudaStreamUpdateCaptureDependencies,
           (cudaStream_t s, cudaGraphNode_t *nodes, const cudaGraphEdgeData *edges, size_t count,
            unsigned int flags),
           MINE(s), nodes, edges, count, flags)
PER_THREAD(cudaGraphUpload, (cudaGraphExec_t exec, cudaStream_t s), exec, MINE(s))
PER_THREAD(cudaGraphLaunch, (cudaGraphExec_t exec, cudaStream_t s), exec, MINE(s))
PER_THREAD(cudaLaunchKernel,
           (const void *func, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s),
           func, grid, block, args, shared, MINE(s))
PER_THREAD(cudaLaunchCooperativeKernel,
           (const void *func, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s),
           func, grid, block, args, shared, MINE(s))
PER_THREAD(cudaGetDriverEntryPoint,
           (const char *symbol, void **ptr, unsigned long long flags,
            enum cudaDriverEntryPointQueryResult *status),
           symbol, ptr, flags, status)
PER_THREAD(cudaGetDriverEntryPointByVersion,
           (const char *symbol, void **ptr, unsigned int version, unsigned long long flags,
            enum cudaDriverEntryPointQueryResult *status),
           symbol, ptr, version, flags, status)

__typeof__(cudaLaunchKernelExC) cudaLaunchKernelExC_ptsz;
cudaError_t cudaLaunchKernelExC_ptsz(const cudaLaunchConfig_t *config, const void *func,
                                     void **args) {
  if (!config) return cudaLaunchKernelExC(config, func, args);
  cudaLaunchConfig_t mine = *config;
  mine.stream = MINE(config->stream);
  return cudaLaunchKernelExC(&mine, func, args);
}

#pragma GCC visibility pop
