/* The plan against a brute-force list of rows written from its description (docs/plan.md), the
 * order of the walk, dependencies, traffic, and sizes. */
#include "trefoil/plan.h"

#include "test.h"
#include "tests/plan/cases.h"

typedef struct listed_row {
  int origin, chunk, phase, src, dst;
  int64_t token;
  int k;
} listed_row_t;

typedef struct row_list {
  listed_row_t *rows;
  size_t num, room;
} row_list_t;

static void add(row_list_t *l, listed_row_t row) {
  if (l->num == l->room) {
    l->room = l->room ? 2 * l->room : 256;
    l->rows = realloc(l->rows, l->room * sizeof *l->rows);
  }
  l->rows[l->num++] = row;
}

static int compareRows(const void *a, const void *b) {
  const listed_row_t *x = a, *y = b;
  int64_t keys[7][2] = {
      {x->origin, y->origin}, {x->chunk, y->chunk}, {x->phase, y->phase}, {x->src, y->src},
      {x->dst, y->dst},       {x->token, y->token}, {x->k, y->k}};
  for (int i = 0; i < 7; i++) {
    if (keys[i][0] != keys[i][1]) return keys[i][0] < keys[i][1] ? -1 : 1;
  }
  return 0;
}

/* One hop of one token, towards the experts for dispatch, turned round for combine. */
static void addHop(row_list_t *l, const trefoil_plan_config_t *c, listed_row_t row) {
  if (c->op == TREFOIL_OP_COMBINE) {
    int src = row.src;
    row.src = row.dst;
    row.dst = src;
    if (row.phase == TREFOIL_PHASE_NET_OUT) row.phase = TREFOIL_PHASE_NET_BACK;
    if (row.phase == TREFOIL_PHASE_FORWARD) row.phase = TREFOIL_PHASE_RETURN;
  }
  add(l, row);
}

/* All rows of one token: for each expert's rank (or each entry) the last hop, for each other node
 * the net hop, both the first time the token names them. */
static void addToken(row_list_t *l, const trefoil_routing_t *r, const trefoil_plan_config_t *c,
                     int origin, int64_t token) {
  const trefoil_shape_t *s = &r->shape;
  int G = s->ranksPerNode, L = (s->numExperts + s->numRanks - 1) / s->numRanks;
  int ht = c->mode == TREFOIL_HT_FLAT || c->mode == TREFOIL_HT_EXPERT_MAJOR;
  int rails = ht || (c->variant == TREFOIL_VARIANT_RAILS && c->op == TREFOIL_OP_DISPATCH);
  int each = c->op == TREFOIL_OP_DISPATCH
                 ? c->variant == TREFOIL_VARIANT_PER_EXPERT
                 : c->mode == TREFOIL_LL_EXPERT_MAJOR && !c->combinePartial;
  int chunk = ht ? (int)(token / (c->chunkTokens ? c->chunkTokens : 64)) : 0;
  const int32_t *row = r->topkIdx[origin] + token * s->topk;
  for (int k = 0; k < s->topk; k++) {
    if (row[k] < 0) continue;
    int rank = row[k] / L, node = rank / G, rankSeen = 0, nodeSeen = 0;
    for (int j = 0; j < k; j++) {
      if (row[j] < 0) continue;
      rankSeen |= row[j] / L == rank;
      nodeSeen |= row[j] / L / G == node;
    }
    int far = rails && node != origin / G, p = node * G + origin % G;
    listed_row_t hop = {origin, chunk, TREFOIL_PHASE_NET_OUT, origin, p, token, -1};
    if (far && !nodeSeen) addHop(l, c, hop);
    hop.phase = far ? TREFOIL_PHASE_FORWARD : TREFOIL_PHASE_DIRECT;
    hop.src = far ? p : origin;
    hop.dst = rank;
    hop.k = each ? k : -1;
    if (each || !rankSeen) addHop(l, c, hop);
  }
}

static void expectRows(row_list_t *l, const trefoil_routing_t *r, const trefoil_plan_config_t *c) {
  for (int o = 0; o < r->shape.numRanks; o++) {
    for (int64_t t = 0; t < r->numTokens[o]; t++) addToken(l, r, c, o, t);
  }
  if (l->num) qsort(l->rows, l->num, sizeof *l->rows, compareRows);
}

static int expectedTier(const trefoil_shape_t *s, int src, int dst) {
  if (src == dst) return TREFOIL_TIER_SELF;
  return src / s->ranksPerNode == dst / s->ranksPerNode ? TREFOIL_TIER_NVLINK : TREFOIL_TIER_NET;
}

/* The transfer waits for exactly what must have arrived: FORWARD for the net rows into its source,
 * NET_BACK for the returns into its source; everything else for nothing. */
static void checkAfter(const trefoil_transfer_t *x) {
  int waits = x->phase == TREFOIL_PHASE_FORWARD || x->phase == TREFOIL_PHASE_NET_BACK;
  CHECK(x->numAfter == waits, "phase %d waits for %d", x->phase, x->numAfter);
  if (!waits) return;
  const trefoil_after_t *a = &x->after[0];
  CHECK(a->chunk == x->chunk && a->origin == x->origin && a->dst == x->src, "phase %d", x->phase);
  if (x->phase == TREFOIL_PHASE_FORWARD) {
    CHECK(a->phase == TREFOIL_PHASE_NET_OUT && a->src == x->origin, "src %d", a->src);
  } else {
    CHECK(a->phase == TREFOIL_PHASE_RETURN && a->src == -1, "src %d", a->src);
  }
}

static void checkWalk(trefoil_plan_t *plan, const random_case_t *c, size_t rowBytes,
                      row_list_t *seen) {
  const trefoil_shape_t *s = &c->routing.shape;
  trefoil_row_t *rows = malloc((size_t)(s->maxTokens * s->topk) * sizeof *rows);
  trefoil_transfer_t x;
  while (trefoilPlanNext(plan, &x)) {
    CHECK(x.rows > 0 && x.rowBytes == rowBytes, "%lld rows", (long long)x.rows);
    CHECK(x.tier == expectedTier(s, x.src, x.dst), "tier %d of %d -> %d", x.tier, x.src, x.dst);
    checkAfter(&x);
    trefoilPlanRows(plan, rows);
    for (int64_t i = 0; i < x.rows; i++) {
      add(seen, (listed_row_t){x.origin, x.chunk, x.phase, x.src, x.dst, rows[i].token, rows[i].k});
    }
  }
  CHECK(!trefoilPlanNext(plan, &x), "the end is not the end");
  free(rows);
}

static void checkTraffic(trefoil_plan_t *plan, const row_list_t *expected, int R, size_t rowBytes) {
  uint64_t *got = malloc((size_t)(R * R) * sizeof *got);
  uint64_t *want = malloc((size_t)(R * R) * sizeof *want);
  for (int phase = -1; phase < TREFOIL_NUM_PHASES; phase++) {
    memset(want, 0, (size_t)(R * R) * sizeof *want);
    memset(got, 0xff, (size_t)(R * R) * sizeof *got);
    for (size_t i = 0; i < expected->num; i++) {
      const listed_row_t *row = &expected->rows[i];
      if (phase < 0 || row->phase == phase) want[row->src * R + row->dst] += rowBytes;
    }
    CHECK(trefoilPlanTraffic(plan, phase, got) == TREFOIL_OK, "%s", trefoilLastError());
    CHECK(!memcmp(want, got, (size_t)(R * R) * sizeof *got), "phase %d", phase);
  }
  free(got);
  free(want);
}

static void checkPlan(const random_case_t *c, const trefoil_plan_config_t *config, int replay) {
  row_list_t expected = {0}, seen = {0}, parts = {0};
  expectRows(&expected, &c->routing, config);
  trefoil_plan_t *plan = NULL;
  REQUIRE(trefoilPlanCreate(&plan, &c->routing, config) == TREFOIL_OK, "%s", trefoilLastError());
  checkWalk(plan, c, config->rowBytes, &seen);
  /* equal to the sorted list: the right rows, and in the promised order */
  int same = seen.num == expected.num;
  for (size_t i = 0; same && i < seen.num; i++) {
    same = !compareRows(&seen.rows[i], &expected.rows[i]);
  }
  CHECK(same, "case %d, mode %d, op %d, variant %d, partial %d, chunk %d: %zu rows, expected %zu",
        replay, (int)config->mode, (int)config->op, (int)config->variant, config->combinePartial,
        config->chunkTokens, seen.num, expected.num);
  int R = c->routing.shape.numRanks;
  for (int first = 0; first < R; first += 3) { /* origins in parts give the same walk */
    trefoilPlanRewindTo(plan, first, 3);
    checkWalk(plan, c, config->rowBytes, &parts);
  }
  same = parts.num == seen.num;
  for (size_t i = 0; same && i < seen.num; i++) {
    same = !compareRows(&seen.rows[i], &parts.rows[i]);
  }
  CHECK(same, "case %d: the walk in parts differs", replay);
  checkTraffic(plan, &expected, R, config->rowBytes);
  trefoilPlanDestroy(plan);
  free(expected.rows);
  free(seen.rows);
  free(parts.rows);
}

TEST(rows_equal_brute_force) {
  static const int chunks[] = {0, 1, 7, 64, 1000};
  for (int i = 0; i < 300; i++) {
    uint64_t state = (uint64_t)i;
    random_case_t c;
    randomCase(&c, &state);
    for (int m = 0; m < TREFOIL_NUM_MODES * 12; m++) {
      trefoil_plan_config_t config = {.mode = (trefoil_mode_t)(m / 12),
                                      .op = (trefoil_op_t)(m & 1),
                                      .variant = (trefoil_variant_t)(m / 4 % 3),
                                      .combinePartial = m >> 1 & 1,
                                      .chunkTokens = chunks[randomBelow(&state, 5)],
                                      .rowBytes = 1 + (size_t)randomBelow(&state, 30000)};
      checkPlan(&c, &config, i);
    }
    freeCase(&c);
  }
}

/* 2 nodes of 2 ranks, 1 expert each. Rank 1's token goes to experts 3, 0, 2: in its own node rank 0
 * directly; node 1 once over the net to p = 1*2 + rail(1) = 3, which keeps a copy and forwards one
 * to rank 2. Combine turns every arrow. LL's dispatch by rails is the same. */
TEST(two_nodes_by_hand) {
  static const int32_t row[] = {3, 0, 2};
  const int32_t *const idx[] = {NULL, row, NULL, NULL};
  const int64_t numTokens[] = {0, 1, 0, 0};
  trefoil_routing_t r = {{4, 2, 4, 3, 8}, numTokens, idx};
  static const int expected[2][4][4] = {/* phase, src, dst, tier */
                                        {{TREFOIL_PHASE_DIRECT, 1, 0, TREFOIL_TIER_NVLINK},
                                         {TREFOIL_PHASE_NET_OUT, 1, 3, TREFOIL_TIER_NET},
                                         {TREFOIL_PHASE_FORWARD, 3, 2, TREFOIL_TIER_NVLINK},
                                         {TREFOIL_PHASE_FORWARD, 3, 3, TREFOIL_TIER_SELF}},
                                        {{TREFOIL_PHASE_DIRECT, 0, 1, TREFOIL_TIER_NVLINK},
                                         {TREFOIL_PHASE_RETURN, 2, 3, TREFOIL_TIER_NVLINK},
                                         {TREFOIL_PHASE_RETURN, 3, 3, TREFOIL_TIER_SELF},
                                         {TREFOIL_PHASE_NET_BACK, 3, 1, TREFOIL_TIER_NET}}};
  for (int way = 0; way < 3; way++) { /* HT's operations, LL's dispatch by rails */
    trefoil_plan_config_t config = {.mode = TREFOIL_HT_FLAT, .op = way == 1, .rowBytes = 9};
    if (way == 2) config.mode = TREFOIL_LL_RANK_MAJOR, config.variant = TREFOIL_VARIANT_RAILS;
    trefoil_plan_t *plan = NULL;
    REQUIRE(trefoilPlanCreate(&plan, &r, &config) == TREFOIL_OK, "%s", trefoilLastError());
    trefoil_transfer_t x;
    for (int i = 0; i < 4; i++) {
      REQUIRE(trefoilPlanNext(plan, &x), "way %d ends at transfer %d", way, i);
      const int *e = expected[way == 1][i];
      CHECK(x.phase == e[0] && x.src == e[1] && x.dst == e[2] && x.tier == e[3],
            "way %d transfer %d: phase %d, %d -> %d, tier %d", way, i, x.phase, x.src, x.dst,
            x.tier);
      CHECK(x.origin == 1 && x.rows == 1 && x.rowBytes == 9 && x.chunk == 0, "transfer %d", i);
    }
    CHECK(!trefoilPlanNext(plan, &x), "way %d has a fifth transfer", way);
    trefoilPlanDestroy(plan);
  }
}

/* What a transfer waits for comes before it in the walk, within its (origin, chunk). */
TEST(dependencies_come_first) {
  uint64_t state = 77;
  random_case_t c;
  randomCaseOf(&c, &(trefoil_shape_t){12, 3, 30, 6, 200}, &state);
  for (int op = 0; op < 2; op++) {
    trefoil_plan_config_t config = {.mode = TREFOIL_HT_FLAT, .op = (trefoil_op_t)op, .rowBytes = 1};
    trefoil_plan_t *plan = NULL;
    REQUIRE(trefoilPlanCreate(&plan, &c.routing, &config) == TREFOIL_OK, "%s", trefoilLastError());
    trefoil_transfer_t x, last = {.origin = -1};
    int64_t into[12] = {0}; /* rows of the waited-for phase into each rank, of this chunk */
    int numWaiting = 0;
    while (trefoilPlanNext(plan, &x)) {
      if (x.origin != last.origin || x.chunk != last.chunk) memset(into, 0, sizeof into);
      if (x.phase == (op ? TREFOIL_PHASE_RETURN : TREFOIL_PHASE_NET_OUT)) into[x.dst] += x.rows;
      if (x.numAfter) {
        numWaiting++;
        CHECK(into[x.src] >= x.rows, "phase %d from %d: %lld rows, %lld before it", x.phase, x.src,
              (long long)x.rows, (long long)into[x.src]);
      }
      last = x;
    }
    CHECK(numWaiting > 50, "only %d transfers wait", numWaiting);
    trefoilPlanDestroy(plan);
  }
  freeCase(&c);
}

/* Every token names K experts of a rank each: K*N*R rows leave in LL; with one expert a rank exact
 * and per-token counts agree. */
TEST(a_thousand_ranks) {
  enum { R = 1024, B = 128, K = 8 };
  int64_t numTokens[R];
  const int32_t *idx[R];
  int32_t *all = malloc(sizeof(int32_t) * R * B * K);
  for (int r = 0; r < R; r++) {
    numTokens[r] = B;
    idx[r] = all + r * B * K;
    for (int i = 0; i < B * K; i++)
      all[r * B * K + i] = (r * 31 + i * 127) % R; /* gcd(127, R) = 1 */
  }
  trefoil_routing_t routing = {{R, 8, R, K, B}, numTokens, idx};
  for (int mode = 0; mode < TREFOIL_NUM_MODES; mode++) {
    trefoil_plan_config_t config = {.mode = (trefoil_mode_t)mode, .rowBytes = 1};
    trefoil_plan_t *plan = NULL;
    REQUIRE(trefoilPlanCreate(&plan, &routing, &config) == TREFOIL_OK, "%s", trefoilLastError());
    int64_t arrived = 0;
    trefoil_transfer_t x;
    while (trefoilPlanNext(plan, &x)) arrived += x.phase == TREFOIL_PHASE_NET_OUT ? 0 : x.rows;
    CHECK(arrived == (int64_t)R * B * K, "mode %d: %lld rows", mode, (long long)arrived);
    trefoilPlanDestroy(plan);
  }
  free(all);
}

TEST(nothing_to_send) {
  const int64_t numTokens[] = {0, 1};
  static const int32_t unused[] = {-1, -1};
  const int32_t *const idx[] = {NULL, unused};
  trefoil_routing_t r = {{2, 1, 4, 2, 4}, numTokens, idx};
  trefoil_plan_config_t config = {.mode = TREFOIL_HT_FLAT, .rowBytes = 1};
  trefoil_plan_t *plan = NULL;
  REQUIRE(trefoilPlanCreate(&plan, &r, &config) == TREFOIL_OK, "%s", trefoilLastError());
  trefoil_transfer_t x;
  CHECK(!trefoilPlanNext(plan, &x), "a transfer from %d", x.src);
  trefoilPlanDestroy(plan);
}

/* Chunks of a token that go to ranks past the first 64: what the chunk before reached is forgotten. */
TEST(no_transfer_without_rows) {
  enum { R = 80 };
  int64_t numTokens[R] = {3};
  static const int32_t row0[] = {79, 70, 1};
  const int32_t *idx[R] = {row0};
  trefoil_routing_t r = {{R, 4, R, 1, 3}, numTokens, idx};
  trefoil_plan_config_t config = {.mode = TREFOIL_HT_FLAT, .rowBytes = 1, .chunkTokens = 1};
  trefoil_plan_t *plan = NULL;
  REQUIRE(trefoilPlanCreate(&plan, &r, &config) == TREFOIL_OK, "%s", trefoilLastError());
  trefoil_transfer_t x;
  int num = 0;
  for (; trefoilPlanNext(plan, &x); num++) CHECK(x.rows == 1, "%d rows to %d", (int)x.rows, x.dst);
  CHECK(num == 5, "%d transfers: two out, two forwarded, one direct", num);
  trefoilPlanDestroy(plan);
}

TEST(rewound_in_the_middle) {
  const int64_t numTokens[] = {2, 1};
  static const int32_t row0[] = {0, 2, 1, 3}, row1[] = {2, 0};
  const int32_t *const idx[] = {row0, row1};
  trefoil_routing_t r = {{2, 2, 4, 2, 2}, numTokens, idx};
  for (int mode = 0; mode < TREFOIL_NUM_MODES; mode++) {
    trefoil_plan_config_t config = {.mode = (trefoil_mode_t)mode, .rowBytes = 1};
    trefoil_plan_t *plan = NULL;
    REQUIRE(trefoilPlanCreate(&plan, &r, &config) == TREFOIL_OK, "%s", trefoilLastError());
    trefoil_transfer_t first, again;
    CHECK(trefoilPlanNext(plan, &first) && first.src == 0 && first.dst == 0, "mode %d", mode);
    trefoilPlanRewind(plan);
    CHECK(trefoilPlanNext(plan, &again), "mode %d: nothing after rewinding", mode);
    CHECK(again.src == first.src && again.dst == first.dst && again.rows == first.rows,
          "mode %d: from %d to %d after rewinding", mode, again.src, again.dst);
    trefoilPlanDestroy(plan);
  }
}

TEST(bad_input) {
  const int64_t numTokens[] = {1};
  static const int32_t row[] = {0};
  const int32_t *const idx[] = {row};
  trefoil_routing_t r = {{1, 1, 1, 1, 1}, numTokens, idx};
  trefoil_plan_t *const untouched = (trefoil_plan_t *)&r;
  trefoil_plan_t *plan = untouched;
  trefoil_plan_config_t bad[] = {{.mode = (trefoil_mode_t)4},
                                 {.op = (trefoil_op_t)2},
                                 {.variant = (trefoil_variant_t)-1},
                                 {.variant = (trefoil_variant_t)3},
                                 {.chunkTokens = -1}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    CHECK(trefoilPlanCreate(&plan, &r, &bad[i]) == TREFOIL_INVALID_ARGUMENT, "config %zu", i);
  }
  trefoil_plan_config_t good = {.rowBytes = 1};
  CHECK(trefoilPlanCreate(NULL, &r, &good) == TREFOIL_INVALID_ARGUMENT, "no out-parameter");
  CHECK(trefoilPlanCreate(&plan, NULL, &good) == TREFOIL_INVALID_ARGUMENT, "no routing");
  CHECK(trefoilPlanCreate(&plan, &r, NULL) == TREFOIL_INVALID_ARGUMENT, "no config");
  CHECK(plan == untouched, "a failure wrote its out-parameter");
  REQUIRE(trefoilPlanCreate(&plan, &r, &good) == TREFOIL_OK, "%s", trefoilLastError());
  uint64_t bytes;
  CHECK(trefoilPlanTraffic(plan, 5, &bytes) == TREFOIL_INVALID_ARGUMENT, "phase 5");
  CHECK(trefoilPlanTraffic(plan, -1, NULL) == TREFOIL_INVALID_ARGUMENT, "no output");
  trefoilPlanRewindTo(plan, 5, 7);
  trefoil_transfer_t x;
  CHECK(!trefoilPlanNext(plan, &x), "origins past the last");
  trefoilPlanDestroy(plan);
  trefoilPlanDestroy(NULL);
}

TEST_MAIN()
