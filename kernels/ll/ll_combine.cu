// The instantiations of combine inside one domain: whole rows.
#include "kernels/ll/combine_kernel.cuh"

namespace {

template <Elem T, ep_ll_sum_t SUM>
__global__ void __launch_bounds__(COMBINE_THREADS, 1)
    combineKernel(const __grid_constant__ CombineArgs a) {
  runCombine<T, SUM>(a);
}

} // namespace

const void *epLlCombineKernel(trefoil_dtype_t dtype, ep_ll_sum_t sum) {
  return kernelOfDtype(dtype, [sum](auto elem) {
    constexpr Elem T = decltype(elem)::value;
    return sum == EP_LL_SUM_EXACT ? EP_KERNEL(combineKernel<T, EP_LL_SUM_EXACT>)
                                  : EP_KERNEL(combineKernel<T, EP_LL_SUM_RANKS>);
  });
}
