#include "ll_windows.h"

#include <stdio.h>
#include <string.h>

typedef struct window_block {
  uint8_t heard;     /* all peers */
  uint8_t fed, done; /* by peer, a bit each */
} window_block_t;

typedef struct window_rank {
  uint8_t launch, sent, received;   /* launches ended; operations sent, received */
  uint8_t said, based, taken;       /* by peer, a bit each */
  uint8_t word[2][WINDOW_RANKS];    /* by peer: its last one, operations counted from 1 */
  uint8_t weights[2][WINDOW_RANKS]; /* by source: the same */
  uint8_t rows[2][WINDOW_RANKS];    /* by source: of which blocks, a bit each */
  uint8_t dones[2][WINDOW_RANKS], before[2][WINDOW_RANKS];
  window_block_t block[WINDOW_BLOCKS];
} window_rank_t;

typedef struct window_state {
  window_rank_t rank[WINDOW_RANKS];
} window_state_t;

enum { SAY, BASE, HEAR, FEED, DONE, TAKE, END };

static char launchOf(const window_setup_t *p, const window_state_t *s, int r) {
  return p->program[r][s->rank[r].launch];
}
static bool sends(char launch) {
  return launch == 'B' || launch == 'S';
}
static bool receives(char launch) {
  return launch == 'B' || launch == 'R';
}
static bool isStraight(const window_setup_t *p, int a, int b, int operation) {
  return a != b && p->straight[a] >> operation & p->straight[b] >> operation & 1;
}
static unsigned straightPeers(const window_setup_t *p, int r, int operation) {
  unsigned set = 0;
  for (int q = 0; q < p->numRanks; q++) set |= (unsigned)isStraight(p, r, q, operation) << q;
  return set;
}
static int countOf(const window_setup_t *p, int operation) {
  return p->fault == WINDOW_FAULT_ONE_COUNT ? 0 : operation & 1;
}

static bool hearsAll(const window_setup_t *p, const window_rank_t *k, int r, int operation) {
  for (int q = 0; q < p->numRanks; q++) {
    if (q == r) continue;
    const int word = k->word[operation & 1][q];
    if (p->fault == WINDOW_FAULT_ANY_WORD ? word == 0 : word != operation + 1) return false;
  }
  return true;
}

static bool hasSent(const window_setup_t *p, const window_rank_t *k, int r, int operation) {
  const unsigned peers = ((1u << p->numRanks) - 1) & ~(1u << r),
                 straight = straightPeers(p, r, operation);
  if (k->said != peers || (straight & ~k->based)) return false;
  for (int b = 0; straight && b < p->numBlocks; b++) {
    if (!k->block[b].heard || (k->block[b].fed & k->block[b].done) != straight) return false;
  }
  return true;
}

static bool hasReceived(const window_setup_t *p, const window_rank_t *k, int r, int operation) {
  const int at = countOf(p, operation);
  if (!hearsAll(p, k, r, operation)) return false;
  for (int q = 0; q < p->numRanks; q++) {
    if (!isStraight(p, r, q, operation)) continue;
    if (!(k->taken >> q & 1)) return false;
    if (p->fault == WINDOW_FAULT_NO_COUNT) continue;
    if ((uint8_t)(k->dones[at][q] - k->before[at][q]) != p->numBlocks) return false;
  }
  return true;
}

static int blockMoves(const window_setup_t *p, const window_rank_t *k, int r, int b,
                      move_t *moves) {
  const window_block_t *block = &k->block[b];
  const unsigned straight = straightPeers(p, r, k->sent);
  int n = 0;
  if (!straight) return 0;
  if (!block->heard && hearsAll(p, k, r, k->sent)) {
    moves[n++] = (move_t){HEAR, (uint8_t)r, (uint8_t)b, 0, 0};
  }
  if (!block->heard && p->fault != WINDOW_FAULT_NO_HEARING) return n;
  for (int q = 0; q < p->numRanks; q++) {
    if (!(straight >> q & 1)) continue;
    const move_t v = {FEED, (uint8_t)r, (uint8_t)b, 0, (uint8_t)q};
    if (!(block->fed >> q & 1)) moves[n++] = v;
    if (!(block->done >> q & 1) &&
        (p->fault == WINDOW_FAULT_EARLY_DONE || block->fed == straight)) {
      moves[n] = v, moves[n++].kind = DONE;
    }
  }
  return n;
}

static int windowMoves(const void *model, const void *state, move_t moves[MAX_MOVES]) {
  const window_setup_t *p = model;
  const window_state_t *s = state;
  int n = 0;
  for (int r = 0; r < p->numRanks; r++) {
    const window_rank_t *k = &s->rank[r];
    const char launch = launchOf(p, s, r);
    if (!launch) continue;
    for (int q = 0; q < p->numRanks; q++) {
      const move_t v = {SAY, (uint8_t)r, 0, 0, (uint8_t)q};
      const bool isFree = s->rank[q].received + 1 >= k->sent || p->fault == WINDOW_FAULT_NO_FREE;
      if (q != r && sends(launch) && !(k->said >> q & 1) && isFree) moves[n++] = v;
      if (sends(launch) && (k->said & ~k->based & straightPeers(p, r, k->sent)) >> q & 1) {
        moves[n] = v, moves[n++].kind = BASE;
      }
      if (receives(launch) && isStraight(p, r, q, k->received) && !(k->taken >> q & 1) &&
          k->weights[k->received & 1][q] == k->received + 1) {
        moves[n] = v, moves[n++].kind = TAKE;
      }
    }
    for (int b = 0; sends(launch) && b < p->numBlocks; b++) {
      n += blockMoves(p, k, r, b, moves + n);
    }
    if ((!sends(launch) || hasSent(p, k, r, k->sent)) &&
        (!receives(launch) || hasReceived(p, k, r, k->received))) {
      moves[n++] = (move_t){END, (uint8_t)r, 0, 0, 0};
    }
  }
  return n;
}

static const char *feed(const window_setup_t *p, window_state_t *s, move_t v) {
  window_rank_t *k = &s->rank[v.rank], *to = &s->rank[v.item];
  const int e = k->sent;
  const bool begun =
      to->sent > e || (to->sent == e && sends(launchOf(p, s, v.item)) && to->said >> v.rank & 1);
  k->block[v.block].fed |= (uint8_t)(1u << v.item);
  if (!begun || to->received > e) {
    return "an output was written while its owner was not in the operation";
  }
  to->rows[e & 1][v.rank] |= (uint8_t)(1u << v.block);
  if (v.block == p->numBlocks - 1) to->weights[e & 1][v.rank] = (uint8_t)(e + 1);
  return NULL;
}

static const char *end(const window_setup_t *p, window_state_t *s, int r) {
  window_rank_t *k = &s->rank[r];
  const char launch = launchOf(p, s, r);
  const int e = k->received, all = (1 << p->numBlocks) - 1;
  if (receives(launch)) {
    for (int q = 0; q < p->numRanks; q++) {
      if (isStraight(p, r, q, e) && k->rows[e & 1][q] != all) {
        return "a rank has received an operation whose rows are not all there";
      }
    }
    memset(k->rows[e & 1], 0, sizeof k->rows[0]);
    k->taken = 0;
    k->received++;
  }
  if (sends(launch)) {
    k->said = k->based = 0;
    memset(k->block, 0, sizeof k->block);
    k->sent++;
  }
  k->launch++;
  return NULL;
}

static const char *windowMake(const void *model, void *state, move_t v) {
  const window_setup_t *p = model;
  window_state_t *s = state;
  window_rank_t *k = &s->rank[v.rank];
  const uint8_t bit = (uint8_t)(1u << v.item);
  const int at = countOf(p, k->sent);
  switch (v.kind) {
  case SAY:
    k->said |= bit;
    s->rank[v.item].word[k->sent & 1][v.rank] = (uint8_t)(k->sent + 1);
    if (p->fault == WINDOW_FAULT_LATE_BASE) return NULL;
    k->before[at][v.item] = k->dones[at][v.item]; /* nobody adds before it has heard the word */
    k->based |= bit;
    return NULL;
  case BASE:
    k->before[at][v.item] = k->dones[at][v.item];
    k->based |= bit;
    return NULL;
  case HEAR:
    k->block[v.block].heard = 1;
    return NULL;
  case FEED:
    return feed(p, s, v);
  case DONE:
    k->block[v.block].done |= bit;
    s->rank[v.item].dones[at][v.rank]++;
    return NULL;
  case TAKE:
    k->taken |= bit;
    return NULL;
  default:
    return end(p, s, v.rank);
  }
}

static const char *windowUnfinished(const void *model, const void *state) {
  const window_setup_t *p = model;
  const window_state_t *s = state;
  for (int r = 0; r < p->numRanks; r++) {
    if (launchOf(p, s, r)) return "ranks wait for each other forever";
  }
  return NULL;
}

static void windowDescribe(const void *model, const void *state, move_t v, char *text,
                           size_t size) {
  static const char *const DOES[] = {
      "says its word to",     "looks up the count of", "hears all, as",      "writes to",
      "adds to the count at", "takes weights of",      "ends its launch, as"};
  const window_state_t *s = state;
  const window_rank_t *k = &s->rank[v.rank];
  (void)model;
  snprintf(text, size, "rank %d, %d sent, %d received, block %d %s rank %d", v.rank, k->sent,
           k->received, v.block, DOES[v.kind], v.item);
}

outcome_t exploreWindows(const window_setup_t *p, uint64_t maxStates, bool trace) {
  window_state_t s;
  memset(&s, 0, sizeof s);
  const machine_t machine = {p,          sizeof s,         windowMoves,
                             windowMake, windowUnfinished, windowDescribe};
  return search(&machine, &s, maxStates, trace);
}
