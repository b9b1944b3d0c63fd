// Cases of the A2SGD kernels: a random model on ranks of one process, its gradients, and what the
// reference makes of them.
#ifndef TREFOIL_TESTS_KERNELS_A2SGD_CASE_CUH
#define TREFOIL_TESTS_KERNELS_A2SGD_CASE_CUH

#include "ll_world.cuh"

#include "kernels/a2sgd/a2sgd_step.h"
#include "trefoil/a2sgd.h"
#include "validate/grad_draw.h"

#include <algorithm>

namespace {

constexpr int GUARD = 64; // bytes before and after an array that must stay
constexpr int UNWRITTEN = 0xA5;

using Model = ep_grad_model_t;

size_t elemBytes(const Model &m) {
  return trefoilDtypeBytes(m.dtype);
}

size_t gradBytes(const Model &m) {
  return epGradModelElements(&m) * elemBytes(m);
}

std::vector<int64_t> groupsOf(const Model &m) {
  if (m.scope == TREFOIL_GRAD_WHOLE_MODEL) return {epGradModelElements(&m)};
  return std::vector<int64_t>(m.sizes, m.sizes + m.numTensors);
}

void setSizes(Model &m, const std::vector<int64_t> &sizes) {
  std::copy(sizes.begin(), sizes.end(), m.sizes);
  m.numTensors = (int)sizes.size();
}

std::vector<char> gradientOf(Rng &rng, const Model &m, ep_grad_values_t values) {
  std::vector<char> bytes(gradBytes(m));
  epFillGradient(&m, values, (uint64_t)rng.next() << 32 | rng.next(), bytes.data());
  return bytes;
}

using Gradients = std::vector<std::vector<char>>; // of each worker

// The updates of the workers whose bit is set; the others' stay as they are.
[[maybe_unused]] Gradients referenceStep(const Model &m, const Gradients &grads, uint64_t active) {
  Gradients updates = grads;
  std::vector<const void *> in;
  std::vector<void *> out;
  for (size_t r = 0; r < grads.size(); r++) {
    if (!(active >> r & 1)) continue;
    in.push_back(grads[r].data());
    out.push_back(updates[r].data());
  }
  const trefoil_grad_config_t c = epGradModelConfig(&m, (int)in.size());
  const trefoil_grad_workers_t workers = {in.data(), nullptr, out.data()};
  OK(trefoilGradStep(&c, 0, &workers));
  return updates;
}

// What a synchronisation makes of the workers' parameters: each worker has a view,
// the workers it averages over; 0: it stays away.
[[maybe_unused]] Gradients referenceSync(const Model &m, const Gradients &params,
                                         const std::vector<uint64_t> &views) {
  Gradients means = params;
  for (size_t r = 0; r < params.size(); r++) {
    if (!views[r]) continue;
    Gradients copies = params;
    std::vector<void *> of;
    for (size_t q = 0; q < params.size(); q++)
      if (views[r] >> q & 1) of.push_back(copies[q].data());
    trefoil_grad_config_t c = epGradModelConfig(&m, (int)of.size());
    c.syncPeriod = 1;
    OK(trefoilGradSync(&c, 0, of.data()));
    means[r] = copies[r];
  }
  return means;
}

// An array on a rank, with guards around it.
struct DeviceArray {
  char *memory, *data;
  size_t bytes, before, whole;

  // `past` bytes past a multiple of 16.
  void open(World &w, int rank, size_t n, size_t past) {
    bytes = n;
    before = GUARD + past;
    whole = before + bytes + GUARD;
    memory = w.filled<char>(rank, whole, UNWRITTEN);
    data = memory + before;
  }
  void put(World &w, int rank, const std::vector<char> &v) {
    if (bytes)
      CU(cudaMemcpyAsync(data, v.data(), bytes, cudaMemcpyHostToDevice, w.ranks[rank].stream));
  }
  // What differs from `want`, guards included; -1: nothing.
  int64_t difference(World &w, int rank, const std::vector<char> &want) const {
    const std::vector<char> have = w.download(rank, memory, whole);
    for (size_t i = 0; i < whole; i++) {
      const bool isData = i >= before && i < before + bytes;
      if (have[i] != (isData ? want[i - before] : (char)UNWRITTEN))
        return (int64_t)i - (int64_t)before;
    }
    return -1;
  }
};

// The kernels' memory on all ranks.
struct Group {
  ep_a2sgd_layout_t at;
  std::vector<ep_a2sgd_step_t> steps; // of each rank, without arrays
  int channels = 0;                   // of synchronisations, at most; 0: there are none
  uint32_t chunkBytes = 0;

  void open(World &w, const Model &m, int smsOfLayout, int sms, uint64_t timeoutNs) {
    const std::vector<int64_t> groups = groupsOf(m);
    OK(epA2sgdLayout((int)groups.size(), groups.data(), w.size(), smsOfLayout, &at));
    if (channels) epA2sgdAddSync(&at, m.dtype, channels, chunkBytes);
    std::vector<char> image(at.imageBytes);
    epA2sgdImage(&at, groups.data(), image.data());
    steps.assign(w.size(), ep_a2sgd_step_t{});
    std::vector<char *> exchange;
    for (int r = 0; r < w.size(); r++) {
      w.ranks[r].used = 0;
      CU(cudaSetDevice(w.ranks[r].device));
      exchange.push_back(w.filled<char>(r, at.exchangeBytes, 0));
      ep_a2sgd_step_t &s = steps[r];
      s.at = at;
      s.scratch = w.filled<char>(r, at.scratchBytes, 0);
      CU(cudaMemcpyAsync(s.scratch, image.data(), image.size(), cudaMemcpyHostToDevice,
                         w.ranks[r].stream));
      memset(w.ranks[r].record, 0, sizeof *w.ranks[r].record);
      s.record = w.ranks[r].recordOnDevice;
      s.timeoutNs = timeoutNs;
      s.rank = r;
      s.numSms = sms;
      s.dtype = m.dtype;
    }
    for (ep_a2sgd_step_t &s : steps) std::copy(exchange.begin(), exchange.end(), s.peers);
    w.sync();
  }

  void maskOf(ep_a2sgd_step_t &s, uint64_t active) {
    int mask[EP_KERNEL_MAX_RANKS];
    for (int r = 0; r < EP_KERNEL_MAX_RANKS; r++) mask[r] = (int)(active >> r & 1);
    s.enableMask = 1;
    CU(cudaMemcpy(s.scratch + EP_A2SGD_MASK_AT, mask, sizeof mask, cudaMemcpyHostToDevice));
  }
  // Every rank's mask.
  void mask(World &, uint64_t active) {
    for (ep_a2sgd_step_t &s : steps) maskOf(s, active);
  }
};

} // namespace

#endif
