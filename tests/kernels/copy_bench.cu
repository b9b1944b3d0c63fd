// What an SM can copy inside its GPU, in the ways that high throughput's receivers might: one row to n.
//
//   copy_bench [--rows N] [--iterations n] [--out file.json]
//
// N rows (32768) of 14,336 bytes are stored by 16 and by 24 SMs, n = 1, 2 or 4 of them after a load of
// another row; a token's n rows lie in n of 128 zones that are filled in its order, as experts' rows are.
// 15 warps an SM, with one row each, take tokens off a counter.
//
//   stores       nothing is loaded
//   async        asynchronous copies of 16 bytes, six steps of 2 KiB under way, ordinary stores (ht_rows.cuh)
//   bulk load    a bulk load of the row by each warp, ordinary stores
//   bulk         the same load, bulk stores
//
// us: median of the launches, between events. gb_per_s: what an SM stores. A launch of each is compared with
// what was to be copied, but for `stores`; what differs has no time. Exit code 1: something differed, or CUDA
// failed; 2: usage; 77: no GPU.
#include "kernels/common/bulk.cuh"

#include <algorithm>
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

namespace {

constexpr int ROW = 14336, WARPS = 15, ZONES = 128, DEPTH = 6, STEP = 2048;
constexpr int SHARED = WARPS * (ROW + 16);
static_assert(ROW % STEP == 0 && DEPTH * STEP <= ROW, "a warp's ring");

struct Args {
  const char *from;
  char *to;
  const int *rows; // [tokens, n]
  unsigned *work;
  int tokens, n;

  EP_DEV int take(int lane) const {
    int t = 0;
    if (lane == 0) t = (int)atomicAdd(work, 1u);
    return __shfl_sync(FULL_WARP, t, 0);
  }
  EP_DEV char *row(int t, int i) const { return to + (size_t)rows[t * n + i] * ROW; }
};

// All lanes: 2 KiB to all rows of a token.
EP_DEV void storeStep(const Args &a, int t, int at, const uint4 (&v)[4], int lane) {
  for (int i = 0; i < a.n; i++) {
    char *to = a.row(t, i) + at + lane * 16;
#pragma unroll
    for (int j = 0; j < 4; j++) storeStream(to + j * 512, v[j]);
  }
}

EP_DEV void readStep(const char *from, uint4 (&v)[4], int lane) {
#pragma unroll
  for (int j = 0; j < 4; j++) v[j] = *(const uint4 *)(from + j * 512 + lane * 16);
}

__global__ void __launch_bounds__(WARPS * 32, 1) stores(const Args a) {
  const int lane = threadIdx.x & 31;
  for (int t; (t = a.take(lane)) < a.tokens;) {
    const uint4 w = make_uint4(t, lane, t, lane), v[4] = {w, w, w, w};
    for (int at = 0; at < ROW; at += STEP) storeStep(a, t, at, v, lane);
  }
}

__global__ void __launch_bounds__(WARPS * 32, 1) async(const Args a) {
  EP_DYNAMIC_SHARED(128, shared);
  const int lane = threadIdx.x & 31;
  char *ring = shared + (threadIdx.x >> 5) * ROW;
  for (int t; (t = a.take(lane)) < a.tokens;) {
    const char *from = a.from + (size_t)t * ROW + lane * 16;
    const auto copy = [&](int at, int slot) {
      for (int j = 0; at < ROW && j < 4; j++)
        copyAsync(sharedAddress(ring) + slot * STEP + j * 512 + lane * 16, from + at + j * 512);
      copyCommit();
    };
    for (int i = 0; i < DEPTH; i++) copy(i * STEP, i);
    for (int at = 0, slot = 0; at < ROW; at += STEP, slot = slot + 1 == DEPTH ? 0 : slot + 1) {
      copyWait<DEPTH - 1>();
      uint4 v[4];
      readStep(ring + slot * STEP, v, lane);
      storeStep(a, t, at, v, lane);
      copy(at + DEPTH * STEP, slot);
    }
  }
}

template <bool BULK_STORES> __global__ void __launch_bounds__(WARPS * 32, 1) bulk(const Args a) {
  EP_DYNAMIC_SHARED(128, shared);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  char *stage = shared + warp * ROW;
  uint64_t *full = (uint64_t *)(shared + WARPS * ROW) + warp;
  uint32_t parity = 0;
  if (lane == 0) barrierInit(full, 1);
  barrierInitFence();
  __syncwarp();
  for (int t; (t = a.take(lane)) < a.tokens; parity ^= 1) {
    if (lane == 0) {
      proxyFence();
      barrierExpect(full, ROW);
      bulkLoad(sharedAddress(stage), a.from + (size_t)t * ROW, ROW, full);
    }
    for (unsigned polls = 0; !barrierTry(full, parity);) {
      if (++polls >> 26) __trap();
    }
    if (BULK_STORES) {
      if (lane < a.n) bulkStore(a.row(t, lane), sharedAddress(stage), ROW);
      bulkCommit();
      bulkRead<0>();
    } else {
      for (int at = 0; at < ROW; at += STEP) {
        uint4 v[4];
        readStep(stage + at, v, lane);
        storeStep(a, t, at, v, lane);
      }
    }
    __syncwarp();
  }
  if (BULK_STORES) bulkDone<0>();
}

__global__ void fill(unsigned *words, size_t n) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
       i += (size_t)gridDim.x * blockDim.x)
    words[i] = (unsigned)i * 2654435761u;
}

__global__ void compare(const Args a, int *bad) {
  for (int q = blockIdx.x; q < a.tokens * a.n; q += gridDim.x) {
    const unsigned *want = (const unsigned *)(a.from + (size_t)(q / a.n) * ROW);
    const unsigned *got = (const unsigned *)a.row(q / a.n, q % a.n);
    for (int i = threadIdx.x; i < ROW / 4; i += blockDim.x)
      if (got[i] != want[i]) *bad = 1;
  }
}

void must(cudaError_t e) {
  if (e == cudaSuccess) return;
  fprintf(stderr, "copy_bench: %s\n", cudaGetErrorString(e));
  exit(1);
}

// Rows of each token: zones by a fixed draw, each filled in the order of tokens.
std::vector<int> drawRows(int tokens, int n) {
  std::vector<int> zoneOf, next(ZONES + 1, 0), rows;
  unsigned state = 1;
  for (int t = 0; t < tokens; t++) {
    std::vector<int> zones(ZONES);
    for (int i = 0; i < ZONES; i++) zones[i] = i;
    for (int i = 0; i < n; i++) {
      state = state * 1664525u + 1013904223u;
      std::swap(zones[i], zones[i + (state >> 8) % (ZONES - i)]);
      zoneOf.push_back(zones[i]);
      next[zones[i] + 1]++;
    }
  }
  for (int i = 0; i < ZONES; i++) next[i + 1] += next[i];
  for (const int z : zoneOf) rows.push_back(next[z]++);
  return rows;
}

struct Bench {
  Args a = {};
  int rows = 32768, iterations = 21;
  int *bad = nullptr;
  FILE *out = nullptr;
  bool failed = false, first = true;
  cudaEvent_t begin, end;

  double launch(void (*kernel)(const Args), int sms) {
    must(cudaMemsetAsync(a.work, 0, 4));
    must(cudaEventRecord(begin));
    kernel<<<sms, WARPS * 32, SHARED>>>(a);
    must(cudaGetLastError());
    must(cudaEventRecord(end));
    must(cudaEventSynchronize(end));
    float ms = 0;
    must(cudaEventElapsedTime(&ms, begin, end));
    return 1e3 * ms;
  }

  void time(const char *way, void (*kernel)(const Args), bool copies, int sms) {
    must(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              SHARED));
    must(cudaMemset(a.to, 0xee, (size_t)rows * ROW));
    must(cudaMemset(bad, 0, 4));
    launch(kernel, sms);
    int differs = 0;
    if (copies) compare<<<1024, 256>>>(a, bad);
    must(cudaMemcpy(&differs, bad, 4, cudaMemcpyDeviceToHost));
    if (differs) {
      printf("%-10s 1 -> %d [%d]: CHECK FAILED\n", way, a.n, sms);
      failed = true;
      return;
    }
    std::vector<double> us;
    for (int i = 0; i < iterations; i++) us.push_back(launch(kernel, sms));
    std::sort(us.begin(), us.end());
    const double p50 = us[us.size() / 2], rate = (double)rows * ROW / p50 / 1e3 / sms;
    printf("%-10s 1 -> %d [%2d] %8.1f us (%.1f to %.1f), an SM stores %.1f GB/s\n", way, a.n, sms,
           p50, us[0], us.back(), rate);
    if (!out) return;
    fprintf(out,
            "%s\n    {\"way\": \"%s\", \"copies\": %d, \"sms\": %d, \"us\": %.1f, \"min_us\": "
            "%.1f, \"max_us\": %.1f, \"sm_gb_per_s\": %.1f}",
            first ? "" : ",", way, a.n, sms, p50, us[0], us.back(), rate);
    first = false;
  }

  void open() {
    char *from = nullptr;
    must(cudaMalloc(&from, (size_t)rows * ROW));
    must(cudaMalloc(&a.to, (size_t)rows * ROW));
    must(cudaMalloc(&a.work, 4));
    must(cudaMalloc(&bad, 4));
    fill<<<1024, 256>>>((unsigned *)from, (size_t)rows * ROW / 4);
    a.from = from;
    must(cudaEventCreate(&begin));
    must(cudaEventCreate(&end));
  }

  void run() {
    for (const int n : {1, 2, 4}) {
      a.n = n;
      a.tokens = rows / n;
      const std::vector<int> drawn = drawRows(a.tokens, n);
      int *table = nullptr;
      must(cudaMalloc(&table, drawn.size() * 4));
      must(cudaMemcpy(table, drawn.data(), drawn.size() * 4, cudaMemcpyHostToDevice));
      a.rows = table;
      for (const int sms : {16, 24}) {
        time("stores", stores, false, sms);
        time("async", async, true, sms);
        time("bulk load", bulk<false>, true, sms);
        time("bulk", bulk<true>, true, sms);
      }
      must(cudaFree(table));
    }
  }
};

} // namespace

int main(int argc, char **argv) {
  Bench b;
  const char *out = nullptr;
  bool isRight = true;
  for (int i = 1; i < argc; i += 2) {
    const char *value = i + 1 < argc ? argv[i + 1] : "";
    if (!strcmp(argv[i], "--rows"))
      b.rows = atoi(value) / 4 * 4;
    else if (!strcmp(argv[i], "--iterations"))
      b.iterations = atoi(value);
    else if (!strcmp(argv[i], "--out") && *value)
      out = value;
    else
      isRight = false;
  }
  if (!isRight || b.rows < 4 || b.iterations < 1) {
    fprintf(stderr, "usage: see the head of copy_bench.cu\n");
    return 2;
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < 1) {
    printf("skipped: needs a GPU\n");
    return 77;
  }
  if (out && !(b.out = fopen(out, "w"))) {
    perror(out);
    return 1;
  }
  cudaDeviceProp p;
  must(cudaGetDeviceProperties(&p, 0));
  if (b.out)
    fprintf(b.out,
            "{\"device\": \"%s\", \"row_bytes\": %d, \"num_rows\": %d, \"iterations\": %d, "
            "\"rows\": [",
            p.name, ROW, b.rows, b.iterations);
  b.open();
  b.run();
  if (b.out) {
    fprintf(b.out, "\n]}\n");
    fclose(b.out);
  }
  return b.failed;
}
