/* The FIFOs of the high-throughput kernels as a machine to search (docs/kernels_ht.md, FIFOs): can full FIFOs
 * deadlock, is a FIFO slot overwritten before it was read.
 *
 * A rank has sending and receiving blocks. A block takes windows of candidates off its role's counter, some
 * ahead of time, and goes through them in order; a sender without further work becomes a receiver. An item
 * runs at once when all that it waits for is there: a sender's, when the FIFO slots it will fill have been
 * given back; a receiver's, when its chunks have been flagged. Flags follow the stores at any later time.
 * Operations come one after the other without a barrier of ranks, and streams count on. */
#ifndef TREFOIL_TESTS_PROTOCOL_FIFOS_H
#define TREFOIL_TESTS_PROTOCOL_FIFOS_H

#include "search.h"

enum { FIFO_RANKS = 3, FIFO_BLOCKS = 3, FIFO_TOKENS = 4, FIFO_AHEAD = 2, FIFO_STREAM = 32 };

typedef enum fifo_fault {
  FIFO_FAULT_NONE,
  FIFO_FAULT_ORDER,    /* candidates by (token, rank, chunk) */
  FIFO_FAULT_ALL_SEND, /* no block receives from the start */
  FIFO_FAULT_LAZY, /* flags wait for further stores: a sender with nothing to do keeps some back */
  FIFO_FAULT_NO_CREDIT, /* FIFO slots are filled without being given back */
  FIFO_FAULT_HALF, /* FIFO slots are given back when the chunk's flag is seen, before it is read */
  FIFO_FAULT_RESTART, /* an operation numbers its chunks from 0 again */
  NUM_FIFO_FAULTS
} fifo_fault_t;

typedef struct fifo_setup {
  bool gathers;    /* combine: a receiver's item needs a chunk of every rank of its token */
  bool everywhere; /* every token goes to every rank; else to some */
  int numRanks, numSenders, numReceivers, slots, numTokens, numChunks, numOperations;
  int take, ahead; /* candidates of a window; windows taken ahead of time, at most FIFO_AHEAD */
  fifo_fault_t fault;
} fifo_setup_t;

/* Every state that is reachable. */
outcome_t exploreFifos(const fifo_setup_t *setup, uint64_t maxStates, bool trace);

#endif
