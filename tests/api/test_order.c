/* Order of calls: two operations in flight completed in either order, capture and replay with other
 * routing, a second handle on the same memory, late, masked and killed ranks. */
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "step.h"
#include "test.h"

static step_case_t smallCase(trefoil_mode_t mode, uint64_t seed) {
  step_case_t c = {.mode = mode, .topk = 3, .numExperts = 8, .maxTokens = 7, .width = 16};
  c.seed = seed;
  if (mode >= TREFOIL_HT_FLAT) c.maxRecv = 4 * 7 * 3 + 8;
  return c;
}

typedef struct pair {
  step_case_t c[2];
  int lifo;
} pair_t;

/* Two handles: D(A) D(B), Completes in either order, C(A) C(B) likewise; a third is refused. */
static void runPair(team_rank_t *r) {
  const pair_t *pair = r->user;
  step_data_t *d[2];
  ncclEpHandle_t h[2];
  ncclEpGroup_t group;
  ncclEpGroupConfig_t config = stepGroupConfig(&pair->c[0], r->numRanks);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  for (int i = 0; i < 2; i++) {
    d[i] = stepMake(&pair->c[i], r->rank, r->numRanks, r->numRanks);
    teamOk(r, ncclEpInitHandle(&h[i], group, stepLayout(&pair->c[i]), NULL, 3, NULL));
    teamCheck(r, stepUpdate(d[i], h[i], r->stream), "update");
  }
  int first = pair->lifo ? 1 : 0;
  for (int round = 0; round < 5; round++) {
    for (int i = 0; i < 2; i++) teamCheck(r, stepDispatch(d[i], h[i], r->stream), "dispatch");
    teamCheck(r, !stepDispatch(d[0], h[0], r->stream), "a third operation was taken");
    teamCheck(r, strstr(ncclEpGetLastError(), "pending"), "%s", ncclEpGetLastError());
    teamOk(r, ncclEpComplete(h[first], NULL, r->stream));
    teamOk(r, ncclEpComplete(h[!first], NULL, r->stream));
    for (int i = 0; i < 2; i++) teamCheck(r, stepCombine(d[i], h[i], r->stream), "combine");
    teamOk(r, ncclEpComplete(h[first], NULL, r->stream));
    teamOk(r, ncclEpComplete(h[!first], NULL, r->stream));
  }
  cudaStreamSynchronize(r->stream);
  for (int i = 0; i < 2; i++) {
    teamCheck(r, !*stepCompareDispatch(d[i]), "handle %d: %s", i, stepCompareDispatch(d[i]));
    teamCheck(r, !*stepCompareCombine(d[i]), "handle %d: %s", i, stepCompareCombine(d[i]));
  }
  teamCheck(r, ncclEpGroupDestroy(group) == ncclInvalidUsage, "destroyed with live handles");
  for (int i = 0; i < 2; i++) teamOk(r, ncclEpHandleDestroy(h[i]));
  teamCheck(r, ncclEpHandleDestroy(h[0]) == ncclInvalidArgument, "destroyed twice");
  teamOk(r, ncclEpGroupDestroy(group));
  teamCheck(r, ncclEpGroupDestroy(group) == ncclInvalidArgument, "group destroyed twice");
  for (int i = 0; i < 2; i++) stepFree(d[i]);
}

TEST(double_buffering) {
  for (int mode = 0; mode < 2; mode++) {
    for (int lifo = 0; lifo < 2; lifo++) {
      pair_t pair = {.lifo = lifo};
      for (int i = 0; i < 2; i++) {
        pair.c[i] = smallCase((trefoil_mode_t)mode, (uint64_t)(300 + i));
        pair.c[i].sendOnly = 1;
      }
      const char *error = teamThreads(3, runPair, &pair);
      CHECK(!*error, "mode %d, lifo %d: %s", mode, lifo, error);
    }
  }
}

/* A send_only, whole operations on the other handle, then A's Complete: A gets its own rows, though the
 * others have used its slot since. */
static void runOvertaken(team_rank_t *r) {
  const pair_t *pair = r->user;
  step_data_t *d[2];
  ncclEpHandle_t h[2];
  ncclEpGroup_t group;
  ncclEpGroupConfig_t config = stepGroupConfig(&pair->c[0], r->numRanks);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  for (int i = 0; i < 2; i++) {
    d[i] = stepMake(&pair->c[i], r->rank, r->numRanks, r->numRanks);
    teamOk(r, ncclEpInitHandle(&h[i], group, stepLayout(&pair->c[i]), NULL, 3, NULL));
    teamCheck(r, stepUpdate(d[i], h[i], r->stream), "update");
  }
  teamCheck(r, stepDispatch(d[0], h[0], r->stream), "dispatch");
  for (int i = 0; i < 3; i++) teamCheck(r, stepDispatch(d[1], h[1], r->stream), "dispatch");
  teamCheck(r, ncclEpHandleDestroy(h[0]) == ncclInvalidUsage, "destroyed while pending");
  teamCheck(r, strstr(ncclEpGetLastError(), "ncclEpComplete"), "%s", ncclEpGetLastError());
  teamOk(r, ncclEpComplete(h[0], NULL, r->stream));
  teamCheck(r, stepCombine(d[0], h[0], r->stream), "combine");
  for (int i = 0; i < 3; i++) teamCheck(r, stepCombine(d[1], h[1], r->stream), "combine");
  teamOk(r, ncclEpComplete(h[0], NULL, r->stream));
  cudaStreamSynchronize(r->stream);
  for (int i = 0; i < 2; i++) {
    teamCheck(r, !*stepCompareDispatch(d[i]), "handle %d: %s", i, stepCompareDispatch(d[i]));
    teamCheck(r, !*stepCompareCombine(d[i]), "handle %d: %s", i, stepCompareCombine(d[i]));
    teamOk(r, ncclEpHandleDestroy(h[i]));
    stepFree(d[i]);
  }
  teamOk(r, ncclEpGroupDestroy(group));
}

TEST(whole_operations_while_one_is_pending) {
  for (int mode = 0; mode < 2; mode++) {
    pair_t pair = {.lifo = 0};
    for (int i = 0; i < 2; i++) pair.c[i] = smallCase((trefoil_mode_t)mode, (uint64_t)(350 + i));
    pair.c[0].sendOnly = 1;
    const char *error = teamThreads(3, runOvertaken, &pair);
    CHECK(!*error, "mode %d: %s", mode, error);
  }
}

/* Graph: update, dispatch, combine captured once; replayed after the routing's content changed. */
static void runGraph(team_rank_t *r) {
  pair_t *pair = r->user;
  step_data_t *a = stepMake(&pair->c[0], r->rank, r->numRanks, r->numRanks);
  step_data_t *b = stepMake(&pair->c[1], r->rank, r->numRanks, r->numRanks);
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
  teamCheck(r, stepCombine(a, h, r->stream), "combine: %s", ncclEpGetLastError());
  teamCheck(r, !cudaStreamEndCapture(r->stream, &graph), "end");
  teamCheck(r, !cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  for (int replay = 0; replay < 3; replay++) {
    cudaGraphLaunch(exec, r->stream);
    cudaStreamSynchronize(r->stream);
    teamCheck(r, !*stepCompareDispatch(a), "replay %d: %s", replay, stepCompareDispatch(a));
    teamCheck(r, !*stepCompareCombine(a), "replay %d: %s", replay, stepCompareCombine(a));
    stepPoison(a);
  }
  /* the other case's routing under the same addresses: no row is where it was */
  memcpy(a->idx[r->rank], b->idx[r->rank], (size_t)(a->numTokens[r->rank] * 3) * 4);
  cudaGraphLaunch(exec, r->stream);
  cudaStreamSynchronize(r->stream);
  int changed = *stepCompareDispatch(a) != 0;
  teamCheck(r, r->numRanks < 2 || changed, "the replay did not see the new routing");
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(a);
  stepFree(b);
}

TEST(capture_and_replay) {
  for (int mode = 0; mode < 4; mode++) {
    pair_t pair = {.lifo = 0};
    pair.c[0] = smallCase((trefoil_mode_t)mode, 400);
    pair.c[1] = smallCase((trefoil_mode_t)mode, 400);
    for (uint64_t seed = 401; seed < 500; seed++) { /* another routing with enough tokens */
      pair.c[1].seed = seed;
      step_data_t *a = stepMake(&pair.c[0], 0, 3, 3), *b = stepMake(&pair.c[1], 0, 3, 3);
      int enough = 1;
      for (int i = 0; i < 3; i++) enough &= b->numTokens[i] >= a->numTokens[i];
      stepFree(a);
      stepFree(b);
      if (enough) break;
    }
    const char *error = teamThreads(3, runGraph, &pair);
    CHECK(!*error, "mode %d: %s", mode, error);
  }
}

/* A second handle on the first one's memory: backward without an Update of its own. */
static void runSecond(team_rank_t *r) {
  pair_t *pair = r->user;
  step_data_t *forward = stepMake(&pair->c[0], r->rank, r->numRanks, r->numRanks);
  step_data_t *backward = stepMake(&pair->c[1], r->rank, r->numRanks, r->numRanks);
  ncclEpGroup_t group;
  ncclEpHandle_t h[2];
  ncclEpGroupConfig_t config = stepGroupConfig(&pair->c[0], r->numRanks);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  size_t bytes = 0;
  teamOk(r, ncclEpHandleMemSize(group, stepLayout(&pair->c[0]), NULL, &bytes, 3));
  ncclEpTensor_t mem = NCCL_EP_TENSOR_INIT;
  mem.ndim = 1;
  mem.datatype = ncclUint8;
  mem.sizes = &bytes;
  teamCheck(r, !cudaMalloc(&mem.data, bytes), "cudaMalloc");
  for (int i = 0; i < 2; i++) {
    teamOk(r, ncclEpInitHandle(&h[i], group, stepLayout(&pair->c[0]), NULL, 3, &mem));
  }
  teamCheck(r, stepUpdate(forward, h[0], r->stream), "update");
  teamCheck(r, stepDispatch(forward, h[0], r->stream), "dispatch");
  teamCheck(r, stepDispatch(backward, h[1], r->stream), "backward: %s", ncclEpGetLastError());
  teamCheck(r, stepCombine(backward, h[1], r->stream), "backward: %s", ncclEpGetLastError());
  teamCheck(r, stepCombine(forward, h[0], r->stream), "combine");
  cudaStreamSynchronize(r->stream);
  /* counters came with the first handle's Update */
  memcpy(backward->counters, forward->counters, (size_t)forward->L * 8);
  memcpy(backward->offsets, forward->offsets, (size_t)forward->L * 8);
  *backward->total = *forward->total;
  teamCheck(r, !*stepCompareDispatch(forward), "%s", stepCompareDispatch(forward));
  teamCheck(r, !*stepCompareDispatch(backward), "backward: %s", stepCompareDispatch(backward));
  teamCheck(r, !*stepCompareCombine(backward), "backward: %s", stepCompareCombine(backward));
  teamCheck(r, !*stepCompareCombine(forward), "%s", stepCompareCombine(forward));
  for (int i = 0; i < 2; i++) teamOk(r, ncclEpHandleDestroy(h[i]));
  teamOk(r, ncclEpGroupDestroy(group));
  cudaFree(mem.data);
  stepFree(forward);
  stepFree(backward);
}

TEST(second_handle_on_the_same_memory) {
  for (int mode = 2; mode < 4; mode++) {
    pair_t pair = {.lifo = 0};
    pair.c[0] = pair.c[1] = smallCase((trefoil_mode_t)mode, 500);
    pair.c[1].backward = 1;
    const char *error = teamThreads(3, runSecond, &pair);
    CHECK(!*error, "mode %d: %s", mode, error);
  }
}

/* Rank 1 never dispatches: the others say so within the timeout, and the process lives. */
static void runLate(team_rank_t *r) {
  const step_case_t *c = r->user;
  step_data_t *d = stepMake(c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  ncclEpGroupConfig_t config = stepGroupConfig(c, r->numRanks);
  config.timeout_ns = 100000000u;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(c), NULL, 3, NULL));
  if (r->rank != 1) {
    teamCheck(r, stepUpdate(d, h, r->stream), "update");
    stepDispatch(d, h, r->stream);
    cudaStreamSynchronize(r->stream);
    teamCheck(r, stepCombine(d, h, r->stream) == 0, "a call after the timeout was taken");
    const char *why = ncclEpGetLastError();
    teamCheck(r, strstr(why, "rank 1 ") != NULL, "does not name rank 1: %s", why);
  }
  teamBarrier(r);
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
}

TEST(late_rank_is_named) {
  for (int mode = 0; mode < 4; mode++) {
    step_case_t c = smallCase((trefoil_mode_t)mode, 600);
    const char *error = teamThreads(3, runLate, &c);
    CHECK(!*error, "mode %d: %s", mode, error);
  }
}

/* Rank 1 dispatches (or combines) after rank 0 gave up on it, freed its tensors and left: in one process it
 * must not read them any more. */
typedef struct freed {
  step_case_t c;
  int combine, ranksPerNode;
} freed_t;

static void runFreed(team_rank_t *r) {
  const freed_t *f = r->user;
  step_data_t *d = stepMake(&f->c, r->rank, r->numRanks, f->ranksPerNode);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  ncclEpGroupConfig_t config = stepGroupConfig(&f->c, r->numRanks);
  /* rank 1 has time */
  config.timeout_ns = r->rank == 0 ? 100000000u : 20000000000u;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(&f->c), NULL, 3, NULL));
  teamCheck(r, stepUpdate(d, h, r->stream), "update");
  if (f->combine) teamCheck(r, stepDispatch(d, h, r->stream), "dispatch");
  cudaStreamSynchronize(r->stream);
  teamBarrier(r);
  /* rank 0's own rows, in memory that goes away */
  void *rows = f->combine ? (void *)d->expertRows[r->rank] : (void *)d->tokens[r->rank], *mine;
  teamCheck(r, d->numTokens[0] > 0 && d->numTokens[1] > 0, "no rows to read");
  size_t bytes = (size_t)f->c.width * 2 * (size_t)(f->combine ? d->slots : d->numTokens[r->rank]);
  mine = mmap(NULL, bytes + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  teamCheck(r, mine != MAP_FAILED, "mmap");
  memcpy(mine, rows, bytes);
  uint16_t **place = f->combine ? &d->expertRows[r->rank] : &d->tokens[r->rank];
  *place = mine;
  if (r->rank == 1) teamBarrier(r); /* rank 0 has given up and freed */
  int taken = f->combine ? stepCombine(d, h, r->stream) : stepDispatch(d, h, r->stream);
  teamCheck(r, taken, "%s", ncclEpGetLastError());
  cudaStreamSynchronize(r->stream);
  mprotect(mine, bytes + 1, PROT_NONE); /* who reads it now is killed */
  *place = rows;
  if (r->rank == 0) teamBarrier(r);
  teamCheck(r, !stepUpdate(d, h, r->stream), "a call after the loss was taken");
  const char *why = ncclEpGetLastError();
  teamCheck(r, strstr(why, r->rank ? "rank 0 gave up" : "rank 1 "), "%s", why);
  teamBarrier(r);
  munmap(mine, bytes + 1);
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
}

TEST(late_rank_reads_no_freed_rows) {
  for (int i = 0; i < 4; i++) {
    freed_t f = {.c = smallCase(i & 1 ? TREFOIL_HT_EXPERT_MAJOR : TREFOIL_HT_FLAT, 650)};

    f.combine = i / 2;
    f.ranksPerNode = 2;
    const char *error = teamThreads(2, runFreed, &f);
    CHECK(!*error, "%s, mode %d: %s", f.combine ? "combine" : "dispatch", f.c.mode, error);
  }
}

/* With masks rank 1 is skipped, the flag goes up, and after Clean everybody is back. */
static void runMasked(team_rank_t *r) {
  const step_case_t *c = r->user;
  step_data_t *d = stepMake(c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  ncclEpGroupConfig_t config = stepGroupConfig(c, r->numRanks);
  config.enable_mask = 1;
  config.timeout_ns = 200000000u;
  int mask[3] = {9, 9, 9}, error = 9;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(c), NULL, 3, NULL));
  teamCheck(r, stepUpdate(d, h, r->stream), "update");
  if (r->rank != 1) {
    teamCheck(r, stepDispatch(d, h, r->stream), "dispatch");
    teamOk(r, ncclEpMaskQuery(group, mask, r->stream));
    cudaStreamSynchronize(r->stream);
    teamOk(r, ncclEpGetAsyncError(group, &error));
    teamCheck(r, error == 1 && mask[1] == 0 && mask[0] == 1 && mask[2] == 1, "not masked");
    teamOk(r, ncclEpErrorClear(group));
  }
  teamBarrier(r);
  /* rank 1 makes up for the dispatch it missed, in its own mask view */
  if (r->rank == 1) {
    int alone[3] = {0, 1, 0};
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
  teamCheck(r, error == 0 && mask[0] == 1 && mask[1] == 1 && mask[2] == 1, "not clean: %d%d%d, %d",
            mask[0], mask[1], mask[2], error);
  teamCheck(r, !*stepCompareDispatch(d), "%s", stepCompareDispatch(d));
  teamCheck(r, !*stepCompareCombine(d), "%s", stepCompareCombine(d));
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
}

TEST(masked_rank_comes_back) {
  for (int mode = 0; mode < 2; mode++) {
    step_case_t c = smallCase((trefoil_mode_t)mode, 700);
    const char *error = teamThreads(3, runMasked, &c);
    CHECK(!*error, "mode %d: %s", mode, error);
  }
}

/* Rank 2's process dies before its dispatch: the survivors name it long before the timeout. */
static void runKilled(team_rank_t *r) {
  const step_case_t *c = r->user;
  step_data_t *d = stepMake(c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  ncclEpGroupConfig_t config = stepGroupConfig(c, r->numRanks);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(c), NULL, 3, NULL));
  if (r->rank == 2) kill(getpid(), SIGKILL);
  stepUpdate(d, h, r->stream);
  stepDispatch(d, h, r->stream);
  cudaStreamSynchronize(r->stream);
  teamCheck(r, stepCombine(d, h, r->stream) == 0, "a call after the loss was taken");
  teamCheck(r, strstr(ncclEpGetLastError(), "rank 2 "), "%s", ncclEpGetLastError());
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
}

TEST(killed_rank_is_named) {
#ifdef __SANITIZE_THREAD__
  SKIP("ThreadSanitizer does not follow a process with threads through fork");
#endif
  for (int mode = 0; mode < 4; mode++) {
    step_case_t c = smallCase((trefoil_mode_t)mode, 800);
    const char *error = teamProcesses(3, runKilled, &c, 1u << 2);
    CHECK(!*error, "mode %d: %s", mode, error);
  }
}

/* Settings that differ: every rank gets the field and both values, and the comm stays usable. */
static void runDiffer(team_rank_t *r) {
  step_case_t c = smallCase(TREFOIL_LL_EXPERT_MAJOR, 900);
  ncclEpGroupConfig_t config = stepGroupConfig(&c, r->numRanks);
  ncclEpGroup_t group = (ncclEpGroup_t)&config;
  config.num_experts = r->rank == 1 ? 24 : 12;
  teamCheck(r, ncclEpCreateGroup(&group, r->comm, &config) == ncclInvalidArgument, "was taken");
  const char *why = ncclEpGetLastError();
  teamCheck(r, strstr(why, "num_experts") && strstr(why, "12") && strstr(why, "24"), "%s", why);
  teamCheck(r, group == (ncclEpGroup_t)&config, "the group was touched");
  config.num_experts = 12;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpGroupDestroy(group));
}

TEST(settings_that_differ) {
  const char *error = teamThreads(3, runDiffer, NULL);
  CHECK(!*error, "%s", error);
}

TEST_MAIN()
