// Times of the network alone: rounds in which every rank puts rows to every other rank and waits for theirs.
#ifndef TREFOIL_TESTS_KERNELS_NET_TIMES_CUH
#define TREFOIL_TESTS_KERNELS_NET_TIMES_CUH

#include "tests/kernels/net_rank.cuh"

#include <algorithm>
#include <vector>

constexpr int TIME_ROUNDS = 240, TIME_WARM = 40;

// One exchange: `puts` puts of `bytes` to each peer, the last one with the signal.
struct Exchange {
  int puts;
  uint64_t bytes;
};

// The latency of one put, the cost of more puts, the rate at growing sizes, and that of several large puts
// under way at once, as high throughput has them.
static const Exchange EXCHANGES[] = {
    {1, 16},        {2, 16},      {4, 16},       {8, 16},       {1, 1 << 13},
    {1, 1 << 15},   {1, 1 << 17}, {1, 1 << 19},  {1, 1 << 20},  {1, 2 << 20},
    {1, 4 << 20},   {1, 8 << 20}, {1, 16 << 20}, {1, 32 << 20}, {1, 64 << 20},
    {1, 128 << 20}, {4, 2 << 20}, {16, 2 << 20}, {28, 2 << 20}, {7, 8 << 20},
};
constexpr int NUM_EXCHANGES = (int)(sizeof EXCHANGES / sizeof EXCHANGES[0]);
constexpr uint64_t TIME_MOST_BYTES = 128 << 20;

struct TimesWork {
  ep_net_port_t port;
  Exchange exchange;
  uint64_t first; // rounds of earlier exchanges
  unsigned long long limitNs;
  int *gaveUp;
  uint64_t *ns; // [TIME_ROUNDS]
};

static inline uint64_t timesBytes(const Options &o) {
  return NET_WORK_START + (1 + (uint64_t)o.ranks) * TIME_MOST_BYTES;
}

// One warp. A weak signal for each parity: two rounds may be under way.
template <class Wire> static __global__ void netTimesKernel(const __grid_constant__ TimesWork w) {
  const Net<Wire> net(w.port);
  const int R = w.port.numRanks, lane = (int)threadIdx.x;
  const uint64_t began = clockNs();
  for (int i = 0; i < TIME_ROUNDS; i++) {
    const uint64_t round = w.first + i + 1, start = clockNs();
    const int parity = round & 1;
    for (int p = 0; p < w.exchange.puts; p++) {
      for (int d = 1; d < R; d++) {
        const int peer = (w.port.rank + d) % R;
        const uint64_t to = NET_WORK_START + (1 + (uint64_t)w.port.rank) * TIME_MOST_BYTES;
        const bool isLast = p + 1 == w.exchange.puts;
        while (!(isLast ? net.template putSignal<NetSignal::WEAK>(peer, to, NET_WORK_START,
                                                                  w.exchange.bytes,
                                                                  parity * R + w.port.rank, 1)
                        : net.put(peer, to, NET_WORK_START, w.exchange.bytes))) {
          if (clockNs() - began > w.limitNs) break;
        }
      }
    }
    for (int d = 1; d < R; d++) {
      const int peer = (w.port.rank + d) % R;
      while (net.readSignal(parity * R + peer) < (round + 1) / 2) {
        if (clockNs() - began < w.limitNs) continue;
        if (lane == 0) atomicAdd(w.gaveUp, 1);
        return;
      }
    }
    __syncwarp();
    if (lane == 0) w.ns[i] = clockNs() - start;
  }
}

static double medianOf(const uint64_t *ns) {
  std::vector<uint64_t> sorted(ns + TIME_WARM, ns + TIME_ROUNDS);
  std::sort(sorted.begin(), sorted.end());
  return 1e-3 * (double)sorted[sorted.size() / 2];
}

// The medians of this rank, us. All ranks call it together.
template <class Wire> static void takeTimes(Rank &r, double *us) {
  uint64_t *ns, *on;
  CU(cudaHostAlloc((void **)&ns, TIME_ROUNDS * sizeof *ns, cudaHostAllocMapped));
  CU(cudaHostGetDevicePointer((void **)&on, ns, 0));
  for (int i = 0; i < NUM_EXCHANGES; i++) {
    const TimesWork w = {r.work.port,    EXCHANGES[i],  (uint64_t)i * TIME_ROUNDS,
                         20000000000ull, r.work.gaveUp, on};
    CU(epStart(netTimesKernel<Wire>, 1, 32, r.stream, w));
    CU(cudaStreamSynchronize(r.stream));
    us[i] = medianOf(ns);
  }
  CU(cudaFreeHost(ns));
}

// The slowest rank's; rate: bytes to each peer over the time that a put of 16 bytes does not take.
static void printTimes(const double (*us)[NUM_EXCHANGES], int ranks) {
  double worst[NUM_EXCHANGES];
  for (int i = 0; i < NUM_EXCHANGES; i++) {
    worst[i] = 0;
    for (int r = 0; r < ranks; r++) worst[i] = std::max(worst[i], us[r][i]);
  }
  printf("{\"ranks\": %d, \"rounds\": %d, \"exchanges\": [", ranks, TIME_ROUNDS - TIME_WARM);
  for (int i = 0; i < NUM_EXCHANGES; i++) {
    const double over = worst[i] - worst[0];
    const double sent = (double)EXCHANGES[i].bytes * (ranks - 1);
    printf("%s\n  {\"puts\": %d, \"bytes\": %llu, \"p50_us\": %.3f, \"gb_per_s\": %.2f}",
           i ? "," : "", EXCHANGES[i].puts, (unsigned long long)EXCHANGES[i].bytes, worst[i],
           over > 0 && EXCHANGES[i].puts == 1 ? 1e-3 * sent / over : 0.0);
  }
  printf("],\n \"latency_us\": %.3f, \"put_us\": %.3f}\n", worst[0], (worst[3] - worst[0]) / 7);
}

#endif
