/* Pushes of dispatch into outputs, and pulls out of inputs, explored; every planted bug is found. */
#include "push.h"

#include "test.h"

enum { ALWAYS = 0xFF };

static void checkClean(const push_setup_t *s) {
  const outcome_t o = explorePush(s, 0, true);
  printf(
      "%d ranks of %d blocks, %d operations, windows %x %x %x, of inputs %x %x %x: %llu states\n",
      s->numRanks, s->numBlocks, s->numOperations, s->open[0], s->open[1], s->open[2], s->pulls[0],
      s->pulls[1], s->pulls[2], (unsigned long long)o.numStates);
  CHECK(!o.wrong, "%s", o.wrong);
  CHECK(o.isComplete && o.numStates > 40, "%llu states", (unsigned long long)o.numStates);
}

TEST(two_ranks) {
  for (int blocks = 1; blocks <= PUSH_BLOCKS; blocks++) {
    for (unsigned other = 0; other < 16;
         other++) { /* with and without a window, from one to the next */
      checkClean(&(push_setup_t){2, blocks, 4, {ALWAYS, other, 0}, PUSH_FAULT_NONE, {0}});
    }
  }
}

TEST(three_ranks) {
  checkClean(&(push_setup_t){3, 1, 2, {ALWAYS, ALWAYS, ALWAYS}, PUSH_FAULT_NONE, {0}});
  checkClean(&(push_setup_t){3, 1, 3, {ALWAYS, ALWAYS, 0}, PUSH_FAULT_NONE, {0}});
  checkClean(&(push_setup_t){3, 1, 3, {ALWAYS, 2, 5}, PUSH_FAULT_NONE, {0}});
  checkClean(&(push_setup_t){3, 1, 3, {ALWAYS, ALWAYS, 6}, PUSH_FAULT_NONE, {0}});
  checkClean(&(push_setup_t){3, 2, 2, {ALWAYS, ALWAYS, 0}, PUSH_FAULT_NONE, {0}});
}

TEST(inputs_and_outputs) {
  for (unsigned first = 0; first < 16; first += 5) {
    for (unsigned other = 0; other < 16; other++) /* pulls between pushes, and pairs of both */
      checkClean(&(push_setup_t){2, 2, 4, {ALWAYS, ALWAYS, 0}, PUSH_FAULT_NONE, {first, other, 0}});
  }
  checkClean(&(push_setup_t){3, 1, 2, {ALWAYS, ALWAYS, ALWAYS}, PUSH_FAULT_NONE, {1, 3, 2}});
  checkClean(&(push_setup_t){3, 1, 3, {ALWAYS, ALWAYS, 6}, PUSH_FAULT_NONE, {5, 5, 4}});
}

TEST(planted_bugs_are_found) {
  static const struct {
    push_setup_t setup;
    const char *what;
  } plants[] = {
      {{2, 1, 2, {ALWAYS, 0, 0}, PUSH_FAULT_ONE_BUFFER, {0}}, "words in one place"},
      {{2, 1, 2, {ALWAYS, ALWAYS, 0}, PUSH_FAULT_NO_WAIT, {0}}, "rows before the word"},
      {{2, 1, 4, {ALWAYS, 0, 0}, PUSH_FAULT_RUN_AHEAD, {0}}, "left without hearing all"},
      {{2, 2, 1, {ALWAYS, ALWAYS, 0}, PUSH_FAULT_EARLY_DONE, {0}}, "counted before it is written"},
      {{2, 2, 1, {ALWAYS, ALWAYS, 0}, PUSH_FAULT_NO_COUNT, {0}}, "left without the counts"},
      {{2, 1, 1, {ALWAYS, ALWAYS, 0}, PUSH_FAULT_LATE_BASE, {0}},
       "the counts' start looked up late"},
      {{2, 2, 2, {ALWAYS, ALWAYS, 0}, PUSH_FAULT_EARLY_DONE, {1, 1, 0}},
       "counted before it is read"},
      {{2, 2, 1, {ALWAYS, ALWAYS, 0}, PUSH_FAULT_NO_COUNT, {1, 1, 0}},
       "left while its input is read"},
  };
  const int n = (int)(sizeof plants / sizeof *plants);
  unsigned planted = 0;
  for (int i = 0; i < n; i++) {
    push_setup_t s = plants[i].setup;
    planted |= 1u << s.fault;
    const outcome_t o = explorePush(&s, 2000000, false);
    printf("planted: %-36s %s, after %llu states\n", plants[i].what,
           o.wrong ? o.wrong : "not found", (unsigned long long)o.numStates);
    CHECK(o.wrong, "%s was not found", plants[i].what);
    s.fault = PUSH_FAULT_NONE;
    const outcome_t clean = explorePush(&s, 0, true);
    CHECK(!clean.wrong && clean.isComplete, "without it: %s", clean.wrong);
  }
  CHECK(planted == (1u << NUM_PUSH_FAULTS) - 2, "planted: %x", planted);
}

TEST_MAIN()
