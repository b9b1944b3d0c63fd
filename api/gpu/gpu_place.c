/* What CUDA knows of an address: asked at every call of groups that check tensors (NCCL_EP_CHECK_TENSORS).
 * The allocation's range comes from the driver, which is there if CUDA is. */
#include "api/gpu/gpu.h"

#ifdef TREFOIL_HOST_RUNTIME
#include "host/trefoil_host.h"

static void findRange(const void *ptr, ep_place_t *out) {
  trefoil_host_memory_t memory;
  trefoilHostMemory(ptr, &memory);
  out->base = (uintptr_t)memory.base;
  out->bytes = memory.bytes;
}
#else
#include <cuda.h>
#include <dlfcn.h>

typedef struct driver {
  CUresult (*attribute)(void *, CUpointer_attribute, CUdeviceptr);
  CUresult (*retain)(CUmemGenericAllocationHandle *, void *);
  CUresult (*release)(CUmemGenericAllocationHandle);
} driver_t;

static void loadDriver(driver_t *d) {
  void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return;
  *(void **)&d->attribute = dlsym(library, "cuPointerGetAttribute");
  *(void **)&d->retain = dlsym(library, "cuMemRetainAllocationHandle");
  *(void **)&d->release = dlsym(library, "cuMemRelease");
  dlclose(library); /* CUDA keeps it */
}

static int rangeAt(const driver_t *d, uintptr_t at, uintptr_t *base, size_t *bytes) {
  CUdeviceptr start = 0;
  if (d->attribute(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, at) ||
      d->attribute(bytes, CU_POINTER_ATTRIBUTE_RANGE_SIZE, at)) {
    return 0;
  }
  *base = start;
  return 1;
}

/* Memory that was mapped piece by piece (PyTorch's expandable segments) goes on where a piece ends. */
static int isMapped(const driver_t *d, uintptr_t at) {
  CUmemGenericAllocationHandle handle;
  if (!d->retain || !d->release || d->retain(&handle, (void *)at)) return 0;
  d->release(handle);
  return 1;
}

/* Without the driver's word the allocation counts as endless. */
static void findRange(const void *ptr, ep_place_t *out) {
  driver_t d = {NULL, NULL, NULL};
  uintptr_t base;
  size_t bytes;
  out->base = (uintptr_t)ptr;
  out->bytes = (size_t)1 << 62;
  loadDriver(&d);
  if (!d.attribute || !rangeAt(&d, (uintptr_t)ptr, &base, &bytes)) return;
  out->base = base;
  out->bytes = bytes;
  if (!isMapped(&d, base)) return;
  for (uintptr_t end = base + bytes; rangeAt(&d, end, &base, &bytes) && isMapped(&d, end);) {
    out->bytes += bytes;
    end = base + bytes;
  }
}
#endif

void epGpuFindPlace(const void *ptr, ep_place_t *out) {
  struct cudaPointerAttributes a;
  *out = (ep_place_t){.kind = EP_PLACE_NONE, .device = -1};
  if (cudaPointerGetAttributes(&a, ptr) != cudaSuccess) {
    cudaGetLastError(); /* not the caller's */
    return;
  }
  if (a.type == cudaMemoryTypeUnregistered) return;
  out->kind = a.type == cudaMemoryTypeDevice    ? EP_PLACE_DEVICE
              : a.type == cudaMemoryTypeManaged ? EP_PLACE_MANAGED
              : a.devicePointer == ptr          ? EP_PLACE_PINNED
                                                : EP_PLACE_APART;
  out->device = a.device;
  findRange(ptr, out);
}
