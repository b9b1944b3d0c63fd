// The Wire of net.cuh for ranks that are virtual on one GPU, or on GPUs that are peers: the posting warp
// copies, then adds to the signal. Machine code without NCCL; every order is strong.
#ifndef TREFOIL_TESTS_KERNELS_NET_COPIES_CUH
#define TREFOIL_TESTS_KERNELS_NET_COPIES_CUH

#include "kernels/net/net.cuh"

constexpr int NET_COPIES_RANKS = 64;

struct NetCopies { // ep_net_port_t.comm
  char *windows[NET_COPIES_RANKS];
  unsigned long long *signals[NET_COPIES_RANKS];
  unsigned long long *consumed; // [rank], this rank's
};

class CopyWire {
public:
  EP_DEV explicit CopyWire(const ep_net_port_t &p) : port(p), all(*(const NetCopies *)p.comm) {}

  template <NetSignal KIND> EP_DEV void post(const NetPut &p) const {
    const char *from = all.windows[port.rank] + p.from;
    char *to = all.windows[p.peer] + p.to;
    for (uint64_t i = threadIdx.x % 32 * 16; i < p.bytes; i += 32 * 16) {
      storeSys(to + i, loadSys(from + i));
    }
    __threadfence_system();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      if (KIND != NetSignal::NONE) {
        atomicAdd_system(all.signals[p.peer] + p.signal, (unsigned long long)p.add);
      }
      atomicAdd(all.consumed + p.peer, 1ull);
    }
    __syncwarp();
  }

  EP_DEV uint64_t signal(int id) const {
    const uint64_t value = *(volatile unsigned long long *)(all.signals[port.rank] + id);
    __threadfence_system();
    return value;
  }
  EP_DEV uint64_t consumed(int peer) const {
    return *(volatile unsigned long long *)(all.consumed + peer);
  }

private:
  const ep_net_port_t &port;
  const NetCopies &all;
};

#endif
