/* Collective calls in which a rank is refused, late, gone or different: every rank gets an error that says
 * so, within its timeout, and the next try works as if nothing had been. */
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "step.h"
#include "test.h"

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static step_case_t smallCase(trefoil_mode_t mode) {
  step_case_t c = {
      .mode = mode, .topk = 3, .numExperts = 8, .maxTokens = 7, .width = 16, .seed = 41};
  if (mode >= TREFOIL_HT_FLAT) c.maxRecv = 4 * 7 * 3 + 8;
  return c;
}

/* A round on the handle, compared with the reference. */
static void roundTrip(team_rank_t *r, ncclEpHandle_t h, const step_case_t *c) {
  step_data_t *d = stepMake(c, r->rank, r->numRanks, r->numRanks);
  teamCheck(r, stepUpdate(d, h, r->stream), "update: %s", ncclEpGetLastError());
  teamCheck(r, stepDispatch(d, h, r->stream), "dispatch: %s", ncclEpGetLastError());
  teamCheck(r, stepCombine(d, h, r->stream), "combine: %s", ncclEpGetLastError());
  cudaStreamSynchronize(r->stream);
  teamCheck(r, !*stepCompareDispatch(d), "%s", stepCompareDispatch(d));
  teamCheck(r, !*stepCompareCombine(d), "%s", stepCompareCombine(d));
  stepFree(d);
}

static ncclResult_t init(ncclEpHandle_t *h, ncclEpGroup_t group, const step_case_t *c, int topk) {
  return ncclEpInitHandle(h, group, stepLayout(c), NULL, topk, NULL);
}

/* Rank 1's configuration is refused: the others hear which field, long before the timeout. */
static void refusedConfig(team_rank_t *r) {
  step_case_t c = smallCase(TREFOIL_LL_EXPERT_MAJOR);
  ncclEpGroupConfig_t config = stepGroupConfig(&c, r->numRanks);
  ncclEpGroup_t none = (ncclEpGroup_t)&config, group = none;
  unsigned bytes = config.max_token_bytes;
  if (r->rank == 1) config.max_token_bytes = 0;
  double start = now();
  ncclResult_t result = ncclEpCreateGroup(&group, r->comm, &config);
  const char *why = ncclEpGetLastError();
  teamCheck(r, result == ncclInvalidArgument && group == none, "%d: %s", (int)result, why);
  teamCheck(r, strstr(why, "max_token_bytes") && (r->rank == 1 || strstr(why, "rank 1 ")), "%s",
            why);
  teamCheck(r, now() - start < 20, "after %.0f s", now() - start);
  teamBarrier(r);
  config.max_token_bytes = bytes;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpGroupDestroy(group));
}

TEST(a_refused_configuration_is_heard_of) {
  const char *error = teamThreads(3, refusedConfig, NULL);
  CHECK(!*error, "%s", error);
#ifndef __SANITIZE_THREAD__
  error = teamProcesses(3, refusedConfig, NULL, 0);
  CHECK(!*error, "processes: %s", error);
#endif
}

/* Rank 0 alone is refused once, then all call: the refusal concerns nobody else. */
static void refusedAlone(team_rank_t *r) {
  step_case_t c = smallCase(TREFOIL_LL_EXPERT_MAJOR);
  ncclEpGroupConfig_t config = stepGroupConfig(&c, r->numRanks), bad = config;
  ncclEpGroup_t group;
  bad.num_experts = 0;
  for (int round = 0; round < 2; round++) {
    if (r->rank == 0) {
      teamCheck(r, ncclEpCreateGroup(&group, r->comm, &bad) == ncclInvalidArgument, "was taken");
    }
    teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
    teamOk(r, ncclEpGroupDestroy(group));
  }
}

TEST(a_refusal_of_one_rank_alone) {
  const char *error = teamThreads(2, refusedAlone, NULL);
  CHECK(!*error, "%s", error);
}

/* Rank 1 does not come to ncclEpCreateGroup: the group's own timeout holds, not NCCL's. */
static void lateGroup(team_rank_t *r) {
  step_case_t c = smallCase(TREFOIL_HT_FLAT);
  ncclEpGroupConfig_t config = stepGroupConfig(&c, r->numRanks);
  ncclEpGroup_t group;
  config.timeout_ns = 100000000u;
  for (int i = 0; i < 2 && r->rank != 1; i++) {
    double start = now();
    teamCheck(r, ncclEpCreateGroup(&group, r->comm, &config) == ncclRemoteError, "no error");
    teamCheck(r, strstr(ncclEpGetLastError(), "rank 1 did not come"), "%s", ncclEpGetLastError());
    teamCheck(r, now() - start < 10, "after %.0f s", now() - start);
  }
  teamBarrier(r);
  config.timeout_ns = 0;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpGroupDestroy(group));
}

TEST(a_rank_late_for_the_group) {
  const char *error = teamThreads(3, lateGroup, NULL);
  CHECK(!*error, "%s", error);
}

/* ---- handles --------------------------------------------------------------------------------- */

static cudaError_t take(void **p, size_t n, void *context) {
  int *left = context;
  return (*left)-- > 0 ? cudaMalloc(p, n) : cudaErrorMemoryAllocation;
}
static cudaError_t give(void *p, void *context) {
  (void)context;
  return cudaFree(p);
}

typedef struct growth {
  step_case_t c;
  int budget; /* allocations that rank 1 has when the buffers shall grow */
} growth_t;

/* Rank 1's allocator fails: the others hear of it, the first handle lives on, a second try succeeds. */
static void failedGrowth(team_rank_t *r) {
  const growth_t *x = r->user;
  ncclEpGroupConfig_t config = stepGroupConfig(&x->c, r->numRanks);
  int left = 1000;
  if (config.num_topk) config.num_topk = 6;
  config.alloc = (ncclEpAllocConfig_t){take, give, &left};
  ncclEpGroup_t group;
  ncclEpHandle_t small, large = (ncclEpHandle_t)&left;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, init(&small, group, &x->c, 3));
  roundTrip(r, small, &x->c);
  if (r->rank == 1) left = x->budget;
  double start = now();
  ncclResult_t result = init(&large, group, &x->c, 6);
  teamCheck(r, result == ncclSystemError, "%d: %s", (int)result, ncclEpGetLastError());
  teamCheck(r, large == (ncclEpHandle_t)&left, "the handle was touched");
  teamCheck(r, strstr(ncclEpGetLastError(), "alloc_fn"), "%s", ncclEpGetLastError());
  teamCheck(r, now() - start < 20, "after %.0f s", now() - start);
  left = 1000;
  teamBarrier(r);
  roundTrip(r, small, &x->c);
  teamOk(r, init(&large, group, &x->c, 6));
  roundTrip(r, small, &x->c);
  step_case_t wide = x->c;
  wide.topk = 6;
  roundTrip(r, large, &wide);
  teamOk(r, ncclEpHandleDestroy(small));
  teamOk(r, ncclEpHandleDestroy(large));
  teamOk(r, ncclEpGroupDestroy(group));
  teamCheck(r, left >= 1000 - 16, "%d allocations", 1000 - left);
}

TEST(buffers_that_cannot_grow) {
  for (int mode = 0; mode < 4; mode += 2) {
    for (int budget = 0; budget < 2; budget++) {
      growth_t x = {smallCase((trefoil_mode_t)mode), budget};
      const char *error = teamThreads(2, failedGrowth, &x);
      CHECK(!*error, "mode %d, budget %d: %s", mode, budget, error);
    }
  }
}

/* num_topk differs: within what is there on rank 0, larger on rank 1; then larger on both. */
static void mixedTopk(team_rank_t *r) {
  step_case_t c = smallCase(TREFOIL_LL_EXPERT_MAJOR);
  ncclEpGroupConfig_t config = stepGroupConfig(&c, r->numRanks);
  config.timeout_ns = 200000000u;
  ncclEpGroup_t group;
  ncclEpHandle_t first, h;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, init(&first, group, &c, 3));
  ncclResult_t result = init(&h, group, &c, r->rank ? 5 : 2);
  teamCheck(r, result == (r->rank ? ncclRemoteError : ncclSuccess), "%d", (int)result);
  teamCheck(r, r->rank == 0 || strstr(ncclEpGetLastError(), "rank 0 "), "%s", ncclEpGetLastError());
  if (r->rank == 0) teamOk(r, ncclEpHandleDestroy(h));
  teamBarrier(r);
  teamCheck(r, init(&h, group, &c, r->rank ? 5 : 6) == ncclInvalidArgument, "was taken");
  const char *why = ncclEpGetLastError();
  teamCheck(r, strstr(why, "num_topk") && strchr(why, '5') && strchr(why, '6'), "%s", why);
  teamBarrier(r);
  teamOk(r, init(&h, group, &c, 8));
  roundTrip(r, first, &c);
  c.topk = 8;
  roundTrip(r, h, &c);
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpHandleDestroy(first));
  teamOk(r, ncclEpGroupDestroy(group));
}

TEST(num_topk_that_differs) {
  const char *error = teamThreads(2, mixedTopk, NULL);
  CHECK(!*error, "%s", error);
}

/* Growth while a send_only operation is pending is refused, and the operation is not lost. */
static void pendingGrowth(team_rank_t *r) {
  step_case_t c = smallCase(TREFOIL_LL_RANK_MAJOR);
  c.sendOnly = 1;
  step_data_t *d = stepMake(&c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroupConfig_t config = stepGroupConfig(&c, r->numRanks);
  ncclEpGroup_t group;
  ncclEpHandle_t h, larger;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, init(&h, group, &c, 3));
  teamCheck(r, stepUpdate(d, h, r->stream) && stepDispatch(d, h, r->stream), "dispatch");
  teamCheck(r, init(&larger, group, &c, 4) == ncclInvalidUsage, "was taken");
  teamCheck(r, strstr(ncclEpGetLastError(), "ncclEpComplete"), "%s", ncclEpGetLastError());
  teamOk(r, ncclEpComplete(h, NULL, r->stream));
  cudaStreamSynchronize(r->stream);
  teamCheck(r, !*stepCompareDispatch(d), "%s", stepCompareDispatch(d));
  teamOk(r, init(&larger, group, &c, 4));
  teamOk(r, ncclEpHandleDestroy(larger));
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
}

TEST(no_growth_under_a_pending_operation) {
  const char *error = teamThreads(2, pendingGrowth, NULL);
  CHECK(!*error, "%s", error);
}

/* A handle that ranks 0 and 1 want while they have masked rank 2, and all three later. */
static void maskedGrowth(team_rank_t *r) {
  step_case_t c = smallCase(TREFOIL_LL_EXPERT_MAJOR), other = smallCase(TREFOIL_LL_RANK_MAJOR);
  ncclEpGroupConfig_t config = stepGroupConfig(&c, r->numRanks);
  config.enable_mask = 1;
  config.timeout_ns = 200000000u;
  int mask[3] = {1, 1, 0};
  ncclEpGroup_t group;
  ncclEpHandle_t h, second;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, init(&h, group, &c, 3));
  if (r->rank < 2) {
    teamOk(r, ncclEpMaskUpdate(group, mask, r->stream));
    teamCheck(r, init(&second, group, &other, 3) == ncclRemoteError, "no error");
    teamCheck(r, strstr(ncclEpGetLastError(), "rank 2 "), "%s", ncclEpGetLastError());
  }
  teamBarrier(r);
  teamOk(r, ncclEpMaskClean(group, r->stream));
  cudaStreamSynchronize(r->stream);
  teamBarrier(r);
  teamOk(r, init(&second, group, &other, 3));
  roundTrip(r, second, &other);
  roundTrip(r, h, &c);
  teamOk(r, ncclEpHandleDestroy(second));
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
}

TEST(a_new_handle_after_a_rank_was_masked) {
  const char *error = teamThreads(3, maskedGrowth, NULL);
  CHECK(!*error, "%s", error);
}

TEST_MAIN()
