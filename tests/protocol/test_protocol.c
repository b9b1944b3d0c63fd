/* The low-latency protocol, explored: every reachable state of every setup below is right, and every
 * planted bug is found. Prints what was explored. */
#include "kernels/common/protocol.h"
#include "protocol_checks.h"

/* Whole operations, staged ones, two in flight, and all of them mixed. */
static const char *const PROGRAMS[] = {"BBBBBB",     "SRSRSRSR",   "SSRRSSRR",  "SSRSRSRR",
                                       "BSSRRBBSSR", "SSLRSRSSLR", "BSRBSSRSRR"};
enum { NUM_PROGRAMS = sizeof PROGRAMS / sizeof *PROGRAMS };

TEST(two_ranks) {
  for (int i = 0; i < NUM_PROGRAMS; i++) checkKinds(setupOf(DISPATCH, 2, 2, PROGRAMS[i]));
}

TEST(ranks_that_stage_differently) {
  static const char *const PAIRS[][2] = {
      {"BBBBB", "SSRRSRSSRR"}, {"SSRRSRSSRR", "SRSSRSRRB"}, {"SSLRBSSRR", "BSSRRSSLR"}};
  for (int i = 0; i < 3; i++) {
    setup_t s = setupOf(DISPATCH, 2, 2, PAIRS[i][0]);
    s.program[1] = PAIRS[i][1];
    checkKinds(s);
  }
  setup_t s = setupOf(DISPATCH, 3, 1, "BBBB");
  s.program[1] = "SSRRSSRR";
  s.program[2] = "SRBSSRR";
  checkKinds(s);
}

TEST(three_ranks) {
  checkKinds(setupOf(DISPATCH, 3, 1, "BBBBBB"));
  checkKinds(setupOf(DISPATCH, 3, 1, "BSSRRB"));
}

/* Nothing reduced: each store, arrival and load by itself, in every order. */
TEST(every_store_a_step) {
  setup_t s = setupOf(DISPATCH, 2, 1, "SSRR");
  s.fine = true;
  checkKinds(s);
  s.program[0] = "BB";
  checkKinds(s);
}

/* Flags repeat and buffers are cleared every few operations; operations use more and fewer cells. */
TEST(marks_wrap) {
  setup_t s = setupOf(DISPATCH, 2, 2, "BBBBBBBBB");
  s.flags = s.clearPeriod = 4;
  checkKinds(s);
  s.program[0] = "SSRRSRSSRRBBSSRR";
  checkKinds(s);
}

TEST(a_rank_dies) {
  for (dies_t dies = DIES; dies <= DIES_UNMASKED; dies++) {
    setup_t s = setupOf(DISPATCH, 2, 2, "BBB");
    s.dies = dies;
    checkKinds(s);
    s.program[0] = "SSRR";
    checkKinds(s);
    s = setupOf(DISPATCH, 3, 1, "BB");
    s.numTokens = 1;
    s.dies = dies;
    checkKinds(s);
  }
}

/* A ack distance says what was received, or, where it does not fit, nothing; never more. */
TEST(lags_in_words) {
  for (uint64_t done = 1; done < 5000000000u; done = done * 7 + 1) {
    for (uint64_t ackDistance = 1; ackDistance < 3 * EP_LL_MAX_ACK_DISTANCE; ackDistance++) {
      uint64_t told = epLlAcked(done + ackDistance, epLlAckDistance(done + ackDistance, done));
      uint64_t want = ackDistance < EP_LL_MAX_ACK_DISTANCE ? done : 0;
      REQUIRE(told == want, "%llu received, ack distance %llu: acked %llu",
              (unsigned long long)done, (unsigned long long)ackDistance, (unsigned long long)told);
    }
  }
}

/* What the tests above would miss if the search or the reductions were wrong: each planted bug must be
 * found by one of these. */
typedef struct plant {
  fault_t fault;
  kind_t kind;
  int numRanks, numBlocks;
  const char *program[2];
  int flags;
  dies_t dies;
} plant_t;

static const plant_t PLANTS[] = {
    {FAULT_NO_FREE_CHECK, DISPATCH, 2, 2, {"SSRRSSRR", NULL}, 16, NOBODY},
    {FAULT_ONE_BUFFER, DISPATCH, 2, 2, {"BBBB", NULL}, 16, NOBODY},
    {FAULT_ACK_DISTANCE_SHORT, COMBINE, 2, 2, {"SSRRSSRR", NULL}, 16, NOBODY},
    {FAULT_LEAST_ACK_DISTANCE, DISPATCH, 3, 1, {"BBBBB", "SSRRSRSSRR"}, 16, NOBODY},
    {FAULT_ACKED_EARLY, PARTIAL, 2, 2, {"SSRRSSRR", NULL}, 16, NOBODY},
    {FAULT_DONE_AT_SEND, COMBINE, 2, 2, {"SSRRSSRR", NULL}, 16, NOBODY},
    {FAULT_FREE_BY_FIRST, DISPATCH, 2, 2, {"SSRRSSRR", NULL}, 16, NOBODY},
    {FAULT_NO_ACKS, COMBINE, 2, 2, {"BSSRRB", NULL}, 16, NOBODY},
    {FAULT_WHOLE_UNTOLD, DISPATCH, 2, 2, {"BBBBB", "SSRRSRSSRR"}, 16, NOBODY},
    {FAULT_CLOCK_BY_ONE, DISPATCH, 2, 2, {"BBBB", NULL}, 16, NOBODY},
    {FAULT_CLOCK_AT_START, COMBINE, 2, 2, {"BBBB", NULL}, 16, NOBODY},
    {FAULT_NUMBER_BY_CLOCK, PARTIAL, 2, 2, {"SSRRSSRR", NULL}, 16, NOBODY},
    {FAULT_NO_CLEAR, DISPATCH, 2, 2, {"BBBBBBBB", NULL}, 4, NOBODY},
    {FAULT_CLEAR_BY_FIRST, COMBINE, 2, 2, {"BBBB", NULL}, 4, NOBODY},
    {FAULT_CLEAR_UNFENCED, COMBINE, 2, 1, {"BBBBB", NULL}, 4, NOBODY},
    {FAULT_CLEAR_OTHER, DISPATCH, 2, 2, {"BBBB", NULL}, 4, NOBODY},
    {FAULT_SHORT_FLAGS, DISPATCH, 2, 2, {"BBBB", NULL}, 16, NOBODY},
    {FAULT_ARRIVALS_STAY, COMBINE, 2, 2, {"SSRRSSRRSSRR", NULL}, 16, NOBODY},
    {FAULT_NO_TIMEOUT_FREE, DISPATCH, 2, 1, {"SSRRSR", NULL}, 16, DIES},
    {FAULT_NO_TIMEOUT_WORDS, COMBINE, 2, 1, {"BBBB", NULL}, 16, DIES_UNMASKED},
};
enum { NUM_PLANTS = sizeof PLANTS / sizeof *PLANTS };

TEST(planted_bugs_are_found) {
  bool planted[NUM_FAULTS] = {true};
  for (int i = 0; i < NUM_PLANTS; i++) {
    const plant_t *p = &PLANTS[i];
    setup_t s = setupOf(p->kind, p->numRanks, p->numBlocks, p->program[0]);
    s.program[1] = p->program[1];
    s.flags = s.clearPeriod = p->flags;
    s.dies = p->dies;
    checkClean(s);
    s.fault = p->fault;
    const outcome_t o = explore(&s, false);
    printf("planted: %-34s %s, after %llu states\n", faultName(p->fault),
           o.wrong ? o.wrong : "not found", (unsigned long long)o.numStates);
    CHECK(o.wrong, "%s was not found", faultName(p->fault));
    planted[p->fault] = true;
  }
  for (int f = 0; f < NUM_FAULTS; f++) CHECK(planted[f], "%s was not planted", faultName(f));
}

TEST_MAIN()
