/* Shapes, routing checks and their sentences, names of types and modes. */
#include "trefoil/shape.h"

#include "test.h"

static const trefoil_shape_t good = {4, 2, 10, 3, 8};

#define REJECTS(field, value)                                                                      \
  do {                                                                                             \
    trefoil_shape_t s = good;                                                                      \
    s.field = (value);                                                                             \
    CHECK(trefoilShapeCheck(&s) == TREFOIL_INVALID_ARGUMENT, #field " = " #value);                 \
  } while (0)

TEST(shape_limits) {
  CHECK(trefoilShapeCheck(&good) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(trefoilShapeCheck(NULL) == TREFOIL_INVALID_ARGUMENT, "NULL");
  REJECTS(numRanks, 0);
  REJECTS(numRanks, -4);
  REJECTS(numRanks, TREFOIL_MAX_RANKS + 1);
  REJECTS(ranksPerNode, 0);
  REJECTS(ranksPerNode, 3);
  REJECTS(ranksPerNode, 8);
  REJECTS(numExperts, 0);
  REJECTS(numExperts, TREFOIL_MAX_EXPERTS + 1);
  REJECTS(topk, 0);
  REJECTS(topk, TREFOIL_MAX_TOPK + 1);
  REJECTS(maxTokens, 0);
  REJECTS(maxTokens, TREFOIL_MAX_TOKENS + 1);
}

/* E = 10, R = 4: L = 3, so ranks 0-2 have three experts and rank 3 the tenth alone; with E = 5, R = 4,
 * L = 2: rank 2 has one and rank 3 none. */
TEST(experts_on_ranks) {
  CHECK(trefoilExpertsPerRank(&good) == 3, "L");
  static const int rankOf[] = {0, 0, 0, 1, 1, 1, 2, 2, 2, 3};
  for (int e = 0; e < 10; e++) {
    CHECK(trefoilRankOfExpert(&good, e) == rankOf[e], "expert %d", e);
    CHECK(trefoilLocalExpert(&good, e) == e % 3, "expert %d", e);
  }
  trefoil_shape_t few = good;
  few.numExperts = 5;
  CHECK(trefoilExpertsPerRank(&few) == 2 && trefoilRankOfExpert(&few, 4) == 2, "few experts");
}

typedef struct fixture {
  int32_t idx[4][8 * 3];
  int64_t numTokens[4];
  const int32_t *rows[4];
  trefoil_routing_t routing;
} fixture_t;

static void setUp(fixture_t *f) {
  memset(f, 0, sizeof *f);
  for (int r = 0; r < 4; r++) {
    f->numTokens[r] = 2 * r; /* 0, 2, 4, 6 */
    f->rows[r] = r ? f->idx[r] : NULL;
    for (int i = 0; i < 8 * 3; i++) f->idx[r][i] = i % 3 == 2 ? -1 : (r + i) % 10;
  }
  f->routing = (trefoil_routing_t){good, f->numTokens, f->rows};
}

static void expectSentence(const fixture_t *f, const char *part) {
  CHECK(trefoilRoutingCheck(&f->routing) == TREFOIL_INVALID_ARGUMENT, "accepted: %s", part);
  CHECK(strstr(trefoilLastError(), part), "\"%s\" lacks \"%s\"", trefoilLastError(), part);
}

TEST(routing_sentences_say_where) {
  fixture_t f;
  setUp(&f);
  CHECK(trefoilRoutingCheck(&f.routing) == TREFOIL_OK, "%s", trefoilLastError());
  f.idx[2][3 * 3 + 1] = 10;
  expectSentence(&f, "rank 2, token 3, k = 1: expert 10");
  f.idx[2][3 * 3 + 1] = -2;
  expectSentence(&f, "rank 2, token 3, k = 1: expert -2");
  setUp(&f);
  f.idx[3][5 * 3 + 2] = f.idx[3][5 * 3];
  expectSentence(&f, "rank 3, token 5: expert");
  expectSentence(&f, "k = 0 and k = 2");
  f.idx[3][5 * 3] = f.idx[3][5 * 3 + 2] = -1; /* -1 twice is fine */
  CHECK(trefoilRoutingCheck(&f.routing) == TREFOIL_OK, "%s", trefoilLastError());
  f.idx[3][6 * 3] = 99; /* past B_r: not read */
  CHECK(trefoilRoutingCheck(&f.routing) == TREFOIL_OK, "%s", trefoilLastError());
  f.numTokens[1] = 9;
  expectSentence(&f, "rank 1 has 9 tokens");
  f.numTokens[1] = -1;
  expectSentence(&f, "rank 1 has -1 tokens");
  setUp(&f);
  f.numTokens[0] = 1;
  expectSentence(&f, "rank 0 has 1 tokens but its topk_idx is NULL");
  f.routing.topkIdx = NULL;
  expectSentence(&f, "topkIdx is NULL");
  f.routing.numTokens = NULL;
  expectSentence(&f, "numTokens is NULL");
}

/* Past 8192 experts the bitmap of a row leaves the stack. */
TEST(many_experts) {
  trefoil_shape_t s = {1, 1, TREFOIL_MAX_EXPERTS, 100, 2};
  int32_t idx[200];
  for (int i = 0; i < 200; i++) idx[i] = i % 100 * 10007;
  const int32_t *rows[] = {idx};
  int64_t n = 2;
  trefoil_routing_t r = {s, &n, rows};
  CHECK(trefoilRoutingCheck(&r) == TREFOIL_OK, "%s", trefoilLastError());
  idx[199] = idx[100];
  CHECK(trefoilRoutingCheck(&r) == TREFOIL_INVALID_ARGUMENT, "a duplicate over 99 entries");
}

TEST(names_and_sizes) {
  CHECK(!strcmp(trefoilModeName(TREFOIL_HT_FLAT), "ht-flat"), "ht-flat");
  CHECK(!strcmp(trefoilModeName((trefoil_mode_t)-1), "unknown"), "-1");
  static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1, 1};
  for (int d = 0; d < 13; d++) {
    CHECK(trefoilDtypeBytes((trefoil_dtype_t)d) == bytes[d], "dtype %d", d);
    CHECK(strcmp(trefoilDtypeName((trefoil_dtype_t)d), "unknown"), "dtype %d", d);
  }
  CHECK(trefoilDtypeBytes((trefoil_dtype_t)13) == 0, "13");
  CHECK(!strcmp(trefoilDtypeName((trefoil_dtype_t)-1), "unknown"), "-1");
}

TEST_MAIN()
