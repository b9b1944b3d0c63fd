/* Progressive filling: all rates rise together until a resource is full; its flows keep that rate, and
 * the others rise on. So resources fill in ascending order of level, (capacity left) / (flows left), and
 * a level never falls, for a flow that is fixed takes at most the level of what else it crosses.
 *
 * Where flows have only gone since the last solution, what filled below their lowest rate fills as
 * before: that part is kept. */
#include "sim/fair_share.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
  MOST_KEPT = 1024
}; /* solutions between two from nothing, which drop what rounding added up */

/* ---- Memory ------------------------------------------------------------------------------------ */

static void *take(ep_share_t *s, int at, size_t count, size_t size) {
  return s->memory[at] = calloc(count + 1, size);
}

int epShareAllocate(ep_share_t *s, int numResources, int numBundles) {
  size_t P = (size_t)numResources, B = (size_t)numBundles, U = B * EP_SHARE_USES;
  *s = (ep_share_t){.numResources = numResources, .numBundles = numBundles};
  s->capacity = take(s, 0, P, sizeof *s->capacity);
  s->uses = take(s, 1, U, sizeof *s->uses);
  s->weight = take(s, 2, B, sizeof *s->weight);
  s->rate = take(s, 3, B, sizeof *s->rate);
  s->solved = take(s, 4, B, sizeof *s->solved);
  s->first = take(s, 5, P + 1, sizeof *s->first);
  s->numOn = take(s, 6, P, sizeof *s->numOn);
  s->list = take(s, 7, U, sizeof *s->list);
  s->place = take(s, 8, U, sizeof *s->place);
  s->total = take(s, 9, P, sizeof *s->total);
  s->count = take(s, 10, P, sizeof *s->count);
  s->left = take(s, 11, P, sizeof *s->left);
  s->level = take(s, 12, P, sizeof *s->level);
  s->fixedBy = take(s, 13, B, sizeof *s->fixedBy);
  s->heap = take(s, 14, P, sizeof *s->heap);
  s->order = take(s, 15, P, sizeof *s->order);
  s->orderLevel = take(s, 16, P, sizeof *s->orderLevel);
  for (int i = 0; i < 17; i++) {
    if (!s->memory[i]) return 0;
  }
  return 1;
}

void epShareFree(ep_share_t *s) {
  for (size_t i = 0; i < sizeof s->memory / sizeof *s->memory; i++) free(s->memory[i]);
  memset(s, 0, sizeof *s);
}

void epShareStart(ep_share_t *s) {
  for (int i = 0; i < s->numBundles * EP_SHARE_USES; i++) {
    if (s->uses[i] >= 0) s->first[s->uses[i] + 1]++;
  }
  for (int p = 0; p < s->numResources; p++) s->first[p + 1] += s->first[p];
}

/* ---- Flows come and go ------------------------------------------------------------------------- */

static const int32_t *usesOf(const ep_share_t *s, int bundle) {
  return s->uses + (size_t)bundle * EP_SHARE_USES;
}

static void enter(ep_share_t *s, int bundle) {
  const int32_t *uses = usesOf(s, bundle);
  for (int k = 0; k < EP_SHARE_USES && uses[k] >= 0; k++) {
    int32_t at = s->first[uses[k]] + s->numOn[uses[k]]++;
    s->list[at] = bundle;
    s->place[(size_t)bundle * EP_SHARE_USES + (size_t)k] = at;
  }
}

/* The list's last bundle takes the place of one that goes. */
static void leave(ep_share_t *s, int bundle) {
  const int32_t *uses = usesOf(s, bundle);
  for (int k = 0; k < EP_SHARE_USES && uses[k] >= 0; k++) {
    int32_t p = uses[k], at = s->place[(size_t)bundle * EP_SHARE_USES + (size_t)k];
    int32_t last = s->list[s->first[p] + --s->numOn[p]];
    s->list[at] = last;
    const int32_t *its = usesOf(s, last);
    int i = 0;
    while (its[i] != p) i++;
    s->place[(size_t)last * EP_SHARE_USES + (size_t)i] = at;
  }
}

void epShareSetWeight(ep_share_t *s, int bundle, int weight) {
  int more = weight - s->weight[bundle];
  if (more == 0) return;
  const int32_t *uses = usesOf(s, bundle);
  for (int k = 0; k < EP_SHARE_USES && uses[k] >= 0; k++) {
    s->total[uses[k]] += more;
    s->left[uses[k]] -= more * s->rate[bundle];
  }
  if (s->weight[bundle] == 0) enter(s, bundle);
  if (weight == 0) leave(s, bundle);
  s->weight[bundle] = weight;
  s->lowest = more > 0 ? 0 : fmin(s->lowest, s->rate[bundle]);
}

void epShareForget(ep_share_t *s) {
  s->lowest = 0;
}

int epShareIsCurrent(const ep_share_t *s) {
  return s->lowest == HUGE_VAL;
}

/* ---- A heap of resources by level --------------------------------------------------------------- */

static void siftDown(ep_share_t *s, int i) {
  int32_t p = s->heap[i];
  for (int c = 2 * i + 1; c < s->numHeap; c = 2 * i + 1) {
    if (c + 1 < s->numHeap && s->level[s->heap[c + 1]] < s->level[s->heap[c]]) c++;
    if (s->level[s->heap[c]] >= s->level[p]) break;
    s->heap[i] = s->heap[c];
    i = c;
  }
  s->heap[i] = p;
}

static void fillHeap(ep_share_t *s) {
  s->numHeap = 0;
  for (int p = 0; p < s->numResources; p++) {
    if (s->count[p] == 0) continue;
    s->level[p] = s->left[p] / (double)s->count[p];
    s->heap[s->numHeap++] = p;
  }
  for (int i = s->numHeap / 2 - 1; i >= 0; i--) siftDown(s, i);
}

static void dropTop(ep_share_t *s) {
  s->heap[0] = s->heap[--s->numHeap];
  if (s->numHeap > 0) siftDown(s, 0);
}

/* ---- Filling ----------------------------------------------------------------------------------- */

/* Takes back what the bundles of a full resource have, and counts them. */
static int empty(ep_share_t *s, int p) {
  int n = 0;
  for (int i = s->first[p]; i < s->first[p] + s->numOn[p]; i++) {
    int b = s->list[i], w = s->weight[b];
    if (s->fixedBy[b] != p) continue;
    const int32_t *uses = usesOf(s, b);
    for (int k = 0; k < EP_SHARE_USES && uses[k] >= 0; k++) {
      s->left[uses[k]] += w * s->rate[b];
      s->count[uses[k]] += w;
    }
    s->fixedBy[b] = -1;
    n++;
  }
  return n;
}

static int emptyAll(ep_share_t *s) {
  int n = 0;
  memcpy(s->left, s->capacity, (size_t)s->numResources * sizeof *s->left);
  memcpy(s->count, s->total, (size_t)s->numResources * sizeof *s->count);
  for (int b = 0; b < s->numBundles; b++) {
    s->fixedBy[b] = -1;
    n += s->weight[b] > 0;
  }
  s->numOrder = s->numSinceAll = 0;
  return n;
}

/* Levels of resources that fill together differ by rounding. */
static int emptyChanged(ep_share_t *s) {
  int n = 0;
  if (s->lowest == 0 || ++s->numSinceAll > MOST_KEPT) return emptyAll(s);
  double from = s->lowest * (1 - 1e-9);
  while (s->numOrder > 0 && s->orderLevel[s->numOrder - 1] >= from) {
    n += empty(s, s->order[--s->numOrder]);
  }
  return n;
}

static void fix(ep_share_t *s, int p, double level) {
  for (int i = s->first[p]; i < s->first[p] + s->numOn[p]; i++) {
    int b = s->list[i], w = s->weight[b];
    if (s->fixedBy[b] >= 0) continue;
    s->fixedBy[b] = p;
    s->rate[b] = level;
    s->solved[s->numSolved++] = b;
    const int32_t *uses = usesOf(s, b);
    for (int k = 0; k < EP_SHARE_USES && uses[k] >= 0; k++) {
      s->left[uses[k]] -= w * level;
      s->count[uses[k]] -= w;
    }
  }
}

/* Whether the level of the heap's top is its level now; else it sinks to its place. */
static int isTopCurrent(ep_share_t *s) {
  int p = s->heap[0];
  double level = s->left[p] / (double)s->count[p];
  if (level <= s->level[p]) return 1;
  s->level[p] = level;
  siftDown(s, 0);
  return s->heap[0] == p;
}

void epShareSolve(ep_share_t *s) {
  int numLeft = emptyChanged(s);
  double last = s->numOrder > 0 ? s->orderLevel[s->numOrder - 1] : 0;
  s->numSolved = 0;
  fillHeap(s);
  while (s->numSolved < numLeft) {
    int p = s->heap[0];
    if (s->count[p] == 0) {
      dropTop(s);
    } else if (isTopCurrent(s)) {
      last = fmax(last, s->level[p]);
      s->order[s->numOrder] = p;
      s->orderLevel[s->numOrder++] = last;
      fix(s, p, last);
      dropTop(s);
    }
  }
  s->lowest = HUGE_VAL;
}
