/* Copies and fills, one and two-dimensional, queued or synchronous.
 *
 * Rules of CUDA that are kept because programs lean on them: a queued copy from ordinary (pageable) host
 * memory to the device has read its source when the call returns; one from the device to pageable
 * memory is complete when the call returns; one between pageable host ranges too. Copies that involve
 * only pinned or device memory are asynchronous. While capturing, nothing is read early. A side that the
 * caller calls "device" must be memory the runtime knows, and stay inside its allocation. */
#include <stdlib.h>
#include <string.h>

#include "host_internal.h"

typedef struct {
  char *dst;
  const char *src;
  size_t dpitch, spitch, width, height;
  enum cudaMemcpyKind kind;
} copy_t;

typedef struct {
  bool known, device; /* the runtime's memory; device memory */
} side_t;

static size_t extent(size_t pitch, size_t width, size_t height) {
  return height ? (height - 1) * pitch + width : 0;
}

/* Checks one side of a copy. claim: 1 device, 0 host, -1 whatever it is. */
static cudaError_t checkSide(const char *ptr, size_t bytes, int claim, side_t *out,
                             const char *func) {
  ep_mem_t mem;
  EP_CUDA_CHECK(ptr, cudaErrorInvalidValue, "%s: a pointer is NULL", func);
  out->known = epMemFind(ptr, &mem);
  out->device = out->known && (mem.kind == EP_MEM_DEVICE || mem.kind == EP_MEM_PEER);
  EP_CUDA_CHECK(claim != 1 || out->known, cudaErrorInvalidValue,
                "%s: %p is not device memory (nor pinned, nor managed)", func, (const void *)ptr);
  EP_CUDA_CHECK(claim != 0 || !out->device, cudaErrorInvalidValue,
                "%s: %p is device memory, but the copy's direction calls it host memory", func,
                (const void *)ptr);
  if (out->known) {
    size_t at = (size_t)(ptr - mem.base);
    EP_CUDA_CHECK(bytes <= mem.bytes - at, cudaErrorInvalidValue,
                  "%s: %zu bytes at offset %zu do not fit the allocation of %zu bytes", func, bytes,
                  at, mem.bytes);
  }
  return cudaSuccess;
}

static void copyRows(char *dst, size_t dpitch, const char *src, size_t spitch, size_t width,
                     size_t height) {
  if (dpitch == width && spitch == width) {
    memmove(dst, src, width * height);
    return;
  }
  for (size_t y = 0; y < height; y++) memmove(dst + y * dpitch, src + y * spitch, width);
}

static void runCopy(ep_op_t *op, cudaStream_t stream, uint64_t ticket) {
  (void)stream, (void)ticket;
  copyRows(op->u.copy.dst, op->u.copy.dpitch, op->u.copy.src, op->u.copy.spitch, op->u.copy.width,
           op->u.copy.height);
}

static cudaError_t enqueueCopy(cudaStream_t s, const copy_t *c, bool snapshot, bool wait,
                               const char *func) {
  ep_op_t *op = epOpNew(cudaGraphNodeTypeMemcpy, runCopy);
  char *staged = op && snapshot ? malloc(c->width * c->height) : NULL;
  if (op && snapshot && !staged) {
    epOpFree(op);
    op = NULL;
  }
  EP_CUDA_CHECK(op, cudaErrorMemoryAllocation, "%s: out of memory", func);
  op->u.copy.dst = c->dst;
  op->u.copy.src = c->src;
  op->u.copy.dpitch = c->dpitch;
  op->u.copy.spitch = c->spitch;
  op->u.copy.width = c->width;
  op->u.copy.height = c->height;
  if (staged) {
    copyRows(staged, c->width, c->src, c->spitch, c->width, c->height);
    op->u.copy.src = staged;
    op->u.copy.spitch = c->width;
    op->shared = staged;
    op->release = free;
  }
  return wait ? epEnqueueAndWait(s, op, func) : epEnqueue(s, op, func);
}

static cudaError_t copy(const copy_t *c, cudaStream_t stream, bool sync, const char *func) {
  cudaStream_t s;
  side_t dst, src;
  int kind = (int)c->kind;
  EP_CUDA_CHECK(kind >= 0 && kind <= 4, cudaErrorInvalidMemcpyDirection,
                "%s: direction %d is no cudaMemcpyKind", func, kind);
  EP_CUDA_CHECK(c->height <= 1 || (c->width <= c->dpitch && c->width <= c->spitch),
                cudaErrorInvalidPitchValue, "%s: width %zu exceeds a pitch, %zu or %zu", func,
                c->width, c->dpitch, c->spitch);
  EP_CUDA_TRY(epStreamResolve(stream, func, &s));
  if (sync) EP_CUDA_TRY(epCaptureForbids(func));
  if (!c->width || !c->height) return cudaSuccess;
  bool any = c->kind == cudaMemcpyDefault;
  EP_CUDA_TRY(checkSide(
      c->dst, extent(c->dpitch, c->width, c->height),
      any ? -1 : kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice, &dst, func));
  EP_CUDA_TRY(checkSide(
      c->src, extent(c->spitch, c->width, c->height),
      any ? -1 : kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice, &src, func));
  bool capturing = epCapturing(s);
  bool early =
      !sync && !capturing && !src.known && dst.known; /* read the source before returning */
  bool idle = atomic_load(&s->completed) == atomic_load(&s->submitted);
  bool wait = sync || (!capturing && !dst.known) || (early && idle);
  return enqueueCopy(s, c, early && !wait, wait, func);
}

static cudaError_t copyFlat(void *dst, const void *src, size_t count, enum cudaMemcpyKind kind,
                            cudaStream_t stream, bool sync, const char *func) {
  copy_t c = {dst, src, count, count, count, 1, kind};
  return copy(&c, stream, sync, func);
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t count, enum cudaMemcpyKind kind) {
  return copyFlat(dst, src, count, kind, NULL, true, "cudaMemcpy");
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t count, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return copyFlat(dst, src, count, kind, stream, false, "cudaMemcpyAsync");
}

cudaError_t cudaMemcpyPeer(void *dst, int dstDevice, const void *src, int srcDevice, size_t count) {
  (void)dstDevice, (void)srcDevice;
  return copyFlat(dst, src, count, cudaMemcpyDeviceToDevice, NULL, true, "cudaMemcpyPeer");
}

cudaError_t cudaMemcpyPeerAsync(void *dst, int dstDevice, const void *src, int srcDevice,
                                size_t count, cudaStream_t stream) {
  (void)dstDevice, (void)srcDevice;
  return copyFlat(dst, src, count, cudaMemcpyDeviceToDevice, stream, false, "cudaMemcpyPeerAsync");
}

cudaError_t cudaMemcpy2D(void *dst, size_t dpitch, const void *src, size_t spitch, size_t width,
                         size_t height, enum cudaMemcpyKind kind) {
  copy_t c = {dst, src, dpitch, spitch, width, height, kind};
  return copy(&c, NULL, true, "cudaMemcpy2D");
}

cudaError_t cudaMemcpy2DAsync(void *dst, size_t dpitch, const void *src, size_t spitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t stream) {
  copy_t c = {dst, src, dpitch, spitch, width, height, kind};
  return copy(&c, stream, false, "cudaMemcpy2DAsync");
}

static void runFill(ep_op_t *op, cudaStream_t stream, uint64_t ticket) {
  (void)stream, (void)ticket;
  for (size_t y = 0; y < op->u.fill.height; y++)
    memset(op->u.fill.dst + y * op->u.fill.pitch, op->u.fill.value, op->u.fill.width);
}

typedef struct {
  void *dst;
  size_t pitch, width, height;
  int value;
} fill_t;

static cudaError_t fill(const fill_t *f, cudaStream_t stream, bool sync, const char *func) {
  cudaStream_t s;
  side_t dst;
  EP_CUDA_TRY(epStreamResolve(stream, func, &s));
  if (sync) EP_CUDA_TRY(epCaptureForbids(func));
  EP_CUDA_CHECK(f->height <= 1 || f->width <= f->pitch, cudaErrorInvalidPitchValue,
                "%s: width %zu exceeds the pitch, %zu", func, f->width, f->pitch);
  if (!f->width || !f->height) return cudaSuccess;
  EP_CUDA_TRY(checkSide(f->dst, extent(f->pitch, f->width, f->height), 1, &dst, func));
  ep_op_t *op = epOpNew(cudaGraphNodeTypeMemset, runFill);
  EP_CUDA_CHECK(op, cudaErrorMemoryAllocation, "%s: out of memory", func);
  op->u.fill.dst = f->dst;
  op->u.fill.pitch = f->pitch;
  op->u.fill.width = f->width;
  op->u.fill.height = f->height;
  op->u.fill.value = f->value;
  EP_CUDA_TRY(epEnqueue(s, op, func));
  if (!sync || dst.device)
    return cudaSuccess; /* CUDA: asynchronous unless the target is host memory */
  epStreamWaitSeq(s, atomic_load(&s->submitted), true);
  return epStreamTakeError(s);
}

cudaError_t cudaMemset(void *devPtr, int value, size_t count) {
  fill_t f = {devPtr, count, count, 1, value};
  return fill(&f, NULL, true, "cudaMemset");
}

cudaError_t cudaMemsetAsync(void *devPtr, int value, size_t count, cudaStream_t stream) {
  fill_t f = {devPtr, count, count, 1, value};
  return fill(&f, stream, false, "cudaMemsetAsync");
}

cudaError_t cudaMemset2D(void *devPtr, size_t pitch, int value, size_t width, size_t height) {
  fill_t f = {devPtr, pitch, width, height, value};
  return fill(&f, NULL, true, "cudaMemset2D");
}

cudaError_t cudaMemset2DAsync(void *devPtr, size_t pitch, int value, size_t width, size_t height,
                              cudaStream_t stream) {
  fill_t f = {devPtr, pitch, width, height, value};
  return fill(&f, stream, false, "cudaMemset2DAsync");
}

/* All memory is everywhere already. */
cudaError_t cudaMemPrefetchAsync(const void *devPtr, size_t count, struct cudaMemLocation location,
                                 unsigned int flags, cudaStream_t stream) {
  cudaStream_t s;
  ep_mem_t mem;
  (void)count, (void)location, (void)flags;
  EP_CUDA_TRY(epStreamResolve(stream, "cudaMemPrefetchAsync", &s));
  EP_CUDA_CHECK(epMemFind(devPtr, &mem) && mem.kind == EP_MEM_MANAGED, cudaErrorInvalidValue,
                "cudaMemPrefetchAsync: %p is not managed memory", devPtr);
  return cudaSuccess;
}
