/* The parent: starts workers, watches them, tells what they found and what became of them, and starts
 * new ones behind a case that ended one. */
#include "validate/checker.h"

#include "plan/error.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef struct parent {
  const ep_check_options_t *options;
  ep_check_outcome_t *outcome;
  ep_check_job_t *jobs; /* [numJobs], shared */
  pid_t pids[EP_MAX_JOBS];
  int numJobs, running;
  double start, deadline;
} parent_t;

/* ---- Workers ------------------------------------------------------------------------------------ */

static void startWorker(parent_t *p, int i, uint64_t firstBatch) {
  ep_check_job_t *job = &p->jobs[i];
  const ep_job_range_t range = {p->numJobs, firstBatch, p->deadline};
  atomic_store(&job->failing, 0);
  atomic_store(&job->failed, 0);
  atomic_store(&job->finished, 0);
  atomic_store(&job->stop, 0);
  epWatchReset(&job->watch, 0, 0);
  p->pids[i] = epWorkerFork(1);
  if (p->pids[i] == 0) _exit(epCheckJob(p->options, job, &range));
  p->running += p->pids[i] > 0;
}

static void stopAll(parent_t *p) {
  for (int i = 0; i < p->numJobs; i++) {
    if (p->pids[i] > 0) epWorkerKill(p->pids[i]);
    p->pids[i] = 0;
  }
  p->running = 0;
}

/* Goes on behind what has its outcome, if more is asked for. */
static void goOn(parent_t *p, int i) {
  ep_check_job_t *job = &p->jobs[i];
  const ep_check_options_t *o = p->options;
  int most = o->maxFindings ? o->maxFindings : 1;
  if (most > 0 && p->outcome->numFindings >= most) {
    stopAll(p);
    return;
  }
  if (!atomic_load(&job->started)) return; /* it cannot even be loaded */
  ep_check_team_t team = {.options = o};
  uint64_t batch = atomic_load(&job->batch);
  epTeamCut(&team, batch);
  uint64_t asked = epCutBits(&team);
  if ((atomic_load(&job->settled) & asked) == asked) batch += (uint64_t)p->numJobs;
  startWorker(p, i, batch);
}

/* ---- Findings ----------------------------------------------------------------------------------- */

static int isSettled(const ep_check_job_t *job, uint64_t caseIdx) {
  return atomic_load(&((ep_check_job_t *)job)->settled) >> caseIdx % EP_BATCH_CASES & 1;
}

/* The case a finding is about has no outcome yet: the first such from where the rank was. */
static void settle(parent_t *p, ep_check_job_t *job, ep_check_finding_t *f, ep_phase_t phase) {
  ep_check_team_t team = {.options = p->options};
  if (!atomic_load(&job->started)) return;
  epTeamCut(&team, atomic_load(&job->batch));
  uint64_t end = team.firstCase + team.numCases, open = 0;
  for (uint64_t i = team.firstCase; i < end; i++) open += !isSettled(job, i);
  if (open == 0) {
    f->numCases = 0;
    return;
  }
  if (f->caseIdx < team.firstCase || f->caseIdx >= end) f->caseIdx = team.firstCase;
  if (isSettled(job, f->caseIdx))
    for (f->caseIdx = team.firstCase; isSettled(job, f->caseIdx);) f->caseIdx++;
  f->numCases = phase == EP_PHASE_OPENING ? open : 1;
  uint64_t bits =
      phase == EP_PHASE_OPENING ? epCutBits(&team) : 1ull << f->caseIdx % EP_BATCH_CASES;
  atomic_fetch_or(&job->settled, bits);
}

static void addFinding(parent_t *p, ep_check_job_t *job, ep_check_finding_t *f, ep_phase_t phase) {
  settle(p, job, f, phase);
  epFindingWrite(f, p->options);
  epFindingAdd(p->outcome, p->options, f);
}

static void takeCall(ep_check_finding_t *f, const ep_place_t *place) {
  const char *call = atomic_load(&((ep_place_t *)place)->call);
  snprintf(f->call, sizeof f->call, "%s", call ? call : "");
  f->caseIdx = atomic_load(&((ep_place_t *)place)->caseIdx);
}

static ep_phase_t phaseOf(const ep_place_t *place) {
  return (ep_phase_t)atomic_load(&((ep_place_t *)place)->phase);
}

/* A worker that hangs is ended; 1: so it was. */
static int endHanging(parent_t *p, int i) {
  ep_check_job_t *job = &p->jobs[i];
  char text[EP_WATCH_TEXT];
  ep_check_finding_t f = {.outcome = EP_CASE_HANGS};
  if (!atomic_load(&job->started)) return 0;
  f.rank = epWatchHang(&job->watch, text);
  if (f.rank < 0) return 0;
  const ep_place_t *place = &job->watch.places[f.rank];
  ep_phase_t phase = phaseOf(place);
  takeCall(&f, place);
  snprintf(f.what, sizeof f.what, "%s", text);
  if (atomic_load(&job->failed)) /* the ranks that waited for it */
    snprintf(f.what, sizeof f.what, "%.1000s; and %.1000s", text, job->finding.what);
  epWorkerKill(p->pids[i]);
  addFinding(p, job, &f, phase);
  return 1;
}

static void takeEnd(parent_t *p, int i, int status) {
  ep_check_job_t *job = &p->jobs[i];
  if (status == 0 && atomic_load(&job->finished)) return;
  ep_check_finding_t f = {.outcome = EP_CASE_ABORTS, .rank = -1, .caseIdx = p->options->firstCase};
  if (atomic_load(&job->failed)) {
    f = job->finding;
    ep_phase_t phase = f.numCases > 1    ? EP_PHASE_OPENING
                       : f.numCases == 1 ? EP_PHASE_CASE
                                         : EP_PHASE_CLOSING;
    addFinding(p, job, &f, phase);
  } else {
    char text[EP_WATCH_TEXT];
    f.rank = epWatchEnd(&job->watch, status, -1, text);
    const ep_place_t *place = f.rank >= 0 ? &job->watch.places[f.rank] : epWatchFirst(&job->watch);
    if (atomic_load(&job->started)) takeCall(&f, place);
    snprintf(f.what, sizeof f.what, "%s", text);
    addFinding(p, job, &f, phaseOf(place));
  }
  goOn(p, i);
}

/* ---- The run ------------------------------------------------------------------------------------ */

static void sumUp(const parent_t *p, ep_check_status_t *s) {
  *s = (ep_check_status_t){.seconds = epNow() - p->start};
  for (int i = 0; i < p->numJobs; i++) {
    s->cases += atomic_load(&p->jobs[i].cases);
    s->bytes += atomic_load(&p->jobs[i].bytes);
    s->counted += atomic_load(&p->jobs[i].counted);
    const ep_puts_t puts = epPutsLoad(p->jobs[i].puts, p->jobs[i].leastPuts);
    epPutsAdd(&s->puts, &puts);
  }
}

static void watchWorkers(parent_t *p) {
  const ep_check_options_t *o = p->options;
  while (p->running > 0) {
    int isIdle = 1;
    for (int i = 0; i < p->numJobs; i++) {
      int status = 0;
      if (p->pids[i] <= 0) continue;
      pid_t pid = waitpid(p->pids[i], &status, WNOHANG);
      if (pid == 0 && !endHanging(p, i)) continue;
      isIdle = 0;
      p->running--;
      p->pids[i] = 0;
      if (pid == 0)
        goOn(p, i);
      else
        takeEnd(p, i, status);
    }
    if (o->interrupted && *o->interrupted) {
      p->outcome->interrupted = *o->interrupted;
      stopAll(p);
    }
    if (!isIdle) continue;
    struct timespec pause = {0, 5000000};
    nanosleep(&pause, NULL);
    sumUp(p, &p->outcome->status);
    if (o->progress) o->progress(o->context, &p->outcome->status);
  }
  sumUp(p, &p->outcome->status);
}

static trefoil_result_t checkOptions(ep_check_options_t *o) {
  EP_CHECK(o->jobs <= EP_MAX_JOBS, TREFOIL_INVALID_ARGUMENT, "%d jobs: at most %d", o->jobs,
           EP_MAX_JOBS);
  EP_CHECK(o->choice.maxRanks <= EP_MAX_RANKS, TREFOIL_INVALID_ARGUMENT, "%d ranks: at most %d",
           o->choice.maxRanks, EP_MAX_RANKS);
  EP_CHECK(o->numCases || o->seconds > 0, TREFOIL_INVALID_ARGUMENT,
           "neither a number of cases nor a time is given");
  EP_CHECK(!o->outcomes || o->numCases, TREFOIL_INVALID_ARGUMENT,
           "outcomes are of a number of cases");
  if (!o->timeoutNs) o->timeoutNs = 20000000000u;
  return TREFOIL_OK;
}

static void *shareMemory(size_t bytes) {
  void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return p == MAP_FAILED ? NULL : p;
}

static trefoil_result_t runJobs(ep_check_options_t *o, ep_check_outcome_t *outcome) {
  parent_t p = {.options = o, .outcome = outcome, .numJobs = o->jobs < 1 ? 1 : o->jobs};
  uint8_t *told = o->outcomes;
  size_t bytes = sizeof *p.jobs * (size_t)p.numJobs;
  p.jobs = shareMemory(bytes);
  if (told) o->outcomes = shareMemory(o->numCases);
  EP_CHECK(p.jobs && !told == !o->outcomes, TREFOIL_SYSTEM_ERROR, "out of memory for %d jobs",
           p.numJobs);
  p.start = epNow();
  p.deadline = o->seconds > 0 ? p.start + o->seconds : 0;
  for (int i = 0; i < p.numJobs; i++)
    startWorker(&p, i, o->firstCase / EP_BATCH_CASES + (uint64_t)i);
  int started = p.running;
  watchWorkers(&p);
  int isShort = 0;
  for (int i = 0; i < p.numJobs; i++) isShort |= atomic_load(&p.jobs[i].timeOver);
  epCompareWithAsked(o, isShort, outcome);
  if (told) {
    memcpy(told, o->outcomes, o->numCases);
    munmap(o->outcomes, o->numCases);
  }
  munmap(p.jobs, bytes);
  EP_CHECK(started == p.numJobs, TREFOIL_SYSTEM_ERROR, "a process could not be started");
  return TREFOIL_OK;
}

/* Processes: in one, cudaFree of a rank waits for the kernels of all that share its device. */
static void shareDevices(ep_check_options_t *o, ep_check_outcome_t *outcome) {
  o->processes = 1;
  outcome->sharedDevices = o->numDevices;
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 0); /* NCCL 2.32; an older one refuses */
}

trefoil_result_t epCheckRun(const ep_check_options_t *options, ep_check_outcome_t *outcome) {
  ep_check_options_t o = *options;
  EP_TRY(checkOptions(&o));
  memset(outcome, 0, sizeof *outcome);
  /* a device a rank: freeing memory waits for all work on its device, another rank's too */
  epLibraryHostDevices(EP_MAX_RANKS);
  if (o.launch) return epCheckLaunched(&o, outcome);
  ep_library_facts_t facts;
  EP_TRY(epLibraryAsk(&o.paths, &facts));
  EP_CHECK(facts.hasGrad || !(o.choice.modes & EP_MODE_A2SGD), TREFOIL_INVALID_ARGUMENT,
           "%s has no calls of A2SGD (trefoil/a2sgd.h)", o.paths.library);
  if (!o.numDevices) o.numDevices = facts.numDevices;
  if (!o.choice.maxRanks)
    o.choice.maxRanks = o.numDevices < EP_CHECK_MOST_RANKS ? o.numDevices : EP_CHECK_MOST_RANKS;
  if (o.choice.maxRanks > o.numDevices) shareDevices(&o, outcome);
  return runJobs(&o, outcome);
}
