// kernels/net/gin.cuh for the emulator: the host runtime's GIN, which net/ carries.
#ifndef TREFOIL_TESTS_EMULATOR_GIN_CUH
#define TREFOIL_TESTS_EMULATOR_GIN_CUH

#include <nccl_device.h>

#include "host/trefoil_host.h"
#include "kernels/net/net.cuh"

class GinWire {
public:
  explicit GinWire(const ep_net_port_t &p) : port(p), gin(((const ncclDevComm_t *)p.comm)->gin) {}

  template <NetSignal KIND> void post(const NetPut &p) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      const uint64_t underWay =
          __atomic_load_n(port.posted + p.peer, __ATOMIC_SEQ_CST) - consumed(p.peer);
      if (underWay > EP_NET_MOST_PUTS) {
        emulator::fail("%zu puts to rank %d are under way", (size_t)underWay, p.peer);
      }
      if (p.bytes > EP_NET_MOST_BYTES) emulator::fail("a put of %zu bytes", (size_t)p.bytes);
      const int signal = KIND == NetSignal::NONE ? -1 : p.signal;
      ncclWindow_t window = (ncclWindow_t)port.window;
      const trefoil_host_put_t put = {port.context, p.peer, window,
                                      window,       p.to,   p.from,
                                      p.bytes,      signal, KIND == NetSignal::STRONG,
                                      p.add,        p.peer};
      trefoilHostGinPut(gin, &put);
    }
    __syncwarp();
  }

  uint64_t signal(int id) const {
    emulator::poll();
    return trefoilHostGinSignal(gin, port.context, id);
  }
  uint64_t consumed(int peer) const { return trefoilHostGinCounter(gin, port.context, peer); }

private:
  const ep_net_port_t &port;
  void *const gin;
};

#endif
