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

// Of a dispatch's kernel with a relay.
template <bool RANK_MAJOR, bool QUANT, bool SEGMENTS, bool SCRATCH>
struct FarTraits : DispatchTraits<true, RANK_MAJOR, QUANT, SEGMENTS, true, SCRATCH> {
  static constexpr bool FAR = true;
};

template <class Network, ep_ll_kind_t KIND, bool PARTIAL> EP_DEV bool isRelay(const RelayArgs &r) {
  const int block = (int)blockIdx.x - r.op.group.numSms;
  if (block < 0) return false;
  runRelay<Network, KIND, PARTIAL>(r, block, (int)gridDim.x - r.op.group.numSms);
  return true;
}

template <class Network, class T>
static __global__ void __launch_bounds__(DISPATCH_THREADS, 1)
    farDispatchKernel(const __grid_constant__ DispatchArgs a, const __grid_constant__ RelayArgs r) {
  if (!isRelay<Network, EP_LL_DISPATCH, false>(r)) runDispatch<T>(a);
}
template <class Network, Elem T, ep_ll_sum_t SUM>
static __global__ void __launch_bounds__(COMBINE_THREADS, 1)
    farCombineKernel(const __grid_constant__ CombineArgs a, const __grid_constant__ RelayArgs r) {
  if (isRelay<Network, EP_LL_COMBINE, SUM == EP_LL_SUM_PARTIAL>(r)) return;
  if constexpr (SUM == EP_LL_SUM_PARTIAL) {
    runPartial<T, true>(a);
  } else {
    runCombine<T, SUM, true>(a);
  }
}

template <class Network> struct FarKernels {
  template <bool RANK_MAJOR, bool QUANT, bool SEGMENTS> static const void *shape(bool scratch) {
    return scratch
               ? EP_KERNEL(farDispatchKernel<Network, FarTraits<RANK_MAJOR, QUANT, SEGMENTS, true>>)
               : EP_KERNEL(
                     farDispatchKernel<Network, FarTraits<RANK_MAJOR, QUANT, SEGMENTS, false>>);
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

  // Loads all of them on the current device.
  static trefoil_result_t load() {
    for (int q = 0; q < 10; q++) { // shapes, by scratch
      const int s = q / 2;
      EP_TRY(epLlLoadKernel(
          dispatch(DispatchChoice{true, s >= 3, s == 2 || s == 4, s >= 1, true, (q & 1) != 0})));
    }
    for (const trefoil_dtype_t t : SUMMED) {
      for (int sum = 0; sum < 3; sum++) EP_TRY(epLlLoadKernel(combine(t, (ep_ll_sum_t)sum)));
    }
    return TREFOIL_OK;
  }

  // What epLlPrepareDispatch or epLlPrepareCombine made of `op`, with the kernel that has a relay.
  static trefoil_result_t prepare(const ep_ll_dispatch_t &op, unsigned parts, ep_ll_ready_t *out) {
    EP_TRY(epLlPrepareDispatch(&op, parts, out));
    out->kernel = dispatch(epLlDispatchChoice(op, parts));
    out->driver = nullptr;
    return TREFOIL_OK;
  }
  static trefoil_result_t prepare(const ep_ll_combine_t &op, unsigned parts, ep_ll_ready_t *out) {
    EP_TRY(epLlPrepareCombine(&op, parts, out));
    out->kernel = combine(op.dtype, op.handle.sum);
    out->driver = nullptr;
    return TREFOIL_OK;
  }

  template <class Args>
  static RelayedOp relayedOp(const Args &a, ep_ll_kind_t kind, unsigned parts, int rowBytes) {
    return RelayedOp{
        a.op.group, a.op.handle, kind, parts, a.op.numTokens, (const char *)a.op.tokens, rowBytes};
  }
  static trefoil_result_t launch(const ep_ll_ready_t &ready, ep_ll_kind_t kind,
                                 const ep_ll_relay_t &relay, cudaStream_t stream) {
    const DispatchArgs &d = *(const DispatchArgs *)ready.args;
    const CombineArgs &c = *(const CombineArgs *)ready.args;
    int more;
    RelayArgs args = kind == EP_LL_DISPATCH
                         ? relayArgs(relayedOp(d, kind, d.parts, d.tokenBytes + d.scaleBytes),
                                     relay, d.wire, ready.warps, &more)
                         : relayArgs(relayedOp(c, kind, c.roles.parts, c.op.rowBytes), relay,
                                     c.wire, ready.warps, &more);
    void *params[] = {(void *)ready.args, &args};
    const cudaError_t e =
        cudaLaunchKernel(ready.kernel, dim3((unsigned)(ready.blocks + more)),
                         dim3((unsigned)ready.warps * 32), params, ready.shared, stream);
    EP_CHECK(e == cudaSuccess, TREFOIL_SYSTEM_ERROR, "the launch failed: %s",
             cudaGetErrorString(e));
    return TREFOIL_OK;
  }
};

#endif
