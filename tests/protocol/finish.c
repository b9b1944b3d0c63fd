/* How a launch of the model ends (finishLaunch in kernels/ll/wait.cuh): arrivals, clearing, free words,
 * the clock. */
#include "model.h"

#include "kernels/common/protocol.h"

#include <string.h>

/* To all peers: this rank has received `number`. */
const char *postFree(const model_t *m, state_t *s, int r, int number) {
  const word_t w = wordOf(flagOf(m, number), (unsigned)number, (unsigned)r, 0);
  for (int d = 0; d < m->setup.numRanks; d++) {
    const place_t p = {(uint8_t)d, (uint8_t)freeCell(m, bufOf(m, number), r), (uint8_t)r};
    const char *wrong = d == r ? NULL : store(s, p, w);
    if (wrong) return wrong;
  }
  return NULL;
}

enum { POSTS = 1, CLEARS = 2, RESETS = 4 }; /* in block_t.isLast */

static void arrive(const model_t *m, state_t *s, int r, int b) {
  rank_t *k = &s->rank[r];
  const int parts = m->launch[r][k->launch].parts, number = k->block[b].role[0].number;
  const bool first = k->arrived == 0, last = k->arrived == m->setup.numBlocks - 1;
  const fault_t f = m->setup.fault;
  const bool due = f != FAULT_NO_CLEAR && parts & RECV &&
                   epLlClears((uint64_t)number, (uint64_t)m->setup.clearPeriod);
  k->arrived++;
  int does = last && f != FAULT_ARRIVALS_STAY ? RESETS : 0;
  if (parts == RECV && (f == FAULT_FREE_BY_FIRST ? first : last)) does |= POSTS;
  if (due && (f == FAULT_CLEAR_BY_FIRST ? first : last)) does |= CLEARS;
  k->block[b].isLast = (uint8_t)does;
  k->block[b].finish = (uint8_t)(does ? STEP_FENCE : STEP_COUNT);
}

static const char *clear(const model_t *m, state_t *s, int r, int b) {
  rank_t *k = &s->rank[r];
  int buf = bufOf(m, k->block[b].role[0].number);
  if (m->setup.fault == FAULT_CLEAR_OTHER) buf ^= 1;
  for (int i = 0; i < m->numCells; i++) {
    const cell_t *c = &k->cell[i];
    if (!isClearedWith(m, i, buf) || !(c->now || c->queue[0])) continue;
    const char *wrong = store(s, (place_t){(uint8_t)r, (uint8_t)i, (uint8_t)r}, CLEARING);
    if (wrong) return wrong;
  }
  return NULL;
}

static const char *post(const model_t *m, state_t *s, int r, int b) {
  rank_t *k = &s->rank[r];
  if (k->block[b].isLast & RESETS) k->arrived = 0;
  return k->block[b].isLast & POSTS ? postFree(m, s, r, k->block[b].role[0].number) : NULL;
}

static void count(const model_t *m, state_t *s, int r, int b) {
  rank_t *k = &s->rank[r];
  const launch_t l = m->launch[r][k->launch];
  const unsigned B = (unsigned)m->setup.numBlocks;
  if (l.parts & SEND) {
    if (b == 0) k->sent[l.ordinal % NUM_HANDLES] = k->block[0].role[0].number;
    if (m->setup.fault == FAULT_CLOCK_BY_ONE) {
      k->clock += b == 0 ? 65536 : 0;
    } else if (m->setup.fault != FAULT_CLOCK_AT_START) {
      k->clock += (uint32_t)epBlockTick((unsigned)b, B);
    }
  }
  memset(&k->block[b], 0, sizeof k->block[b]);
  k->block[b].finish = ENDED;
  for (unsigned i = 0; i < B; i++) {
    if (k->block[i].finish != ENDED) return;
  }
  memset(k->block, 0, sizeof k->block); /* the launch ends, the next one may start */
  k->launch++;
  if (k->failed) {
    k->gone = 1; /* the library launches nothing any more */
    k->launch = (uint8_t)m->numLaunches[r];
  }
}

const char *finishMove(const model_t *m, state_t *s, int r, int b) {
  block_t *k = &s->rank[r].block[b];
  const char *wrong = NULL;
  switch ((step_t)k->finish) {
  case STEP_ARRIVE:
    arrive(m, s, r, b);
    if (k->isLast & CLEARS) wrong = clear(m, s, r, b);
    break;
  case STEP_FENCE:
    k->finish = STEP_POST;
    break;
  case STEP_POST:
    wrong = post(m, s, r, b);
    k->finish = STEP_COUNT;
    break;
  default:
    count(m, s, r, b);
    break;
  }
  return wrong;
}
