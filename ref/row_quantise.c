#include "ref/row.h"

#include "ref/bits.h"

/* Largest magnitude of a block, NaN left out, at least `floor`. */
EP_BITS_INLINE float maxMagnitude(const uint16_t *bf16, int n, float floor) {
  uint32_t max = epBits(floor);
  for (int i = 0; i < n; i++) {
    uint32_t u = (uint32_t)(bf16[i] & 0x7FFFu) << 16;
    u = epSelect(u > 0x7F800000u, 0, u);
    max = u > max ? u : max; /* magnitudes order as their bits */
  }
  return epFloat(max);
}

/* The smallest power of two that is >= x, for normal x > 0; infinity stays. */
EP_BITS_INLINE float powerOfTwoAbove(float x) {
  uint32_t u = epBits(x);
  return epFloat((u + 0x007FFFFFu) & 0x7F800000u);
}

EP_ROW_CLONES static void quantise(const uint16_t *bf16, int64_t width, int roundScales, uint8_t *q,
                                   float *scales) {
  for (int64_t b = 0; b < width / 128; b++) {
    float a = maxMagnitude(bf16 + b * 128, 128, 1e-4f);
    float scale = a * (1.0f / 448.0f), times = 448.0f / a;
    if (roundScales) {
      scale = powerOfTwoAbove(scale);
      times = 1.0f / scale; /* exact: a power of two, and 0 for infinity */
    }
    for (int i = 0; i < 128; i++) {
      q[b * 128 + i] = epF32ToE4m3(epBf16ToF32(bf16[b * 128 + i]) * times);
    }
    scales[b] = scale;
  }
}

void epRowQuantiseE4m3(const uint16_t *bf16, int64_t width, int roundScales, uint8_t *q,
                       float *scales) {
  quantise(bf16, width, roundScales, q, scales);
}

/* x * g / s with zeros where there is nothing to scale by. */
static uint8_t encodeElement(uint16_t bf16, float g, float s) {
  return s == 0 || g == 0 ? 0 : epF32ToE2m1(epBf16ToF32(bf16) * g / s);
}

void epRowEncodeNvfp4(const uint16_t *bf16, int64_t width, float g, uint8_t *packed,
                      uint8_t *blockScales) {
  for (int64_t b = 0; b < width / 16; b++) {
    const uint16_t *x = bf16 + b * 16;
    blockScales[b] = epF32ToE4m3(g * maxMagnitude(x, 16, 0.0f) / 6.0f);
    float s = epE4m3ToF32(blockScales[b]);
    for (int i = 0; i < 16; i += 2) {
      uint8_t low = encodeElement(x[i], g, s), high = encodeElement(x[i + 1], g, s);
      packed[b * 8 + i / 2] = (uint8_t)(low | high << 4);
    }
  }
}

void epRowDecodeNvfp4(const uint8_t *packed, const uint8_t *blockScales, float g, int64_t width,
                      float *out) {
  for (int64_t i = 0; i < width; i++) {
    float s = epE4m3ToF32(blockScales[i / 16]);
    float c = epE2m1ToF32((uint8_t)(packed[i / 2] >> (i & 1) * 4 & 0xF));
    out[i] = s == 0 || g == 0 ? 0.0f : c * s / g;
  }
}
