/* The plan of one dispatch or combine: an iterator over transfers.
 *
 * Per origin o and chunk c the rows are counted per target rank and per target node (plan/chunk.h);
 * the transfers then follow from the counts alone:
 *
 *   LL, any nodes            o <-> every target rank t                         DIRECT
 *   HT, targets in o's node  o <-> t                                           DIRECT
 *   HT, and LL dispatch by rails, other nodes m, with p = m*G + rail(o):
 *     dispatch               o -> p, one row a token   NET_OUT,  then p -> t   FORWARD
 *     combine                t -> p                    RETURN,   then p -> o   NET_BACK
 *
 * FORWARD of a chunk waits for the chunk's NET_OUT to p, NET_BACK for every RETURN to p. One row to
 * itself is a row too (tier SELF): o's own experts, and p's. Ranks ascend with their nodes, so a
 * walk of targets in ascending order gives each phase in the order the header promises. */
#include "trefoil/plan.h"

#include <stdlib.h>
#include <string.h>

#include "plan/chunk.h"
#include "plan/error.h"

enum { DEFAULT_CHUNK_TOKENS = 64 };

struct trefoil_plan {
  trefoil_routing_t routing;
  trefoil_plan_config_t config;
  int byRails;         /* hierarchical phases exist */
  int64_t chunkTokens; /* of this mode: LL all */
  ep_chunk_t *chunk;   /* a pointer: rows are listed lazily behind a const plan */
  int firstOrigin, endOrigin;
  int64_t nextFirst; /* first token of the chunk after this one */
  int origin;        /* of the chunk in hand, or endOrigin */
  int loaded;
  int phaseStep;  /* position in the phases of the operation */
  int target;     /* next target to look at */
  int lastTarget; /* of the transfer returned last, or -1 */
};

static const int phasesOf[2][3] = {
    {TREFOIL_PHASE_DIRECT, TREFOIL_PHASE_NET_OUT, TREFOIL_PHASE_FORWARD},
    {TREFOIL_PHASE_DIRECT, TREFOIL_PHASE_RETURN, TREFOIL_PHASE_NET_BACK},
};

static trefoil_result_t checkConfig(const trefoil_plan_config_t *c) {
  EP_CHECK((unsigned)c->mode < TREFOIL_NUM_MODES, TREFOIL_INVALID_ARGUMENT,
           "mode %d is not one of the %d modes", (int)c->mode, TREFOIL_NUM_MODES);
  EP_CHECK(c->op == TREFOIL_OP_DISPATCH || c->op == TREFOIL_OP_COMBINE, TREFOIL_INVALID_ARGUMENT,
           "operation %d is neither dispatch (0) nor combine (1)", (int)c->op);
  EP_CHECK((unsigned)c->variant <= TREFOIL_VARIANT_RAILS, TREFOIL_INVALID_ARGUMENT,
           "variant %d is none of ours (0), per-expert (1) and rails (2)", (int)c->variant);
  EP_CHECK(c->chunkTokens >= 0, TREFOIL_INVALID_ARGUMENT,
           "%d tokens of a chunk: must be positive, or 0 for %d", c->chunkTokens,
           DEFAULT_CHUNK_TOKENS);
  return TREFOIL_OK;
}

static int rowsAreEntries(const trefoil_plan_config_t *c) {
  if (c->op == TREFOIL_OP_DISPATCH) return c->variant == TREFOIL_VARIANT_PER_EXPERT;
  return c->mode == TREFOIL_LL_EXPERT_MAJOR && !c->combinePartial;
}

static int64_t longestChunk(const trefoil_routing_t *r, int64_t chunkTokens) {
  int64_t most = 0;
  for (int rank = 0; rank < r->shape.numRanks; rank++) {
    if (r->numTokens[rank] > most) most = r->numTokens[rank];
  }
  return most < chunkTokens ? most : chunkTokens;
}

trefoil_result_t trefoilPlanCreate(trefoil_plan_t **plan, const trefoil_routing_t *routing,
                                   const trefoil_plan_config_t *config) {
  EP_CHECK(plan && config, TREFOIL_INVALID_ARGUMENT, "the %s is NULL",
           plan ? "configuration" : "plan's out-parameter");
  EP_TRY(checkConfig(config));
  EP_TRY(trefoilRoutingCheck(routing));
  int ht = config->mode == TREFOIL_HT_FLAT || config->mode == TREFOIL_HT_EXPERT_MAJOR;
  int64_t chunkTokens = config->chunkTokens ? config->chunkTokens : DEFAULT_CHUNK_TOKENS;
  if (!ht) chunkTokens = routing->shape.maxTokens;
  int isRails = config->variant == TREFOIL_VARIANT_RAILS && config->op == TREFOIL_OP_DISPATCH;
  int64_t longest = longestChunk(routing, chunkTokens);
  EP_CHECK(longestChunk(routing, INT64_MAX) / chunkTokens < INT32_MAX, TREFOIL_INVALID_ARGUMENT,
           "%lld tokens in chunks of %lld are too many chunks",
           (long long)longestChunk(routing, INT64_MAX), (long long)chunkTokens);
  size_t head = (sizeof(trefoil_plan_t) + sizeof(ep_chunk_t) + 15) / 16 * 16;
  size_t bytes = head + epChunkBytes(routing, longest);
  trefoil_plan_t *p = calloc(1, bytes);
  EP_CHECK(p, TREFOIL_SYSTEM_ERROR, "out of memory: %zu bytes for a plan", bytes);
  p->routing = *routing;
  p->config = *config;
  p->byRails = ht || isRails;
  p->chunkTokens = chunkTokens;
  p->chunk = (ep_chunk_t *)(p + 1);
  epChunkInit(p->chunk, &p->routing, longest, (char *)p + head);
  p->chunk->perEntry = rowsAreEntries(config);
  trefoilPlanRewind(p);
  *plan = p;
  return TREFOIL_OK;
}

void trefoilPlanDestroy(trefoil_plan_t *plan) {
  free(plan);
}

void trefoilPlanRewind(trefoil_plan_t *p) {
  if (p) trefoilPlanRewindTo(p, 0, p->routing.shape.numRanks);
}

void trefoilPlanRewindTo(trefoil_plan_t *p, int firstOrigin, int numOrigins) {
  if (!p) return;
  int R = p->routing.shape.numRanks;
  if (firstOrigin < 0) firstOrigin = 0;
  if (firstOrigin > R) firstOrigin = R;
  if (numOrigins < 0) numOrigins = 0;
  if (numOrigins > R - firstOrigin) numOrigins = R - firstOrigin;
  p->firstOrigin = firstOrigin;
  p->endOrigin = firstOrigin + numOrigins;
  p->origin = firstOrigin;
  p->nextFirst = 0;
  p->loaded = 0;
  p->lastTarget = -1;
}

/* Loads the next chunk with tokens; 0 at the end. */
static int loadNextChunk(trefoil_plan_t *p) {
  while (p->origin < p->endOrigin && p->nextFirst >= p->routing.numTokens[p->origin]) {
    p->origin++;
    p->nextFirst = 0;
  }
  if (p->origin >= p->endOrigin) return 0;
  int64_t end = p->nextFirst + p->chunkTokens;
  if (end > p->routing.numTokens[p->origin]) end = p->routing.numTokens[p->origin];
  epChunkLoad(p->chunk, p->origin, p->nextFirst, end);
  p->nextFirst = end;
  p->phaseStep = 0;
  p->target = 0;
  p->loaded = 1;
  return 1;
}

/* Targets of a phase: ranks, or (net phases) nodes; the first and the one past the last. */
static void targetRange(const trefoil_plan_t *p, int phase, int *first, int *end) {
  const trefoil_shape_t *s = &p->routing.shape;
  int net = phase == TREFOIL_PHASE_NET_OUT || phase == TREFOIL_PHASE_NET_BACK;
  *first = net ? s->numRanks : 0;
  *end = net ? p->chunk->numTargets : s->numRanks;
  if (phase == TREFOIL_PHASE_DIRECT && p->byRails) {
    *first = trefoilNodeOf(s, p->origin) * s->ranksPerNode;
    *end = *first + s->ranksPerNode;
  }
}

/* The next target of the phase: by rails the origin's own node belongs to DIRECT alone. */
static int nextTarget(const trefoil_plan_t *p, int phase) {
  const trefoil_shape_t *s = &p->routing.shape;
  int first, end, ownNode = trefoilNodeOf(s, p->origin);
  targetRange(p, phase, &first, &end);
  int t = epChunkNextTarget(p->chunk, p->target > first ? p->target : first);
  if (phase != TREFOIL_PHASE_DIRECT && t < end) {
    if (t == s->numRanks + ownNode) t = epChunkNextTarget(p->chunk, t + 1);
    if (t < s->numRanks && trefoilNodeOf(s, t) == ownNode) {
      t = epChunkNextTarget(p->chunk, (ownNode + 1) * s->ranksPerNode);
    }
  }
  return t < end ? t : -1;
}

static int tierOf(const trefoil_shape_t *s, int src, int dst) {
  if (src == dst) return TREFOIL_TIER_SELF;
  return trefoilNodeOf(s, src) == trefoilNodeOf(s, dst) ? TREFOIL_TIER_NVLINK : TREFOIL_TIER_NET;
}

/* Ends of the transfer: `far` is the target's end, `near` the origin's. */
static void setEnds(const trefoil_plan_t *p, trefoil_transfer_t *x, int target) {
  const trefoil_shape_t *s = &p->routing.shape;
  int G = s->ranksPerNode, rail = trefoilRailOf(s, p->origin);
  int near = p->origin, far = target;
  if (target >= s->numRanks) {
    far = (target - s->numRanks) * G + rail;
  } else if (x->phase != TREFOIL_PHASE_DIRECT) {
    near = trefoilNodeOf(s, target) * G + rail;
  }
  x->src = p->config.op == TREFOIL_OP_DISPATCH ? near : far;
  x->dst = p->config.op == TREFOIL_OP_DISPATCH ? far : near;
  x->tier = tierOf(s, x->src, x->dst);
}

static void fill(const trefoil_plan_t *p, int phase, int target, trefoil_transfer_t *x) {
  memset(x, 0, sizeof *x);
  x->phase = phase;
  x->chunk = (int)(p->chunk->first / p->chunkTokens);
  x->origin = p->origin;
  x->rows = p->chunk->rows[target];
  x->rowBytes = p->config.rowBytes;
  setEnds(p, x, target);
  if (phase == TREFOIL_PHASE_FORWARD) {
    x->after[x->numAfter++] =
        (trefoil_after_t){TREFOIL_PHASE_NET_OUT, x->chunk, x->origin, x->origin, x->src};
  } else if (phase == TREFOIL_PHASE_NET_BACK) {
    x->after[x->numAfter++] =
        (trefoil_after_t){TREFOIL_PHASE_RETURN, x->chunk, x->origin, -1, x->src};
  }
}

int trefoilPlanNext(trefoil_plan_t *p, trefoil_transfer_t *transfer) {
  if (!p || !transfer) return 0;
  int numPhases = p->byRails ? 3 : 1;
  while (p->loaded || loadNextChunk(p)) {
    for (; p->phaseStep < numPhases; p->phaseStep++, p->target = 0) {
      int phase = phasesOf[p->config.op][p->phaseStep];
      int target = nextTarget(p, phase);
      if (target < 0) continue;
      fill(p, phase, target, transfer);
      p->target = target + 1;
      p->lastTarget = target;
      return 1;
    }
    p->loaded = 0;
  }
  p->lastTarget = -1;
  return 0;
}

void trefoilPlanRows(const trefoil_plan_t *p, trefoil_row_t *rows) {
  if (p && rows && p->lastTarget >= 0) epChunkRows(p->chunk, p->lastTarget, rows);
}

trefoil_result_t trefoilPlanTraffic(trefoil_plan_t *p, int phase, uint64_t *bytes) {
  EP_CHECK(p && bytes, TREFOIL_INVALID_ARGUMENT, "the %s is NULL", p ? "output" : "plan");
  EP_CHECK(phase < TREFOIL_NUM_PHASES, TREFOIL_INVALID_ARGUMENT,
           "phase %d: must be in [0, %d), or negative for all", phase, TREFOIL_NUM_PHASES);
  size_t R = (size_t)p->routing.shape.numRanks;
  memset(bytes, 0, R * R * sizeof *bytes);
  trefoilPlanRewind(p);
  trefoil_transfer_t x;
  while (trefoilPlanNext(p, &x)) {
    if (phase >= 0 && x.phase != phase) continue;
    bytes[(size_t)x.src * R + (size_t)x.dst] += (uint64_t)x.rows * x.rowBytes;
  }
  trefoilPlanRewind(p);
  return TREFOIL_OK;
}
