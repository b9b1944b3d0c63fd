/* Row arithmetic: what one row of a sum or of a quantisation is, to the bit. The reference and the
 * CPU library share these functions, but neither slots nor orders: which calls them when is what
 * the checker compares.
 *
 * A sum (docs/spec.md, rules S1 to S5) is in f32 in the order of the calls and is rounded once at its
 * end. It starts with its first term: no zero is added before it. One unweighted row alone is
 * copied, NaN payload and all; any other NaN becomes the one NaN of the format. No term: zeros.
 *
 *   ep_sum_t s = {.dtype = TREFOIL_BF16, .width = H, .acc = scratch};   scratch: H floats
 *   epSumBegin(&s, out);           out: a row, scratch of the sum until epSumEnd
 *   epSumAdd(&s, row);             each row is read during its call only
 *   epSumEnd(&s);                  out holds the result
 *
 * Levels (ranks of a node, then nodes) are sums whose rows are results of other sums, each with its
 * own out and acc. A sum may cover part of a row: every element stands alone. Functions
 * here cannot fail and keep no state outside their arguments. */
#ifndef TREFOIL_REF_ROW_H
#define TREFOIL_REF_ROW_H

#include "trefoil/base.h"

typedef struct ep_sum {
  trefoil_dtype_t dtype; /* f32, f16 or bf16: of rows and result */
  int64_t width;         /* elements */
  float *acc;            /* [width] scratch */
  void *out;             /* [width] of dtype */
  int state;             /* 0 empty, 1 out holds the only row, 2 acc holds the sum */
} ep_sum_t;

void epSumBegin(ep_sum_t *s, void *out);
void epSumAdd(ep_sum_t *s, const void *row);                  /* + row */
void epSumAddWeighted(ep_sum_t *s, const void *row, float w); /* first: row*w; then fma */
void epSumAddDecoded(ep_sum_t *s, const float *row);          /* + row of f32 (from NVFP4) */
void epSumAddDecodedWeighted(ep_sum_t *s, const float *row, float w);
void epSumEnd(ep_sum_t *s);

/* The same sums, to the bit, of rows that are all at hand: one pass over the columns, much faster where
 * rows come from memory. weights: as epSumAddWeighted. groups: the rows of each group, [numGroups]
 * counts, are summed first and rounded to the dtype; these results are then summed unweighted (a group
 * of no rows adds nothing). out overlaps no row. */
typedef struct ep_terms {
  trefoil_dtype_t dtype;
  int64_t width;
  const void *const *rows; /* [numRows] */
  const float *weights;    /* [numRows], NULL: unweighted */
  const int *groups;       /* NULL: one level */
  int numRows, numGroups;
} ep_terms_t;
void epSumTerms(const ep_terms_t *t, void *out);

/* E4M3 per 128 elements (rules Q2, Q3): q [width], scales [width / 128]. */
void epRowQuantiseE4m3(const uint16_t *bf16, int64_t width, int roundScales, uint8_t *q,
                       float *scales);

/* NVFP4 per 16 elements with the row's scale g (rule Q4): packed [width / 2], the first of two in
 * the low half; blockScales E4M3 [width / 16]. Decoding gives the f32 terms of the sum. */
void epRowEncodeNvfp4(const uint16_t *bf16, int64_t width, float g, uint8_t *packed,
                      uint8_t *blockScales);
void epRowDecodeNvfp4(const uint8_t *packed, const uint8_t *blockScales, float g, int64_t width,
                      float *out);

/* Loops over rows are compiled twice, for any x86-64 and for machines with AVX2 and FMA, with the same
 * bits from both: contraction is off and fmaf is exact either way. Sanitizers and dispatch by the
 * loader do not go together, and GCC before 12 does not know the second machine by this name. */
#if !defined(EP_ROW_CLONES) && defined(__x86_64__) && defined(__GNUC__) && __GNUC__ >= 12 &&       \
    !defined(__clang__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define EP_ROW_CLONES __attribute__((target_clones("default", "arch=x86-64-v3")))
#elif !defined(EP_ROW_CLONES)
#define EP_ROW_CLONES
#endif

#endif
