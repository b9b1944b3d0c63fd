/* The explored rings with more ring slots, ranks and operations than test_rings.c has time for. */
#include "rings_checks.h"

TEST(two_ranks) {
  ring_setup_t s = setupOf("DDD", 1, 2, 2, 2, 2, RING_TWO_STEPS);
  checkClean(&s);
  s = setupOf("DCD", 1, 2, 1, 2, 2, RING_TWO_STEPS);
  checkClean(&s);
  s = setupOf("D", 1, 4, 1, 1, 3, RING_TWO_STEPS);
  checkClean(&s);
  s = setupOf("C", 1, 4, 1, 3, 4, RING_TWO_STEPS);
  checkClean(&s);
}

TEST(domains_of_two) {
  ring_setup_t s = setupOf("D", 2, 1, 1, 1, 1, RING_ONE_STEP);
  checkClean(&s);
}

TEST(waits_in_domains_of_two) {
  ring_setup_t s = setupOf("D", 2, 2, 1, 1, 3, RING_AT_ONCE);
  checkClean(&s);
  s = setupOf("C", 2, 2, 1, 2, 3, RING_AT_ONCE);
  checkClean(&s);
}

TEST_MAIN()
