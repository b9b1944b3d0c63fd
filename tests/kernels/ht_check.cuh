// A group of ranks and one step of it against the reference, bit for bit; for the test of random shapes
// and the benchmark of high throughput.
#ifndef TREFOIL_TESTS_KERNELS_HT_CHECK_CUH
#define TREFOIL_TESTS_KERNELS_HT_CHECK_CUH

#include "ll_world.cuh"

#include "kernels/ht/ht.h"

#include <algorithm>
#include <string>
#include <thread>

namespace {

constexpr int POISON = 0xEE;

struct Shape {
  ep_ht_config_t config;
  int R, E, K, L, N, steps, numSms, passes; // passes: 2 with gradients
  int64_t alignment, maxRecv;
  bool expertMajor, drop, zeroCopyOn, idx64, count64, globalIds, finite, delays;
  trefoil_dtype_t dtype, combineDtype;
  int width, scaleBytes, combineWidth, holes;
  int windows; // dispatch outputs and combine inputs lie in windows: 0 on no rank, 1 on all, 2 on some, not
               // always the same, and some dispatch inputs; 3 on all, as do dispatch inputs
  int closed;    // 1 + a rank whose tensors never lie in windows; 0: none
  int combines;  // how often each combine is made; 0 as 1
  int spare;     // rows of the outputs past maxRecv
  int perDomain; // ranks of an NVLink domain; 0: all
  int ringSlots; // of rings between domains; 0: chosen
  int crowd;     // tokens go to the first experts only, so many; 0: to all
  bool sowsBad;  // unused entries are now and then ids that no expert has
  int tokenBytes() const { return width * (int)trefoilDtypeBytes(dtype); }
  int combineBytes() const { return combineWidth * (int)trefoilDtypeBytes(combineDtype); }
};

struct HtRank {
  int device;
  cudaStream_t stream;
  char *exchange, *control, *scratch;
  uint64_t *bytes; // NULL: not counted
  ep_ht_status_t *status;
  std::vector<void *> memory;
};

struct Pass { // a dispatch and a combine, forward or of gradients
  std::vector<char> tokens, scales, y;
  std::vector<float> weights, slotWeights;
  ep_ht_dispatch_t dispatch;
  ep_ht_combine_t combine;
  char *seen = nullptr; // the output tokens as they were when the dispatch ended
};

struct StepRank {
  int64_t B, slots, rows; // slots that arrive, rows of the output tensors
  unsigned numBad;        // ids that no expert has
  std::vector<int32_t> topk;
  ep_ht_update_t update;
  Pass pass[2];
};

// First of all in a program: more than eight ranks of one GPU would share queues and wait for each other, and
// a kernel that is loaded late would wait for those that run.
void beforeCuda() {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
}

struct Ranks {
  std::vector<HtRank> ranks;

  void open(int R, bool isVirtual) {
    ranks.resize(R);
    for (int r = 0; r < R; r++) {
      HtRank &k = ranks[r];
      k.device = isVirtual ? 0 : r;
      CU(cudaSetDevice(k.device));
      for (int p = 0; p < R && !isVirtual; p++) {
        if (p != r) CU(cudaDeviceEnablePeerAccess(p, 0));
      }
      OK(epHtLoad());
      CU(cudaStreamCreateWithFlags(&k.stream, cudaStreamNonBlocking));
    }
  }
  char *take(int r, size_t bytes, int fill) {
    char *p;
    CU(cudaSetDevice(ranks[r].device));
    CU(cudaMalloc(&p, bytes + 256));
    CU(cudaMemset(p, fill, bytes + 256));
    ranks[r].memory.push_back(p);
    return p;
  }
  template <class T> T *upload(int r, const std::vector<T> &v) {
    T *p = (T *)take(r, v.size() * sizeof(T), POISON);
    CU(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
  }
  void sync() {
    for (HtRank &k : ranks) {
      CU(cudaSetDevice(k.device));
      CU(cudaDeviceSynchronize());
    }
  }
  void free() {
    for (HtRank &k : ranks) {
      for (void *p : k.memory) CU(cudaFree(p));
      k.memory.clear();
      k.bytes = nullptr;
      k.status = nullptr;
    }
  }
};

std::vector<char> payload(Rng &rng, trefoil_dtype_t dtype, size_t bytes, bool finite) {
  std::vector<char> v((bytes + 3) / 4 * 4);
  uint32_t *w = (uint32_t *)v.data();
  for (size_t i = 0; i < v.size() / 4; i++) {
    uint32_t x = rng.next();
    if (finite && dtype == TREFOIL_F32)
      x = (x & 0x80FFFFFFu) | 0x3E000000u;
    else if (finite)
      x = (x & 0x83FF83FFu) | (dtype == TREFOIL_F16 ? 0x30003000u : 0x3C003C00u);
    w[i] = x;
  }
  return v;
}

trefoil_case_t caseOf(const Shape &s, const std::vector<StepRank> &step,
                      std::vector<int64_t> &tokens, std::vector<const int32_t *> &topk) {
  tokens.clear();
  topk.clear();
  for (const StepRank &k : step) {
    tokens.push_back(k.B);
    topk.push_back(k.topk.data());
  }
  trefoil_case_t c = {};
  c.routing.shape = trefoil_shape_t{s.R, s.perDomain ? s.perDomain : s.R, s.E, s.K, s.N};
  c.routing.numTokens = tokens.data();
  c.routing.topkIdx = topk.data();
  c.mode = s.expertMajor ? TREFOIL_HT_EXPERT_MAJOR : TREFOIL_HT_FLAT;
  c.width = s.width;
  c.dtype = s.dtype;
  c.quant = s.scaleBytes ? TREFOIL_QUANT_CALLER : TREFOIL_QUANT_NONE;
  c.scaleBytes = s.scaleBytes;
  c.alignment = s.alignment;
  c.globalIds = s.globalIds;
  c.maxRecv = s.maxRecv;
  c.drop = s.drop;
  c.zeroCopyOn = s.zeroCopyOn;
  return c;
}

ep_ht_group_t groupOf(const Ranks &w, const Shape &s, const ep_ht_layout_t &at, int r) {
  ep_ht_group_t g = {};
  for (int p = 0; p < s.R; p++) {
    const bool isFar = s.perDomain && p / s.perDomain != r / s.perDomain;
    g.peers[p] = isFar ? nullptr : w.ranks[p].exchange;
  }
  g.at = at;
  g.control = w.ranks[r].control;
  g.scratch = w.ranks[r].scratch;
  g.bytes = w.ranks[r].bytes;
  g.status = w.ranks[r].status;
  g.timeoutNs = 20000000000ull;
  g.rank = r;
  g.numRanks = s.R;
  g.numExperts = s.E;
  g.numLocal = s.L;
  g.maxTokens = s.N;
  return g;
}

void makeRank(Ranks &w, Rng &rng, const Shape &s, const trefoil_case_t &c, StepRank &k, int r,
              const ep_ht_group_t &g, const ep_ht_handle_t &h) {
  k.slots = trefoilRefNumSlots(&c, r);
  k.rows = std::max(k.slots, s.maxRecv) + (s.maxRecv ? s.spare : 0);
  std::vector<int32_t> given = k.topk;
  for (int32_t &e : given) {
    if (!s.sowsBad || e != -1 || !rng.one(5)) continue;
    e = rng.one(2) ? s.E + rng.below(9) : -2 - rng.below(9);
    k.numBad++;
  }
  std::vector<int64_t> wide(given.begin(), given.end());
  k.update.group = g;
  k.update.handle = h;
  k.update.topkIdx = s.idx64 ? (void *)w.upload(r, wide) : (void *)w.upload(r, given);
  k.update.idx64 = s.idx64;
  k.update.numTokens = (int)k.B;
  k.update.numSms = s.numSms;
  const int each = s.count64 ? 8 : 4;
  k.update.expertCounters = {w.take(r, s.L * each, POISON), s.count64};
  k.update.expertOffsets = {s.expertMajor ? w.take(r, s.L * each, POISON) : nullptr, s.count64};
  k.update.total = {w.take(r, each, POISON), s.count64};
  for (int back = 0; back < s.passes; back++) {
    Pass &p = k.pass[back];
    p.tokens = payload(rng, s.dtype, k.B * s.tokenBytes(), s.finite);
    p.scales = payload(rng, TREFOIL_F32, k.B * s.scaleBytes, s.finite);
    p.y = payload(rng, s.combineDtype, k.rows * s.combineBytes(), s.finite);
    for (int64_t i = 0; i < k.B * s.K; i++) p.weights.push_back((rng.below(2001) - 1000) * 1e-3f);
    const int64_t per = s.expertMajor ? 1 : s.K;
    for (int64_t i = 0; i < k.rows * per; i++) p.slotWeights.push_back(rng.below(1000) * 1e-3f);
    ep_ht_dispatch_t &d = p.dispatch;
    d.group = g;
    d.handle = h;
    d.tokens = w.upload(r, p.tokens);
    d.scales = w.upload(r, p.scales);
    d.outTokens = w.take(r, k.rows * s.tokenBytes(), POISON);
    d.outScales = w.take(r, k.rows * s.scaleBytes, POISON);
    if (!back) {
      d.weights = w.upload(r, p.weights);
      d.outWeights = (float *)w.take(r, k.rows * per * 4, POISON);
      d.outIdx = s.expertMajor ? nullptr : (int64_t *)w.take(r, k.rows * per * 8, POISON);
    }
    d.topkRows = k.rows;
    d.tokenBytes = s.tokenBytes();
    d.scaleBytes = s.scaleBytes;
    d.globalIds = s.globalIds;
    d.numSms = s.numSms;
    d.numSenders = 1 + rng.below(std::max(1, s.numSms - 1));
    ep_ht_combine_t &m = p.combine;
    m.group = g;
    m.handle = h;
    m.tokens = w.upload(r, p.y);
    m.out = w.take(r, k.B * s.combineBytes(), POISON);
    if (back) {
      m.rowWeights = w.upload(r, p.slotWeights);
      m.outWeights = (float *)w.take(r, k.B * s.K * 4, POISON);
    }
    m.dtype = s.combineDtype;
    m.rowBytes = s.combineBytes();
    m.numSms = s.numSms;
    m.numSenders = 1 + rng.below(std::max(1, s.numSms - 1));
  }
}

// Where the outputs of a dispatch lie, for all ranks of a step: windows begin somewhere before them.
void openWindows(Rng &rng, const Shape &s, std::vector<StepRank> &step) {
  for (int back = 0; back < s.passes && s.windows; back++) {
    for (StepRank &k : step) {
      ep_ht_window_t &w = k.pass[back].dispatch.window;
      w.is = s.windows != 2 || !rng.one(3);
      w.id = s.windows != 2 || !rng.one(4) ? 7 : 8;
      w.tokensOffset = 16 * rng.below(1000);
      w.scalesOffset = 16 * rng.below(1000);
      ep_ht_combine_t &m = k.pass[back].combine;
      ep_ht_input_t &in = k.pass[back].dispatch.input;
      in.is = s.windows == 3 || (s.windows == 2 && rng.one(2));
      m.input.is = s.windows != 2 || !rng.one(3);
      if (m.group.rank == s.closed - 1) w.is = in.is = m.input.is = 0;
      const char *exchange = m.group.peers[m.group.rank];
      m.input.tokens = (const char *)m.tokens - exchange;
      in.tokens = (const char *)k.pass[back].dispatch.tokens - exchange;
      if (s.scaleBytes) in.scales = (const char *)k.pass[back].dispatch.scales - exchange;
    }
    for (StepRank &k : step) {
      for (int r = 0; r < s.R; r++) {
        const ep_ht_dispatch_t &to = step[r].pass[back].dispatch;
        ep_ht_window_t &w = k.pass[back].dispatch.window;
        w.tokens[r] = (char *)to.outTokens - to.window.tokensOffset;
        w.scales[r] = (char *)to.outScales - to.window.scalesOffset;
        if (to.window.id != w.id) w.tokens[r] += 16; // nowhere: another window
      }
    }
  }
}

bool equal(const char *what, int back, int step, int r, const void *device, const void *want,
           size_t bytes, size_t row) {
  std::vector<unsigned char> a(bytes);
  if (bytes) CU(cudaMemcpy(a.data(), device, bytes, cudaMemcpyDeviceToHost));
  const unsigned char *b = (const unsigned char *)want;
  if (!bytes || memcmp(a.data(), b, bytes) == 0) return true;
  size_t i = 0, n = 0;
  while (a[i] == b[i]) i++;
  for (size_t j = i; j < bytes; j++) n += a[j] != b[j];
  printf("  step %d rank %d %s %s: %zu of %zu bytes differ, first in row %zu at byte %zu: got",
         step, r, back ? "backward" : "forward", what, n, bytes, i / row, i % row);
  for (size_t j = i & ~(size_t)3; j < (i & ~(size_t)3) + 8 && j < bytes; j++) printf(" %02x", a[j]);
  printf(" want");
  for (size_t j = i & ~(size_t)3; j < (i & ~(size_t)3) + 8 && j < bytes; j++) printf(" %02x", b[j]);
  printf("\n");
  return false;
}

bool checkCounter(const char *what, int step, int r, const Shape &s, const ep_ht_counter_t &got,
                  const std::vector<int64_t> &want) {
  if (!got.data) return true;
  const std::vector<int32_t> narrow(want.begin(), want.end());
  return s.count64 ? equal(what, 0, step, r, got.data, want.data(), want.size() * 8, 8)
                   : equal(what, 0, step, r, got.data, narrow.data(), narrow.size() * 4, 4);
}

bool checkRank(const Shape &s, const std::vector<StepRank> &step, int at, int r) {
  std::vector<int64_t> tokens;
  std::vector<const int32_t *> topk;
  trefoil_case_t c = caseOf(s, step, tokens, topk);
  const StepRank &k = step[r];
  std::vector<int64_t> counts(s.L), offsets(s.L), total(1);
  trefoil_counters_t counters = {counts.data(), offsets.data(), total.data(), nullptr};
  OK(trefoilRefCounters(&c, r, &counters));
  bool ok = checkCounter("expert counters", at, r, s, k.update.expertCounters, counts);
  ok &= checkCounter("offsets", at, r, s, k.update.expertOffsets, offsets);
  ok &= checkCounter("total", at, r, s, k.update.total, total);
  const int64_t per = s.expertMajor ? 1 : s.K;
  for (int back = 0; back < s.passes; back++) {
    c.backward = back;
    c.width = s.width;
    c.dtype = s.dtype;
    c.quant = s.scaleBytes ? TREFOIL_QUANT_CALLER : TREFOIL_QUANT_NONE;
    std::vector<trefoil_source_t> sources;
    std::vector<trefoil_expert_rows_t> experts;
    for (const StepRank &q : step) {
      const Pass &p = q.pass[back];
      sources.push_back({p.tokens.data(), s.scaleBytes ? p.scales.data() : nullptr,
                         back ? nullptr : p.weights.data()});
      experts.push_back({p.y.data(), back ? p.slotWeights.data() : nullptr, nullptr});
    }
    const Pass &p = k.pass[back];
    std::vector<char> want(k.rows * s.tokenBytes(), (char)POISON),
        scales(k.rows * s.scaleBytes, (char)POISON), idx(k.rows * per * 8, (char)POISON);
    std::vector<float> weights(k.rows * per);
    memset(weights.data(), POISON, weights.size() * 4);
    trefoil_received_t out = {want.data(), s.scaleBytes ? scales.data() : nullptr,
                              back ? nullptr : weights.data(),
                              back || s.expertMajor ? nullptr : idx.data(), k.rows};
    OK(trefoilRefDispatch(&c, r, sources.data(), &out));
    ok &= equal("tokens", back, at, r, p.dispatch.outTokens, want.data(), want.size(),
                s.tokenBytes());
    if (p.seen) {
      ok &= equal("tokens at the end of dispatch", back, at, r, p.seen, want.data(), want.size(),
                  s.tokenBytes());
    }
    ok &= equal("scales", back, at, r, p.dispatch.outScales, scales.data(), scales.size(),
                std::max(s.scaleBytes, 1));
    if (!back) {
      ok &= equal("weights", back, at, r, p.dispatch.outWeights, weights.data(), weights.size() * 4,
                  per * 4);
      if (!s.expertMajor) {
        ok &= equal("idx", back, at, r, p.dispatch.outIdx, idx.data(), idx.size(), per * 8);
      }
    }
    c.width = s.combineWidth;
    c.dtype = s.combineDtype;
    c.quant = TREFOIL_QUANT_NONE;
    std::vector<char> sum(k.B * s.combineBytes());
    std::vector<float> gradients(k.B * s.K);
    OK(trefoilRefCombine(&c, r, experts.data(), nullptr, sum.data(),
                         back ? gradients.data() : nullptr));
    ok &= equal("combine", back, at, r, p.combine.out, sum.data(), sum.size(), s.combineBytes());
    if (back) {
      ok &= equal("gradients of weights", back, at, r, p.combine.outWeights, gradients.data(),
                  gradients.size() * 4, s.K * 4);
    }
  }
  return ok;
}

// Whether more comes to a rank than maxRecv.
bool overflows(const Shape &s, const std::vector<StepRank> &step, int r) {
  std::vector<int64_t> tokens, counts(s.L), offsets(s.L);
  std::vector<const int32_t *> topk;
  const trefoil_case_t c = caseOf(s, step, tokens, topk);
  int64_t slots;
  trefoil_counters_t counters = {counts.data(), offsets.data(), &slots, nullptr};
  OK(trefoilRefCounters(&c, r, &counters));
  return s.maxRecv && slots > s.maxRecv;
}

// What was reported to the ranks: ids that no expert has, and dispatches that trapped them.
bool checkRecords(const Ranks &w, const Shape &s, const std::vector<std::vector<StepRank>> &steps) {
  bool ok = true;
  for (int r = 0; r < s.R; r++) {
    ep_ht_status_t got;
    unsigned bad = 0, traps = 0;
    for (const std::vector<StepRank> &step : steps) {
      bad += step[r].numBad;
      traps += !s.drop && overflows(s, step, r) ? s.passes : 0;
    }
    CU(cudaMemcpy(&got, w.ranks[r].status, sizeof got, cudaMemcpyDeviceToHost));
    if (got.badIds == bad && got.traps == traps) continue;
    printf("  rank %d was told of %u bad ids and %u traps, not %u and %u\n", r, got.badIds,
           got.traps, bad, traps);
    ok = false;
  }
  return ok;
}

// What the ranks have counted as sent, where nothing was dropped, is what the reference moves.
bool checkBytes(const Ranks &w, const Shape &s, const std::vector<std::vector<StepRank>> &steps) {
  std::vector<uint64_t> want(2 * s.R * s.R), got(2 * s.R * s.R);
  for (const std::vector<StepRank> &step : steps) {
    std::vector<int64_t> tokens, rows(s.R * s.R);
    std::vector<const int32_t *> topk;
    const trefoil_case_t c = caseOf(s, step, tokens, topk);
    for (int r = 0; r < s.R; r++) {
      if (overflows(s, step, r)) return true;
    }
    for (int op = 0; op < 2; op++) {
      OK(trefoilRefTraffic(&c, op, rows.data()));
      const uint64_t bytes = op ? s.combineBytes() : s.tokenBytes() + s.scaleBytes;
      for (int i = 0; i < s.R * s.R; i++) {
        const int times = s.passes * (op ? std::max(s.combines, 1) : 1);
        want[(i / s.R * 2 + op) * s.R + i % s.R] += (uint64_t)rows[i] * times * bytes;
      }
    }
  }
  for (int r = 0; r < s.R; r++) {
    CU(cudaMemcpy(&got[r * 2 * s.R], w.ranks[r].bytes, 16 * s.R, cudaMemcpyDeviceToHost));
  }
  for (int i = 0; i < 2 * s.R * s.R; i++) {
    if (got[i] == want[i]) continue;
    printf("  rank %d has counted %llu bytes to rank %d in %s, not %llu\n", i / s.R / 2,
           (unsigned long long)got[i], i % s.R, i / s.R % 2 ? "combines" : "dispatches",
           (unsigned long long)want[i]);
    return false;
  }
  return true;
}

} // namespace

#endif
