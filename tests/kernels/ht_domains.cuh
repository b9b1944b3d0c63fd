// Ranks of several NVLink domains in one process, for the tests of the high-throughput kernels, over a
// network of plain copies, with rings of any size.
#ifndef TREFOIL_TESTS_KERNELS_HT_DOMAINS_CUH
#define TREFOIL_TESTS_KERNELS_HT_DOMAINS_CUH

#include "ht_check.cuh"
#include "kernels/ht/ht_far.cuh"
#include "net_copies.cuh"

namespace {

struct HtDomains {
  std::vector<ep_ht_far_t> ranks; // empty: all ranks are in one domain

  // A fresh group of the shape: zero but for what is in rings and messages, which is full of ones.
  void reset(Ranks &w, const Shape &s) {
    ranks.clear();
    if (!s.perDomain) return;
    OK(HtFarKernels<CopyWire>::load());
    ep_ht_far_layout_t at;
    OK(epHtFarLayout(&s.config, s.perDomain, s.ringSlots, &at));
    const size_t R = s.R, signals = EP_HT_FAR_SIGNALS(R / s.perDomain);
    std::vector<NetCopies *> copies(R);
    NetCopies all = {};
    for (size_t r = 0; r < R; r++) {
      ep_ht_far_t far = {};
      far.at = at;
      far.window = w.take(r, 128 + at.bytes, 0xff);
      far.control = w.take(r, EP_HT_FAR_CONTROL_BYTES, 0);
      far.words = w.take(r, at.wordBytes, 0);
      far.port.comm = copies[r] = (NetCopies *)w.take(r, sizeof all, 0);
      far.port.posted = (uint64_t *)w.take(r, 2 * R * 8, 0);
      far.port.rank = (int)r;
      far.port.numRanks = (int)R;
      all.windows[r] = far.window;
      all.signals[r] = (unsigned long long *)w.take(r, signals * 8, 0);
      ranks.push_back(far);
    }
    for (size_t r = 0; r < R; r++) {
      all.consumed = (unsigned long long *)ranks[r].port.posted + R;
      CU(cudaSetDevice(w.ranks[r].device));
      CU(cudaMemcpy(copies[r], &all, sizeof all, cudaMemcpyHostToDevice));
    }
  }

  void update(const ep_ht_update_t &op, cudaStream_t q) const {
    if (ranks.empty())
      OK(epHtUpdate(&op, q));
    else
      OK(HtFarKernels<CopyWire>::update(op, ranks[op.group.rank], q));
  }
  void dispatch(const ep_ht_dispatch_t &op, cudaStream_t q) const {
    if (ranks.empty())
      OK(epHtDispatch(&op, q));
    else
      OK(HtFarKernels<CopyWire>::dispatch(op, ranks[op.group.rank], q));
  }
  void combine(const ep_ht_combine_t &op, cudaStream_t q) const {
    if (ranks.empty())
      OK(epHtCombine(&op, q));
    else
      OK(HtFarKernels<CopyWire>::combine(op, ranks[op.group.rank], q));
  }
};

HtDomains htDomains; // of the case that runs

} // namespace

#endif
