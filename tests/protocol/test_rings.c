/* The rings of the high-throughput kernels, explored; every planted bug is found. */
#include "rings.h"

#include "test.h"

static ring_setup_t setupOf(bool gathers, int numRanks, int units) {
  return (ring_setup_t){.gathers = gathers,
                        .numRanks = numRanks,
                        .numFeeders = 1,
                        .numFollowers = 1,
                        .units = units,
                        .numTokens = 2,
                        .numPieces = 2,
                        .numOperations = 1,
                        .take = 2,
                        .ahead = numRanks == 2 ? RING_AHEAD : 0};
}

static void checkClean(const ring_setup_t *s) {
  const outcome_t o = exploreRings(s, 0, true);
  printf(
      "%s %d ranks, %d + %d blocks, %d units, %d tokens x %d pieces, %d operations: %llu states\n",
      s->gathers ? "combine " : "dispatch", s->numRanks, s->numFeeders, s->numFollowers, s->units,
      s->numTokens, s->numPieces, s->numOperations, (unsigned long long)o.numStates);
  CHECK(!o.wrong, "%s", o.wrong);
  CHECK(o.isComplete && o.numStates > 100, "%llu states", (unsigned long long)o.numStates);
}

TEST(full_rings) {
  for (int gathers = 0; gathers < 2; gathers++) {
    for (int units = 1; units <= 4; units *= 2) {
      ring_setup_t s = setupOf(gathers, 2, units);
      s.numTokens = 3;
      s.numOperations = 2;
      checkClean(&s);
      s = setupOf(gathers, 3, units);
      if (units == 2) continue; /* in between, and large */
      s.everywhere = units == 1;
      s.numPieces = units == 1 ? 2 : 1;
      checkClean(&s);
    }
  }
}

TEST(more_blocks) {
  for (int gathers = 0; gathers < 2; gathers++) {
    ring_setup_t s = setupOf(gathers, 2, 1);
    s.numFeeders = 2;
    checkClean(&s);
    s.numFeeders = 1;
    s.numFollowers = 2;
    s.take = 1;
    checkClean(&s);
  }
}

TEST(planted_bugs_are_found) {
  static const struct {
    ring_fault_t fault;
    bool gathers;
    int numRanks, units, numTokens, numOperations;
    const char *what;
  } plants[] = {
      {RING_FAULT_ORDER, false, 3, 1, 2, 1, "candidates by (token, rank, piece)"},
      {RING_FAULT_ALL_FEED, false, 2, 1, 4, 1, "nobody follows from the start"},
      {RING_FAULT_LAZY, false, 2, 1, 2, 1, "flags kept back"},
      {RING_FAULT_NO_CREDIT, true, 2, 1, 2, 1, "units not given back"},
      {RING_FAULT_HALF, true, 2, 1, 2, 1, "units given back too early"},
      {RING_FAULT_RESTART, false, 2, 2, 2, 2, "pieces numbered from 0 again"},
  };
  const int n = (int)(sizeof plants / sizeof *plants);
  CHECK(n == NUM_RING_FAULTS - 1, "%d of %d are planted", n, NUM_RING_FAULTS - 1);
  for (int i = 0; i < n; i++) {
    ring_setup_t s = setupOf(plants[i].gathers, plants[i].numRanks, plants[i].units);
    s.numTokens = plants[i].numTokens;
    s.everywhere = plants[i].fault == RING_FAULT_ORDER;
    s.numOperations = plants[i].numOperations;
    const outcome_t clean = exploreRings(&s, 300000, true);
    CHECK(!clean.wrong, "without it: %s", clean.wrong);
    s.fault = plants[i].fault;
    const outcome_t o = exploreRings(&s, 2000000, false);
    printf("planted: %-36s %s, after %llu states\n", plants[i].what,
           o.wrong ? o.wrong : "not found", (unsigned long long)o.numStates);
    CHECK(o.wrong, "%s was not found", plants[i].what);
  }
}

TEST_MAIN()
