// What is signalled once chunks are stored (ht_pipe.cuh): weights and ids are passed on and flags raised;
// and the last warp of a dispatch's senders, which does both.
#ifndef TREFOIL_KERNELS_HT_COMPLETION_CUH
#define TREFOIL_KERNELS_HT_COMPLETION_CUH

#include "kernels/ht/ht_producer.cuh"

// The metadata of items [k, k + m), which is their weights and ids. Four words a lane at a time, so
// that all their loads are under way before the first is looked at.
template <class P> EP_DEV void passMetadata(const HtBlock &b, const P &p, int k, int m, int lane) {
  const int per = p.numMetadata(), total = m * per;
  for (int u0 = 0; u0 < total; u0 += 4 * 32) {
    typename P::Metadata metadata[4];
#pragma unroll
    for (int u = 0; u < 4; u++) {
      const int q = u0 + u * 32 + lane, i = k + q / per;
      metadata[u].is = false;
      if (q < total) metadata[u] = p.take(b.item(i), b.entries(i), q % per);
    }
#pragma unroll
    for (int u = 0; u < 4; u++) {
      const int q = u0 + u * 32 + lane, i = k + q / per;
      if (q < total && metadata[u].is) p.give(b.item(i), b.entries(i), q % per, metadata[u]);
    }
  }
  __syncwarp();
}

// The flags of items [k, end), which have been written, behind one fence for all of them.
template <class P> EP_DEV void raiseFlags(const HtBlock &b, const P &p, int k, int end, int lane) {
  if (p.flags()) __threadfence_system();
  for (int i = k + (lane >> 3); i < end; i += 4) p.raise(b.item(i), b.entries(i), lane & 7);
}

// A sender's: flags for what has been written.
template <class P> EP_DEV void signalWarp(const HtBlock &b, const P &p, int lane) {
  HtWatchdog deadline;
  for (int raised = 0;;) {
    const bool last = __shfl_sync(FULL_WARP, loadAcquireShared(&b.at->ended), 0);
    int c = __shfl_sync(FULL_WARP, (int)loadAcquireShared(&b.at->complete), 0);
    if (c == raised) {
      if (last) return;
      deadline();
      __nanosleep(100);
      continue;
    }
    __syncwarp();
    passMetadata(b, p, raised, c - raised, lane);
    raiseFlags(b, p, raised, c, lane);
    __syncwarp();
    if (lane == 0) {
      storeReleaseShared(&b.at->stored, c);
      storeReleaseShared(&b.at->retired, c);
    }
    raised = c;
    deadline = HtWatchdog();
  }
}

#endif
