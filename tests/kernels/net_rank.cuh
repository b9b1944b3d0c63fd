// A rank of the tests of kernels/net: what it was asked, its memory, its launch, what it found.
#ifndef TREFOIL_TESTS_KERNELS_NET_RANK_CUH
#define TREFOIL_TESTS_KERNELS_NET_RANK_CUH

#include "kernels/common/start.cuh"
#include "tests/kernels/net_work.cuh"

#include <cstdio>
#include <cstdlib>
#include <string>

#define CU(x)                                                                                      \
  do {                                                                                             \
    const cudaError_t e_ = (x);                                                                    \
    if (e_ != cudaSuccess) {                                                                       \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_));          \
      exit(3);                                                                                     \
    }                                                                                              \
  } while (0)

struct Options {
  int ranks = 4, rounds = 40, bytes = 4096, burst = 100, late = -1;
  bool gin = false, refused = false, times = false, processes = false;
};

struct Results {
  int wrong, refused, gaveUp, gaveUpOn;
};

struct Rank {
  cudaStream_t stream;
  NetWork work;
  Results *results;
};

template <class T> static T *zeros(size_t count) {
  T *p;
  CU(cudaMalloc((void **)&p, count * sizeof(T)));
  CU(cudaMemset(p, 0, count * sizeof(T)));
  return p;
}

static NetWork workOf(const Options &o, int rank) {
  NetWork w = {};
  w.port.rank = rank;
  w.port.numRanks = o.ranks;
  w.rounds = o.rounds;
  w.rowBytes = o.bytes;
  w.burst = o.burst;
  w.limitNs = o.late < 0 ? 60000000000ull : 200000000ull;
  return w;
}

static void prepare(Rank &r) {
  CU(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
  r.work.port.posted = zeros<uint64_t>((size_t)r.work.port.numRanks);
  CU(cudaHostAlloc((void **)&r.results, sizeof *r.results, cudaHostAllocMapped));
  *r.results = Results{0, 0, 0, -1};
  Results *on;
  CU(cudaHostGetDevicePointer((void **)&on, r.results, 0));
  r.work.wrong = &on->wrong;
  r.work.refused = &on->refused;
  r.work.gaveUp = &on->gaveUp;
  r.work.gaveUpOn = &on->gaveUpOn;
}

template <class Wire> static void launch(Rank &r) {
  CU(epStart(netWorkKernel<Wire>, 1, (unsigned)r.work.port.numRanks * 32, r.stream, r.work));
}

// Without a late rank: no wrong word, and no wait that ended. With one: the others
// gave up on it and on nobody else.
static bool isRight(const Options &o, int rank, const Results &r) {
  if (r.wrong) return false;
  if (o.late < 0) return r.gaveUp == 0;
  return rank == o.late ? r.gaveUp == 0 : r.gaveUp == 1 && r.gaveUpOn == o.late;
}

inline Options parse(int argc, char **argv) {
  Options o;
  for (int i = 1; i < argc; i++) {
    const std::string a = argv[i];
    const int n = i + 1 < argc ? atoi(argv[i + 1]) : -1;
    bool *const flag = a == "--gin"         ? &o.gin
                       : a == "--times"     ? &o.times
                       : a == "--refused"   ? &o.refused
                       : a == "--processes" ? &o.processes
                                            : nullptr;
    if (flag) {
      *flag = true;
      continue;
    }
    int *to = a == "--ranks"    ? &o.ranks
              : a == "--rounds" ? &o.rounds
              : a == "--bytes"  ? &o.bytes
              : a == "--burst"  ? &o.burst
              : a == "--late"   ? &o.late
                                : nullptr;
    if (!to || n < 0) {
      fprintf(stderr, "net_device: %s: no such option, or no number\n", a.c_str());
      exit(2);
    }
    *to = n;
    i++;
  }
  if (o.ranks < 1 || o.ranks > 32 || o.bytes % 16) {
    fprintf(stderr, "net_device: 1 to 32 ranks, rows of a multiple of 16 bytes\n");
    exit(2);
  }
  return o;
}

#endif
