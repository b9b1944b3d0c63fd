/* Conversions between f32 and the small formats, on bits, without branches, so that loops over rows
 * vectorise. docs/spec.md, rules N1 to N6.
 *
 * A small format is given by its mantissa bits M, its exponent bias b and a limit. Rounding to
 * nearest even of a normal number adds half of the last kept place minus one plus that place's bit; a
 * subnormal is rounded by adding and removing a power of two whose own last place is the format's
 * smallest step, which lets the adder round (round to nearest even is the mode of every thread we
 * run on; tests/ref/test_numerics.c notices flushed subnormals). */
#ifndef TREFOIL_REF_BITS_H
#define TREFOIL_REF_BITS_H

#include <stdint.h>
#include <string.h>

#define EP_BITS_INLINE static inline __attribute__((always_inline))
#define EP_F32_NAN     0x7FFFFFFFu
#define EP_F16_NAN     0x7FFFu
#define EP_BF16_NAN    0x7FFFu
#define EP_FP8_NAN     0x7Fu

EP_BITS_INLINE uint32_t epBits(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}
EP_BITS_INLINE float epFloat(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

/* cond ? a : b without a branch: a compiler moves arithmetic into branches, and cannot vectorise
 * them then. */
EP_BITS_INLINE uint32_t epSelect(int cond, uint32_t a, uint32_t b) {
  uint32_t mask = -(uint32_t)(cond != 0);
  return (a & mask) | (b & ~mask);
}

/* Magnitude of a number without sign (u < 0x80000000, not NaN) in a format of `man` mantissa bits
 * and `bias`: sign-less code, rounded to nearest even, not limited above. */
EP_BITS_INLINE uint32_t epNarrowMagnitude(uint32_t u, int man, int bias) {
  int shift = 23 - man;
  uint32_t smallestNormal = (uint32_t)(128 - bias) << 23;       /* 2^(1 - bias) */
  uint32_t magic = (uint32_t)(127 + 1 - bias - man + 23) << 23; /* its last place: the step */
  uint32_t normal = (u + ((1u << (shift - 1)) - 1) + ((u >> shift) & 1)) >> shift;
  normal -= (uint32_t)(127 - bias) << man;
  int isSubnormal = u < smallestNormal;
  uint32_t subnormal = epBits(epFloat(epSelect(isSubnormal, u, 0)) + epFloat(magic)) - magic;
  return epSelect(isSubnormal, subnormal, normal);
}

EP_BITS_INLINE uint16_t epF32ToBf16(float x) {
  uint32_t u = epBits(x);
  uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1)) >> 16;
  return (uint16_t)epSelect((u & 0x7FFFFFFFu) > 0x7F800000u, EP_BF16_NAN, rounded);
}
EP_BITS_INLINE uint16_t epF32ToF16(float x) {
  uint32_t u = epBits(x) & 0x7FFFFFFFu, sign = epBits(x) >> 16 & 0x8000u;
  uint32_t code = epNarrowMagnitude(epSelect(u <= 0x7F800000u, u, 0), 10, 15);
  code = code < 0x7C00u ? code : 0x7C00u;
  return (uint16_t)epSelect(u > 0x7F800000u, EP_F16_NAN, sign | code);
}
/* Saturating: no infinity comes out of a conversion to fp8. */
EP_BITS_INLINE uint8_t epF32ToE4m3(float x) {
  uint32_t u = epBits(x) & 0x7FFFFFFFu, sign = epBits(x) >> 24 & 0x80u;
  uint32_t limited = u < 0x43E00000u ? u : 0x43E00000u; /* 448 */
  return (uint8_t)epSelect(u > 0x7F800000u, EP_FP8_NAN, sign | epNarrowMagnitude(limited, 3, 7));
}
EP_BITS_INLINE uint8_t epF32ToE5m2(float x) {
  uint32_t u = epBits(x) & 0x7FFFFFFFu, sign = epBits(x) >> 24 & 0x80u;
  uint32_t limited = u < 0x47600000u ? u : 0x47600000u; /* 57344 */
  return (uint8_t)epSelect(u > 0x7F800000u, EP_FP8_NAN, sign | epNarrowMagnitude(limited, 2, 15));
}
/* Saturating at 6; E2M1 has no NaN: NaN becomes +6. */
EP_BITS_INLINE uint8_t epF32ToE2m1(float x) {
  uint32_t u = epBits(x) & 0x7FFFFFFFu, sign = epBits(x) >> 28 & 0x8u;
  uint32_t limited = u < 0x40C00000u ? u : 0x40C00000u; /* 6 */
  return (uint8_t)epSelect(u > 0x7F800000u, 0x7u, sign | epNarrowMagnitude(limited, 1, 1));
}

/* Widening is exact. These keep NaN payloads, as row sums may: they canonicalise at their end. */
EP_BITS_INLINE float epBf16ToF32(uint16_t h) {
  return epFloat((uint32_t)h << 16);
}
/* Sign-less code of a format with infinities above all-ones exponents: times 2^(127 - bias). */
EP_BITS_INLINE float epWidenMagnitude(uint32_t code, int man, int bias) {
  float scale = epFloat((uint32_t)(127 + 127 - bias) << 23);
  return epFloat(code << (23 - man)) * scale;
}
EP_BITS_INLINE float epF16ToF32(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000u) << 16, code = h & 0x7FFFu;
  uint32_t u = epBits(epWidenMagnitude(code, 10, 15));
  return epFloat(sign | epSelect(code >= 0x7C00u, u | 0x7F800000u, u));
}
EP_BITS_INLINE float epE5m2ToF32(uint8_t q) {
  return epF16ToF32((uint16_t)(q << 8));
}
EP_BITS_INLINE float epE4m3ToF32(uint8_t q) {
  uint32_t sign = (uint32_t)(q & 0x80u) << 24, code = q & 0x7Fu;
  uint32_t u = epBits(epWidenMagnitude(code, 3, 7));
  return epFloat(sign | epSelect(code == 0x7Fu, EP_F32_NAN, u));
}
EP_BITS_INLINE float epE2m1ToF32(uint8_t q) {
  uint32_t sign = (uint32_t)(q & 0x8u) << 28, code = q & 0x7u;
  return epFloat(sign | epBits(epWidenMagnitude(code, 1, 1)));
}
/* Any NaN becomes the one NaN. */
EP_BITS_INLINE float epCanonical(float x) {
  uint32_t u = epBits(x);
  return epFloat(epSelect((u & 0x7FFFFFFFu) > 0x7F800000u, EP_F32_NAN, u));
}

#endif
