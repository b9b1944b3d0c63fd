/* The model of the low-latency protocol as a machine to search. */
#include "explorer.h"

static int moves(const void *m, const void *s, move_t v[MAX_MOVES]) {
  return modelMoves(m, s, v);
}
static const char *make(const void *m, void *s, move_t v) {
  return modelMake(m, s, v);
}
static const char *unfinished(const void *m, const void *s) {
  return modelUnfinished(m, s);
}
static void describe(const void *m, const void *s, move_t v, char *text, size_t size) {
  modelDescribe(m, s, v, text, size);
}

outcome_t explore(const setup_t *setup, bool trace) {
  model_t m;
  state_t s;
  modelInit(&m, setup);
  modelStart(&m, &s);
  const machine_t machine = {
      &m, (size_t)setup->numRanks * sizeof s.rank[0], moves, make, unfinished, describe};
  return search(&machine, &s, setup->maxStates, trace);
}
