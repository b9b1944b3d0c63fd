// Puts and signals between NVLink domains, one interface for all kernels. What carries them is a Wire:
// NCCL's GIN (gin.cuh; the emulator has a file of that name over the engine in net/), or plain copies in
// tests.
//
// A Wire has
//   Wire(const ep_net_port_t &)
//   template <NetSignal KIND> void post(const NetPut &) const  all lanes of a warp; one counted put
//   uint64_t signal(int id) const                              acquires what came before the signal
//   uint64_t consumed(int peer) const                          puts to the peer whose sources may be reused
//
// Order: what the posting warp has written, or has acquired from other threads, is in the put. Puts are
// not ordered. A weak signal says that its own put is there, a strong one besides all earlier puts of the
// context to that peer. Signals count up and are never reset.
//
// Nothing here waits. A post that finds too many puts to its peer under way is refused, and what waits for a
// signal reads it again: both loops are the caller's, with its time limit and its record. Data may be read
// after the signal was seen; by bulk copies after a proxyFence besides.
#ifndef TREFOIL_KERNELS_NET_NET_CUH
#define TREFOIL_KERNELS_NET_NET_CUH

#include "kernels/common/ptx.cuh"
#include "kernels/net/net_port.h"

enum class NetSignal { NONE, WEAK, STRONG };

struct NetPut {
  int peer;
  uint64_t to, from, bytes; // offsets in the peer's window and in this rank's
  int signal;
  uint64_t add;
};

template <class Wire> class Net {
public:
  EP_DEV explicit Net(const ep_net_port_t &p) : port(p), wire(p) {}

  // All lanes of a warp with equal arguments. False: nothing was posted; try again.
  EP_DEV bool put(int peer, uint64_t to, uint64_t from, uint64_t bytes) const {
    return post<NetSignal::NONE>(NetPut{peer, to, from, bytes, 0, 0});
  }
  template <NetSignal KIND>
  EP_DEV bool putSignal(int peer, uint64_t to, uint64_t from, uint64_t bytes, int signal,
                        uint64_t add) const {
    return post<KIND>(NetPut{peer, to, from, bytes, signal, add});
  }
  template <NetSignal KIND> EP_DEV bool signal(int peer, int signal, uint64_t add) const {
    return post<KIND>(NetPut{peer, port.scratch, port.scratch, EP_NET_SCRATCH_BYTES, signal, add});
  }

  // One thread, after a put with data.
  EP_DEV void count(int purpose, int peer) const {
    unsigned long long *to = (unsigned long long *)port.purposes;
    if (to) atomicAdd(to + purpose * port.numRanks + peer, 1ull);
  }

  // One thread.
  EP_DEV uint64_t readSignal(int signal) const { return wire.signal(signal); }
  // Whether no put to the peer is under way.
  EP_DEV bool isIdle(int peer) const {
    const uint64_t consumed = wire.consumed(peer);
    return consumed >= *(volatile uint64_t *)(port.posted + peer);
  }
  // Puts to the peer so far whose sources may be reused.
  EP_DEV uint64_t completed(int peer) const { return wire.consumed(peer); }

private:
  // One thread: counts a put to the peer unless there are too many. A number of consumed puts that is newer
  // than that of posted ones gives a huge difference, and a refusal.
  EP_DEV bool reservePut(int peer) const {
    unsigned long long *posted = (unsigned long long *)port.posted + peer;
    const unsigned long long consumed = wire.consumed(peer);
    unsigned long long seen = *(volatile unsigned long long *)posted;
    while (seen - consumed < EP_NET_MOST_PUTS) {
      const unsigned long long found = atomicCAS(posted, seen, seen + 1);
      if (found == seen) return true;
      seen = found;
    }
    return false;
  }

  template <NetSignal KIND> EP_DEV bool post(const NetPut &p) const {
    int taken = 0;
    __syncwarp();
    if (threadIdx.x % 32 == 0) taken = reservePut(p.peer);
    if (!__shfl_sync(FULL_WARP, taken, 0)) return false;
    wire.template post<KIND>(p);
    return true;
  }

  const ep_net_port_t &port;
  const Wire wire;
};

#endif
