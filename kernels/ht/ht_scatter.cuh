// The scatter pipeline (ht_pipe.cuh): one chunk in, n copies out. Stage of item k is k mod S.
#ifndef TREFOIL_KERNELS_HT_SCATTER_CUH
#define TREFOIL_KERNELS_HT_SCATTER_CUH

#include "kernels/ht/ht_completion.cuh"

// Up to four items at a time, a lane an item. Items without entries take a stage and load nothing.
template <class P> EP_DEV void scatterLoader(const HtBlock &b, const P &p, int lane) {
  for (int k = 0;;) {
    const int m = __shfl_sync(FULL_WARP, min(4, waitPast(&b.at->head, k)), 0);
    __syncwarp(); // what lane 0 has acquired, all may read
    const int i = k + lane;
    int n = 0;
    if (lane < m) {
      const HtItem &item = b.item(i);
      n = item.n;
      if (n >= 0) {
        waitPhase(&b.empty[b.stage(i)], b.phase(i) ^ 1);
        if (P::FENCE) proxyFence();
        if (n > 0)
          p.load(item, sharedAddress(b.stageAt(i)), &b.full[b.stage(i)]);
        else
          barrierArrive(&b.full[b.stage(i)], 1);
      }
    }
    const bool over = __any_sync(FULL_WARP, n < 0);
    k += m - (over ? 1 : 0);
    if (lane == 0) {
      storeReleaseShared(&b.at->loaded, k);
      storeReleaseShared(&b.at->issued, k);
    }
    if (over) return;
  }
}

// Up to four items at a time, eight lanes an item; one group of bulk stores a step. A stage is given back
// READ steps later, when its group has been read; with nothing to do at once, since items to come may need
// it. A sender publishes LAG steps later that a group is written. More of them keep flags back: with small
// FIFOs 8 steps take 20 % longer, 16 steps 70 %. With nothing to do all are finished, as the credits
// awaited may depend on their flags.
template <class P> EP_DEV void scatterStorer(const HtBlock &b, const P &p, int lane) {
  constexpr int LAG = 2, READ = 1;
  const int i = lane >> 3;
  int k = 0, back = 0, end[LAG] = {}; // items stored, stages given back, k before the last steps
  const auto giveBack = [&](int until) {
    if (back + lane < until) barrierArrive(&b.empty[b.stage(back + lane)], 1);
    back = until;
  };
  for (;;) {
    // The description of k must be there before its stage's phase may be asked for.
    HtWatchdog deadline;
    int there = 0, idle = 0;
    bool over = false;
    for (;;) {
      const int head = (int)loadAcquireShared(&b.at->head),
                issued = (int)loadAcquireShared(&b.at->issued);
      const int u = k + i;
      const bool isEnd = u < head && b.item(u).n < 0;
      const bool ready =
          u < issued && u < head && !isEnd && barrierTest(&b.full[b.stage(u)], b.phase(u));
      const unsigned notReady = ~__ballot_sync(FULL_WARP, ready);
      there = notReady ? (__ffs(notReady) - 1) >> 3 : 4;
      over = __shfl_sync(FULL_WARP, isEnd, 0);
      if (there || over) break;
      if (back < k) {
        bulkRead<0>();
        __syncwarp();
        giveBack(k);
      }
      if (++idle == HT_IDLE) {
        bulkDone<0>();
        __syncwarp();
        if (lane == 0) storeReleaseShared(&b.at->complete, k);
#pragma unroll
        for (int j = 0; j < LAG; j++) end[j] = k;
      }
      deadline();
    }
    if (over && !there) break;
    const int u = k + i;
    if (i < there) {
      const HtItem &item = b.item(u);
      for (int j = lane & 7; j < item.n; j += 8) {
        p.store(item, b.entries(u)[j], sharedAddress(b.stageAt(u)));
      }
      if constexpr (P::SIDE_DATA) p.storeSideData(item, b.entries(u), b.stageAt(u), lane & 7);
    }
#pragma unroll
    for (int j = LAG - 1; j > 0; j--) end[j] = end[j - 1];
    end[0] = k;
    k += there;
    bulkCommit();
    __syncwarp();
    bulkRead<READ>();
    __syncwarp();
    if (end[READ - 1] > back) giveBack(end[READ - 1]);
    bulkDone<LAG>();
    __syncwarp();
    if (lane == 0) storeReleaseShared(&b.at->complete, end[LAG - 1]);
  }
  bulkDone<0>();
  __syncwarp();
  if (lane == 0) {
    storeReleaseShared(&b.at->complete, k);
    storeReleaseShared(&b.at->ended, 1);
  }
}

// All threads: roles 0 to 3.
template <class P>
EP_DEV void scatterPipe(const HtBlock &b, const P &p, const HtShape &shape, unsigned *work) {
  const int lane = threadIdx.x & 31, role = threadIdx.x >> 5;
  if (role == 0) scheduler(b, p, shape, work, lane);
  if (role == 1) scatterLoader(b, p, lane);
  if (role == 2) scatterStorer(b, p, lane);
  if (role == 3) signalWarp(b, p, lane);
}
#endif
