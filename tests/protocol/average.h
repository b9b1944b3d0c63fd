/* The synchronisation of A2SGD's parameters as a machine to search (kernels/a2sgd/a2sgd_sync.cuh): is a
 * stage or a slice of the mean read only while it is of the reader's chunk, and do the ranks ever wait for
 * each other forever.
 *
 * A channel's chunks, one after the other. A rank copies its own into its stage, posts a word to each peer,
 * reads all stages when it has their words, posts a word for its slice of the mean, and takes the others'
 * slices when they have come. Ranks that see one another may see different ranks beside: then each sums the
 * slices itself, out of the stages. Limits of waits are left out. */
#ifndef TREFOIL_TESTS_PROTOCOL_AVERAGE_H
#define TREFOIL_TESTS_PROTOCOL_AVERAGE_H

#include "search.h"

enum { AVERAGE_RANKS = 3, AVERAGE_CHUNKS = 4 };

typedef enum average_fault {
  AVERAGE_FAULT_NONE,
  AVERAGE_FAULT_ONE_WORD,   /* words of all chunks lie in one place */
  AVERAGE_FAULT_ONE_STAGE,  /* a rank has one stage */
  AVERAGE_FAULT_EARLY_POST, /* the word of a stage before the copy */
  AVERAGE_FAULT_EARLY_SUM,  /* stages are read without their words */
  AVERAGE_FAULT_EARLY_TAKE, /* slices are taken without their words */
  NUM_AVERAGE_FAULTS
} average_fault_t;

typedef struct average_setup {
  int numRanks, numChunks;
  uint8_t
      views[AVERAGE_RANKS]; /* of each rank: the ranks that it sees, and is seen by; itself, too */
  uint8_t slices[AVERAGE_CHUNKS]; /* of each chunk: the ranks that have a slice */
  average_fault_t fault;
} average_setup_t;

/* Every state that is reachable. */
outcome_t exploreAverage(const average_setup_t *setup, uint64_t maxStates, bool trace);

#endif
