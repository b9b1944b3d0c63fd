#include "ref/row.h"

#include "ref/bits.h"

/* The five loops over a row, for rows of `type` that `load` turns into f32. */
#define DEFINE_LOOPS(name, type, load)                                                             \
  EP_ROW_CLONES static void addTwo##name(float *acc, const type *a, const type *b, int64_t n) {    \
    for (int64_t i = 0; i < n; i++) acc[i] = load(a[i]) + load(b[i]);                              \
  }                                                                                                \
  EP_ROW_CLONES static void add##name(float *acc, const type *a, int64_t n) {                      \
    for (int64_t i = 0; i < n; i++) acc[i] += load(a[i]);                                          \
  }                                                                                                \
  EP_ROW_CLONES static void widen##name(float *acc, const type *a, int64_t n) {                    \
    for (int64_t i = 0; i < n; i++) acc[i] = load(a[i]);                                           \
  }                                                                                                \
  EP_ROW_CLONES static void times##name(float *acc, const type *a, float w, int64_t n) {           \
    for (int64_t i = 0; i < n; i++) acc[i] = load(a[i]) * w;                                       \
  }                                                                                                \
  EP_ROW_CLONES static void fma##name(float *acc, const type *a, float w, int64_t n) {             \
    for (int64_t i = 0; i < n; i++) acc[i] = __builtin_fmaf(load(a[i]), w, acc[i]);                \
  }
#define AS_IS(x) (x)
DEFINE_LOOPS(F32, float, AS_IS)
DEFINE_LOOPS(F16, uint16_t, epF16ToF32)
DEFINE_LOOPS(Bf16, uint16_t, epBf16ToF32)

EP_ROW_CLONES static void roundF32(float *out, const float *acc, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = epCanonical(acc[i]);
}
EP_ROW_CLONES static void roundF16(uint16_t *out, const float *acc, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = epF32ToF16(acc[i]);
}
EP_ROW_CLONES static void roundBf16(uint16_t *out, const float *acc, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = epF32ToBf16(acc[i]);
}

/* Calls the loop of the sum's dtype. */
#define BY_DTYPE(s, loop, acc, row, ...)                                                           \
  do {                                                                                             \
    if ((s)->dtype == TREFOIL_F32)                                                                 \
      loop##F32((acc), (row), __VA_ARGS__);                                                        \
    else if ((s)->dtype == TREFOIL_F16)                                                            \
      loop##F16((acc), (row), __VA_ARGS__);                                                        \
    else                                                                                           \
      loop##Bf16((acc), (row), __VA_ARGS__);                                                       \
  } while (0)

/* A second term comes: the only row so far, in out, becomes the sum so far. */
static void unpark(ep_sum_t *s) {
  if (s->state == 1) BY_DTYPE(s, widen, s->acc, s->out, s->width);
  s->state = 2;
}

void epSumBegin(ep_sum_t *s, void *out) {
  s->out = out;
  s->state = 0;
}

void epSumAdd(ep_sum_t *s, const void *row) {
  if (s->state == 0) {
    memcpy(s->out, row, (size_t)s->width * trefoilDtypeBytes(s->dtype));
    s->state = 1;
  } else if (s->state == 1) {
    BY_DTYPE(s, addTwo, s->acc, s->out, row, s->width);
    s->state = 2;
  } else {
    BY_DTYPE(s, add, s->acc, row, s->width);
  }
}

void epSumAddWeighted(ep_sum_t *s, const void *row, float w) {
  if (s->state == 0) {
    BY_DTYPE(s, times, s->acc, row, w, s->width);
    s->state = 2;
  } else {
    unpark(s);
    BY_DTYPE(s, fma, s->acc, row, w, s->width);
  }
}

void epSumAddDecoded(ep_sum_t *s, const float *row) {
  if (s->state == 0) {
    memcpy(s->acc, row, (size_t)s->width * sizeof *row);
    s->state = 2;
  } else {
    unpark(s);
    addF32(s->acc, row, s->width);
  }
}

void epSumAddDecodedWeighted(ep_sum_t *s, const float *row, float w) {
  if (s->state == 0) {
    timesF32(s->acc, row, w, s->width);
    s->state = 2;
  } else {
    unpark(s);
    fmaF32(s->acc, row, w, s->width);
  }
}

void epSumEnd(ep_sum_t *s) {
  if (s->state == 0) memset(s->out, 0, (size_t)s->width * trefoilDtypeBytes(s->dtype));
  if (s->state == 2) BY_DTYPE(s, round, s->out, s->acc, s->width);
}
