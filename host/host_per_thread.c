/* The names that programs built with a default stream per thread call (nvcc --default-stream per-thread,
 * CUDA_API_PER_THREAD_DEFAULT_STREAM): as the others, but stream 0 is the calling thread's own. */
#include "host_internal.h"

#define OWN(stream) ((stream) ? (stream) : cudaStreamPerThread)
#define EXPORTED    __attribute__((visibility("default")))
#define PER_THREAD(name, parameters, arguments)                                                    \
  EXPORTED cudaError_t name##_ptsz parameters;                                                     \
  cudaError_t name##_ptsz parameters {                                                             \
    return name arguments;                                                                         \
  }

PER_THREAD(cudaMallocAsync, (void **devPtr, size_t size, cudaStream_t hStream),
           (devPtr, size, OWN(hStream)))
PER_THREAD(cudaMallocFromPoolAsync,
           (void **ptr, size_t size, cudaMemPool_t memPool, cudaStream_t stream),
           (ptr, size, memPool, OWN(stream)))
PER_THREAD(cudaFreeAsync, (void *devPtr, cudaStream_t hStream), (devPtr, OWN(hStream)))
PER_THREAD(cudaMemcpyAsync,
           (void *dst, const void *src, size_t count, enum cudaMemcpyKind kind,
            cudaStream_t stream),
           (dst, src, count, kind, OWN(stream)))
PER_THREAD(cudaMemcpy2DAsync,
           (void *dst, size_t dpitch, const void *src, size_t spitch, size_t width, size_t height,
            enum cudaMemcpyKind kind, cudaStream_t stream),
           (dst, dpitch, src, spitch, width, height, kind, OWN(stream)))
PER_THREAD(cudaMemsetAsync, (void *devPtr, int value, size_t count, cudaStream_t stream),
           (devPtr, value, count, OWN(stream)))
PER_THREAD(cudaMemset2DAsync,
           (void *devPtr, size_t pitch, int value, size_t width, size_t height,
            cudaStream_t stream),
           (devPtr, pitch, value, width, height, OWN(stream)))
PER_THREAD(cudaMemPrefetchAsync,
           (const void *devPtr, size_t count, struct cudaMemLocation location, unsigned int flags,
            cudaStream_t stream),
           (devPtr, count, location, flags, OWN(stream)))
PER_THREAD(cudaStreamGetPriority, (cudaStream_t hStream, int *priority), (OWN(hStream), priority))
PER_THREAD(cudaStreamGetFlags, (cudaStream_t hStream, unsigned int *flags), (OWN(hStream), flags))
PER_THREAD(cudaStreamGetDevice, (cudaStream_t hStream, int *device), (OWN(hStream), device))
PER_THREAD(cudaStreamGetId, (cudaStream_t hStream, unsigned long long *streamId),
           (OWN(hStream), streamId))
PER_THREAD(cudaStreamSynchronize, (cudaStream_t stream), (OWN(stream)))
PER_THREAD(cudaStreamQuery, (cudaStream_t stream), (OWN(stream)))
PER_THREAD(cudaStreamWaitEvent, (cudaStream_t stream, cudaEvent_t event, unsigned int flags),
           (OWN(stream), event, flags))
PER_THREAD(cudaStreamAddCallback,
           (cudaStream_t stream, cudaStreamCallback_t callback, void *userData, unsigned int flags),
           (OWN(stream), callback, userData, flags))
PER_THREAD(cudaLaunchHostFunc, (cudaStream_t stream, cudaHostFn_t fn, void *userData),
           (OWN(stream), fn, userData))
PER_THREAD(cudaEventRecord, (cudaEvent_t event, cudaStream_t stream), (event, OWN(stream)))
PER_THREAD(cudaEventRecordWithFlags, (cudaEvent_t event, cudaStream_t stream, unsigned int flags),
           (event, OWN(stream), flags))
PER_THREAD(cudaStreamBeginCapture, (cudaStream_t stream, enum cudaStreamCaptureMode mode),
           (OWN(stream), mode))
PER_THREAD(cudaStreamEndCapture, (cudaStream_t stream, cudaGraph_t *pGraph), (OWN(stream), pGraph))
PER_THREAD(cudaStreamIsCapturing,
           (cudaStream_t stream, enum cudaStreamCaptureStatus *pCaptureStatus),
           (OWN(stream), pCaptureStatus))
PER_THREAD(cudaStreamGetCaptureInfo,
           (cudaStream_t stream, enum cudaStreamCaptureStatus *captureStatus_out,
            unsigned long long *id_out, cudaGraph_t *graph_out,
            const cudaGraphNode_t **dependencies_out, const cudaGraphEdgeData **edgeData_out,
            size_t *numDependencies_out),
           (OWN(stream), captureStatus_out, id_out, graph_out, dependencies_out, edgeData_out,
            numDependencies_out))
PER_THREAD(cudaGraphUpload, (cudaGraphExec_t graphExec, cudaStream_t stream),
           (graphExec, OWN(stream)))
PER_THREAD(cudaGraphLaunch, (cudaGraphExec_t graphExec, cudaStream_t stream),
           (graphExec, OWN(stream)))
PER_THREAD(cudaLaunchKernel,
           (const void *func, dim3 gridDim, dim3 blockDim, void **args, size_t sharedMem,
            cudaStream_t stream),
           (func, gridDim, blockDim, args, sharedMem, OWN(stream)))
PER_THREAD(cudaLaunchCooperativeKernel,
           (const void *func, dim3 gridDim, dim3 blockDim, void **args, size_t sharedMem,
            cudaStream_t stream),
           (func, gridDim, blockDim, args, sharedMem, OWN(stream)))

EXPORTED cudaError_t cudaLaunchKernelExC_ptsz(const cudaLaunchConfig_t *config, const void *func,
                                              void **args);
cudaError_t cudaLaunchKernelExC_ptsz(const cudaLaunchConfig_t *config, const void *func,
                                     void **args) {
  if (!config) return cudaLaunchKernelExC(config, func, args);
  cudaLaunchConfig_t own = *config;
  own.stream = OWN(config->stream);
  return cudaLaunchKernelExC(&own, func, args);
}

/* Copies and fills without a stream: on the thread's own. Copies wait, fills do not. */
#define ON_OWN_STREAM(name, parameters, queue, then)                                               \
  EXPORTED cudaError_t name##_ptds parameters;                                                     \
  cudaError_t name##_ptds parameters {                                                             \
    cudaError_t error = queue;                                                                     \
    return error == cudaSuccess ? then : error;                                                    \
  }

ON_OWN_STREAM(cudaMemcpy, (void *dst, const void *src, size_t count, enum cudaMemcpyKind kind),
              cudaMemcpyAsync(dst, src, count, kind, cudaStreamPerThread),
              cudaStreamSynchronize(cudaStreamPerThread))
ON_OWN_STREAM(cudaMemcpy2D,
              (void *dst, size_t dpitch, const void *src, size_t spitch, size_t width,
               size_t height, enum cudaMemcpyKind kind),
              cudaMemcpy2DAsync(dst, dpitch, src, spitch, width, height, kind, cudaStreamPerThread),
              cudaStreamSynchronize(cudaStreamPerThread))
ON_OWN_STREAM(cudaMemset, (void *devPtr, int value, size_t count),
              cudaMemsetAsync(devPtr, value, count, cudaStreamPerThread), cudaSuccess)
ON_OWN_STREAM(cudaMemset2D, (void *devPtr, size_t pitch, int value, size_t width, size_t height),
              cudaMemset2DAsync(devPtr, pitch, value, width, height, cudaStreamPerThread),
              cudaSuccess)
