/* The engine of port queues.
 *
 * Every resource serves what comes to it first come, first served; equal times in an order that is
 * the same from every rank's point of view. A segment's head goes on as soon as its service begins and
 * its tail follows, so a segment occupies several resources at the same time (cut-through):
 *
 *   begin = max(head + latency, when the resource is free)      free = begin + rows * time of a row
 *   head' = begin                                               tail' = max(free, tail + latency)
 *
 * Buffers in the fabric do not fill up, so nothing ever pushes back, and the kinds of resources can be
 * put in an order in which each is fed by earlier ones only:
 *
 *   dispatch  send, nic-out, leaf-up, leaf-down, nic-in, forward, nvlink-out, nvlink-in, receive
 *   combine   send, nvlink-out, nvlink-in, forward, nic-out, leaf-up, leaf-down, nic-in, receive
 *
 * That is why there is no event loop: kind by kind, the arrivals at each resource are sorted and
 * served in one go, with the same result as an event loop would have. FORWARD waits for the tail of
 * its chunk's NET_OUT, NET_BACK for the tails of all RETURNs that are summed into it. */
#include <stdlib.h>

#include "plan/error.h"
#include "sim/engine.h"
#include "sim/key_sort.h"

typedef struct crossing {
  int32_t id, at; /* segment, resource */
} crossing_t;

typedef struct queues {
  const ep_replay_t *replay;
  const ep_fabric_t *fabric;
  ep_timing_t *timing;
  ep_fs_t *head, *tail;        /* [segments] */
  int64_t *first;              /* [most of a kind + 1] */
  crossing_t *crossing;        /* [segments] */
  int32_t *ids;                /* [segments] grouped by resource */
  ep_keyed_t *keyed, *scratch; /* of one resource */
  int64_t roomKeyed;
  ep_fs_t *came; /* [moves] when the last row was there; where a segment is a move, its tail */
} queues_t;

static const trefoil_resource_t orders[2][TREFOIL_NUM_RESOURCES - 1] = {
    {TREFOIL_RESOURCE_NIC_OUT, TREFOIL_RESOURCE_LEAF_UP, TREFOIL_RESOURCE_LEAF_DOWN,
     TREFOIL_RESOURCE_NIC_IN, TREFOIL_RESOURCE_FORWARD, TREFOIL_RESOURCE_NVLINK_OUT,
     TREFOIL_RESOURCE_NVLINK_IN, TREFOIL_RESOURCE_RECEIVE},
    {TREFOIL_RESOURCE_NVLINK_OUT, TREFOIL_RESOURCE_NVLINK_IN, TREFOIL_RESOURCE_FORWARD,
     TREFOIL_RESOURCE_NIC_OUT, TREFOIL_RESOURCE_LEAF_UP, TREFOIL_RESOURCE_LEAF_DOWN,
     TREFOIL_RESOURCE_NIC_IN, TREFOIL_RESOURCE_RECEIVE}};

static ep_fs_t later(ep_fs_t a, ep_fs_t b) {
  return a > b ? a : b;
}

/* ---- The first kind: SMs that send, in the order of issue --------------------------------------- */

static void issue(queues_t *q) {
  const ep_replay_t *r = q->replay;
  for (int rank = 0; rank < q->fabric->numRanks; rank++) {
    ep_fs_t now = q->fabric->start[rank], row = q->fabric->row[TREFOIL_RESOURCE_SEND][rank];
    for (int64_t i = r->firstOf[rank]; i < r->firstOf[rank + 1]; i++) {
      int32_t id = r->issued[i];
      if (q->fabric->ownRowsStay && epIsOwn(epMoveOf(r, id))) {
        q->head[id] = q->tail[id] = q->fabric->start[rank];
        continue;
      }
      q->head[id] = now;
      now += epRowsOf(r, id) * row;
      q->tail[id] = now;
    }
  }
}

/* ---- The others: gather, sort, serve ------------------------------------------------------------ */

/* Groups the segments that cross a kind, each group in the order of r->issued. */
static void gather(queues_t *q, trefoil_resource_t kind) {
  const ep_replay_t *r = q->replay;
  int n = q->fabric->count[kind];
  int64_t numCrossing = 0;
  for (int i = 0; i <= n; i++) q->first[i] = 0;
  for (int64_t i = 0; i < r->numSegments; i++) {
    int32_t id = r->issued[i];
    int at = epResourceOf(q->fabric, epMoveOf(r, id), kind);
    if (at < 0) continue;
    q->first[at + 1]++;
    q->crossing[numCrossing++] = (crossing_t){id, at};
  }
  for (int i = 0; i < n; i++) q->first[i + 1] += q->first[i];
  for (int64_t i = 0; i < numCrossing; i++) {
    q->ids[q->first[q->crossing[i].at]++] = q->crossing[i].id;
  }
  for (int i = n; i > 0; i--) q->first[i] = q->first[i - 1];
  q->first[0] = 0;
}

static trefoil_result_t makeRoom(queues_t *q, int64_t n) {
  if (n <= q->roomKeyed) return TREFOIL_OK;
  free(q->keyed);
  q->roomKeyed = 0;
  q->keyed = malloc(2 * (size_t)n * sizeof *q->keyed);
  EP_CHECK(q->keyed, TREFOIL_SYSTEM_ERROR, "out of memory for a queue of %lld", (long long)n);
  q->scratch = q->keyed + n;
  q->roomKeyed = n;
  return TREFOIL_OK;
}

static int isInward(trefoil_resource_t kind) {
  return kind == TREFOIL_RESOURCE_NVLINK_IN || kind == TREFOIL_RESOURCE_NIC_IN ||
         kind == TREFOIL_RESOURCE_RECEIVE;
}

static ep_fs_t latencyOf(const ep_fabric_t *f, trefoil_resource_t kind) {
  if (kind == TREFOIL_RESOURCE_NVLINK_IN) return f->latency[TREFOIL_TIER_NVLINK];
  return kind == TREFOIL_RESOURCE_NIC_IN ? f->latency[TREFOIL_TIER_NET] : 0;
}

/* Arrivals in the order of service. Equal times: the source next round the ring comes first. */
static void sortArrivals(queues_t *q, trefoil_resource_t kind, const int32_t *ids, int64_t n) {
  int64_t turn = 0;
  if (isInward(kind)) {
    while (turn < n && epMoveOf(q->replay, ids[turn])->src < epMoveOf(q->replay, ids[turn])->dst &&
           epCrossesSend(epMoveOf(q->replay, ids[turn]))) {
      turn++;
    }
  }
  for (int64_t i = 0; i < n; i++) {
    int32_t id = ids[i + turn < n ? i + turn : i + turn - n];
    q->keyed[i] = (ep_keyed_t){(uint64_t)q->head[id], id};
  }
  epSortKeyed(q->keyed, q->scratch, (size_t)n);
}

static void serve(queues_t *q, trefoil_resource_t kind, int at, int64_t n) {
  const ep_fabric_t *f = q->fabric;
  ep_fs_t row = f->row[kind][at], latency = latencyOf(f, kind), isFree = 0;
  if (kind == TREFOIL_RESOURCE_FORWARD || kind == TREFOIL_RESOURCE_RECEIVE) isFree = f->start[at];
  for (int64_t i = 0; i < n; i++) {
    int32_t id = q->keyed[i].id;
    q->head[id] = later(q->head[id] + latency, isFree);
    isFree = epServed(f, kind, at, q->head[id], epRowsOf(q->replay, id) * row);
    q->tail[id] = later(isFree, q->tail[id] + latency);
    if (kind == TREFOIL_RESOURCE_RECEIVE || kind == TREFOIL_RESOURCE_FORWARD) {
      q->timing->finish[at] = later(q->timing->finish[at], q->tail[id]);
    }
  }
}

/* A kind that takes no time: nothing queues there, but SMs do not begin before their rank. */
static void pass(queues_t *q, trefoil_resource_t kind) {
  const ep_replay_t *r = q->replay;
  int isSm = kind == TREFOIL_RESOURCE_FORWARD || kind == TREFOIL_RESOURCE_RECEIVE;
  ep_fs_t latency = latencyOf(q->fabric, kind);
  for (int64_t i = 0; i < r->numSegments; i++) {
    int at = epResourceOf(q->fabric, epMoveOf(r, i), kind);
    if (at < 0) continue;
    q->head[i] = later(q->head[i] + latency, isSm ? q->fabric->start[at] : 0);
    q->tail[i] = later(q->head[i], q->tail[i] + latency);
    if (isSm) q->timing->finish[at] = later(q->timing->finish[at], q->tail[i]);
  }
}

static trefoil_result_t sweep(queues_t *q, trefoil_resource_t kind) {
  const ep_fabric_t *f = q->fabric;
  int at = 0;
  while (at < f->count[kind] && f->row[kind][at] == 0) at++;
  if (at == f->count[kind]) {
    if (at > 0) pass(q, kind);
    return TREFOIL_OK;
  }
  gather(q, kind);
  for (at = 0; at < f->count[kind]; at++) {
    int64_t n = q->first[at + 1] - q->first[at];
    if (n == 0) continue;
    EP_TRY(makeRoom(q, n));
    sortArrivals(q, kind, q->ids + q->first[at], n);
    serve(q, kind, at, n);
  }
  return TREFOIL_OK;
}

/* ---- What waits --------------------------------------------------------------------------------- */

/* Dispatch: a chunk is forwarded when all its rows have come. */
static void releaseForwards(queues_t *q) {
  const ep_replay_t *r = q->replay;
  for (int64_t i = 0; i < r->numSegments && r->segments; i++) {
    ep_fs_t *came = &q->came[r->segments[i].move];
    *came = later(*came, q->tail[i]);
  }
  for (int64_t i = 0; i < r->numSegments; i++) {
    const ep_move_t *m = epMoveOf(r, i);
    if (m->phase != TREFOIL_PHASE_FORWARD) continue;
    q->head[i] = q->tail[i] = q->came[r->partner[m - r->moves]];
  }
}

/* Combine: a chunk's partial sums go back when all its rows are summed. */
static void releaseReturns(queues_t *q) {
  const ep_replay_t *r = q->replay;
  for (int64_t i = 0; i < r->numMoves; i++) {
    if (r->moves[i].phase != TREFOIL_PHASE_RETURN || r->partner[i] < 0) continue;
    int32_t back = r->partner[i];
    q->head[back] = q->tail[back] = later(q->tail[back], q->tail[i]);
  }
}

/* ---- Timeline ----------------------------------------------------------------------------------- */

static ep_move_times_t *timesOf(const queues_t *q, int64_t segment) {
  int64_t at = epMoveOf(q->replay, segment) - q->replay->moves;
  return q->timing->moves && at < q->timing->numTimes ? &q->timing->moves[at] : NULL;
}

/* Issued: by the SMs that send, or (the waiting ones) by those that forward. */
static void markIssued(queues_t *q, int waiting) {
  for (int64_t i = 0; i < q->replay->numSegments && q->timing->moves; i++) {
    ep_move_times_t *t = timesOf(q, i);
    if (!t || epCrossesSend(epMoveOf(q->replay, i)) == waiting) continue;
    if (q->head[i] < t->start) t->start = q->head[i];
    t->sent = later(t->sent, q->tail[i]);
  }
}

static void markSent(queues_t *q, trefoil_resource_t port) {
  for (int64_t i = 0; i < q->replay->numSegments && q->timing->moves; i++) {
    ep_move_times_t *t = timesOf(q, i);
    if (!t || epResourceOf(q->fabric, epMoveOf(q->replay, i), port) < 0) continue;
    t->sent = later(t->sent, q->tail[i]);
  }
}

static void markEnd(queues_t *q) {
  for (int64_t i = 0; i < q->replay->numSegments && q->timing->moves; i++) {
    ep_move_times_t *t = timesOf(q, i);
    if (t) t->end = later(t->end, q->tail[i]);
  }
}

/* ---- Together ----------------------------------------------------------------------------------- */

static trefoil_result_t runAll(queues_t *q) {
  const ep_replay_t *r = q->replay;
  issue(q);
  markIssued(q, 0);
  for (int i = 0; i < TREFOIL_NUM_RESOURCES - 1; i++) {
    trefoil_resource_t kind = orders[r->op][i];
    if (kind == TREFOIL_RESOURCE_FORWARD && !r->hasNetPhases) continue;
    int isDispatch = r->op == TREFOIL_OP_DISPATCH;
    if (kind == TREFOIL_RESOURCE_FORWARD && isDispatch) releaseForwards(q);
    EP_TRY(sweep(q, kind));
    if (kind == TREFOIL_RESOURCE_FORWARD && !isDispatch) releaseReturns(q);
    if (kind == TREFOIL_RESOURCE_FORWARD) markIssued(q, 1);
    if (kind == TREFOIL_RESOURCE_NVLINK_OUT || kind == TREFOIL_RESOURCE_NIC_OUT) markSent(q, kind);
  }
  markEnd(q);
  return TREFOIL_OK;
}

trefoil_result_t epQueuesRun(const ep_replay_t *replay, const ep_fabric_t *fabric,
                             ep_timing_t *timing) {
  size_t n = (size_t)replay->numSegments + 1, most = 1;
  for (int k = 0; k < TREFOIL_NUM_RESOURCES; k++) {
    if ((size_t)fabric->count[k] > most) most = (size_t)fabric->count[k];
  }
  queues_t q = {.replay = replay, .fabric = fabric, .timing = timing};
  q.head = calloc(2 * n, sizeof *q.head);
  q.tail = q.head + n;
  q.first = calloc(most + 1, sizeof *q.first);
  q.ids = malloc(n * sizeof *q.ids);
  q.crossing = malloc(n * sizeof *q.crossing);
  q.came = replay->segments ? calloc((size_t)replay->numMoves + 1, sizeof *q.came) : q.tail;
  trefoil_result_t result = TREFOIL_SYSTEM_ERROR;
  if (q.head && q.first && q.ids && q.crossing && q.came) {
    result = runAll(&q);
  } else {
    epFail(result, "out of memory for %zu transfers", n);
  }
  if (replay->segments) free(q.came);
  free(q.head);
  free(q.first);
  free(q.ids);
  free(q.crossing);
  free(q.keyed);
  return result;
}
