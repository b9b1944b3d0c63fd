/* Workers: processes that call a library under test, and what their parent sees of them. Every rank has a
 * place in shared memory that says which call it is in and since when; so a call that never returns, a
 * crash and an exit() in the middle are told with rank, call and case, by the parent or by the hooks.
 *
 * A worker has a process group of its own, dies with its parent, and has stderr for stdout: what a library
 * prints never mixes with results. */
#ifndef TREFOIL_VALIDATE_WORKER_H
#define TREFOIL_VALIDATE_WORKER_H

#include "plan/clock.h"
#include "plan/error.h"
#include "trefoil/base.h"

#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { EP_WATCH_MAX_RANKS = 64, EP_WATCH_TEXT = 2048 };

typedef enum ep_phase { EP_PHASE_OPENING, EP_PHASE_CASE, EP_PHASE_CLOSING } ep_phase_t;

/* Where a rank is. `call` points into this program's text, the same in parent and child. */
typedef struct ep_place {
  _Atomic(const char *) call; /* NULL: in none */
  _Atomic uint64_t sinceNs, deadlineNs;
  _Atomic uint64_t caseIdx;
  _Atomic int phase, op;   /* op: of the script; as many as it has: the wait at its end */
  uint64_t limitNs;        /* of a call, by the rank itself */
  _Atomic uint64_t rounds; /* begun, see epWatchBarrier */
} ep_place_t;

typedef struct ep_watch {
  ep_place_t places[EP_WATCH_MAX_RANKS];
  _Atomic int numRanks;
  _Atomic int isEnding;  /* a hook ran: */
  _Atomic int endedRank; /* the rank of that thread, -1: none */
} ep_watch_t;

/* Before and after a call; place may be NULL. */
void epPlaceEnter(ep_place_t *place, const char *call);
void epPlaceLeave(ep_place_t *place);
/* A call between both. Where it fails with epRc_: `record`, and `code` with the sentence `why`. */
#define EP_TRY_PLACED(rank, type, call, code, record, why)                                         \
  do {                                                                                             \
    epPlaceEnter((rank)->place, (rank)->doing);                                                    \
    type epRc_ = (call);                                                                           \
    epPlaceLeave((rank)->place);                                                                   \
    if (epRc_) {                                                                                   \
      record;                                                                                      \
      return epFail((code), "%s: %s", (rank)->doing, (why));                                       \
    }                                                                                              \
  } while (0)
/* All places empty, limits as said. */
void epWatchReset(ep_watch_t *watch, int numRanks, uint64_t limitNs);
/* The limit that follows from a group's timeout: a quarter more and 5 s; on GPUs, where libraries
 * compile, 60 s. */
uint64_t epCallLimitNs(uint64_t timeoutNs, int isHost);

/* In a worker: crashes and exit() leave word in `watch`; and which rank this thread is. */
void epWatchHooks(ep_watch_t *watch);
void epWatchThread(int rank);

/* A barrier of all ranks before each round, so that one rank's writes into another's windows find the round's
 * contents there. Ends early once *stop is set, and after the rank's limit for a call. */
void epWatchBarrier(ep_watch_t *watch, int rank, int numRanks, const _Atomic int *stop);

/* One that has been in a call for longer than ns; -1: none. */
int epWatchLongest(const ep_watch_t *watch, uint64_t ns);
/* A rank whose call is over its limit: writes the sentence and the rank that keeps the others waiting, the
 * one least far; -1: none. */
int epWatchHang(const ep_watch_t *watch, char text[EP_WATCH_TEXT]);
/* The sentence for a process that ended with `status`, and the rank or -1. rank >= 0: the process was
 * that rank's. */
int epWatchEnd(const ep_watch_t *watch, int status, int rank, char text[EP_WATCH_TEXT]);
/* The place of the rank that is least far, for an end that is no rank's. */
const ep_place_t *epWatchFirst(const ep_watch_t *watch);

/* How a case ended. */
typedef enum ep_case_outcome {
  EP_CASE_NOT_RUN,
  EP_CASE_AGREES,     /* every byte, on all ranks */
  EP_CASE_ORDER_OPEN, /* order-free: other order or rounding than ours, inside what is left open */
  EP_CASE_REFUSED,    /* the library returned ncclInvalidArgument or ncclInvalidUsage */
  EP_CASE_ABORTS, /* another code, CUDA or NCCL failed, or a process ended: signal, abort(), exit() */
  EP_CASE_HANGS, /* a call did not return within its limit */
  EP_CASE_WRONG, /* it returned, and something is different */
  EP_CASE_NUM_OUTCOMES
} ep_case_outcome_t;

/* "agrees", "order open", "refused", ... */
const char *epOutcomeName(ep_case_outcome_t outcome);

/* fork(); the child is a worker. isHead: of a process group of its own. */
pid_t epWorkerFork(int isHead);
/* Ends the head of a group and all that it started. */
void epWorkerKill(pid_t pid);
/* stdout becomes stderr; what it was, to be given back. */
int epStdoutAway(void);
void epStdoutBack(int saved);

#endif
