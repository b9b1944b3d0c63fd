#include "push.h"

#include <stdio.h>
#include <string.h>

typedef struct push_block {
  uint8_t announced;     /* all peers */
  uint8_t written, done; /* by peer, a bit each */
} push_block_t;

typedef struct push_rank {
  uint8_t operation;
  uint8_t announcedTo, based,
      taken;                        /* by peer, a bit each; based: the count's start is looked up */
  uint8_t announced[2][PUSH_RANKS]; /* by peer: its word is of this operation, counted from 1 */
  uint8_t weights[PUSH_RANKS];      /* by source: the same */
  uint8_t rows[PUSH_RANKS];         /* by source: of which blocks, a bit each */
  uint8_t dones[PUSH_RANKS], before[PUSH_RANKS];
  push_block_t block[PUSH_BLOCKS];
} push_rank_t;

typedef struct push_state {
  push_rank_t rank[PUSH_RANKS];
} push_state_t;

enum { ANNOUNCE, BASE, WAIT, SEND, DONE, TAKE, LEAVE };

static bool isOpen(const push_setup_t *p, int rank, int operation) {
  return p->open[rank] >> operation & 1;
}
static bool pulls(const push_setup_t *p, int rank, int operation) {
  return p->pulls[rank] >> operation & 1;
}
static bool isZeroCopy(const push_setup_t *p, int a, int b, int operation) {
  return a != b && isOpen(p, a, operation) && isOpen(p, b, operation) &&
         pulls(p, a, operation) == pulls(p, b, operation);
}
static int bufferOf(const push_setup_t *p, int operation) {
  return p->fault == PUSH_FAULT_ONE_BUFFER ? 0 : operation & 1;
}

static bool hasAllAnnounces(const push_setup_t *p, const push_rank_t *k, int r) {
  for (int q = 0; q < p->numRanks; q++) {
    if (q != r && k->announced[bufferOf(p, k->operation)][q] != k->operation + 1) return false;
  }
  return true;
}

static bool mayLeave(const push_setup_t *p, const push_rank_t *k, int r) {
  const int e = k->operation;
  const unsigned peers = ((1u << p->numRanks) - 1) & ~(1u << r);
  if (k->announcedTo != peers) return false;
  if (!isOpen(p, r, e)) return p->fault == PUSH_FAULT_RUN_AHEAD || hasAllAnnounces(p, k, r);
  for (int q = 0; q < p->numRanks; q++) {
    for (int b = 0; b < p->numBlocks; b++) {
      if (!k->block[b].announced) return false;
      if (isZeroCopy(p, r, q, e) && !(k->block[b].written & k->block[b].done & 1u << q))
        return false;
    }
    if (!isZeroCopy(p, r, q, e)) continue;
    if (!(k->taken & k->based & 1u << q)) return false;
    if (p->fault == PUSH_FAULT_NO_COUNT) continue;
    if ((uint8_t)(k->dones[q] - k->before[q]) != p->numBlocks) return false;
  }
  return true;
}

static int blockMoves(const push_setup_t *p, const push_rank_t *k, int r, int b, move_t *moves) {
  const push_block_t *block = &k->block[b];
  const bool early = p->fault == PUSH_FAULT_EARLY_DONE;
  unsigned pushed = 0;
  int n = 0;
  for (int q = 0; q < p->numRanks; q++) pushed |= (unsigned)isZeroCopy(p, r, q, k->operation) << q;
  if (!block->announced && hasAllAnnounces(p, k, r)) {
    moves[n++] = (move_t){WAIT, (uint8_t)r, (uint8_t)b, 0, 0};
  }
  if (!block->announced && p->fault != PUSH_FAULT_NO_WAIT) return n;
  for (int q = 0; q < p->numRanks; q++) {
    if (!(pushed >> q & 1)) continue;
    const move_t v = {SEND, (uint8_t)r, (uint8_t)b, 0, (uint8_t)q};
    if (!(block->written >> q & 1)) moves[n++] = v;
    if (!(block->done >> q & 1) && (early || block->written == pushed)) {
      moves[n] = v, moves[n++].kind = DONE;
    }
  }
  return n;
}

static int pushMoves(const void *model, const void *state, move_t moves[MAX_MOVES]) {
  const push_setup_t *p = model;
  const push_state_t *s = state;
  int n = 0;
  for (int r = 0; r < p->numRanks; r++) {
    const push_rank_t *k = &s->rank[r];
    const int e = k->operation;
    if (e == p->numOperations) continue;
    for (int q = 0; q < p->numRanks; q++) {
      const move_t v = {ANNOUNCE, (uint8_t)r, 0, 0, (uint8_t)q};
      if (q != r && !(k->announcedTo >> q & 1)) moves[n++] = v;
      if (!isZeroCopy(p, r, q, e)) continue;
      if ((k->announcedTo & ~k->based) >> q & 1) moves[n] = v, moves[n++].kind = BASE;
      if (!(k->taken >> q & 1) && k->weights[q] == e + 1) moves[n] = v, moves[n++].kind = TAKE;
    }
    if (isOpen(p, r, e)) {
      for (int b = 0; b < p->numBlocks; b++) n += blockMoves(p, k, r, b, moves + n);
    }
    if (mayLeave(p, k, r)) moves[n++] = (move_t){LEAVE, (uint8_t)r, 0, 0, 0};
  }
  return n;
}

static const char *send(const push_setup_t *p, push_state_t *s, move_t v) {
  push_rank_t *k = &s->rank[v.rank], *to = &s->rank[v.item];
  k->block[v.block].written |= (uint8_t)(1u << v.item);
  if (to->operation != k->operation || !(to->announcedTo >> v.rank & 1)) {
    return "a window was used while its owner was not in the operation";
  }
  if (pulls(p, v.rank, k->operation))
    k->rows[v.item] |= (uint8_t)(1u << v.block);
  else
    to->rows[v.rank] |= (uint8_t)(1u << v.block);
  if (v.block == p->numBlocks - 1) to->weights[v.rank] = (uint8_t)(k->operation + 1);
  return NULL;
}

static const char *leave(const push_setup_t *p, push_rank_t *k, int r) {
  for (int q = 0; q < p->numRanks; q++) {
    if (isZeroCopy(p, r, q, k->operation) && k->rows[q] != (1u << p->numBlocks) - 1) {
      return "a rank has left an operation whose rows are not all there";
    }
  }
  k->operation++;
  k->announcedTo = k->based = k->taken = 0;
  memset(k->rows, 0, sizeof k->rows);
  memset(k->before, 0, sizeof k->before);
  memset(k->block, 0, sizeof k->block);
  return NULL;
}

static const char *pushMake(const void *model, void *state, move_t v) {
  const push_setup_t *p = model;
  push_state_t *s = state;
  push_rank_t *k = &s->rank[v.rank];
  const uint8_t bit = (uint8_t)(1u << v.item);
  switch (v.kind) {
  case ANNOUNCE:
    k->announcedTo |= bit;
    s->rank[v.item].announced[bufferOf(p, k->operation)][v.rank] = (uint8_t)(k->operation + 1);
    if (p->fault == PUSH_FAULT_LATE_BASE) return NULL;
    k->before[v.item] = k->dones[v.item]; /* no peer adds before it has the announcement */
    k->based |= bit;
    return NULL;
  case BASE:
    k->before[v.item] = k->dones[v.item];
    k->based |= bit;
    return NULL;
  case WAIT:
    k->block[v.block].announced = 1;
    return NULL;
  case SEND:
    return send(p, s, v);
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

static const char *pushUnfinished(const void *model, const void *state) {
  const push_setup_t *p = model;
  const push_state_t *s = state;
  for (int r = 0; r < p->numRanks; r++) {
    if (s->rank[r].operation < p->numOperations) return "ranks wait for each other forever";
  }
  return NULL;
}

static void pushDescribe(const void *model, const void *state, move_t v, char *text, size_t size) {
  static const char *const DOES[] = {
      "announces to",         "looks up the count of", "waits for all, as", "uses the window of",
      "adds to the count at", "takes weights of",      "leaves, as"};
  const push_state_t *s = state;
  (void)model;
  snprintf(text, size, "rank %d, operation %d, block %d %s rank %d", v.rank,
           s->rank[v.rank].operation, v.block, DOES[v.kind], v.item);
}

outcome_t explorePush(const push_setup_t *p, uint64_t maxStates, bool trace) {
  push_state_t s;
  memset(&s, 0, sizeof s);
  const machine_t machine = {p, sizeof s, pushMoves, pushMake, pushUnfinished, pushDescribe};
  return search(&machine, &s, maxStates, trace);
}
