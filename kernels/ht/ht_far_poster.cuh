// The block of a dispatch or combine that talks to the network (ht_far.h). A warp has some of the rings, and
// for each goes round four things, none of which waits:
//
//   post      units that have been filled, without a gap, are put, with a strong signal: how many
//   land      of units that have come, the words that forwarders and receivers wait for
//   return    units that have been read, without a gap, are signalled back
//   refill    of units that have been read at the other end, the words that senders and reducers wait for
//
// Both ends know from the tables how many units an operation adds. The block stays until all of those are
// put, have landed and are signalled back; what comes back later the next launch takes.
//
// With nothing under way to the node all that is complete goes, else a chunk of units is waited for. To
// wait for full chunks would stop both ends where rings are small: the rest of a chunk may need the
// credits that it keeps back.
#ifndef TREFOIL_KERNELS_HT_FAR_POSTER_CUH
#define TREFOIL_KERNELS_HT_FAR_POSTER_CUH

#include "kernels/ht/ht_far_control.cuh"
#include "kernels/net/net.cuh"

// Of this launch, in units; refilled: since the rings began. In shared memory, a ring's each.
struct HtPosted {
  unsigned long long filled, posted, landed, consumed, returned, refilled;
  Spin spin; // of a put that was refused
};
constexpr int HT_POSTER_BYTES = EP_HT_FAR_NODES * sizeof(HtPosted);

template <class Network> class Poster {
public:
  EP_DEV Poster(const HtFar &at, unsigned operationKind, HtPosted *shared)
      : far(at), kind((int)(operationKind - EP_HT_KIND_DISPATCH)), waitKind(operationKind),
        lane(threadIdx.x % 32), states(shared), net(at.f.far.port) {}

  // All threads of the block.
  EP_DEV void run(const HtFarTables &t, int numChunks) {
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (int i = warp; i < far.num; i += warps) {
      states[i] = HtPosted{0, 0, 0, 0, 0, far.c.rings[kind][i].credited, Spin{}};
    }
    __syncwarp();
    for (bool goesOn = warp < far.num; goesOn;) {
      goesOn = false;
      for (int i = warp; i < far.num; i += warps) {
        begin(i, t, numChunks);
        post();
        land();
        giveBack();
        refill();
        goesOn = goesOn || !isOver();
      }
      if (__any_sync(FULL_WARP, hasFailed())) break;
      if (goesOn) __nanosleep(100);
    }
    for (int i = warp; i < far.num; i += warps) {
      if (lane == 0) far.c.rings[kind][i].credited = states[i].refilled;
    }
  }

private:
  EP_DEV void begin(int i, const HtFarTables &t, int numChunks) {
    const bool back = kind == 1;
    ring = i;
    before = far.c.rings[kind][i];
    out = (unsigned long long)t.counts[back][i] * numChunks;
    in = (unsigned long long)t.counts[!back][i] * numChunks;
    __syncwarp();
    s = states[i];
  }
  EP_DEV void save() {
    __syncwarp();
    if (lane == 0) states[ring] = s;
    __syncwarp();
  }
  EP_DEV bool hasFailed() const {
    return lane == 0 && loadVolatile(&htControl(far.g).wait.failed) != 0;
  }
  EP_DEV bool isOver() const { return s.posted == out && s.landed == in && s.returned == in; }

  EP_DEV int peer() const { return far.railRank(ring); }
  EP_DEV int units() const { return far.f.far.at.ringUnits[kind]; }
  EP_DEV int signalOf(bool credits, int node) const {
    return (2 * (int)credits + kind) * (far.num + 1) + node;
  }
  // All lanes: what the other end has added to a signal since the rings began.
  EP_DEV unsigned long long told(bool credits, unsigned long long earlier) const {
    unsigned long long n = 0;
    if (lane == 0) n = net.readSignal(signalOf(credits, far.nodeOf(ring)));
    n = __shfl_sync(FULL_WARP, n, 0);
    __syncwarp(); // what lane 0 has acquired
    return n > earlier ? n - earlier : 0;
  }
  EP_DEV bool isIdle() const {
    return __shfl_sync(FULL_WARP, (int)(lane == 0 && net.isIdle(peer())), 0);
  }

  // How many of units [q, q + n) have their word, up to the first that has not. visit(u, isVoid): of those.
  template <class F>
  EP_DEV int prefix(HtRingWord what, unsigned long long q, unsigned long long n, F visit) const {
    const int most = n < 32 ? (int)n : 32;
    const HtLocation u = far.unitOf(kind, ring, q + lane);
    uint32_t word = 0;
    if (lane < most) word = loadAcquire(far.wordAt(kind, what, u.code));
    const bool is = lane < most && (int)(word >> 1) == u.epoch;
    const unsigned missing = ~__ballot_sync(FULL_WARP, is);
    const int there = missing ? __ffs(missing) - 1 : 32;
    if (lane < there) visit(u, (bool)(word & 1));
    return there;
  }
  // Moves on `at` up to `end` while there are words.
  template <class F>
  EP_DEV void extend(unsigned long long &at, unsigned long long end, HtRingWord what,
                     unsigned long long first, F visit) const {
    while (at < end) {
      const int n = prefix(what, first + at, end - at, visit);
      at += n;
      if (n < 32) return;
    }
  }

  EP_DEV uint32_t *voidOf(bool isIn, const HtLocation &u) const {
    return (uint32_t *)(far.unitAt(kind, isIn, u.code) + far.f.far.at.voidAt);
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

  EP_DEV void post() {
    extend(s.filled, out, HT_FILLED, before.sent,
           [&](const HtLocation &u, bool isVoid) { *voidOf(false, u) = isVoid; });
    while (s.posted < s.filled) {
      const unsigned long long waiting = s.filled - s.posted;
      const int chunk = far.f.far.at.chunkUnits[kind];
      if (waiting < (unsigned)chunk && s.filled != out && !isIdle()) break;
      const HtLocation u = far.unitOf(kind, ring, before.sent + s.posted);
      const int untilEnd = units() - (u.code & 0xffffff), most = min(chunk, untilEnd);
      const int n = waiting < (unsigned)most ? (int)waiting : most;
      const uint64_t unit = far.f.far.at.unitBytes, base = far.f.far.port.scratch + 128;
      // At the other end this node has a number among the far ones of that.
      const int there = far.own < far.nodeOf(ring) ? far.own : far.own - 1;
      const int landing = (HT_RING_PEER + there) << 24 | (u.code & 0xffffff);
      if (!took(net.template putSignal<NetSignal::STRONG>(
              peer(), base + far.unitOffset(kind, true, landing),
              base + far.unitOffset(kind, false, u.code), n * unit, signalOf(false, far.own),
              (uint64_t)n))) {
        break;
      }
      s.posted += n;
    }
    save();
  }

  EP_DEV void land() {
    const unsigned long long all = told(false, before.receivedBefore + before.received);
    const unsigned long long there = all < in ? all : in;
    for (; s.landed < there; s.landed += 32) {
      if (s.landed + lane < there) {
        const HtLocation u = far.unitOf(kind, ring, before.received + s.landed + lane);
        const bool isVoid = loadVolatile(voidOf(true, u)) != 0;
        __threadfence_system();
        far.note(kind, HT_LANDED, u, isVoid);
      }
    }
    if (s.landed > there) s.landed = there;
    save();
  }

  EP_DEV void giveBack() {
    extend(s.consumed, in, HT_CONSUMED, before.received, [](const HtLocation &, bool) {});
    const unsigned long long waiting = s.consumed - s.returned;
    const bool isEnough = waiting * 4 >= (unsigned)units() || s.consumed == in;
    if (waiting && (isEnough || isIdle()) &&
        took(net.template signal<NetSignal::WEAK>(peer(), signalOf(true, far.own), waiting))) {
      s.returned = s.consumed;
    }
    save();
  }

  EP_DEV void refill() {
    const unsigned long long all = told(true, before.sentBefore);
    if (s.refilled < all) __threadfence_system();
    for (; s.refilled < all; s.refilled += 32) {
      if (s.refilled + lane < all) {
        far.note(kind, HT_REFILL, far.unitOf(kind, ring, s.refilled + lane), false);
      }
    }
    if (s.refilled > all) s.refilled = all;
    save();
  }

  const HtFar &far;
  const int kind;
  const unsigned waitKind;
  const int lane;
  HtPosted *const states;
  const Net<Network> net;
  int ring = 0;
  ep_ht_ring_count_t before = {};
  unsigned long long out = 0, in = 0;
  HtPosted s = {};
};

#endif
