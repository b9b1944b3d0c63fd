/* What the CPU library counts of its own (trefoil/device.h): bytes per destination equal the routing's,
 * in every mode, one node and several, threads and processes; only while it is on; a sentence where
 * nothing was counted, or where a rank has not come. */
#include <stdlib.h>

#include "step.h"
#include "test.h"
#include "trefoil/device.h"

typedef struct job {
  step_case_t c;
  int ranksPerNode, fromEnvironment;
} job_t;

static int step(team_rank_t *r, step_data_t *d, ncclEpHandle_t h) {
  return stepDispatch(d, h, r->stream) && ncclEpComplete(h, NULL, r->stream) == ncclSuccess &&
         stepCombine(d, h, r->stream) && ncclEpComplete(h, NULL, r->stream) == ncclSuccess;
}

/* This rank's counts of one kind against `times` steps. */
static void expectCounts(team_rank_t *r, step_data_t *d, ncclEpGroup_t group, int kind, int times) {
  uint64_t bytes[16];
  int64_t rows[16 * 16];
  int tiers[16], G = d->ref.routing.shape.ranksPerNode;
  teamCheck(r, trefoilRefTraffic(&d->ref, kind, rows) == TREFOIL_OK, "%s", trefoilLastError());
  teamOk(r, ncclEpReadBytes(group, kind, bytes, tiers, 1, r->stream));
  for (int q = 0; q < r->numRanks; q++) {
    unsigned long long want = (unsigned long long)rows[r->rank * r->numRanks + q] *
                              (unsigned long long)(times * d->c->width * 2);
    int tier = q == r->rank ? 0 : q / G == r->rank / G ? 1 : 2;
    teamCheck(r, bytes[q] == want, "%s to rank %d: %llu bytes, the routing says %llu",
              kind ? "combine" : "dispatch", q, (unsigned long long)bytes[q], want);
    teamCheck(r, tiers[q] == tier, "tier %d of the way to rank %d", tiers[q], q);
  }
}

static void runJob(team_rank_t *r) {
  const job_t *job = r->user;
  step_data_t *d = stepMake(&job->c, r->rank, r->numRanks, job->ranksPerNode);
  ncclEpGroupConfig_t config = stepGroupConfig(&job->c, r->numRanks);
  ncclEpHandleConfig_t handleConfig = stepHandleConfig(&job->c);
  ncclEpGroup_t group;
  ncclEpHandle_t handle;
  uint64_t bytes[16];
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r,
         ncclEpInitHandle(&handle, group, stepLayout(&job->c), &handleConfig, job->c.topk, NULL));
  teamCheck(r, stepUpdate(d, handle, r->stream), "update: %s", ncclEpGetLastError());
  if (!job->fromEnvironment) {
    teamCheck(r, ncclEpReadBytes(group, 0, bytes, NULL, 0, r->stream) == ncclInvalidUsage, "read");
    teamCheck(r, strstr(ncclEpGetLastError(), "never counted"), "%s", ncclEpGetLastError());
    teamCheck(r, step(r, d, handle), "%s", ncclEpGetLastError()); /* not counted */
    teamOk(r, ncclEpCountBytes(group, 1));
  }
  for (int i = 0; i < 3; i++) teamCheck(r, step(r, d, handle), "%s", ncclEpGetLastError());
  teamOk(r, ncclEpCountBytes(group, 0));
  teamCheck(r, step(r, d, handle), "%s", ncclEpGetLastError());
  expectCounts(r, d, group, NCCL_EP_KIND_DISPATCH, 3);
  expectCounts(r, d, group, NCCL_EP_KIND_COMBINE, 3);
  expectCounts(r, d, group, NCCL_EP_KIND_DISPATCH, 0);
  expectCounts(r, d, group, NCCL_EP_KIND_COMBINE, 0);
  teamCheck(r, ncclEpReadBytes(group, 2, bytes, NULL, 0, r->stream) == ncclInvalidArgument, "kind");
  teamOk(r, ncclEpHandleDestroy(handle));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
}

static job_t makeJob(int mode, int R, int G) {
  job_t job = {.ranksPerNode = G};
  job.c = (step_case_t){.mode = (trefoil_mode_t)mode,
                        .topk = 4,
                        .numExperts = 11,
                        .maxTokens = 150,
                        .width = 24,
                        .seed = (uint64_t)(31 * R + mode)};
  if (mode >= TREFOIL_HT_FLAT) job.c.maxRecv = R * 150 * 4 + 100;
  return job;
}

static void everyMode(int processes) {
  static const int shapes[][2] = {{1, 1}, {3, 3}, {4, 2}, {6, 2}};
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    char size[8];
    snprintf(size, sizeof size, "%d", shapes[i][1]);
    setenv("NCCL_LSA_TEAM_SIZE", size, 1);
    for (int mode = 0; mode < 4; mode++) {
      job_t job = makeJob(mode, shapes[i][0], shapes[i][1]);
      const char *error = processes ? teamProcesses(shapes[i][0], runJob, &job, 0)
                                    : teamThreads(shapes[i][0], runJob, &job);
      CHECK(!*error, "mode %d, %d ranks: %s", mode, shapes[i][0], error);
    }
    unsetenv("NCCL_LSA_TEAM_SIZE");
  }
}

TEST(bytes_equal_the_routing_in_every_mode) {
  everyMode(0);
}

TEST(processes_count_the_same) {
#ifdef __SANITIZE_THREAD__
  SKIP("children of a program with threads");
#else
  everyMode(1);
#endif
}

TEST(the_environment_turns_it_on) {
  setenv("NCCL_EP_COUNT_BYTES", "1", 1);
  job_t job = makeJob(TREFOIL_LL_RANK_MAJOR, 2, 2);
  job.fromEnvironment = 1;
  const char *error = teamThreads(2, runJob, &job);
  unsetenv("NCCL_EP_COUNT_BYTES");
  CHECK(!*error, "%s", error);
}

/* Neither rank has come to the receiving half yet when rank 0 wants its counts. */
static void runLate(team_rank_t *r) {
  const job_t *job = r->user;
  step_data_t *d = stepMake(&job->c, r->rank, r->numRanks, 2);
  ncclEpGroupConfig_t config = stepGroupConfig(&job->c, r->numRanks);
  config.timeout_ns = 300000000u;
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  uint64_t bytes[16] = {77};
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpCountBytes(group, 1));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(&job->c), NULL, job->c.topk, NULL));
  teamCheck(r, stepUpdate(d, h, r->stream), "update: %s", ncclEpGetLastError());
  if (r->rank == 0) {
    teamCheck(r, stepDispatch(d, h, r->stream), "%s", ncclEpGetLastError());
    ncclResult_t rc = ncclEpReadBytes(group, 0, bytes, NULL, 1, r->stream);
    teamCheck(r, rc == ncclRemoteError && bytes[0] == 77, "%d", (int)rc);
    teamCheck(r, strstr(ncclEpGetLastError(), "has not taken what rank 0 sent to it"), "%s",
              ncclEpGetLastError());
  }
  teamBarrier(r);
  if (r->rank == 1) teamCheck(r, stepDispatch(d, h, r->stream), "%s", ncclEpGetLastError());
  teamOk(r, ncclEpComplete(h, NULL, r->stream));
  expectCounts(r, d, group, NCCL_EP_KIND_DISPATCH, 1);
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
}

TEST(counts_of_what_nobody_took_yet) {
  job_t job = makeJob(TREFOIL_LL_EXPERT_MAJOR, 2, 2);
  job.c.sendOnly = 1;
  const char *error = teamThreads(2, runLate, &job);
  CHECK(!*error, "%s", error);
}

TEST_MAIN()
