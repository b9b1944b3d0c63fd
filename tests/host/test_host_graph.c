/* Executable graphs that are updated, the dependencies of a capture, user objects. */
#include <stdatomic.h>
#include <stdbool.h>

#include <cuda_runtime.h>

#include "test.h"
#include "trefoil_host.h"

#define OK(call)       REQUIRE((call) == cudaSuccess, "%s: %s", #call, trefoilHostLastError())
#define IS(call, code) CHECK((call) == (code), "%s: %s", #call, trefoilHostLastError())

static void add(void *arg) {
  atomic_fetch_add((_Atomic int *)arg, 1);
}

/* Two nodes one after another; fill: the second is a fill, else a function. */
static void capturePair(cudaStream_t s, _Atomic int *first, _Atomic int *second, bool fill,
                        cudaGraph_t *graph) {
  OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
  OK(cudaLaunchHostFunc(s, add, first));
  if (fill)
    OK(cudaMemsetAsync(second, 0, 4, s));
  else
    OK(cudaLaunchHostFunc(s, add, second));
  OK(cudaStreamEndCapture(s, graph));
}

TEST(an_updated_graph_runs_the_new_work) {
  cudaStream_t s;
  cudaGraph_t graph, next;
  cudaGraphExec_t exec;
  cudaGraphExecUpdateResultInfo info;
  _Atomic int a = 0, b = 0, c = 0;
  OK(cudaStreamCreate(&s));
  capturePair(s, &a, &b, false, &graph);
  capturePair(s, &c, &b, false, &next);
  OK(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 100; i++) OK(cudaGraphLaunch(exec, s));
  OK(cudaGraphExecUpdate(exec, next, &info)); /* with launches under way, which stay as they were */
  CHECK(info.result == cudaGraphExecUpdateSuccess && !info.errorNode, "%d", (int)info.result);
  OK(cudaGraphDestroy(next));
  for (int i = 0; i < 10; i++) OK(cudaGraphLaunch(exec, s));
  OK(cudaStreamSynchronize(s));
  CHECK(a == 100 && b == 110 && c == 10, "%d, %d, %d", a, b, c);
  OK(cudaGraphDestroy(graph));
  OK(cudaGraphExecDestroy(exec));
  IS(cudaGraphExecUpdate(exec, graph, &info), cudaErrorInvalidValue);
  OK(cudaStreamDestroy(s));
}

TEST(another_shape_is_refused_and_changes_nothing) {
  cudaStream_t s, t;
  cudaEvent_t fork;
  cudaGraph_t graph, typed, longer, wide;
  cudaGraphExec_t exec;
  cudaGraphExecUpdateResultInfo info;
  cudaGraphNode_t nodes[2];
  size_t count = 2;
  _Atomic int a = 0, *pinned;
  OK(cudaStreamCreate(&s));
  OK(cudaStreamCreate(&t));
  OK(cudaEventCreate(&fork));
  OK(cudaMallocHost((void **)&pinned, 4));
  capturePair(s, &a, pinned, false, &graph);
  capturePair(s, &a, pinned, true, &typed);
  OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < 3; i++) OK(cudaLaunchHostFunc(s, add, &a));
  OK(cudaStreamEndCapture(s, &longer));
  OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal)); /* two nodes side by side */
  OK(cudaEventRecord(fork, s));
  OK(cudaStreamWaitEvent(t, fork, 0));
  OK(cudaLaunchHostFunc(s, add, &a));
  OK(cudaLaunchHostFunc(t, add, &a));
  OK(cudaEventRecord(fork, t));
  OK(cudaStreamWaitEvent(s, fork, 0));
  OK(cudaStreamEndCapture(s, &wide));
  OK(cudaGraphInstantiate(&exec, graph, 0));
  IS(cudaGraphExecUpdate(exec, typed, &info), cudaErrorGraphExecUpdateFailure);
  OK(cudaGraphGetNodes(typed, nodes, &count));
  CHECK(info.result == cudaGraphExecUpdateErrorNodeTypeChanged && info.errorNode == nodes[1], "%d",
        (int)info.result);
  IS(cudaGraphExecUpdate(exec, longer, &info), cudaErrorGraphExecUpdateFailure);
  CHECK(info.result == cudaGraphExecUpdateErrorTopologyChanged && !info.errorNode, "%d",
        (int)info.result);
  CHECK(strstr(trefoilHostLastError(), "has 2 nodes, the graph 3"), "%s", trefoilHostLastError());
  IS(cudaGraphExecUpdate(exec, wide, &info), cudaErrorGraphExecUpdateFailure);
  CHECK(info.result == cudaGraphExecUpdateErrorTopologyChanged && info.errorNode, "%d",
        (int)info.result);
  a = *pinned = 0;
  OK(cudaGraphLaunch(exec, s));
  OK(cudaStreamSynchronize(s));
  CHECK(a == 1 && *pinned == 1, "%d, %d", a, *pinned);
  OK(cudaGraphExecDestroy(exec));
  cudaGraph_t all[] = {graph, typed, longer, wide};
  for (int i = 0; i < 4; i++) OK(cudaGraphDestroy(all[i]));
  OK(cudaFreeHost((void *)pinned));
  OK(cudaEventDestroy(fork));
  OK(cudaStreamDestroy(s));
  OK(cudaStreamDestroy(t));
}

TEST(the_dependencies_of_a_capture_are_set) {
  cudaStream_t s;
  cudaGraph_t graph;
  cudaGraphNode_t nodes[2], foreign;
  const cudaGraphNode_t *now;
  enum cudaStreamCaptureStatus status;
  size_t count = 2;
  _Atomic int a = 0;
  OK(cudaStreamCreate(&s));
  IS(cudaStreamUpdateCaptureDependencies(s, NULL, NULL, 0, 1), cudaErrorIllegalState);
  OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
  OK(cudaLaunchHostFunc(s, add, &a));
  OK(cudaLaunchHostFunc(s, add, &a));
  OK(cudaStreamGetCaptureInfo(s, &status, NULL, &graph, &now, NULL, &count));
  CHECK(count == 1, "%zu", count);
  OK(cudaGraphGetNodes(graph, NULL, &count));
  OK(cudaGraphGetNodes(graph, nodes, &count));
  OK(cudaStreamUpdateCaptureDependencies(s, nodes, NULL, 1, cudaStreamSetCaptureDependencies));
  OK(cudaStreamGetCaptureInfo(s, &status, NULL, NULL, &now, NULL, &count));
  CHECK(count == 1 && now[0] == nodes[0], "%zu", count);
  OK(cudaStreamUpdateCaptureDependencies(s, nodes, NULL, 2, cudaStreamAddCaptureDependencies));
  OK(cudaStreamGetCaptureInfo(s, &status, NULL, NULL, &now, NULL, &count));
  CHECK(count == 2, "%zu", count);
  OK(cudaStreamUpdateCaptureDependencies(s, (cudaGraphNode_t *)now, NULL, 2,
                                         cudaStreamSetCaptureDependencies));
  foreign = (cudaGraphNode_t)&foreign;
  IS(cudaStreamUpdateCaptureDependencies(s, &foreign, NULL, 1, 0), cudaErrorInvalidValue);
  OK(cudaStreamEndCapture(s, &graph));
  OK(cudaGraphDestroy(graph));
  OK(cudaStreamDestroy(s));
}

TEST(user_objects_live_as_long_as_what_refers_to_them) {
  cudaStream_t s;
  cudaGraph_t graph, next;
  cudaGraphExec_t exec;
  cudaUserObject_t object, other;
  cudaGraphExecUpdateResultInfo info;
  _Atomic int gone = 0, otherGone = 0, ran = 0;
  OK(cudaStreamCreate(&s));
  IS(cudaUserObjectCreate(&object, (void *)&gone, add, 1, 0), cudaErrorInvalidValue);
  IS(cudaUserObjectCreate(&object, (void *)&gone, add, 0, 1), cudaErrorInvalidValue);
  OK(cudaUserObjectCreate(&object, (void *)&gone, add, 1, cudaUserObjectNoDestructorSync));
  OK(cudaUserObjectCreate(&other, (void *)&otherGone, add, 1, cudaUserObjectNoDestructorSync));
  OK(cudaUserObjectRetain(object, 2));
  OK(cudaUserObjectRelease(object, 2));
  capturePair(s, &ran, &ran, false, &graph);
  capturePair(s, &ran, &ran, false, &next);
  OK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
  IS(cudaGraphReleaseUserObject(graph, object, 2), cudaErrorInvalidValue);
  IS(cudaGraphReleaseUserObject(graph, other, 1), cudaErrorInvalidValue);
  OK(cudaGraphRetainUserObject(next, other, 2, 0));
  OK(cudaUserObjectRelease(other, 1));
  OK(cudaGraphReleaseUserObject(next, other, 1));
  OK(cudaGraphInstantiate(&exec, graph, 0));
  OK(cudaGraphDestroy(graph));
  CHECK(gone == 0, "the executable graph holds it");
  OK(cudaGraphLaunch(exec, s));
  OK(cudaGraphExecUpdate(exec, next, &info));
  OK(cudaStreamSynchronize(s));
  CHECK(gone == 1, "nothing holds it: %d", gone);
  IS(cudaUserObjectRetain(object, 1), cudaErrorInvalidValue);
  OK(cudaGraphDestroy(next));
  CHECK(otherGone == 0, "the updated graph holds it");
  OK(cudaGraphExecDestroy(exec));
  CHECK(otherGone == 1, "nothing holds it: %d", otherGone);
  OK(cudaStreamDestroy(s));
}

TEST_MAIN()
