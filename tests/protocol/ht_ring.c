/* Where rings must be at the end, and the search. */
#include <stdio.h>
#include <string.h>

#include "ht_ring_state.h"

/* Whether words say that all of `total` ring slots or chunks went through `size` slots. */
static bool isThrough(const uint8_t *words, int total, int size) {
  for (int i = 0; i < size; i++) {
    if (words[i] != (total - i + size - 1) / size) return false;
  }
  return true;
}

static const char *ringCounts(const plan_t *m, const ring_state_t *s, int kind, int r) {
  const ring_t *g = &s->ring[kind][r];
  const int all = m->base[kind][m->numOperations][r], n = m->p->ringSlots;
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
  const int last = m->numOperations - 1, n = m->p->fifoSlots;
  int all = ringNumber(m, kind, last, o, 0, 1u << h);
  if (kindOf(m, last) == kind) all = ringNumber(m, kind, last, o, m->p->numTokens, 1u << h);
  if (ringIsInPlace(m, kind, o, h)) all = 0;
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
    snprintf(text, size, "ring of rank %d, kind %d, put %d of %d ring slots from %d on: %s (%d)",
             v.rank, v.role, v.block, g->put[v.block].n, g->put[v.block].first,
             NETWORK[v.kind - ARRIVES], v.item);
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
  ringPlan(&m, p);
  for (int r = 0; r < m.numRanks; r++) ringStartLaunch(&m, &s, r);
  const machine_t machine = {&m, sizeof s, ringMoves, ringMake, ringUnfinished, ringDescribe};
  return search(&machine, &s, maxStates, trace);
}
