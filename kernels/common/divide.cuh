// Division by a number that is the same for a whole launch: a product with its inverse.
#ifndef TREFOIL_KERNELS_COMMON_DIVIDE_CUH
#define TREFOIL_KERNELS_COMMON_DIVIDE_CUH

#include <cuda_runtime.h>

#define EP_BOTH __host__ __device__ __forceinline__

struct Divisor {
  unsigned n, inverse; // 2^31 / n, rounded up

  static EP_BOTH Divisor of(unsigned n) { return Divisor{n, 0x7fffffffu / n + 1}; }

  // x / n for x below 2^31: the product is at most one too great.
  EP_BOTH unsigned quotient(unsigned x) const {
    const unsigned q = smallQuotient(x);
    return q - (q * n > x);
  }
  // x / n where x * n is below 2^31: the product is right.
  EP_BOTH unsigned smallQuotient(unsigned x) const {
    return (unsigned)((unsigned long long)x * inverse >> 31);
  }
};

#endif
