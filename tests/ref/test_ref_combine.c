/* Orders and rounding of combine against answers derived by hand. Width is 1 throughout: one number a
 * row. Orders show in f32 by 2^24 + 1 + 1, which is 2^24 from the left and 2^24 + 2 from the
 * right; rounding of partial sums shows in bf16 by 256 + 1 + 1, which is 258 rounded once and 256
 * rounded after each addition (257 is a tie, and 256 is even). */
#include "test.h"

#include "trefoil/numerics.h"
#include "trefoil/ref.h"

#include <math.h>
#include <stdbool.h>

#define BIG       16777216.0f /* 2^24 */
#define MAX_RANKS 4
#define MAX_K     4

/* One token of rank 0, routed to `idx`; the row that its expert e returns is value(e): what the slot
 * holds follows from trefoilRefSlots, which test_ref_dispatch.c checks. */
typedef struct sum {
  trefoil_case_t c;
  int32_t idx[MAX_K];
  float weights[MAX_K];
  int64_t numTokens[MAX_RANKS];
  const int32_t *topkIdx[MAX_RANKS];
  uint32_t rows[MAX_RANKS][64]; /* bits of value per slot, of the case's dtype in its low end */
  uint32_t byExpert[16];        /* bits returned by each (global) expert */
} sum_t;

static void sumMake(sum_t *s, trefoil_mode_t mode, trefoil_dtype_t dtype, int ranks, int perNode) {
  memset(s, 0, sizeof *s);
  s->c.routing.shape = (trefoil_shape_t){ranks, perNode, 4 * ranks, MAX_K, 1};
  s->c.routing.numTokens = s->numTokens;
  s->c.routing.topkIdx = s->topkIdx;
  s->c.mode = mode;
  s->c.dtype = dtype;
  s->c.width = 1;
  s->numTokens[0] = 1;
  s->topkIdx[0] = s->idx;
  for (int k = 0; k < MAX_K; k++) {
    s->idx[k] = -1;
    s->weights[k] = 1;
  }
}

/* Names expert e as the k-th, returning x. */
static void sumTerm(sum_t *s, int k, int e, float x) {
  s->idx[k] = e;
  if (s->c.dtype == TREFOIL_F32) memcpy(&s->byExpert[e], &x, 4);
  if (s->c.dtype == TREFOIL_BF16) s->byExpert[e] = trefoilF32ToBf16(x);
  if (s->c.dtype == TREFOIL_F16) s->byExpert[e] = trefoilF32ToF16(x);
}

/* Runs the combine of rank 0; returns the bits of the result. */
static uint32_t sumRun(sum_t *s) {
  trefoil_expert_rows_t experts[MAX_RANKS] = {{0}};
  uint8_t packed[MAX_RANKS][64 * 4];
  size_t bytes = trefoilDtypeBytes(s->c.dtype);
  for (int d = 0; d < s->c.routing.shape.numRanks; d++) {
    trefoil_slot_t slots[64];
    memset(packed[d], 0x5A, sizeof packed[d]);
    if (trefoilRefSlots(&s->c, d, slots) != TREFOIL_OK) {
      CHECK(false, "%s", trefoilLastError());
      return 0xBAD;
    }
    for (int64_t i = 0; i < trefoilRefNumSlots(&s->c, d); i++) {
      if (slots[i].src < 0) continue;
      int e = slots[i].expert + 4 * d; /* expert-major; else the first expert of the rank named */
      for (int k = 0; k < MAX_K && slots[i].expert < 0; k++) {
        if (s->idx[k] >= 0 && s->idx[k] / 4 == d && e < 4 * d) e = s->idx[k];
      }
      memcpy(packed[d] + (size_t)i * bytes, &s->byExpert[e], bytes);
    }
    experts[d].tokens = packed[d];
  }
  uint32_t out = 0x5A5A5A5A;
  const float *weights = s->c.mode == TREFOIL_LL_EXPERT_MAJOR ? s->weights : NULL;
  trefoil_result_t result = trefoilRefCombine(&s->c, 0, experts, weights, &out, NULL);
  CHECK(result == TREFOIL_OK, "%s", trefoilLastError());
  return bytes == 2 ? out & 0xFFFF : out;
}

static uint32_t bitsOf(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
#define SUM_IS_F32(s, x)                                                                           \
  do {                                                                                             \
    uint32_t got = sumRun(s);                                                                      \
    CHECK(got == bitsOf(x), "got %08x, want %08x", got, bitsOf(x));                                \
  } while (0)
#define SUM_IS_BF16(s, x)                                                                          \
  do {                                                                                             \
    float got = trefoilBf16ToF32((uint16_t)sumRun(s));                                             \
    CHECK(got == (x), "got %g, want %g", got, (double)(x));                                        \
  } while (0)

/* k 0..2 on ranks 2, 0, 1 (four experts a rank) return 2^24, 1, 1. */
static void namedOutOfOrder(sum_t *s, trefoil_mode_t mode) {
  sumMake(s, mode, TREFOIL_F32, 4, 4);
  sumTerm(s, 0, 8, BIG);
  sumTerm(s, 1, 0, 1);
  sumTerm(s, 2, 4, 1);
}

TEST(order_ll_expert_major_by_k) {
  sum_t s;
  namedOutOfOrder(&s, TREFOIL_LL_EXPERT_MAJOR);
  SUM_IS_F32(&s, BIG);
  sumTerm(&s, 0, 0, 1);
  sumTerm(&s, 1, 8, 1);
  sumTerm(&s, 2, 4, BIG);
  SUM_IS_F32(&s, BIG + 2);
}

TEST(order_ll_rank_major_as_named) {
  sum_t s;
  namedOutOfOrder(&s, TREFOIL_LL_RANK_MAJOR);
  SUM_IS_F32(&s, BIG); /* 2^24 first: rank 2 is named first */
}

TEST(order_ht_flat_by_rank) {
  sum_t s;
  namedOutOfOrder(&s, TREFOIL_HT_FLAT);
  SUM_IS_F32(&s, BIG + 2); /* ranks 0, 1, 2 */
}

TEST(order_ht_expert_major_by_k_then_rank) {
  sum_t s;
  namedOutOfOrder(&s, TREFOIL_HT_EXPERT_MAJOR);
  SUM_IS_F32(&s, BIG + 2);
  /* Within a rank by k, not by expert id: expert 3 (2^24), then 0 and 1. */
  sumMake(&s, TREFOIL_HT_EXPERT_MAJOR, TREFOIL_F32, 2, 2);
  sumTerm(&s, 0, 3, BIG);
  sumTerm(&s, 1, 0, 1);
  sumTerm(&s, 2, 1, 1);
  SUM_IS_F32(&s, BIG);
  /* By rank first: k 0 and 2 on rank 0 make 2, then 2^24 of rank 1. By k alone it would be 2^24. */
  sumMake(&s, TREFOIL_HT_EXPERT_MAJOR, TREFOIL_F32, 2, 2);
  sumTerm(&s, 0, 0, 1);
  sumTerm(&s, 1, 4, BIG);
  sumTerm(&s, 2, 1, 1);
  SUM_IS_F32(&s, BIG + 2);
}

/* Ranks 0..3 in nodes {0, 1}, {2, 3} return 256, 1, 1 and nothing. */
TEST(nodes_round_their_partial) {
  sum_t s;
  for (int perNode = 4; perNode >= 1; perNode /= 2) {
    sumMake(&s, TREFOIL_HT_FLAT, TREFOIL_BF16, 4, perNode);
    sumTerm(&s, 0, 0, 256);
    sumTerm(&s, 1, 4, 1);
    sumTerm(&s, 2, 8, 1);
    /* One node: 258. Two: 256 + 1 rounds to 256, and 256 + 1 again. One rank a node: no partial has
       two terms, nodes ascend as ranks do: 258. */
    SUM_IS_BF16(&s, perNode == 2 ? 256 : 258);
  }
}

/* Ranks return 1, 2^24, -2^24, 0.5. One node: 1 + 2^24 is 2^24 (a tie), minus 2^24 is 0, plus 0.5.
 * Two nodes: 2^24 in the first; in the second -2^24 + 0.5 is a tie and goes to -2^24: 0. */
TEST(nodes_change_the_order) {
  sum_t s;
  for (int perNode = 4; perNode >= 2; perNode /= 2) {
    sumMake(&s, TREFOIL_HT_FLAT, TREFOIL_F32, 4, perNode);
    sumTerm(&s, 0, 0, 1);
    sumTerm(&s, 1, 4, BIG);
    sumTerm(&s, 2, 8, -BIG);
    sumTerm(&s, 3, 12, 0.5f);
    SUM_IS_F32(&s, perNode == 4 ? 0.5f : 0.0f);
  }
}

TEST(partials_of_ranks_are_rounded) {
  sum_t s;
  sumMake(&s, TREFOIL_HT_EXPERT_MAJOR, TREFOIL_BF16, 2, 2);
  sumTerm(&s, 0, 0, 256);
  sumTerm(&s, 1, 1, 1);
  sumTerm(&s, 2, 4, 1);
  SUM_IS_BF16(&s, 256);
  s.c.mode = TREFOIL_LL_EXPERT_MAJOR;
  SUM_IS_BF16(&s, 258); /* exact: one rounding */
  s.c.combinePartial = 1;
  SUM_IS_BF16(&s, 256);
  /* f16 rounds its partials as well: 2048 + 1 is a tie, 2048 is even. */
  sumMake(&s, TREFOIL_HT_EXPERT_MAJOR, TREFOIL_F16, 2, 2);
  sumTerm(&s, 0, 0, 2048);
  sumTerm(&s, 1, 1, 1);
  sumTerm(&s, 2, 4, 1);
  CHECK(trefoilF16ToF32((uint16_t)sumRun(&s)) == 2048, "f16 partial");
}

TEST(partial_ranks_ascend) {
  sum_t s;
  sumMake(&s, TREFOIL_LL_EXPERT_MAJOR, TREFOIL_F32, 4, 4);
  sumTerm(&s, 0, 8, BIG);
  sumTerm(&s, 1, 0, 1);
  sumTerm(&s, 2, 4, 1);
  s.c.combinePartial = 1;
  SUM_IS_F32(&s, BIG + 2);
  /* LL knows no nodes: 256 and 1 of ranks 0 and 1 are not rounded together. */
  sumMake(&s, TREFOIL_LL_EXPERT_MAJOR, TREFOIL_BF16, 4, 2);
  sumTerm(&s, 0, 0, 256);
  sumTerm(&s, 1, 4, 1);
  sumTerm(&s, 2, 8, 1);
  s.c.combinePartial = 1;
  SUM_IS_BF16(&s, 258);
}

/* (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24, the last bit half of a last place. */
TEST(weighted_first_rounded_then_fused) {
  const float a = 1 + 0x1p-12f;
  sum_t s;
  sumMake(&s, TREFOIL_LL_EXPERT_MAJOR, TREFOIL_F32, 2, 2);
  sumTerm(&s, 0, 0, a); /* the first product is rounded: 1 + 2^-11; then -1 */
  s.weights[0] = a;
  sumTerm(&s, 1, 1, -1);
  SUM_IS_F32(&s, 0x1p-11f);
  sumTerm(&s, 0, 1, -1); /* the second is not: -1 + (1 + 2^-11 + 2^-24) */
  s.weights[0] = 1;
  sumTerm(&s, 1, 0, a);
  s.weights[1] = a;
  SUM_IS_F32(&s, 0x1p-11f + 0x1p-24f);
}

TEST(one_term_is_a_copy) {
  const trefoil_mode_t modes[] = {TREFOIL_LL_RANK_MAJOR, TREFOIL_HT_FLAT, TREFOIL_HT_EXPERT_MAJOR};
  for (int m = 0; m < 3; m++) {
    sum_t s;
    for (int perNode = 1; perNode <= 4; perNode *= 2) {
      sumMake(&s, modes[m], TREFOIL_F32, 4, perNode);
      s.idx[2] = 9;
      const uint32_t odd[] = {0x7F812345u, 0xFFC00001u, 0x80000000u, 0x80000001u, 0x7F800000u};
      for (int i = 0; i < 5; i++) {
        s.byExpert[9] = odd[i];
        CHECK(sumRun(&s) == odd[i], "mode %d: %08x became %08x", modes[m], odd[i], sumRun(&s));
      }
      s.c.dtype = TREFOIL_BF16;
      s.byExpert[9] = 0xFF81;
      CHECK(sumRun(&s) == 0xFF81, "bf16 NaN payload");
      s.c.dtype = TREFOIL_F16;
      s.byExpert[9] = 0xFC01;
      CHECK(sumRun(&s) == 0xFC01, "f16 NaN payload");
    }
  }
}

TEST(other_nans_are_canonical) {
  const uint32_t quiet[] = {
      [TREFOIL_F16] = 0x7FFF, [TREFOIL_F32] = 0x7FFFFFFF, [TREFOIL_BF16] = 0x7FFF};
  const uint32_t odd[] = {
      [TREFOIL_F16] = 0xFC01, [TREFOIL_F32] = 0xFF800001u, [TREFOIL_BF16] = 0xFF81};
  const trefoil_dtype_t dtypes[] = {TREFOIL_F16, TREFOIL_F32, TREFOIL_BF16};
  for (int i = 0; i < 3; i++) {
    trefoil_dtype_t d = dtypes[i];
    sum_t s;
    sumMake(&s, TREFOIL_LL_EXPERT_MAJOR, d, 4, 2); /* weighted: never a copy, even by 1 */
    sumTerm(&s, 0, 0, 1);
    s.byExpert[0] = odd[d];
    CHECK(sumRun(&s) == quiet[d], "%s: %08x", trefoilDtypeName(d), sumRun(&s));
    for (int mode = TREFOIL_LL_RANK_MAJOR; mode <= TREFOIL_HT_EXPERT_MAJOR; mode++) {
      sumMake(&s, mode, d, 4, 2);
      sumTerm(&s, 0, 0, 1);
      sumTerm(&s, 1, 12, 1);
      s.byExpert[0] = odd[d];
      CHECK(sumRun(&s) == quiet[d], "%s mode %d: %08x", trefoilDtypeName(d), mode, sumRun(&s));
      sumTerm(&s, 0, 0, INFINITY); /* infinity minus infinity */
      sumTerm(&s, 1, 12, -INFINITY);
      CHECK(sumRun(&s) == quiet[d], "%s mode %d: %08x", trefoilDtypeName(d), mode, sumRun(&s));
    }
  }
}

/* No zero starts a sum: -0 alone, weighted or added to -0, stays -0. */
TEST(negative_zero) {
  sum_t s;
  sumMake(&s, TREFOIL_LL_EXPERT_MAJOR, TREFOIL_F32, 4, 2);
  sumTerm(&s, 0, 0, -0.0f);
  SUM_IS_F32(&s, -0.0f);
  sumTerm(&s, 1, 12, -0.0f);
  SUM_IS_F32(&s, -0.0f);
  for (int mode = TREFOIL_LL_RANK_MAJOR; mode <= TREFOIL_HT_EXPERT_MAJOR; mode++) {
    sumMake(&s, mode, TREFOIL_F32, 4, 2);
    sumTerm(&s, 0, 0, -0.0f);
    sumTerm(&s, 1, 12, -0.0f);
    SUM_IS_F32(&s, -0.0f);
  }
}

TEST(subnormals_are_kept) {
  for (int mode = 0; mode <= TREFOIL_HT_EXPERT_MAJOR; mode++) {
    sum_t s;
    sumMake(&s, mode, TREFOIL_F32, 4, 4);
    sumTerm(&s, 0, 0, 0x1p-149f);
    sumTerm(&s, 1, 4, 0x1p-148f);
    SUM_IS_F32(&s, 0x1.8p-148f);
    sumMake(&s, mode, TREFOIL_F16, 4, 4);
    sumTerm(&s, 0, 0, 0x1p-24f);
    sumTerm(&s, 1, 4, 0x1p-23f);
    CHECK(sumRun(&s) == 3, "f16 subnormals, mode %d: %x", mode, sumRun(&s));
  }
}

TEST(no_valid_entry_is_zero) {
  for (int mode = 0; mode <= TREFOIL_HT_EXPERT_MAJOR; mode++) {
    sum_t s;
    sumMake(&s, mode, TREFOIL_F32, 4, 2);
    CHECK(sumRun(&s) == 0, "mode %d: %08x", mode, sumRun(&s));
  }
}

/* A masked rank's term is left out, and a later mask loses what dispatch still had. */
TEST(masked_terms_are_left_out) {
  const uint8_t masked[4] = {1, 1, 0, 1}; /* rank 1 regards rank 0 as dead */
  for (int combineOnly = 0; combineOnly < 2; combineOnly++) {
    sum_t s;
    sumMake(&s, TREFOIL_LL_EXPERT_MAJOR, TREFOIL_F32, 2, 2);
    sumTerm(&s, 0, 0, 3);
    sumTerm(&s, 1, 4, 5);
    s.weights[0] = 0.25f;
    if (combineOnly)
      s.c.activeCombine = masked;
    else
      s.c.active = masked;
    SUM_IS_F32(&s, 0.75f); /* not renormalised */
    s.c.mode = TREFOIL_LL_RANK_MAJOR;
    SUM_IS_F32(&s, 3.0f);
  }
}

/* Three tokens to one rank with max_recv 2: the dropped one combines to zeros, weights too. */
TEST(dropped_and_trapped_add_nothing) {
  for (int mode = TREFOIL_HT_FLAT; mode <= TREFOIL_HT_EXPERT_MAJOR; mode++) {
    for (int drop = 0; drop < 2; drop++) {
      const int32_t idx[] = {0, 0, 0};
      const int32_t *topkIdx[] = {idx};
      const int64_t numTokens[] = {3};
      trefoil_case_t c = {.routing = {{1, 1, 1, 1, 3}, numTokens, topkIdx},
                          .mode = mode,
                          .width = 1,
                          .dtype = TREFOIL_F32,
                          .maxRecv = 2,
                          .drop = drop,
                          .backward = 1};
      const float rows[] = {1, 2, 99}, rowWeights[] = {3, 4, 99};
      const trefoil_expert_rows_t experts = {.tokens = rows, .topkWeights = rowWeights};
      float out[3] = {7, 7, 7}, weights[3] = {7, 7, 7};
      REQUIRE(trefoilRefCombine(&c, 0, &experts, NULL, out, weights) == TREFOIL_OK, "%s",
              trefoilLastError());
      for (int t = 0; t < 3; t++) {
        CHECK(out[t] == (drop && t < 2 ? rows[t] : 0), "token %d is %g", t, out[t]);
        CHECK(weights[t] == (drop && t < 2 ? rowWeights[t] : 0), "weight %d is %g", t, weights[t]);
      }
    }
  }
}

/* Rank 0's one token names experts 3, -, 1 (rank 0) and 5 (rank 1). Flat: rank 0's slot lists 1, then
 * 3. Expert-major on rank 0: expert 1 in slot 0, expert 3 in slot 1. Bits come back as they are. */
TEST(backward_returns_weights) {
  const int32_t idx[] = {3, -1, 1, 5};
  const int32_t *topkIdx[] = {idx, NULL};
  const int64_t numTokens[] = {1, 0};
  trefoil_case_t c = {.routing = {{2, 1, 8, 4, 1}, numTokens, topkIdx},
                      .mode = TREFOIL_HT_FLAT,
                      .width = 1,
                      .dtype = TREFOIL_F32,
                      .backward = 1};
  const float rows[] = {1, 2};
  const uint32_t flat0[] = {0x11, 0xFF800001u, 0x99, 0x99}, flat1[] = {0x55, 0x99, 0x99, 0x99};
  trefoil_expert_rows_t experts[2] = {{rows, (const float *)flat0, NULL},
                                      {rows, (const float *)flat1, NULL}};
  uint32_t got[4];
  float out;
  REQUIRE(trefoilRefCombine(&c, 0, experts, NULL, &out, (float *)got) == TREFOIL_OK, "%s",
          trefoilLastError());
  CHECK(got[0] == 0xFF800001u && got[1] == 0 && got[2] == 0x11 && got[3] == 0x55,
        "flat: %x %x %x %x", got[0], got[1], got[2], got[3]);
  c.mode = TREFOIL_HT_EXPERT_MAJOR;
  REQUIRE(trefoilRefCombine(&c, 0, experts, NULL, &out, (float *)got) == TREFOIL_OK, "%s",
          trefoilLastError());
  CHECK(got[0] == 0xFF800001u && got[1] == 0 && got[2] == 0x11 && got[3] == 0x55,
        "expert-major: %x %x %x %x", got[0], got[1], got[2], got[3]);
  CHECK(out == 4, "1 + 2 on rank 0 and 1 of rank 1's slot 0 make %g", out);
}

/* Rank 1's rail leads to rank 3 of the other node, which has no expert of its token and passes it on. */
TEST(traffic_keeps_to_its_rail) {
  const int32_t idx[] = {8, 9};
  const int32_t *topkIdx[] = {NULL, idx, NULL, NULL};
  const int64_t numTokens[] = {0, 1, 0, 0};
  trefoil_case_t c = {.routing = {{4, 2, 16, 2, 1}, numTokens, topkIdx},
                      .mode = TREFOIL_HT_FLAT,
                      .width = 1,
                      .dtype = TREFOIL_F32};
  int64_t rows[16];
  REQUIRE(trefoilRefTraffic(&c, 0, rows) == TREFOIL_OK, "%s", trefoilLastError());
  for (int i = 0; i < 16; i++) {
    CHECK(rows[i] == (i == 1 * 4 + 3 || i == 3 * 4 + 2), "rows[%d] = %lld", i, (long long)rows[i]);
  }
}

/* Rows of src and dst: two nodes of two ranks, rank 0's token to ranks 0, 2 and 3 (two experts of 3). */
TEST(traffic_counts) {
  sum_t s;
  int64_t rows[16];
  sumMake(&s, TREFOIL_HT_FLAT, TREFOIL_F32, 4, 2);
  sumTerm(&s, 0, 0, 1);
  sumTerm(&s, 1, 13, 1);
  sumTerm(&s, 2, 8, 1);
  sumTerm(&s, 3, 12, 1);
  const int64_t ht[16] = {[0 * 4 + 0] = 1, [0 * 4 + 2] = 1, [2 * 4 + 2] = 1, [2 * 4 + 3] = 1};
  const int64_t ll[16] = {[0 * 4 + 0] = 1, [0 * 4 + 2] = 1, [0 * 4 + 3] = 1};
  const int64_t exact[16] = {[0 * 4 + 0] = 1, [0 * 4 + 2] = 1, [0 * 4 + 3] = 2};
  for (int combine = 0; combine < 2; combine++) {
    for (int mode = 0; mode < TREFOIL_NUM_MODES; mode++) {
      s.c.mode = mode;
      REQUIRE(trefoilRefTraffic(&s.c, combine, rows) == TREFOIL_OK, "%s", trefoilLastError());
      bool isExact = combine && mode == TREFOIL_LL_EXPERT_MAJOR;
      const int64_t *want = mode >= TREFOIL_HT_FLAT ? ht : isExact ? exact : ll;
      for (int i = 0; i < 16; i++) { /* combine: the same ways back */
        int64_t got = rows[combine ? i % 4 * 4 + i / 4 : i];
        CHECK(got == want[i], "mode %d combine %d: rows[%d] = %lld", mode, combine, i,
              (long long)got);
      }
    }
  }
}

/* g = 1, x = 1.3 (bf16 1.296875): s = E4M3(1.296875 / 6 = 0.2161) = 0.21875, c = E2M1(5.93) = 6, so the
 * term is 1.3125, not a copy of x. With weight 2 it is 2.625; partial sums do not apply. */
TEST(nvfp4_terms_are_rounded) {
  const int32_t idx[] = {1};
  const int32_t *topkIdx[] = {idx};
  const int64_t numTokens[] = {1};
  trefoil_case_t c = {.routing = {{1, 1, 2, 1, 1}, numTokens, topkIdx},
                      .mode = TREFOIL_LL_RANK_MAJOR,
                      .width = 16,
                      .dtype = TREFOIL_BF16,
                      .quant = TREFOIL_QUANT_NVFP4};
  uint16_t rows[2][16], out[16];
  const float scales[] = {1, 1}, weights[] = {2};
  for (int i = 0; i < 32; i++) rows[i / 16][i % 16] = trefoilF32ToBf16(1.3f);
  const trefoil_expert_rows_t experts = {.tokens = rows, .scales = scales};
  REQUIRE(trefoilRefCombine(&c, 0, &experts, NULL, out, NULL) == TREFOIL_OK, "%s",
          trefoilLastError());
  CHECK(trefoilBf16ToF32(out[15]) == 1.3125f, "rank-major: %g", trefoilBf16ToF32(out[15]));
  c.mode = TREFOIL_LL_EXPERT_MAJOR;
  c.combinePartial = 1;
  REQUIRE(trefoilRefCombine(&c, 0, &experts, weights, out, NULL) == TREFOIL_OK, "%s",
          trefoilLastError());
  CHECK(trefoilBf16ToF32(out[0]) == 2.625f, "expert-major: %g", trefoilBf16ToF32(out[0]));
  const float nan = NAN; /* a scale that is NaN: every term is NaN, and the one NaN comes out */
  const trefoil_expert_rows_t bad = {.tokens = rows, .scales = (float[]){nan, nan}};
  c.mode = TREFOIL_LL_RANK_MAJOR;
  REQUIRE(trefoilRefCombine(&c, 0, &bad, NULL, out, NULL) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(out[0] == 0x7FFF, "NaN is %04x", out[0]);
}

TEST_MAIN()
