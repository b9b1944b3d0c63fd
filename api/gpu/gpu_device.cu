// Small kernels of the GPU library itself: the mask, and what the device clock says.
#include "api/gpu/gpu_device.h"

extern "C" {
#include "plan/error.h"
}
#include "kernels/device/signal.cuh"

#include <cuda_runtime.h>
#include <time.h>

#define TRY_CUDA(call)                                                                             \
  do {                                                                                             \
    const cudaError_t e_ = (call);                                                                 \
    EP_CHECK(e_ == cudaSuccess, TREFOIL_SYSTEM_ERROR, "%s: %s", #call, cudaGetErrorString(e_));    \
  } while (0)

namespace {

__global__ void setMask(int *mask, unsigned long long active, int numRanks) {
  if (threadIdx.x < (unsigned)numRanks) mask[threadIdx.x] = (int)(active >> threadIdx.x & 1);
}

__global__ void settleControl(Control *c) {
  KindControl &k = c->kind[threadIdx.x];
  const unsigned long long e = k.clock >> 16;
  k.done[e & 1] = k.known[e & 1] = e;
  k.done[~e & 1] = k.known[~e & 1] = e ? e - 1 : 0;
}

__global__ void readClock(volatile unsigned long long *out) {
  unsigned long long t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  *out = t;
}

__global__ void noteFinished(const HandleHead *head, int kind, volatile uint64_t *finished) {
  const uint64_t number = head->sent[kind];
  if (number > *finished) *finished = number;
}

int64_t realNs() {
  timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

trefoil_result_t sample(cudaStream_t stream, unsigned long long *word, int64_t *offsetNs) {
  int64_t least = INT64_MAX;
  for (int i = 0; i < 5; i++) { // the shortest round trip is the truest
    const int64_t from = realNs();
    readClock<<<1, 1, 0, stream>>>(word);
    TRY_CUDA(cudaStreamSynchronize(stream));
    const int64_t to = realNs();
    if (to - from >= least) continue;
    least = to - from;
    *offsetNs = from + (to - from) / 2 - (int64_t) * (volatile unsigned long long *)word;
  }
  return TREFOIL_OK;
}

} // namespace

extern "C" trefoil_result_t epGpuSetMask(int *mask, uint64_t active, int numRanks, void *stream) {
  setMask<<<1, 64, 0, (cudaStream_t)stream>>>(mask, active, numRanks);
  TRY_CUDA(cudaGetLastError());
  return TREFOIL_OK;
}

extern "C" trefoil_result_t epGpuSettle(void *control) {
  settleControl<<<1, 2>>>((Control *)control);
  TRY_CUDA(cudaGetLastError());
  TRY_CUDA(cudaDeviceSynchronize());
  return TREFOIL_OK;
}

extern "C" trefoil_result_t epGpuNoteFinished(const void *handleMem, int kind, uint64_t *finished,
                                              void *stream) {
  noteFinished<<<1, 1, 0, (cudaStream_t)stream>>>((const HandleHead *)handleMem, kind, finished);
  TRY_CUDA(cudaGetLastError());
  return TREFOIL_OK;
}

extern "C" trefoil_result_t epGpuClockOffset(int64_t *offsetNs) {
  unsigned long long *word = nullptr;
  cudaStream_t stream = nullptr;
  TRY_CUDA(cudaHostAlloc((void **)&word, sizeof *word, cudaHostAllocMapped));
  trefoil_result_t result = TREFOIL_OK;
  if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess) {
    result = sample(stream, word, offsetNs);
    cudaStreamDestroy(stream);
  } else {
    result = epFail(TREFOIL_SYSTEM_ERROR, "cudaStreamCreate: %s",
                    cudaGetErrorString(cudaGetLastError()));
  }
  cudaFreeHost(word);
  return result;
}

extern "C" trefoil_result_t epGpuLoadSmall(void) {
  cudaFuncAttributes a;
  TRY_CUDA(cudaFuncGetAttributes(&a, (const void *)setMask));
  TRY_CUDA(cudaFuncGetAttributes(&a, (const void *)readClock));
  TRY_CUDA(cudaFuncGetAttributes(&a, (const void *)noteFinished));
  TRY_CUDA(cudaFuncGetAttributes(&a, (const void *)settleControl));
  return TREFOIL_OK;
}
