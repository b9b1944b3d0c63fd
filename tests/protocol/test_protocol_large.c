/* The explored protocol with more ranks, blocks and operations than test_protocol.c has time for. */
#include "protocol_checks.h"

TEST(two_ranks_of_three_blocks) {
  checkKinds(setupOf(DISPATCH, 2, 3, "BBBB"));
}

TEST(three_ranks_of_two_blocks) {
  checkKinds(setupOf(DISPATCH, 3, 2, "BBBB"));
  checkKinds(setupOf(DISPATCH, 3, 2, "SSRRSSRR"));
}

TEST(every_store_a_step) {
  setup_t s = setupOf(DISPATCH, 2, 1, "BBBB");
  s.fine = true;
  checkKinds(s);
  s.program[0] = "SSRRSR";
  checkKinds(s);
}

TEST(marks_wrap) {
  setup_t s = setupOf(DISPATCH, 3, 1, "BBBBB");
  s.flags = s.clearPeriod = 4;
  s.first = 3;
  checkKinds(s);
}

TEST(a_rank_dies) {
  setup_t s = setupOf(DISPATCH, 3, 1, "BBBB");
  s.dies = DIES_UNMASKED;
  checkKinds(s);
  s.dies = DIES;
  checkKinds(s);
  s.program[0] = "SSRR";
  checkKinds(s);
}

TEST_MAIN()
