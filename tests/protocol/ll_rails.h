/* Low latency's dispatch by rails (kernels/ll/relay.cuh) as a machine to search: two domains of two ranks, so
 * every rank has a mate, whom it stores to, and a peer in the other domain, whom it sends one message an
 * operation for both ranks there. The peer's relay stores what is for its mate into the mate's memory.
 *
 * Found out: is exchange memory, a mirror or a message written only when nobody needs what it holds, is a
 * message read only when it is there, is nobody said to have received what it has not, does every wait end.
 * Launches and the network are as in ll_relay.h; a relay's steps to one rank are one. */
#ifndef TREFOIL_TESTS_PROTOCOL_LL_RAILS_H
#define TREFOIL_TESTS_PROTOCOL_LL_RAILS_H

#include "search.h"

enum { RAILS_RANKS = 4 };

typedef enum rails_fault {
  RAILS_FAULT_NONE,
  RAILS_FAULT_NO_FREE_CHECK, /* the source's mirrors are stored to without waiting for receipts */
  RAILS_FAULT_ONE_MESSAGE,   /* all operations' messages lie in one place */
  RAILS_FAULT_SIGNAL_FIRST,  /* a signal may arrive before its data */
  RAILS_FAULT_NO_SIGNAL,     /* a message is read without its signal */
  RAILS_FAULT_POST_BY_FIRST, /* posted when the words for one rank are packed */
  RAILS_FAULT_CREDIT_EARLY, /* a peer's receipt is enough, and said before its mate's rows are read */
  RAILS_FAULT_NO_FORWARDER, /* a relay lands what is for its own rank alone */
  RAILS_FAULT_OWN_RELAY,    /* a launch ends before its relay has landed the mate's rows */
  RAILS_FAULT_FREE_UNTOLD,  /* what a peer says of its receipts is not told to the mate */
  NUM_RAILS_FAULTS
} rails_fault_t;

typedef struct rails_setup {
  /* B a whole operation, S sends the next, R receives the oldest sent; NULL: as rank 0 */
  const char *program[RAILS_RANKS];
  rails_fault_t fault;
} rails_setup_t;

/* Every state that is reachable. */
outcome_t exploreRails(const rails_setup_t *setup, uint64_t maxStates, bool trace);

#endif
