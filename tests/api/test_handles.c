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

/* ---- one handle_mem for handles of different num_topk ---------------------------------------- */

typedef struct sharing {
  step_case_t c; /* backward; its top-k is the routing's */
  int topk[2];   /* the handles' num_topk: the first updates, the second reads */
  int apart;     /* the first is gone when the second is made */
} sharing_t;

static ncclEpTensor_t allocMem(size_t *bytes) {
  ncclEpTensor_t mem = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 1, .datatype = ncclUint8,
                        .sizes = bytes};
  if (cudaMalloc(&mem.data, *bytes) == cudaSuccess) memset(mem.data, 0xA5, *bytes);
  return mem;
}

static size_t memBytes(ncclEpGroup_t group, ncclEpLayout_t layout, const int topk[2]) {
  size_t most = 0, bytes = 0;
  for (int i = 0; i < 2; i++) {
    if (ncclEpHandleMemSize(group, layout, NULL, &bytes, topk[i]) == ncclSuccess && bytes > most) {
      most = bytes;
    }
  }
  return most;
}

static void runSharing(team_rank_t *r) {
  const sharing_t *x = r->user;
  step_data_t *d = stepMake(&x->c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroup_t group;
  ncclEpHandle_t first, second;
  ncclEpGroupConfig_t config = stepGroupConfig(&x->c, r->numRanks);
  config.num_topk = 0; /* so that -1 has room for more than the routing's */
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  ncclEpLayout_t layout = stepLayout(&x->c);
  size_t bytes = memBytes(group, layout, x->topk);
  ncclEpTensor_t mem = allocMem(&bytes);
  teamCheck(r, mem.data, "cudaMalloc");
  teamOk(r, ncclEpInitHandle(&first, group, layout, NULL, x->topk[0], &mem));
  if (!x->apart) teamOk(r, ncclEpInitHandle(&second, group, layout, NULL, x->topk[1], &mem));
  teamCheck(r, stepUpdate(d, first, r->stream), "update: %s", ncclEpGetLastError());
  if (x->apart) {
    teamOk(r, ncclEpHandleDestroy(first));
    teamOk(r, ncclEpInitHandle(&second, group, layout, NULL, x->topk[1], &mem));
  }
  teamCheck(r, stepDispatch(d, second, r->stream), "dispatch: %s", ncclEpGetLastError());
  teamCheck(r, stepCombine(d, second, r->stream), "combine: %s", ncclEpGetLastError());
  /* what does not fit the routing is refused: rows, and weights of another top-k */
  d->numTokens[r->rank]++;
  teamCheck(r, !stepDispatch(d, second, r->stream), "a row too many was taken");
  teamCheck(r, strstr(ncclEpGetLastError(), "inputs->tokens"), "%s", ncclEpGetLastError());
  d->numTokens[r->rank]--;
  step_case_t other = x->c;
  for (other.topk = x->c.topk - 1; other.topk <= x->c.topk + 1; other.topk += 2) {
    d->c = &other;
    teamCheck(r, !stepCombine(d, second, r->stream), "top-%d was taken", other.topk);
    teamCheck(r, strstr(ncclEpGetLastError(), "outputs->topk_weights"), "%s", ncclEpGetLastError());
  }
  d->c = &x->c;
  cudaStreamSynchronize(r->stream);
  teamCheck(r, !*stepCompareDispatch(d), "%s", stepCompareDispatch(d));
  teamCheck(r, !*stepCompareCombine(d), "%s", stepCompareCombine(d));
  if (!x->apart) teamOk(r, ncclEpHandleDestroy(first));
  teamOk(r, ncclEpHandleDestroy(second));
  teamOk(r, ncclEpGroupDestroy(group));
  cudaFree(mem.data);
  stepFree(d);
}

TEST(one_memory_for_handles_of_other_top_k) {
  static const int topk[3][2] = {{3, -1}, {-1, 3}, {-1, -1}};
  for (int mode = 2; mode < 4; mode++) {
    for (int i = 0; i < 6; i++) {
      sharing_t x = {.c = smallCase((trefoil_mode_t)mode, 60), .apart = i % 2};
      x.c.backward = 1;
      memcpy(x.topk, topk[i / 2], sizeof x.topk);
      const char *error = teamThreads(2, runSharing, &x);
      CHECK(!*error, "mode %d, top-k %d then %d, apart %d: %s", mode, x.topk[0], x.topk[1], x.apart,
            error);
    }
  }
}

/* No routing, one of another layout, one of another top-k: refused, and nothing is lost. */
static void runUnfit(team_rank_t *r) {
  const sharing_t *x = r->user;
  step_data_t *d = stepMake(&x->c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroup_t group;
  ncclEpHandle_t h, other;
  ncclEpGroupConfig_t config = stepGroupConfig(&x->c, r->numRanks);
  config.num_topk = 0;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  ncclEpLayout_t layout = stepLayout(&x->c), elsewhere = NCCL_EP_LAYOUT_FLAT;
  if (layout == NCCL_EP_LAYOUT_FLAT) elsewhere = NCCL_EP_LAYOUT_EXPERT_MAJOR;
  size_t bytes = memBytes(group, layout, (const int[2]){-1, 3});
  ncclEpTensor_t mem = allocMem(&bytes);
  teamOk(r, ncclEpInitHandle(&h, group, layout, NULL, 3, &mem));
#define UNFIT(call, what)                                                                          \
  do {                                                                                             \
    teamCheck(r, !(call), "line %d: %s was taken", __LINE__, #call);                               \
    teamCheck(r, strstr(ncclEpGetLastError(), (what)), "line %d: '%s' is not in: %s", __LINE__,    \
              (what), ncclEpGetLastError());                                                       \
  } while (0)
  UNFIT(stepDispatch(d, h, r->stream), "ncclEpUpdateHandle");
  UNFIT(stepCombine(d, h, r->stream), "ncclEpUpdateHandle");
  teamCheck(r, stepUpdate(d, h, r->stream), "update: %s", ncclEpGetLastError());
  teamOk(r, ncclEpInitHandle(&other, group, elsewhere, NULL, 3, &mem));
  step_case_t turned = x->c;
  turned.mode = x->c.mode == TREFOIL_HT_FLAT ? TREFOIL_HT_EXPERT_MAJOR : TREFOIL_HT_FLAT;
  d->c = &turned;
  UNFIT(stepDispatch(d, other, r->stream), "holds the routing of a");
  d->c = &x->c;
  teamOk(r, ncclEpHandleDestroy(other));
  teamOk(r, ncclEpInitHandle(&other, group, layout, NULL, 2, &mem));
  UNFIT(stepDispatch(d, other, r->stream), "a routing of top-3");
  UNFIT(stepCombine(d, other, r->stream), "a routing of top-3");
  teamOk(r, ncclEpHandleDestroy(other));
  teamCheck(r, stepDispatch(d, h, r->stream), "dispatch: %s", ncclEpGetLastError());
  teamCheck(r, stepCombine(d, h, r->stream), "combine: %s", ncclEpGetLastError());
  cudaStreamSynchronize(r->stream);
  teamCheck(r, !*stepCompareDispatch(d), "%s", stepCompareDispatch(d));
  teamCheck(r, !*stepCompareCombine(d), "%s", stepCompareCombine(d));
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  cudaFree(mem.data);
  stepFree(d);
}

TEST(a_memory_without_a_fitting_routing_loses_nothing) {
  for (int mode = 2; mode < 4; mode++) {
    sharing_t x = {.c = smallCase((trefoil_mode_t)mode, 70)};
    x.c.backward = 1;
    const char *error = teamThreads(2, runUnfit, &x);
    CHECK(!*error, "mode %d: %s", mode, error);
  }
}

/* A routing that a handle of another group has left there is none: other experts, other tokens. */
static void runOtherOwner(team_rank_t *r) {
  const step_case_t *c = r->user;
  for (int which = 0; which < 2; which++) {
    step_case_t other = *c;
    if (which == 0) other.numExperts /= 2;
    if (which == 1) other.maxTokens--;
    step_data_t *d = stepMake(c, r->rank, r->numRanks, r->numRanks);
    ncclEpGroup_t group;
    ncclEpHandle_t h;
    ncclEpGroupConfig_t config = stepGroupConfig(c, r->numRanks);
    teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
    size_t bytes = 0;
    teamOk(r, ncclEpHandleMemSize(group, stepLayout(c), NULL, &bytes, 3));
    ncclEpTensor_t mem = allocMem(&bytes);
    teamOk(r, ncclEpInitHandle(&h, group, stepLayout(c), NULL, 3, &mem));
    teamCheck(r, stepUpdate(d, h, r->stream), "update: %s", ncclEpGetLastError());
    cudaStreamSynchronize(r->stream);
    teamOk(r, ncclEpHandleDestroy(h));
    teamOk(r, ncclEpGroupDestroy(group));
    config = stepGroupConfig(&other, r->numRanks);
    teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
    teamOk(r, ncclEpInitHandle(&h, group, stepLayout(&other), NULL, 3, &mem));
    if (d->numTokens[r->rank] > other.maxTokens) d->numTokens[r->rank] = other.maxTokens;
    UNFIT(stepDispatch(d, h, r->stream), "ncclEpUpdateHandle");
    UNFIT(stepCombine(d, h, r->stream), "ncclEpUpdateHandle");
    teamOk(r, ncclEpHandleDestroy(h));
    teamOk(r, ncclEpGroupDestroy(group));
    cudaFree(mem.data);
    stepFree(d);
  }
}

TEST(a_routing_of_another_group_is_none) {
  for (int mode = 2; mode < 4; mode++) {
    step_case_t c = smallCase((trefoil_mode_t)mode, 75);
    const char *error = teamThreads(2, runOtherOwner, &c);
    CHECK(!*error, "mode %d: %s", mode, error);
  }
}

/* Each Update may bring another top-k, up to what the group or the library makes room for. */
static void runLargerTopk(team_rank_t *r) {
  const step_case_t *c = r->user;
  static int32_t ids[40];
  teamPin(NULL, ids, sizeof ids);
  for (int bound = 0; bound < 2; bound++) {
    ncclEpGroup_t group;
    ncclEpHandle_t h;
    ncclEpGroupConfig_t config = stepGroupConfig(c, r->numRanks);
    config.num_experts = 40;
    config.num_topk = bound ? 5 : 0;
    config.max_recv_tokens_per_rank = 200;
    size_t most = bound ? 5 : 32;
    teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
    teamOk(r, ncclEpInitHandle(&h, group, stepLayout(c), NULL, -1, NULL));
    for (size_t k = most + 1; k >= most; k--) {
      for (size_t i = 0; i < k; i++) ids[i] = (int32_t)i;
      ncclEpTensor_t idx = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, .datatype = ncclInt32,
                            .data = ids, .sizes = (size_t[]){1, k}};
      ncclResult_t got = ncclEpUpdateHandle(h, &idx, NULL, r->stream);
      cudaStreamSynchronize(r->stream);
      teamCheck(r, got == (k > most ? ncclInvalidUsage : ncclSuccess), "top-%zu gave %d: %s", k,
                (int)got, ncclEpGetLastError());
      teamCheck(r, k == most || strstr(ncclEpGetLastError(), "top-k up to"), "%s",
                ncclEpGetLastError());
    }
    teamOk(r, ncclEpHandleDestroy(h));
    teamOk(r, ncclEpGroupDestroy(group));
  }
}

TEST(a_larger_top_k_is_refused) {
  for (int mode = 2; mode < 4; mode++) {
    step_case_t c = smallCase((trefoil_mode_t)mode, 76);
    const char *error = teamThreads(1, runLargerTopk, &c);
    CHECK(!*error, "mode %d: %s", mode, error);
  }
}

/* Memory that a live handle would have overwritten: refused; after its destruction it is free again. */
static void runOverlap(team_rank_t *r) {
  const step_case_t *c = r->user;
  int ht = c->mode >= TREFOIL_HT_FLAT;
  ncclEpGroup_t group;
  ncclEpHandle_t h, other = NULL;
  ncclEpGroupConfig_t config = stepGroupConfig(c, r->numRanks);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  size_t bytes = 0;
  teamOk(r, ncclEpHandleMemSize(group, stepLayout(c), NULL, &bytes, 3));
  size_t room = 2 * bytes + 64;
  ncclEpTensor_t mem = allocMem(&room);
  char *start = (char *)mem.data;
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(c), NULL, 3, &mem));
  size_t next = (bytes + 15) / 16 * 16;
  for (size_t at = ht ? 16 : 0; at < bytes; at += 16) {
    mem.data = start + at;
    room = 2 * bytes + 64 - at;
    teamCheck(r,
              ncclEpInitHandle(&other, group, stepLayout(c), NULL, 3, &mem) ==
                      ncclInvalidArgument &&
                  !other,
              "%zu bytes from a live handle's memory", at);
    teamCheck(r, strstr(ncclEpGetLastError(), "handle_mem"), "%s", ncclEpGetLastError());
  }
  mem.data = start + next;
  room = 2 * bytes + 64 - next;
  teamOk(r, ncclEpInitHandle(&other, group, stepLayout(c), NULL, 3, &mem));
  teamOk(r, ncclEpHandleDestroy(h));
  mem.data = start;
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(c), NULL, 3, &mem));
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpHandleDestroy(other));
  teamOk(r, ncclEpGroupDestroy(group));
  cudaFree(start);
}

TEST(memory_of_live_handles_does_not_overlap) {
  for (int mode = 0; mode < 4; mode++) {
    step_case_t c = smallCase((trefoil_mode_t)mode, 80);
    const char *error = teamThreads(1, runOverlap, &c);
    CHECK(!*error, "mode %d: %s", mode, error);
  }
}

TEST_MAIN()
