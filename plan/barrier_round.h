/* Barrier rounds: ranks agree on the host, with a time limit. Each shows a record and reads all records. A
 * round is completed by all ranks or by none; one that fails leaves nothing behind and may be tried again.
 *
 * Shared state and an entry per rank lie in memory that all ranks map; zeros at first. Where it comes from,
 * how a rank's process is watched and what the records mean is the caller's. */
#ifndef TREFOIL_PLAN_BARRIER_ROUND_H
#define TREFOIL_PLAN_BARRIER_ROUND_H

#include <stddef.h>

#include "plan/doorbell.h"

enum {
  EP_ROUND_BYTES = 256,
  EP_FAILURE_NOTICE_WORDS = 48
}; /* of a record; of a notice, 8 bytes each */

typedef struct ep_round_shared {
  _Atomic uint64_t word;
  ep_doorbell_t doorbell;
} ep_round_shared_t;

typedef struct ep_round_entry {
  _Atomic uint32_t arrivedIn;                       /* the last attempt it came to */
  _Atomic uint64_t failedCall;                      /* 0, or which of its calls failed */
  _Atomic uint64_t notice[EP_FAILURE_NOTICE_WORDS]; /* and why */
  _Alignas(16) char records[2][EP_ROUND_BYTES];     /* by parity of the rounds completed */
} ep_round_entry_t;

/* One rank's view. */
typedef struct ep_round {
  ep_round_shared_t *shared;
  void *entries; /* rank 0's; the next ones at a distance of stride bytes */
  size_t stride;
  int rank, numRanks;
  void *owner;
  int (*isGone)(void *owner, int rank); /* it cannot come any more */
  int (*isAborted)(void *owner);        /* this rank shall not wait any more; may be NULL */
  uint32_t numCalls, callsSince;        /* collective calls since that many barrier rounds */
} ep_round_t;

typedef enum {
  EP_ROUND_COMPLETE,
  EP_ROUND_GONE,           /* rank is gone; isGone was asked for it last */
  EP_ROUND_FAILED,         /* rank's call failed: code, text */
  EP_ROUND_LATE,           /* the ranks in text did not come in time */
  EP_ROUND_LATE_ELSEWHERE, /* rank did not come within another rank's limit */
  EP_ROUND_LEFT,           /* another rank has stopped waiting */
  EP_ROUND_ABORTED
} ep_round_end_t;

typedef struct ep_round_outcome {
  ep_round_end_t end;
  int rank, code;
  char text[8 * (EP_FAILURE_NOTICE_WORDS - 1)];
} ep_round_outcome_t;

/* Shows `bytes` (at most EP_ROUND_BYTES) at `mine`; if the barrier round is completed, all ranks' are in
 * `all`. */
void epRoundJoin(ep_round_t *m, const void *mine, size_t bytes, void *all, uint64_t timeoutNs,
                 ep_round_outcome_t *out);

/* Around a collective call that may meet: it begins; it has failed on this rank, so that ranks that meet in
 * the call of the same number (since the last completed round) wait for this one no more than a second. */
void epRoundCallBegin(ep_round_t *m);
void epRoundCallFail(ep_round_t *m, int code, const char *why);

#endif
