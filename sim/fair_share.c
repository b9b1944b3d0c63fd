/* Progressive filling: all rates rise together until a resource is full; its flows keep that rate, and
 * the others rise on. So resources fill in ascending order of level, (capacity left) / (flows left), and
 * a level never falls, for a flow that is fixed takes at most the level of what else it crosses.
 *
 * Where flows have only gone since the last solution, its order is a good guess. Any order is right in
 * which levels, each worked out from those before it, ascend, and no other resource is over its capacity:
 * then each flow has its rate from the first of its resources in it, which is full and has no faster flow.
 * So levels are worked out again from the first that changes; one that comes out lower than the level
 * before it moves to where it fits, one that is over its capacity enters. */
#include "sim/fair_share.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_MOVES = 256, NOWHERE = INT_MAX };
#define ROUNDING 1e-12

/* ---- Memory ------------------------------------------------------------------------------------ */

static void *take(ep_share_t *s, int at, size_t count, size_t size) {
  return s->memory[at] = calloc(count + 1, size);
}

int epShareAllocate(ep_share_t *s, int numResources, int numBundles) {
  size_t P = (size_t)numResources, B = (size_t)numBundles, U = B * EP_SHARE_USES;
  *s = (ep_share_t){.numResources = numResources, .numBundles = numBundles};
  s->capacity = take(s, 0, P, sizeof *s->capacity);
  s->isCovered = take(s, 1, P, sizeof *s->isCovered);
  s->uses = take(s, 2, U, sizeof *s->uses);
  s->isBare = take(s, 3, B, sizeof *s->isBare);
  s->weight = take(s, 4, B, sizeof *s->weight);
  s->order = take(s, 5, P, sizeof *s->order);
  s->level = take(s, 6, P, sizeof *s->level);
  s->fixedBy = take(s, 7, B, sizeof *s->fixedBy);
  s->changed = take(s, 8, B, sizeof *s->changed);
  s->fixedBefore = take(s, 9, B, sizeof *s->fixedBefore);
  s->first = take(s, 10, P + 1, sizeof *s->first);
  s->numOn = take(s, 11, P, sizeof *s->numOn);
  s->place = take(s, 12, U, sizeof *s->place);
  s->numBare = take(s, 13, P, sizeof *s->numBare);
  s->position = take(s, 14, P, sizeof *s->position);
  s->total = take(s, 15, P, sizeof *s->total);
  s->count = take(s, 16, P, sizeof *s->count);
  s->left = take(s, 17, P, sizeof *s->left);
  s->bound = take(s, 18, P, sizeof *s->bound);
  s->heap = take(s, 19, P, sizeof *s->heap);
  s->given = take(s, 20, P, sizeof *s->given);
  for (int i = 0; i <= 20; i++) {
    if (!s->memory[i]) return 0;
  }
  return 1;
}

void epShareFree(ep_share_t *s) {
  for (size_t i = 0; i < sizeof s->memory / sizeof *s->memory; i++) free(s->memory[i]);
  memset(s, 0, sizeof *s);
}

static const int32_t *usesOf(const ep_share_t *s, int bundle) {
  return s->uses + (size_t)bundle * EP_SHARE_USES;
}

static int countUses(const int32_t *uses) {
  int n = 0;
  while (n < EP_SHARE_USES && uses[n] >= 0) n++;
  return n;
}

int epShareStart(ep_share_t *s) {
  s->numOthers = 1;
  for (int b = 0; b < s->numBundles; b++) {
    const int32_t *uses = usesOf(s, b);
    int n = countUses(uses);
    for (int k = 0; k < n; k++) s->first[uses[k] + 1]++;
    if (n - 1 > s->numOthers) s->numOthers = n - 1;
    s->fixedBy[b] = -1;
  }
  for (int p = 0; p < s->numResources; p++) {
    s->first[p + 1] += s->first[p];
    s->position[p] = NOWHERE;
  }
  for (int p = 0; p <= s->numResources; p++) s->level[p] = HUGE_VAL; /* and of no resource */
  size_t n = (size_t)s->first[s->numResources];
  s->list = take(s, 21, n, sizeof *s->list);
  s->others = take(s, 22, n * (size_t)s->numOthers, sizeof *s->others);
  s->weights = take(s, 23, n, sizeof *s->weights);
  s->isStale = 2;
  return s->list && s->others && s->weights;
}

/* HUGE_VAL: not full, or not known to be. */
static void setLevel(ep_share_t *s, int p, double level) {
  int isGiven = level < HUGE_VAL;
  s->level[p] = level;
  s->given[p] = isGiven ? (ep_given_t){level, 1} : (ep_given_t){0, 0};
}

/* ---- Flows come and go ------------------------------------------------------------------------- */

static int32_t *othersAt(const ep_share_t *s, int at) {
  return s->others + (size_t)at * (size_t)s->numOthers;
}

/* The uses of a bundle but one; then numResources, which is none and never full. */
static void fillOthers(const ep_share_t *s, int at, const int32_t *uses, int but) {
  int32_t *others = othersAt(s, at);
  int n = 0;
  for (int k = 0; k < EP_SHARE_USES && uses[k] >= 0; k++) {
    if (k != but) others[n++] = uses[k];
  }
  while (n < s->numOthers) others[n++] = s->numResources;
}

static void enter(ep_share_t *s, int bundle) {
  const int32_t *uses = usesOf(s, bundle);
  for (int k = 0; k < EP_SHARE_USES && uses[k] >= 0; k++) {
    int32_t at = s->first[uses[k]] + s->numOn[uses[k]]++;
    s->list[at] = bundle;
    s->place[(size_t)bundle * EP_SHARE_USES + (size_t)k] = at;
    s->numBare[uses[k]] += s->isBare[bundle];
    fillOthers(s, at, uses, k);
  }
}

/* The last bundle of a resource takes the place of one that goes. */
static void moveLast(ep_share_t *s, int32_t p, int at) {
  int from = s->first[p] + --s->numOn[p];
  int32_t last = s->list[from];
  const int32_t *its = usesOf(s, last);
  int i = 0;
  while (its[i] != p) i++;
  s->place[(size_t)last * EP_SHARE_USES + (size_t)i] = at;
  s->list[at] = last;
  s->weights[at] = s->weights[from];
  memmove(othersAt(s, at), othersAt(s, from), (size_t)s->numOthers * sizeof *s->others);
}

static void leave(ep_share_t *s, int bundle) {
  const int32_t *uses = usesOf(s, bundle);
  for (int k = 0; k < EP_SHARE_USES && uses[k] >= 0; k++) {
    s->numBare[uses[k]] -= s->isBare[bundle];
    moveLast(s, uses[k], s->place[(size_t)bundle * EP_SHARE_USES + (size_t)k]);
  }
  s->fixedBy[bundle] = -1;
}

static void markStale(ep_share_t *s, int kind, int from) {
  if (s->isStale == 0 || from < s->firstStale) s->firstStale = from;
  if (kind > s->isStale) s->isStale = kind;
}

void epShareSetWeight(ep_share_t *s, int bundle, int weight) {
  int more = weight - s->weight[bundle];
  if (more == 0) return;
  const int32_t *uses = usesOf(s, bundle);
  if (s->weight[bundle] == 0) enter(s, bundle);
  for (int k = 0; k < EP_SHARE_USES && uses[k] >= 0; k++) {
    s->total[uses[k]] += more;
    s->weights[s->place[(size_t)bundle * EP_SHARE_USES + (size_t)k]] = weight;
    markStale(s, more > 0 ? 2 : 1, s->position[uses[k]]);
  }
  if (weight == 0) leave(s, bundle);
  s->weight[bundle] = weight;
}

void epShareForget(ep_share_t *s) {
  s->isStale = 2;
}

int epShareIsCurrent(const ep_share_t *s) {
  return s->isStale == 0;
}

/* ---- Who gives a bundle its rate --------------------------------------------------------------- */

static void setPositions(ep_share_t *s) {
  for (int i = 0; i < s->numOrder; i++) s->position[s->order[i]] = i;
}

/* The first of its uses in the order. */
static void setFixedBy(ep_share_t *s, int b) {
  const int32_t *uses = usesOf(s, b);
  int32_t best = uses[0];
  for (int k = 1; k < EP_SHARE_USES && uses[k] >= 0; k++) {
    if (s->position[uses[k]] < s->position[best]) best = uses[k];
  }
  if (s->fixedBy[b] == best) return;
  s->fixedBefore[s->numChanged] = s->fixedBy[b];
  s->changed[s->numChanged++] = b;
  s->fixedBy[b] = best;
}

/* ---- All anew: a heap of resources by level ------------------------------------------------------ */

static void siftDown(ep_share_t *s, int i) {
  int32_t p = s->heap[i];
  for (int c = 2 * i + 1; c < s->numHeap; c = 2 * i + 1) {
    if (c + 1 < s->numHeap && s->bound[s->heap[c + 1]] < s->bound[s->heap[c]]) c++;
    if (s->bound[s->heap[c]] >= s->bound[p]) break;
    s->heap[i] = s->heap[c];
    i = c;
  }
  s->heap[i] = p;
}

static void fillHeap(ep_share_t *s) {
  s->numHeap = 0;
  for (int p = 0; p < s->numResources; p++) {
    if (s->count[p] == 0) continue;
    s->bound[p] = s->left[p] / (double)s->count[p];
    s->heap[s->numHeap++] = p;
  }
  for (int i = s->numHeap / 2 - 1; i >= 0; i--) siftDown(s, i);
}

static void dropTop(ep_share_t *s) {
  s->heap[0] = s->heap[--s->numHeap];
  if (s->numHeap > 0) siftDown(s, 0);
}

/* Gives the rate to the flows of a resource that have none. */
static void fix(ep_share_t *s, int p, double level) {
  for (int i = s->first[p]; i < s->first[p] + s->numOn[p]; i++) {
    const int32_t *others = othersAt(s, i);
    int isFixed = 0;
    for (int k = 0; k < s->numOthers; k++) isFixed |= s->level[others[k]] < HUGE_VAL;
    if (isFixed) continue;
    for (int k = 0; k < s->numOthers && others[k] < s->numResources; k++) {
      s->left[others[k]] -= s->weights[i] * level;
      s->count[others[k]] -= (int64_t)s->weights[i];
    }
  }
  s->count[p] = 0;
  setLevel(s, p, level);
}

/* Whether the level of the heap's top is its level now; else it sinks to its place. */
static int isTopCurrent(ep_share_t *s) {
  int p = s->heap[0];
  double level = s->left[p] / (double)s->count[p];
  if (level <= s->bound[p]) return 1;
  s->bound[p] = level;
  siftDown(s, 0);
  return s->heap[0] == p;
}

static void forgetLevels(ep_share_t *s) {
  for (int p = 0; p < s->numResources; p++) {
    setLevel(s, p, HUGE_VAL);
    s->position[p] = NOWHERE;
  }
  memcpy(s->left, s->capacity, (size_t)s->numResources * sizeof *s->left);
  memcpy(s->count, s->total, (size_t)s->numResources * sizeof *s->count);
  s->numOrder = s->firstNew = 0;
}

static void solveAll(ep_share_t *s) {
  double last = 0;
  forgetLevels(s);
  fillHeap(s);
  while (s->numHeap > 0) {
    int p = s->heap[0];
    if (s->count[p] > 0) {
      if (!isTopCurrent(s)) continue;
      last = fmax(last, s->bound[p]);
      s->order[s->numOrder++] = p;
      fix(s, p, last);
    }
    dropTop(s);
  }
  setPositions(s);
  for (int b = 0; b < s->numBundles; b++) {
    if (s->weight[b] > 0) setFixedBy(s, b);
  }
}

/* ---- From the last order ----------------------------------------------------------------------- */

/* What its flows take that others give their rate, and the flows that are left. */
typedef struct load {
  double used, numLeft;
} load_t;

static inline double lower(double a, double b) {
  return a < b ? a : b;
}

/* The lowest level of what else a place's bundle crosses. */
static inline double rateAt(const ep_share_t *s, int at) {
  const int32_t *others = othersAt(s, at);
  double rate = s->level[others[0]];
  for (int k = 1; k < s->numOthers; k++) rate = lower(rate, s->level[others[k]]);
  return rate;
}

static inline ep_given_t givenAt(const ep_share_t *s, int at) {
  double rate = rateAt(s, at);
  return rate < HUGE_VAL ? (ep_given_t){rate, 1} : (ep_given_t){0, 0};
}

/* What the flows of a resource take that others give their rate, and how many flows that are: two at a
 * time, for a sum waits for the one before. */
static ep_given_t loadOf(const ep_share_t *s, int p) {
  ep_given_t a = {0, 0}, b = {0, 0};
  int i = s->first[p], end = i + s->numOn[p];
  for (; i + 1 < end; i += 2) {
    a += s->weights[i] * givenAt(s, i);
    b += s->weights[i + 1] * givenAt(s, i + 1);
  }
  if (i < end) a += s->weights[i] * givenAt(s, i);
  return a + b;
}

/* The same of bundles over at most two resources. */
static ep_given_t loadOfPairs(const ep_share_t *s, int p) {
  ep_given_t a = {0, 0}, b = {0, 0};
  int i = s->first[p], end = i + s->numOn[p];
  for (; i + 1 < end; i += 2) {
    a += s->weights[i] * s->given[s->others[i]];
    b += s->weights[i + 1] * s->given[s->others[i + 1]];
  }
  if (i < end) a += s->weights[i] * s->given[s->others[i]];
  return a + b;
}

static load_t findLoad(const ep_share_t *s, int p) {
  ep_given_t sum = s->numOthers == 1 ? loadOfPairs(s, p) : loadOf(s, p);
  return (load_t){sum[0], (double)s->total[p] - sum[1]};
}

static double highestOf(const ep_share_t *s, int p) {
  double highest = 0;
  for (int i = s->first[p]; i < s->first[p] + s->numOn[p]; i++) {
    double rate = rateAt(s, i);
    highest = rate > highest ? rate : highest;
  }
  return highest;
}

static void markMoved(ep_share_t *s, int p) {
  s->heap[s->numMoved++] = p; /* the heap is not in use */
}

/* Puts a resource into the order before a place, whose levels from there on are to be found again. */
static void insertAt(ep_share_t *s, int p, int at) {
  for (int i = at; i < s->numOrder; i++) setLevel(s, s->order[i], HUGE_VAL);
  memmove(s->order + at + 1, s->order + at, (size_t)(s->numOrder - at) * sizeof *s->order);
  s->order[at] = p;
  s->numOrder++;
  if (at < s->firstNew) s->firstNew = at;
  markMoved(s, p);
}

static void removeAt(ep_share_t *s, int at) {
  int p = s->order[at];
  memmove(s->order + at, s->order + at + 1, (size_t)(s->numOrder - at - 1) * sizeof *s->order);
  s->numOrder--;
  s->position[p] = NOWHERE;
  setLevel(s, p, HUGE_VAL);
  markMoved(s, p);
}

/* The first place of a level above this one, before a place. */
static int placeOf(const ep_share_t *s, double level, int before) {
  while (before > 0 && s->level[s->order[before - 1]] > level) before--;
  return before;
}

/* Finds the level of order[at]; returns the place to go on from. */
static int solveAt(ep_share_t *s, int at) {
  int p = s->order[at];
  load_t load = findLoad(s, p);
  if (load.numLeft == 0) {
    removeAt(s, at);
    return at;
  }
  double level = (s->capacity[p] - load.used) / load.numLeft;
  double last = at > 0 ? s->level[s->order[at - 1]] : 0;
  if (level >= last * (1 - ROUNDING)) {
    setLevel(s, p, fmax(level, last));
    return at + 1;
  }
  int to = placeOf(s, level, at);
  removeAt(s, at);
  insertAt(s, p, to);
  return to;
}

/* Enters a resource that is over its capacity before what gives its fastest flow a rate; returns the place to
 * go on from, or numOrder. */
static int enterFull(ep_share_t *s) {
  for (int p = 0; p < s->numResources; p++) {
    int isFree = s->total[p] == 0 || (s->isCovered[p] && s->numBare[p] == 0);
    if (isFree || s->level[p] < HUGE_VAL) continue;
    load_t load = findLoad(s, p);
    int areLeft = load.numLeft > 0, at = s->numOrder;
    if (!areLeft && load.used <= s->capacity[p] * (1 + ROUNDING)) continue;
    if (!areLeft) at = placeOf(s, highestOf(s, p) * (1 - ROUNDING), s->numOrder);
    insertAt(s, p, at);
    return at;
  }
  return s->numOrder;
}

/* 0: it takes too many moves. */
static int solveFrom(ep_share_t *s, int from) {
  s->numMoved = 0;
  s->firstNew = from;
  for (int i = from; i < s->numOrder; i++) setLevel(s, s->order[i], HUGE_VAL);
  for (int at = from; at < s->numOrder;) {
    at = solveAt(s, at);
    if (at == s->numOrder) at = enterFull(s);
    if (s->numMoved + 2 > MOST_MOVES || s->numMoved + 2 > s->numResources) return 0;
  }
  return 1;
}

static void solveChanged(ep_share_t *s) {
  if (s->firstStale >= s->numOrder) s->firstStale = s->numOrder > 0 ? s->numOrder - 1 : 0;
  if (!solveFrom(s, s->firstStale)) {
    solveAll(s);
    return;
  }
  setPositions(s);
  for (int i = 0; i < s->numMoved; i++) {
    int p = s->heap[i];
    for (int k = s->first[p]; k < s->first[p] + s->numOn[p]; k++) setFixedBy(s, s->list[k]);
  }
}

void epShareSolve(ep_share_t *s) {
  s->numChanged = 0;
  if (s->isStale == 2) {
    solveAll(s);
  } else if (s->isStale == 1) {
    solveChanged(s);
  }
  s->isStale = 0;
}
