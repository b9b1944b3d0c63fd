/* CUDA graphs: two handles on two streams, the combine of one beside the dispatch of the other, captured
 * once and replayed with other routing, tokens and weights each time; the same called without a graph. In
 * every other case the captured handles are made in the capture.
 * The two that overlap share the GPU: each takes at most half of its SMs. */
#include "test.h"

#include <string.h>

#include "gpu_script.h"
#include "plan/error.h"
#include "validate/checker.h"

enum { NUM_REPLAYS = 10, HALF_OF_SMS = 64, NUM_HANDLES = 2 };

typedef struct graphs {
  script_list_t *list;
  int captured;
} graphs_t;

/* The second stream, and what orders the two. */
typedef struct fork {
  cudaStream_t main, side;
  cudaEvent_t forked, joined;
} fork_t;

/* Operations by place in the script, see makeScript. */
enum { UPDATE_A, UPDATE_B, DISPATCH_A, COMBINE_A, DISPATCH_B, COMBINE_B };

static trefoil_result_t makeScript(ep_check_case_t *c, const ep_check_group_t *g, int i) {
  EP_TRY(scriptBegin(c, g, 40 + (uint64_t)i, EP_MAX_ROUNDS));
  int a = i % 2, b = 1 - a; /* expert-major, rank-major; HT: flat, expert-major */
  scriptUpdate(c, a, 0);
  scriptUpdate(c, b, 1);
  scriptAdd(c, EP_OP_DISPATCH, a);
  scriptAdd(c, EP_OP_COMBINE, a);
  scriptAdd(c, EP_OP_DISPATCH, b);
  scriptAdd(c, EP_OP_COMBINE, b);
  return scriptEnd(c);
}

static trefoil_result_t call(ep_check_rank_t *k, const ep_check_case_t *c, int op,
                             cudaStream_t stream) {
  k->stream = stream;
  return epCallOp(k, c, &c->ops[op]);
}

/* The combine of A beside the dispatch of B. */
static trefoil_result_t callAll(ep_check_rank_t *k, const ep_check_case_t *c, const fork_t *f) {
  const ep_library_t *lib = k->lib;
  EP_TRY(call(k, c, UPDATE_A, f->main));
  EP_TRY(call(k, c, UPDATE_B, f->main));
  EP_TRY(call(k, c, DISPATCH_A, f->main));
  k->doing = "cudaStreamWaitEvent";
  EP_TRY_CUDA(k, lib->cudaEventRecord(f->forked, f->main));
  EP_TRY_CUDA(k, lib->cudaStreamWaitEvent(f->side, f->forked, 0));
  EP_TRY(call(k, c, COMBINE_A, f->side));
  EP_TRY(call(k, c, DISPATCH_B, f->main));
  k->doing = "cudaStreamWaitEvent";
  EP_TRY_CUDA(k, lib->cudaEventRecord(f->joined, f->side));
  EP_TRY_CUDA(k, lib->cudaStreamWaitEvent(f->main, f->joined, 0));
  return call(k, c, COMBINE_B, f->main);
}

static trefoil_result_t makeHandles(ep_check_rank_t *k) {
  for (int i = 0; i < NUM_HANDLES; i++) {
    const ep_check_handle_t *h = &k->group->handles[i];
    ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
    config.dispatch_output_per_expert_alignment = h->alignment;
    k->doing = "ncclEpInitHandle in a capture";
    EP_TRY_EP(k, k->lib->ncclEpInitHandle(&k->handles[i], k->epGroup, epLayoutOf(h->mode), &config,
                                          h->initTopk, NULL));
  }
  return TREFOIL_OK;
}

static trefoil_result_t capture(ep_check_rank_t *k, const ep_check_case_t *c, const fork_t *f,
                                int inside, cudaGraphExec_t *exec) {
  const ep_library_t *lib = k->lib;
  cudaGraph_t graph = NULL;
  k->doing = "cudaStreamBeginCapture";
  EP_TRY_CUDA(k, lib->cudaStreamBeginCapture(f->main, cudaStreamCaptureModeRelaxed));
  if (inside) EP_TRY(makeHandles(k));
  EP_TRY(callAll(k, c, f));
  k->doing = "cudaStreamEndCapture";
  EP_TRY_CUDA(k, lib->cudaStreamEndCapture(f->main, &graph));
  k->doing = "cudaGraphInstantiateWithFlags";
  EP_TRY_CUDA(k, lib->cudaGraphInstantiateWithFlags(exec, graph, 0));
  EP_TRY_CUDA(k, lib->cudaGraphDestroy(graph));
  return TREFOIL_OK;
}

/* One case, again and again; every other time with the other contents. */
static trefoil_result_t runCase(gpu_rank_t *rank, const fork_t *f, int i, uint8_t *result) {
  const graphs_t *g = rank->run->context;
  ep_check_rank_t *k = &rank->rank;
  const ep_library_t *lib = k->lib;
  const ep_check_case_t *c = &g->list->cases[i];
  cudaGraphExec_t exec = NULL;
  ncclEpHandle_t before[NUM_HANDLES];
  int inside = g->captured && i / 2 % 2;
  memcpy(before, k->handles, sizeof before);
  if (g->captured) EP_TRY(capture(k, c, f, inside, &exec));
  for (int again = 0; again < NUM_REPLAYS; again++) {
    int round = (again + i) % EP_MAX_ROUNDS;
    const uint8_t *initial = g->list->initial[round][k->rank] + g->list->offsets[i];
    k->doing = "cudaMemcpyAsync";
    EP_TRY_CUDA(
        k, lib->cudaMemcpyAsync(k->image, initial, c->usedBytes, cudaMemcpyHostToDevice, f->main));
    k->doing = "cudaGraphLaunch";
    if (exec)
      EP_TRY_CUDA(k, lib->cudaGraphLaunch(exec, f->main));
    else
      EP_TRY(callAll(k, c, f));
    k->doing = "cudaStreamSynchronize"; /* no pageable copy behind a kernel that waits on GIN */
    EP_TRY_CUDA(k, lib->cudaStreamSynchronize(f->main));
    k->doing = "cudaMemcpyAsync";
    EP_TRY_CUDA(
        k, lib->cudaMemcpyAsync(result, k->image, c->usedBytes, cudaMemcpyDeviceToHost, f->main));
    EP_TRY_CUDA(k, lib->cudaStreamSynchronize(f->main));
    EP_TRY(scriptCompare(g->list, i, round, k->rank, result));
  }
  if (exec) EP_TRY_CUDA(k, lib->cudaGraphExecDestroy(exec));
  for (int h = 0; inside && h < NUM_HANDLES; h++) {
    k->doing = "ncclEpHandleDestroy";
    EP_TRY_EP(k, lib->ncclEpHandleDestroy(k->handles[h]));
  }
  memcpy(k->handles, before, sizeof before);
  return TREFOIL_OK;
}

static trefoil_result_t runAll(gpu_rank_t *rank) {
  const graphs_t *g = rank->run->context;
  ep_check_rank_t *k = &rank->rank;
  const ep_library_t *lib = k->lib;
  fork_t f = {.main = k->stream};
  uint8_t *result = malloc(k->group->imageBytes);
  EP_CHECK(result, TREFOIL_SYSTEM_ERROR, "out of memory for results");
  k->doing = "cudaStreamCreateWithFlags";
  EP_TRY_CUDA(k, lib->cudaStreamCreateWithFlags(&f.side, cudaStreamNonBlocking));
  EP_TRY_CUDA(k, lib->cudaEventCreateWithFlags(&f.forked, cudaEventDisableTiming));
  EP_TRY_CUDA(k, lib->cudaEventCreateWithFlags(&f.joined, cudaEventDisableTiming));
  trefoil_result_t rc = TREFOIL_OK;
  for (int i = 0; i < g->list->numCases && rc == TREFOIL_OK; i++) rc = runCase(rank, &f, i, result);
  k->stream = f.main;
  free(result);
  if (rc != TREFOIL_OK) return rc;
  EP_TRY_CUDA(k, lib->cudaEventDestroy(f.forked));
  EP_TRY_CUDA(k, lib->cudaEventDestroy(f.joined));
  EP_TRY_CUDA(k, lib->cudaStreamDestroy(f.side));
  return TREFOIL_OK;
}

static void run(int numRanks, int captured, int highThroughput) {
  ep_check_group_t g = (highThroughput ? gpuGroupHt : gpuGroup)(numRanks, 24, 2048);
  script_list_t list;
  graphs_t context = {&list, captured};
  gpu_run_t run = {.group = &g, .work = runAll, .context = &context};
  g.maxSms = HALF_OF_SMS;
  epBatchEnvironment(&g);
  REQUIRE(scriptListBegin(&list, &g, gpuScaled(12, 12)) == TREFOIL_OK, "%s", trefoilLastError());
  for (int i = 0; i < list.numCases; i++)
    REQUIRE(makeScript(&list.cases[i], &g, i) == TREFOIL_OK, "%s", trefoilLastError());
  REQUIRE(scriptListExpect(&list) == TREFOIL_OK, "%s", trefoilLastError());
  gpuRun(&run, numRanks);
  CHECK(!*run.failure, "%s", run.failure);
  scriptListFree(&list);
}

TEST(two_handles_on_two_streams_called) {
  GPU_RANKS(R, 2);
  run(R, 0, 0);
  run(R, 0, 1);
}

TEST(two_handles_on_two_streams_replayed) {
  GPU_RANKS(R, 2);
  run(R, 1, 0);
  run(R, 1, 1);
}

TEST_MAIN()
