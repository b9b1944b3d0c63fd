/* Routings that find faults: ragged and empty ranks, unused entries, one expert or one rank that gets
 * everything, and plain uniform ones. */
#include "validate/check_case.h"

#include "plan/error.h"

#include <stdlib.h>

/* Full ranks, but for what the group's features allow. */
static void limitedCounts(ep_check_routing_t *routing, const ep_check_group_t *g, ep_rng_t *rng) {
  const trefoil_shape_t *s = &g->shape;
  int ragged = epUses(g, rng, EP_F_RAGGED, 2), empty = epUses(g, rng, EP_F_EMPTY_RANKS, 4);
  int only = (int)epBelow(rng, s->numRanks);
  for (int r = 0; r < s->numRanks; r++) {
    routing->numTokens[r] = ragged ? epRange(rng, 1, s->maxTokens) : s->maxTokens;
    if (empty && (r == only || epOneIn(rng, 3))) routing->numTokens[r] = 0;
  }
}

static void makeCounts(ep_check_routing_t *routing, const trefoil_shape_t *s, ep_rng_t *rng) {
  int kind = (int)epBelow(rng, 8);
  int only = (int)epBelow(rng, s->numRanks);
  for (int r = 0; r < s->numRanks; r++) {
    int64_t B = epRange(rng, 0, s->maxTokens);
    if (kind == 0) B = s->maxTokens;
    if (kind == 1 && r != only) B = 0;
    if (kind == 2 && epOneIn(rng, 2)) B = 0;
    if (kind >= 6 && B == 0) B = 1;
    routing->numTokens[r] = B;
  }
}

typedef struct ids_kind {
  int hotExpert, hotRank, unusedOneIn; /* -1 and 0: not so */
} ids_kind_t;

/* Fills one row without duplicates: a partial shuffle of the experts. */
static void makeRow(const trefoil_shape_t *s, const ids_kind_t *kind, int topk, int32_t *shuffled,
                    ep_rng_t *rng, int32_t *row) {
  int E = s->numExperts, L = trefoilExpertsPerRank(s);
  for (int k = 0; k < topk; k++) {
    int pick = k + (int)epBelow(rng, E - k);
    if (kind->hotRank >= 0) /* prefer that rank's experts while it has any */
      for (int i = k; i < E; i++)
        if (shuffled[i] / L == kind->hotRank && !epOneIn(rng, 8)) pick = i;
    if (k == 0 && kind->hotExpert >= 0)
      for (int i = 0; i < E; i++)
        if (shuffled[i] == kind->hotExpert) pick = i;
    int32_t expert = shuffled[pick];
    shuffled[pick] = shuffled[k];
    shuffled[k] = expert;
    row[k] = kind->unusedOneIn && epOneIn(rng, kind->unusedOneIn) ? -1 : expert;
  }
}

trefoil_result_t epMakeRouting(ep_check_case_t *c, int routingIdx, ep_rng_t *rng) {
  ep_check_routing_t *routing = &c->routings[routingIdx];
  const trefoil_shape_t *s = &c->group->shape;
  int R = s->numRanks, E = s->numExperts;
  if (c->group->limited)
    limitedCounts(routing, c->group, rng);
  else
    makeCounts(routing, s, rng);
  routing->wideIds = epUses(c->group, rng, EP_F_WIDE_IDS, 2);
  int64_t total = 0;
  for (int r = 0; r < R; r++) total += routing->numTokens[r];
  int32_t shuffled[1024];
  EP_CHECK(E <= 1024, TREFOIL_INVALID_ARGUMENT, "%d experts: random cases have at most 1024", E);
  for (int i = 0; i < E; i++) shuffled[i] = i;
  for (int round = 0; round < c->numRounds; round++) {
    int32_t *ids = malloc(sizeof *ids * (size_t)(total * routing->topk + 1));
    EP_CHECK(ids, TREFOIL_SYSTEM_ERROR, "out of memory for a routing");
    routing->ids[round] = ids;
    ids_kind_t kind = {-1, -1, 0};
    if (epOneIn(rng, 4)) kind.hotExpert = (int)epBelow(rng, E);
    if (epOneIn(rng, 6)) kind.hotRank = (int)epBelow(rng, R);
    if (epUses(c->group, rng, EP_F_UNUSED, 2)) kind.unusedOneIn = 1 + (int)epBelow(rng, 6);
    for (int r = 0; r < R; r++) {
      routing->rows[round][r] = ids;
      for (int64_t t = 0; t < routing->numTokens[r]; t++, ids += routing->topk)
        makeRow(s, &kind, routing->topk, shuffled, rng, ids);
    }
  }
  return TREFOIL_OK;
}
