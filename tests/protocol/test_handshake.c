/* Zero-copy dispatches and combines, explored; every planted bug is found. */
#include "handshake.h"

#include "test.h"

enum { ALWAYS = 0xFF };

static void checkClean(const handshake_setup_t *s) {
  const outcome_t o = exploreHandshake(s, 0, true);
  printf("%d ranks of %d blocks, %d operations, windows %x %x %x, of inputs %x %x %x, others "
         "%x %x %x: %llu states\n",
         s->numRanks, s->numBlocks, s->numOperations, s->open[0], s->open[1], s->open[2],
         s->pulls[0], s->pulls[1], s->pulls[2], s->other[0], s->other[1], s->other[2],
         (unsigned long long)o.numStates);
  CHECK(!o.wrong, "%s", o.wrong);
  CHECK(o.isComplete && o.numStates > 20, "%llu states", (unsigned long long)o.numStates);
}

#define CLEAN(...) checkClean(&(handshake_setup_t){__VA_ARGS__})

/* With and without a window, from one operation to the next. */
TEST(two_ranks) {
  for (int blocks = 1; blocks <= HANDSHAKE_BLOCKS; blocks++) {
    for (unsigned other = 0; other < 16; other++) {
      CLEAN(2, blocks, 4, {ALWAYS, other, 0}, HANDSHAKE_FAULT_NONE, {0}, {0});
      CLEAN(2, blocks, 4, {5, other, 0}, HANDSHAKE_FAULT_NONE, {0}, {0});
    }
  }
}

TEST(three_ranks) {
  CLEAN(3, 1, 1, {ALWAYS, ALWAYS, ALWAYS}, HANDSHAKE_FAULT_NONE, {0}, {0});
  CLEAN(3, 1, 3, {ALWAYS, 0, 0}, HANDSHAKE_FAULT_NONE, {0}, {0});
  CLEAN(3, 1, 3, {ALWAYS, 2, 5}, HANDSHAKE_FAULT_NONE, {0}, {0});
  CLEAN(3, 1, 3, {ALWAYS, ALWAYS, 0}, HANDSHAKE_FAULT_NONE, {0}, {0});
  CLEAN(3, 1, 3, {ALWAYS, ALWAYS, 6}, HANDSHAKE_FAULT_NONE, {0}, {0});
}

/* Pulls between pushes, and pairs of both. */
TEST(inputs_and_outputs) {
  for (unsigned first = 0; first < 16; first += 5) {
    for (unsigned other = 0; other < 16; other++) {
      CLEAN(2, 2, 4, {ALWAYS, ALWAYS, 0}, HANDSHAKE_FAULT_NONE, {first, other, 0}, {0});
    }
  }
  CLEAN(3, 1, 3, {ALWAYS, ALWAYS, 2}, HANDSHAKE_FAULT_NONE, {1, 3, 2}, {0});
}

TEST(two_windows) {
  for (unsigned first = 0; first < 8; first++) {
    for (unsigned open = 0; open < 8; open++) {
      CLEAN(2, 2, 3, {ALWAYS, open, 0}, HANDSHAKE_FAULT_NONE, {0}, {first, 2, 0});
      CLEAN(2, 1, 3, {ALWAYS, open, 0}, HANDSHAKE_FAULT_NONE, {4, 4, 0}, {first, 1, 0});
    }
  }
  CLEAN(3, 1, 2, {ALWAYS, 3, 2}, HANDSHAKE_FAULT_NONE, {0}, {1, 3, 0});
}

TEST(planted_bugs_are_found) {
  static const struct {
    handshake_setup_t setup;
    const char *what;
  } plants[] = {
      {{2, 1, 2, {ALWAYS, 0, 0}, HANDSHAKE_FAULT_EXACT, {0}, {0}}, "a later word waited past"},
      {{2, 1, 2, {ALWAYS, 2, 0}, HANDSHAKE_FAULT_ANY_NUMBER, {0}, {0}},
       "a later word taken for this one's"},
      {{2, 1, 1, {ALWAYS, ALWAYS, 0}, HANDSHAKE_FAULT_ANY_TAG, {1, 0, 0}, {0}},
       "an input taken for an output"},
      {{2, 1, 1, {ALWAYS, ALWAYS, 0}, HANDSHAKE_FAULT_ANY_WINDOW, {0}, {1, 0, 0}},
       "another window taken for this one"},
      {{2, 1, 1, {ALWAYS, ALWAYS, 0}, HANDSHAKE_FAULT_HALF_WORD, {0}, {0}},
       "half of the words believed"},
      {{2, 1, 2, {ALWAYS, ALWAYS, 0}, HANDSHAKE_FAULT_NO_WAIT, {0}, {0}}, "rows before the word"},
      {{2, 2, 1, {ALWAYS, ALWAYS, 0}, HANDSHAKE_FAULT_EARLY_DONE, {0}, {0}},
       "counted before it is written"},
      {{2, 2, 2, {ALWAYS, ALWAYS, 0}, HANDSHAKE_FAULT_EARLY_DONE, {3, 3, 0}, {0}},
       "counted before it is read"},
      {{2, 2, 1, {ALWAYS, ALWAYS, 0}, HANDSHAKE_FAULT_NO_COUNT, {0}, {0}},
       "left without the counts"},
      {{2, 2, 1, {ALWAYS, ALWAYS, 0}, HANDSHAKE_FAULT_NO_COUNT, {1, 1, 0}, {0}},
       "left while its input is read"},
      {{2, 1, 1, {ALWAYS, ALWAYS, 0}, HANDSHAKE_FAULT_LATE_BASE, {0}, {0}},
       "the counts' start looked up late"},
  };
  const int n = (int)(sizeof plants / sizeof *plants);
  unsigned planted = 0;
  for (int i = 0; i < n; i++) {
    handshake_setup_t s = plants[i].setup;
    planted |= 1u << s.fault;
    const outcome_t o = exploreHandshake(&s, 2000000, false);
    printf("planted: %-36s %s, after %llu states\n", plants[i].what,
           o.wrong ? o.wrong : "not found", (unsigned long long)o.numStates);
    CHECK(o.wrong, "%s was not found", plants[i].what);
    s.fault = HANDSHAKE_FAULT_NONE;
    const outcome_t clean = exploreHandshake(&s, 0, true);
    CHECK(!clean.wrong && clean.isComplete, "without it: %s", clean.wrong);
  }
  CHECK(planted == (1u << NUM_HANDSHAKE_FAULTS) - 2, "planted: %x", planted);
}

TEST_MAIN()
