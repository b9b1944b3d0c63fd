// Low-latency dispatch of the usual shapes: the same protocol and the same memory as ll_dispatch.cu, on a
// shorter way from the first load to the last store (device/quick.cuh says which shapes and why).
#include "kernels/device/quick_receive.cuh"
#include "kernels/device/quick_send.cuh"
#include "kernels/ll_kernels.cuh"

namespace {

__device__ __noinline__ void finishAndClear(const QuickArgs &a, unsigned long long number,
                                            uint64_t began) {
  const Op op = {number, markOf(number), (int)(number & 1), true, 0};
  finishLaunch(a.op.group, a.op.handle, EP_LL_DISPATCH, op, EP_LL_BOTH, began);
}

EP_DEV void finishQuick(const QuickArgs &a, unsigned long long number, uint64_t began) {
  if (epLlClears(number, EP_LL_CLEAR_PERIOD)) {
    finishAndClear(a, number, began);
    return;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) headOf(a.op.handle).sent[EP_LL_DISPATCH] = number;
  countSend(*a.control);
  stampBlock(a.op.group, began);
}

template <bool RANKS, bool QUANT, bool SEGMENTS, bool COUNT>
__global__ void __launch_bounds__(QUICK_THREADS, 1)
    quickKernel(const __grid_constant__ QuickArgs a) {
  EP_DYNAMIC_SHARED(16, shared);
  const uint64_t began = a.op.group.stamps && threadIdx.x == 0 ? clockNs() : 0;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const FirstLoads first = firstLoads(a, lane);
  if (warp < a.numSend) {
    if (QUANT) {
      quickSendQuantised<RANKS>(a, first, warp, shared + a.rowAt, lane);
    } else {
      quickSendRows<SEGMENTS>(a, first, warp, lane);
    }
  } else {
    const int w = warp - a.numSend, e = firstExpert(a, w, lane);
    const SlotMap map = {(unsigned *)(shared + a.mapAt), (unsigned *)(shared + a.beforeAt),
                         RANKS ? 1 : a.numLocal,         a.chunks,
                         SlotMap::strideOf(a.chunks),    a.perSource};
    unsigned *owed = (unsigned *)(shared + a.owedAt);
    clearShared(a, map, owed, w, lane);
    QuickReceiver<RANKS, QUANT, SEGMENTS> receiver = {a,
                                                      nextOp(first.control),
                                                      quickActive(a, first, lane),
                                                      w,
                                                      lane,
                                                      (volatile int *)shared,
                                                      map,
                                                      owed,
                                                      (unsigned long long *)(shared + a.routeAt)};
    quickAnnounce<COUNT>(a, receiver.op, receiver.active, e, w, lane);
    if (QUANT) helpQuantise(a, w, shared + a.rowAt, lane);
    receiver.run();
  }
  finishQuick(a, (first.control.clock >> 16) + 1, began);
}

template <bool COUNT> const void *kernelOf(bool rankMajor, bool quantises, bool segments) {
  if (quantises) {
    return rankMajor ? EP_KERNEL(quickKernel<true, true, true, COUNT>)
                     : EP_KERNEL(quickKernel<false, true, true, COUNT>);
  }
  if (rankMajor) return EP_KERNEL(quickKernel<true, false, true, COUNT>);
  return segments ? EP_KERNEL(quickKernel<false, false, true, COUNT>)
                  : EP_KERNEL(quickKernel<false, false, false, COUNT>);
}

} // namespace

const void *epLlQuickKernel(bool rankMajor, bool quantises, bool segments, bool counts) {
  return counts ? kernelOf<true>(rankMajor, quantises, segments)
                : kernelOf<false>(rankMajor, quantises, segments);
}
