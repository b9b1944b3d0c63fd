// Kernel times of low-latency dispatch and combine on GPUs that share NVLink, one thread for all ranks.
//
//   ll_bench [--ranks R] [--out file.json] [--tokens B] [--tune] [--dispatch] [--generic] [--virtual]
//
// --virtual: the ranks share one GPU and its SMs.
//
// Lockstep time: ranks are aligned by a barrier kernel; device clock from the first block's start to the
// last block's end, slowest rank, median and 99th percentile of 200 launches that go round three
// data sets. Back to back: events round the same launches in a graph, per launch. The plain copy
// rate is that of an all-to-all of 16-byte stores in the same run, and the ratio is time / (bytes
// of the busiest port of the plan / that rate + 3.4 us). What fails its check against the reference
// is not timed.
//
#include "ll_time.cuh"

namespace {

struct Data {
  std::vector<std::vector<char>> y, x; // a rank
};

struct Choice {
  bool tune, dispatchOnly, generic;
};

void benchOne(Bench &b, const Data &data, int B, bool rankMajor, ep_ll_quant_t quant,
              ep_ll_sum_t sum, const Choice &choice, bool dispatchToo) {
  if (choice.dispatchOnly && !dispatchToo) return;
  World &w = b.w;
  const Shape s = benchShape(b.R, rankMajor, quant, sum);
  w.reset(s.config, 0);
  std::vector<std::vector<StepRank>> sets(SETS, std::vector<StepRank>(b.R));
  b.each([&](int r) {
    Rng rng = {(uint64_t)(B * 100 + r)};
    ep_ll_group_t g = w.group(r, s.config, GRID, 3000000000ull);
    char *y = choice.dispatchOnly ? nullptr : w.upload(r, data.y[r]);
    for (int i = 0; i < SETS; i++) {
      StepRank &k = sets[i][r];
      k.B = B;
      k.topk = randomRouting(rng, B, s.K, s.E, 0);
      const char *x = data.x[r].data() + (size_t)i * s.N * s.inputBytes();
      k.tokens.assign(x, x + B * s.inputBytes());
      k.yBytes = data.y[r].data();
      k.weights.resize(B * s.K);
      for (float &f : k.weights) f = (rng.below(100000) + 1) * 1e-5f;
      std::vector<int64_t> topk64(k.topk.begin(), k.topk.end());
      ep_ll_handle_t h = {w.upload(r, topk64),
                          w.filled<char>(r, epLlHandleBytes(&s.config, s.K), 0),
                          s.K,
                          1,
                          rankMajor,
                          sum};
      k.dispatch = ep_ll_dispatch_t{};
      ep_ll_dispatch_t &d = k.dispatch;
      d.group = g;
      d.handle = h;
      d.tokens = w.upload(r, k.tokens);
      d.weights = w.upload(r, k.weights);
      d.outTokens = w.filled<char>(r, s.slots() * s.tokenBytes(), POISON);
      d.outScales = w.filled<char>(r, s.slots() * s.scaleBytesOut, POISON);
      d.counters = w.filled<int32_t>(r, rankMajor ? s.R : s.L, POISON);
      if (rankMajor) {
        d.outWeights = w.filled<float>(r, s.slots() * s.K, POISON);
        d.outIdx = w.filled<int32_t>(r, s.slots() * s.K, POISON);
      }
      d.numTokens = B;
      d.tokenBytes = (int)s.tokenBytes();
      d.scaleBytes = s.scaleBytesOut;
      d.quant = quant;
      d.generic = choice.generic;
      ep_ll_combine_t &c = k.combine;
      c = ep_ll_combine_t{g,
                          h,
                          y,
                          rankMajor ? nullptr : d.weights,
                          w.filled<char>(r, B * s.combineBytes() + 64, POISON),
                          TREFOIL_BF16,
                          B,
                          (int)s.combineBytes(),
                          0,
                          0};
    }
  });
  w.sync();
  b.each([&](int r) {
    for (auto &set : sets) {
      OK(epLlDispatch(&set[r].dispatch, EP_LL_BOTH, w.ranks[r].stream));
      if (choice.dispatchOnly) continue;
      OK(epLlCombine(&set[r].combine, EP_LL_BOTH, w.ranks[r].stream));
    }
  });
  w.sync();
  std::vector<char> okDispatch(b.R * SETS, 1), okCombine(b.R * SETS, 1);
  std::vector<std::thread> threads;
  for (int q = 0; q < b.R * SETS; q++) {
    threads.emplace_back([&, q] {
      const int r = q % b.R, i = q / b.R;
      CU(cudaSetDevice(w.ranks[r].device));
      if (dispatchToo) okDispatch[q] = checkDispatch(w, s, sets[i], i, r, nullptr);
      if (!choice.dispatchOnly) okCombine[q] = checkCombine(w, s, sets[i], i, r, nullptr);
    });
  }
  for (auto &t : threads) t.join();
  const bool okD = *std::min_element(okDispatch.begin(), okDispatch.end());
  const bool okC = *std::min_element(okCombine.begin(), okCombine.end());
  for (int r = 0; r < b.R; r++) {
    if (w.ranks[r].record->failed) printf("rank %d gave up\n", r), b.failed = true;
  }
  auto warps = [&](bool combine) {
    std::vector<std::pair<int, int>> v = {{0, 0}};
    if (!choice.tune) return v;
    if (combine && sum == EP_LL_SUM_PARTIAL)
      v = {{10, 10}, {4, 4}, {8, 8}, {6, 6}};
    else if (combine)
      v = {{10, 10}, {12, 8}, {8, 12}, {5, 15}, {8, 8}, {4, 4}};
    else if (quant)
      v = {{4, 4}, {8, 4}, {8, 8}, {4, 15}, {5, 15}, {3, 15}, {12, 8}};
    else
      v = {{2, 15}, {3, 15}, {4, 15}, {2, 8}, {4, 8}, {2, 4}, {2, 2}};
    return v;
  };
  if (dispatchToo) {
    const char *name = quant       ? "dispatch expert-major e4m3"
                       : rankMajor ? "dispatch rank-major"
                                   : "dispatch expert-major";
    for (auto p : warps(false)) {
      const auto t = okD ? b.time([&](int r, int i, unsigned long long *stamps) {
        ep_ll_dispatch_t d = sets[i % SETS][r].dispatch;
        d.group.stamps = (uint64_t *)stamps;
        d.sendWarps = p.first;
        d.recvWarps = p.second;
        OK(epLlDispatch(&d, EP_LL_BOTH, w.ranks[r].stream));
      })
                         : Bench::Times{};
      b.row(name, B, s, false, busiestPort(s, sets, false), okD, t, p.first, p.second);
    }
  }
  const char *name = sum == EP_LL_SUM_EXACT     ? "combine expert-major exact"
                     : sum == EP_LL_SUM_PARTIAL ? "combine expert-major partial"
                                                : "combine rank-major";
  if (!quant && !choice.dispatchOnly) {
    for (auto p : warps(true)) {
      const auto t = okC ? b.time([&](int r, int i, unsigned long long *stamps) {
        ep_ll_combine_t c = sets[i % SETS][r].combine;
        c.group.stamps = (uint64_t *)stamps;
        c.sendWarps = p.first;
        c.recvWarps = p.second;
        OK(epLlCombine(&c, EP_LL_BOTH, w.ranks[r].stream));
      })
                         : Bench::Times{};
      b.row(name, B, s, true, busiestPort(s, sets, true), okC, t, p.first, p.second);
    }
  }
  for (int r = 0; r < b.R; r++) {
    if (w.ranks[r].record->failed)
      printf("rank %d gave up while being timed\n", r), b.failed = true;
  }
}

} // namespace

int main(int argc, char **argv) {
  int R = 4, only = 0, isVirtual = 0;
  Choice choice = {};
  const char *out = nullptr;
  for (int i = 1; i < argc; i++) {
    if (!strcmp(argv[i], "--ranks") && i + 1 < argc)
      R = atoi(argv[++i]);
    else if (!strcmp(argv[i], "--out") && i + 1 < argc)
      out = argv[++i];
    else if (!strcmp(argv[i], "--tokens") && i + 1 < argc)
      only = atoi(argv[++i]);
    else if (!strcmp(argv[i], "--virtual"))
      isVirtual = 1;
    else if (!strcmp(argv[i], "--tune"))
      choice.tune = true;
    else if (!strcmp(argv[i], "--dispatch"))
      choice.dispatchOnly = true;
    else if (!strcmp(argv[i], "--generic"))
      choice.generic = true;
    else {
      fprintf(stderr, "unknown argument %s\n", argv[i]);
      return 2;
    }
  }
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  int devices = 0;
  const int wanted = isVirtual ? 1 : R;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < wanted || R < 2 || R > 8) {
    printf("skipped: %d GPUs here, %d needed\n", devices, wanted);
    return 77;
  }
  Bench b;
  b.open(R, isVirtual, 80u << 20);
  b.measureCopies();
  if (out) b.json = fopen(out, "w");
  if (b.json) {
    cudaDeviceProp p;
    CU(cudaGetDeviceProperties(&p, 0));
    fprintf(b.json,
            "{\"device\": \"%d x %s\", \"copy_rate_GBps\": %.1f, \"iterations\": %d, \"rows\": [",
            R, p.name, b.copyRate, ITERATIONS);
  }
  Data data = {std::vector<std::vector<char>>(R), std::vector<std::vector<char>>(R)};
  std::vector<std::thread> threads;
  const size_t yBytes = benchShape(R, false, EP_LL_QUANT_NONE, EP_LL_SUM_EXACT).slots() * 14336;
  for (int r = 0; r < R; r++) {
    threads.emplace_back([&, r] {
      data.y[r] = finiteBf16(1000 + r, yBytes);
      data.x[r] = finiteBf16(2000 + r, (size_t)SETS * 128 * 14336);
    });
  }
  for (auto &t : threads) t.join();
  for (int B : {1, 8, 32, 64, 128}) {
    if (only && B != only) continue;
    benchOne(b, data, B, false, EP_LL_QUANT_NONE, EP_LL_SUM_EXACT, choice, true);
    benchOne(b, data, B, false, EP_LL_QUANT_NONE, EP_LL_SUM_PARTIAL, choice, false);
    benchOne(b, data, B, true, EP_LL_QUANT_NONE, EP_LL_SUM_RANKS, choice, true);
    benchOne(b, data, B, false, EP_LL_QUANT_E4M3, EP_LL_SUM_EXACT, choice, true);
  }
  if (b.json) fprintf(b.json, "\n]}\n"), fclose(b.json);
  return b.failed;
}
