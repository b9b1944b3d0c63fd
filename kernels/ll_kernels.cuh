// The kernels of each phase, for the launcher: pointers that cudaLaunchKernel takes.
#ifndef TREFOIL_KERNELS_LL_KERNELS_CUH
#define TREFOIL_KERNELS_LL_KERNELS_CUH

#include "kernels/device/args.cuh"

constexpr int DISPATCH_THREADS = 20 * 32, QUICK_THREADS = 20 * 32, COMBINE_THREADS = 28 * 32,
              PARTIAL_THREADS = 28 * 32;

const void *epLlDispatchKernel(bool quantises, bool segments, bool scratch);
const void *epLlQuickKernel(bool rankMajor, bool quantises, bool segments);
const void *epLlCombineKernel(Elem elem, ep_ll_sum_t sum); // EXACT and RANKS
const void *epLlPartialKernel(Elem elem);

#endif
