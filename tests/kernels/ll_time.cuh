// Timing of the low-latency kernels: lockstep and back to back, the rate of plain copies in the
// same run, rows of the report; for the benchmark.
#ifndef TREFOIL_TESTS_KERNELS_LL_TIME_CUH
#define TREFOIL_TESTS_KERNELS_LL_TIME_CUH

#include "ll_check.cuh"

#include <functional>
#include <thread>

namespace {

constexpr int ITERATIONS = 200, SETS = 3;
static int GRID = 132; // blocks of a rank; ranks that share a GPU share its SMs

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

  // backToBack: also as one stream of launches.
  Times time(const Launch &launch, bool backToBack = true) {
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
    double slowest = 0;
    if (backToBack) {
      graphs = capture(ITERATIONS, false, launch);
      replay(graphs);
      replay(graphs);
      each([&](int r) {
        float ms;
        CU(cudaEventElapsedTime(&ms, begin[r], end[r]));
        slowest = std::max(slowest, ms * 1e3 / ITERATIONS);
        CU(cudaGraphExecDestroy(graphs[r]));
      });
    }
    std::sort(worst.begin(), worst.end());
    return Times{worst[ITERATIONS / 2], worst[ITERATIONS * 99 / 100], slowest};
  }

  void open(int numRanks, bool isVirtual, size_t exchange) {
    R = numRanks;
    if (isVirtual) GRID /= R;
    w.open(R, isVirtual, exchange, 6ull << 30);
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

} // namespace

#endif
