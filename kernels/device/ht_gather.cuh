// The gather pipeline: n pieces in, their sum out, in the order of the entries, in fp32, rounded once. Item
// k's pieces are the next n slots of the ring (one, of zeros, for a sum of nothing); the sum replaces the
// last of them. A sum of one piece is a copy.
//
// HT_REDUCE_GROUPS groups of reducing warps take items by turns; a thread has up to four vectors of a piece.
#ifndef TREFOIL_KERNELS_DEVICE_HT_GATHER_CUH
#define TREFOIL_KERNELS_DEVICE_HT_GATHER_CUH

#include "kernels/device/ht_pipe.cuh"
#include "kernels/device/reduce.cuh"

template <class P> EP_DEV void gatherLoader(const HtBlock &b, const P &p, int lane) {
  for (int k = 0, c = 0;; k++) {
    waitPast(&b.at->head, k);
    const HtItem &item = b.item(k);
    const int n = item.n;
    if (n < 0) return;
    const int step = min(32, b.S);
    for (int i0 = 0; i0 < piecesOf<P>(n); i0 += step) {
      const int m = min(step, piecesOf<P>(n) - i0), u = c + i0 + lane;
      if (lane < m) {
        waitPhase(&b.empty[b.slot(u)], b.phase(u) ^ 1);
        if (P::FENCE) proxyFence();
        if (n > 0)
          p.load(item, b.entries(k)[i0 + lane], sharedAddress(b.place(u)), &b.full[b.slot(u)]);
        else
          barrierArrive(&b.full[b.slot(u)], 1);
      }
      __syncwarp();
      if (lane == 0) tell(&b.at->issued, c + i0 + m);
    }
    c += piecesOf<P>(n);
    __syncwarp();
    if (lane == 0) tell(&b.at->loaded, k + 1);
  }
}

// Waits until item k is described; false if an item before it, or itself, is the end.
EP_DEV bool waitItem(const HtBlock &b, int k) {
  HtPatience p;
  for (;;) {
    const int head = (int)told(&b.at->head);
    if (head > k) return b.item(k).n >= 0;
    if (head == k && k > 0 && b.item(k - 1).n < 0) return false;
    p();
  }
}

template <Elem T, class P> EP_DEV void reducer(const HtBlock &b, const P &p, int lane) {
  constexpr int THREADS = HT_REDUCE_WARPS * 32;
  const int warp = (threadIdx.x >> 5) - 4, group = warp / HT_REDUCE_WARPS;
  const int at = (warp % HT_REDUCE_WARPS * 32 + lane) * 16;
  for (int k = group;; k += HT_REDUCE_GROUPS) {
    if (!waitItem(b, k)) return;
    const int n = b.item(k).n;
    int c = b.item(k).first;
    const int bytes = pieceBytes(p.row(), b.item(k).piece);
    Sum<T> sum[4];
#pragma unroll
    for (int j = 0; j < 4; j++) sum[j].clear();
    for (int i = 0; i < n; i++, c++) {
      waitPast(&b.at->issued, c);
      waitPhase(&b.full[b.slot(c)], b.phase(c));
      if (n == 1) continue;
      char *place = b.place(c) + at;
      uint4 v[4];
#pragma unroll
      for (int j = 0; j < 4; j++) { // all loads before the first sum
        v[j] = make_uint4(0, 0, 0, 0);
        if (at + j * THREADS * 16 < bytes) v[j] = *(const uint4 *)(place + j * THREADS * 16);
      }
#pragma unroll
      for (int j = 0; j < 4; j++) sum[j].add(v[j]);
      if (i < n - 1) {
        __syncwarp();
        if (lane == 0) barrierArrive(&b.empty[b.slot(c)], 1);
        continue;
      }
#pragma unroll
      for (int j = 0; j < 4; j++) {
        if (at + j * THREADS * 16 < bytes) {
          *(uint4 *)(place + j * THREADS * 16) = sum[j].round();
        }
      }
      proxyFenceShared();
    }
    if (n == 0 && P::ZERO_ROW) {
      waitPast(&b.at->issued, c);
      waitPhase(&b.full[b.slot(c)], b.phase(c));
#pragma unroll
      for (int j = 0; j < 4; j++) {
        if (at + j * THREADS * 16 < bytes) {
          *(uint4 *)(b.place(c) + at + j * THREADS * 16) = make_uint4(0, 0, 0, 0);
        }
      }
      proxyFenceShared();
      c++;
    }
    __syncwarp();
    if (lane == 0) barrierArrive(&b.done[b.slot(k)], 1);
  }
}

// One bulk store an item. LAG: how many stores may be under way before the oldest must be written for good;
// with nothing to do all are finished, as in the scatter pipeline.
template <class P> EP_DEV void gatherStorer(const HtBlock &b, const P &p, int lane) {
  constexpr int LAG = 8;
  int k = 0, c = 0, held[3] = {-1, -1, -1};
  for (;; k++) {
    HtPatience patience;
    int n = 0;
    for (int idle = 0;; idle++) {
      const bool is = __shfl_sync(FULL_WARP, (int)told(&b.at->head) > k, 0);
      n = is ? b.item(k).n : 0;
      if (n < 0) break;
      if (is && __shfl_sync(FULL_WARP, barrierTest(&b.done[b.slot(k)], b.phase(k)), 0)) break;
      if (idle == 0) {
        bulkRead<0>();
        for (int j = 0; j < 3; j++) {
          if (lane == 0 && held[j] >= 0) barrierArrive(&b.empty[held[j]], HT_REDUCE_WARPS);
          held[j] = -1;
        }
      }
      if (P::FEEDS && idle == HT_IDLE) {
        bulkDone<0>();
        if (lane == 0) tell(&b.at->complete, k);
      }
      patience();
    }
    if (n < 0) break;
    const int pieces = piecesOf<P>(n);
    c += pieces;
    if (lane == 0) {
      if (pieces) p.store(b.item(k), sharedAddress(b.place(c - 1)));
      bulkCommit();
      bulkRead<3>();
      if (held[2] >= 0) barrierArrive(&b.empty[held[2]], HT_REDUCE_WARPS);
      if (P::FEEDS) {
        bulkDone<LAG>();
        if (k + 1 - LAG > (int)told(&b.at->complete)) tell(&b.at->complete, k + 1 - LAG);
      } else {
        tell(&b.at->stored, k + 1);
      }
    }
    held[2] = held[1];
    held[1] = held[0];
    held[0] = pieces ? b.slot(c - 1) : -1;
    __syncwarp();
  }
  bulkDone<0>();
  __syncwarp();
  if (lane == 0) {
    tell(&b.at->complete, k);
    tell(&b.at->ended, 1);
  }
}

// A follower's: once an item's sum is on its way, and so its pieces have been read, their units are free.
template <class P> EP_DEV void gatherClerk(const HtBlock &b, const P &p, int lane) {
  for (int k = 0;; k++) {
    waitPast(&b.at->head, k);
    const HtItem &item = b.item(k);
    const int n = item.n;
    if (n < 0) return;
    p.note(item, b.entries(k), n, lane);
    waitPast(&b.at->stored, k);
    for (int i = lane; i < n; i += 32) p.release(b.entries(k)[i]);
    __syncwarp();
    if (lane == 0) tell(&b.at->noted, k + 1);
  }
}

// All threads: roles 0 to 3, then the reducers.
template <Elem T, class P>
EP_DEV void gatherPipe(const HtBlock &b, const P &p, const HtShape &shape, unsigned *work) {
  const int lane = threadIdx.x & 31, role = threadIdx.x >> 5;
  if (role == 0) scout(b, p, shape, work, lane);
  if (role == 1) gatherLoader(b, p, lane);
  if (role == 2) gatherStorer(b, p, lane);
  if (role == 3) {
    if constexpr (P::FEEDS)
      flagger(b, p, lane);
    else
      gatherClerk(b, p, lane);
  }
  if (role >= 4) reducer<T>(b, p, lane);
}
// Readers of a slot: the reducing warps, or the storer for all of them.
constexpr int HT_GATHER_READERS = HT_REDUCE_WARPS;

#endif
