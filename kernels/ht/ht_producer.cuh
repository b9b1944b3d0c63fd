// The producer of a pipeline (ht_pipe.cuh), its scheduler: takes candidates off the operation's counter,
// waits for their flags or credits, and describes them as work items.
#ifndef TREFOIL_KERNELS_HT_PRODUCER_CUH
#define TREFOIL_KERNELS_HT_PRODUCER_CUH

#include "kernels/ht/ht_pipe.cuh"

// What an entry, or the one side, waits for before its item may run.
struct HtWatch {
  const uint32_t *word; // NULL: nothing
  int want;             // epoch
  int rank;
};
struct HtEntry {
  HtWatch watch;
  HtLocation location;
  bool is;
};

// What a lane has loaded of the tables for its candidate, one batch ahead of its use.
struct HtAhead {
  int index; // of the token among its source's, -1: no item
  int2 entry;
};

EP_DEV void waitRoom(const HtBlock &b, int k, int ahead) {
  HtWatchdog p;
  while ((int)(k - min((int)loadAcquireShared(&b.at->stored),
                       (int)loadAcquireShared(&b.at->retired))) > HT_DESCS ||
         (int)(k - loadAcquireShared(&b.at->loaded)) > ahead) {
    p();
  }
  __syncwarp();
}

EP_DEV void finish(const HtBlock &b, int k, int lane) {
  waitRoom(b, k + 1, HT_DESCS);
  if (lane == 0) {
    b.item(k).n = -1;
    storeReleaseShared(&b.at->end, k + 1);
    storeReleaseShared(&b.at->head, k + 1);
  }
}

// A rank that is not in the operation at all is named before any other.
template <class P> EP_DEV void nameCulprit(const P &p, Awaited &w, unsigned &expected) {
  const int r = p.missing();
  if (r < 0) return;
  w.phase = EP_WAIT_ANNOUNCE;
  w.rank = r;
  expected = w.received = 0;
  w.item = -1;
}

// One thread: true to poll again.
template <class P>
EP_DEV bool keepWaiting(const P &p, const Awaited &w, unsigned expected, Spin &spin) {
  return htKeepWaiting(p.group(), w, expected, spin);
}

// Describes items [k, k + m): the groups of p.lanes() lanes that have one, in their order. Items are shown
// as soon as all before them are. False: gave up.
template <class P>
EP_DEV bool describe(const HtBlock &b, const P &p, int k, int c, const HtAhead &ahead, int lane) {
  const int lanes = p.lanes(), first = lane & -lanes, l = lane - first;
  const unsigned group = (1u << lanes) - 1;
  const bool mine = c >= 0;
  const unsigned heads = __ballot_sync(FULL_WARP, mine && l == 0);
  const int m = __popc(heads), at = k + __popc(heads & ((1u << first) - 1));
  HtItem item = {};
  int bound = 0, i0 = 0, n = 0, shown = 0;
  HtEntry e = {};
  if (mine) {
    bound = p.begin(c, ahead.index, item);
    if (l < bound) e = p.entry(item, l, ahead.entry);
    if constexpr (P::WATCH_ONE) {
      if (l == 0) e.watch = p.watchOne(item);
    }
  }
  bool fin = !mine;
  Spin spin;
  for (;;) {
    bool alive = true;
    if (e.watch.word) {
      const uint32_t v = loadAcquire(e.watch.word);
      if ((int)(v >> 1) == e.watch.want) {
        e.watch.word = nullptr;
        if ((v & 1) && e.is) {
          e.is = false;
          p.isVoid(e.location);
        }
      } else {
        Awaited w = {P::KIND, P::PHASE, e.watch.rank, v >> 1, item.token};
        unsigned expected = (unsigned)e.watch.want;
        if (!((spin.polls + 1) & 255)) nameCulprit(p, w, expected);
        alive = keepWaiting(p, w, expected, spin);
      }
    }
    if (__any_sync(FULL_WARP, !alive)) return false;
    const unsigned waits = __ballot_sync(FULL_WARP, e.watch.word != nullptr);
    const bool ready = !fin && !(waits >> first & group);
    const unsigned in = __ballot_sync(FULL_WARP, ready && e.is) >> first & group;
    if (ready) {
      if (e.is) {
        b.entries(at)[n + __popc(in & ((1u << l) - 1))] =
            make_int2(e.location.code, e.location.epoch);
      }
      n += __popc(in);
      i0 += lanes;
      e = HtEntry{};
      if (i0 + l < bound) e = p.entry(item, i0 + l, p.load(item, i0 + l));
      if (i0 >= bound) {
        fin = true;
        if (l == 0) {
          if (n == 0) p.isEmpty(item);
          item.n = n;
          b.item(at) = item;
        }
      }
    }
    const unsigned pending = __ballot_sync(FULL_WARP, !fin);
    const int now = __popc(pending ? heads & ((1u << (__ffs(pending) - 1)) - 1) : heads);
    __syncwarp();
    if (now > shown && lane == 0) storeReleaseShared(&b.at->head, k + now);
    shown = now;
    if (now == m) return true;
  }
}

// The loads of a batch go out before the batch in front of it is waited for, and so do those that decide
// which candidates of the next window are items.
template <class P>
EP_DEV void scheduler(const HtBlock &b, const P &p, const HtShape &shape, unsigned *work,
                      int lane) {
  const long long total = p.candidates();
  const int group = lane >> (__ffs(p.lanes()) - 1), l = lane & (p.lanes() - 1);
  long long base = 0, nextBase = 0;
  unsigned taken = 0, mask = 0;
  int nextIndex = -1, k = 0;
  const auto take = [&] {
    if (lane == 0) taken = atomicAdd(work, (unsigned)shape.take);
  };
  const auto lookAhead = [&] { // at the next candidates
    nextBase = __shfl_sync(FULL_WARP, taken, 0);
    nextIndex = lane < shape.take && nextBase + lane < total ? p.index((int)(nextBase + lane)) : -1;
    take();
  };
  const auto nextBatch = [&](HtAhead &ahead) { // this lane's candidate or -1; -2 for all: no more
    while (!mask) {
      if (nextBase >= total) return -2;
      base = nextBase;
      mask = __ballot_sync(FULL_WARP, nextIndex >= 0);
      lookAhead();
    }
    int c = -1;
    for (int i = 0; mask && i < shape.batch; i++, mask &= mask - 1) {
      if (i == group) c = (int)base + __ffs(mask) - 1;
    }
    ahead = HtAhead{-1, make_int2(-1, 0)};
    if (c >= 0) ahead = p.ahead(c, l);
    return c;
  };
  take();
  lookAhead();
  HtAhead ahead, nextAhead;
  int c = nextBatch(ahead);
  while (c != -2) {
    const int m = __popc(__ballot_sync(FULL_WARP, c >= 0 && l == 0));
    const int next = nextBatch(nextAhead);
    waitRoom(b, k + m, shape.batch + 4);
    if (!describe(b, p, k, c, ahead, lane)) {
      k = (int)loadAcquireShared(&b.at->head);
      break;
    }
    k += m;
    c = next;
    ahead = nextAhead;
  }
  finish(b, k, lane);
}

#endif
