/* What the files of the rings' machine share: what is known from the tables, and states. */
#ifndef TREFOIL_TESTS_PROTOCOL_HT_RING_STATE_H
#define TREFOIL_TESTS_PROTOCOL_HT_RING_STATE_H

#include "ht_ring.h"

enum { DISPATCHES, COMBINES, NUM_KINDS };
enum { SEND, PASS, RECEIVE, ENDED }; /* roles; PASS: forwards or reduces */
enum {
  LOCATIONS = RING_RANKS + 1,
  CANDIDATES = RING_TOKENS * RING_RANKS,
  STREAM = RING_OPERATIONS * RING_TOKENS
};

/* ---- What is known from the tables ---- */

/* A slot of the ring from rank `a` to its rail's, or a FIFO slot of the stream of owner `a` and rank `b`. */
typedef struct location {
  uint8_t isRing, a, b, slot, epoch;
} location_t;

/* What a candidate reads and fills. */
typedef struct item {
  uint8_t is, id, numIn, numOut, token; /* id: of what it reads and fills; token: a bit */
  location_t in[LOCATIONS], out[LOCATIONS];
} item_t;

typedef struct plan {
  const ring_setup_t *p;
  int numRanks, numOperations, numBlocks, blocks[RING_ROLES];
  uint8_t goes[RING_OPERATIONS][RING_RANKS][RING_TOKENS]; /* ranks that a token goes to */
  item_t item[RING_OPERATIONS][RING_RANKS][RING_ROLES][CANDIDATES];
  uint8_t numCandidates[RING_OPERATIONS][RING_ROLES];
  uint16_t received[RING_OPERATIONS][RING_RANKS]; /* bits of the tokens that a rank receives */
  uint8_t base[NUM_KINDS][RING_OPERATIONS + 1]
              [RING_RANKS]; /* ring slots before an operation, by ring */
  uint8_t slotId[NUM_KINDS][RING_RANKS][STREAM];
} plan_t;

static inline int kindOf(const plan_t *m, int operation) {
  return m->p->program[operation] == 'C' ? COMBINES : DISPATCHES;
}
static inline int peerOf(const plan_t *m, int r) {
  return (r + m->p->perDomain) % m->numRanks;
}
static inline unsigned nearRanks(const plan_t *m, int r) {
  const int per = m->p->perDomain;
  return ((1u << per) - 1) << (r / per * per);
}
/* Of the ring from rank r, whose tokens it carries. */
static inline int ownerOf(const plan_t *m, int kind, int r) {
  return kind == DISPATCHES ? r : peerOf(m, r);
}

/* ---- States ---- */

typedef struct put {
  uint8_t first, n, arrived, isSignalled; /* arrived: bits */
} put_t;

/* From one rank to its rail's, of a kind. Contents are ids, words epochs, counts since the start. */
typedef struct ring {
  uint8_t out[RING_SLOTS], filled[RING_SLOTS], refill[RING_SLOTS];
  uint8_t in[RING_SLOTS], landed[RING_SLOTS], consumed[RING_SLOTS];
  uint8_t posted, refilled;    /* of the poster that sends */
  uint8_t landings, returned;  /* of the one that lands */
  uint8_t signal, credit;      /* as they have arrived */
  uint8_t numPuts, numCredits; /* under way */
  put_t put[RING_SLOTS];       /* the oldest first */
} ring_t;

typedef struct fifo {
  uint8_t slot[FIFO_SLOTS], flag[FIFO_SLOTS], credit[FIFO_SLOTS];
} fifo_t;

typedef struct worker {
  uint8_t role, candidate, runs;
} worker_t;

typedef struct ring_rank {
  uint16_t received; /* bits, of the launch */
  uint8_t operation, taken[RING_ROLES];
  worker_t block[RING_BLOCKS];
} ring_rank_t;

typedef struct ring_state {
  ring_rank_t rank[RING_RANKS];
  ring_t ring[NUM_KINDS][RING_RANKS];
  fifo_t fifo[NUM_KINDS][RING_RANKS][RING_RANKS];
  uint8_t isFaulty; /* what a fault does only once has happened */
} ring_state_t;

/* Moves; lost or twice is what a fault does with a signal or credit. */
enum { STARTS, ENDS, POSTS, LANDS, RETURNS, REFILLS, LEAVES, ARRIVES, SIGNALS, CREDITS };
enum { LOST = 1, TWICE };

static inline bool hasArrived(const put_t *put) {
  return put->arrived == (1u << put->n) - 1;
}

static inline int slotOf(const plan_t *m, int q) {
  return q % m->p->ringSlots;
}
static inline int epochOf(const plan_t *m, int q) {
  return q / m->p->ringSlots + 1;
}

/* Where the rings of a rank's launch are when its poster is through. */
typedef struct poster {
  int kind, outEnd, inEnd;
} poster_t;

static inline poster_t posterOf(const plan_t *m, const ring_state_t *s, int r) {
  const int e = s->rank[r].operation, kind = kindOf(m, e), peer = peerOf(m, r);
  return (poster_t){kind, m->base[kind][e + 1][r], m->base[kind][e + 1][peer]};
}

static inline const item_t *itemOf(const plan_t *m, const ring_state_t *s, int r,
                                   const worker_t *b) {
  return &m->item[s->rank[r].operation][r][b->role][b->candidate];
}

/* ---- ht_ring_plan.c ---- */

void ringPlan(plan_t *m, const ring_setup_t *p);
/* Tokens of `owner` that go to one of `ranks`: in earlier operations of the kind, and before `token`. */
int ringNumber(const plan_t *m, int kind, int operation, int owner, int token, unsigned ranks);
/* Whether rows between the two need no FIFO. */
bool ringIsInPlace(const plan_t *m, int kind, int owner, int rank);

/* ---- ht_ring_moves.c ---- */

int ringMoves(const void *model, const void *state, move_t moves[MAX_MOVES]);
/* How far ring slots of a ring are given back, or may be taken for landed, by a poster. */
int ringConsumed(const plan_t *m, const ring_t *g, const poster_t *at);
int ringLandings(const plan_t *m, const ring_t *g, const poster_t *at);

/* ---- ht_ring_make.c ---- */

void ringStartLaunch(const plan_t *m, ring_state_t *s, int r);
const char *ringMake(const void *model, void *state, move_t v);

#endif
