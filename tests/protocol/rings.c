#include "rings.h"

#include <stdio.h>
#include <string.h>

enum { NONE = 255, FEED = 0, FOLLOW = 1 };

typedef struct ring_block {
  uint8_t follows, ended, reading; /* reading: the item at hand has given its units back already */
  uint8_t at;                      /* place in the first window */
  uint8_t window[1 + RING_AHEAD];  /* first candidates; NONE */
  uint8_t numLate;                 /* stores whose flags are not raised yet */
  uint8_t late[RING_TOKENS * 4];   /* their candidates, oldest first */
} ring_block_t;

typedef struct ring_rank {
  uint8_t operation, taken[2];
  ring_block_t block[RING_BLOCKS];
  /* Of the streams to each rank: pieces flagged, pieces given back; and those read, kept by the reader. */
  uint32_t flagged[RING_RANKS], returned[RING_RANKS], stored[RING_RANKS], read[RING_RANKS];
} ring_rank_t;

typedef struct ring_state {
  ring_rank_t rank[RING_RANKS];
} ring_state_t;

static unsigned mix(unsigned a, unsigned b, unsigned c) {
  unsigned x = a * 2654435761u ^ b * 2246822519u ^ c * 3266489917u;
  x ^= x >> 15;
  x *= 2654435761u;
  return x >> 13;
}

/* In every operation the same routing but for the first rank's tokens; combine goes the way back. */
static bool goes(const ring_setup_t *p, int owner, int token, int to) {
  if (p->everywhere) return owner != to;
  return owner != to && mix((unsigned)owner, (unsigned)token, (unsigned)to) % 4 < 3 &&
         token < p->numTokens - (owner == 1);
}

/* Number of a piece in the stream that carries (owner's token, piece) to or from `other`. */
static int number(const ring_setup_t *p, int operation, int owner, int token, int other,
                  int piece) {
  int before = 0, all = 0;
  for (int t = 0; t < p->numTokens; t++) {
    if (t < token) before += goes(p, owner, t, other);
    all += goes(p, owner, t, other);
  }
  if (p->fault == RING_FAULT_RESTART) operation = 0;
  return (operation * all + before) * p->numPieces + piece;
}

/* A candidate of this role is a token of the rank's own, for all its ranks at once. */
static bool isOwn(const ring_setup_t *p, int role) {
  return p->gathers == (role == FOLLOW);
}

/* A candidate's item: the pieces that it needs or makes. */
typedef struct ring_item {
  int n;
  struct {
    uint8_t from, to, number;
  } piece[RING_RANKS];
} ring_item_t;

static int perToken(const ring_setup_t *p, int role) {
  return isOwn(p, role) ? 1 : p->numRanks - 1;
}
static int numCandidates(const ring_setup_t *p, int role) {
  return p->numTokens * p->numPieces * perToken(p, role);
}

static ring_item_t itemOf(const ring_setup_t *p, int operation, int rank, int role, int c) {
  ring_item_t item = {0};
  const int turns = perToken(p, role);
  int turn = c % turns, piece = c / turns % p->numPieces;
  const int token = c / turns / p->numPieces;
  if (p->fault == RING_FAULT_ORDER) {
    piece = c % p->numPieces;
    turn = c / p->numPieces % turns;
  }
  for (int i = 0; i < p->numRanks - 1; i++) {
    const bool mine = isOwn(p, role);
    if (!mine && i != turn) continue;
    const int other = (rank + (role == FEED ? 1 + i : p->numRanks - 1 - i)) % p->numRanks;
    const int owner = mine ? rank : other, peer = mine ? other : rank;
    if (!goes(p, owner, token, peer)) continue;
    const int q = number(p, operation, owner, token, peer, piece);
    item.piece[item.n].from = (uint8_t)(role == FEED ? rank : other);
    item.piece[item.n].to = (uint8_t)(role == FEED ? other : rank);
    item.piece[item.n++].number = (uint8_t)q;
  }
  return item;
}

static bool mayRun(const ring_setup_t *p, const ring_state_t *s, const ring_item_t *item,
                   int role) {
  for (int i = 0; i < item->n; i++) {
    const ring_rank_t *from = &s->rank[item->piece[i].from];
    const int to = item->piece[i].to, q = item->piece[i].number;
    if (role == FOLLOW && !(from->flagged[to] >> q & 1)) return false;
    if (role == FEED && p->fault != RING_FAULT_NO_CREDIT && q >= p->units &&
        !(from->returned[to] >> (q - p->units) & 1)) {
      return false;
    }
  }
  return true;
}

/* kind: what a block may do next. */
enum { TAKE, RUN, RAISE };

static bool isHeld(const ring_setup_t *p, const ring_block_t *b) {
  /* A lazy feeder raises a flag only when another store has followed, or at the end. */
  return p->fault == RING_FAULT_LAZY && b->numLate <= 1 && !b->follows;
}

static int ringMoves(const void *model, const void *state, move_t moves[MAX_MOVES]) {
  const ring_setup_t *p = model;
  const ring_state_t *s = state;
  int n = 0;
  for (int r = 0; r < p->numRanks; r++) {
    const ring_rank_t *k = &s->rank[r];
    if (k->operation == p->numOperations) continue;
    for (int b = 0; b < p->numFeeders + p->numFollowers; b++) {
      const ring_block_t *block = &k->block[b];
      const int role = block->follows;
      const move_t v = {0, (uint8_t)r, (uint8_t)b, 0, 0};
      if (block->numLate && !isHeld(p, block)) { /* alone enough: it takes nothing from anybody */
        moves[0] = v, moves[0].kind = RAISE;
        return 1;
      }
      if (block->ended) continue;
      if (block->window[p->ahead] == NONE && k->taken[role] < numCandidates(p, role)) {
        moves[n] = v, moves[n++].kind = TAKE;
      }
      if (block->window[0] == NONE) {
        if (k->taken[role] >= numCandidates(p, role)) moves[n] = v, moves[n++].kind = RUN;
        continue;
      }
      const ring_item_t item = itemOf(p, k->operation, r, role, block->window[0] + block->at);
      if (block->reading || mayRun(p, s, &item, role)) moves[n] = v, moves[n++].kind = RUN;
    }
  }
  return n;
}

static void giveBack(ring_state_t *s, const ring_item_t *item) {
  for (int i = 0; i < item->n; i++) {
    s->rank[item->piece[i].from].returned[item->piece[i].to] |= 1u << item->piece[i].number;
  }
}

static const char *runItem(const ring_setup_t *p, ring_state_t *s, int r, ring_block_t *b) {
  const ring_item_t item = itemOf(p, s->rank[r].operation, r, b->follows, b->window[0] + b->at);
  if (b->follows && p->fault == RING_FAULT_HALF && !b->reading && item.n) {
    b->reading = 1;
    giveBack(s, &item);
    return NULL;
  }
  for (int i = 0; i < item.n; i++) {
    ring_rank_t *from = &s->rank[item.piece[i].from];
    const int to = item.piece[i].to, q = item.piece[i].number;
    if (b->follows) {
      from->read[to] |= 1u << q;
      if (q + p->units < RING_STREAM && from->stored[to] >> (q + p->units) & 1) {
        return "a unit was read after it had been filled again";
      }
    } else {
      if (from->stored[to] >> q & 1) return "a piece was stored twice";
      from->stored[to] |= 1u << q;
      if (q >= p->units && !(from->read[to] >> (q - p->units) & 1)) {
        return "a unit was filled before it had been read";
      }
    }
  }
  if (b->follows) giveBack(s, &item);
  if (!b->follows && item.n) b->late[b->numLate++] = (uint8_t)(b->window[0] + b->at);
  b->reading = 0;
  b->at++;
  if (b->at == p->take || b->window[0] + b->at >= numCandidates(p, b->follows)) {
    memmove(b->window, b->window + 1, RING_AHEAD);
    b->window[RING_AHEAD] = NONE;
    b->at = 0;
  }
  return NULL;
}

static void startLaunch(const ring_setup_t *p, ring_rank_t *k) {
  const int numFollowers = p->fault == RING_FAULT_ALL_FEED ? 0 : p->numFollowers;
  k->taken[FEED] = k->taken[FOLLOW] = 0;
  memset(k->block, 0, sizeof k->block);
  for (int b = 0; b < p->numFeeders + p->numFollowers; b++) {
    memset(k->block[b].window, NONE, sizeof k->block[b].window);
    k->block[b].follows = b >= p->numFeeders + p->numFollowers - numFollowers;
  }
}

/* A block has gone through all candidates of its role. */
static void endRole(const ring_setup_t *p, ring_rank_t *k, ring_block_t *b) {
  if (!b->follows) {
    b->follows = 1;
    return;
  }
  b->ended = 1;
  for (int i = 0; i < p->numFeeders + p->numFollowers; i++) {
    if (!k->block[i].ended || k->block[i].numLate) return;
  }
  k->operation++;
  startLaunch(p, k);
}

static const char *ringMake(const void *model, void *state, move_t v) {
  const ring_setup_t *p = model;
  ring_state_t *s = state;
  ring_rank_t *k = &s->rank[v.rank];
  ring_block_t *b = &k->block[v.block];
  if (v.kind == TAKE) {
    int i = 0;
    while (b->window[i] != NONE) i++;
    b->window[i] = k->taken[b->follows];
    k->taken[b->follows] += (uint8_t)p->take;
    return NULL;
  }
  if (v.kind == RAISE) {
    const ring_item_t item = itemOf(p, k->operation, v.rank, FEED, b->late[0]);
    for (int i = 0; i < item.n; i++) k->flagged[item.piece[i].to] |= 1u << item.piece[i].number;
    memmove(b->late, b->late + 1, sizeof b->late - 1);
    b->late[sizeof b->late - 1] = 0;
    b->numLate--;
    if (b->ended && !b->numLate) endRole(p, k, b);
    return NULL;
  }
  if (b->window[0] != NONE) return runItem(p, s, v.rank, b);
  endRole(p, k, b);
  return NULL;
}

static const char *ringUnfinished(const void *model, const void *state) {
  const ring_setup_t *p = model;
  const ring_state_t *s = state;
  for (int r = 0; r < p->numRanks; r++) {
    if (s->rank[r].operation < p->numOperations) return "blocks wait for each other forever";
  }
  return NULL;
}

static void ringDescribe(const void *model, const void *state, move_t v, char *text, size_t size) {
  static const char *const DOES[] = {"takes a window", "runs candidate", "raises flags"};
  const ring_state_t *s = state;
  const ring_block_t *b = &s->rank[v.rank].block[v.block];
  (void)model;
  snprintf(text, size, "rank %d, operation %d, block %d, %s: %s %d", v.rank,
           s->rank[v.rank].operation, v.block, b->follows ? "follows" : "feeds", DOES[v.kind],
           b->window[0] + b->at);
}

outcome_t exploreRings(const ring_setup_t *p, uint64_t maxStates, bool trace) {
  ring_state_t s;
  memset(&s, 0, sizeof s);
  for (int r = 0; r < p->numRanks; r++) startLaunch(p, &s.rank[r]);
  const machine_t machine = {p, sizeof s, ringMoves, ringMake, ringUnfinished, ringDescribe};
  return search(&machine, &s, maxStates, trace);
}
