/* A real shape at work: the ranks' life, phase by phase, with a barrier between phases. A rank that fails
 * says so and goes on to the barriers; the others have GRACE_NS to come there, too, or else the parent ends
 * them, because their calls would wait for the failed rank. All of it in a child process, whose
 * results lie in shared memory; several shapes of the same ranks share their communicator. */
#include "validate/real_work.h"

#include "plan/error.h"
#include "validate/checker.h"
#include "validate/cupti_times.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static trefoil_result_t dispatchRank(real_rank_t *rank) {
  EP_TRY(epRealDispatch(rank));
  return epRealSync(rank);
}

static trefoil_result_t combineRank(real_rank_t *rank) {
  EP_TRY(epRealCombine(rank));
  return epRealSync(rank);
}

/* Plain copies by all ranks at once: what memory here can do. */
static trefoil_result_t copyRank(real_rank_t *rank) {
  const ep_library_t *lib = &rank->run->lib;
  size_t bytes = rank->tokens.bytes;
  if (bytes == 0) return TREFOIL_OK;
  rank->doing = "cudaMemcpyAsync";
  for (size_t at = 0; at + bytes <= rank->received.bytes && at < 8 * bytes; at += bytes)
    EP_REAL_CUDA(rank, lib->cudaMemcpyAsync((uint8_t *)rank->received.data + at, rank->tokens.data,
                                            bytes, cudaMemcpyDeviceToDevice, rank->stream));
  return epRealSync(rank);
}

static uint64_t copyBytes(const real_rank_t *rank) {
  size_t n = rank->tokens.bytes ? rank->received.bytes / rank->tokens.bytes : 0;
  return (uint64_t)rank->tokens.bytes * (n > 8 ? 8 : n);
}

static void timeAgain(real_rank_t *rank) {
  real_t *run = rank->run;
  ep_real_result_t *result = run->result;
  int first = rank->rank == 0;
  double best = 0;
  for (int i = 0; i < 5; i++) {
    double s = epRealPhase(rank, copyRank, "copy");
    double rate = s > 0 ? (double)copyBytes(rank) * run->options->shape.numRanks / s : 0;
    if (rate > best) best = rate;
  }
  if (first) result->copyRate = best;
  for (int i = 0; i < run->options->repeats && i < EP_REAL_MAX_REPEATS; i++) {
    double d = epRealPhase(rank, dispatchRank, "dispatch");
    double c = epRealHasCombine(run->options) ? epRealPhase(rank, combineRank, "combine") : 0;
    if (atomic_load(&run->failed)) return;
    if (!first) continue;
    result->dispatchTimes[i] = d;
    result->combineTimes[i] = c;
    result->numRepeats = i + 1;
  }
}

/* Of this rank since the group was made. */
static trefoil_result_t addPuts(real_rank_t *rank) {
  real_t *run = rank->run;
  const trefoil_shape_t *s = &run->options->shape;
  ep_puts_t *puts = &run->puts[rank->rank];
  if (s->ranksPerNode == s->numRanks) return TREFOIL_OK;
  rank->doing = "ncclEpReadPuts";
  ncclResult_t rc = epPutsRead(&run->lib, rank->group, s->numRanks, rank->stream, puts->counted);
  if (rc == ncclInvalidUsage) return TREFOIL_OK;
  EP_REAL_EP(rank, rc);
  pthread_mutex_lock(&run->mutex);
  epPutsAdd(&run->result->puts, puts);
  pthread_mutex_unlock(&run->mutex);
  return epPutsCheck(puts);
}

/* Everything once, compared. */
static void checkRank(real_rank_t *rank) {
  ep_real_result_t *result = rank->run->result;
  double s[6];
  epRealPhase(rank, epRealOpen, "set-up");
  s[0] = epRealPhase(rank, epRealUpdate, "Update");
  s[1] = epRealPhase(rank, dispatchRank, "Dispatch");
  s[2] = epRealPhase(rank, epRealCompareDispatch, "comparing the dispatch");
  s[3] = s[4] = 0;
  if (epRealHasCombine(rank->run->options)) {
    s[3] = epRealPhase(rank, combineRank, "Combine");
    s[4] = epRealPhase(rank, epRealCompareCombine, "comparing the combine");
  }
  epRealPhase(rank, epRealCompareInputs, "comparing the inputs");
  epRealPhase(rank, addPuts, "counting puts");
  if (rank->rank > 0) return;
  result->updateS = s[0];
  result->dispatchS = s[1];
  result->combineS = s[3];
  result->referenceS = s[2] + s[4];
}

static void *rankMain(void *argument) {
  real_rank_t *rank = argument;
  real_t *run = rank->run;
  epWatchThread(rank->rank);
  checkRank(rank);
  if (run->twin) {
    real_rank_t *both[2] = {rank, &run->twin->ranks[rank->rank]};
    checkRank(both[1]);
    if (!atomic_load(&run->failed) && !atomic_load(&run->twin->failed)) epPairMeasure(both);
    epRealPhase(both[1], epRealClose, "closing");
  } else if (run->options->repeats > 0 && !atomic_load(&run->failed)) {
    if (run->lib.isHost)
      timeAgain(rank);
    else
      epGpuMeasure(rank);
  }
  epRealPhase(rank, epRealClose, "closing");
  return NULL;
}

/* What a process keeps from run to run. */
typedef struct keep {
  ep_library_t lib;
  ncclUniqueId id;
  ncclComm_t comms[EP_REAL_MAX_RANKS];
  ep_gpu_peers_t peers[EP_GPU_MAX_RANKS];
  struct keep *other;  /* options.against */
  char noKernels[200]; /* why CUPTI tells no times, or "" */
} keep_t;

static trefoil_result_t openProcess(keep_t *keep, const ep_real_options_t *o) {
  int R = o->shape.numRanks, devices = 0;
  EP_TRY(epLibraryLoad(&keep->lib, &o->paths));
  if (o->against && !keep->lib.isHost && epCuptiOpen() != TREFOIL_OK)
    snprintf(keep->noKernels, sizeof keep->noKernels, "%s", trefoilLastError());
  EP_TRY(epLibraryDevices(&keep->lib, &devices));
  EP_CHECK(devices >= R, TREFOIL_INVALID_ARGUMENT,
           "%d ranks on %d GPUs: every rank needs a GPU of its own", R, devices);
  EP_CHECK(keep->lib.ncclGetUniqueId(&keep->id) == ncclSuccess, TREFOIL_SYSTEM_ERROR,
           "ncclGetUniqueId failed");
  if (!keep->lib.isHost && o->repeats > 0) EP_TRY(epGpuTeam(R, keep->peers));
  if (!o->against) return TREFOIL_OK;
  keep->other = calloc(1, sizeof *keep->other);
  EP_CHECK(keep->other, TREFOIL_SYSTEM_ERROR, "out of memory");
  ep_library_paths_t paths = o->paths;
  paths.library = o->against;
  EP_TRY(epLibraryLoad(&keep->other->lib, &paths));
  EP_CHECK(keep->other->lib.ncclGetUniqueId(&keep->other->id) == ncclSuccess, TREFOIL_SYSTEM_ERROR,
           "ncclGetUniqueId failed");
  return TREFOIL_OK;
}

/* What all ranks know, and a place for each of them. */
static trefoil_result_t openRanks(real_t *run) {
  int R = run->options->shape.numRanks;
  EP_TRY(epRealRouting(run));
  EP_TRY(epRealTraffic(run));
  run->ranks = calloc((size_t)R, sizeof *run->ranks);
  EP_CHECK(run->ranks, TREFOIL_SYSTEM_ERROR, "out of memory for the ranks");
  pthread_barrier_init(&run->barrier, NULL, (unsigned)R);
  pthread_mutex_init(&run->mutex, NULL);
  pthread_cond_init(&run->turn, NULL);
  for (int r = 0; r < R; r++)
    run->ranks[r] = (real_rank_t){.run = run, .rank = r, .place = &run->watch->places[r]};
  return TREFOIL_OK;
}

static void closeRanks(real_t *run) {
  for (int r = 0; r < run->options->shape.numRanks; r++) {
    free(run->ids[r]);
    free(run->weights[r]);
    free(run->tokens[r]);
    free(run->scales[r]);
  }
  free(run->ranks);
  run->result->ok = !atomic_load(&run->failed);
  run->result->rowsMoved = atomic_load(&run->rowsMoved);
  run->result->sumsMoved = atomic_load(&run->sumsMoved);
  run->result->outcome = !run->result->ok                                   ? EP_CASE_WRONG
                         : run->result->rowsMoved || run->result->sumsMoved ? EP_CASE_ORDER_OPEN
                                                                            : EP_CASE_AGREES;
  run->result->bytesCompared = atomic_load(&run->compared);
}

/* The twin's outcome is the pair's. */
static void joinTwin(real_t *run) {
  ep_real_result_t *a = run->result, *b = run->twin->result;
  ep_pair_times_t *t = &a->pair;
  t->moved[0] = a->rowsMoved || a->sumsMoved;
  t->moved[1] = b->rowsMoved || b->sumsMoved;
  t->culprit = !a->ok ? 0 : !b->ok ? 1 : -1;
  if (a->ok && !b->ok) {
    a->ok = 0;
    a->outcome = b->outcome;
    memcpy(a->difference, b->difference, sizeof a->difference);
  }
  a->bytesCompared += b->bytesCompared;
}

static trefoil_result_t runRanks(real_t *run) {
  int R = run->options->shape.numRanks;
  pthread_t threads[EP_REAL_MAX_RANKS];
  EP_TRY(openRanks(run));
  if (run->twin) EP_TRY(openRanks(run->twin));
  for (int r = 0; r < R; r++)
    EP_CHECK(!pthread_create(&threads[r], NULL, rankMain, &run->ranks[r]), TREFOIL_SYSTEM_ERROR,
             "a thread could not be started");
  for (int r = 0; r < R; r++) pthread_join(threads[r], NULL);
  if (run->twin) closeRanks(run->twin);
  closeRanks(run);
  if (run->twin) joinTwin(run);
  return TREFOIL_OK;
}

/* What the child shares with its parent. */
typedef struct shared {
  ep_watch_t watch;
  _Atomic uint64_t numSteps;
  _Atomic int numDone;  /* runs that took place */
  _Atomic int atWork;   /* ranks are calling the library */
  _Atomic int failed;   /* the run at work has */
  _Atomic int finished; /* all that was asked for, or why not is told */
  char failure[1024];
  ep_real_result_t results[];
} shared_t;

/* What a group reads from the environment. */
static void setEnvironment(const ep_real_options_t *o) {
  char number[16];
  snprintf(number, sizeof number, "%d", o->shape.ranksPerNode);
  if (o->shape.ranksPerNode < o->shape.numRanks)
    setenv("NCCL_LSA_TEAM_SIZE", number, 1);
  else
    unsetenv("NCCL_LSA_TEAM_SIZE");
  if (o->partial)
    setenv("NCCL_EP_LL_COMBINE", "partial", 1);
  else
    unsetenv("NCCL_EP_LL_COMBINE");
}

/* The same shape on the other library. */
static trefoil_result_t makeTwin(real_t *run, keep_t *keep) {
  typedef struct twin {
    real_t run;
    ep_real_options_t options;
    ep_real_result_t result;
  } twin_t;
  twin_t *t = calloc(1, sizeof *t);
  EP_CHECK(t, TREFOIL_SYSTEM_ERROR, "out of memory");
  t->options = *run->options;
  t->options.paths.library = run->options->against;
  t->options.open = run->options->againstOpen;
  t->run = *run;
  t->run.options = &t->options;
  t->run.result = &t->result;
  t->run.lib = keep->other->lib;
  t->run.id = keep->other->id;
  t->run.comms = keep->other->comms;
  t->run.pair = run->pair = &run->result->pair;
  memcpy(run->pair->noKernels, keep->noKernels, sizeof run->pair->noKernels);
  run->pair->culprit = -1;
  run->twin = &t->run;
  return TREFOIL_OK;
}

static trefoil_result_t runAll(const ep_real_options_t *options, int numRuns, shared_t *shared) {
  keep_t *keep = calloc(1, sizeof *keep);
  EP_CHECK(keep, TREFOIL_SYSTEM_ERROR, "out of memory");
  epLibraryHostDevices(options->shape.numRanks);
  /* nothing is loaded while a peer waits for this rank in a kernel */
  if (options->against) setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  setEnvironment(options);
  EP_TRY(openProcess(keep, options));
  double start = epNow();
  for (int i = 0; i < numRuns; i++) {
    if (options->seconds > 0 && epNow() - start > options->seconds) break;
    real_t *run = calloc(1, sizeof *run);
    EP_CHECK(run, TREFOIL_SYSTEM_ERROR, "out of memory");
    run->options = &options[i];
    run->result = &shared->results[i];
    run->lib = keep->lib;
    run->id = keep->id;
    run->comms = keep->comms;
    run->peers = keep->peers;
    run->isLast = i + 1 == numRuns;
    run->watch = &shared->watch;
    run->told = &shared->failed;
    uint64_t timeout = run->options->timeoutNs ? run->options->timeoutNs : 100000000000u;
    epWatchReset(run->watch, run->options->shape.numRanks,
                 run->options->limitNs ? run->options->limitNs
                                       : epCallLimitNs(timeout, keep->lib.isHost));
    atomic_store(&shared->atWork, 1);
    run->numDone = &shared->numSteps;
    /* two ranks' references at a time fit a small machine; GPUs come with larger ones */
    run->maxComparing = keep->lib.isHost ? 2 : options->shape.numRanks;
    setEnvironment(run->options);
    if (keep->other) EP_TRY(makeTwin(run, keep)); // NOLINT: the process ends
    EP_TRY(runRanks(run));
    free(run->twin);
    free(run);
    atomic_store(&shared->atWork, 0);
    atomic_store(&shared->failed, 0);
    atomic_fetch_add(&shared->numDone, 1);
    if (!shared->results[i].ok) break;
  }
  return TREFOIL_OK;
}

static trefoil_result_t checkOptions(const ep_real_options_t *o) {
  int R = o->shape.numRanks;
  EP_CHECK(R <= EP_REAL_MAX_RANKS, TREFOIL_INVALID_ARGUMENT, "%d ranks: at most %d in one process",
           R, EP_REAL_MAX_RANKS);
  EP_CHECK(o->repeats <= EP_REAL_MAX_REPEATS, TREFOIL_INVALID_ARGUMENT, "%d repeats: at most %d",
           o->repeats, EP_REAL_MAX_REPEATS);
  EP_CHECK(o->shape.topk <= o->shape.numExperts, TREFOIL_INVALID_ARGUMENT,
           "top-%d of %d experts: an expert can be used once a token", o->shape.topk,
           o->shape.numExperts);
  EP_CHECK(o->iterations >= 0 && o->iterations <= EP_GPU_ITERATIONS, TREFOIL_INVALID_ARGUMENT,
           "%d iterations: at most %d", o->iterations, EP_GPU_ITERATIONS);
  EP_CHECK(!o->backward || o->mode >= TREFOIL_HT_FLAT, TREFOIL_INVALID_ARGUMENT,
           "low latency has no backward");
  EP_CHECK(!o->fp8 || o->hidden % 128 == 0, TREFOIL_INVALID_ARGUMENT,
           "hidden %lld: rows with a scale for each 128 elements need a multiple of 128",
           (long long)o->hidden);
  EP_CHECK(o->startSkewNs <= 10000000, TREFOIL_INVALID_ARGUMENT,
           "a start skew of %llu ns: at most 10 ms", (unsigned long long)o->startSkewNs);
  EP_CHECK(!(o->toE4m3 || o->partial) || o->mode < TREFOIL_HT_FLAT, TREFOIL_INVALID_ARGUMENT,
           "quantising in the dispatch, and partial combine, are low latency's alone");
  return trefoilShapeCheck(&o->shape);
}

/* Steps of all runs, for the progress display. */
static uint64_t countSteps(const ep_real_options_t *options, int numRuns) {
  uint64_t total = 0;
  for (int i = 0; i < numRuns; i++)
    total += (uint64_t)options[i].shape.numRanks *
             (9 + (options[i].repeats ? 5 + 2 * (uint64_t)options[i].repeats : 0));
  return total;
}

static int runChild(const ep_real_options_t *options, int numRuns, shared_t *shared) {
  epWatchHooks(&shared->watch);
  if (runAll(options, numRuns, shared) != TREFOIL_OK) {
    snprintf(shared->failure, sizeof shared->failure, "%s", trefoilLastError());
    atomic_store(&shared->finished, 1);
    return 1;
  }
  atomic_store(&shared->finished, 1);
  return 0;
}

/* The run at work did not come to its end by itself: that is its result. */
static void endRun(const ep_real_options_t *options, shared_t *shared, ep_case_outcome_t outcome,
                   const char *text) {
  int at = atomic_load(&shared->numDone);
  ep_real_result_t *result = &shared->results[at];
  char before[1024];
  snprintf(before, sizeof before, "%s", result->difference);
  result->ok = 0;
  result->outcome = outcome;
  snprintf(result->difference, sizeof result->difference, "%s%s%s", text,
           *text && *before ? "; and " : "", before);
  atomic_fetch_add(&shared->numDone, 1);
  if (options->finished) options->finished(options->context, at, result);
}

/* How long ranks may take to come to an end after one of them has failed; and who has been in its call for
 * LONG_BEFORE_NS by then may be what the others wait for: then the limit of a call counts. */
#define GRACE_NS       3000000000u
#define LONG_BEFORE_NS 1000000000u

static double graceEnd(const shared_t *shared) {
  return epWatchLongest(&shared->watch, LONG_BEFORE_NS) >= 0 ? 1e30 : epNow() + 1e-9 * GRACE_NS;
}

/* Ends the child when it hangs, or when its ranks only wait for one that has failed (until *grace; 0: none
 * has). */
static int endChild(const ep_real_options_t *options, shared_t *shared, pid_t pid, double *grace) {
  char text[EP_WATCH_TEXT] = "";
  ep_case_outcome_t outcome = EP_CASE_WRONG;
  if (!atomic_load(&shared->failed))
    *grace = 0;
  else if (*grace == 0)
    *grace = graceEnd(shared);
  if (atomic_load(&shared->atWork) && epWatchHang(&shared->watch, text) >= 0)
    outcome = EP_CASE_HANGS;
  else if (*grace == 0 || epNow() < *grace)
    return 0;
  epWorkerKill(pid);
  endRun(options, shared, outcome, text);
  return 1;
}

/* Waits for the child, telling what is done; its status, or -1: it was ended here. */
static int watchChild(const ep_real_options_t *options, int numRuns, shared_t *shared, pid_t pid) {
  uint64_t total = countSteps(options, numRuns);
  double grace = 0;
  int status = 1, numReported = 0;
  for (;;) {
    pid_t ended = waitpid(pid, &status, WNOHANG);
    int at = atomic_load(&shared->numDone);
    while (options->finished && numReported < at) {
      options->finished(options->context, numReported, &shared->results[numReported]);
      numReported++;
    }
    if (ended != 0) return status;
    if (options->interrupted && *options->interrupted) {
      epWorkerKill(pid);
      return -1;
    }
    if (endChild(options, shared, pid, &grace)) return -1;
    if (options->progress && at < numRuns)
      options->progress(options->context, trefoilModeName(options[at].mode),
                        atomic_load(&shared->numSteps), total);
    struct timespec pause = {0, 20000000};
    nanosleep(&pause, NULL);
  }
}

trefoil_result_t epRealRunAll(const ep_real_options_t *options, int numRuns,
                              ep_real_result_t *results, int *numDone) {
  for (int i = 0; i < numRuns; i++) EP_TRY(checkOptions(&options[i]));
  size_t bytes = sizeof(shared_t) + sizeof *results * (size_t)numRuns;
  shared_t *shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  EP_CHECK(shared != MAP_FAILED, TREFOIL_SYSTEM_ERROR, "out of memory");
  pid_t pid = epWorkerFork(1);
  if (pid == 0) _exit(runChild(options, numRuns, shared));
  int status = pid > 0 ? watchChild(options, numRuns, shared, pid) : 0;
  if (pid > 0 && status >= 0 && !atomic_load(&shared->finished)) {
    char text[EP_WATCH_TEXT];
    epWatchEnd(&shared->watch, status, -1, text);
    endRun(options, shared, EP_CASE_ABORTS, text);
    status = 0;
  }
  *numDone = atomic_load(&shared->numDone);
  memcpy(results, shared->results, sizeof *results * (size_t)numRuns);
  char failure[1024];
  memcpy(failure, shared->failure, sizeof failure);
  munmap(shared, bytes);
  EP_CHECK(pid > 0, TREFOIL_SYSTEM_ERROR, "a process could not be started");
  EP_CHECK(status <= 0, TREFOIL_SYSTEM_ERROR, "%s", failure);
  return TREFOIL_OK;
}

trefoil_result_t epRealRun(const ep_real_options_t *options, ep_real_result_t *result) {
  int numDone;
  result->ok = 0;
  result->outcome = EP_CASE_NOT_RUN;
  return epRealRunAll(options, 1, result, &numDone);
}
