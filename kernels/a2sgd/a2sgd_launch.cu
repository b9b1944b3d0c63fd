// The two kernels of an A2SGD step, and the one of a synchronisation of the parameters.
#include "kernels/a2sgd/a2sgd_exchange.cuh"
#include "kernels/a2sgd/a2sgd_sync.cuh"
#include "kernels/common/start.cuh"

extern "C" {
#include "plan/error.h"
}

#define TRY_CUDA(call)                                                                             \
  do {                                                                                             \
    const cudaError_t e_ = (call);                                                                 \
    EP_CHECK(e_ == cudaSuccess, TREFOIL_SYSTEM_ERROR, "A2SGD: %s", cudaGetErrorString(e_));        \
  } while (0)

namespace {

// All threads of a block: whether the counter reaches `all` now that it has counted `n`; if so, it starts
// anew. What thread 0 and the whole block wrote before is visible to a reader that finds it reached. Thread
// 0's `counts` is what matters: without it nothing is counted.
EP_DEV bool reaches(unsigned *counter, unsigned n, unsigned all, bool counts = true) {
  EP_SHARED(int, isReached);
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    isReached = counts && atomicAdd(counter, n) + n == all;
    if (isReached) *counter = 0;
    __threadfence();
  }
  __syncthreads();
  return isReached;
}

EP_DEV bool isPartOf(const ep_a2sgd_group_t &g, uint32_t part) {
  return part - g.firstPart < g.numParts;
}

// The block has summed n parts of a group since it came to it. True in the block that has then sent the
// means of the last group.
EP_DEV bool finishParts(const ep_a2sgd_step_t &s, const ep_a2sgd_group_t &g, int group, unsigned n,
                        unsigned long long epoch, bool counts) {
  if (!n || !reaches((unsigned *)(s.scratch + s.at.done) + group, n, g.numParts, counts))
    return false;
  sendMeans(s, epoch, group, g.count, sumParts(s, g));
  return s.at.numFilled == 1 || reaches(&controlOf(s).arrived, 1, s.at.numFilled);
}

// Blocks on an SM at a time: f32 takes more registers.
template <Elem T> constexpr int MEANS_BLOCKS = T == Elem::F32 ? 3 : 4;
constexpr int MOVE_BLOCKS = 4;
constexpr int SYNC_BLOCKS = 2;

template <Elem T>
__global__ void __launch_bounds__(EP_A2SGD_THREADS, MEANS_BLOCKS<T>)
    meansKernel(const __grid_constant__ ep_a2sgd_step_t s) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  A2sgdControl &c = controlOf(s);
  const unsigned long long epoch = loadVolatile(&c.epoch) + 1;
  const bool counts = !loadVolatile(&c.wait.failed); // looked at when parts are summed
  ep_a2sgd_group_t g = {0, 0, 0, 0};
  int group = 0;
  bool isLast = false;
  unsigned numSummed = 0; // of the group's parts, by this block
  for (uint32_t part = blockIdx.x;; part += gridDim.x) {
    if (!isPartOf(g, part)) {
      isLast = finishParts(s, g, group, numSummed, epoch, counts);
      if (part >= s.at.numParts) break;
      numSummed = 0;
      group = loadGroup(s, part, lane, g);
    }
    const Sums sums = sumPart<T>(s, g, part - g.firstPart, warp, lane);
    if (threadIdx.x == 0) storePart(s, part, sums);
    numSummed++;
  }
  if (!isLast) return;
  if (s.stamps && threadIdx.x == 0) s.stamps[0] = clockNs();
  receiveMeans(s, epoch);
  __syncthreads();
  if (threadIdx.x == 0) c.epoch = epoch;
  if (s.stamps && threadIdx.x == 0) s.stamps[1] = clockNs();
}

template <Elem T>
__global__ void __launch_bounds__(EP_A2SGD_THREADS, MOVE_BLOCKS)
    moveKernel(const __grid_constant__ ep_a2sgd_step_t s) {
  if (loadVolatile(&controlOf(s).wait.failed)) return;
  ep_a2sgd_group_t g = {0, 0, 0, 0};
  float2 by = make_float2(0, 0);
  for (uint32_t part = blockIdx.x; part < s.at.numParts; part += gridDim.x) {
    if (!isPartOf(g, part)) {
      by = movesOf(s)[loadGroup(s, part, threadIdx.x % 32, g)];
    }
    movePart<T>(s, g, part - g.firstPart, by);
  }
}

EP_DEV bool isDue(const ep_a2sgd_step_t &s) {
  const unsigned long long steps = loadVolatile(&controlOf(s).epoch), period = s.syncPeriod;
  return !period || (steps && steps % period == 0);
}

template <Elem T>
__global__ void __launch_bounds__(EP_A2SGD_THREADS, SYNC_BLOCKS)
    syncKernel(const __grid_constant__ ep_a2sgd_step_t s) {
  A2sgdControl &c = controlOf(s);
  const unsigned long long sync = loadVolatile(&c.syncs) + 1;
  if (!isDue(s)) return;
  for (int channel; (channel = takeChannel(s)) < s.at.channels;)
    if (hasFailed(s) || !averageChannel<T>(s, channel, sync)) return;
  if (!reaches(&c.arrived, 1, gridDim.x) || threadIdx.x) return;
  c.nextChannel = 0;
  c.syncs = sync;
}

const void *meansOf(trefoil_dtype_t dtype) {
  return kernelOfDtype(dtype, [](auto t) { return EP_KERNEL(meansKernel<decltype(t)::value>); });
}
const void *moveOf(trefoil_dtype_t dtype) {
  return kernelOfDtype(dtype, [](auto t) { return EP_KERNEL(moveKernel<decltype(t)::value>); });
}

const void *syncOf(trefoil_dtype_t dtype) {
  return kernelOfDtype(dtype, [](auto t) { return EP_KERNEL(syncKernel<decltype(t)::value>); });
}

// work: parts or channels, each for one block at a time.
trefoil_result_t launch(const void *kernel, int blocksPerSm, uint32_t work,
                        const ep_a2sgd_step_t *s, void *stream) {
  EP_CHECK(kernel, TREFOIL_INVALID_ARGUMENT, "dtype is %s; gradients must be f32, f16 or bf16",
           trefoilDtypeName(s->dtype));
  if (work == 0) return TREFOIL_OK;
  const unsigned most = s->numSms < 1 ? 1 : (unsigned)(s->numSms * blocksPerSm);
  void *params[] = {(void *)s};
  TRY_CUDA(cudaLaunchKernel(kernel, dim3(min(most, work)), dim3(EP_A2SGD_THREADS), params, 0,
                            (cudaStream_t)stream));
  return TREFOIL_OK;
}

} // namespace

extern "C" trefoil_result_t epA2sgdMeans(const ep_a2sgd_step_t *step, void *stream) {
  const bool isF32 = step->dtype == TREFOIL_F32;
  return launch(meansOf(step->dtype), isF32 ? MEANS_BLOCKS<Elem::F32> : MEANS_BLOCKS<Elem::BF16>,
                step->at.numParts, step, stream);
}

extern "C" trefoil_result_t epA2sgdMove(const ep_a2sgd_step_t *step, void *stream) {
  return launch(moveOf(step->dtype), MOVE_BLOCKS, step->at.numParts, step, stream);
}

// A block on an SM: links are slower than that many.
extern "C" trefoil_result_t epA2sgdSync(const ep_a2sgd_step_t *step, void *stream) {
  return launch(syncOf(step->dtype), 1, (uint32_t)step->at.channels, step, stream);
}

extern "C" trefoil_result_t epA2sgdStep(const ep_a2sgd_step_t *step, void *stream) {
  EP_TRY(epA2sgdMeans(step, stream));
  return epA2sgdMove(step, stream);
}

extern "C" trefoil_result_t epA2sgdLoad(void) {
  cudaFuncAttributes a;
  for (trefoil_dtype_t dtype : SUMMED) {
    TRY_CUDA(cudaFuncGetAttributes(&a, meansOf(dtype)));
    TRY_CUDA(cudaFuncGetAttributes(&a, moveOf(dtype)));
    TRY_CUDA(cudaFuncGetAttributes(&a, syncOf(dtype)));
  }
  return TREFOIL_OK;
}
