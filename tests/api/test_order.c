/* Order of calls: two operations in flight completed in either order, capture and replay with other
 * routing, a second handle on the same memory, settings that differ. */
#include <stdlib.h>

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

static int isRefused(int taken, const char *because) {
  return !taken && strstr(ncclEpGetLastError(), because);
}

/* With A and B in flight: nothing else on A, and no third operation on a handle of its own. */
static void checkRefused(team_rank_t *r, step_data_t *d, ncclEpHandle_t a, ncclEpHandle_t third) {
  teamCheck(r, isRefused(stepDispatch(d, a, r->stream), "pending"), "a dispatch of A was taken");
  teamCheck(r, isRefused(stepCombine(d, a, r->stream), "pending"), "a combine of A was taken");
  teamCheck(r, isRefused(stepUpdate(d, a, r->stream), "pending"), "an update of A was taken");
  teamCheck(r, isRefused(stepDispatch(d, third, r->stream), "in flight"), "a third dispatch");
  teamCheck(r, isRefused(stepCombine(d, third, r->stream), "in flight"), "a third combine");
}

/* Two handles: D(A) D(B), Completes in either order, C(A) C(B) likewise; a third is refused. */
static void runPair(team_rank_t *r) {
  const pair_t *pair = r->user;
  step_data_t *d[2];
  ncclEpHandle_t h[2], third;
  ncclEpGroup_t group;
  ncclEpGroupConfig_t config = stepGroupConfig(&pair->c[0], r->numRanks);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  for (int i = 0; i < 2; i++) {
    d[i] = stepMake(&pair->c[i], r->rank, r->numRanks, r->numRanks);
    teamOk(r, ncclEpInitHandle(&h[i], group, stepLayout(&pair->c[i]), NULL, 3, NULL));
    teamCheck(r, stepUpdate(d[i], h[i], r->stream), "update");
  }
  teamOk(r, ncclEpInitHandle(&third, group, stepLayout(&pair->c[0]), NULL, 3, NULL));
  teamCheck(r, stepUpdate(d[0], third, r->stream), "update");
  int first = pair->lifo ? 1 : 0;
  for (int round = 0; round < 5; round++) {
    for (int i = 0; i < 2; i++) teamCheck(r, stepDispatch(d[i], h[i], r->stream), "dispatch");
    checkRefused(r, d[0], h[0], third);
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
  teamOk(r, ncclEpHandleDestroy(third));
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

/* Another Update: a combine waits for its dispatch (low latency), and one that was captured before goes by
 * the routing it was captured with. */
static void runUpdated(team_rank_t *r) {
  const pair_t *pair = r->user;
  step_data_t *d[2];
  ncclEpHandle_t h;
  ncclEpGroup_t group;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  int isHt = pair->c[0].mode >= TREFOIL_HT_FLAT;
  ncclEpGroupConfig_t config = stepGroupConfig(&pair->c[0], r->numRanks);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(&pair->c[0]), NULL, 3, NULL));
  for (int i = 0; i < 2; i++) {
    d[i] = stepMake(&pair->c[i], r->rank, r->numRanks, r->numRanks);
    teamCheck(r, stepUpdate(d[i], h, r->stream), "update");
    if (!isHt) {
      teamCheck(r, !stepCombine(d[i], h, r->stream), "combined without a dispatch");
      teamCheck(r, strstr(ncclEpGetLastError(), "no ncclEpDispatch on this handle since"), "%s",
                ncclEpGetLastError());
    }
    if (i == 0 || !isHt) teamCheck(r, stepDispatch(d[i], h, r->stream), "dispatch");
    if (i == 0 && !isHt) cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeThreadLocal);
    teamCheck(r, stepCombine(d[i], h, r->stream), "combine");
    if (i == 0 && !isHt) {
      teamCheck(r,
                cudaStreamEndCapture(r->stream, &graph) == cudaSuccess &&
                    cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess,
                "capture");
      continue;
    }
    cudaStreamSynchronize(r->stream);
    teamCheck(r, !*stepCompareCombine(d[i]), "routing %d: %s", i, stepCompareCombine(d[i]));
  }
  if (!isHt) {
    cudaGraphLaunch(executable, r->stream);
    cudaStreamSynchronize(r->stream);
    teamCheck(r, !*stepCompareCombine(d[0]), "captured: %s", stepCompareCombine(d[0]));
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
  }
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  for (int i = 0; i < 2; i++) stepFree(d[i]);
}

TEST(combine_right_after_another_update) {
  for (int mode = 0; mode < 4; mode++) {
    pair_t pair = {.lifo = 0};
    for (int i = 0; i < 2; i++) pair.c[i] = smallCase((trefoil_mode_t)mode, (uint64_t)(330 + i));
    const char *error = teamThreads(3, runUpdated, &pair);
    CHECK(!*error, "mode %d: %s", mode, error);
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

/* Random orders of whole operations, sends and Completes on three handles, all ranks alike. */
enum { NUM_MIXED = 3 };
typedef struct mixed {
  step_case_t c[NUM_MIXED];
  step_data_t *d[NUM_MIXED];
  ncclEpHandle_t h[NUM_MIXED];
  int dispatched[NUM_MIXED];
  int pending[NUM_MIXED]; /* 0, or what follows */
  int done[NUM_MIXED];    /* bit 1: a dispatch to compare, bit 2: a combine */
  uint64_t state;
} mixed_t;

static int drawMixed(mixed_t *m, int n) {
  m->state = m->state * 6364136223846793005u + 1442695040888963407u;
  return (int)(m->state >> 33) % n;
}

static void compareMixed(team_rank_t *r, mixed_t *m, int step) {
  cudaStreamSynchronize(r->stream);
  for (int i = 0; i < NUM_MIXED; i++) {
    const char *first = m->done[i] & 1 ? stepCompareDispatch(m->d[i]) : "";
    teamCheck(r, !*first, "step %d, handle %d: %s", step, i, first);
    const char *second = m->done[i] & 2 ? stepCompareCombine(m->d[i]) : "";
    teamCheck(r, !*second, "step %d, handle %d: %s", step, i, second);
    if (m->pending[i]) continue;
    stepPoison(m->d[i]);
    m->done[i] = 0;
  }
}

static void runMixedStep(team_rank_t *r, mixed_t *m) {
  int i = drawMixed(m, NUM_MIXED), numPending = 0;
  for (int j = 0; j < NUM_MIXED; j++) numPending += m->pending[j] != 0;
  while (numPending == 2 && !m->pending[i]) i = (i + 1) % NUM_MIXED;
  if (m->pending[i]) {
    teamOk(r, ncclEpComplete(m->h[i], NULL, r->stream));
    m->done[i] |= m->pending[i];
    m->pending[i] = 0;
    return;
  }
  int kind = 1 + drawMixed(m, 2);
  if (!m->dispatched[i]) kind = 1; /* the first dispatch after the Update */
  m->dispatched[i] = 1;
  m->c[i].sendOnly = drawMixed(m, 2);
  int taken = kind == 1 ? stepDispatch(m->d[i], m->h[i], r->stream)
                        : stepCombine(m->d[i], m->h[i], r->stream);
  teamCheck(r, taken, "%s", ncclEpGetLastError());
  if (m->c[i].sendOnly) {
    m->pending[i] = kind;
  } else {
    m->done[i] |= kind;
  }
}

static void runMixed(team_rank_t *r) {
  mixed_t m = *(const mixed_t *)r->user;
  ncclEpGroup_t group;
  ncclEpGroupConfig_t config = stepGroupConfig(&m.c[0], r->numRanks);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  for (int i = 0; i < NUM_MIXED; i++) {
    m.d[i] = stepMake(&m.c[i], r->rank, r->numRanks, r->numRanks);
    teamOk(r, ncclEpInitHandle(&m.h[i], group, stepLayout(&m.c[i]), NULL, 3, NULL));
    teamCheck(r, stepUpdate(m.d[i], m.h[i], r->stream), "update");
  }
  for (int step = 0; step < 120 && !r->error[0]; step++) {
    runMixedStep(r, &m);
    if (!r->error[0] && drawMixed(&m, 4) == 0) compareMixed(r, &m, step);
  }
  if (r->error[0]) return;
  for (int i = 0; i < NUM_MIXED; i++) {
    teamOk(r, ncclEpComplete(m.h[i], NULL, r->stream));
    teamOk(r, ncclEpHandleDestroy(m.h[i]));
    stepFree(m.d[i]);
  }
  teamOk(r, ncclEpGroupDestroy(group));
}

TEST(random_orders) {
  for (uint64_t seed = 0; seed < 8; seed++) {
    mixed_t m = {.state = seed};
    for (int i = 0; i < NUM_MIXED; i++) {
      m.c[i] = smallCase((trefoil_mode_t)(seed % 2), seed * 10 + (uint64_t)i);
    }
    const char *error = teamThreads(3, runMixed, &m);
    CHECK(!*error, "seed %d: %s", (int)seed, error);
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

/* A program that makes a handle in every forward pass makes it in the capture, too. */
static void runMadeInside(team_rank_t *r) {
  const pair_t *pair = r->user;
  step_data_t *d[2];
  ncclEpGroup_t group;
  ncclEpHandle_t first, h[2];
  ncclEpGroupConfig_t config = stepGroupConfig(&pair->c[0], r->numRanks);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&first, group, stepLayout(&pair->c[0]), NULL, 3, NULL));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  for (int i = 0; i < 2; i++) d[i] = stepMake(&pair->c[i], r->rank, r->numRanks, r->numRanks);
  teamCheck(r, !cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeThreadLocal), "begin");
  for (int i = 0; i < 2; i++) {
    teamOk(r, ncclEpInitHandle(&h[i], group, stepLayout(&pair->c[i]), NULL, 3, NULL));
    teamCheck(r, stepUpdate(d[i], h[i], r->stream), "update: %s", ncclEpGetLastError());
    teamCheck(r, stepDispatch(d[i], h[i], r->stream), "dispatch: %s", ncclEpGetLastError());
    teamCheck(r, stepCombine(d[i], h[i], r->stream), "combine: %s", ncclEpGetLastError());
  }
  teamCheck(r, !cudaStreamEndCapture(r->stream, &graph), "end");
  teamCheck(r, !cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  for (int k = 0; k < 6 && !r->error[0]; k++) {
    cudaGraphLaunch(exec, r->stream);
    cudaStreamSynchronize(r->stream);
    for (int i = 0; i < 2; i++) {
      teamCheck(r, !*stepCompareDispatch(d[i]), "replay %d: %s", k, stepCompareDispatch(d[i]));
      teamCheck(r, !*stepCompareCombine(d[i]), "replay %d: %s", k, stepCompareCombine(d[i]));
      stepPoison(d[i]);
    }
  }
  if (r->error[0]) return;
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  for (int i = 0; i < 2; i++) {
    teamOk(r, ncclEpHandleDestroy(h[i]));
    stepFree(d[i]);
  }
  teamOk(r, ncclEpHandleDestroy(first));
  teamOk(r, ncclEpGroupDestroy(group));
}

TEST(handles_made_in_a_capture) {
  for (int mode = 0; mode < 4; mode++) {
    pair_t pair = {.lifo = 0};
    for (int i = 0; i < 2; i++) pair.c[i] = smallCase((trefoil_mode_t)mode, (uint64_t)(430 + i));
    const char *error = teamThreads(3, runMadeInside, &pair);
    CHECK(!*error, "mode %d: %s", mode, error);
  }
}

typedef struct one_op {
  step_case_t c;
  int combine;
} one_op_t;

/* Complete, but the graph with the send was never launched: nothing is received, a sentence tells why,
 * and the group goes on. */
static void runUnsent(team_rank_t *r) {
  const one_op_t *f = r->user;
  step_data_t *d = stepMake(&f->c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  ncclEpGroupConfig_t config = stepGroupConfig(&f->c, r->numRanks);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(&f->c), NULL, 3, NULL));
  teamCheck(r, stepUpdate(d, h, r->stream), "update");
  for (int i = 0; i < 3; i++) { /* slots hold old rows */
    teamCheck(r, stepDispatch(d, h, r->stream), "dispatch");
    teamOk(r, ncclEpComplete(h, NULL, r->stream));
    teamCheck(r, stepCombine(d, h, r->stream), "combine");
    teamOk(r, ncclEpComplete(h, NULL, r->stream));
  }
  cudaStreamSynchronize(r->stream);
  stepPoison(d);
  cudaGraph_t graph;
  teamCheck(r, !cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeRelaxed), "begin");
  int sent = f->combine ? stepCombine(d, h, r->stream) : stepDispatch(d, h, r->stream);
  teamCheck(r, sent, "%s", ncclEpGetLastError());
  teamCheck(r, !cudaStreamEndCapture(r->stream, &graph), "end");
  cudaGraphDestroy(graph);
  teamOk(r, ncclEpComplete(h, NULL, r->stream));
  cudaStreamSynchronize(r->stream);
  teamCheck(r, f->combine ? *stepCompareCombine(d) : *stepCompareDispatch(d), "rows were received");
  teamCheck(r, !stepDispatch(d, h, r->stream), "the receive of nothing is not told");
  teamCheck(r, strstr(ncclEpGetLastError(), "send_only"), "%s", ncclEpGetLastError());
  teamCheck(r, stepDispatch(d, h, r->stream), "%s", ncclEpGetLastError());
  teamOk(r, ncclEpComplete(h, NULL, r->stream));
  teamCheck(r, stepCombine(d, h, r->stream), "%s", ncclEpGetLastError());
  teamOk(r, ncclEpComplete(h, NULL, r->stream));
  cudaStreamSynchronize(r->stream);
  teamCheck(r, !*stepCompareDispatch(d), "%s", stepCompareDispatch(d));
  teamCheck(r, !*stepCompareCombine(d), "%s", stepCompareCombine(d));
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
}

TEST(receive_of_a_send_that_never_ran) {
  for (int i = 0; i < 4; i++) {
    one_op_t f = {.c = smallCase(i & 1 ? TREFOIL_LL_RANK_MAJOR : TREFOIL_LL_EXPERT_MAJOR, 450)};
    f.c.sendOnly = 1;
    f.combine = i / 2;
    const char *error = teamThreads(2, runUnsent, &f);
    CHECK(!*error, "%s, mode %d: %s", f.combine ? "combine" : "dispatch", f.c.mode, error);
  }
}

/* What was sent outside a graph is not received in one, where it would be received at every launch. */
static void runAcross(team_rank_t *r) {
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
  cudaGraph_t graph;
  teamCheck(r, stepDispatch(d[0], h[0], r->stream), "dispatch");
  teamCheck(r, !cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeRelaxed), "begin");
  int taken = stepDispatch(d[1], h[1], r->stream);
  teamCheck(r, !taken && strstr(ncclEpGetLastError(), "graph"), "%s", ncclEpGetLastError());
  teamCheck(r, !cudaStreamEndCapture(r->stream, &graph), "end");
  cudaGraphDestroy(graph);
  teamOk(r, ncclEpComplete(h[0], NULL, r->stream));
  teamCheck(r, stepDispatch(d[1], h[1], r->stream), "%s", ncclEpGetLastError());
  cudaStreamSynchronize(r->stream);
  for (int i = 0; i < 2; i++) {
    teamCheck(r, !*stepCompareDispatch(d[i]), "handle %d: %s", i, stepCompareDispatch(d[i]));
    teamOk(r, ncclEpHandleDestroy(h[i]));
    stepFree(d[i]);
  }
  teamOk(r, ncclEpGroupDestroy(group));
}

TEST(sent_outside_a_graph) {
  pair_t pair = {.lifo = 0};
  for (int i = 0; i < 2; i++) pair.c[i] = smallCase(TREFOIL_LL_EXPERT_MAJOR, (uint64_t)(480 + i));
  pair.c[0].sendOnly = 1;
  const char *error = teamThreads(2, runAcross, &pair);
  CHECK(!*error, "%s", error);
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
