// A launch that is no triple angle bracket: its result is its own, not what an older call left behind, and
// it can be compiled by any C++ compiler.
#ifndef TREFOIL_KERNELS_COMMON_START_CUH
#define TREFOIL_KERNELS_COMMON_START_CUH

#include <cuda_runtime.h>

template <typename... Params, typename... Args>
cudaError_t epStart(void (*kernel)(Params...), unsigned blocks, unsigned threads,
                    cudaStream_t stream, Args... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, Params(args)...);
}

#endif
