/* A batch at work. A producer makes cases and the reference's answers and puts them into a ring of
 * slots; each rank's thread takes slots in order, runs its part and compares its own image. A slot
 * is made anew when every rank has left it. As processes, every rank makes all cases itself, which
 * the seed allows, and runs its own part. */
#include "validate/checker.h"

#include "plan/error.h"
#include "validate/check_counts.h"
#include "validate/check_report.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { RING = 4 };

/* One rank's images of one slot. */
enum { INITIAL, EXPECTED = INITIAL + EP_MAX_ROUNDS, BOUNDS = EXPECTED + EP_MAX_ROUNDS, NUM_IMAGES };

typedef struct buffer {
  uint8_t *data;
  size_t bytes;
} buffer_t;

/* Kept from batch to batch, since fresh pages cost more than what is written into them; given back
 * when they have grown large. */
#define KEPT_BYTES ((size_t)256 << 20)
struct ep_check_buffers {
  buffer_t images[RING][EP_MAX_RANKS][NUM_IMAGES];
  buffer_t results[EP_MAX_RANKS][EP_MAX_ROUNDS];
};

typedef struct slot {
  ep_check_case_t c;
  buffer_t (*buffers)[NUM_IMAGES]; /* [ranks] */
  uint8_t *initial[EP_MAX_ROUNDS][EP_MAX_RANKS];
  uint8_t *expected[EP_MAX_ROUNDS][EP_MAX_RANKS];
  uint8_t *bounds[EP_MAX_RANKS]; /* order-free: sums of magnitudes */
  ep_check_counts_t counts;
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
  buffer_t *buffers;
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

/* Where an image of so many bytes lies; NULL: out of memory. */
static uint8_t *grow(buffer_t *b, size_t bytes) {
  if (bytes <= b->bytes) return b->data;
  free(b->data);
  *b = (buffer_t){0};
  bytes += bytes / 2;
  if (posix_memalign((void **)&b->data, 64, bytes) != 0) return b->data = NULL;
  b->bytes = bytes;
  return b->data;
}

static trefoil_result_t growSlot(slot_t *slot, int R) {
  size_t bytes = slot->c.usedBytes;
  for (int r = 0; r < R; r++) {
    buffer_t *images = slot->buffers[r];
    int enough = 1;
    for (int round = 0; round < slot->c.numRounds; round++) {
      slot->initial[round][r] = grow(&images[INITIAL + round], bytes);
      slot->expected[round][r] = grow(&images[EXPECTED + round], bytes);
      enough &= slot->initial[round][r] && slot->expected[round][r];
    }
    if (slot->c.group->orderFree) enough &= !!(slot->bounds[r] = grow(&images[BOUNDS], bytes));
    EP_CHECK(enough, TREFOIL_SYSTEM_ERROR, "out of memory for the images of a case");
  }
  return TREFOIL_OK;
}

static void freeBuffers(buffer_t *b, size_t count) {
  for (size_t i = 0; i < count; i++) free(b[i].data);
  memset(b, 0, count * sizeof *b);
}

/* Keeps the buffers for the next batch if they are not too large; all: none. */
static void trimBuffers(struct ep_check_buffers *buffers, int all) {
  buffer_t *b = (buffer_t *)buffers;
  size_t count = sizeof *buffers / sizeof *b, bytes = 0;
  for (size_t i = 0; i < count; i++) bytes += b[i].bytes;
  if (all || bytes > KEPT_BYTES) freeBuffers(b, count);
}

void epTeamFree(ep_check_team_t *team) {
  if (team->buffers) trimBuffers(team->buffers, 1);
  free(team->buffers);
  team->buffers = NULL;
}

static trefoil_result_t makeSlot(slot_t *slot, const ep_check_team_t *team, uint64_t index) {
  const ep_check_group_t *g = &team->group;
  int R = g->shape.numRanks;
  epFreeCase(&slot->c);
  EP_TRY(epMakeCase(&slot->c, g, index));
  if (team->options->countBytes) EP_TRY(epPlanCounts(&slot->c, &slot->counts));
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

static trefoil_result_t growResults(rank_task_t *task, const ep_check_case_t *c) {
  for (int round = 0; round < c->numRounds; round++) {
    task->result[round] = grow(&task->buffers[round], c->usedBytes);
    EP_CHECK(task->result[round], TREFOIL_SYSTEM_ERROR, "out of memory for the results of a case");
  }
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

/* What this rank sent, as the library counts it. */
static int isCountRight(rank_task_t *task, ep_check_rank_t *rank, const slot_t *slot) {
  ep_check_team_t *team = task->ring->team;
  uint64_t compared = 0;
  if (!rank->counts) return 1;
  if (epRankCompareCounts(rank, &slot->counts, &compared) != TREFOIL_OK) {
    char what[2048];
    snprintf(what, sizeof what, "rank %d: %s", task->rank, trefoilLastError());
    epTeamFail(team, &slot->c, slot->c.index, what);
    return 0;
  }
  atomic_fetch_add(&team->job->counted, compared);
  return 1;
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
  if (growResults(task, c) != TREFOIL_OK ||
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
  if (!isCountRight(task, rank, slot)) return 1;
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
  const ep_check_options_t *o = team->options;
  int local = o->launch ? o->launch->localRank : rank;
  return (ep_check_rank_t){.lib = team->lib,
                           .group = &team->group,
                           .rank = rank,
                           .device = local % (o->numDevices > 0 ? o->numDevices : 1),
                           .timeoutNs = o->timeoutNs,
                           .counts = o->countBytes && epCanCount(team->lib),
                           .kept = team->comms ? &team->comms->of[team->group.shape.numRanks][rank]
                                               : NULL};
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
    if (makeSlot(slot, team, index) != TREFOIL_OK) {
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
  if (!team->buffers) team->buffers = calloc(1, sizeof *team->buffers);
  if (!ring || !tasks || !team->buffers || team->lib->ncclGetUniqueId(&ring->id) != ncclSuccess) {
    epTeamFail(team, NULL, team->firstCase, "ncclGetUniqueId failed, or no memory for a team");
    return 1;
  }
  ring->team = team;
  pthread_mutex_init(&ring->mutex, NULL);
  pthread_cond_init(&ring->produced, NULL);
  pthread_cond_init(&ring->left, NULL);
  ring->numRunning = R;
  for (int i = 0; i < RING; i++) ring->slots[i].buffers = team->buffers->images[i];
  for (int r = 0; r < R; r++) {
    tasks[r] = (rank_task_t){.ring = ring, .rank = r, .buffers = team->buffers->results[r]};
    if (pthread_create(&threads[r], NULL, rankMain, &tasks[r]) != 0) {
      epTeamFail(team, NULL, team->firstCase, "a thread could not be started");
      return 1;
    }
  }
  produce(ring);
  /* After a failure the other ranks may wait for the one that left: the process ends instead. */
  if (atomic_load(&team->job->failing)) return 1;
  for (int r = 0; r < R; r++) pthread_join(threads[r], NULL);
  for (int i = 0; i < RING; i++) epFreeCase(&ring->slots[i].c);
  trimBuffers(team->buffers, 0);
  free(tasks);
  free(ring);
  return 0;
}

/* All processes come this far before any goes on (see produce). */
static void meetAgain(ep_check_team_t *team, uint64_t numMeetings) {
  ep_check_job_t *job = team->job;
  struct timespec pause = {0, 50000};
  if (team->options->launch) {
    epLaunchedMeet(team);
    return;
  }
  atomic_fetch_add(&job->numArrived, 1);
  while (atomic_load(&job->numArrived) < numMeetings * (uint64_t)team->group.shape.numRanks &&
         !atomic_load(&job->stop))
    nanosleep(&pause, NULL);
}

int epTeamProcess(ep_check_team_t *team, int rankIdx) {
  uint64_t numMeetings = 0;
  ring_t ring = {.team = team};
  pthread_mutex_init(&ring.mutex, NULL);
  buffer_t results[EP_MAX_ROUNDS] = {{0}}, images[EP_MAX_RANKS][NUM_IMAGES] = {{{0}}};
  rank_task_t task = {.ring = &ring, .rank = rankIdx, .buffers = results};
  ep_check_rank_t rank = newRank(team, rankIdx);
  slot_t *slot = calloc(1, sizeof *slot);
  if (rankIdx == 0 && !team->options->launch) {
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
  slot->buffers = images;
  int bad = 0;
  for (uint64_t i = 0; i < team->numCases && !bad && !atomic_load(&team->job->stop); i++) {
    uint64_t index = team->firstCase + i;
    if (makeSlot(slot, team, index) != TREFOIL_OK) {
      epTeamFail(team, &slot->c, index, trefoilLastError());
      bad = 1;
    } else {
      bad = runSlot(&task, &rank, slot);
      if (ring.earliest) epTeamFail(team, &slot->c, index, ring.what);
      if (!bad && slot->c.numMasks) meetAgain(team, ++numMeetings);
    }
  }
  if (!bad && !atomic_load(&team->job->stop) && epRankClose(&rank) != TREFOIL_OK) {
    openFailed(team, rankIdx, "closing");
    bad = 1;
  }
  epFreeCase(&slot->c);
  free(slot);
  freeBuffers(images[0], EP_MAX_RANKS * NUM_IMAGES);
  freeBuffers(results, EP_MAX_ROUNDS);
  return bad;
}
