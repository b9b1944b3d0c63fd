/* Handles that meet: one handle_mem for several, buffers that grow or cannot, a handle given up
 * between the halves of its operation; and waits without an end. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "step.h"
#include "test.h"

static step_case_t smallCase(trefoil_mode_t mode, uint64_t seed) {
  step_case_t c = {.mode = mode, .topk = 3, .numExperts = 8, .maxTokens = 7, .width = 16};
  c.seed = seed;
  if (mode >= TREFOIL_HT_FLAT) c.maxRecv = 4 * 7 * 3 + 8;
  return c;
}

/* "For ever" must not wrap to a moment that has passed: rank 1 comes late to everything. */
static void runForEver(team_rank_t *r) {
  const step_case_t *c = r->user;
  step_data_t *d = stepMake(c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  ncclEpGroupConfig_t config = stepGroupConfig(c, r->numRanks);
  config.timeout_ns = UINT64_MAX - (uint64_t)r->rank;
  if (r->rank == 1) usleep(20000);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  if (r->rank == 1) usleep(20000);
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(c), NULL, 3, NULL));
  if (r->rank == 1) usleep(20000);
  teamCheck(r, stepUpdate(d, h, r->stream), "update: %s", ncclEpGetLastError());
  teamCheck(r, stepDispatch(d, h, r->stream), "dispatch: %s", ncclEpGetLastError());
  cudaStreamSynchronize(r->stream);
  teamCheck(r, !*stepCompareDispatch(d), "%s", stepCompareDispatch(d));
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
}

TEST(a_timeout_may_be_for_ever) {
  for (int mode = 0; mode < 4; mode += 2) {
    step_case_t c = smallCase((trefoil_mode_t)mode, 50);
    const char *error = teamThreads(2, runForEver, &c);
    CHECK(!*error, "mode %d: %s", mode, error);
  }
  setenv("NCCL_EP_TIMEOUT_MS", "18446744073709", 1); /* 2^64 ns and a bit */
  step_case_t c = smallCase(TREFOIL_LL_EXPERT_MAJOR, 51);
  const char *error = teamThreads(2, runForEver, &c);
  unsetenv("NCCL_EP_TIMEOUT_MS");
  CHECK(!*error, "NCCL_EP_TIMEOUT_MS: %s", error);
}

TEST_MAIN()
