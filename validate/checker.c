/* Jobs: processes that take batches in turn; the parent watches, sums up, and survives crashes. */
#include "validate/checker.h"

#include "plan/error.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* What a group reads from the environment; the job's own, never the user's. */
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
  unsetenv("NCCL_EP_TIMEOUT_MS"); /* the group configuration says how long */
}

/* The part of a batch that was asked for; 0: none of it. */
int epTeamCut(ep_check_team_t *team, uint64_t batch) {
  const ep_check_options_t *o = team->options;
  uint64_t first = batch * EP_BATCH_CASES, end = first + EP_BATCH_CASES;
  uint64_t lastEnd = o->numCases ? o->firstCase + o->numCases : UINT64_MAX;
  if (first < o->firstCase) first = o->firstCase;
  if (end > lastEnd) end = lastEnd;
  team->firstCase = first;
  team->numCases = first < end ? end - first : 0;
  return first < end;
}

/* A child that does not outlive its parent. */
static pid_t forkChild(void) {
  pid_t parent = getpid(), pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
  }
  return pid;
}

static void describeEnd(ep_check_team_t *team, int status, const char *who) {
  char what[256];
  if (WIFSIGNALED(status))
    snprintf(what, sizeof what, "%s was ended by signal %d (%s)", who, WTERMSIG(status),
             strsignal(WTERMSIG(status)));
  else
    snprintf(what, sizeof what, "%s ended with code %d", who, WEXITSTATUS(status));
  epTeamFail(team, NULL, atomic_load(&team->job->currentCase), what);
}

static int loadLibrary(ep_check_team_t *team, ep_library_t *lib) {
  if (epLibraryLoad(lib, &team->options->paths) != TREFOIL_OK) {
    epTeamFail(team, NULL, team->firstCase, trefoilLastError());
    return 1;
  }
  team->lib = lib;
  return 0;
}

static int runProcesses(ep_check_team_t *team) {
  int R = team->group.shape.numRanks, bad = 0;
  atomic_store(&team->job->idReady, 0);
  atomic_store(&team->job->numArrived, 0);
  pid_t pids[EP_MAX_RANKS];
  for (int r = 0; r < R; r++) {
    pids[r] = forkChild();
    if (pids[r] != 0) continue;
    ep_library_t lib;
    _exit(loadLibrary(team, &lib) || epTeamProcess(team, r));
  }
  /* The first that ends badly ends them all: they would wait for it. */
  for (int left = R; left > 0; left--) {
    int status = 1;
    pid_t pid = waitpid(-1, &status, 0);
    if (pid < 0) return 1;
    if (status == 0 || bad) continue;
    bad = 1;
    for (int r = 0; r < R; r++) {
      char who[64];
      snprintf(who, sizeof who, "the process of rank %d", r);
      if (pids[r] == pid && !atomic_load(&team->job->failing)) describeEnd(team, status, who);
      if (pids[r] != pid) kill(pids[r], SIGKILL);
    }
  }
  return bad;
}

/* A job's whole life; returns its exit code. */
static int runJob(const ep_check_options_t *o, ep_check_job_t *job, int jobIdx, int numJobs,
                  double deadline) {
  ep_library_t lib;
  static ep_check_comms_t comms;
  ep_check_team_t team = {.options = o, .job = job, .deadline = deadline};
  team.firstCase = o->firstCase;
  if (o->choice.gpuSubset) team.comms = &comms;
  if (!o->processes && loadLibrary(&team, &lib)) return 1;
  uint64_t batch = o->firstCase / EP_BATCH_CASES + (uint64_t)jobIdx;
  int failed = 0;
  for (; !failed; batch += (uint64_t)numJobs) {
    if (atomic_load(&job->stop) || (deadline > 0 && epNow() > deadline)) break;
    if (!epTeamCut(&team, batch)) break;
    epMakeGroup(&team.group, &o->choice, batch);
    epBatchEnvironment(&team.group);
    failed = o->processes ? runProcesses(&team) : epTeamThreads(&team);
  }
  if (!failed) epTeamFree(&team); /* else threads may be at work still */
  return failed;
}

static void sumUp(const ep_check_job_t *jobs, int numJobs, double start, ep_check_status_t *s) {
  *s = (ep_check_status_t){.seconds = epNow() - start};
  for (int i = 0; i < numJobs; i++) {
    s->cases += atomic_load(&((ep_check_job_t *)jobs)[i].cases);
    s->bytes += atomic_load(&((ep_check_job_t *)jobs)[i].bytes);
    s->counted += atomic_load(&((ep_check_job_t *)jobs)[i].counted);
  }
}

/* Waits for the jobs; a job that ends badly stops the others. */
static void watchJobs(const ep_check_options_t *o, ep_check_job_t *jobs, const pid_t *pids,
                      int numJobs, double start, ep_check_status_t *status) {
  int running = numJobs;
  while (running > 0) {
    int code = 0;
    pid_t pid = waitpid(-1, &code, WNOHANG);
    if (pid == 0) {
      struct timespec pause = {0, 5000000};
      nanosleep(&pause, NULL);
      sumUp(jobs, numJobs, start, status);
      if (o->progress) o->progress(o->context, status);
      continue;
    }
    if (pid < 0 && errno != EINTR) break;
    for (int i = 0; i < numJobs; i++) {
      if (pids[i] != pid) continue;
      running--;
      if (code == 0) continue;
      if (!atomic_load(&jobs[i].failed)) {
        ep_check_team_t team = {.options = o, .job = &jobs[i]};
        uint64_t at = atomic_load(&jobs[i].currentCase);
        epMakeGroup(&team.group, &o->choice, at / EP_BATCH_CASES);
        atomic_store(&jobs[i].failing, 0);
        describeEnd(&team, code, "the checking process");
      }
      for (int j = 0; j < numJobs; j++) atomic_store(&jobs[j].stop, 1);
    }
  }
  sumUp(jobs, numJobs, start, status);
}

trefoil_result_t epCheckRun(const ep_check_options_t *options, ep_check_outcome_t *outcome) {
  ep_check_options_t o = *options;
  int numJobs = o.jobs < 1 ? 1 : o.jobs;
  EP_CHECK(numJobs <= EP_MAX_JOBS, TREFOIL_INVALID_ARGUMENT, "%d jobs: at most %d", numJobs,
           EP_MAX_JOBS);
  EP_CHECK(o.choice.maxRanks <= EP_MAX_RANKS, TREFOIL_INVALID_ARGUMENT, "%d ranks: at most %d",
           o.choice.maxRanks, EP_MAX_RANKS);
  EP_CHECK(o.numCases || o.seconds > 0, TREFOIL_INVALID_ARGUMENT,
           "neither a number of cases nor a time is given");
  if (!o.timeoutNs) o.timeoutNs = 20000000000u;
  /* a device a rank: who frees memory waits for all work on its device, another rank's too */
  epLibraryHostDevices(EP_MAX_RANKS);
  if (o.launch) return epCheckLaunched(&o, outcome);
  int devices = 0;
  EP_TRY(epLibraryProbe(&o.paths, &devices));
  if (!o.numDevices) o.numDevices = devices;
  if (!o.choice.maxRanks) o.choice.maxRanks = o.numDevices < 8 ? o.numDevices : 8;
  EP_CHECK(o.choice.maxRanks <= o.numDevices, TREFOIL_INVALID_ARGUMENT,
           "%d ranks on %d GPUs: every rank needs a GPU of its own", o.choice.maxRanks,
           o.numDevices);
  size_t bytes = sizeof(ep_check_job_t) * (size_t)numJobs;
  ep_check_job_t *jobs =
      mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  EP_CHECK(jobs != MAP_FAILED, TREFOIL_SYSTEM_ERROR, "out of memory for %d jobs", numJobs);
  double start = epNow(), deadline = o.seconds > 0 ? start + o.seconds : 0;
  pid_t pids[EP_MAX_JOBS];
  for (int i = 0; i < numJobs; i++) {
    atomic_store(&jobs[i].currentCase, o.firstCase);
    pids[i] = forkChild();
    if (pids[i] == 0) _exit(runJob(&o, &jobs[i], i, numJobs, deadline));
  }
  memset(outcome, 0, sizeof *outcome);
  watchJobs(&o, jobs, pids, numJobs, start, &outcome->status);
  for (int i = 0; i < numJobs; i++) {
    if (!atomic_load(&jobs[i].failed) ||
        (outcome->failed && outcome->failedCase < jobs[i].failedCase))
      continue;
    outcome->failed = 1;
    outcome->failedCase = jobs[i].failedCase;
    memcpy(outcome->text, jobs[i].text, sizeof outcome->text);
  }
  munmap(jobs, bytes);
  return TREFOIL_OK;
}
