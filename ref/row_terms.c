/* Sums of rows that are all known beforehand: one pass over the columns in blocks that stay in the
 * first cache, up to four rows a loop, and the sum so far in registers. The same bits as the sums of
 * row_sum.c: every element stands alone, and its terms are added in the same order. */
#include "ref/bits.h"
#include "ref/row.h"

enum { BLOCK = 512, FUSED = 4 };

/* Columns of a sum at work; rows wait until FUSED are there or the last one is known. */
typedef struct chain {
  trefoil_dtype_t dtype;
  int64_t width; /* of the block */
  int weighted, begun, numRows;
  const void *rows[FUSED];
  float weights[FUSED];
  float acc[BLOCK]; /* begun: the sum so far */
} chain_t;

/* acc or out = (acc +) rows[0] + .. + rows[n - 1], in this order. n, first and last are constants
 * where it is used: a loop without branches for each. */
#define DEFINE_FUSED(name, type, load, store)                                                      \
  EP_BITS_INLINE void plainLoop##name(chain_t *c, type *restrict out, int n, int first) {          \
    const type *p[FUSED] = {c->rows[0], c->rows[1], c->rows[2], c->rows[3]};                       \
    float *restrict acc = c->acc;                                                                  \
    int64_t width = c->width;                                                                      \
    _Pragma("GCC ivdep") for (int64_t i = 0; i < width; i++) {                                     \
      float x = first ? load(p[0][i]) : acc[i] + load(p[0][i]);                                    \
      if (n > 1) x = x + load(p[1][i]);                                                            \
      if (n > 2) x = x + load(p[2][i]);                                                            \
      if (n > 3) x = x + load(p[3][i]);                                                            \
      if (out)                                                                                     \
        out[i] = store(x);                                                                         \
      else                                                                                         \
        acc[i] = x;                                                                                \
    }                                                                                              \
  }                                                                                                \
  EP_BITS_INLINE void weightedLoop##name(chain_t *c, type *restrict out, int n, int first) {       \
    const type *p[FUSED] = {c->rows[0], c->rows[1], c->rows[2], c->rows[3]};                       \
    float w0 = c->weights[0], w1 = c->weights[1], w2 = c->weights[2], w3 = c->weights[3];          \
    float *restrict acc = c->acc;                                                                  \
    int64_t width = c->width;                                                                      \
    _Pragma("GCC ivdep") for (int64_t i = 0; i < width; i++) {                                     \
      float x = first ? load(p[0][i]) * w0 : __builtin_fmaf(load(p[0][i]), w0, acc[i]);            \
      if (n > 1) x = __builtin_fmaf(load(p[1][i]), w1, x);                                         \
      if (n > 2) x = __builtin_fmaf(load(p[2][i]), w2, x);                                         \
      if (n > 3) x = __builtin_fmaf(load(p[3][i]), w3, x);                                         \
      if (out)                                                                                     \
        out[i] = store(x);                                                                         \
      else                                                                                         \
        acc[i] = x;                                                                                \
    }                                                                                              \
  }                                                                                                \
  DEFINE_FLUSH(plain, name, type)                                                                  \
  DEFINE_FLUSH(weighted, name, type)

#define DEFINE_FLUSH(kind, name, type)                                                             \
  EP_ROW_CLONES static void kind##name(chain_t *c, type *out) {                                    \
    int n = c->numRows;                                                                            \
    if (!out && c->begun) {                                                                        \
      kind##Loop##name(c, NULL, FUSED, 0);                                                         \
    } else if (!out) {                                                                             \
      kind##Loop##name(c, NULL, FUSED, 1);                                                         \
    } else if (c->begun) {                                                                         \
      if (n == 1) kind##Loop##name(c, out, 1, 0);                                                  \
      if (n == 2) kind##Loop##name(c, out, 2, 0);                                                  \
      if (n == 3) kind##Loop##name(c, out, 3, 0);                                                  \
      if (n == 4) kind##Loop##name(c, out, 4, 0);                                                  \
    } else {                                                                                       \
      if (n == 1) kind##Loop##name(c, out, 1, 1);                                                  \
      if (n == 2) kind##Loop##name(c, out, 2, 1);                                                  \
      if (n == 3) kind##Loop##name(c, out, 3, 1);                                                  \
      if (n == 4) kind##Loop##name(c, out, 4, 1);                                                  \
    }                                                                                              \
  }

#define AS_IS(x) (x)
DEFINE_FUSED(F32, float, AS_IS, epCanonical)
DEFINE_FUSED(F16, uint16_t, epF16ToF32, epF32ToF16)
DEFINE_FUSED(Bf16, uint16_t, epBf16ToF32, epF32ToBf16)

/* Adds the rows that wait; out: they were the last. */
static void flush(chain_t *c, void *out) {
  if (c->dtype == TREFOIL_F32) {
    (c->weighted ? weightedF32 : plainF32)(c, out);
  } else if (c->dtype == TREFOIL_F16) {
    (c->weighted ? weightedF16 : plainF16)(c, out);
  } else {
    (c->weighted ? weightedBf16 : plainBf16)(c, out);
  }
  c->begun = 1;
  c->numRows = 0;
}

static void begin(chain_t *c, const ep_terms_t *t, int64_t width, int weighted) {
  c->dtype = t->dtype;
  c->width = width;
  c->weighted = weighted;
  c->begun = c->numRows = 0;
}

static void makeRoom(chain_t *c) {
  if (c->numRows == FUSED) flush(c, NULL);
}

static void add(chain_t *c, const void *row, float weight) {
  makeRoom(c);
  c->rows[c->numRows] = row;
  c->weights[c->numRows++] = weight;
}

static void end(chain_t *c, void *out) {
  size_t bytes = (size_t)c->width * trefoilDtypeBytes(c->dtype);
  if (c->begun || c->numRows > 1 || (c->numRows && c->weighted)) {
    for (int i = c->numRows; i < FUSED; i++) c->rows[i] = c->rows[0];
    flush(c, out);
  } else if (c->numRows) {
    memcpy(out, c->rows[0], bytes);
  } else {
    memset(out, 0, bytes);
  }
}

/* Rows [first, first + n) of the terms, their columns from byte `at` on. */
static void addRows(chain_t *c, const ep_terms_t *t, int first, int n, size_t at) {
  for (int i = first; i < first + n; i++)
    add(c, (const char *)t->rows[i] + at, t->weights ? t->weights[i] : 1);
}

void epSumTerms(const ep_terms_t *t, void *out) {
  size_t elementBytes = trefoilDtypeBytes(t->dtype);
  chain_t whole, part;
  float partial[FUSED][BLOCK];
  for (int64_t i = 0; i < t->width; i += BLOCK) {
    int64_t width = t->width - i < BLOCK ? t->width - i : BLOCK;
    size_t at = (size_t)i * elementBytes;
    begin(&whole, t, width, t->weights && !t->groups);
    for (int g = 0, first = 0; g < t->numGroups && t->groups; first += t->groups[g++]) {
      if (t->groups[g] == 1 && !t->weights) {
        addRows(&whole, t, first, 1, at);
        continue;
      }
      if (t->groups[g] == 0) continue;
      makeRoom(&whole);
      begin(&part, t, width, t->weights != NULL);
      addRows(&part, t, first, t->groups[g], at);
      end(&part, partial[whole.numRows]);
      add(&whole, partial[whole.numRows], 1);
    }
    if (!t->groups) addRows(&whole, t, 0, t->numRows, at);
    end(&whole, (char *)out + at);
  }
}
