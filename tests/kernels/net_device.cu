// Puts and signals of kernels/net between virtual ranks, over plain copies: on one GPU, or in the emulator.
//
//   net_device [--ranks N] [--rounds N] [--bytes N] [--burst N]
//   net_device --late N       rank N is never launched: the others end at their limit and name it
//
// In the emulator also --gin: over the device communicators of the host runtime, that is, the network in
// net/ with its delays and faults (TREFOIL_NET_*). --refused: some posts must be refused, because too many
// are under way: for a network with much latency.
#include "tests/kernels/net_copies.cuh"
#include "tests/kernels/net_rank.cuh"

#ifdef TREFOIL_EMULATED
#include "tests/kernels/net_gin_rank.cuh"
#endif

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

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
static void runGin(const Options &o, std::vector<Rank> &ranks) {
  ncclUniqueId id;
  NC(ncclGetUniqueId(&id));
  std::vector<std::thread> threads;
  for (int r = 0; r < o.ranks; r++) {
    threads.emplace_back([&, r] { runGinRank(o, ranks[r], r, r % 8, id); });
  }
  for (std::thread &t : threads) t.join();
}
#else
static void runGin(const Options &, std::vector<Rank> &) {
  fprintf(stderr, "--gin is for the emulator\n");
  exit(2);
}
#endif

int main(int argc, char **argv) {
  const Options o = parse(argc, argv);
  if (o.times) {
    fprintf(stderr, "net_device: --times is for net_gin\n");
    return 2;
  }
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
