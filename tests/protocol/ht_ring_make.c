/* What moves do. */
#include <stdlib.h>
#include <string.h>

#include "ht_ring_state.h"

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

void ringStartLaunch(const plan_t *m, ring_state_t *s, int r) {
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
    const location_t *u = &item->in[i];
    const uint8_t *from = u->isRing ? s->ring[kind][u->a].in : s->fifo[kind][u->a][u->b].slot;
    if (from[u->slot] == item->id) continue;
    if (ends) return "what is being read was overwritten";
    return u->isRing ? "a ring slot of another token is read" : "a slot of another token is read";
  }
  return NULL;
}

static void consume(ring_state_t *s, int kind, const item_t *item, bool ringSlots, bool fifoSlots) {
  for (int i = 0; i < item->numIn; i++) {
    const location_t *u = &item->in[i];
    if (u->isRing && ringSlots) s->ring[kind][u->a].consumed[u->slot] = u->epoch;
    if (!u->isRing && fifoSlots) s->fifo[kind][u->a][u->b].credit[u->slot] = u->epoch;
  }
}

static const char *startItem(const plan_t *m, ring_state_t *s, int r, worker_t *b) {
  const int kind = kindOf(m, s->rank[r].operation);
  const item_t *item = itemOf(m, s, r, b);
  const char *wrong = checkRead(s, kind, item, false);
  for (int i = 0; i < item->numOut; i++) {
    const location_t *u = &item->out[i];
    uint8_t *to = u->isRing ? s->ring[kind][u->a].out : s->fifo[kind][u->a][u->b].slot;
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
    const location_t *u = &item->out[i];
    uint8_t *words = u->isRing ? s->ring[kind][u->a].filled : s->fifo[kind][u->a][u->b].flag;
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
  ringStartLaunch(m, s, r);
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
  const int end = ringLandings(m, g, &at);
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
  const int end = ringConsumed(m, g, &at);
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
  const bool isRight = g->out[slotOf(m, q)] == m->slotId[kind][r][q];
  drop(g, i);
  return isRight ? NULL : "a put carries what is not of its ring slot";
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

const char *ringMake(const void *model, void *state, move_t v) {
  return makeOne(model, state, v);
}
