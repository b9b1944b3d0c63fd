/* Dispatches that push into the receivers' outputs, or pull out of the senders' inputs, as a machine to
 * search (kernels/ht/ht_pairs.cuh): is a window used only while its owner is in the operation, is every
 * row there when the operation ends, and do the ranks ever wait for each other forever.
 *
 * In every operation a rank tells each peer that it is in it (with its rows' slots there, as expert-major
 * does) and whether its output, or its input, lies in a window. A pair pushes, or pulls, if both do. A
 * block of such a rank waits for all peers, writes its rows, a row and its weights to each peer, or reads
 * that peer's and writes the weights, and adds to that peer's count;
 * the rank leaves the operation when all blocks are through, the weights are taken and every peer's count is
 * full. A rank without a window leaves when it has all announcements. Rows through FIFOs are left out:
 * nothing holds such ranks back. */
#ifndef TREFOIL_TESTS_PROTOCOL_PUSH_H
#define TREFOIL_TESTS_PROTOCOL_PUSH_H

#include "search.h"

enum { PUSH_RANKS = 3, PUSH_BLOCKS = 2 };

typedef enum push_fault {
  PUSH_FAULT_NONE,
  PUSH_FAULT_ONE_BUFFER, /* words of all operations lie in one place */
  PUSH_FAULT_NO_WAIT,    /* blocks write without the peers' announcements */
  PUSH_FAULT_RUN_AHEAD,  /* a rank without a window leaves without all announcements */
  PUSH_FAULT_EARLY_DONE, /* a block adds to the counts before its rows are written */
  PUSH_FAULT_NO_COUNT,   /* a rank leaves without looking at the counts */
  PUSH_FAULT_LATE_BASE, /* what the counts start from is looked up after the announcement is sent */
  NUM_PUSH_FAULTS
} push_fault_t;

typedef struct push_setup {
  int numRanks, numBlocks, numOperations;
  unsigned open[PUSH_RANKS]; /* bit e: in operation e the rank's output or input lies in a window */
  push_fault_t fault;
  unsigned pulls[PUSH_RANKS]; /* bit e: it is the input */
} push_setup_t;

/* Every state that is reachable. */
outcome_t explorePush(const push_setup_t *setup, uint64_t maxStates, bool trace);

#endif
