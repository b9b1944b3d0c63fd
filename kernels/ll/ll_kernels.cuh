// The kernels of each phase, for the launcher: pointers that cudaLaunchKernel takes.
#ifndef TREFOIL_KERNELS_LL_KERNELS_CUH
#define TREFOIL_KERNELS_LL_KERNELS_CUH

#include "kernels/ll/args.cuh"

constexpr int DISPATCH_THREADS = 20 * 32, COMBINE_THREADS = 20 * 32, PARTIAL_THREADS = 20 * 32;
// Partial sums: pairs and rows that a block works on together, and pieces of shared memory.
constexpr int PARTIAL_PAIRS = 8, PARTIAL_ROWS = 88, PARTIAL_STAGES = 4,
              PARTIAL_STAGE_BYTES = 44 * 1024;

static_assert(PARTIAL_ROWS >= EP_LL_MAX_TOPK && PARTIAL_ROWS * 512 <= PARTIAL_STAGE_BYTES,
              "stages");

// Which instantiation of dispatch (DispatchTraits); rank-major and quantised rows have segments.
struct DispatchChoice {
  bool generic, rankMajor, quantises, segments;
  bool counts;  // of the fast path
  bool scratch; // of the generic one
};
const void *epLlDispatchKernel(const DispatchChoice &choice);
DispatchChoice epLlDispatchChoice(const ep_ll_dispatch_t &op, unsigned parts);
const void *epLlCombineKernel(trefoil_dtype_t dtype, ep_ll_sum_t sum); // EXACT and RANKS
const void *epLlPartialKernel(trefoil_dtype_t dtype);
// On the current device, with as much shared memory as a launch may ask for.
trefoil_result_t epLlLoadKernel(const void *kernel);

#endif
