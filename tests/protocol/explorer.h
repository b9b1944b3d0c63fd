/* The low-latency protocol as a model that can be explored state by state (docs/kernels.md, States).
 *
 * A rank is a list of launches in stream order; a launch is a few blocks; a block is two roles, one
 * that sends and one that receives, as warps are. Roles advance by the steps below in any order, the
 * control words are shared as on the device, and the arithmetic on them is the kernels' own
 * (kernels/common/protocol.h). A store to exchange memory is first queued at its cell and arrives at any
 * later time: stores to different cells in any order, stores of one rank to one cell in theirs.
 *
 * What a cell holds says more than on the device: beside the flag, which operation and source truly wrote
 * it. A role that takes a cell by its flag and finds another operation or source has found a bug; so has
 * an end of all steps with a launch left. */
#ifndef TREFOIL_TESTS_PROTOCOL_H
#define TREFOIL_TESTS_PROTOCOL_H

#include "search.h"

enum {
  MAX_RANKS = 3,
  MAX_BLOCKS = 3,
  MAX_TOKENS = 2,
  NUM_K = 2,
  MAX_LAUNCHES = 32,
  NUM_HANDLES = 4
};
enum { MAX_CELLS = 2 * MAX_RANKS * (2 + 2 * MAX_TOKENS), MAX_ORDINAL = 30, MAX_STEPS = 12 };

typedef enum kind { DISPATCH, COMBINE, PARTIAL } kind_t; /* COMBINE: exact and rank-major */
enum { SEND = 1, RECV = 2, BOTH = 3 };

/* Bugs that can be planted; 0 plants none. */
typedef enum fault {
  FAULT_NONE,
  FAULT_NO_FREE_CHECK,      /* a send never waits for its buffer */
  FAULT_ONE_BUFFER,         /* every operation uses buffer 0 */
  FAULT_ACK_DISTANCE_SHORT, /* the ack distance sent is one too short */
  FAULT_LEAST_ACK_DISTANCE, /* the least ack distance received counts, not the greatest */
  FAULT_ACKED_EARLY,        /* a peer that has sent counts as one that has received */
  FAULT_DONE_AT_SEND,       /* a sent operation counts as received */
  FAULT_FREE_BY_FIRST,      /* the first block that ends tells that the buffer is free */
  FAULT_NO_ACKS,            /* launches that send do not tell what they have received */
  FAULT_WHOLE_UNTOLD,       /* launches that send and receive do not */
  FAULT_CLOCK_BY_ONE,       /* block 0 counts the operation alone */
  FAULT_CLOCK_AT_START,     /* blocks are counted when they start */
  FAULT_NUMBER_BY_CLOCK,    /* a receive takes its number from the clock, not from its handle */
  FAULT_NO_CLEAR,           /* buffers are never cleared */
  FAULT_CLEAR_BY_FIRST,     /* the first block that ends clears */
  FAULT_CLEAR_UNFENCED,     /* nobody waits for the clearing stores */
  FAULT_CLEAR_OTHER,        /* the other buffer is cleared */
  FAULT_SHORT_FLAGS,        /* flags repeat after two operations */
  FAULT_ARRIVALS_STAY,      /* the arrivals are not set back */
  FAULT_NO_TIMEOUT_FREE,    /* the wait for a free buffer has no limit */
  FAULT_NO_TIMEOUT_WORDS,   /* the wait for words and announcements has no limit */
  NUM_FAULTS
} fault_t;
const char *faultName(fault_t fault);

/* What befalls the last rank: it stops at any moment, and waits for it end with a mask or with failure;
 * or it is late, is masked although it lives, and goes on. */
typedef enum dies { NOBODY, DIES, DIES_UNMASKED, LATE } dies_t;

typedef struct setup {
  kind_t kind;
  int numRanks, numBlocks;
  /* B a whole operation, S sends the next, R receives the oldest one sent, L the latest; NULL: rank 0's */
  const char *program[MAX_RANKS];
  int first;              /* operations before these */
  int flags, clearPeriod; /* as EP_LL_FLAGS and EP_LL_CLEAR_PERIOD */
  int numTokens;          /* 0 to MAX_TOKENS a rank, uneven; or exactly -numTokens */
  dies_t dies;
  fault_t fault;
  bool fine;          /* no reduction: every store, load and delivery is a step of its own */
  uint64_t maxStates; /* gives up beyond; 0 = no limit */
} setup_t;

typedef enum step {
  STEP_END,
  STEP_READ, /* the control words */
  STEP_ACK,  /* post what has been received out of the other buffer */
  STEP_FREE, /* wait until the buffer may be written */
  STEP_PUT_WORDS,
  STEP_PUT_ROWS,
  STEP_PUT_ANNOUNCE,
  STEP_GET_WORDS,
  STEP_GET_ROWS,
  STEP_GET_ANNOUNCE,
  STEP_RECORD,
  /* of a block, after both roles */
  STEP_ARRIVE,
  STEP_FENCE,
  STEP_POST,
  STEP_COUNT
} step_t;

/* What lies in a cell: flag, ordinal of the operation that wrote it, its source, the ack distance it
 * carries. */
typedef uint16_t word_t;
enum {
  CLEARING = 0xffff,
  MAX_ACK_DISTANCE_SENT = 15
}; /* CLEARING: a store of zeros by the owner */
static inline word_t wordOf(unsigned flag, unsigned ordinal, unsigned source,
                            unsigned ackDistance) {
  return (word_t)(flag | ordinal << 5 | source << 10 | ackDistance << 12);
}
static inline unsigned markIn(word_t w) {
  return w & 31;
}
static inline unsigned ordinalIn(word_t w) {
  return w >> 5 & 31;
}
static inline unsigned sourceIn(word_t w) {
  return w >> 10 & 3;
}
static inline unsigned ackDistanceIn(word_t w) {
  return w >> 12;
}

typedef struct cell {
  word_t now, queue[2]; /* queue[0] is the older; another source's may overtake */
} cell_t;

typedef struct role {
  uint8_t pc, number, ackDistance, isFree, active,
      greatestDistance; /* what it read at its start; greatest ack distance received */
  uint16_t got;         /* cells taken so far, if fine */
} role_t;

typedef struct block {
  role_t role[2];
  uint8_t finish, isLast;
} block_t;

typedef struct rank {
  uint32_t clock;
  uint8_t done[2], acked[2], sent[NUM_HANDLES];
  uint8_t launch, arrived, mask, failed, gone;
  block_t block[MAX_BLOCKS];
  cell_t cell[MAX_CELLS];
} rank_t;

typedef struct state {
  rank_t rank[MAX_RANKS];
} state_t;

typedef struct launch {
  uint8_t parts, ordinal;
} launch_t;

typedef struct model {
  setup_t setup;
  launch_t launch[MAX_RANKS][MAX_LAUNCHES];
  int numLaunches[MAX_RANKS];
  /* [parts][role][block 0 or another] */
  uint8_t steps[4][2][2][MAX_STEPS];
  int numCells;
} model_t;

/* Of move_t: kind; item is a cell, the rank given up, or a place in a list. */
typedef enum move_kind {
  MOVE_ROLE,
  MOVE_FINISH,
  MOVE_ARRIVES,
  MOVE_DIES,
  MOVE_GIVES_UP
} move_kind_t;
enum { ALL_ITEMS = 255 };

void modelInit(model_t *m, const setup_t *setup);
void modelStart(const model_t *m, state_t *s);
/* Moves that are possible in s; if one of them alone is enough, only that. */
int modelMoves(const model_t *m, const state_t *s, move_t moves[MAX_MOVES]);
/* Makes a move. NULL, or what is wrong. */
const char *modelMake(const model_t *m, state_t *s, move_t move);
/* NULL, or which rank has not ended. For states without moves. */
const char *modelUnfinished(const model_t *m, const state_t *s);
void modelDescribe(const model_t *m, const state_t *s, move_t move, char *text, size_t size);

/* Depth first through every reachable state. With `trace`, prints the way to what is wrong. */
outcome_t explore(const setup_t *setup, bool trace);

#endif
