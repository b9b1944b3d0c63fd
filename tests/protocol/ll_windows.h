/* Low-latency dispatches straight into the receivers' outputs as a machine to search
 * (kernels/device/straight.cuh): is an output written only while its owner is in the operation, is
 * every row there when it has been received, and do the ranks ever wait for each other forever.
 *
 * A rank runs launches in order: a whole operation (B), the sending part of the next one (S), the
 * receiving part of the oldest (R). The sending part tells each peer that the rank is in the
 * operation, once the peer has received the operation before the last one; a block that has heard
 * all peers writes its rows to each peer with which the pair goes straight, its weights as lines,
 * and adds to that peer's count. The receiving part hears all peers, takes the weights, and ends
 * when every count is full. A pair goes straight if both ranks do in that operation; lines of other
 * pairs are left out, they are explored elsewhere (explorer.h). */
#ifndef TREFOIL_TESTS_PROTOCOL_LL_WINDOWS_H
#define TREFOIL_TESTS_PROTOCOL_LL_WINDOWS_H

#include "search.h"

enum { WINDOW_RANKS = 3, WINDOW_BLOCKS = 2 };

typedef enum window_fault {
  WINDOW_FAULT_NONE,
  WINDOW_FAULT_NO_FREE,    /* words are stored before the peer has received the operation but one */
  WINDOW_FAULT_NO_HEARING, /* blocks write without having heard the peers */
  WINDOW_FAULT_ANY_WORD,   /* a peer's word of an earlier operation will do */
  WINDOW_FAULT_EARLY_DONE, /* a block adds to the counts before its rows are written */
  WINDOW_FAULT_NO_COUNT,   /* a rank has received without looking at the counts */
  WINDOW_FAULT_LATE_BASE,  /* what the counts start from is looked up after the word is said */
  WINDOW_FAULT_ONE_COUNT,  /* the counts of two operations in flight are one */
  NUM_WINDOW_FAULTS
} window_fault_t;

typedef struct window_setup {
  int numRanks, numBlocks;
  const char *program[WINDOW_RANKS]; /* of B, S and R; as many operations on each rank */
  unsigned straight[WINDOW_RANKS];   /* bit e: in operation e the rank goes straight */
  window_fault_t fault;
} window_setup_t;

/* Every state that is reachable. */
outcome_t exploreWindows(const window_setup_t *setup, uint64_t maxStates, bool trace);

#endif
