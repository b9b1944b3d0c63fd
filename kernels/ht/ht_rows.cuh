// The pipeline of asynchronous copies, in which a warp has an item to itself:
//
//   scheduler -> HT_ROW_WARPS reducers -> completion
//
//   sums    n chunks in, their sum out, in the order of the entries, in fp32, rounded once; a sum of one
//           chunk is a copy
//   copies  one chunk in, to n places (HtCopies)
//
// A lane streams its part of the item's chunks through shared memory of its own by asynchronous copies of
// 16 bytes, a step (of all entries) after the other, adds, and stores what belongs where. No stage
// passes from warp to warp, and the copies are of the proxy of ordinary accesses: there is nothing to wait
// for but items, and no fence.
#ifndef TREFOIL_KERNELS_HT_ROWS_CUH
#define TREFOIL_KERNELS_HT_ROWS_CUH

#include "kernels/common/reduce.cuh"
#include "kernels/ht/ht_completion.cuh"

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

// A lane's vectors of one step.
struct HtRowVectors {
  uint4 v[HT_ROW_VECTORS];
};

// The sum of an item's chunks.
template <Elem T> struct HtPlainSum {
  Sum<T> sum[HT_ROW_VECTORS];

  EP_DEV void clear() {
#pragma unroll
    for (int j = 0; j < HT_ROW_VECTORS; j++) sum[j].clear();
  }
  EP_DEV void add(const HtRowVectors &in, const int2 *, int, int) {
#pragma unroll
    for (int j = 0; j < HT_ROW_VECTORS; j++) sum[j].add(in.v[j]);
  }
  EP_DEV uint4 round(int j) const {
    return sum[j].round();
  }
};

// A warp's item. SUM: HtPlainSum, one with more levels, or HtCopies.
template <class SUM, class P> struct HtRowWork {
  const P &p;
  const HtItem &item;
  const int2 *entries;
  char *ring; // this lane's
  int lane, bytes;
  int entry = 0, at = 0; // of the next copies

  EP_DEV void copyStep(int slot) {
    if (at < bytes) {
      const char *from = p.from(item, entries[entry]) + at + lane * 16;
      const uint32_t to = sharedAddress(ring) + slot * HT_ROW_STEP;
#pragma unroll
      for (int j = 0; j < HT_ROW_VECTORS; j++) {
        if (at + j * 512 + lane * 16 < bytes) copyAsync(to + j * 512, from + j * 512);
      }
      if (++entry == item.n) {
        entry = 0;
        at += HT_ROW_STEP;
      }
    }
    copyCommit(); // of a step past the end too: groups are counted
  }
  EP_DEV void add() {
    const int n = item.n;
    char *to = p.to(item) + lane * 16;
#pragma unroll
    for (int slot = 0; slot < HT_ROW_DEPTH; slot++) copyStep(slot);
    SUM sum;
    sum.clear();
    int slot = 0, i = 0;
    for (int done = 0; done < bytes;) {
      copyWait<HT_ROW_DEPTH - 1>();
      HtRowVectors in;
#pragma unroll
      for (int j = 0; j < HT_ROW_VECTORS; j++)
        in.v[j] = *(const uint4 *)(ring + slot * HT_ROW_STEP + j * 512);
      if (n > 1) sum.add(in, entries, i, n);
      if (++i == n) {
#pragma unroll
        for (int j = 0; j < HT_ROW_VECTORS; j++) {
          if (done + j * 512 + lane * 16 < bytes)
            storeStream(to + done + j * 512, n > 1 ? sum.round(j) : in.v[j]);
        }
        sum.clear();
        i = 0;
        done += HT_ROW_STEP;
      }
      copyStep(slot);
      slot = slot + 1 == HT_ROW_DEPTH ? 0 : slot + 1;
    }
  }
  EP_DEV void zero() const {
    char *to = p.to(item);
    for (int o = lane * 16; o < bytes; o += 512) storeStream(to + o, make_uint4(0, 0, 0, 0));
  }
  EP_DEV void run() {
    if (item.n > 0)
      add();
    else if (P::ZERO_ROW)
      zero();
  }
};

struct HtCopies {};
template <class P> struct HtRowWork<HtCopies, P> {
  const P &p;
  const HtItem &item;
  const int2 *entries;
  char *ring; // this lane's
  int lane, bytes;

  EP_DEV void copyStep(const HtChunkPlace &from, int at, int slot) const {
    const uint32_t to = sharedAddress(ring) + slot * HT_ROW_STEP;
#pragma unroll
    for (int j = 0; j < HT_ROW_VECTORS; j++) {
      const int o = at + j * 512 + lane * 16;
      if (o < bytes) copyAsync(to + j * 512, from.at(o));
    }
    copyCommit();
  }
  EP_DEV void store(const HtRowVectors &in, int at) const {
    for (int i = 0; i < item.n; i++) {
      const HtChunkPlace to = p.place(item, entries[i]);
#pragma unroll
      for (int j = 0; j < HT_ROW_VECTORS; j++) {
        const int o = at + j * 512 + lane * 16;
        if (o < bytes) storeStream(to.at(o), in.v[j]);
      }
    }
  }
  EP_DEV void run() {
    if (item.n <= 0) return;
    const HtChunkPlace from = p.source(item);
    for (int slot = 0; slot < HT_ROW_DEPTH; slot++) copyStep(from, slot * HT_ROW_STEP, slot);
    int slot = 0;
    for (int at = 0; at < bytes; at += HT_ROW_STEP) {
      copyWait<HT_ROW_DEPTH - 1>();
      HtRowVectors in;
#pragma unroll
      for (int j = 0; j < HT_ROW_VECTORS; j++)
        in.v[j] = *(const uint4 *)(ring + slot * HT_ROW_STEP + j * 512);
      store(in, at);
      copyStep(from, at + HT_ROW_DEPTH * HT_ROW_STEP, slot);
      slot = slot + 1 == HT_ROW_DEPTH ? 0 : slot + 1;
    }
  }
};

// Items as they come, off the block's counter.
template <class SUM, class P> EP_DEV void rowReducer(const HtBlock &b, const P &p, int lane) {
  char *ring = b.ring + ((threadIdx.x >> 5) - 2) * HT_ROW_RING + lane * 16;
  for (;;) {
    int k = 0;
    if (lane == 0) k = (int)atomicAdd(&b.at->loaded, 1u);
    k = __shfl_sync(FULL_WARP, k, 0);
    if (!waitItem(b, k)) return;
    const HtItem &item = b.item(k);
    HtRowWork<SUM, P> work{p, item, b.entries(k), ring, lane, chunkBytes(p.row(), item.chunk)};
    work.run();
    __syncwarp();
    if (lane == 0) barrierArrive(b.isDone(k), 1);
  }
}

// Items that are through, in their order: a sender's flags, behind one fence for all of them; a
// receiver's credits.
template <class P> EP_DEV void rowCompletion(const HtBlock &b, const P &p, int lane) {
  HtWatchdog deadline;
  for (int k = 0;;) {
    const int head = __shfl_sync(FULL_WARP, (int)loadAcquireShared(&b.at->head), 0), i = k + lane;
    __syncwarp(); // what lane 0 has acquired, all may read
    const bool is = i < head && b.item(i).n >= 0 && barrierTest(b.isDone(i), b.donePhase(i));
    const unsigned isNot = ~__ballot_sync(FULL_WARP, is);
    const int m = isNot ? __ffs(isNot) - 1 : 32;
    if (m == 0) {
      if (head > k && b.item(k).n < 0) return;
      deadline();
      __nanosleep(50);
      continue;
    }
    passMetadata(b, p, k, m, lane);
    if constexpr (P::SENDS)
      raiseFlags(b, p, k, k + m, lane);
    else if (lane < m)
      p.release(b.item(i), b.entries(i));
    __syncwarp();
    k += m;
    if (lane == 0) {
      storeReleaseShared(&b.at->stored, k);
      storeReleaseShared(&b.at->retired, k);
    }
    deadline = HtWatchdog();
  }
}

// All threads: roles 0 and 1, then the reducers.
template <class SUM, class P>
EP_DEV void rowPipe(const HtBlock &b, const P &p, const HtShape &shape, unsigned *work) {
  const int lane = threadIdx.x & 31, role = threadIdx.x >> 5;
  if (role == 0) scheduler(b, p, shape, work, lane);
  if (role == 1) rowCompletion(b, p, lane);
  if (role >= 2 && role - 2 < b.room) rowReducer<SUM>(b, p, lane);
}

#endif
