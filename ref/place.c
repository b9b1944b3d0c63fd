#include "ref/place.h"

#include "plan/error.h"

#include <stdlib.h>

/* Is k the first of the row that names an expert of rank d? */
static bool isFirstOfRank(const ep_placer_t *p, const int32_t *row, int k, int d) {
  int firstExpert = d * p->numLocal;
  for (int j = 0; j < k; j++) {
    if (row[j] >= firstExpert && row[j] < firstExpert + p->numLocal) return false;
  }
  return true;
}

/* Rows per expert and tokens per rank over all sources, as if nothing were ever dropped. */
static void countAll(ep_placer_t *p) {
  const trefoil_shape_t *s = &p->c->routing.shape;
  int firstExpert = p->firstRank * p->numLocal, endExpert = p->endRank * p->numLocal;
  for (int src = 0; src < s->numRanks; src++) {
    for (int64_t t = 0; t < p->c->routing.numTokens[src]; t++) {
      const int32_t *row = epRoutingRow(p->c, src, t);
      for (int k = 0; k < s->topk; k++) {
        if (row[k] < firstExpert || row[k] >= endExpert) continue;
        int d = row[k] / p->numLocal;
        if (!epLinked(p->c->active, s->numRanks, src, d)) continue;
        p->count[row[k]]++;
        p->received[d] += isFirstOfRank(p, row, k, d);
      }
    }
  }
}

static void layZones(ep_placer_t *p) {
  const trefoil_shape_t *s = &p->c->routing.shape;
  for (int d = p->firstRank; d < p->endRank; d++) {
    int64_t base = 0;
    for (int l = 0; l < p->numLocal; l++) {
      int e = d * p->numLocal + l;
      p->offset[e] = base;
      if (p->c->mode == TREFOIL_HT_EXPERT_MAJOR) base += epPadded(p->c, p->count[e]);
      if (p->c->mode == TREFOIL_LL_EXPERT_MAJOR) base += s->numRanks * s->maxTokens;
    }
    p->total[d] = p->c->mode == TREFOIL_HT_EXPERT_MAJOR ? base : p->received[d];
  }
}

trefoil_result_t epPlacerInit(ep_placer_t *p, const trefoil_case_t *c, int rank) {
  size_t numRanks = (size_t)c->routing.shape.numRanks;
  int numLocal = trefoilExpertsPerRank(&c->routing.shape);
  size_t numZones = numRanks * (size_t)numLocal;
  int64_t *memory = calloc(3 * numZones + 3 * numRanks, sizeof *memory);
  EP_CHECK(memory, TREFOIL_SYSTEM_ERROR, "out of memory for the counts of %zu experts", numZones);
  *p = (ep_placer_t){
      .c = c,
      .numLocal = numLocal,
      .firstRank = rank < 0 ? 0 : rank,
      .endRank = rank < 0 ? (int)numRanks : rank + 1,
      .count = memory,
      .offset = memory + numZones,
      .next = memory + 2 * numZones,
      .received = memory + 3 * numZones,
      .total = memory + 3 * numZones + numRanks,
      .flat = memory + 3 * numZones + 2 * numRanks,
      .lastSrc = -1,
  };
  countAll(p);
  layZones(p);
  return TREFOIL_OK;
}

void epPlacerFree(ep_placer_t *p) {
  free(p->count); /* the one block of all arrays */
  p->count = NULL;
}

int64_t epKeptSlots(const ep_placer_t *p, int d) {
  if (p->c->maxRecv == 0 || p->total[d] <= p->c->maxRecv) return p->total[d];
  return p->c->drop ? p->c->maxRecv : 0;
}

/* Is HT's row of a token, the flatIdx-th that rank d receives, kept in this slot? */
static bool isKept(const ep_placer_t *p, int d, int64_t slot, int64_t flatIdx) {
  const trefoil_case_t *c = p->c;
  if (slot >= epKeptSlots(p, d)) return false;
  bool limitsTokens = c->maxRecv > 0 && !(c->zeroCopyOn && c->mode == TREFOIL_HT_EXPERT_MAJOR);
  return !limitsTokens || flatIdx < c->maxRecv;
}

int epPlaceToken(ep_placer_t *p, int src, int64_t token, ep_place_t *places) {
  const trefoil_case_t *c = p->c;
  const trefoil_shape_t *s = &c->routing.shape;
  if (src != p->lastSrc && c->mode == TREFOIL_LL_RANK_MAJOR) {
    for (int d = p->firstRank; d < p->endRank; d++) p->flat[d] = 0;
  }
  p->lastSrc = src;
  const int32_t *row = epRoutingRow(c, src, token);
  int firstExpert = p->firstRank * p->numLocal, endExpert = p->endRank * p->numLocal;
  int numPlaces = 0;
  for (int k = 0; k < s->topk; k++) {
    if (row[k] < firstExpert || row[k] >= endExpert) continue;
    int e = row[k], d = e / p->numLocal;
    if (!epLinked(c->active, s->numRanks, src, d)) continue;
    bool first = isFirstOfRank(p, row, k, d); /* a token is counted once per rank */
    p->flat[d] += first;
    int64_t flatIdx = p->flat[d] - 1, slot;
    if (epIsExpertMajor(c)) {
      slot = p->offset[e] + p->next[e]++;
    } else if (!first) {
      continue;
    } else {
      slot = c->mode == TREFOIL_LL_RANK_MAJOR ? src * s->maxTokens + flatIdx : flatIdx;
    }
    if (epIsHt(c) && !isKept(p, d, slot, flatIdx)) continue;
    int expert = epIsExpertMajor(c) ? e - d * p->numLocal : -1;
    places[numPlaces++] = (ep_place_t){.rank = d, .k = k, .expert = expert, .slot = slot};
  }
  return numPlaces;
}
