/* Contents of an image: noise everywhere, then ids, tokens, weights, scales. */
#include "validate/check_case.h"

#include <pthread.h>
#include <string.h>

/* Noise is the same in every case: bytes of a fixed stream, by position. */
enum { NOISE_BYTES = 1 << 16 };
static uint64_t noise[NOISE_BYTES / 8];
static pthread_once_t noiseOnce = PTHREAD_ONCE_INIT;

static void makeNoise(void) {
  ep_rng_t rng = epRng(7, 7, 7);
  for (size_t i = 0; i < NOISE_BYTES / 8; i++) noise[i] = epRand(&rng);
}

static void fillNoise(uint8_t *image, size_t bytes) {
  pthread_once(&noiseOnce, makeNoise);
  for (size_t at = 0; at < bytes; at += NOISE_BYTES)
    memcpy(image + at, noise, bytes - at < NOISE_BYTES ? bytes - at : NOISE_BYTES);
}

/* The special values of a type, as bit patterns. */
static uint32_t specialBits(trefoil_dtype_t dtype, uint64_t random) {
  static const uint16_t bf16[] = {0x0000, 0x8000, 0x0001, 0x8001, 0x007f, 0x0080, 0x3f80, 0xbf80,
                                  0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7fc1, 0xffa5, 0x3f81, 0x4049};
  static const uint16_t f16[] = {0x0000, 0x8000, 0x0001, 0x8001, 0x03ff, 0x0400, 0x3c00, 0xbc00,
                                 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e01, 0xfd55, 0x3c01, 0x4248};
  static const uint32_t f32[] = {0x00000000, 0x80000000, 0x00000001, 0x80000001,
                                 0x007fffff, 0x00800000, 0x3f800000, 0xbf800000,
                                 0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000,
                                 0x7fc12345, 0xffa54321, 0x3f800001, 0x40490fdb};
  unsigned i = (unsigned)(random >> 60);
  switch (dtype) {
  case TREFOIL_BF16:
    return bf16[i];
  case TREFOIL_F16:
    return f16[i];
  case TREFOIL_F32:
    return f32[i];
  default:
    return (uint32_t)(random >> 32);
  }
}

static void putElement(void *out, int64_t i, size_t bytes, uint32_t bits) {
  if (bytes == 2)
    ((uint16_t *)out)[i] = (uint16_t)bits;
  else if (bytes == 4)
    memcpy((uint8_t *)out + 4 * i, &bits, 4);
  else
    ((uint8_t *)out)[i] = (uint8_t)bits;
}

/* Random bits, each 8 bytes masked: keep, then set. */
static void fillMasked(uint64_t key, size_t bytes, uint64_t keep, uint64_t set, uint8_t *out) {
  ep_rng_t rng = {key};
  for (size_t at = 0; at < bytes; at += 8) {
    uint64_t r = (epRand(&rng) & keep) | set;
    memcpy(out + at, &r, bytes - at < 8 ? bytes - at : 8);
  }
}

/* Ordinary values: every sign and mantissa, exponents of 2^-15 .. 2^0 (f16: subnormals too; fp8 and
 * fp4: below every NaN and infinity). */
static void fillFinite(trefoil_dtype_t dtype, uint64_t key, size_t bytes, uint8_t *out) {
  if (dtype == TREFOIL_BF16)
    fillMasked(key, bytes, 0x87ff87ff87ff87ffu, 0x3800380038003800u, out);
  else if (dtype == TREFOIL_F16)
    fillMasked(key, bytes, 0xbfffbfffbfffbfffu, 0, out);
  else if (dtype == TREFOIL_F32)
    fillMasked(key, bytes, 0x87ffffff87ffffffu, 0x3800000038000000u, out);
  else
    fillMasked(key, bytes, 0x7777777777777777u, 0, out);
}

/* Small integers, exact in the plain types: where (rank, token) and the element meet. */
enum { NUM_CODES = 251 };
static uint32_t codes[3][NUM_CODES]; /* f32, bf16, f16 */
static pthread_once_t codesOnce = PTHREAD_ONCE_INIT;

static void makeCodes(void) {
  for (int i = 0; i < NUM_CODES; i++) {
    float value = (float)(i - 125);
    uint32_t bits;
    memcpy(&bits, &value, 4);
    codes[0][i] = bits;
    codes[1][i] = bits >> 16;
    codes[2][i] =
        i == 125 ? 0
                 : (bits >> 16 & 0x8000) | ((bits >> 23 & 255) - 112) << 10 | (bits >> 13 & 0x3ff);
  }
}

static void fillCoded(trefoil_dtype_t dtype, uint64_t key, int64_t count, void *out) {
  pthread_once(&codesOnce, makeCodes);
  size_t b = trefoilDtypeBytes(dtype);
  const uint32_t *table = codes[dtype == TREFOIL_BF16 ? 1 : dtype == TREFOIL_F16 ? 2 : 0];
  unsigned at = (unsigned)(key % NUM_CODES);
  for (int64_t i = 0; i < count; i++) {
    putElement(out, i, b, b == 1 ? at : table[at]);
    at += 3;
    if (at >= NUM_CODES) at -= NUM_CODES;
  }
}

void epFillPayload(ep_payload_t payload, trefoil_dtype_t dtype, uint64_t key, int64_t count,
                   void *out) {
  size_t b = trefoilDtypeBytes(dtype), bytes = b * (size_t)count;
  ep_rng_t rng = {epMix(key)};
  switch (payload) {
  case EP_PAYLOAD_CODED:
    fillCoded(dtype, key, count, out);
    break;
  case EP_PAYLOAD_FINITE:
    fillFinite(dtype, rng.state, bytes, out);
    break;
  case EP_PAYLOAD_BITS:
    fillMasked(rng.state, bytes, UINT64_MAX, 0, out);
    break;
  default:
    for (int64_t i = 0; i < count; i++) putElement(out, i, b, specialBits(dtype, epRand(&rng)));
    break;
  }
}

static uint8_t *tensorAt(const ep_check_case_t *c, const ep_check_op_t *op, ep_tensor_id_t tensor,
                         uint8_t *image) {
  return image + c->regions[op->region[tensor]].offset;
}

static void fillIds(const ep_check_case_t *c, const ep_check_op_t *op, int round, int rank,
                    uint8_t *out) {
  const ep_check_routing_t *routing = &c->routings[op->routing];
  int64_t n = routing->numTokens[rank] * routing->topk;
  const int32_t *ids = routing->rows[round][rank];
  if (!routing->wideIds) {
    memcpy(out, ids, sizeof *ids * (size_t)n);
    return;
  }
  for (int64_t i = 0; i < n; i++) {
    int64_t id = ids[i];
    memcpy(out + 8 * i, &id, 8);
  }
}

/* Rows of a tensor, each with a key of its own. */
static void fillRows(const ep_check_case_t *c, const ep_check_op_t *op, ep_tensor_id_t tensor,
                     int round, int rank, uint8_t *image) {
  ep_check_dims_t d;
  epTensorDims(c, op, tensor, rank, &d);
  if (d.bytes == 0) return;
  ep_payload_t payload = op->payload;
  if (tensor == EP_T_IN_WEIGHTS || tensor == EP_T_OUT_WEIGHTS)
    payload = op->payload == EP_PAYLOAD_CODED ? EP_PAYLOAD_FINITE : op->payload;
  if (tensor == EP_T_IN_SCALES)
    payload = op->quant == TREFOIL_QUANT_CALLER ? EP_PAYLOAD_BITS : EP_PAYLOAD_FINITE;
  uint8_t *out = tensorAt(c, op, tensor, image);
  size_t rows = d.bytes / d.rowBytes;
  int64_t width = (int64_t)d.sizes[d.ndim - 1];
  for (size_t i = 0; i < rows; i++) {
    uint64_t key = payload == EP_PAYLOAD_CODED
                       ? op->payloadKey % 251 + 37 * (uint64_t)rank + 11 * i + 5 * (uint64_t)round
                       : epMix(op->payloadKey + 64 * i + (uint64_t)rank * 4 +
                               (uint64_t)tensor * 997 + ((uint64_t)round << 40));
    epFillPayload(payload, d.dtype, key, width, out + i * d.rowBytes);
  }
}

/* NVFP4's row scale: g = 2688 / max|row|, 0 for a row of zeros. */
static void fillRowScales(const ep_check_case_t *c, const ep_check_op_t *op, int rank,
                          uint8_t *image) {
  ep_check_dims_t d, tokens;
  epTensorDims(c, op, EP_T_IN_SCALES, rank, &d);
  epTensorDims(c, op, EP_T_IN_TOKENS, rank, &tokens);
  const uint8_t *rows = tensorAt(c, op, EP_T_IN_TOKENS, image);
  uint8_t *out = tensorAt(c, op, EP_T_IN_SCALES, image);
  for (size_t i = 0; i < d.bytes / 4; i++) {
    float most = 0;
    for (size_t j = 0; j < tokens.rowBytes / 2; j++) {
      uint16_t half;
      memcpy(&half, rows + i * tokens.rowBytes + 2 * j, 2);
      uint32_t bits = (uint32_t)(half & 0x7fff) << 16;
      float value;
      memcpy(&value, &bits, 4);
      if (value > most) most = value;
    }
    float g = most > 0 ? 2688.0f / most : 0.0f;
    memcpy(out + 4 * i, &g, 4);
  }
}

static void fillGradient(const ep_check_case_t *c, const ep_check_op_t *op, int round, int rank,
                         uint8_t *image) {
  uint64_t key = epMix(op->payloadKey + (uint64_t)rank * 4 + (uint64_t)round);
  uint8_t *out = tensorAt(c, op, op->inPlace ? EP_T_UPDATE : EP_T_GRAD, image);
  epFillGradient(&c->group->model, op->values, key, out);
}

void epFillImage(const ep_check_case_t *c, int round, int rank, uint8_t *image) {
  fillNoise(image, c->usedBytes);
  for (int i = 0; i < c->numOps; i++) {
    const ep_check_op_t *op = &c->ops[i];
    if (op->kind == EP_OP_UPDATE) fillIds(c, op, round, rank, tensorAt(c, op, EP_T_IDX, image));
    if (op->kind == EP_OP_DISPATCH) {
      fillRows(c, op, EP_T_IN_TOKENS, round, rank, image);
      if (op->region[EP_T_IN_WEIGHTS] >= 0) fillRows(c, op, EP_T_IN_WEIGHTS, round, rank, image);
      if (op->region[EP_T_IN_SCALES] >= 0) fillRows(c, op, EP_T_IN_SCALES, round, rank, image);
    }
    int isGrad = op->kind == EP_OP_GRAD_STEP || op->kind == EP_OP_GRAD_SYNC;
    if (isGrad && op->from < 0) fillGradient(c, op, round, rank, image);
    if (op->kind != EP_OP_COMBINE) continue;
    if (op->from < 0) fillRows(c, op, EP_T_IN_TOKENS, round, rank, image);
    if (op->region[EP_T_IN_SCALES] >= 0) fillRowScales(c, op, rank, image);
    if (op->region[EP_T_IN_WEIGHTS] >= 0) fillRows(c, op, EP_T_IN_WEIGHTS, round, rank, image);
    if (op->region[EP_T_OUT_WEIGHTS] >= 0 && !c->group->highThroughput)
      fillRows(c, op, EP_T_OUT_WEIGHTS, round, rank, image); /* LL: read, not written */
  }
}
