// Ranks of several NVLink domains in one process, for the tests of the low-latency kernels: far ranks get
// mirrors, and each launch has a relay, over a network of plain copies.
#ifndef TREFOIL_TESTS_KERNELS_LL_DOMAINS_CUH
#define TREFOIL_TESTS_KERNELS_LL_DOMAINS_CUH

#include "kernels/ll/far.cuh"
#include "ll_check.cuh"
#include "net_copies.cuh"

namespace {

struct DomainRank {
  char *window, *mirrors, *control;
  NetCopies *copies;
  unsigned long long *signals, *counts; // counts: puts posted, puts consumed
};

constexpr size_t GUARD_BYTES = 1 << 20; // behind a window

// Domains of `perDomain` ranks; 0: all ranks are in one, and nothing here is used.
struct Domains {
  int perDomain, blocks;
  bool rails; // dispatch goes by rails, unless there are masks
  std::vector<DomainRank> ranks;
  ep_ll_relay_layout_t at;

  bool isFar(int r, int p) const { return perDomain && r / perDomain != p / perDomain; }

  void open(World &w, int n) {
    perDomain = n;
    if (!n) return;
    ranks.resize(w.ranks.size());
    for (size_t r = 0; r < ranks.size(); r++) {
      DomainRank &k = ranks[r];
      CU(cudaSetDevice(w.ranks[r].device));
      CU(cudaMalloc(&k.control, EP_LL_RELAY_CONTROL_BYTES));
      CU(cudaMalloc(&k.copies, sizeof *k.copies));
      CU(cudaMalloc(&k.signals, EP_LL_RELAY_SIGNALS(ranks.size()) * 8));
      CU(cudaMalloc(&k.counts, 2 * ranks.size() * 8));
      OK(FarKernels<CopyWire>::load());
      k.window = k.mirrors = nullptr;
    }
  }

  // A fresh group, all zero but for what messages lie in: that is full of ones.
  void reset(World &w, const ep_ll_config_t &config, uint64_t first, bool masks, Rng &rng) {
    if (!perDomain) return;
    blocks = 1 + rng.below(3);
    OK(epLlRelayLayout(&config, perDomain, rails && !masks, &at));
    const size_t R = ranks.size();
    char control[EP_LL_RELAY_CONTROL_BYTES];
    epLlRelayControlInit(control, first);
    for (size_t r = 0; r < R; r++) {
      DomainRank &k = ranks[r];
      CU(cudaSetDevice(w.ranks[r].device));
      CU(cudaFree(k.window));
      CU(cudaFree(k.mirrors));
      CU(cudaMalloc(&k.window, 128 + at.bytes + GUARD_BYTES));
      CU(cudaMalloc(&k.mirrors, at.mirrorBytes));
      CU(cudaMemset(k.window, 0xff, 128 + at.bytes + GUARD_BYTES));
      CU(cudaMemset(k.mirrors, 0, at.mirrorBytes));
      CU(cudaMemset(k.signals, 0, EP_LL_RELAY_SIGNALS(R) * 8));
      CU(cudaMemset(k.counts, 0, 2 * R * 8));
      CU(cudaMemcpy(k.control, control, sizeof control, cudaMemcpyHostToDevice));
    }
    for (size_t r = 0; r < R; r++) {
      NetCopies copies = {};
      for (size_t p = 0; p < R; p++) {
        copies.windows[p] = ranks[p].window;
        copies.signals[p] = ranks[p].signals;
      }
      copies.consumed = ranks[r].counts + R;
      CU(cudaSetDevice(w.ranks[r].device));
      CU(cudaMemcpy(ranks[r].copies, &copies, sizeof copies, cudaMemcpyHostToDevice));
    }
    w.sync();
  }

  void setPeers(ep_ll_group_t &g) const {
    g.firstNear = (uint16_t)(perDomain ? g.rank / perDomain * perDomain : 0);
    g.numNear = (uint16_t)perDomain;
    for (int p = 0; p < g.numRanks; p++) {
      if (isFar(g.rank, p)) {
        g.peers[p] = ranks[g.rank].mirrors;
      }
    }
  }

  // No message has run over its end into what lies behind the window.
  bool checkGuard(World &w, int r) const {
    const std::vector<char> guard(GUARD_BYTES, (char)0xff);
    const char *at = ranks[r].window + 128 + this->at.bytes;
    return equal("behind the window", r, 0, w.download(r, at, GUARD_BYTES).data(), guard.data(),
                 GUARD_BYTES, 16);
  }

  ep_ll_relay_t relayOf(int rank, int numRanks) const {
    const DomainRank &k = ranks[rank];
    ep_ll_relay_t relay = {};
    relay.port.comm = k.copies;
    relay.port.posted = (uint64_t *)k.counts;
    relay.port.rank = rank;
    relay.port.numRanks = numRanks;
    relay.at = at;
    relay.window = k.window;
    relay.control = k.control;
    relay.blocks = blocks;
    return relay;
  }

  template <class Op>
  trefoil_result_t launch(const Op &op, ep_ll_kind_t kind, unsigned parts, cudaStream_t stream) {
    ep_ll_ready_t ready;
    OK(FarKernels<CopyWire>::prepare(op, parts, &ready));
    return FarKernels<CopyWire>::launch(ready, kind, relayOf(op.group.rank, op.group.numRanks),
                                        stream);
  }
  trefoil_result_t dispatch(ep_ll_dispatch_t op, unsigned parts, cudaStream_t stream) {
    if (!perDomain) return epLlDispatch(&op, parts, stream);
    op.generic = 1;
    return launch(op, EP_LL_DISPATCH, parts, stream);
  }
  trefoil_result_t combine(const ep_ll_combine_t &op, unsigned parts, cudaStream_t stream) {
    return perDomain ? launch(op, EP_LL_COMBINE, parts, stream) : epLlCombine(&op, parts, stream);
  }
};

Domains domains; // of the World of this program

} // namespace

#endif
