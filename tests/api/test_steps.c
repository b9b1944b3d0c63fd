/* Dispatch and combine against the reference: every mode, threads and processes, one node and
 * several, repeated without a new Update and without synchronising in between. */
#include <stdlib.h>

#include "api/cpu/cpu.h" /* the executor's own counters */
#include "step.h"
#include "test.h"

typedef struct job {
  step_case_t c;
  int ranksPerNode, repeats, windowed, leavesComplete;
} job_t;

/* Rows that this rank pulled, per rank it pulled from: what the reference counts in the routing. */
static void checkTraffic(team_rank_t *r, const job_t *job, step_data_t *d, ncclEpGroup_t group) {
  ep_cpu_group_t *g = epCpu(group);
  int64_t rows[64];
  for (int op = 0; op < 2; op++) {
    trefoil_case_t c = d->ref;
    if (op) c.quant = job->c.combineQuant;
    teamCheck(r, trefoilRefTraffic(&c, op, rows) == TREFOIL_OK, "%s", trefoilLastError());
    for (int src = 0; src < r->numRanks; src++) {
      long long want = (long long)rows[src * r->numRanks + r->rank] * job->repeats;
      long long got = (long long)g->peers[src].rowsFrom[op];
      teamCheck(r, got == want, "%s pulled %lld rows from rank %d, the routing says %lld",
                op ? "combine" : "dispatch", got, src, want);
    }
  }
}

static void runJob(team_rank_t *r) {
  const job_t *job = r->user;
  const step_case_t *c = &job->c;
  step_data_t *d = stepMake(c, r->rank, r->numRanks, job->ranksPerNode);
  ncclEpGroupConfig_t config = stepGroupConfig(c, r->numRanks);
  ncclEpHandleConfig_t handleConfig = stepHandleConfig(c);
  ncclEpGroup_t group;
  ncclEpHandle_t handle;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&handle, group, stepLayout(c), &handleConfig, c->topk, NULL));
  teamCheck(r, stepUpdate(d, handle, r->stream), "update: %s", ncclEpGetLastError());
  for (int i = 0; i < job->repeats; i++) {
    if (i == job->repeats - 1) {
      cudaStreamSynchronize(r->stream);
      stepPoison(d);
    }
    teamCheck(r, stepDispatch(d, handle, r->stream), "dispatch: %s", ncclEpGetLastError());
    if (!job->leavesComplete) teamOk(r, ncclEpComplete(handle, NULL, r->stream));
    teamCheck(r, stepCombine(d, handle, r->stream), "combine: %s", ncclEpGetLastError());
    if (!job->leavesComplete) teamOk(r, ncclEpComplete(handle, NULL, r->stream));
  }
  cudaStreamSynchronize(r->stream);
  int failed = 0;
  if (!c->drop && c->mode >= TREFOIL_HT_FLAT) teamOk(r, ncclEpGetAsyncError(group, &failed));
  teamCheck(r, !failed, "async error");
  teamCheck(r, !*stepCompareDispatch(d), "dispatch: %s", stepCompareDispatch(d));
  teamCheck(r, !*stepCompareCombine(d), "combine: %s", stepCompareCombine(d));
  if (!c->drop) checkTraffic(r, job, d, group);
  teamOk(r, ncclEpHandleDestroy(handle));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
}

static const char *modeNames[] = {"ll-expert-major", "ll-rank-major", "ht-flat", "ht-expert-major"};

/* The modes have their own limits: HT rows are multiples of 16 bytes, max_recv covers the worst. */
static job_t makeJob(trefoil_mode_t mode, int R, uint64_t seed) {
  job_t job = {.ranksPerNode = R, .repeats = 3};
  job.c = (step_case_t){.mode = mode, .topk = 4, .numExperts = 11, .maxTokens = 9, .width = 24};
  job.c.seed = seed;
  job.c.wideIds = seed % 2;
  job.c.globalIds = seed % 3 == 0;
  if (mode == TREFOIL_HT_FLAT) job.c.maxRecv = R * 9;
  if (mode == TREFOIL_HT_EXPERT_MAJOR) job.c.maxRecv = R * 9 * 4 + 11 * 4;
  if (mode == TREFOIL_HT_EXPERT_MAJOR) job.c.alignment = 4;
  return job;
}

static void checkThreads(job_t *job, int R, const char *what) {
  const char *error = teamThreads(R, runJob, job);
  CHECK(!*error, "%s, %s, %d ranks, seed %d: %s", what, modeNames[job->c.mode], R, (int)job->c.seed,
        error);
}

TEST(modes_in_one_process) {
  for (int mode = 0; mode < 4; mode++) {
    for (int R = 1; R <= 4; R++) {
      job_t job = makeJob((trefoil_mode_t)mode, R, (uint64_t)(10 * R + mode));
      checkThreads(&job, R, "threads");
    }
  }
}

TEST(send_only) {
  for (int mode = 0; mode < 2; mode++) {
    job_t job = makeJob((trefoil_mode_t)mode, 3, 77);
    job.c.sendOnly = 1;
    checkThreads(&job, 3, "send_only");
  }
}

/* High throughput ignores it: all is done without a Complete. */
TEST(send_only_in_high_throughput) {
  for (int mode = 2; mode < 4; mode++) {
    job_t job = makeJob((trefoil_mode_t)mode, 3, 77);
    job.c.sendOnly = job.leavesComplete = 1;
    checkThreads(&job, 3, "send_only");
  }
}

TEST(backward) {
  for (int mode = 2; mode < 4; mode++) {
    job_t job = makeJob((trefoil_mode_t)mode, 3, 78);
    job.c.backward = 1;
    checkThreads(&job, 3, "backward");
  }
}

TEST(eager_sizing) {
  for (int mode = 2; mode < 4; mode++) {
    job_t job = makeJob((trefoil_mode_t)mode, 3, 79);
    job.c.maxRecv = 0;
    checkThreads(&job, 3, "eager");
  }
}

TEST(overflow_drop) {
  for (int mode = 2; mode < 4; mode++) {
    for (int seed = 80; seed < 84; seed++) {
      job_t job = makeJob((trefoil_mode_t)mode, 3, (uint64_t)seed);
      job.c.maxRecv = 9;
      job.c.drop = 1;
      checkThreads(&job, 3, "drop");
    }
  }
}

TEST(quantised_dispatch) {
  for (int mode = 0; mode < 4; mode++) {
    job_t job = makeJob((trefoil_mode_t)mode, 3, 90);
    job.c.quant = TREFOIL_QUANT_CALLER;
    checkThreads(&job, 3, "caller's scales");
    if (mode >= 2) continue;
    job = makeJob((trefoil_mode_t)mode, 3, 91);
    job.c.width = 512;
    job.c.quant = TREFOIL_QUANT_E4M3;
    checkThreads(&job, 3, "E4M3");
    job.c.roundScales = 1;
    checkThreads(&job, 3, "E4M3, rounded scales");
  }
}

TEST(nvfp4_combine) {
  for (int mode = 0; mode < 2; mode++) {
    job_t job = makeJob((trefoil_mode_t)mode, 3, 92);
    job.c.width = 32;
    job.c.combineQuant = TREFOIL_QUANT_NVFP4;
    checkThreads(&job, 3, "NVFP4");
  }
}

TEST(partial_combine) {
  setenv("NCCL_EP_LL_COMBINE", "partial", 1);
  job_t job = makeJob(TREFOIL_LL_EXPERT_MAJOR, 3, 93);
  job.c.partial = 1;
  checkThreads(&job, 3, "partial sums");
  job.c.sendOnly = 1;
  checkThreads(&job, 3, "partial sums, send_only");
  job = makeJob(TREFOIL_LL_EXPERT_MAJOR, 3, 94);
  job.c.width = 32;
  job.c.partial = 1;
  job.c.combineQuant = TREFOIL_QUANT_NVFP4; /* of a row each: nothing is summed before */
  checkThreads(&job, 3, "partial sums asked for, NVFP4");
  unsetenv("NCCL_EP_LL_COMBINE");
}

/* 150 tokens are three chunks; 2 nodes of 2 and 3 nodes of 1 and 2 are pretended. */
TEST(several_nodes) {
  static const int shapes[][2] = {{4, 2}, {3, 1}, {6, 2}, {4, 4}};
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    int R = shapes[i][0];
    char size[8];
    snprintf(size, sizeof size, "%d", shapes[i][1]);
    setenv("NCCL_LSA_TEAM_SIZE", size, 1);
    for (int mode = 0; mode < 4; mode++) {
      for (int backward = 0; backward < (mode >= 2 ? 2 : 1); backward++) {
        job_t job = makeJob((trefoil_mode_t)mode, R, 100 + i);
        job.ranksPerNode = shapes[i][1];
        job.c.maxTokens = 150;
        job.c.backward = backward;
        if (mode >= 2) job.c.maxRecv = R * 150 * 4 + 100;
        checkThreads(&job, R, backward ? "nodes, backward" : "nodes");
      }
    }
    unsetenv("NCCL_LSA_TEAM_SIZE");
  }
}

/* A row of two bytes more than the group was made for, both ways. */
static void runTooWide(team_rank_t *r) {
  const job_t *job = r->user;
  step_data_t *d = stepMake(&job->c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroupConfig_t config = stepGroupConfig(&job->c, r->numRanks);
  ncclEpGroup_t group;
  ncclEpHandle_t handle;
  config.max_token_bytes = (unsigned)(job->c.width * 2 - 2);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&handle, group, stepLayout(&job->c), NULL, job->c.topk, NULL));
  teamCheck(r, stepUpdate(d, handle, r->stream), "update: %s", ncclEpGetLastError());
  teamCheck(r, !stepDispatch(d, handle, r->stream), "a dispatch was taken");
  teamCheck(r, strstr(ncclEpGetLastError(), "max_token_bytes"), "%s", ncclEpGetLastError());
  teamCheck(r, !stepCombine(d, handle, r->stream), "a combine was taken");
  teamCheck(r, strstr(ncclEpGetLastError(), "max_token_bytes"), "%s", ncclEpGetLastError());
  teamOk(r, ncclEpHandleDestroy(handle));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
}

TEST(rows_above_the_groups_limit) {
  for (int mode = 0; mode < 2; mode++) {
    job_t job = makeJob((trefoil_mode_t)mode, 2, 92);
    const char *error = teamThreads(2, runTooWide, &job);
    CHECK(!*error, "mode %d: %s", mode, error);
  }
}

TEST(processes) {
#ifdef __SANITIZE_THREAD__
  SKIP("ThreadSanitizer does not follow a process with threads through fork");
#endif
  for (int mode = 0; mode < 4; mode++) {
    job_t job = makeJob((trefoil_mode_t)mode, 3, 120);
    const char *error = teamProcesses(3, runJob, &job, 0);
    CHECK(!*error, "processes, %s: %s", modeNames[mode], error);
  }
}

TEST_MAIN()
