/* Measuring on GPUs, each rank in its thread. A measurement is EP_GPU_ITERATIONS of (lockstep, event,
 * operation, event) on the rank's stream: called one after the other, then captured and replayed twice,
 * of which the second counts. The pause in the lockstep kernel lets the host queue what follows before the
 * GPU is there: a host that comes late would be measured as the operation's time.
 *
 * With a start skew the last rank leaves the lockstep later than the others, whose kernels wait for it: the
 * slowest rank's kernel time is then from their start. Background work is started before a replayed
 * measurement and stopped after it. */
#include "validate/gpu_times.h"

#include "plan/clock.h"
#include "plan/error.h"
#include "validate/real_work.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
  N = EP_GPU_ITERATIONS,
  CALLED_PAUSE_NS = 60000,
  REPLAYED_PAUSE_NS = 4000,
  BURST_PAUSE_NS = 30000,
  COPIES = 10,
  HT_SMS = 32 /* what high throughput takes unless told otherwise */
};

/* One measurement of one rank, seconds. */
typedef struct series {
  double kernel[N], event[N], host[N];
} series_t;

typedef struct ep_gpu_rank {
  cudaEvent_t before[N], after[N];
  series_t series[2]; /* called, replayed */
  double backToBack, copy[2];
  ep_gpu_worker_t *worker; /* background work, running now */
  double backgroundAlone, background;
} gpu_rank_t;

/* What is measured now: the same on all ranks. */
typedef struct job {
  ep_gpu_what_t what;
  int replayed;
} job_t;
static _Thread_local job_t job;

static const ep_library_t *libOf(const real_rank_t *rank) {
  return &rank->run->lib;
}

static gpu_rank_t *mine(const real_rank_t *rank) {
  return &rank->run->gpuRanks[rank->rank];
}

static int numIterations(const real_rank_t *rank) {
  int n = rank->run->options->iterations;
  return n > 0 ? n : N;
}

/* ---- Parts of a measurement ---- */

static trefoil_result_t lockstep(real_rank_t *rank, unsigned pauseNs) {
  const ep_real_options_t *o = rank->run->options;
  int isLate = rank->rank > 0 && rank->rank == o->shape.numRanks - 1;
  return epGpuLockstep(&rank->run->peers[rank->rank], pauseNs,
                       isLate ? (unsigned)o->startSkewNs : 0, rank->stream);
}

static trefoil_result_t record(real_rank_t *rank, cudaEvent_t event) {
  rank->doing = "cudaEventRecordWithFlags";
  EP_REAL_CUDA(rank, libOf(rank)->cudaEventRecordWithFlags(event, rank->stream,
                                                           job.replayed ? cudaEventRecordExternal
                                                                        : cudaEventRecordDefault));
  return TREFOIL_OK;
}

static trefoil_result_t operate(real_rank_t *rank, ep_gpu_what_t what) {
  if (what == EP_GPU_EMPTY) return epGpuEmpty(rank->stream);
  if (what != EP_GPU_COMBINE) EP_TRY(epRealDispatch(rank));
  if (what != EP_GPU_DISPATCH) EP_TRY(epRealCombine(rank));
  return TREFOIL_OK;
}

static trefoil_result_t keepTimes(real_rank_t *rank, unsigned numLaunches) {
  const ep_library_t *lib = libOf(rank);
  rank->doing = "ncclEpKeepTimes";
  if (lib->ncclEpKeepTimes) EP_REAL_EP(rank, lib->ncclEpKeepTimes(rank->group, numLaunches));
  return TREFOIL_OK;
}

/* Operations in lockstep, with events. */
static trefoil_result_t queueAll(real_rank_t *rank) {
  gpu_rank_t *g = mine(rank);
  unsigned pause = job.replayed ? REPLAYED_PAUSE_NS : CALLED_PAUSE_NS;
  for (int i = 0; i < numIterations(rank); i++) {
    EP_TRY(lockstep(rank, pause));
    EP_TRY(record(rank, g->before[i]));
    EP_TRY(operate(rank, job.what));
    EP_TRY(record(rank, g->after[i]));
  }
  return TREFOIL_OK;
}

/* Operations one after the other, events round them all: in before[0] and after[0]; the host's time of
 * each call. */
static trefoil_result_t queueBurst(real_rank_t *rank) {
  gpu_rank_t *g = mine(rank);
  EP_TRY(lockstep(rank, BURST_PAUSE_NS));
  EP_TRY(record(rank, g->before[0]));
  for (int i = 0; i < numIterations(rank); i++) {
    double start = epNow();
    EP_TRY(operate(rank, job.what));
    g->series[job.replayed].host[i] = epNow() - start;
  }
  return record(rank, g->after[0]);
}

typedef trefoil_result_t (*queue_t)(real_rank_t *rank);

static trefoil_result_t replay(real_rank_t *rank, queue_t queue) {
  const ep_library_t *lib = libOf(rank);
  cudaGraph_t graph = NULL;
  cudaGraphExec_t exec = NULL;
  rank->doing = "cudaStreamBeginCapture";
  EP_REAL_CUDA(rank, lib->cudaStreamBeginCapture(rank->stream, cudaStreamCaptureModeRelaxed));
  EP_TRY(queue(rank));
  rank->doing = "cudaStreamEndCapture";
  EP_REAL_CUDA(rank, lib->cudaStreamEndCapture(rank->stream, &graph));
  rank->doing = "cudaGraphInstantiateWithFlags";
  EP_REAL_CUDA(rank, lib->cudaGraphInstantiateWithFlags(&exec, graph, 0));
  rank->doing = "cudaGraphLaunch";
  for (int i = 0; i < 2; i++) EP_REAL_CUDA(rank, lib->cudaGraphLaunch(exec, rank->stream));
  EP_TRY(epRealSync(rank));
  EP_REAL_CUDA(rank, lib->cudaGraphExecDestroy(exec));
  EP_REAL_CUDA(rank, lib->cudaGraphDestroy(graph));
  return TREFOIL_OK;
}

static trefoil_result_t elapsed(real_rank_t *rank, int i, double *seconds) {
  gpu_rank_t *g = mine(rank);
  float ms = 0;
  rank->doing = "cudaEventElapsedTime";
  EP_REAL_CUDA(rank, libOf(rank)->cudaEventElapsedTime(&ms, g->before[i], g->after[i]));
  *seconds = 1e-3 * (double)ms;
  return TREFOIL_OK;
}

/* From the first launch's start to the last one's end of each operation. */
static trefoil_result_t readKernelTimes(real_rank_t *rank, series_t *s) {
  const ep_library_t *lib = libOf(rank);
  int each = job.what == EP_GPU_BOTH ? 2 : 1, n = numIterations(rank);
  unsigned count = (unsigned)(n * each);
  ncclEpKernelTime_t *times = calloc(count, sizeof *times);
  EP_CHECK(times, TREFOIL_SYSTEM_ERROR, "out of memory for kernel times");
  ncclResult_t rc = lib->ncclEpReadTimes(rank->group, times, &count, rank->stream);
  for (int i = 0; rc == ncclSuccess && i < n && count == (unsigned)(n * each); i++)
    s->kernel[i] = 1e-9 * (double)(times[(i + 1) * each - 1].endNs - times[i * each].startNs);
  free(times);
  rank->doing = "ncclEpReadTimes";
  EP_REAL_EP(rank, rc);
  EP_CHECK(count == (unsigned)(n * each), TREFOIL_INTERNAL_ERROR,
           "ncclEpReadTimes told %u launches of %d", count, n * each);
  return TREFOIL_OK;
}

/* ---- Phases ---- */

static trefoil_result_t prepare(real_rank_t *rank) {
  gpu_rank_t *g = mine(rank);
  rank->doing = "cudaEventCreateWithFlags";
  for (int i = 0; i < N; i++) {
    EP_REAL_CUDA(rank, libOf(rank)->cudaEventCreateWithFlags(&g->before[i], cudaEventDefault));
    EP_REAL_CUDA(rank, libOf(rank)->cudaEventCreateWithFlags(&g->after[i], cudaEventDefault));
  }
  return TREFOIL_OK;
}

static trefoil_result_t putAway(real_rank_t *rank) {
  gpu_rank_t *g = mine(rank);
  rank->doing = "cudaEventDestroy";
  for (int i = 0; i < N; i++) {
    EP_REAL_CUDA(rank, libOf(rank)->cudaEventDestroy(g->before[i]));
    EP_REAL_CUDA(rank, libOf(rank)->cudaEventDestroy(g->after[i]));
  }
  return keepTimes(rank, 0);
}

static trefoil_result_t measureCopies(real_rank_t *rank) {
  gpu_rank_t *g = mine(rank);
  job.replayed = 0;
  for (int kind = 0; kind < 2; kind++) {
    for (int again = 0; again < 2; again++) { /* the first warms up */
      EP_TRY(lockstep(rank, CALLED_PAUSE_NS));
      EP_TRY(record(rank, g->before[0]));
      for (int i = 0; i < COPIES; i++)
        EP_TRY(epGpuCopy(&rank->run->peers[rank->rank], kind, rank->stream));
      EP_TRY(record(rank, g->after[0]));
      EP_TRY(epRealSync(rank));
    }
    EP_TRY(elapsed(rank, 0, &g->copy[kind]));
  }
  return TREFOIL_OK;
}

/* SMs for products of matrices: those that the operation does not take. */
static int smsBackground(const real_t *run) {
  int taken = run->options->maxSms > 0                ? (int)run->options->maxSms
              : run->options->mode >= TREFOIL_HT_FLAT ? HT_SMS
                                                      : run->peers[0].numSms / 2;
  return taken < run->peers[0].numSms ? run->peers[0].numSms - taken : 1;
}

static trefoil_result_t startBackground(real_rank_t *rank) {
  const real_t *run = rank->run;
  if (run->options->background == EP_REAL_BACKGROUND_NOTHING) return TREFOIL_OK;
  if (run->options->background == EP_REAL_BACKGROUND_COPIES_FROM_0 && rank->rank > 0)
    return TREFOIL_OK;
  rank->doing = "background work";
  return epGpuBackgroundStart(&run->peers[rank->rank],
                              run->options->background == EP_REAL_BACKGROUND_GEMM ? EP_GPU_GEMM
                                                                                  : EP_GPU_COPIES,
                              smsBackground(run), &mine(rank)->worker);
}

static trefoil_result_t stopBackground(real_rank_t *rank, double *perSecond) {
  gpu_rank_t *g = mine(rank);
  if (!g->worker) return TREFOIL_OK;
  ep_gpu_worker_t *worker = g->worker;
  g->worker = NULL;
  return epGpuBackgroundStop(worker, perSecond);
}

/* How fast it is alone, on all ranks at once. */
static trefoil_result_t measureBackground(real_rank_t *rank) {
  struct timespec pause = {0, 30000000};
  EP_TRY(startBackground(rank));
  nanosleep(&pause, NULL);
  return stopBackground(rank, &mine(rank)->backgroundAlone);
}

/* After a replayed measurement, also one that failed: its thread must end. */
static void endBackground(real_rank_t *rank) {
  gpu_rank_t *g = mine(rank);
  double rate = 0;
  if (!g->worker) return;
  if (stopBackground(rank, &rate) != TREFOIL_OK)
    epRealFail(rank->run, "rank %d: %s", rank->rank, trefoilLastError());
  if (g->background == 0 || rate < g->background) g->background = rate;
}

static trefoil_result_t measureSeries(real_rank_t *rank) {
  series_t *s = &mine(rank)->series[job.replayed];
  int hasKernel = job.what != EP_GPU_EMPTY && libOf(rank)->ncclEpKeepTimes != NULL;
  int n = numIterations(rank);
  if (hasKernel) EP_TRY(keepTimes(rank, (unsigned)n * (job.what == EP_GPU_BOTH ? 2 : 1)));
  EP_TRY(job.replayed ? replay(rank, queueAll) : queueAll(rank));
  EP_TRY(epRealSync(rank));
  for (int i = 0; i < n; i++) EP_TRY(elapsed(rank, i, &s->event[i]));
  if (hasKernel) {
    EP_TRY(readKernelTimes(rank, s));
    EP_TRY(keepTimes(rank, 0));
  }
  return TREFOIL_OK;
}

/* Ranks take turns: threads that call at the same time wait for one another in the driver, which the
 * processes of a real program do not. */
static trefoil_result_t callInTurn(real_rank_t *rank) {
  static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&turn);
  trefoil_result_t rc = queueBurst(rank);
  pthread_mutex_unlock(&turn);
  return rc;
}

static trefoil_result_t measureBurst(real_rank_t *rank) {
  double seconds;
  job.replayed = 0;
  EP_TRY(callInTurn(rank));
  EP_TRY(epRealSync(rank));
  job.replayed = 1;
  EP_TRY(replay(rank, queueBurst));
  EP_TRY(elapsed(rank, 0, &seconds));
  mine(rank)->backToBack = seconds / numIterations(rank);
  return TREFOIL_OK;
}

/* ---- Sums ---- */

static int byValue(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static ep_gpu_spread_t spread(double *values, int n) {
  qsort(values, (size_t)n, sizeof *values, byValue);
  return (ep_gpu_spread_t){values[n / 2], values[n * 99 / 100], values[0], values[n - 1]};
}

typedef enum which { KERNEL, EVENT, OVERHEAD, HOST } which_t;

static double valueOf(const series_t *s, which_t which, int i) {
  return which == KERNEL     ? s->kernel[i]
         : which == EVENT    ? s->event[i]
         : which == OVERHEAD ? s->event[i] - s->kernel[i]
                             : s->host[i];
}

/* The slowest rank of each operation, or (pooled) every rank's. */
static ep_gpu_spread_t summarise(const real_t *run, int replayed, which_t which, int pooled) {
  int R = run->options->shape.numRanks, n = 0;
  double values[N * EP_GPU_MAX_RANKS];
  for (int i = 0; i < run->result->gpu.iterations; i++) {
    double worst = 0;
    for (int r = 0; r < R; r++) {
      double v = valueOf(&run->gpuRanks[r].series[replayed], which, i);
      if (pooled) values[n++] = v;
      if (v > worst) worst = v;
    }
    if (!pooled) values[n++] = worst;
  }
  return spread(values, n);
}

/* Bytes of the plan through the port that has most to carry, the larger direction. */
static uint64_t busiestPort(const uint64_t *bytes, int R) {
  uint64_t most = 0;
  for (int r = 0; r < R; r++) {
    uint64_t out = 0, in = 0;
    for (int q = 0; q < R; q++) {
      if (q == r) continue;
      out += bytes[r * R + q];
      in += bytes[q * R + r];
    }
    if (out > most) most = out;
    if (in > most) most = in;
  }
  return most;
}

static uint64_t portBytes(const real_t *run, ep_gpu_what_t what) {
  int R = run->options->shape.numRanks;
  uint64_t bytes = 0;
  if (what == EP_GPU_DISPATCH || what == EP_GPU_BOTH)
    bytes += busiestPort(run->result->dispatchBytes, R);
  if (what == EP_GPU_COMBINE || what == EP_GPU_BOTH)
    bytes += busiestPort(run->result->combineBytes, R);
  return bytes;
}

static void sumUp(const real_t *run, ep_gpu_what_t what) {
  ep_gpu_times_t *all = &run->result->gpu;
  ep_gpu_figures_t *f = &all->of[what];
  int hasKernel = what != EP_GPU_EMPTY && all->hasKernelTimes;
  for (int replayed = 0; replayed < 2; replayed++) {
    f->event[replayed] = summarise(run, replayed, EVENT, 0);
    if (!hasKernel) continue;
    f->kernel[replayed] = summarise(run, replayed, KERNEL, 0);
    f->eventOverKernel[replayed] = summarise(run, replayed, OVERHEAD, 1);
  }
  f->host = summarise(run, 0, HOST, 1);
  for (int r = 0; r < run->options->shape.numRanks; r++)
    if (run->gpuRanks[r].backToBack > f->backToBack) f->backToBack = run->gpuRanks[r].backToBack;
  if (what == EP_GPU_EMPTY || all->copyRate <= 0) return;
  f->portBytes = portBytes(run, what);
  double floor = (double)f->portBytes / all->copyRate + (what == EP_GPU_BOTH ? 2 : 1) * 3.4e-6;
  f->ratio = (hasKernel ? f->kernel[1].p50 : f->event[1].p50) / floor;
}

static void sumUpBackground(real_t *run) {
  ep_gpu_times_t *t = &run->result->gpu;
  for (int r = 0; r < run->options->shape.numRanks; r++) {
    const gpu_rank_t *g = &run->gpuRanks[r];
    if (r > 0 && run->options->background == EP_REAL_BACKGROUND_COPIES_FROM_0) break;
    if (r == 0 || g->backgroundAlone < t->backgroundAlone) t->backgroundAlone = g->backgroundAlone;
    if (r == 0 || g->background < t->background) t->background = g->background;
  }
}

static double copyRate(const real_t *run) {
  int R = run->options->shape.numRanks;
  double best = 0;
  for (int kind = 0; kind < 2; kind++) {
    double slowest = 0;
    for (int r = 0; r < R; r++)
      if (run->gpuRanks[r].copy[kind] > slowest) slowest = run->gpuRanks[r].copy[kind];
    double rate = slowest > 0 ? (double)COPIES * (R - 1) * EP_GPU_COPY_BYTES / slowest : 0;
    if (rate > best) best = rate;
  }
  return best;
}

/* ---- The whole ---- */

static trefoil_result_t start(real_rank_t *rank) {
  real_t *run = rank->run;
  if (rank->rank > 0) return TREFOIL_OK;
  run->gpuRanks = calloc((size_t)run->options->shape.numRanks, sizeof *run->gpuRanks);
  EP_CHECK(run->gpuRanks, TREFOIL_SYSTEM_ERROR, "out of memory for measurements");
  run->result->gpu.iterations = numIterations(rank);
  run->result->gpu.hasKernelTimes = run->lib.ncclEpKeepTimes && run->lib.ncclEpReadTimes;
  run->lib.ncclGetVersion(&run->result->gpu.ncclVersion);
  return epGpuFacts(0, &run->result->gpu.facts);
}

static void measureWhat(real_rank_t *rank, ep_gpu_what_t what) {
  static const char *const names[] = {"timing an empty kernel", "timing dispatch", "timing combine",
                                      "timing both"};
  for (int replayed = 0; replayed < 2; replayed++) {
    int isBackground = replayed && what != EP_GPU_EMPTY && rank->run->options->background;
    job = (job_t){what, replayed};
    /* a phase of its own: memory must not be allocated while a peer's kernel waits for this rank */
    if (isBackground) epRealPhase(rank, startBackground, names[what]);
    epRealPhase(rank, measureSeries, names[what]);
    if (isBackground) endBackground(rank);
  }
  epRealPhase(rank, measureBurst, names[what]);
  if (rank->rank == 0 && !atomic_load(&rank->run->failed)) sumUp(rank->run, what);
}

void epGpuMeasure(real_rank_t *rank) {
  real_t *run = rank->run;
  int isMore = run->options->shape.numRanks > 1;
  epRealPhase(rank, start, "measuring");
  epRealPhase(rank, prepare, "measuring");
  if (isMore) epRealPhase(rank, measureCopies, "copying");
  if (rank->rank == 0 && isMore) run->result->gpu.copyRate = copyRate(run);
  if (run->options->background != EP_REAL_BACKGROUND_NOTHING)
    epRealPhase(rank, measureBackground, "measuring the background work");
  measureWhat(rank, EP_GPU_EMPTY);
  measureWhat(rank, EP_GPU_DISPATCH);
  if (epRealHasCombine(run->options)) {
    measureWhat(rank, EP_GPU_COMBINE);
    measureWhat(rank, EP_GPU_BOTH);
  }
  epRealPhase(rank, putAway, "measuring");
  if (rank->rank > 0) return;
  sumUpBackground(run);
  run->result->gpu.measured = !atomic_load(&run->failed);
  free(run->gpuRanks);
  run->gpuRanks = NULL;
}
