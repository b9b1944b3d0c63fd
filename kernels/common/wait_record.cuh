// Waiting for a peer, in every mode: what a wait is for, how long it has lasted, its limit, and the record
// that names the rank (ep_wait_record_t).
//
// A wait polls freely; each 256th poll it checks its limit. When the limit passes, the first thread to notice
// either masks the rank (groups with masks) or sets `failed`, and writes the final record; the others find
// the mask or the word at their next look.
//
// The record is written by threads of many blocks: one at a time, and what was written of a wait that was
// given up stays. Otherwise a thread that had just decided to record that it still waits could write over
// the rank given up.
#ifndef TREFOIL_KERNELS_COMMON_WAIT_RECORD_CUH
#define TREFOIL_KERNELS_COMMON_WAIT_RECORD_CUH

#include "kernels/common/ptx.cuh"
#include "kernels/common/waits.h"

constexpr unsigned long long RECORD_EVERY = 2000000, RECORD_AFTER = 1000000; // ns
constexpr unsigned long long RECORD_FINAL = ~0ull >> 1;

template <typename T> EP_DEV T loadVolatile(const T *p) {
  return *(const volatile T *)p;
}

// Of a group's control memory.
struct WaitControl {
  unsigned failed;             // a wait gave up, and nothing goes on without its rank: all leave
  unsigned writing;            // a thread is at the record
  unsigned long long recorded; // device clock of the last record written
};

struct Awaited {
  unsigned kind; // ep_ll_kind_t, EP_HT_KIND_*
  ep_wait_phase_t phase;
  int rank;
  unsigned received; // flag or count found
  long long item;    // token or step, -1 = none
};

struct Spin {
  unsigned polls = 0;
  uint64_t since = 0; // device clock of the first look at it, 0 = none yet
};

// expected: flag or count waited for.
EP_DEV void writeRecord(ep_wait_record_t *r, const Awaited &w, unsigned long long operation,
                        unsigned expected, uint64_t since, uint64_t now, bool gaveUp) {
  if (!r) return;
  r->kind = w.kind;
  r->phase = w.phase;
  r->rank = w.rank;
  r->operation = operation;
  r->expected = expected;
  r->received = w.received;
  r->item = w.item;
  r->sinceNs = since;
  r->nowNs = now;
  if (gaveUp) {
    r->failed = 1;
    r->numGaveUp++;
  }
  __threadfence_system();
  r->state = gaveUp ? 2 : 1;
}

// Calls write() if it is time for another record of a wait that goes on. One thread.
template <typename F>
EP_DEV void recordWait(WaitControl &c, unsigned long long waited, unsigned long long now, F write) {
  const unsigned long long last = loadVolatile(&c.recorded);
  if (waited <= RECORD_AFTER || (long long)(now - last) <= (long long)RECORD_EVERY) return;
  if (atomicCAS(&c.writing, 0u, 1u) != 0) return;
  if (loadVolatile(&c.recorded) == last) {
    *(volatile unsigned long long *)&c.recorded = now;
    write();
  }
  __threadfence();
  atomicExch(&c.writing, 0u);
}

// Calls write() for a wait that was given up. One thread. The lock is held briefly.
template <typename F> EP_DEV void recordTimeout(WaitControl &c, F write) {
  for (int tries = 0; tries < 10000 && atomicCAS(&c.writing, 0u, 1u) != 0; tries++) {
    __nanosleep(100);
  }
  *(volatile unsigned long long *)&c.recorded = RECORD_FINAL;
  write();
  __threadfence();
  atomicExch(&c.writing, 0u);
}

// One thread: the wait for `rank` ends without it. mask: of a group with masks, else NULL. Calls write() if
// no other thread was first.
template <typename F> EP_DEV void giveUp(WaitControl &c, int *mask, int rank, F write) {
  const bool isFirst = mask ? atomicExch(mask + rank, 0) != 0 : atomicCAS(&c.failed, 0u, 1u) == 0;
  if (isFirst) recordTimeout(c, write);
}

// One thread, seldom: false when the wait must end. since: when it began, 0 = sets it. write(now, gaveUp)
// writes the record. Low latency has a second limit, and its own checkLimit.
template <typename F>
EP_DEV bool checkWait(WaitControl &c, int *mask, int rank, uint64_t limitNs, uint64_t &since,
                      F write) {
  if (loadVolatile(&c.failed) || (mask && loadVolatile(mask + rank) == 0)) return false;
  const uint64_t now = clockNs();
  if (!since) since = now;
  const uint64_t waited = now - since;
  if (waited < limitNs) {
    recordWait(c, waited, now, [&] { write(now, false); });
    return true;
  }
  giveUp(c, mask, rank, [&] { write(now, true); });
  return false;
}

#endif
