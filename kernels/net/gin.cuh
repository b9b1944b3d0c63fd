// NCCL's GIN as the Wire of net.cuh: the only file that includes NCCL's device code. Nothing of it that waits
// is used; posting would wait for room in NCCL's queue, which EP_NET_MOST_PUTS leaves free.
#ifndef TREFOIL_KERNELS_NET_GIN_CUH
#define TREFOIL_KERNELS_NET_GIN_CUH

#include <nccl_device.h>

#include "kernels/net/net.cuh"

class GinWire {
public:
  EP_DEV explicit GinWire(const ep_net_port_t &p)
      : port(p), comm(*(const ncclDevComm *)p.comm), gin(comm, p.context) {}

  template <NetSignal KIND> EP_DEV void post(const NetPut &p) const {
    if (threadIdx.x % 32 == 0) {
      if constexpr (KIND == NetSignal::NONE) {
        send(p, ncclGin_None{});
      } else if constexpr (KIND == NetSignal::WEAK) {
        send(p, ncclGin_WeakSignalAdd{(ncclGinSignal_t)p.signal, p.add});
      } else {
        send(p, ncclGin_StrongSignalAdd{(ncclGinSignal_t)p.signal, p.add});
      }
    }
    __syncwarp();
  }

  EP_DEV uint64_t signal(int id) const { return gin.readSignal((ncclGinSignal_t)id); }

  // A counter has 56 bits: as many puts to a peer take longer than any machine lasts.
  EP_DEV uint64_t consumed(int peer) const { return gin.readCounter(counterOf(peer)); }

private:
  EP_DEV ncclGinCounter_t counterOf(int peer) const { return (ncclGinCounter_t)peer; }
  template <class Action> EP_DEV void send(const NetPut &p, Action action) const {
    ncclWindow_t window = (ncclWindow_t)port.window;
    gin.put(ncclTeamWorld(comm), p.peer, window, p.to, window, p.from, p.bytes, action,
            ncclGin_WeakCounterInc{counterOf(p.peer)});
  }

  const ep_net_port_t &port;
  const ncclDevComm &comm;
  const ncclGin gin;
};

#endif
