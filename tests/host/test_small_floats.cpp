// cuda_fp16.h, cuda_bf16.h and cuda_fp8.h of host/include against docs/spec.md's numerics, bit by bit. A NaN
// widens to some NaN: the spec has one, CUDA's bf16 keeps its bits.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "small_floats_inputs.h"
#include "test.h"
#include "trefoil/numerics.h"

static bool same(float a, float b) {
  return a != a ? b != b : !memcmp(&a, &b, sizeof a);
}

TEST(every_number_widens_as_the_spec_says) {
  for (unsigned i = 0; i < 65536; i++) {
    const unsigned short bits = static_cast<unsigned short>(i);
    const float half = __half2float(__ushort_as_half(bits));
    const float brain = __bfloat162float(__ushort_as_bfloat16(bits));
    CHECK(same(half, trefoilF16ToF32(bits)), "f16 0x%04x: %a", i, half);
    CHECK(same(brain, trefoilBf16ToF32(bits)), "bf16 0x%04x: %a", i, brain);
  }
  for (unsigned i = 0; i < 256; i++) {
    __nv_fp8_e4m3 a;
    __nv_fp8_e5m2 b;
    a.__x = b.__x = static_cast<unsigned char>(i);
    CHECK(same(static_cast<float>(a), trefoilE4m3ToF32(a.__x)), "e4m3 0x%02x", i);
    CHECK(same(static_cast<float>(b), trefoilE5m2ToF32(b.__x)), "e5m2 0x%02x", i);
  }
}

TEST(every_tie_and_its_neighbours_narrow_as_the_spec_says) {
  for (uint32_t i = 0; i < NUM_FLOATS; i++) {
    const float x = inputFloat(i);
    const __half half(x);
    const __nv_bfloat16 brain(x);
    const __nv_fp8_e4m3 a(x);
    const __nv_fp8_e5m2 b(x);
    CHECK(__half_as_ushort(half) == trefoilF32ToF16(x), "%a: f16 0x%04x", x,
          __half_as_ushort(half));
    CHECK(__bfloat16_as_ushort(brain) == trefoilF32ToBf16(x), "%a: bf16 0x%04x", x,
          __bfloat16_as_ushort(brain));
    CHECK(a.__x == trefoilF32ToE4m3(x), "%a: e4m3 0x%02x", x, a.__x);
    CHECK(b.__x == trefoilF32ToE5m2(x), "%a: e5m2 0x%02x", x, b.__x);
  }
}

// Against arithmetic, where neither header stands beside: between the two numbers of the directed roundings.
TEST(directed_roundings_enclose_the_number) {
  for (uint32_t i = 0; i < NUM_FLOATS; i += 7) {
    const float x = inputFloat(i);
    if (x != x || x > 65504 || x < -65504) continue;
    const float down = __float2half_rd(x), up = __float2half_ru(x), zero = __float2half_rz(x);
    CHECK(down <= x && x <= up && zero == (x < 0 ? up : down), "%a: %a, %a, %a", x, down, up, zero);
    const bool exact = down == x, next = up == x || bool(__heq(__half(up), __half(down))) == exact;
    CHECK(next && (exact || __half_as_ushort(__half(down)) != __half_as_ushort(__half(up))), "%a",
          x);
  }
}

TEST(types_are_used_as_in_a_program) {
  const __half a = 1.5f;
  __nv_bfloat16 b(3);
  b += __nv_bfloat16(0.5f);
  const __half2 two = __floats2half2_rn(1.0f, -2.0f);
  CHECK(static_cast<float>(a * a) == 2.25f && static_cast<int>(b) == 3 && a > __half(1), "wrong");
  CHECK(__low2float(two + two) == 2.0f && __high2float(two) == -2.0f, "wrong");
  CHECK(sizeof(__half) == 2 && sizeof(two) == 4 && alignof(__half2) == 4, "wrong sizes");
  CHECK(sizeof(__nv_fp8_e4m3) == 1 && sizeof(__nv_fp8x2_e4m3) == 2, "wrong sizes");
  const __nv_fp8x2_e4m3 pair(float2{1.0f, 1000.0f});
  CHECK(pair.__x == 0x7e38, "0x%04x", pair.__x);
}

TEST_MAIN()
