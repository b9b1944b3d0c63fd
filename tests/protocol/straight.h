/* Dispatches straight into the receivers' outputs as a machine to search (kernels/ht/ht_direct.cuh): is
 * an output written only while its owner is in the operation, is every row there when the operation
 * ends, and do the ranks ever wait for each other forever.
 *
 * In every operation a rank tells each peer that it is in it (with its rows' places there, as expert-major
 * does) and whether its output lies in a window. A pair goes direct if both do. A block of such a rank
 * hears all peers, writes its rows, a row and its weights to each peer, and adds to that peer's count; the
 * rank leaves the operation when all blocks are through, the weights are taken and every peer's count is
 * full. A rank without a window leaves when it has heard all. Rows through rings are left out: nothing
 * holds such ranks back. */
#ifndef TREFOIL_TESTS_PROTOCOL_STRAIGHT_H
#define TREFOIL_TESTS_PROTOCOL_STRAIGHT_H

#include "search.h"

enum { STRAIGHT_RANKS = 3, STRAIGHT_BLOCKS = 2 };

typedef enum straight_fault {
  STRAIGHT_FAULT_NONE,
  STRAIGHT_FAULT_ONE_BUFFER, /* words of all operations lie in one place */
  STRAIGHT_FAULT_NO_HEARING, /* blocks write without having heard the peers */
  STRAIGHT_FAULT_RUN_AHEAD,  /* a rank without a window leaves without having heard all */
  STRAIGHT_FAULT_EARLY_DONE, /* a block adds to the counts before its rows are written */
  STRAIGHT_FAULT_NO_COUNT,   /* a rank leaves without looking at the counts */
  STRAIGHT_FAULT_LATE_BASE,  /* what the counts start from is looked up after the word is said */
  NUM_STRAIGHT_FAULTS
} straight_fault_t;

typedef struct straight_setup {
  int numRanks, numBlocks, numOperations;
  unsigned open[STRAIGHT_RANKS]; /* bit e: in operation e the rank's output lies in a window */
  straight_fault_t fault;
} straight_setup_t;

/* Every state that is reachable. */
outcome_t exploreStraight(const straight_setup_t *setup, uint64_t maxStates, bool trace);

#endif
