/* Legs agree: the layout's slots and the plan's traffic against the reference, which computes both
 * from routing in its own way. */
#include "trefoil/layout.h"
#include "trefoil/plan.h"
#include "trefoil/ref.h"

#include "test.h"
#include "tests/plan/cases.h"

static void compareSlots(const trefoil_case_t *c, const trefoil_layout_t *l, int rank, int replay) {
  const trefoil_shape_t *s = &c->routing.shape;
  int64_t num = trefoilRefNumSlots(c, rank), matched = 0, wanted = 0;
  CHECK(num == l->numSlots[rank], "case %d rank %d: %lld slots, the reference has %lld", replay,
        rank, (long long)l->numSlots[rank], (long long)num);
  trefoil_slot_t *slots = malloc((size_t)(num + 1) * sizeof *slots);
  REQUIRE(trefoilRefSlots(c, rank, slots) == TREFOIL_OK, "%s", trefoilLastError());
  for (int64_t i = 0; i < num; i++) {
    if (slots[i].src < 0) continue;
    wanted++;
    const int32_t *row = c->routing.topkIdx[slots[i].src] + slots[i].token * s->topk;
    for (int k = 0; k < s->topk; k++) {
      if (row[k] < 0 || trefoilRankOfExpert(s, row[k]) != rank) continue;
      if (slots[i].k >= 0 && slots[i].k != k) continue;
      matched += l->slotOf[slots[i].src][slots[i].token * s->topk + k] == i;
      break;
    }
  }
  CHECK(matched == wanted, "case %d mode %d rank %d: %lld of %lld slots agree", replay,
        (int)c->mode, rank, (long long)matched, (long long)wanted);
  free(slots);
}

static void compareCounters(const trefoil_case_t *c, const trefoil_layout_t *l, int rank,
                            int replay) {
  int L = l->numLocalExperts, R = c->routing.shape.numRanks;
  int64_t count[64] = {0}, offset[64] = {0}, total = 0, sources[64] = {0};
  trefoil_counters_t out = {count, offset, &total, sources};
  REQUIRE(trefoilRefCounters(c, rank, &out) == TREFOIL_OK, "%s", trefoilLastError());
  for (int i = 0; i < L && c->mode != TREFOIL_LL_RANK_MAJOR; i++) {
    CHECK(count[i] == l->shownCount[rank * L + i], "case %d mode %d rank %d: expert %d shows %lld",
          replay, (int)c->mode, rank, i, (long long)l->shownCount[rank * L + i]);
    if (c->mode != TREFOIL_HT_EXPERT_MAJOR) continue;
    CHECK(offset[i] == l->shownOffset[rank * L + i], "case %d rank %d expert %d", replay, rank, i);
  }
  for (int src = 0; src < R && c->mode == TREFOIL_LL_RANK_MAJOR; src++) {
    CHECK(sources[src] == l->rowsFrom[rank * R + src], "case %d: %d from %d", replay, rank, src);
  }
  if (c->mode < TREFOIL_HT_FLAT) return;
  CHECK(total == l->total[rank], "case %d mode %d rank %d: total %lld, the reference has %lld",
        replay, (int)c->mode, rank, (long long)l->total[rank], (long long)total);
}

static trefoil_case_t randomLimits(const random_case_t *r, int mode, uint64_t *state) {
  trefoil_case_t c = {.routing = r->routing, .mode = (trefoil_mode_t)mode, .width = 8};
  c.dtype = TREFOIL_BF16;
  if (mode < TREFOIL_HT_FLAT) return c;
  if (mode == TREFOIL_HT_EXPERT_MAJOR) c.alignment = (size_t)1 << randomBelow(state, 5);
  if (randomBelow(state, 2)) c.maxRecv = r->routing.shape.maxTokens + randomBelow(state, 40);
  c.drop = c.maxRecv && randomBelow(state, 2);
  return c;
}

TEST(layout_equals_reference) {
  trefoil_layout_t l = {0};
  for (int i = 0; i < 300; i++) {
    uint64_t state = 9000 + (uint64_t)i;
    random_case_t r;
    randomCase(&r, &state);
    for (int mode = 0; mode < TREFOIL_NUM_MODES; mode++) {
      trefoil_case_t c = randomLimits(&r, mode, &state);
      trefoil_layout_config_t config = {
          .mode = c.mode, .alignment = c.alignment, .maxRecv = c.maxRecv, .drop = c.drop};
      REQUIRE(trefoilLayoutCompute(&l, &r.routing, &config) == TREFOIL_OK, "%s",
              trefoilLastError());
      for (int rank = 0; rank < r.routing.shape.numRanks; rank++) {
        compareSlots(&c, &l, rank, i);
        compareCounters(&c, &l, rank, i);
      }
    }
    freeCase(&r);
  }
  trefoilLayoutFree(&l);
}

TEST(traffic_equals_reference) {
  for (int i = 0; i < 300; i++) {
    uint64_t state = 7000 + (uint64_t)i;
    random_case_t r;
    randomCase(&r, &state);
    size_t pairs = (size_t)r.routing.shape.numRanks * (size_t)r.routing.shape.numRanks;
    uint64_t *bytes = malloc(pairs * sizeof *bytes);
    int64_t *rows = malloc(pairs * sizeof *rows);
    for (int m = 0; m < TREFOIL_NUM_MODES * 8; m++) {
      trefoil_case_t c = {.routing = r.routing, .mode = (trefoil_mode_t)(m / 8), .width = 8};
      c.dtype = TREFOIL_BF16;
      c.combinePartial = c.mode == TREFOIL_LL_EXPERT_MAJOR && (m >> 1 & 1);
      c.rails = m >> 2 & 1;
      trefoil_plan_config_t config = {.mode = c.mode,
                                      .op = (trefoil_op_t)(m & 1),
                                      .variant =
                                          c.rails ? TREFOIL_VARIANT_RAILS : TREFOIL_VARIANT_OURS,
                                      .combinePartial = c.combinePartial,
                                      .rowBytes = 100};
      trefoil_plan_t *plan = NULL;
      REQUIRE(trefoilPlanCreate(&plan, &r.routing, &config) == TREFOIL_OK, "%s",
              trefoilLastError());
      CHECK(trefoilPlanTraffic(plan, -1, bytes) == TREFOIL_OK, "%s", trefoilLastError());
      CHECK(trefoilRefTraffic(&c, m & 1, rows) == TREFOIL_OK, "%s", trefoilLastError());
      for (size_t p = 0; p < pairs; p++) {
        CHECK(bytes[p] == (uint64_t)rows[p] * 100,
              "case %d mode %d op %d pair %zu: %llu bytes, %lld rows", i, (int)c.mode, m & 1, p,
              (unsigned long long)bytes[p], (long long)rows[p]);
      }
      trefoilPlanDestroy(plan);
    }
    free(bytes);
    free(rows);
    freeCase(&r);
  }
}

/* Where the layout gives a token slots on a rank, the plan brings one row of it there, by DIRECT or
 * FORWARD, and nowhere else; its combine takes it away again. */
TEST(plan_brings_what_the_layout_places) {
  trefoil_layout_t l = {0};
  for (int i = 0; i < 200; i++) {
    uint64_t state = 5000 + (uint64_t)i;
    random_case_t r;
    randomCase(&r, &state);
    const trefoil_shape_t *s = &r.routing.shape;
    int R = s->numRanks;
    trefoil_layout_config_t lc = {.mode = (trefoil_mode_t)randomBelow(&state, TREFOIL_NUM_MODES)};
    REQUIRE(trefoilLayoutCompute(&l, &r.routing, &lc) == TREFOIL_OK, "%s", trefoilLastError());
    size_t places = (size_t)R * (size_t)s->maxTokens * (size_t)R; /* [src, token, dst] */
    uint8_t *placed = calloc(places, 1), *brought = calloc(places, 1);
    trefoil_row_t *rows = malloc((size_t)(s->maxTokens * s->topk) * sizeof *rows);
    for (int src = 0; src < R; src++) {
      for (int64_t n = 0; n < r.numTokens[src] * s->topk; n++) {
        if (l.slotOf[src][n] < 0) continue;
        int dst = trefoilRankOfExpert(s, r.idx[src][n]);
        placed[((size_t)src * (size_t)s->maxTokens + (size_t)(n / s->topk)) * (size_t)R +
               (size_t)dst] = 1;
      }
    }
    for (int op = 0; op < 2; op++) {
      trefoil_plan_config_t config = {.mode = lc.mode, .op = (trefoil_op_t)op, .combinePartial = 1};
      trefoil_plan_t *plan = NULL;
      trefoil_transfer_t x;
      REQUIRE(trefoilPlanCreate(&plan, &r.routing, &config) == TREFOIL_OK, "%s",
              trefoilLastError());
      memset(brought, 0, places);
      while (trefoilPlanNext(plan, &x)) {
        if (x.phase == TREFOIL_PHASE_NET_OUT || x.phase == TREFOIL_PHASE_NET_BACK) continue;
        trefoilPlanRows(plan, rows);
        int expertRank = op ? x.src : x.dst;
        for (int64_t n = 0; n < x.rows; n++) {
          brought[((size_t)x.origin * (size_t)s->maxTokens + (size_t)rows[n].token) * (size_t)R +
                  (size_t)expertRank]++;
        }
      }
      CHECK(!memcmp(placed, brought, places), "case %d mode %d op %d", i, (int)lc.mode, op);
      trefoilPlanDestroy(plan);
    }
    free(placed);
    free(brought);
    free(rows);
    freeCase(&r);
  }
  trefoilLayoutFree(&l);
}

TEST_MAIN()
