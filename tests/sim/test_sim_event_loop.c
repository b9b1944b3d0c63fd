/* The engine of queues sweeps kind after kind of resource and claims to be what an event loop would
 * be. Here is the event loop, written from docs/sim.md: it walks the plan itself, keeps one heap of
 * arrivals, and must find the same end of every transfer, to the femtosecond. Ranks start at random
 * times and SMs take time, so segments do not arrive together and the order among equals does not
 * matter. */
#include "sim_world.h"
#include "tests/plan/cases.h"

typedef int64_t fs_t;
enum { NS = 1000000, MOST_STAGES = 8, MOST_RANKS = 16 };
enum { SEND, FORWARD, OUT, IN, NIC_OUT, UP, DOWN, NIC_IN, RECEIVE, KINDS };

typedef struct segment {
  trefoil_transfer_t of;
  int64_t rows, order;                       /* order of issue at its source */
  int stages[MOST_STAGES], numStages, stage; /* resource = kind * MOST_RANKS + index */
  fs_t latency[MOST_STAGES], tail;
} segment_t;

typedef struct event {
  fs_t time;
  int64_t order;
  int segment;
} event_t;

typedef struct loop {
  const trefoil_shape_t *s;
  fs_t rowTime[KINDS], latency[3], start[MOST_RANKS], isFree[KINDS * MOST_RANKS];
  segment_t *segments;
  int numSegments, numEvents;
  event_t *heap;
  int isDispatch, hasLeaves;
} loop_t;

/* ---- A heap by time, then order ----------------------------------------------------------------- */

static int isBefore(const event_t *a, const event_t *b) {
  return a->time != b->time ? a->time < b->time : a->order < b->order;
}
static void push(loop_t *l, event_t e) {
  int i = l->numEvents++;
  for (; i > 0 && isBefore(&e, &l->heap[(i - 1) / 2]); i = (i - 1) / 2) {
    l->heap[i] = l->heap[(i - 1) / 2];
  }
  l->heap[i] = e;
}
static event_t pop(loop_t *l) {
  event_t top = l->heap[0], last = l->heap[--l->numEvents];
  int i = 0;
  for (int c = 1; c < l->numEvents; c = 2 * i + 1) {
    if (c + 1 < l->numEvents && isBefore(&l->heap[c + 1], &l->heap[c])) c++;
    if (!isBefore(&l->heap[c], &last)) break;
    l->heap[i] = l->heap[c];
    i = c;
  }
  l->heap[i] = last;
  return top;
}

/* ---- Segments and the resources they cross -------------------------------------------------------- */

static void cross(segment_t *p, int kind, int index, fs_t latency) {
  p->stages[p->numStages] = kind * MOST_RANKS + index;
  p->latency[p->numStages++] = latency;
}

static void layWay(const loop_t *l, segment_t *p) {
  const trefoil_transfer_t *x = &p->of;
  int isForwarded = x->phase == TREFOIL_PHASE_FORWARD, isBack = x->phase == TREFOIL_PHASE_NET_BACK;
  if (isForwarded) cross(p, FORWARD, x->src, 0);
  if (!isForwarded && !isBack) cross(p, SEND, x->src, 0);
  if (x->tier == TREFOIL_TIER_NVLINK) {
    cross(p, OUT, x->src, 0);
    cross(p, IN, x->dst, l->latency[1]);
  } else if (x->tier == TREFOIL_TIER_NET) {
    int from = x->src / l->s->ranksPerNode, to = x->dst / l->s->ranksPerNode;
    cross(p, NIC_OUT, x->src, 0);
    if (l->hasLeaves) cross(p, UP, from, 0);
    if (l->hasLeaves) cross(p, DOWN, to, 0);
    cross(p, NIC_IN, x->dst, l->latency[2]);
  }
  if (x->phase == TREFOIL_PHASE_RETURN) cross(p, FORWARD, x->dst, 0);
  if (x->phase != TREFOIL_PHASE_RETURN && x->phase != TREFOIL_PHASE_NET_OUT) {
    cross(p, RECEIVE, x->dst, 0);
  }
}

static void addSegment(loop_t *l, const trefoil_transfer_t *x, int64_t rows, int64_t first) {
  l->segments = realloc(l->segments, (size_t)(l->numSegments + 1) * sizeof *l->segments);
  segment_t *p = &l->segments[l->numSegments++];
  memset(p, 0, sizeof *p);
  p->of = *x;
  p->rows = rows;
  int R = l->s->numRanks, peer = l->isDispatch ? x->dst : x->origin;
  p->order = (first * 2 + (x->phase == TREFOIL_PHASE_DIRECT)) * R + (peer - x->src + R) % R;
  layWay(l, p);
}

/* LL: the rows of one token to one rank. HT: a transfer of the plan. */
static void addTransfer(loop_t *l, const trefoil_plan_t *plan, const trefoil_transfer_t *x,
                        int isHt) {
  if (isHt) {
    addSegment(l, x, x->rows, x->chunk);
    return;
  }
  trefoil_row_t rows[1024];
  trefoilPlanRows(plan, rows);
  for (int64_t i = 0; i < x->rows;) {
    int64_t n = 1;
    while (i + n < x->rows && rows[i + n].token == rows[i].token) n++;
    addSegment(l, x, n, rows[i].token);
    i += n;
  }
}

/* ---- Events ------------------------------------------------------------------------------------- */

/* What waits for a segment that is done starts at its tail, or when the last of its kind is done. */
static void release(loop_t *l, const segment_t *done) {
  int isOut = done->of.phase == TREFOIL_PHASE_NET_OUT;
  if (!isOut && done->of.phase != TREFOIL_PHASE_RETURN) return;
  fs_t latest = done->tail;
  for (int i = 0; i < l->numSegments && !isOut; i++) {
    const segment_t *p = &l->segments[i];
    if (p->of.phase != TREFOIL_PHASE_RETURN || p->of.origin != done->of.origin ||
        p->of.chunk != done->of.chunk || p->of.dst != done->of.dst) {
      continue;
    }
    if (p->stage < p->numStages) return;
    if (p->tail > latest) latest = p->tail;
  }
  for (int i = 0; i < l->numSegments; i++) {
    segment_t *p = &l->segments[i];
    int waits = p->of.phase == (isOut ? TREFOIL_PHASE_FORWARD : TREFOIL_PHASE_NET_BACK);
    if (!waits || p->of.origin != done->of.origin || p->of.chunk != done->of.chunk ||
        p->of.src != done->of.dst) {
      continue;
    }
    p->tail = latest;
    push(l, (event_t){latest, i, i});
  }
}

static void arrive(loop_t *l, const event_t *e) {
  segment_t *p = &l->segments[e->segment];
  int at = p->stages[p->stage], kind = at / MOST_RANKS;
  fs_t begin = e->time > l->isFree[at] ? e->time : l->isFree[at];
  int isSm = kind == FORWARD || kind == RECEIVE;
  if (isSm && begin < l->start[at % MOST_RANKS]) begin = l->start[at % MOST_RANKS];
  l->isFree[at] = begin + p->rows * l->rowTime[kind];
  fs_t tail = p->tail + p->latency[p->stage];
  p->tail = l->isFree[at] > tail ? l->isFree[at] : tail;
  if (++p->stage == p->numStages) {
    release(l, p);
  } else {
    push(l, (event_t){begin + p->latency[p->stage], e->order, e->segment});
  }
}

static void runLoop(loop_t *l) {
  l->heap = malloc((size_t)(l->numSegments + 1) * sizeof *l->heap);
  for (int i = 0; i < l->numSegments; i++) {
    segment_t *p = &l->segments[i];
    if (p->stages[0] / MOST_RANKS != SEND) continue;
    p->tail = l->start[p->of.src];
    push(l, (event_t){p->tail, p->order, i});
  }
  while (l->numEvents) {
    event_t e = pop(l);
    arrive(l, &e);
  }
}

/* ---- Against the engine ------------------------------------------------------------------------- */

static fs_t endOf(const loop_t *l, const trefoil_sim_span_t *s) {
  fs_t end = -1;
  for (int i = 0; i < l->numSegments; i++) {
    const segment_t *p = &l->segments[i];
    int same = p->of.phase == s->phase && p->of.chunk == s->chunk && p->of.origin == s->origin &&
               p->of.src == s->src && p->of.dst == s->dst;
    if (same && p->tail > end) end = p->tail;
  }
  return end;
}

static void setLoop(loop_t *l, world_t *w, uint64_t *state, trefoil_change_t *late) {
  l->s = &w->routing.shape;
  l->hasLeaves = w->cluster.leafOversubscription > 1;
  fs_t fixed = (w->workload.mode >= TREFOIL_HT_FLAT ? 10 : 3) * 1000ll * NS;
  for (int r = 0; r < l->s->numRanks; r++) {
    double us = (double)(nextRandom(state) >> 11) * 0x1p-53 * 3;
    late[r] = (trefoil_change_t){TREFOIL_CHANGE_START_US, r, us};
    l->start[r] = fixed + (fs_t)llround(us * 1e3 * NS);
  }
  l->latency[1] = 500 * NS;
  l->latency[2] = 5000ll * NS;
  fs_t sm = w->costs.numSms;
  int splits = w->workload.mode >= TREFOIL_HT_FLAT && l->s->numRanks > l->s->ranksPerNode;
  double forward = (double)sm * 0.5, own = splits ? forward : (double)sm;
  const trefoil_op_costs_t *c = &w->costs.op[!l->isDispatch];
  l->rowTime[SEND] = (fs_t)llround(c->sendRowNs / own * NS);
  l->rowTime[RECEIVE] = (fs_t)llround(c->receiveRowNs / own * NS);
  l->rowTime[FORWARD] =
      (fs_t)llround((l->isDispatch ? c->sendRowNs : c->receiveRowNs) / forward * NS);
  l->rowTime[OUT] = l->rowTime[IN] = 100 * NS;
  l->rowTime[NIC_OUT] = l->rowTime[NIC_IN] = 200 * NS;
  l->rowTime[UP] = l->rowTime[DOWN] = (fs_t)llround(10000.0 * 3 / (50.0 * l->s->ranksPerNode) * NS);
}

/* A random routing on nodes that are their own leaves, 3:1. */
static void initRandom(world_t *w, const random_case_t *c, uint64_t *state) {
  worldInit(w, 2, 2, (trefoil_mode_t)randomBelow(state, 4));
  w->cluster.gpusPerNode = 4;
  w->cluster.nodesPerLeaf = 1;
  w->cluster.leafOversubscription = randomBelow(state, 2) ? 3 : 1;
  w->routing = c->routing;
  w->workload.chunkTokens = 1 + (int)randomBelow(state, 8);
  w->costs.numSms = 2 + (int)randomBelow(state, 3);
  for (int op = 0; op < 2; op++) { /* SMs without a cost would let segments through together */
    w->costs.op[op].sendRowNs = 1 + (double)randomBelow(state, 900);
    w->costs.op[op].receiveRowNs = 1 + (double)randomBelow(state, 900);
  }
}

static void compareOp(world_t *w, int op, const trefoil_change_t *late, loop_t *l, uint64_t seed) {
  int isHt = w->workload.mode >= TREFOIL_HT_FLAT;
  trefoil_plan_config_t config = {.mode = w->workload.mode,
                                  .op = (trefoil_op_t)op,
                                  .chunkTokens = isHt ? w->workload.chunkTokens : 0,
                                  .rowBytes = WORLD_ROW_BYTES};
  trefoil_plan_t *plan = NULL;
  trefoil_transfer_t x;
  REQUIRE(trefoilPlanCreate(&plan, &w->routing, &config) == TREFOIL_OK, "%s", trefoilLastError());
  while (trefoilPlanNext(plan, &x)) addTransfer(l, plan, &x, isHt);
  trefoilPlanDestroy(plan);
  runLoop(l);
  w->run.changes = late;
  w->run.numChanges = w->routing.shape.numRanks;
  w->run.maxSpans = 1 << 20;
  trefoil_sim_result_t r;
  trefoil_sim_t *sim = worldRun(w, TREFOIL_ENGINE_QUEUES, &r);
  REQUIRE(sim, "%s", trefoilLastError());
  fs_t zero = INT64_MAX, fixed = (isHt ? 10 : 3) * 1000ll * NS;
  for (int k = 0; k < w->routing.shape.numRanks; k++) {
    if (l->start[k] - fixed < zero) zero = l->start[k] - fixed;
  }
  for (int64_t i = 0; i < r.op[op].numSpans; i++) {
    const trefoil_sim_span_t *s = &r.op[op].spans[i];
    double end = (double)(endOf(l, s) - zero) / 1e9;
    CHECK(s->endUs == end, "seed %llu mode %d op %d: phase %d %d -> %d chunk %d: %.10g, loop %.10g",
          (unsigned long long)seed, (int)w->workload.mode, op, s->phase, s->src, s->dst, s->chunk,
          s->endUs, end);
  }
  trefoilSimDestroy(sim);
}

TEST(as_an_event_loop) {
  for (uint64_t seed = 1; seed <= 300; seed++) {
    uint64_t state = seed * 31;
    random_case_t c;
    world_t w;
    trefoil_change_t late[MOST_RANKS];
    randomCase(&c, &state);
    initRandom(&w, &c, &state);
    w.workload.routing = &w.routing;
    for (int op = 0; op < 2; op++) {
      loop_t l = {.isDispatch = op == TREFOIL_OP_DISPATCH};
      setLoop(&l, &w, &state, late);
      compareOp(&w, op, late, &l, seed);
      free(l.segments);
      free(l.heap);
    }
    freeCase(&c);
  }
}

TEST_MAIN()
