#include "ht_ring.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DISPATCHES, COMBINES, NUM_KINDS };
enum { SEND, PASS, RECEIVE, ENDED }; /* roles; PASS: forwards or reduces */
enum {
  PLACES = RING_RANKS + 1,
  CANDIDATES = RING_TOKENS * RING_RANKS,
  STREAM = RING_OPERATIONS * RING_TOKENS
};

/* ---- What is known from the tables ---- */

/* A unit of the ring from rank `a` to its rail's, or a FIFO slot of the stream of owner `a` and rank `b`. */
typedef struct place {
  uint8_t isUnit, a, b, slot, epoch;
} place_t;

/* What a candidate reads and fills. */
typedef struct item {
  uint8_t is, id, numIn, numOut, token; /* id: of what it reads and fills; token: a bit */
  place_t in[PLACES], out[PLACES];
} item_t;

typedef struct plan {
  const ring_setup_t *p;
  int numRanks, numOperations, numBlocks, blocks[RING_ROLES];
  uint8_t goes[RING_OPERATIONS][RING_RANKS][RING_TOKENS]; /* ranks that a token goes to */
  item_t item[RING_OPERATIONS][RING_RANKS][RING_ROLES][CANDIDATES];
  uint8_t numCandidates[RING_OPERATIONS][RING_ROLES];
  uint16_t received[RING_OPERATIONS][RING_RANKS]; /* bits of the tokens that a rank receives */
  uint8_t base[NUM_KINDS][RING_OPERATIONS + 1][RING_RANKS]; /* units before an operation, by ring */
  uint8_t unitId[NUM_KINDS][RING_RANKS][STREAM];
} plan_t;

static int kindOf(const plan_t *m, int operation) {
  return m->p->program[operation] == 'C' ? COMBINES : DISPATCHES;
}
static int peerOf(const plan_t *m, int r) {
  return (r + m->p->perDomain) % m->numRanks;
}
static unsigned nearRanks(const plan_t *m, int r) {
  const int per = m->p->perDomain;
  return ((1u << per) - 1) << (r / per * per);
}
/* Of the ring from rank r, whose tokens it carries. */
static int ownerOf(const plan_t *m, int kind, int r) {
  return kind == DISPATCHES ? r : peerOf(m, r);
}

static unsigned mix(unsigned a, unsigned b, unsigned c) {
  unsigned x = a * 2654435761u ^ b * 2246822519u ^ c * 3266489917u;
  x ^= x >> 15;
  x *= 2654435761u;
  return x >> 13;
}

static unsigned ranksOf(const plan_t *m, int operation, int owner, int token) {
  const ring_setup_t *p = m->p;
  if (p->owners && !(p->owners >> owner & 1)) return 0;
  if (!p->uneven) return (1u << m->numRanks) - 1;
  unsigned ranks = 0;
  for (int r = 0; r < m->numRanks; r++) {
    const unsigned x = mix((unsigned)(operation * 4 + owner), (unsigned)token, (unsigned)r);
    ranks |= (unsigned)(x % 4 < 3) << r;
  }
  return ranks;
}

/* Tokens of `owner` that go to one of `ranks`: in earlier operations of the kind, and before `token`. */
static int numberOf(const plan_t *m, int kind, int operation, int owner, int token,
                    unsigned ranks) {
  int n = 0;
  for (int e = 0; e <= operation; e++) {
    if (e < operation && kindOf(m, e) != kind) continue;
    const int end = e < operation ? m->p->numTokens : token;
    for (int t = 0; t < end; t++) n += (m->goes[e][owner][t] & ranks) != 0;
  }
  return n;
}

static void addPlace(place_t *to, uint8_t *n, bool isUnit, int a, int b, int number, int size) {
  to[(*n)++] = (place_t){isUnit, (uint8_t)a, (uint8_t)b, (uint8_t)(number % size),
                         (uint8_t)(number / size + 1)};
}
static void addSlot(const plan_t *m, place_t *to, uint8_t *n, int e, int o, int t, int rank) {
  const int q = numberOf(m, kindOf(m, e), e, o, t, 1u << rank);
  addPlace(to, n, false, o, rank, q, m->p->slots);
}
/* The unit of a token in the ring from rank r. */
static void addUnit(const plan_t *m, place_t *to, uint8_t *n, int e, int o, int t, int r) {
  const unsigned far = ~nearRanks(m, o);
  const int first = m->p->fault == RING_FAULT_RESTART ? numberOf(m, kindOf(m, e), e, o, 0, far) : 0;
  addPlace(to, n, true, r, 0, numberOf(m, kindOf(m, e), e, o, t, far) - first, m->p->units);
}

static bool isInPlace(const plan_t *m, int kind, int owner, int rank) {
  if (kind == DISPATCHES) return owner == rank;
  return m->p->flat && owner % m->p->perDomain == rank % m->p->perDomain;
}
/* FIFO slots of a token for the ranks of a set. */
static void addSlots(const plan_t *m, place_t *to, uint8_t *n, int e, int o, int t,
                     unsigned ranks) {
  for (int h = 0; h < m->numRanks; h++) {
    if ((ranks >> h & 1) && !isInPlace(m, kindOf(m, e), o, h)) addSlot(m, to, n, e, o, t, h);
  }
}

static item_t dispatchItem(const plan_t *m, int e, int r, int role, int c) {
  const int R = m->numRanks;
  const int t = role == RECEIVE ? c / R : c;
  const int o = role == SEND ? r : role == PASS ? peerOf(m, r) : (2 * R - 1 + r - c % R) % R;
  const unsigned ranks = m->goes[e][o][t], near = nearRanks(m, r);
  item_t i = {.id = (uint8_t)(1 + e * RING_TOKENS + t), .token = (uint8_t)(o * RING_TOKENS + t)};
  if (role == RECEIVE) {
    if ((i.is = ranks >> r & 1)) addSlots(m, i.in, &i.numIn, e, o, t, 1u << r);
    return i;
  }
  if (role == SEND && (ranks & ~near)) addUnit(m, i.out, &i.numOut, e, o, t, r);
  if (role == PASS && (ranks & near)) addUnit(m, i.in, &i.numIn, e, o, t, o);
  addSlots(m, i.out, &i.numOut, e, o, t, ranks & near);
  i.is = i.numOut > 0;
  return i;
}

static item_t combineItem(const plan_t *m, int e, int r, int role, int c) {
  const int R = m->numRanks, T = m->p->numTokens;
  const bool byOwner = m->p->fault == RING_FAULT_ORDER;
  const int turn = byOwner ? c / T : c % R, ofSender = byOwner ? c % T : c / R;
  const int t = role == SEND ? ofSender : c;
  const int o = role == SEND ? (r + 1 + turn) % R : role == PASS ? peerOf(m, r) : r;
  const unsigned ranks = m->goes[e][o][t], near = nearRanks(m, r);
  item_t i = {.id = (uint8_t)(1 + e * RING_TOKENS + t), .token = (uint8_t)(o * RING_TOKENS + t)};
  if (role == SEND) {
    addSlots(m, i.out, &i.numOut, e, o, t, ranks & 1u << r);
    i.is = i.numOut > 0;
    return i;
  }
  addSlots(m, i.in, &i.numIn, e, o, t, ranks & near);
  if (role == PASS && (ranks & near)) addUnit(m, i.out, &i.numOut, e, o, t, r);
  if (role == RECEIVE && (ranks & ~near)) addUnit(m, i.in, &i.numIn, e, o, t, peerOf(m, r));
  i.is = role == RECEIVE ? ranks != 0 : i.numOut > 0;
  return i;
}

static void planItems(plan_t *m, int e) {
  const int T = m->p->numTokens, kind = kindOf(m, e);
  for (int role = 0; role < RING_ROLES; role++) {
    const bool byRank = role == (kind == DISPATCHES ? RECEIVE : SEND);
    const int n = byRank ? T * m->numRanks : T;
    m->numCandidates[e][role] = (uint8_t)n;
    for (int r = 0; r < m->numRanks; r++) {
      for (int c = 0; c < n; c++) {
        const item_t i =
            kind == DISPATCHES ? dispatchItem(m, e, r, role, c) : combineItem(m, e, r, role, c);
        m->item[e][r][role][c] = i;
        if (role == RECEIVE && i.is) m->received[e][r] |= (uint16_t)(1u << i.token);
      }
    }
  }
}

static void planUnits(plan_t *m, int e) {
  const int kind = kindOf(m, e);
  for (int r = 0; r < m->numRanks; r++) {
    const int o = ownerOf(m, kind, r);
    int q = m->base[kind][e][r];
    for (int t = 0; t < m->p->numTokens; t++) {
      if (!(m->goes[e][o][t] & ~nearRanks(m, o))) continue;
      m->unitId[kind][r][q++] = (uint8_t)(1 + e * RING_TOKENS + t);
    }
    m->base[kind][e + 1][r] = (uint8_t)q;
    m->base[!kind][e + 1][r] = m->base[!kind][e][r];
  }
}

static void makePlan(plan_t *m, const ring_setup_t *p) {
  m->p = p;
  m->numRanks = 2 * p->perDomain;
  m->numOperations = (int)strlen(p->program);
  memcpy(m->blocks, p->blocks, sizeof m->blocks);
  if (p->fault == RING_FAULT_NO_MIDDLE) m->blocks[SEND] += m->blocks[PASS], m->blocks[PASS] = 0;
  if (p->fault == RING_FAULT_NO_RECEIVER)
    m->blocks[PASS] += m->blocks[RECEIVE], m->blocks[RECEIVE] = 0;
  for (int role = 0; role < RING_ROLES; role++) m->numBlocks += m->blocks[role];
  for (int e = 0; e < m->numOperations; e++) {
    for (int o = 0; o < m->numRanks; o++) {
      for (int t = 0; t < p->numTokens; t++) m->goes[e][o][t] = (uint8_t)ranksOf(m, e, o, t);
    }
  }
  for (int e = 0; e < m->numOperations; e++) {
    planItems(m, e);
    planUnits(m, e);
  }
}

/* ---- States ---- */

typedef struct put {
  uint8_t first, n, arrived, isSignalled; /* arrived: bits */
} put_t;

/* From one rank to its rail's, of a kind. Contents are ids, words epochs, counts since the start. */
typedef struct ring {
  uint8_t out[RING_UNITS], filled[RING_UNITS], refill[RING_UNITS];
  uint8_t in[RING_UNITS], landed[RING_UNITS], consumed[RING_UNITS];
  uint8_t posted, refilled;    /* of the poster that sends */
  uint8_t landings, returned;  /* of the one that lands */
  uint8_t signal, credit;      /* as they have arrived */
  uint8_t numPuts, numCredits; /* under way */
  put_t put[RING_UNITS];       /* the oldest first */
} ring_t;

typedef struct fifo {
  uint8_t slot[RING_SLOTS], flag[RING_SLOTS], credit[RING_SLOTS];
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

enum { STARTS, ENDS, POSTS, LANDS, RETURNS, REFILLS, LEAVES, ARRIVES, SIGNALS, CREDITS };
enum { LOST = 1, TWICE };

typedef struct list {
  move_t *moves;
  int n;
} list_t;

static void add(list_t *to, int kind, int rank, int block, int role, int item) {
  to->moves[to->n++] =
      (move_t){(uint8_t)kind, (uint8_t)rank, (uint8_t)block, (uint8_t)role, (uint8_t)item};
}

static int slotOf(const plan_t *m, int q) {
  return q % m->p->units;
}
static int epochOf(const plan_t *m, int q) {
  return q / m->p->units + 1;
}

/* Where the rings of a rank's launch are when its poster is through. */
typedef struct poster {
  int kind, outEnd, inEnd;
} poster_t;

static poster_t posterOf(const plan_t *m, const ring_state_t *s, int r) {
  const int e = s->rank[r].operation, kind = kindOf(m, e), peer = peerOf(m, r);
  return (poster_t){kind, m->base[kind][e + 1][r], m->base[kind][e + 1][peer]};
}

/* How far units up to `end` have their word, from `at` on. isGappy: up to the last that has it. */
static int reach(const plan_t *m, const uint8_t *words, int at, int end, bool isGappy) {
  int last = at;
  for (int q = at; q < end && q < at + m->p->units; q++) {
    const bool is = words[slotOf(m, q)] == epochOf(m, q);
    if (is) last = q + 1;
    if (!is && !isGappy) break;
  }
  return last;
}

static int filledOf(const plan_t *m, const ring_t *g, const poster_t *at) {
  return reach(m, g->filled, g->posted, at->outEnd, m->p->fault == RING_FAULT_GAP);
}
static int consumedOf(const plan_t *m, const ring_t *g, const poster_t *at) {
  return reach(m, g->consumed, g->returned, at->inEnd, m->p->fault == RING_FAULT_CREDIT_GAP);
}
static int landingsOf(const plan_t *m, const ring_t *g, const poster_t *at) {
  const ring_fault_t fault = m->p->fault;
  const int all = fault == RING_FAULT_NO_SIGNAL ? g->posted : g->signal;
  return all < at->inEnd || fault == RING_FAULT_NO_CAP ? all : at->inEnd;
}

static bool isOver(const plan_t *m, const ring_t *out, const ring_t *in, const poster_t *at) {
  if (m->p->fault == RING_FAULT_POSTER_LEAVES && out->posted == at->outEnd) return true;
  return out->posted == at->outEnd && in->landings == at->inEnd && in->returned == at->inEnd;
}

/* ---- Moves that are possible ---- */

static bool isThere(const ring_state_t *s, int kind, const place_t *u) {
  const uint8_t *words = u->isUnit ? s->ring[kind][u->a].landed : s->fifo[kind][u->a][u->b].flag;
  return words[u->slot] == u->epoch;
}
static bool isFree(const plan_t *m, const ring_state_t *s, int kind, const place_t *u) {
  if (m->p->fault == (u->isUnit ? RING_FAULT_NO_CREDIT : RING_FAULT_NO_FIFO_CREDIT)) return true;
  const uint8_t *words = u->isUnit ? s->ring[kind][u->a].refill : s->fifo[kind][u->a][u->b].credit;
  return words[u->slot] == u->epoch - 1;
}

static const item_t *itemOf(const plan_t *m, const ring_state_t *s, int r, const worker_t *b) {
  return &m->item[s->rank[r].operation][r][b->role][b->candidate];
}

static bool mayStart(const plan_t *m, const ring_state_t *s, int r, const worker_t *b) {
  const int kind = kindOf(m, s->rank[r].operation);
  const item_t *item = itemOf(m, s, r, b);
  for (int i = 0; i < item->numIn; i++) {
    if (!isThere(s, kind, &item->in[i])) return false;
  }
  for (int i = 0; i < item->numOut; i++) {
    if (!isFree(m, s, kind, &item->out[i])) return false;
  }
  return true;
}

/* An item that may start stays so, and takes nothing from anybody: where only waits are in question it is
 * enough alone. The same goes for a part of a put. */
static bool blockMoves(const plan_t *m, const ring_state_t *s, int r, list_t *to) {
  for (int i = 0; i < m->numBlocks; i++) {
    const worker_t *b = &s->rank[r].block[i];
    if (b->role == ENDED) continue;
    if (!b->runs && !mayStart(m, s, r, b)) continue;
    if (m->p->steps == RING_AT_ONCE) to->n = 0;
    add(to, b->runs ? ENDS : STARTS, r, i, 0, 0);
    if (m->p->steps == RING_AT_ONCE) return true;
  }
  return false;
}

/* Of a put of units from g->posted on: how many at least and at most; 0: none. */
static int mostOf(const plan_t *m, const ring_t *g, const poster_t *at, int *least) {
  const int filled = filledOf(m, g, at), waiting = filled - g->posted, chunk = m->p->chunk;
  const int untilEnd = m->p->units - slotOf(m, g->posted);
  int most = chunk < untilEnd ? chunk : untilEnd;
  if (waiting < most) most = waiting;
  *least = 1;
  if (m->p->fault != RING_FAULT_FULL_CHUNKS) return most;
  if (most > 1) *least = most;
  return waiting >= chunk || filled == at->outEnd ? most : 0;
}

/* To raise words that others wait for takes nothing from anybody, nor does the end of a launch: alone they
 * are enough, but items of two steps run beside all that there is. */
static bool isEnough(const plan_t *m, list_t *to, int kind, int r) {
  const bool is = m->p->steps != RING_TWO_STEPS;
  if (is) to->n = 0;
  add(to, kind, r, 0, 0, 0);
  return is;
}

static bool posterMoves(const plan_t *m, const ring_state_t *s, int r, list_t *to) {
  const poster_t at = posterOf(m, s, r);
  const ring_t *out = &s->ring[at.kind][r], *in = &s->ring[at.kind][peerOf(m, r)];
  if (isOver(m, out, in, &at)) return false;
  if (landingsOf(m, in, &at) > in->landings && isEnough(m, to, LANDS, r)) return true;
  if (out->credit > out->refilled && isEnough(m, to, REFILLS, r)) return true;
  int least;
  const int most = mostOf(m, out, &at, &least);
  for (int n = least; n <= most && out->numPuts < RING_UNITS; n++) add(to, POSTS, r, 0, 0, n);
  if (consumedOf(m, in, &at) > in->returned) add(to, RETURNS, r, 0, 0, 0);
  return false;
}

static bool hasArrived(const put_t *put) {
  return put->arrived == (1u << put->n) - 1;
}

static bool maySignal(const plan_t *m, const ring_t *g, int i) {
  const ring_fault_t fault = m->p->fault;
  if (fault == RING_FAULT_OTHER_CONTEXT) return !g->put[i].isSignalled;
  if (fault == RING_FAULT_WEAK) return hasArrived(&g->put[i]);
  for (int j = 0; j <= i; j++) {
    if (!hasArrived(&g->put[j])) return false;
  }
  return true;
}

static bool networkMoves(const plan_t *m, const ring_state_t *s, int kind, int r, list_t *to) {
  const ring_t *g = &s->ring[kind][r];
  const ring_fault_t fault = s->isFaulty ? RING_FAULT_NONE : m->p->fault;
  for (int i = 0; i < g->numPuts; i++) {
    for (int j = 0; j < g->put[i].n; j++) {
      if (g->put[i].arrived >> j & 1) continue;
      if (m->p->steps == RING_AT_ONCE) to->n = 0;
      add(to, ARRIVES, r, i, kind, j);
      if (m->p->steps == RING_AT_ONCE) return true;
    }
    if (!maySignal(m, g, i)) continue;
    if (fault == RING_FAULT_SIGNAL_LOST) add(to, SIGNALS, r, i, kind, LOST);
    if (fault == RING_FAULT_SIGNAL_TWICE) add(to, SIGNALS, r, i, kind, TWICE);
    add(to, SIGNALS, r, i, kind, 0);
  }
  if (!g->numCredits) return false;
  if (fault == RING_FAULT_CREDIT_LOST) add(to, CREDITS, r, 0, kind, LOST);
  if (fault == RING_FAULT_CREDIT_TWICE) add(to, CREDITS, r, 0, kind, TWICE);
  add(to, CREDITS, r, 0, kind, 0);
  return false;
}

static bool mayLeave(const plan_t *m, const ring_state_t *s, int r) {
  for (int i = 0; i < m->numBlocks; i++) {
    if (s->rank[r].block[i].role != ENDED) return false;
  }
  const poster_t at = posterOf(m, s, r);
  return isOver(m, &s->ring[at.kind][r], &s->ring[at.kind][peerOf(m, r)], &at);
}

static int ringMoves(const void *model, const void *state, move_t moves[MAX_MOVES]) {
  const plan_t *m = model;
  const ring_state_t *s = state;
  list_t to = {moves, 0};
  for (int r = 0; r < m->numRanks; r++) {
    if (s->rank[r].operation == m->numOperations) continue;
    if (posterMoves(m, s, r, &to)) return 1;
    if (mayLeave(m, s, r) && isEnough(m, &to, LEAVES, r)) return 1;
  }
  for (int r = 0; r < m->numRanks; r++) {
    if (s->rank[r].operation < m->numOperations && blockMoves(m, s, r, &to)) return 1;
    for (int kind = 0; kind < NUM_KINDS; kind++) {
      if (networkMoves(m, s, kind, r, &to)) return 1;
    }
  }
  return to.n;
}

/* ---- What they do ---- */

static int compareBlocks(const void *a, const void *b) {
  return memcmp(a, b, sizeof(worker_t));
}

/* The next candidate that is an item, of the block's role or the next one. A block takes it at once:
 * if it were to wait and another took it, the two would have changed places. */
static void takeWork(const plan_t *m, ring_rank_t *k, int r, worker_t *b) {
  const int e = k->operation;
  b->runs = b->candidate = 0;
  for (; b->role != ENDED; b->role++) {
    uint8_t *next = &k->taken[b->role];
    while (*next < m->numCandidates[e][b->role]) {
      b->candidate = (*next)++;
      if (m->item[e][r][b->role][b->candidate].is) return;
    }
    b->candidate = 0;
  }
}

/* Blocks are told apart by what they do alone. */
static void sortBlocks(const plan_t *m, ring_rank_t *k) {
  qsort(k->block, (size_t)m->numBlocks, sizeof *k->block, compareBlocks);
}

static void startLaunch(const plan_t *m, ring_state_t *s, int r) {
  ring_rank_t *k = &s->rank[r];
  k->received = 0;
  memset(k->taken, 0, sizeof k->taken);
  memset(k->block, 0, sizeof k->block);
  if (k->operation == m->numOperations) return;
  int i = 0;
  for (int role = 0; role < RING_ROLES; role++) {
    for (int b = 0; b < m->blocks[role]; b++) k->block[i++].role = (uint8_t)role;
  }
  for (i = 0; i < m->numBlocks; i++) takeWork(m, k, r, &k->block[i]);
  sortBlocks(m, k);
}

static const char *checkRead(const ring_state_t *s, int kind, const item_t *item, bool ends) {
  for (int i = 0; i < item->numIn; i++) {
    const place_t *u = &item->in[i];
    const uint8_t *from = u->isUnit ? s->ring[kind][u->a].in : s->fifo[kind][u->a][u->b].slot;
    if (from[u->slot] == item->id) continue;
    if (ends) return "what is being read was overwritten";
    return u->isUnit ? "a unit of another token is read" : "a slot of another token is read";
  }
  return NULL;
}

static void consume(ring_state_t *s, int kind, const item_t *item, bool units, bool slots) {
  for (int i = 0; i < item->numIn; i++) {
    const place_t *u = &item->in[i];
    if (u->isUnit && units) s->ring[kind][u->a].consumed[u->slot] = u->epoch;
    if (!u->isUnit && slots) s->fifo[kind][u->a][u->b].credit[u->slot] = u->epoch;
  }
}

static const char *startItem(const plan_t *m, ring_state_t *s, int r, worker_t *b) {
  const int kind = kindOf(m, s->rank[r].operation);
  const item_t *item = itemOf(m, s, r, b);
  const char *wrong = checkRead(s, kind, item, false);
  for (int i = 0; i < item->numOut; i++) {
    const place_t *u = &item->out[i];
    uint8_t *to = u->isUnit ? s->ring[kind][u->a].out : s->fifo[kind][u->a][u->b].slot;
    to[u->slot] = item->id;
  }
  if (m->p->fault == RING_FAULT_CREDIT_EARLY) consume(s, kind, item, true, false);
  b->runs = 1;
  return wrong;
}

static const char *deliver(ring_rank_t *k, const item_t *item) {
  const uint16_t bit = (uint16_t)(1u << item->token);
  if (k->received & bit) return "a token is received twice";
  k->received |= bit;
  return NULL;
}

static const char *endItem(const plan_t *m, ring_state_t *s, int r, worker_t *b) {
  ring_rank_t *k = &s->rank[r];
  const int kind = kindOf(m, k->operation);
  const item_t *item = itemOf(m, s, r, b);
  const char *wrong = checkRead(s, kind, item, true);
  for (int i = 0; i < item->numOut; i++) {
    const place_t *u = &item->out[i];
    uint8_t *words = u->isUnit ? s->ring[kind][u->a].filled : s->fifo[kind][u->a][u->b].flag;
    words[u->slot] = u->epoch;
  }
  consume(s, kind, item, true, true);
  if (!wrong && b->role == RECEIVE) wrong = deliver(k, item);
  takeWork(m, k, r, b);
  sortBlocks(m, k);
  return wrong;
}

static const char *leave(const plan_t *m, ring_state_t *s, int r) {
  ring_rank_t *k = &s->rank[r];
  const poster_t at = posterOf(m, s, r);
  const bool isAll = k->received == m->received[k->operation][r];
  ring_t *in = &s->ring[at.kind][peerOf(m, r)];
  if (m->p->fault == RING_FAULT_RESET) in->signal = (uint8_t)at.inEnd;
  k->operation++;
  startLaunch(m, s, r);
  return isAll ? NULL : "a rank leaves without a token";
}

static void post(const plan_t *m, ring_state_t *s, int r, int n) {
  const poster_t at = posterOf(m, s, r);
  ring_t *g = &s->ring[at.kind][r];
  g->put[g->numPuts++] = (put_t){g->posted, (uint8_t)n, 0, 0};
  g->posted = (uint8_t)(g->posted + n);
}

static void land(const plan_t *m, ring_state_t *s, int r) {
  const poster_t at = posterOf(m, s, r);
  ring_t *g = &s->ring[at.kind][peerOf(m, r)];
  const int end = landingsOf(m, g, &at);
  for (int q = g->landings; q < end; q++) g->landed[slotOf(m, q)] = (uint8_t)epochOf(m, q);
  g->landings = (uint8_t)end;
}

static void refill(const plan_t *m, ring_state_t *s, int r) {
  const poster_t at = posterOf(m, s, r);
  ring_t *g = &s->ring[at.kind][r];
  for (int q = g->refilled; q < g->credit; q++) g->refill[slotOf(m, q)] = (uint8_t)epochOf(m, q);
  g->refilled = g->credit;
}

static void giveBack(const plan_t *m, ring_state_t *s, int r) {
  const poster_t at = posterOf(m, s, r);
  ring_t *g = &s->ring[at.kind][peerOf(m, r)];
  const int end = consumedOf(m, g, &at);
  g->numCredits = (uint8_t)(g->numCredits + end - g->returned);
  g->returned = (uint8_t)end;
}

/* A put that has arrived and was signalled is no more. */
static void drop(ring_t *g, int i) {
  if (!hasArrived(&g->put[i]) || !g->put[i].isSignalled) return;
  g->numPuts--;
  for (; i < g->numPuts; i++) g->put[i] = g->put[i + 1];
  memset(&g->put[g->numPuts], 0, sizeof *g->put);
}

static const char *arrive(const plan_t *m, ring_t *g, const move_t *v) {
  const int r = v->rank, kind = v->role, i = v->block, j = v->item;
  const int q = g->put[i].first + j;
  g->in[slotOf(m, q)] = g->out[slotOf(m, q)];
  g->put[i].arrived |= (uint8_t)(1u << j);
  const bool isRight = g->out[slotOf(m, q)] == m->unitId[kind][r][q];
  drop(g, i);
  return isRight ? NULL : "a put carries what is not of its unit";
}

static int timesOf(ring_state_t *s, int what) {
  if (what) s->isFaulty = 1;
  return what == LOST ? 0 : what == TWICE ? 2 : 1;
}

static void signal(ring_state_t *s, const move_t *v) {
  ring_t *g = &s->ring[v->role][v->rank];
  g->signal = (uint8_t)(g->signal + timesOf(s, v->item) * g->put[v->block].n);
  g->put[v->block].isSignalled = 1;
  drop(g, v->block);
}

static const char *makeOne(const plan_t *m, ring_state_t *s, move_t v) {
  ring_t *g = &s->ring[v.role][v.rank];
  worker_t *b = &s->rank[v.rank].block[v.block];
  switch (v.kind) {
  case STARTS: {
    const char *wrong = startItem(m, s, v.rank, b);
    return wrong || m->p->steps == RING_TWO_STEPS ? wrong : endItem(m, s, v.rank, b);
  }
  case ENDS:
    return endItem(m, s, v.rank, b);
  case POSTS:
    post(m, s, v.rank, v.item);
    return NULL;
  case LANDS:
    land(m, s, v.rank);
    return NULL;
  case RETURNS:
    giveBack(m, s, v.rank);
    return NULL;
  case REFILLS:
    refill(m, s, v.rank);
    return NULL;
  case LEAVES:
    return leave(m, s, v.rank);
  case ARRIVES:
    return arrive(m, g, &v);
  case SIGNALS:
    signal(s, &v);
    return NULL;
  default:
    g->numCredits--;
    g->credit = (uint8_t)(g->credit + timesOf(s, v.item));
    return NULL;
  }
}

static const char *ringMake(const void *model, void *state, move_t v) {
  return makeOne(model, state, v);
}

/* Whether words say that all of `total` units or chunks went through `size` places. */
static bool isThrough(const uint8_t *words, int total, int size) {
  for (int i = 0; i < size; i++) {
    if (words[i] != (total - i + size - 1) / size) return false;
  }
  return true;
}

static const char *ringCounts(const plan_t *m, const ring_state_t *s, int kind, int r) {
  const ring_t *g = &s->ring[kind][r];
  const int all = m->base[kind][m->numOperations][r], n = m->p->units;
  if (g->posted != all || g->landings != all || g->returned != all || g->signal != all ||
      g->credit != all || g->numPuts || g->numCredits)
    return "the counts of a ring do not agree";
  if (!isThrough(g->filled, all, n) || !isThrough(g->landed, all, n) ||
      !isThrough(g->consumed, all, n) || !isThrough(g->refill, g->refilled, n))
    return "the words of a ring do not agree";
  return NULL;
}

static const char *fifoCounts(const plan_t *m, const ring_state_t *s, int kind, int o, int h) {
  const fifo_t *f = &s->fifo[kind][o][h];
  const int last = m->numOperations - 1, n = m->p->slots;
  int all = numberOf(m, kind, last, o, 0, 1u << h);
  if (kindOf(m, last) == kind) all = numberOf(m, kind, last, o, m->p->numTokens, 1u << h);
  if (isInPlace(m, kind, o, h)) all = 0;
  return isThrough(f->flag, all, n) && isThrough(f->credit, all, n)
             ? NULL
             : "the words of a FIFO do not agree";
}

static const char *ringUnfinished(const void *model, const void *state) {
  const plan_t *m = model;
  const ring_state_t *s = state;
  const char *wrong = NULL;
  for (int r = 0; r < m->numRanks; r++) {
    if (s->rank[r].operation < m->numOperations) return "ranks wait for each other forever";
  }
  for (int kind = 0; kind < NUM_KINDS; kind++) {
    for (int r = 0; r < m->numRanks && !wrong; r++) {
      wrong = ringCounts(m, s, kind, r);
      for (int h = 0; h < m->numRanks && !wrong; h++) wrong = fifoCounts(m, s, kind, r, h);
    }
  }
  return wrong;
}

static void ringDescribe(const void *model, const void *state, move_t v, char *text, size_t size) {
  static const char *const NETWORK[] = {"part arrives", "signal arrives", "credit arrives"};
  static const char *const DOES[] = {"begins",  "ends",    "puts",  "lands",
                                     "returns", "refills", "leaves"};
  static const char *const ROLES[] = {"send", "pass on", "receive", "end"};
  const ring_state_t *s = state;
  const ring_rank_t *k = &s->rank[v.rank];
  (void)model;
  if (v.kind >= ARRIVES) {
    const ring_t *g = &s->ring[v.role][v.rank];
    snprintf(text, size, "ring of rank %d, kind %d, put %d of %d units from %d on: %s (%d)", v.rank,
             v.role, v.block, g->put[v.block].n, g->put[v.block].first, NETWORK[v.kind - ARRIVES],
             v.item);
  } else if (v.kind <= ENDS) {
    const worker_t *b = &k->block[v.block];
    snprintf(text, size, "rank %d, operation %d: a block %s to %s candidate %d", v.rank,
             k->operation, DOES[v.kind], ROLES[b->role], b->candidate);
  } else {
    snprintf(text, size, "rank %d, operation %d: %s (%d)", v.rank, k->operation, DOES[v.kind],
             v.item);
  }
}

outcome_t exploreRings(const ring_setup_t *p, uint64_t maxStates, bool trace) {
  plan_t m;
  ring_state_t s;
  memset(&m, 0, sizeof m);
  memset(&s, 0, sizeof s);
  makePlan(&m, p);
  for (int r = 0; r < m.numRanks; r++) startLaunch(&m, &s, r);
  const machine_t machine = {&m, sizeof s, ringMoves, ringMake, ringUnfinished, ringDescribe};
  return search(&machine, &s, maxStates, trace);
}
