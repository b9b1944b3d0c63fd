/* What test_rings.c and test_rings_large.c check of a setup. */
#ifndef TREFOIL_TESTS_PROTOCOL_RINGS_CHECKS_H
#define TREFOIL_TESTS_PROTOCOL_RINGS_CHECKS_H

#include "ht_ring.h"

#include "test.h"

/* One block of each role, tokens of all ranks. */
static inline ring_setup_t setupOf(const char *program, int perDomain, int ringSlots, int fifoSlots,
                                   int chunk, int numTokens, ring_steps_t steps) {
  return (ring_setup_t){.program = program,
                        .perDomain = perDomain,
                        .ringSlots = ringSlots,
                        .fifoSlots = fifoSlots,
                        .chunk = chunk,
                        .numTokens = numTokens,
                        .steps = steps,
                        .blocks = {1, 1, 1}};
}

/* All paths end, since no step is taken back, and they end where all launches have and all counts agree. */
static inline void checkClean(const ring_setup_t *s) {
  static const char *const STEPS[] = {"two steps", "one step", "at once"};
  const outcome_t o = exploreRings(s, 0, true);
  printf("2 domains x %d, %s, rings of %d, FIFOs of %d, chunks of %d, %d tokens%s%s%s, "
         "%d + %d + %d blocks, %s: %llu states\n",
         s->perDomain, s->program, s->ringSlots, s->fifoSlots, s->chunk, s->numTokens,
         s->owners ? " of some" : "", s->uneven ? ", uneven" : "", s->flat ? ", flat" : "",
         s->blocks[0], s->blocks[1], s->blocks[2], STEPS[s->steps],
         (unsigned long long)o.numStates);
  CHECK(!o.wrong, "%s", o.wrong);
  CHECK(o.isComplete && o.numStates > 100, "%llu states", (unsigned long long)o.numStates);
}

#endif
