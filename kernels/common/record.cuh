// Mutual exclusion for the record of waits (ep_ll_record_t), written by threads of many blocks: one at a
// time, and what was written of a wait that was given up stays. Otherwise a thread that had just decided to
// note that it still waits could write over the rank given up.
#ifndef TREFOIL_KERNELS_COMMON_RECORD_CUH
#define TREFOIL_KERNELS_COMMON_RECORD_CUH

#include "kernels/common/ptx.cuh"

constexpr unsigned long long RECORD_EVERY = 2000000, RECORD_AFTER = 1000000; // ns
constexpr unsigned long long RECORD_FINAL = ~0ull >> 1;

// Calls write() if it is time for another note of a wait that goes on. One thread.
template <typename F>
EP_DEV void recordWait(unsigned *writing, unsigned long long *recorded, unsigned long long waited,
                       unsigned long long now, F write) {
  const unsigned long long last = *(volatile unsigned long long *)recorded;
  if (waited <= RECORD_AFTER || (long long)(now - last) <= (long long)RECORD_EVERY) return;
  if (atomicCAS(writing, 0u, 1u) != 0) return;
  if (*(volatile unsigned long long *)recorded == last) {
    *(volatile unsigned long long *)recorded = now;
    write();
  }
  __threadfence();
  atomicExch(writing, 0u);
}

// Calls write() for a wait that was given up. One thread. The lock is held briefly.
template <typename F>
EP_DEV void recordTimeout(unsigned *writing, unsigned long long *recorded, F write) {
  for (int tries = 0; tries < 10000 && atomicCAS(writing, 0u, 1u) != 0; tries++) __nanosleep(100);
  *(volatile unsigned long long *)recorded = RECORD_FINAL;
  write();
  __threadfence();
  atomicExch(writing, 0u);
}

#endif
