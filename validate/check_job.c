/* A worker's life: batches in turn, ranks as threads of it or as processes below it. */
#include "validate/checker.h"

#include "plan/error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* What a group reads from the environment; the worker's own, not the user's. */
void epBatchEnvironment(const ep_check_group_t *g) {
  char number[16];
  snprintf(number, sizeof number, "%d", g->shape.ranksPerNode);
  if (g->shape.ranksPerNode < g->shape.numRanks)
    setenv("NCCL_LSA_TEAM_SIZE", number, 1);
  else
    unsetenv("NCCL_LSA_TEAM_SIZE");
  if (g->partial)
    setenv("NCCL_EP_LL_COMBINE", "partial", 1);
  else
    unsetenv("NCCL_EP_LL_COMBINE");
  if (!g->gpuSubset) unsetenv("NCCL_EP_LL_DISPATCH"); /* on GPUs the user's: check_counts.c */
  unsetenv("NCCL_EP_TIMEOUT_MS");                     /* the group configuration says how long */
}

/* The part of a batch that was asked for; 0: none of it. */
int epTeamCut(ep_check_team_t *team, uint64_t batch) {
  const ep_check_options_t *o = team->options;
  const ep_check_choice_t *choice = &o->choice;
  uint64_t first = batch * EP_BATCH_CASES, end = first + EP_BATCH_CASES;
  if (choice->cells)
    end = first + (uint64_t)choice->cells[batch % (uint64_t)choice->numCells].numCases;
  uint64_t lastEnd = o->numCases ? o->firstCase + o->numCases : UINT64_MAX;
  if (first < o->firstCase) first = o->firstCase;
  if (end > lastEnd) end = lastEnd;
  team->firstCase = first;
  team->numCases = first < end ? end - first : 0;
  return first < end;
}

uint64_t epCutBits(const ep_check_team_t *team) {
  uint64_t n = team->numCases;
  return (n >= 64 ? UINT64_MAX : (1ull << n) - 1) << team->firstCase % EP_BATCH_CASES;
}

static int loadLibrary(ep_check_team_t *team, ep_library_t *lib) {
  const ep_check_options_t *o = team->options;
  if (epLibraryLoad(lib, &o->paths) != TREFOIL_OK) {
    const ep_check_culprit_t culprit = {EP_CASE_ABORTS, -1, "", 0, team->firstCase, 1};
    epTeamFail(team, &culprit, trefoilLastError());
    return 1;
  }
  team->lib = lib;
  team->limitNs = o->limitNs ? o->limitNs : epCallLimitNs(o->timeoutNs, lib->isHost);
  return 0;
}

static int runRankProcess(ep_check_team_t *team, int rank) {
  ep_library_t lib;
  epWatchHooks(&team->job->watch);
  epWatchThread(rank);
  int bad = loadLibrary(team, &lib);
  team->job->watch.places[rank].limitNs = team->limitNs;
  if (!bad) bad = epTeamProcess(team, rank);
  atomic_store(&team->job->rankDone[rank], bad ? EP_RANK_TOLD : EP_RANK_DONE);
  return bad;
}

/* How many cases a finding at this place stands for. */
static uint64_t casesOf(const ep_check_team_t *team, ep_place_t *place) {
  int phase = atomic_load(&place->phase);
  return phase == EP_PHASE_OPENING ? team->numCases : phase == EP_PHASE_CASE;
}

/* The processes of a batch's ranks. */
typedef struct rank_processes {
  ep_check_team_t *team;
  pid_t pids[EP_MAX_RANKS]; /* 0: has ended */
  int left;
  int isBad;      /* one did not do its part */
  int mute;       /* one that ended without a word, or -1: */
  int muteStatus; /* its status */
} rank_processes_t;

/* One has ended. */
static void takeEnded(rank_processes_t *p, pid_t pid, int status) {
  for (int r = 0; r < p->team->group.shape.numRanks; r++) {
    if (p->pids[r] != pid) continue;
    p->pids[r] = 0;
    p->left--;
    int done = atomic_load(&p->team->job->rankDone[r]);
    p->isBad |= status != 0 || done != EP_RANK_DONE;
    if (done == EP_RANK_AT_WORK && p->mute < 0) {
      p->mute = r;
      p->muteStatus = status;
    }
  }
}

/* Of a rank that crashed the others see that it is gone, and may be faster to say so. */
static void takeMute(rank_processes_t *p) {
  ep_check_job_t *job = p->team->job;
  char what[EP_WATCH_TEXT];
  ep_place_t *place = &job->watch.places[p->mute];
  epWatchEnd(&job->watch, p->muteStatus, p->mute, what);
  const ep_check_culprit_t culprit = {.outcome = EP_CASE_ABORTS,
                                      .rank = p->mute,
                                      .call = atomic_load(&place->call),
                                      .caseIdx = atomic_load(&place->caseIdx),
                                      .numCases = casesOf(p->team, place)};
  atomic_store(&job->failing, 0);
  epTeamFail(p->team, &culprit, what);
}

/* The first that ends badly ends them all: they would wait for it. */
static int runProcesses(ep_check_team_t *team) {
  ep_check_job_t *job = team->job;
  int R = team->group.shape.numRanks, status;
  rank_processes_t p = {.team = team, .left = R, .mute = -1};
  atomic_store(&job->idReady, 0);
  atomic_store(&job->numArrived, 0);
  for (int r = 0; r < R; r++) {
    atomic_store(&job->rankDone[r], EP_RANK_AT_WORK);
    p.pids[r] = epWorkerFork(0);
    if (p.pids[r] == 0) _exit(runRankProcess(team, r));
  }
  while (p.left > 0 && !p.isBad) {
    pid_t pid = waitpid(-1, &status, 0);
    if (pid < 0) return 1;
    takeEnded(&p, pid, status);
  }
  if (!p.isBad) return 0;
  struct timespec pause = {0, 5000000};
  for (int i = 0; i < 20 && p.left > 0; i++) {
    pid_t pid = waitpid(-1, &status, WNOHANG);
    if (pid > 0)
      takeEnded(&p, pid, status);
    else
      nanosleep(&pause, NULL);
  }
  if (p.mute >= 0)
    takeMute(&p);
  else
    epTeamAwaitHanging(team);
  for (int r = 0; r < R; r++)
    if (p.pids[r] > 0) kill(p.pids[r], SIGKILL);
  while (waitpid(-1, &status, 0) > 0) continue;
  return 1;
}

/* A batch that was begun before is gone on with; what has its outcome stays. */
static void beginBatch(ep_check_team_t *team, uint64_t batch) {
  ep_check_job_t *job = team->job;
  if (!atomic_load(&job->started) || atomic_load(&job->batch) != batch) {
    atomic_store(&job->settled, 0);
    atomic_store(&job->batch, batch);
    atomic_store(&job->started, 1);
  }
  uint64_t settled = atomic_load(&job->settled), first = team->firstCase;
  while (settled >> first % EP_BATCH_CASES & 1 && first + 1 < team->firstCase + team->numCases)
    first++;
  for (int i = 0; i < EP_BATCH_CASES; i++) {
    atomic_store(&job->passed[i], 0);
    atomic_store(&job->open[i], 0);
  }
  epMakeGroup(&team->group, &team->options->choice, batch);
  epWatchReset(&job->watch, team->group.shape.numRanks, team->limitNs);
  for (int r = 0; r < team->group.shape.numRanks; r++)
    atomic_store(&job->watch.places[r].caseIdx, first);
  epBatchEnvironment(&team->group);
}

int epCheckJob(const ep_check_options_t *o, ep_check_job_t *job, const ep_job_range_t *range) {
  ep_library_t lib;
  static ep_check_comms_t comms;
  ep_check_team_t team = {.options = o, .job = job, .deadline = range->deadline};
  team.firstCase = o->firstCase;
  if (o->choice.gpuSubset) team.comms = &comms;
  if (!o->processes) {
    epWatchHooks(&job->watch);
    if (loadLibrary(&team, &lib)) return 1;
  }
  for (uint64_t batch = range->firstBatch;; batch += (uint64_t)range->numJobs) {
    int isLate = range->deadline > 0 && epNow() > range->deadline;
    if (isLate) atomic_store(&job->timeOver, 1);
    if (isLate || !epTeamCut(&team, batch)) break;
    beginBatch(&team, batch);
    if (o->processes ? runProcesses(&team) : epTeamThreads(&team)) return 1; /* threads go on */
  }
  epTeamFree(&team);
  atomic_store(&job->finished, 1);
  return 0;
}
