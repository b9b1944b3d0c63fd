/* The arithmetic of reductions. Terms are taken in ascending rank order: acc = term of rank 0, then
 * acc = acc op term of rank 1, and so on, so every rank gets the same bits every time. Integers wrap;
 * f32 and f64 round at each step; f16 and bf16 are added in f32 and rounded once at the end, to nearest
 * even. ncclAvg is the sum divided by the number of ranks (integers: towards zero). max and min of
 * floating point prefer the number where one side is NaN. */
#include <math.h>
#include <string.h>

#include "comm_internal.h"

size_t epTypeBytes(ncclDataType_t type) {
  switch (type) {
  case ncclInt8:
  case ncclUint8:
  case ncclFloat8e4m3:
  case ncclFloat8e5m2:
    return 1;
  case ncclFloat16:
  case ncclBfloat16:
    return 2;
  case ncclInt32:
  case ncclUint32:
  case ncclFloat32:
    return 4;
  case ncclInt64:
  case ncclUint64:
  case ncclFloat64:
    return 8;
  default:
    return 0;
  }
}

bool epReducible(ncclDataType_t type, ncclRedOp_t op) {
  return (unsigned)op < ncclNumOps && epTypeBytes(type) && type != ncclFloat8e4m3 &&
         type != ncclFloat8e5m2;
}

static float floatOfBits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static uint32_t bitsOfFloat(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static float floatOfBf16(uint16_t half) {
  return floatOfBits((uint32_t)half << 16);
}

static uint16_t bf16OfFloat(float value) {
  uint32_t bits = bitsOfFloat(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

static float floatOfF16(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, frac = half & 1023;
  if (exponent == 31) return floatOfBits(sign | 0x7f800000u | frac << 13);
  if (exponent) return floatOfBits(sign | (exponent + 112) << 23 | frac << 13);
  float magnitude = (float)frac * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

static uint16_t f16OfFloat(float value) {
  uint32_t bits = bitsOfFloat(value), magnitude = bits & 0x7fffffffu;
  uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00); /* 65520 and above */
  if (magnitude < 0x38800000u) {                                  /* below 2^-14: steps of 2^-24 */
    float steps = floatOfBits(magnitude) * 0x1p24f;
    return (uint16_t)(sign | (uint16_t)rintf(steps));
  }
  uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1);
  return (uint16_t)(sign | (uint16_t)((rounded >> 13) - (112u << 10)));
}

#define STEP_LOOP(T, expr)                                                                         \
  for (size_t i = 0; i < count; i++) {                                                             \
    T x = a[i], y = b[i];                                                                          \
    a[i] = (T)(expr);                                                                              \
  }                                                                                                \
  break
#define DEFINE_STEP(name, T, U, MAX, MIN)                                                          \
  static void name(T *a, const T *b, size_t count, ncclRedOp_t op) {                               \
    switch (op) {                                                                                  \
    case ncclProd:                                                                                 \
      STEP_LOOP(T, (U)x *(U)y);                                                                    \
    case ncclMax:                                                                                  \
      STEP_LOOP(T, MAX);                                                                           \
    case ncclMin:                                                                                  \
      STEP_LOOP(T, MIN);                                                                           \
    default:                                                                                       \
      STEP_LOOP(T, (U)x + (U)y);                                                                   \
    }                                                                                              \
  }
DEFINE_STEP(stepI8, int8_t, uint32_t, x > y ? x : y, x < y ? x : y)
DEFINE_STEP(stepU8, uint8_t, uint32_t, x > y ? x : y, x < y ? x : y)
DEFINE_STEP(stepI32, int32_t, uint32_t, x > y ? x : y, x < y ? x : y)
DEFINE_STEP(stepU32, uint32_t, uint32_t, x > y ? x : y, x < y ? x : y)
DEFINE_STEP(stepI64, int64_t, uint64_t, x > y ? x : y, x < y ? x : y)
DEFINE_STEP(stepU64, uint64_t, uint64_t, x > y ? x : y, x < y ? x : y)
DEFINE_STEP(stepF32, float, float, fmaxf(x, y), fminf(x, y))
DEFINE_STEP(stepF64, double, double, fmax(x, y), fmin(x, y))

static void widen(float *out, const uint16_t *in, size_t count, ncclDataType_t type) {
  for (size_t i = 0; i < count; i++)
    out[i] = type == ncclBfloat16 ? floatOfBf16(in[i]) : floatOfF16(in[i]);
}

static bool isHalf(ncclDataType_t type) {
  return type == ncclFloat16 || type == ncclBfloat16;
}

void epReduceFirst(ep_accumulator_t *acc, const void *term, size_t bytes, ncclDataType_t type) {
  if (!isHalf(type)) {
    memcpy(acc->wide, term, bytes);
    return;
  }
  uint16_t narrow[EP_SLOT_BYTES / 2];
  memcpy(narrow, term, bytes);
  widen((float *)(void *)acc->wide, narrow, bytes / 2, type);
}

void epReduceNext(ep_accumulator_t *acc, const void *term, size_t bytes, ncclDataType_t type,
                  ncclRedOp_t op) {
  ep_accumulator_t aligned;
  epReduceFirst(&aligned, term, bytes, type);
  void *a = acc->wide;
  const void *b = aligned.wide;
  size_t count = bytes / epTypeBytes(type);
  switch (type) {
  case ncclInt8:
    stepI8(a, b, count, op);
    break;
  case ncclUint8:
    stepU8(a, b, count, op);
    break;
  case ncclInt32:
    stepI32(a, b, count, op);
    break;
  case ncclUint32:
    stepU32(a, b, count, op);
    break;
  case ncclInt64:
    stepI64(a, b, count, op);
    break;
  case ncclUint64:
    stepU64(a, b, count, op);
    break;
  case ncclFloat64:
    stepF64(a, b, count, op);
    break;
  default:
    stepF32(a, b, count, op);
    break; /* f32, and f16 and bf16 made wide */
  }
}

#define DIVIDE(T)                                                                                  \
  for (size_t i = 0; i < count; i++) ((T *)a)[i] = (T)(((T *)a)[i] / (T)numRanks)

static void divide(void *a, size_t count, ncclDataType_t type, int numRanks) {
  switch (type) {
  case ncclInt8:
    for (size_t i = 0; i < count; i++) ((int8_t *)a)[i] = (int8_t)(((int8_t *)a)[i] / numRanks);
    break;
  case ncclUint8:
    for (size_t i = 0; i < count; i++) ((uint8_t *)a)[i] = (uint8_t)(((uint8_t *)a)[i] / numRanks);
    break;
  case ncclInt32:
    DIVIDE(int32_t);
    break;
  case ncclUint32:
    DIVIDE(uint32_t);
    break;
  case ncclInt64:
    DIVIDE(int64_t);
    break;
  case ncclUint64:
    DIVIDE(uint64_t);
    break;
  case ncclFloat64:
    DIVIDE(double);
    break;
  default:
    DIVIDE(float);
    break;
  }
}

void epReduceStore(const ep_accumulator_t *acc, void *out, size_t bytes, ncclDataType_t type,
                   ncclRedOp_t op, int numRanks) {
  ep_accumulator_t sum = *acc;
  size_t count = bytes / epTypeBytes(type);
  if (op == ncclAvg) divide(sum.wide, count, type, numRanks);
  if (!isHalf(type)) {
    memcpy(out, sum.wide, bytes);
    return;
  }
  uint16_t narrow[EP_SLOT_BYTES / 2];
  const float *wide = (const float *)(const void *)sum.wide;
  for (size_t i = 0; i < count; i++)
    narrow[i] = type == ncclBfloat16 ? bf16OfFloat(wide[i]) : f16OfFloat(wide[i]);
  memcpy(out, narrow, bytes);
}
