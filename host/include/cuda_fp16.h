/* f16 (1 sign, 5 exponent, 10 mantissa bits) for host code of machines without a toolkit: CUDA's names,
 * bits and roundings. In C only the types of bits, as CUDA has it. tests/host compares every number with
 * docs/spec.md's numerics, and with CUDA's own header where it is there. */
#ifndef TREFOIL_CUDA_FP16_H
#define TREFOIL_CUDA_FP16_H

#include "small_floats.h"

typedef struct __attribute__((aligned(2))) {
  unsigned short x;
} __half_raw;
typedef struct __attribute__((aligned(4))) {
  unsigned short x, y;
} __half2_raw;

#ifdef __cplusplus
#define TREFOIL_T      __half
#define TREFOIL_T2     __half2
#define TREFOIL_RAW    __half_raw
#define TREFOIL_RAW2   __half2_raw
#define TREFOIL_NARROW trefoilToHalfBits
#define TREFOIL_WIDEN  trefoilHalfBitsToFloat
#include "small_float_type.h"

typedef __half half;
typedef __half2 half2;
typedef __half __nv_half;
typedef __half2 __nv_half2;

TREFOIL_INLINE __half __ushort_as_half(const unsigned short bits) {
  return trefoilFromBits(__half(), bits);
}
TREFOIL_INLINE __half __short_as_half(const short bits) {
  return trefoilFromBits(__half(), static_cast<unsigned short>(bits));
}
TREFOIL_INLINE unsigned short __half_as_ushort(const __half a) {
  return static_cast<__half_raw>(a).x;
}
TREFOIL_INLINE short __half_as_short(const __half a) {
  return static_cast<short>(static_cast<__half_raw>(a).x);
}

TREFOIL_INLINE __half __float2half(const float a) {
  return __half(a);
}
TREFOIL_INLINE __half __double2half(const double a) {
  return __half(a);
}
TREFOIL_INLINE __half __float2half_rn(const float a) {
  return trefoilFromBits(__half(),
                         trefoilToHalfBits(static_cast<double>(a), TREFOIL_ROUND_NEAREST));
}
TREFOIL_INLINE __half __float2half_rz(const float a) {
  return trefoilFromBits(__half(), trefoilToHalfBits(static_cast<double>(a), TREFOIL_ROUND_ZERO));
}
TREFOIL_INLINE __half __float2half_rd(const float a) {
  return trefoilFromBits(__half(), trefoilToHalfBits(static_cast<double>(a), TREFOIL_ROUND_DOWN));
}
TREFOIL_INLINE __half __float2half_ru(const float a) {
  return trefoilFromBits(__half(), trefoilToHalfBits(static_cast<double>(a), TREFOIL_ROUND_UP));
}
TREFOIL_INLINE float __half2float(const __half a) {
  return a;
}
TREFOIL_INLINE __half __int2half_rn(const int i) {
  return __half(i);
}
TREFOIL_INLINE int __half2int_rz(const __half a) {
  return a;
}
TREFOIL_INLINE __half __uint2half_rn(const unsigned int i) {
  return __half(i);
}
TREFOIL_INLINE unsigned int __half2uint_rz(const __half a) {
  return a;
}
TREFOIL_INLINE __half __short2half_rn(const short i) {
  return __half(i);
}
TREFOIL_INLINE short __half2short_rz(const __half a) {
  return a;
}
TREFOIL_INLINE __half __ushort2half_rn(const unsigned short i) {
  return __half(i);
}
TREFOIL_INLINE unsigned short __half2ushort_rz(const __half a) {
  return a;
}
TREFOIL_INLINE __half __ll2half_rn(const long long i) {
  return __half(i);
}
TREFOIL_INLINE long long __half2ll_rz(const __half a) {
  return a;
}
TREFOIL_INLINE __half __ull2half_rn(const unsigned long long i) {
  return __half(i);
}
TREFOIL_INLINE unsigned long long __half2ull_rz(const __half a) {
  return a;
}

TREFOIL_INLINE __half2 make_half2(const __half a, const __half b) {
  return __half2(a, b);
}
TREFOIL_INLINE __half2 __halves2half2(const __half a, const __half b) {
  return __half2(a, b);
}
TREFOIL_INLINE __half2 __half2half2(const __half a) {
  return __half2(a, a);
}
TREFOIL_INLINE __half2 __floats2half2_rn(const float a, const float b) {
  return __half2(__half(a), __half(b));
}
TREFOIL_INLINE __half2 __float2half2_rn(const float a) {
  return __half2(__half(a), __half(a));
}
TREFOIL_INLINE __half2 __float22half2_rn(const float2 a) {
  return __half2(__half(a.x), __half(a.y));
}
TREFOIL_INLINE float2 __half22float2(const __half2 a) {
  const float2 wide = {a.x, a.y};
  return wide;
}
TREFOIL_INLINE __half __low2half(const __half2 a) {
  return a.x;
}
TREFOIL_INLINE __half __high2half(const __half2 a) {
  return a.y;
}
#endif

#endif
