/* The rings of high throughput across NVLink domains, explored; every planted bug is found. */
#include "rings_checks.h"

TEST(two_ranks) {
  static const struct {
    const char *program;
    int ringSlots, fifoSlots, chunk, numTokens;
    bool flat;
  } setups[] = {
      {"DDD", 1, 1, 1, 3, false},  {"DD", 2, 1, 1, 2, false},  {"D", 2, 2, 2, 2, false},
      {"CCC", 1, 1, 1, 3, false},  {"CCC", 2, 2, 2, 2, false}, {"CCC", 2, 2, 2, 2, true},
      {"DCDC", 1, 1, 1, 2, false},
  };
  for (size_t i = 0; i < sizeof setups / sizeof *setups; i++) {
    ring_setup_t s = setupOf(setups[i].program, 1, setups[i].ringSlots, setups[i].fifoSlots,
                             setups[i].chunk, setups[i].numTokens, RING_TWO_STEPS);
    s.flat = setups[i].flat;
    checkClean(&s);
  }
}

TEST(more_blocks) {
  ring_setup_t s = setupOf("D", 1, 2, 1, 1, 2, RING_TWO_STEPS);
  s.blocks[0] = 2;
  checkClean(&s);
  s = setupOf("D", 1, 2, 2, 1, 3, RING_TWO_STEPS);
  s.owners = 1;
  s.blocks[1] = 2;
  checkClean(&s);
  s = setupOf("C", 1, 2, 2, 1, 2, RING_TWO_STEPS);
  s.blocks[1] = 2;
  checkClean(&s);
  s.blocks[1] = 1;
  s.blocks[2] = 2;
  checkClean(&s);
}

TEST(domains_of_two) {
  ring_setup_t s = setupOf("DD", 2, 1, 1, 1, 1, RING_TWO_STEPS);
  s.owners = 3;
  checkClean(&s);
  s = setupOf("C", 2, 1, 1, 1, 1, RING_TWO_STEPS);
  checkClean(&s);
  s = setupOf("D", 2, 2, 1, 1, 2, RING_ONE_STEP);
  s.owners = 9;
  checkClean(&s);
  s = setupOf("C", 2, 1, 1, 1, 2, RING_ONE_STEP);
  s.uneven = true;
  checkClean(&s);
  s = setupOf("CC", 2, 1, 1, 1, 1, RING_ONE_STEP);
  s.flat = true;
  checkClean(&s);
}

TEST(waits_in_domains_of_two) {
  ring_setup_t s = setupOf("D", 2, 1, 1, 1, 3, RING_AT_ONCE);
  checkClean(&s);
  s.program = "C";
  checkClean(&s);
  s = setupOf("D", 2, 2, 1, 1, 2, RING_AT_ONCE);
  checkClean(&s);
  s = setupOf("C", 2, 2, 1, 2, 2, RING_AT_ONCE);
  checkClean(&s);
  s = setupOf("DC", 2, 1, 1, 1, 2, RING_AT_ONCE);
  s.uneven = true;
  checkClean(&s);
}

typedef struct plant {
  ring_fault_t fault;
  const char *what, *program, *wrong; /* what is found wrong */
  int ringSlots, fifoSlots, chunk, numTokens, blocks[RING_ROLES];
} plant_t;

static const char READ[] = "a ring slot of another token is read";
static const char PUT[] = "a put carries what is not of its ring slot";
static const char UNDER[] = "what is being read was overwritten";
static const char WAIT[] = "ranks wait for each other forever";

static const plant_t PLANTS[] = {
    {RING_FAULT_NO_CREDIT,
     "a ring slot filled without its credit",
     "D",
     PUT,
     1,
     1,
     1,
     2,
     {1, 1, 1}},
    {RING_FAULT_NO_FIFO_CREDIT, "a slot without its credit", "C", WAIT, 2, 1, 1, 2, {1, 1, 1}},
    {RING_FAULT_NO_SIGNAL, "data read before its signal", "D", READ, 1, 1, 1, 2, {1, 1, 1}},
    {RING_FAULT_WEAK, "weak signals", "D", READ, 2, 1, 1, 2, {1, 1, 1}},
    {RING_FAULT_OTHER_CONTEXT, "signals on another context", "C", READ, 1, 1, 1, 2, {1, 1, 1}},
    {RING_FAULT_CREDIT_EARLY,
     "a ring slot given back too early",
     "C",
     UNDER,
     1,
     1,
     1,
     2,
     {1, 1, 1}},
    {RING_FAULT_FULL_CHUNKS, "full chunks alone", "C", WAIT, 4, 1, 3, 3, {1, 1, 1}},
    {RING_FAULT_GAP, "a gap put", "C", PUT, 2, 2, 1, 2, {1, 2, 1}},
    {RING_FAULT_CREDIT_GAP, "a gap given back", "C", UNDER, 2, 2, 1, 3, {1, 1, 2}},
    {RING_FAULT_RESET, "a count set back", "DD", WAIT, 1, 1, 1, 2, {1, 1, 1}},
    {RING_FAULT_NO_CAP, "the next operation's ring slots", "DD", WAIT, 2, 1, 1, 2, {1, 1, 1}},
    {RING_FAULT_RESTART, "ring slots numbered from 0 again", "DD", READ, 2, 1, 1, 1, {1, 1, 1}},
    {RING_FAULT_SIGNAL_LOST, "a signal lost", "D", WAIT, 2, 1, 1, 2, {1, 1, 1}},
    {RING_FAULT_SIGNAL_TWICE, "a signal twice", "DD", READ, 2, 1, 1, 2, {1, 1, 1}},
    {RING_FAULT_CREDIT_LOST, "a credit lost", "D", WAIT, 1, 1, 1, 2, {1, 1, 1}},
    {RING_FAULT_CREDIT_TWICE, "a credit twice", "D", WAIT, 1, 1, 1, 3, {1, 1, 1}},
    {RING_FAULT_POSTER_LEAVES, "the poster leaves early", "D", WAIT, 1, 1, 1, 2, {1, 1, 1}},
    {RING_FAULT_NO_MIDDLE, "nobody forwards", "D", WAIT, 1, 1, 1, 3, {1, 1, 1}},
    {RING_FAULT_NO_MIDDLE, "nobody reduces", "C", WAIT, 1, 1, 1, 2, {1, 1, 1}},
    {RING_FAULT_NO_RECEIVER, "nobody receives, dispatch", "D", WAIT, 1, 1, 1, 3, {1, 1, 1}},
    {RING_FAULT_NO_RECEIVER, "nobody receives, combine", "C", WAIT, 1, 1, 1, 3, {1, 1, 1}},
    {RING_FAULT_ORDER, "all tokens of an owner first", "C", WAIT, 1, 1, 1, 3, {1, 1, 1}},
};

TEST(planted_bugs_are_found) {
  unsigned planted = 0;
  for (size_t i = 0; i < sizeof PLANTS / sizeof *PLANTS; i++) {
    const plant_t *p = &PLANTS[i];
    ring_setup_t s =
        setupOf(p->program, 1, p->ringSlots, p->fifoSlots, p->chunk, p->numTokens, RING_TWO_STEPS);
    memcpy(s.blocks, p->blocks, sizeof s.blocks);
    s.fault = p->fault;
    planted |= 1u << p->fault;
    const outcome_t o = exploreRings(&s, 2000000, false);
    printf("planted: %-36s %s, after %llu states\n", p->what, o.wrong ? o.wrong : "not found",
           (unsigned long long)o.numStates);
    CHECK(o.wrong && !strcmp(o.wrong, p->wrong), "%s: %s", p->what,
          o.wrong ? o.wrong : "not found");
    s.fault = RING_FAULT_NONE;
    const outcome_t clean = exploreRings(&s, 0, true);
    CHECK(!clean.wrong && clean.isComplete, "without it: %s", clean.wrong);
  }
  CHECK(planted == (1u << NUM_RING_FAULTS) - 2, "planted: %x", planted);
}

TEST_MAIN()
