/* Memory of three dimensions: rows of a pitch, slices of so many rows. All is linear memory; arrays, which
 * these calls could name too, do not exist here. */
#include "host_internal.h"

cudaError_t cudaMalloc3D(struct cudaPitchedPtr *pitchedDevPtr, struct cudaExtent extent) {
  size_t rows;
  EP_CUDA_CHECK(pitchedDevPtr, cudaErrorInvalidValue, "cudaMalloc3D: pitchedDevPtr is NULL");
  EP_CUDA_CHECK(!__builtin_mul_overflow(extent.height, extent.depth, &rows),
                cudaErrorMemoryAllocation, "cudaMalloc3D: %zu x %zu x %zu bytes are too many",
                extent.width, extent.height, extent.depth);
  struct cudaPitchedPtr made = {NULL, 0, extent.width, extent.height};
  EP_CUDA_TRY(cudaMallocPitch(&made.ptr, &made.pitch, extent.width, rows));
  *pitchedDevPtr = made;
  return cudaSuccess;
}

static char *at(struct cudaPitchedPtr p, struct cudaPos pos) {
  return p.ptr ? (char *)p.ptr + pos.z * p.pitch * p.ysize + pos.y * p.pitch + pos.x : NULL;
}

static cudaError_t copyLinear(const struct cudaMemcpy3DParms *p, cudaStream_t stream, bool sync,
                              const char *func) {
  EP_CUDA_CHECK(p, cudaErrorInvalidValue, "%s: the parameters are NULL", func);
  EP_CUDA_CHECK(!p->srcArray && !p->dstArray, cudaErrorNotSupported,
                "%s with an array is not implemented by the host runtime", func);
  EP_CUDA_CHECK(p->extent.depth <= 1 || (p->srcPos.y + p->extent.height <= p->srcPtr.ysize &&
                                         p->dstPos.y + p->extent.height <= p->dstPtr.ysize),
                cudaErrorInvalidValue, "%s: %zu rows exceed a slice of %zu or %zu rows", func,
                p->extent.height, p->srcPtr.ysize, p->dstPtr.ysize);
  ep_copy_t c = {
      .dst = at(p->dstPtr, p->dstPos),
      .src = at(p->srcPtr, p->srcPos),
      .dpitch = p->dstPtr.pitch,
      .spitch = p->srcPtr.pitch,
      .dslice = p->dstPtr.pitch * p->dstPtr.ysize,
      .sslice = p->srcPtr.pitch * p->srcPtr.ysize,
      .width = p->extent.width,
      .height = p->extent.height,
      .depth = p->extent.depth,
      .kind = p->kind,
  };
  return epCopy(&c, stream, sync, func);
}

static cudaError_t copyPeer(const struct cudaMemcpy3DPeerParms *p, cudaStream_t stream, bool sync,
                            const char *func) {
  EP_CUDA_CHECK(p, cudaErrorInvalidValue, "%s: the parameters are NULL", func);
  struct cudaMemcpy3DParms q = {p->srcArray, p->srcPos, p->srcPtr, p->dstArray,
                                p->dstPos,   p->dstPtr, p->extent, cudaMemcpyDeviceToDevice};
  return copyLinear(&q, stream, sync, func);
}

static cudaError_t fillLinear(struct cudaPitchedPtr p, int value, struct cudaExtent extent,
                              cudaStream_t stream, bool sync) {
  const char *func = sync ? "cudaMemset3D" : "cudaMemset3DAsync";
  EP_CUDA_CHECK(extent.depth <= 1 || extent.height <= p.ysize, cudaErrorInvalidValue,
                "%s: %zu rows exceed a slice of %zu rows", func, extent.height, p.ysize);
  ep_fill_t f = {p.ptr,        p.pitch, p.pitch * p.ysize, extent.width, extent.height,
                 extent.depth, value};
  return epFill(&f, stream, sync, func);
}

cudaError_t cudaMemcpy3D(const struct cudaMemcpy3DParms *p) {
  return copyLinear(p, NULL, true, "cudaMemcpy3D");
}

cudaError_t cudaMemcpy3D_ptds(const struct cudaMemcpy3DParms *p) {
  return copyLinear(p, cudaStreamPerThread, true, "cudaMemcpy3D");
}

cudaError_t cudaMemcpy3DAsync(const struct cudaMemcpy3DParms *p, cudaStream_t stream) {
  return copyLinear(p, stream, false, "cudaMemcpy3DAsync");
}

cudaError_t cudaMemcpy3DPeer(const struct cudaMemcpy3DPeerParms *p) {
  return copyPeer(p, NULL, true, "cudaMemcpy3DPeer");
}

cudaError_t cudaMemcpy3DPeer_ptds(const struct cudaMemcpy3DPeerParms *p) {
  return copyPeer(p, cudaStreamPerThread, true, "cudaMemcpy3DPeer");
}

cudaError_t cudaMemcpy3DPeerAsync(const struct cudaMemcpy3DPeerParms *p, cudaStream_t stream) {
  return copyPeer(p, stream, false, "cudaMemcpy3DPeerAsync");
}

cudaError_t cudaMemset3D(struct cudaPitchedPtr pitchedDevPtr, int value, struct cudaExtent extent) {
  return fillLinear(pitchedDevPtr, value, extent, NULL, true);
}

cudaError_t cudaMemset3D_ptds(struct cudaPitchedPtr pitchedDevPtr, int value,
                              struct cudaExtent extent) {
  return fillLinear(pitchedDevPtr, value, extent, cudaStreamPerThread, true);
}

cudaError_t cudaMemset3DAsync(struct cudaPitchedPtr pitchedDevPtr, int value,
                              struct cudaExtent extent, cudaStream_t stream) {
  return fillLinear(pitchedDevPtr, value, extent, stream, false);
}
