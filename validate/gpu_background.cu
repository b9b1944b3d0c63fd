// Background work of a measurement: a thread a GPU keeps four units queued on a stream of its own until it is
// stopped. A unit is a copy of EP_GPU_COPY_BYTES by the copy engines, or a product of matrices.
//
// The product: C = A B^T in bf16 with f32 sums, by wmma; a block does tiles of 128 x 128 in turn, 32 of the
// inner dimension at a time through shared memory. It asks for so much shared memory that an SM holds one
// block and nothing large beside it, so that numSms blocks are numSms SMs. It is a load, not a contest:
// what counts is its rate beside something to its rate alone.
#include "validate/gpu_tools.h"

extern "C" {
#include "plan/error.h"
}

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <mma.h>

#include <cstdlib>
#include <ctime>
#include <pthread.h>

namespace {

constexpr int SIZE = 2048, TILE = 128, STEP = 32, PITCH = STEP + 8, QUEUED = 4;
constexpr size_t SHARED_BYTES = 120 << 10;
constexpr double UNIT_FLOPS = 2.0 * SIZE * SIZE * SIZE;

__global__ void __launch_bounds__(256)
    productKernel(const __nv_bfloat16 *a, const __nv_bfloat16 *b, __nv_bfloat16 *c) {
  namespace w = nvcuda::wmma;
  extern __shared__ __align__(128) __nv_bfloat16 shared[];
  __nv_bfloat16 *tileA = shared, *tileB = shared + TILE * PITCH;
  const int warp = threadIdx.x / 32, row = warp / 2 * 32, column = warp % 2 * 64;
  for (int tile = blockIdx.x; tile < (SIZE / TILE) * (SIZE / TILE); tile += gridDim.x) {
    const int m = tile / (SIZE / TILE) * TILE, n = tile % (SIZE / TILE) * TILE;
    w::fragment<w::accumulator, 16, 16, 16, float> sum[2][4];
    for (auto &r : sum)
      for (auto &s : r) w::fill_fragment(s, 0.0f);
    for (int k = 0; k < SIZE; k += STEP) {
      __syncthreads();
      for (int i = threadIdx.x; i < TILE * STEP / 8; i += blockDim.x) {
        const int y = i / (STEP / 8), x = i % (STEP / 8) * 8;
        *(uint4 *)(tileA + y * PITCH + x) = *(const uint4 *)(a + (size_t)(m + y) * SIZE + k + x);
        *(uint4 *)(tileB + y * PITCH + x) = *(const uint4 *)(b + (size_t)(n + y) * SIZE + k + x);
      }
      __syncthreads();
      for (int kk = 0; kk < STEP; kk += 16) {
        w::fragment<w::matrix_a, 16, 16, 16, __nv_bfloat16, w::row_major> fa[2];
        w::fragment<w::matrix_b, 16, 16, 16, __nv_bfloat16, w::col_major> fb;
        for (int i = 0; i < 2; i++)
          w::load_matrix_sync(fa[i], tileA + (row + 16 * i) * PITCH + kk, PITCH);
        for (int j = 0; j < 4; j++) {
          w::load_matrix_sync(fb, tileB + (column + 16 * j) * PITCH + kk, PITCH);
          for (int i = 0; i < 2; i++) w::mma_sync(sum[i][j], fa[i], fb, sum[i][j]);
        }
      }
    }
    float *out = (float *)(tileB + TILE * PITCH) + warp * 256;
    for (int i = 0; i < 2; i++)
      for (int j = 0; j < 4; j++) {
        w::store_matrix_sync(out, sum[i][j], 16, w::mem_row_major);
        __syncwarp();
        for (int e = threadIdx.x % 32; e < 256; e += 32)
          c[(size_t)(m + row + 16 * i + e / 16) * SIZE + n + column + 16 * j + e % 16] =
              __float2bfloat16(out[e]);
        __syncwarp();
      }
  }
}

double seconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

} // namespace

struct ep_gpu_worker {
  pthread_t thread;
  cudaStream_t stream;
  cudaEvent_t done[QUEUED];
  ep_gpu_background_t kind;
  int device, numSms;
  char *from, *to;         // a copy's
  __nv_bfloat16 *matrices; // a product's: three
  volatile int stop;
  cudaError_t rc;
  double perSecond;
};

namespace {

constexpr size_t MATRIX = (size_t)SIZE * SIZE;

cudaError_t queueProduct(__nv_bfloat16 *m, int numSms, cudaStream_t stream) {
  productKernel<<<numSms, 256, SHARED_BYTES, stream>>>(m, m + MATRIX, m + 2 * MATRIX);
  return cudaGetLastError();
}

cudaError_t prepareProduct() {
  return cudaFuncSetAttribute(productKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              (int)SHARED_BYTES);
}

cudaError_t queueUnit(ep_gpu_worker_t *w) {
  if (w->kind == EP_GPU_COPIES)
    return cudaMemcpyAsync(w->to, w->from, EP_GPU_COPY_BYTES, cudaMemcpyDefault, w->stream);
  return queueProduct(w->matrices, w->numSms, w->stream);
}

// Units are counted from the end of the first to the end of the last.
void *feed(void *argument) {
  auto *w = (ep_gpu_worker_t *)argument;
  cudaError_t rc = cudaSetDevice(w->device);
  long queued = 0, ended = 0;
  double first = 0, last = 0;
  while (rc == cudaSuccess && (!w->stop || ended < queued || ended < 2)) {
    if ((!w->stop || queued < 2) && queued - ended < QUEUED) {
      rc = queueUnit(w);
      if (rc == cudaSuccess) rc = cudaEventRecord(w->done[queued % QUEUED], w->stream);
      queued++;
      continue;
    }
    rc = cudaEventSynchronize(w->done[ended % QUEUED]);
    last = seconds();
    if (ended++ == 0) first = last;
  }
  const double unit = w->kind == EP_GPU_COPIES ? (double)EP_GPU_COPY_BYTES : UNIT_FLOPS;
  w->perSecond = ended > 1 && last > first ? unit * (double)(ended - 1) / (last - first) : 0;
  w->rc = rc;
  return nullptr;
}

cudaError_t prepare(ep_gpu_worker_t *w) {
  cudaError_t rc = cudaSetDevice(w->device);
  if (rc == cudaSuccess) rc = cudaStreamCreateWithFlags(&w->stream, cudaStreamNonBlocking);
  for (auto &e : w->done)
    if (rc == cudaSuccess)
      rc = cudaEventCreateWithFlags(&e, cudaEventDisableTiming | cudaEventBlockingSync);
  if (w->kind == EP_GPU_COPIES) return rc;
  if (rc == cudaSuccess) rc = cudaMalloc(&w->matrices, epGpuProductBytes());
  if (rc == cudaSuccess) rc = cudaMemsetAsync(w->matrices, 0x3c, epGpuProductBytes(), w->stream);
  return rc == cudaSuccess ? prepareProduct() : rc;
}

void release(ep_gpu_worker_t *w) {
  for (auto &e : w->done)
    if (e) cudaEventDestroy(e);
  cudaFree(w->matrices);
  if (w->stream) cudaStreamDestroy(w->stream);
  free(w);
}

} // namespace

extern "C" size_t epGpuProductBytes(void) {
  return 3 * MATRIX * sizeof(__nv_bfloat16);
}

extern "C" trefoil_result_t epGpuProduct(void *memory, int numSms, void *stream) {
  cudaError_t rc = prepareProduct();
  if (rc == cudaSuccess) rc = queueProduct((__nv_bfloat16 *)memory, numSms, (cudaStream_t)stream);
  EP_CHECK(rc == cudaSuccess, TREFOIL_SYSTEM_ERROR, "the background work could not be started: %s",
           cudaGetErrorString(rc));
  return TREFOIL_OK;
}

extern "C" trefoil_result_t epGpuBackgroundStart(const ep_gpu_peers_t *p, ep_gpu_background_t kind,
                                                 int numSms, ep_gpu_worker_t **out) {
  auto *w = (ep_gpu_worker_t *)calloc(1, sizeof(ep_gpu_worker_t));
  EP_CHECK(w, TREFOIL_SYSTEM_ERROR, "out of memory for the background work");
  const int next = (p->rank + 1) % p->numRanks;
  w->kind = kind;
  w->device = p->rank;
  w->numSms = numSms;
  w->from = (char *)p->words[p->rank] + EP_GPU_PAGE_BYTES + p->rank * EP_GPU_COPY_BYTES;
  w->to = (char *)p->words[next] + EP_GPU_PAGE_BYTES + p->rank * EP_GPU_COPY_BYTES;
  if (p->numRanks == 1) w->to = w->from + EP_GPU_COPY_BYTES;
  const cudaError_t rc = prepare(w);
  if (rc == cudaSuccess && pthread_create(&w->thread, nullptr, feed, w) == 0) {
    *out = w;
    return TREFOIL_OK;
  }
  release(w);
  return epFail(TREFOIL_SYSTEM_ERROR, "the background work could not be started: %s",
                rc == cudaSuccess ? "no thread" : cudaGetErrorString(rc));
}

extern "C" trefoil_result_t epGpuBackgroundStop(ep_gpu_worker_t *w, double *perSecond) {
  w->stop = 1;
  pthread_join(w->thread, nullptr);
  const cudaError_t rc = w->rc;
  *perSecond = w->perSecond;
  release(w);
  EP_CHECK(rc == cudaSuccess, TREFOIL_SYSTEM_ERROR, "the background work ended: %s",
           cudaGetErrorString(rc));
  return TREFOIL_OK;
}
