/* Traces: the generators do what they say and are fixed by position, files come back as they were
 * written, and everything malformed is refused with a sentence. */
#include "trefoil/trace.h"

#include "plan/npy.h"
#include "plan/philox.h"
#include "plan/trace_import.h"
#include "test.h"

#include <math.h>
#include <unistd.h>

static trefoil_trace_spec_t baseSpec(void) {
  trefoil_trace_spec_t s = {.shape = {8, 4, 64, 6, 100}, .numSteps = 5, .seed = 42};
  return s;
}

static const trefoil_trace_t *make(const trefoil_trace_spec_t *spec) {
  const trefoil_trace_t *t = NULL;
  CHECK(trefoilTraceGenerate(&t, spec) == TREFOIL_OK, "%s", trefoilLastError());
  return t;
}

static trefoil_trace_stats_t describe(const trefoil_trace_spec_t *spec) {
  trefoil_trace_stats_t stats = {0};
  const trefoil_trace_t *t = make(spec);
  if (!t) return stats;
  CHECK(trefoilTraceDescribe(t, -1, &stats) == TREFOIL_OK, "%s", trefoilLastError());
  trefoilTraceDestroy(t);
  return stats;
}

/* Known answers of Philox4x32-10 from the authors' test vectors. */
TEST(philox_known_answers) {
  ep_philox_t a = epPhilox(0, 0, 0, 0, 0);
  CHECK(a.word[0] == 0x6627e8d5u && a.word[1] == 0xe169c58du && a.word[2] == 0xbc57ac4cu &&
            a.word[3] == 0x9b00dbd8u,
        "%08x", a.word[0]);
  a = epPhilox(UINT64_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX);
  CHECK(a.word[0] == 0x408f276du && a.word[1] == 0x41c83b0eu && a.word[2] == 0xa20bc7c6u &&
            a.word[3] == 0x6d5451fdu,
        "%08x", a.word[0]);
  a = epPhilox(0x299f31d0a4093822u, 0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u);
  CHECK(a.word[0] == 0xd16cfe09u && a.word[1] == 0x94fdcceb, "%08x", a.word[0]);
}

/* A row depends on (seed, step, rank, token) alone: not on how many ranks, tokens or steps there
 * are, as long as the experts' weights are the same. */
TEST(position_fixes_a_row) {
  trefoil_trace_spec_t small = baseSpec(), large = baseSpec(), other = baseSpec();
  small.popularity = large.popularity = other.popularity = TREFOIL_POPULARITY_ZIPF;
  small.skew = large.skew = other.skew = 1.1;
  large.shape.numRanks = 16;
  large.shape.maxTokens = 300;
  large.numSteps = 7;
  other.seed = 43;
  const trefoil_trace_t *a = make(&small), *b = make(&large), *c = make(&other);
  REQUIRE(a && b && c, "no traces");
  int differs = 0;
  for (int step = 0; step < 5; step++) {
    trefoil_routing_t ra, rb, rc;
    trefoilTraceRouting(a, step, &ra);
    trefoilTraceRouting(b, step, &rb);
    trefoilTraceRouting(c, step, &rc);
    for (int r = 0; r < 8; r++) {
      CHECK(!memcmp(ra.topkIdx[r], rb.topkIdx[r], 100 * 6 * 4), "step %d rank %d", step, r);
      differs += memcmp(ra.topkIdx[r], rc.topkIdx[r], 100 * 6 * 4) != 0;
    }
  }
  CHECK(differs == 40, "another seed gives %d other blocks of 40", differs);
  trefoilTraceDestroy(a);
  trefoilTraceDestroy(b);
  trefoilTraceDestroy(c);
}

TEST(weights_sum_to_one) {
  trefoil_trace_spec_t s = baseSpec();
  s.withWeights = 1;
  const trefoil_trace_t *t = make(&s);
  REQUIRE(t && t->topkWeights, "no trace with weights");
  for (int64_t row = 0; row < 100; row++) {
    double sum = 0;
    for (int k = 0; k < 6; k++) {
      float w = t->topkWeights[row * 6 + k];
      CHECK(w > 0 && w < 1, "row %lld: weight %g", (long long)row, w);
      sum += w;
    }
    CHECK(fabs(sum - 1) < 1e-6, "row %lld: weights sum to %.9g", (long long)row, sum);
  }
  trefoilTraceDestroy(t);
}

/* How many of the groups of `size` experts a row has experts of. */
static int groupsOf(const int32_t *row, int topk, int size) {
  uint64_t seen = 0;
  for (int k = 0; k < topk; k++)
    if (row[k] >= 0) seen |= UINT64_C(1) << (row[k] / size);
  return __builtin_popcountll(seen);
}

/* 64 experts in 8 groups, 4 a row: no row has more, all experts are as popular, and a row that fills
 * its groups has each of their experts once. */
TEST(groups_limit_a_row) {
  trefoil_trace_spec_t s = baseSpec();
  s.shape.maxTokens = 2000;
  s.numGroups = 8;
  s.topkGroups = 4;
  trefoil_trace_stats_t d = describe(&s);
  CHECK(d.maxOverMeanExperts < 1.06 && d.giniExperts < 0.02, "%g %g", d.maxOverMeanExperts,
        d.giniExperts);
  const trefoil_trace_t *t = make(&s), *zipf, *full;
  s.popularity = TREFOIL_POPULARITY_ZIPF;
  s.skew = 2;
  zipf = make(&s);
  s.popularity = TREFOIL_POPULARITY_HOT_EXPERT;
  s.skew = 1e6;
  s.hot = 63;
  s.shape.topk = 32;
  full = make(&s);
  REQUIRE(t && zipf && full, "no traces");
  int most = 0, allFour = 0;
  for (int64_t row = 0; row < 10000; row++) {
    int n = groupsOf(t->topkIdx + row * 6, 6, 8), m = groupsOf(zipf->topkIdx + row * 6, 6, 8);
    most = n > most ? n : most;
    most = m > most ? m : most;
    allFour += n == 4;
    const int32_t *all = full->topkIdx + row * 32;
    CHECK(groupsOf(all, 32, 8) == 4, "row %lld", (long long)row);
    uint64_t seen = 0;
    for (int k = 0; k < 32; k++) seen |= all[k] < 0 ? 0 : UINT64_C(1) << all[k];
    CHECK(__builtin_popcountll(seen) == 32 && seen >> 63, "row %lld: twice", (long long)row);
  }
  CHECK(most == 4, "%d groups in a row", most);
  /* 6 of 32: none of 8 is left out in 1 - 4 C(24,6)/C(32,6) + 6 C(16,6)/C(32,6) - ... = 0.4594 */
  CHECK(fabs(allFour / 1e4 - 0.4594) < 0.025, "%d rows have experts of all 4", allFour);
  trefoilTraceDestroy(t);
  trefoilTraceDestroy(zipf);
  trefoilTraceDestroy(full);
}

static void expectGroups(int groups, int most, int topk, const char *sentence) {
  trefoil_trace_spec_t s = baseSpec();
  s.numGroups = groups;
  s.topkGroups = most;
  s.shape.topk = topk;
  const trefoil_trace_t *t = NULL;
  CHECK(trefoilTraceGenerate(&t, &s) == TREFOIL_INVALID_ARGUMENT && !t, "%d of %d", most, groups);
  CHECK(strstr(trefoilLastError(), sentence), "%s", trefoilLastError());
}

TEST(groups_that_cannot_be) {
  expectGroups(-1, 1, 6, "groups -1");
  expectGroups(65, 1, 6, "groups 65");
  expectGroups(8, 0, 6, "groups of a row 0");
  expectGroups(8, 9, 6, "groups of a row 9");
  expectGroups(7, 7, 6, "7 groups of 64 experts");
  expectGroups(16, 1, 6, "1 groups must hold top-6");
}

TEST(uniform_is_even) {
  trefoil_trace_spec_t s = baseSpec();
  s.shape.maxTokens = 2000;
  trefoil_trace_stats_t d = describe(&s);
  CHECK(d.numTokens == 8 * 2000 * 5 && d.numEntries == d.numTokens * 6, "counts");
  /* 7500 entries an expert, sd 87: 5 sd */
  CHECK(d.maxOverMeanExperts < 1.06 && d.giniExperts < 0.02, "%g %g", d.maxOverMeanExperts,
        d.giniExperts);
  /* 6 of 64 experts, 8 a rank: 8 * (1 - C(56,6)/C(64,6)) = 8 * (1 - 0.43304) = 4.5357 ranks */
  CHECK(fabs(d.ranksPerToken - 4.5357) < 0.03, "%g ranks per token", d.ranksPerToken);
  /* 32 of 64 experts a node: 2 * (1 - C(32,6)/C(64,6)) = 2 * (1 - 0.012087) */
  CHECK(fabs(d.nodesPerToken - 1.9758) < 0.01, "%g nodes per token", d.nodesPerToken);
  CHECK(fabs((double)d.rowsNetOnce / (double)d.numTokens - 0.98791) < 0.005, "one other node");
  double rows = (double)(d.rowsSelf + d.rowsNvlink + d.rowsNet);
  CHECK(fabs(rows / (double)d.numTokens - d.ranksPerToken) < 1e-9, "tiers");
  CHECK(fabs((double)d.rowsSelf / rows - 1.0 / 8) < 0.01, "%g", (double)d.rowsSelf / rows);
  CHECK(fabs((double)d.rowsNet / rows - 4.0 / 8) < 0.01, "%g", (double)d.rowsNet / rows);
}

TEST(skew_shows) {
  trefoil_trace_spec_t s = baseSpec();
  s.shape.topk = 1; /* one draw a row, so the shares are exact */
  s.shape.maxTokens = 4000;
  s.popularity = TREFOIL_POPULARITY_ZIPF;
  s.skew = 1;
  double harmonic = 0;
  for (int i = 1; i <= 64; i++) harmonic += 1.0 / i;
  trefoil_trace_stats_t d = describe(&s);
  CHECK(fabs(d.maxOverMeanExperts / (64 / harmonic) - 1) < 0.03, "%g", d.maxOverMeanExperts);
  s.popularity = TREFOIL_POPULARITY_HOT_EXPERT;
  s.hot = 37;
  s.skew = 21; /* 21 of 84: a quarter of all entries */
  d = describe(&s);
  CHECK(d.hottestExpert == 37 && fabs(d.maxOverMeanExperts / 16 - 1) < 0.03, "expert %d, %g",
        d.hottestExpert, d.maxOverMeanExperts);
  s.popularity = TREFOIL_POPULARITY_HOT_RANK;
  s.hot = 5;
  s.skew = 7; /* 56 of 112: half */
  d = describe(&s);
  CHECK(d.hottestRank == 5 && fabs(d.maxOverMeanRanks / 4 - 1) < 0.03, "rank %d, %g", d.hottestRank,
        d.maxOverMeanRanks);
}

/* Rows stay without duplicates where few experts have all the weight, or none is left. */
TEST(extreme_weights) {
  trefoil_trace_spec_t s = baseSpec();
  s.popularity = TREFOIL_POPULARITY_HOT_RANK;
  s.skew = 1e6;
  trefoil_trace_stats_t d = describe(&s); /* 6 of the 8 experts of rank 0, nearly always */
  CHECK(d.ranksPerToken < 1.01, "%g", d.ranksPerToken);
  s.skew = 0; /* no experts of the hot rank at all */
  d = describe(&s);
  CHECK(d.numEntries == d.numTokens * 6, "entries");
  s.shape.numExperts = 4;
  s.shape.numRanks = 4;
  s.shape.topk = 4; /* top-4 of 4 experts, one of weight 0: 3 entries a row */
  d = describe(&s);
  CHECK(d.numEntries == d.numTokens * 3, "%lld entries of %lld tokens", (long long)d.numEntries,
        (long long)d.numTokens);
}

TEST(specifications_that_make_no_trace) {
  const trefoil_trace_t *t = NULL;
  trefoil_trace_spec_t s = baseSpec();
  s.shape.numExperts = 4; /* top-6 */
  CHECK(trefoilTraceGenerate(&t, &s) == TREFOIL_INVALID_ARGUMENT, "top-6 of 4");
  s = baseSpec();
  s.seed = UINT64_MAX; /* its provenance could not be written as JSON */
  CHECK(trefoilTraceGenerate(&t, &s) == TREFOIL_INVALID_ARGUMENT, "a seed of 64 bits");
  s = baseSpec();
  s.withWeights = 1;
  t = make(&s);
  REQUIRE(t, "no trace");
  float *weights = (float *)t->topkWeights; /* as a caller's own might be */
  weights[7] = NAN;
  const trefoil_trace_t *copy = NULL;
  CHECK(trefoilTraceCreate(&copy, t) == TREFOIL_INVALID_ARGUMENT, "NaN weights");
  CHECK(strstr(trefoilLastError(), "row 1, k = 1"), "%s", trefoilLastError());
  trefoilTraceDestroy(t);
}

/* 64 experts, 160 physical: experts below 32 have three copies, the others two. Every entry stays an
 * entry of its expert, and the copies of an expert get alike: n entries on c copies have a standard
 * deviation of sqrt(n / c (1 - 1/c)), and 6 of them are never reached by chance. */
TEST(redundant_copies) {
  trefoil_trace_spec_t spec = baseSpec();
  spec.unusedFraction = 0.1;
  spec.withWeights = 1;
  const trefoil_trace_t *from = make(&spec), *to = NULL;
  REQUIRE(from, "no trace");
  CHECK(trefoilTraceCopies(&to, from, 160, 9) == TREFOIL_OK, "%s", trefoilLastError());
  REQUIRE(to, "no copies");
  CHECK(to->shape.numExperts == 160 && to->numTokens == from->numTokens, "another shape");
  int64_t seen[160] = {0}, entries = from->numTokens * 6;
  for (int64_t i = 0; i < entries; i++) {
    int32_t e = from->topkIdx[i], c = to->topkIdx[i];
    CHECK(e < 0 ? c == -1 : c >= 0 && c < 160 && c % 64 == e, "entry %d: %d to %d", (int)i, e, c);
    if (c >= 0 && c < 160) seen[c]++;
  }
  for (int e = 0; e < 64; e++) {
    int copies = e < 32 ? 3 : 2;
    double all = 0;
    for (int j = 0; j < copies; j++) all += (double)seen[e + 64 * j];
    double share = all / copies, most = 6 * sqrt(share * (1 - 1.0 / copies));
    for (int j = 0; j < copies; j++)
      CHECK(fabs((double)seen[e + 64 * j] - share) < most, "expert %d copy %d: %lld of %g", e, j,
            (long long)seen[e + 64 * j], all);
  }
  CHECK(!memcmp(from->topkWeights, to->topkWeights, (size_t)entries * 4), "weights");
  const trefoil_trace_t *none = NULL;
  CHECK(trefoilTraceCopies(&none, from, 63, 9) == TREFOIL_INVALID_ARGUMENT && !none, "63 of 64");
  CHECK(strstr(trefoilLastError(), "63 physical experts"), "%s", trefoilLastError());
  trefoilTraceDestroy(from);
  trefoilTraceDestroy(to);
}

/* Rows of the busiest rank over the mean, in entries. */
static double busiestRank(const trefoil_trace_t *t) {
  int64_t load[8] = {0}, most = 0, all = 0;
  for (int64_t i = 0; i < t->numTokens * t->shape.topk; i++)
    if (t->topkIdx[i] >= 0) load[trefoilRankOfExpert(&t->shape, t->topkIdx[i])]++;
  for (int r = 0; r < 8; r++) {
    most = load[r] > most ? load[r] : most;
    all += load[r];
  }
  return (double)most * 8 / (double)all;
}

/* The hottest experts have copies, on ranks of their own, and the busiest rank comes near the mean;
 * copies in turn leave it busy. Every entry stays one of its expert. */
TEST(copies_placed_by_load) {
  trefoil_trace_spec_t spec = baseSpec();
  spec.popularity = TREFOIL_POPULARITY_ZIPF;
  spec.skew = 1;
  const trefoil_trace_t *from = make(&spec), *placed = NULL, *inTurn = NULL;
  REQUIRE(from, "no trace");
  trefoil_placement_t how = {.physicalExperts = 96, .seed = 9};
  CHECK(trefoilTracePlaced(&placed, from, &how) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(trefoilTraceCopies(&inTurn, from, 96, 9) == TREFOIL_OK, "%s", trefoilLastError());
  REQUIRE(placed && inTurn, "no copies");
  int32_t of[96];
  int64_t load[64] = {0};
  int copies[64] = {0}, hottest = 0;
  for (int p = 0; p < 96; p++) of[p] = -1;
  for (int64_t i = 0; i < from->numTokens * 6; i++) {
    int32_t e = from->topkIdx[i], p = placed->topkIdx[i];
    REQUIRE(p >= 0 && p < 96 && (of[p] < 0 || of[p] == e), "%d of %d and %d", p, of[p], e);
    copies[e] += of[p] < 0;
    of[p] = e;
    load[e]++;
  }
  for (int p = 0; p < 96; p++)
    for (int q = p + 1; q / 12 == p / 12; q++)
      CHECK(of[p] != of[q], "expert %d twice on rank %d", of[p], p / 12);
  for (int e = 1; e < 64; e++) hottest = load[e] > load[hottest] ? e : hottest;
  for (int e = 0; e < 64; e++) {
    CHECK(copies[e] >= 1 && copies[e] <= copies[hottest], "expert %d: %d copies", e, copies[e]);
  }
  CHECK(copies[hottest] > 2, "the hottest has %d copies", copies[hottest]);
  CHECK(busiestRank(placed) < 1.05, "by load: %g", busiestRank(placed));
  CHECK(busiestRank(inTurn) > 1.3, "in turn: %g", busiestRank(inTurn));
  const trefoil_trace_t *none = NULL;
  how.physicalExperts = 98;
  CHECK(trefoilTracePlaced(&none, from, &how) == TREFOIL_INVALID_ARGUMENT && !none, "98 on 8");
  CHECK(strstr(trefoilLastError(), "a multiple of the 8 ranks"), "%s", trefoilLastError());
  trefoilTraceDestroy(from);
  trefoilTraceDestroy(placed);
  trefoilTraceDestroy(inTurn);
}

/* One entry a row; expert e has load[e] rows. */
static const trefoil_trace_t *withLoads(const int *load, int experts, int ranks) {
  static int32_t idx[1024];
  static int64_t offsets[65];
  int64_t n = 0;
  for (int e = 0; e < experts; e++)
    for (int i = 0; i < load[e]; i++) idx[n++] = e;
  for (int r = 0; r <= ranks; r++) offsets[r] = n * r / ranks;
  trefoil_trace_t contents = {.shape = {ranks, ranks / 2, experts, 1, 1024}, .numSteps = 1};
  contents.offsets = offsets;
  contents.topkIdx = idx;
  const trefoil_trace_t *made = NULL;
  CHECK(trefoilTraceCreate(&made, &contents) == TREFOIL_OK, "%s", trefoilLastError());
  return made;
}

/* Which expert each physical one is a copy of. */
static void copiesOf(const trefoil_trace_t *from, const trefoil_trace_t *to, int *of) {
  for (int p = 0; p < to->shape.numExperts; p++) of[p] = -1;
  for (int64_t i = 0; i < from->numTokens; i++) of[to->topkIdx[i]] = from->topkIdx[i];
}

/* By hand: 8 experts in 4 groups of loads 100, 60, 40, 20 on 2 nodes of 2 ranks, 12 physical.
 * Groups: {0, 3} to node 0 and {1, 2} to node 1: 120 and 100. Node 0 has experts 0 (90), 1 (10),
 * 6 (16), 7 (4) in 6 slots: both copies more are of 0, 30 each. They go to ranks 0, 1, 0; 6 to rank 1
 * (30), 1 to rank 1 (46), 7 to rank 0 (60), which has the last slot: 64 and 56. Node 1 has 2 (40),
 * 3 (20), 4 (25), 5 (15): copies more of 2 (20 each) and of 4 (12.5 each); 2 to rank 2 and 3, 3 to
 * rank 2, 5 to rank 3 (35), 4 to rank 3 (47.5) and to rank 2 (52.5). */
TEST(copies_placed_by_groups_as_by_hand) {
  const int load[] = {90, 10, 40, 20, 25, 15, 16, 4};
  const int expected[4][3] = {{0, 0, 7}, {0, 6, 1}, {2, 3, 4}, {2, 5, 4}};
  const trefoil_trace_t *from = withLoads(load, 8, 4), *placed = NULL;
  trefoil_placement_t how = {.physicalExperts = 12, .seed = 1, .numGroups = 4, .numNodes = 2};
  REQUIRE(from, "no trace");
  CHECK(trefoilTracePlaced(&placed, from, &how) == TREFOIL_OK, "%s", trefoilLastError());
  REQUIRE(placed, "no copies");
  int of[12];
  copiesOf(from, placed, of);
  for (int p = 0; p < 12; p++)
    CHECK(of[p] == expected[p / 3][p % 3], "place %d has expert %d", p, of[p]);
  trefoilTraceDestroy(placed);
  trefoilTraceDestroy(from);
}

/* Entries of the busiest rank of any size, over the mean. */
static double busiestOf(const trefoil_trace_t *t) {
  trefoil_trace_stats_t stats;
  CHECK(trefoilTraceDescribe(t, -1, &stats) == TREFOIL_OK, "%s", trefoilLastError());
  return stats.maxOverMeanRanks;
}

/* Each group is whole on one node, each expert has a copy, and no placement is worse than copies in
 * turn; a token of 4 of 8 groups reaches at most 4 nodes. */
TEST(copies_placed_by_groups) {
  for (int nodes = 1; nodes <= 8; nodes *= 2) {
    trefoil_trace_spec_t spec = {.numSteps = 2, .seed = 5, .numGroups = 8, .topkGroups = 4};
    spec.shape = (trefoil_shape_t){16, 16 / nodes, 64, 8, 200};
    spec.popularity = TREFOIL_POPULARITY_ZIPF;
    spec.skew = 0.8;
    const trefoil_trace_t *from = make(&spec), *placed = NULL, *inTurn = NULL;
    trefoil_placement_t how = {.physicalExperts = 96, .seed = 9, .numGroups = 8, .numNodes = nodes};
    REQUIRE(from, "no trace");
    CHECK(trefoilTracePlaced(&placed, from, &how) == TREFOIL_OK, "%s", trefoilLastError());
    CHECK(trefoilTraceCopies(&inTurn, from, 96, 9) == TREFOIL_OK, "%s", trefoilLastError());
    REQUIRE(placed && inTurn, "no copies");
    int nodeOf[8], of[96], copies[64] = {0};
    for (int g = 0; g < 8; g++) nodeOf[g] = -1;
    for (int p = 0; p < 96; p++) of[p] = -1;
    for (int64_t i = 0; i < from->numTokens * 8; i++) {
      int32_t e = from->topkIdx[i], p = placed->topkIdx[i];
      REQUIRE(p >= 0 && p < 96 && (of[p] < 0 || of[p] == e), "%d of %d and %d", p, of[p], e);
      copies[e] += of[p] < 0;
      of[p] = e;
      int node = p / (96 / nodes), *seen = &nodeOf[e / 8];
      REQUIRE(*seen < 0 || *seen == node, "group %d on nodes %d and %d", e / 8, *seen, node);
      *seen = node;
    }
    for (int e = 0; e < 64; e++) CHECK(copies[e] >= 1, "expert %d has no copy", e);
    CHECK(busiestOf(placed) <= busiestOf(inTurn), "%g against %g in turn", busiestOf(placed),
          busiestOf(inTurn));
    trefoil_trace_stats_t stats;
    CHECK(trefoilTraceDescribe(placed, -1, &stats) == TREFOIL_OK, "%s", trefoilLastError());
    CHECK(stats.nodesPerToken <= 4, "%g nodes a token", stats.nodesPerToken);
    trefoilTraceDestroy(placed);
    trefoilTraceDestroy(inTurn);
    trefoilTraceDestroy(from);
  }
}

TEST(placements_that_cannot_be) {
  const int load[] = {1, 1, 1, 1, 1, 1, 1, 1};
  const trefoil_trace_t *from = withLoads(load, 8, 4), *none = NULL;
  REQUIRE(from, "no trace");
  static const struct {
    trefoil_placement_t how;
    const char *words;
  } bad[] = {{{10, 1, 4, 2, 0}, "a multiple of the 4 ranks"},
             {{8, 1, 4, 3, 0}, "3 nodes: must divide the 4 ranks"},
             {{8, 1, 3, 1, 0}, "3 groups of experts: must divide the 8 experts"},
             {{8, 1, 2, 4, 0}, "2 groups of experts on 4 nodes: each must take as many"},
             {{4, 1, 4, 2, 0}, "4 physical experts: must be at least the trace's 8"}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    CHECK(trefoilTracePlaced(&none, from, &bad[i].how) == TREFOIL_INVALID_ARGUMENT && !none,
          "%s: accepted", bad[i].words);
    CHECK(strstr(trefoilLastError(), bad[i].words), "%s", trefoilLastError());
  }
  CHECK(trefoilTracePlaced(&none, from, NULL) == TREFOIL_INVALID_ARGUMENT, "no placement");
  trefoilTraceDestroy(from);
}

TEST(token_counts) {
  trefoil_trace_spec_t s = baseSpec();
  s.numSteps = 40;
  s.numEmptyRanks = 3;
  s.burstPeriod = 4;
  s.burstLow = 0.1;
  const trefoil_trace_t *t = make(&s);
  REQUIRE(t, "no trace");
  int sameRanks = 0;
  for (int step = 0; step < 40; step++) {
    trefoil_routing_t r;
    trefoilTraceRouting(t, step, &r);
    int empty = 0;
    for (int rank = 0; rank < 8; rank++) {
      empty += r.numTokens[rank] == 0;
      int full = step % 4 ? 10 : 100;
      CHECK(r.numTokens[rank] == 0 || r.numTokens[rank] == full, "step %d: %lld", step,
            (long long)r.numTokens[rank]);
    }
    CHECK(empty == 3, "step %d: %d empty", step, empty);
    sameRanks += r.numTokens[0] == 0;
  }
  CHECK(sameRanks > 3 && sameRanks < 30, "rank 0 is empty in %d of 40 steps", sameRanks);
  trefoilTraceDestroy(t);
  s = baseSpec();
  s.ragged = 1;
  s.numSteps = 50;
  trefoil_trace_stats_t d = describe(&s);
  CHECK(d.minTokens < 10 && d.maxTokens > 90 && fabs((double)d.numTokens / 400 - 50.5) < 5, "%lld",
        (long long)d.numTokens);
  s.unusedFraction = 0.25;
  d = describe(&s);
  CHECK(fabs((double)d.numEntries / (6.0 * (double)d.numTokens) - 0.75) < 0.01, "unused");
}

TEST(gini_by_hand) {
  /* counts 1, 0, 3, 0: sorted 0 0 1 3: (-3*0 - 1*0 + 1*1 + 3*3) / (4*4) = 10/16 */
  static const int32_t idx[] = {2, 2, 2, 0};
  static const int64_t offsets[] = {0, 3, 4};
  trefoil_trace_t c = {{2, 1, 4, 1, 3}, 1, 4, offsets, idx, NULL, NULL};
  const trefoil_trace_t *t = NULL;
  REQUIRE(trefoilTraceCreate(&t, &c) == TREFOIL_OK, "%s", trefoilLastError());
  trefoil_trace_stats_t d;
  REQUIRE(trefoilTraceDescribe(t, 0, &d) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(fabs(d.giniExperts - 10.0 / 16) < 1e-12 && d.hottestExpert == 2, "%g", d.giniExperts);
  /* ranks: 1 and 3 rows: (-1*1 + 1*3) / (2*4) = 1/4; mean 2 */
  CHECK(fabs(d.giniRanks - 0.25) < 1e-12 && d.maxOverMeanRanks == 1.5, "%g", d.giniRanks);
  CHECK(d.rowsSelf == 0 && d.rowsNet == 4 && d.rowsNetOnce == 4 && d.minTokens == 1, "tiers");
  trefoilTraceDestroy(t);
}

static char *tempPath(void) {
  static char path[] = "/tmp/trefoil_trace_XXXXXX";
  strcpy(path, "/tmp/trefoil_trace_XXXXXX");
  int fd = mkstemp(path);
  if (fd >= 0) close(fd);
  return path;
}

static int sameTraces(const trefoil_trace_t *a, const trefoil_trace_t *b) {
  if (memcmp(&a->shape, &b->shape, sizeof a->shape) || a->numSteps != b->numSteps) return 0;
  if (a->numTokens != b->numTokens || strcmp(a->provenance, b->provenance)) return 0;
  if (!a->topkWeights != !b->topkWeights) return 0;
  size_t entries = (size_t)a->numTokens * (size_t)a->shape.topk;
  size_t offsets = (size_t)a->numSteps * ((size_t)a->shape.numRanks + 1);
  return !memcmp(a->offsets, b->offsets, offsets * 8) &&
         !memcmp(a->topkIdx, b->topkIdx, entries * 4) &&
         (!a->topkWeights || !memcmp(a->topkWeights, b->topkWeights, entries * 4));
}

static char *slurp(const char *path, size_t *size) {
  FILE *f = fopen(path, "rb");
  if (!f) return NULL;
  char *data = malloc(1 << 24);
  *size = fread(data, 1, 1 << 24, f);
  fclose(f);
  return data;
}

/* Whether this build has trace files at all. */
static int hasFiles(void) {
  const trefoil_trace_t *t;
  return trefoilTraceLoad(&t, "/nonexistent/trace.npz", NULL) != TREFOIL_INVALID_USAGE;
}

TEST(files_come_back) {
  if (!hasFiles()) SKIP("built without libzip or jansson");
  char *path = tempPath();
  for (int variant = 0; variant < 4; variant++) {
    trefoil_trace_spec_t s = baseSpec();
    s.ragged = 0.5;
    s.unusedFraction = 0.1;
    s.withWeights = variant & 1;
    if (variant & 2) s.shape.numExperts = 70000; /* int32 */
    const trefoil_trace_t *t = make(&s), *back = NULL;
    REQUIRE(t, "no trace");
    REQUIRE(trefoilTraceSave(t, path) == TREFOIL_OK, "%s", trefoilLastError());
    size_t size = 0, sizeAgain = 0;
    char *first = slurp(path, &size);
    REQUIRE(trefoilTraceLoad(&back, path, NULL) == TREFOIL_OK, "%s", trefoilLastError());
    const char *seed = strstr(back->provenance, "\"seed\": 42");
    CHECK(seed, "%s", back->provenance);
    trefoil_trace_t sorted = *back; /* the provenance comes back with its keys sorted */
    sorted.provenance = t->provenance;
    CHECK(sameTraces(t, &sorted), "variant %d", variant);
    REQUIRE(trefoilTraceSave(t, path) == TREFOIL_OK, "%s", trefoilLastError());
    char *again = slurp(path, &sizeAgain);
    CHECK(size == sizeAgain && !memcmp(first, again, size), "equal traces, other files");
    free(first);
    free(again);
    trefoilTraceDestroy(t);
    trefoilTraceDestroy(back);
  }
  unlink(path);
}

/* No tokens at all; and a write that fails leaves the file that was there. */
TEST(empty_traces_and_failing_writes) {
  if (!hasFiles()) SKIP("built without libzip or jansson");
  char *path = tempPath();
  static const int64_t offsets[6] = {0};
  trefoil_trace_t c = {{2, 1, 4, 3, 5}, 2, 0, offsets, NULL, NULL, NULL};
  const trefoil_trace_t *empty = NULL, *back = NULL;
  REQUIRE(trefoilTraceCreate(&empty, &c) == TREFOIL_OK, "%s", trefoilLastError());
  REQUIRE(trefoilTraceSave(empty, path) == TREFOIL_OK, "%s", trefoilLastError());
  c.provenance = "[]";
  const trefoil_trace_t *badProvenance = NULL;
  REQUIRE(trefoilTraceCreate(&badProvenance, &c) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(trefoilTraceSave(badProvenance, path) == TREFOIL_INVALID_ARGUMENT,
        "a provenance that is an array");
  REQUIRE(trefoilTraceLoad(&back, path, NULL) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(sameTraces(empty, back), "the empty trace comes back");
  trefoil_trace_stats_t d;
  CHECK(trefoilTraceDescribe(back, -1, &d) == TREFOIL_OK && d.emptyRanks == 4, "%lld empty",
        (long long)d.emptyRanks);
  CHECK(d.giniExperts == 0 && d.ranksPerToken == 0, "no loads");
  trefoilTraceDestroy(empty);
  trefoilTraceDestroy(badProvenance);
  trefoilTraceDestroy(back);
  unlink(path);
}

/* A saved file cut anywhere, or with any byte changed, loads as itself or fails with a sentence. */
TEST(damaged_files) {
  if (!hasFiles()) SKIP("built without libzip or jansson");
  char *path = tempPath();
  trefoil_trace_spec_t s = baseSpec();
  s.numSteps = 1;
  s.shape.maxTokens = 4;
  const trefoil_trace_t *t = make(&s), *back;
  REQUIRE(trefoilTraceSave(t, path) == TREFOIL_OK, "%s", trefoilLastError());
  size_t size = 0;
  char *bytes = slurp(path, &size);
  unlink(path);
  for (size_t cut = 0; cut < size; cut++) {
    uint8_t *part = malloc(cut + 1); /* exact, so that a sanitizer sees a read past it */
    memcpy(part, bytes, cut);
    back = t;
    CHECK(epTraceLoadBytes(&back, part, cut, NULL) != TREFOIL_OK, "cut at %zu loads", cut);
    CHECK(back == t && trefoilLastError()[0], "cut at %zu", cut);
    free(part);
  }
  int refused = 0;
  for (size_t i = 0; i < size; i++) {
    uint8_t *changed = malloc(size);
    memcpy(changed, bytes, size);
    changed[i] ^= 0x55;
    back = NULL;
    refused += epTraceLoadBytes(&back, changed, size, NULL) != TREFOIL_OK;
    trefoilTraceDestroy(back);
    free(changed);
  }
  CHECK(refused > (int)size / 2, "only %d of %zu changes are noticed", refused, size);
  free(bytes);
  trefoilTraceDestroy(t);
}

/* An .npy in memory: header text as given, then data. */
static size_t makeNpy(uint8_t *out, int version, const char *dictionary, const void *data,
                      size_t n) {
  size_t length = strlen(dictionary), start = version == 1 ? 10 : 12;
  memcpy(out, "\x93NUMPY", 6);
  out[6] = (uint8_t)version;
  out[7] = 0;
  memset(out + 8, 0, 4);
  out[8] = (uint8_t)length;
  out[9] = (uint8_t)(length >> 8);
  memcpy(out + start, dictionary, length);
  if (n) memcpy(out + start + length, data, n);
  return start + length + n;
}

TEST(npy_headers) {
  static const struct {
    const char *dictionary;
    size_t dataBytes;
    const char *sentence; /* NULL: taken */
  } cases[] = {
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (2, 3), }\n", 24, NULL},
      {"{\"shape\": (2L, 3L), \"descr\": \"|i1\", \"fortran_order\": False}  \n", 6, NULL},
      {"{'descr': '<i8', 'fortran_order': False, 'shape': (0, 3), }", 0, NULL},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }", 4, NULL},
      {"{'descr': '<i4', 'fortran_order': True, 'shape': (2, 3), }", 24, "Fortran"},
      {"{'descr': '>i4', 'fortran_order': False, 'shape': (2, 3), }", 24, "'>i4'"},
      {"{'descr': '<c8', 'fortran_order': False, 'shape': (2, 3), }", 48, "'<c8'"},
      {"{'descr': '|O', 'fortran_order': False, 'shape': (2, 3), }", 48, "'|O'"},
      {"{'descr': [('a', '<i4')], 'fortran_order': False, 'shape': (2, 3), }", 24, "plain"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (2, 3), }", 23, "shape asks"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (2, 3), }", 28, "28 bytes"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }", 24, "asks"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }", 0,
       "for more"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (99999999999999999999, 3), }", 24,
       "large"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (-2, 3), }", 24, "not a number"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (), }", 4, "no dimensions"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (1,1,1,1,1), }", 4, "more than 4"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (2, 3)", 24, "comma or brace"},
      {"{'descr': '<i4', 'fortran_order': False, }", 24, "missing"},
      {"{'descr': '<i4', 'descr': '<i4', 'shape': (2, 3), }", 24, "twice"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (2, 3), 'x': 1}", 24, "unknown key"},
      {"{'descr': '<i4', 'fortran_order': 0, 'shape': (2, 3), }", 24, "truth"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (2, 3), } x", 24, "follows"},
      {"", 0, "brace"},
  };
  uint8_t file[512], data[64] = {0};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    for (int version = 1; version <= 3; version++) {
      size_t n = makeNpy(file, version, cases[i].dictionary, data, cases[i].dataBytes);
      ep_npy_t npy;
      trefoil_result_t result = epNpyParse("a", file, n, &npy);
      if (!cases[i].sentence) {
        CHECK(result == TREFOIL_OK, "case %zu: %s", i, trefoilLastError());
        continue;
      }
      CHECK(result == TREFOIL_INVALID_ARGUMENT, "case %zu is taken", i);
      CHECK(strstr(trefoilLastError(), cases[i].sentence), "case %zu: %s", i, trefoilLastError());
    }
  }
  size_t n = makeNpy(file, 1, cases[0].dictionary, data, 24);
  ep_npy_t npy;
  file[9] = 0xff; /* a header longer than the file */
  CHECK(epNpyParse("a", file, n, &npy) == TREFOIL_INVALID_ARGUMENT, "cut header");
  file[6] = 4;
  CHECK(epNpyParse("a", file, n, &npy) == TREFOIL_INVALID_ARGUMENT, "version 4");
}

/* Signs and widths: the same values from every integer type. */
TEST(npy_values) {
  static const int64_t wide[] = {-1, 0, 127, INT32_MAX};
  uint8_t file[512];
  ep_npy_t npy;
  int32_t out[4];
  int64_t out64[4];
  size_t n = makeNpy(file, 1, "{'descr': '<i8', 'fortran_order': False, 'shape': (4,)}", wide, 32);
  REQUIRE(epNpyParse("a", file, n, &npy) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(epNpyInts32("a", &npy, out) == TREFOIL_OK && out[0] == -1 && out[3] == INT32_MAX, "i8");
  static const int64_t wider[] = {0, 0, 0, (int64_t)INT32_MAX + 1};
  n = makeNpy(file, 1, "{'descr': '<i8', 'fortran_order': False, 'shape': (4,)}", wider, 32);
  REQUIRE(epNpyParse("a", file, n, &npy) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(epNpyInts32("a", &npy, out) == TREFOIL_INVALID_ARGUMENT, "2^31 into int32");
  static const int8_t bytes[] = {-1, -128, 127, 0};
  n = makeNpy(file, 1, "{'descr': '|i1', 'fortran_order': False, 'shape': (4,)}", bytes, 4);
  REQUIRE(epNpyParse("a", file, n, &npy) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(epNpyInts("a", &npy, out64) == TREFOIL_OK && out64[0] == -1 && out64[1] == -128, "i1");
  n = makeNpy(file, 1, "{'descr': '|u1', 'fortran_order': False, 'shape': (4,)}", bytes, 4);
  REQUIRE(epNpyParse("a", file, n, &npy) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(epNpyInts("a", &npy, out64) == TREFOIL_OK && out64[0] == 255 && out64[1] == 128, "u1");
  n = makeNpy(file, 1, "{'descr': '<u8', 'fortran_order': False, 'shape': (4,)}", wide, 32);
  REQUIRE(epNpyParse("a", file, n, &npy) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(epNpyInts("a", &npy, out64) == TREFOIL_INVALID_ARGUMENT, "2^64 - 1 into int64");
}

TEST(arrays_of_others) {
  if (!hasFiles()) SKIP("built without libzip or jansson");
  static const int16_t ids[] = {0, 1, 2, 3, 4, 5, 6, 7, 0, 2, 1, 3};
  uint8_t file[512];
  const trefoil_trace_t *t = NULL;
  size_t n = makeNpy(file, 1, "{'descr': '<i2', 'fortran_order': False, 'shape': (6, 2)}", ids, 24);
  trefoil_trace_hints_t h = {.numRanks = 2, .numExperts = 8};
  REQUIRE(epTraceLoadBytes(&t, file, n, &h) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(t->numSteps == 1 && t->offsets[1] == 3 && t->offsets[2] == 6 && t->shape.maxTokens == 3,
        "even");
  trefoilTraceDestroy(t);
  h.tokensPerRank = 1; /* 3 steps of 2 ranks with a token each */
  REQUIRE(epTraceLoadBytes(&t, file, n, &h) == TREFOIL_OK, "%s", trefoilLastError());
  trefoil_routing_t r;
  CHECK(t->numSteps == 3 && trefoilTraceRouting(t, 2, &r) == TREFOIL_OK, "%d steps", t->numSteps);
  CHECK(r.topkIdx[1][0] == 1 && r.topkIdx[1][1] == 3 && r.numTokens[1] == 1, "the last token");
  trefoilTraceDestroy(t);
  const trefoil_trace_t *const untouched = t = (const trefoil_trace_t *)&h;
  h.tokensPerRank = 4;
  CHECK(epTraceLoadBytes(&t, file, n, &h) == TREFOIL_INVALID_ARGUMENT, "6 rows of 2 * 4");
  h = (trefoil_trace_hints_t){.numRanks = 2};
  CHECK(epTraceLoadBytes(&t, file, n, &h) == TREFOIL_INVALID_ARGUMENT, "no experts");
  CHECK(strstr(trefoilLastError(), "experts"), "%s", trefoilLastError());
  h.numExperts = 7;
  CHECK(epTraceLoadBytes(&t, file, n, &h) == TREFOIL_INVALID_ARGUMENT, "expert 7 of 7");
  CHECK(strstr(trefoilLastError(), "rank 1, token 0, k = 1"), "%s", trefoilLastError());
  h = (trefoil_trace_hints_t){.numExperts = 8};
  CHECK(epTraceLoadBytes(&t, file, n, &h) == TREFOIL_INVALID_ARGUMENT, "no ranks");
  n = makeNpy(file, 2, "{'descr': '<i2', 'fortran_order': False, 'shape': (3, 2, 1, 2)}", ids, 24);
  CHECK(t == untouched, "a failure wrote its out-parameter");
  REQUIRE(epTraceLoadBytes(&t, file, n, &h) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(t->numSteps == 3 && t->shape.numRanks == 2 && t->offsets[8] == 6, "4-D");
  trefoilTraceDestroy(t);
  h.numRanks = 3;
  CHECK(epTraceLoadBytes(&t, file, n, &h) == TREFOIL_INVALID_ARGUMENT, "2 ranks, 3 asked for");
  n = makeNpy(file, 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2)}", ids, 24);
  h.numRanks = 1;
  CHECK(epTraceLoadBytes(&t, file, n, &h) == TREFOIL_INVALID_ARGUMENT, "floats as ids");
}

TEST(bad_input) {
  static const int32_t idx[] = {0, 2, 2, 2};
  static const int64_t good[] = {0, 3, 4}, descends[] = {0, 5, 4}, gap[] = {1, 3, 4};
  const trefoil_trace_t *t = NULL;
  trefoil_trace_t c = {{2, 1, 4, 1, 3}, 1, 0, good, idx, NULL, "{}"};
  trefoil_trace_t bad = c;
  bad.offsets = descends;
  CHECK(trefoilTraceCreate(&t, &bad) == TREFOIL_INVALID_ARGUMENT, "descending");
  bad.offsets = gap;
  CHECK(trefoilTraceCreate(&t, &bad) == TREFOIL_INVALID_ARGUMENT, "a gap");
  bad = c, bad.shape.numExperts = 2;
  CHECK(trefoilTraceCreate(&t, &bad) == TREFOIL_INVALID_ARGUMENT, "expert 2 of 2");
  CHECK(strstr(trefoilLastError(), "step 0: rank 0, token 1"), "%s", trefoilLastError());
  bad = c, bad.shape.maxTokens = 2;
  CHECK(trefoilTraceCreate(&t, &bad) == TREFOIL_INVALID_ARGUMENT, "3 tokens of 2");
  bad = c, bad.topkIdx = NULL;
  CHECK(trefoilTraceCreate(&t, &bad) == TREFOIL_INVALID_ARGUMENT, "no ids");
  bad = c, bad.numSteps = 0;
  CHECK(trefoilTraceCreate(&t, &bad) == TREFOIL_INVALID_ARGUMENT, "no steps");
  CHECK(!t, "a failure wrote its out-parameter");
  trefoil_trace_spec_t s = baseSpec();
  s.popularity = TREFOIL_POPULARITY_HOT_RANK, s.hot = 8;
  CHECK(trefoilTraceGenerate(&t, &s) == TREFOIL_INVALID_ARGUMENT, "rank 8 of 8");
  s = baseSpec(), s.ragged = NAN;
  CHECK(trefoilTraceGenerate(&t, &s) == TREFOIL_INVALID_ARGUMENT, "NaN");
  s = baseSpec(), s.shape.maxTokens = TREFOIL_MAX_TOKENS;
  CHECK(trefoilTraceGenerate(&t, &s) == TREFOIL_INVALID_ARGUMENT, "too large");
  if (!hasFiles()) return;
  CHECK(trefoilTraceLoad(&t, "/nonexistent/x.npz", NULL) == TREFOIL_SYSTEM_ERROR, "no file");
  CHECK(trefoilTraceLoad(&t, "/dev/null", NULL) == TREFOIL_INVALID_ARGUMENT, "an empty file");
  REQUIRE(trefoilTraceCreate(&t, &c) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(trefoilTraceSave(t, "/nonexistent/x.npz") == TREFOIL_SYSTEM_ERROR, "no folder");
  trefoilTraceDestroy(t);
  c.provenance = "not json";
  REQUIRE(trefoilTraceCreate(&t, &c) == TREFOIL_OK, "%s", trefoilLastError());
  char *path = tempPath();
  CHECK(trefoilTraceSave(t, path) == TREFOIL_INVALID_ARGUMENT, "a provenance that is no JSON");
  unlink(path);
  trefoilTraceDestroy(t);
}

TEST_MAIN()
