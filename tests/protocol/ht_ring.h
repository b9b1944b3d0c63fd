/* The rings of high throughput across NVLink domains (kernels/ht/ht_far.h) as a machine to search: is a ring
 * slot or a FIFO slot written only when nobody needs what it holds, is it read only when it is there, and
 * does every wait end.
 *
 * Two domains. A rank runs dispatches and combines in stream order, and no ranks meet in between. A launch
 * has worker blocks and a poster. A block sends, then forwards (combine: reduces), then receives, from the
 * role on that it starts with; it takes work off its role's counter. An item begins once all that it waits
 * for is there: it reads, and writes where its rows go. When it ends it looks once more at what it has read,
 * and only then raises its words, flags and credits. The poster does its four things in any order and at
 * any time.
 *
 * A put is under way for any time. Its parts arrive in any order, each with what its source holds at that
 * moment, its strong signal after them and after the parts of earlier puts. Credits arrive one by one, at
 * any time. A rank may be told at any time that nothing is under way, for a source may be read early; so
 * the poster of the model may put any number of complete ring slots, up to a chunk. */
#ifndef TREFOIL_TESTS_PROTOCOL_HT_RING_H
#define TREFOIL_TESTS_PROTOCOL_HT_RING_H

#include "search.h"

enum { RING_RANKS = 4, RING_TOKENS = 4, RING_OPERATIONS = 4, RING_BLOCKS = 4 };
enum { RING_SLOTS = 4, FIFO_SLOTS = 2, RING_ROLES = 3 };

typedef enum ring_fault {
  RING_FAULT_NONE,
  RING_FAULT_NO_CREDIT,      /* a ring slot is filled without waiting for its credit */
  RING_FAULT_NO_FIFO_CREDIT, /* so is a FIFO slot, by forwarders and senders of combine */
  RING_FAULT_NO_SIGNAL,      /* a ring slot is read as soon as it is put */
  RING_FAULT_WEAK,           /* a signal says that its own put is there, not earlier ones */
  RING_FAULT_OTHER_CONTEXT,  /* a signal may overtake its own data, too */
  RING_FAULT_CREDIT_EARLY,   /* a ring slot is given back when its reader begins */
  RING_FAULT_FULL_CHUNKS,    /* full chunks only are put, or the end of the operation */
  RING_FAULT_GAP,        /* ring slots behind one that is not filled are put, and it with them */
  RING_FAULT_CREDIT_GAP, /* ring slots are given back with one before them that is still read */
  RING_FAULT_RESET,  /* a launch that ends sets its count of landed ring slots to what it expects */
  RING_FAULT_NO_CAP, /* the poster takes ring slots of the next operation for this one's */
  RING_FAULT_RESTART,      /* an operation numbers its ring slots from 0 again */
  RING_FAULT_SIGNAL_LOST,  /* one signal does not arrive */
  RING_FAULT_SIGNAL_TWICE, /* one arrives twice */
  RING_FAULT_CREDIT_LOST,
  RING_FAULT_CREDIT_TWICE,
  RING_FAULT_POSTER_LEAVES, /* the poster ends when all is put, whatever has still to land */
  RING_FAULT_NO_MIDDLE,     /* no block forwards or reduces from the start: it sends first */
  RING_FAULT_NO_RECEIVER,   /* no block receives from the start: it forwards or reduces first */
  RING_FAULT_ORDER, /* senders of combine take all tokens of an owner before the next owner */
  NUM_RING_FAULTS
} ring_fault_t;

/* How items run. In two steps: every step of all there is. In one step: what takes nothing from anybody goes
 * first, as words raised. At once: so do items and the parts of puts, which answers only whether a wait lasts
 * forever. */
typedef enum ring_steps { RING_TWO_STEPS, RING_ONE_STEP, RING_AT_ONCE } ring_steps_t;

typedef struct ring_setup {
  const char *program;      /* D a dispatch, C a combine; the same on all ranks */
  int perDomain;            /* ranks of a domain */
  int ringSlots, fifoSlots; /* of a ring, of a FIFO: powers of two */
  int chunk;                /* ring slots of a put at most */
  int numTokens;            /* chunks of a rank's tokens, one after the other */
  unsigned owners;          /* bits: ranks that have tokens; 0: all */
  bool uneven; /* tokens go to some ranks, others in each operation; else all go to all */
  bool flat;   /* combine: rows for the rank itself are read in place, without FIFO */
  ring_steps_t steps;
  int blocks[RING_ROLES]; /* that start as senders, forwarders or reducers, receivers */
  ring_fault_t fault;
} ring_setup_t;

/* Every state that is reachable. */
outcome_t exploreRings(const ring_setup_t *setup, uint64_t maxStates, bool trace);

#endif
