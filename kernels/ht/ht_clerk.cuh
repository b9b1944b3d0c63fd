// The last warp of a pipeline (ht_pipe.cuh): what has to be told of pieces that are through. A follower's
// gives units back, a feeder's raises flags; both tell weights and ids.
#ifndef TREFOIL_KERNELS_HT_CLERK_CUH
#define TREFOIL_KERNELS_HT_CLERK_CUH

#include "kernels/ht/ht_producer.cuh"

// What items [k, k + m) have to tell besides their rows: weights and ids. Four notes a lane at a time, so
// that all their loads are under way before the first is looked at.
template <class P> EP_DEV void passNotes(const HtBlock &b, const P &p, int k, int m, int lane) {
  const int per = p.numNotes(), notes = m * per;
  for (int u0 = 0; u0 < notes; u0 += 4 * 32) {
    typename P::Note note[4];
#pragma unroll
    for (int u = 0; u < 4; u++) {
      const int q = u0 + u * 32 + lane, i = k + q / per;
      note[u].is = false;
      if (q < notes) note[u] = p.take(b.item(i), b.entries(i), q % per);
    }
#pragma unroll
    for (int u = 0; u < 4; u++) {
      const int q = u0 + u * 32 + lane, i = k + q / per;
      if (q < notes && note[u].is) p.give(b.item(i), b.entries(i), q % per, note[u]);
    }
  }
  __syncwarp();
}

// A follower's: once an item's stores are out, and so its pieces have been loaded, their units are free;
// weights and ids are written. It holds no slot: the loader need not wait for it.
template <class P> EP_DEV void clerk(const HtBlock &b, const P &p, int lane) {
  HtPatience patience;
  for (int k = 0;;) {
    const int m = min(32, __shfl_sync(FULL_WARP, (int)told(&b.at->stored), 0) - k);
    if (m == 0) {
      if (__shfl_sync(FULL_WARP, (int)told(&b.at->head), 0) > k && b.item(k).n < 0) return;
      patience();
      __nanosleep(50);
      continue;
    }
    __syncwarp(); // what lane 0 has been told of, all may read
    passNotes(b, p, k, m, lane);
    if (lane < m) p.release(b.item(k + lane), b.entries(k + lane));
    __syncwarp();
    k += m;
    if (lane == 0) tell(&b.at->noted, k);
    patience = HtPatience();
  }
}

// A feeder's: flags for what has been written, behind one fence for all that is.
template <class P> EP_DEV void flagger(const HtBlock &b, const P &p, int lane) {
  HtPatience patience;
  for (int raised = 0;;) {
    const bool last = __shfl_sync(FULL_WARP, told(&b.at->ended), 0);
    int c = __shfl_sync(FULL_WARP, (int)told(&b.at->complete), 0);
    if (c == raised) {
      if (last) return;
      patience();
      __nanosleep(100);
      continue;
    }
    __syncwarp();
    passNotes(b, p, raised, c - raised, lane);
    if (p.flags()) __threadfence_system();
    for (int i = raised + (lane >> 3); i < c; i += 4) {
      p.raise(b.item(i), b.entries(i), lane & 7);
    }
    __syncwarp();
    if (lane == 0) {
      tell(&b.at->stored, c);
      tell(&b.at->noted, c);
    }
    raised = c;
    patience = HtPatience();
  }
}

#endif
