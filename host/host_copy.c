/* Copies and fills, queued or synchronous; those of three dimensions are called from host_copy3d.c.
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
  bool known, device; /* the runtime's memory; device memory */
} side_t;

/* Bytes from the first to the last, that one included; false: more than a size_t counts. */
static bool extent(size_t pitch, size_t slice, const size_t shape[3], size_t *bytes) {
  size_t rows, slices;
  return !__builtin_mul_overflow(shape[1] - 1, pitch, &rows) &&
         !__builtin_mul_overflow(shape[2] - 1, slice, &slices) &&
         !__builtin_add_overflow(rows, slices, &rows) &&
         !__builtin_add_overflow(rows, shape[0], bytes);
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

static void copySlices(const ep_copy_t *c) {
  bool flat = c->dpitch == c->width && c->spitch == c->width;
  for (size_t z = 0; z < c->depth; z++) {
    char *dst = c->dst + z * c->dslice;
    const char *src = c->src + z * c->sslice;
    if (flat) memmove(dst, src, c->width * c->height);
    for (size_t y = 0; !flat && y < c->height; y++)
      memmove(dst + y * c->dpitch, src + y * c->spitch, c->width);
  }
}

static void runCopy(ep_stream_op_t *op, cudaStream_t stream, uint64_t ticket) {
  (void)stream, (void)ticket;
  copySlices(&op->u.copy);
}

static cudaError_t enqueueCopy(cudaStream_t s, const ep_copy_t *c, bool snapshot, bool wait,
                               const char *func) {
  ep_stream_op_t *op = epOpNew(cudaGraphNodeTypeMemcpy, runCopy);
  char *staged = op && snapshot ? malloc(c->width * c->height * c->depth) : NULL;
  if (op && snapshot && !staged) {
    epOpFree(op);
    op = NULL;
  }
  EP_CUDA_CHECK(op, cudaErrorMemoryAllocation, "%s: out of memory", func);
  op->u.copy = *c;
  if (staged) {
    ep_copy_t early = *c;
    early.dst = staged;
    early.dpitch = c->width;
    early.dslice = c->width * c->height;
    copySlices(&early);
    op->u.copy.src = staged;
    op->u.copy.spitch = early.dpitch;
    op->u.copy.sslice = early.dslice;
    op->shared = staged;
    op->release = free;
  }
  return wait ? epEnqueueAndWait(s, op, func) : epEnqueue(s, op, func);
}

/* Both sides are what the direction says, and large enough. */
static cudaError_t checkSides(const ep_copy_t *c, side_t *dst, side_t *src, const char *func) {
  const size_t shape[3] = {c->width, c->height, c->depth};
  int kind = (int)c->kind;
  bool any = c->kind == cudaMemcpyDefault;
  size_t dstBytes, srcBytes;
  EP_CUDA_CHECK(extent(c->dpitch, c->dslice, shape, &dstBytes) &&
                    extent(c->spitch, c->sslice, shape, &srcBytes),
                cudaErrorInvalidValue, "%s: %zu x %zu x %zu bytes are too many", func, c->width,
                c->height, c->depth);
  EP_CUDA_TRY(checkSide(
      c->dst, dstBytes,
      any ? -1 : kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice, dst, func));
  return checkSide(c->src, srcBytes,
                   any ? -1 : kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice,
                   src, func);
}

cudaError_t epCopy(const ep_copy_t *c, cudaStream_t stream, bool sync, const char *func) {
  cudaStream_t s;
  side_t dst, src;
  EP_CUDA_CHECK((int)c->kind >= 0 && (int)c->kind <= 4, cudaErrorInvalidMemcpyDirection,
                "%s: direction %d is no cudaMemcpyKind", func, (int)c->kind);
  EP_CUDA_CHECK((c->height <= 1 && c->depth <= 1) ||
                    (c->width <= c->dpitch && c->width <= c->spitch),
                cudaErrorInvalidPitchValue, "%s: width %zu exceeds a pitch, %zu or %zu", func,
                c->width, c->dpitch, c->spitch);
  EP_CUDA_TRY(epStreamResolve(stream, func, &s));
  if (sync) EP_CUDA_TRY(epCaptureForbids(func));
  if (!c->width || !c->height || !c->depth) return cudaSuccess;
  EP_CUDA_TRY(checkSides(c, &dst, &src, func));
  bool capturing = epCapturing(s);
  bool early =
      !sync && !capturing && !src.known && dst.known; /* read the source before returning */
  bool idle = atomic_load(&s->completed) == atomic_load(&s->submitted);
  bool wait = sync || (!capturing && !dst.known) || (early && idle);
  return enqueueCopy(s, c, early && !wait, wait, func);
}

static ep_copy_t flat(void *dst, const void *src, size_t count, enum cudaMemcpyKind kind) {
  return (ep_copy_t){dst, src, count, count, 0, 0, count, 1, 1, kind};
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t count, enum cudaMemcpyKind kind) {
  ep_copy_t c = flat(dst, src, count, kind);
  return epCopy(&c, NULL, true, "cudaMemcpy");
}

cudaError_t cudaMemcpy_ptds(void *dst, const void *src, size_t count, enum cudaMemcpyKind kind) {
  ep_copy_t c = flat(dst, src, count, kind);
  return epCopy(&c, cudaStreamPerThread, true, "cudaMemcpy");
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t count, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
  ep_copy_t c = flat(dst, src, count, kind);
  return epCopy(&c, stream, false, "cudaMemcpyAsync");
}

cudaError_t cudaMemcpyPeer(void *dst, int dstDevice, const void *src, int srcDevice, size_t count) {
  (void)dstDevice, (void)srcDevice;
  ep_copy_t c = flat(dst, src, count, cudaMemcpyDeviceToDevice);
  return epCopy(&c, NULL, true, "cudaMemcpyPeer");
}

cudaError_t cudaMemcpyPeerAsync(void *dst, int dstDevice, const void *src, int srcDevice,
                                size_t count, cudaStream_t stream) {
  (void)dstDevice, (void)srcDevice;
  ep_copy_t c = flat(dst, src, count, cudaMemcpyDeviceToDevice);
  return epCopy(&c, stream, false, "cudaMemcpyPeerAsync");
}

cudaError_t cudaMemcpy2D(void *dst, size_t dpitch, const void *src, size_t spitch, size_t width,
                         size_t height, enum cudaMemcpyKind kind) {
  ep_copy_t c = {dst, src, dpitch, spitch, 0, 0, width, height, 1, kind};
  return epCopy(&c, NULL, true, "cudaMemcpy2D");
}

cudaError_t cudaMemcpy2D_ptds(void *dst, size_t dpitch, const void *src, size_t spitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind) {
  ep_copy_t c = {dst, src, dpitch, spitch, 0, 0, width, height, 1, kind};
  return epCopy(&c, cudaStreamPerThread, true, "cudaMemcpy2D");
}

cudaError_t cudaMemcpy2DAsync(void *dst, size_t dpitch, const void *src, size_t spitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t stream) {
  ep_copy_t c = {dst, src, dpitch, spitch, 0, 0, width, height, 1, kind};
  return epCopy(&c, stream, false, "cudaMemcpy2DAsync");
}

static void runFill(ep_stream_op_t *op, cudaStream_t stream, uint64_t ticket) {
  (void)stream, (void)ticket;
  const ep_fill_t *f = &op->u.fill;
  for (size_t z = 0; z < f->depth; z++)
    for (size_t y = 0; y < f->height; y++)
      memset(f->dst + z * f->slice + y * f->pitch, f->value, f->width);
}

cudaError_t epFill(const ep_fill_t *f, cudaStream_t stream, bool sync, const char *func) {
  const size_t shape[3] = {f->width, f->height, f->depth};
  cudaStream_t s;
  side_t dst;
  size_t bytes;
  EP_CUDA_TRY(epStreamResolve(stream, func, &s));
  if (sync) EP_CUDA_TRY(epCaptureForbids(func));
  EP_CUDA_CHECK((f->height <= 1 && f->depth <= 1) || f->width <= f->pitch,
                cudaErrorInvalidPitchValue, "%s: width %zu exceeds the pitch, %zu", func, f->width,
                f->pitch);
  if (!f->width || !f->height || !f->depth) return cudaSuccess;
  EP_CUDA_CHECK(extent(f->pitch, f->slice, shape, &bytes), cudaErrorInvalidValue,
                "%s: %zu x %zu x %zu bytes are too many", func, f->width, f->height, f->depth);
  EP_CUDA_TRY(checkSide(f->dst, bytes, 1, &dst, func));
  ep_stream_op_t *op = epOpNew(cudaGraphNodeTypeMemset, runFill);
  EP_CUDA_CHECK(op, cudaErrorMemoryAllocation, "%s: out of memory", func);
  op->u.fill = *f;
  EP_CUDA_TRY(epEnqueue(s, op, func));
  if (!sync || dst.device)
    return cudaSuccess; /* CUDA: asynchronous unless the target is host memory */
  epStreamWaitSeq(s, atomic_load(&s->submitted), true);
  return epStreamTakeError(s);
}

cudaError_t cudaMemset(void *devPtr, int value, size_t count) {
  ep_fill_t f = {devPtr, count, 0, count, 1, 1, value};
  return epFill(&f, NULL, true, "cudaMemset");
}

cudaError_t cudaMemset_ptds(void *devPtr, int value, size_t count) {
  ep_fill_t f = {devPtr, count, 0, count, 1, 1, value};
  return epFill(&f, cudaStreamPerThread, true, "cudaMemset");
}

cudaError_t cudaMemsetAsync(void *devPtr, int value, size_t count, cudaStream_t stream) {
  ep_fill_t f = {devPtr, count, 0, count, 1, 1, value};
  return epFill(&f, stream, false, "cudaMemsetAsync");
}

cudaError_t cudaMemset2D(void *devPtr, size_t pitch, int value, size_t width, size_t height) {
  ep_fill_t f = {devPtr, pitch, 0, width, height, 1, value};
  return epFill(&f, NULL, true, "cudaMemset2D");
}

cudaError_t cudaMemset2D_ptds(void *devPtr, size_t pitch, int value, size_t width, size_t height) {
  ep_fill_t f = {devPtr, pitch, 0, width, height, 1, value};
  return epFill(&f, cudaStreamPerThread, true, "cudaMemset2D");
}

cudaError_t cudaMemset2DAsync(void *devPtr, size_t pitch, int value, size_t width, size_t height,
                              cudaStream_t stream) {
  ep_fill_t f = {devPtr, pitch, 0, width, height, 1, value};
  return epFill(&f, stream, false, "cudaMemset2DAsync");
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
