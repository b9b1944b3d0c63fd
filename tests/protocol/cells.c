/* Where things lie, who stores what and who waits for what: the lists behind the steps. */
#include "model.h"

#include <string.h>

static unsigned mix(unsigned a, unsigned b, unsigned c) {
  unsigned x = a * 2654435761u ^ b * 2246822519u ^ c * 3266489917u;
  x ^= x >> 15;
  x *= 2654435761u;
  return x >> 13;
}

/* Tokens of rank r in an operation: uneven, some ranks have none. */
int tokensOf(const model_t *m, int ordinal, int r) {
  const int n = m->setup.numTokens;
  return n < 0 ? -n : (int)(mix(ordinal, r, 1) % (unsigned)(n + 1));
}

/* The rank of entry k of a token, or -1; the entries of a token name different ranks. */
int rankOfEntry(const model_t *m, int ordinal, int r, int t, int k) {
  const int R = m->setup.numRanks, x = (int)(mix(ordinal, r * 8 + t, 2) % (unsigned)(R + 1));
  if (k == 0) return x == R ? -1 : x;
  if (mix(ordinal, r * 8 + t, 3) % 3 == 0) return -1;
  return (x + 1 + (int)(mix(ordinal, r * 8 + t, 4) % (unsigned)(R - 1))) % R;
}

static bool goesTo(const model_t *m, int ordinal, int r, int t, int d) {
  for (int k = 0; k < NUM_K; k++) {
    if (rankOfEntry(m, ordinal, r, t, k) == d) return true;
  }
  return false;
}

static int wordCell(const model_t *m, int buf, int from, int t) {
  return (buf * m->setup.numRanks + from) * MAX_TOKENS + t;
}
static int announceCell(const model_t *m, int buf, int from) {
  const int R = m->setup.numRanks;
  return 2 * R * MAX_TOKENS + buf * R + from;
}
int freeCell(const model_t *m, int buf, int from) {
  const int R = m->setup.numRanks;
  return 2 * R * (MAX_TOKENS + 1) + buf * R + from;
}
static int rowCell(const model_t *m, int buf, int from, int t) {
  const int R = m->setup.numRanks;
  return 2 * R * (MAX_TOKENS + 2) + (buf * R + from) * MAX_TOKENS + t;
}
static int termCell(const model_t *m, int buf, int t, int k) {
  return 2 * m->setup.numRanks * (MAX_TOKENS + 2) + (buf * MAX_TOKENS + t) * NUM_K + k;
}
int firstWordCell(const model_t *m, int buf, int from) {
  return m->setup.kind == DISPATCH ? wordCell(m, buf, from, 0) : announceCell(m, buf, from);
}

int numCellsOf(const model_t *m) {
  const int R = m->setup.numRanks, rows = R * MAX_TOKENS, terms = MAX_TOKENS * NUM_K;
  return 2 * R * (MAX_TOKENS + 2) + 2 * (rows > terms ? rows : terms);
}

bool isClearedWith(const model_t *m, int cell, int buf) {
  const int R = m->setup.numRanks, rows = 2 * R * (MAX_TOKENS + 2);
  if (cell < 2 * R * MAX_TOKENS) return cell / (R * MAX_TOKENS) == buf;
  if (cell < 2 * R * (MAX_TOKENS + 1)) return (cell - 2 * R * MAX_TOKENS) / R == buf;
  if (cell < rows) return false; /* free words stay */
  return (cell - rows) / (m->setup.kind == DISPATCH ? R * MAX_TOKENS : MAX_TOKENS * NUM_K) == buf;
}

static void add(place_list_t *l, int at, int cell, int source) {
  l->place[l->n].at = (uint8_t)at;
  l->place[l->n].cell = (uint8_t)cell;
  l->place[l->n++].source = (uint8_t)source;
}

static bool isActive(const role_t *role, int r) {
  return role->active >> r & 1;
}

static int atLeastOne(int n) {
  return n > 0 ? n : 1;
}

void placesToPut(const model_t *m, const actor_t *a, step_t step, place_list_t *l) {
  const int R = m->setup.numRanks, B = m->setup.numBlocks, o = a->ordinal, r = a->rank;
  const int mine = tokensOf(m, o, r);
  l->n = 0;
  for (int d = 0; d < R; d++) {
    if (!isActive(a->role, d)) continue;
    if (step == STEP_PUT_ANNOUNCE) add(l, d, announceCell(m, a->buf, r), r);
    if (step == STEP_PUT_WORDS) { /* a dispatch's routing to all, a partial sum's weights to some */
      const bool all = m->setup.kind == DISPATCH;
      for (int t = a->block; t < (all ? atLeastOne(mine) : mine); t += B) {
        if (all || (d != r && goesTo(m, o, r, t, d))) add(l, d, wordCell(m, a->buf, r, t), r);
      }
    }
    if (step == STEP_PUT_ROWS && m->setup.kind == DISPATCH) {
      for (int t = a->block; t < mine; t += B) {
        if (d != r && goesTo(m, o, r, t, d)) add(l, d, rowCell(m, a->buf, r, t), r);
      }
    }
    if (step == STEP_PUT_ROWS && m->setup.kind != DISPATCH) {
      if (d == r && m->setup.kind != PARTIAL) continue; /* own rows are read in place */
      for (int t = 0; t < tokensOf(m, o, d); t++) {
        for (int k = 0; k < NUM_K; k++) {
          if ((t + k) % B == a->block && rankOfEntry(m, o, d, t, k) == r) {
            add(l, d, termCell(m, a->buf, t, k), r);
          }
        }
      }
    }
  }
}

static void wordsToGet(const model_t *m, const actor_t *a, place_list_t *l) {
  const int R = m->setup.numRanks, B = m->setup.numBlocks, o = a->ordinal, r = a->rank;
  if (m->setup.kind == PARTIAL) { /* weights of the rows that this block owes */
    for (int s = 0; s < R; s++) {
      for (int t = 0; isActive(a->role, s) && s != r && t < tokensOf(m, o, s); t++) {
        for (int k = 0; k < NUM_K; k++) {
          if ((t + k) % B == a->block && rankOfEntry(m, o, s, t, k) == r) {
            add(l, r, wordCell(m, a->buf, s, t), s);
          }
        }
      }
    }
    return;
  }
  int most = 0; /* a block without work reads the first words only */
  for (int s = 0; s < R; s++) most = tokensOf(m, o, s) > most ? tokensOf(m, o, s) : most;
  for (int s = 0; s < R; s++) {
    const int n = a->block == 0 || a->block < most ? atLeastOne(tokensOf(m, o, s)) : 1;
    for (int t = 0; isActive(a->role, s) && t < n; t++) add(l, r, wordCell(m, a->buf, s, t), s);
  }
}

static void rowsToGet(const model_t *m, const actor_t *a, place_list_t *l) {
  const int R = m->setup.numRanks, B = m->setup.numBlocks, o = a->ordinal, r = a->rank;
  if (m->setup.kind == DISPATCH) {
    for (int s = 0; s < R; s++) {
      if (s == r || !isActive(a->role, s)) continue;
      for (int t = a->block; t < tokensOf(m, o, s); t += B) {
        if (goesTo(m, o, s, t, r)) add(l, r, rowCell(m, a->buf, s, t), s);
      }
    }
    return;
  }
  for (int t = a->block; t < tokensOf(m, o, r); t += B) {
    for (int k = 0; k < NUM_K; k++) {
      const int s = rankOfEntry(m, o, r, t, k);
      if (s < 0 || !isActive(a->role, s) || (s == r && m->setup.kind != PARTIAL)) continue;
      add(l, r, termCell(m, a->buf, t, k), s);
    }
  }
}

void placesToGet(const model_t *m, const actor_t *a, step_t step, place_list_t *l) {
  l->n = 0;
  if (step == STEP_GET_WORDS) wordsToGet(m, a, l);
  if (step == STEP_GET_ROWS) rowsToGet(m, a, l);
  if (step == STEP_GET_ANNOUNCE) {
    for (int s = 0; s < m->setup.numRanks; s++) {
      if (isActive(a->role, s)) add(l, a->rank, announceCell(m, a->buf, s), s);
    }
  }
}

void placesUnused(const model_t *m, const actor_t *a, place_list_t *l) {
  l->n = 0;
  if (m->setup.kind != DISPATCH) return;
  for (int s = 0; s < m->setup.numRanks; s++) {
    if (!isActive(a->role, s)) continue;
    for (int t = atLeastOne(tokensOf(m, a->ordinal, s)); t < MAX_TOKENS; t++) {
      add(l, a->rank, wordCell(m, a->buf, s, t), s);
    }
  }
}
