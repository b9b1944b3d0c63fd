// Puts and signals of kernels/net between virtual ranks, over plain copies: on one GPU, or in the emulator.
//
//   net_device [--ranks N] [--rounds N] [--bytes N] [--burst N]
//   net_device --late N       rank N is never launched: the others end at their limit and name it
//
// In the emulator also --gin: over the device communicators of the host runtime, that is, the network in
// net/ with its delays and faults (TREFOIL_NET_*). --refused: some posts must be refused, because too many
// are under way: for a network with much latency.
#include "kernels/common/start.cuh"
#include "tests/kernels/net_copies.cuh"
#include "tests/kernels/net_work.cuh"

#ifdef TREFOIL_EMULATED
#include "kernels/net/gin.cuh"
#endif

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

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
  bool gin = false, refused = false;
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

static void runCopies(const Options &o, std::vector<Rank> &ranks) {
  NetCopies all = {};
  for (int r = 0; r < o.ranks; r++) {
    Rank &k = ranks[r];
    k.work = workOf(o, r);
    prepare(k);
    k.work.memory = all.windows[r] = zeros<char>(netWorkBytes(k.work));
    all.signals[r] = zeros<unsigned long long>((size_t)(NET_SIGNALS * o.ranks));
  }
  for (int r = 0; r < o.ranks; r++) {
    all.consumed = zeros<unsigned long long>((size_t)o.ranks);
    NetCopies *on = zeros<NetCopies>(1);
    CU(cudaMemcpy(on, &all, sizeof all, cudaMemcpyHostToDevice));
    ranks[r].work.port.comm = on;
  }
  for (int r = 0; r < o.ranks; r++) {
    if (r != o.late) launch<CopyWire>(ranks[r]);
  }
  for (Rank &k : ranks) CU(cudaStreamSynchronize(k.stream));
}

#ifdef TREFOIL_EMULATED
#define NC(x)                                                                                      \
  do {                                                                                             \
    if ((x) != ncclSuccess) {                                                                      \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, ncclGetLastError(nullptr));       \
      exit(3);                                                                                     \
    }                                                                                              \
  } while (0)

static void runGinRank(const Options &o, Rank &k, int rank, ncclUniqueId id) {
  ncclComm_t comm;
  ncclWindow_t window;
  ncclDevComm_t dev;
  void *memory;
  CU(cudaSetDevice(rank % 8));
  NC(ncclCommInitRank(&comm, o.ranks, id, rank));
  k.work = workOf(o, rank);
  prepare(k);
  const size_t bytes = netWorkBytes(k.work);
  NC(ncclMemAlloc(&memory, bytes));
  memset(memory, 0, bytes);
  NC(ncclCommWindowRegister(comm, memory, bytes, &window, 0));
  ncclDevCommRequirements_t reqs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  reqs.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
  reqs.ginContextCount = 1;
  reqs.ginSignalCount = NET_SIGNALS * o.ranks;
  reqs.ginCounterCount = o.ranks;
  NC(ncclDevCommCreate(comm, &reqs, &dev));
  k.work.memory = (char *)memory;
  k.work.port.comm = &dev;
  k.work.port.window = window;
  if (rank != o.late) launch<GinWire>(k);
  CU(cudaStreamSynchronize(k.stream));
  NC(ncclDevCommDestroy(comm, &dev));
  // No rank leaves while others may still write to its memory.
  int word = 0;
  NC(ncclAllReduce(&word, &word, 1, ncclInt32, ncclSum, comm, k.stream));
  CU(cudaStreamSynchronize(k.stream));
  NC(ncclCommDestroy(comm));
  NC(ncclMemFree(memory));
}

static void runGin(const Options &o, std::vector<Rank> &ranks) {
  ncclUniqueId id;
  NC(ncclGetUniqueId(&id));
  std::vector<std::thread> threads;
  for (int r = 0; r < o.ranks; r++) {
    threads.emplace_back([&, r] { runGinRank(o, ranks[r], r, id); });
  }
  for (std::thread &t : threads) t.join();
}
#else
static void runGin(const Options &, std::vector<Rank> &) {
  fprintf(stderr, "--gin is for the emulator\n");
  exit(2);
}
#endif

// Without a late rank: no wrong word, and no wait that ended. With one: the others
// gave up on it and on nobody else.
static bool isRight(const Options &o, int rank, const Results &r) {
  if (r.wrong) return false;
  if (o.late < 0) return r.gaveUp == 0;
  return rank == o.late ? r.gaveUp == 0 : r.gaveUp == 1 && r.gaveUpOn == o.late;
}

static Options parse(int argc, char **argv) {
  Options o;
  for (int i = 1; i < argc; i++) {
    const std::string a = argv[i];
    const int n = i + 1 < argc ? atoi(argv[i + 1]) : -1;
    if (a == "--gin" || a == "--refused") {
      (a == "--gin" ? o.gin : o.refused) = true;
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

int main(int argc, char **argv) {
  const Options o = parse(argc, argv);
  int devices = 0, refused = 0, bad = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || !devices) {
    printf("skipped: no GPU\n");
    return 77;
  }
  std::vector<Rank> ranks(o.ranks);
  (o.gin ? runGin : runCopies)(o, ranks);
  for (int r = 0; r < o.ranks; r++) {
    const Results &is = *ranks[r].results;
    refused += is.refused;
    if (isRight(o, r, is)) continue;
    bad++;
    printf("rank %d: %d words differ, %d waits ended at the limit, the last one for rank %d\n", r,
           is.wrong, is.gaveUp, is.gaveUpOn);
  }
  if (o.refused && !refused) {
    bad++;
    printf("no put was refused\n");
  }
  printf("%d tests, %d failed, 0 skipped (%d posts refused)\n", o.ranks, bad, refused);
  return bad ? 1 : 0;
}
