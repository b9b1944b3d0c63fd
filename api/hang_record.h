/* The progress record: what a rank was doing, readable after the fact.
 *
 * With NCCL_EP_HANG_DIR set, every group keeps one small mapped file a rank,
 *     <dir>/nccl_ep.<host>.<pid>.<number>.<rank>.hang      (number: of the file, in its process)
 * and its operations keep it current: a file stays readable when its process is killed. A file of a
 * group that was destroyed in good order is removed. `trefoil doctor --hang FILES` merges them.
 *
 * On GPUs the waits are in kernels, which write their part (ep_hang_device_t) themselves: the file's page is
 * mapped to the device where the file system allows that (tmpfs: /dev/shm, /tmp of most containers), so it is
 * true whenever the process ends; elsewhere a thread copies it every 20 ms. epHangMerge makes `kinds` of it.
 *
 * Native byte order, written in place by one process without a lock: `sequence` of a kind is odd
 * while its fields change. Times are CLOCK_REALTIME nanoseconds. */
#ifndef TREFOIL_API_HANG_RECORD_H
#define TREFOIL_API_HANG_RECORD_H

#include <stdint.h>
#include <stdio.h>

#include "kernels/ht/ht.h"
#include "kernels/ll/relay.h"

#define EP_HANG_MAGIC   0x474E4148464F5254ull /* "TROFHANG" */
#define EP_HANG_VERSION 4u
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

typedef struct ep_hang_device {
  int32_t used;          /* 0: a group of the CPU library */
  int32_t masks;         /* enable_mask */
  int32_t rails, unused; /* dispatch goes by rails */
  int64_t clockOffsetNs; /* CLOCK_REALTIME minus the device clock */
  uint64_t finished[3];  /* dispatches, combines, Updates that this rank has finished */
  ep_wait_record_t wait; /* the last long wait */
} ep_hang_device_t;

typedef struct ep_hang_record {
  uint64_t magic;
  uint32_t version, bytes; /* bytes = sizeof(ep_hang_record_t) */
  int32_t rank, numRanks, ranksPerNode;
  int32_t pid;
  uint64_t groupId;   /* the same on all ranks of a communicator */
  uint32_t groupNo;   /* the same on all ranks, another for each group of the communicator */
  uint32_t algorithm; /* 0 low latency, 1 high throughput */
  uint64_t startNs, timeoutNs;
  uint32_t failed; /* 1: the group gave up */
  int32_t culprit; /* on this rank; -1: none */
  char host[64];
  ep_hang_kind_t kinds[EP_HANG_KINDS]; /* update, dispatch, combine */
  ep_hang_device_t device;
} ep_hang_record_t;

static inline const char *epHangPhase(uint32_t phase) {
  switch (phase) {
  case EP_WAIT_ANNOUNCE:
    return "sign that it is there";
  case EP_WAIT_ROUTING:
    return "routing";
  case EP_WAIT_ROWS:
    return "rows";
  case EP_WAIT_WEIGHTS:
    return "weights";
  case EP_WAIT_BUFFER:
    return "receive of the last operation but one";
  case EP_WAIT_READ:
    return "word that it has read its rows";
  case EP_WAIT_CREDIT:
    return "room in its FIFO";
  case EP_WAIT_BLOCKS:
    return "own other blocks, which do not run";
  case EP_WAIT_POST:
    return "network to take puts to it";
  case EP_WAIT_MEANS:
    return "means";
  case EP_WAIT_PARAMS:
    return "parameters";
  default:
    return "answer";
  }
}

/* Whether `received` of a wait says what lay there: low latency's waits for rows poll many packets and
 * leave it 0. */
static inline int epHangHasReceived(uint32_t kind, uint32_t phase) {
  return phase != EP_WAIT_ROWS || kind > EP_LL_COMBINE;
}

/* Index in `kinds` of a kind of the kernels. */
static inline unsigned epHangKindOf(uint32_t kind) {
  if (kind == EP_HT_KIND_UPDATE) return 0;
  return kind == EP_LL_DISPATCH || kind == EP_HT_KIND_DISPATCH ? 1 : 2;
}

/* By rails: the rank through which comes what this one waits for in an operation of `kinds`; -1: it comes
 * straight, or it is not known to wait. */
static inline int32_t epHangVia(const ep_hang_record_t *r, unsigned kind) {
  const ep_hang_device_t *d = &r->device;
  int32_t perNode = r->ranksPerNode, peer = r->kinds[kind].peer;
  if (!d->used || !d->rails || !d->wait.state || d->wait.kind != EP_LL_DISPATCH) return -1;
  if (epHangKindOf(EP_LL_DISPATCH) != kind || peer < 0) return -1;
  return perNode < 1 || r->numRanks % perNode ? -1 : epLlRailVia(perNode, r->rank, peer);
}

/* A reader's: turns what kernels wrote into what the rest of the record says. */
static inline void epHangMerge(ep_hang_record_t *r) {
  const ep_hang_device_t *d = &r->device;
  if (!d->used) return;
  for (unsigned k = 0; k < EP_HANG_KINDS; k++) {
    ep_hang_kind_t *kind = &r->kinds[k];
    uint64_t finished = d->finished[k == 0 ? 2 : k - 1];
    int own = d->wait.state && epHangKindOf(d->wait.kind) == k;
    int stays = own && d->wait.state == 2 && !d->masks; /* it gave up: so it stays */
    kind->state = EP_HANG_IDLE;
    kind->number = finished;
    kind->peer = -1;
    if (!stays && !(own && d->wait.operation > finished)) continue;
    kind->state = EP_HANG_WAITING;
    kind->number = d->wait.operation;
    kind->sinceNs = d->wait.sinceNs + (uint64_t)d->clockOffsetNs;
    kind->peer = d->wait.rank >= 0 && d->wait.rank < r->numRanks ? d->wait.rank : -1;
    snprintf(kind->what, sizeof kind->what, "%s", epHangPhase(d->wait.phase));
  }
  if (!d->wait.failed) return;
  r->failed = !d->masks;
  r->culprit = d->wait.rank >= 0 && d->wait.rank < r->numRanks ? d->wait.rank : -1;
}

#endif
