/* What the test programs of the explored protocol share: a setup, run for each kind of operation. */
#ifndef TREFOIL_TESTS_PROTOCOL_CHECKS_H
#define TREFOIL_TESTS_PROTOCOL_CHECKS_H

#include "explorer.h"

#include "test.h"

static const char *const KINDS[] = {"dispatch", "combine", "partial"};
static const char *const FATES[] = {"", ", the last rank dies", ", the last rank dies, no mask",
                                    ", the last rank is late"};

static setup_t setupOf(kind_t kind, int numRanks, int numBlocks, const char *program) {
  setup_t s = {0};
  s.kind = kind;
  s.numRanks = numRanks;
  s.numBlocks = numBlocks;
  s.program[0] = program;
  s.flags = 16;
  s.clearPeriod = 16;
  s.numTokens = MAX_TOKENS;
  return s;
}

static void print(const setup_t *s, const outcome_t *o) {
  printf("%-8s %d ranks x %d blocks, %s", KINDS[s->kind], s->numRanks, s->numBlocks, s->program[0]);
  for (int r = 1; r < s->numRanks; r++) {
    if (s->program[r]) printf(" | %s", s->program[r]);
  }
  printf("%s%s%s: %llu states, %llu moves\n", s->fine ? ", every store a step" : "", FATES[s->dies],
         s->fault ? ", planted" : "", (unsigned long long)o->numStates,
         (unsigned long long)o->numMoves);
}

static void checkClean(setup_t s) {
  const outcome_t o = explore(&s, true);
  print(&s, &o);
  CHECK(!o.wrong, "%s: %s", KINDS[s.kind], o.wrong);
  CHECK(o.isComplete, "%s: not all states were seen", KINDS[s.kind]);
  CHECK(o.numStates > 100, "only %llu states", (unsigned long long)o.numStates);
}

static void checkKinds(setup_t s) {
  for (kind_t kind = DISPATCH; kind <= PARTIAL; kind++) {
    s.kind = kind;
    checkClean(s);
  }
}

#endif
