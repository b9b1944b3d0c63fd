/* fp8 (e4m3: 4 exponent, 3 mantissa bits, no infinity; e5m2: 5 and 2) for host code of machines without a
 * toolkit: CUDA's names, bits and roundings, in C and C++. tests/host compares every number with
 * docs/spec.md's numerics, and with CUDA's own header where it is there. e8m0 is not here. */
#ifndef TREFOIL_CUDA_FP8_H
#define TREFOIL_CUDA_FP8_H

#include "cuda_bf16.h"
#include "cuda_fp16.h"

typedef unsigned char __nv_fp8_storage_t;
typedef unsigned short int __nv_fp8x2_storage_t;
typedef unsigned int __nv_fp8x4_storage_t;
typedef enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE } __nv_saturation_t;
typedef enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 } __nv_fp8_interpretation_t;

TREFOIL_INLINE __nv_fp8_storage_t
__nv_cvt_double_to_fp8(const double x, const __nv_saturation_t saturate,
                       const __nv_fp8_interpretation_t fp8_interpretation) {
  const uint64_t bits = trefoilDoubleBits(x);
  const unsigned sign = (unsigned)(bits >> 56 & 0x80);
  const int isE4m3 = fp8_interpretation == __NV_E4M3;
  if (x != x) return (__nv_fp8_storage_t)(sign | (isE4m3 ? 0x7f : 0x7e | (bits >> 50 & 3)));
  const uint32_t above = isE4m3 ? 0x7f : 0x7c; /* NaN; infinity */
  uint32_t code =
      trefoilNarrowBits(x, isE4m3 ? 4 : 5, isE4m3 ? 3 : 2, above, TREFOIL_ROUND_NEAREST);
  if (code == above && saturate == __NV_SATFINITE) code = above - 1;
  return (__nv_fp8_storage_t)(sign | code);
}

TREFOIL_INLINE __nv_fp8_storage_t
__nv_cvt_float_to_fp8(const float x, const __nv_saturation_t saturate,
                      const __nv_fp8_interpretation_t fp8_interpretation) {
  if (x != x) return 0x7f;
  return __nv_cvt_double_to_fp8((double)x, saturate, fp8_interpretation);
}

TREFOIL_INLINE __nv_fp8_storage_t
__nv_cvt_halfraw_to_fp8(const __half_raw x, const __nv_saturation_t saturate,
                        const __nv_fp8_interpretation_t fp8_interpretation) {
  return __nv_cvt_float_to_fp8(trefoilHalfBitsToFloat(x.x), saturate, fp8_interpretation);
}

TREFOIL_INLINE __nv_fp8_storage_t
__nv_cvt_bfloat16raw_to_fp8(const __nv_bfloat16_raw x, const __nv_saturation_t saturate,
                            const __nv_fp8_interpretation_t fp8_interpretation) {
  return __nv_cvt_float_to_fp8(trefoilBfloatBitsToFloat(x.x), saturate, fp8_interpretation);
}

TREFOIL_INLINE __half_raw __nv_cvt_fp8_to_halfraw(
    const __nv_fp8_storage_t x, const __nv_fp8_interpretation_t fp8_interpretation) {
  const unsigned magnitude = x & 0x7fu, sign = (x & 0x80u) << 8;
  const int isE4m3 = fp8_interpretation == __NV_E4M3;
  __half_raw out;
  if (magnitude > (isE4m3 ? 0x7eu : 0x7cu))
    out.x = 0x7fff;
  else if (isE4m3)
    out.x = (unsigned short)(sign | trefoilToHalfBits((double)trefoilWidenBits(magnitude, 4, 3),
                                                      TREFOIL_ROUND_NEAREST));
  else
    out.x = (unsigned short)(sign | magnitude << 8);
  return out;
}

/* Pairs: the first in the low byte. */
#define TREFOIL_PAIR(name, Pair, convert, Single)                                                  \
  TREFOIL_INLINE __nv_fp8x2_storage_t name(const Pair x, const __nv_saturation_t saturate,         \
                                           const __nv_fp8_interpretation_t fp8_interpretation) {   \
    Single(x.x, low) Single(x.y, high);                                                            \
    return (__nv_fp8x2_storage_t)(convert(low, saturate, fp8_interpretation) |                     \
                                  convert(high, saturate, fp8_interpretation) << 8);               \
  }
#define TREFOIL_NUMBER(from, to) const double to = (double)from;
#define TREFOIL_HALF(from, to)   const __half_raw to = {from};
#define TREFOIL_BFLOAT(from, to) const __nv_bfloat16_raw to = {from};
TREFOIL_INLINE __nv_fp8_storage_t trefoilFloatToFp8(double x, __nv_saturation_t saturate,
                                                    __nv_fp8_interpretation_t as) {
  return __nv_cvt_float_to_fp8((float)x, saturate, as);
}
TREFOIL_PAIR(__nv_cvt_double2_to_fp8x2, double2, __nv_cvt_double_to_fp8, TREFOIL_NUMBER)
TREFOIL_PAIR(__nv_cvt_float2_to_fp8x2, float2, trefoilFloatToFp8, TREFOIL_NUMBER)
TREFOIL_PAIR(__nv_cvt_halfraw2_to_fp8x2, __half2_raw, __nv_cvt_halfraw_to_fp8, TREFOIL_HALF)
TREFOIL_PAIR(__nv_cvt_bfloat16raw2_to_fp8x2, __nv_bfloat162_raw, __nv_cvt_bfloat16raw_to_fp8,
             TREFOIL_BFLOAT)
#undef TREFOIL_PAIR
#undef TREFOIL_NUMBER
#undef TREFOIL_HALF
#undef TREFOIL_BFLOAT

TREFOIL_INLINE __half2_raw __nv_cvt_fp8x2_to_halfraw2(
    const __nv_fp8x2_storage_t x, const __nv_fp8_interpretation_t fp8_interpretation) {
  __half2_raw out;
  out.x = __nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)(x & 0xff), fp8_interpretation).x;
  out.y = __nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)(x >> 8), fp8_interpretation).x;
  return out;
}

#ifdef __cplusplus
/* Conversions to fp8 saturate; integers go by f32, as in CUDA. */
#define TREFOIL_FP8(Type, as)                                                                      \
  struct Type {                                                                                    \
    __nv_fp8_storage_t __x;                                                                        \
    Type() = default;                                                                              \
    explicit Type(const __half f) : __x(__nv_cvt_halfraw_to_fp8(f, __NV_SATFINITE, as)) {}         \
    explicit Type(const __nv_bfloat16 f)                                                           \
        : __x(__nv_cvt_bfloat16raw_to_fp8(f, __NV_SATFINITE, as)) {}                               \
    explicit Type(const float f) : __x(__nv_cvt_float_to_fp8(f, __NV_SATFINITE, as)) {}            \
    explicit Type(const double f) : __x(__nv_cvt_double_to_fp8(f, __NV_SATFINITE, as)) {}          \
    explicit Type(const short i) : Type(static_cast<float>(i)) {}                                  \
    explicit Type(const unsigned short i) : Type(static_cast<float>(i)) {}                         \
    explicit Type(const int i) : Type(static_cast<float>(i)) {}                                    \
    explicit Type(const unsigned int i) : Type(static_cast<float>(i)) {}                           \
    explicit Type(const long i) : Type(static_cast<float>(i)) {}                                   \
    explicit Type(const unsigned long i) : Type(static_cast<float>(i)) {}                          \
    explicit Type(const long long i) : Type(static_cast<float>(i)) {}                              \
    explicit Type(const unsigned long long i) : Type(static_cast<float>(i)) {}                     \
    explicit operator __half() const { return __nv_cvt_fp8_to_halfraw(__x, as); }                  \
    explicit operator float() const {                                                              \
      return trefoilHalfBitsToFloat(__nv_cvt_fp8_to_halfraw(__x, as).x);                           \
    }                                                                                              \
    explicit operator __nv_bfloat16() const { return static_cast<float>(*this); }                  \
    explicit operator double() const { return static_cast<double>(static_cast<float>(*this)); }    \
    explicit operator bool() const { return (__x & 0x7fu) != 0; }                                  \
  }
TREFOIL_FP8(__nv_fp8_e4m3, __NV_E4M3);
TREFOIL_FP8(__nv_fp8_e5m2, __NV_E5M2);
#undef TREFOIL_FP8

#define TREFOIL_FP8X2(Type, as)                                                                    \
  struct Type {                                                                                    \
    __nv_fp8x2_storage_t __x;                                                                      \
    Type() = default;                                                                              \
    explicit Type(const float2 f) : __x(__nv_cvt_float2_to_fp8x2(f, __NV_SATFINITE, as)) {}        \
    explicit Type(const double2 f) : __x(__nv_cvt_double2_to_fp8x2(f, __NV_SATFINITE, as)) {}      \
    explicit Type(const __half2 f) : __x(__nv_cvt_halfraw2_to_fp8x2(f, __NV_SATFINITE, as)) {}     \
    explicit Type(const __nv_bfloat162 f)                                                          \
        : __x(__nv_cvt_bfloat16raw2_to_fp8x2(f, __NV_SATFINITE, as)) {}                            \
    explicit operator __half2() const { return __nv_cvt_fp8x2_to_halfraw2(__x, as); }              \
    explicit operator float2() const { return __half22float2(static_cast<__half2>(*this)); }       \
  }
TREFOIL_FP8X2(__nv_fp8x2_e4m3, __NV_E4M3);
TREFOIL_FP8X2(__nv_fp8x2_e5m2, __NV_E5M2);
#undef TREFOIL_FP8X2
#endif

#endif
