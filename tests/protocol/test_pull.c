/* Flat combines out of windows, explored; every planted bug is found. */
#include "pull.h"

#include "test.h"

enum { ALWAYS = 0xFF };

static void checkClean(const pull_setup_t *s) {
  const outcome_t o = explorePull(s, 0, true);
  printf("%d ranks of %d blocks, %d operations, windows %x %x %x: %llu states\n", s->numRanks,
         s->numBlocks, s->numOperations, s->open[0], s->open[1], s->open[2],
         (unsigned long long)o.numStates);
  CHECK(!o.wrong, "%s", o.wrong);
  CHECK(o.isComplete && o.numStates > 20, "%llu states", (unsigned long long)o.numStates);
}

TEST(two_ranks) {
  for (int blocks = 1; blocks <= PULL_BLOCKS; blocks++) {
    for (unsigned other = 0; other < 8; other++) { /* with and without a window, by turns */
      checkClean(&(pull_setup_t){2, blocks, 3, {ALWAYS, other, 0}, PULL_FAULT_NONE});
      checkClean(&(pull_setup_t){2, blocks, 3, {5, other, 0}, PULL_FAULT_NONE});
    }
  }
}

TEST(three_ranks) {
  checkClean(&(pull_setup_t){3, 1, 1, {ALWAYS, ALWAYS, ALWAYS}, PULL_FAULT_NONE});
  checkClean(&(pull_setup_t){3, 1, 3, {ALWAYS, 0, 0}, PULL_FAULT_NONE});
  checkClean(&(pull_setup_t){3, 1, 2, {ALWAYS, 2, 1}, PULL_FAULT_NONE});
  checkClean(&(pull_setup_t){3, 1, 2, {ALWAYS, ALWAYS, 0}, PULL_FAULT_NONE});
}

TEST(planted_bugs_are_found) {
  static const struct {
    pull_setup_t setup;
    const char *what;
  } plants[] = {
      {{2, 1, 2, {ALWAYS, 0, 0}, PULL_FAULT_EXACT}, "a later word waited past"},
      {{2, 1, 2, {ALWAYS, 2, 0}, PULL_FAULT_ANY_NUMBER}, "a later word taken for this one's"},
      {{2, 1, 1, {ALWAYS, ALWAYS, 0}, PULL_FAULT_HALF_WORD}, "half of the words believed"},
      {{2, 1, 2, {ALWAYS, ALWAYS, 0}, PULL_FAULT_NO_WAIT}, "rows read unheard"},
      {{2, 1, 1, {ALWAYS, ALWAYS, 0}, PULL_FAULT_EARLY_COUNT}, "counted before it is read"},
      {{2, 1, 1, {ALWAYS, ALWAYS, 0}, PULL_FAULT_NO_COUNT}, "left without the counts"},
      {{2, 1, 1, {ALWAYS, ALWAYS, 0}, PULL_FAULT_LATE_BASE}, "the counts' start looked up late"},
  };
  const int n = (int)(sizeof plants / sizeof *plants);
  CHECK(n == NUM_PULL_FAULTS - 1, "%d of %d are planted", n, NUM_PULL_FAULTS - 1);
  for (int i = 0; i < n; i++) {
    pull_setup_t s = plants[i].setup;
    const outcome_t o = explorePull(&s, 2000000, false);
    printf("planted: %-36s %s, after %llu states\n", plants[i].what,
           o.wrong ? o.wrong : "not found", (unsigned long long)o.numStates);
    CHECK(o.wrong, "%s was not found", plants[i].what);
    s.fault = PULL_FAULT_NONE;
    const outcome_t clean = explorePull(&s, 0, true);
    CHECK(!clean.wrong && clean.isComplete, "without it: %s", clean.wrong);
  }
}

TEST_MAIN()
