/* The order in which a rank's SMs issue its rows.
 *
 * LL goes through the tokens: of each token the peers, beginning with the next rank round the ring,
 * so that all ranks do not serve the same peer at the same time. A combine goes through the tokens of
 * its peers in the same way, and so do those that forward what came to them by rails. HT goes through
 * the chunks, in each the rows of other nodes first, for they have the longer way. */
#include <stdlib.h>

#include "plan/error.h"
#include "sim/key_sort.h"
#include "sim/replay.h"

enum { LONG_WAY_BIT = 20 }; /* below it the distance round the ring: TREFOIL_MAX_RANKS fits */

static uint64_t keyOf(const ep_replay_t *r, const trefoil_shape_t *s, int64_t segment,
                      const int64_t *blocks) {
  const ep_move_t *m = epMoveOf(r, segment);
  int peer = r->op == TREFOIL_OP_DISPATCH ? m->dst : m->origin;
  uint64_t distance = (uint64_t)(((int64_t)peer - m->src + s->numRanks) % s->numRanks);
  if (!r->ht) return (uint64_t)blocks[segment] << LONG_WAY_BIT | distance;
  uint64_t isNear = m->phase == TREFOIL_PHASE_DIRECT;
  return (uint64_t)m->chunk << (LONG_WAY_BIT + 1) | isNear << LONG_WAY_BIT | distance;
}

/* Counting sort of the segments that SEND issues, by source; the others follow as they are. */
static void groupBySource(ep_replay_t *r, int numRanks) {
  for (int64_t i = 0; i < r->numSegments; i++) {
    const ep_move_t *m = epMoveOf(r, i);
    if (epCrossesSend(m)) r->firstOf[m->src + 1]++;
  }
  for (int k = 0; k < numRanks; k++) r->firstOf[k + 1] += r->firstOf[k];
  int64_t others = r->firstOf[numRanks];
  for (int64_t i = 0; i < r->numSegments; i++) {
    const ep_move_t *m = epMoveOf(r, i);
    r->issued[epCrossesSend(m) ? r->firstOf[m->src]++ : others++] = (int32_t)i;
  }
  for (int k = numRanks; k > 0; k--) r->firstOf[k] = r->firstOf[k - 1];
  r->firstOf[0] = 0;
}

static int64_t longestList(const ep_replay_t *r, int numRanks) {
  int64_t most = r->numSegments - r->firstOf[numRanks] + 1;
  for (int k = 0; k < numRanks; k++) {
    int64_t n = r->firstOf[k + 1] - r->firstOf[k];
    if (n > most) most = n;
  }
  return most;
}

trefoil_result_t epReplayOrder(ep_replay_t *r, const trefoil_shape_t *s, const int64_t *blocks) {
  r->issued = malloc((size_t)(r->numSegments + 1) * sizeof *r->issued);
  EP_CHECK(r->issued, TREFOIL_SYSTEM_ERROR, "out of memory for %lld transfers",
           (long long)r->numSegments);
  groupBySource(r, s->numRanks);
  size_t most = (size_t)longestList(r, s->numRanks);
  ep_keyed_t *keyed = malloc(2 * most * sizeof *keyed);
  EP_CHECK(keyed, TREFOIL_SYSTEM_ERROR, "out of memory for %zu transfers of a rank", most);
  for (int k = 0; k <= s->numRanks; k++) { /* past the last: LL's that are forwarded */
    if (k == s->numRanks && r->ht) break;
    int32_t *list = r->issued + r->firstOf[k];
    int64_t end = k < s->numRanks ? r->firstOf[k + 1] : r->numSegments;
    size_t n = (size_t)(end - r->firstOf[k]);
    for (size_t i = 0; i < n; i++) keyed[i] = (ep_keyed_t){keyOf(r, s, list[i], blocks), list[i]};
    epSortKeyed(keyed, keyed + most, n);
    for (size_t i = 0; i < n; i++) list[i] = keyed[i].id;
  }
  free(keyed);
  return TREFOIL_OK;
}
