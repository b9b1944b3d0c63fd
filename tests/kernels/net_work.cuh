// What the tests of kernels/net run on every rank: rows to every peer, each round checked by its receiver,
// over any Wire.
#ifndef TREFOIL_TESTS_KERNELS_NET_WORK_CUH
#define TREFOIL_TESTS_KERNELS_NET_WORK_CUH

#include "kernels/net/net.cuh"

// Signals, by source rank. Data have one for each parity: two rounds may be under way to a peer, and of one
// weak signal for both the later round could be taken for the earlier one.
enum { NET_DATA = 0, NET_DATA_ODD = 1, NET_READ = 2, NET_BURST = 3, NET_SIGNALS = 4 };

struct NetWork {
  ep_net_port_t port;
  char *
      memory; // of the window: scratch | out [parity][peer][row] | in [parity][source][row] | burst [source]
  int rounds, rowBytes, burst;
  unsigned long long limitNs;
  int *wrong;             // words that differ
  int *refused;           // posts that were refused
  int *gaveUp, *gaveUpOn; // waits that ended at the limit, and the rank of the last one
};

constexpr int NET_BURST_BYTES = 32; // of one put of a burst
constexpr int NET_WORK_START = 128; // scratch

static inline __host__ __device__ uint64_t netRowAt(const NetWork &w, int where, int parity,
                                                    int rank) {
  return NET_WORK_START +
         (uint64_t)((where * 2 + parity) * w.port.numRanks + rank) * (uint64_t)w.rowBytes;
}
static inline __host__ __device__ uint64_t netBurstAt(const NetWork &w, int where, int rank,
                                                      int i) {
  return netRowAt(w, 2, 0, 0) +
         (uint64_t)((where * w.port.numRanks + rank) * w.burst + i) * NET_BURST_BYTES;
}
static inline __host__ __device__ uint64_t netWorkBytes(const NetWork &w) {
  return netBurstAt(w, 2, 0, 0);
}

EP_DEV unsigned netWord(int source, int peer, int round, unsigned i) {
  return ((unsigned)source * 31u + (unsigned)peer) * 0x9E3779B9u + (unsigned)round * 0x85EBCA6Bu +
         i;
}

EP_DEV uint4 netVector(int source, int peer, int round, unsigned i) {
  return make_uint4(netWord(source, peer, round, i), i, (unsigned)round, ~i);
}

// One warp a peer, all at once. A wait ends at the limit, with the rank's name.
template <class Wire> class NetPeer {
public:
  EP_DEV NetPeer(const NetWork &work, int rank)
      : w(work), net(work.port), peer(rank), lane((int)threadIdx.x % 32), began(clockNs()) {}

  EP_DEV void run() {
    for (int round = 1; round <= w.rounds && goesOn; round++) {
      const int parity = round & 1;
      fill(netRowAt(w, 0, parity, peer), w.rowBytes, round);
      // The peer has read the round before the last one: both buffers may be used again.
      if (round > 2) await(NET_READ, (uint64_t)(round - 2));
      const uint64_t from = netRowAt(w, 0, parity, peer);
      const uint64_t to = netRowAt(w, 1, parity, w.port.rank);
      send([&] {
        return net.template putSignal<NetSignal::WEAK>(peer, to, from, (uint64_t)w.rowBytes,
                                                       signalOf(NET_DATA + parity, w.port.rank), 1);
      });
      await(NET_DATA + parity, (uint64_t)(round + 1) / 2);
      check(netRowAt(w, 1, parity, peer), w.rowBytes, round);
      send([&] {
        return net.template signal<NetSignal::WEAK>(peer, signalOf(NET_READ, w.port.rank), 1);
      });
    }
    runBurst();
  }

private:
  // More puts than may be under way, then one strong signal for all of them.
  EP_DEV void runBurst() {
    for (int i = 0; i < w.burst; i++) fill(netBurstAt(w, 0, peer, i), NET_BURST_BYTES, i);
    for (int i = 0; i < w.burst && goesOn; i++) {
      const uint64_t from = netBurstAt(w, 0, peer, i), to = netBurstAt(w, 1, w.port.rank, i);
      const int id = signalOf(NET_BURST, w.port.rank);
      send([&] {
        return i + 1 < w.burst ? net.put(peer, to, from, NET_BURST_BYTES)
                               : net.template putSignal<NetSignal::STRONG>(peer, to, from,
                                                                           NET_BURST_BYTES, id, 7);
      });
    }
    if (w.burst) await(NET_BURST, 7);
    for (int i = 0; i < w.burst; i++) check(netBurstAt(w, 1, peer, i), NET_BURST_BYTES, i);
  }

  EP_DEV int signalOf(int kind, int rank) const { return kind * w.port.numRanks + rank; }

  EP_DEV void fill(uint64_t at, int bytes, int round) const {
    for (unsigned i = lane; i < (unsigned)bytes / 16; i += 32) {
      storeSys(w.memory + at + i * 16, netVector(w.port.rank, peer, round, i));
    }
  }

  EP_DEV void check(uint64_t at, int bytes, int round) const {
    if (!goesOn) return;
    for (unsigned i = lane; i < (unsigned)bytes / 16; i += 32) {
      const uint4 is = loadSys(w.memory + at + i * 16);
      const uint4 be = netVector(peer, w.port.rank, round, i);
      if (is.x != be.x || is.y != be.y || is.z != be.z || is.w != be.w) atomicAdd(w.wrong, 1);
    }
    __syncwarp();
  }

  // All lanes: whether to try again.
  EP_DEV bool keepOn() {
    const int late = lane == 0 && clockNs() - began > w.limitNs;
    goesOn = !__shfl_sync(FULL_WARP, late, 0);
    if (late) {
      atomicAdd(w.gaveUp, 1);
      atomicExch(w.gaveUpOn, peer);
    }
    return goesOn;
  }

  template <class Post> EP_DEV void send(Post post) {
    __syncwarp();
    while (goesOn && !post()) {
      if (lane == 0) atomicAdd(w.refused, 1);
      keepOn();
    }
  }

  EP_DEV void await(int kind, uint64_t least) {
    while (goesOn) {
      const int there = lane == 0 && net.readSignal(signalOf(kind, peer)) >= least;
      if (__shfl_sync(FULL_WARP, there, 0)) return;
      keepOn();
    }
  }

  const NetWork &w;
  const Net<Wire> net;
  const int peer, lane;
  const uint64_t began;
  bool goesOn = true;
};

template <class Wire> static __global__ void netWorkKernel(const __grid_constant__ NetWork w) {
  const int warp = (int)threadIdx.x / 32;
  if (warp < w.port.numRanks) NetPeer<Wire>(w, warp).run();
}

#endif
