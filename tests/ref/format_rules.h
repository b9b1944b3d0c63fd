/* The number formats from first principles, in double arithmetic: what ref/bits.h must agree with.
 *
 * valueOf decodes a code by its definition; tieAbove is the midpoint between the values of a code and
 * the next one, where nearest-even changes from one to the other. Both are exact in double. */
#ifndef TREFOIL_TESTS_FORMAT_RULES_H
#define TREFOIL_TESTS_FORMAT_RULES_H

#include "trefoil/numerics.h"

#include <math.h>
#include <string.h>

typedef struct format {
  const char *name;
  trefoil_dtype_t dtype;
  int bits, man, bias;
  uint32_t numFinite; /* codes without sign that are finite numbers: [0, numFinite) */
  int saturates;      /* else the code numFinite is infinity */
  uint32_t nan;       /* what NaN becomes */
} format_t;

static const format_t formats[] = {
    {"bf16", TREFOIL_BF16, 16, 7, 127, 0x7F80, 0, 0x7FFF},
    {"f16", TREFOIL_F16, 16, 10, 15, 0x7C00, 0, 0x7FFF},
    {"e4m3", TREFOIL_E4M3, 8, 3, 7, 0x7F, 1, 0x7F},
    {"e5m2", TREFOIL_E5M2, 8, 2, 15, 0x7C, 1, 0x7F},
    {"e2m1", TREFOIL_FP4X2, 4, 1, 1, 0x8, 1, 0x7},
};
#define NUM_FORMATS (sizeof formats / sizeof *formats)

/* The value of a code without sign, also of the one past the last finite one, were it a number. */
static inline double valueOf(const format_t *f, uint32_t code) {
  int exponent = (int)(code >> f->man), mantissa = (int)(code & ((1u << f->man) - 1));
  if (exponent == 0) return ldexp(mantissa, 1 - f->bias - f->man);
  return ldexp(mantissa + (1 << f->man), exponent - f->bias - f->man);
}

static inline double tieAbove(const format_t *f, uint32_t code) {
  return (valueOf(f, code) + valueOf(f, code + 1)) / 2;
}

static inline uint32_t narrowOne(const format_t *f, float x) {
  switch (f->dtype) {
  case TREFOIL_BF16:
    return trefoilF32ToBf16(x);
  case TREFOIL_F16:
    return trefoilF32ToF16(x);
  case TREFOIL_E4M3:
    return trefoilF32ToE4m3(x);
  case TREFOIL_E5M2:
    return trefoilF32ToE5m2(x);
  default:
    return trefoilF32ToE2m1(x);
  }
}

static inline float widenOne(const format_t *f, uint32_t code) {
  switch (f->dtype) {
  case TREFOIL_BF16:
    return trefoilBf16ToF32((uint16_t)code);
  case TREFOIL_F16:
    return trefoilF16ToF32((uint16_t)code);
  case TREFOIL_E4M3:
    return trefoilE4m3ToF32((uint8_t)code);
  case TREFOIL_E5M2:
    return trefoilE5m2ToF32((uint8_t)code);
  default:
    return trefoilE2m1ToF32((uint8_t)code);
  }
}

static inline float floatOf(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
static inline uint32_t bitsOf(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}

#endif
