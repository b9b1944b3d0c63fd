// Every conversion of cuda_fp16.h, cuda_bf16.h and cuda_fp8.h over all inputs: a line with a hash each.
// Compiled with the host runtime's headers and with CUDA's, the lines are the same.
#include <cstdint>
#include <cstdio>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "small_floats_inputs.h"

template <class F> static void hash(const char *name, uint32_t count, F f) {
  uint64_t h = 0xcbf29ce484222325u;
  for (uint32_t i = 0; i < count; i++) h = (h ^ static_cast<uint64_t>(f(i))) * 0x100000001b3u;
  std::printf("%-32s %016llx\n", name, static_cast<unsigned long long>(h));
}

static uint32_t bitsOf(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
static uint64_t bitsOf(__half a) {
  return __half_as_ushort(a);
}
static uint64_t bitsOf(__nv_bfloat16 a) {
  return __bfloat16_as_ushort(a);
}

// Two numbers of 16 bits from an index: each with some others.
static unsigned short first(uint32_t i) {
  return static_cast<unsigned short>(i >> 4);
}
static unsigned short second(uint32_t i) {
  return static_cast<unsigned short>(i * 2654435761u >> 16);
}

#define FROM_FLOAT(call)                                                                           \
  hash(#call, NUM_FLOATS, [](uint32_t i) { return bitsOf(call(inputFloat(i))); })
#define TO(call, make)                                                                             \
  hash(#call, 65536, [](uint32_t i) { return call(make(static_cast<unsigned short>(i))); })
#define PAIR(name, make)                                                                           \
  hash(#name " " #make, 1 << 20,                                                                   \
       [](uint32_t i) { return bitsOf(name(make(first(i)), make(second(i)))); })
#define TRUTH(name, make)                                                                          \
  hash(#name " " #make, 1 << 20, [](uint32_t i) { return name(make(first(i)), make(second(i))); })

#define TYPE(T, word, narrow, make)                                                                \
  FROM_FLOAT(__float2##narrow##_rn), FROM_FLOAT(__float2##narrow##_rz);                            \
  FROM_FLOAT(__float2##narrow##_rd), FROM_FLOAT(__float2##narrow##_ru);                            \
  hash("__double2" #narrow, NUM_FLOATS,                                                            \
       [](uint32_t i) { return bitsOf(__double2##narrow(inputDouble(i))); });                      \
  hash("__" #word "2float", 65536,                                                                 \
       [](uint32_t i) { return bitsOf(__##word##2float(make(static_cast<unsigned short>(i)))); }); \
  TO(__##word##2int_rz, make), TO(__##word##2uint_rz, make), TO(__##word##2short_rz, make);        \
  TO(__##word##2ushort_rz, make), TO(__##word##2ll_rz, make), TO(__##word##2ull_rz, make);         \
  TO(__hisnan, make), TO(__hisinf, make), TO(static_cast<bool>, make);                             \
  hash("__int2" #narrow, 1 << 20,                                                                  \
       [](uint32_t i) { return bitsOf(__int2##narrow##_rn(static_cast<int>(i * 2654435761u))); }); \
  hash("__ll2" #narrow, 1 << 20, [](uint32_t i) {                                                  \
    return bitsOf(__ll2##narrow##_rn(static_cast<long long>(i * 0x9e3779b97f4a7c15u) >> i % 63));  \
  });                                                                                              \
  hash("__ull2" #narrow, 1 << 20,                                                                  \
       [](uint32_t i) { return bitsOf(__ull2##narrow##_rn(i * 0x9e3779b97f4a7c15u >> i % 63)); }); \
  PAIR(__hadd, make), PAIR(__hsub, make), PAIR(__hmul, make), PAIR(__hdiv, make);                  \
  PAIR(__hmax, make), PAIR(__hmin, make), TRUTH(__heq, make), TRUTH(__hne, make);                  \
  TRUTH(__hlt, make), TRUTH(__hle, make), TRUTH(__hgt, make), TRUTH(__hge, make);                  \
  hash("__habs " #make, 65536,                                                                     \
       [](uint32_t i) { return bitsOf(__habs(make(static_cast<unsigned short>(i)))); });           \
  hash("__hneg " #make, 65536,                                                                     \
       [](uint32_t i) { return bitsOf(__hneg(make(static_cast<unsigned short>(i)))); })

static const __nv_fp8_interpretation_t kinds[] = {__NV_E4M3, __NV_E5M2};
static const __nv_saturation_t ends[] = {__NV_NOSAT, __NV_SATFINITE};

int main() {
  TYPE(__half, half, half, __ushort_as_half);
  TYPE(__nv_bfloat16, bfloat16, bfloat16, __ushort_as_bfloat16);
  hash("__floats2half2_rn", NUM_FLOATS, [](uint32_t i) {
    const __half2_raw two = __floats2half2_rn(inputFloat(i), inputFloat(NUM_FLOATS - 1 - i));
    return two.x | two.y << 16;
  });
  hash("__nv_cvt_float_to_fp8", NUM_FLOATS * 4, [](uint32_t i) {
    return __nv_cvt_float_to_fp8(inputFloat(i / 4), ends[i & 1], kinds[i >> 1 & 1]);
  });
  hash("__nv_cvt_double_to_fp8", NUM_FLOATS * 4, [](uint32_t i) {
    return __nv_cvt_double_to_fp8(inputDouble(i / 4), ends[i & 1], kinds[i >> 1 & 1]);
  });
  hash("__nv_cvt_halfraw_to_fp8", 65536 * 4, [](uint32_t i) {
    const __half_raw raw = {static_cast<unsigned short>(i / 4)};
    return __nv_cvt_halfraw_to_fp8(raw, ends[i & 1], kinds[i >> 1 & 1]);
  });
  hash("__nv_cvt_bfloat16raw2_to_fp8x2", 65536 * 4, [](uint32_t i) {
    const __nv_bfloat162_raw raw = {static_cast<unsigned short>(i / 4), second(i)};
    return __nv_cvt_bfloat16raw2_to_fp8x2(raw, ends[i & 1], kinds[i >> 1 & 1]);
  });
  hash("__nv_cvt_fp8x2_to_halfraw2", 65536 * 2, [](uint32_t i) {
    const __half2_raw two =
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(i >> 1), kinds[i & 1]);
    return two.x | two.y << 16;
  });
  hash("float of e4m3 and e5m2", 256, [](uint32_t i) {
    __nv_fp8_e4m3 a;
    __nv_fp8_e5m2 b;
    a.__x = b.__x = static_cast<__nv_fp8_storage_t>(i);
    return static_cast<uint64_t>(bitsOf(static_cast<float>(a))) << 32 |
           bitsOf(static_cast<float>(b));
  });
  return 0;
}
