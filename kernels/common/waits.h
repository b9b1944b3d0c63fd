/* What a wait on the device is for, and the record that names the rank waited for: of low latency and high
 * throughput. C and C++. */
#ifndef TREFOIL_KERNELS_COMMON_WAITS_H
#define TREFOIL_KERNELS_COMMON_WAITS_H

#include <stdint.h>

typedef enum ep_ll_kind { EP_LL_DISPATCH = 0, EP_LL_COMBINE = 1 } ep_ll_kind_t;
/* Kinds of operation in the record (ep_wait_record_t.kind), after those of low latency. */
#define EP_HT_KIND_DISPATCH 2u
#define EP_HT_KIND_COMBINE  3u
#define EP_HT_KIND_UPDATE   4u

/* What a wait is waiting for. */
typedef enum ep_wait_phase {
  EP_WAIT_NONE = 0,
  EP_WAIT_ANNOUNCE = 1, /* what every rank announces to every rank in every operation */
  EP_WAIT_ROUTING = 2,  /* which experts a token uses */
  EP_WAIT_ROWS = 3,     /* a token's row */
  EP_WAIT_WEIGHTS = 4,  /* partial sums: a token's weights */
  EP_WAIT_BUFFER = 5,   /* LL: the peer has not finished the operation before the last one */
  EP_WAIT_READ = 6,     /* HT: the peer has not read its rows out of this rank's window */
  EP_WAIT_CREDIT = 7,   /* HT: the peer has not taken chunks out of the FIFO that this rank fills */
  EP_WAIT_BLOCKS = 8, /* HT Update: blocks of this rank's own launch do not run at the same time */
  EP_WAIT_POST = 9,   /* across domains: the network takes no more puts to the peer */
  EP_WAIT_MEANS = 10, /* A2SGD: a group's two means */
  EP_WAIT_PARAMS = 11 /* A2SGD: parameters, or a slice of their mean */
} ep_wait_phase_t;

/* Which rank keeps this rank waiting. One a rank, in host memory mapped to the device; written only
 * by a wait that has lasted a millisecond, or that gave up. */
typedef struct ep_wait_record {
  uint32_t state;          /* 0 never waited long, 1 waiting (or waited, at nowNs), 2 gave up */
  uint32_t kind;           /* ep_ll_kind_t, EP_HT_KIND_* */
  uint32_t phase;          /* ep_wait_phase_t */
  int32_t rank;            /* the rank waited for */
  uint64_t operation;      /* number of this rank's operation of that kind, from 1 */
  uint32_t expected;       /* flag of this operation */
  uint32_t received;       /* flag found: an earlier one, 0 = nothing yet (ROWS: unknown, 0) */
  int64_t item;            /* token or step waited for, -1 = none */
  uint64_t sinceNs, nowNs; /* device clock */
  uint32_t failed;         /* async error: 1 once a wait gave up */
  uint32_t numGaveUp;
} ep_wait_record_t;

#endif
