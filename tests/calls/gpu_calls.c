/* The C API on GPUs, call by call: every mode against the reference, two operations in flight, graphs,
 * masks, late ranks. Ranks are threads, and processes. */
#include <pthread.h>

#include "gpu_case.h"
#include "test.h"

/* One of many shapes, recipes and ways, by seed. */
static step_case_t anyCase(uint64_t seed) {
  uint64_t s = seed * 0x9E3779B97F4A7C15ull >> 8;
  step_case_t c = smallCase((trefoil_mode_t)(seed & 1), seed);
  c.topk = 1 + (int)(s % 8);
  c.numExperts = 8 + (int)(s / 8 % 40);
  c.maxTokens = 1 + (int64_t)(s / 320 % 70);
  c.width = 8 * (1 + (int64_t)(s / 22400 % 90));
  c.quant = (trefoil_quant_t)(seed / 2 % 3);
  if (c.quant == TREFOIL_QUANT_E4M3) c.width = 512 * (1 + (int64_t)(s % 3));
  c.roundScales = c.quant == TREFOIL_QUANT_E4M3 && s & 64;
  c.sendOnly = s & 128 ? 1 : 0;
  c.wideIds = s & 256 ? 1 : 0;
  c.globalIds = s & 512 ? 1 : 0;
  return c;
}

/* High throughput: both layouts, bounds, eager sizing, gradients, alignment. */
static step_case_t anyHtCase(uint64_t seed) {
  uint64_t s = seed * 0x9E3779B97F4A7C15ull >> 8;
  step_case_t c = smallCase((trefoil_mode_t)(2 + (seed & 1)), seed);
  c.topk = 1 + (int)(s % 8);
  c.numExperts = 8 + (int)(s / 8 % 40);
  c.maxTokens = 1 + (int64_t)(s / 320 % 700);
  c.width = 8 * (1 + (int64_t)(s / 22400 % 200));
  c.quant = s & 4096 ? TREFOIL_QUANT_CALLER : TREFOIL_QUANT_NONE;
  c.backward = seed / 2 % 3 == 0;
  if (seed & 1) c.alignment = (size_t)1 << s % 5;
  c.wideIds = s & 256 ? 1 : 0;
  c.globalIds = s & 512 ? 1 : 0;
  int64_t most = (int64_t)4 * c.maxTokens * (seed & 1 ? c.topk : 1) + 16 * c.numExperts;
  c.maxRecv = seed / 2 % 4 == 0 ? 0 : most;
  c.drop = c.maxRecv && seed / 2 % 5 == 0;
  if (c.drop) c.maxRecv = c.maxTokens;
  if (s & 1024) c.maxSms = 1 + (unsigned)(s % 24);
  return c;
}

typedef struct job {
  uint64_t first;
  int count, partial, ht;
} job_t;

static void runOne(team_rank_t *r, const step_case_t *c) {
  step_data_t *d = stepMake(c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroupConfig_t config = stepGroupConfig(c, r->numRanks);
  ncclEpHandleConfig_t handleConfig = stepHandleConfig(c);
  ncclEpGroup_t group;
  ncclEpHandle_t handle;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&handle, group, stepLayout(c), &handleConfig, c->topk, NULL));
  teamCheck(r, stepUpdate(d, handle, r->stream), "update: %s", ncclEpGetLastError());
  for (int i = 0; i < 3; i++) {
    if (i == 2) {
      cudaStreamSynchronize(r->stream);
      stepPoison(d);
    }
    teamCheck(r, stepDispatch(d, handle, r->stream), "dispatch: %s", ncclEpGetLastError());
    teamOk(r, ncclEpComplete(handle, NULL, r->stream));
    teamCheck(r, stepCombine(d, handle, r->stream), "combine: %s", ncclEpGetLastError());
    teamOk(r, ncclEpComplete(handle, NULL, r->stream));
  }
  cudaError_t error = cudaStreamSynchronize(r->stream);
  teamCheck(r, error == cudaSuccess, "stream: %s", cudaGetErrorString(error));
  teamCheck(r, !*stepCompareDispatch(d), "dispatch: %s", stepCompareDispatch(d));
  teamCheck(r, !*stepCompareCombine(d), "combine: %s", stepCompareCombine(d));
  teamOk(r, ncclEpHandleDestroy(handle));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
}

static void runJob(team_rank_t *r) {
  const job_t *job = r->user;
  for (int i = 0; i < job->count && !r->error[0]; i++) {
    step_case_t c =
        job->ht ? anyHtCase(job->first + (uint64_t)i) : anyCase(job->first + (uint64_t)i);
    c.partial = job->partial && c.mode == TREFOIL_LL_EXPERT_MAJOR;
    runOne(r, &c);
    if (r->error[0]) { /* at once: the other ranks may wait for this one */
      fprintf(stderr, "case %llu, rank %d of %d: %s\n",
              (unsigned long long)job->first + (uint64_t)i, r->rank, r->numRanks, r->error);
    }
  }
}

/* GPU_CALLS_CASE=N runs that one (GPU_CALLS_HT: of high throughput). */
TEST(one_case) {
  const char *number = getenv("GPU_CALLS_CASE");
  if (!number || !numGpus()) SKIP("needs a GPU and GPU_CALLS_CASE");
  job_t job = {strtoull(number, NULL, 10), 1, getenv("NCCL_EP_LL_COMBINE") != NULL,
               getenv("GPU_CALLS_HT") != NULL};
  const char *error = teamThreads(numGpus(), runJob, &job);
  CHECK(!*error, "%s", error);
}

/* Random cases, and operations in flight; the emulator has more cases by trefoil check. */
#ifdef TREFOIL_EMULATED_RANKS
enum { MANY = 8, FEW = 3, PARTIAL = 6, ROUNDS = 8 };
#else
enum { MANY = 40, FEW = 10, PARTIAL = 12, ROUNDS = 20 };
#endif

TEST(processes) {
  int n = numGpus();
  if (n < 2) SKIP("needs two GPUs");
  job_t job = {1000, 8, 0, 0};
  const char *error = teamProcesses(n, runJob, &job, 0);
  CHECK(!*error, "%s", error);
}

TEST(threads) {
  if (!numGpus()) SKIP("needs a GPU");
  for (int n = 1; n <= numGpus(); n++) {
    job_t job = {2000 + 100 * (uint64_t)n, n == numGpus() ? MANY : FEW, 0, 0};
    const char *error = teamThreads(n, runJob, &job);
    CHECK(!*error, "%d ranks: %s", n, error);
  }
}

TEST(partial_sums) {
  if (!numGpus()) SKIP("needs a GPU");
  job_t job = {3000, PARTIAL, 1, 0};
  setenv("NCCL_EP_LL_COMBINE", "partial", 1);
  const char *error = teamThreads(numGpus(), runJob, &job);
  unsetenv("NCCL_EP_LL_COMBINE");
  CHECK(!*error, "%s", error);
}

TEST(high_throughput) {
  if (!numGpus()) SKIP("needs a GPU");
  for (int n = 1; n <= numGpus(); n++) {
    job_t job = {4000 + 100 * (uint64_t)n, n == numGpus() ? MANY : FEW, 0, 1};
    const char *error = teamThreads(n, runJob, &job);
    CHECK(!*error, "%d ranks: %s", n, error);
  }
}

/* Inputs outside windows are copied first where SMs are few; ranks have unlike numbers of tokens. */
static void runFewSms(team_rank_t *r) {
  for (uint64_t seed = 0; seed < 6; seed++) {
    step_case_t c = smallCase(TREFOIL_HT_EXPERT_MAJOR, 4900 + seed);
    c.maxTokens = 30;
    c.width = 512;
    c.maxSms = 24;
    c.quant = seed & 1 ? TREFOIL_QUANT_CALLER : TREFOIL_QUANT_NONE;
    runOne(r, &c);
  }
}

TEST(few_sms_of_high_throughput) {
  if (!numGpus()) SKIP("needs a GPU");
  const char *error = teamThreads(numGpus(), runFewSms, NULL);
  CHECK(!*error, "%s", error);
}

/* ---- two in flight, two streams -------------------------------------------------------------- */

typedef struct pair {
  step_case_t c[2];
  int lifo, streams;
} pair_t;

static void runPair(team_rank_t *r) {
  const pair_t *pair = r->user;
  step_data_t *d[2];
  ncclEpHandle_t h[2];
  ncclEpGroup_t group;
  cudaStream_t s[2] = {r->stream, r->stream};
  if (pair->streams)
    teamCheck(r, !cudaStreamCreateWithFlags(&s[1], cudaStreamNonBlocking), "stream");
  ncclEpGroupConfig_t config = stepGroupConfig(&pair->c[0], r->numRanks);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  for (int i = 0; i < 2; i++) {
    d[i] = stepMake(&pair->c[i], r->rank, r->numRanks, r->numRanks);
    teamOk(r, ncclEpInitHandle(&h[i], group, stepLayout(&pair->c[i]), NULL, 3, NULL));
    teamCheck(r, stepUpdate(d[i], h[i], s[i]), "update");
  }
  int first = pair->lifo ? 1 : 0, sendOnly = pair->c[0].sendOnly;
  for (int round = 0; round < ROUNDS; round++) {
    for (int i = 0; i < 2; i++) {
      teamCheck(r, stepDispatch(d[i], h[i], s[i]), "dispatch: %s", ncclEpGetLastError());
    }
    if (sendOnly) {
      teamCheck(r, !stepDispatch(d[0], h[0], s[0]), "a third operation was taken");
      teamCheck(r, strstr(ncclEpGetLastError(), "pending"), "%s", ncclEpGetLastError());
    }
    teamOk(r, ncclEpComplete(h[first], NULL, s[first]));
    teamOk(r, ncclEpComplete(h[!first], NULL, s[!first]));
    for (int i = 0; i < 2; i++) {
      teamCheck(r, stepCombine(d[i], h[i], s[i]), "combine: %s", ncclEpGetLastError());
    }
    teamOk(r, ncclEpComplete(h[first], NULL, s[first]));
    teamOk(r, ncclEpComplete(h[!first], NULL, s[!first]));
  }
  for (int i = 0; i < 2; i++) cudaStreamSynchronize(s[i]);
  for (int i = 0; i < 2; i++) {
    teamCheck(r, !*stepCompareDispatch(d[i]), "handle %d: %s", i, stepCompareDispatch(d[i]));
    teamCheck(r, !*stepCompareCombine(d[i]), "handle %d: %s", i, stepCompareCombine(d[i]));
  }
  teamCheck(r, ncclEpGroupDestroy(group) == ncclInvalidUsage, "destroyed with live handles");
  for (int i = 0; i < 2; i++) teamOk(r, ncclEpHandleDestroy(h[i]));
  teamOk(r, ncclEpGroupDestroy(group));
  for (int i = 0; i < 2; i++) stepFree(d[i]);
  if (pair->streams) cudaStreamDestroy(s[1]);
}

TEST(double_buffering) {
  if (!numGpus()) SKIP("needs a GPU");
  for (int way = 0; way < 16; way++) {
    pair_t pair = {.lifo = way >> 1 & 1, .streams = way >> 2 & 1};
    for (int i = 0; i < 2; i++) {
      pair.c[i] = smallCase((trefoil_mode_t)(way & 1), (uint64_t)(300 + i));
      pair.c[i].sendOnly = way >> 3 & 1;
    }
    const char *error = teamThreads(numGpus(), runPair, &pair);
    CHECK(!*error, "way %d: %s", way, error);
  }
}

/* ---- graphs ---------------------------------------------------------------------------------- */

static void runGraph(team_rank_t *r) {
  pair_t *pair = r->user;
  step_data_t *a = stepMake(&pair->c[0], r->rank, r->numRanks, r->numRanks);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  ncclEpGroupConfig_t config = stepGroupConfig(&pair->c[0], r->numRanks);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(&pair->c[0]), NULL, 3, NULL));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  teamCheck(r, !cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeRelaxed), "begin");
  teamCheck(r, stepUpdate(a, h, r->stream), "update: %s", ncclEpGetLastError());
  teamCheck(r, stepDispatch(a, h, r->stream), "dispatch: %s", ncclEpGetLastError());
  teamOk(r, ncclEpComplete(h, NULL, r->stream));
  teamCheck(r, stepCombine(a, h, r->stream), "combine: %s", ncclEpGetLastError());
  teamOk(r, ncclEpComplete(h, NULL, r->stream));
  teamCheck(r, !cudaStreamEndCapture(r->stream, &graph), "end");
  teamCheck(r, !cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  for (int replay = 0; replay < 30; replay++) {
    cudaGraphLaunch(exec, r->stream);
    if (replay % 3) continue;
    cudaStreamSynchronize(r->stream);
    teamCheck(r, !*stepCompareDispatch(a), "replay %d: %s", replay, stepCompareDispatch(a));
    teamCheck(r, !*stepCompareCombine(a), "replay %d: %s", replay, stepCompareCombine(a));
    stepPoison(a);
  }
  /* the same addresses, each token's experts changed: the dispatch is another one */
  cudaStreamSynchronize(r->stream);
  for (int64_t i = 0; i < a->numTokens[r->rank] * 3; i++) {
    int32_t *e = &a->idx[r->rank][i];
    if (*e >= 0) *e = (*e + 1) % pair->c[0].numExperts;
  }
  if (a->wide) {
    for (int64_t i = 0; i < a->numTokens[r->rank] * 3; i++) a->wide[i] = a->idx[r->rank][i];
  }
  cudaGraphLaunch(exec, r->stream);
  cudaStreamSynchronize(r->stream);
  int changed = *stepCompareDispatch(a) != 0;
  teamCheck(r, r->numRanks < 2 || changed, "the replay did not see the new routing");
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(a);
}

TEST(capture_and_replay) {
  if (!numGpus()) SKIP("needs a GPU");
  for (int way = 0; way < 4; way++) {
    pair_t pair = {.lifo = 0};
    pair.c[0] = smallCase((trefoil_mode_t)(way & 1), 400);
    pair.c[0].sendOnly = way >> 1;
    const char *error = teamThreads(numGpus(), runGraph, &pair);
    CHECK(!*error, "way %d: %s", way, error);
  }
}

/* ---- who is late ----------------------------------------------------------------------------- */

static void runLate(team_rank_t *r) {
  const step_case_t *c = r->user;
  step_data_t *d = stepMake(c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  ncclEpGroupConfig_t config = stepGroupConfig(c, r->numRanks);
  config.timeout_ns = 300000000u;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(c), NULL, 3, NULL));
  teamCheck(r, stepUpdate(d, h, r->stream), "update");
  for (int i = 0; i < 2; i++) {
    teamCheck(r, stepDispatch(d, h, r->stream), "%s", ncclEpGetLastError());
    teamCheck(r, stepCombine(d, h, r->stream), "%s", ncclEpGetLastError());
  }
  cudaStreamSynchronize(r->stream);
  teamBarrier(r);
  if (r->rank != 1) {
    teamCheck(r, stepDispatch(d, h, r->stream), "%s", ncclEpGetLastError());
    cudaError_t error = cudaStreamSynchronize(r->stream);
    teamCheck(r, error == cudaSuccess, "stream: %s", cudaGetErrorString(error));
    teamCheck(r, stepCombine(d, h, r->stream) == 0, "a call after the timeout was taken");
    const char *why = ncclEpGetLastError();
    teamCheck(r, strstr(why, "rank 1 ") && strstr(why, "Dispatch 3"), "sentence: %s", why);
    if (r->rank == 0) printf("late: %s\n", why);
  }
  teamBarrier(r);
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
}

TEST(late_rank_is_named) {
  if (numGpus() < 2) SKIP("needs two GPUs");
  for (int mode = 0; mode < 2; mode++) {
    step_case_t c = smallCase((trefoil_mode_t)mode, 600);
    const char *error = teamThreads(numGpus(), runLate, &c);
    CHECK(!*error, "mode %d: %s", mode, error);
  }
}

static void runMasked(team_rank_t *r) {
  const step_case_t *c = r->user;
  step_data_t *d = stepMake(c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  ncclEpGroupConfig_t config = stepGroupConfig(c, r->numRanks);
  config.enable_mask = 1;
  config.timeout_ns = 200000000u;
  int error = 9, *mask, ok = 1;
  teamCheck(r, !cudaHostAlloc((void **)&mask, 64, cudaHostAllocPortable), "alloc");
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(c), NULL, 3, NULL));
  teamCheck(r, stepUpdate(d, h, r->stream), "update");
  if (r->rank != 1) {
    teamCheck(r, stepDispatch(d, h, r->stream), "dispatch");
    teamOk(r, ncclEpMaskQuery(group, mask, r->stream));
    cudaStreamSynchronize(r->stream);
    teamOk(r, ncclEpGetAsyncError(group, &error));
    for (int i = 0; i < r->numRanks; i++) ok &= mask[i] == (i != 1);
    teamCheck(r, error == 1 && ok, "not masked: %d", error);
    teamOk(r, ncclEpErrorClear(group));
  }
  teamBarrier(r);
  if (r->rank == 1) { /* makes up for the dispatch it missed, in its own view alone */
    int alone[16] = {0, 1};
    teamOk(r, ncclEpMaskUpdate(group, alone, r->stream));
    teamCheck(r, stepDispatch(d, h, r->stream), "dispatch");
    cudaStreamSynchronize(r->stream);
  }
  teamBarrier(r);
  teamOk(r, ncclEpMaskClean(group, r->stream));
  cudaStreamSynchronize(r->stream);
  teamBarrier(r);
  stepPoison(d);
  teamCheck(r, stepDispatch(d, h, r->stream), "dispatch");
  teamCheck(r, stepCombine(d, h, r->stream), "combine");
  teamOk(r, ncclEpMaskQuery(group, mask, r->stream));
  cudaStreamSynchronize(r->stream);
  teamOk(r, ncclEpGetAsyncError(group, &error));
  for (int i = 0; i < r->numRanks; i++) ok &= mask[i] == 1;
  teamCheck(r, error == 0 && ok, "not clean: %d", error);
  teamCheck(r, !*stepCompareDispatch(d), "%s", stepCompareDispatch(d));
  teamCheck(r, !*stepCompareCombine(d), "%s", stepCompareCombine(d));
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  cudaFreeHost(mask);
  stepFree(d);
}

TEST(masked_rank_comes_back) {
  if (numGpus() < 2) SKIP("needs two GPUs");
  for (int mode = 0; mode < 2; mode++) {
    step_case_t c = smallCase((trefoil_mode_t)mode, 610);
    const char *error = teamThreads(numGpus(), runMasked, &c);
    CHECK(!*error, "mode %d: %s", mode, error);
  }
}

/* Group creation: a rank that is refused, and one that does not come. */
static void runRefused(team_rank_t *r) {
  step_case_t c = smallCase(TREFOIL_LL_EXPERT_MAJOR, 620);
  ncclEpGroupConfig_t config = stepGroupConfig(&c, r->numRanks);
  config.timeout_ns = 2500000000u;
  ncclEpGroup_t group = NULL;
  if (r->rank == 1) config.num_experts = 0;
  ncclResult_t result = ncclEpCreateGroup(&group, r->comm, &config);
  const char *why = ncclEpGetLastError();
  teamCheck(r, result == ncclInvalidArgument && strstr(why, "num_experts"), "refused: %s", why);
  teamCheck(r, r->rank == 1 || strstr(why, "rank 1"), "refused: %s", why);
  teamBarrier(r);
  config.num_experts = r->rank == 1 ? 16 : 8;
  result = ncclEpCreateGroup(&group, r->comm, &config);
  why = ncclEpGetLastError();
  teamCheck(r, result == ncclInvalidArgument && strstr(why, "num_experts differs"), "differs: %s",
            why);
  teamBarrier(r);
  if (r->rank != 1) {
    result = ncclEpCreateGroup(&group, r->comm, &config);
    why = ncclEpGetLastError();
    teamCheck(r, result == ncclRemoteError && strstr(why, "rank 1 did not come"), "absent: %s",
              why);
  }
  teamBarrier(r);
  config.num_experts = 8;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpGroupDestroy(group));
}

TEST(group_creation_names_whom_it_misses) {
  if (numGpus() < 2) SKIP("needs two GPUs");
  const char *error = teamThreads(numGpus(), runRefused, NULL);
  CHECK(!*error, "%s", error);
}

/* ---- a thread that has called nothing yet ------------------------------------------------------- */

typedef struct afresh {
  step_data_t *d;
  ncclEpHandle_t handle;
  char error[200];
} afresh_t;

static void callOnce(afresh_t *a) {
  int ok = stepDispatch(a->d, a->handle, NULL) && !ncclEpComplete(a->handle, NULL, NULL) &&
           stepCombine(a->d, a->handle, NULL) && !ncclEpComplete(a->handle, NULL, NULL);
  snprintf(a->error, sizeof a->error, "%s", ok ? "" : ncclEpGetLastError());
}

static void *callAfresh(void *user) {
  callOnce(user);
  return NULL;
}

/* On the null stream, after the same calls of another thread: nothing before the launch needs the runtime. */
static void runAfresh(team_rank_t *r) {
  const step_case_t *c = r->user;
  step_data_t *d = stepMake(c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroup_t group;
  afresh_t a = {.d = d};
  ncclEpGroupConfig_t config = stepGroupConfig(c, r->numRanks);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&a.handle, group, stepLayout(c), NULL, c->topk, NULL));
  teamCheck(r, stepUpdate(d, a.handle, NULL), "update: %s", ncclEpGetLastError());
  callOnce(&a);
  teamCheck(r, !*a.error, "the first thread: %s", a.error);
  teamCheck(r, !cudaDeviceSynchronize(), "synchronize");
  stepPoison(d);
  pthread_t thread;
  teamCheck(r, !pthread_create(&thread, NULL, callAfresh, &a), "pthread_create");
  pthread_join(thread, NULL);
  teamCheck(r, !*a.error, "the new thread: %s", a.error);
  teamCheck(r, !cudaDeviceSynchronize(), "synchronize");
  teamCheck(r, !*stepCompareDispatch(d), "dispatch: %s", stepCompareDispatch(d));
  teamCheck(r, !*stepCompareCombine(d), "combine: %s", stepCompareCombine(d));
  teamOk(r, ncclEpHandleDestroy(a.handle));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
}

TEST(a_new_thread_calls) {
  if (!numGpus()) SKIP("needs a GPU");
  for (int mode = 0; mode < 4; mode++) {
    step_case_t c = smallCase((trefoil_mode_t)mode, 640);
    const char *error = teamThreads(1, runAfresh, &c);
    CHECK(!*error, "mode %d: %s", mode, error);
  }
}

TEST_MAIN()
