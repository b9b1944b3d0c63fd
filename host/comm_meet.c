/* Meetings: host-side agreement of all ranks that may fail and be tried again.
 *
 * One word on the board decides: attempt, meetings held, ranks arrived, and the rank missed last (+ 1), 16
 * bits each. A rank puts its record on the board, then counts itself into the attempt. The last one to
 * come closes it as held; one that will not wait any longer closes it as failed. Both are a
 * compare-and-swap of the word, so that all who had come agree which it was, and a rank that comes later
 * finds a fresh attempt. Whoever waits in an attempt tells "held" from "failed" by the number of meetings
 * held, which cannot grow without him.
 *
 * Records lie in two places by parity of the meetings held, not of attempts: a record is overwritten only
 * when the next meeting was held, and its reader has come to that one.
 *
 * A rank whose call fails says so with the number of the call: its calls since the last meeting held. If
 * all make the same calls the numbers agree, and who waits in call n need not wait for a rank whose call
 * n has failed. It still waits a moment, in case that rank tries again (then the numbers disagree until
 * the next meeting is held). */
#include <stdio.h>
#include <string.h>

#include "comm_internal.h"

#define MOMENT_NS 1000000000ull

typedef struct {
  uint16_t attempt, held, arrived, missed;
} meeting_t;

static meeting_t unpack(uint64_t word) {
  meeting_t m = {(uint16_t)(word >> 48), (uint16_t)(word >> 32), (uint16_t)(word >> 16),
                 (uint16_t)word};
  return m;
}

static uint64_t pack(meeting_t m) {
  return (uint64_t)m.attempt << 48 | (uint64_t)m.held << 32 | (uint64_t)m.arrived << 16 | m.missed;
}

static uint32_t arrivalIn(uint16_t attempt) {
  return 0x10000u | attempt;
}

typedef struct {
  uint64_t code;
  char text[8 * (EP_EXCUSE_WORDS - 1)];
} excuse_t;

/* One that waits. */
typedef struct {
  ncclComm_t comm;
  uint16_t attempt, held;
  uint64_t startNs, timeoutNs;
} waiter_t;

/* ---- Calls and excuses ---- */

static uint16_t numHeld(ncclComm_t comm) {
  return unpack(atomic_load(&comm->board->meeting)).held;
}

static uint64_t callNumber(ncclComm_t comm) {
  return (uint64_t)(numHeld(comm) + 1u) << 32 | comm->numCalls;
}

void trefoilHostCallBegin(ncclComm_t comm) {
  if (epCommGet(comm, "trefoilHostCallBegin") != ncclSuccess) return;
  uint32_t held = numHeld(comm);
  if (comm->callsSince != held) comm->numCalls = 0;
  comm->callsSince = held;
  comm->numCalls++;
}

void trefoilHostCallFail(ncclComm_t comm, ncclResult_t code, const char *why) {
  if (epCommGet(comm, "trefoilHostCallFail") != ncclSuccess) return;
  if (comm->callsSince != numHeld(comm)) return; /* it has met: all know as much */
  ep_rank_entry_t *mine = epCommEntry(comm, comm->rank);
  excuse_t excuse = {.code = (uint64_t)code};
  uint64_t words[EP_EXCUSE_WORDS];
  snprintf(excuse.text, sizeof excuse.text, "%s", why);
  memcpy(words, &excuse, sizeof words);
  atomic_store(&mine->excused, 0);
  for (int i = 0; i < EP_EXCUSE_WORDS; i++) atomic_store(&mine->excuse[i], words[i]);
  atomic_store(&mine->excused, callNumber(comm));
  epCommRingAll(comm);
}

/* How the rank's call of this number has failed, with the sentence; ncclSuccess: it has not. */
static ncclResult_t excuseOf(ncclComm_t comm, int rank) {
  ep_rank_entry_t *entry = epCommEntry(comm, rank);
  uint64_t number = callNumber(comm), words[EP_EXCUSE_WORDS];
  if (atomic_load(&entry->excused) != number) return ncclSuccess;
  for (int i = 0; i < EP_EXCUSE_WORDS; i++) words[i] = atomic_load(&entry->excuse[i]);
  if (atomic_load(&entry->excused) != number) return ncclSuccess;
  excuse_t excuse;
  memcpy(&excuse, words, sizeof excuse);
  return epNcclFail((ncclResult_t)excuse.code, "rank %d has failed: %s", rank, excuse.text);
}

/* ---- Arriving, waiting, giving up ---- */

static void arrive(waiter_t *w) {
  ep_rank_entry_t *mine = epCommEntry(w->comm, w->comm->rank);
  _Atomic uint64_t *word = &w->comm->board->meeting;
  uint64_t seen = atomic_load(word);
  meeting_t m;
  do {
    m = unpack(seen);
    w->attempt = m.attempt;
    w->held = m.held;
    atomic_store(&mine->arrivedIn, arrivalIn(m.attempt));
    if (++m.arrived == w->comm->numRanks) {
      meeting_t next = {(uint16_t)(m.attempt + 1), (uint16_t)(m.held + 1), 0, 0};
      m = next;
    }
  } while (!atomic_compare_exchange_strong(word, &seen, pack(m)));
  if (m.held != w->held) epCommRingAll(w->comm);
}

/* Whether rank r's coming is not worth waiting for; then why. */
static ncclResult_t hopelessness(const waiter_t *w, int r, uint64_t waited) {
  ncclResult_t why = ncclSuccess;
  if (!epCommPeerThere(w->comm, r)) return ncclRemoteError;
  if (waited >= MOMENT_NS || waited >= w->timeoutNs) why = excuseOf(w->comm, r);
  if (why != ncclSuccess || waited < w->timeoutNs) return why;
  return epNcclFail(ncclRemoteError, "rank %d did not come within the timeout", r);
}

/* The first rank that makes it hopeless; *why: ncclSuccess: none. */
static int firstHopeless(const waiter_t *w, uint64_t waited, ncclResult_t *why) {
  int me = w->comm->rank;
  *why = ncclSuccess;
  for (int r = 0; r < w->comm->numRanks && *why == ncclSuccess; r++) {
    if (atomic_load(&epCommEntry(w->comm, r)->arrivedIn) == arrivalIn(w->attempt)) continue;
    *why = hopelessness(w, r, waited);
    if (*why != ncclSuccess) return r;
  }
  if (atomic_load(&w->comm->aborting))
    *why = epNcclFail(ncclInvalidUsage, "the communicator was aborted");
  else if (waited >= w->timeoutNs) /* one died as it came */
    *why = epNcclFail(ncclRemoteError, "not all ranks came within the timeout");
  return me;
}

/* The attempt was closed by another rank. */
static ncclResult_t sayClosed(const waiter_t *w, meeting_t now) {
  int r = (int)now.missed - 1;
  if (r < 0 || r == w->comm->rank)
    return epNcclFail(ncclRemoteError, "another rank has stopped waiting for all to come");
  if (!epCommPeerThere(w->comm, r)) return ncclRemoteError;
  ncclResult_t why = excuseOf(w->comm, r);
  if (why != ncclSuccess) return why;
  return epNcclFail(ncclRemoteError, "rank %d did not come within another rank's timeout", r);
}

static ncclResult_t waitForAll(const waiter_t *w) {
  _Atomic uint64_t *word = &w->comm->board->meeting;
  uint64_t slice = 1000000;
  for (;;) {
    uint32_t bell = epCommBell(w->comm);
    uint64_t seen = atomic_load(word), waited = epNowNs() - w->startNs;
    meeting_t m = unpack(seen);
    if (m.held != w->held) return ncclSuccess;
    if (m.attempt != w->attempt) return sayClosed(w, m);
    ncclResult_t why;
    int missed = firstHopeless(w, waited, &why);
    if (why != ncclSuccess) {
      meeting_t next = {(uint16_t)(m.attempt + 1), m.held, 0, (uint16_t)(missed + 1)};
      if (!atomic_compare_exchange_strong(word, &seen, pack(next))) continue;
      epCommRingAll(w->comm);
      return why;
    }
    uint64_t left = waited < w->timeoutNs ? w->timeoutNs - waited : slice;
    epCommSleep(w->comm, bell, left < slice ? left : slice);
    if (slice < 16000000) slice *= 2;
  }
}

static ncclResult_t meet(ncclComm_t comm, const void *mine, size_t bytes, void *all,
                         uint64_t timeoutNs) {
  waiter_t w = {.comm = comm, .startNs = epNowNs(), .timeoutNs = timeoutNs};
  int place = numHeld(comm) & 1;
  memcpy(epCommEntry(comm, comm->rank)->shownToAll[place], mine, bytes);
  arrive(&w);
  EP_NCCL_TRY(waitForAll(&w));
  for (int r = 0; r < comm->numRanks; r++)
    memcpy((char *)all + (size_t)r * bytes, epCommEntry(comm, r)->shownToAll[place], bytes);
  return ncclSuccess;
}

ncclResult_t trefoilHostMeet(ncclComm_t comm, const void *mine, size_t bytes, void *all,
                             uint64_t timeoutNs) {
  const char *func = "trefoilHostMeet";
  EP_NCCL_TRY(epCommUsable(comm, func));
  EP_NCCL_CHECK(!epInHostFunc(), ncclInvalidUsage, "%s was called from a host function", func);
  EP_NCCL_CHECK(mine && all && bytes <= EP_SHOWN_BYTES, ncclInvalidArgument,
                "%s: %zu bytes, at most %d", func, bytes, EP_SHOWN_BYTES);
  EP_NCCL_CHECK(epCommEnter(comm), ncclInvalidUsage, "%s: the communicator was aborted", func);
  ncclResult_t met = meet(comm, mine, bytes, all, timeoutNs);
  epCommLeave(comm);
  return met;
}
