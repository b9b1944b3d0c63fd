/* The relay of low latency across NVLink domains (kernels/ll/relay.cuh) as a machine to search: is a mirror,
 * a message or exchange memory written only when nobody needs what it holds, is a message read only when it
 * is there, and does every wait end.
 *
 * Every rank is a domain of its own. It has a list of launches in stream order: whole operations, sends,
 * receives. In a launch the kernel of one domain is a sending and a receiving role for each peer; the
 * relay beside it has a few warps for each peer that pack and post, and as many that land. A put is
 * under way for any time: its source is read as late as the network may, its parts arrive in any order, its
 * signal after them. */
#ifndef TREFOIL_TESTS_PROTOCOL_LL_RELAY_H
#define TREFOIL_TESTS_PROTOCOL_LL_RELAY_H

#include "search.h"

enum { RELAY_RANKS = 3, RELAY_WARPS = 2, RELAY_ROWS = 2 };

typedef enum relay_fault {
  RELAY_FAULT_NONE,
  RELAY_FAULT_NO_FREE_CHECK,  /* a launch stores into a mirror without waiting for its peer */
  RELAY_FAULT_ONE_MESSAGE,    /* all operations' messages lie in one place */
  RELAY_FAULT_SIGNAL_FIRST,   /* a signal may arrive before its data: on another context */
  RELAY_FAULT_NO_SIGNAL,      /* a message is read without its signal */
  RELAY_FAULT_POST_BY_FIRST,  /* the first warp that has packed its rows posts the message */
  RELAY_FAULT_ROWS_UNCHECKED, /* rows of the mirror are packed without a look at their flags */
  RELAY_FAULT_FREE_BY_FIRST,  /* the first warp that has landed says that the buffer is free */
  RELAY_FAULT_FREE_EARLY,     /* it is said before the launch has received */
  RELAY_FAULT_RESET,          /* a signal is set back once it was seen */
  RELAY_FAULT_NO_FREE,        /* receive-only launches do not say that they have received */
  RELAY_FAULT_NO_HEAD, /* a launch that waits for its peer is not told what the last message's head says */
  NUM_RELAY_FAULTS
} relay_fault_t;

typedef struct relay_setup {
  int numRanks, numWarps; /* for each peer and direction */
  int numRows;            /* of a message */
  const char *program
      [RELAY_RANKS]; /* B a whole operation, S sends the next, R receives the oldest sent; NULL: rank 0's */
  relay_fault_t fault;
} relay_setup_t;

/* Every state that is reachable. */
outcome_t exploreRelay(const relay_setup_t *setup, uint64_t maxStates, bool trace);

#endif
