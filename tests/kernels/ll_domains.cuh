// Ranks of several NVLink domains in one process, for the tests of the low-latency kernels: far ranks get
// mirrors, and each launch has a relay, over a network of plain copies.
#ifndef TREFOIL_TESTS_KERNELS_LL_DOMAINS_CUH
#define TREFOIL_TESTS_KERNELS_LL_DOMAINS_CUH

#include "kernels/ll/far.cuh"
#include "ll_world.cuh"
#include "net_copies.cuh"

namespace {

struct DomainRank {
  char *window, *mirrors, *control;
  NetCopies *copies;
  unsigned long long *signals, *counts; // counts: puts posted, puts consumed
};

// Domains of `perDomain` ranks; 0: all ranks are in one, and nothing here is used.
struct Domains {
  int perDomain, blocks;
  std::vector<DomainRank> ranks;
  ep_ll_relay_layout_t at;
  size_t mirrorBytes;

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
      k.window = k.mirrors = nullptr;
    }
  }

  // A fresh group, all zero but for what messages lie in: that is full of ones.
  void reset(World &w, const ep_ll_config_t &config, uint64_t first, Rng &rng) {
    if (!perDomain) return;
    blocks = 1 + rng.below(3);
    OK(epLlRelayLayout(&config, perDomain, &at));
    mirrorBytes = w.at.bytes;
    const size_t R = ranks.size(), far = R - perDomain;
    char control[EP_LL_RELAY_CONTROL_BYTES];
    epLlRelayControlInit(control, first);
    for (size_t r = 0; r < R; r++) {
      DomainRank &k = ranks[r];
      CU(cudaSetDevice(w.ranks[r].device));
      CU(cudaFree(k.window));
      CU(cudaFree(k.mirrors));
      CU(cudaMalloc(&k.window, 128 + at.bytes));
      CU(cudaMalloc(&k.mirrors, far * mirrorBytes));
      CU(cudaMemset(k.window, 0xff, 128 + at.bytes));
      CU(cudaMemset(k.mirrors, 0, far * mirrorBytes));
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
    for (int p = 0; p < g.numRanks; p++) {
      if (isFar(g.rank, p)) {
        g.peers[p] = ranks[g.rank].mirrors + farIndexOf(g.rank, p) * mirrorBytes;
      }
    }
  }
  int farIndexOf(int r, int p) const { return p < r / perDomain * perDomain ? p : p - perDomain; }

  ep_ll_relay_t relayOf(const ep_ll_group_t &group, const ep_ll_handle_t &handle, ep_ll_kind_t kind,
                        unsigned parts, int numTokens) const {
    const DomainRank &k = ranks[group.rank];
    ep_ll_relay_t op = {};
    op.group = group;
    op.handle = handle;
    op.kind = kind;
    op.parts = parts;
    op.numTokens = numTokens;
    op.port.comm = k.copies;
    op.port.posted = (uint64_t *)k.counts;
    op.port.rank = group.rank;
    op.port.numRanks = group.numRanks;
    op.at = at;
    op.window = k.window;
    op.control = k.control;
    op.blocks = blocks;
    return op;
  }

  trefoil_result_t dispatch(ep_ll_dispatch_t op, unsigned parts, cudaStream_t stream) {
    if (!perDomain) return epLlDispatch(&op, parts, stream);
    op.generic = 1;
    ep_ll_relay_t relay = relayOf(op.group, op.handle, EP_LL_DISPATCH, parts, op.numTokens);
    const int weights = op.handle.rankMajor ? (op.handle.numTopk * 4 + 15) / 16 * 16 : 0;
    relay.rowBytes = op.tokenBytes + op.scaleBytes + weights;
    ep_ll_ready_t ready;
    OK(epLlPrepareDispatch(&op, parts, &ready));
    const void *kernel = FarKernels<CopyWire>::dispatch(epLlDispatchChoice(op, parts));
    return FarKernels<CopyWire>::launch(kernel, ready, relay, stream);
  }
  trefoil_result_t combine(const ep_ll_combine_t &op, unsigned parts, cudaStream_t stream) {
    if (!perDomain) return epLlCombine(&op, parts, stream);
    ep_ll_relay_t relay = relayOf(op.group, op.handle, EP_LL_COMBINE, parts, op.numTokens);
    relay.rowBytes = op.rowBytes;
    ep_ll_ready_t ready;
    OK(epLlPrepareCombine(&op, parts, &ready));
    const void *kernel = FarKernels<CopyWire>::combine(op.dtype, op.handle.sum);
    return FarKernels<CopyWire>::launch(kernel, ready, relay, stream);
  }
};

Domains domains; // of the World of this program

} // namespace

#endif
