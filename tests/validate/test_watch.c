/* The barrier of ranks before a round: nobody passes before all have come; a failure and the limit end it. */
#include "test.h"

#include "validate/worker.h"

#include <pthread.h>

enum { RANKS = 4, ROUNDS = 200 };
static ep_watch_t watch;
static _Atomic int stop, came, early;

static void *barrierOften(void *argument) {
  int rank = (int)(intptr_t)argument;
  for (int round = 1; round <= ROUNDS; round++) {
    atomic_fetch_add(&came, 1);
    epWatchBarrier(&watch, rank, RANKS, &stop);
    if (atomic_load(&came) < RANKS * round) atomic_fetch_add(&early, 1);
    epWatchBarrier(&watch, rank, RANKS, &stop);
  }
  return NULL;
}

TEST(no_rank_passes_before_all_have_come) {
  pthread_t threads[RANKS];
  epWatchReset(&watch, RANKS, 20000000000ull);
  for (int r = 0; r < RANKS; r++)
    pthread_create(&threads[r], NULL, barrierOften, (void *)(intptr_t)r);
  for (int r = 0; r < RANKS; r++) pthread_join(threads[r], NULL);
  CHECK(atomic_load(&came) == RANKS * ROUNDS, "%d came", atomic_load(&came));
  CHECK(atomic_load(&early) == 0, "%d were early", atomic_load(&early));
}

TEST(a_failed_rank_is_not_waited_for) {
  epWatchReset(&watch, 2, 20000000000ull);
  atomic_store(&stop, 1);
  uint64_t begin = epMonotonicNs();
  epWatchBarrier(&watch, 0, 2, &stop);
  CHECK(epMonotonicNs() - begin < 5000000000ull, "it waited");
  atomic_store(&stop, 0);
}

TEST(a_rank_that_does_not_come_is_waited_for_up_to_the_limit) {
  epWatchReset(&watch, 2, 50000000);
  uint64_t begin = epMonotonicNs();
  epWatchBarrier(&watch, 0, 2, &stop);
  uint64_t took = epMonotonicNs() - begin;
  CHECK(took >= 50000000 && took < 5000000000ull, "%llu ns", (unsigned long long)took);
}

TEST_MAIN()
