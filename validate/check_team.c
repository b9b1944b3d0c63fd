/* A batch at work. A producer makes cases and the reference's answers and puts them into a ring of
 * slots; each rank's thread takes slots in order, runs its part and compares its own image. A slot
 * is made anew when every rank has left it. As processes, every rank makes all cases itself, which
 * the seed allows, and runs its own part. */
#include "validate/checker.h"

#include "plan/error.h"
#include "validate/check_rank.h"
#include "validate/check_report.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { RING = 4 };

typedef struct slot {
  ep_check_case_t c;
  size_t capacity;
  uint8_t *initial[EP_MAX_ROUNDS][EP_MAX_RANKS];
  uint8_t *expected[EP_MAX_ROUNDS][EP_MAX_RANKS];
  uint8_t *bounds[EP_MAX_RANKS]; /* order-free: sums of magnitudes */
} slot_t;

typedef struct ring {
  ep_check_team_t *team;
  pthread_mutex_t mutex;
  pthread_cond_t produced, left;
  uint64_t numProduced, numLeft[EP_MAX_RANKS];
  int ended; /* nothing more will be produced */
  int numRunning;
  int differsRank;
  int earliest;     /* region of the earliest difference so far + 1, 0: none */
  uint64_t differs; /* the slot's number */
  char what[2048];
  slot_t slots[RING];
  ncclUniqueId id;
} ring_t;

typedef struct rank_task {
  ring_t *ring;
  int rank;
  uint64_t number; /* of the slot at work */
  size_t capacity;
  uint8_t *result[EP_MAX_ROUNDS];
} rank_task_t;

double epNow(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void epTeamFail(ep_check_team_t *team, const ep_check_case_t *c, uint64_t index, const char *what) {
  ep_check_job_t *job = team->job;
  int no = 0;
  if (!atomic_compare_exchange_strong(&job->failing, &no, 1)) return;
  char group[1024], script[4096] = "";
  epDescribeGroup(&team->group, group, sizeof group);
  if (c) epDescribeScript(c, script, sizeof script);
  snprintf(job->text, sizeof job->text, "case %llu: %s\n%s\n%sreplay: %s --case %llu",
           (unsigned long long)index, what, group, script,
           team->options->replay ? team->options->replay : "", (unsigned long long)index);
  job->failedCase = index;
  atomic_store(&job->failed, 1);
  atomic_store(&job->stop, 1);
}

static int growOne(uint8_t **p, size_t bytes) {
  free(*p);
  return posix_memalign((void **)p, 64, bytes) == 0;
}

static trefoil_result_t growSlot(slot_t *slot, int R) {
  if (slot->c.usedBytes <= slot->capacity) return TREFOIL_OK;
  size_t bytes = slot->c.usedBytes + slot->c.usedBytes / 2;
  for (int round = 0; round < EP_MAX_ROUNDS; round++)
    for (int r = 0; r < R; r++)
      EP_CHECK(growOne(&slot->initial[round][r], bytes) &&
                   growOne(&slot->expected[round][r], bytes),
               TREFOIL_SYSTEM_ERROR, "out of memory for the images of a case");
  for (int r = 0; r < R; r++)
    EP_CHECK(!slot->c.group->orderFree || growOne(&slot->bounds[r], bytes), TREFOIL_SYSTEM_ERROR,
             "out of memory for the bounds of a case");
  slot->capacity = bytes;
  return TREFOIL_OK;
}

static trefoil_result_t makeSlot(slot_t *slot, const ep_check_group_t *g, uint64_t index) {
  int R = g->shape.numRanks;
  epFreeCase(&slot->c);
  EP_TRY(epMakeCase(&slot->c, g, index));
  EP_TRY(growSlot(slot, R));
  for (int round = 0; round < slot->c.numRounds; round++) {
    for (int r = 0; r < R; r++) {
      epFillImage(&slot->c, round, r, slot->initial[round][r]);
      memcpy(slot->expected[round][r], slot->initial[round][r], slot->c.usedBytes);
    }
    EP_TRY(epExpect(&slot->c, round, slot->expected[round]));
  }
  if (!g->orderFree) return TREFOIL_OK;
  for (int r = 0; r < R; r++) {
    memcpy(slot->bounds[r], slot->initial[0][r], slot->c.usedBytes);
    epMakeMagnitudes(&slot->c, r, slot->bounds[r]);
  }
  return epExpect(&slot->c, 0, slot->bounds);
}

static void freeSlot(slot_t *slot) {
  epFreeCase(&slot->c);
  for (int r = 0; r < EP_MAX_RANKS; r++) free(slot->bounds[r]);
  for (int round = 0; round < EP_MAX_ROUNDS; round++)
    for (int r = 0; r < EP_MAX_RANKS; r++) {
      free(slot->initial[round][r]);
      free(slot->expected[round][r]);
    }
}

static trefoil_result_t growResults(rank_task_t *task, size_t bytes) {
  if (bytes <= task->capacity) return TREFOIL_OK;
  for (int round = 0; round < EP_MAX_ROUNDS; round++)
    EP_CHECK(growOne(&task->result[round], bytes + bytes / 2), TREFOIL_SYSTEM_ERROR,
             "out of memory for the results of a case");
  task->capacity = bytes + bytes / 2;
  return TREFOIL_OK;
}

/* One spoiled row makes others wrong later on: of all ranks' differences the earliest is told. */
static void recordDifference(const rank_task_t *task, int region, const char *what) {
  ring_t *ring = task->ring;
  pthread_mutex_lock(&ring->mutex);
  if (!ring->earliest || task->number < ring->differs ||
      (task->number == ring->differs &&
       (region < ring->earliest || (region == ring->earliest && task->rank < ring->differsRank)))) {
    ring->earliest = region;
    ring->differsRank = task->rank;
    ring->differs = task->number;
    snprintf(ring->what, sizeof ring->what, "%s", what);
  }
  pthread_mutex_unlock(&ring->mutex);
}

/* Runs a rank's part of a slot and compares; 0 if all is well. */
static int runSlot(rank_task_t *task, ep_check_rank_t *rank, slot_t *slot) {
  ep_check_team_t *team = task->ring->team;
  const ep_check_case_t *c = &slot->c;
  uint8_t *initial[EP_MAX_ROUNDS];
  char what[2048];
  for (int round = 0; round < EP_MAX_ROUNDS; round++)
    initial[round] = slot->initial[round][task->rank];
  atomic_store(&team->job->currentCase, c->index);
  if (growResults(task, c->usedBytes) != TREFOIL_OK ||
      (c->group->orderFree ? epRankRunFree(rank, c, initial[0], slot->expected[0][task->rank],
                                           slot->bounds[task->rank], task->result[0])
                           : epRankRun(rank, c, initial, task->result)) != TREFOIL_OK) {
    snprintf(what, sizeof what, "rank %d: %s", task->rank, trefoilLastError());
    epTeamFail(team, c, c->index, what);
    return 1;
  }
  for (int round = 0; round < c->numRounds; round++) {
    ep_check_images_t images = {slot->expected[round], task->result[round]};
    if (!memcmp(slot->expected[round][task->rank], task->result[round], c->usedBytes)) continue;
    int region = epDescribeDifference(c, round, task->rank, &images, what, sizeof what);
    recordDifference(task, region, what);
    return 1;
  }
  atomic_fetch_add(&team->job->bytes, c->usedBytes * (uint64_t)c->numRounds);
  if (task->rank == 0) atomic_fetch_add(&team->job->cases, 1);
  return 0;
}

static void openFailed(ep_check_team_t *team, int rank, const char *when) {
  char what[1024];
  snprintf(what, sizeof what, "rank %d, %s the batch: %s", rank, when, trefoilLastError());
  epTeamFail(team, NULL, team->firstCase, what);
}

static ep_check_rank_t newRank(ep_check_team_t *team, int rank) {
  return (ep_check_rank_t){
      .lib = team->lib, .group = &team->group, .rank = rank, .timeoutNs = team->options->timeoutNs};
}

static void *rankMain(void *argument) {
  rank_task_t *task = argument;
  ring_t *ring = task->ring;
  ep_check_rank_t rank = newRank(ring->team, task->rank);
  int bad = epRankOpen(&rank, &ring->id) != TREFOIL_OK;
  if (bad) openFailed(ring->team, task->rank, "opening");
  for (uint64_t n = 0; !bad; n++) {
    pthread_mutex_lock(&ring->mutex);
    while (ring->numProduced == n && !ring->ended) pthread_cond_wait(&ring->produced, &ring->mutex);
    int over = ring->numProduced == n;
    pthread_mutex_unlock(&ring->mutex);
    if (over) break;
    task->number = n;
    bad = runSlot(task, &rank, &ring->slots[n % RING]);
    pthread_mutex_lock(&ring->mutex);
    ring->numLeft[task->rank] = n + 1;
    pthread_cond_signal(&ring->left);
    pthread_mutex_unlock(&ring->mutex);
  }
  if (!bad && epRankClose(&rank) != TREFOIL_OK) {
    openFailed(ring->team, task->rank, "closing");
    bad = 1;
  }
  for (int round = 0; round < EP_MAX_ROUNDS; round++) free(task->result[round]);
  pthread_mutex_lock(&ring->mutex);
  ring->numRunning--;
  pthread_cond_signal(&ring->left);
  pthread_mutex_unlock(&ring->mutex);
  return NULL;
}

/* Waits until at most `numAhead` slots are in use; 0 when something failed. */
static int waitFree(ring_t *ring, uint64_t numAhead) {
  int R = ring->team->group.shape.numRanks, free = 0;
  pthread_mutex_lock(&ring->mutex);
  while (!free && !ring->earliest && !atomic_load(&ring->team->job->stop)) {
    free = 1;
    for (int r = 0; r < R; r++) free &= ring->numLeft[r] + numAhead >= ring->numProduced;
    if (!free) pthread_cond_wait(&ring->left, &ring->mutex);
  }
  free &= !ring->earliest;
  pthread_mutex_unlock(&ring->mutex);
  return free && !atomic_load(&ring->team->job->stop);
}

/* Called with the mutex: waits, a second at most, for the other ranks to finish that case. */
static void reportEarliest(ring_t *ring) {
  ep_check_team_t *team = ring->team;
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += 1;
  int all = 0;
  while (!all) {
    all = 1;
    for (int r = 0; r < team->group.shape.numRanks; r++) all &= ring->numLeft[r] > ring->differs;
    if (!all && pthread_cond_timedwait(&ring->left, &ring->mutex, &until) != 0) break;
  }
  const ep_check_case_t *c = &ring->slots[ring->differs % RING].c;
  epTeamFail(team, c, c->index, ring->what);
}

static void produce(ring_t *ring) {
  ep_check_team_t *team = ring->team;
  int masked = 0;
  for (uint64_t i = 0; i < team->numCases; i++) {
    if (team->deadline > 0 && epNow() > team->deadline) break;
    /* Ranks that masked one another come together again when all are through MaskClean. */
    if (!waitFree(ring, masked ? 0 : RING - 1)) break;
    uint64_t index = team->firstCase + i;
    slot_t *slot = &ring->slots[ring->numProduced % RING];
    if (makeSlot(slot, &team->group, index) != TREFOIL_OK) {
      char what[1024];
      snprintf(what, sizeof what, "the case itself: %s", trefoilLastError());
      epTeamFail(team, &slot->c, index, what);
      break;
    }
    masked = slot->c.numMasks;
    pthread_mutex_lock(&ring->mutex);
    ring->numProduced++;
    pthread_cond_broadcast(&ring->produced);
    pthread_mutex_unlock(&ring->mutex);
  }
  pthread_mutex_lock(&ring->mutex);
  ring->ended = 1;
  pthread_cond_broadcast(&ring->produced);
  while (ring->numRunning > 0 && !ring->earliest && !atomic_load(&team->job->failed))
    pthread_cond_wait(&ring->left, &ring->mutex);
  if (ring->earliest) reportEarliest(ring);
  pthread_mutex_unlock(&ring->mutex);
}

int epTeamThreads(ep_check_team_t *team) {
  int R = team->group.shape.numRanks;
  ring_t *ring = calloc(1, sizeof *ring);
  rank_task_t *tasks = calloc((size_t)R, sizeof *tasks);
  pthread_t threads[EP_MAX_RANKS];
  if (!ring || !tasks || team->lib->ncclGetUniqueId(&ring->id) != ncclSuccess) {
    epTeamFail(team, NULL, team->firstCase, "ncclGetUniqueId failed, or no memory for a team");
    return 1;
  }
  ring->team = team;
  pthread_mutex_init(&ring->mutex, NULL);
  pthread_cond_init(&ring->produced, NULL);
  pthread_cond_init(&ring->left, NULL);
  ring->numRunning = R;
  for (int r = 0; r < R; r++) {
    tasks[r] = (rank_task_t){.ring = ring, .rank = r};
    if (pthread_create(&threads[r], NULL, rankMain, &tasks[r]) != 0) {
      epTeamFail(team, NULL, team->firstCase, "a thread could not be started");
      return 1;
    }
  }
  produce(ring);
  /* After a failure the other ranks may wait for the one that left: the process ends instead. */
  if (atomic_load(&team->job->failing)) return 1;
  for (int r = 0; r < R; r++) pthread_join(threads[r], NULL);
  for (int i = 0; i < RING; i++) freeSlot(&ring->slots[i]);
  free(tasks);
  free(ring);
  return 0;
}

/* All processes come this far before any goes on (see produce). */
static void meetAgain(ep_check_team_t *team, uint64_t numMeetings) {
  ep_check_job_t *job = team->job;
  struct timespec pause = {0, 50000};
  atomic_fetch_add(&job->numArrived, 1);
  while (atomic_load(&job->numArrived) < numMeetings * (uint64_t)team->group.shape.numRanks &&
         !atomic_load(&job->stop))
    nanosleep(&pause, NULL);
}

int epTeamProcess(ep_check_team_t *team, int rankIdx) {
  uint64_t numMeetings = 0;
  ring_t ring = {.team = team};
  pthread_mutex_init(&ring.mutex, NULL);
  rank_task_t task = {.ring = &ring, .rank = rankIdx};
  ep_check_rank_t rank = newRank(team, rankIdx);
  slot_t *slot = calloc(1, sizeof *slot);
  if (rankIdx == 0) {
    if (team->lib->ncclGetUniqueId(&team->job->id) != ncclSuccess)
      epTeamFail(team, NULL, team->firstCase, "ncclGetUniqueId failed");
    atomic_store(&team->job->idReady, 1);
  }
  struct timespec pause = {0, 100000};
  while (!atomic_load(&team->job->idReady) && !atomic_load(&team->job->stop))
    nanosleep(&pause, NULL);
  ncclUniqueId id = team->job->id;
  if (!slot || atomic_load(&team->job->stop) || epRankOpen(&rank, &id) != TREFOIL_OK) {
    openFailed(team, rankIdx, "opening");
    return 1;
  }
  int bad = 0;
  for (uint64_t i = 0; i < team->numCases && !bad && !atomic_load(&team->job->failed); i++) {
    uint64_t index = team->firstCase + i;
    if (makeSlot(slot, &team->group, index) != TREFOIL_OK) {
      epTeamFail(team, &slot->c, index, trefoilLastError());
      bad = 1;
    } else {
      bad = runSlot(&task, &rank, slot);
      if (ring.earliest) epTeamFail(team, &slot->c, index, ring.what);
      if (!bad && slot->c.numMasks) meetAgain(team, ++numMeetings);
    }
  }
  if (!bad && !atomic_load(&team->job->failed) && epRankClose(&rank) != TREFOIL_OK) {
    openFailed(team, rankIdx, "closing");
    bad = 1;
  }
  freeSlot(slot);
  free(slot);
  for (int round = 0; round < EP_MAX_ROUNDS; round++) free(task.result[round]);
  return bad;
}
