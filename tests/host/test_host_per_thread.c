/* A program built for the per-thread default stream: stream 0 is this thread's, and does not wait for the
 * legacy stream's work. */
#define CUDA_API_PER_THREAD_DEFAULT_STREAM
#include <pthread.h>

#include <cuda_runtime.h>

#include "test.h"
#include "trefoil_host.h"

#define OK(call)       REQUIRE((call) == cudaSuccess, "%s: %s", #call, trefoilHostLastError())
#define IS(call, code) CHECK((call) == (code), "%s: %s", #call, trefoilHostLastError())

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;

static void waitForGate(void *data) {
  (void)data;
  pthread_mutex_lock(&gate);
  pthread_mutex_unlock(&gate);
}

static void *idOfStream0(void *out) {
  cudaStreamGetId(0, (unsigned long long *)out);
  return NULL;
}

TEST(stream_0_is_this_threads) {
  unsigned long long mine = 0, same = 0, others = 0;
  pthread_t thread;
  OK(cudaStreamGetId(0, &mine));
  OK(cudaStreamGetId(cudaStreamPerThread, &same));
  pthread_create(&thread, NULL, idOfStream0, &others);
  pthread_join(thread, NULL);
  CHECK(mine == same && mine != others, "%llu, %llu, %llu", mine, same, others);
}

TEST(synchronous_copies_do_not_wait_for_other_streams) {
  cudaStream_t other;
  char *device, byte = 0;
  OK(cudaStreamCreate(
      &other)); /* a blocking stream: a copy on the legacy stream would wait for it */
  OK(cudaMalloc((void **)&device, 64));
  pthread_mutex_lock(&gate);
  OK(cudaLaunchHostFunc(other, waitForGate, NULL));
  OK(cudaMemset(device, 7, 64));
  OK(cudaMemcpy(&byte, device, 1, cudaMemcpyDeviceToHost));
  OK(cudaMemcpyAsync(device, &byte, 1, cudaMemcpyHostToDevice, 0));
  OK(cudaStreamSynchronize(0));
  pthread_mutex_unlock(&gate);
  CHECK(byte == 7, "%d", byte);
  OK(cudaStreamSynchronize(other));
  OK(cudaFree(device));
  OK(cudaStreamDestroy(other));
}

TEST(stream_0_can_be_captured) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  char *device;
  OK(cudaMalloc((void **)&device, 64));
  OK(cudaStreamBeginCapture(0, cudaStreamCaptureModeRelaxed));
  OK(cudaMemsetAsync(device, 9, 64, 0));
  OK(cudaStreamEndCapture(0, &graph));
  OK(cudaGraphInstantiate(&exec, graph, 0));
  OK(cudaGraphLaunch(exec, 0));
  OK(cudaStreamSynchronize(0));
  CHECK(device[63] == 9, "%d", device[63]);
  OK(cudaGraphExecDestroy(exec));
  OK(cudaGraphDestroy(graph));
  OK(cudaFree(device));
}

TEST_MAIN()
