// Low-latency dispatch: one copy per (token, rank) on the wire; the receiver makes its experts' copies.
//
//   sending warps     rows, step by step, to every rank that needs them
//   receiving warps   send the routing words (they have nothing else to do yet), read all ranks', derive
//                     the slots (slots.cuh), then take rows as they arrive
//
// Work is partitioned over blocks into equal contiguous parts of items: (token, step) for senders, (token,
// group of sources, step) for receivers. ll/dispatch.cuh lists the instantiations' traits.
#ifndef TREFOIL_KERNELS_LL_DISPATCH_KERNEL_CUH
#define TREFOIL_KERNELS_LL_DISPATCH_KERNEL_CUH

#include "kernels/ll/dispatch_receive.cuh"
#include "kernels/ll/dispatch_send.cuh"
#include "kernels/ll/ll_kernels.cuh"

static __device__ __noinline__ void finishAndClear(const DispatchArgs &a, unsigned long long number,
                                                   uint64_t began) {
  const Op op = {number, flagOf(number), (int)(number & 1), true, 0};
  finishLaunch(a.op.group, a.op.handle, EP_LL_DISPATCH, op, EP_LL_BOTH, began);
}

// Both parts in one launch: no block has to be last, except where the buffer is cleared.
EP_DEV void finishFast(const DispatchArgs &a, unsigned long long number, uint64_t began) {
  if (epLlClears(number, EP_LL_CLEAR_PERIOD)) {
    finishAndClear(a, number, began);
    return;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) headOf(a.op.handle).sent[EP_LL_DISPATCH] = number;
  countSend(*a.control, a.numSms);
  stampBlock(a.op.group, began);
}

template <class T>
EP_DEV Receiver<T> receiverOf(const DispatchArgs &a, const FirstLoads &first, char *shared,
                              int warp, int lane) {
  char *big = shared;
  if (T::SCRATCH) big = (char *)a.op.scratch + blockIdx.x * a.bigBytes - a.bigAt;
  const SlotMap map = {(unsigned *)(big + a.mapAt),    (unsigned *)(big + a.beforeAt),
                       T::RANK_MAJOR ? 1 : a.numLocal, a.spans,
                       SlotMap::strideOf(a.spans),     a.perSource};
  unsigned *returns = (unsigned *)(big + a.returnsAt);
  clearShared(a, map, returns, warp, lane);
  return Receiver<T>{a,
                     operationOf<T>(a, first),
                     activeOf<T>(a, first, lane),
                     warp,
                     lane,
                     (volatile int *)shared,
                     map,
                     returns,
                     {a, (unsigned *)(big + a.routeAt)}};
}

// All threads of a block.
template <class T> EP_DEV void runDispatch(const DispatchArgs &a) {
  EP_DYNAMIC_SHARED(16, shared);
  const uint64_t began = a.op.group.stamps && threadIdx.x == 0 ? clockNs() : 0;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const FirstLoads first = firstLoads(a, lane);
  if (warp < a.numSend) {
    if (T::GENERIC && !a.numRecv) {
      announce<T>(a, nextOp(first.control), activeOf<T>(a, first, lane),
                  firstExperts<T>(a, warp, lane), warp, lane);
    }
    if constexpr (T::QUANT)
      sendQuantised<T>(a, first, warp, shared + a.rowAt, lane);
    else
      sendRows<T>(a, first, warp, lane);
  } else {
    const int w = warp - a.numSend;
    const Experts<T> e = firstExperts<T>(a, w, lane);
    Receiver<T> receiver = receiverOf<T>(a, first, shared, w, lane);
    if (!T::GENERIC || a.numSend) {
      announce<T>(a, receiver.op, receiver.active, e, w, lane);
      if (T::QUANT) helpQuantise<T>(a, w, shared + a.rowAt, lane);
    }
    receiver.run();
  }
  if constexpr (T::GENERIC) {
    finishLaunch<T::FAR>(a.op.group, a.op.handle, EP_LL_DISPATCH, operationOf<T>(a, first), a.parts,
                         began);
  } else {
    finishFast(a, (first.control.clock >> 16) + 1, began);
  }
}

#endif
