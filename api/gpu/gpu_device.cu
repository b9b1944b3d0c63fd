// Small kernels of the GPU library itself: the mask, and what the device clock says.
#include "api/gpu/gpu_device.h"

extern "C" {
#include "plan/error.h"
}
#include "kernels/ht/ht_control.cuh"
#include "kernels/ll/signal.cuh"
#include "kernels/common/start.cuh"

#include <cuda_runtime.h>
#include <time.h>

#define TRY_CUDA(call)                                                                             \
  do {                                                                                             \
    const cudaError_t e_ = (call);                                                                 \
    EP_CHECK(e_ == cudaSuccess, TREFOIL_SYSTEM_ERROR, "%s: %s", #call, cudaGetErrorString(e_));    \
  } while (0)

namespace {

template <typename... Params, typename... Args>
trefoil_result_t launch(void (*kernel)(Params...), unsigned threads, void *stream, Args... args) {
  TRY_CUDA(epStart(kernel, 1, threads, (cudaStream_t)stream, args...));
  return TREFOIL_OK;
}

__global__ void setMask(int *mask, unsigned long long active, int numRanks) {
  if (threadIdx.x < (unsigned)numRanks) mask[threadIdx.x] = (int)(active >> threadIdx.x & 1);
}

__global__ void settleControl(Control *c) {
  KindControl &k = c->kind[threadIdx.x];
  const unsigned long long e = k.clock >> 16;
  k.done[e & 1] = k.acked[e & 1] = e;
  k.done[~e & 1] = k.acked[~e & 1] = e ? e - 1 : 0;
}

// New FIFOs: chunks are counted from the start again. Updates' words have their own numbers.
__global__ void restartRings(HtControl *c) {
  for (unsigned i = threadIdx.x; i < sizeof c->fifos / 8; i += blockDim.x) {
    ((unsigned long long *)c->fifos)[i] = 0;
  }
}

__global__ void recordFinishedHt(const HtControl *c, volatile uint64_t *finished) {
  finished[threadIdx.x] = c->numbers[threadIdx.x];
}

constexpr int GUARDED = 2; // ep_ht_head_t.trapped

__global__ void guard(ep_ht_head_t *head, long long rows) {
  if (!head->trapped && head->numRows > rows) head->trapped = GUARDED;
}

__global__ void after(ep_ht_head_t *head, long long rows, volatile ep_ht_status_t *status) {
  if (head->trapped != GUARDED) return;
  status->neededRows = head->rowTotal;
  status->rows = rows;
  __threadfence_system();
  status->shorts = status->shorts + 1;
  head->trapped = 0;
}

__global__ void readClock(volatile unsigned long long *out) {
  *out = clockNs();
}

__global__ void recordFinished(const HandleHead *head, int kind, volatile uint64_t *finished) {
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
    EP_TRY(launch(readClock, 1, stream, word));
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
  return launch(setMask, 64, stream, mask, active, numRanks);
}

extern "C" trefoil_result_t epGpuRecordFinishedHt(const void *control, uint64_t *finished,
                                                  void *stream) {
  return launch(recordFinishedHt, 3, stream, (const HtControl *)control, finished);
}

extern "C" trefoil_result_t epGpuHtGuard(void *head, int64_t rows, void *stream) {
  return launch(guard, 1, stream, (ep_ht_head_t *)head, rows);
}

extern "C" trefoil_result_t epGpuHtAfter(void *head, int64_t rows, ep_ht_status_t *status,
                                         void *stream) {
  return launch(after, 1, stream, (ep_ht_head_t *)head, rows, status);
}

extern "C" trefoil_result_t epGpuSettle(void *control, int ht) {
  if (ht) {
    EP_TRY(launch(restartRings, 256, nullptr, (HtControl *)control));
  } else {
    EP_TRY(launch(settleControl, 2, nullptr, (Control *)control));
  }
  TRY_CUDA(cudaDeviceSynchronize());
  return TREFOIL_OK;
}

extern "C" trefoil_result_t epGpuRecordFinished(const void *handleMem, int kind, uint64_t *finished,
                                                void *stream) {
  return launch(recordFinished, 1, stream, (const HandleHead *)handleMem, kind, finished);
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
  const void *kernels[] = {(const void *)setMask,        (const void *)readClock,
                           (const void *)recordFinished, (const void *)settleControl,
                           (const void *)restartRings,   (const void *)recordFinishedHt,
                           (const void *)guard,          (const void *)after};
  cudaFuncAttributes a;
  for (const void *kernel : kernels) TRY_CUDA(cudaFuncGetAttributes(&a, kernel));
  return TREFOIL_OK;
}
