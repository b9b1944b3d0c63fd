/* The handshake of zero-copy operations as a machine to search (kernels/ht/ht_handshake.cuh): dispatches that
 * push into the receivers' outputs or pull out of the senders' inputs, flat combines that pull. Is memory
 * used only while its owner is in the operation, do two ranks always agree on the way between them, is
 * every row there when the operation ends, and do the ranks ever wait for each other forever.
 *
 * In every operation a rank tells each peer that it takes part: one word with a tag (none, its output, or its
 * input, lies in a window), and if there is a tag a second word with data, here which window it is. Words
 * arrive in any order, in one place, whatever operation they are of. A pair pushes if both have
 * announced outputs of the same window, pulls if both have announced inputs, else it uses FIFOs.
 *
 * A block of a rank with a tag waits for each peer, a word of a later operation being as good as "no tag";
 * then it writes its rows, a row and its weights to each peer that agrees, or reads that peer's and writes
 * the weights, and adds to that peer's count. The rank leaves when all blocks are through, the weights
 * are taken and every such peer's count is full. A rank without a tag leaves as soon as it has announced
 * that. Rows through FIFOs are left out: nothing holds such ranks back. */
#ifndef TREFOIL_TESTS_PROTOCOL_HANDSHAKE_H
#define TREFOIL_TESTS_PROTOCOL_HANDSHAKE_H

#include "search.h"

enum { HANDSHAKE_RANKS = 3, HANDSHAKE_BLOCKS = 2 };

typedef enum handshake_fault {
  HANDSHAKE_FAULT_NONE,
  HANDSHAKE_FAULT_EXACT, /* a word of a later operation is waited past, for one that will not come */
  HANDSHAKE_FAULT_ANY_NUMBER, /* a word of a later operation is taken for this one's */
  HANDSHAKE_FAULT_ANY_TAG,    /* a pair does without FIFOs if both have announced any tag */
  HANDSHAKE_FAULT_ANY_WINDOW, /* a pair pushes into whatever windows both have announced */
  HANDSHAKE_FAULT_HALF_WORD,  /* the data is believed when the first word is there */
  HANDSHAKE_FAULT_NO_WAIT,    /* blocks use the peers' memory without their announcements */
  HANDSHAKE_FAULT_EARLY_DONE, /* a block adds to the counts before its rows are written or read */
  HANDSHAKE_FAULT_NO_COUNT,   /* a rank leaves without looking at the counts */
  HANDSHAKE_FAULT_LATE_BASE,  /* what the counts start from is looked up after the announcement */
  NUM_HANDSHAKE_FAULTS
} handshake_fault_t;

/* By rank, bit e: of operation e. */
typedef struct handshake_setup {
  int numRanks, numBlocks, numOperations;
  unsigned open[HANDSHAKE_RANKS]; /* the rank's output or input lies in a window */
  handshake_fault_t fault;
  unsigned pulls[HANDSHAKE_RANKS]; /* it is the input */
  unsigned other[HANDSHAKE_RANKS]; /* the output lies in another window */
} handshake_setup_t;

/* Every state that is reachable. */
outcome_t exploreHandshake(const handshake_setup_t *setup, uint64_t maxStates, bool trace);

#endif
