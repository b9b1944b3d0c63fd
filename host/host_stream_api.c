/* Questions to streams, waiting for them, and host functions on them. */
#include "host_internal.h"

static cudaError_t resolve(cudaStream_t handle, const char *func, cudaStream_t *out) {
  return epStreamResolve(handle, func, out);
}

cudaError_t cudaStreamGetPriority(cudaStream_t hStream, int *priority) {
  cudaStream_t s;
  EP_CUDA_CHECK(priority, cudaErrorInvalidValue, "cudaStreamGetPriority: priority is NULL");
  EP_CUDA_TRY(resolve(hStream, "cudaStreamGetPriority", &s));
  *priority = s->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamGetFlags(cudaStream_t hStream, unsigned int *flags) {
  cudaStream_t s;
  EP_CUDA_CHECK(flags, cudaErrorInvalidValue, "cudaStreamGetFlags: flags is NULL");
  EP_CUDA_TRY(resolve(hStream, "cudaStreamGetFlags", &s));
  *flags = s->flags;
  return cudaSuccess;
}

cudaError_t cudaStreamGetDevice(cudaStream_t hStream, int *device) {
  cudaStream_t s;
  EP_CUDA_CHECK(device, cudaErrorInvalidValue, "cudaStreamGetDevice: device is NULL");
  EP_CUDA_TRY(resolve(hStream, "cudaStreamGetDevice", &s));
  *device = s->device;
  return cudaSuccess;
}

cudaError_t cudaStreamGetId(cudaStream_t hStream, unsigned long long *streamId) {
  cudaStream_t s;
  EP_CUDA_CHECK(streamId, cudaErrorInvalidValue, "cudaStreamGetId: streamId is NULL");
  EP_CUDA_TRY(resolve(hStream, "cudaStreamGetId", &s));
  *streamId = s->id;
  return cudaSuccess;
}

static void waitBlocking(cudaStream_t s, void *data) {
  (void)data;
  if (!(s->flags & cudaStreamNonBlocking)) epStreamWaitSeq(s, atomic_load(&s->submitted), true);
}

/* Waiting for the legacy stream waits for the work its work would wait for, too. */
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  cudaStream_t s;
  EP_CUDA_TRY(resolve(stream, "cudaStreamSynchronize", &s));
  EP_CUDA_CHECK(!epInHostFunc(), cudaErrorNotPermitted,
                "cudaStreamSynchronize was called from a host function");
  if (epCapturing(s))
    return epCaptureBreak(s, cudaErrorStreamCaptureUnsupported, "cudaStreamSynchronize");
  if (s->legacy) {
    EP_CUDA_TRY(epCaptureForbidsLegacy(s, "cudaStreamSynchronize"));
    epStreamsForEach(s->device, waitBlocking, NULL);
  }
  epStreamWaitSeq(s, atomic_load(&s->submitted), true);
  return epStreamTakeError(s);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  cudaStream_t s;
  EP_CUDA_TRY(resolve(stream, "cudaStreamQuery", &s));
  if (epCapturing(s))
    return epCaptureBreak(s, cudaErrorStreamCaptureUnsupported, "cudaStreamQuery");
  if (atomic_load(&s->completed) < atomic_load(&s->submitted)) return cudaErrorNotReady;
  return epStreamTakeError(s);
}

typedef struct {
  cudaError_t error;
} drained_t;

static void drain(cudaStream_t s, void *data) {
  drained_t *d = data;
  epStreamWaitSeq(s, atomic_load(&s->submitted), true);
  if (d->error == cudaSuccess) d->error = epStreamTakeError(s);
}

cudaError_t cudaDeviceSynchronize(void) {
  drained_t d = {cudaSuccess};
  EP_CUDA_CHECK(!epInHostFunc(), cudaErrorNotPermitted,
                "cudaDeviceSynchronize was called from a host function");
  EP_CUDA_TRY(epCaptureForbids("cudaDeviceSynchronize"));
  EP_CUDA_CHECK(!epDeviceCapturing(epCurrentDevice()), cudaErrorStreamCaptureUnsupported,
                "cudaDeviceSynchronize while a stream of device %d is capturing",
                epCurrentDevice());
  epStreamsForEach(epCurrentDevice(), drain, &d);
  return d.error;
}

cudaError_t cudaDeviceReset(void) {
  return cudaDeviceSynchronize();
}

static cudaError_t queueHost(cudaStream_t stream, cudaHostFn_t fn, cudaStreamCallback_t callback,
                             void *data, const char *func) {
  cudaStream_t s;
  EP_CUDA_TRY(resolve(stream, func, &s));
  EP_CUDA_CHECK(fn || callback, cudaErrorInvalidValue, "%s: the function is NULL", func);
  ep_stream_op_t *op = epOpNew(cudaGraphNodeTypeHost, epRunHost);
  EP_CUDA_CHECK(op, cudaErrorMemoryAllocation, "%s: out of memory", func);
  op->u.host.fn = fn;
  op->u.host.callback = callback;
  op->u.host.data = data;
  return epEnqueue(s, op, func);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *userData) {
  return queueHost(stream, fn, NULL, userData, "cudaLaunchHostFunc");
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback,
                                  void *userData, unsigned int flags) {
  cudaStream_t s;
  EP_CUDA_CHECK(!flags, cudaErrorInvalidValue, "cudaStreamAddCallback: flags must be 0");
  EP_CUDA_TRY(resolve(stream, "cudaStreamAddCallback", &s));
  if (epCapturing(s))
    return epCaptureBreak(s, cudaErrorStreamCaptureUnsupported, "cudaStreamAddCallback");
  return queueHost(stream, NULL, callback, userData, "cudaStreamAddCallback");
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  cudaStream_t s;
  EP_CUDA_CHECK(stream && stream != cudaStreamLegacy && stream != cudaStreamPerThread,
                cudaErrorInvalidResourceHandle, "cudaStreamDestroy: a default stream");
  EP_CUDA_TRY(epStreamResolve(stream, "cudaStreamDestroy", &s));
  if (epCapturing(s))
    return epCaptureBreak(s, cudaErrorStreamCaptureUnsupported, "cudaStreamDestroy");
  epStreamRetire(s);
  return cudaSuccess;
}
