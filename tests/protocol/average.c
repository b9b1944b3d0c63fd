#include "average.h"

#include <stdio.h>
#include <string.h>

/* Sets of ranks are a bit each; numbers of chunks count from 1. */
typedef struct average_rank {
  uint8_t number, isStaged;
  uint8_t stagedTo, meanTo;           /* to whom the words are posted */
  uint8_t read;                       /* whose stages are summed into the own slice */
  uint8_t taken;                      /* whose slice is here */
  uint8_t again[AVERAGE_RANKS];       /* of a slice that this rank sums itself: whose stages are */
  uint8_t stages[2], means[2];        /* the chunk whose content lies there */
  uint8_t words[2][2][AVERAGE_RANKS]; /* staged and mean, by parity and source */
} average_rank_t;

typedef struct average_state {
  average_rank_t rank[AVERAGE_RANKS];
} average_state_t;

enum { STAGE, POST_STAGED, READ, SUM, POST_MEAN, TAKE, READ_AGAIN, NEXT };
enum { STAGED, MEAN };

static int placeOf(const average_setup_t *p, int number, average_fault_t one) {
  return p->fault == one ? 0 : number & 1;
}
static uint8_t *wordOf(const average_setup_t *p, average_rank_t *to, int kind, int number,
                       int from) {
  return &to->words[kind][placeOf(p, number, AVERAGE_FAULT_ONE_WORD)][from];
}
static uint8_t *stageOf(const average_setup_t *p, average_rank_t *k, int number) {
  return &k->stages[placeOf(p, number, AVERAGE_FAULT_ONE_STAGE)];
}

/* Whether the words of all these ranks have come. */
static bool haveCome(const average_setup_t *p, const average_rank_t *k, int kind, unsigned of) {
  for (int q = 0; q < p->numRanks; q++) {
    const int place = placeOf(p, k->number, AVERAGE_FAULT_ONE_WORD);
    if (of >> q & 1 && k->words[kind][place][q] != k->number) return false;
  }
  return true;
}

/* The ranks whose slice this one waits for, and those whose slice it sums itself. */
static unsigned slicesOf(const average_setup_t *p, const average_rank_t *k, int r) {
  return p->slices[k->number - 1] & ~(1u << r);
}
static bool isGood(const average_setup_t *p, int r, int of) {
  return p->views[r] >> of & 1 && p->views[r] == p->views[of];
}

static bool isThrough(const average_setup_t *p, const average_rank_t *k, int r) {
  for (int q = 0; q < p->numRanks; q++) {
    if (!(slicesOf(p, k, r) >> q & 1)) continue;
    if (isGood(p, r, q) ? !(k->taken >> q & 1) : k->again[q] != p->views[r]) return false;
  }
  return k->meanTo == p->views[r];
}

static int takeMoves(const average_setup_t *p, const average_rank_t *k, int r, move_t *moves) {
  const unsigned wanted = slicesOf(p, k, r);
  int n = 0;
  if (p->fault != AVERAGE_FAULT_EARLY_TAKE && !haveCome(p, k, MEAN, wanted & p->views[r])) return 0;
  for (int q = 0; q < p->numRanks; q++) {
    if (!(wanted >> q & 1)) continue;
    const move_t v = {TAKE, (uint8_t)r, 0, 0, (uint8_t)q};
    if (isGood(p, r, q) && !(k->taken >> q & 1)) moves[n++] = v;
    for (int of = 0; !isGood(p, r, q) && of < p->numRanks; of++) {
      if ((p->views[r] & ~k->again[q]) >> of & 1)
        moves[n++] = (move_t){READ_AGAIN, (uint8_t)r, (uint8_t)q, 0, (uint8_t)of};
    }
  }
  if (isThrough(p, k, r)) moves[n++] = (move_t){NEXT, (uint8_t)r, 0, 0, 0};
  return n;
}

static int rankMoves(const average_setup_t *p, const average_rank_t *k, int r, move_t *moves) {
  const unsigned view = p->views[r];
  int n = 0;
  const bool mayPost = k->isStaged || p->fault == AVERAGE_FAULT_EARLY_POST;
  if (!k->isStaged) moves[n++] = (move_t){STAGE, (uint8_t)r, 0, 0, 0};
  const bool heard = p->fault == AVERAGE_FAULT_EARLY_SUM || haveCome(p, k, STAGED, view);
  const bool mayRead = k->isStaged && k->stagedTo == view && heard;
  const bool isSummed = k->means[k->number & 1] == k->number;
  for (int q = 0; q < p->numRanks; q++) {
    if (!(view >> q & 1)) continue;
    const move_t v = {POST_STAGED, (uint8_t)r, 0, 0, (uint8_t)q};
    if (mayPost && !(k->stagedTo >> q & 1)) moves[n++] = v;
    if (mayRead && !(k->read >> q & 1)) moves[n] = v, moves[n++].kind = READ;
    if (isSummed && !(k->meanTo >> q & 1)) moves[n] = v, moves[n++].kind = POST_MEAN;
  }
  if (k->read == view && !isSummed) moves[n++] = (move_t){SUM, (uint8_t)r, 0, 0, 0};
  if (k->meanTo == view) n += takeMoves(p, k, r, moves + n);
  return n;
}

static int averageMoves(const void *model, const void *state, move_t moves[MAX_MOVES]) {
  const average_setup_t *p = model;
  const average_state_t *s = state;
  int n = 0;
  for (int r = 0; r < p->numRanks; r++) {
    if (s->rank[r].number <= p->numChunks) n += rankMoves(p, &s->rank[r], r, moves + n);
  }
  return n;
}

static void goOn(average_rank_t *k) {
  k->number++;
  k->isStaged = k->stagedTo = k->meanTo = k->read = k->taken = 0;
  memset(k->again, 0, sizeof k->again);
}

static const char *averageMake(const void *model, void *state, move_t v) {
  const average_setup_t *p = model;
  average_state_t *s = state;
  average_rank_t *k = &s->rank[v.rank], *of = &s->rank[v.item];
  const uint8_t bit = (uint8_t)(1u << v.item);
  const int number = k->number;
  switch (v.kind) {
  case STAGE:
    k->isStaged = 1;
    *stageOf(p, k, number) = (uint8_t)number;
    return NULL;
  case POST_STAGED:
    k->stagedTo |= bit;
    *wordOf(p, of, STAGED, number, v.rank) = (uint8_t)number;
    return NULL;
  case READ:
    k->read |= bit;
    return *stageOf(p, of, number) == number ? NULL : "a stage of another chunk was summed";
  case SUM:
    k->means[number & 1] = (uint8_t)number;
    return NULL;
  case POST_MEAN:
    k->meanTo |= bit;
    *wordOf(p, of, MEAN, number, v.rank) = (uint8_t)number;
    return NULL;
  case TAKE:
    k->taken |= bit;
    return of->means[number & 1] == number ? NULL : "a slice of another chunk was taken";
  case READ_AGAIN:
    k->again[v.block] |= bit;
    return *stageOf(p, of, number) == number ? NULL : "a stage of another chunk was summed again";
  default:
    goOn(k);
    return NULL;
  }
}

static const char *averageUnfinished(const void *model, const void *state) {
  const average_setup_t *p = model;
  const average_state_t *s = state;
  for (int r = 0; r < p->numRanks; r++) {
    if (s->rank[r].number <= p->numChunks) return "ranks wait for each other forever";
  }
  return NULL;
}

static void averageDescribe(const void *model, const void *state, move_t v, char *text,
                            size_t size) {
  static const char *const DOES[] = {"copies",
                                     "posts its stage to",
                                     "reads the stage of",
                                     "sums",
                                     "posts its slice to",
                                     "takes the slice of",
                                     "reads once more",
                                     "is through"};
  const average_state_t *s = state;
  (void)model;
  snprintf(text, size, "rank %d, chunk %d %s (rank %d)", v.rank, s->rank[v.rank].number,
           DOES[v.kind], v.item);
}

outcome_t exploreAverage(const average_setup_t *p, uint64_t maxStates, bool trace) {
  average_state_t s;
  memset(&s, 0, sizeof s);
  for (int r = 0; r < p->numRanks; r++) s.rank[r].number = 1;
  const machine_t machine = {p,           sizeof s,          averageMoves,
                             averageMake, averageUnfinished, averageDescribe};
  return search(&machine, &s, maxStates, trace);
}
