/* Barrier rounds: held by all or by none, tried again after every kind of failure. */
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "trefoil_host.h"

#include "host_ranks.h"

#define OK(call) REQUIRE((call) == ncclSuccess, "%s: %s", #call, trefoilHostLastError())
#define MS       1000000ull

static uint64_t nowNs(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Ranks come at random times with random timeouts until 300 rounds were completed: whoever was in the n-th
 * finds everybody in the n-th. */
static void chaosBody(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  ncclComm_t comm;
  uint32_t random = 77u + (uint32_t)rank * 1000003u;
  int held = 0, failed = 0;
  (void)arg;
  OK(ncclCommInitRank(&comm, numRanks, *id, rank));
  while (held < 300) {
    int mine[3] = {held, rank, failed}, all[8][3];
    random = random * 1664525u + 1013904223u;
    if (random >> 28 == 0) usleep((random >> 8) % 2000);
    ncclResult_t result = trefoilHostBarrierRound(comm, mine, sizeof mine, all,
                                                  held < 290 ? (random >> 12) % (2 * MS) : ~0ull);
    if (result != ncclSuccess) {
      CHECK(result == ncclRemoteError && strstr(trefoilHostLastError(), "rank"), "%s",
            trefoilHostLastError());
      failed++;
      continue;
    }
    for (int r = 0; r < numRanks; r++) {
      REQUIRE(all[r][0] == held && all[r][1] == r, "barrier round %d: rank %d shows %d, as rank %d",
              held, r, all[r][0], all[r][1]);
    }
    held++;
  }
  OK(ncclCommDestroy(comm));
}

TEST(held_by_all_or_by_none) {
  runThreads(3, chaosBody, NULL);
}

TEST(between_processes_too) {
#ifdef __SANITIZE_THREAD__
  SKIP("ThreadSanitizer does not follow a process with threads through fork");
#endif
  pid_t pids[3];
  startProcesses(3, chaosBody, NULL, pids);
  for (int r = 0; r < 3; r++) {
    int status = -1;
    waitpid(pids[r], &status, 0);
    CHECK(status == 0, "rank %d ended with 0x%x", r, status);
  }
}

static pthread_barrier_t barrier;

static void lateBody(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  ncclComm_t comm;
  int all[3];
  (void)arg;
  OK(ncclCommInitRank(&comm, numRanks, *id, rank));
  for (int i = 0; i < rank; i++) { /* each a different number of times */
    ncclResult_t result = trefoilHostBarrierRound(comm, &rank, sizeof rank, all, 20 * MS);
    CHECK(result == ncclRemoteError && strstr(trefoilHostLastError(), "rank 0") &&
              strstr(trefoilHostLastError(), "did not come within"),
          "%d, %s", (int)result, trefoilHostLastError());
  }
  pthread_barrier_wait(&barrier);
  for (int i = 0; i < 3; i++) {
    OK(trefoilHostBarrierRound(comm, &rank, sizeof rank, all, 20000 * MS));
    CHECK(all[0] == 0 && all[1] == 1 && all[2] == 2, "%d %d %d", all[0], all[1], all[2]);
  }
  if (rank != 0) {
    CHECK(trefoilHostBarrierRound(comm, &rank, sizeof rank, all, 20000 * MS) == ncclRemoteError &&
              strstr(trefoilHostLastError(), "rank 0 is gone"),
          "%s", trefoilHostLastError());
    pthread_barrier_wait(&barrier);
  }
  OK(ncclCommDestroy(comm));
  if (rank == 0) pthread_barrier_wait(&barrier);
}

TEST(a_late_rank_costs_nothing_later) {
  pthread_barrier_init(&barrier, NULL, 3);
  runThreads(3, lateBody, NULL);
  pthread_barrier_destroy(&barrier);
}

/* Rank 1's call fails before it meets: the others need not wait for it, and hear why. */
static void failedCallBody(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  ncclComm_t comm;
  int all[3];
  (void)arg;
  OK(ncclCommInitRank(&comm, numRanks, *id, rank));
  for (int round = 0; round < 2; round++) {
    trefoilHostCallBegin(comm);
    if (rank == 1) {
      trefoilHostCallFail(comm, ncclInvalidArgument, "the width is 3");
    } else {
      uint64_t start = nowNs();
      ncclResult_t result = trefoilHostBarrierRound(comm, &rank, sizeof rank, all, 60000 * MS);
      CHECK(result == ncclInvalidArgument, "%d", (int)result);
      CHECK(strstr(trefoilHostLastError(), "rank 1 ") &&
                strstr(trefoilHostLastError(), "the width is 3"),
            "%s", trefoilHostLastError());
      CHECK(nowNs() - start < 10000 * MS, "after %.1f s", (double)(nowNs() - start) * 1e-9);
    }
    pthread_barrier_wait(&barrier);
  }
  /* that was another call: now a late rank is waited for */
  trefoilHostCallBegin(comm);
  if (rank == 1) usleep(1300000);
  OK(trefoilHostBarrierRound(comm, &rank, sizeof rank, all, 60000 * MS));
  OK(ncclCommDestroy(comm));
}

TEST(a_failed_call_is_heard_of) {
  pthread_barrier_init(&barrier, NULL, 3);
  runThreads(3, failedCallBody, NULL);
  pthread_barrier_destroy(&barrier);
}

TEST_MAIN()
