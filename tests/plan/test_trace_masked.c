/* Entries of generated traces that are masked: as many of each rank, which ones by chance. */
#include "trefoil/trace.h"

#include "test.h"

#include <string.h>

static const trefoil_trace_t *make(const trefoil_trace_spec_t *spec) {
  const trefoil_trace_t *t = NULL;
  CHECK(trefoilTraceGenerate(&t, spec) == TREFOIL_OK, "%s", trefoilLastError());
  return t;
}

static int64_t entriesOf(const trefoil_trace_spec_t *spec) {
  trefoil_trace_stats_t stats = {.numEntries = -1};
  const trefoil_trace_t *t = make(spec);
  if (t) CHECK(trefoilTraceDescribe(t, -1, &stats) == TREFOIL_OK, "%s", trefoilLastError());
  trefoilTraceDestroy(t);
  return stats.numEntries;
}

static int64_t maskedOf(const trefoil_trace_t *t, const trefoil_trace_t *whole, int step,
                        int rank) {
  const int64_t *offsets = t->offsets + (int64_t)step * (t->shape.numRanks + 1);
  int64_t masked = 0, K = t->shape.topk;
  for (int64_t i = offsets[rank] * K; i < offsets[rank + 1] * K; i++) {
    masked += t->topkIdx[i] < 0;
    CHECK(t->topkIdx[i] < 0 || t->topkIdx[i] == whole->topkIdx[i], "entry %d", (int)i);
  }
  return masked;
}

/* So many of each rank's entries are -1, others in each step and on each rank, and each entry as often:
 * of 600 a rank, 150 in 40 (step, rank), so 10 +- 2.7 times. Weights are of the entries left. */
TEST(masked_entries) {
  trefoil_trace_spec_t s = {.shape = {8, 4, 64, 6, 100}, .numSteps = 5, .seed = 42};
  const trefoil_trace_t *whole = make(&s), *t = NULL;
  s.numMasked = 150;
  s.withWeights = 1;
  t = make(&s);
  REQUIRE(whole && t, "no trace");
  int seen[600] = {0};
  for (int step = 0; step < 5; step++)
    for (int r = 0; r < 8; r++) CHECK(maskedOf(t, whole, step, r) == 150, "%d %d", step, r);
  for (int64_t i = 0; i < t->numTokens * 6; i++) {
    seen[i % 600] += t->topkIdx[i] < 0;
    CHECK((t->topkIdx[i] < 0) == (t->topkWeights[i] == 0), "weight %d", (int)i);
  }
  for (int i = 0; i < 600; i++) CHECK(seen[i] > 0 && seen[i] < 24, "entry %d: %d", i, seen[i]);
  CHECK(strstr(t->provenance, "\"masked\": 150"), "%s", t->provenance);
  trefoilTraceDestroy(whole);
  trefoilTraceDestroy(t);
  s.numMasked = 600;
  CHECK(entriesOf(&s) == 0, "all of them");
  s.numMasked = 601;
  CHECK(trefoilTraceGenerate(&t, &s) == TREFOIL_INVALID_ARGUMENT, "more than there are");
  CHECK(strstr(trefoilLastError(), "masked entries 601: must be in [0, 600]"), "%s",
        trefoilLastError());
  s.numMasked = 1;
  s.numEmptyRanks = 3;
  CHECK(trefoilTraceGenerate(&t, &s) == TREFOIL_INVALID_ARGUMENT, "of an empty rank");
  CHECK(strstr(trefoilLastError(), "1 masked entries: rank "), "%s", trefoilLastError());
}

TEST_MAIN()
