/* The C API on GPUs: halves of an operation in and out of graphs, graphs that outlive the memory they were
 * captured with, and callers that have another GPU current. */
#include <string.h>

#include "gpu_case.h"
#include "test.h"

static cudaGraphExec_t endCapture(team_rank_t *r, cudaStream_t stream) {
  cudaGraph_t graph = NULL;
  cudaGraphExec_t exec = NULL;
  if (cudaStreamEndCapture(stream, &graph) || cudaGraphInstantiate(&exec, graph, 0)) {
    teamFail(r, "no graph");
    exec = NULL;
  }
  if (graph) cudaGraphDestroy(graph);
  return exec;
}

static void compare(team_rank_t *r, step_data_t *d, const char *when, int i) {
  cudaError_t error = cudaStreamSynchronize(r->stream);
  teamCheck(r, error == cudaSuccess, "%s %d: %s", when, i, cudaGetErrorString(error));
  teamCheck(r, !*stepCompareDispatch(d), "%s %d: %s", when, i, stepCompareDispatch(d));
  teamCheck(r, !*stepCompareCombine(d), "%s %d: %s", when, i, stepCompareCombine(d));
  stepPoison(d);
}

static void beginCapture(team_rank_t *r) {
  teamCheck(r, !cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeRelaxed), "begin");
}

/* ---- halves ------------------------------------------------------------------------------------ */

static void refusesComplete(team_rank_t *r, ncclEpHandle_t h) {
  ncclResult_t result = ncclEpComplete(h, NULL, r->stream);
  teamCheck(r,
            result == ncclInvalidUsage && strstr(ncclEpGetLastError(), "capture both or neither"),
            "Complete returned %d: %s", (int)result, ncclEpGetLastError());
}

/* Sent outside, completed in a capture: refused, and nothing is lost. */
static void sendOutside(team_rank_t *r, step_data_t *d, ncclEpHandle_t h) {
  teamCheck(r, stepDispatch(d, h, r->stream), "dispatch: %s", ncclEpGetLastError());
  cudaStream_t other;
  cudaGraph_t graph;
  teamCheck(r, !cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "stream");
  teamCheck(r, !cudaStreamBeginCapture(other, cudaStreamCaptureModeRelaxed), "begin");
  cudaStream_t own = r->stream;
  r->stream = other;
  refusesComplete(r, h);
  r->stream = own;
  teamCheck(r, !cudaStreamEndCapture(other, &graph), "end");
  cudaGraphDestroy(graph);
  cudaStreamDestroy(other);
  teamOk(r, ncclEpComplete(h, NULL, r->stream));
  teamCheck(r, stepCombine(d, h, r->stream), "combine: %s", ncclEpGetLastError());
  teamOk(r, ncclEpComplete(h, NULL, r->stream));
  compare(r, d, "sent outside", 0);
}

/* A graph of what sends, one of what receives. */
static void runHalves(team_rank_t *r) {
  const step_case_t *c = r->user;
  step_data_t *d = stepMake(c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  cudaGraphExec_t half[4];
  ncclEpGroupConfig_t config = stepGroupConfig(c, r->numRanks);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(c), NULL, c->topk, NULL));
  teamCheck(r, stepUpdate(d, h, r->stream), "update: %s", ncclEpGetLastError());
  sendOutside(r, d, h);
  for (int i = 0; i < 4 && !r->error[0]; i++) {
    if (i & 1) refusesComplete(r, h);
    beginCapture(r);
    if (i & 1) {
      teamOk(r, ncclEpComplete(h, NULL, r->stream));
    } else {
      int sent = i ? stepCombine(d, h, r->stream) : stepDispatch(d, h, r->stream);
      teamCheck(r, sent, "send %d: %s", i, ncclEpGetLastError());
    }
    half[i] = endCapture(r, r->stream);
  }
  for (int i = 0; i < 6 && !r->error[0]; i++) {
    for (int k = 0; k < 4; k++) cudaGraphLaunch(half[k], r->stream);
    compare(r, d, "replay", i);
  }
  if (r->error[0]) return;
  for (int i = 0; i < 4; i++) cudaGraphExecDestroy(half[i]);
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
}

TEST(halves_are_both_captured_or_neither) {
  if (!numGpus()) SKIP("needs a GPU");
  for (int mode = 0; mode < 2; mode++) {
    step_case_t c = smallCase((trefoil_mode_t)mode, 700);
    c.sendOnly = 1;
    const char *error = teamThreads(numGpus(), runHalves, &c);
    CHECK(!*error, "mode %d: %s", mode, error);
  }
}

/* ---- a graph and larger memory later ----------------------------------------------------------- */

typedef struct side {
  step_case_t c;
  step_data_t *d[2];
  ncclEpHandle_t h[2];
} side_t;

static void openSide(team_rank_t *r, side_t *s, ncclEpGroup_t group) {
  for (int i = 0; i < 2; i++) {
    s->d[i] = stepMake(&s->c, r->rank, r->numRanks, r->numRanks);
    teamOk(r, ncclEpInitHandle(&s->h[i], group, stepLayout(&s->c), NULL, s->c.topk, NULL));
    teamCheck(r, stepUpdate(s->d[i], s->h[i], r->stream), "update: %s", ncclEpGetLastError());
    stepPoison(s->d[i]);
  }
}

/* One handle after the other. */
static void runSide(team_rank_t *r, side_t *s) {
  for (int i = 0; i < 4; i++) {
    step_data_t *d = s->d[i / 2];
    ncclEpHandle_t h = s->h[i / 2];
    int ok = i & 1 ? stepCombine(d, h, r->stream) : stepDispatch(d, h, r->stream);
    teamCheck(r, ok, "operation %d: %s", i, ncclEpGetLastError());
    teamOk(r, ncclEpComplete(h, NULL, r->stream));
  }
}

/* Both dispatches in flight together. Returns 0 if the second one is refused. */
static int sendTwo(team_rank_t *r, side_t *s) {
  int first = stepDispatch(s->d[0], s->h[0], r->stream);
  int second = first && stepDispatch(s->d[1], s->h[1], r->stream);
  int completed = ncclEpComplete(s->h[0], NULL, r->stream) == ncclSuccess;
  if (second) completed &= ncclEpComplete(s->h[1], NULL, r->stream) == ncclSuccess;
  if (!first || !completed) teamFail(r, "%s", ncclEpGetLastError());
  return second;
}

static void compareSide(team_rank_t *r, side_t *s, const char *name, int i) {
  for (int k = 0; k < 2 && !r->error[0]; k++) compare(r, s->d[k], name, i);
}

/* Top-1 in a graph; then top-4, whose exchange memory is another: both go on, in any order. */
static void runOutlived(team_rank_t *r) {
  side_t sides[2];
  ncclEpGroup_t group;
  cudaGraphExec_t exec;
  for (int i = 0; i < 2; i++) {
    sides[i].c = *(const step_case_t *)r->user;
    sides[i].c.topk = 1 + 3 * i;
    sides[i].c.seed += (uint64_t)i;
  }
  ncclEpGroupConfig_t config = stepGroupConfig(&sides[0].c, r->numRanks);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  openSide(r, &sides[0], group);
  beginCapture(r);
  runSide(r, &sides[0]);
  exec = endCapture(r, r->stream);
  for (int i = 0; i < 3 && exec; i++) cudaGraphLaunch(exec, r->stream);
  compareSide(r, &sides[0], "before", 0);
  if (!r->error[0]) openSide(r, &sides[1], group);
  for (int i = 0; i < 12 && !r->error[0]; i++) {
    int isGraph = 0x5D2B >> i & 1; /* both neighbours, in all orders */
    if (isGraph) {
      cudaGraphLaunch(exec, r->stream);
    } else {
      runSide(r, &sides[1]);
    }
    if (i % 3 == 2) compareSide(r, &sides[!isGraph], isGraph ? "graph" : "new handles", i);
  }
  if (sides[0].c.sendOnly && !r->error[0]) {
    teamCheck(r, !sendTwo(r, &sides[1]), "two in flight were taken");
    stepCombine(sides[1].d[0], sides[1].h[0], r->stream);
    teamOk(r, ncclEpComplete(sides[1].h[0], NULL, r->stream));
    compare(r, sides[1].d[0], "after a refusal", 0);
  }
  if (r->error[0]) return;
  cudaStreamSynchronize(r->stream);
  cudaGraphExecDestroy(exec);
  for (int i = 0; i < 4; i++) {
    teamOk(r, ncclEpHandleDestroy(sides[i / 2].h[i % 2]));
    stepFree(sides[i / 2].d[i % 2]);
  }
  teamOk(r, ncclEpGroupDestroy(group));
}

TEST(graphs_outlive_the_memory_of_smaller_top_k) {
  if (!numGpus()) SKIP("needs a GPU");
  for (int way = 0; way < 4; way++) {
    step_case_t c = smallCase((trefoil_mode_t)(way & 1), 710);
    c.sendOnly = way >> 1;
    const char *error = teamThreads(numGpus(), runOutlived, &c);
    CHECK(!*error, "way %d: %s", way, error);
  }
}

/* A graph with two in flight: larger memory is refused, and all goes on. */
static void runTwo(team_rank_t *r) {
  side_t side = {.c = *(const step_case_t *)r->user};
  ncclEpGroup_t group;
  ncclEpHandle_t larger;
  ncclEpGroupConfig_t config = stepGroupConfig(&side.c, r->numRanks);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  openSide(r, &side, group);
  beginCapture(r);
  int ok = sendTwo(r, &side);
  cudaGraphExec_t exec = endCapture(r, r->stream);
  teamCheck(r, ok && exec, "not captured: %s", ncclEpGetLastError());
  ncclResult_t result =
      ncclEpInitHandle(&larger, group, stepLayout(&side.c), NULL, side.c.topk + 1, NULL);
  teamCheck(r, result == ncclInvalidUsage && strstr(ncclEpGetLastError(), "in flight"), "%d: %s",
            (int)result, ncclEpGetLastError());
  for (int i = 0; i < 5 && !r->error[0]; i++) {
    cudaGraphLaunch(exec, r->stream);
    for (int k = 0; k < 2; k++) {
      teamCheck(r, stepCombine(side.d[k], side.h[k], r->stream), "%s", ncclEpGetLastError());
      teamOk(r, ncclEpComplete(side.h[k], NULL, r->stream));
    }
    compareSide(r, &side, "replay", i);
  }
  if (r->error[0]) return;
  cudaGraphExecDestroy(exec);
  for (int i = 0; i < 2; i++) {
    teamOk(r, ncclEpHandleDestroy(side.h[i]));
    stepFree(side.d[i]);
  }
  teamOk(r, ncclEpGroupDestroy(group));
}

TEST(two_in_flight_in_a_graph_keep_the_memory) {
  if (!numGpus()) SKIP("needs a GPU");
  for (int mode = 0; mode < 2; mode++) {
    step_case_t c = smallCase((trefoil_mode_t)mode, 730);
    c.sendOnly = 1;
    const char *error = teamThreads(numGpus(), runTwo, &c);
    CHECK(!*error, "mode %d: %s", mode, error);
  }
}

/* ---- handles made in a capture ------------------------------------------------------------------ */

/* A handle for each of two layers, made where a forward pass makes it. */
static void makeInside(team_rank_t *r, side_t *s, ncclEpGroup_t group) {
  for (int i = 0; i < 2; i++) {
    teamOk(r, ncclEpInitHandle(&s->h[i], group, stepLayout(&s->c), NULL, s->c.topk, NULL));
    teamCheck(r, stepUpdate(s->d[i], s->h[i], r->stream), "update: %s", ncclEpGetLastError());
  }
  runSide(r, s);
}

static void beginStrictCapture(team_rank_t *r) {
  teamCheck(r, !cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeThreadLocal), "begin");
}

/* Larger buffers: refused; and the capture is broken, as CUDA has it. */
static void refusesLarger(team_rank_t *r, side_t *s, ncclEpGroup_t group) {
  cudaGraph_t graph = NULL;
  ncclEpHandle_t h;
  beginStrictCapture(r);
  ncclResult_t result = ncclEpInitHandle(&h, group, stepLayout(&s->c), NULL, s->c.topk + 1, NULL);
  int told = strstr(ncclEpGetLastError(), "which a capture does not allow") != NULL;
  cudaStreamEndCapture(r->stream, &graph);
  cudaGetLastError();
  if (graph) cudaGraphDestroy(graph);
  teamCheck(r, result == ncclInvalidUsage && told, "%d: %s", (int)result, ncclEpGetLastError());
}

static void runMadeInside(team_rank_t *r) {
  side_t side = {.c = *(const step_case_t *)r->user};
  ncclEpGroup_t group;
  ncclEpHandle_t first;
  ncclEpGroupConfig_t config = stepGroupConfig(&side.c, r->numRanks);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&first, group, stepLayout(&side.c), NULL, side.c.topk, NULL));
  for (int i = 0; i < 2; i++) side.d[i] = stepMake(&side.c, r->rank, r->numRanks, r->numRanks);
  beginStrictCapture(r);
  makeInside(r, &side, group);
  cudaGraphExec_t exec = endCapture(r, r->stream);
  for (int i = 0; i < 6 && exec && !r->error[0]; i++) {
    cudaGraphLaunch(exec, r->stream);
    compareSide(r, &side, "replay", i);
  }
  if (!r->error[0]) refusesLarger(r, &side, group);
  if (r->error[0]) return;
  cudaGraphLaunch(exec, r->stream); /* nothing of the refusal is left */
  compareSide(r, &side, "after the refusal", 0);
  cudaGraphExecDestroy(exec);
  for (int i = 0; i < 2; i++) {
    teamOk(r, ncclEpHandleDestroy(side.h[i]));
    stepFree(side.d[i]);
  }
  teamOk(r, ncclEpHandleDestroy(first));
  teamOk(r, ncclEpGroupDestroy(group));
}

TEST(low_latency_handles_made_in_a_capture) {
  if (!numGpus()) SKIP("needs a GPU");
  for (int way = 0; way < 4; way++) {
    step_case_t c = smallCase((trefoil_mode_t)(way & 1), 740);
    c.sendOnly = way >> 1;
    const char *error = teamThreads(numGpus(), runMadeInside, &c);
    CHECK(!*error, "way %d: %s", way, error);
  }
}

/* ---- another GPU is current -------------------------------------------------------------------- */

static void isCurrent(team_rank_t *r, int device, const char *after) {
  int is = -1;
  teamCheck(r, !cudaGetDevice(&is) && is == device, "after %s GPU %d is current, was %d", after, is,
            device);
}

static void runElsewhere(team_rank_t *r) {
  const step_case_t *c = r->user;
  step_data_t *d = stepMake(c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  int own = 0, other = (r->rank + 1) % r->numRanks;
  ncclEpGroupConfig_t config = stepGroupConfig(c, r->numRanks);
  ncclEpHandleConfig_t handleConfig = stepHandleConfig(c);
  cudaGetDevice(&own);
  other = (own + 1) % numGpus();
  cudaSetDevice(other);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  isCurrent(r, other, "CreateGroup");
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(c), &handleConfig, c->topk, NULL));
  isCurrent(r, other, "InitHandle");
  for (int i = 0; i < 3 && !r->error[0]; i++) {
    teamCheck(r, stepUpdate(d, h, r->stream), "update: %s", ncclEpGetLastError());
    isCurrent(r, other, "Update");
    teamCheck(r, stepDispatch(d, h, r->stream), "dispatch: %s", ncclEpGetLastError());
    isCurrent(r, other, "Dispatch");
    teamCheck(r, stepCombine(d, h, r->stream), "combine: %s", ncclEpGetLastError());
    isCurrent(r, other, "Combine");
    compare(r, d, "step", i);
  }
  if (r->error[0]) return;
  teamOk(r, ncclEpHandleDestroy(h));
  isCurrent(r, other, "HandleDestroy");
  teamOk(r, ncclEpGroupDestroy(group));
  isCurrent(r, other, "GroupDestroy");
  cudaSetDevice(own);
  stepFree(d);
}

TEST(another_gpu_may_be_current) {
  if (numGpus() < 2) SKIP("needs two GPUs");
  for (int way = 0; way < 5; way++) {
    step_case_t c = smallCase((trefoil_mode_t)(way & 3), 720);
    if (way == 2 || way == 3) c.maxRecv = 4 * 7 * 3; /* the last way sizes eagerly */
    if (way == 4) c.mode = TREFOIL_HT_FLAT;
    const char *error = teamThreads(numGpus(), runElsewhere, &c);
    CHECK(!*error, "way %d: %s", way, error);
  }
}

TEST_MAIN()
