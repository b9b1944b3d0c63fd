/* Slots and counters of one receiving rank, straight from the walk over all tokens. */
#include "ref/place.h"

#include "plan/error.h"

#include <stdlib.h>

static int64_t numSlots(const ep_placer_t *p, int rank) {
  const trefoil_shape_t *s = &p->c->routing.shape;
  if (p->c->mode == TREFOIL_LL_EXPERT_MAJOR) return p->numLocal * s->numRanks * s->maxTokens;
  if (p->c->mode == TREFOIL_LL_RANK_MAJOR) return s->numRanks * s->maxTokens;
  return epKeptSlots(p, rank);
}

int64_t trefoilRefNumSlots(const trefoil_case_t *c, int rank) {
  ep_placer_t p;
  if (epRankCheck(c, rank) != TREFOIL_OK) return -1;
  if (epPlacerInit(&p, c, rank) != TREFOIL_OK) return -1;
  int64_t n = numSlots(&p, rank);
  epPlacerFree(&p);
  return n;
}

/* Slots of no row; in expert-major they still belong to their zone. */
static void clearSlots(const ep_placer_t *p, int rank, trefoil_slot_t *slots, int64_t n) {
  int zone = 0;
  for (int64_t i = 0; i < n; i++) {
    const int64_t *offset = p->offset + (int64_t)rank * p->numLocal;
    if (epIsExpertMajor(p->c)) {
      while (zone + 1 < p->numLocal && offset[zone + 1] <= i) zone++;
    }
    slots[i] = (trefoil_slot_t){
        .src = -1, .token = -1, .k = -1, .expert = epIsExpertMajor(p->c) ? zone : -1};
  }
}

trefoil_result_t trefoilRefSlots(const trefoil_case_t *c, int rank, trefoil_slot_t *slots) {
  EP_TRY(epRankCheck(c, rank));
  ep_placer_t p;
  EP_TRY(epPlacerInit(&p, c, rank));
  trefoil_result_t result = TREFOIL_OK;
  int64_t n = numSlots(&p, rank);
  ep_place_t *places = malloc(sizeof *places * (size_t)c->routing.shape.topk);
  if (!places) {
    result = epFail(TREFOIL_SYSTEM_ERROR, "out of memory for %d places", c->routing.shape.topk);
  } else if (!slots && n > 0) {
    result = epFail(TREFOIL_INVALID_ARGUMENT, "slots is NULL");
  } else if (n > 0) {
    clearSlots(&p, rank, slots, n);
    for (int src = 0; src < c->routing.shape.numRanks; src++) {
      for (int64_t t = 0; t < c->routing.numTokens[src]; t++) {
        int numPlaces = epPlaceToken(&p, src, t, places);
        for (int i = 0; i < numPlaces; i++) {
          slots[places[i].slot] = (trefoil_slot_t){.src = src,
                                                   .token = t,
                                                   .k = epIsExpertMajor(c) ? places[i].k : -1,
                                                   .expert = places[i].expert};
        }
      }
    }
  }
  free(places);
  epPlacerFree(&p);
  return result;
}
