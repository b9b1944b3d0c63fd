// Puts and signals of kernels/net over NCCL's GIN, on GPUs: a process for each rank, every rank a node of its
// own (NCCL_LSA_TEAM_SIZE=1), with the network that the environment chooses (docs/net.md).
//
//   net_gin [--ranks N] [--rounds N] [--bytes N] [--burst N] [--late N]
//   net_gin --times [--processes] [--ranks N]
//
// --times: what the network takes for puts of growing size, all ranks at once, threads of one process as in
// `trefoil bench`, or processes; prints JSON.
// More ranks than GPUs share them. With MPS they run side by side; else in turns of some milliseconds.
#include "tests/kernels/net_gin_rank.cuh"

#include <cstring>
#include <ctime>
#include <new>
#include <sys/mman.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

constexpr int SKIPPED = 77, SECONDS = 120;

// What the processes share.
struct Shared {
  volatile int hasId;
  ncclUniqueId id;
  Results results[32];
  double us[32][NUM_EXCHANGES];
};

static void pause20ms() {
  const timespec t = {0, 20000000};
  nanosleep(&t, nullptr);
}

static int devicesHere() {
  int n = 0;
  return cudaGetDeviceCount(&n) == cudaSuccess ? n : 0;
}

static int rankMain(const Options &o, int rank, Shared *all) {
  alarm(SECONDS); // NCCL waits without a limit for a rank that has ended
  const int devices = devicesHere();
  if (!devices) return SKIPPED;
  if (o.ranks > devices) setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 0);
  if (rank == 0) {
    NC(ncclGetUniqueId(&all->id));
    __sync_synchronize();
    all->hasId = 1;
  }
  for (int waits = 0; !all->hasId; waits++) {
    if (waits == 3000) return 3;
    pause20ms();
  }
  Rank k;
  timespec start, end;
  clock_gettime(CLOCK_MONOTONIC, &start);
  runGinRank(o, k, rank, rank % devices, all->id, all->us[rank]);
  clock_gettime(CLOCK_MONOTONIC, &end);
  all->results[rank] = *k.results;
  if (rank == 0 && !o.times)
    printf("%.1f s\n",
           (double)(end.tv_sec - start.tv_sec) + 1e-9 * (double)(end.tv_nsec - start.tv_nsec));
  return 0;
}

// How many ranks failed; -1: there is no GPU.
static int judge(const Options &o, const Shared *all, const int *status) {
  int bad = 0;
  for (int r = 0; r < o.ranks; r++) {
    const Results &is = all->results[r];
    if (WIFEXITED(status[r]) && WEXITSTATUS(status[r]) == SKIPPED) return -1;
    if (status[r]) {
      printf("rank %d: its process ended with %s %d\n", r, WIFEXITED(status[r]) ? "code" : "signal",
             WIFEXITED(status[r]) ? WEXITSTATUS(status[r]) : WTERMSIG(status[r]));
    } else if (!isRight(o, r, is)) {
      printf("rank %d: %d words differ, %d waits ended at the limit, the last one for rank %d\n", r,
             is.wrong, is.gaveUp, is.gaveUpOn);
    } else {
      continue;
    }
    bad++;
  }
  return bad;
}

static void startProcesses(const Options &o, Shared *all, int *status) {
  pid_t pids[32];
  for (int r = 0; r < o.ranks; r++) {
    pids[r] = fork();
    if (pids[r] < 0) exit(3);
    if (pids[r] == 0) {
      const int result = rankMain(o, r, all);
      fflush(stdout);
      _exit(result);
    }
  }
  for (int r = 0; r < o.ranks; r++) waitpid(pids[r], &status[r], 0);
}

static int startThreads(const Options &o, Shared *all) {
  if (o.ranks > devicesHere()) {
    printf("skipped: %d ranks need a GPU each, or --processes\n", o.ranks);
    return SKIPPED;
  }
  std::vector<std::thread> threads;
  for (int r = 0; r < o.ranks; r++) threads.emplace_back([&, r] { rankMain(o, r, all); });
  for (std::thread &t : threads) t.join();
  return 0;
}

static int runTimes(const Options &o, Shared *all) {
  int status[32] = {}, gaveUp = 0;
  if (o.processes) {
    startProcesses(o, all, status);
    const int bad = judge(o, all, status);
    if (bad) return bad < 0 ? SKIPPED : 1;
  } else if (const int skipped = startThreads(o, all)) {
    return skipped;
  }
  for (int r = 0; r < o.ranks; r++) gaveUp += all->results[r].gaveUp;
  if (gaveUp) {
    fprintf(stderr, "net_gin: %d waits ended at the limit\n", gaveUp);
    return 1;
  }
  printTimes(all->us, o.ranks);
  return 0;
}

int main(int argc, char **argv) {
  const Options o = parse(argc, argv);
  void *memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 3;
  Shared *all = new (memory) Shared();
  int status[32];
  setenv("NCCL_LSA_TEAM_SIZE", "1", 0);
  if (o.times) return runTimes(o, all);
  startProcesses(o, all, status);
  const int bad = judge(o, all, status);
  if (bad < 0) {
    printf("skipped: no GPU\n");
    return SKIPPED;
  }
  int refused = 0;
  for (int r = 0; r < o.ranks; r++) refused += all->results[r].refused;
  printf("%d tests, %d failed, 0 skipped (%d posts refused)\n", o.ranks, bad, refused);
  return bad ? 1 : 0;
}
