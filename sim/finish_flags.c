/* The end of an operation: a rank is done when it has taken its rows, its own SMs have sent theirs,
 * and every other rank has let it know that it sends nothing more. That word leaves a rank when its
 * SMs have issued its last row, and takes the latency of its way. Its receivers need the time of all
 * its rows from when it has all announcements. */
#include <stdlib.h>

#include "plan/error.h"
#include "sim/engine.h"

/* The largest of some values, and the largest of those that came from somewhere else. */
typedef struct top {
  ep_fs_t best, other;
  int where;
} top_t;

static void offer(top_t *t, ep_fs_t value, int where) {
  if (value > t->best) {
    t->other = t->best;
    t->best = value;
    t->where = where;
  } else if (value > t->other) {
    t->other = value;
  }
}
static ep_fs_t bestBut(const top_t *t, int where) {
  return t->where == where ? t->other : t->best;
}
static void raiseTo(ep_fs_t *to, ep_fs_t value) {
  if (value > *to) *to = value;
}

trefoil_result_t epFinishFlags(const ep_replay_t *replay, const ep_fabric_t *f,
                               const trefoil_shape_t *s, ep_fs_t *finish) {
  int numNodes = s->numRanks / s->ranksPerNode;
  top_t *nodes = malloc((size_t)numNodes * sizeof *nodes), all = {-1, -1, -1};
  EP_CHECK(nodes, TREFOIL_SYSTEM_ERROR, "out of memory for %d nodes", numNodes);
  for (int m = 0; m < numNodes; m++) nodes[m] = (top_t){-1, -1, -1};
  for (int r = 0; r < s->numRanks; r++) {
    ep_fs_t done = f->start[r] + epRowsToSend(f, replay, r) * f->row[TREFOIL_RESOURCE_SEND][r];
    raiseTo(&finish[r], done);
    raiseTo(&finish[r],
            f->announced[r] + replay->takenRows[r] * f->row[TREFOIL_RESOURCE_RECEIVE][r]);
    finish[r] += f->rest[r];
    offer(&nodes[trefoilNodeOf(s, r)], done, r);
  }
  for (int m = 0; m < numNodes; m++) offer(&all, nodes[m].best, m);
  for (int r = 0; r < s->numRanks; r++) {
    int m = trefoilNodeOf(s, r);
    ep_fs_t near = bestBut(&nodes[m], r), far = bestBut(&all, m);
    if (near >= 0) raiseTo(&finish[r], near + f->latency[TREFOIL_TIER_NVLINK]);
    if (far >= 0) raiseTo(&finish[r], far + f->latency[TREFOIL_TIER_NET]);
  }
  free(nodes);
  return TREFOIL_OK;
}
