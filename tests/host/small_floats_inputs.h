/* Numbers to convert: every sign, exponent and 11 bits of mantissa, with nothing, little or much behind. That
 * holds every number of 16 bits, every tie, and both neighbours of each. */
#ifndef TREFOIL_TESTS_HOST_SMALL_FLOATS_INPUTS_H
#define TREFOIL_TESTS_HOST_SMALL_FLOATS_INPUTS_H

#include <stdint.h>
#include <string.h>

enum { NUM_FLOATS = 3 << 20 };

static inline float inputFloat(uint32_t i) {
  static const uint32_t behind[3] = {0, 1, 0xfff};
  const uint32_t bits = (i / 3) << 12 | behind[i % 3];
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* Of a float the double, or a neighbour: what rounding by way of a float gets wrong. */
static inline double inputDouble(uint32_t i) {
  const double x = (double)inputFloat(i);
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7ff0000000000000u) != 0x7ff0000000000000u && bits << 1) bits += i % 5 - 2u;
  double near;
  memcpy(&near, &bits, sizeof near);
  return near;
}

#endif
