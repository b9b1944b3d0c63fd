/* From a plan to transfers.
 *
 * One walk of the plan's iterator copies its transfers. LL transfers are then cut into segments of a
 * token each (of a few, where that would be more than MAX_SEGMENTS), because an LL sender goes through
 * its tokens, not through its peers. By rails the walk also finds what waits for what: of one (origin,
 * chunk) it yields NET_OUT before FORWARD, and RETURN, node by node, before NET_BACK. */
#include <stdlib.h>
#include <string.h>

#include "plan/error.h"
#include "sim/replay.h"

enum { FIRST_ROOM = 1 << 12 };
#define MAX_SEGMENTS ((int64_t)1 << 24)

typedef struct build {
  ep_replay_t *replay;
  const trefoil_routing_t *routing;
  trefoil_plan_t *plan;
  int32_t *slotOfNode; /* the NET_OUT to a node, or its first RETURN */
  trefoil_row_t *rows; /* LL: of one transfer */
  int64_t roomRows;
  int64_t tokensOfSegment;
} build_t;

/* Grows an array of numUsed entries, so that one more fits. */
static trefoil_result_t makeRoom(void **array, int64_t numUsed, int64_t *max, size_t size) {
  if (numUsed < *max) return TREFOIL_OK;
  EP_CHECK(numUsed < INT32_MAX / 2, TREFOIL_INVALID_ARGUMENT,
           "more than %d transfers of one operation cannot be replayed", INT32_MAX / 2);
  int64_t room = *max ? *max * 2 : FIRST_ROOM;
  void *grown = realloc(*array, (size_t)room * size);
  EP_CHECK(grown, TREFOIL_SYSTEM_ERROR, "out of memory for %lld transfers", (long long)room);
  *array = grown;
  *max = room;
  return TREFOIL_OK;
}

static trefoil_result_t addMove(ep_replay_t *r, const trefoil_transfer_t *x) {
  EP_CHECK(x->rows <= INT32_MAX, TREFOIL_INVALID_ARGUMENT,
           "%lld rows from rank %d to rank %d: at most %d can be replayed", (long long)x->rows,
           x->src, x->dst, INT32_MAX);
  int64_t room = r->maxMoves;
  EP_TRY(makeRoom((void **)&r->moves, r->numMoves, &r->maxMoves, sizeof *r->moves));
  if (r->hasNetPhases && r->maxMoves != room) {
    int32_t *grown = realloc(r->partner, (size_t)r->maxMoves * sizeof *grown);
    EP_CHECK(grown, TREFOIL_SYSTEM_ERROR, "out of memory for %lld transfers",
             (long long)r->maxMoves);
    r->partner = grown;
  }
  r->moves[r->numMoves++] = (ep_move_t){.origin = x->origin,
                                        .src = x->src,
                                        .dst = x->dst,
                                        .rows = (int32_t)x->rows,
                                        .chunk = x->chunk,
                                        .phase = (uint8_t)x->phase,
                                        .tier = (uint8_t)x->tier};
  return TREFOIL_OK;
}

/* Cuts the transfer that was added last; rows ascend by token. */
static trefoil_result_t addSegments(build_t *b, int64_t numRows, int64_t **blocks,
                                    int64_t *maxBlocks) {
  ep_replay_t *r = b->replay;
  if (numRows > b->roomRows) {
    trefoil_row_t *grown = realloc(b->rows, (size_t)numRows * sizeof *grown);
    EP_CHECK(grown, TREFOIL_SYSTEM_ERROR, "out of memory for %lld rows", (long long)numRows);
    b->rows = grown;
    b->roomRows = numRows;
  }
  trefoilPlanRows(b->plan, b->rows);
  int64_t block = -1;
  for (int64_t i = 0; i < numRows; i++) {
    int64_t next = b->rows[i].token / b->tokensOfSegment;
    if (next == block) {
      r->segments[r->numSegments - 1].rows++;
      continue;
    }
    block = next;
    EP_TRY(makeRoom((void **)&r->segments, r->numSegments, &r->maxSegments, sizeof *r->segments));
    EP_TRY(makeRoom((void **)blocks, r->numSegments, maxBlocks, sizeof **blocks));
    (*blocks)[r->numSegments] = block; // NOLINT(clang-analyzer-core.NullDereference): makeRoom
    r->segments[r->numSegments++] = (ep_segment_t){(int32_t)(r->numMoves - 1), 1};
  }
  return TREFOIL_OK;
}

/* The partners of the transfer that was added last: what it waits for, what waits for it. */
static void addPartner(build_t *b) {
  ep_replay_t *r = b->replay;
  const trefoil_shape_t *s = &b->routing->shape;
  int32_t at = (int32_t)(r->numMoves - 1);
  const ep_move_t *m = &r->moves[at];
  r->partner[at] = -1;
  if (m->phase == TREFOIL_PHASE_NET_OUT) {
    b->slotOfNode[trefoilNodeOf(s, m->dst)] = at;
  } else if (m->phase == TREFOIL_PHASE_FORWARD) {
    r->partner[at] = b->slotOfNode[trefoilNodeOf(s, m->src)];
  } else if (m->phase == TREFOIL_PHASE_RETURN) {
    const ep_move_t *before = at > 0 ? m - 1 : NULL;
    int same = before && before->phase == m->phase && before->dst == m->dst &&
               before->origin == m->origin && before->chunk == m->chunk;
    if (!same) b->slotOfNode[trefoilNodeOf(s, m->dst)] = at;
  } else if (m->phase == TREFOIL_PHASE_NET_BACK) {
    int32_t i = b->slotOfNode[trefoilNodeOf(s, m->src)];
    for (; r->moves[i].phase == TREFOIL_PHASE_RETURN && r->moves[i].dst == m->src; i++) {
      r->partner[i] = at;
    }
  }
}

static trefoil_result_t countRows(ep_replay_t *r, int numRanks) {
  size_t R = (size_t)numRanks;
  r->sentRows = calloc(6 * R, sizeof *r->sentRows); /* all six arrays */
  r->firstOf = calloc(R + 1, sizeof *r->firstOf);
  EP_CHECK(r->sentRows && r->firstOf, TREFOIL_SYSTEM_ERROR, "out of memory for %d ranks", numRanks);
  r->takenRows = r->sentRows + R;
  r->ownRows = r->takenRows + R;
  r->nearOut = r->ownRows + R;
  r->nearIn = r->nearOut + R;
  r->slots = r->nearIn + R;
  for (int64_t i = 0; i < r->numMoves; i++) {
    const ep_move_t *m = &r->moves[i];
    if (epCrossesSend(m)) r->sentRows[m->src] += m->rows;
    if (epCrossesReceive(m)) r->takenRows[m->dst] += m->rows;
    if (epIsOwn(m)) r->ownRows[m->src] += m->rows;
    if (m->tier != TREFOIL_TIER_NVLINK) continue;
    r->nearOut[m->src] += m->rows;
    r->nearIn[m->dst] += m->rows;
  }
  return TREFOIL_OK;
}

/* Expert-major, a rank has a place for each (token, k) of its experts. Else a token has one place at
 * each rank: the rows that a dispatch takes there, and that a combine sends from there. */
static void countSlots(ep_replay_t *r, const trefoil_routing_t *routing, trefoil_mode_t mode) {
  const trefoil_shape_t *s = &routing->shape;
  if (mode != TREFOIL_LL_EXPERT_MAJOR && mode != TREFOIL_HT_EXPERT_MAJOR) {
    const int64_t *rows = r->op == TREFOIL_OP_DISPATCH ? r->takenRows : r->sentRows;
    memcpy(r->slots, rows, (size_t)s->numRanks * sizeof *rows);
    return;
  }
  for (int src = 0; src < s->numRanks; src++) {
    const int32_t *ids = routing->topkIdx[src];
    for (int64_t i = 0; i < routing->numTokens[src] * s->topk; i++) {
      if (ids[i] >= 0) r->slots[trefoilRankOfExpert(s, ids[i])]++;
    }
  }
}

static trefoil_result_t walk(build_t *b, int64_t **blocks) {
  ep_replay_t *r = b->replay;
  int64_t maxBlocks = 0;
  trefoil_transfer_t x;
  while (trefoilPlanNext(b->plan, &x)) {
    EP_TRY(addMove(r, &x));
    if (r->hasNetPhases) addPartner(b);
    if (!r->ht) EP_TRY(addSegments(b, x.rows, blocks, &maxBlocks));
  }
  if (r->ht) r->numSegments = r->numMoves;
  EP_TRY(countRows(r, b->routing->shape.numRanks));
  return epReplayOrder(r, &b->routing->shape, *blocks);
}

static int64_t tokensOfSegment(const trefoil_routing_t *routing) {
  int64_t entries = 0;
  for (int i = 0; i < routing->shape.numRanks; i++) {
    entries += routing->numTokens[i] * routing->shape.topk;
  }
  return 1 + entries / MAX_SEGMENTS;
}

trefoil_result_t epReplayBuild(ep_replay_t *replay, const trefoil_sim_workload_t *w,
                               trefoil_op_t op, int chunkTokens) {
  const trefoil_shape_t *s = &w->routing->shape;
  int numNodes = s->numRanks / s->ranksPerNode;
  trefoil_plan_config_t config = {.mode = w->mode,
                                  .op = op,
                                  .variant = w->variant,
                                  .combinePartial = w->combinePartial,
                                  .chunkTokens = chunkTokens};
  config.rowBytes = op == TREFOIL_OP_DISPATCH ? w->dispatchRowBytes : w->combineRowBytes;
  ep_replay_t made = {.op = op, .rowBytes = config.rowBytes, .chunkTokens = chunkTokens};
  made.ht = w->mode == TREFOIL_HT_FLAT || w->mode == TREFOIL_HT_EXPERT_MAJOR;
  int isRails = w->variant == TREFOIL_VARIANT_RAILS && op == TREFOIL_OP_DISPATCH;
  made.hasNetPhases = (made.ht || isRails) && numNodes > 1;
  build_t b = {.replay = &made, .routing = w->routing};
  b.tokensOfSegment = tokensOfSegment(w->routing);
  int64_t *blocks = NULL;
  EP_TRY(trefoilPlanCreate(&b.plan, w->routing, &config));
  b.slotOfNode = calloc((size_t)numNodes, sizeof *b.slotOfNode);
  trefoil_result_t result = TREFOIL_SYSTEM_ERROR;
  if (b.slotOfNode) {
    result = walk(&b, &blocks);
    if (result == TREFOIL_OK) countSlots(&made, w->routing, w->mode);
  } else {
    epFail(result, "out of memory for %d nodes", numNodes);
  }
  trefoilPlanDestroy(b.plan);
  free(b.slotOfNode);
  free(b.rows);
  free(blocks);
  if (result != TREFOIL_OK) {
    epReplayFree(&made);
    return result;
  }
  *replay = made;
  return TREFOIL_OK;
}

void epReplayFree(ep_replay_t *r) {
  free(r->moves);
  free(r->segments);
  free(r->partner);
  free(r->issued);
  free(r->firstOf);
  free(r->sentRows);
  memset(r, 0, sizeof *r);
}
