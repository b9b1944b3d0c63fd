/* Flat combines that pull out of windows as a machine to search (kernels/ht/ht_pull.cuh): are rows read only
 * while their owner is in the operation, do two ranks always agree on the way between them, and do the ranks
 * ever wait for each other forever.
 *
 * In every operation a rank tells each peer, in two words that arrive in any order, whether its input lies in
 * a window and where. There is one place for these words, and a rank without a window leaves as soon as it
 * has announced that. A block of a rank with one waits for each peer, a word of a later operation being as
 * good as "no window"; sends its peers' gradients; reads the rows of each peer that has a window too, and
 * adds to that peer's count. The rank leaves when all blocks are through, the gradients are taken and
 * every such peer's count is full. Rows through FIFOs are left out: nothing holds such ranks back. */
#ifndef TREFOIL_TESTS_PROTOCOL_PULL_H
#define TREFOIL_TESTS_PROTOCOL_PULL_H

#include "search.h"

enum { PULL_RANKS = 3, PULL_BLOCKS = 2 };

typedef enum pull_fault {
  PULL_FAULT_NONE,
  PULL_FAULT_EXACT, /* a word of a later operation is waited past, for one that will not come */
  PULL_FAULT_ANY_NUMBER,  /* a word of a later operation is taken for this one's */
  PULL_FAULT_HALF_WORD,   /* where rows lie is believed when one of the two words is there */
  PULL_FAULT_NO_WAIT,     /* blocks read without the peers' announcements */
  PULL_FAULT_EARLY_COUNT, /* a block adds to the counts before it has read */
  PULL_FAULT_NO_COUNT,    /* a rank leaves without looking at the counts */
  PULL_FAULT_LATE_BASE, /* what the counts start from is looked up after the announcement is sent */
  NUM_PULL_FAULTS
} pull_fault_t;

typedef struct pull_setup {
  int numRanks, numBlocks, numOperations;
  unsigned open[PULL_RANKS]; /* bit e: in operation e the rank's input lies in a window */
  pull_fault_t fault;
} pull_setup_t;

/* Every state that is reachable. */
outcome_t explorePull(const pull_setup_t *setup, uint64_t maxStates, bool trace);

#endif
