// Kernel times of high-throughput Update, dispatch and combine on GPUs that share NVLink.
//
//   ht_bench [--ranks R] [--tokens B] [--hidden H] [--topk K] [--out file.json] [--only flat|em] [--sweep]
//
// All ranks are released together by a barrier kernel. kernel: device clock from the first block's start
// to the last block's end; event: CUDA events round the one launch; both of the slowest rank, median of 25
// launches that go round two data sets. The plain copy is a push of the same bytes, destinations by turns, by
// the same bulk copies, in the same run. What fails its check against the reference is not timed.
#include "ht_check.cuh"

#include "kernels/device/bulk.cuh"

#include <functional>

namespace {

constexpr int ITERATIONS = 25, SETS = 2, GRID = 132;

struct Gate {
  unsigned *words[8];
  int rank, numRanks;
  unsigned *epoch;
};

__global__ void gateKernel(const __grid_constant__ Gate b) {
  const unsigned long long t0 = clockNs();
  const unsigned e = *b.epoch + 1;
  while (clockNs() - t0 < 10000) {
  }
  if (threadIdx.x < b.numRanks) {
    *(volatile unsigned *)(b.words[threadIdx.x] + b.rank) = e;
    while ((int)(*(volatile unsigned *)(b.words[b.rank] + threadIdx.x) - e) < 0) {
      if (clockNs() - t0 > 4000000000ull) break;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) *b.epoch = e;
}

// A push of `rows` rows to each peer, peers by turns, one bulk copy a row, rows off one counter.
struct Copy {
  char *from, *to[8];
  unsigned *work;
  int rank, numRanks, rows, rowBytes;
};

__global__ void copyKernel(const __grid_constant__ Copy c) {
  extern __shared__ __align__(128) char ring[];
  __shared__ uint64_t full[8];
  if (threadIdx.x == 0) {
    for (int i = 0; i < 8; i++) barrierInit(&full[i], 1);
    barrierInitFence();
    const int peers = c.numRanks - 1, total = c.rows * peers;
    int taken[8], n = 0, done = 0;
    bool more = true;
    while (more || done < n) {
      while (more && n - done < 4) {
        const int i = (int)atomicAdd(c.work, 1u);
        if (i >= total) {
          more = false;
          break;
        }
        if (n >= 8) bulkRead<3>();
        taken[n % 8] = i;
        barrierExpect(&full[n % 8], c.rowBytes);
        bulkLoad(sharedAddress(ring) + n % 8 * c.rowBytes,
                 c.from + (size_t)(i / peers) * c.rowBytes, c.rowBytes, &full[n % 8]);
        n++;
      }
      if (done < n) {
        while (!barrierTry(&full[done % 8], done / 8 & 1)) {
        }
        const int i = taken[done % 8], to = (c.rank + 1 + i % peers) % c.numRanks;
        bulkStore(c.to[to] + ((size_t)c.rank * c.rows + i / peers) * c.rowBytes,
                  sharedAddress(ring) + done % 8 * c.rowBytes, c.rowBytes);
        bulkCommit();
        done++;
      }
    }
    bulkDone<0>();
  }
}

struct Times {
  double kernel, low, high, event;
};

struct Bench {
  Ranks w;
  int R;
  std::vector<Gate> gates;
  std::vector<uint64_t *> stamps;
  std::vector<cudaEvent_t> begin, end;
  FILE *json = nullptr;
  bool first = true, failed = false;
  double copyNs = 0; // of a byte

  using Launch = std::function<void(int rank, int i, uint64_t *stamps)>;

  void open(int ranks) {
    R = ranks;
    w.open(R, false);
    gates.resize(R);
    for (int r = 0; r < R; r++) {
      CU(cudaSetDevice(w.ranks[r].device));
      unsigned *words;
      CU(cudaMalloc(&words, 4096));
      CU(cudaMemset(words, 0, 4096));
      for (Gate &g : gates) g.words[r] = words;
      gates[r].rank = r;
      gates[r].numRanks = R;
      gates[r].epoch = words + 64;
      uint64_t *s;
      CU(cudaMalloc(&s, ITERATIONS * GRID * 16));
      stamps.push_back(s);
      for (int i = 0; i < ITERATIONS; i++) {
        cudaEvent_t e;
        CU(cudaEventCreate(&e));
        begin.push_back(e);
        CU(cudaEventCreate(&e));
        end.push_back(e);
      }
    }
  }

  Times time(const Launch &launch, bool stamped) {
    std::vector<double> kernel(ITERATIONS), event(ITERATIONS);
    for (int r = 0; r < R; r++) {
      CU(cudaSetDevice(w.ranks[r].device));
      CU(cudaMemset(stamps[r], 0, ITERATIONS * GRID * 16));
    }
    for (int i = 0; i < ITERATIONS; i++) {
      for (int r = 0; r < R; r++) {
        CU(cudaSetDevice(w.ranks[r].device));
        cudaStream_t q = w.ranks[r].stream;
        gateKernel<<<1, 32, 0, q>>>(gates[r]);
        CU(cudaEventRecord(begin[r * ITERATIONS + i], q));
        launch(r, i, stamps[r] + (size_t)i * GRID * 2);
        CU(cudaEventRecord(end[r * ITERATIONS + i], q));
      }
    }
    w.sync();
    for (int r = 0; r < R; r++) {
      std::vector<uint64_t> h(ITERATIONS * GRID * 2);
      CU(cudaMemcpy(h.data(), stamps[r], h.size() * 8, cudaMemcpyDeviceToHost));
      for (int i = 0; i < ITERATIONS; i++) {
        uint64_t lo = ~0ull, hi = 0;
        for (int b = 0; b < GRID; b++) {
          const uint64_t *s = &h[((size_t)i * GRID + b) * 2];
          if (s[1]) lo = std::min(lo, s[0]);
          hi = std::max(hi, s[1]);
        }
        float ms;
        CU(cudaEventElapsedTime(&ms, begin[r * ITERATIONS + i], end[r * ITERATIONS + i]));
        event[i] = std::max(event[i], ms * 1e3);
        if (stamped) kernel[i] = std::max(kernel[i], (hi - lo) * 1e-3);
      }
    }
    const auto sort = [](std::vector<double> &v) {
      v.erase(v.begin(), v.begin() + 3);
      std::sort(v.begin(), v.end());
    };
    sort(kernel);
    sort(event);
    const size_t n = kernel.size();
    return Times{kernel[n / 2], kernel[0], kernel[n - 1], event[n / 2]};
  }

  void row(const char *name, const Shape &s, int sms, int feeders, double bytes, const Times &t) {
    const double ratio = bytes ? bytes * copyNs * 1e-3 / t.event : 0;
    printf("%-22s [%3d, %2d feed] kernel %8.2f (%8.2f to %8.2f) event %8.2f us  %6.1f MB  %.1f %% "
           "of the copy\n",
           name, sms, feeders, t.kernel, t.low, t.high, t.event, bytes * 1e-6, ratio * 100);
    fflush(stdout);
    if (!json) return;
    fprintf(
        json,
        "%s\n  {\"operation\": \"%s\", \"sms\": %d, \"feeders\": %d, \"ranks\": %d, \"tokens\": "
        "%d, "
        "\"topk\": %d, \"experts\": %d, \"hidden\": %d, \"kernel_us\": %.2f, \"kernel_min_us\": "
        "%.2f, "
        "\"kernel_max_us\": %.2f, \"event_us\": %.2f, \"port_bytes\": %.0f, \"copy_share\": %.4f}",
        first ? "[" : ",", name, sms, feeders, s.R, s.N, s.K, s.E, s.width, t.kernel, t.low, t.high,
        t.event, bytes, ratio);
    first = false;
  }
};

double busiestPort(const Shape &s, const std::vector<StepRank> &step, bool combine) {
  std::vector<int64_t> tokens, rows(s.R * s.R);
  std::vector<const int32_t *> topk;
  const trefoil_case_t c = caseOf(s, step, tokens, topk);
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
  return (double)most * (combine ? s.combineBytes() : s.tokenBytes() + s.scaleBytes);
}

void measureCopy(Bench &b, const Shape &s, double bytes) {
  const int rows = (int)(bytes / s.tokenBytes() / (s.R - 1));
  std::vector<Copy> copies(s.R);
  for (int r = 0; r < s.R; r++) {
    Copy &c = copies[r];
    c.from = b.w.take(r, (size_t)rows * s.tokenBytes(), 1);
    c.work = (unsigned *)b.w.take(r, 64, 0);
    c.rank = r;
    c.numRanks = s.R;
    c.rows = rows;
    c.rowBytes = s.tokenBytes();
    char *to = b.w.take(r, (size_t)rows * s.R * s.tokenBytes(), 0);
    for (Copy &o : copies) o.to[r] = to;
  }
  for (int r = 0; r < s.R; r++) {
    CU(cudaSetDevice(b.w.ranks[r].device));
    CU(cudaFuncSetAttribute(copyKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                            8 * s.tokenBytes()));
  }
  for (int sms : {10, 16, 24, 132}) {
    const Times t = b.time(
        [&](int r, int, uint64_t *) {
          cudaStream_t q = b.w.ranks[r].stream;
          CU(cudaMemsetAsync(copies[r].work, 0, 4, q));
          copyKernel<<<sms, 32, 8 * s.tokenBytes(), q>>>(copies[r]);
        },
        false);
    const double sent = (double)rows * (s.R - 1) * s.tokenBytes();
    printf("plain push by turns [%3d]  event %.2f us  %.1f GB/s a port\n", sms, t.event,
           sent / t.event * 1e-3);
    b.copyNs = b.copyNs ? std::min(b.copyNs, t.event * 1e3 / sent) : t.event * 1e3 / sent;
  }
  b.w.free();
}

Shape benchShape(int R, int tokens, int hidden, int topk, bool expertMajor, int64_t alignment) {
  Shape s = {};
  s.R = R;
  s.E = 256;
  s.K = topk;
  s.L = s.E / R;
  s.N = tokens;
  s.steps = SETS;
  s.passes = 1;
  s.dtype = s.combineDtype = TREFOIL_BF16;
  s.width = s.combineWidth = hidden;
  s.expertMajor = expertMajor;
  s.alignment = alignment;
  s.idx64 = s.finite = true;
  s.config = ep_ht_config_t{R, s.E, s.K, s.N, (size_t)s.tokenBytes(), 0};
  return s;
}

void benchLayout(Bench &b, Shape s, bool sweep) {
  ep_ht_layout_t at;
  OK(epHtLayout(&s.config, &at));
  std::vector<std::vector<StepRank>> sets(SETS, std::vector<StepRank>(s.R));
  for (int r = 0; r < s.R; r++) {
    HtRank &k = b.w.ranks[r];
    k.exchange = b.w.take(r, at.bytes, 0);
    k.control = b.w.take(r, EP_HT_CONTROL_BYTES, 0);
    k.scratch = b.w.take(r, epHtScratchBytes(&s.config), 0);
  }
  s.numSms = 132;
  for (int i = 0; i < SETS; i++) {
    for (int r = 0; r < s.R; r++) {
      Rng rng = {(uint64_t)(i * 100 + r + 1)};
      sets[i][r].B = s.N;
      sets[i][r].topk = randomRouting(rng, s.N, s.K, s.E, 0);
    }
    std::vector<int64_t> tokens;
    std::vector<const int32_t *> topk;
    const trefoil_case_t c = caseOf(s, sets[i], tokens, topk);
    std::vector<std::thread> threads;
    for (int r = 0; r < s.R; r++) {
      threads.emplace_back([&, r] {
        Rng rng = {(uint64_t)(i * 1000 + r + 7)};
        const ep_ht_handle_t h = {b.w.take(r, epHtHandleBytes(&s.config, s.K), POISON),
                                  s.K,
                                  s.expertMajor,
                                  0,
                                  0,
                                  s.alignment,
                                  0};
        makeRank(b.w, rng, s, c, sets[i][r], r, groupOf(b.w, s, at, r), h);
      });
    }
    for (auto &t : threads) t.join();
  }
  b.w.sync();
  const auto launchAll = [&](int sms, int feed, int feedCombine) {
    for (int i = 0; i < SETS; i++) {
      for (int r = 0; r < s.R; r++) {
        CU(cudaSetDevice(b.w.ranks[r].device));
        cudaStream_t q = b.w.ranks[r].stream;
        StepRank &k = sets[i][r];
        OK(epHtUpdate(&k.update, q));
        k.pass[0].dispatch.numSms = k.pass[0].combine.numSms = sms;
        k.pass[0].dispatch.numFeeders = feed;
        k.pass[0].combine.numFeeders = feedCombine;
        OK(epHtDispatch(&k.pass[0].dispatch, q));
        OK(epHtCombine(&k.pass[0].combine, q));
      }
    }
    b.w.sync();
  };
  launchAll(24, 0, 0);
  std::vector<char> good(s.R, 0);
  std::vector<std::thread> threads;
  for (int r = 0; r < s.R; r++) {
    threads.emplace_back([&, r] {
      CU(cudaSetDevice(b.w.ranks[r].device));
      good[r] = checkRank(s, sets[0], 0, r) && checkRank(s, sets[1], 1, r);
    });
  }
  for (auto &t : threads) t.join();
  for (char ok : good) b.failed |= !ok;
  const std::string layout = s.expertMajor ? "expert-major" : "flat";
  if (b.failed) {
    printf("%s: CHECK FAILED\n", layout.c_str());
    b.w.free();
    return;
  }
  const Times u = b.time(
      [&](int r, int i, uint64_t *stamps) {
        ep_ht_update_t o = sets[i % SETS][r].update;
        o.group.stamps = stamps;
        OK(epHtUpdate(&o, b.w.ranks[r].stream));
      },
      true);
  b.row(("update " + layout).c_str(), s, 132, 0, 0, u);
  // The two data sets alternate handles: each was updated with its own routing above.
  const double port[2] = {busiestPort(s, sets[0], false), busiestPort(s, sets[0], true)};
  std::vector<std::pair<int, int>> sizes[2];
  if (s.expertMajor) {
    sizes[0] = {{24, 10}, {20, 8}, {28, 10}, {32, 12}};
    sizes[1] = {{28, 20}, {24, 18}, {32, 22}};
  } else {
    sizes[0] = {{24, 10}, {20, 10}, {22, 10}, {16, 8}};
    sizes[1] = {{20, 10}, {16, 8}, {18, 10}, {24, 12}};
  }
  if (sweep) {
    for (int sms : {8, 12, 40, 64, 132}) {
      sizes[0].push_back({sms, sms < 24 ? sms / 2 : 12});
      sizes[1].push_back({sms, s.expertMajor ? sms * 5 / 7 : sms < 24 ? sms / 2 : 12});
    }
  }
  for (int combine = 0; combine < 2; combine++) {
    for (auto [sms, feed] : sizes[combine]) {
      const Times t = b.time(
          [&, sms = sms, feed = feed](int r, int i, uint64_t *stamps) {
            Pass &p = sets[i % SETS][r].pass[0];
            if (combine) {
              ep_ht_combine_t o = p.combine;
              o.group.stamps = stamps;
              o.numSms = sms;
              o.numFeeders = feed;
              OK(epHtCombine(&o, b.w.ranks[r].stream));
            } else {
              ep_ht_dispatch_t o = p.dispatch;
              o.group.stamps = stamps;
              o.numSms = sms;
              o.numFeeders = feed;
              OK(epHtDispatch(&o, b.w.ranks[r].stream));
            }
          },
          true);
      b.row(((combine ? "combine " : "dispatch ") + layout).c_str(), s, sms, feed, port[combine],
            t);
    }
  }
  b.w.free();
}

} // namespace

int main(int argc, char **argv) {
  int R = 4, tokens = 4096, hidden = 7168, topk = 8;
  int64_t alignment = 1;
  std::string only, out;
  bool sweep = false;
  for (int i = 1; i < argc; i++) {
    const std::string o = argv[i];
    auto next = [&] { return i + 1 < argc ? argv[++i] : "0"; };
    if (o == "--ranks") R = atoi(next());
    if (o == "--tokens") tokens = atoi(next());
    if (o == "--hidden") hidden = atoi(next());
    if (o == "--topk") topk = atoi(next());
    if (o == "--align") alignment = atoi(next());
    if (o == "--out") out = next();
    if (o == "--only") only = next();
    if (o == "--sweep") sweep = true;
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < R) {
    printf("skipped: needs %d GPUs, found %d\n", R, devices);
    return 77;
  }
  Bench b;
  b.open(R);
  if (!out.empty()) b.json = fopen(out.c_str(), "w");
  measureCopy(b, benchShape(R, tokens, hidden, topk, false, 1),
              (double)tokens * std::min(R - 1, topk) * 0.9 * hidden * 2);
  if (only != "em") benchLayout(b, benchShape(R, tokens, hidden, topk, false, 1), sweep);
  if (only != "flat") benchLayout(b, benchShape(R, tokens, hidden, topk, true, alignment), sweep);
  if (b.json) {
    fprintf(b.json, "\n]\n");
    fclose(b.json);
  }
  return b.failed ? 1 : 0;
}
