// The instantiations of dispatch inside one domain.
#include "kernels/ll/dispatch_kernel.cuh"

namespace {

template <class T>
__global__ void __launch_bounds__(DISPATCH_THREADS, 1)
    dispatchKernel(const __grid_constant__ DispatchArgs a) {
  runDispatch<T>(a);
}

template <bool RANK_MAJOR, bool QUANT, bool SEGMENTS>
const void *kernelOf(bool generic, bool counts, bool scratch) {
  if (generic && scratch) {
    return EP_KERNEL(dispatchKernel<DispatchTraits<true, RANK_MAJOR, QUANT, SEGMENTS, true, true>>);
  }
  if (generic) {
    return EP_KERNEL(
        dispatchKernel<DispatchTraits<true, RANK_MAJOR, QUANT, SEGMENTS, true, false>>);
  }
  return counts
             ? EP_KERNEL(
                   dispatchKernel<DispatchTraits<false, RANK_MAJOR, QUANT, SEGMENTS, true, false>>)
             : EP_KERNEL(dispatchKernel<
                         DispatchTraits<false, RANK_MAJOR, QUANT, SEGMENTS, false, false>>);
}

} // namespace

const void *epLlDispatchKernel(const DispatchChoice &c) {
  if (c.quantises) {
    return c.rankMajor ? kernelOf<true, true, true>(c.generic, c.counts, c.scratch)
                       : kernelOf<false, true, true>(c.generic, c.counts, c.scratch);
  }
  if (c.rankMajor) return kernelOf<true, false, true>(c.generic, c.counts, c.scratch);
  return c.segments ? kernelOf<false, false, true>(c.generic, c.counts, c.scratch)
                    : kernelOf<false, false, false>(c.generic, c.counts, c.scratch);
}
