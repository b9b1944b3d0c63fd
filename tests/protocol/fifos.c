#include "fifos.h"

#include <stdio.h>
#include <string.h>

enum { NONE = 255, SENDER = 0, RECEIVER = 1 };

typedef struct fifo_block {
  uint8_t receives, ended,
      reading; /* reading: the item at hand has given its FIFO slots back already */
  uint8_t at;  /* place in the first window */
  uint8_t window[1 + FIFO_AHEAD]; /* first candidates; NONE */
  uint8_t numLate;                /* stores whose flags are not raised yet */
  uint8_t late[FIFO_TOKENS * 4];  /* their candidates, oldest first */
} fifo_block_t;

typedef struct fifo_rank {
  uint8_t operation, taken[2];
  fifo_block_t block[FIFO_BLOCKS];
  /* Of the streams to each rank: chunks flagged, chunks given back; and those read, kept by the reader. */
  uint32_t flagged[FIFO_RANKS], returned[FIFO_RANKS], stored[FIFO_RANKS], read[FIFO_RANKS];
} fifo_rank_t;

typedef struct fifo_state {
  fifo_rank_t rank[FIFO_RANKS];
} fifo_state_t;

static unsigned mix(unsigned a, unsigned b, unsigned c) {
  unsigned x = a * 2654435761u ^ b * 2246822519u ^ c * 3266489917u;
  x ^= x >> 15;
  x *= 2654435761u;
  return x >> 13;
}

/* In every operation the same routing but for the first rank's tokens; combine goes the way back. */
static bool goes(const fifo_setup_t *p, int owner, int token, int to) {
  if (p->everywhere) return owner != to;
  return owner != to && mix((unsigned)owner, (unsigned)token, (unsigned)to) % 4 < 3 &&
         token < p->numTokens - (owner == 1);
}

/* Number of a chunk in the stream that carries (owner's token, chunk) to or from `other`. */
static int number(const fifo_setup_t *p, int operation, int owner, int token, int other,
                  int chunk) {
  int before = 0, all = 0;
  for (int t = 0; t < p->numTokens; t++) {
    if (t < token) before += goes(p, owner, t, other);
    all += goes(p, owner, t, other);
  }
  if (p->fault == FIFO_FAULT_RESTART) operation = 0;
  return (operation * all + before) * p->numChunks + chunk;
}

/* A candidate of this role is a token of the rank's own, for all its ranks at once. */
static bool isOwn(const fifo_setup_t *p, int role) {
  return p->gathers == (role == RECEIVER);
}

/* A candidate's item: the chunks that it needs or makes. */
typedef struct fifo_item {
  int n;
  struct {
    uint8_t from, to, number;
  } chunk[FIFO_RANKS];
} fifo_item_t;

static int perToken(const fifo_setup_t *p, int role) {
  return isOwn(p, role) ? 1 : p->numRanks - 1;
}
static int numCandidates(const fifo_setup_t *p, int role) {
  return p->numTokens * p->numChunks * perToken(p, role);
}

static fifo_item_t itemOf(const fifo_setup_t *p, int operation, int rank, int role, int c) {
  fifo_item_t item = {0};
  const int turns = perToken(p, role);
  int turn = c % turns, chunk = c / turns % p->numChunks;
  const int token = c / turns / p->numChunks;
  if (p->fault == FIFO_FAULT_ORDER) {
    chunk = c % p->numChunks;
    turn = c / p->numChunks % turns;
  }
  for (int i = 0; i < p->numRanks - 1; i++) {
    const bool mine = isOwn(p, role);
    if (!mine && i != turn) continue;
    const int other = (rank + (role == SENDER ? 1 + i : p->numRanks - 1 - i)) % p->numRanks;
    const int owner = mine ? rank : other, peer = mine ? other : rank;
    if (!goes(p, owner, token, peer)) continue;
    const int q = number(p, operation, owner, token, peer, chunk);
    item.chunk[item.n].from = (uint8_t)(role == SENDER ? rank : other);
    item.chunk[item.n].to = (uint8_t)(role == SENDER ? other : rank);
    item.chunk[item.n++].number = (uint8_t)q;
  }
  return item;
}

static bool mayRun(const fifo_setup_t *p, const fifo_state_t *s, const fifo_item_t *item,
                   int role) {
  for (int i = 0; i < item->n; i++) {
    const fifo_rank_t *from = &s->rank[item->chunk[i].from];
    const int to = item->chunk[i].to, q = item->chunk[i].number;
    if (role == RECEIVER && !(from->flagged[to] >> q & 1)) return false;
    if (role == SENDER && p->fault != FIFO_FAULT_NO_CREDIT && q >= p->slots &&
        !(from->returned[to] >> (q - p->slots) & 1)) {
      return false;
    }
  }
  return true;
}

/* kind: what a block may do next. */
enum { TAKE, RUN, RAISE };

static bool isHeld(const fifo_setup_t *p, const fifo_block_t *b) {
  /* A lazy sender raises a flag only when another store has followed, or at the end. */
  return p->fault == FIFO_FAULT_LAZY && b->numLate <= 1 && !b->receives;
}

static int fifoMoves(const void *model, const void *state, move_t moves[MAX_MOVES]) {
  const fifo_setup_t *p = model;
  const fifo_state_t *s = state;
  int n = 0;
  for (int r = 0; r < p->numRanks; r++) {
    const fifo_rank_t *k = &s->rank[r];
    if (k->operation == p->numOperations) continue;
    for (int b = 0; b < p->numSenders + p->numReceivers; b++) {
      const fifo_block_t *block = &k->block[b];
      const int role = block->receives;
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
      const fifo_item_t item = itemOf(p, k->operation, r, role, block->window[0] + block->at);
      if (block->reading || mayRun(p, s, &item, role)) moves[n] = v, moves[n++].kind = RUN;
    }
  }
  return n;
}

static void giveBack(fifo_state_t *s, const fifo_item_t *item) {
  for (int i = 0; i < item->n; i++) {
    s->rank[item->chunk[i].from].returned[item->chunk[i].to] |= 1u << item->chunk[i].number;
  }
}

static const char *runItem(const fifo_setup_t *p, fifo_state_t *s, int r, fifo_block_t *b) {
  const fifo_item_t item = itemOf(p, s->rank[r].operation, r, b->receives, b->window[0] + b->at);
  if (b->receives && p->fault == FIFO_FAULT_HALF && !b->reading && item.n) {
    b->reading = 1;
    giveBack(s, &item);
    return NULL;
  }
  for (int i = 0; i < item.n; i++) {
    fifo_rank_t *from = &s->rank[item.chunk[i].from];
    const int to = item.chunk[i].to, q = item.chunk[i].number;
    if (b->receives) {
      from->read[to] |= 1u << q;
      if (q + p->slots < FIFO_STREAM && from->stored[to] >> (q + p->slots) & 1) {
        return "a slot was read after it had been filled again";
      }
    } else {
      if (from->stored[to] >> q & 1) return "a chunk was stored twice";
      from->stored[to] |= 1u << q;
      if (q >= p->slots && !(from->read[to] >> (q - p->slots) & 1)) {
        return "a slot was filled before it had been read";
      }
    }
  }
  if (b->receives) giveBack(s, &item);
  if (!b->receives && item.n) b->late[b->numLate++] = (uint8_t)(b->window[0] + b->at);
  b->reading = 0;
  b->at++;
  if (b->at == p->take || b->window[0] + b->at >= numCandidates(p, b->receives)) {
    memmove(b->window, b->window + 1, FIFO_AHEAD);
    b->window[FIFO_AHEAD] = NONE;
    b->at = 0;
  }
  return NULL;
}

static void startLaunch(const fifo_setup_t *p, fifo_rank_t *k) {
  const int numReceivers = p->fault == FIFO_FAULT_ALL_SEND ? 0 : p->numReceivers;
  k->taken[SENDER] = k->taken[RECEIVER] = 0;
  memset(k->block, 0, sizeof k->block);
  for (int b = 0; b < p->numSenders + p->numReceivers; b++) {
    memset(k->block[b].window, NONE, sizeof k->block[b].window);
    k->block[b].receives = b >= p->numSenders + p->numReceivers - numReceivers;
  }
}

/* A block has gone through all candidates of its role. */
static void endRole(const fifo_setup_t *p, fifo_rank_t *k, fifo_block_t *b) {
  if (!b->receives) {
    b->receives = 1;
    return;
  }
  b->ended = 1;
  for (int i = 0; i < p->numSenders + p->numReceivers; i++) {
    if (!k->block[i].ended || k->block[i].numLate) return;
  }
  k->operation++;
  startLaunch(p, k);
}

static const char *fifoMake(const void *model, void *state, move_t v) {
  const fifo_setup_t *p = model;
  fifo_state_t *s = state;
  fifo_rank_t *k = &s->rank[v.rank];
  fifo_block_t *b = &k->block[v.block];
  if (v.kind == TAKE) {
    int i = 0;
    while (b->window[i] != NONE) i++;
    b->window[i] = k->taken[b->receives];
    k->taken[b->receives] += (uint8_t)p->take;
    return NULL;
  }
  if (v.kind == RAISE) {
    const fifo_item_t item = itemOf(p, k->operation, v.rank, SENDER, b->late[0]);
    for (int i = 0; i < item.n; i++) k->flagged[item.chunk[i].to] |= 1u << item.chunk[i].number;
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

static const char *fifoUnfinished(const void *model, const void *state) {
  const fifo_setup_t *p = model;
  const fifo_state_t *s = state;
  for (int r = 0; r < p->numRanks; r++) {
    if (s->rank[r].operation < p->numOperations) return "blocks wait for each other forever";
  }
  return NULL;
}

static void fifoDescribe(const void *model, const void *state, move_t v, char *text, size_t size) {
  static const char *const DOES[] = {"takes a window", "runs candidate", "raises flags"};
  const fifo_state_t *s = state;
  const fifo_block_t *b = &s->rank[v.rank].block[v.block];
  (void)model;
  snprintf(text, size, "rank %d, operation %d, block %d, %s: %s %d", v.rank,
           s->rank[v.rank].operation, v.block, b->receives ? "receives" : "sends", DOES[v.kind],
           b->window[0] + b->at);
}

outcome_t exploreFifos(const fifo_setup_t *p, uint64_t maxStates, bool trace) {
  fifo_state_t s;
  memset(&s, 0, sizeof s);
  for (int r = 0; r < p->numRanks; r++) startLaunch(p, &s.rank[r]);
  const machine_t machine = {p, sizeof s, fifoMoves, fifoMake, fifoUnfinished, fifoDescribe};
  return search(&machine, &s, maxStates, trace);
}
