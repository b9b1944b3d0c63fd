/* ncclCommShrink, with ranks that live and ranks that are gone, and the configured collectives. */
#include <stdbool.h>

#include <cuda_runtime.h>

#include "host_ranks.h"
#include "trefoil_host.h"

#define NCCL(call) REQUIRE((call) == ncclSuccess, "%s: %s", #call, ncclGetLastError(NULL))

/* The sum of 2^rank over the communicator; 0 if it failed. */
static int sumOfRanks(ncclComm_t comm) {
  int rank = -1, sum = 0, *buffer;
  cudaStream_t s;
  ncclCommUserRank(comm, &rank);
  if (cudaStreamCreate(&s) != cudaSuccess) return 0;
  cudaMallocHost((void **)&buffer, sizeof *buffer);
  *buffer = 1 << rank;
  bool good = ncclAllReduce(buffer, buffer, 1, ncclInt32, ncclSum, comm, s) == ncclSuccess &&
              cudaStreamSynchronize(s) == cudaSuccess;
  if (good) sum = *buffer;
  cudaFreeHost(buffer);
  cudaStreamDestroy(s);
  return sum;
}

static void shrinkTwice(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  ncclComm_t comm, less, least;
  int excluded[] = {1, 3, 1}, count = 0, place = -1;
  (void)arg;
  NCCL(ncclCommInitRank(&comm, numRanks, *id, rank));
  if (rank != 1 && rank != 3) {
    NCCL(ncclCommShrink(comm, excluded, 3, &less, NULL, NCCL_SHRINK_DEFAULT));
    NCCL(ncclCommCount(less, &count));
    NCCL(ncclCommUserRank(less, &place));
    CHECK(count == numRanks - 2 && place == (rank == 0   ? 0
                                             : rank == 2 ? 1
                                                         : rank - 2),
          "rank %d is rank %d of %d", rank, place, count);
    CHECK(sumOfRanks(less) == (1 << count) - 1, "the wrong ranks are in it");
    NCCL(ncclCommShrink(comm, excluded, 2, &least, NULL, NCCL_SHRINK_DEFAULT)); /* once more */
    CHECK(sumOfRanks(least) == (1 << count) - 1, "the wrong ranks are in it");
    NCCL(ncclCommDestroy(less));
    if (place > 0) {
      int first = 0;
      NCCL(ncclCommShrink(least, &first, 1, &less, NULL, NCCL_SHRINK_DEFAULT));
      CHECK(sumOfRanks(less) == (1 << (count - 1)) - 1, "shrunk from a shrunk one");
      NCCL(ncclCommDestroy(less));
    }
    NCCL(ncclCommDestroy(least));
  }
  CHECK(sumOfRanks(comm) == (1 << numRanks) - 1, "the parent still works");
  NCCL(ncclCommDestroy(comm));
}

TEST(ranks_that_stay_go_on) {
  runThreads(6, shrinkTwice, NULL);
#ifndef __SANITIZE_THREAD__ /* which does not follow threads of a forked process */
  runProcesses(5, shrinkTwice, NULL);
#endif
}

/* Rank 2 dies; the others' collective fails, and they go on without it. */
static void survive(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  ncclComm_t comm, less;
  int dead = 2;
  (void)arg;
  NCCL(ncclCommInitRank(&comm, numRanks, *id, rank));
  if (rank == dead) {
    fflush(NULL);
    _exit(0);
  }
  CHECK(sumOfRanks(comm) == 0, "rank 2 is gone");
  CHECK(ncclCommShrink(comm, &dead, 1, &less, NULL, NCCL_SHRINK_DEFAULT) == ncclRemoteError,
        "the communicator has failed: %s", ncclGetLastError(NULL));
  NCCL(ncclCommShrink(comm, &dead, 1, &less, NULL, NCCL_SHRINK_ABORT));
  CHECK(sumOfRanks(less) == (1 << (numRanks - 1)) - 1, "the survivors");
  CHECK(sumOfRanks(comm) == 0, "the parent's work was ended");
  NCCL(ncclCommDestroy(less));
  NCCL(ncclCommDestroy(comm));
}

TEST(survivors_go_on_without_the_dead) {
#ifdef __SANITIZE_THREAD__
  SKIP("ThreadSanitizer does not follow threads of a forked process");
#endif
  runProcesses(4, survive, NULL);
}

TEST(what_cannot_be_shrunk_is_refused) {
  ncclComm_t comm, less;
  ncclUniqueId id;
  int self = 0, none = 7;
  NCCL(ncclGetUniqueId(&id));
  NCCL(ncclCommInitRank(&comm, 1, id, 0));
  CHECK(ncclCommShrink(comm, &self, 1, &less, NULL, 0) == ncclInvalidArgument, "excludes itself");
  CHECK(ncclCommShrink(comm, &none, 1, &less, NULL, 0) == ncclInvalidArgument, "no such rank");
  CHECK(ncclCommShrink(comm, &none, 0, &less, NULL, 0) == ncclInvalidArgument, "nobody");
  CHECK(ncclCommShrink(comm, &none, 1, &less, NULL, 8) == ncclInvalidArgument, "flags");
  NCCL(ncclCommDestroy(comm));
}

enum { COUNT = 3 };

/* Each configured collective gives what the plain one gives. */
static void configured(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  ncclCollConfig_t config = NCCL_COLLCONFIG_INITIALIZER;
  ncclComm_t comm;
  cudaStream_t s;
  int *in, *plain, *with, round = 0;
  size_t bytes = (size_t)(numRanks * COUNT) * sizeof(int);
  (void)arg;
  NCCL(ncclCommInitRank(&comm, numRanks, *id, rank));
  cudaStreamCreate(&s);
  cudaMallocHost((void **)&in, bytes);
  cudaMallocHost((void **)&plain, bytes);
  cudaMallocHost((void **)&with, bytes);
  REQUIRE(cudaEventCreateWithFlags(&config.launchCompletionEvent, cudaEventDisableTiming) ==
              cudaSuccess,
          "%s", trefoilHostLastError());
  for (int i = 0; i < numRanks * COUNT; i++) in[i] = 100 * rank + i;
#define SAME(name, ...)                                                                            \
  memset(plain, 0, bytes), memset(with, 0, bytes);                                                 \
  NCCL(name(in, plain, COUNT, ncclInt32, __VA_ARGS__, s));                                         \
  NCCL(name##Config(in, with, COUNT, ncclInt32, __VA_ARGS__, s, round++ % 2 ? NULL : &config));    \
  CHECK(cudaEventSynchronize(config.launchCompletionEvent) == cudaSuccess, "the event");           \
  CHECK(cudaStreamSynchronize(s) == cudaSuccess, "%s", trefoilHostLastError());                    \
  CHECK(!memcmp(plain, with, bytes), "%s: other results", #name)
  SAME(ncclAllReduce, ncclSum, comm);
  SAME(ncclReduce, ncclMax, 1, comm);
  SAME(ncclReduceScatter, ncclSum, comm);
  SAME(ncclBroadcast, 1, comm);
  SAME(ncclAllGather, comm);
  SAME(ncclAlltoAll, comm);
  SAME(ncclGather, 0, comm);
  SAME(ncclScatter, 1, comm);
  config.magic = 0;
  CHECK(ncclAllReduceConfig(in, with, COUNT, ncclInt32, ncclSum, comm, s, &config) ==
            ncclInvalidArgument,
        "not initialised");
  config.magic = NCCL_API_MAGIC;
  config.algSelection = "ring";
  CHECK(ncclAllReduceConfig(in, with, COUNT, ncclInt32, ncclSum, comm, s, &config) ==
            ncclInvalidArgument,
        "no such algorithm");
  CHECK(strstr(ncclGetLastError(NULL), "ncclAllReduceConfig: algSelection is \"ring\""), "%s",
        ncclGetLastError(NULL));
  config.algSelection = NULL;
  NCCL(ncclGroupStart());
  CHECK(ncclAllReduceConfig(in, with, COUNT, ncclInt32, ncclSum, comm, s, &config) ==
            ncclInvalidUsage,
        "an event in a group");
  CHECK(ncclGroupEnd() == ncclInvalidUsage, "the group remembers");
  cudaEventDestroy(config.launchCompletionEvent);
  cudaFreeHost(in);
  cudaFreeHost(plain);
  cudaFreeHost(with);
  cudaStreamDestroy(s);
  NCCL(ncclCommDestroy(comm));
}

TEST(configured_collectives_are_the_plain_ones) {
  runThreads(3, configured, NULL);
}

TEST_MAIN()
