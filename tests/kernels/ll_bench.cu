// Kernel times of low-latency dispatch and combine on GPUs that share NVLink, one thread for all ranks.
//
//   ll_bench [--ranks R] [--out file.json] [--tokens B] [--tune] [--dispatch] [--general]
//
// Lockstep time: ranks are aligned by a barrier kernel; device clock from the first block's start to the
// last block's end, slowest rank, median and 99th percentile of 200 launches that go round three data sets.
// Back to back: events round the same launches in a graph, per launch. The plain copy rate is that of an
// all-to-all of 16-byte stores in the same run, and the ratio is time / (bytes of the busiest port of the
// plan / that rate + 3.4 us). What fails its check against the reference is not timed.
#include "ll_check.cuh"

#include <functional>
#include <thread>

namespace {

constexpr int ITERATIONS = 200, SETS = 3, GRID = 132;

struct Barrier {
  unsigned *words[8];
  int rank, numRanks;
  unsigned *epoch;
};

__device__ inline unsigned long long now() {
  unsigned long long t;
  asm volatile("mov.u64 %0,%globaltimer;" : "=l"(t));
  return t;
}

// All ranks leave within about a microsecond; first a pause, so that all have arrived.
__global__ void lockstepKernel(const __grid_constant__ Barrier b, int pauseNs) {
  const unsigned long long t0 = now();
  while (now() - t0 < (unsigned)pauseNs) {
  }
  const unsigned e = *b.epoch + 1;
  if (threadIdx.x < b.numRanks) {
    *(volatile unsigned *)(b.words[threadIdx.x] + b.rank) = e;
    while ((int)(*(volatile unsigned *)(b.words[b.rank] + threadIdx.x) - e) < 0) {
      if (now() - t0 > 4000000000ull) break;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) *b.epoch = e;
}

// Every rank stores its share to every other rank, destinations rotated.
__global__ void allToAllKernel(const __grid_constant__ Barrier b, size_t bytesEach) {
  const size_t n = bytesEach / 16;
  for (int d = 1; d < b.numRanks; d++) {
    uint4 *to = (uint4 *)(b.words[(b.rank + d) % b.numRanks] + 1024) + b.rank * n;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
      to[i] = make_uint4(i, d, b.rank, 7);
    }
  }
}

// Every launch copies to all peers at once instead of one after the other: blocks take peers in turn.
__global__ void spreadCopyKernel(const __grid_constant__ Barrier b, size_t bytesEach) {
  const size_t n = bytesEach / 16;
  const int peers = b.numRanks - 1, d = 1 + blockIdx.x % peers, part = blockIdx.x / peers;
  const int parts = (gridDim.x - blockIdx.x % peers + peers - 1) / peers;
  uint4 *to = (uint4 *)(b.words[(b.rank + d) % b.numRanks] + 1024) + b.rank * n;
  for (size_t i = part * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)parts * blockDim.x) {
    to[i] = make_uint4(i, d, b.rank, 7);
  }
}

struct Bench {
  World w;
  int R;
  std::vector<Barrier> barriers;
  std::vector<unsigned long long *> stamps;
  std::vector<cudaEvent_t> begin, end;
  double copyRate = 0; // bytes / ns of one port
  FILE *json = nullptr;
  bool firstRow = true, failed = false;

  using Launch = std::function<void(int rank, int i, unsigned long long *stamps)>;

  void each(const std::function<void(int)> &f) {
    for (int r = 0; r < R; r++) {
      CU(cudaSetDevice(w.ranks[r].device));
      f(r);
    }
  }

  std::vector<cudaGraphExec_t> capture(int n, bool lockstep, const Launch &launch) {
    std::vector<cudaGraphExec_t> graphs(R);
    each([&](int r) {
      cudaStream_t s = w.ranks[r].stream;
      cudaGraph_t g;
      CU(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
      if (!lockstep) lockstepKernel<<<1, 32, 0, s>>>(barriers[r], 20000);
      if (!lockstep) CU(cudaEventRecordWithFlags(begin[r], s, cudaEventRecordExternal));
      for (int i = 0; i < n; i++) {
        if (lockstep) lockstepKernel<<<1, 32, 0, s>>>(barriers[r], 4000);
        launch(r, i, lockstep ? stamps[r] + (size_t)i * GRID * 2 : nullptr);
      }
      if (!lockstep) CU(cudaEventRecordWithFlags(end[r], s, cudaEventRecordExternal));
      CU(cudaStreamEndCapture(s, &g));
      CU(cudaGraphInstantiate(&graphs[r], g, 0));
      CU(cudaGraphDestroy(g));
    });
    return graphs;
  }

  void replay(std::vector<cudaGraphExec_t> &graphs) {
    each([&](int r) { CU(cudaGraphLaunch(graphs[r], w.ranks[r].stream)); });
    w.sync();
  }

  struct Times {
    double median, p99, backToBack;
  };

  Times time(const Launch &launch) {
    auto graphs = capture(ITERATIONS, true, launch);
    replay(graphs);
    replay(graphs);
    std::vector<double> worst(ITERATIONS, 0);
    each([&](int r) {
      const auto h = w.download(r, stamps[r], (size_t)ITERATIONS * GRID * 2);
      for (int i = 0; i < ITERATIONS; i++) {
        unsigned long long lo = ~0ull, hi = 0;
        for (int b = 0; b < GRID; b++) {
          lo = std::min(lo, h[((size_t)i * GRID + b) * 2]);
          hi = std::max(hi, h[((size_t)i * GRID + b) * 2 + 1]);
        }
        worst[i] = std::max(worst[i], (hi - lo) * 1e-3);
      }
      CU(cudaGraphExecDestroy(graphs[r]));
    });
    graphs = capture(ITERATIONS, false, launch);
    replay(graphs);
    replay(graphs);
    double slowest = 0;
    each([&](int r) {
      float ms;
      CU(cudaEventElapsedTime(&ms, begin[r], end[r]));
      slowest = std::max(slowest, ms * 1e3 / ITERATIONS);
      CU(cudaGraphExecDestroy(graphs[r]));
    });
    std::sort(worst.begin(), worst.end());
    return Times{worst[ITERATIONS / 2], worst[ITERATIONS * 99 / 100], slowest};
  }

  void open(int numRanks) {
    R = numRanks;
    w.open(R, false, 80u << 20, 6ull << 30);
    barriers.resize(R);
    each([&](int r) {
      unsigned *words, *epoch;
      unsigned long long *s;
      CU(cudaMalloc(&words, 4096 + (400u << 20)));
      CU(cudaMemset(words, 0, 4096));
      CU(cudaMalloc(&epoch, 4));
      CU(cudaMemset(epoch, 0, 4));
      CU(cudaMalloc(&s, sizeof *s * ITERATIONS * GRID * 2));
      for (Barrier &b : barriers) b.words[r] = words;
      barriers[r].rank = r;
      barriers[r].numRanks = R;
      barriers[r].epoch = epoch;
      stamps.push_back(s);
      cudaEvent_t e;
      CU(cudaEventCreate(&e));
      begin.push_back(e);
      CU(cudaEventCreate(&e));
      end.push_back(e);
    });
    w.sync();
  }

  void measureCopies() {
    const size_t each3 = 30u << 20;
    for (int kind = 0; kind < 2; kind++) {
      const int n = 10;
      for (int rep = 0; rep < 2; rep++) {
        each([&](int r) {
          cudaStream_t s = w.ranks[r].stream;
          lockstepKernel<<<1, 32, 0, s>>>(barriers[r], 100000);
          CU(cudaEventRecord(begin[r], s));
          for (int i = 0; i < n; i++) {
            if (kind == 0)
              allToAllKernel<<<GRID, 1024, 0, s>>>(barriers[r], each3);
            else
              spreadCopyKernel<<<GRID, 1024, 0, s>>>(barriers[r], each3);
          }
          CU(cudaEventRecord(end[r], s));
        });
        w.sync();
      }
      double slowest = 0;
      each([&](int r) {
        float ms;
        CU(cudaEventElapsedTime(&ms, begin[r], end[r]));
        slowest = std::max(slowest, (double)ms * 1e6 / n);
      });
      const double rate = (double)each3 * (R - 1) / slowest;
      printf("plain all-to-all, %s: %.1f GB/s a port\n",
             kind ? "all peers at once" : "peer after peer", rate);
      copyRate = std::max(copyRate, rate);
    }
  }

  void row(const char *name, int tokens, const Shape &s, bool combine, double portBytes, bool ok,
           const Times &t, int send, int recv) {
    const double floor = portBytes / copyRate * 1e-3 + 3.4;
    printf("%-30s B %3d  check %s  lockstep %6.2f us p99 %6.2f  back to back %6.2f  port %6.2f MB  "
           "ratio %.3f",
           name, tokens, ok ? "ok" : "FAILED", t.median, t.p99, t.backToBack, portBytes * 1e-6,
           t.median / floor);
    if (send) printf("  %d+%d warps", send, recv);
    printf("\n");
    fflush(stdout);
    failed |= !ok;
    if (!json || !ok) return;
    fprintf(json,
            "%s\n    {\"operation\": \"%s\", \"tokens\": %d, \"ranks\": %d, \"experts\": %d, "
            "\"topk\": %d, "
            "\"hidden\": %d, \"check\": \"ok\", \"lockstep_us\": %.3f, \"p99_us\": %.3f, "
            "\"back_to_back_us\": %.3f, "
            "\"busiest_port_bytes\": %.0f, \"ratio\": %.4f}",
            firstRow ? "" : ",", name, tokens, R, s.E, s.K, combine ? s.combineWidth : s.tokenWidth,
            t.median, t.p99, t.backToBack, portBytes, t.median / floor);
    firstRow = false;
  }
};

Shape benchShape(int R, bool rankMajor, ep_ll_quant_t quant, ep_ll_sum_t sum) {
  Shape s = {};
  s.R = R;
  s.E = 256;
  s.K = 8;
  s.L = s.E / R;
  s.N = 128;
  s.steps = SETS;
  s.blocks = GRID;
  s.dtype = s.combineDtype = TREFOIL_BF16;
  s.tokenWidth = s.combineWidth = 7168;
  s.rankMajor = rankMajor;
  s.quant = quant;
  s.scaleBytesOut = quant ? s.tokenWidth / 32 : 0;
  s.sum = sum;
  s.idx64 = true;
  s.finite = true;
  s.config = ep_ll_config_t{R, s.E, s.K, s.N, (size_t)s.combineBytes(), sum == EP_LL_SUM_PARTIAL};
  return s;
}

std::vector<char> finiteBf16(uint64_t seed, size_t bytes) {
  std::vector<char> v(bytes);
  Rng rng = {seed};
  uint32_t *w = (uint32_t *)v.data();
  for (size_t i = 0; i < bytes / 4; i++) w[i] = (rng.next() & 0x83FF83FFu) | 0x3C003C00u;
  return v;
}

// Bytes through the busiest port, mean over the sets.
double busiestPort(const Shape &s, const std::vector<std::vector<StepRank>> &sets, bool combine) {
  double sum = 0;
  for (const auto &set : sets) {
    std::vector<int64_t> tokens, rows(s.R * s.R);
    std::vector<const int32_t *> topk;
    const trefoil_case_t c = caseOf(s, set, tokens, topk, combine);
    OK(trefoilRefTraffic(&c, combine, rows.data()));
    int64_t most = 0;
    for (int r = 0; r < s.R; r++) {
      int64_t out = 0, in = 0;
      for (int q = 0; q < s.R; q++) {
        if (q == r) continue;
        out += rows[r * s.R + q];
        in += rows[q * s.R + r];
      }
      most = std::max({most, out, in});
    }
    sum += (double)most * (combine ? s.combineBytes() : s.tokenBytes() + s.scaleBytesOut);
  }
  return sum / sets.size();
}

struct Data {
  std::vector<std::vector<char>> y, x; // a rank
};

struct Choice {
  bool tune, dispatchOnly, general;
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
      d.general = choice.general;
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
      v = {{14, 14}, {4, 4}, {8, 8}, {6, 6}};
    else if (combine)
      v = {{14, 14}, {13, 15}, {12, 15}, {10, 15}, {8, 15}, {8, 8}, {4, 4}};
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
  int R = 4, only = 0;
  Choice choice = {};
  const char *out = nullptr;
  for (int i = 1; i < argc; i++) {
    if (!strcmp(argv[i], "--ranks") && i + 1 < argc)
      R = atoi(argv[++i]);
    else if (!strcmp(argv[i], "--out") && i + 1 < argc)
      out = argv[++i];
    else if (!strcmp(argv[i], "--tokens") && i + 1 < argc)
      only = atoi(argv[++i]);
    else if (!strcmp(argv[i], "--tune"))
      choice.tune = true;
    else if (!strcmp(argv[i], "--dispatch"))
      choice.dispatchOnly = true;
    else if (!strcmp(argv[i], "--general"))
      choice.general = true;
    else {
      fprintf(stderr, "unknown argument %s\n", argv[i]);
      return 2;
    }
  }
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < R || R < 2 || R > 8) {
    printf("skipped: %d GPUs here, %d needed\n", devices, R);
    return 77;
  }
  Bench b;
  b.open(R);
  b.measureCopies();
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
  if (out) b.json = fopen(out, "w");
  if (b.json) {
    cudaDeviceProp p;
    CU(cudaGetDeviceProperties(&p, 0));
    fprintf(b.json,
            "{\"device\": \"%d x %s\", \"copy_rate_GBps\": %.1f, \"iterations\": %d, \"rows\": [",
            R, p.name, b.copyRate, ITERATIONS);
  }
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
