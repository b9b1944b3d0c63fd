/* One word decides: attempt, rounds completed, ranks arrived, and the rank missed last (+ 1), 16 bits each. A
 * rank puts its record into its entry, then counts itself into the attempt. The last one to come closes it as
 * completed; one whose limit is over closes it as failed. Both are a compare-and-swap of the word, so that
 * all ranks that had come agree which it was, and a rank that comes later finds a new attempt. A rank that
 * waits in an attempt tells "completed" from "failed" by the number of rounds completed, which cannot grow
 * without it. There is no lock that a dead rank could hold.
 *
 * Records lie in two buffers by parity of the rounds completed, not of attempts: a record is overwritten only
 * when the next round was completed, and its reader has come to that one.
 *
 * A rank whose call fails leaves a notice with the number of the call: its calls since the last barrier round
 * completed. If all make the same calls the numbers agree, and a wait in call n need not be for a rank whose
 * call n has failed. It still waits a moment, in case that rank tries again (then the numbers disagree
 * until the next round is completed). */
#include "plan/barrier_round.h"

#include <stdio.h>
#include <string.h>

#include "plan/clock.h"

#define MOMENT_NS 1000000000ull

typedef struct {
  uint16_t attempt, completed, arrived, missed;
} state_t;

static state_t unpack(uint64_t word) {
  state_t s = {(uint16_t)(word >> 48), (uint16_t)(word >> 32), (uint16_t)(word >> 16),
               (uint16_t)word};
  return s;
}

static uint64_t pack(state_t s) {
  return (uint64_t)s.attempt << 48 | (uint64_t)s.completed << 32 | (uint64_t)s.arrived << 16 |
         s.missed;
}

static ep_round_entry_t *entryOf(const ep_round_t *m, int rank) {
  return (ep_round_entry_t *)(void *)((char *)m->entries + (size_t)rank * m->stride);
}

/* ---- Calls and notices ---- */

typedef struct {
  uint64_t code;
  char text[8 * (EP_FAILURE_NOTICE_WORDS - 1)];
} notice_t;

/* Never 0. */
static uint64_t callNumber(ep_round_t *m) {
  uint32_t completed = unpack(atomic_load(&m->shared->word)).completed;
  if (m->callsSince != completed) m->numCalls = 0;
  m->callsSince = completed;
  return (uint64_t)(completed + 1u) << 32 | m->numCalls;
}

void epRoundCallBegin(ep_round_t *m) {
  callNumber(m);
  m->numCalls++;
}

void epRoundCallFail(ep_round_t *m, int code, const char *why) {
  ep_round_entry_t *mine = entryOf(m, m->rank);
  notice_t notice = {.code = (uint64_t)code};
  uint64_t words[EP_FAILURE_NOTICE_WORDS];
  snprintf(notice.text, sizeof notice.text, "%s", why);
  memcpy(words, &notice, sizeof words);
  atomic_store(&mine->failedCall, 0);
  for (int i = 0; i < EP_FAILURE_NOTICE_WORDS; i++) atomic_store(&mine->notice[i], words[i]);
  atomic_store(&mine->failedCall, callNumber(m));
}

/* ---- Arriving, waiting, giving up ---- */

/* One that waits. */
typedef struct {
  const ep_round_t *m;
  ep_round_outcome_t *out;
  uint16_t attempt, completed;
  uint64_t call, startNs, timeoutNs;
} waiter_t;

static uint32_t arrivalIn(uint16_t attempt) {
  return 0x10000u | attempt;
}

static int end(const waiter_t *w, ep_round_end_t how, int rank) {
  w->out->end = how;
  w->out->rank = rank;
  return 1;
}

static void ringAll(const waiter_t *w) {
  epDoorbellRing(&w->m->shared->doorbell, 0, EP_FUTEX_SHARED);
}

static void arrive(waiter_t *w) {
  _Atomic uint64_t *word = &w->m->shared->word;
  uint64_t seen = atomic_load(word);
  state_t s;
  do {
    s = unpack(seen);
    w->attempt = s.attempt;
    w->completed = s.completed;
    atomic_store(&entryOf(w->m, w->m->rank)->arrivedIn, arrivalIn(s.attempt));
    if (++s.arrived == w->m->numRanks) {
      state_t next = {(uint16_t)(s.attempt + 1), (uint16_t)(s.completed + 1), 0, 0};
      s = next;
    }
  } while (!atomic_compare_exchange_strong(word, &seen, pack(s)));
  if (s.completed != w->completed) ringAll(w);
}

/* Whether the rank's call of this number has failed; then with its sentence. */
static int hasFailed(const waiter_t *w, int rank) {
  ep_round_entry_t *entry = entryOf(w->m, rank);
  uint64_t words[EP_FAILURE_NOTICE_WORDS];
  if (atomic_load(&entry->failedCall) != w->call) return 0;
  for (int i = 0; i < EP_FAILURE_NOTICE_WORDS; i++) words[i] = atomic_load(&entry->notice[i]);
  if (atomic_load(&entry->failedCall) != w->call) return 0;
  notice_t notice;
  memcpy(&notice, words, sizeof notice);
  w->out->code = (int)notice.code;
  memcpy(w->out->text, notice.text, sizeof notice.text);
  return end(w, EP_ROUND_FAILED, rank);
}

static void addMissing(const waiter_t *w, int rank) {
  size_t n = strlen(w->out->text);
  if (n < sizeof w->out->text - 16)
    snprintf(w->out->text + n, sizeof w->out->text - n, n ? ", %d" : "%d", rank);
}

/* Whether this rank must not go on waiting. */
static int isHopeless(const waiter_t *w, uint64_t waited) {
  const ep_round_t *m = w->m;
  int isLate = waited >= w->timeoutNs, missed = -1;
  w->out->text[0] = 0;
  for (int r = 0; r < m->numRanks; r++) {
    if (atomic_load(&entryOf(m, r)->arrivedIn) == arrivalIn(w->attempt)) continue;
    int isGone = m->isGone(m->owner, r);
    if ((isGone || isLate || waited >= MOMENT_NS) && hasFailed(w, r)) return 1;
    if (isGone) return end(w, EP_ROUND_GONE, r);
    if (missed < 0) missed = r;
    if (isLate) addMissing(w, r);
  }
  if (m->isAborted && m->isAborted(m->owner)) return end(w, EP_ROUND_ABORTED, m->rank);
  if (!isLate) return 0;
  /* none is missing: one died as it came */
  return missed < 0 ? end(w, EP_ROUND_LEFT, m->rank) : end(w, EP_ROUND_LATE, missed);
}

/* The attempt was closed by another rank. */
static void publishClosed(const waiter_t *w, int missed) {
  const ep_round_t *m = w->m;
  if (missed < 0 || missed == m->rank)
    end(w, EP_ROUND_LEFT, missed);
  else if (hasFailed(w, missed))
    return;
  else if (m->isGone(m->owner, missed))
    end(w, EP_ROUND_GONE, missed);
  else
    end(w, EP_ROUND_LATE_ELSEWHERE, missed);
}

static void waitForAll(const waiter_t *w) {
  ep_round_shared_t *shared = w->m->shared;
  for (uint64_t slice = 1000000;; slice *= slice < 16000000 ? 2 : 1) {
    uint32_t rings = epDoorbellRead(&shared->doorbell);
    uint64_t seen = atomic_load(&shared->word), waited = epMonotonicNs() - w->startNs;
    state_t s = unpack(seen);
    if (s.completed != w->completed) {
      end(w, EP_ROUND_COMPLETE, w->m->rank);
      return;
    }
    if (s.attempt != w->attempt) {
      publishClosed(w, (int)s.missed - 1);
      return;
    }
    if (isHopeless(w, waited)) {
      state_t next = {(uint16_t)(s.attempt + 1), s.completed, 0, (uint16_t)(w->out->rank + 1)};
      if (!atomic_compare_exchange_strong(&shared->word, &seen, pack(next))) continue;
      ringAll(w);
      return;
    }
    uint64_t left = waited < w->timeoutNs ? w->timeoutNs - waited : slice;
    epDoorbellSleep(&shared->doorbell, rings, left < slice ? left : slice, 0, EP_FUTEX_SHARED);
  }
}

void epRoundJoin(ep_round_t *m, const void *mine, size_t bytes, void *all, uint64_t timeoutNs,
                 ep_round_outcome_t *out) {
  waiter_t w = {.m = m, .out = out, .call = callNumber(m), .timeoutNs = timeoutNs};
  int shared = (int)(m->callsSince & 1);
  w.startNs = epMonotonicNs();
  memcpy(entryOf(m, m->rank)->records[shared], mine, bytes);
  arrive(&w);
  waitForAll(&w);
  if (out->end != EP_ROUND_COMPLETE) return;
  for (int r = 0; r < m->numRanks; r++)
    memcpy((char *)all + (size_t)r * bytes, entryOf(m, r)->records[shared], bytes);
}
