#include "handshake.h"

#include <stdio.h>
#include <string.h>

typedef struct shake_block {
  uint8_t announced, agreed; /* by peer, a bit each; agreed: no FIFO, as far as known */
  uint8_t written, done;     /* by peer; written: rows are written, or read */
} shake_block_t;

typedef struct shake_rank {
  uint8_t operation;
  uint8_t announcedTo[2], based,
      taken;                        /* by peer, a bit each; based: the count's start is looked up */
  uint8_t first[HANDSHAKE_RANKS];   /* by peer: its first word, 4 x operation from 1 + tag */
  uint8_t data[HANDSHAKE_RANKS];    /* by peer: its second, 2 x operation from 1 + window */
  uint8_t weights[HANDSHAKE_RANKS]; /* by source: its operation, from 1 */
  uint8_t rows[HANDSHAKE_RANKS];    /* by source: of which blocks, a bit each */
  uint8_t dones[HANDSHAKE_RANKS], before[HANDSHAKE_RANKS];
  shake_block_t block[HANDSHAKE_BLOCKS];
} shake_rank_t;

typedef struct shake_state {
  shake_rank_t rank[HANDSHAKE_RANKS];
} shake_state_t;

enum { FIRST, DATA, BASE, WAIT, USE, DONE, TAKE, LEAVE };
enum { NO_TAG, OUTPUT, INPUT };
typedef enum { ABSENT, BY_FIFOS, ZERO_COPY } agreed_t;

static uint8_t bit(int rank) {
  return (uint8_t)(1u << rank);
}
static unsigned peersOf(const handshake_setup_t *p, int r) {
  return ((1u << p->numRanks) - 1) & ~(1u << r);
}

static int tagOf(const handshake_setup_t *p, int rank, int operation) {
  if (!(p->open[rank] >> operation & 1)) return NO_TAG;
  return p->pulls[rank] >> operation & 1 ? INPUT : OUTPUT;
}
static int windowOf(const handshake_setup_t *p, int rank, int operation) {
  return tagOf(p, rank, operation) == OUTPUT ? (int)(p->other[rank] >> operation & 1) : 0;
}
/* What the pair has to agree on. */
static bool isZeroCopy(const handshake_setup_t *p, int a, int b, int operation) {
  const int tag = tagOf(p, a, operation);
  return a != b && tag && tag == tagOf(p, b, operation) &&
         windowOf(p, a, operation) == windowOf(p, b, operation);
}

/* What rank r, which has a tag, makes of the words of peer q. */
static agreed_t agreedWith(const handshake_setup_t *p, const shake_rank_t *k, int r, int q) {
  const int want = k->operation + 1, found = k->first[q] >> 2, tag = k->first[q] & 3;
  const int own = tagOf(p, r, k->operation);
  const bool anyNumber = p->fault == HANDSHAKE_FAULT_ANY_NUMBER;
  if (found < want) return ABSENT;
  if (found > want && !anyNumber) return p->fault == HANDSHAKE_FAULT_EXACT ? ABSENT : BY_FIFOS;
  if (p->fault == HANDSHAKE_FAULT_ANY_TAG ? !tag : tag != own) return BY_FIFOS;
  if (anyNumber || p->fault == HANDSHAKE_FAULT_HALF_WORD) return ZERO_COPY;
  if (k->data[q] >> 1 != want) return ABSENT;
  const bool same = (k->data[q] & 1) == windowOf(p, r, k->operation);
  return same || p->fault == HANDSHAKE_FAULT_ANY_WINDOW ? ZERO_COPY : BY_FIFOS;
}

static bool isThrough(const handshake_setup_t *p, const shake_rank_t *k, int r) {
  for (int b = 0; b < p->numBlocks; b++) {
    const shake_block_t *block = &k->block[b];
    if (block->announced != peersOf(p, r)) return false;
    if ((block->written & block->done) != block->agreed) return false;
  }
  return true;
}

static bool mayLeave(const handshake_setup_t *p, const shake_rank_t *k, int r) {
  const int e = k->operation;
  const unsigned peers = peersOf(p, r);
  if (!tagOf(p, r, e)) return k->announcedTo[0] == peers;
  if ((k->announcedTo[0] & k->announcedTo[1]) != peers || !isThrough(p, k, r)) return false;
  for (int q = 0; q < p->numRanks; q++) {
    if (!isZeroCopy(p, r, q, e)) continue;
    if (!(k->taken & k->based & bit(q))) return false;
    if (p->fault == HANDSHAKE_FAULT_NO_COUNT) continue;
    if ((uint8_t)(k->dones[q] - k->before[q]) != p->numBlocks) return false;
  }
  return true;
}

static int blockMoves(const handshake_setup_t *p, const shake_rank_t *k, int r, int b,
                      move_t *moves) {
  const shake_block_t *block = &k->block[b];
  const bool unheard = p->fault == HANDSHAKE_FAULT_NO_WAIT;
  const bool all = unheard || block->announced == peersOf(p, r);
  int n = 0;
  for (int q = 0; q < p->numRanks; q++) {
    const move_t v = {WAIT, (uint8_t)r, (uint8_t)b, 0, (uint8_t)q};
    if (q == r) continue;
    if (!(block->announced & bit(q)) && agreedWith(p, k, r, q) != ABSENT) moves[n++] = v;
    if (!all || !(unheard ? isZeroCopy(p, r, q, k->operation) : block->agreed & bit(q))) continue;
    if (!(block->written & bit(q))) moves[n] = v, moves[n++].kind = USE;
    const bool isUsed = block->written == block->agreed || p->fault == HANDSHAKE_FAULT_EARLY_DONE;
    if (!(block->done & bit(q)) && isUsed) moves[n] = v, moves[n++].kind = DONE;
  }
  return n;
}

static int shakeMoves(const void *model, const void *state, move_t moves[MAX_MOVES]) {
  const handshake_setup_t *p = model;
  const shake_state_t *s = state;
  int n = 0;
  for (int r = 0; r < p->numRanks; r++) {
    const shake_rank_t *k = &s->rank[r];
    const int e = k->operation;
    if (e == p->numOperations) continue;
    const bool open = tagOf(p, r, e) != NO_TAG;
    for (int q = 0; q < p->numRanks; q++) {
      const move_t v = {FIRST, (uint8_t)r, 0, 0, (uint8_t)q};
      if (q == r) continue;
      for (uint8_t word = FIRST; word <= (open ? DATA : FIRST); word++) {
        if (!(k->announcedTo[word] & bit(q))) moves[n] = v, moves[n++].kind = word;
      }
      if (open && k->announcedTo[0] & ~k->based & bit(q)) moves[n] = v, moves[n++].kind = BASE;
      if (!isZeroCopy(p, r, q, e) || k->taken & bit(q)) continue;
      if (k->weights[q] == e + 1) moves[n] = v, moves[n++].kind = TAKE;
    }
    for (int b = 0; open && b < p->numBlocks; b++) n += blockMoves(p, k, r, b, moves + n);
    if (mayLeave(p, k, r)) moves[n++] = (move_t){LEAVE, (uint8_t)r, 0, 0, 0};
  }
  return n;
}

static void announce(const handshake_setup_t *p, shake_state_t *s, move_t v) {
  shake_rank_t *k = &s->rank[v.rank], *to = &s->rank[v.item];
  const int e = k->operation, number = e + 1;
  if (!((k->announcedTo[0] | k->announcedTo[1]) & bit(v.item)) &&
      p->fault != HANDSHAKE_FAULT_LATE_BASE) {
    k->before[v.item] = k->dones[v.item]; /* no peer adds before it has the announcement */
    k->based |= bit(v.item);
  }
  k->announcedTo[v.kind] |= bit(v.item);
  if (v.kind == FIRST)
    to->first[v.rank] = (uint8_t)(4 * number + tagOf(p, v.rank, e));
  else
    to->data[v.rank] = (uint8_t)(2 * number + windowOf(p, v.rank, e));
}

static const char *await(const handshake_setup_t *p, shake_rank_t *k, move_t v) {
  shake_block_t *block = &k->block[v.block];
  const bool agreed = agreedWith(p, k, v.rank, v.item) == ZERO_COPY;
  block->announced |= bit(v.item);
  if (agreed) block->agreed |= bit(v.item);
  if (agreed != isZeroCopy(p, v.rank, v.item, k->operation)) {
    return "two ranks disagree on the way between them";
  }
  return agreed && k->data[v.item] >> 1 != k->operation + 1 ? "data is used that is not there"
                                                            : NULL;
}

static const char *use(const handshake_setup_t *p, shake_state_t *s, move_t v) {
  shake_rank_t *k = &s->rank[v.rank], *peer = &s->rank[v.item];
  k->block[v.block].written |= bit(v.item);
  if (p->fault == HANDSHAKE_FAULT_NO_WAIT) k->block[v.block].agreed |= bit(v.item);
  if (peer->operation != k->operation || !(peer->announcedTo[0] & bit(v.rank))) {
    return "memory was used while its owner was not in the operation";
  }
  if (tagOf(p, v.rank, k->operation) == INPUT)
    k->rows[v.item] |= bit(v.block);
  else
    peer->rows[v.rank] |= bit(v.block);
  if (v.block == p->numBlocks - 1) peer->weights[v.rank] = (uint8_t)(k->operation + 1);
  return NULL;
}

static const char *leave(const handshake_setup_t *p, shake_rank_t *k, int r) {
  for (int q = 0; q < p->numRanks; q++) {
    if (isZeroCopy(p, r, q, k->operation) && k->rows[q] != (1u << p->numBlocks) - 1) {
      return "a rank has left an operation whose rows are not all there";
    }
  }
  k->operation++;
  memset(k->announcedTo, 0, sizeof k->announcedTo);
  k->based = k->taken = 0;
  memset(k->rows, 0, sizeof k->rows);
  memset(k->before, 0, sizeof k->before);
  memset(k->block, 0, sizeof k->block);
  return NULL;
}

static const char *shakeMake(const void *model, void *state, move_t v) {
  const handshake_setup_t *p = model;
  shake_state_t *s = state;
  shake_rank_t *k = &s->rank[v.rank];
  switch (v.kind) {
  case FIRST:
  case DATA:
    announce(p, s, v);
    return NULL;
  case BASE:
    k->before[v.item] = k->dones[v.item];
    k->based |= bit(v.item);
    return NULL;
  case WAIT:
    return await(p, k, v);
  case USE:
    return use(p, s, v);
  case DONE:
    k->block[v.block].done |= bit(v.item);
    s->rank[v.item].dones[v.rank]++;
    return NULL;
  case TAKE:
    k->taken |= bit(v.item);
    return NULL;
  default:
    return leave(p, k, v.rank);
  }
}

static const char *shakeUnfinished(const void *model, const void *state) {
  const handshake_setup_t *p = model;
  const shake_state_t *s = state;
  for (int r = 0; r < p->numRanks; r++) {
    if (s->rank[r].operation < p->numOperations) return "ranks wait for each other forever";
  }
  return NULL;
}

static void shakeDescribe(const void *model, const void *state, move_t v, char *text, size_t size) {
  static const char *const DOES[] = {
      "announces to",       "sends data to",        "looks up the count of", "waits for",
      "uses the memory of", "adds to the count at", "takes weights of",      "leaves, as"};
  const shake_state_t *s = state;
  (void)model;
  snprintf(text, size, "rank %d, operation %d, block %d %s rank %d", v.rank,
           s->rank[v.rank].operation, v.block, DOES[v.kind], v.item);
}

outcome_t exploreHandshake(const handshake_setup_t *p, uint64_t maxStates, bool trace) {
  shake_state_t s;
  memset(&s, 0, sizeof s);
  const machine_t machine = {p, sizeof s, shakeMoves, shakeMake, shakeUnfinished, shakeDescribe};
  return search(&machine, &s, maxStates, trace);
}
