/* Ranks in processes: memory seen across processes, collectives, threads and processes mixed, and ranks
 * that are killed at random points: the others return an error that names them, and nobody hangs.
 * argv: --kills N sets how many (default 30). */
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <time.h>

#include "host_ranks.h"
#include "trefoil_host.h"

#define OK(call)      REQUIRE((call) == ncclSuccess, "%s: %s", #call, trefoilHostLastError())
#define CUDA_OK(call) REQUIRE((call) == cudaSuccess, "%s: %s", #call, trefoilHostLastError())

static int numKills = 30;

static void barrier(ncclComm_t comm, cudaStream_t stream) {
  int one = 1;
  OK(ncclAllReduce(&one, &one, 1, ncclInt32, ncclSum, comm, stream));
  CUDA_OK(cudaStreamSynchronize(stream));
}

/* Windows over ncclMemAlloc and cudaMalloc memory, small and large: every rank writes into every other's
 * memory and reads what the others wrote. */
static void windowBody(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  static const size_t sizes[] = {4096, 100000, 5 << 20, 40 << 20};
  ncclComm_t comm;
  cudaStream_t stream;
  (void)arg;
  CUDA_OK(cudaStreamCreate(&stream));
  OK(ncclCommInitRank(&comm, numRanks, *id, rank));
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    ncclWindow_t win;
    char *mem, *peer;
    size_t last = sizes[i] - (size_t)numRanks;
    OK(ncclMemAlloc((void **)&mem, sizes[i]));
    OK(ncclCommWindowRegister(comm, mem, sizes[i], &win, NCCL_WIN_COLL_SYMMETRIC));
    for (int p = 0; p < numRanks; p++) {
      struct cudaPointerAttributes attributes;
      OK(ncclGetPeerDevicePointer(win, last + (size_t)rank, p, (void **)&peer));
      *peer = (char)(10 * rank + p);
      CUDA_OK(cudaPointerGetAttributes(&attributes, peer));
      CHECK(attributes.type == cudaMemoryTypeDevice && attributes.device == p, "device %d",
            attributes.device);
      CHECK(trefoilHostSameProcess(comm, p) == (p == rank), "rank %d and %d", rank, p);
    }
    barrier(comm, stream);
    for (int p = 0; p < numRanks; p++)
      CHECK(mem[last + (size_t)p] == 10 * p + rank, "size %zu: %d from %d", sizes[i],
            mem[last + (size_t)p], p);
    OK(ncclGetPeerDevicePointer(win, last, (rank + 1) % numRanks, (void **)&peer));
    char copy[16];
    CUDA_OK(cudaMemcpy(copy, peer, (size_t)numRanks, cudaMemcpyDeviceToHost));
    CHECK(copy[rank] == 10 * rank + (rank + 1) % numRanks, "copied %d", copy[rank]);
    barrier(comm, stream);
    OK(ncclCommWindowDeregister(comm, win));
    CHECK(cudaMemcpy(copy, peer, 1, cudaMemcpyDeviceToHost) != cudaSuccess || i < 2,
          "a peer's memory after the window is gone");
    OK(ncclMemFree(mem));
  }
  OK(ncclCommDestroy(comm));
}

TEST(windows_across_processes) {
  runProcesses(4, windowBody, NULL);
}

static void collectiveBody(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  enum { COUNT = 100000 };
  ncclComm_t comm, half;
  cudaStream_t stream;
  float *mine, *all;
  (void)arg;
  CUDA_OK(cudaStreamCreate(&stream));
  OK(ncclCommInitRank(&comm, numRanks, *id, rank));
  CUDA_OK(cudaMalloc((void **)&mine, COUNT * sizeof(float)));
  CUDA_OK(cudaMalloc((void **)&all, (size_t)numRanks * COUNT * sizeof(float)));
  for (int round = 0; round < 5; round++) {
    for (int i = 0; i < COUNT; i++) mine[i] = (float)(rank + i % 100 + round);
    OK(ncclAllGather(mine, all, COUNT, ncclFloat, comm, stream));
    OK(ncclAllReduce(mine, mine, COUNT, ncclFloat, ncclSum, comm, stream));
    CUDA_OK(cudaStreamSynchronize(stream));
    for (int i = 0; i < COUNT; i += 997) {
      int base = i % 100 + round;
      CHECK(mine[i] == (float)(numRanks * base + numRanks * (numRanks - 1) / 2), "sum at %d", i);
      for (int p = 0; p < numRanks; p++)
        CHECK(all[p * COUNT + i] == (float)(p + base), "block %d at %d", p, i);
    }
  }
  OK(ncclCommSplit(comm, rank % 2, rank, &half, NULL));
  mine[0] = (float)rank;
  OK(ncclAllReduce(mine, mine, 1, ncclFloat, ncclSum, half, stream));
  CUDA_OK(cudaStreamSynchronize(stream));
  CHECK(mine[0] == (rank % 2 ? 4.0f : 2.0f), "half: %g", mine[0]);
  OK(ncclCommDestroy(half));
  OK(ncclCommDestroy(comm));
}

TEST(collectives_across_processes) {
  runProcesses(4, collectiveBody, NULL);
}

/* Two processes with two rank threads each: ranks 2p and 2p + 1 live together. */
static void mixedRank(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  ncclComm_t comm;
  cudaStream_t stream;
  ncclWindow_t win;
  int *mem, *peer, sum = rank;
  (void)arg;
  CUDA_OK(cudaStreamCreate(&stream));
  OK(ncclCommInitRank(&comm, numRanks, *id, rank));
  OK(ncclMemAlloc((void **)&mem, 4096));
  *mem = rank + 50;
  OK(ncclCommWindowRegister(comm, mem, 4096, &win, 0));
  OK(ncclAllReduce(&sum, &sum, 1, ncclInt32, ncclSum, comm, stream));
  CUDA_OK(cudaStreamSynchronize(stream));
  CHECK(sum == 6, "sum %d", sum);
  for (int p = 0; p < numRanks; p++) {
    OK(ncclGetPeerDevicePointer(win, 0, p, (void **)&peer));
    CHECK(*peer == p + 50, "rank %d reads %d of %d", rank, *peer, p);
    CHECK(trefoilHostSameProcess(comm, p) == (p / 2 == rank / 2), "rank %d and %d", rank, p);
  }
  barrier(comm, stream);
  OK(ncclCommDestroy(comm));
  OK(ncclMemFree(mem));
}

static void mixedBody(int process, int numProcesses, const ncclUniqueId *id, void *arg) {
  pthread_t threads[2];
  rank_call_t calls[2];
  (void)numProcesses;
  for (int i = 0; i < 2; i++) {
    calls[i] = (rank_call_t){2 * process + i, 4, *id, arg, mixedRank};
    pthread_create(&threads[i], NULL, rankThread, &calls[i]);
  }
  for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
}

TEST(threads_and_processes_mixed) {
  runProcesses(2, mixedBody, NULL);
}

/* ---- Killed ranks ---- */

typedef struct {
  _Atomic int reports[8]; /* 1 clean end, 2 an error that names the victim, 3 another error */
  _Atomic int started;
  int victim;
  char sentences[8][200];
} shared_t;

static void report(shared_t *shared, int rank, int victim) {
  char want[32];
  snprintf(want, sizeof want, "rank %d", victim);
  snprintf(shared->sentences[rank], sizeof shared->sentences[rank], "%s", trefoilHostLastError());
  atomic_store(&shared->reports[rank], strstr(trefoilHostLastError(), want) ? 2 : 3);
}

/* Communicators, windows and collectives in a loop, until something fails. */
static void busyBody(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  shared_t *shared = arg;
  ncclComm_t comm = NULL;
  cudaStream_t stream;
  void *mem;
  float x[5000] = {0}, all[20000];
  cudaStreamCreate(&stream);
  atomic_fetch_add(&shared->started, 1);
  if (ncclCommInitRank(&comm, numRanks, *id, rank) != ncclSuccess) {
    report(shared, rank, shared->victim);
    return;
  }
  ncclMemAlloc(&mem, 8192);
  for (;;) {
    ncclWindow_t win;
    ncclComm_t part;
    bool good = ncclCommWindowRegister(comm, mem, 8192, &win, 0) == ncclSuccess;
    for (int i = 0; i < 5 && good; i++)
      good = ncclAllReduce(x, x, 5000, ncclFloat, ncclSum, comm, stream) == ncclSuccess &&
             ncclAllGather(x, all, 5000, ncclFloat, comm, stream) == ncclSuccess;
    good = good && cudaStreamSynchronize(stream) == cudaSuccess;
    good = good && ncclCommWindowDeregister(comm, win) == ncclSuccess;
    good = good && ncclCommSplit(comm, 0, rank, &part, NULL) == ncclSuccess &&
           ncclCommDestroy(part) == ncclSuccess;
    if (!good) break;
  }
  report(shared, rank, shared->victim);
  ncclCommDestroy(comm);
}

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

TEST(a_killed_rank_is_named_and_nobody_hangs) {
  enum { R = 4 };
  shared_t *shared =
      mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  double worst = 0;
  srand(7);
  for (int round = 0; round < numKills; round++) {
    pid_t pids[R];
    memset(shared, 0, sizeof *shared);
    shared->victim = rand() % R;
    startProcesses(R, busyBody, shared, pids);
    while (atomic_load(&shared->started) < R) usleep(200);
    usleep((useconds_t)(rand() % 12000) + 500);
    kill(pids[shared->victim], SIGKILL);
    double start = seconds();
    for (int r = 0; r < R; r++) waitpid(pids[r], NULL, 0);
    double took = seconds() - start;
    if (took > worst) worst = took;
    CHECK(took < 10, "round %d: %.1f s", round, took);
    for (int r = 0; r < R; r++)
      CHECK(r == shared->victim || atomic_load(&shared->reports[r]) == 2 ||
                strstr(shared->sentences[r], "did not arrive"),
            "round %d: rank %d of a group without %d says: %s", round, r, shared->victim,
            shared->sentences[r]);
  }
  printf("worst time from kill to the last rank's end: %.3f s\n", worst);
  munmap(shared, sizeof *shared);
}

TEST(an_id_of_a_dead_process_is_refused) {
  ncclUniqueId *id =
      mmap(NULL, sizeof *id, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ncclComm_t comm = NULL;
  pid_t pid = fork();
  if (pid == 0) _exit(ncclGetUniqueId(id) == ncclSuccess ? 0 : 1);
  int status;
  waitpid(pid, &status, 0);
  REQUIRE(status == 0, "no id");
  CHECK(ncclCommInitRank(&comm, 2, *id, 0) == ncclRemoteError && !comm, "no error");
  CHECK(strstr(trefoilHostLastError(), "is gone"), "%s", trefoilHostLastError());
  munmap(id, sizeof *id);
}

static void mixedAlone(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  ncclComm_t comm;
  cudaStream_t stream;
  int sum = rank;
  (void)arg;
  CUDA_OK(cudaStreamCreate(&stream));
  OK(ncclCommInitRank(&comm, numRanks, *id, rank));
  OK(ncclAllReduce(&sum, &sum, 1, ncclInt32, ncclSum, comm, stream));
  CUDA_OK(cudaStreamSynchronize(stream));
  CHECK(sum == 6, "sum %d", sum);
  OK(ncclCommDestroy(comm));
  CUDA_OK(cudaStreamDestroy(stream));
}

/* A child forked from a process that has used everything starts afresh. */
TEST(fork_after_use) {
  ncclUniqueId id;
  ncclComm_t comm;
  cudaStream_t stream;
  int *device, host = 5;
  CUDA_OK(cudaStreamCreate(&stream));
  CUDA_OK(cudaMalloc((void **)&device, 4));
  CUDA_OK(cudaMemcpyAsync(device, &host, 4, cudaMemcpyHostToDevice, stream));
  OK(ncclGetUniqueId(&id));
  OK(ncclCommInitRank(&comm, 1, id, 0));
  fflush(NULL);
  pid_t pid = fork();
  if (pid == 0) {
    testFailures = 0;
    runThreads(4, mixedAlone, NULL);
    fflush(NULL);
    _exit(testFailures ? 1 : 0);
  }
  CUDA_OK(cudaStreamSynchronize(stream));
  CHECK(*device == 5, "device %d", *device);
  int status;
  waitpid(pid, &status, 0);
  CHECK(status == 0, "child: 0x%x", status);
  OK(ncclCommDestroy(comm));
  CUDA_OK(cudaFree(device));
  CUDA_OK(cudaStreamDestroy(stream));
}

int main(int argc, char **argv) {
#if defined(__SANITIZE_THREAD__)
  printf("skipped: ThreadSanitizer does not follow threads made after a fork\n");
  return 77;
#endif
  setenv("NCCL_EP_TIMEOUT_MS", "3000", 1);
  if (argc > 2 && !strcmp(argv[1], "--kills")) {
    numKills = atoi(argv[2]);
    argc -= 2;
    argv += 2;
  }
  return testRunAll(argc, argv);
}
