// Low latency across NVLink domains over a Wire of kernels/net: the kernels of one domain with blocks of the
// relay behind theirs. Dispatch takes the generic path.
#ifndef TREFOIL_KERNELS_LL_FAR_CUH
#define TREFOIL_KERNELS_LL_FAR_CUH

#include "kernels/ll/combine_kernel.cuh"
#include "kernels/ll/dispatch_kernel.cuh"
#include "kernels/ll/partial_kernel.cuh"
#include "kernels/ll/relay.cuh"

extern "C" {
#include "plan/error.h"
}

template <class Network> EP_DEV bool isRelay(const RelayArgs &r) {
  const int block = (int)blockIdx.x - r.op.group.numSms;
  if (block < 0) return false;
  runRelay<Network>(r, block, (int)gridDim.x - r.op.group.numSms);
  return true;
}

template <class Network, class T>
static __global__ void __launch_bounds__(DISPATCH_THREADS, 1)
    farDispatchKernel(const __grid_constant__ DispatchArgs a, const __grid_constant__ RelayArgs r) {
  if (!isRelay<Network>(r)) runDispatch<T>(a);
}
template <class Network, Elem T, ep_ll_sum_t SUM>
static __global__ void __launch_bounds__(COMBINE_THREADS, 1)
    farCombineKernel(const __grid_constant__ CombineArgs a, const __grid_constant__ RelayArgs r) {
  if (isRelay<Network>(r)) return;
  if constexpr (SUM == EP_LL_SUM_PARTIAL) {
    runPartial<T>(a);
  } else {
    runCombine<T, SUM>(a);
  }
}

template <class Network> struct FarKernels {
  template <bool RANK_MAJOR, bool QUANT, bool SEGMENTS> static const void *shape(bool scratch) {
    return scratch
               ? EP_KERNEL(farDispatchKernel<
                           Network, DispatchTraits<true, RANK_MAJOR, QUANT, SEGMENTS, true, true>>)
               : EP_KERNEL(
                     farDispatchKernel<
                         Network, DispatchTraits<true, RANK_MAJOR, QUANT, SEGMENTS, true, false>>);
  }
  static const void *dispatch(const DispatchChoice &c) {
    if (c.quantises) {
      return c.rankMajor ? shape<true, true, true>(c.scratch) : shape<false, true, true>(c.scratch);
    }
    if (c.rankMajor) return shape<true, false, true>(c.scratch);
    return c.segments ? shape<false, false, true>(c.scratch)
                      : shape<false, false, false>(c.scratch);
  }
  static const void *combine(trefoil_dtype_t dtype, ep_ll_sum_t sum) {
    return kernelOfDtype(dtype, [sum](auto elem) {
      constexpr Elem T = decltype(elem)::value;
      return sum == EP_LL_SUM_EXACT   ? EP_KERNEL(farCombineKernel<Network, T, EP_LL_SUM_EXACT>)
             : sum == EP_LL_SUM_RANKS ? EP_KERNEL(farCombineKernel<Network, T, EP_LL_SUM_RANKS>)
                                      : EP_KERNEL(farCombineKernel<Network, T, EP_LL_SUM_PARTIAL>);
    });
  }

  // What epLlPrepareDispatch or epLlPrepareCombine made, with a relay behind it.
  static trefoil_result_t launch(const void *kernel, ep_ll_ready_t &ready,
                                 const ep_ll_relay_t &relay, cudaStream_t stream) {
    int more;
    RelayArgs args = relayArgs(relay, ready.warps, &more);
    void *params[] = {ready.args, &args};
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         (int)ready.shared);
    if (e == cudaSuccess) {
      e = cudaLaunchKernel(kernel, dim3((unsigned)(ready.blocks + more)),
                           dim3((unsigned)ready.warps * 32), params, ready.shared, stream);
    }
    EP_CHECK(e == cudaSuccess, TREFOIL_SYSTEM_ERROR, "the launch failed: %s",
             cudaGetErrorString(e));
    return TREFOIL_OK;
  }
};

#endif
