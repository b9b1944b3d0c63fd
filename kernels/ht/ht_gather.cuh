// The gather pipeline: n chunks in, their sum out, in the order of the entries, in fp32, rounded once. Item
// k's chunks are the next n stages of the ring (one, of zeros, for a sum of nothing); the sum replaces the
// last of them. A sum of one chunk is a copy.
//
// HT_REDUCE_GROUPS groups of reducing warps take items by turns.
#ifndef TREFOIL_KERNELS_HT_GATHER_CUH
#define TREFOIL_KERNELS_HT_GATHER_CUH

#include "kernels/ht/ht_completion.cuh"
#include "kernels/common/reduce.cuh"

constexpr int HT_LOAD_ITEMS = 8, HT_LOAD_CHUNKS = 8; // of a step of the loader

// The items that the loader takes next: lane j < items has number k + j's chunks and where they begin.
struct HtStep {
  int items, chunks; // chunks: of all of them
  int first, mine;   // of the lane's item: its first chunk of the step, and how many
};

// Waits for item k; takes as many as are described and have few chunks together, or one. items 0: the end.
template <class P> EP_DEV HtStep nextStep(const HtBlock &b, int k, int lane) {
  const int m = min(HT_LOAD_ITEMS, __shfl_sync(FULL_WARP, waitPast(&b.at->head, k), 0));
  __syncwarp(); // what lane 0 has acquired, all may read
  const int n = lane < m ? b.item(k + lane).n : -1;
  const int there = __ffs(__ballot_sync(FULL_WARP, n < 0)) - 1; // lane m has none
  HtStep s;
  s.mine = lane < there ? chunksOf<P>(n) : 0;
  int end = s.mine;
#pragma unroll
  for (int d = 1; d < HT_LOAD_ITEMS; d *= 2) {
    const int before = __shfl_up_sync(FULL_WARP, end, d);
    if (lane >= d) end += before;
  }
  s.first = end - s.mine;
  const unsigned few =
      __ballot_sync(FULL_WARP, lane < there && (lane == 0 || end <= min(HT_LOAD_CHUNKS, b.S)));
  s.items = __popc(few);
  s.chunks = s.items ? __shfl_sync(FULL_WARP, end, s.items - 1) : 0;
  return s;
}

// A lane a chunk; chunks go out as soon as their stages and those before them are free. Issuing a bulk
// load takes about 125 ns of the warp, so all else is shared by the items of a step.
template <class P> EP_DEV void gatherLoader(const HtBlock &b, const P &p, int lane) {
  const int width = min(32, b.S);
  for (int k = 0, c = 0;;) {
    const HtStep s = nextStep<P>(b, k, lane);
    if (!s.items) return;
    for (int w = 0; w < s.chunks; w += width) {
      const int m = min(width, s.chunks - w), q = w + lane, stage = b.stage(c + q);
      const uint32_t phase = b.phase(c + q) ^ 1;
      int item = 0, i = q;
      for (int j = 1; j < s.items; j++) {
        const int first = __shfl_sync(FULL_WARP, s.first, j);
        if (first <= q) {
          item = j;
          i = q - first;
        }
      }
      HtWatchdog deadline;
      for (int out = 0; out < m;) {
        const bool waits = lane >= out && lane < m && !barrierTest(&b.empty[stage], phase);
        const unsigned notFree = __ballot_sync(FULL_WARP, waits);
        const int until = notFree ? __ffs(notFree) - 1 : m;
        if (until == out) {
          deadline();
          continue;
        }
        if (lane >= out && lane < until) {
          const HtItem &it = b.item(k + item);
          if (P::FENCE) proxyFence();
          if (it.n > 0)
            p.load(it, b.entries(k + item)[i], sharedAddress(b.stageAt(c + q)), &b.full[stage]);
          else
            barrierArrive(&b.full[stage], 1);
        }
        __syncwarp();
        if (lane == 0) storeReleaseShared(&b.at->issued, c + w + until);
        out = until;
      }
    }
    c += s.chunks;
    k += s.items;
    __syncwarp();
    if (lane == 0) storeReleaseShared(&b.at->loaded, k);
  }
}

// Waits until item k is described; false if an item before it, or itself, is the end.
EP_DEV bool waitItem(const HtBlock &b, int k) {
  HtWatchdog p;
  for (;;) {
    if ((int)loadAcquireShared(&b.at->head) > k) return b.item(k).n >= 0;
    const int end =
        (int)loadAcquireShared(&b.at->end); // the last description may be another item's by now
    if (end && end <= k + 1) return false;
    p();
  }
}

// Items by turns of the groups. What bounds a sum is how many instructions it takes: a lane waits for a
// chunk, all of a window at once, and then there is nothing between the loads and the additions.
template <Elem T, class P> EP_DEV void reducer(const HtBlock &b, const P &p, int lane) {
  constexpr int APART = HT_REDUCE_WARPS * 32 * 16, V = HT_REDUCE_VECTORS;
  const int warp = (threadIdx.x >> 5) - 4, group = warp / HT_REDUCE_WARPS;
  const int at = (warp % HT_REDUCE_WARPS * 32 + lane) * 16, width = min(32, b.S);
  for (int k = group;; k += HT_REDUCE_GROUPS) {
    if (!waitItem(b, k)) return;
    const int n = b.item(k).n, bytes = chunkBytes(p.row(), b.item(k).chunk);
    const int chunks = chunksOf<P>(n), first = b.item(k).first;
    Sum<T> sum[V];
#pragma unroll
    for (int j = 0; j < V; j++) sum[j].clear();
    for (int w = 0; w < chunks; w += width) {
      const int m = min(width, chunks - w), c = first + w + lane, from = b.stage(first + w);
      if (lane < m) {
        waitPast(&b.at->issued, c);
        waitPhase(&b.full[b.stage(c)], b.phase(c));
      }
      __syncwarp();
      for (int i = 0; n > 1 && i < m; i++) {
        const int stage = from + i < b.S ? from + i : from + i - b.S;
        const char *part = b.ring + stage * b.stageStride + at;
        uint4 v[V];
#pragma unroll
        for (int j = 0; j < V; j++) { // all loads before the first sum
          if (at + j * APART < bytes) v[j] = *(const uint4 *)(part + j * APART);
        }
#pragma unroll
        for (int j = 0; j < V; j++) {
          if (at + j * APART < bytes) sum[j].add(v[j]);
        }
      }
      __syncwarp();
      if (lane < m && w + lane < chunks - 1) barrierArrive(&b.empty[b.stage(c)], 1);
    }
    if (n > 1 || (n == 0 && P::ZERO_ROW)) {
      char *part = b.stageAt(first + chunks - 1) + at;
#pragma unroll
      for (int j = 0; j < V; j++) {
        if (at + j * APART < bytes)
          *(uint4 *)(part + j * APART) = n ? sum[j].round() : make_uint4(0, 0, 0, 0);
      }
      proxyFenceShared();
    }
    __syncwarp();
    if (lane == 0) barrierArrive(b.isDone(k), 1);
  }
}

// One bulk store an item. LAG: how many stores may be under way before the oldest must be written for good;
// with nothing to do all are finished, as in the scatter pipeline.
template <class P> EP_DEV void gatherStorer(const HtBlock &b, const P &p, int lane) {
  constexpr int LAG = 4;
  int k = 0, c = 0, held[3] = {-1, -1, -1};
  for (;; k++) {
    HtWatchdog deadline;
    int n = 0;
    for (int idle = 0;; idle++) {
      const bool is = __shfl_sync(FULL_WARP, (int)loadAcquireShared(&b.at->head) > k, 0);
      __syncwarp();
      n = is ? b.item(k).n : 0;
      if (n < 0) break;
      if (is && __shfl_sync(FULL_WARP, barrierTest(b.isDone(k), b.donePhase(k)), 0)) break;
      if (idle == 0) {
        bulkRead<0>();
        for (int j = 0; j < 3; j++) {
          if (lane == 0 && held[j] >= 0) barrierArrive(&b.empty[held[j]], HT_REDUCE_WARPS);
          held[j] = -1;
        }
      }
      if (P::SENDS && idle == HT_IDLE) {
        bulkDone<0>();
        if (lane == 0) storeReleaseShared(&b.at->complete, k);
      }
      deadline();
    }
    if (n < 0) break;
    const int chunks = chunksOf<P>(n);
    c += chunks;
    if (lane == 0) {
      if (chunks) p.store(b.item(k), sharedAddress(b.stageAt(c - 1)));
      bulkCommit();
      bulkRead<3>();
      if (held[2] >= 0) barrierArrive(&b.empty[held[2]], HT_REDUCE_WARPS);
      if (P::SENDS) {
        bulkDone<LAG>();
        if (k + 1 - LAG > (int)loadAcquireShared(&b.at->complete))
          storeReleaseShared(&b.at->complete, k + 1 - LAG);
      } else {
        storeReleaseShared(&b.at->stored, k + 1);
      }
    }
    held[2] = held[1];
    held[1] = held[0];
    held[0] = chunks ? b.stage(c - 1) : -1;
    __syncwarp();
  }
  bulkDone<0>();
  __syncwarp();
  if (lane == 0) {
    storeReleaseShared(&b.at->complete, k);
    storeReleaseShared(&b.at->ended, 1);
  }
}

// All threads: roles 0 to 3, then the reducers.
template <Elem T, class P>
EP_DEV void gatherPipe(const HtBlock &b, const P &p, const HtShape &shape, unsigned *work) {
  const int lane = threadIdx.x & 31, role = threadIdx.x >> 5;
  if (role == 0) scheduler(b, p, shape, work, lane);
  if (role == 1) gatherLoader(b, p, lane);
  if (role == 2) gatherStorer(b, p, lane);
  if (role == 3) {
    if constexpr (P::SENDS)
      signalWarp(b, p, lane);
    else
      completionWarp(b, p, lane);
  }
  if (role >= 4) reducer<T>(b, p, lane);
}
// Readers of a stage: the reducing warps, or the storer for all of them.
constexpr int HT_GATHER_READERS = HT_REDUCE_WARPS;

#endif
