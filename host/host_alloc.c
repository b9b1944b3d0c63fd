/* The allocation functions of the CUDA runtime over host_memory.c. Freeing device memory waits for the
 * device's queued work first, as CUDA does; host_pool.c has what allocates and frees in stream order. */
#include <string.h>

#include "host_internal.h"

static cudaError_t allocate(void **ptr, size_t bytes, ep_mem_kind_t kind, unsigned flags,
                            const char *func) {
  EP_CUDA_CHECK(ptr, cudaErrorInvalidValue, "%s: the pointer to fill is NULL", func);
  EP_CUDA_CHECK(!epInHostFunc(), cudaErrorNotPermitted, "%s was called from a host function", func);
  EP_CUDA_TRY(epCaptureForbids(func));
  if (bytes == 0) {
    *ptr = NULL;
    return cudaSuccess;
  }
  return epMemAlloc(ptr, bytes, 256, kind, flags);
}

cudaError_t cudaMalloc(void **devPtr, size_t size) {
  return allocate(devPtr, size, EP_MEM_DEVICE, 0, "cudaMalloc");
}

cudaError_t cudaMallocPitch(void **devPtr, size_t *pitch, size_t width, size_t height) {
  EP_CUDA_CHECK(pitch, cudaErrorInvalidValue, "cudaMallocPitch: pitch is NULL");
  EP_CUDA_CHECK(width <= EP_DEVICE_BYTES && (!height || width <= EP_DEVICE_BYTES / height),
                cudaErrorMemoryAllocation,
                "cudaMallocPitch: %zu rows of %zu bytes are more than a device holds", height,
                width);
  size_t rowBytes = (width + 511) & ~(size_t)511;
  EP_CUDA_TRY(allocate(devPtr, rowBytes * height, EP_MEM_DEVICE, 0, "cudaMallocPitch"));
  *pitch = rowBytes;
  return cudaSuccess;
}

cudaError_t cudaMallocManaged(void **devPtr, size_t size, unsigned int flags) {
  EP_CUDA_CHECK(size, cudaErrorInvalidValue, "cudaMallocManaged: size is 0");
  return allocate(devPtr, size, EP_MEM_MANAGED, flags, "cudaMallocManaged");
}

cudaError_t cudaMallocHost(void **ptr, size_t size) {
  return allocate(ptr, size, EP_MEM_HOST, 0, "cudaMallocHost");
}

cudaError_t cudaHostAlloc(void **pHost, size_t size, unsigned int flags) {
  EP_CUDA_CHECK(!(flags & ~7u), cudaErrorInvalidValue, "cudaHostAlloc: unknown flags 0x%x", flags);
  return allocate(pHost, size, EP_MEM_HOST, flags, "cudaHostAlloc");
}

static void drain(cudaStream_t stream, void *data) {
  (void)data;
  epStreamWaitSeq(stream, atomic_load(&stream->submitted), true);
}

static cudaError_t freeMemory(void *ptr, bool hostSide, const char *func) {
  if (!ptr) return cudaSuccess;
  EP_CUDA_CHECK(!epInHostFunc(), cudaErrorNotPermitted, "%s was called from a host function", func);
  EP_CUDA_TRY(epCaptureForbids(func));
  ep_mem_t mem;
  cudaError_t error;
  if (epMemFind(ptr, &mem)) epStreamsForEach(mem.device, drain, NULL);
  if (epGraphMemFree(ptr, &error, func)) return error;
  epPoolForget(ptr);
  return epMemFree(ptr, hostSide, func);
}

cudaError_t cudaFree(void *devPtr) {
  return freeMemory(devPtr, false, "cudaFree");
}

cudaError_t cudaFreeHost(void *ptr) {
  return freeMemory(ptr, true, "cudaFreeHost");
}

cudaError_t cudaHostRegister(void *ptr, size_t size, unsigned int flags) {
  EP_CUDA_CHECK(ptr && size, cudaErrorInvalidValue, "cudaHostRegister: no memory given");
  ep_mem_t mem = {.base = ptr,
                  .bytes = size,
                  .kind = EP_MEM_REGISTERED,
                  .device = epCurrentDevice(),
                  .flags = flags};
  return epMemAdd(&mem);
}

cudaError_t cudaHostUnregister(void *ptr) {
  ep_mem_t mem;
  EP_CUDA_CHECK(ptr && epMemFind(ptr, &mem) && mem.kind == EP_MEM_REGISTERED && epMemForget(ptr),
                cudaErrorHostMemoryNotRegistered, "cudaHostUnregister: %p is not registered", ptr);
  return cudaSuccess;
}

static cudaError_t findHost(void *pHost, ep_mem_t *mem, const char *func) {
  EP_CUDA_CHECK(pHost && epMemFind(pHost, mem) &&
                    (mem->kind == EP_MEM_HOST || mem->kind == EP_MEM_REGISTERED),
                cudaErrorInvalidValue, "%s: %p is not pinned or registered host memory", func,
                pHost);
  return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void **pDevice, void *pHost, unsigned int flags) {
  ep_mem_t mem;
  EP_CUDA_CHECK(pDevice && !flags, cudaErrorInvalidValue,
                "cudaHostGetDevicePointer: pDevice is NULL, or flags are not 0");
  EP_CUDA_TRY(findHost(pHost, &mem, "cudaHostGetDevicePointer"));
  *pDevice = pHost;
  return cudaSuccess;
}

cudaError_t cudaHostGetFlags(unsigned int *pFlags, void *pHost) {
  ep_mem_t mem;
  EP_CUDA_CHECK(pFlags, cudaErrorInvalidValue, "cudaHostGetFlags: pFlags is NULL");
  EP_CUDA_TRY(findHost(pHost, &mem, "cudaHostGetFlags"));
  *pFlags = mem.flags | cudaHostAllocMapped;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *freeBytes, size_t *total) {
  EP_CUDA_CHECK(freeBytes && total, cudaErrorInvalidValue, "cudaMemGetInfo: free or total is NULL");
  size_t used = epMemUsed(epCurrentDevice());
  *total = EP_DEVICE_BYTES;
  *freeBytes = used < EP_DEVICE_BYTES ? EP_DEVICE_BYTES - used : 0;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *ptr) {
  EP_CUDA_CHECK(attributes, cudaErrorInvalidValue, "cudaPointerGetAttributes: attributes is NULL");
  struct cudaPointerAttributes a;
  ep_mem_t mem;
  memset(&a, 0, sizeof a);
  a.device = -2; /* cudaInvalidDeviceId */
  if (!epMemFind(ptr, &mem)) {
    a.type = cudaMemoryTypeUnregistered;
    a.hostPointer = (void *)ptr;
  } else {
    bool device = mem.kind == EP_MEM_DEVICE || mem.kind == EP_MEM_PEER;
    a.type = device                       ? cudaMemoryTypeDevice
             : mem.kind == EP_MEM_MANAGED ? cudaMemoryTypeManaged
                                          : cudaMemoryTypeHost;
    a.device = mem.device;
    a.devicePointer = (void *)ptr;
    a.hostPointer = device ? NULL : (void *)ptr;
  }
  *attributes = a;
  return cudaSuccess;
}
