/* Which moves are possible in a state, and when one of them alone is enough.
 *
 * A store may arrive at once, before anything else happens, if nobody can still want what it overwrites and
 * nobody can lose it: the owner has received all operations up to the one two before, no other store
 * is on its way to the cell, and its source cannot die with the store under way. Such an arrival
 * commutes with all moves but the one that waits for it, so the other orders lead to no other states that
 * matter. What is left to order freely are the roles, the ends of blocks, clearing and deaths. */
#include "model.h"

#include <stdio.h>
#include <string.h>

/* Rank r has received all operations up to this one, with all its blocks. */
static int receivedBy(const model_t *m, const state_t *s, int r) {
  unsigned got = 0;
  for (int i = 0; i < s->rank[r].launch && i < m->numLaunches[r]; i++) {
    if (m->launch[r][i].parts & RECV) got |= 1u << m->launch[r][i].ordinal;
  }
  int n = m->setup.first;
  while (got >> (n + 1) & 1) n++;
  return n;
}

static bool mayDie(const model_t *m, const state_t *s, int r) {
  return m->setup.dies != NOBODY && r == m->setup.numRanks - 1 &&
         (s->rank[r].gone || s->rank[r].launch < m->numLaunches[r]);
}

static bool isHarmless(const model_t *m, const state_t *s, const cell_t *c, int received) {
  const word_t w = c->queue[0];
  if (c->queue[1] || w == CLEARING || mayDie(m, s, (int)sourceIn(w))) return false;
  return (int)ordinalIn(w) <= received + 2;
}

typedef struct moves {
  move_t *v;
  int n;
} moves_t;

static void add(moves_t *l, move_kind_t kind, int rank, int block, int role, int item) {
  if (l->n < MAX_MOVES) {
    l->v[l->n++] =
        (move_t){(uint8_t)kind, (uint8_t)rank, (uint8_t)block, (uint8_t)role, (uint8_t)item};
  }
}

/* Arrivals at rank r; true if the only one in the list is enough. */
static bool addArrivals(const model_t *m, const state_t *s, int r, moves_t *l) {
  const rank_t *k = &s->rank[r];
  const int received = receivedBy(m, s, r);
  if (k->gone) return false;
  for (int i = 0; i < m->numCells; i++) {
    const cell_t *c = &k->cell[i];
    if (!c->queue[0]) continue;
    if (!m->setup.fine && isHarmless(m, s, c, received)) {
      l->n = 0;
      add(l, MOVE_ARRIVES, r, 0, 0, i);
      return true;
    }
    add(l, MOVE_ARRIVES, r, 0, 0, i);
    if (!c->queue[1]) continue;
    const int from0 = c->queue[0] == CLEARING ? r : (int)sourceIn(c->queue[0]);
    const int from1 = c->queue[1] == CLEARING ? r : (int)sourceIn(c->queue[1]);
    if (from0 != from1) add(l, MOVE_ARRIVES, r, 0, 1, i);
  }
  return false;
}

/* One role's moves; returns the ranks that it waits for, as bits. */
static int addRole(const model_t *m, const state_t *s, int r, int b, int role, moves_t *l) {
  const step_t step = stepOf(m, s, r, b, role);
  const actor_t a = actorOf(m, s, r, b, role);
  int waitsFor = 0;
  if (step == STEP_END) return 0;
  if (step == STEP_FREE) {
    if (canSend(m, s, &a, &waitsFor)) add(l, MOVE_ROLE, r, b, role, ALL_ITEMS);
    return waitsFor;
  }
  if (step != STEP_GET_WORDS && step != STEP_GET_ROWS && step != STEP_GET_ANNOUNCE) {
    add(l, MOVE_ROLE, r, b, role, ALL_ITEMS);
    return 0;
  }
  place_list_t want;
  placesToGet(m, &a, step, &want);
  for (int i = 0; i < want.n; i++) {
    if (a.role->got >> i & 1) continue;
    if (!canGet(m, s, &a, want.place[i], step)) {
      waitsFor |= 1 << want.place[i].source;
    } else if (m->setup.fine) {
      add(l, MOVE_ROLE, r, b, role, i);
    }
  }
  if (want.n == 0 || (!m->setup.fine && !waitsFor)) add(l, MOVE_ROLE, r, b, role, ALL_ITEMS);
  return waitsFor;
}

static bool isCleared(const rank_t *k, int numCells) {
  for (int i = 0; i < numCells; i++) {
    if (k->cell[i].queue[0] == CLEARING || k->cell[i].queue[1] == CLEARING) return false;
  }
  return true;
}

static void addBlock(const model_t *m, const state_t *s, int r, int b, moves_t *l, int *waitsFor) {
  const rank_t *k = &s->rank[r];
  const int finish = k->block[b].finish;
  if (finish == ENDED) return;
  if (finish == 0) {
    for (int role = 0; role < 2; role++) *waitsFor |= addRole(m, s, r, b, role, l);
    return;
  }
  const bool waits = finish == STEP_FENCE && m->setup.fault != FAULT_CLEAR_UNFENCED;
  if (!waits || isCleared(k, m->numCells)) add(l, MOVE_FINISH, r, b, 0, 0);
}

int modelMoves(const model_t *m, const state_t *s, move_t v[MAX_MOVES]) {
  const int last = m->setup.numRanks - 1;
  moves_t l = {v, 0};
  for (int r = 0; r < m->setup.numRanks; r++) {
    if (addArrivals(m, s, r, &l)) return l.n;
  }
  for (int r = 0; r < m->setup.numRanks; r++) {
    const rank_t *k = &s->rank[r];
    int waitsFor = 0;
    if (k->gone || k->launch >= m->numLaunches[r]) continue;
    for (int b = 0; b < m->setup.numBlocks; b++) addBlock(m, s, r, b, &l, &waitsFor);
    for (int p = 0; p < m->setup.numRanks; p++) {
      const bool may = s->rank[p].gone || (m->setup.dies == LATE && (p == last || r == last));
      if (waitsFor >> p & 1 && may && k->mask >> p & 1 && !k->failed && p != r) {
        add(&l, MOVE_GIVES_UP, r, 0, 0, p);
      }
    }
  }
  /* Dying is possible, not bound to happen: it is no way out of a deadlock. */
  if (l.n > 0 && m->setup.dies != LATE && mayDie(m, s, last) && !s->rank[last].gone)
    add(&l, MOVE_DIES, last, 0, 0, 0);
  return l.n;
}

void modelDescribe(const model_t *m, const state_t *s, move_t v, char *text, size_t size) {
  static const char *const STEPS[] = {
      "ends",      "reads the control words", "sends acks", "may send",  "puts words",
      "puts rows", "puts its announcement",   "gets words", "gets rows", "gets announcements",
      "records",   "arrives at the end",      "clears",     "posts",     "counts"};
  const rank_t *k = &s->rank[v.rank];
  const int launch = k->launch < m->numLaunches[v.rank] ? k->launch : 0;
  const int e = m->launch[v.rank][launch].ordinal;
  switch ((move_kind_t)v.kind) {
  case MOVE_ROLE:
    snprintf(text, size, "rank %d, operation %d, block %d, %s: %s", v.rank, e, v.block,
             v.role ? "receiver" : "sender", STEPS[stepOf(m, s, v.rank, v.block, v.role)]);
    break;
  case MOVE_FINISH:
    snprintf(text, size, "rank %d, operation %d, block %d: %s", v.rank, e, v.block,
             STEPS[k->block[v.block].finish]);
    break;
  case MOVE_ARRIVES: {
    const word_t w = k->cell[v.item].queue[v.role];
    if (w == CLEARING) {
      snprintf(text, size, "at rank %d, cell %d: zeros arrive", v.rank, v.item);
    } else {
      snprintf(text, size, "at rank %d, cell %d: operation %u of rank %u arrives", v.rank, v.item,
               ordinalIn(w), sourceIn(w));
    }
    break;
  }
  case MOVE_DIES:
    snprintf(text, size, "rank %d dies", v.rank);
    break;
  default:
    snprintf(text, size, "rank %d gives rank %d up", v.rank, v.item);
    break;
  }
}
