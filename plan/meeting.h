/* Meetings: ranks agree on the host, with a time limit. Each shows a record and reads all records. A meeting
 * is held by all ranks or by none; one that fails leaves nothing behind and may be tried again.
 *
 * A place and a seat per rank lie in memory that all ranks map; zeros at first. Where it comes from, how a
 * rank's process is watched and what the records mean is the caller's. */
#ifndef TREFOIL_PLAN_MEETING_H
#define TREFOIL_PLAN_MEETING_H

#include <stddef.h>

#include "plan/doorbell.h"

enum { EP_MEETING_BYTES = 256, EP_NOTICE_WORDS = 48 }; /* of a record; of a notice, 8 bytes each */

typedef struct ep_meeting_place {
  _Atomic uint64_t word;
  ep_doorbell_t doorbell;
} ep_meeting_place_t;

typedef struct ep_meeting_seat {
  _Atomic uint32_t arrivedIn;                     /* the last attempt it came to */
  _Atomic uint64_t failedCall;                    /* 0, or which of its calls failed */
  _Atomic uint64_t notice[EP_NOTICE_WORDS];       /* and why */
  _Alignas(16) char records[2][EP_MEETING_BYTES]; /* by parity of the meetings held */
} ep_meeting_seat_t;

/* One rank's view. */
typedef struct ep_meeting {
  ep_meeting_place_t *place;
  void *seats; /* rank 0's; the next ones at a distance of stride bytes */
  size_t stride;
  int rank, numRanks;
  void *owner;
  int (*isGone)(void *owner, int rank); /* it cannot come any more */
  int (*isAborted)(void *owner);        /* this rank shall not wait any more; may be NULL */
  uint32_t numCalls, callsSince;        /* collective calls since that many meetings */
} ep_meeting_t;

typedef enum {
  EP_MEETING_HELD,
  EP_MEETING_GONE,           /* rank is gone; isGone was asked for it last */
  EP_MEETING_FAILED,         /* rank's call failed: code, text */
  EP_MEETING_LATE,           /* the ranks in text did not come in time */
  EP_MEETING_LATE_ELSEWHERE, /* rank did not come within another rank's limit */
  EP_MEETING_LEFT,           /* another rank has stopped waiting */
  EP_MEETING_ABORTED
} ep_meeting_end_t;

typedef struct ep_meeting_outcome {
  ep_meeting_end_t end;
  int rank, code;
  char text[8 * (EP_NOTICE_WORDS - 1)];
} ep_meeting_outcome_t;

/* Shows `bytes` (at most EP_MEETING_BYTES) at `mine`; if the meeting is held, all ranks' are in `all`. */
void epMeetingJoin(ep_meeting_t *m, const void *mine, size_t bytes, void *all, uint64_t timeoutNs,
                   ep_meeting_outcome_t *out);

/* Around a collective call that may meet: it begins; it has failed on this rank, so that ranks that meet in
 * the call of the same number (since the last meeting held) wait for this one no more than a second. */
void epMeetingCallBegin(ep_meeting_t *m);
void epMeetingCallFail(ep_meeting_t *m, int code, const char *why);

#endif
