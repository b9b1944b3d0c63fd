/* Random cases where a launcher started the ranks, a process each. Every process makes all cases itself,
 * which the seed allows, and runs its own part; they meet before a batch, after cases with masks and at
 * the end. A rank that failed goes to the next barrier round at once: there all learn of it and stop, so
 * every rank has been to the same barrier rounds. */
#include "validate/checker.h"

#include "plan/error.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static void reportProgress(const ep_check_team_t *team, double start) {
  const ep_check_options_t *o = team->options;
  ep_check_status_t s = {team->leastOfAll, team->bytesOfAll, team->countedOfAll, epNow() - start,
                         team->putsOfAll};
  if (o->progress && o->launch->rank == 0) o->progress(o->context, &s);
}

/* ---- No parent watches here: a thread does, and what exit() runs -------------------------------- */

static ep_check_team_t *launched; /* at work; else NULL */

/* Says what became of this rank and ends it: the others notice, and name it. */
static void endRank(ep_case_outcome_t outcome, const char *what) {
  const ep_check_team_t *team = launched;
  static ep_check_finding_t f;
  f.outcome = outcome;
  f.rank = team->options->launch->rank;
  f.numCases = 1;
  f.caseIdx = atomic_load(&team->job->watch.places[f.rank].caseIdx);
  snprintf(f.what, sizeof f.what, "%s", what);
  epFindingWrite(&f, team->options);
  fprintf(stderr, "trefoil check: %s\n", f.text);
  _exit(1);
}

static void onExit(int status, void *context) {
  (void)context;
  if (!launched) return;
  int rank = launched->options->launch->rank;
  char what[256];
  const char *call = atomic_load(&launched->job->watch.places[rank].call);
  snprintf(what, sizeof what, "rank %d: %s: its process ended with exit code %d in the middle",
           rank, call ? call : "outside of calls", status);
  endRank(EP_CASE_ABORTS, what);
}

/* The places of other ranks are empty here: this rank alone is looked at. */
static void *watchMain(void *argument) {
  ep_check_team_t *team = argument;
  struct timespec pause = {0, 20000000};
  char text[EP_WATCH_TEXT];
  while (!atomic_load(&team->job->finished)) {
    nanosleep(&pause, NULL);
    if (epWatchHang(&team->job->watch, text) >= 0) endRank(EP_CASE_HANGS, text);
  }
  return NULL;
}

/* All batches that were asked for. */
static void runBatches(ep_check_team_t *team, double start) {
  const ep_check_options_t *o = team->options;
  ep_check_job_t *job = team->job;
  int rank = o->launch->rank;
  for (uint64_t batch = o->firstCase / EP_BATCH_CASES; epTeamCut(team, batch); batch++) {
    epMakeGroup(&team->group, &o->choice, batch);
    epBatchEnvironment(&team->group);
    for (int i = 0; i < EP_BATCH_CASES; i++) atomic_store(&job->passed[i], 0);
    atomic_store(&job->watch.places[rank].caseIdx, team->firstCase);
    if (rank == 0 && team->lib->ncclGetUniqueId(&job->id) != ncclSuccess) {
      const ep_check_culprit_t culprit = {EP_CASE_ABORTS,  0, "ncclGetUniqueId", ncclSuccess,
                                          team->firstCase, 1};
      epTeamFail(team, &culprit, "rank 0: ncclGetUniqueId failed");
    }
    epLaunchedBarrier(team);
    reportProgress(team, start);
    if (atomic_load(&job->stop)) return;
    atomic_store(&job->idReady, 1);
    if (epTeamProcess(team, rank)) break;
  }
  epLaunchedBarrier(team); /* of the failure, or that there was none */
}

/* What all ranks found, in words; green is only what was run. */
static void writeOutcome(const ep_check_team_t *team, double start, ep_check_outcome_t *outcome) {
  const ep_check_options_t *o = team->options;
  ep_check_job_t *job = team->job;
  outcome->status = (ep_check_status_t){team->leastOfAll, team->bytesOfAll, team->countedOfAll,
                                        epNow() - start, team->putsOfAll};
  outcome->sharedDevices = team->sharedDevices;
  if (atomic_load(&job->failed)) {
    epFindingWrite(&job->finding, o);
    epFindingAdd(outcome, o, &job->finding);
  }
  epCompareWithAsked(o, atomic_load(&job->timeOver), outcome);
}

/* Runs what was asked for with a watcher beside. */
static void runWatched(ep_check_team_t *team, double start, ep_check_outcome_t *outcome) {
  pthread_t watcher;
  ep_check_job_t *job = team->job;
  static int isHooked;
  epWatchReset(&job->watch, team->options->launch->numRanks, team->limitNs);
  launched = team;
  if (!isHooked++) on_exit(onExit, NULL);
  int saved = epStdoutAway(); /* a library's prints never mix with results */
  int isWatched = pthread_create(&watcher, NULL, watchMain, team) == 0;
  runBatches(team, start);
  launched = NULL;
  epStdoutBack(saved);
  atomic_store(&job->finished, 1);
  if (isWatched) pthread_join(watcher, NULL);
  writeOutcome(team, start, outcome);
}

trefoil_result_t epCheckLaunched(const ep_check_options_t *options, ep_check_outcome_t *outcome) {
  ep_check_options_t o = *options;
  ep_library_t lib;
  static ep_check_comms_t comms;
  ep_launch_t *launch = o.launch;
  EP_CHECK(launch->numRanks <= EP_MAX_RANKS, TREFOIL_INVALID_ARGUMENT,
           "%d processes: random cases have at most %d ranks", launch->numRanks, EP_MAX_RANKS);
  EP_TRY(epLibraryLoad(&lib, &o.paths));
  EP_TRY(epLibraryDevices(&lib, &o.numDevices));
  const char *shares = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  EP_CHECK(launch->localRank < o.numDevices || (shares && atoi(shares)), TREFOIL_INVALID_ARGUMENT,
           "%d ranks on a host with %d GPUs: NCCL gives every rank a GPU of its own, unless "
           "NCCL_MULTI_RANK_GPU_ENABLE=1 lets them share (NCCL 2.32 or newer)",
           launch->numLocal, o.numDevices);
  o.choice.minRanks = o.choice.maxRanks = launch->numRanks;
  ep_check_job_t *job = calloc(1, sizeof *job);
  EP_CHECK(job, TREFOIL_SYSTEM_ERROR, "out of memory");
  double start = epNow();
  ep_check_team_t team = {.lib = &lib,
                          .options = &o,
                          .job = job,
                          .limitNs = o.limitNs ? o.limitNs : epCallLimitNs(o.timeoutNs, lib.isHost),
                          .deadline = o.seconds > 0 ? start + o.seconds : 0,
                          .comms = &comms};
  runWatched(&team, start, outcome);
  free(job);
  return TREFOIL_OK;
}
