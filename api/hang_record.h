/* The progress record: what a rank was doing, readable after the fact.
 *
 * With NCCL_EP_HANG_DIR set, every group keeps one small mapped file a rank,
 *     <dir>/nccl_ep.<host>.<pid>.<group>.<rank>.hang      (group: counted per process and rank)
 * and its operations keep it current: a file stays readable when its process is killed. A file of a
 * group that was destroyed in good order is removed. `trefoil doctor --hang FILES` merges them.
 *
 * Native byte order, written in place by one process without a lock: `sequence` of a kind is odd
 * while its fields change. Times are CLOCK_REALTIME nanoseconds. */
#ifndef TREFOIL_API_HANG_RECORD_H
#define TREFOIL_API_HANG_RECORD_H

#include <stdint.h>

#define EP_HANG_MAGIC   0x474E4148464F5254ull /* "TROFHANG" */
#define EP_HANG_VERSION 1u
#define EP_HANG_KINDS   3

typedef enum ep_hang_state {
  EP_HANG_IDLE = 0,    /* operation `number` is done (0: none ran yet) */
  EP_HANG_RUNNING = 1, /* operation `number` runs */
  EP_HANG_WAITING = 2  /* it waits for `peer`'s `what` since sinceNs */
} ep_hang_state_t;

typedef struct ep_hang_kind {
  uint32_t sequence;
  uint32_t state;   /* ep_hang_state_t */
  uint64_t number;  /* of the operation, counted from 1 per kind and layout */
  uint64_t sinceNs; /* of the state */
  int32_t peer;     /* rank waited for; -1: none in particular */
  int32_t layout;   /* 0 expert-major, 1 rank-major or flat */
  char what[40];    /* "rows", "routing", ... */
} ep_hang_kind_t;

typedef struct ep_hang_record {
  uint64_t magic;
  uint32_t version, bytes; /* bytes = sizeof(ep_hang_record_t) */
  int32_t rank, numRanks, ranksPerNode;
  int32_t pid;
  uint64_t groupId;   /* the same on all ranks of a communicator */
  uint32_t groupNo;   /* groups made on this rank before, in this process */
  uint32_t algorithm; /* 0 low latency, 1 high throughput */
  uint64_t startNs, timeoutNs;
  uint32_t failed; /* 1: the group gave up */
  int32_t culprit; /* on this rank; -1: none */
  char host[64];
  ep_hang_kind_t kinds[EP_HANG_KINDS]; /* update, dispatch, combine */
} ep_hang_record_t;

#endif
