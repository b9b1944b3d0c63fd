/* The layout: against slots written down by hand, against the definition (ascending source and
 * token, walked naively), and what must hold between its tables, for every mode and limit. */
#include "trefoil/layout.h"

#include "test.h"
#include "tests/plan/cases.h"

/* 2 ranks, 4 experts (rank 0: 0, 1; rank 1: 2, 3), K = 2, N = 3.
 *   rank 0: t0 (0, 2), t1 (1, 0), t2 (3, -1)      rank 1: t0 (2, 1), t1 (-1, -1) */
static const int32_t idx0[] = {0, 2, 1, 0, 3, -1};
static const int32_t idx1[] = {2, 1, -1, -1};
static const int32_t *const handIdx[] = {idx0, idx1};
static const int64_t handTokens[] = {3, 2};
static const trefoil_routing_t hand = {{2, 2, 4, 2, 3}, handTokens, handIdx};

static void expectSlots(const trefoil_layout_config_t *config, const int64_t *expected) {
  trefoil_layout_t l = {0};
  REQUIRE(trefoilLayoutCompute(&l, &hand, config) == TREFOIL_OK, "%s", trefoilLastError());
  for (int i = 0; i < 10; i++) {
    int64_t slot = i < 6 ? l.slotOf[0][i] : l.slotOf[1][i - 6];
    CHECK(slot == expected[i], "mode %d entry %d: slot %lld, expected %lld", (int)config->mode, i,
          (long long)slot, (long long)expected[i]);
  }
  trefoilLayoutFree(&l);
}

TEST(by_hand) {
  /* LL expert-major: zones of R*N = 6. Expert 0: (0,t0), (0,t1); 1: (0,t1), (1,t0); 2: (0,t0),
   * (1,t0); 3: (0,t2). */
  expectSlots(&(trefoil_layout_config_t){.mode = TREFOIL_LL_EXPERT_MAJOR},
              (int64_t[]){0, 0, 6, 1, 6, -1, 1, 7, -1, -1});
  /* LL rank-major: zones of N = 3 per source. On rank 0: t0, t1 of 0; t0 of 1. On rank 1: t0, t2 of
   * 0; t0 of 1. */
  expectSlots(&(trefoil_layout_config_t){.mode = TREFOIL_LL_RANK_MAJOR},
              (int64_t[]){0, 0, 1, 1, 1, -1, 3, 3, -1, -1});
  expectSlots(&(trefoil_layout_config_t){.mode = TREFOIL_HT_FLAT},
              (int64_t[]){0, 0, 1, 1, 1, -1, 2, 2, -1, -1});
  /* HT expert-major, zones padded to 4: expert 0 at 0, 1 at 4; expert 2 at 0, 3 at 4. */
  expectSlots(&(trefoil_layout_config_t){.mode = TREFOIL_HT_EXPERT_MAJOR, .alignment = 4},
              (int64_t[]){0, 0, 4, 1, 4, -1, 1, 5, -1, -1});
  /* Unpadded: expert 0 at 0, 1 at 2; 2 at 0, 3 at 2. */
  expectSlots(&(trefoil_layout_config_t){.mode = TREFOIL_HT_EXPERT_MAJOR},
              (int64_t[]){0, 0, 2, 1, 2, -1, 1, 3, -1, -1});
}

TEST(limits_by_hand) {
  /* TRAP at 3 slots: rank 0 has 4, so it receives nothing; rank 1 has 3. */
  trefoil_layout_config_t c = {.mode = TREFOIL_HT_EXPERT_MAJOR, .maxRecv = 3};
  expectSlots(&c, (int64_t[]){-1, 0, -1, -1, 2, -1, 1, -1, -1, -1});
  /* DROP at 2: rank 0 keeps the tokens t0, t1 of rank 0, whose slots are 0 and 2, 1: 2 is over;
   * rank 1 keeps t0 and t2 of rank 0, so (1,t0)'s slot 1 is dropped too, and t2's slot 2 is over. */
  c = (trefoil_layout_config_t){.mode = TREFOIL_HT_EXPERT_MAJOR, .maxRecv = 2, .drop = 1};
  expectSlots(&c, (int64_t[]){0, 0, -1, 1, -1, -1, -1, -1, -1, -1});
  c.zeroCopyOn = 1; /* only slots count: (1,t0) keeps slot 1 of rank 1 */
  expectSlots(&c, (int64_t[]){0, 0, -1, 1, -1, -1, 1, -1, -1, -1});
  c = (trefoil_layout_config_t){.mode = TREFOIL_HT_FLAT, .maxRecv = 2, .drop = 1};
  expectSlots(&c, (int64_t[]){0, 0, 1, 1, 1, -1, -1, -1, -1, -1});
  trefoil_layout_t l = {0};
  c = (trefoil_layout_config_t){
      .mode = TREFOIL_HT_EXPERT_MAJOR, .maxRecv = 3, .drop = 1, .alignment = 2};
  REQUIRE(trefoilLayoutCompute(&l, &hand, &c) == TREFOIL_OK, "%s", trefoilLastError());
  /* padded zones: 2 + 2 on both ranks, so 4 true slots, 3 kept; the second zone shows 1 of 2 */
  CHECK(l.total[0] == 4 && l.numSlots[0] == 3 && l.overflowed[0], "rank 0");
  CHECK(l.shownOffset[1] == 2 && l.shownCount[1] == 1 && l.expertPadded[1] == 2, "expert 1");
  CHECK(l.expertFilled[1] == 1 && l.expertFilled[3] == 1 && l.expertCount[3] == 1, "filled");
  trefoilLayoutFree(&l);
}

/* The definition, walked for one rank and expert at a time. */
typedef struct naive {
  const trefoil_routing_t *r;
  trefoil_layout_config_t c;
  int L;
} naive_t;

static int linked(const naive_t *n, int src, int dst) {
  int R = n->r->shape.numRanks;
  if (!n->c.active || n->c.mode >= TREFOIL_HT_FLAT) return 1;
  return n->c.active[src * R + dst] && n->c.active[dst * R + src];
}

static int uses(const naive_t *n, int src, int64_t t, int dst) {
  const int32_t *row = n->r->topkIdx[src] + t * n->r->shape.topk;
  for (int k = 0; k < n->r->shape.topk; k++) {
    if (row[k] >= 0 && row[k] / n->L == dst) return linked(n, src, dst);
  }
  return 0;
}

/* Rows before (src, token) of the same kind on dst: of the expert, or tokens; fromSrc only src's. */
static int64_t before(const naive_t *n, int src, int64_t token, int dst, int expert, int fromSrc) {
  int64_t count = 0;
  for (int s = fromSrc ? src : 0; s <= src; s++) {
    int64_t end = s < src ? n->r->numTokens[s] : token;
    for (int64_t t = 0; t < end; t++) {
      if (expert < 0) {
        count += uses(n, s, t, dst);
        continue;
      }
      const int32_t *row = n->r->topkIdx[s] + t * n->r->shape.topk;
      for (int k = 0; k < n->r->shape.topk; k++) count += row[k] == expert && linked(n, s, dst);
    }
  }
  return count;
}

static int64_t allOf(const naive_t *n, int dst, int expert) {
  return before(n, n->r->shape.numRanks - 1, n->r->numTokens[n->r->shape.numRanks - 1], dst, expert,
                0);
}

static int64_t paddedOf(const naive_t *n, int expert) {
  int64_t a = n->c.alignment ? (int64_t)n->c.alignment : 1;
  return (allOf(n, expert / n->L, expert) + a - 1) / a * a;
}

static int64_t totalOf(const naive_t *n, int dst) {
  if (n->c.mode != TREFOIL_HT_EXPERT_MAJOR) return allOf(n, dst, -1);
  int64_t sum = 0;
  for (int e = dst * n->L; e < (dst + 1) * n->L; e++) sum += paddedOf(n, e);
  return sum;
}

static int64_t naiveSlot(const naive_t *n, int src, int64_t t, int expert) {
  const trefoil_shape_t *s = &n->r->shape;
  int dst = expert / n->L;
  if (!linked(n, src, dst)) return -1;
  int64_t flat = before(n, src, t, dst, -1, 0), slot = flat;
  if (n->c.mode == TREFOIL_LL_EXPERT_MAJOR) {
    return expert % n->L * s->numRanks * s->maxTokens + before(n, src, t, dst, expert, 0);
  }
  if (n->c.mode == TREFOIL_LL_RANK_MAJOR) {
    return src * s->maxTokens + before(n, src, t, dst, -1, 1);
  }
  if (n->c.mode == TREFOIL_HT_EXPERT_MAJOR) {
    slot = before(n, src, t, dst, expert, 0);
    for (int e = dst * n->L; e < expert; e++) slot += paddedOf(n, e);
  }
  if (n->c.maxRecv == 0 || totalOf(n, dst) <= n->c.maxRecv) return slot;
  int flatLimits = n->c.mode == TREFOIL_HT_FLAT || !n->c.zeroCopyOn;
  if (!n->c.drop || slot >= n->c.maxRecv || (flatLimits && flat >= n->c.maxRecv)) return -1;
  return slot;
}

static void compareWithNaive(const naive_t *n, const trefoil_layout_t *l, int replay) {
  const trefoil_shape_t *s = &n->r->shape;
  for (int src = 0; src < s->numRanks; src++) {
    for (int64_t i = 0; i < n->r->numTokens[src] * s->topk; i++) {
      int e = n->r->topkIdx[src][i];
      int64_t want = e < 0 ? -1 : naiveSlot(n, src, i / s->topk, e), got = l->slotOf[src][i];
      CHECK(got == want, "case %d mode %d: rank %d token %lld k %d: slot %lld, expected %lld",
            replay, (int)n->c.mode, src, (long long)(i / s->topk), (int)(i % s->topk),
            (long long)got, (long long)want);
    }
  }
}

static void compareTables(const naive_t *n, const trefoil_layout_t *l, int replay) {
  const trefoil_shape_t *s = &n->r->shape;
  for (int dst = 0; dst < s->numRanks; dst++) {
    int64_t total = totalOf(n, dst), filled = 0, rows = 0;
    for (int e = dst * n->L; e < (dst + 1) * n->L; e++) {
      CHECK(l->expertCount[e] == allOf(n, dst, e), "case %d expert %d", replay, e);
      filled += l->expertFilled[e];
      rows += l->expertCount[e];
      if (n->c.mode == TREFOIL_HT_EXPERT_MAJOR) {
        CHECK(l->expertPadded[e] == paddedOf(n, e), "case %d expert %d", replay, e);
      }
    }
    if (n->c.mode == TREFOIL_LL_EXPERT_MAJOR) total = rows;
    CHECK(l->total[dst] == total, "case %d rank %d: total %lld, expected %lld", replay, dst,
          (long long)l->total[dst], (long long)total);
    int64_t withSlot = 0;
    for (int src = 0; src < s->numRanks; src++) {
      int64_t from = 0;
      for (int64_t t = 0; t < n->r->numTokens[src]; t++) from += uses(n, src, t, dst);
      CHECK(l->rowsFrom[dst * s->numRanks + src] == from, "case %d: %d from %d", replay, dst, src);
      if (n->c.mode == TREFOIL_LL_RANK_MAJOR) {
        int64_t first = l->firstFrom[dst * s->numRanks + src];
        CHECK(first == src * s->maxTokens, "case %d: %d from %d begins at %lld", replay, dst, src,
              (long long)first);
      }
      for (int64_t i = 0; i < n->r->numTokens[src] * s->topk; i++) {
        int e = n->r->topkIdx[src][i];
        if (e < 0 || e / n->L != dst || l->slotOf[src][i] < 0) continue;
        withSlot++;
        CHECK(l->slotOf[src][i] < l->numSlots[dst], "case %d: a slot past the end", replay);
      }
    }
    CHECK(filled == withSlot, "case %d rank %d: %lld filled, %lld slots", replay, dst,
          (long long)filled, (long long)withSlot);
  }
}

TEST(equals_the_definition) {
  trefoil_layout_t l = {0}; /* one object through all cases: nothing of a step may stay */
  for (int i = 0; i < 400; i++) {
    uint64_t state = 1000 + (uint64_t)i;
    random_case_t c;
    randomCase(&c, &state);
    int R = c.routing.shape.numRanks;
    uint8_t active[256];
    for (int j = 0; j < R * R; j++) active[j] = randomBelow(&state, 5) != 0;
    for (int mode = 0; mode < TREFOIL_NUM_MODES; mode++) {
      naive_t n = {
          &c.routing, {.mode = (trefoil_mode_t)mode}, trefoilExpertsPerRank(&c.routing.shape)};
      n.c.alignment = (size_t)1 << randomBelow(&state, 6);
      if (randomBelow(&state, 2)) n.c.maxRecv = 1 + randomBelow(&state, 60);
      n.c.drop = (int)randomBelow(&state, 2);
      n.c.zeroCopyOn = (int)randomBelow(&state, 2);
      if (randomBelow(&state, 3) == 0) n.c.active = active;
      REQUIRE(trefoilLayoutCompute(&l, &c.routing, &n.c) == TREFOIL_OK, "%s", trefoilLastError());
      compareWithNaive(&n, &l, i);
      compareTables(&n, &l, i);
    }
    freeCase(&c);
  }
  trefoilLayoutFree(&l);
  CHECK(!l.memory && !l.memoryBytes, "free");
}

/* Slots of one rank, walked in (src, token) order, ascend by one where a new token comes. */
TEST(large_flat_is_packed) {
  enum { R = 16, B = 700, K = 8 };
  uint64_t state = 5;
  random_case_t c;
  randomCaseOf(&c, &(trefoil_shape_t){R, 8, 250, K, B}, &state);
  trefoil_layout_t l = {0};
  trefoil_layout_config_t config = {.mode = TREFOIL_HT_FLAT};
  REQUIRE(trefoilLayoutCompute(&l, &c.routing, &config) == TREFOIL_OK, "%s", trefoilLastError());
  int L = l.numLocalExperts;
  for (int dst = 0; dst < R; dst++) {
    int64_t next = 0;
    for (int src = 0; src < R; src++) {
      CHECK(l.firstFrom[dst * R + src] == next, "first of %d on %d", src, dst);
      for (int64_t t = 0; t < c.numTokens[src]; t++) {
        int seen = 0;
        for (int k = 0; k < K; k++) {
          int e = c.idx[src][t * K + k];
          if (e < 0 || e / L != dst) continue;
          CHECK(l.slotOf[src][t * K + k] == next, "slot of (%d, %lld)", src, (long long)t);
          seen = 1;
        }
        next += seen;
      }
    }
    CHECK(next == l.numSlots[dst], "rank %d", dst);
  }
  trefoilLayoutFree(&l);
  freeCase(&c);
}

TEST(bad_input) {
  trefoil_layout_t l = {0};
  trefoil_layout_config_t good = {.mode = TREFOIL_HT_FLAT}, c;
  REQUIRE(trefoilLayoutCompute(&l, &hand, &good) == TREFOIL_OK, "%s", trefoilLastError());
  trefoil_layout_t was = l;
  c = good, c.mode = (trefoil_mode_t)7;
  CHECK(trefoilLayoutCompute(&l, &hand, &c) == TREFOIL_INVALID_ARGUMENT, "mode 7");
  c = good, c.alignment = 3;
  CHECK(trefoilLayoutCompute(&l, &hand, &c) == TREFOIL_INVALID_ARGUMENT, "alignment 3");
  c = good, c.maxRecv = -1;
  CHECK(trefoilLayoutCompute(&l, &hand, &c) == TREFOIL_INVALID_ARGUMENT, "maxRecv -1");
  int64_t tokens[] = {3, 4};
  trefoil_routing_t r = hand;
  r.numTokens = tokens;
  CHECK(trefoilLayoutCompute(&l, &r, &good) == TREFOIL_INVALID_ARGUMENT, "4 of 3 tokens");
  static const int32_t wild[] = {0, 4, 0, 1, 0, 1};
  const int32_t *rows[] = {wild, idx1};
  r = hand;
  r.topkIdx = rows;
  CHECK(trefoilLayoutCompute(&l, &r, &good) == TREFOIL_INVALID_ARGUMENT, "expert 4 of 4");
  CHECK(strstr(trefoilLastError(), "rank 0, token 0, k = 1"), "%s", trefoilLastError());
  r = hand;
  r.shape.numRanks = TREFOIL_LAYOUT_MAX_RANKS + 2;
  CHECK(trefoilLayoutCompute(&l, &r, &good) == TREFOIL_INVALID_ARGUMENT, "too many ranks");
  CHECK(trefoilLayoutCompute(NULL, &hand, &good) == TREFOIL_INVALID_ARGUMENT, "NULL");
  CHECK(!memcmp(&l, &was, sizeof l) && l.slotOf[1][0] == 2, "a failure changed the layout");
  trefoilLayoutFree(&l);
  trefoilLayoutFree(NULL);
}

TEST_MAIN()
