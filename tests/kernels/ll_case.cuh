// Random cases of low latency: their shapes, what each rank holds in each step, and how its operations are
// put on its stream; for the test of random shapes.
#ifndef TREFOIL_TESTS_KERNELS_LL_CASE_CUH
#define TREFOIL_TESTS_KERNELS_LL_CASE_CUH

#include "ll_check.cuh"
#include "ll_domains.cuh"

namespace {

struct Options {
  int maxBlocks, style,
      generic; // generic: 0 each rank draws which dispatch it runs, 1 never the fast one
  bool verbose, isLong, twice; // twice: tokens name experts more than once
};

Shape randomShape(Rng &rng, int R, const Options &o) {
  Shape s = {};
  s.R = R;
  s.E = rng.one(4) ? 1 + rng.below(R * 3) : R * (1 + rng.below(6));
  s.K = rng.one(8) ? 1 + rng.below(64) : 1 + rng.below(10);
  s.N = rng.one(6) ? 1 + rng.below(150) : 1 + rng.below(20);
  s.L = (s.E + R - 1) / R;
  s.rankMajor = rng.one(3);
  s.sum = s.rankMajor ? EP_LL_SUM_RANKS : rng.one(2) ? EP_LL_SUM_PARTIAL : EP_LL_SUM_EXACT;
  static const trefoil_dtype_t wide[] = {TREFOIL_BF16, TREFOIL_F16, TREFOIL_F32};
  s.dtype = wide[rng.below(3)];
  s.combineDtype = wide[rng.below(3)];
  s.tokenWidth = 16 / (int)trefoilDtypeBytes(s.dtype) * (1 + rng.below(rng.one(4) ? 600 : 40));
  if (rng.one(2)) { // the usual: what the fast path takes
    s.K = 1 + rng.below(8);
    s.tokenWidth = 16 / (int)trefoilDtypeBytes(s.dtype) * (32 + rng.below(rng.one(3) ? 900 : 60));
  }
  const int quant = rng.below(4);
  if (quant == 1) {
    static const trefoil_dtype_t any[] = {TREFOIL_E4M3, TREFOIL_E5M2, TREFOIL_FP4X2, TREFOIL_BF16};
    s.dtype = any[rng.below(4)];
    if (rng.one(2)) s.tokenWidth = 16 * (1 + rng.below(100));
    s.tokenWidth = (s.tokenWidth + 15) / 16 * 16;
    s.scaleBytes = s.scaleBytesOut = 16 * (1 + rng.below(8));
  } else if (quant == 2) {
    s.quant = rng.one(2) ? EP_LL_QUANT_E4M3 : EP_LL_QUANT_E4M3_POW2;
    s.dtype = TREFOIL_BF16;
    s.tokenWidth = 512 * (1 + rng.below(rng.one(4) ? 15 : 5));
    s.scaleBytesOut = s.tokenWidth / 32;
  }
  s.combineWidth =
      16 / (int)trefoilDtypeBytes(s.combineDtype) * (1 + rng.below(rng.one(4) ? 600 : 40));
  s.steps = 2 + rng.below(5);
  const int many = rng.below(10);
  if (many < 2) { // more experts, and up to all k of a token on a rank
    s.E = std::max(64, R * (1 + rng.below(40)));
    s.K = 1 + rng.below(64);
  } else if (many == 2) { // ids of two bytes
    s.E = R * (256 + rng.below(60));
    s.N = 1 + rng.below(8);
    s.tokenWidth = s.quant ? 512 : 16 * (1 + rng.below(3));
    if (s.quant) s.scaleBytesOut = s.tokenWidth / 32;
  }
  if (o.twice) { // rows of a token once an expert, where top-k is more
    s.E = R * (1 + s.E % 2);
    s.K = 8 + s.K % 8;
    s.rankMajor = false;
    s.sum = EP_LL_SUM_EXACT;
  }
  s.L = (s.E + R - 1) / R;
  const bool huge = rng.one(40) && !o.twice;
  if (huge) { // slot map and routing past shared memory
    s.E = R * (8000 / R + rng.below(2000 / R + 1));
    s.L = s.E / R;
    s.N = 129 + rng.below(22);
    s.tokenWidth = s.combineWidth = 16;
    s.scaleBytes = s.scaleBytesOut = s.scaleBytes ? 16 : 0;
    s.quant = EP_LL_QUANT_NONE;
    s.steps = 2;
  }
  if (o.isLong) { // more tokens than 64 spans of the slot map have bits
    s.E = R;
    s.L = 1;
    s.K = 1 + rng.below(std::min(R, 4));
    s.N = 32768 / R + 1 + rng.below(200);
    s.tokenWidth = s.combineWidth = 16;
    s.scaleBytes = s.scaleBytesOut = s.scaleBytes ? 16 : 0;
    s.quant = EP_LL_QUANT_NONE;
    s.steps = 2;
  }
  const size_t most = huge || o.isLong ? 400u << 20 : 6u << 20;
  while (s.slots() * std::max(s.tokenBytes(), s.combineBytes()) > most && s.N > 1) s.N /= 2;
  s.style = (Style)rng.below(NUM_STYLES);
  s.alone = (s.N + s.K) % 2;
  s.blocks = 1 + rng.below(o.maxBlocks);
  s.idx64 = rng.one(2);
  s.globalIds = rng.one(3);
  s.finite = rng.one(2);
  s.delays = rng.one(2);
  s.holes = rng.one(2) ? 2 + rng.below(6) : 0;
  if (o.twice) s.holes = 2;
  s.finite = s.finite || o.twice;
  Rng side = {rng.s ^ 0x57A16417}; // what is drawn elsewhere does not depend on it
  s.reuses = s.style != TWO_IN_FLIGHT && side.one(2);
  static const uint64_t starts[] = {
      0, 1, (1ull << 30) - 3, 0xFFFFFFFEull - 3, (1ull << 32) - 2, 1ull << 40};
  s.first = starts[rng.below(6)] + rng.below(3);
  s.config = ep_ll_config_t{R,
                            s.E,
                            s.K + (s.K < 60 ? rng.below(4) : 0),
                            s.N,
                            std::max(s.tokenBytes() + s.scaleBytesOut, s.combineBytes()) +
                                16 * rng.below(3),
                            s.sum == EP_LL_SUM_PARTIAL};
  return s;
}

// Random bits with words that equal flags of these operations; or finite small values.
std::vector<char> payload(Rng &rng, const Shape &s, trefoil_dtype_t dtype, size_t bytes,
                          bool finite) {
  std::vector<char> v(bytes);
  uint32_t *w = (uint32_t *)v.data();
  for (size_t i = 0; i < bytes / 4; i++) {
    uint32_t x = rng.next();
    if (finite && dtype == TREFOIL_F32)
      x = (x & 0x80FFFFFFu) | 0x3E000000u;
    else if (finite)
      x = (x & 0x83FF83FFu) | (dtype == TREFOIL_F16 ? 0x30003000u : 0x3C003C00u);
    else if (x % 17 == 0)
      x = (uint32_t)(s.first % 0xFFFFFFFEull) + 2 + rng.below(2 * s.steps + 2);
    else if (x % 19 == 0)
      x = rng.one(2) ? 0 : 0xFFFFFFFFu;
    w[i] = x;
  }
  return v;
}

long numDispatches, numFast, numScratch; // for the summary

// Unused entries name the token's expert before them once more, with a weight of 0: nothing changes the sums.
std::vector<int32_t> nameTwice(std::vector<int32_t> topk, std::vector<float> &weights, int K) {
  for (size_t i = 0; i < topk.size(); i++) {
    if (i % K == 0 || topk[i] >= 0) continue;
    topk[i] = topk[i - 1];
    weights[i] = 0;
  }
  return topk;
}

// Outputs of one rank: its own, or those of an earlier step.
void makeOutputs(World &w, Rng &rng, const Shape &s, int r, StepRank &k, const StepRank *earlier) {
  ep_ll_dispatch_t &d = k.dispatch;
  const size_t tokens = s.slots() * s.tokenBytes(), scales = s.slots() * s.scaleBytesOut;
  k.keptTokens = k.keptScales = nullptr;
  if (s.reuses) {
    k.keptTokens = w.filled<char>(r, tokens, 0);
    k.keptScales = w.filled<char>(r, scales, 0);
  }
  const bool again = s.reuses && earlier;
  d.outTokens = again ? earlier->dispatch.outTokens : w.filled<char>(r, tokens, POISON);
  d.outScales = again ? earlier->dispatch.outScales : w.filled<char>(r, scales, POISON);
}

// from NULL: poison. Not a cudaMemcpyAsync or cudaMemsetAsync: under compute-sanitizer's initcheck the host
// waits for those, and the ranks that are not launched yet are waited for.
__global__ void copyBytes(char *to, const char *from, size_t n) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    to[i] = from ? from[i] : (char)POISON;
}

// Behind a dispatch on a stream whose next one has the same output: what it held is copied, slowly now and
// then, and poison put there. No peer may write into it before the next one has begun here.
void keepOutputs(const Shape &s, const StepRank &k, Rng &rng, cudaStream_t stream) {
  if (!k.keptTokens) return;
  const ep_ll_dispatch_t &d = k.dispatch;
  const size_t tokens = s.slots() * s.tokenBytes(), scales = s.slots() * s.scaleBytesOut;
  for (int i = 0; i < 2; i++) {
    if (rng.one(2)) CU(epStart(delayKernel, 1, 1, stream, 1000 + rng.below(40000)));
    const auto copy = [&](void *to, const void *from, size_t n) {
      CU(epStart(copyBytes, 4, 256, stream, (char *)to, (const char *)from, n));
    };
    copy(i ? d.outTokens : k.keptTokens, i ? nullptr : d.outTokens, tokens);
    copy(i ? d.outScales : k.keptScales, i ? nullptr : d.outScales, scales);
  }
}

void makeStep(World &w, Rng &rng, const Shape &s, std::vector<StepRank> &step, void *const *handles,
              const ep_ll_group_t *groups, const Options &o, const std::vector<StepRank> *earlier) {
  for (int r = 0; r < s.R; r++) {
    StepRank &k = step[r];
    k.B = rng.one(5) ? 0 : rng.one(3) ? s.N : rng.below(s.N + 1);
    k.topk = randomRouting(rng, (int)k.B, s.K, s.E, s.holes);
    k.tokens = payload(rng, s, s.dtype, k.B * s.inputBytes(), s.finite);
    for (size_t i = 0; s.quant && i + 256 <= k.tokens.size(); i += 256) {
      if (rng.one(8)) memset(&k.tokens[i], 0, 256); // a block of zeros has a scale, too
    }
    k.scales = payload(rng, s, TREFOIL_F32, k.B * s.scaleBytes, s.finite);
    k.y = payload(rng, s, s.combineDtype, s.slots() * s.combineBytes(), s.finite);
    k.yBytes = k.y.data();
    k.weights.resize(k.B * s.K);
    for (float &x : k.weights) x = (rng.below(2001) - 1000) * 1e-3f;
    const std::vector<int32_t> topk = o.twice ? nameTwice(k.topk, k.weights, s.K) : k.topk;
    std::vector<int64_t> topk64(topk.begin(), topk.end());
    ep_ll_handle_t h = {};
    h.topkIdx = s.idx64 ? (void *)w.upload(r, topk64) : (void *)w.upload(r, topk);
    h.memory = handles[r];
    h.numTopk = s.K;
    h.idx64 = s.idx64;
    h.rankMajor = s.rankMajor;
    h.sum = s.sum;
    ep_ll_dispatch_t &d = k.dispatch;
    d = ep_ll_dispatch_t{};
    d.group = groups[r];
    d.handle = h;
    d.tokens = w.upload(r, k.tokens);
    d.scales = s.scaleBytes ? w.upload(r, k.scales) : nullptr;
    d.weights = w.upload(r, k.weights);
    makeOutputs(w, rng, s, r, k, earlier ? &(*earlier)[r] : nullptr);
    d.counters = w.filled<int32_t>(r, s.rankMajor ? s.R : s.L, POISON);
    if (s.rankMajor) {
      d.outWeights = w.filled<float>(r, s.slots() * s.K, POISON);
      d.outIdx = w.filled<int32_t>(r, s.slots() * s.K, POISON);
    }
    d.numTokens = (int)k.B;
    d.tokenBytes = (int)s.tokenBytes();
    d.scaleBytes = s.scaleBytesOut;
    d.quant = s.quant;
    d.globalIds = s.globalIds;
    d.generic = o.generic == 1 || (o.generic == 0 && rng.one(3)); // ranks may differ in it
    ep_ll_combine_t &c = k.combine;
    c = ep_ll_combine_t{};
    c.group = groups[r];
    c.handle = h;
    c.tokens = w.upload(r, k.y);
    c.weights = s.rankMajor ? nullptr : d.weights;
    c.out = w.filled<char>(r, k.B * s.combineBytes() + 64, POISON);
    c.dtype = s.combineDtype;
    c.numTokens = (int)k.B;
    c.rowBytes = (int)s.combineBytes();
    if (const size_t n = epLlDispatchScratch(&d.group, &h, d.tokenBytes)) {
      d.scratch = w.take<char>(r, n);
      numScratch++;
    }
    numDispatches++;
    numFast += s.style != STAGED && epLlDispatchIsFast(&d, EP_LL_BOTH);
  }
}

void maybeDelay(const Shape &s, Rng &rng, cudaStream_t stream) {
  if (s.delays && rng.one(2))
    CU(epStart(delayKernel, 1, 1, stream, rng.one(40) ? 3000000 : rng.below(60000)));
}

// Whether steps i and i + 1 are in flight together: equal on all ranks, as it is the order of operations.
bool isPair(const Shape &s, int i) {
  return s.style == TWO_IN_FLIGHT && i + 1 < s.steps && (i + s.N + s.E) % 3 != 0;
}

// Whether step i is a dispatch alone: without combines a rank may be two operations ahead of another.
bool isAlone(const Shape &s, int i) {
  return s.style == TWO_IN_FLIGHT && s.alone && i < (s.steps - 1) / 2 * 2;
}

// Enqueues all steps of one rank. What it stages is its own affair.
void enqueue(const Shape &s, std::vector<std::vector<StepRank>> &steps, int r, cudaStream_t stream,
             Rng rng) {
  const int n = s.steps;
  for (int i = 0; i < n; i++) {
    StepRank &k = steps[i][r];
    maybeDelay(s, rng, stream);
    if (isAlone(s, i)) {
      StepRank &next = steps[++i][r];
      for (StepRank *x : {&k, &next}) OK(domains.dispatch(x->dispatch, EP_LL_SEND, stream));
      if (rng.one(3)) CU(epStart(delayKernel, 1, 1, stream, rng.below(1000000)));
      for (StepRank *x : {&k, &next}) OK(domains.dispatch(x->dispatch, EP_LL_RECV, stream));
      continue;
    }
    if (isPair(s, i) && rng.one(3)) {
      for (int j = i; j < i + 2; j++)
        OK(domains.dispatch(steps[j][r].dispatch, EP_LL_BOTH, stream));
      for (int j = i; j < i + 2; j++) OK(domains.combine(steps[j][r].combine, EP_LL_BOTH, stream));
      i++;
      continue;
    }
    if (isPair(s, i)) {
      StepRank &next = steps[i + 1][r];
      for (StepRank *x : {&k, &next}) OK(domains.dispatch(x->dispatch, EP_LL_SEND, stream));
      maybeDelay(s, rng, stream);
      for (StepRank *x : {&k, &next}) OK(domains.dispatch(x->dispatch, EP_LL_RECV, stream));
      for (StepRank *x : {&k, &next}) OK(domains.combine(x->combine, EP_LL_SEND, stream));
      maybeDelay(s, rng, stream);
      for (StepRank *x : {&next, &k}) OK(domains.combine(x->combine, EP_LL_RECV, stream));
      i++;
      continue;
    }
    const bool staged = s.style == STAGED || (s.style == TWO_IN_FLIGHT && rng.one(3));
    if (staged) {
      OK(domains.dispatch(k.dispatch, EP_LL_SEND, stream));
      OK(domains.dispatch(k.dispatch, EP_LL_RECV, stream));
      keepOutputs(s, k, rng, stream);
      OK(domains.combine(k.combine, EP_LL_SEND, stream));
      maybeDelay(s, rng, stream);
      OK(domains.combine(k.combine, EP_LL_RECV, stream));
    } else {
      OK(domains.dispatch(k.dispatch, EP_LL_BOTH, stream));
      keepOutputs(s, k, rng, stream);
      maybeDelay(s, rng, stream);
      OK(domains.combine(k.combine, EP_LL_BOTH, stream));
    }
  }
}

std::vector<std::vector<StepRank>> makeSteps(World &w, Rng &rng, const Shape &s, int enableMask,
                                             uint64_t timeoutNs, const Options &o) {
  ep_ll_config_t config = s.config;
  w.reset(config, s.first);
  Rng side = {rng.s ^ 0xD0A1};
  domains.reset(w, config, s.first, enableMask != 0, side);
  std::vector<ep_ll_group_t> groups;
  std::vector<void *> handles[2];
  for (int r = 0; r < s.R; r++) {
    CU(cudaSetDevice(w.ranks[r].device));
    groups.push_back(w.group(r, config, s.blocks, timeoutNs));
    domains.setPeers(groups[r]);
    groups[r].enableMask = enableMask;
    if (domains.perDomain) groups[r].bytes = w.filled<uint64_t>(r, 2 * s.R, 0);
    for (auto &h : handles) h.push_back(w.filled<char>(r, epLlHandleBytes(&s.config, s.K), 0));
  }
  std::vector<std::vector<StepRank>> steps(s.steps, std::vector<StepRank>(s.R));
  for (int i = 0; i < s.steps; i++)
    makeStep(w, rng, s, steps[i], handles[i % 2].data(), groups.data(), o, i ? &steps[0] : nullptr);
  w.sync();
  return steps;
}

void launchAll(World &w, const Shape &s, std::vector<std::vector<StepRank>> &steps, Rng &rng) {
  std::vector<cudaGraphExec_t> graphs(s.R);
  for (int r = 0; r < s.R; r++) {
    cudaStream_t stream = w.ranks[r].stream;
    CU(cudaSetDevice(w.ranks[r].device));
    if (s.style == GRAPH) CU(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    enqueue(s, steps, r, stream, Rng{rng.s + r * 77});
    if (s.style != GRAPH) continue;
    cudaGraph_t graph;
    CU(cudaStreamEndCapture(stream, &graph));
    CU(cudaGraphInstantiate(&graphs[r], graph, 0));
    CU(cudaGraphDestroy(graph));
  }
  if (s.style == GRAPH) { // replayed: operations are counted on the device
    for (int replay = 0; replay < 2; replay++) {
      for (int r = 0; r < s.R; r++) {
        CU(cudaSetDevice(w.ranks[r].device));
        CU(cudaGraphLaunch(graphs[r], w.ranks[r].stream));
      }
    }
  }
  w.sync();
  if (s.style == GRAPH) {
    for (cudaGraphExec_t g : graphs) CU(cudaGraphExecDestroy(g));
  }
}

void printShape(const Shape &s) {
  printf("  R %d E %d K %d N %d %s sum %d dtype %s width %d scales %d quant %d combine %s width %d "
         "steps %d"
         " %s blocks %d%s first %llu\n",
         s.R, s.E, s.K, s.N, s.rankMajor ? "rank-major" : "expert-major", s.sum,
         trefoilDtypeName(s.dtype), s.tokenWidth, s.scaleBytes, s.quant,
         trefoilDtypeName(s.combineDtype), s.combineWidth, s.steps, STYLES[s.style], s.blocks,
         s.reuses ? ", one output" : "", (unsigned long long)s.first);
  fflush(stdout);
}

} // namespace

#endif
