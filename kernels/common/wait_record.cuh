// Waiting for a peer, in low latency and high throughput: what a wait is for, how long it has lasted, and
// the record that names the rank (ep_wait_record_t). The modes differ in what ends a wait: checkLimit
// (ll/wait.cuh) and htCheckLimit (ht/ht_control.cuh).
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

#endif
