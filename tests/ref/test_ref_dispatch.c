/* Slots, counters and dispatch of the reference against answers derived by hand. The first tests are
 * the worked example of docs/spec.md; the others change one thing about it. */
#include "test.h"

#include <stdbool.h>

#include "ref_example.h"

#define POISON (-777.0f)

typedef struct {
  int src, token, k, expert;
} want_t;

static void checkSlots(const trefoil_case_t *c, int rank, int n, const want_t *want) {
  trefoil_slot_t slots[32];
  REQUIRE(trefoilRefNumSlots(c, rank) == n, "rank %d: %lld slots, not %d", rank,
          (long long)trefoilRefNumSlots(c, rank), n);
  REQUIRE(trefoilRefSlots(c, rank, slots) == TREFOIL_OK, "%s", trefoilLastError());
  for (int i = 0; i < n; i++) {
    bool same = slots[i].src == want[i].src && slots[i].token == want[i].token &&
                slots[i].k == want[i].k && slots[i].expert == want[i].expert;
    CHECK(same, "rank %d slot %d is {%d, %lld, %d, %d}", rank, i, slots[i].src,
          (long long)slots[i].token, slots[i].k, slots[i].expert);
  }
}

static void checkCounts(const char *what, const int64_t *got, int n, const int64_t *want) {
  for (int i = 0; i < n; i++) {
    CHECK(got[i] == want[i], "%s[%d] is %lld, not %lld", what, i, (long long)got[i],
          (long long)want[i]);
  }
}
#define COUNTS(what, got, ...)                                                                     \
  checkCounts(what, got, sizeof((int64_t[]){__VA_ARGS__}) / 8, (int64_t[]){__VA_ARGS__})

/* A row of tokens: src < 0 a row of `fill`. */
static void checkRow(const float *row, int src, int64_t token, float fill, const char *what) {
  for (int i = 0; i < EXAMPLE_WIDTH; i++) {
    float want = src < 0 ? fill : exampleValue(src, token, i);
    CHECK(row[i] == want, "%s column %d is %g, not %g", what, i, row[i], want);
  }
}

static void poison(float *p, int n) {
  for (int i = 0; i < n; i++) p[i] = POISON;
}

TEST(example_ll_expert_major) {
  example_t x;
  exampleMake(&x, TREFOIL_LL_EXPERT_MAJOR);
  /* L * R * N = 8 slots: four for each local expert, packed from the first. */
  const want_t rank1[] = {{0, 0, 0, 0}, {0, 1, 1, 0},    {1, 0, 1, 0},    {-1, -1, -1, 0},
                          {0, 1, 0, 1}, {-1, -1, -1, 1}, {-1, -1, -1, 1}, {-1, -1, -1, 1}};
  checkSlots(&x.c, 1, 8, rank1);
  const want_t rank0[] = {{0, 0, 1, 0},    {-1, -1, -1, 0}, {-1, -1, -1, 0}, {-1, -1, -1, 0},
                          {-1, -1, -1, 1}, {-1, -1, -1, 1}, {-1, -1, -1, 1}, {-1, -1, -1, 1}};
  checkSlots(&x.c, 0, 8, rank0);
  int64_t counters[2], untouched = -5;
  trefoil_counters_t out = {.expertCounters = counters, .total = &untouched};
  REQUIRE(trefoilRefCounters(&x.c, 1, &out) == TREFOIL_OK, "%s", trefoilLastError());
  COUNTS("expertCounters", counters, 3, 1);
  CHECK(untouched == -5, "a counter that the mode lacks was written");
  float tokens[8 * EXAMPLE_WIDTH];
  poison(tokens, 8 * EXAMPLE_WIDTH);
  trefoil_received_t to = {.tokens = tokens};
  REQUIRE(trefoilRefDispatch(&x.c, 1, x.sources, &to) == TREFOIL_OK, "%s", trefoilLastError());
  for (int i = 0; i < 8; i++) {
    checkRow(tokens + i * EXAMPLE_WIDTH, rank1[i].src, rank1[i].token, POISON, "tokens");
  }
}

TEST(example_ll_rank_major) {
  example_t x;
  exampleMake(&x, TREFOIL_LL_RANK_MAJOR);
  const want_t rank1[] = {{0, 0, -1, -1}, {0, 1, -1, -1}, {1, 0, -1, -1}, {-1, -1, -1, -1}};
  checkSlots(&x.c, 1, 4, rank1);
  int64_t sources[2];
  trefoil_counters_t out = {.srcRankCounters = sources};
  REQUIRE(trefoilRefCounters(&x.c, 1, &out) == TREFOIL_OK, "%s", trefoilLastError());
  COUNTS("srcRankCounters", sources, 2, 1);
  for (int global = 0; global < 2; global++) {
    float tokens[4 * EXAMPLE_WIDTH], weights[8];
    int32_t ids[8];
    poison(tokens, 4 * EXAMPLE_WIDTH);
    poison(weights, 8);
    memset(ids, 0x55, sizeof ids);
    x.c.globalIds = global;
    trefoil_received_t to = {.tokens = tokens, .topkWeights = weights, .topkIdx = ids};
    REQUIRE(trefoilRefDispatch(&x.c, 1, x.sources, &to) == TREFOIL_OK, "%s", trefoilLastError());
    for (int i = 0; i < 4; i++) {
      checkRow(tokens + i * EXAMPLE_WIDTH, rank1[i].src, rank1[i].token, POISON, "tokens");
    }
    /* The source's order of k; ids of other ranks' experts are -1; all ids of the unused row. */
    const int32_t want[2][8] = {{0, -1, 1, 0, -1, 0, -1, -1}, {2, -1, 3, 2, -1, 2, -1, -1}};
    const float wantWeights[8] = {0.75f, 0.25f, 0.5f, 0.125f, 9, 0.5f, POISON, POISON};
    for (int i = 0; i < 8; i++) {
      CHECK(ids[i] == want[global][i], "id %d is %d", i, ids[i]);
      CHECK(weights[i] == wantWeights[i], "weight %d is %g", i, weights[i]);
    }
  }
}

TEST(example_ht_flat) {
  example_t x;
  exampleMake(&x, TREFOIL_HT_FLAT);
  const want_t rank1[] = {{0, 0, -1, -1}, {0, 1, -1, -1}, {1, 0, -1, -1}};
  checkSlots(&x.c, 1, 3, rank1);
  int64_t experts[2], total;
  trefoil_counters_t out = {.expertCounters = experts, .total = &total};
  REQUIRE(trefoilRefCounters(&x.c, 1, &out) == TREFOIL_OK, "%s", trefoilLastError());
  COUNTS("expertCounters", experts, 3, 1);
  COUNTS("total", &total, 3);
  float tokens[5 * EXAMPLE_WIDTH], weights[10];
  int64_t ids[10];
  poison(tokens, 5 * EXAMPLE_WIDTH);
  poison(weights, 10);
  memset(ids, 0x55, sizeof ids);
  x.c.globalIds = 1;
  x.c.maxRecv = 4; /* tensors of five rows: the fifth is past max_recv and stays as it is */
  trefoil_received_t to = {.tokens = tokens, .topkWeights = weights, .topkIdx = ids, .topkRows = 5};
  REQUIRE(trefoilRefDispatch(&x.c, 1, x.sources, &to) == TREFOIL_OK, "%s", trefoilLastError());
  for (int i = 0; i < 5; i++) {
    checkRow(tokens + i * EXAMPLE_WIDTH, i < 3 ? rank1[i].src : -1, i < 3 ? rank1[i].token : 0,
             POISON, "tokens");
  }
  /* Token 1 of rank 0 names 3, then 2: ascending ids, and the weights go with them. */
  const int64_t wantIds[8] = {2, -1, 2, 3, 2, -1, -1, -1};
  const float wantWeights[8] = {0.75f, 0, 0.125f, 0.5f, 0.5f, 0, 0, 0};
  for (int i = 0; i < 8; i++) {
    CHECK(ids[i] == wantIds[i], "id %d is %lld", i, (long long)ids[i]);
    CHECK(weights[i] == wantWeights[i], "weight %d is %g", i, weights[i]);
  }
  for (int i = 8; i < 10; i++) {
    CHECK(ids[i] == 0x5555555555555555 && weights[i] == POISON, "row 4 is past max_recv");
  }
}

TEST(example_ht_expert_major) {
  example_t x;
  exampleMake(&x, TREFOIL_HT_EXPERT_MAJOR);
  x.c.alignment = 4;
  const want_t rank1[] = {{0, 0, 0, 0}, {0, 1, 1, 0},    {1, 0, 1, 0},    {-1, -1, -1, 0},
                          {0, 1, 0, 1}, {-1, -1, -1, 1}, {-1, -1, -1, 1}, {-1, -1, -1, 1}};
  checkSlots(&x.c, 1, 8, rank1);
  int64_t experts[2], offsets[2], total;
  trefoil_counters_t out = {experts, offsets, &total, NULL};
  REQUIRE(trefoilRefCounters(&x.c, 1, &out) == TREFOIL_OK, "%s", trefoilLastError());
  COUNTS("expertCounters", experts, 4, 4);
  COUNTS("expertOffsets", offsets, 0, 4);
  COUNTS("total", &total, 8);
  float tokens[9 * EXAMPLE_WIDTH], weights[9];
  poison(tokens, 9 * EXAMPLE_WIDTH);
  poison(weights, 9);
  trefoil_received_t to = {.tokens = tokens, .topkWeights = weights, .topkRows = 9};
  REQUIRE(trefoilRefDispatch(&x.c, 1, x.sources, &to) == TREFOIL_OK, "%s", trefoilLastError());
  const float wantWeights[9] = {0.75f, 0.125f, 0.5f, 0, 0.5f, 0, 0, 0, 0};
  for (int i = 0; i < 9; i++) {
    float fill = i < 8 ? 0 : POISON; /* padding is zero, the row past the count untouched */
    checkRow(tokens + i * EXAMPLE_WIDTH, i < 8 ? rank1[i].src : -1, i < 8 ? rank1[i].token : 0,
             fill, "tokens");
    CHECK(weights[i] == wantWeights[i], "weight %d is %g", i, weights[i]);
  }
  /* Rank 0: one row of expert 0; expert 1 is unused: no padding for it, counter 0. */
  REQUIRE(trefoilRefCounters(&x.c, 0, &out) == TREFOIL_OK, "%s", trefoilLastError());
  COUNTS("expertCounters", experts, 4, 0);
  COUNTS("expertOffsets", offsets, 0, 4);
  COUNTS("total", &total, 4);
}

TEST(alignments) {
  example_t x;
  exampleMake(&x, TREFOIL_HT_EXPERT_MAJOR);
  const struct {
    size_t alignment;
    int64_t counters[2], total;
  } want[] = {
      {0, {3, 1}, 4}, {1, {3, 1}, 4}, {2, {4, 2}, 6}, {8, {8, 8}, 16}, {128, {128, 128}, 256}};
  for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
    int64_t experts[2], offsets[2], total;
    trefoil_counters_t out = {experts, offsets, &total, NULL};
    x.c.alignment = want[i].alignment;
    REQUIRE(trefoilRefCounters(&x.c, 1, &out) == TREFOIL_OK, "%s", trefoilLastError());
    COUNTS("expertCounters", experts, want[i].counters[0], want[i].counters[1]);
    COUNTS("expertOffsets", offsets, 0, want[i].counters[0]);
    COUNTS("total", &total, want[i].total);
  }
}

/* max_recv 2 of three tokens: rank 1 keeps rank 0's two tokens. */
TEST(drop_flat) {
  example_t x;
  exampleMake(&x, TREFOIL_HT_FLAT);
  x.c.maxRecv = 2;
  x.c.drop = 1;
  const want_t rank1[] = {{0, 0, -1, -1}, {0, 1, -1, -1}};
  checkSlots(&x.c, 1, 2, rank1);
  int64_t experts[2], total;
  trefoil_counters_t out = {.expertCounters = experts, .total = &total};
  REQUIRE(trefoilRefCounters(&x.c, 1, &out) == TREFOIL_OK, "%s", trefoilLastError());
  COUNTS("expertCounters", experts, 2, 1); /* kept tokens only */
  COUNTS("total", &total, 3);              /* the true number */
}

/* Two tokens may stay, and slots below two: zone 0 is [0, 3) by the true counts and loses its third
 * slot twice over; zone 1, at 3, is out. */
TEST(drop_expert_major) {
  example_t x;
  exampleMake(&x, TREFOIL_HT_EXPERT_MAJOR);
  x.c.maxRecv = 2;
  x.c.drop = 1;
  const want_t rank1[] = {{0, 0, 0, 0}, {0, 1, 1, 0}};
  checkSlots(&x.c, 1, 2, rank1);
  int64_t experts[2], offsets[2], total;
  trefoil_counters_t out = {experts, offsets, &total, NULL};
  REQUIRE(trefoilRefCounters(&x.c, 1, &out) == TREFOIL_OK, "%s", trefoilLastError());
  COUNTS("expertCounters", experts, 2, 0);
  COUNTS("expertOffsets", offsets, 0, 2);
  COUNTS("total", &total, 4);
}

/* Tokens past the first max_recv are dropped even where their slot would fit: three tokens A, B, C to
 * one rank, A and B use expert 1 alone, C expert 0; max_recv 2. Zones by true counts: expert 0 at
 * [0, 1), expert 1 at [1, 3). C is the third token: slot 0 stays empty and is zeroed; B's slot 2
 * is past max_recv. Counters: min(1, 2 - 0) = 1, min(2, 2 - 1) = 1. With zero copy only slots
 * count, so C stays. */
TEST(drop_by_token_and_by_slot) {
  const int32_t idx[] = {1, 1, 0};
  const int32_t *topkIdx[] = {idx};
  const int64_t numTokens[] = {3};
  const float tokens[] = {1, 2, 3}, weights[] = {4, 5, 6};
  trefoil_case_t c = {.routing = {{1, 1, 2, 1, 3}, numTokens, topkIdx},
                      .mode = TREFOIL_HT_EXPERT_MAJOR,
                      .width = 1,
                      .dtype = TREFOIL_F32,
                      .maxRecv = 2,
                      .drop = 1};
  for (int zeroCopy = 0; zeroCopy < 2; zeroCopy++) {
    c.zeroCopyOn = zeroCopy;
    const want_t dropped[] = {{-1, -1, -1, 0}, {0, 0, 0, 1}}, kept[] = {{0, 2, 0, 0}, {0, 0, 0, 1}};
    checkSlots(&c, 0, 2, zeroCopy ? kept : dropped);
    int64_t experts[2], offsets[2], total;
    trefoil_counters_t out = {experts, offsets, &total, NULL};
    REQUIRE(trefoilRefCounters(&c, 0, &out) == TREFOIL_OK, "%s", trefoilLastError());
    COUNTS("expertCounters", experts, 1, 1);
    COUNTS("expertOffsets", offsets, 0, 1);
    COUNTS("total", &total, 3);
    float got[3] = {POISON, POISON, POISON}, gotWeights[3] = {POISON, POISON, POISON};
    trefoil_source_t source = {.tokens = tokens, .topkWeights = weights};
    trefoil_received_t to = {.tokens = got, .topkWeights = gotWeights, .topkRows = 3};
    REQUIRE(trefoilRefDispatch(&c, 0, &source, &to) == TREFOIL_OK, "%s", trefoilLastError());
    CHECK(got[0] == (zeroCopy ? 3 : 0) && got[1] == 1 && got[2] == POISON, "%g %g %g", got[0],
          got[1], got[2]);
    CHECK(gotWeights[0] == (zeroCopy ? 6 : 0) && gotWeights[1] == 4 && gotWeights[2] == POISON,
          "%g %g %g", gotWeights[0], gotWeights[1], gotWeights[2]);
  }
}

/* TRAP: a rank over max_recv receives nothing and tells the true counts; the other rank is whole. */
TEST(trap) {
  for (int mode = TREFOIL_HT_FLAT; mode <= TREFOIL_HT_EXPERT_MAJOR; mode++) {
    example_t x;
    exampleMake(&x, mode);
    x.c.maxRecv = 2;
    CHECK(trefoilRefNumSlots(&x.c, 1) == 0, "a trapping rank has no slots");
    CHECK(trefoilRefNumSlots(&x.c, 0) == 1, "rank 0 receives its one row");
    int64_t experts[2], total;
    trefoil_counters_t out = {.expertCounters = experts, .total = &total};
    REQUIRE(trefoilRefCounters(&x.c, 1, &out) == TREFOIL_OK, "%s", trefoilLastError());
    COUNTS("expertCounters", experts, 3, 1);
    COUNTS("total", &total, mode == TREFOIL_HT_FLAT ? 3 : 4);
    float tokens[4 * EXAMPLE_WIDTH], weights[8];
    int64_t ids[8];
    poison(tokens, 4 * EXAMPLE_WIDTH);
    poison(weights, 8);
    memset(ids, 0x55, sizeof ids);
    trefoil_received_t to = {
        .tokens = tokens, .topkWeights = weights, .topkIdx = ids, .topkRows = 4};
    REQUIRE(trefoilRefDispatch(&x.c, 1, x.sources, &to) == TREFOIL_OK, "%s", trefoilLastError());
    for (int i = 0; i < 8; i++) {
      CHECK(tokens[i] == POISON && weights[i] == POISON && ids[i] == 0x5555555555555555,
            "element %d was written", i);
    }
  }
}

/* Rows travel if each rank regards the other as alive; a one-sided mask is enough to lose them. */
TEST(masks) {
  const uint8_t all[4] = {1, 1, 1, 1}, seen1[4] = {1, 1, 0, 1}, seen0[4] = {1, 0, 1, 1};
  const uint8_t *masks[] = {all, seen1, seen0};
  for (int m = 0; m < 3; m++) {
    example_t x;
    exampleMake(&x, TREFOIL_LL_EXPERT_MAJOR);
    x.c.active = masks[m];
    int64_t counters[2], sources[2];
    trefoil_counters_t out = {.expertCounters = counters, .srcRankCounters = sources};
    REQUIRE(trefoilRefCounters(&x.c, 1, &out) == TREFOIL_OK, "%s", trefoilLastError());
    if (m == 0)
      COUNTS("expertCounters", counters, 3, 1);
    else
      COUNTS("expertCounters", counters, 1, 0);
    trefoil_slot_t slots[8];
    REQUIRE(trefoilRefSlots(&x.c, 1, slots) == TREFOIL_OK, "%s", trefoilLastError());
    CHECK(slots[0].src == (m == 0 ? 0 : 1), "slots close up after a masked source");
    x.c.mode = TREFOIL_LL_RANK_MAJOR;
    REQUIRE(trefoilRefCounters(&x.c, 1, &out) == TREFOIL_OK, "%s", trefoilLastError());
    COUNTS("srcRankCounters", sources, m == 0 ? 2 : 0, 1);
    REQUIRE(trefoilRefSlots(&x.c, 1, slots) == TREFOIL_OK, "%s", trefoilLastError());
    CHECK(slots[2].src == 1 && slots[2].token == 0, "rank 1's zone stays at slot 2");
  }
}

/* E = 5 over R = 4: L = 2, rank 2 has expert 4 alone, rank 3 none. */
TEST(ranks_without_experts) {
  const int32_t idx0[] = {4, 1}, idx3[] = {-1, 4, -1, -1};
  const int32_t *topkIdx[] = {idx0, NULL, NULL, idx3};
  const int64_t numTokens[] = {1, 0, 0, 2};
  trefoil_case_t c = {.routing = {{4, 4, 5, 2, 2}, numTokens, topkIdx},
                      .mode = TREFOIL_HT_EXPERT_MAJOR,
                      .width = 1,
                      .dtype = TREFOIL_F32,
                      .alignment = 2};
  int64_t experts[2], offsets[2], total;
  trefoil_counters_t out = {experts, offsets, &total, NULL};
  REQUIRE(trefoilRefCounters(&c, 2, &out) == TREFOIL_OK, "%s", trefoilLastError());
  COUNTS("expertCounters", experts, 2, 0);
  COUNTS("expertOffsets", offsets, 0, 2);
  REQUIRE(trefoilRefCounters(&c, 3, &out) == TREFOIL_OK, "%s", trefoilLastError());
  COUNTS("expertCounters", experts, 0, 0);
  COUNTS("expertOffsets", offsets, 0, 0);
  COUNTS("total", &total, 0);
  CHECK(trefoilRefNumSlots(&c, 3) == 0, "rank 3 has no experts");
  const want_t rank2[] = {{0, 0, 0, 0}, {3, 0, 1, 0}};
  checkSlots(&c, 2, 2, rank2);
  c.mode = TREFOIL_HT_FLAT;
  const want_t flat2[] = {{0, 0, -1, -1}, {3, 0, -1, -1}};
  checkSlots(&c, 2, 2, flat2);
  c.mode = TREFOIL_LL_EXPERT_MAJOR;
  CHECK(trefoilRefNumSlots(&c, 3) == 2 * 4 * 2, "LL tensors have one shape on all ranks");
}

/* The caller's scales lie beside their rows, padding is zero in both. */
TEST(scales_side_by_side) {
  example_t x;
  exampleMake(&x, TREFOIL_HT_EXPERT_MAJOR);
  x.c.alignment = 4;
  x.c.quant = TREFOIL_QUANT_CALLER;
  x.c.dtype = TREFOIL_E4M3;
  x.c.width = 3;
  x.c.scaleBytes = 2;
  const uint8_t tokens0[6] = {1, 2, 3, 4, 5, 6}, tokens1[3] = {7, 8, 9};
  const uint8_t scales0[4] = {11, 12, 13, 14}, scales1[2] = {15, 16};
  const trefoil_source_t sources[2] = {{tokens0, scales0, exampleWeights0},
                                       {tokens1, scales1, exampleWeights1}};
  uint8_t tokens[8 * 3], scales[8 * 2];
  memset(tokens, 0xEE, sizeof tokens);
  memset(scales, 0xEE, sizeof scales);
  trefoil_received_t to = {.tokens = tokens, .scales = scales};
  REQUIRE(trefoilRefDispatch(&x.c, 1, sources, &to) == TREFOIL_OK, "%s", trefoilLastError());
  const uint8_t wantTokens[24] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0, 4, 5, 6};
  const uint8_t wantScales[16] = {11, 12, 13, 14, 15, 16, 0, 0, 13, 14};
  CHECK(!memcmp(tokens, wantTokens, 24), "tokens differ");
  CHECK(!memcmp(scales, wantScales, 16), "scales differ");
}

/* Backward carries rows alone: no weights or ids are written, even where tensors are given. */
TEST(backward_rows_alone) {
  example_t x;
  exampleMake(&x, TREFOIL_HT_FLAT);
  x.c.backward = 1;
  x.sources[0].topkWeights = x.sources[1].topkWeights = NULL;
  float tokens[3 * EXAMPLE_WIDTH], weights[6];
  poison(tokens, 3 * EXAMPLE_WIDTH);
  poison(weights, 6);
  trefoil_received_t to = {.tokens = tokens, .topkWeights = weights, .topkRows = 3};
  REQUIRE(trefoilRefDispatch(&x.c, 1, x.sources, &to) == TREFOIL_OK, "%s", trefoilLastError());
  checkRow(tokens, 0, 0, 0, "tokens");
  checkRow(tokens + 2 * EXAMPLE_WIDTH, 1, 0, 0, "tokens");
  for (int i = 0; i < 6; i++) CHECK(weights[i] == POISON, "weight %d was written", i);
}

/* Dispatch never changes a bit: NaN payloads, -0 and subnormals travel as they are. */
TEST(dispatch_keeps_bits) {
  example_t x;
  exampleMake(&x, TREFOIL_HT_FLAT);
  const uint32_t odd[4] = {0x7F800001u, 0xFFC12345u, 0x80000000u, 0x00000001u};
  memcpy(x.tokens[0], odd, sizeof odd);
  uint32_t tokens[3 * EXAMPLE_WIDTH];
  trefoil_received_t to = {.tokens = tokens};
  REQUIRE(trefoilRefDispatch(&x.c, 1, x.sources, &to) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(!memcmp(tokens, odd, sizeof odd), "bits changed");
}

TEST(no_tokens_anywhere) {
  for (int mode = 0; mode < TREFOIL_NUM_MODES; mode++) {
    const int32_t *topkIdx[] = {NULL, NULL};
    const int64_t numTokens[] = {0, 0};
    trefoil_case_t c = {.routing = {{2, 1, 2, 1, 2}, numTokens, topkIdx},
                        .mode = mode,
                        .width = 1,
                        .dtype = TREFOIL_F32};
    const trefoil_source_t sources[2] = {{0}};
    float tokens[4], weights[4];
    int32_t ids[8];
    poison(tokens, 4);
    poison(weights, 4);
    memset(ids, 0x55, sizeof ids);
    trefoil_received_t to = {
        .tokens = tokens, .topkWeights = weights, .topkIdx = ids, .topkRows = 4};
    REQUIRE(trefoilRefDispatch(&c, 1, sources, &to) == TREFOIL_OK, "%s", trefoilLastError());
    for (int i = 0; i < 4; i++) CHECK(tokens[i] == POISON, "mode %d wrote a row", mode);
    bool hasIds = mode == TREFOIL_LL_RANK_MAJOR || mode == TREFOIL_HT_FLAT;
    CHECK(ids[0] == (hasIds ? -1 : 0x55555555), "mode %d: id %d", mode, ids[0]);
    CHECK(weights[0] == (mode >= TREFOIL_HT_FLAT ? 0 : POISON), "mode %d: weight %g", mode,
          weights[0]);
    CHECK(trefoilRefCombine(&c, 1, NULL, NULL, NULL, NULL) == TREFOIL_OK, "%s", trefoilLastError());
  }
}

TEST_MAIN()
