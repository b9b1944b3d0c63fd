/* cudaProfilerStart and cudaProfilerStop do nothing, as where no profiler is attached. */
#ifndef TREFOIL_CUDA_PROFILER_API_H
#define TREFOIL_CUDA_PROFILER_API_H

#include "cuda_runtime_api.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

cudaError_t cudaProfilerStart(void);
cudaError_t cudaProfilerStop(void);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
