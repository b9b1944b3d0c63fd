/* The FIFOs of the high-throughput kernels, explored; every planted bug is found. */
#include "fifos.h"

#include "test.h"

static fifo_setup_t setupOf(bool gathers, int numRanks, int slots) {
  return (fifo_setup_t){.gathers = gathers,
                        .numRanks = numRanks,
                        .numSenders = 1,
                        .numReceivers = 1,
                        .slots = slots,
                        .numTokens = 2,
                        .numChunks = 2,
                        .numOperations = 1,
                        .take = 2,
                        .ahead = numRanks == 2 ? FIFO_AHEAD : 0};
}

static void checkClean(const fifo_setup_t *s) {
  const outcome_t o = exploreFifos(s, 0, true);
  printf(
      "%s %d ranks, %d + %d blocks, %d slots, %d tokens x %d chunks, %d operations: %llu states\n",
      s->gathers ? "combine " : "dispatch", s->numRanks, s->numSenders, s->numReceivers, s->slots,
      s->numTokens, s->numChunks, s->numOperations, (unsigned long long)o.numStates);
  CHECK(!o.wrong, "%s", o.wrong);
  CHECK(o.isComplete && o.numStates > 100, "%llu states", (unsigned long long)o.numStates);
}

TEST(full_rings) {
  for (int gathers = 0; gathers < 2; gathers++) {
    for (int slots = 1; slots <= 4; slots *= 2) {
      fifo_setup_t s = setupOf(gathers, 2, slots);
      s.numTokens = 3;
      s.numOperations = 2;
      checkClean(&s);
      s = setupOf(gathers, 3, slots);
      if (slots == 2) continue; /* in between, and large */
      s.everywhere = slots == 1;
      s.numChunks = slots == 1 ? 2 : 1;
      checkClean(&s);
    }
  }
}

TEST(more_blocks) {
  for (int gathers = 0; gathers < 2; gathers++) {
    fifo_setup_t s = setupOf(gathers, 2, 1);
    s.numSenders = 2;
    checkClean(&s);
    s.numSenders = 1;
    s.numReceivers = 2;
    s.take = 1;
    checkClean(&s);
  }
}

TEST(planted_bugs_are_found) {
  static const struct {
    fifo_fault_t fault;
    bool gathers;
    int numRanks, slots, numTokens, numOperations;
    const char *what;
  } plants[] = {
      {FIFO_FAULT_ORDER, false, 3, 1, 2, 1, "candidates by (token, rank, chunk)"},
      {FIFO_FAULT_ALL_SEND, false, 2, 1, 4, 1, "no block receives from the start"},
      {FIFO_FAULT_LAZY, false, 2, 1, 2, 1, "flags kept back"},
      {FIFO_FAULT_NO_CREDIT, true, 2, 1, 2, 1, "slots not given back"},
      {FIFO_FAULT_HALF, true, 2, 1, 2, 1, "slots given back too early"},
      {FIFO_FAULT_RESTART, false, 2, 2, 2, 2, "chunks numbered from 0 again"},
  };
  const int n = (int)(sizeof plants / sizeof *plants);
  CHECK(n == NUM_FIFO_FAULTS - 1, "%d of %d are planted", n, NUM_FIFO_FAULTS - 1);
  for (int i = 0; i < n; i++) {
    fifo_setup_t s = setupOf(plants[i].gathers, plants[i].numRanks, plants[i].slots);
    s.numTokens = plants[i].numTokens;
    s.everywhere = plants[i].fault == FIFO_FAULT_ORDER;
    s.numOperations = plants[i].numOperations;
    const outcome_t clean = exploreFifos(&s, 300000, true);
    CHECK(!clean.wrong, "without it: %s", clean.wrong);
    s.fault = plants[i].fault;
    const outcome_t o = exploreFifos(&s, 2000000, false);
    printf("planted: %-36s %s, after %llu states\n", plants[i].what,
           o.wrong ? o.wrong : "not found", (unsigned long long)o.numStates);
    CHECK(o.wrong, "%s was not found", plants[i].what);
  }
}

TEST_MAIN()
