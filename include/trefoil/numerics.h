/* Trefoil: the number formats and the rounding of docs/spec.md, sections N and Q. C99 and C++.
 *
 *   format  sign/exponent/mantissa  bias  largest     no number
 *   bf16    1/8/7                   127   3.39e38     infinities, NaN
 *   f16     1/5/10                  15    65504       infinities, NaN
 *   e4m3    1/4/3                   7     448         NaN only (0x7F, 0xFF)
 *   e5m2    1/5/2                   15    57344       infinities, NaN
 *   e2m1    1/2/1                   1     6           none
 *
 * Rounding is to nearest even; subnormals are kept on both sides. bf16 and f16 overflow to infinity;
 * e4m3, e5m2 and e2m1 saturate, infinities included. NaN becomes the one NaN of the format: f32
 * 0x7FFFFFFF, bf16 and f16 0x7FFF, e4m3 and e5m2 0x7F, e2m1 +6. Widening is exact, and turns any NaN
 * into f32 0x7FFFFFFF. */
#ifndef TREFOIL_NUMERICS_H
#define TREFOIL_NUMERICS_H

#include "trefoil/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One value. */
TREFOIL_API uint16_t trefoilF32ToBf16(float x);
TREFOIL_API uint16_t trefoilF32ToF16(float x);
TREFOIL_API uint8_t trefoilF32ToE4m3(float x);
TREFOIL_API uint8_t trefoilF32ToE5m2(float x);
TREFOIL_API uint8_t trefoilF32ToE2m1(float x); /* in the low four bits */

/* One value. */
TREFOIL_API float trefoilBf16ToF32(uint16_t bits);
TREFOIL_API float trefoilF16ToF32(uint16_t bits);
TREFOIL_API float trefoilE4m3ToF32(uint8_t bits);
TREFOIL_API float trefoilE5m2ToF32(uint8_t bits);
TREFOIL_API float trefoilE2m1ToF32(uint8_t bits); /* the low four bits */

/* Arrays of count elements; TREFOIL_FP4X2: count elements in count / 2 bytes, the first in the low
 * half, count even. dtype: f32, f16, bf16, e4m3, e5m2, fp4x2; f32 only canonicalises NaN.
 * TREFOIL_INVALID_ARGUMENT: another dtype, count < 0, NULL with count > 0. */
TREFOIL_API trefoil_result_t trefoilNarrow(trefoil_dtype_t dtype, const float *in, int64_t count,
                                           void *out);
TREFOIL_API trefoil_result_t trefoilWiden(trefoil_dtype_t dtype, const void *in, int64_t count,
                                          float *out);

/* E4M3 with one f32 scale per 128 elements: bf16 [width] in, q [width] and scales [width / 128] out;
 * x = q * scale. Per block a = max(1e-4, max|x|), NaN left out of the maximum; scale = a * fp32(1/448)
 * and q = E4M3(x * (448 / a)), or with roundScales scale = 2^e, e = ceil(log2(a * fp32(1/448))), and
 * q = E4M3(x * 2^-e). width: a multiple of 128. */
TREFOIL_API trefoil_result_t trefoilQuantiseE4m3(const uint16_t *bf16, int64_t width,
                                                 int roundScales, uint8_t *q, float *scales);

/* NVFP4 with the row's scale g: bf16 [width] in, packed [width / 2] (first element in the low half) and
 * blockScales E4M3 [width / 16] out. Per block s = E4M3(g * max|x| / 6), c = E2M1(x * g / s), each
 * operation rounded to f32 from left to right; c = 0 where s or g is 0. width: a multiple of 16. */
TREFOIL_API trefoil_result_t trefoilEncodeNvfp4(const uint16_t *bf16, int64_t width, float g,
                                                uint8_t *packed, uint8_t *blockScales);
/* x = c * s / g in f32; 0 where s or g is 0. */
TREFOIL_API trefoil_result_t trefoilDecodeNvfp4(const uint8_t *packed, const uint8_t *blockScales,
                                                float g, int64_t width, float *out);

#ifdef __cplusplus
}
#endif
#endif
