/* trefoilGradGpuSync, of the GPU library on emulated kernels and of the CPU library (ON_CPU): a thread a
 * rank, against trefoilGradSync. */
#include <cuda_runtime.h>
#include <nccl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "nccl_ep.h"
#include "test.h"
#include "trefoil/a2sgd.h"

enum { RANKS = 3, ROUNDS = 4, MOST_BYTES = 160000 };
/* Of a wait for a rank that stays away; the emulator's clock is slow. */
#ifdef ON_CPU
#define LIMIT_NS 1000000000
#else
#define LIMIT_NS 20000000
#endif

typedef struct job {
  trefoil_grad_config_t config;
  trefoil_grad_gpu_options_t options;
  int stays;      /* this rank makes no call between Create and Destroy; -1: none */
  int late;       /* this rank comes late to its first call; -1: none */
  int isExplicit; /* the step is given by its number */
  int isCaptured; /* a step and a synchronisation are replayed, on the first array */
  int noSteps;    /* of round i is given the number 2 i + 1, and no step is made */
  int twoComms;   /* a second object, on a second communicator, makes the same calls in between */
  int64_t otherPeriod; /* of rank 1; 0: as the others */
} job_t;

typedef struct rank {
  const job_t *job;
  ncclComm_t comms[2];
  int me;
  trefoil_result_t created, called, later, destroyed;
  char sentence[256];
  int mask[RANKS];
  char before[ROUNDS][MOST_BYTES], after[2][ROUNDS][MOST_BYTES];
} rank_t;

static job_t jobOf(trefoil_dtype_t dtype, int numTensors, const int64_t *sizes, int64_t period) {
  return (job_t){.config = {.method = TREFOIL_GRAD_A2SGD,
                            .dtype = dtype,
                            .numWorkers = RANKS,
                            .numTensors = numTensors,
                            .sizes = sizes,
                            .syncPeriod = period},
                 .stays = -1,
                 .late = -1};
}

static size_t bytesOf(const job_t *j) {
  size_t n = 0;
  for (int t = 0; t < j->config.numTensors; t++) n += (size_t)j->config.sizes[t];
  return n * trefoilDtypeBytes(j->config.dtype);
}

static void keepSentence(rank_t *k, trefoil_result_t result) {
  if (result != TREFOIL_OK && !k->sentence[0])
    snprintf(k->sentence, sizeof k->sentence, "%s", ncclEpGetLastError());
}

/* ---- a rank ---------------------------------------------------------------------------------- */

typedef struct device {
  trefoil_grad_gpu_t objects[2];
  cudaStream_t stream;
  char *grad, *params[2][ROUNDS];
} device_t;

static void call(rank_t *k, const device_t *d, int object, int round) {
  const job_t *j = k->job;
  int64_t step = j->noSteps ? 2 * round + 1 : j->isExplicit ? round : TREFOIL_GRAD_LAST_STEP;
  trefoil_result_t result = TREFOIL_OK;
  if (!j->noSteps) result = trefoilGradGpuStep(d->objects[object], d->grad, d->grad, d->stream);
  if (result == TREFOIL_OK)
    result = trefoilGradGpuSync(d->objects[object], step, d->params[object][round], d->stream);
  keepSentence(k, result);
  if (k->called == TREFOIL_OK) k->called = result;
}

static void fetch(rank_t *k, const device_t *d, int object, int from, int to) {
  cudaStreamSynchronize(d->stream);
  cudaMemcpy(k->after[object][to], d->params[object][from], bytesOf(k->job),
             cudaMemcpyDeviceToHost);
}

/* What each replay leaves. */
static void replay(rank_t *k, const device_t *d) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaStreamBeginCapture(d->stream, cudaStreamCaptureModeRelaxed);
  call(k, d, 0, 0);
  cudaStreamEndCapture(d->stream, &graph);
  cudaGraphInstantiate(&exec, graph, 0);
  for (int i = 0; i < ROUNDS; i++) {
    cudaGraphLaunch(exec, d->stream);
    fetch(k, d, 0, 0, i);
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
}

static void callAll(rank_t *k, const device_t *d) {
  int objects = k->job->twoComms ? 2 : 1;
  if (k->me == k->job->late) usleep(200000);
  if (k->job->isCaptured) {
    replay(k, d);
    return;
  }
  for (int i = 0; i < ROUNDS; i++)
    for (int o = 0; o < objects; o++) call(k, d, o, i);
  for (int i = 0; i < ROUNDS; i++)
    for (int o = 0; o < objects; o++) fetch(k, d, o, i, i);
  k->later = trefoilGradGpuSync(d->objects[0], 0, d->params[0][0], d->stream);
  keepSentence(k, k->later);
}

static void openDevice(const rank_t *k, device_t *d) {
  size_t bytes = bytesOf(k->job);
  cudaStreamCreate(&d->stream);
  cudaMalloc((void **)&d->grad, bytes + 16);
  cudaMemset(d->grad, 0, bytes + 16);
  for (int o = 0; o < 2; o++)
    for (int i = 0; i < ROUNDS; i++) {
      cudaMalloc((void **)&d->params[o][i], bytes + 16);
      cudaMemcpy(d->params[o][i], k->before[i], bytes, cudaMemcpyHostToDevice);
    }
}

static void closeDevice(device_t *d) {
  for (int o = 0; o < 2; o++)
    for (int i = 0; i < ROUNDS; i++) cudaFree(d->params[o][i]);
  cudaFree(d->grad);
  cudaStreamDestroy(d->stream);
}

static void *runRank(void *arg) {
  rank_t *k = arg;
  const job_t *j = k->job;
  trefoil_grad_config_t config = j->config;
  device_t d = {.stream = NULL};
  if (k->me == 1 && j->otherPeriod) config.syncPeriod = j->otherPeriod;
  cudaSetDevice(k->me);
  for (int o = 0; o <= j->twoComms && k->created == TREFOIL_OK; o++)
    k->created = trefoilGradGpuCreate(&config, &j->options, k->comms[o], &d.objects[o]);
  keepSentence(k, k->created);
  if (k->created != TREFOIL_OK) return NULL;
  openDevice(k, &d);
  if (k->me != j->stays) callAll(k, &d);
  cudaStreamSynchronize(d.stream);
  if (j->options.enableMask) trefoilGradGpuGetMask(d.objects[0], k->mask, d.stream);
  for (int o = 0; o <= j->twoComms; o++) k->destroyed = trefoilGradGpuDestroy(d.objects[o]);
  closeDevice(&d);
  return NULL;
}

/* Any bits. */
static void fill(rank_t *k) {
  uint32_t bits = 1 + (uint32_t)k->me;
  for (size_t i = 0; i < sizeof k->before; i++)
    k->before[i / MOST_BYTES][i % MOST_BYTES] =
        (char)((bits = bits * 1664525u + 1013904223u) >> 24);
  memcpy(k->after[0], k->before, sizeof k->before);
  memcpy(k->after[1], k->before, sizeof k->before);
}

static rank_t *run(const job_t *j) {
  ncclComm_t comms[2][RANKS];
  pthread_t threads[RANKS];
  rank_t *ranks = calloc(RANKS, sizeof *ranks);
  for (int o = 0; o <= j->twoComms; o++)
    if (ncclCommInitAll(comms[o], RANKS, NULL) != ncclSuccess) abort();
  for (int r = 0; r < RANKS; r++) {
    ranks[r].job = j;
    ranks[r].me = r;
    for (int o = 0; o <= j->twoComms; o++) ranks[r].comms[o] = comms[o][r];
    fill(&ranks[r]);
  }
  for (int r = 0; r < RANKS; r++) pthread_create(&threads[r], NULL, runRank, &ranks[r]);
  for (int r = 0; r < RANKS; r++) pthread_join(threads[r], NULL);
  for (int o = 0; o <= j->twoComms; o++)
    for (int r = 0; r < RANKS; r++) ncclCommDestroy(comms[o][r]);
  return ranks;
}

/* ---- what is expected ------------------------------------------------------------------------ */

/* Parameters of round `from` at the reference's hand, of the first `numWorkers` ranks. */
static void checkRound(const rank_t *ranks, int object, int from, int round, int numWorkers) {
  static char want[RANKS][MOST_BYTES];
  const job_t *j = ranks[0].job;
  trefoil_grad_config_t c = j->config;
  void *params[RANKS];
  c.numWorkers = numWorkers;
  for (int r = 0; r < RANKS; r++) {
    memcpy(want[r], ranks[r].before[from], MOST_BYTES);
    params[r] = want[r];
  }
  for (int i = j->isCaptured ? 0 : round; i <= round; i++) {
    trefoil_result_t result = trefoilGradSync(&c, j->noSteps ? 2 * i + 1 : i, params);
    REQUIRE(result == TREFOIL_OK, "%s", trefoilLastError());
  }
  for (int r = 0; r < numWorkers; r++)
    CHECK(!memcmp(ranks[r].after[object][round], want[r], bytesOf(j)),
          "rank %d, object %d, round %d differs", r, object, round);
}

static void expectMeans(const job_t *j) {
  rank_t *ranks = run(j);
  for (int r = 0; r < RANKS; r++)
    CHECK(!ranks[r].created && !ranks[r].called && !ranks[r].later && !ranks[r].destroyed,
          "rank %d: %s", r, ranks[r].sentence);
  for (int o = 0; o <= j->twoComms; o++)
    for (int i = 0; i < ROUNDS; i++) checkRound(ranks, o, j->isCaptured ? 0 : i, i, RANKS);
  free(ranks);
}

static const int64_t medium[] = {9000, 5, 0, 131};

/* ---- tests ----------------------------------------------------------------------------------- */

TEST(parameters_become_the_mean) {
  for (int64_t period = 0; period <= 3; period++) {
    job_t j = jobOf(TREFOIL_F32, 4, medium, period);
    j.isExplicit = period % 2;
    j.late = (int)period;
    expectMeans(&j);
  }
}

TEST(sizes_and_dtypes) {
  static const int64_t sizes[] = {0, 1, 3, 8191, 40000}; /* the last: chunks and a rest */
  static const trefoil_dtype_t dtypes[] = {TREFOIL_F32, TREFOIL_F16, TREFOIL_BF16};
  for (int i = 0; i < 15; i++) {
    job_t j = jobOf(dtypes[i % 3], 1, &sizes[i / 3], 1 + i % 2);
    expectMeans(&j);
  }
}

TEST(without_steps_the_number_says) {
  job_t j = jobOf(TREFOIL_BF16, 4, medium, 4);
  j.noSteps = 1;
  expectMeans(&j);
}

TEST(captured) {
  job_t j = jobOf(TREFOIL_F32, 4, medium, 2);
  j.isCaptured = 1;
  expectMeans(&j);
}

TEST(two_communicators) {
  job_t j = jobOf(TREFOIL_F16, 4, medium, 2);
  j.twoComms = 1;
  expectMeans(&j);
}

TEST(a_lost_rank_is_named_and_nothing_is_written) {
  job_t j = jobOf(TREFOIL_F32, 4, medium, 1);
  j.options.timeoutNs = LIMIT_NS;
  j.noSteps = 1;
  j.stays = 2;
  rank_t *ranks = run(&j);
  for (int r = 0; r < 2; r++) {
    CHECK(ranks[r].later == TREFOIL_REMOTE_ERROR, "rank %d: %d", r, ranks[r].later);
    CHECK(strstr(ranks[r].sentence, "rank 2 did not answer") &&
              strstr(ranks[r].sentence, "in A2SGD synchronisation 1 for its parameters from 0"),
          "%s", ranks[r].sentence);
    CHECK(!memcmp(ranks[r].after[0], ranks[r].before, sizeof ranks[r].before), "written");
  }
  free(ranks);
}

TEST(a_lost_rank_is_masked) {
  job_t j = jobOf(TREFOIL_F32, 4, medium, 2);
  j.options = (trefoil_grad_gpu_options_t){.enableMask = 1, .timeoutNs = LIMIT_NS};
  j.noSteps = 1;
  j.stays = 2;
  rank_t *ranks = run(&j);
  for (int r = 0; r < 2; r++) {
    CHECK(!ranks[r].called && !ranks[r].later, "rank %d: %s", r, ranks[r].sentence);
    CHECK(ranks[r].mask[0] && ranks[r].mask[1] && !ranks[r].mask[2], "the mask of rank %d", r);
  }
  for (int i = 0; i < ROUNDS; i++) checkRound(ranks, 0, i, i, 2);
  free(ranks);
}

TEST(periods_that_differ_fail_everywhere) {
  job_t j = jobOf(TREFOIL_F32, 4, medium, 2);
  j.options.timeoutNs = 2000000000;
  j.otherPeriod = 3;
  rank_t *ranks = run(&j);
  for (int r = 0; r < RANKS; r++) {
    CHECK(ranks[r].created == TREFOIL_INVALID_ARGUMENT, "rank %d: %d", r, ranks[r].created);
    CHECK(strstr(ranks[r].sentence, "rank 1 differs from rank 0's"), "%s", ranks[r].sentence);
  }
  free(ranks);
}

static size_t exchangeOf(const trefoil_grad_config_t *c) {
  size_t exchange = 0, scratch = 0;
  CHECK(!trefoilGradGpuSizes(c, 132, &exchange, &scratch), "%s", ncclEpGetLastError());
  return exchange;
}

TEST(exchange_memory_is_bounded) {
  const int64_t large = (int64_t)1 << 30;
  job_t small = jobOf(TREFOIL_F32, 1, &medium[0], 0), huge = jobOf(TREFOIL_F32, 1, &large, 0);
  const size_t without = exchangeOf(&small.config);
  CHECK(exchangeOf(&huge.config) == without, "without a period");
  small.config.syncPeriod = huge.config.syncPeriod = 7;
  CHECK(exchangeOf(&small.config) > without, "with one");
  CHECK(exchangeOf(&huge.config) < without + (32u << 20), "%zu bytes", exchangeOf(&huge.config));
}

static void refuses(trefoil_grad_gpu_t g, int64_t step, void *params, const char *word) {
  CHECK(trefoilGradGpuSync(g, step, params, NULL) == TREFOIL_INVALID_ARGUMENT, "%s", word);
  CHECK(strstr(ncclEpGetLastError(), word), "%s", ncclEpGetLastError());
}

TEST(bad_arguments) {
  job_t j = jobOf(TREFOIL_F32, 4, medium, 2);
  ncclComm_t comm;
  trefoil_grad_gpu_t g;
  int device = 0;
  _Alignas(16) char params[16];
  j.config.numWorkers = 1;
  REQUIRE(ncclCommInitAll(&comm, 1, &device) == ncclSuccess, "a communicator");
  REQUIRE(!trefoilGradGpuCreate(&j.config, NULL, comm, &g), "%s", ncclEpGetLastError());
  refuses(g, -2, params, "step is -2, must be 0..4294967295, or -1");
  refuses(g, (int64_t)1 << 32, params, "step is 4294967296");
  refuses(g, 0, NULL, "params is NULL");
  refuses(g, 0, params + 2, "params must lie at a multiple of 4 bytes");
  refuses(NULL, 0, params, "is not what trefoilGradGpuCreate gave");
  CHECK(!trefoilGradGpuDestroy(g), "%s", ncclEpGetLastError());
  refuses(g, 0, params, "or was destroyed");
  ncclCommDestroy(comm);
}

TEST_MAIN()
