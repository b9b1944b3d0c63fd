/* Memory by the sizing table. What is asked for is counted per kind, so that the preflight's sums
 * can be compared with what really happened. Shared memory is the backend's business. */
#include <stdlib.h>

#include "api/object.h"

/* No part of a capture that the thread is in, and no harm to it. */
static cudaError_t takeDevice(const ncclEpAllocConfig_t *a, void **out, size_t bytes) {
  enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) return error;
  error = a->alloc_fn ? a->alloc_fn(out, bytes, a->context) : cudaMalloc(out, bytes);
  cudaThreadExchangeStreamCaptureMode(&mode);
  return error;
}

/* On the communicator's device, whichever is current in the caller. */
static trefoil_result_t allocDevice(ncclEpGroup_t g, const ep_buffer_t *b, void **out) {
  const ncclEpAllocConfig_t *a = &g->config.alloc;
  void *p = NULL;
  int own, before;
  EP_CHECK(ncclCommCuDevice(g->comm, &own) == ncclSuccess &&
               cudaGetDevice(&before) == cudaSuccess && cudaSetDevice(own) == cudaSuccess,
           TREFOIL_SYSTEM_ERROR, "%s: the communicator's device cannot be used", b->name);
  cudaError_t error = takeDevice(a, &p, b->bytes);
  cudaSetDevice(before);
  EP_CHECK(error == cudaSuccess && p, TREFOIL_SYSTEM_ERROR, "%s: %zu bytes of device memory: %s%s",
           b->name, b->bytes, a->alloc_fn ? "config.alloc.alloc_fn: " : "",
           error == cudaSuccess ? "gave NULL" : cudaGetErrorString(error));
  *out = p;
  return TREFOIL_OK;
}

trefoil_result_t epAllocBuffer(ncclEpGroup_t g, const ep_buffer_t *b, void **out) {
  void *p = NULL;
  if (b->memory == EP_MEMORY_DEVICE) {
    EP_TRY(allocDevice(g, b, &p));
  } else {
    p = calloc(1, b->bytes);
    EP_CHECK(p, TREFOIL_SYSTEM_ERROR, "%s: out of memory: %zu bytes", b->name, b->bytes);
  }
  g->allocated[b->ofHandle][b->memory] += b->bytes;
  *out = p;
  return TREFOIL_OK;
}

void epFreeBuffer(ncclEpGroup_t g, const ep_buffer_t *b, void *memory) {
  if (!memory) return;
  g->allocated[b->ofHandle][b->memory] -= b->bytes;
  if (b->memory != EP_MEMORY_DEVICE) {
    free(memory);
  } else if (g->config.alloc.free_fn) {
    g->config.alloc.free_fn(memory, g->config.alloc.context);
  } else {
    cudaFree(memory);
  }
}
