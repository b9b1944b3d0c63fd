/* Capture and graphs: replay with changed data, forks and joins, and what CUDA forbids meanwhile. */
#include <stdatomic.h>

#include <cuda_runtime.h>

#include "test.h"
#include "trefoil_host.h"

#define OK(call)       REQUIRE((call) == cudaSuccess, "%s: %s", #call, trefoilHostLastError())
#define IS(call, code) CHECK((call) == (code), "%s: %s", #call, trefoilHostLastError())

static void addOne(void *arg) {
  ++*(int *)arg;
}
static void timesTwo(void *arg) {
  *(int *)arg *= 2;
}

TEST(a_graph_runs_again_with_present_data) {
  cudaStream_t s;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  int *in, *out, calls = 0;
  OK(cudaStreamCreate(&s));
  OK(cudaMallocHost((void **)&in, 4));
  OK(cudaMallocHost((void **)&out, 4));
  *out = -1;
  OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
  OK(cudaMemcpyAsync(out, in, 4, cudaMemcpyDefault, s));
  OK(cudaLaunchHostFunc(s, addOne, out));
  OK(cudaLaunchHostFunc(s, timesTwo, out));
  OK(cudaLaunchHostFunc(s, addOne, &calls));
  OK(cudaStreamEndCapture(s, &graph));
  CHECK(*out == -1 && calls == 0, "captured work ran");
  size_t nodes = 0;
  OK(cudaGraphGetNodes(graph, NULL, &nodes));
  CHECK(nodes == 4, "%zu nodes", nodes);
  OK(cudaGraphInstantiate(&exec, graph, 0));
  OK(cudaGraphDestroy(graph)); /* the executable graph stands alone */
  for (int i = 0; i < 50; i++) {
    *in = i;
    OK(cudaGraphLaunch(exec, s));
    OK(cudaStreamSynchronize(s));
    CHECK(*out == (i + 1) * 2, "round %d: %d", i, *out);
  }
  OK(cudaGraphLaunch(exec, s));
  OK(cudaGraphExecDestroy(exec)); /* a launch under way is not touched */
  OK(cudaStreamSynchronize(s));
  CHECK(calls == 51, "%d calls", calls);
  IS(cudaGraphLaunch(exec, s), cudaErrorInvalidValue);
  OK(cudaFreeHost(in));
  OK(cudaFreeHost(out));
  OK(cudaStreamDestroy(s));
}

TEST(streams_join_a_capture_by_events) {
  cudaStream_t a, b;
  cudaEvent_t fork, join;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  enum cudaStreamCaptureStatus status;
  int value = 3;
  OK(cudaStreamCreate(&a));
  OK(cudaStreamCreate(&b));
  OK(cudaEventCreate(&fork));
  OK(cudaEventCreate(&join));
  OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeRelaxed));
  OK(cudaLaunchHostFunc(a, addOne, &value));
  OK(cudaEventRecord(fork, a));
  OK(cudaStreamWaitEvent(b, fork, 0));
  OK(cudaStreamIsCapturing(b, &status));
  CHECK(status == cudaStreamCaptureStatusActive, "b does not capture: %d", status);
  OK(cudaLaunchHostFunc(b, timesTwo, &value));
  OK(cudaEventRecord(join, b));
  OK(cudaStreamWaitEvent(a, join, 0));
  OK(cudaLaunchHostFunc(a, addOne, &value));
  IS(cudaEventQuery(join), cudaErrorCapturedEvent);
  OK(cudaStreamEndCapture(a, &graph));
  OK(cudaStreamIsCapturing(b, &status));
  CHECK(status == cudaStreamCaptureStatusNone, "b still captures");
  OK(cudaGraphInstantiateWithFlags(&exec, graph, 0));
  OK(cudaGraphLaunch(exec, b));
  OK(cudaGraphLaunch(exec, a)); /* ordered behind the launch on b */
  OK(cudaStreamSynchronize(a));
  CHECK(value == (((3 + 1) * 2 + 1) + 1) * 2 + 1, "value %d", value);
  OK(cudaGraphExecDestroy(exec));
  OK(cudaGraphDestroy(graph));
  OK(cudaEventDestroy(fork));
  OK(cudaEventDestroy(join));
  OK(cudaStreamDestroy(a));
  OK(cudaStreamDestroy(b));
}

TEST(unjoined_work_is_an_error) {
  cudaStream_t a, b;
  cudaEvent_t fork;
  cudaGraph_t graph = NULL;
  int value = 0;
  OK(cudaStreamCreate(&a));
  OK(cudaStreamCreate(&b));
  OK(cudaEventCreate(&fork));
  OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeRelaxed));
  OK(cudaEventRecord(fork, a));
  OK(cudaStreamWaitEvent(b, fork, 0));
  OK(cudaLaunchHostFunc(b, addOne, &value));
  IS(cudaStreamEndCapture(a, &graph), cudaErrorStreamCaptureUnjoined);
  CHECK(!graph, "a graph was given");
  OK(cudaLaunchHostFunc(b, addOne, &value)); /* both streams are usable again */
  OK(cudaStreamSynchronize(b));
  CHECK(value == 1, "value %d", value);
  OK(cudaEventDestroy(fork));
  OK(cudaStreamDestroy(a));
  OK(cudaStreamDestroy(b));
}

/* Each of these breaks a global-mode capture. */
static cudaError_t forbidden(int which, cudaStream_t s, void *device) {
  char host[4];
  void *p;
  switch (which) {
  case 0:
    return cudaStreamSynchronize(s);
  case 1:
    return cudaStreamQuery(s);
  case 2:
    return cudaMalloc(&p, 16);
  case 3:
    return cudaFree(device);
  case 4:
    return cudaDeviceSynchronize();
  case 5:
    return cudaMemcpy(host, device, 4, cudaMemcpyDeviceToHost);
  case 6:
    return cudaMallocHost(&p, 16);
  default:
    return cudaMemset(device, 0, 4);
  }
}

TEST(forbidden_calls_break_the_capture) {
  cudaStream_t s;
  cudaGraph_t graph;
  enum cudaStreamCaptureStatus status;
  void *device;
  OK(cudaStreamCreate(&s));
  OK(cudaMalloc(&device, 16));
  for (int which = 0; which < 8; which++) {
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    CHECK(forbidden(which, s, device) == cudaErrorStreamCaptureUnsupported, "call %d: %s", which,
          trefoilHostLastError());
    OK(cudaStreamIsCapturing(s, &status));
    CHECK(status == cudaStreamCaptureStatusInvalidated, "call %d: status %d", which, status);
    IS(cudaMemsetAsync(device, 0, 4, s), cudaErrorStreamCaptureInvalidated);
    IS(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
    OK(cudaStreamSynchronize(s));
  }
  OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
  IS(cudaMemsetAsync(device, 0, 4, NULL), cudaErrorStreamCaptureImplicit);
  IS(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
  OK(cudaFree(device));
  OK(cudaStreamDestroy(s));
}

TEST(relaxed_mode_allows_allocation) {
  cudaStream_t s;
  cudaGraph_t graph;
  void *device;
  OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
  OK(cudaMalloc(&device, 16));
  OK(cudaMemsetAsync(device, 5, 16, s));
  OK(cudaStreamEndCapture(s, &graph));
  OK(cudaGraphDestroy(graph));
  OK(cudaFree(device));
  OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
  enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  OK(cudaThreadExchangeStreamCaptureMode(&mode));
  CHECK(mode == cudaStreamCaptureModeGlobal, "mode %d", mode);
  OK(cudaMalloc(&device, 16));
  OK(cudaThreadExchangeStreamCaptureMode(&mode));
  OK(cudaStreamEndCapture(s, &graph));
  OK(cudaGraphDestroy(graph));
  OK(cudaFree(device));
  OK(cudaStreamDestroy(s));
}

TEST(wrong_ends_and_beginnings) {
  cudaStream_t a, b;
  cudaEvent_t e, outside;
  cudaGraph_t graph;
  OK(cudaStreamCreate(&a));
  OK(cudaStreamCreate(&b));
  OK(cudaEventCreate(&e));
  OK(cudaEventCreate(&outside));
  OK(cudaEventRecord(outside, b));
  IS(cudaStreamBeginCapture(NULL, cudaStreamCaptureModeGlobal), cudaErrorStreamCaptureUnsupported);
  IS(cudaStreamEndCapture(a, &graph), cudaErrorIllegalState);
  OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeRelaxed));
  IS(cudaStreamBeginCapture(a, cudaStreamCaptureModeRelaxed), cudaErrorIllegalState);
  OK(cudaEventRecord(e, a));
  OK(cudaStreamWaitEvent(b, e, 0));
  IS(cudaStreamEndCapture(b, &graph), cudaErrorStreamCaptureUnmatched);
  IS(cudaStreamWaitEvent(a, outside, 0), cudaErrorStreamCaptureIsolation);
  IS(cudaStreamEndCapture(a, &graph), cudaErrorStreamCaptureInvalidated);
  IS(cudaStreamWaitEvent(b, e, 0), cudaErrorCapturedEvent); /* that capture has ended */
  OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeRelaxed));
  OK(cudaStreamBeginCapture(b, cudaStreamCaptureModeRelaxed));
  OK(cudaEventRecord(e, a));
  IS(cudaStreamWaitEvent(b, e, 0), cudaErrorStreamCaptureMerge);
  IS(cudaStreamEndCapture(a, &graph), cudaErrorStreamCaptureInvalidated);
  IS(cudaStreamEndCapture(b, &graph), cudaErrorStreamCaptureInvalidated);
  OK(cudaEventDestroy(e));
  OK(cudaEventDestroy(outside));
  OK(cudaStreamDestroy(a));
  OK(cudaStreamDestroy(b));
}

TEST_MAIN()
