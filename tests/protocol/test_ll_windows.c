/* Low-latency dispatches straight into outputs, explored; every planted bug is found. */
#include "ll_windows.h"

#include "test.h"

enum { ALWAYS = 0xFF };

static void checkClean(const window_setup_t *s) {
  const outcome_t o = exploreWindows(s, 0, true);
  printf("%d ranks of %d blocks, %s %s %s, straight %x %x %x: %llu states\n", s->numRanks,
         s->numBlocks, s->program[0], s->program[1], s->numRanks > 2 ? s->program[2] : "",
         s->straight[0], s->straight[1], s->straight[2], (unsigned long long)o.numStates);
  CHECK(!o.wrong, "%s", o.wrong);
  CHECK(o.isComplete && o.numStates > 20, "%llu states", (unsigned long long)o.numStates);
}

/* Going straight or not, from one operation to the next; whole, staged, two in flight, and each
 * rank its own. */
TEST(two_ranks) {
  static const char *const programs[][2] = {{"BBBB", "BBBB"},         {"SRSRSRSR", "SRSRSRSR"},
                                            {"SSRRSSRR", "SSRRSSRR"}, {"SSRSRSRR", "SSRSRSRR"},
                                            {"BBBB", "SRSRSRSR"},     {"SSRRSSRR", "BBBB"}};
  for (size_t i = 0; i < sizeof programs / sizeof *programs; i++) {
    for (int blocks = 1; blocks <= WINDOW_BLOCKS; blocks++) {
      for (unsigned other = 0; other < 16; other++) {
        checkClean(&(window_setup_t){2,
                                     blocks,
                                     {programs[i][0], programs[i][1], NULL},
                                     {ALWAYS, other, 0},
                                     WINDOW_FAULT_NONE});
      }
    }
  }
}

TEST(three_ranks) {
  static const char *const programs[][3] = {
      {"BB", "BB", "BB"}, {"SSRR", "SSRR", "SSRR"}, {"BB", "SRSR", "SSRR"}};
  static const unsigned straight[][3] = {{ALWAYS, ALWAYS, ALWAYS}, {ALWAYS, ALWAYS, 2}};
  for (int i = 0; i < 3; i++) {
    for (int j = 0; j < 2; j++) {
      checkClean(&(window_setup_t){3,
                                   1,
                                   {programs[i][0], programs[i][1], programs[i][2]},
                                   {straight[j][0], straight[j][1], straight[j][2]},
                                   WINDOW_FAULT_NONE});
    }
  }
}

TEST(planted_bugs_are_found) {
#define TWO(program)                                                                               \
  {program, program, NULL}, {                                                                      \
    ALWAYS, ALWAYS, 0                                                                              \
  }
  static const struct {
    window_setup_t setup;
    const char *what;
  } plants[] = {
      {{2, 1, TWO("SSRRSSRR"), WINDOW_FAULT_NO_FREE}, "words over words that are not read"},
      {{2, 1, TWO("BB"), WINDOW_FAULT_NO_HEARING}, "rows before the word"},
      {{2, 1, TWO("BBB"), WINDOW_FAULT_ANY_WORD}, "a word of an earlier operation"},
      {{2, 2, TWO("B"), WINDOW_FAULT_EARLY_DONE}, "counted before it is written"},
      {{2, 2, TWO("B"), WINDOW_FAULT_NO_COUNT}, "received without the counts"},
      {{2, 1, TWO("B"), WINDOW_FAULT_LATE_BASE}, "the counts' start looked up late"},
      {{2, 1, TWO("SSRR"), WINDOW_FAULT_ONE_COUNT}, "one count for two in flight"},
  };
#undef TWO
  const int n = (int)(sizeof plants / sizeof *plants);
  CHECK(n == NUM_WINDOW_FAULTS - 1, "%d of %d are planted", n, NUM_WINDOW_FAULTS - 1);
  for (int i = 0; i < n; i++) {
    window_setup_t s = plants[i].setup;
    const outcome_t o = exploreWindows(&s, 2000000, false);
    printf("planted: %-36s %s, after %llu states\n", plants[i].what,
           o.wrong ? o.wrong : "not found", (unsigned long long)o.numStates);
    CHECK(o.wrong, "%s was not found", plants[i].what);
    s.fault = WINDOW_FAULT_NONE;
    const outcome_t clean = exploreWindows(&s, 0, true);
    CHECK(!clean.wrong && clean.isComplete, "without it: %s", clean.wrong);
  }
}

TEST_MAIN()
