/* Every bit pattern of the small formats, every rounding boundary from f32, and what a compiler
 * must not do to arithmetic. test_numerics_all.c takes all 2^32 floats. */
#include "test.h"

#include "format_rules.h"

#include "ref/row.h"

#include <float.h>
#include <stdbool.h>

TEST(widen_every_pattern) {
  for (size_t i = 0; i < NUM_FORMATS; i++) {
    const format_t *f = &formats[i];
    uint32_t signBit = 1u << (f->bits - 1);
    for (uint32_t code = 0; code < 2 * signBit; code++) {
      uint32_t magnitude = code & (signBit - 1), got = bitsOf(widenOne(f, code));
      bool isInf = f->dtype != TREFOIL_E4M3 && magnitude == f->numFinite;
      uint32_t want = 0x7FFFFFFFu;
      if (isInf) want = 0x7F800000u | (code & signBit ? 0x80000000u : 0);
      if (magnitude < f->numFinite) {
        want = bitsOf((float)valueOf(f, magnitude)) | (code & signBit ? 0x80000000u : 0);
      }
      CHECK(got == want, "%s 0x%x is %08x, not %08x", f->name, code, got, want);
    }
  }
}

TEST(narrow_gives_every_number_back) {
  for (size_t i = 0; i < NUM_FORMATS; i++) {
    const format_t *f = &formats[i];
    uint32_t signBit = 1u << (f->bits - 1);
    for (uint32_t code = 0; code < 2 * signBit; code++) {
      if ((code & (signBit - 1)) >= f->numFinite) continue;
      uint32_t got = narrowOne(f, widenOne(f, code));
      CHECK(got == code, "%s 0x%x comes back as 0x%x", f->name, code, got);
    }
  }
}

static void checkBothSigns(const format_t *f, float x, uint32_t code) {
  uint32_t signBit = 1u << (f->bits - 1);
  CHECK(narrowOne(f, x) == code, "%s(%a) is 0x%x, not 0x%x", f->name, x, narrowOne(f, x), code);
  CHECK(narrowOne(f, -x) == (code | signBit), "%s(%a) is 0x%x, not 0x%x", f->name, -x,
        narrowOne(f, -x), code | signBit);
}

/* At each tie the even code wins, one float to either side the near one. */
TEST(narrow_at_every_tie) {
  for (size_t i = 0; i < NUM_FORMATS; i++) {
    const format_t *f = &formats[i];
    for (uint32_t code = 0; code < f->numFinite - (uint32_t)f->saturates; code++) {
      float tie = (float)tieAbove(f, code);
      CHECK((double)tie == tieAbove(f, code), "%s: the tie above 0x%x is a float", f->name, code);
      checkBothSigns(f, tie, code + (code & 1));
      checkBothSigns(f, nextafterf(tie, 0), code);
      checkBothSigns(f, nextafterf(tie, INFINITY), code + 1);
    }
  }
}

TEST(overflow_and_nan) {
  for (size_t i = 0; i < NUM_FORMATS; i++) {
    const format_t *f = &formats[i];
    uint32_t over = f->saturates ? f->numFinite - 1 : f->numFinite;
    float max = (float)valueOf(f, f->numFinite - 1);
    checkBothSigns(f, max, f->numFinite - 1);
    if (f->dtype != TREFOIL_BF16) checkBothSigns(f, 2 * max, over);
    checkBothSigns(f, FLT_MAX, over);
    checkBothSigns(f, INFINITY, over);
    const uint32_t nans[] = {0x7F800001u, 0x7FC00000u, 0x7FFFFFFFu, 0xFF800001u, 0xFFFFFFFFu};
    for (int n = 0; n < 5; n++) {
      CHECK(narrowOne(f, floatOf(nans[n])) == f->nan, "%s(%08x) is 0x%x", f->name, nans[n],
            narrowOne(f, floatOf(nans[n])));
    }
  }
}

/* The array functions equal the single ones, over all exponents and a dense sample. */
TEST(arrays_equal_singles) {
  enum { COUNT = 1 << 16 };
  static float in[COUNT], back[COUNT];
  static uint16_t out[COUNT];
  for (size_t i = 0; i < NUM_FORMATS; i++) {
    const format_t *f = &formats[i];
    for (uint32_t n = 0; n < COUNT; n++) in[n] = floatOf(n * 65537u + 12345u * (uint32_t)i);
    REQUIRE(trefoilNarrow(f->dtype, in, COUNT, out) == TREFOIL_OK, "%s", trefoilLastError());
    REQUIRE(trefoilWiden(f->dtype, out, COUNT, back) == TREFOIL_OK, "%s", trefoilLastError());
    const uint8_t *bytes = (const uint8_t *)out;
    for (uint32_t n = 0; n < COUNT; n++) {
      uint32_t got = f->bits == 16  ? out[n]
                     : f->bits == 8 ? bytes[n]
                                    : bytes[n / 2] >> n % 2 * 4 & 15;
      CHECK(got == narrowOne(f, in[n]), "%s(%08x) is 0x%x", f->name, bitsOf(in[n]), got);
      CHECK(bitsOf(back[n]) == bitsOf(widenOne(f, got)), "%s 0x%x widens otherwise", f->name, got);
    }
  }
  const float some[3] = {floatOf(0xFF800001u), -0.0f, floatOf(1)};
  float same[3];
  REQUIRE(trefoilNarrow(TREFOIL_F32, some, 3, same) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(bitsOf(same[0]) == 0x7FFFFFFFu && bitsOf(same[1]) == 0x80000000u && bitsOf(same[2]) == 1,
        "f32 to f32 changes NaN alone");
}

TEST(arrays_refuse_bad_arguments) {
  float x = 0;
  uint8_t out[4] = {9, 9, 9, 9};
  CHECK(trefoilNarrow(TREFOIL_INT32, &x, 1, out) == TREFOIL_INVALID_ARGUMENT, "int32");
  CHECK(trefoilNarrow(TREFOIL_BF16, NULL, 1, out) == TREFOIL_INVALID_ARGUMENT, "NULL");
  CHECK(trefoilNarrow(TREFOIL_BF16, &x, -1, out) == TREFOIL_INVALID_ARGUMENT, "-1");
  CHECK(trefoilNarrow(TREFOIL_FP4X2, &x, 1, out) == TREFOIL_INVALID_ARGUMENT, "half a byte");
  CHECK(trefoilWiden(99, out, 1, &x) == TREFOIL_INVALID_ARGUMENT, "no dtype");
  CHECK(trefoilQuantiseE4m3((uint16_t *)out, 64, 0, out, &x) == TREFOIL_INVALID_ARGUMENT, "64");
  CHECK(trefoilQuantiseE4m3(NULL, 128, 0, out, &x) == TREFOIL_INVALID_ARGUMENT, "NULL");
  CHECK(trefoilEncodeNvfp4((uint16_t *)out, 8, 1, out, out) == TREFOIL_INVALID_ARGUMENT, "8");
  CHECK(trefoilDecodeNvfp4(out, NULL, 1, 16, &x) == TREFOIL_INVALID_ARGUMENT, "NULL");
  CHECK(out[0] == 9 && out[3] == 9 && x == 0, "a refused call wrote something");
  CHECK(trefoilNarrow(TREFOIL_BF16, NULL, 0, NULL) == TREFOIL_OK, "nothing to do");
}

/* a = 3: scale = 3 * fp32(1/448), q of 3 is 448 (0x7E), of -1.5 is -224. As a power of two:
 * 3/448 = 0.0067 -> 2^-7: 3 * 128 = 384 (0x7C). */
TEST(quantise_e4m3_by_hand) {
  uint16_t x[256] = {0};
  uint8_t q[256];
  float scales[2];
  x[0] = trefoilF32ToBf16(3);
  x[1] = trefoilF32ToBf16(-1.5f);
  REQUIRE(trefoilQuantiseE4m3(x, 256, 0, q, scales) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(q[0] == 0x7E && q[1] == 0xF6 && q[2] == 0, "q is %x %x %x", q[0], q[1], q[2]);
  CHECK(scales[0] == 3.0f * (float)(1.0 / 448), "scale is %a", scales[0]);
  /* A block of zeros has the floor 1e-4. */
  CHECK(scales[1] == 1e-4f * (float)(1.0 / 448), "scale of zeros is %a", scales[1]);
  REQUIRE(trefoilQuantiseE4m3(x, 256, 1, q, scales) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(q[0] == 0x7C && q[1] == 0xF4 && scales[0] == 0x1p-7f, "q is %x, scale %a", q[0], scales[0]);
  x[0] = trefoilF32ToBf16(5); /* 5/448 = 1.43 * 2^-7: up to 2^-6, and 5 * 64 = 320 */
  REQUIRE(trefoilQuantiseE4m3(x, 256, 1, q, scales) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(q[0] == 0x7A && scales[0] == 0x1p-6f, "q is %x, scale %a", q[0], scales[0]);
  /* 7 * 2^6 = 448: a * fp32(1/448) is a power of two already, or just above it by rounding. */
  x[0] = trefoilF32ToBf16(448);
  REQUIRE(trefoilQuantiseE4m3(x, 256, 1, q, scales) == TREFOIL_OK, "%s", trefoilLastError());
  float product = 448.0f * (float)(1.0 / 448);
  CHECK(scales[0] == exp2f(ceilf(log2f(product))), "scale of 448 is %a", scales[0]);
  /* Infinity makes finite numbers zero, itself NaN; NaN is left out of the maximum. */
  x[0] = 0xFF80;
  x[2] = 0x7FC1;
  for (int round = 0; round < 2; round++) {
    REQUIRE(trefoilQuantiseE4m3(x, 128, round, q, scales) == TREFOIL_OK, "%s", trefoilLastError());
    CHECK(q[0] == 0x7F && q[1] == 0x80 && q[2] == 0x7F && q[3] == 0, "q is %x %x %x", q[0], q[1],
          q[2]);
    CHECK(scales[0] == INFINITY, "scale is %a", scales[0]);
  }
  x[0] = trefoilF32ToBf16(3);
  REQUIRE(trefoilQuantiseE4m3(x, 128, 0, q, scales) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(q[0] == 0x7E && q[2] == 0x7F && scales[0] == 3.0f * (float)(1.0 / 448), "NaN in a block");
}

/* g = 2688 / 6 = 448: s = E4M3(448 * 6 / 6) = 448; c = E2M1(6 * 448 / 448) = 6; x = 6 * 448 / 448. */
TEST(nvfp4_by_hand) {
  uint16_t x[16] = {0};
  uint8_t packed[8], s[1];
  float out[16];
  const float in[8] = {6, -3, 0.5f, 0.25f, 0.75f, 5, -2.5f, 1};
  const float want[8] = {6, -3, 0.5f, 0, 1, 4, -2, 1}; /* ties to even: 0.25, 0.75, 5, 2.5 */
  for (int i = 0; i < 8; i++) x[i] = trefoilF32ToBf16(in[i]);
  REQUIRE(trefoilEncodeNvfp4(x, 16, 448, packed, s) == TREFOIL_OK, "%s", trefoilLastError());
  REQUIRE(trefoilDecodeNvfp4(packed, s, 448, 16, out) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(s[0] == 0x7E, "s is %x", s[0]);
  CHECK(packed[0] == (0x7 | (0x8 | 0x5) << 4), "the first is in the low half: %x", packed[0]);
  for (int i = 0; i < 8; i++) CHECK(out[i] == want[i], "x[%d] is %g", i, out[i]);
  /* Left to right: g = 8, max 10.9375: s = E4M3(14.58) = 15; 2.34375 * 8 / 15 = 1.25, a tie that goes
     to 1. 2.34375 * (8 / 15) would be just above it. */
  memset(x, 0, sizeof x);
  x[0] = trefoilF32ToBf16(10.9375f);
  x[15] = trefoilF32ToBf16(2.34375f);
  REQUIRE(trefoilEncodeNvfp4(x, 16, 8, packed, s) == TREFOIL_OK, "%s", trefoilLastError());
  REQUIRE(trefoilDecodeNvfp4(packed, s, 8, 16, out) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(s[0] == 0x57 && out[15] == 1.875f, "s is %x, x[15] is %g", s[0], out[15]);
  for (int zero = 0; zero < 2; zero++) { /* no scale, or a block of zeros: zeros */
    memset(x, 0, zero ? sizeof x : 0);
    float g = zero ? 448 : 0;
    REQUIRE(trefoilEncodeNvfp4(x, 16, g, packed, s) == TREFOIL_OK, "%s", trefoilLastError());
    REQUIRE(trefoilDecodeNvfp4(packed, s, g, 16, out) == TREFOIL_OK, "%s", trefoilLastError());
    for (int i = 0; i < 16; i++) CHECK(bitsOf(out[i]) == 0, "x[%d] is %g", i, out[i]);
  }
}

/* Sums of any width give each element the same bits: vector loops and their ends agree. */
TEST(sums_at_every_width) {
  enum { MAX = 70 };
  const trefoil_dtype_t dtypes[] = {TREFOIL_F32, TREFOIL_F16, TREFOIL_BF16};
  for (int d = 0; d < 3; d++) {
    float f32[3][MAX], acc[MAX];
    uint8_t rows[3][4 * MAX], out[4 * MAX], one[4];
    size_t bytes = trefoilDtypeBytes(dtypes[d]);
    for (int i = 0; i < 3 * MAX; i++)
      f32[i / MAX][i % MAX] = sinf((float)(i * i)) * exp2f(i % 40 - 20);
    for (int r = 0; r < 3; r++) trefoilNarrow(dtypes[d], f32[r], MAX, rows[r]);
    for (int width = 1; width <= MAX; width++) {
      ep_sum_t s = {.dtype = dtypes[d], .width = width, .acc = acc};
      memset(out, 0xEE, sizeof out);
      epSumBegin(&s, out);
      for (int r = 0; r < 3; r++) epSumAdd(&s, rows[r]);
      epSumAddWeighted(&s, rows[1], 0.3f);
      epSumEnd(&s);
      CHECK((size_t)width * bytes == sizeof out || out[(size_t)width * bytes] == 0xEE, "overrun");
      for (int i = 0; i < width; i++) {
        ep_sum_t t = {.dtype = dtypes[d], .width = 1, .acc = acc};
        epSumBegin(&t, one);
        for (int r = 0; r < 3; r++) epSumAdd(&t, rows[r] + (size_t)i * bytes);
        epSumAddWeighted(&t, rows[1] + (size_t)i * bytes, 0.3f);
        epSumEnd(&t);
        CHECK(!memcmp(one, out + (size_t)i * bytes, bytes), "width %d element %d", width, i);
      }
    }
  }
}

/* The variants of the row loops that the loader chooses here, against plain ones: any bits at all. */
void plainSumBegin(ep_sum_t *s, void *out);
void plainSumAdd(ep_sum_t *s, const void *row);
void plainSumAddWeighted(ep_sum_t *s, const void *row, float w);
void plainSumEnd(ep_sum_t *s);
void plainRowQuantiseE4m3(const uint16_t *bf16, int64_t width, int roundScales, uint8_t *q,
                          float *scales);

TEST(variants_agree) {
  enum { WIDTH = 1280, ROWS = 3 };
  const trefoil_dtype_t dtypes[] = {TREFOIL_F32, TREFOIL_F16, TREFOIL_BF16};
  static uint32_t rows[ROWS][WIDTH], got[WIDTH], want[WIDTH];
  static float acc[WIDTH];
  uint64_t state = 1;
  for (int round = 0; round < 60; round++) {
    for (int i = 0; i < ROWS * WIDTH; i++) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      rows[i / WIDTH][i % WIDTH] = (uint32_t)(state >> 32);
    }
    ep_sum_t s = {.dtype = dtypes[round % 3], .width = WIDTH, .acc = acc};
    int numTerms = 1 + round % 4; /* rows 0, 1, 2 and then a weighted one */
    epSumBegin(&s, got);
    for (int i = 0; i < numTerms && i < 3; i++) epSumAdd(&s, rows[i]);
    if (numTerms > 3) epSumAddWeighted(&s, rows[0], 0.7f);
    epSumEnd(&s);
    plainSumBegin(&s, want);
    for (int i = 0; i < numTerms && i < 3; i++) plainSumAdd(&s, rows[i]);
    if (numTerms > 3) plainSumAddWeighted(&s, rows[0], 0.7f);
    plainSumEnd(&s);
    CHECK(!memcmp(got, want, WIDTH * trefoilDtypeBytes(s.dtype)), "sum, round %d", round);
    float scales[2][10];
    const uint16_t *row = (const uint16_t *)rows[0];
    epRowQuantiseE4m3(row, WIDTH, round % 2, (uint8_t *)got, scales[0]);
    plainRowQuantiseE4m3(row, WIDTH, round % 2, (uint8_t *)want, scales[1]);
    CHECK(!memcmp(got, want, WIDTH), "E4M3, round %d", round);
    CHECK(!memcmp(scales[0], scales[1], sizeof scales[0]), "scales, round %d", round);
  }
}

/* What must not happen to a build: contraction of a*b + c, subnormals as zero, excess precision. */
#if defined(__x86_64__)
__attribute__((target("fma"), noinline))
#else
__attribute__((noinline))
#endif
static void
multiplyAdd(const float *a, const float *b, const float *c, float *out) {
  for (int i = 0; i < 8; i++) out[i] = a[i] * b[i] + c[i];
}

TEST(no_contraction) {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("fma")) SKIP("this processor has no fused multiply-add");
#endif
  float a[8], c[8], out[8];
  for (int i = 0; i < 8; i++) {
    a[i] = 1 + 0x1p-12f;
    c[i] = -(1 + 0x1p-11f);
  }
  multiplyAdd(a, a, c, out);
  for (int i = 0; i < 8; i++) CHECK(out[i] == 0, "a * b + c was fused: %a", out[i]);
}

TEST(no_flush_to_zero) {
  volatile float smallest = FLT_MIN, subnormal = 0x1p-149f;
  CHECK(bitsOf(smallest / 2) == 0x00400000u, "FLT_MIN / 2 is %08x", bitsOf(smallest / 2));
  CHECK(bitsOf(subnormal * 8) == 8, "2^-149 * 8 is %08x", bitsOf(subnormal * 8));
  CHECK(FLT_EVAL_METHOD == 0, "floats are evaluated in more than their precision");
}

TEST_MAIN()
