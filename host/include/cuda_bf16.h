/* bf16 (1 sign, 8 exponent, 7 mantissa bits) for host code of machines without a toolkit: CUDA's names,
 * bits and roundings. In C only the types of bits, as CUDA has it. tests/host compares every number with
 * docs/spec.md's numerics, and with CUDA's own header where it is there. */
#ifndef TREFOIL_CUDA_BF16_H
#define TREFOIL_CUDA_BF16_H

#include "small_floats.h"

typedef struct __attribute__((aligned(2))) {
  unsigned short x;
} __nv_bfloat16_raw;
typedef struct __attribute__((aligned(4))) {
  unsigned short x, y;
} __nv_bfloat162_raw;

#ifdef __cplusplus
#define TREFOIL_T      __nv_bfloat16
#define TREFOIL_T2     __nv_bfloat162
#define TREFOIL_RAW    __nv_bfloat16_raw
#define TREFOIL_RAW2   __nv_bfloat162_raw
#define TREFOIL_NARROW trefoilToBfloatBits
#define TREFOIL_WIDEN  trefoilBfloatBitsToFloat
#include "small_float_type.h"

typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

TREFOIL_INLINE __nv_bfloat16 __ushort_as_bfloat16(const unsigned short bits) {
  return trefoilFromBits(__nv_bfloat16(), bits);
}
TREFOIL_INLINE __nv_bfloat16 __short_as_bfloat16(const short bits) {
  return trefoilFromBits(__nv_bfloat16(), static_cast<unsigned short>(bits));
}
TREFOIL_INLINE unsigned short __bfloat16_as_ushort(const __nv_bfloat16 a) {
  return static_cast<__nv_bfloat16_raw>(a).x;
}
TREFOIL_INLINE short __bfloat16_as_short(const __nv_bfloat16 a) {
  return static_cast<short>(static_cast<__nv_bfloat16_raw>(a).x);
}

TREFOIL_INLINE __nv_bfloat16 __float2bfloat16(const float a) {
  return __nv_bfloat16(a);
}
TREFOIL_INLINE __nv_bfloat16 __double2bfloat16(const double a) {
  return __nv_bfloat16(a);
}
TREFOIL_INLINE __nv_bfloat16 __float2bfloat16_rn(const float a) {
  return trefoilFromBits(__nv_bfloat16(),
                         trefoilToBfloatBits(static_cast<double>(a), TREFOIL_ROUND_NEAREST));
}
TREFOIL_INLINE __nv_bfloat16 __float2bfloat16_rz(const float a) {
  return trefoilFromBits(__nv_bfloat16(),
                         trefoilToBfloatBits(static_cast<double>(a), TREFOIL_ROUND_ZERO));
}
TREFOIL_INLINE __nv_bfloat16 __float2bfloat16_rd(const float a) {
  return trefoilFromBits(__nv_bfloat16(),
                         trefoilToBfloatBits(static_cast<double>(a), TREFOIL_ROUND_DOWN));
}
TREFOIL_INLINE __nv_bfloat16 __float2bfloat16_ru(const float a) {
  return trefoilFromBits(__nv_bfloat16(),
                         trefoilToBfloatBits(static_cast<double>(a), TREFOIL_ROUND_UP));
}
TREFOIL_INLINE float __bfloat162float(const __nv_bfloat16 a) {
  return a;
}
TREFOIL_INLINE __nv_bfloat16 __int2bfloat16_rn(const int i) {
  return __nv_bfloat16(i);
}
TREFOIL_INLINE int __bfloat162int_rz(const __nv_bfloat16 a) {
  return a;
}
TREFOIL_INLINE __nv_bfloat16 __uint2bfloat16_rn(const unsigned int i) {
  return __nv_bfloat16(i);
}
TREFOIL_INLINE unsigned int __bfloat162uint_rz(const __nv_bfloat16 a) {
  return a;
}
TREFOIL_INLINE __nv_bfloat16 __short2bfloat16_rn(const short i) {
  return __nv_bfloat16(i);
}
TREFOIL_INLINE short __bfloat162short_rz(const __nv_bfloat16 a) {
  return a;
}
TREFOIL_INLINE __nv_bfloat16 __ushort2bfloat16_rn(const unsigned short i) {
  return __nv_bfloat16(i);
}
TREFOIL_INLINE unsigned short __bfloat162ushort_rz(const __nv_bfloat16 a) {
  return a;
}
TREFOIL_INLINE __nv_bfloat16 __ll2bfloat16_rn(const long long i) {
  return __nv_bfloat16(i);
}
TREFOIL_INLINE long long __bfloat162ll_rz(const __nv_bfloat16 a) {
  return a;
}
TREFOIL_INLINE __nv_bfloat16 __ull2bfloat16_rn(const unsigned long long i) {
  return __nv_bfloat16(i);
}
TREFOIL_INLINE unsigned long long __bfloat162ull_rz(const __nv_bfloat16 a) {
  return a;
}

TREFOIL_INLINE __nv_bfloat162 make_bfloat162(const __nv_bfloat16 a, const __nv_bfloat16 b) {
  return __nv_bfloat162(a, b);
}
TREFOIL_INLINE __nv_bfloat162 __halves2bfloat162(const __nv_bfloat16 a, const __nv_bfloat16 b) {
  return __nv_bfloat162(a, b);
}
TREFOIL_INLINE __nv_bfloat162 __bfloat162bfloat162(const __nv_bfloat16 a) {
  return __nv_bfloat162(a, a);
}
TREFOIL_INLINE __nv_bfloat162 __floats2bfloat162_rn(const float a, const float b) {
  return __nv_bfloat162(__nv_bfloat16(a), __nv_bfloat16(b));
}
TREFOIL_INLINE __nv_bfloat162 __float2bfloat162_rn(const float a) {
  return __nv_bfloat162(__nv_bfloat16(a), __nv_bfloat16(a));
}
TREFOIL_INLINE __nv_bfloat162 __float22bfloat162_rn(const float2 a) {
  return __nv_bfloat162(__nv_bfloat16(a.x), __nv_bfloat16(a.y));
}
TREFOIL_INLINE float2 __bfloat1622float2(const __nv_bfloat162 a) {
  const float2 wide = {a.x, a.y};
  return wide;
}
TREFOIL_INLINE __nv_bfloat16 __low2bfloat16(const __nv_bfloat162 a) {
  return a.x;
}
TREFOIL_INLINE __nv_bfloat16 __high2bfloat16(const __nv_bfloat162 a) {
  return a.y;
}
#endif

#endif
