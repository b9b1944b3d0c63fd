/* Synchronisations of A2SGD's parameters, explored; every planted bug is found. */
#include "average.h"

#include "test.h"

static void checkClean(const average_setup_t *s) {
  const outcome_t o = exploreAverage(s, 0, true);
  printf("%d ranks, %d chunks, views %x %x %x, slices %x %x %x: %llu states\n", s->numRanks,
         s->numChunks, s->views[0], s->views[1], s->views[2], s->slices[0], s->slices[1],
         s->slices[2], (unsigned long long)o.numStates);
  CHECK(!o.wrong, "%s", o.wrong);
  CHECK(o.isComplete && o.numStates > 40, "%llu states", (unsigned long long)o.numStates);
}

TEST(two_ranks) {
  for (int slices = 0; slices < 16; slices++) /* the last ranks of a short chunk have none */
    checkClean(&(average_setup_t){
        2,
        4,
        {3, 3},
        {slices & 1 ? 3 : 1, slices & 2 ? 3 : 1, slices & 4 ? 3 : 1, slices & 8 ? 3 : 1},
        AVERAGE_FAULT_NONE});
}

TEST(two_ranks_that_are_alone) {
  checkClean(&(average_setup_t){2, 3, {1, 2}, {3, 1, 3}, AVERAGE_FAULT_NONE});
}

TEST(three_ranks) {
  checkClean(&(average_setup_t){3, 3, {7, 7, 7}, {1, 1, 1}, AVERAGE_FAULT_NONE});
  checkClean(&(average_setup_t){3, 3, {7, 7, 7}, {7, 3, 7}, AVERAGE_FAULT_NONE});
}

TEST(views_that_differ) {
  checkClean(&(average_setup_t){3, 3, {3, 7, 6}, {1, 3, 7}, AVERAGE_FAULT_NONE});
  checkClean(&(average_setup_t){3, 3, {3, 3, 4}, {7, 1, 7}, AVERAGE_FAULT_NONE});
}

TEST(planted_bugs_are_found) {
  static const struct {
    average_setup_t setup;
    const char *what;
  } plants[] = {
      {{3, 2, {7, 7, 7}, {1, 1}, AVERAGE_FAULT_ONE_WORD}, "words in one place"},
      {{3, 2, {3, 7, 6}, {1, 1}, AVERAGE_FAULT_ONE_STAGE}, "one stage"},
      {{2, 1, {3, 3}, {3}, AVERAGE_FAULT_EARLY_POST}, "the word before the copy"},
      {{2, 1, {3, 3}, {3}, AVERAGE_FAULT_EARLY_SUM}, "sums without words"},
      {{2, 1, {3, 3}, {3}, AVERAGE_FAULT_EARLY_TAKE}, "slices without words"},
  };
  const int n = (int)(sizeof plants / sizeof *plants);
  CHECK(n == NUM_AVERAGE_FAULTS - 1, "%d of %d are planted", n, NUM_AVERAGE_FAULTS - 1);
  for (int i = 0; i < n; i++) {
    average_setup_t s = plants[i].setup;
    const outcome_t o = exploreAverage(&s, 5000000, false);
    printf("planted: %-36s %s, after %llu states\n", plants[i].what,
           o.wrong ? o.wrong : "not found", (unsigned long long)o.numStates);
    CHECK(o.wrong, "%s was not found", plants[i].what);
  }
}

TEST_MAIN()
