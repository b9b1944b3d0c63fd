/* The rings of the high-throughput kernels as a machine to search (docs/kernels_ht.md, Rings): can full rings
 * deadlock, is a unit overwritten before it was read.
 *
 * A rank has feeding and following blocks. A block takes windows of candidates off its role's counter, some
 * ahead of time, and goes through them in order; a feeder that has run dry follows. An item runs at once
 * when all that it waits for is there: a feeder's, when the units it will fill have been given back; a
 * follower's, when its pieces have been flagged. Flags follow the stores at any later time. Operations
 * come one after the other without a meeting of ranks, and streams count on. */
#ifndef TREFOIL_TESTS_PROTOCOL_RINGS_H
#define TREFOIL_TESTS_PROTOCOL_RINGS_H

#include "search.h"

enum { RING_RANKS = 3, RING_BLOCKS = 3, RING_TOKENS = 4, RING_AHEAD = 2, RING_STREAM = 32 };

typedef enum ring_fault {
  RING_FAULT_NONE,
  RING_FAULT_ORDER,    /* candidates by (token, rank, piece) */
  RING_FAULT_ALL_FEED, /* no block follows from the start */
  RING_FAULT_LAZY, /* flags wait for further stores: a feeder with nothing to do keeps some back */
  RING_FAULT_NO_CREDIT, /* units are filled without being given back */
  RING_FAULT_HALF,      /* units are given back when the piece's flag is seen, before it is read */
  RING_FAULT_RESTART,   /* an operation numbers its pieces from 0 again */
  NUM_RING_FAULTS
} ring_fault_t;

typedef struct ring_setup {
  bool gathers;    /* combine: a follower's item needs a piece of every rank of its token */
  bool everywhere; /* every token goes to every rank; else to some */
  int numRanks, numFeeders, numFollowers, units, numTokens, numPieces, numOperations;
  int take, ahead; /* candidates of a window; windows taken ahead of time, at most RING_AHEAD */
  ring_fault_t fault;
} ring_setup_t;

/* Every state that is reachable. */
outcome_t exploreRings(const ring_setup_t *setup, uint64_t maxStates, bool trace);

#endif
