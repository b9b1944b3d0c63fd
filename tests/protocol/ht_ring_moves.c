/* Moves that are possible in a state. */
#include "ht_ring_state.h"

typedef struct list {
  move_t *moves;
  int n;
} list_t;

static void add(list_t *to, int kind, int rank, int block, int role, int item) {
  to->moves[to->n++] =
      (move_t){(uint8_t)kind, (uint8_t)rank, (uint8_t)block, (uint8_t)role, (uint8_t)item};
}

/* ---- Posters ---- */

/* How far ring slots up to `end` have their word, from `at` on. isGappy: up to the last that has it. */
static int reach(const plan_t *m, const uint8_t *words, int at, int end, bool isGappy) {
  int last = at;
  for (int q = at; q < end && q < at + m->p->ringSlots; q++) {
    const bool is = words[slotOf(m, q)] == epochOf(m, q);
    if (is) last = q + 1;
    if (!is && !isGappy) break;
  }
  return last;
}

static int filledOf(const plan_t *m, const ring_t *g, const poster_t *at) {
  return reach(m, g->filled, g->posted, at->outEnd, m->p->fault == RING_FAULT_GAP);
}
int ringConsumed(const plan_t *m, const ring_t *g, const poster_t *at) {
  return reach(m, g->consumed, g->returned, at->inEnd, m->p->fault == RING_FAULT_CREDIT_GAP);
}
int ringLandings(const plan_t *m, const ring_t *g, const poster_t *at) {
  const ring_fault_t fault = m->p->fault;
  const int all = fault == RING_FAULT_NO_SIGNAL ? g->posted : g->signal;
  return all < at->inEnd || fault == RING_FAULT_NO_CAP ? all : at->inEnd;
}

static bool isOver(const plan_t *m, const ring_t *out, const ring_t *in, const poster_t *at) {
  if (m->p->fault == RING_FAULT_POSTER_LEAVES && out->posted == at->outEnd) return true;
  return out->posted == at->outEnd && in->landings == at->inEnd && in->returned == at->inEnd;
}

/* ---- Blocks, posters, the network ---- */

static bool isThere(const ring_state_t *s, int kind, const location_t *u) {
  const uint8_t *words = u->isRing ? s->ring[kind][u->a].landed : s->fifo[kind][u->a][u->b].flag;
  return words[u->slot] == u->epoch;
}
static bool isFree(const plan_t *m, const ring_state_t *s, int kind, const location_t *u) {
  if (m->p->fault == (u->isRing ? RING_FAULT_NO_CREDIT : RING_FAULT_NO_FIFO_CREDIT)) return true;
  const uint8_t *words = u->isRing ? s->ring[kind][u->a].refill : s->fifo[kind][u->a][u->b].credit;
  return words[u->slot] == u->epoch - 1;
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

/* Of a put of ring slots from g->posted on: how many at least and at most; 0: none. */
static int mostOf(const plan_t *m, const ring_t *g, const poster_t *at, int *least) {
  const int filled = filledOf(m, g, at), waiting = filled - g->posted, chunk = m->p->chunk;
  const int untilEnd = m->p->ringSlots - slotOf(m, g->posted);
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
  if (ringLandings(m, in, &at) > in->landings && isEnough(m, to, LANDS, r)) return true;
  if (out->credit > out->refilled && isEnough(m, to, REFILLS, r)) return true;
  int least;
  const int most = mostOf(m, out, &at, &least);
  for (int n = least; n <= most && out->numPuts < RING_SLOTS; n++) add(to, POSTS, r, 0, 0, n);
  if (ringConsumed(m, in, &at) > in->returned) add(to, RETURNS, r, 0, 0, 0);
  return false;
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

int ringMoves(const void *model, const void *state, move_t moves[MAX_MOVES]) {
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
