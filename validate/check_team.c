/* A batch at work. A producer makes cases and the reference's answers and puts them into a ring of
 * slots; each rank's thread takes slots in order, runs its part and compares its own image. A slot
 * is made anew when every rank has left it. */
#include "validate/check_slot.h"

#include "plan/error.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { RING = 4 };

/* Kept from batch to batch, since fresh pages cost more than what is written into them; given back
 * when they have grown large. */
#define KEPT_BYTES ((size_t)256 << 20)
struct ep_check_buffers {
  ep_buffer_t images[RING][EP_MAX_RANKS][EP_NUM_IMAGES];
  ep_buffer_t results[EP_MAX_RANKS][EP_MAX_ROUNDS];
};

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
  char what[EP_CHECK_SENTENCE];
  ep_slot_t slots[RING];
  ncclUniqueId id;
} ring_t;

typedef struct rank_task {
  ring_t *ring;
  int rank;
  ep_buffer_t *buffers;
} rank_task_t;

/* Keeps the buffers for the next batch if they are not too large; all: none. */
static void trimBuffers(struct ep_check_buffers *buffers, int all) {
  ep_buffer_t *b = (ep_buffer_t *)buffers;
  size_t count = sizeof *buffers / sizeof *b, bytes = 0;
  for (size_t i = 0; i < count; i++) bytes += b[i].bytes;
  if (all || bytes > KEPT_BYTES) epBuffersFree(b, count);
}

void epTeamFree(ep_check_team_t *team) {
  if (team->buffers) trimBuffers(team->buffers, 1);
  free(team->buffers);
  team->buffers = NULL;
}

/* Fails without a rank or a call. */
static int failSetUp(ep_check_team_t *team, uint64_t index, const char *what) {
  const ep_check_culprit_t culprit = {EP_CASE_ABORTS, -1, "", ncclSuccess, index, 1};
  epTeamFail(team, &culprit, what);
  return 1;
}

/* One spoiled row makes others wrong later on: of all ranks' differences the earliest is reported. */
static void recordDifference(ring_t *ring, int rank, uint64_t number, int region,
                             const char *what) {
  pthread_mutex_lock(&ring->mutex);
  if (!ring->earliest || number < ring->differs ||
      (number == ring->differs &&
       (region < ring->earliest || (region == ring->earliest && rank < ring->differsRank)))) {
    ring->earliest = region;
    ring->differsRank = rank;
    ring->differs = number;
    snprintf(ring->what, sizeof ring->what, "%s", what);
  }
  pthread_mutex_unlock(&ring->mutex);
}

static void *rankMain(void *argument) {
  rank_task_t *task = argument;
  ring_t *ring = task->ring;
  ep_worker_rank_t worker;
  epWorkerRankInit(&worker, ring->team, task->rank, task->buffers);
  int bad = epRankOpen(&worker.rank, &ring->id) != TREFOIL_OK;
  if (bad) epWorkerRankFailed(&worker, EP_PHASE_OPENING);
  epWorkerRankPhase(&worker, EP_PHASE_CASE);
  for (uint64_t n = 0; !bad; n++) {
    pthread_mutex_lock(&ring->mutex);
    while (ring->numProduced == n && !ring->ended) pthread_cond_wait(&ring->produced, &ring->mutex);
    int over = ring->numProduced == n;
    pthread_mutex_unlock(&ring->mutex);
    if (over) break;
    int region;
    char what[EP_CHECK_SENTENCE];
    bad = epSlotRun(&worker, &ring->slots[n % RING], &region, what);
    if (region) recordDifference(ring, task->rank, n, region, what);
    pthread_mutex_lock(&ring->mutex);
    ring->numLeft[task->rank] = n + 1;
    pthread_cond_signal(&ring->left);
    pthread_mutex_unlock(&ring->mutex);
  }
  if (!bad) epWorkerRankPhase(&worker, EP_PHASE_CLOSING);
  if (!bad && epRankClose(&worker.rank) != TREFOIL_OK)
    epWorkerRankFailed(&worker, EP_PHASE_CLOSING);
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
  const ep_check_culprit_t culprit = {EP_CASE_WRONG, ring->differsRank, "",
                                      ncclSuccess,   c->index,          1};
  epTeamFail(team, &culprit, ring->what);
}

/* Puts case after case into the ring. */
static void produceCases(ring_t *ring) {
  ep_check_team_t *team = ring->team;
  uint64_t settled = atomic_load(&team->job->settled);
  int masked = 0;
  for (uint64_t i = 0; i < team->numCases; i++) {
    uint64_t index = team->firstCase + i;
    if (settled >> index % EP_BATCH_CASES & 1) continue;
    if (team->deadline > 0 && epNow() > team->deadline) {
      atomic_store(&team->job->timeOver, 1);
      return;
    }
    /* Ranks that masked one another come together again when all are through MaskClean. */
    if (!waitFree(ring, masked ? 0 : RING - 1)) return;
    ep_slot_t *slot = &ring->slots[ring->numProduced % RING];
    if (epSlotMake(slot, team, index) != TREFOIL_OK) {
      char what[1024];
      snprintf(what, sizeof what, "the case itself: %s", trefoilLastError());
      failSetUp(team, index, what);
      return;
    }
    masked = slot->c.numMasks;
    pthread_mutex_lock(&ring->mutex);
    ring->numProduced++;
    pthread_cond_broadcast(&ring->produced);
    pthread_mutex_unlock(&ring->mutex);
  }
}

static void produce(ring_t *ring) {
  ep_check_team_t *team = ring->team;
  produceCases(ring);
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
  if (!team->buffers) team->buffers = calloc(1, sizeof *team->buffers);
  if (!ring || !tasks || !team->buffers || team->lib->ncclGetUniqueId(&ring->id) != ncclSuccess) {
    free(ring);
    free(tasks);
    return failSetUp(team, team->firstCase, "ncclGetUniqueId failed, or no memory for a team");
  }
  ring->team = team;
  pthread_mutex_init(&ring->mutex, NULL);
  pthread_cond_init(&ring->produced, NULL);
  pthread_cond_init(&ring->left, NULL);
  ring->numRunning = R;
  for (int i = 0; i < RING; i++) ring->slots[i].buffers = team->buffers->images[i];
  for (int r = 0; r < R; r++) {
    tasks[r] = (rank_task_t){.ring = ring, .rank = r, .buffers = team->buffers->results[r]};
    if (pthread_create(&threads[r], NULL, rankMain, &tasks[r]) != 0)
      return failSetUp(team, team->firstCase, "a thread could not be started");
  }
  produce(ring);
  /* After a failure the other ranks may wait for the one that left: the process ends instead. */
  if (atomic_load(&team->job->failing)) {
    epTeamAwaitHanging(team);
    return 1;
  }
  for (int r = 0; r < R; r++) pthread_join(threads[r], NULL);
  for (int i = 0; i < RING; i++) epFreeCase(&ring->slots[i].c);
  trimBuffers(team->buffers, 0);
  free(tasks);
  free(ring);
  return 0;
}
