/* Single numbers: the public face of ref/bits.h. */
#include "trefoil/numerics.h"

#include "ref/bits.h"

uint16_t trefoilF32ToBf16(float x) {
  return epF32ToBf16(x);
}
uint16_t trefoilF32ToF16(float x) {
  return epF32ToF16(x);
}
uint8_t trefoilF32ToE4m3(float x) {
  return epF32ToE4m3(x);
}
uint8_t trefoilF32ToE5m2(float x) {
  return epF32ToE5m2(x);
}
uint8_t trefoilF32ToE2m1(float x) {
  return epF32ToE2m1(x);
}

float trefoilBf16ToF32(uint16_t bits) {
  return epCanonical(epBf16ToF32(bits));
}
float trefoilF16ToF32(uint16_t bits) {
  return epCanonical(epF16ToF32(bits));
}
float trefoilE4m3ToF32(uint8_t bits) {
  return epCanonical(epE4m3ToF32(bits));
}
float trefoilE5m2ToF32(uint8_t bits) {
  return epCanonical(epE5m2ToF32(bits));
}
float trefoilE2m1ToF32(uint8_t bits) {
  return epE2m1ToF32(bits);
}
