/* Issuing work on a stream: onto its queue, or into what it captures. */
#include "host_internal.h"

static void pushAfter(cudaStream_t s, cudaStream_t other) {
  uint64_t seq = atomic_load(&other->submitted);
  if (other == s || atomic_load(&other->completed) >= seq) return;
  ep_stream_op_t *op = epOpNew(cudaGraphNodeTypeWaitEvent, epRunAfter);
  if (!op) {
    epStreamWaitSeq(other, seq, false); /* no memory to defer it: wait now */
    return;
  }
  op->u.after.stream = other;
  op->u.after.seq = seq;
  epStreamPush(s, op, false);
}

static void afterBlocking(cudaStream_t other, void *legacy) {
  if (!(other->flags & cudaStreamNonBlocking)) pushAfter(legacy, other);
}

static cudaError_t enqueue(cudaStream_t stream, ep_stream_op_t *op, const char *func, bool quiet) {
  cudaError_t error = cudaSuccess;
  if (epInHostFunc())
    error = epCudaFail(cudaErrorNotPermitted, "%s was called from a host function", func);
  else if (epCapturing(stream))
    return epCaptureAdd(stream, op, func);
  else if (stream->legacy)
    error = epCaptureForbidsLegacy(stream, func);
  if (error != cudaSuccess) {
    epOpFree(op);
    return error;
  }
  if (stream->legacy) {
    epStreamsForEach(stream->device, afterBlocking, stream);
  } else if (!(stream->flags & cudaStreamNonBlocking)) {
    cudaStream_t legacy = epStreamLegacy(stream->device);
    if (legacy) pushAfter(stream, legacy);
  }
  if (op->prepare) op->ticket = op->prepare(op);
  epStreamPush(stream, op, quiet);
  return cudaSuccess;
}

cudaError_t epEnqueue(cudaStream_t stream, ep_stream_op_t *op, const char *func) {
  return enqueue(stream, op, func, false);
}

cudaError_t epEnqueueAndWait(cudaStream_t stream, ep_stream_op_t *op, const char *func) {
  EP_CUDA_TRY(enqueue(stream, op, func, true));
  epStreamWaitSeq(stream, atomic_load(&stream->submitted), true);
  return epStreamTakeError(stream);
}
