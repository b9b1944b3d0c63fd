// Times of launches on all ranks of a group, and of a plain copy to compare them with.
//
// A measurement is so many of (gate, event, launch, event) on each rank's stream, queued without waiting.
// The gate lets all ranks go within about a microsecond, after a pause in which the host queues what
// follows. kernel: device clock, from the first block's start to the last block's end; event: the pair of
// events; both of the slowest rank. The first WARM launches do not count.
#ifndef TREFOIL_TESTS_KERNELS_HT_TIME_CUH
#define TREFOIL_TESTS_KERNELS_HT_TIME_CUH

#include "ht_check.cuh"

#include "kernels/common/bulk.cuh"

#include <functional>

namespace {

constexpr int WARM = 3;
static int GRID = 132; // blocks of a rank; ranks that share a GPU share its SMs

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

struct Spread { // microseconds
  double p50, p99, min, max;
};

Spread spreadOf(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  const size_t n = v.size();
  return Spread{v[n / 2], v[n * 99 / 100], v[0], v[n - 1]};
}

struct Times {
  Spread kernel, event;
};

struct Clock {
  using Launch = std::function<void(int rank, int i, uint64_t *stamps)>;

  Ranks *w;
  int R, iterations;
  std::vector<Gate> gates;
  std::vector<uint64_t *> stamps;
  std::vector<cudaEvent_t> begin, end;

  void open(Ranks &ranks, int counted) {
    w = &ranks;
    R = (int)ranks.ranks.size();
    iterations = counted + WARM;
    gates.resize(R);
    for (int r = 0; r < R; r++) {
      CU(cudaSetDevice(w->ranks[r].device));
      unsigned *words;
      CU(cudaMalloc(&words, 4096));
      CU(cudaMemset(words, 0, 4096));
      for (Gate &g : gates) g.words[r] = words;
      gates[r].rank = r;
      gates[r].numRanks = R;
      gates[r].epoch = words + 64;
      uint64_t *s;
      CU(cudaMalloc(&s, (size_t)iterations * GRID * 16));
      stamps.push_back(s);
      for (int i = 0; i < 2 * iterations; i++) {
        cudaEvent_t e;
        CU(cudaEventCreate(&e));
        (i % 2 ? begin : end).push_back(e);
      }
    }
  }

  void close() {
    for (cudaEvent_t e : begin) CU(cudaEventDestroy(e));
    for (cudaEvent_t e : end) CU(cudaEventDestroy(e));
    for (uint64_t *s : stamps) CU(cudaFree(s));
    for (int r = 0; r < R; r++) CU(cudaFree(gates[0].words[r]));
  }

  Times time(const Launch &launch) {
    for (int r = 0; r < R; r++) {
      CU(cudaSetDevice(w->ranks[r].device));
      CU(cudaMemset(stamps[r], 0, (size_t)iterations * GRID * 16));
    }
    w->sync();
    for (int i = 0; i < iterations; i++) {
      for (int r = 0; r < R; r++) {
        CU(cudaSetDevice(w->ranks[r].device));
        cudaStream_t q = w->ranks[r].stream;
        CU(epStart(gateKernel, 1, 32, q, gates[r]));
        CU(cudaEventRecord(begin[r * iterations + i], q));
        launch(r, i, stamps[r] + (size_t)i * GRID * 2);
        CU(cudaEventRecord(end[r * iterations + i], q));
      }
    }
    w->sync();
    return collect();
  }

  Times collect() {
    std::vector<double> kernel(iterations - WARM), event(iterations - WARM);
    std::vector<uint64_t> h((size_t)iterations * GRID * 2);
    for (int r = 0; r < R; r++) {
      CU(cudaMemcpy(h.data(), stamps[r], h.size() * 8, cudaMemcpyDeviceToHost));
      for (int i = WARM; i < iterations; i++) {
        uint64_t lo = ~0ull, hi = 0;
        for (int b = 0; b < GRID; b++) {
          const uint64_t *s = &h[((size_t)i * GRID + b) * 2];
          if (s[1]) lo = std::min(lo, s[0]);
          hi = std::max(hi, s[1]);
        }
        if (!hi) lo = 0; // a launch that stamped nothing
        float ms;
        CU(cudaEventElapsedTime(&ms, begin[r * iterations + i], end[r * iterations + i]));
        event[i - WARM] = std::max(event[i - WARM], ms * 1e3);
        kernel[i - WARM] = std::max(kernel[i - WARM], (hi - lo) * 1e-3);
      }
    }
    return Times{spreadOf(kernel), spreadOf(event)};
  }
};

// A push of `rows` rows to each peer, peers by turns, one bulk copy a row, rows off one counter.
struct Copy {
  char *from, *to[8];
  unsigned *work;
  uint64_t *stamps;
  int rank, numRanks, rows, rowBytes;
};

__global__ void copyKernel(const __grid_constant__ Copy c) {
  EP_DYNAMIC_SHARED(128, ring);
  EP_SHARED_ARRAY(uint64_t, full, 8);
  if (threadIdx.x == 0) {
    const uint64_t began = clockNs();
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
    c.stamps[blockIdx.x * 2] = began;
    c.stamps[blockIdx.x * 2 + 1] = clockNs();
  }
}

struct CopyTimes {
  int sms;
  double bytes; // through a port, each way
  Times times;
  double nsOfByte() const { return times.kernel.p50 * 1e3 / bytes; }
};

// The rate that a port gives: about `bytes` from each rank, by different numbers of blocks.
std::vector<CopyTimes> measureCopies(Clock &clock, int rowBytes, double bytes) {
  Ranks &w = *clock.w;
  const int R = clock.R, rows = (int)(bytes / rowBytes / (R - 1));
  std::vector<Copy> copies(R);
  for (int r = 0; r < R; r++) {
    Copy &c = copies[r];
    c.from = w.take(r, (size_t)rows * rowBytes, 1);
    c.work = (unsigned *)w.take(r, 64, 0);
    c.rank = r;
    c.numRanks = R;
    c.rows = rows;
    c.rowBytes = rowBytes;
    char *to = w.take(r, (size_t)rows * R * rowBytes, 0);
    for (Copy &o : copies) o.to[r] = to;
  }
  for (int r = 0; r < R; r++) {
    CU(cudaSetDevice(w.ranks[r].device));
    CU(cudaFuncSetAttribute(EP_KERNEL(copyKernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                            8 * rowBytes));
  }
  std::vector<CopyTimes> all;
  for (int sms : {10, 16, 24, GRID}) {
    const Times t = clock.time([&](int r, int, uint64_t *stamps) {
      cudaStream_t q = w.ranks[r].stream;
      Copy c = copies[r];
      c.stamps = stamps;
      CU(cudaMemsetAsync(c.work, 0, 4, q));
      void *params[] = {&c};
      CU(cudaLaunchKernel(EP_KERNEL(copyKernel), dim3(sms), dim3(32), params, 8 * rowBytes, q));
    });
    all.push_back(CopyTimes{sms, (double)rows * (R - 1) * rowBytes, t});
  }
  w.free();
  return all;
}

} // namespace

#endif
