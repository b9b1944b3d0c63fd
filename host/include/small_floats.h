/* What cuda_fp16.h, cuda_bf16.h and cuda_fp8.h share: numbers of a sign, some bits of exponent and some of
 * mantissa, made from doubles (and so from floats) with one rounding. C99 and C++11. */
#ifndef TREFOIL_SMALL_FLOATS_H
#define TREFOIL_SMALL_FLOATS_H

#include <stdint.h>
#include <string.h>

#include "vector_types.h"

#define TREFOIL_INLINE static inline __attribute__((unused))

typedef enum {
  TREFOIL_ROUND_NEAREST, /* ties to even */
  TREFOIL_ROUND_ZERO,
  TREFOIL_ROUND_DOWN,
  TREFOIL_ROUND_UP
} trefoil_round_t;

TREFOIL_INLINE uint32_t trefoilFloatBits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

TREFOIL_INLINE float trefoilBitsFloat(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

TREFOIL_INLINE uint64_t trefoilDoubleBits(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

/* |x| in exponent and mantissa bits, x no NaN. above: the code after the largest number's, for what exceeds
 * it and for infinity. */
TREFOIL_INLINE uint32_t trefoilNarrowBits(double x, int exponentBits, int mantissaBits,
                                          uint32_t above, trefoil_round_t round) {
  const uint64_t bits = trefoilDoubleBits(x), one = 1;
  const int negative = (int)(bits >> 63), field = (int)(bits >> 52 & 0x7ff);
  const int least = 2 - (1 << (exponentBits - 1)); /* exponent of the smallest normal number */
  if (field == 0x7ff) return above;
  const int exponent = field ? field - 1023 : -1022;
  const uint64_t significand = (bits & ((one << 52) - 1)) | (field ? one << 52 : 0);
  const int below = exponent < least ? least - exponent : 0;
  const int shift =
      below > mantissaBits + 1 ? 62 : 52 - mantissaBits + below; /* 62: under half the smallest */
  uint64_t kept = significand >> shift;
  const uint64_t rest = significand & ((one << shift) - 1), half = one << (shift - 1);
  if (round == TREFOIL_ROUND_NEAREST)
    kept += rest > half || (rest == half && (kept & 1));
  else if (round != TREFOIL_ROUND_ZERO)
    kept += rest && (round == TREFOIL_ROUND_UP) == !negative;
  const uint64_t base = below ? 0 : (uint64_t)(exponent - least) << mantissaBits;
  const int inward = round == TREFOIL_ROUND_ZERO ||
                     (round != TREFOIL_ROUND_NEAREST && (round == TREFOIL_ROUND_UP) == negative);
  if (base + kept < above) return (uint32_t)(base + kept);
  return inward ? above - 1 : above;
}

/* The float of exponent and mantissa bits that are finite. */
TREFOIL_INLINE float trefoilWidenBits(uint32_t bits, int exponentBits, int mantissaBits) {
  const uint32_t mantissa = bits & ((1u << mantissaBits) - 1), field = bits >> mantissaBits;
  const int bias = (1 << (exponentBits - 1)) - 1;
  const float unit = trefoilBitsFloat((uint32_t)(128 - bias - mantissaBits) << 23);
  if (!field) return (float)mantissa * unit; /* subnormal: so many of the smallest */
  return trefoilBitsFloat((field + (uint32_t)(127 - bias)) << 23 | mantissa << (23 - mantissaBits));
}

/* f16 and bf16 as 16 bits. NaN becomes 0x7FFF. */
TREFOIL_INLINE unsigned short trefoilToHalfBits(double x, trefoil_round_t round) {
  if (x != x) return 0x7fff;
  return (unsigned short)(trefoilNarrowBits(x, 5, 10, 0x7c00, round) |
                          trefoilDoubleBits(x) >> 63 << 15);
}

TREFOIL_INLINE unsigned short trefoilToBfloatBits(double x, trefoil_round_t round) {
  if (x != x) return 0x7fff;
  return (unsigned short)(trefoilNarrowBits(x, 8, 7, 0x7f80, round) |
                          trefoilDoubleBits(x) >> 63 << 15);
}

/* A NaN becomes 0x7FFFFFFF, as CUDA's conversion on the host has it. */
TREFOIL_INLINE float trefoilHalfBitsToFloat(unsigned short h) {
  const uint32_t magnitude = h & 0x7fffu, sign = (uint32_t)(h & 0x8000u) << 16;
  if (magnitude > 0x7c00u) return trefoilBitsFloat(0x7fffffffu);
  if (magnitude == 0x7c00u) return trefoilBitsFloat(sign | 0x7f800000u);
  return trefoilBitsFloat(sign | trefoilFloatBits(trefoilWidenBits(magnitude, 5, 10)));
}

TREFOIL_INLINE float trefoilBfloatBitsToFloat(unsigned short b) {
  return trefoilBitsFloat((uint32_t)b << 16);
}

#ifdef __cplusplus
/* Towards zero, to the nearest the type has; NaN: 0, of 64 bits the lowest (as signed). */
template <class Int> static inline Int trefoilToInt(float x) {
  const bool isSigned = static_cast<Int>(-1) < static_cast<Int>(0);
  const int bits = static_cast<int>(sizeof(Int)) * 8 - isSigned;
  const Int most = static_cast<Int>(isSigned ? (1ull << bits) - 1 : ~0ull);
  if (x != x) return sizeof(Int) == 8 ? static_cast<Int>(1ull << 63) : static_cast<Int>(0);
  if (x >= trefoilBitsFloat(static_cast<uint32_t>(127 + bits) << 23)) return most;
  const float least = isSigned ? -trefoilBitsFloat(static_cast<uint32_t>(127 + bits) << 23) : 0;
  if (x <= least) return isSigned ? static_cast<Int>(-most - 1) : static_cast<Int>(0);
  return static_cast<Int>(x);
}
#endif

#endif
