// Cases of the A2SGD kernels: a random model on ranks of one process, its gradients, and what the
// reference makes of them.
#ifndef TREFOIL_TESTS_KERNELS_A2SGD_CASE_CUH
#define TREFOIL_TESTS_KERNELS_A2SGD_CASE_CUH

#include "ll_world.cuh"

#include "kernels/a2sgd/a2sgd_step.h"
#include "trefoil/a2sgd.h"
#include "trefoil/numerics.h"

#include <algorithm>
#include <cmath>

namespace {

constexpr int GUARD = 64; // bytes before and after an array that must stay
constexpr int UNWRITTEN = 0xA5;

enum Values { MIXED, POSITIVE, ZEROS, NOT_FINITE, ANY_BITS, NEGATIVE, EXTREME, NUM_VALUES };

struct Model {
  trefoil_dtype_t dtype;
  trefoil_grad_scope_t scope;
  std::vector<int64_t> sizes;

  size_t elemBytes() const { return trefoilDtypeBytes(dtype); }
  int64_t elements() const {
    int64_t n = 0;
    for (int64_t s : sizes) n += s;
    return n;
  }
  std::vector<int64_t> groups() const {
    return scope == TREFOIL_GRAD_WHOLE_MODEL ? std::vector<int64_t>{elements()} : sizes;
  }
  trefoil_grad_config_t config(int numWorkers) const {
    trefoil_grad_config_t c = {};
    c.method = TREFOIL_GRAD_A2SGD;
    c.dtype = dtype;
    c.numWorkers = numWorkers;
    c.numTensors = (int)sizes.size();
    c.sizes = sizes.data();
    c.scope = scope;
    return c;
  }
};

float value(Rng &rng, Values how) {
  const float x = (float)((int)rng.next()) * 0x1p-31f;
  switch (how) {
  case POSITIVE:
    return fabsf(x);
  case NEGATIVE:
    return -fabsf(x);
  case ZEROS:
    return rng.one(2) ? 0.0f : -0.0f;
  case NOT_FINITE:
    return rng.one(300) ? NAN : rng.one(300) ? INFINITY : rng.one(300) ? -INFINITY : x;
  case EXTREME:
    return ldexpf(x, rng.one(2) ? 127 : -135);
  default:
    return ldexpf(x, rng.below(20) - 14);
  }
}

uint32_t bitsOf(Rng &rng, trefoil_dtype_t dtype, Values how) {
  if (how == ANY_BITS) return rng.next();
  const float x = value(rng, how);
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return dtype == TREFOIL_F32   ? bits
         : dtype == TREFOIL_F16 ? trefoilF32ToF16(x)
                                : trefoilF32ToBf16(x);
}

std::vector<char> gradientOf(Rng &rng, const Model &m, Values how) {
  const size_t each = m.elemBytes();
  std::vector<char> bytes(m.elements() * each);
  for (size_t i = 0; i < bytes.size(); i += each) {
    const uint32_t bits = bitsOf(rng, m.dtype, how);
    memcpy(&bytes[i], &bits, each);
  }
  return bytes;
}

using Gradients = std::vector<std::vector<char>>; // of each worker

// The updates of the workers whose bit is set; the others' stay as they are.
Gradients referenceStep(const Model &m, const Gradients &grads, uint64_t active) {
  Gradients updates = grads;
  std::vector<const void *> in;
  std::vector<void *> out;
  for (size_t r = 0; r < grads.size(); r++) {
    if (!(active >> r & 1)) continue;
    in.push_back(grads[r].data());
    out.push_back(updates[r].data());
  }
  const trefoil_grad_config_t c = m.config((int)in.size());
  const trefoil_grad_workers_t workers = {in.data(), nullptr, out.data()};
  OK(trefoilGradStep(&c, 0, &workers));
  return updates;
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

  void open(World &w, const Model &m, int smsOfLayout, int sms, uint64_t timeoutNs) {
    const std::vector<int64_t> groups = m.groups();
    OK(epA2sgdLayout((int)groups.size(), groups.data(), w.size(), smsOfLayout, &at));
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

  // Every rank's mask.
  void mask(World &w, uint64_t active) {
    for (ep_a2sgd_step_t &s : steps) {
      int mask[EP_KERNEL_MAX_RANKS];
      for (int r = 0; r < EP_KERNEL_MAX_RANKS; r++) mask[r] = (int)(active >> r & 1);
      s.enableMask = 1;
      CU(cudaMemcpy(s.scratch + EP_A2SGD_MASK_AT, mask, sizeof mask, cudaMemcpyHostToDevice));
    }
  }
};

} // namespace

#endif
