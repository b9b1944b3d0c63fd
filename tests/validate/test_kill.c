/* A rank process killed at a random moment, from the first call to the last: every survivor returns from
 * its call within the timeout, with a sentence that names the rank. argv[2]: how many kills. A kill waits
 * for what it is meant to hit, not for a time: a slow machine kills at the same places. */
#include "test.h"

#include "validate/check_rank.h"
#include "validate/checker.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { TIMEOUT_MS = 1500, MARGIN_MS = 6000, START_MS = 60000 };
typedef enum kill_place { IN_START, IN_FIRST_CASE, AT_WORK, NUM_PLACES } kill_place_t;
static int numKills = 10;

typedef struct shared {
  _Atomic int idReady;
  ncclUniqueId id;
  _Atomic uint64_t cases;
  _Atomic int opened[EP_MAX_RANKS];
} shared_t;

/* A rank: case after case until a call fails; the sentence goes to its parent. */
static void rankMain(const ep_check_group_t *g, int rankIdx, shared_t *shared, int out) {
  static ep_check_case_t c;
  static ep_library_t lib;
  ep_library_paths_t paths = {getenv("TREFOIL_CPU"), getenv("TREFOIL_HOST"),
                              getenv("TREFOIL_HOST")};
  ep_check_rank_t rank = {
      .lib = &lib, .group = g, .rank = rankIdx, .timeoutNs = TIMEOUT_MS * 1000000ull};
  int ok = epLibraryLoad(&lib, &paths) == TREFOIL_OK;
  if (ok && rankIdx == 0) {
    ok = lib.ncclGetUniqueId(&shared->id) == ncclSuccess;
    shared->idReady = 1;
  }
  while (ok && !shared->idReady) usleep(50);
  ncclUniqueId id = shared->id;
  ok = ok && epRankOpen(&rank, &id) == TREFOIL_OK;
  shared->opened[rankIdx] = ok;
  for (uint64_t i = g->batch * EP_BATCH_CASES; ok; i++) {
    uint8_t *initial[EP_MAX_ROUNDS], *result[EP_MAX_ROUNDS];
    ok = epMakeCase(&c, g, i) == TREFOIL_OK;
    for (int round = 0; ok && round < c.numRounds; round++) {
      initial[round] = malloc(c.usedBytes);
      result[round] = malloc(c.usedBytes);
      epFillImage(&c, round, rankIdx, initial[round]);
    }
    if (ok && c.trapped == 0) ok = epRankRun(&rank, &c, initial, result) == TREFOIL_OK;
    for (int round = 0; round < c.numRounds; round++) {
      free(initial[round]);
      free(result[round]);
    }
    epFreeCase(&c);
    if (ok && rankIdx == 0) shared->cases++;
  }
  const char *why = trefoilLastError();
  if (write(out, why, strlen(why)) < 0) _exit(2);
  _exit(0);
}

static int reached(const shared_t *shared, kill_place_t place, int victim) {
  if (place == AT_WORK) return shared->cases > 0;
  return place == IN_FIRST_CASE ? shared->opened[victim] : shared->idReady;
}

/* Waits until the group has come to that place; 0 if it does not within START_MS. */
static int waitFor(const shared_t *shared, kill_place_t place, int victim) {
  for (int i = 0; i < START_MS * 20 && !reached(shared, place, victim); i++) usleep(50);
  return reached(shared, place, victim);
}

/* Kills a rank of one group `us` microseconds after that place; 1 if all is as it should be. */
static int killOnce(uint64_t batch, int victim, kill_place_t place, int64_t us, shared_t *shared) {
  ep_check_choice_t choice = {.seed = 77, .minRanks = 3, .maxRanks = 3};
  ep_check_group_t g;
  do epMakeGroup(&g, &choice, batch += 1000);
  while (g.enableMask || g.imageBytes > 8u << 20);
  epBatchEnvironment(&g);
  char number[16];
  snprintf(number, sizeof number, "%d", TIMEOUT_MS);
  setenv("NCCL_EP_TIMEOUT_MS", number, 1);
  memset(shared, 0, sizeof *shared);
  int R = g.shape.numRanks, ends[EP_MAX_RANKS][2] = {{0}}, ok = 1;
  pid_t pids[EP_MAX_RANKS] = {0};
  for (int r = 0; r < R; r++) {
    if (pipe(ends[r])) return 0;
    pids[r] = fork();
    if (pids[r] == 0) rankMain(&g, r, shared, ends[r][1]);
    close(ends[r][1]);
  }
  int came = waitFor(shared, place, victim);
  CHECK(came, "batch %d, victim %d: place %d was not reached", (int)g.batch, victim, (int)place);
  ok &= came;
  struct timespec pause = {us / 1000000, us % 1000000 * 1000};
  nanosleep(&pause, NULL);
  kill(pids[victim], SIGKILL);
  int wasOpen = shared->opened[victim];
  int limit = TIMEOUT_MS + MARGIN_MS;
  for (int r = 0; r < R; r++) {
    char sentence[600] = "", name[32];
    struct pollfd ready = {.fd = ends[r][0], .events = POLLIN};
    int ended = poll(&ready, 1, limit);
    ssize_t n = ended > 0 ? read(ends[r][0], sentence, sizeof sentence - 1) : 0;
    close(ends[r][0]);
    if (r != victim) {
      snprintf(name, sizeof name, "rank %d", victim);
      int named = n > 0 && strstr(sentence, name) != NULL;
      /* Who dies on the way into the communicator is no rank yet: then any reason will do. */
      if (!wasOpen && n > 0) named |= strstr(sentence, "ncclCommInitRank") != NULL;
      CHECK(ended > 0, "batch %d, victim %d after %d us: rank %d did not return", (int)g.batch,
            victim, (int)us, r);
      CHECK(ended <= 0 || named, "batch %d, victim %d after %d us: rank %d says '%s'", (int)g.batch,
            victim, (int)us, r, sentence);
      ok &= ended > 0 && named;
    }
    if (ended <= 0) kill(pids[r], SIGKILL);
  }
  for (int r = 0; r < R; r++) {
    kill(pids[r], SIGKILL);
    waitpid(pids[r], NULL, 0);
  }
  return ok;
}

TEST(survivors_name_the_killed_rank) {
  shared_t *shared =
      mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(shared != MAP_FAILED, "mmap");
  ep_rng_t rng = epRng(1, 2, 3);
  int bad = 0;
  uint64_t cases = 0;
  for (int i = 0; i < numKills && bad < 5; i++) {
    kill_place_t place = (kill_place_t)(i % NUM_PLACES);
    int64_t us = epRange(&rng, 0, place == AT_WORK ? 130000 : 20000);
    bad += !killOnce((uint64_t)i, (int)epBelow(&rng, 3), place, us, shared);
    cases += shared->cases;
  }
  CHECK(cases > 0, "no rank ever got to work");
  printf("%d kills, %d cases done before them\n", numKills, (int)cases);
  munmap(shared, sizeof *shared);
}

int main(int argc, char **argv) {
  if (argc > 2) numKills = atoi(argv[2]);
  return testRunAll(argc > 1 ? 2 : 1, argv);
}
