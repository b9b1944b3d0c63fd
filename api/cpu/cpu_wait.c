/* Waiting for other ranks, and giving up on them.
 *
 * A rank waits on its own doorbells (plan/doorbell.h), one a kind of operation; a rank that changes
 * a word rings its owner's. A rank that waits for one other is woken by that one (or by a failure). Sleeps
 * are cut into slices, between which it checks whether the peer lives, whether another rank has given up
 * (the rank that it gave up on is named here too), and the time.
 *
 * The way out and MaskClean push: rank r writes word [r] of every rank's own array, and each waits
 * on its own memory. When all have left, a rank's memory has no readers any more and may be
 * freed. */
#include <stdio.h>

#include "api/cpu/cpu.h"
#include "api/cpu/cpu_hang.h"
#include "trefoil_host.h"

#define LOOK_NS 5000000ull /* between looks at the peer's life */

static const char *const kindNames[EP_NUM_KINDS] = {"update", "dispatch", "combine"};

/* "For ever" is a legal timeout: the sum stays below 2^63 instead of wrapping. */
static uint64_t deadlineAfter(uint64_t now, uint64_t timeoutNs) {
  return timeoutNs < INT64_MAX - now ? now + timeoutNs : INT64_MAX;
}

static ep_futex_scope_t scopeOf(const ep_cpu_group_t *g) {
  return g->oneProcess ? EP_FUTEX_PRIVATE : EP_FUTEX_SHARED;
}

static ep_doorbell_t *doorbellOf(const ep_cpu_group_t *g, int r, ep_kind_t kind) {
  return &g->peers[r].control->doorbells[kind].doorbell;
}

void epRing(ep_cpu_group_t *g, int r, ep_kind_t kind) {
  epDoorbellRing(doorbellOf(g, r, kind), (uint32_t)g->me + 1, scopeOf(g));
}

void epRingAll(ep_cpu_group_t *g, ep_kind_t kind) {
  for (int r = 0; r < g->R; r++) {
    if (r != g->me) epRing(g, r, kind);
  }
}

/* Without masks: the group is lost; the others get a failure notice with the culprit. */
static void failGroup(const ep_op_t *op, int culprit) {
  ep_cpu_group_t *g = op->g;
  atomic_store(&g->failed, 1);
  epStore(&g->peers[g->me].control->failure, (uint64_t)culprit + 1);
  for (int kind = 0; kind < EP_NUM_KINDS; kind++) {
    for (int r = 0; r < g->R; r++) {
      if (r != g->me) epDoorbellRing(doorbellOf(g, r, (ep_kind_t)kind), 0, scopeOf(g));
    }
  }
}

void epGiveUp(const ep_op_t *op, int peer, const char *how, const char *what) {
  ep_cpu_group_t *g = op->g;
  unsigned long long no = op->no;
  if (g->group->limits.enableMask && !epIsHt(g->group)) {
    if (atomic_exchange(&g->peers[peer].active, -1) != 1) return;
    epReport(g->group, EP_DEFERRED_FLAG, TREFOIL_REMOTE_ERROR,
             "rank %d %s: %s %llu, waiting for its %s; it is masked", peer, how,
             kindNames[op->kind], no, what);
    return;
  }
  epReport(g->group, EP_DEFERRED_FATAL, TREFOIL_REMOTE_ERROR,
           "rank %d %s: %s %llu on rank %d, waiting for its %s; the group is lost, destroy it",
           peer, how, kindNames[op->kind], no, g->me, what);
  failGroup(op, peer);
}

void epRecordMasked(const ep_op_t *op) {
  ep_cpu_group_t *g = op->g;
  for (int r = 0; r < g->R; r++) {
    if (epActive(g, r)) continue;
    ep_word_t *at = epWordOf(op, g->me, (ep_array_t)(EP_ARRAY_MASKED_AT + (int)op->kind), r);
    ep_word_t *since = epWordOf(op, g->me, (ep_array_t)(EP_ARRAY_MASKED_SINCE + (int)op->kind), r);
    if (epLoad(at) + 1 != op->no) epStore(since, op->no);
    epStore(at, op->no);
  }
}

int epOwesReading(const ep_op_t *op, int r, uint64_t no) {
  int me = op->g->me, kind = (int)op->kind;
  int state = atomic_load_explicit(&op->g->peers[r].active, memory_order_relaxed);
  if (state != 0) return state > 0;
  uint64_t at = epLoad(epWordOf(op, me, (ep_array_t)(EP_ARRAY_MASKED_AT + kind), r));
  uint64_t since = epLoad(epWordOf(op, me, (ep_array_t)(EP_ARRAY_MASKED_SINCE + kind), r));
  return no < since || no > at;
}

void epWentOn(const ep_op_t *op, int peer) {
  int me = op->g->me, kind = (int)op->kind;
  uint64_t at = epLoad(epWordOf(op, peer, (ep_array_t)(EP_ARRAY_MASKED_AT + kind), me));
  uint64_t since = epLoad(epWordOf(op, peer, (ep_array_t)(EP_ARRAY_MASKED_SINCE + kind), me));
  if (since <= op->no && op->no <= at) return;
  epGiveUp(op, peer, "went on without this rank", "rows");
}

/* Another rank gave up: its culprit is ours. */
static int adoptFailure(const ep_op_t *op) {
  ep_cpu_group_t *g = op->g;
  for (int r = 0; r < g->R; r++) {
    uint64_t failure = r == g->me ? 0 : epLoad(&g->peers[r].control->failure);
    if (!failure) continue;
    int culprit = (int)(failure - 1);
    if (culprit == g->me) {
      epReport(g->group, EP_DEFERRED_FATAL, TREFOIL_REMOTE_ERROR,
               "this rank (%d) was late: rank %d gave up waiting for it; the group is lost, "
               "destroy it",
               g->me, r);
    } else {
      epReport(g->group, EP_DEFERRED_FATAL, TREFOIL_REMOTE_ERROR,
               "rank %d is gone or late, says rank %d; the group is lost (here in %s %llu), "
               "destroy it",
               culprit, r, kindNames[op->kind], (unsigned long long)op->no);
    }
    failGroup(op, culprit);
    return 1;
  }
  return 0;
}

void epPeerWithdrawn(const ep_op_t *op, int r) {
  if (adoptFailure(op)) return;
  epReport(op->g->group, EP_DEFERRED_FATAL, TREFOIL_REMOTE_ERROR,
           "rank %d has given up: its group is lost, and with it this rank's (%d), in %s %llu; "
           "destroy it",
           r, op->g->me, kindNames[op->kind], (unsigned long long)op->no);
  failGroup(op, r);
}

int epWasSent(const ep_op_t *op) {
  if (op->no) return 1;
  epReport(op->g->group, EP_DEFERRED_STICKY, TREFOIL_INVALID_USAGE,
           "ncclEpComplete: no send_only %s of the handle has run since the last one was received: "
           "launch the graph that holds it first; nothing was received",
           kindNames[op->kind]);
  return 0;
}

uint32_t epBell(const ep_op_t *op) {
  return epDoorbellRead(doorbellOf(op->g, op->g->me, op->kind));
}

/* 0: gone, dead or too late; then the peer has been given up. */
static int lookAround(const ep_op_t *op, int peer, const char *what, ep_deadline_t *p) {
  uint64_t now = epMonotonicNs();
  int masks = op->g->group->limits.enableMask && !epIsHt(op->g->group);
  if (atomic_load(&op->g->failed)) return 0;
  if (p->deadlineNs == 0 || p->peer != peer) epHangWait(op, peer, what);
  p->peer = peer;
  if (!masks && adoptFailure(op)) return 0;
  if (p->deadlineNs == 0) {
    p->deadlineNs = deadlineAfter(now, op->g->group->timeoutNs);
    p->nextLookNs = now + LOOK_NS;
  } else if (now >= p->nextLookNs) {
    p->nextLookNs = now + LOOK_NS;
    if (peer >= 0 && trefoilHostPeerAlive(op->g->group->comm, peer) == 0) {
      if (!masks && adoptFailure(op)) return 0; /* it may have said why before it left */
      epGiveUp(op, peer, "is gone", what);
      return 0;
    }
  }
  if (now < p->deadlineNs) return 1;
  char how[64];
  snprintf(how, sizeof how, "did not come within %.3f s", (double)op->g->group->timeoutNs * 1e-9);
  epGiveUp(op, peer, how, what);
  return 0;
}

/* wanted: 1 + the rank whose ring ends the sleep, 0: any. With several sleepers any does. */
static int sleepFor(const ep_op_t *op, uint32_t seen, int peer, const char *what,
                    ep_deadline_t *deadline, uint32_t wanted) {
  if (!lookAround(op, peer, what, deadline)) return 0;
  uint64_t left = deadline->deadlineNs - epMonotonicNs(), slice = LOOK_NS;
  if ((int64_t)left <= 0) left = 1;
  epDoorbellSleep(doorbellOf(op->g, op->g->me, op->kind), seen, left < slice ? left : slice, wanted,
                  scopeOf(op->g));
  return 1;
}

int epSleep(const ep_op_t *op, uint32_t seen, int peer, const char *what, ep_deadline_t *deadline) {
  return sleepFor(op, seen, peer, what, deadline, 0);
}

int epWait(const ep_op_t *op, int peer, const ep_word_t *word, uint64_t value, const char *what) {
  for (int i = epNumSpins(); i > 0; i--) {
    if (epLoad(word) >= value) return 1;
    epSpinPause();
  }
  ep_deadline_t deadline = {.peer = peer};
  for (;;) {
    uint32_t seen = epBell(op);
    if (epLoad(word) >= value) break;
    if (!sleepFor(op, seen, peer, what, &deadline, (uint32_t)peer + 1)) return 0;
  }
  epHangGo(op);
  return 1;
}

/* Word [r] of this rank's own array, written by rank r, which wakes by the word's own address. */
static int waitPushed(ep_cpu_group_t *g, int r, const ep_word_t *word, uint64_t value,
                      uint64_t deadlineNs) {
  for (int i = epNumSpins(); i > 0; i--) {
    if (epLoad(word) >= value) return 1;
    epSpinPause();
  }
  for (;;) {
    uint64_t seen = epLoad(word), now = epMonotonicNs();
    if (seen >= value) return 1;
    if (now >= deadlineNs || trefoilHostPeerAlive(g->group->comm, r) == 0) {
      return epLoad(word) >= value;
    }
    uint64_t left = deadlineNs - now;
    const void *lowHalf = word;
    epFutexWait(lowHalf, (uint32_t)seen, left < LOOK_NS ? left : LOOK_NS, EP_FUTEX_SHARED);
  }
}

static void push(ep_cpu_group_t *g, ep_array_t array, uint64_t value, int onlyActive) {
  for (int r = 0; r < g->R; r++) {
    if (onlyActive && !epActive(g, r)) continue;
    ep_word_t *word = &epArray(g->peers[r].control, g->R, array, 0)[g->me];
    epStore(word, value);
    const void *lowHalf = word;
    epFutexWake(lowHalf, EP_FUTEX_SHARED);
  }
}

int epLeave(ep_cpu_group_t *g, uint64_t timeoutNs) {
  uint64_t deadline = deadlineAfter(epMonotonicNs(), timeoutNs);
  push(g, EP_ARRAY_LEAVING, 1, 0);
  ep_word_t *own = epArray(g->peers[g->me].control, g->R, EP_ARRAY_LEAVING, 0);
  for (int r = 0; r < g->R; r++) {
    if (!waitPushed(g, r, &own[r], 1, deadline)) return 0;
  }
  return 1;
}

/* MaskClean's: every rank is notified, the unmasked ones are waited for. Ranks that are masked need not come,
 * so their counts differ: each waits for one more of a peer's than it has waited for before. */
int epCleanBarrier(ep_cpu_group_t *g) {
  uint64_t deadline = deadlineAfter(epMonotonicNs(), g->group->timeoutNs);
  push(g, EP_ARRAY_CLEAN, ++g->cleans, 0);
  ep_word_t *own = epArray(g->peers[g->me].control, g->R, EP_ARRAY_CLEAN, 0);
  int all = 1;
  for (int r = 0; r < g->R; r++) {
    if (!epActive(g, r)) continue;
    if (waitPushed(g, r, &own[r], g->peers[r].cleansTaken + 1, deadline)) {
      g->peers[r].cleansTaken++;
      continue;
    }
    epReport(g->group, EP_DEFERRED_FLAG, TREFOIL_REMOTE_ERROR,
             "ncclEpMaskClean: rank %d did not come within the timeout", r);
    all = 0;
  }
  return all;
}
