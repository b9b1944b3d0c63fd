// The instantiations of combine inside one domain: partial sums.
#include "kernels/ll/partial_kernel.cuh"

namespace {

template <Elem T>
__global__ void __launch_bounds__(PARTIAL_THREADS, 1)
    partialKernel(const __grid_constant__ CombineArgs a) {
  runPartial<T>(a);
}

} // namespace

const void *epLlPartialKernel(trefoil_dtype_t dtype) {
  return kernelOfDtype(dtype,
                       [](auto elem) { return EP_KERNEL(partialKernel<decltype(elem)::value>); });
}
