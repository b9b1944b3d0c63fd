/* What the engines replay: the transfers of a plan, and the fabric they cross. */
#ifndef TREFOIL_SIM_REPLAY_H
#define TREFOIL_SIM_REPLAY_H

#include "trefoil/sim.h"

/* Times are whole femtoseconds: sums of them do not depend on their order, and 2^63 are 2.5 hours. */
typedef int64_t ep_fs_t;
#define EP_FS_PER_US  1e9
#define EP_FS_PER_NS  1e6
#define EP_LONGEST_FS 0x1p60 /* 19 minutes: no operation may take longer */

/* ---- Transfers: of one operation, in the plan's order ------------------------------------------ */

typedef struct ep_move {
  int32_t origin, src, dst;
  int32_t rows;
  int32_t chunk;
  uint8_t phase, tier;
} ep_move_t;

/* A segment of a transfer that goes through the queues as one: rows of the same few tokens. In HT a
 * segment is a transfer. By rails LL's NET_OUT is one message: its rows are forwarded when all are there. */
typedef struct ep_segment {
  int32_t move;
  int32_t rows;
} ep_segment_t;

typedef struct ep_replay {
  trefoil_op_t op;
  size_t rowBytes;
  int chunkTokens;
  int ht, hasNetPhases; /* the mode; rows go by rails, and there is more than one node */
  int64_t numMoves, maxMoves;
  ep_move_t *moves;
  int64_t numSegments, maxSegments;
  ep_segment_t *segments; /* NULL: segment i is move i */
  /* By rails: the NET_OUT that a FORWARD waits for, or the NET_BACK that a RETURN is summed into; -1.
   * NULL where no move waits. */
  int32_t *partner;
  /* Segments that SEND issues, by source, in the order of their issue: issued[firstOf[r]] on; after
   * firstOf[R] all others. */
  int32_t *issued;
  int64_t *firstOf;   /* [R + 1] */
  int64_t *sentRows;  /* [R] rows that a rank's SEND issues */
  int64_t *takenRows; /* [R] rows that a rank's RECEIVE takes */
  int64_t *ownRows;   /* [R] rows of sentRows that stay on the rank */
  int64_t *nearOut;   /* [R] rows that leave by NVLink */
  int64_t *nearIn;    /* [R] rows that come by NVLink */
  int64_t *slots;     /* [R] places of rows in the layout of a rank */
} ep_replay_t;

struct trefoil_sim {
  trefoil_shape_t shape;
  trefoil_sim_workload_t workload;
  int64_t *numTokens; /* [R] */
  ep_replay_t replay[2];
  trefoil_sim_result_t last; /* owns the arrays of the last run */
};

/* A segment as it goes from queue to queue. */
static inline const ep_move_t *epMoveOf(const ep_replay_t *r, int64_t segment) {
  return &r->moves[r->segments ? r->segments[segment].move : segment];
}
static inline int64_t epRowsOf(const ep_replay_t *r, int64_t segment) {
  return r->segments ? r->segments[segment].rows : r->moves[segment].rows;
}

/* Frees the arrays of an operation's result. */
void epSimForget(trefoil_sim_op_t *op);

/* Reads the plan of one operation. chunkTokens: HT, > 0. */
trefoil_result_t epReplayBuild(ep_replay_t *replay, const trefoil_sim_workload_t *workload,
                               trefoil_op_t op, int chunkTokens);
void epReplayFree(ep_replay_t *replay);
/* Fills issued and firstOf (zeroed). blocks: LL, the number of each segment's tokens. */
trefoil_result_t epReplayOrder(ep_replay_t *replay, const trefoil_shape_t *shape,
                               const int64_t *blocks);

/* Which resources a move crosses. */
static inline int epCrossesSend(const ep_move_t *m) {
  return m->phase == TREFOIL_PHASE_DIRECT || m->phase == TREFOIL_PHASE_NET_OUT ||
         m->phase == TREFOIL_PHASE_RETURN;
}
/* FORWARD issues there, RETURN is summed there. */
static inline int epIsOwn(const ep_move_t *m) {
  return m->phase == TREFOIL_PHASE_DIRECT && m->tier == TREFOIL_TIER_SELF;
}
static inline int epCrossesForward(const ep_move_t *m) {
  return m->phase == TREFOIL_PHASE_FORWARD || m->phase == TREFOIL_PHASE_RETURN;
}
static inline int epForwarder(const ep_move_t *m) {
  return m->phase == TREFOIL_PHASE_FORWARD ? m->src : m->dst;
}
/* The others end at a forwarder. */
static inline int epCrossesReceive(const ep_move_t *m) {
  return m->phase != TREFOIL_PHASE_NET_OUT && m->phase != TREFOIL_PHASE_RETURN;
}

#endif
