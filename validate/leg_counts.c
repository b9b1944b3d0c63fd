/* Rows token by token, straight from routing and the rules of docs/plan.md: no plan, no chunks, no
 * iterator. Slow and plain, so that it is easy to believe.
 *
 *   LL         each rank that has an expert of the token gets one row; exact expert-major combine
 *              brings one row back for each expert, the others one for each rank
 *   HT         ranks of the token's own node as in LL, one row a rank both ways; each other node gets
 *              one row at p, its rank on the source's rail, which passes one on to each target; combine
 *              the other way round */
#include "validate/legs.h"

#include <string.h>

typedef struct count {
  const trefoil_sim_workload_t *work;
  ep_leg_table_t *table;
} count_t;

static int tierOf(const trefoil_shape_t *s, int src, int dst) {
  if (src == dst) return TREFOIL_TIER_SELF;
  return trefoilNodeOf(s, src) == trefoilNodeOf(s, dst) ? TREFOIL_TIER_NVLINK : TREFOIL_TIER_NET;
}

static void add(const count_t *c, int op, int phase, int src, int dst, int rows) {
  const trefoil_sim_workload_t *w = c->work;
  int tier = tierOf(&w->routing->shape, src, dst);
  uint64_t *at = c->table->bytes + epLegAt(c->table, op, tier, phase);
  size_t rowBytes = op == TREFOIL_OP_COMBINE ? w->combineRowBytes : w->dispatchRowBytes;
  at[src * c->table->numRanks + dst] += (uint64_t)rows * rowBytes;
}

/* A row towards the experts, or back. */
static void addHop(const count_t *c, int op, int phase, int from, int to) {
  if (op == TREFOIL_OP_DISPATCH)
    add(c, op, phase, from, to, 1);
  else
    add(c, op, phase, to, from, 1);
}

/* entries [R]: how many experts of the token each rank has. */
static void addByRails(const count_t *c, int op, int src, const int *entries) {
  static const int phases[2][2] = {{TREFOIL_PHASE_NET_OUT, TREFOIL_PHASE_FORWARD},
                                   {TREFOIL_PHASE_NET_BACK, TREFOIL_PHASE_RETURN}};
  const trefoil_shape_t *s = &c->work->routing->shape;
  int G = s->ranksPerNode;
  for (int node = 0; node < s->numRanks / G; node++) {
    int p = node * G + trefoilRailOf(s, src), numTargets = 0;
    int isHome = node == trefoilNodeOf(s, src);
    for (int r = node * G; r < (node + 1) * G; r++) {
      if (!entries[r]) continue;
      numTargets++;
      addHop(c, op, isHome ? TREFOIL_PHASE_DIRECT : phases[op][1], isHome ? src : p, r);
    }
    if (!isHome && numTargets > 0) addHop(c, op, phases[op][0], src, p);
  }
}

static void addTokenLl(const count_t *c, int src, const int *entries) {
  const trefoil_sim_workload_t *w = c->work;
  int isExact = w->mode == TREFOIL_LL_EXPERT_MAJOR && !w->combinePartial;
  int isRails = w->variant == TREFOIL_VARIANT_RAILS;
  if (isRails) addByRails(c, TREFOIL_OP_DISPATCH, src, entries);
  for (int r = 0; r < c->table->numRanks; r++) {
    if (!entries[r]) continue;
    if (!isRails) add(c, TREFOIL_OP_DISPATCH, TREFOIL_PHASE_DIRECT, src, r, 1);
    add(c, TREFOIL_OP_COMBINE, TREFOIL_PHASE_DIRECT, r, src, isExact ? entries[r] : 1);
  }
}

static void addTokenHt(const count_t *c, int src, const int *entries) {
  for (int op = 0; op < 2; op++) addByRails(c, op, src, entries);
}

trefoil_result_t epLegRouting(const trefoil_sim_workload_t *work, ep_leg_table_t *table) {
  const trefoil_routing_t *routing = work->routing;
  const trefoil_shape_t *s = &routing->shape;
  count_t c = {work, table};
  int isHt = work->mode == TREFOIL_HT_FLAT || work->mode == TREFOIL_HT_EXPERT_MAJOR;
  for (int src = 0; src < s->numRanks; src++) {
    for (int64_t t = 0; t < routing->numTokens[src]; t++) {
      int entries[EP_MAX_RANKS] = {0};
      const int32_t *ids = routing->topkIdx[src] + t * s->topk;
      for (int k = 0; k < s->topk; k++) {
        if (ids[k] >= 0) entries[trefoilRankOfExpert(s, ids[k])]++;
      }
      if (isHt)
        addTokenHt(&c, src, entries);
      else
        addTokenLl(&c, src, entries);
    }
  }
  return TREFOIL_OK;
}
