#include "straight.h"

#include <stdio.h>
#include <string.h>

typedef struct straight_block {
  uint8_t heard;     /* all peers */
  uint8_t fed, done; /* by peer, a bit each */
} straight_block_t;

typedef struct straight_rank {
  uint8_t operation;
  uint8_t said, based, taken;       /* by peer, a bit each; based: the count's start is looked up */
  uint8_t hello[2][STRAIGHT_RANKS]; /* by peer: its word is of this operation, counted from 1 */
  uint8_t weights[STRAIGHT_RANKS];  /* by source: the same */
  uint8_t rows[STRAIGHT_RANKS];     /* by source: of which blocks, a bit each */
  uint8_t dones[STRAIGHT_RANKS], before[STRAIGHT_RANKS];
  straight_block_t block[STRAIGHT_BLOCKS];
} straight_rank_t;

typedef struct straight_state {
  straight_rank_t rank[STRAIGHT_RANKS];
} straight_state_t;

enum { SAY, BASE, HEAR, FEED, DONE, TAKE, LEAVE };

static bool isOpen(const straight_setup_t *p, int rank, int operation) {
  return p->open[rank] >> operation & 1;
}
static bool isDirect(const straight_setup_t *p, int a, int b, int operation) {
  return a != b && isOpen(p, a, operation) && isOpen(p, b, operation);
}
static int bufferOf(const straight_setup_t *p, int operation) {
  return p->fault == STRAIGHT_FAULT_ONE_BUFFER ? 0 : operation & 1;
}

static bool hearsAll(const straight_setup_t *p, const straight_rank_t *k, int r) {
  for (int q = 0; q < p->numRanks; q++) {
    if (q != r && k->hello[bufferOf(p, k->operation)][q] != k->operation + 1) return false;
  }
  return true;
}

static bool mayLeave(const straight_setup_t *p, const straight_rank_t *k, int r) {
  const int e = k->operation;
  const unsigned peers = ((1u << p->numRanks) - 1) & ~(1u << r);
  if (k->said != peers) return false;
  if (!isOpen(p, r, e)) return p->fault == STRAIGHT_FAULT_RUN_AHEAD || hearsAll(p, k, r);
  for (int q = 0; q < p->numRanks; q++) {
    for (int b = 0; b < p->numBlocks; b++) {
      if (!k->block[b].heard) return false;
      if (isDirect(p, r, q, e) && !(k->block[b].fed & k->block[b].done & 1u << q)) return false;
    }
    if (!isDirect(p, r, q, e)) continue;
    if (!(k->taken & k->based & 1u << q)) return false;
    if (p->fault == STRAIGHT_FAULT_NO_COUNT) continue;
    if ((uint8_t)(k->dones[q] - k->before[q]) != p->numBlocks) return false;
  }
  return true;
}

static int blockMoves(const straight_setup_t *p, const straight_rank_t *k, int r, int b,
                      move_t *moves) {
  const straight_block_t *block = &k->block[b];
  const bool early = p->fault == STRAIGHT_FAULT_EARLY_DONE;
  unsigned direct = 0;
  int n = 0;
  for (int q = 0; q < p->numRanks; q++) direct |= (unsigned)isDirect(p, r, q, k->operation) << q;
  if (!block->heard && hearsAll(p, k, r)) {
    moves[n++] = (move_t){HEAR, (uint8_t)r, (uint8_t)b, 0, 0};
  }
  if (!block->heard && p->fault != STRAIGHT_FAULT_NO_HEARING) return n;
  for (int q = 0; q < p->numRanks; q++) {
    if (!(direct >> q & 1)) continue;
    const move_t v = {FEED, (uint8_t)r, (uint8_t)b, 0, (uint8_t)q};
    if (!(block->fed >> q & 1)) moves[n++] = v;
    if (!(block->done >> q & 1) && (early || block->fed == direct)) {
      moves[n] = v, moves[n++].kind = DONE;
    }
  }
  return n;
}

static int straightMoves(const void *model, const void *state, move_t moves[MAX_MOVES]) {
  const straight_setup_t *p = model;
  const straight_state_t *s = state;
  int n = 0;
  for (int r = 0; r < p->numRanks; r++) {
    const straight_rank_t *k = &s->rank[r];
    const int e = k->operation;
    if (e == p->numOperations) continue;
    for (int q = 0; q < p->numRanks; q++) {
      const move_t v = {SAY, (uint8_t)r, 0, 0, (uint8_t)q};
      if (q != r && !(k->said >> q & 1)) moves[n++] = v;
      if (!isDirect(p, r, q, e)) continue;
      if ((k->said & ~k->based) >> q & 1) moves[n] = v, moves[n++].kind = BASE;
      if (!(k->taken >> q & 1) && k->weights[q] == e + 1) moves[n] = v, moves[n++].kind = TAKE;
    }
    if (isOpen(p, r, e)) {
      for (int b = 0; b < p->numBlocks; b++) n += blockMoves(p, k, r, b, moves + n);
    }
    if (mayLeave(p, k, r)) moves[n++] = (move_t){LEAVE, (uint8_t)r, 0, 0, 0};
  }
  return n;
}

static const char *feed(const straight_setup_t *p, straight_state_t *s, move_t v) {
  straight_rank_t *k = &s->rank[v.rank], *to = &s->rank[v.item];
  k->block[v.block].fed |= (uint8_t)(1u << v.item);
  if (to->operation != k->operation || !(to->said >> v.rank & 1)) {
    return "an output was written while its owner was not in the operation";
  }
  to->rows[v.rank] |= (uint8_t)(1u << v.block);
  if (v.block == p->numBlocks - 1) to->weights[v.rank] = (uint8_t)(k->operation + 1);
  return NULL;
}

static const char *leave(const straight_setup_t *p, straight_rank_t *k, int r) {
  for (int q = 0; q < p->numRanks; q++) {
    if (isDirect(p, r, q, k->operation) && k->rows[q] != (1u << p->numBlocks) - 1) {
      return "a rank has left an operation whose rows are not all there";
    }
  }
  k->operation++;
  k->said = k->based = k->taken = 0;
  memset(k->rows, 0, sizeof k->rows);
  memset(k->before, 0, sizeof k->before);
  memset(k->block, 0, sizeof k->block);
  return NULL;
}

static const char *straightMake(const void *model, void *state, move_t v) {
  const straight_setup_t *p = model;
  straight_state_t *s = state;
  straight_rank_t *k = &s->rank[v.rank];
  const uint8_t bit = (uint8_t)(1u << v.item);
  switch (v.kind) {
  case SAY:
    k->said |= bit;
    s->rank[v.item].hello[bufferOf(p, k->operation)][v.rank] = (uint8_t)(k->operation + 1);
    if (p->fault == STRAIGHT_FAULT_LATE_BASE) return NULL;
    k->before[v.item] = k->dones[v.item]; /* nobody adds before it has heard the word */
    k->based |= bit;
    return NULL;
  case BASE:
    k->before[v.item] = k->dones[v.item];
    k->based |= bit;
    return NULL;
  case HEAR:
    k->block[v.block].heard = 1;
    return NULL;
  case FEED:
    return feed(p, s, v);
  case DONE:
    k->block[v.block].done |= bit;
    s->rank[v.item].dones[v.rank]++;
    return NULL;
  case TAKE:
    k->taken |= bit;
    return NULL;
  default:
    return leave(p, k, v.rank);
  }
}

static const char *straightUnfinished(const void *model, const void *state) {
  const straight_setup_t *p = model;
  const straight_state_t *s = state;
  for (int r = 0; r < p->numRanks; r++) {
    if (s->rank[r].operation < p->numOperations) return "ranks wait for each other forever";
  }
  return NULL;
}

static void straightDescribe(const void *model, const void *state, move_t v, char *text,
                             size_t size) {
  static const char *const DOES[] = {
      "says its word to",     "looks up the count of", "hears all, as", "writes to",
      "adds to the count at", "takes weights of",      "leaves, as"};
  const straight_state_t *s = state;
  (void)model;
  snprintf(text, size, "rank %d, operation %d, block %d %s rank %d", v.rank,
           s->rank[v.rank].operation, v.block, DOES[v.kind], v.item);
}

outcome_t exploreStraight(const straight_setup_t *p, uint64_t maxStates, bool trace) {
  straight_state_t s;
  memset(&s, 0, sizeof s);
  const machine_t machine = {
      p, sizeof s, straightMoves, straightMake, straightUnfinished, straightDescribe};
  return search(&machine, &s, maxStates, trace);
}
