/* The relay across NVLink domains, explored; every planted bug is found. */
#include "ll_relay.h"

#include "test.h"

static void checkClean(const relay_setup_t *s) {
  const outcome_t o = exploreRelay(s, 0, true);
  printf("%d ranks x %d warps, %d rows, %s", s->numRanks, s->numWarps, s->numRows, s->program[0]);
  for (int r = 1; r < s->numRanks; r++) {
    if (s->program[r]) printf(" | %s", s->program[r]);
  }
  printf(": %llu states\n", (unsigned long long)o.numStates);
  CHECK(!o.wrong, "%s", o.wrong);
  CHECK(o.isComplete && o.numStates > 100, "%llu states", (unsigned long long)o.numStates);
}

TEST(whole_operations) {
  checkClean(&(relay_setup_t){2, 1, 1, {"BBBBBBB", NULL, NULL}, RELAY_FAULT_NONE});
  checkClean(&(relay_setup_t){2, 1, 2, {"BBBBB", NULL, NULL}, RELAY_FAULT_NONE});
  checkClean(&(relay_setup_t){2, 2, 1, {"BBBBB", NULL, NULL}, RELAY_FAULT_NONE});
  checkClean(&(relay_setup_t){2, 2, 2, {"BBBB", NULL, NULL}, RELAY_FAULT_NONE});
}

TEST(sends_and_receives) {
  static const char *const programs[][2] = {{"SRSRSR", NULL},
                                            {"SSRRSSR", NULL},
                                            {"SRBSSRRB", NULL},
                                            {"BBBB", "SSRRSRSR"},
                                            {"SSRSRR", "BSSRR"}};
  for (int i = 0; i < 5; i++) {
    const relay_setup_t s = {2, 2, 1, {programs[i][0], programs[i][1], NULL}, RELAY_FAULT_NONE};
    checkClean(&s);
    checkClean(&(relay_setup_t){2, 1, 2, {s.program[0], s.program[1], NULL}, RELAY_FAULT_NONE});
  }
}

TEST(planted_bugs_are_found) {
  static const struct {
    relay_setup_t setup;
    const char *what;
  } plants[] = {
      {{2, 1, 1, {"SRSRSR", "SSRRSR"}, RELAY_FAULT_NO_FREE_CHECK}, "stored without waiting"},
      {{2, 1, 1, {"SSRR"}, RELAY_FAULT_ONE_MESSAGE}, "one message for both parities"},
      {{2, 1, 1, {"BB"}, RELAY_FAULT_SIGNAL_FIRST}, "the signal before its data"},
      {{2, 1, 1, {"BB"}, RELAY_FAULT_NO_SIGNAL}, "read without the signal"},
      {{2, 2, 2, {"BB"}, RELAY_FAULT_POST_BY_FIRST}, "posted by the first warp"},
      {{2, 1, 1, {"BB"}, RELAY_FAULT_ROWS_UNCHECKED}, "rows packed unseen"},
      {{2, 2, 1, {"SRSRSR", "SSRSRR"}, RELAY_FAULT_FREE_BY_FIRST}, "free by the first warp"},
      {{2, 2, 1, {"SRSRSR", "SSRSRR"}, RELAY_FAULT_FREE_EARLY}, "free before it has received"},
      {{2, 1, 1, {"BBBB"}, RELAY_FAULT_RESET}, "a signal set back"},
      {{2, 1, 1, {"SSRRSSRR"}, RELAY_FAULT_NO_FREE}, "receipt not said"},
      {{2, 1, 1, {"BBSSRR"}, RELAY_FAULT_NO_HEAD}, "the last head not looked at"},
  };
  const int n = (int)(sizeof plants / sizeof *plants);
  CHECK(n == NUM_RELAY_FAULTS - 1, "%d of %d are planted", n, NUM_RELAY_FAULTS - 1);
  for (int i = 0; i < n; i++) {
    relay_setup_t s = plants[i].setup;
    const outcome_t o = exploreRelay(&s, 5000000, false);
    printf("planted: %-36s %s, after %llu states\n", plants[i].what,
           o.wrong ? o.wrong : "not found", (unsigned long long)o.numStates);
    CHECK(o.wrong, "%s was not found", plants[i].what);
    s.fault = RELAY_FAULT_NONE;
    const outcome_t clean = exploreRelay(&s, 0, true);
    CHECK(!clean.wrong && clean.isComplete, "without it: %s", clean.wrong);
  }
}

TEST_MAIN()
