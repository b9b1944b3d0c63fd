/* The turns of two libraries (real_pair.h). Values of all ranks and calls of a block are kept until the block
 * ends; then rank 0 takes the slowest rank of each call, and their median. */
#include "validate/real_work.h"

#include "plan/clock.h"
#include "plan/error.h"
#include "validate/cupti_times.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N = EP_PAIR_ITERATIONS, B = EP_PAIR_BLOCKS, PAUSE_NS = 300000 };

typedef struct pair {
  double values[EP_REAL_MAX_RANKS][EP_PAIR_NUM_FIGURES][N];
  double medians[2][2][EP_PAIR_NUM_FIGURES][B]; /* [operation][library] */
  double all[2][2][EP_PAIR_NUM_FIGURES][B * N];
  int numCalls[2][2][EP_PAIR_NUM_FIGURES];
  int hasCupti;
} pair_t;
static pair_t *pair; /* of the child process: one shape at a time */

/* What is timed now: the same on all ranks. */
typedef struct turn {
  int operation, library, block, traced;
} turn_t;
static _Thread_local turn_t turn;

static trefoil_result_t operate(real_rank_t *rank) {
  return turn.operation ? epRealCombine(rank) : epRealDispatch(rank);
}

/* Untimed: what a library compiles or loads at its first calls of a shape, it does here. */
static trefoil_result_t warmUp(real_rank_t *rank) {
  for (int i = 0; i < 3; i++) {
    EP_TRY(operate(rank));
    EP_TRY(epRealSync(rank));
  }
  return TREFOIL_OK;
}

/* ---- On GPUs ---- */

static trefoil_result_t callBlock(real_rank_t *rank, cudaEvent_t *events) {
  const ep_library_t *lib = &rank->run->lib;
  double(*mine)[N] = pair->values[rank->rank];
  for (int i = 0; i < N; i++) {
    EP_TRY(epGpuLockstep(&rank->run->peers[rank->rank], PAUSE_NS, 0, rank->stream));
    rank->doing = "cudaEventRecord";
    EP_REAL_CUDA(rank, lib->cudaEventRecord(events[2 * i], rank->stream));
    double start = epNow();
    EP_TRY(operate(rank));
    mine[EP_PAIR_HOST][i] = epNow() - start;
    rank->doing = "cudaEventRecord";
    EP_REAL_CUDA(rank, lib->cudaEventRecord(events[2 * i + 1], rank->stream));
  }
  EP_TRY(epRealSync(rank));
  for (int i = 0; i < N; i++) {
    float ms = 0;
    rank->doing = "cudaEventElapsedTime";
    EP_REAL_CUDA(rank, lib->cudaEventElapsedTime(&ms, events[2 * i], events[2 * i + 1]));
    mine[EP_PAIR_EVENT][i] = 1e-3 * (double)ms;
  }
  return TREFOIL_OK;
}

static trefoil_result_t blockOnGpus(real_rank_t *rank) {
  const ep_library_t *lib = &rank->run->lib;
  cudaEvent_t events[2 * N] = {0};
  trefoil_result_t rc = TREFOIL_OK;
  for (int i = 0; i < 2 * N && rc == TREFOIL_OK; i++)
    if (lib->cudaEventCreateWithFlags(&events[i], cudaEventDefault) != cudaSuccess)
      rc = epFail(TREFOIL_SYSTEM_ERROR, "an event could not be made");
  if (rc == TREFOIL_OK) rc = callBlock(rank, events);
  for (int i = 0; i < 2 * N; i++)
    if (events[i]) lib->cudaEventDestroy(events[i]);
  return rc;
}

/* No kernel times then, and why; the other figures stand. */
static void dropTrace(real_rank_t *rank) {
  ep_pair_times_t *t = rank->run->pair;
  snprintf(t->noKernels, sizeof t->noKernels, "%.190s", trefoilLastError());
  pair->hasCupti = 0;
  for (int operation = 0; operation < 2; operation++)
    for (int lib = 0; lib < 2; lib++)
      pair->numCalls[operation][lib][EP_PAIR_SPAN] = pair->numCalls[operation][lib][EP_PAIR_SUM] =
          0;
}

static trefoil_result_t startTrace(real_rank_t *rank) {
  if (rank->rank == 0 && epCuptiStart() != TREFOIL_OK) dropTrace(rank);
  return TREFOIL_OK;
}

/* Rank 0, for all GPUs. */
static trefoil_result_t readTrace(real_rank_t *rank) {
  ep_cupti_call_t calls[N];
  EP_TRY(epCuptiStop());
  for (int r = 0; r < rank->run->options->shape.numRanks; r++) {
    EP_TRY(epCuptiCalls(r, N, calls));
    for (int i = 0; i < N; i++) {
      pair->values[r][EP_PAIR_SPAN][i] = calls[i].span;
      pair->values[r][EP_PAIR_SUM][i] = calls[i].sum;
    }
    if (r > 0) continue;
    ep_pair_operation_t *o = &rank->run->pair->operations[turn.operation];
    o->numKernels[turn.library] = calls[N - 1].numKernels;
    o->numCopies[turn.library] = calls[N - 1].numCopies;
  }
  return TREFOIL_OK;
}

static trefoil_result_t endTrace(real_rank_t *rank) {
  if (rank->rank == 0 && pair->hasCupti && readTrace(rank) != TREFOIL_OK) dropTrace(rank);
  return TREFOIL_OK;
}

/* ---- Sums ---- */

static int byValue(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void keepValue(ep_pair_figure_t figure, double value) {
  int *n = &pair->numCalls[turn.operation][turn.library][figure];
  if (*n < B * N) pair->all[turn.operation][turn.library][figure][(*n)++] = value;
}

/* The block's calls, slowest rank of each; their median is the block's. */
static void endBlock(const real_t *run, ep_pair_figure_t figure) {
  double worst[N] = {0};
  for (int i = 0; i < N; i++) {
    for (int r = 0; r < run->options->shape.numRanks; r++)
      if (pair->values[r][figure][i] > worst[i]) worst[i] = pair->values[r][figure][i];
    keepValue(figure, worst[i]);
  }
  qsort(worst, N, sizeof *worst, byValue);
  pair->medians[turn.operation][turn.library][figure][turn.block] = worst[N / 2];
}

static void sumUp(ep_pair_times_t *t, int operation, ep_pair_figure_t figure) {
  ep_pair_operation_t *o = &t->operations[operation];
  double ratios[B];
  int n = 0;
  for (int lib = 0; lib < 2; lib++) {
    int count = pair->numCalls[operation][lib][figure];
    double *v = pair->all[operation][lib][figure];
    if (count == 0) return;
    qsort(v, (size_t)count, sizeof *v, byValue);
    o->of[lib][figure] = (ep_gpu_spread_t){v[count / 2], v[count * 99 / 100], v[0], v[count - 1]};
  }
  for (int b = 0; b < B; b++) {
    double first = pair->medians[operation][0][figure][b];
    if (first > 0) ratios[n++] = pair->medians[operation][1][figure][b] / first;
  }
  if (n == 0) return;
  qsort(ratios, (size_t)n, sizeof *ratios, byValue);
  o->ratio[figure] = (ep_pair_ratio_t){ratios[n / 2], ratios[0], ratios[n - 1]};
}

/* ---- The turns ---- */

static trefoil_result_t syncAfter(real_rank_t *rank) {
  EP_TRY(operate(rank));
  return epRealSync(rank);
}

static void block(real_rank_t *rank) {
  real_t *run = rank->run;
  static const char *const names[] = {"timing dispatch", "timing combine"};
  const char *name = names[turn.operation];
  int isFirst = rank->rank == 0;
  if (run->lib.isHost) {
    for (int i = 0; i < N; i++) {
      double s = epRealPhase(rank, syncAfter, name);
      if (isFirst) pair->values[0][EP_PAIR_WALL][i] = s;
    }
    if (isFirst && !atomic_load(&run->failed)) endBlock(run, EP_PAIR_WALL);
    return;
  }
  if (turn.traced) epRealPhase(rank, startTrace, "starting CUPTI");
  epRealPhase(rank, blockOnGpus, name);
  if (turn.traced) epRealPhase(rank, endTrace, "reading CUPTI");
  if (!isFirst || atomic_load(&run->failed) || (turn.traced && !pair->hasCupti)) return;
  endBlock(run, turn.traced ? EP_PAIR_SPAN : EP_PAIR_EVENT);
  endBlock(run, turn.traced ? EP_PAIR_SUM : EP_PAIR_HOST);
}

static trefoil_result_t start(real_rank_t *rank) {
  if (rank->rank > 0) return TREFOIL_OK;
  ep_pair_times_t *t = rank->run->pair;
  free(pair);
  pair = calloc(1, sizeof *pair);
  EP_CHECK(pair, TREFOIL_SYSTEM_ERROR, "out of memory for measurements");
  pair->hasCupti = !rank->run->lib.isHost && !*t->noKernels;
  t->blocks = B;
  t->iterations = N;
  rank->run->lib.ncclGetVersion(&t->ncclVersion);
  return rank->run->lib.isHost ? TREFOIL_OK : epGpuFacts(0, &t->facts);
}

/* Traced blocks come after all others: recording costs time. */
void epPairMeasure(real_rank_t *ranks[2]) {
  int isFirst = ranks[0]->rank == 0,
      numOperations = epRealHasCombine(ranks[0]->run->options) ? 2 : 1;
  epRealPhase(ranks[0], start, "measuring");
  if (!pair) return;
  for (int operation = 0; operation < numOperations; operation++)
    for (int lib = 0; lib < 2; lib++) {
      turn = (turn_t){.operation = operation, .library = lib};
      epRealPhase(ranks[lib], warmUp, "calls that are not timed");
    }
  for (int traced = 0; traced < 2; traced++)
    for (int operation = 0; operation < numOperations; operation++)
      for (int b = 0; b < B; b++)
        for (int lib = 0; lib < 2; lib++) {
          turn = (turn_t){operation, lib, b, traced};
          if (!traced || pair->hasCupti) block(ranks[lib]);
        }
  if (!isFirst) return;
  ep_pair_times_t *t = ranks[0]->run->pair;
  for (int operation = 0; operation < numOperations; operation++)
    for (int f = 0; f < EP_PAIR_NUM_FIGURES; f++) sumUp(t, operation, (ep_pair_figure_t)f);
  t->measured = !atomic_load(&ranks[0]->run->failed) && !atomic_load(&ranks[1]->run->failed);
}
