/* NVTX ranges named after the functions, so that a profiler shows calls beside kernels. In the GPU library;
 * without a profiler a range costs a load and a branch. */
#ifndef TREFOIL_API_RANGE_H
#define TREFOIL_API_RANGE_H

#ifdef TREFOIL_NVTX
#include <nvtx3/nvToolsExt.h>

static inline void epRangeEnd(int *range) {
  (void)range;
  nvtxRangePop();
}
/* First statement of a function: a range until it returns. */
#define EP_RANGE()                                                                                 \
  __attribute__((cleanup(epRangeEnd))) int epRange = nvtxRangePushA(__func__);                     \
  (void)epRange
#else
#define EP_RANGE() (void)0
#endif

#endif
