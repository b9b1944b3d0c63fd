/* Random cases where a launcher started the ranks, a process each. Every process makes all cases itself,
 * which the seed allows, and runs its own part; they meet before a batch, after cases with masks and at
 * the end. A rank that failed goes to the next meeting at once: there all learn of it and stop, so
 * every rank has been to the same meetings. */
#include "validate/checker.h"

#include "plan/error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What a rank brings to a meeting. */
typedef struct state {
  int failed, over; /* over: rank 0 has seen enough time go by */
  uint64_t failedCase, bytes, counted;
  ncclUniqueId id;
  char text[EP_CHECK_TEXT];
} state_t;

static state_t stateOf(const ep_check_team_t *team) {
  ep_check_job_t *job = team->job;
  state_t s = {.failed = atomic_load(&job->failed),
               .over = team->deadline > 0 && epNow() > team->deadline,
               .failedCase = job->failedCase,
               .bytes = atomic_load(&job->bytes),
               .counted = atomic_load(&job->counted),
               .id = job->id};
  memcpy(s.text, job->text, sizeof s.text);
  return s;
}

/* The failure to tell: of the earliest case; there, who found something different rather than who
 * then waited for that rank. */
static const state_t *firstFailure(const state_t *all, int R) {
  const state_t *first = NULL;
  for (int r = 0; r < R; r++) {
    if (!all[r].failed) continue;
    int isEarlier = !first || all[r].failedCase < first->failedCase;
    int isCause = first && all[r].failedCase == first->failedCase &&
                  strstr(all[r].text, "expected") && !strstr(first->text, "expected");
    if (isEarlier || isCause) first = &all[r];
  }
  return first;
}

void epLaunchedMeet(ep_check_team_t *team) {
  ep_launch_t *launch = team->options->launch;
  ep_check_job_t *job = team->job;
  if (atomic_load(&job->numArrived) == UINT64_MAX) return; /* all know already */
  state_t mine = stateOf(team), *all = calloc((size_t)launch->numRanks, sizeof *all);
  if (!all || epLaunchGather(launch, &mine, all, sizeof mine) != TREFOIL_OK) {
    epTeamFail(team, NULL, atomic_load(&job->currentCase),
               all ? trefoilLastError() : "out of memory for a meeting");
    atomic_store(&job->numArrived, UINT64_MAX);
  } else {
    const state_t *first = firstFailure(all, launch->numRanks);
    job->id = all[0].id;
    if (first) {
      job->failedCase = first->failedCase;
      memcpy(job->text, first->text, sizeof job->text);
      atomic_store(&job->failed, 1);
    }
    if (first || all[0].over) {
      atomic_store(&job->stop, 1);
      atomic_store(&job->numArrived, UINT64_MAX);
    }
    team->bytesOfAll = team->countedOfAll = 0;
    for (int r = 0; r < launch->numRanks; r++) {
      team->bytesOfAll += all[r].bytes;
      team->countedOfAll += all[r].counted;
    }
  }
  free(all);
}

static void tellProgress(const ep_check_team_t *team, double start) {
  const ep_check_options_t *o = team->options;
  ep_check_status_t s = {team->casesDone, team->bytesOfAll, team->countedOfAll, epNow() - start};
  if (o->progress && o->launch->rank == 0) o->progress(o->context, &s);
}

/* All batches that were asked for. */
static void runBatches(ep_check_team_t *team, double start) {
  const ep_check_options_t *o = team->options;
  ep_check_job_t *job = team->job;
  for (uint64_t batch = o->firstCase / EP_BATCH_CASES; epTeamCut(team, batch); batch++) {
    epMakeGroup(&team->group, &o->choice, batch);
    epBatchEnvironment(&team->group);
    if (o->launch->rank == 0 && team->lib->ncclGetUniqueId(&job->id) != ncclSuccess)
      epTeamFail(team, NULL, team->firstCase, "ncclGetUniqueId failed");
    atomic_store(&job->currentCase, team->firstCase);
    epLaunchedMeet(team);
    tellProgress(team, start);
    if (atomic_load(&job->stop)) return;
    atomic_store(&job->idReady, 1);
    if (epTeamProcess(team, o->launch->rank)) break;
    if (!atomic_load(&job->stop)) team->casesDone += team->numCases;
  }
  epLaunchedMeet(team); /* of the failure, or that there was none */
}

trefoil_result_t epCheckLaunched(const ep_check_options_t *options, ep_check_outcome_t *outcome) {
  ep_check_options_t o = *options;
  ep_library_t lib;
  static ep_check_comms_t comms;
  ep_launch_t *launch = o.launch;
  EP_CHECK(launch->numRanks <= EP_MAX_RANKS, TREFOIL_INVALID_ARGUMENT,
           "%d processes: random cases have at most %d ranks", launch->numRanks, EP_MAX_RANKS);
  EP_TRY(epLibraryLoad(&lib, &o.paths));
  if (lib.cudaGetDeviceCount(&o.numDevices) != cudaSuccess) o.numDevices = 0;
  EP_CHECK(o.numDevices > 0 && launch->localRank < o.numDevices, TREFOIL_INVALID_ARGUMENT,
           "%d ranks on a host with %d GPUs: every rank needs a GPU of its own", launch->numLocal,
           o.numDevices);
  o.choice.minRanks = o.choice.maxRanks = launch->numRanks;
  ep_check_job_t *job = calloc(1, sizeof *job);
  EP_CHECK(job, TREFOIL_SYSTEM_ERROR, "out of memory");
  double start = epNow();
  ep_check_team_t team = {.lib = &lib,
                          .options = &o,
                          .job = job,
                          .deadline = o.seconds > 0 ? start + o.seconds : 0,
                          .comms = &comms};
  runBatches(&team, start);
  *outcome = (ep_check_outcome_t){
      .status = {team.casesDone, team.bytesOfAll, team.countedOfAll, epNow() - start},
      .failed = atomic_load(&job->failed),
      .failedCase = job->failedCase};
  memcpy(outcome->text, job->text, sizeof outcome->text);
  free(job);
  return TREFOIL_OK;
}
