// One step of a group against the reference, bit for bit; for the test of random shapes and the benchmark.
#ifndef TREFOIL_TESTS_KERNELS_LL_CHECK_CUH
#define TREFOIL_TESTS_KERNELS_LL_CHECK_CUH

#include "ll_world.cuh"

#include "trefoil/ref.h"

#include <algorithm>

namespace {

constexpr int POISON = 0xEE;

enum Style { FUSED, STAGED, TWO_IN_FLIGHT, GRAPH, NUM_STYLES };
const char *const STYLES[] = {"fused", "staged", "two in flight", "graph"};

struct Shape {
  ep_ll_config_t config;
  int R, E, K, L, N, steps, blocks, scaleBytes, tokenWidth, combineWidth, scaleBytesOut;
  trefoil_dtype_t dtype, combineDtype;
  ep_ll_quant_t quant;
  ep_ll_sum_t sum;
  Style style;
  bool alone; // two in flight: only the last steps have combines
  bool rankMajor, idx64, globalIds, finite, delays;
  int windows; // outputs lie in windows: 0 on no rank, 1 on all, 2 on some, not always the same
  bool reuses; // one output for all steps, copied and poisoned behind each
  int holes;
  uint64_t first;
  size_t tokenBytes() const { // of an output row
    return quant ? (size_t)tokenWidth : (size_t)tokenWidth * trefoilDtypeBytes(dtype);
  }
  size_t inputBytes() const { return (size_t)tokenWidth * trefoilDtypeBytes(dtype); }
  size_t combineBytes() const { return (size_t)combineWidth * trefoilDtypeBytes(combineDtype); }
  size_t slots() const { return (size_t)(rankMajor ? 1 : L) * R * N; }
};

// What one rank holds for one step, on the host and on its device.
struct StepRank {
  int64_t B;
  std::vector<int32_t> topk;
  std::vector<char> tokens, scales, y;
  const char *yBytes; // y, or another buffer of the same shape
  std::vector<float> weights;
  ep_ll_dispatch_t dispatch;
  ep_ll_combine_t combine;
  char *keptTokens,
      *keptScales; // what a reused output held after this step; NULL: it is this step's own
};

bool equal(const char *what, int r, int step, const void *got, const void *want, size_t bytes,
           size_t rowBytes) {
  const unsigned char *a = (const unsigned char *)got, *b = (const unsigned char *)want;
  if (memcmp(a, b, bytes) == 0) return true;
  size_t i = 0, n = 0;
  while (a[i] == b[i]) i++;
  for (size_t j = i; j < bytes; j++) n += a[j] != b[j];
  printf("  step %d rank %d %s: %zu of %zu bytes differ, first in row %zu at byte %zu: got", step,
         r, what, n, bytes, i / rowBytes, i % rowBytes);
  for (size_t j = i & ~(size_t)3; j < (i & ~(size_t)3) + 16 && j < bytes; j++)
    printf(" %02x", a[j]);
  printf(" want");
  for (size_t j = i & ~(size_t)3; j < (i & ~(size_t)3) + 16 && j < bytes; j++)
    printf(" %02x", b[j]);
  printf("\n");
  return false;
}

trefoil_case_t caseOf(const Shape &s, const std::vector<StepRank> &step,
                      std::vector<int64_t> &tokens, std::vector<const int32_t *> &topk,
                      bool combine) {
  tokens.clear();
  topk.clear();
  for (const StepRank &k : step) {
    tokens.push_back(k.B);
    topk.push_back(k.topk.data());
  }
  trefoil_case_t c = {};
  c.routing.shape = trefoil_shape_t{s.R, s.R, s.E, s.K, s.N};
  c.routing.numTokens = tokens.data();
  c.routing.topkIdx = topk.data();
  c.mode = s.rankMajor ? TREFOIL_LL_RANK_MAJOR : TREFOIL_LL_EXPERT_MAJOR;
  c.width = combine ? s.combineWidth : s.tokenWidth;
  c.dtype = combine ? s.combineDtype : s.dtype;
  c.quant = combine        ? TREFOIL_QUANT_NONE
            : s.quant      ? TREFOIL_QUANT_E4M3
            : s.scaleBytes ? TREFOIL_QUANT_CALLER
                           : TREFOIL_QUANT_NONE;
  c.roundScales = s.quant == EP_LL_QUANT_E4M3_POW2;
  c.scaleBytes = s.scaleBytes;
  c.globalIds = s.globalIds;
  c.combinePartial = s.sum == EP_LL_SUM_PARTIAL;
  return c;
}

// Compares the dispatch of one step of one rank with the reference; active is the R x R mask or NULL.
bool checkDispatch(World &w, const Shape &s, const std::vector<StepRank> &step, int at, int r,
                   const uint8_t *active) {
  std::vector<int64_t> tokens;
  std::vector<const int32_t *> topk;
  trefoil_case_t c = caseOf(s, step, tokens, topk, false);
  c.active = active;
  std::vector<trefoil_source_t> sources;
  for (const StepRank &k : step) {
    sources.push_back(trefoil_source_t{k.tokens.data(), s.scaleBytes ? k.scales.data() : nullptr,
                                       s.rankMajor ? k.weights.data() : nullptr});
  }
  const size_t slots = s.slots(), tb = s.tokenBytes(), sb = s.scaleBytesOut;
  std::vector<char> wantTokens(slots * tb, (char)POISON), wantScales(slots * sb, (char)POISON);
  std::vector<char> wantWeights(s.rankMajor ? slots * s.K * 4 : 0, (char)POISON),
      wantIdx = wantWeights;
  trefoil_received_t want = {};
  want.tokens = wantTokens.data();
  want.scales = sb ? wantScales.data() : nullptr;
  want.topkWeights = s.rankMajor ? (float *)wantWeights.data() : nullptr;
  want.topkIdx = s.rankMajor ? wantIdx.data() : nullptr;
  want.topkRows = (int64_t)slots;
  OK(trefoilRefDispatch(&c, r, sources.data(), &want));
  std::vector<int64_t> counts(s.rankMajor ? s.R : s.L);
  trefoil_counters_t counters = {};
  (s.rankMajor ? counters.srcRankCounters : counters.expertCounters) = counts.data();
  OK(trefoilRefCounters(&c, r, &counters));
  const std::vector<int32_t> wantCounts(counts.begin(), counts.end());
  const ep_ll_dispatch_t &d = step[r].dispatch;
  bool ok = equal("counters", r, at, w.download(r, d.counters, counts.size()).data(),
                  wantCounts.data(), counts.size() * 4, 4);
  const char *outTokens = step[r].keptTokens ? step[r].keptTokens : (char *)d.outTokens;
  const char *outScales = step[r].keptScales ? step[r].keptScales : (char *)d.outScales;
  ok &= equal("tokens", r, at, w.download(r, outTokens, slots * tb).data(), wantTokens.data(),
              slots * tb, tb);
  ok &= equal("scales", r, at, w.download(r, outScales, slots * sb).data(), wantScales.data(),
              slots * sb, sb);
  if (s.rankMajor) {
    ok &= equal("weights", r, at, w.download(r, d.outWeights, slots * s.K).data(),
                wantWeights.data(), slots * s.K * 4, s.K * 4);
    ok &= equal("idx", r, at, w.download(r, d.outIdx, slots * s.K).data(), wantIdx.data(),
                slots * s.K * 4, s.K * 4);
  }
  return ok;
}

// activeCombine: the masks of the combine, NULL if they are those of the dispatch.
bool checkCombine(World &w, const Shape &s, const std::vector<StepRank> &step, int at, int r,
                  const uint8_t *active, const uint8_t *activeCombine = nullptr) {
  std::vector<int64_t> tokens;
  std::vector<const int32_t *> topk;
  trefoil_case_t c = caseOf(s, step, tokens, topk, true);
  c.active = active;
  c.activeCombine = activeCombine;
  std::vector<trefoil_expert_rows_t> experts;
  for (const StepRank &k : step) {
    experts.push_back(trefoil_expert_rows_t{k.yBytes, nullptr, nullptr});
  }
  const size_t bytes = step[r].B * s.combineBytes();
  std::vector<char> out(bytes + 64, (char)POISON);
  OK(trefoilRefCombine(&c, r, experts.data(), s.rankMajor ? nullptr : step[r].weights.data(),
                       out.data(), nullptr));
  return equal("combine", r, at, w.download(r, (char *)step[r].combine.out, bytes + 64).data(),
               out.data(), bytes + 64, s.combineBytes());
}

} // namespace

#endif
