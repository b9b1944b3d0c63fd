/* Low latency's dispatch by rails, explored; every planted bug is found. */
#include "ll_rails.h"

#include "test.h"

static void checkClean(const rails_setup_t *s) {
  const outcome_t o = exploreRails(s, 0, true);
  printf("%s", s->program[0]);
  for (int r = 1; r < RAILS_RANKS; r++) printf(" | %s", s->program[r] ? s->program[r] : "same");
  printf(": %llu states\n", (unsigned long long)o.numStates);
  CHECK(!o.wrong, "%s", o.wrong);
  CHECK(o.isComplete && o.numStates > 1000, "%llu states", (unsigned long long)o.numStates);
}

TEST(operations_sends_and_receives) {
  static const char *const programs[][RAILS_RANKS] = {{"BBBBBB"},
                                                      {"BBB", "SRSRSR", "BBB", "BBB"},
                                                      {"SSRRSR", "BBB", "BBB", "BBB"},
                                                      {"SRS"},
                                                      {"BBSR"}};
  for (size_t i = 0; i < sizeof programs / sizeof *programs; i++) {
    const char *const *p = programs[i];
    checkClean(&(rails_setup_t){{p[0], p[1], p[2], p[3]}, RAILS_FAULT_NONE});
  }
}

TEST(planted_bugs_are_found) {
  static const struct {
    rails_setup_t setup;
    const char *what;
  } plants[] = {
      {{{"BSS"}, RAILS_FAULT_NO_FREE_CHECK}, "stored without waiting"},
      {{{"BBB"}, RAILS_FAULT_ONE_MESSAGE}, "one message for both parities"},
      {{{"BB"}, RAILS_FAULT_SIGNAL_FIRST}, "the signal before its data"},
      {{{"BB"}, RAILS_FAULT_NO_SIGNAL}, "the head read before its signal"},
      {{{"B"}, RAILS_FAULT_POST_BY_FIRST}, "posted with the words for one rank"},
      {{{"SRSRS", NULL, "SSR", "SSR"}, RAILS_FAULT_CREDIT_EARLY},
       "credit before the mate's rows are read"},
      {{{"B"}, RAILS_FAULT_NO_FORWARDER}, "no forwarder"},
      {{{"BB"}, RAILS_FAULT_OWN_RELAY}, "ended before its relay"},
      {{{"BSS"}, RAILS_FAULT_FREE_UNTOLD}, "receipts not told to the mate"},
  };
  const int n = (int)(sizeof plants / sizeof *plants);
  CHECK(n == NUM_RAILS_FAULTS - 1, "%d of %d are planted", n, NUM_RAILS_FAULTS - 1);
  for (int i = 0; i < n; i++) {
    rails_setup_t s = plants[i].setup;
    const outcome_t o = exploreRails(&s, 1000000, false);
    printf("planted: %-40s %s, after %llu states\n", plants[i].what,
           o.wrong ? o.wrong : "not found", (unsigned long long)o.numStates);
    CHECK(o.wrong, "%s was not found", plants[i].what);
    s.fault = RAILS_FAULT_NONE;
    const outcome_t clean = exploreRails(&s, 0, true);
    CHECK(!clean.wrong && clean.isComplete, "without it: %s", clean.wrong);
  }
}

TEST_MAIN()
