/* Cases within a profile: what is forced is there, what is not allowed is not, shapes are the profile's; and
 * matching rows by content, with every kind of row that has no partner. */
#include "test.h"

#include "validate/check_case.h"

#include <string.h>

static const ep_profile_t shaped = {
    .name = "shaped",
    .modes = 15,
    .features = EP_ALL_FEATURES,
    .open = EP_OPEN_LL_ROWS,
    .numRanks = 2,
    .ranks = {2, 4},
    .numShapes = {2, 1},
    .shapes = {{{512, 8, 2, 2}, {1024, 8, 3, 4}}, {{512, 16, 2, 4}}},
    .other = {{272, 5, 6, 3}, {272, 5, 6, 3}},
};
static const ep_profile_t open = {.name = "free", .modes = 15, .features = EP_ALL_FEATURES};

static ep_check_group_t group;
static ep_check_case_t c;

/* Whether any operation of a kind has what `has` looks for. */
typedef int (*has_t)(const ep_check_op_t *op);
static int any(ep_op_kind_t kind, has_t has) {
  int n = 0;
  for (int i = 0; i < c.numOps; i++) n += c.ops[i].kind == kind && (!has || has(&c.ops[i]));
  return n;
}
static int isF16(const ep_check_op_t *op) {
  return op->dtype == TREFOIL_F16;
}
static int isF32(const ep_check_op_t *op) {
  return op->dtype == TREFOIL_F32;
}
static int isCaller(const ep_check_op_t *op) {
  return op->quant == TREFOIL_QUANT_CALLER;
}
static int isE4m3(const ep_check_op_t *op) {
  return op->quant == TREFOIL_QUANT_E4M3;
}
static int isRounded(const ep_check_op_t *op) {
  return op->roundScales;
}
static int isNvfp4(const ep_check_op_t *op) {
  return op->quant == TREFOIL_QUANT_NVFP4;
}
static int isBackward(const ep_check_op_t *op) {
  return op->backward;
}
static int isStaged(const ep_check_op_t *op) {
  return op->sendOnly;
}
static int isWide(const ep_check_op_t *op) {
  return op->wideCounters;
}
static int isCounting(const ep_check_op_t *op) {
  return op->wantCounters == 7;
}
static int isGlobal(const ep_check_op_t *op) {
  return op->globalIds;
}

static int hasEmpty(void) {
  for (int i = 0; i < c.numRoutings; i++)
    for (int r = 0; r < group.shape.numRanks; r++)
      if (c.routings[i].numTokens[r] == 0) return 1;
  return 0;
}
static int isRagged(void) {
  for (int i = 0; i < c.numRoutings; i++)
    for (int r = 0; r < group.shape.numRanks; r++)
      if (c.routings[i].numTokens[r] != group.shape.maxTokens) return 1;
  return 0;
}
static int hasUnused(void) {
  for (int i = 0; i < c.numRoutings; i++)
    for (int r = 0; r < group.shape.numRanks; r++)
      for (int64_t j = 0; j < c.routings[i].numTokens[r] * c.routings[i].topk; j++)
        if (c.routings[i].rows[0][r][j] < 0) return 1;
  return 0;
}

/* Whether this case has a feature; -1: a matter of its numbers. */
static int uses(int feature) {
  switch (feature) {
  case EP_F_F16:
    return any(EP_OP_DISPATCH, isF16) > 0;
  case EP_F_F32:
    return any(EP_OP_DISPATCH, isF32) > 0;
  case EP_F_CALLER_SCALES:
    return any(EP_OP_DISPATCH, isCaller) > 0;
  case EP_F_E4M3:
    return any(EP_OP_DISPATCH, isE4m3) > 0;
  case EP_F_ROUND_SCALES:
    return any(EP_OP_DISPATCH, isRounded) > 0;
  case EP_F_NVFP4:
    return any(EP_OP_COMBINE, isNvfp4) > 0;
  case EP_F_BACKWARD:
    return any(EP_OP_DISPATCH, isBackward) > 0;
  case EP_F_STAGED:
    return any(EP_OP_DISPATCH, isStaged) > 0 && any(EP_OP_COMBINE, isStaged) > 0 &&
           any(EP_OP_COMPLETE, NULL) > 1;
  case EP_F_GRAPH:
    return c.captured && c.numRounds == 2;
  case EP_F_WINDOW:
    return group.useWindow;
  case EP_F_ZERO_COPY:
    return group.zeroCopy == NCCL_EP_ZERO_COPY_ON && group.useWindow;
  case EP_F_MASK:
    return any(EP_OP_MASK_UPDATE, NULL) > 0 && group.enableMask;
  case EP_F_EAGER:
    return group.highThroughput && group.maxRecv == 0;
  case EP_F_TRAP:
    return group.highThroughput && group.maxRecv == group.shape.maxTokens && !group.drop;
  case EP_F_DROP:
    return group.highThroughput && group.maxRecv == group.shape.maxTokens && group.drop;
  case EP_F_COUNTERS:
    return any(EP_OP_UPDATE, isCounting) > 0;
  case EP_F_WIDE_COUNTERS:
    return any(EP_OP_UPDATE, isWide) > 0;
  case EP_F_WIDE_IDS:
    return c.routings[0].wideIds;
  case EP_F_GLOBAL_IDS:
    return any(EP_OP_DISPATCH, isGlobal) > 0;
  case EP_F_ALIGNMENT:
    return group.handles[0].alignment > 1;
  case EP_F_OWN_MEMORY:
    return group.handles[0].ownMemory;
  case EP_F_SHARED_MEMORY:
    return group.handles[1].shareWith == 0;
  case EP_F_ALLOCATOR:
    return group.customAlloc;
  case EP_F_FRESH_HANDLE:
    return c.freshHandle;
  case EP_F_HANDLES:
    return group.numHandles == EP_MAX_HANDLES;
  case EP_F_RAGGED:
    return isRagged();
  case EP_F_EMPTY_RANKS:
    return hasEmpty();
  case EP_F_UNUSED:
    return hasUnused();
  case EP_F_PARTIAL:
    return group.partial;
  default:
    return -1;
  }
}

/* Features that come with another one. */
static int comesWith(int feature, int forced) {
  return (feature == EP_F_BACKWARD && forced == EP_F_SHARED_MEMORY) ||
         (feature == EP_F_OWN_MEMORY && forced == EP_F_SHARED_MEMORY) ||
         (feature == EP_F_HANDLES && forced == EP_F_SHARED_MEMORY) ||
         (feature == EP_F_WINDOW && forced == EP_F_ZERO_COPY) ||
         (feature == EP_F_COUNTERS && forced == EP_F_WIDE_COUNTERS) ||
         (feature == EP_F_E4M3 && forced == EP_F_ROUND_SCALES) ||
         (feature == EP_F_RAGGED && forced == EP_F_EMPTY_RANKS);
}

static void drawCell(const ep_profile_t *p, int mode, int forced) {
  ep_check_cell_t cell = {.mode = (trefoil_mode_t)mode, .numCases = 4};
  if (forced >= 0) cell.allowed = cell.forced = EP_BIT(forced);
  ep_check_choice_t choice = {.seed = 3, .minRanks = 2, .maxRanks = 4, .profile = p};
  choice.cells = &cell;
  choice.numCells = 1;
  choice.orderFree = p->open;
  const char *word = forced < 0 ? "plain" : epFeatureWord(forced);
  int times = 0;
  for (uint64_t batch = 0; batch < 4; batch++) {
    epMakeGroup(&group, &choice, batch);
    for (uint64_t i = 0; i < 4; i++) {
      REQUIRE(epMakeCase(&c, &group, batch * EP_BATCH_CASES + i) == TREFOIL_OK, "%s: %s", word,
              trefoilLastError());
      for (int f = 0; f < EP_NUM_FEATURES && !c.trapped; f++)
        if (f != forced && !comesWith(f, forced))
          CHECK(uses(f) <= 0, "%s, mode %d has %s", word, mode, epFeatureWord(f));
      times += forced < 0 || uses(forced) != 0;
      epFreeCase(&c);
    }
  }
  int rare = forced == EP_F_RAGGED || forced == EP_F_UNUSED; /* by chance */
  CHECK(rare ? times >= 12 : times == 16, "%s, mode %d: in %d of 16 cases", word, mode, times);
}

TEST(what_is_forced_is_there_and_nothing_else) {
  for (int mode = 0; mode < TREFOIL_NUM_MODES; mode++)
    for (int f = -1; f < EP_NUM_FEATURES; f++) {
      if (f >= 0 && !(epFeatureModes(f) >> mode & 1)) continue;
      drawCell(&open, mode, f);
      drawCell(&shaped, mode, f);
    }
}

TEST(shapes_are_the_profiles) {
  ep_check_choice_t choice = {.seed = 5, .minRanks = 1, .maxRanks = 8, .profile = &shaped};
  int others = 0;
  for (uint64_t batch = 0; batch < 400; batch++) {
    ep_profile_t p = shaped;
    p.features = batch % 2 ? EP_ALL_FEATURES : 0;
    choice.profile = &p;
    epMakeGroup(&group, &choice, batch);
    int ht = group.highThroughput, R = group.shape.numRanks;
    CHECK(R == 2 || R == 4, "%d ranks", R);
    int known = 0;
    for (int i = 0; i < p.numShapes[ht]; i++) {
      const ep_profile_shape_t *s = &p.shapes[ht][i];
      known |= group.hidden == s->hidden && group.shape.topk == s->topk &&
               group.shape.maxTokens == s->tokens && group.shape.numExperts == R * s->localExperts;
    }
    CHECK(known || p.features, "batch %d: hidden %d, top-%d of %d, %d tokens", (int)batch,
          (int)group.hidden, group.shape.topk, group.shape.numExperts, (int)group.shape.maxTokens);
    others += !known;
  }
  CHECK(others > 50, "outside in only %d of 400", others);
}

/* ---- Rows and sums ---- */

static int64_t to[6];
static int64_t match(const char *expected, const char *found, int *moved, int64_t *other) {
  static const int64_t used[] = {0, 1, 2, 3, 4};
  *moved = 0;
  const ep_zone_t zone = {.expected = (const uint8_t *)expected,
                          .found = (const uint8_t *)found,
                          .rowBytes = 2,
                          .used = used,
                          .numUsed = 5};
  return epMatchZone(&zone, to, moved, other);
}

TEST(rows_match_as_sets) {
  int moved;
  int64_t other;
  CHECK(match("aabbccddee", "aabbccddee", &moved, &other) == -1 && !moved, "equal");
  CHECK(match("aabbccddee", "eeaaddccbb", &moved, &other) == -1 && moved, "in another order");
  CHECK(to[0] == 1 && to[1] == 4 && to[2] == 3 && to[3] == 2 && to[4] == 0, "wrong permutation");
  CHECK(match("aaaabbbbcc", "bbaaccaabb", &moved, &other) == -1, "equal rows");
  uint8_t rows[] = "aaaabbbbcc";
  REQUIRE(epPermuteRows(rows, 2, 5, to), "no memory");
  CHECK(!memcmp(rows, "bbaaccaabb", 10), "permuted to %s", rows);
  CHECK(match("aabbccddee", "aabbccddxx", &moved, &other) == 4 && other == 4, "one is nobody's");
  CHECK(match("aabbccddee", "aabbccddaa", &moved, &other) == 4 && other == 4, "one twice");
  CHECK(match("aabbccddee", "ddbbxxaacc", &moved, &other) == 4 && other == 2, "moved, one wrong");
}

TEST(sums_have_bounds) {
  const uint16_t expected[] = {0x3f80, 0x3f80}, magnitudes[] = {0x3f80, 0x3f80};
  uint16_t found[] = {0x3f80, 0x3f81};
  double wanted, had, bound;
  int moved = 0;
  ep_sums_t s = {
      TREFOIL_BF16,          2, 4, 4, (const uint8_t *)expected, (const uint8_t *)magnitudes,
      (const uint8_t *)found};
  CHECK(epCompareSums(&s, &moved, &wanted, &had, &bound) == -1 && moved, "one unit is inside");
  found[1] = 0x3f90; /* 1.125: beyond (2 + 2) / 128 */
  CHECK(epCompareSums(&s, &moved, &wanted, &had, &bound) == 1, "16 units are not");
  CHECK(wanted == 1.0 && had == 1.125 && bound > 0.03 && bound < 0.04, "%g %g %g", wanted, had,
        bound);
  found[1] = 0x7fc0;
  CHECK(epCompareSums(&s, &moved, &wanted, &had, &bound) == 1, "a NaN is not");
}

TEST_MAIN()
