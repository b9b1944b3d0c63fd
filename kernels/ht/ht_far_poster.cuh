// The block of a dispatch or combine that uses the network (ht_far.h). Each ring has four duties, and a
// warp goes round some of them, of one ring or several; none of them waits:
//
//   post      slots that have been filled, without a gap, are put, with a strong signal: how many
//   land      of slots that have come, the words that forwarders and receivers wait for
//   return    slots that have been read, without a gap, are signalled back
//   refill    of slots that have been read at the other end, the words that senders and reducers wait for
//
// The tables give both ends the number of slots that an operation adds. The block stays until all are
// put, have landed and are signalled back; what comes back later the next launch takes.
//
// With nothing under way to the node all that is complete goes, else a batch of slots is waited for. To
// wait for full chunks would stop both ends where rings are small: the rest of a chunk may need the
// credits that it keeps back.
#ifndef TREFOIL_KERNELS_HT_FAR_POSTER_CUH
#define TREFOIL_KERNELS_HT_FAR_POSTER_CUH

#include "kernels/ht/ht_far_control.cuh"
#include "kernels/net/net.cuh"

enum HtDuty { HT_POST, HT_LAND, HT_RETURN, HT_REFILLS, HT_DUTIES };

// A duty of a ring, in slots of this launch; of refills: since the rings began. In shared memory.
struct HtPosted {
  unsigned long long ready, done; // filled, posted | -, landed | consumed, returned | -, refilled
  Spin spin;                      // of a put that was refused
  bool isOver;
#ifdef TREFOIL_HT_FAR_STAMPS
  uint32_t stamps;
  unsigned long long left;
#endif
};
constexpr int HT_MOST_CHUNKS = 4; // in a put, where so many wait
constexpr int HT_SEARCH = 16;     // words a lane looks at, loads in flight
constexpr int HT_POSTER_BYTES = HT_DUTIES * EP_HT_FAR_NODES * sizeof(HtPosted);

template <class Network> class Poster {
public:
  EP_DEV Poster(const HtFar &at, unsigned operationKind, HtPosted *shared)
      : far(at), kind((int)indexOfKind(operationKind)), waitKind(operationKind),
        lane(threadIdx.x % 32), states(shared), net(at.f.far.port) {}

  // All threads of the block.
  EP_DEV void run(const HtFarTables &t, int numChunks) {
    EP_SHARED(int, numOpen); // duties that are not over, but for refills
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32, items = far.num * HT_DUTIES;
    if (threadIdx.x == 0) numOpen = far.num * (HT_DUTIES - 1);
    for (int i = warp; i < items; i += warps) {
      const int at = i / HT_DUTIES;
      const bool refills = i % HT_DUTIES == HT_REFILLS;
      states[i] = HtPosted{0, refills ? far.c.rings[kind][at].credited : 0, Spin{}, false};
    }
    __syncthreads();
    for (bool goesOn = warp < items; goesOn;) {
      goesOn = false;
      for (int i = warp; i < items; i += warps) {
        begin(i, t, numChunks);
        if (s.isOver) continue;
#ifdef TREFOIL_HT_FAR_STAMPS
        const HtPosted was = s;
        work((HtDuty)(i % HT_DUTIES), &numOpen);
        stamp((HtDuty)(i % HT_DUTIES), was);
#else
        work((HtDuty)(i % HT_DUTIES), &numOpen);
#endif
        save(i);
        goesOn = goesOn || !s.isOver;
      }
      if (__any_sync(FULL_WARP, hasFailed())) break;
      if (goesOn) __nanosleep(100);
    }
    for (int i = warp; i < items; i += warps) {
      if (lane == 0 && i % HT_DUTIES == HT_REFILLS) {
        far.c.rings[kind][i / HT_DUTIES].credited = states[i].done;
      }
    }
  }

private:
  EP_DEV void begin(int i, const HtFarTables &t, int numChunks) {
    __syncwarp();
    s = states[i];
    if (i == item) return;
    const bool back = kind == 1;
    item = i;
    ring = i / HT_DUTIES;
    before = far.c.rings[kind][ring];
    out = (unsigned long long)t.counts[back][ring] * numChunks;
    in = (unsigned long long)t.counts[!back][ring] * numChunks;
  }
  EP_DEV void save(int i) {
    __syncwarp();
    if (lane == 0) states[i] = s;
    __syncwarp();
  }
  EP_DEV void work(HtDuty duty, int *numOpen) {
    if (duty == HT_REFILLS) {
      s.isOver = __shfl_sync(FULL_WARP, *(volatile int *)numOpen, 0) == 0;
      refill();
      return;
    }
    if (duty == HT_POST) {
      post();
    } else if (duty == HT_LAND) {
      land();
    } else {
      giveBack();
    }
    s.isOver = s.done == (duty == HT_POST ? out : in);
    if (s.isOver && lane == 0) atomicAdd(numOpen, -1);
  }
  EP_DEV bool hasFailed() const {
    return lane == 0 && loadVolatile(&htControl(far.g).wait.failed) != 0;
  }

  EP_DEV int peer() const {
    return far.railRank(ring);
  }
  EP_DEV int slots() const {
    return far.f.far.at.ringSlots[kind];
  }
  EP_DEV int signalOf(bool credits, int node) const {
    return (2 * (int)credits + kind) * (far.num + 1) + node;
  }
  // All lanes: what the other end has added to a signal since the rings began.
  EP_DEV unsigned long long signalled(bool credits, unsigned long long earlier) const {
    unsigned long long n = 0;
    if (lane == 0) n = net.readSignal(signalOf(credits, far.nodeOf(ring)));
    n = __shfl_sync(FULL_WARP, n, 0);
    __syncwarp(); // what lane 0 has acquired
    return n > earlier ? n - earlier : 0;
  }
  EP_DEV bool isIdle() const {
    return __shfl_sync(FULL_WARP, (int)(lane == 0 && net.isIdle(peer())), 0);
  }

  // One word a slot of this ring, by the slot's number; and one in each slot (only of a combine: its epoch,
  // if it stands for nothing). In registers: system fences empty the cache that holds the tables.
  struct Words {
    uint32_t *first;
    int bits;
    EP_DEV HtLocation slot(unsigned long long q) const { return fifoSlotOf(0, q, bits); }
    EP_DEV uint32_t load(unsigned long long q) const { return loadVolatile(first + slot(q).code); }
    EP_DEV void set(unsigned long long q, bool isVoid) const {
      const HtLocation u = slot(q);
      storeRelaxed(first + u.code, (uint32_t)u.epoch << 1 | (uint32_t)isVoid);
    }
  };
  struct Voids {
    char *first;
    size_t stride;
    EP_DEV uint32_t *at(const HtLocation &u) const { return (uint32_t *)(first + u.code * stride); }
  };
  EP_DEV Words wordsOf(HtRingWord what) const {
    return Words{far.wordAt(kind, what, (HT_RING_PEER + ring) << 24), far.f.slotBits[kind]};
  }
  EP_DEV Voids voidsOf(bool isIn) const {
    const ep_ht_far_layout_t &l = far.f.far.at;
    return Voids{far.ringSlotAt(1, isIn, (HT_RING_PEER + ring) << 24) + l.voidAt, l.slotBytes};
  }

  // Moves on `at` up to `end`, over slots that have their word, to the first that has not.
  // visit(u, isVoid): of those. One fence for many words: with stores of a whole GPU under way it takes
  // microseconds. Of the GPU's scope, as the words are its own blocks': what a put takes of them to
  // the network is NCCL's part.
  template <class F>
  EP_DEV void extend(unsigned long long &at, unsigned long long end, HtRingWord what,
                     unsigned long long first, F visit) const {
    const Words all = wordsOf(what);
    while (at < end) {
      uint32_t words[HT_SEARCH];
#pragma unroll
      for (int j = 0; j < HT_SEARCH; j++) {
        const unsigned long long q = at + j * 32 + lane;
        if (q < end) words[j] = all.load(first + q);
      }
      const bool any = (int)(words[0] >> 1) == all.slot(first + at).epoch; // lane 0's
      if (!__shfl_sync(FULL_WARP, any, 0)) return;
      __threadfence(); // what was written before these words
#pragma unroll
      for (int j = 0; j < HT_SEARCH; j++) {
        const unsigned long long q = at + lane; // `at` has moved on by j * 32
        const HtLocation u = all.slot(first + q);
        const bool is = q < end && (int)(words[j] >> 1) == u.epoch;
        const unsigned missing = ~__ballot_sync(FULL_WARP, is);
        const int there = missing ? __ffs(missing) - 1 : 32;
        if (lane < there) visit(u, (bool)(words[j] & 1));
        at += there;
        if (there < 32) return;
      }
    }
  }
  EP_DEV HtLocation ringSlotOf(unsigned long long q) const {
    return far.ringSlotOf(kind, ring, q);
  }

  // All lanes: a post that may have been refused.
  EP_DEV bool took(bool posted) {
    if (posted) {
      s.spin = Spin{};
    } else if (lane == 0) {
      htKeepWaiting(far.g, Awaited{waitKind, EP_WAIT_POST, peer(), 0, -1}, 0, s.spin);
    }
    return posted;
  }

  // Slots are filled about as fast as they are looked at: without a limit the search goes on until all are.
  EP_DEV void post() {
    const int chunk = far.f.far.at.batchSlots[kind], large = HT_MOST_CHUNKS * chunk;
    const int search = max(32 * HT_SEARCH, chunk);
    const unsigned long long end = s.done + search < out ? s.done + search : out;
    const Voids voids = voidsOf(false);
    extend(s.ready, end, HT_FILLED, before.sent, [&](const HtLocation &u, bool isVoid) {
      if (isVoid) *voids.at(u) = (uint32_t)u.epoch;
    });
    while (s.done < s.ready) {
      const unsigned long long waiting = s.ready - s.done;
      if (waiting < (unsigned)chunk && s.ready != out && !isIdle()) break;
      const HtLocation u = ringSlotOf(before.sent + s.done);
      const int untilEnd = slots() - (u.code & 0xffffff), most = min(large, untilEnd);
      const int n = waiting < (unsigned)most ? (int)waiting : most;
      const uint64_t slot = far.f.far.at.slotBytes, base = far.f.far.port.scratch + 128;
      // At the other end this node has a number among the far ones of that.
      const int there = far.own < far.nodeOf(ring) ? far.own : far.own - 1;
      const int landing = (HT_RING_PEER + there) << 24 | (u.code & 0xffffff);
      if (!took(net.template putSignal<NetSignal::STRONG>(
              peer(), base + far.ringSlotOffset(kind, true, landing),
              base + far.ringSlotOffset(kind, false, u.code), n * slot, signalOf(false, far.own),
              (uint64_t)n))) {
        break;
      }
      if (lane == 0) net.count(kind, peer());
      s.done += n;
    }
  }

  EP_DEV void land() {
    const unsigned long long all = signalled(false, before.receivedBefore + before.received);
    const unsigned long long there = all < in ? all : in;
    if (s.done >= there) return;
    const Words words = wordsOf(HT_LANDED);
    __threadfence_system();
    for (; s.done < there; s.done += HT_SEARCH * 32) {
      bool isVoid[HT_SEARCH] = {};
      if (kind == 1) areVoid(isVoid, there, words);
#pragma unroll
      for (int j = 0; j < HT_SEARCH; j++) {
        const unsigned long long q = s.done + j * 32 + lane;
        if (q < there) words.set(before.received + q, isVoid[j]);
      }
    }
    s.done = there;
  }
  // Of slots that have come.
  EP_DEV void areVoid(bool (&isVoid)[HT_SEARCH], unsigned long long there,
                      const Words &words) const {
    const Voids voids = voidsOf(true);
#pragma unroll
    for (int j = 0; j < HT_SEARCH; j++) {
      const unsigned long long q = s.done + j * 32 + lane;
      const HtLocation u = words.slot(before.received + q);
      if (q < there) isVoid[j] = loadVolatile(voids.at(u)) == (uint32_t)u.epoch;
    }
  }

  EP_DEV void giveBack() {
    extend(s.ready, in, HT_CONSUMED, before.received, [](const HtLocation &, bool) {});
    const unsigned long long waiting = s.ready - s.done;
    const bool isEnough = waiting * 4 >= (unsigned)slots() || s.ready == in;
    if (waiting && (isEnough || isIdle()) &&
        took(net.template signal<NetSignal::WEAK>(peer(), signalOf(true, far.own), waiting))) {
      s.done = s.ready;
    }
  }

  EP_DEV void refill() {
    const unsigned long long all = signalled(true, before.sentBefore);
    if (s.done >= all) return;
    const Words words = wordsOf(HT_REFILL);
    __threadfence_system();
    for (s.done += lane; s.done < all; s.done += 32) words.set(s.done, false);
    s.done = all;
  }

#ifdef TREFOIL_HT_FAR_STAMPS
  // What a duty has done since `was`.
  EP_DEV void stamp(HtDuty duty, const HtPosted &was) {
    if (!far.f.stamps || ring >= HT_STAMPED_RINGS || lane) return;
    const unsigned long long number = loadVolatile(&htControl(far.g).numbers[kind]);
    HtStampedDuty &to = far.f.stamps->duties[kind][number % HT_STAMPED_LAUNCHES][ring][duty];
    const auto add = [&](HtStampOf of, unsigned long long count) {
      if (s.stamps == HT_STAMPS) return;
      if (!s.stamps) to.number = number + 1;
      to.at[s.stamps++] = HtStamp{clockNs(), of, (uint32_t)count};
      to.stamps = s.stamps;
    };
    const unsigned long long all = duty == HT_POST ? out : in;
    const bool isReady = s.ready / 32 != was.ready / 32 || (s.ready == all && was.ready != all);
    if (duty == HT_POST) {
      s.left = net.completed(peer());
      if (s.left != was.left || !s.stamps) add(HT_STAMP_LEFT, s.left);
      if (isReady) add(HT_STAMP_FILLED, s.ready);
      if (s.done != was.done) add(HT_STAMP_PUT, s.done);
    } else if (duty == HT_RETURN) {
      if (isReady) add(HT_STAMP_READ, s.ready);
      if (s.done != was.done) add(HT_STAMP_RETURNED, s.done);
    } else if (s.done != was.done) {
      add(duty == HT_LAND ? HT_STAMP_LANDED : HT_STAMP_REFILLED, s.done);
    }
  }
#endif

  const HtFar &far;
  const int kind;
  const unsigned waitKind;
  const int lane;
  HtPosted *const states;
  const Net<Network> net;
  int item = -1, ring = 0; // the state's, and what belongs to it
  ep_ht_ring_count_t before = {};
  unsigned long long out = 0, in = 0;
  HtPosted s = {};
};

#endif
