#include "pull.h"

#include <stdio.h>
#include <string.h>

typedef struct pull_block {
  uint8_t announced,
      pulls; /* peers, a bit each; pulls: those that are read from, as far as known */
  uint8_t sent, read, counted;
} pull_block_t;

typedef struct pull_rank {
  uint8_t operation;
  uint8_t announcedTo[2], based,
      taken; /* by peer, a bit each; based: the count's start is looked up */
  uint8_t where
      [PULL_RANKS]; /* by peer: twice the operation that its word is of, counted from 1, + open */
  uint8_t rows[PULL_RANKS];      /* by peer: its other word's operation */
  uint8_t gradients[PULL_RANKS]; /* by peer: the same */
  uint8_t counts[PULL_RANKS], before[PULL_RANKS];
  pull_block_t block[PULL_BLOCKS];
} pull_rank_t;

typedef struct pull_state {
  pull_rank_t rank[PULL_RANKS];
} pull_state_t;

enum { SAY_WHERE, SAY_ROWS, BASE, WAIT, SEND, READ, TAKE, COUNT, LEAVE };

static bool isOpen(const pull_setup_t *p, int rank, int operation) {
  return p->open[rank] >> operation & 1;
}
static bool isPull(const pull_setup_t *p, int a, int b, int operation) {
  return a != b && isOpen(p, a, operation) && isOpen(p, b, operation);
}
static unsigned peersOf(const pull_setup_t *p, int r) {
  return ((1u << p->numRanks) - 1) & ~(1u << r);
}

/* What an open rank makes of peer q's words: -1 nothing yet, 0 no window, 1 a window. */
static int announcedBy(const pull_setup_t *p, const pull_rank_t *k, int q) {
  const int want = k->operation + 1, found = k->where[q] >> 1, window = k->where[q] & 1;
  if (p->fault == PULL_FAULT_ANY_NUMBER && found >= want) return window;
  if (found > want) return p->fault == PULL_FAULT_EXACT ? -1 : 0;
  if (found < want) return -1;
  if (!window) return 0;
  return k->rows[q] == want || p->fault == PULL_FAULT_HALF_WORD ? 1 : -1;
}

static bool mayLeave(const pull_setup_t *p, const pull_rank_t *k, int r) {
  const int e = k->operation;
  const unsigned peers = peersOf(p, r);
  if (!isOpen(p, r, e)) return k->announcedTo[0] == peers;
  if ((k->announcedTo[0] & k->announcedTo[1]) != peers) return false;
  for (int b = 0; b < p->numBlocks; b++) {
    const pull_block_t *block = &k->block[b];
    if (block->announced != peers) return false;
    if ((block->sent & block->read & block->counted) != block->pulls) return false;
  }
  for (int q = 0; q < p->numRanks; q++) {
    if (!isPull(p, r, q, e)) continue;
    if (!(k->taken & k->based & 1u << q)) return false;
    if (p->fault == PULL_FAULT_NO_COUNT) continue;
    if ((uint8_t)(k->counts[q] - k->before[q]) != p->numBlocks) return false;
  }
  return true;
}

static int blockMoves(const pull_setup_t *p, const pull_rank_t *k, int r, int b, move_t *moves) {
  const pull_block_t *block = &k->block[b];
  const bool all = block->announced == peersOf(p, r) || p->fault == PULL_FAULT_NO_WAIT;
  int n = 0;
  for (int q = 0; q < p->numRanks; q++) {
    const move_t v = {WAIT, (uint8_t)r, (uint8_t)b, 0, (uint8_t)q};
    if (q == r) continue;
    if (!(block->announced >> q & 1) && announcedBy(p, k, q) >= 0) moves[n++] = v;
    const bool pulls =
        p->fault == PULL_FAULT_NO_WAIT ? isPull(p, r, q, k->operation) : block->pulls >> q & 1;
    if (!all || !pulls) continue;
    if (!(block->sent >> q & 1)) moves[n] = v, moves[n++].kind = SEND;
    if (!(block->read >> q & 1)) moves[n] = v, moves[n++].kind = READ;
    const bool isRead = block->read == block->pulls || p->fault == PULL_FAULT_EARLY_COUNT;
    if (!(block->counted >> q & 1) && isRead) moves[n] = v, moves[n++].kind = COUNT;
  }
  return n;
}

static int pullMoves(const void *model, const void *state, move_t moves[MAX_MOVES]) {
  const pull_setup_t *p = model;
  const pull_state_t *s = state;
  int n = 0;
  for (int r = 0; r < p->numRanks; r++) {
    const pull_rank_t *k = &s->rank[r];
    const int e = k->operation;
    if (e == p->numOperations) continue;
    const bool open = isOpen(p, r, e);
    for (int q = 0; q < p->numRanks; q++) {
      if (q == r) continue;
      for (uint8_t word = SAY_WHERE; word <= (open ? SAY_ROWS : SAY_WHERE); word++) {
        if (!(k->announcedTo[word] >> q & 1))
          moves[n++] = (move_t){word, (uint8_t)r, 0, 0, (uint8_t)q};
      }
      const move_t v = {BASE, (uint8_t)r, 0, 0, (uint8_t)q};
      if (open && (k->announcedTo[0] & ~k->based) >> q & 1) moves[n++] = v;
      if (!isPull(p, r, q, e) || k->taken >> q & 1) continue;
      if (k->gradients[q] == e + 1) moves[n] = v, moves[n++].kind = TAKE;
    }
    for (int b = 0; open && b < p->numBlocks; b++) n += blockMoves(p, k, r, b, moves + n);
    if (mayLeave(p, k, r)) moves[n++] = (move_t){LEAVE, (uint8_t)r, 0, 0, 0};
  }
  return n;
}

static void say(const pull_setup_t *p, pull_state_t *s, move_t v) {
  pull_rank_t *k = &s->rank[v.rank], *to = &s->rank[v.item];
  const uint8_t bit = (uint8_t)(1u << v.item), number = (uint8_t)(k->operation + 1);
  if (!k->announcedTo[0] && !k->announcedTo[1] && p->fault != PULL_FAULT_LATE_BASE) {
    memcpy(k->before, k->counts,
           sizeof k->before); /* no peer adds before it has the announcement */
    k->based = (uint8_t)peersOf(p, v.rank);
  }
  k->announcedTo[v.kind] |= bit;
  if (v.kind == SAY_WHERE) {
    to->where[v.rank] = (uint8_t)(2 * number + isOpen(p, v.rank, k->operation));
  } else {
    to->rows[v.rank] = number;
  }
}

static const char *blockMake(const pull_setup_t *p, pull_state_t *s, move_t v) {
  pull_rank_t *k = &s->rank[v.rank], *peer = &s->rank[v.item];
  pull_block_t *block = &k->block[v.block];
  const uint8_t bit = (uint8_t)(1u << v.item);
  const bool rowsAnnounced = k->rows[v.item] == k->operation + 1;
  switch (v.kind) {
  case WAIT:
    block->announced |= bit;
    if (announcedBy(p, k, v.item) == 1) block->pulls |= bit;
    if (!!(block->pulls & bit) != isPull(p, v.rank, v.item, k->operation)) {
      return "two ranks disagree on the way between them";
    }
    return (block->pulls & bit) && !rowsAnnounced ? "rows are read without an announcement" : NULL;
  case SEND:
    block->sent |= bit;
    if (v.block == p->numBlocks - 1) peer->gradients[v.rank] = (uint8_t)(k->operation + 1);
    return NULL;
  case READ:
    block->read |= bit;
    if (p->fault == PULL_FAULT_NO_WAIT) block->pulls |= bit;
    return peer->operation == k->operation && peer->announcedTo[0] >> v.rank & 1
               ? NULL
               : "rows were read while their owner was not in the operation";
  default:
    block->counted |= bit;
    peer->counts[v.rank]++;
    return NULL;
  }
}

static const char *pullMake(const void *model, void *state, move_t v) {
  const pull_setup_t *p = model;
  pull_state_t *s = state;
  pull_rank_t *k = &s->rank[v.rank];
  const uint8_t bit = (uint8_t)(1u << v.item);
  switch (v.kind) {
  case SAY_WHERE:
  case SAY_ROWS:
    say(p, s, v);
    return NULL;
  case BASE:
    k->before[v.item] = k->counts[v.item];
    k->based |= bit;
    return NULL;
  case TAKE:
    k->taken |= bit;
    return NULL;
  case LEAVE:
    k->operation++;
    memset(k->announcedTo, 0, sizeof k->announcedTo);
    k->based = k->taken = 0;
    memset(k->before, 0, sizeof k->before);
    memset(k->block, 0, sizeof k->block);
    return NULL;
  default:
    return blockMake(p, s, v);
  }
}

static const char *pullUnfinished(const void *model, const void *state) {
  const pull_setup_t *p = model;
  const pull_state_t *s = state;
  for (int r = 0; r < p->numRanks; r++) {
    if (s->rank[r].operation < p->numOperations) return "ranks wait for each other forever";
  }
  return NULL;
}

static void pullDescribe(const void *model, const void *state, move_t v, char *text, size_t size) {
  static const char *const DOES[] = {"says where its rows lie to",
                                     "says how many rows to",
                                     "looks up the count of",
                                     "waits for",
                                     "sends gradients to",
                                     "reads rows of",
                                     "takes gradients of",
                                     "adds to the count at",
                                     "leaves, as"};
  const pull_state_t *s = state;
  (void)model;
  snprintf(text, size, "rank %d, operation %d, block %d %s rank %d", v.rank,
           s->rank[v.rank].operation, v.block, DOES[v.kind], v.item);
}

outcome_t explorePull(const pull_setup_t *p, uint64_t maxStates, bool trace) {
  pull_state_t s;
  memset(&s, 0, sizeof s);
  const machine_t machine = {p, sizeof s, pullMoves, pullMake, pullUnfinished, pullDescribe};
  return search(&machine, &s, maxStates, trace);
}
