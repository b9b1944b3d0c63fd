/* The counters of one receiving rank. Expert counters of HT flat count what was kept, so they come
 * from a walk; the others are the placer's own counts, clamped where DROP says so. */
#include "ref/place.h"

#include "plan/error.h"

#include <stdlib.h>

/* HT flat: kept tokens that use each local expert. A trapping rank reports the true numbers. */
static trefoil_result_t countFlat(ep_placer_t *p, int rank, int64_t *counters) {
  const trefoil_case_t *c = p->c;
  int64_t *count = p->count + (int64_t)rank * p->numLocal;
  bool dropped = c->drop && c->maxRecv > 0 && p->total[rank] > c->maxRecv;
  if (!dropped) {
    for (int l = 0; l < p->numLocal; l++) counters[l] = count[l];
    return TREFOIL_OK;
  }
  ep_place_t *places = malloc(sizeof *places * (size_t)c->routing.shape.topk);
  EP_CHECK(places, TREFOIL_SYSTEM_ERROR, "out of memory for %d places", c->routing.shape.topk);
  for (int l = 0; l < p->numLocal; l++) counters[l] = 0;
  for (int src = 0; src < c->routing.shape.numRanks; src++) {
    for (int64_t t = 0; t < c->routing.numTokens[src]; t++) {
      if (epPlaceToken(p, src, t, places) == 0) continue;
      const int32_t *row = epRoutingRow(c, src, t);
      for (int k = 0; k < c->routing.shape.topk; k++) {
        if (row[k] >= 0 && row[k] / p->numLocal == rank) counters[row[k] % p->numLocal]++;
      }
    }
  }
  free(places);
  return TREFOIL_OK;
}

static void countHtExpertMajor(const ep_placer_t *p, int rank, const trefoil_counters_t *out) {
  const trefoil_case_t *c = p->c;
  for (int l = 0; l < p->numLocal; l++) {
    int64_t offset = p->offset[(int64_t)rank * p->numLocal + l];
    int64_t padded = epPadded(c, p->count[(int64_t)rank * p->numLocal + l]);
    if (c->drop && c->maxRecv > 0) {
      if (offset > c->maxRecv) offset = c->maxRecv;
      if (padded > c->maxRecv - offset) padded = c->maxRecv - offset;
    }
    if (out->expertOffsets) out->expertOffsets[l] = offset;
    if (out->expertCounters) out->expertCounters[l] = padded;
  }
}

/* LL rank-major: tokens of each source, each counted once. */
static void countSources(const ep_placer_t *p, int rank, int64_t *counters) {
  const trefoil_case_t *c = p->c;
  const trefoil_shape_t *s = &c->routing.shape;
  for (int src = 0; src < s->numRanks; src++) {
    counters[src] = 0;
    if (!epLinked(c->active, s->numRanks, src, rank)) continue;
    for (int64_t t = 0; t < c->routing.numTokens[src]; t++) {
      const int32_t *row = epRoutingRow(c, src, t);
      bool names = false;
      for (int k = 0; k < s->topk; k++) names |= row[k] >= 0 && row[k] / p->numLocal == rank;
      counters[src] += names;
    }
  }
}

trefoil_result_t trefoilRefCounters(const trefoil_case_t *c, int rank,
                                    const trefoil_counters_t *out) {
  EP_TRY(epRankCheck(c, rank));
  EP_CHECK(out, TREFOIL_INVALID_ARGUMENT, "out is NULL");
  ep_placer_t p;
  EP_TRY(epPlacerInit(&p, c, rank));
  trefoil_result_t result = TREFOIL_OK;
  switch (c->mode) {
  case TREFOIL_LL_EXPERT_MAJOR:
    for (int l = 0; l < p.numLocal && out->expertCounters; l++) {
      out->expertCounters[l] = p.count[(int64_t)rank * p.numLocal + l];
    }
    break;
  case TREFOIL_LL_RANK_MAJOR:
    if (out->srcRankCounters) countSources(&p, rank, out->srcRankCounters);
    break;
  case TREFOIL_HT_FLAT:
    if (out->expertCounters) result = countFlat(&p, rank, out->expertCounters);
    break;
  case TREFOIL_HT_EXPERT_MAJOR:
    countHtExpertMajor(&p, rank, out);
    break;
  }
  if (epIsHt(c) && out->total && result == TREFOIL_OK) *out->total = p.total[rank];
  epPlacerFree(&p);
  return result;
}
