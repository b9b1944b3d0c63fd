/* Arrays and rows of numbers, with their arguments checked. */
#include "trefoil/numerics.h"

#include "plan/error.h"
#include "ref/bits.h"
#include "ref/row.h"

#include <stdbool.h>

static trefoil_result_t checkArray(trefoil_dtype_t dtype, const void *in, int64_t count,
                                   const void *out) {
  EP_CHECK(count >= 0, TREFOIL_INVALID_ARGUMENT, "count is %lld, must be >= 0", (long long)count);
  EP_CHECK((in && out) || count == 0, TREFOIL_INVALID_ARGUMENT, "%s is NULL", in ? "out" : "in");
  EP_CHECK(dtype != TREFOIL_FP4X2 || count % 2 == 0, TREFOIL_INVALID_ARGUMENT,
           "count is %lld; fp4x2 holds pairs", (long long)count);
  switch (dtype) {
  case TREFOIL_F32:
  case TREFOIL_F16:
  case TREFOIL_BF16:
  case TREFOIL_E4M3:
  case TREFOIL_E5M2:
  case TREFOIL_FP4X2:
    return TREFOIL_OK;
  default:
    return epFail(TREFOIL_INVALID_ARGUMENT,
                  "dtype is %s; conversions know f32, f16, bf16, e4m3, e5m2 and fp4x2",
                  trefoilDtypeName(dtype));
  }
}

#define EACH(type, expr)                                                                           \
  do {                                                                                             \
    type *to = out;                                                                                \
    for (int64_t i = 0; i < count; i++) to[i] = (expr);                                            \
  } while (0)

trefoil_result_t trefoilNarrow(trefoil_dtype_t dtype, const float *in, int64_t count, void *out) {
  EP_TRY(checkArray(dtype, in, count, out));
  if (dtype == TREFOIL_F32) EACH(float, epCanonical(in[i]));
  if (dtype == TREFOIL_F16) EACH(uint16_t, epF32ToF16(in[i]));
  if (dtype == TREFOIL_BF16) EACH(uint16_t, epF32ToBf16(in[i]));
  if (dtype == TREFOIL_E4M3) EACH(uint8_t, epF32ToE4m3(in[i]));
  if (dtype == TREFOIL_E5M2) EACH(uint8_t, epF32ToE5m2(in[i]));
  if (dtype == TREFOIL_FP4X2) {
    count /= 2;
    EACH(uint8_t, (uint8_t)(epF32ToE2m1(in[2 * i]) | epF32ToE2m1(in[2 * i + 1]) << 4));
  }
  return TREFOIL_OK;
}

trefoil_result_t trefoilWiden(trefoil_dtype_t dtype, const void *in, int64_t count, float *out) {
  EP_TRY(checkArray(dtype, in, count, out));
  const float *f32 = in;
  const uint16_t *half = in;
  const uint8_t *byte = in;
  if (dtype == TREFOIL_F32) EACH(float, epCanonical(f32[i]));
  if (dtype == TREFOIL_F16) EACH(float, epCanonical(epF16ToF32(half[i])));
  if (dtype == TREFOIL_BF16) EACH(float, epCanonical(epBf16ToF32(half[i])));
  if (dtype == TREFOIL_E4M3) EACH(float, epCanonical(epE4m3ToF32(byte[i])));
  if (dtype == TREFOIL_E5M2) EACH(float, epCanonical(epE5m2ToF32(byte[i])));
  if (dtype == TREFOIL_FP4X2) EACH(float, epE2m1ToF32((uint8_t)(byte[i / 2] >> (i & 1) * 4)));
  return TREFOIL_OK;
}

static trefoil_result_t checkRow(int64_t width, int block, bool hasAll) {
  EP_CHECK(width >= 0 && width % block == 0, TREFOIL_INVALID_ARGUMENT,
           "width is %lld, must be a multiple of %d", (long long)width, block);
  EP_CHECK(hasAll || width == 0, TREFOIL_INVALID_ARGUMENT, "an argument is NULL");
  return TREFOIL_OK;
}

trefoil_result_t trefoilQuantiseE4m3(const uint16_t *bf16, int64_t width, int roundScales,
                                     uint8_t *q, float *scales) {
  EP_TRY(checkRow(width, 128, bf16 && q && scales));
  epRowQuantiseE4m3(bf16, width, roundScales, q, scales);
  return TREFOIL_OK;
}

trefoil_result_t trefoilEncodeNvfp4(const uint16_t *bf16, int64_t width, float g, uint8_t *packed,
                                    uint8_t *blockScales) {
  EP_TRY(checkRow(width, 16, bf16 && packed && blockScales));
  epRowEncodeNvfp4(bf16, width, g, packed, blockScales);
  return TREFOIL_OK;
}

trefoil_result_t trefoilDecodeNvfp4(const uint8_t *packed, const uint8_t *blockScales, float g,
                                    int64_t width, float *out) {
  EP_TRY(checkRow(width, 16, packed && blockScales && out));
  epRowDecodeNvfp4(packed, blockScales, g, width, out);
  return TREFOIL_OK;
}
