/* The engines: each replays one operation on one fabric. */
#ifndef TREFOIL_SIM_ENGINE_H
#define TREFOIL_SIM_ENGINE_H

#include "sim/fabric.h"

/* When a move's first row was issued, its last byte left the sender, its last row was taken. */
typedef struct ep_move_times {
  ep_fs_t start, sent, end;
} ep_move_times_t;

typedef struct ep_timing {
  ep_fs_t *finish;        /* [R] a rank's last row taken, or forwarded */
  ep_move_times_t *moves; /* [numTimes] of the first moves, or NULL; start is INT64_MAX */
  int64_t numTimes;
} ep_timing_t;

/* Port queues of our own. finish is zeroed by the caller. */
trefoil_result_t epQueuesRun(const ep_replay_t *replay, const ep_fabric_t *fabric,
                             ep_timing_t *timing);

/* SimGrid, in a child process; start and sent of a move are when its flow began and ended. */
trefoil_result_t epSimGridRun(const ep_replay_t *replay, const ep_fabric_t *fabric,
                              const trefoil_shape_t *shape, double timeoutS, ep_timing_t *timing);

/* The same flows, shared by our own solver in this process; a move's times mean the same. numUnlike: those
 * that are left where flows over the same resources are one. */
trefoil_result_t epFairRun(const ep_replay_t *replay, const ep_fabric_t *fabric, double timeoutS,
                           ep_timing_t *timing, int64_t *numFlows, int64_t *numUnlike);

/* Every rank waits for word from every other that nothing more will come, and for its own SMs. */
trefoil_result_t epFinishFlags(const ep_replay_t *replay, const ep_fabric_t *fabric,
                               const trefoil_shape_t *shape, ep_fs_t *finish);

#endif
