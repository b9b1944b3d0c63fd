// A group of ranks in one process for the tests of the low-latency kernels: a GPU each, or all of them
// virtual on one GPU (few blocks each, one stream each). Raw peer pointers take the place of windows.
#ifndef TREFOIL_TESTS_KERNELS_LL_WORLD_CUH
#define TREFOIL_TESTS_KERNELS_LL_WORLD_CUH

#include "kernels/common/ptx.cuh"
#include "kernels/common/start.cuh"
#include "kernels/ll/ll.h"

#include <cuda_runtime.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define CU(x)                                                                                      \
  do {                                                                                             \
    const cudaError_t e_ = (x);                                                                    \
    if (e_ != cudaSuccess) {                                                                       \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_));          \
      exit(3);                                                                                     \
    }                                                                                              \
  } while (0)
#define OK(x)                                                                                      \
  do {                                                                                             \
    if ((x) != TREFOIL_OK) {                                                                       \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, trefoilLastError());              \
      exit(3);                                                                                     \
    }                                                                                              \
  } while (0)

static __global__ void delayKernel(unsigned long long ns) {
  const uint64_t t0 = clockNs();
  while (clockNs() - t0 < ns) {
  }
}

struct Rng {
  uint64_t s;
  uint32_t next() {
    s += 0x9E3779B97F4A7C15ull;
    uint64_t z = s;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return (uint32_t)(z >> 32);
  }
  int below(int n) { return (int)(next() % (uint32_t)n); }
  bool one(int n) { return below(n) == 0; }
};

struct WorldRank {
  int device;
  cudaStream_t stream;
  char *exchange, *control, *pool;
  size_t used;
  int *mask;
  ep_wait_record_t *record, *recordOnDevice;
};

// A GPU runs this many queues at a time; a launch behind another rank's in the same queue would wait for it.
constexpr int RANKS_A_GPU = 32;

struct World {
  std::vector<WorldRank> ranks;
  size_t exchangeBytes, poolBytes;
  ep_ll_layout_t at;
  int size() const { return (int)ranks.size(); }

  static int gpusFor(int numRanks, bool isVirtual) {
    return isVirtual ? (numRanks + RANKS_A_GPU - 1) / RANKS_A_GPU : numRanks;
  }

  // Virtual ranks share as few GPUs as they can.
  void open(int numRanks, bool isVirtual, size_t exchange, size_t pool) {
    const int gpus = gpusFor(numRanks, isVirtual);
    for (int d = 0; d < gpus; d++) {
      CU(cudaSetDevice(d));
      for (int p = 0; p < gpus; p++) {
        if (p != d) CU(cudaDeviceEnablePeerAccess(p, 0));
      }
    }
    ranks.resize(numRanks);
    exchangeBytes = exchange;
    poolBytes = pool;
    for (int r = 0; r < numRanks; r++) {
      WorldRank &k = ranks[r];
      k.device = (int)((long long)r * gpus / numRanks);
      CU(cudaSetDevice(k.device));
      OK(epLlLoad());
      CU(cudaStreamCreateWithFlags(&k.stream, cudaStreamNonBlocking));
      CU(cudaMalloc(&k.exchange, exchange + pool)); // at one distance on every rank, as in windows
      k.pool = k.exchange + exchange;
      CU(cudaMalloc(&k.control, EP_LL_CONTROL_BYTES));
      CU(cudaMalloc(&k.mask, EP_LL_MAX_RANKS * sizeof(int)));
      CU(cudaHostAlloc(&k.record, sizeof *k.record, cudaHostAllocMapped | cudaHostAllocPortable));
      CU(cudaHostGetDevicePointer(&k.recordOnDevice, k.record, 0));
    }
  }

  // A fresh group: everything zero, all ranks active, operations numbered from first + 1.
  void reset(const ep_ll_config_t &config, uint64_t first) {
    OK(epLlLayout(&config, &at));
    if (at.bytes > exchangeBytes) {
      fprintf(stderr, "the case needs %zu bytes of exchange memory\n", at.bytes);
      exit(3);
    }
    char control[EP_LL_CONTROL_BYTES];
    epLlControlInit(control, first);
    std::vector<int> ones(EP_LL_MAX_RANKS, 1);
    for (WorldRank &k : ranks) {
      CU(cudaSetDevice(k.device));
      CU(cudaMemset(k.exchange, 0, at.bytes));
      CU(cudaMemcpy(k.control, control, sizeof control, cudaMemcpyHostToDevice));
      CU(cudaMemcpy(k.mask, ones.data(), ones.size() * 4, cudaMemcpyHostToDevice));
      memset(k.record, 0, sizeof *k.record);
      k.used = 0;
    }
    sync();
  }

  void sync() {
    for (WorldRank &k : ranks) {
      CU(cudaSetDevice(k.device));
      CU(cudaDeviceSynchronize());
    }
  }

  template <typename T> T *take(int r, size_t n) {
    WorldRank &k = ranks[r];
    T *p = (T *)(k.pool + k.used);
    k.used += (n * sizeof(T) + 255) / 256 * 256;
    if (k.used > poolBytes) {
      fprintf(stderr, "the pool of %zu bytes is too small\n", poolBytes);
      exit(3);
    }
    return p;
  }
  // Memory filled with host bytes, or with one byte.
  template <typename T> T *upload(int r, const std::vector<T> &v) {
    T *p = take<T>(r, v.size());
    CU(cudaMemcpyAsync(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice, ranks[r].stream));
    return p;
  }
  template <typename T> T *filled(int r, size_t n, int byte) {
    T *p = take<T>(r, n);
    CU(cudaMemsetAsync(p, byte, n * sizeof(T), ranks[r].stream));
    return p;
  }
  template <typename T> std::vector<T> download(int r, const T *p, size_t n) {
    std::vector<T> v(n);
    if (n) CU(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
  }

  ep_ll_group_t group(int r, const ep_ll_config_t &c, int blocks, uint64_t timeoutNs) const {
    ep_ll_group_t g = {};
    for (int p = 0; p < size(); p++) g.peers[p] = ranks[p].exchange;
    g.at = at;
    g.control = ranks[r].control;
    g.mask = ranks[r].mask;
    g.record = ranks[r].recordOnDevice;
    g.timeoutNs = timeoutNs;
    g.rank = r;
    g.numRanks = c.numRanks;
    g.numExperts = c.numExperts;
    g.numLocal = (c.numExperts + c.numRanks - 1) / c.numRanks;
    g.maxTokens = (int)c.maxTokens;
    g.numSms = blocks;
    return g;
  }
};

// Distinct experts or -1, seeded; one in `holes` entries unused (0: none).
static inline std::vector<int32_t> randomRouting(Rng &rng, int tokens, int topk, int experts,
                                                 int holes) {
  std::vector<int32_t> v((size_t)tokens * topk, -1);
  for (int t = 0; t < tokens; t++) {
    int32_t *row = &v[(size_t)t * topk];
    if (holes && rng.one(12)) continue;
    for (int k = 0; k < topk && k < experts; k++) {
      if (holes && rng.one(holes)) continue;
      bool again = true;
      while (again) {
        row[k] = rng.below(experts);
        again = false;
        for (int j = 0; j < k; j++) again = again || row[j] == row[k];
      }
    }
  }
  return v;
}

#endif
