/* A batch's part of one rank that is a process: it makes all cases itself, which the seed allows. */
#include "validate/check_slot.h"

#include "plan/error.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* All processes come this far before any goes on: ranks that masked one another come together again when
 * all are through MaskClean. */
static void barrierAgain(ep_check_team_t *team, uint64_t numBarriers) {
  ep_check_job_t *job = team->job;
  struct timespec pause = {0, 50000};
  if (team->options->launch) {
    epLaunchedBarrier(team);
    return;
  }
  atomic_fetch_add(&job->numArrived, 1);
  while (atomic_load(&job->numArrived) < numBarriers * (uint64_t)team->group.shape.numRanks &&
         !atomic_load(&job->stop))
    nanosleep(&pause, NULL);
}

/* Nonzero: the case failed, and it was reported. */
static int runCase(ep_worker_rank_t *worker, ep_slot_t *slot, uint64_t index) {
  ep_check_team_t *team = worker->team;
  char what[EP_CHECK_SENTENCE];
  ep_check_culprit_t culprit = {EP_CASE_ABORTS, worker->rank.rank, "", ncclSuccess, index, 1};
  if (epSlotMake(slot, team, index) != TREFOIL_OK) {
    snprintf(what, sizeof what, "the case itself: %s", trefoilLastError());
    epTeamFail(team, &culprit, what);
    return 1;
  }
  int region, bad = epSlotRun(worker, slot, &region, what);
  culprit.outcome = EP_CASE_WRONG;
  if (region) epTeamFail(team, &culprit, what);
  return bad;
}

static int runCases(ep_worker_rank_t *worker, ep_slot_t *slot) {
  ep_check_team_t *team = worker->team;
  uint64_t numBarriers = 0, settled = atomic_load(&team->job->settled);
  int bad = 0;
  if (team->options->launch) settled = 0;
  for (uint64_t i = 0; i < team->numCases && !bad && !atomic_load(&team->job->stop); i++) {
    uint64_t index = team->firstCase + i;
    if (settled >> index % EP_BATCH_CASES & 1) continue;
    bad = runCase(worker, slot, index);
    if (!bad && slot->c.numMasks) barrierAgain(team, ++numBarriers);
  }
  return bad;
}

/* The communicator's id, from rank 0 to the others. */
static int getId(ep_check_team_t *team, int rank, ncclUniqueId *id) {
  ep_check_job_t *job = team->job;
  struct timespec pause = {0, 100000};
  if (rank == 0 && !team->options->launch) {
    const ep_check_culprit_t culprit = {EP_CASE_ABORTS,  0, "ncclGetUniqueId", ncclSuccess,
                                        team->firstCase, 1};
    if (team->lib->ncclGetUniqueId(&job->id) != ncclSuccess)
      epTeamFail(team, &culprit, "rank 0: ncclGetUniqueId failed");
    atomic_store(&job->idReady, 1);
  }
  while (!atomic_load(&job->idReady) && !atomic_load(&job->stop)) nanosleep(&pause, NULL);
  *id = job->id;
  return !atomic_load(&job->stop);
}

int epTeamProcess(ep_check_team_t *team, int rankIdx) {
  ep_buffer_t results[EP_MAX_ROUNDS] = {{0}}, images[EP_MAX_RANKS][EP_NUM_IMAGES] = {{{0}}};
  ep_worker_rank_t worker;
  ncclUniqueId id;
  epWorkerRankInit(&worker, team, rankIdx, results);
  epWorkerRankPhase(&worker, EP_PHASE_OPENING);
  if (!getId(team, rankIdx, &id)) return 1;
  ep_slot_t *slot = calloc(1, sizeof *slot);
  if (!slot || epRankOpen(&worker.rank, &id) != TREFOIL_OK) {
    epWorkerRankFailed(&worker, EP_PHASE_OPENING);
    free(slot);
    return 1;
  }
  slot->buffers = images;
  epWorkerRankPhase(&worker, EP_PHASE_CASE);
  int bad = runCases(&worker, slot);
  epWorkerRankPhase(&worker, EP_PHASE_CLOSING);
  if (!bad && !atomic_load(&team->job->stop)) {
    bad = epRankClose(&worker.rank) != TREFOIL_OK;
    if (bad) epWorkerRankFailed(&worker, EP_PHASE_CLOSING);
  }
  epFreeCase(&slot->c);
  free(slot);
  epBuffersFree(images[0], EP_MAX_RANKS * EP_NUM_IMAGES);
  epBuffersFree(results, EP_MAX_ROUNDS);
  return bad;
}
