/* Streams, events, copies: order, what is asynchronous, what waits for what. */
#include <stdatomic.h>
#include <stdint.h>
#include <pthread.h>
#include <time.h>

#include <cuda_runtime.h>

#include "test.h"
#include "trefoil_host.h"

#define OK(call) REQUIRE((call) == cudaSuccess, "%s: %s", #call, trefoilHostLastError())

static void pauseMs(int ms) {
  struct timespec t = {ms / 1000, ms % 1000 * 1000000L};
  nanosleep(&t, NULL);
}

/* A gate: host functions that wait until it is opened. */
typedef struct {
  _Atomic int open, passed;
} gate_t;

static void passGate(void *arg) {
  gate_t *gate = arg;
  while (!atomic_load(&gate->open)) pauseMs(1);
  atomic_fetch_add(&gate->passed, 1);
}

static void recordPassed(void *arg) {
  atomic_fetch_add(&((gate_t *)arg)->passed, 1);
}

TEST(work_waits_for_what_is_before_it_in_the_stream) {
  cudaStream_t s;
  gate_t gate = {0};
  int *device, host = -1, value = 42;
  OK(cudaStreamCreate(&s));
  OK(cudaMalloc((void **)&device, sizeof(int)));
  OK(cudaMemset(device, 0, sizeof(int)));
  OK(cudaDeviceSynchronize());
  OK(cudaLaunchHostFunc(s, passGate, &gate));
  OK(cudaMemcpyAsync(device, &value, sizeof(int), cudaMemcpyHostToDevice, s));
  value = 43; /* pageable source: read when the call returned */
  pauseMs(20);
  CHECK(*(volatile int *)device == 0, "the copy ran before the host function ended");
  CHECK(cudaStreamQuery(s) == cudaErrorNotReady, "the stream says it is idle");
  atomic_store(&gate.open, 1);
  OK(cudaStreamSynchronize(s));
  OK(cudaMemcpy(&host, device, sizeof(int), cudaMemcpyDeviceToHost));
  CHECK(host == 42, "host %d", host);
  OK(cudaFree(device));
  OK(cudaStreamDestroy(s));
}

TEST(a_missing_synchronisation_shows) {
  cudaStream_t s;
  gate_t gate = {0};
  char *pinned, *device;
  OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  OK(cudaMallocHost((void **)&pinned, 64));
  OK(cudaMalloc((void **)&device, 64));
  OK(cudaMemset(device, 7, 64));
  OK(cudaDeviceSynchronize());
  memset(pinned, 1, 64);
  OK(cudaLaunchHostFunc(s, passGate, &gate));
  OK(cudaMemcpyAsync(pinned, device, 64, cudaMemcpyDeviceToHost, s)); /* pinned: asynchronous */
  CHECK(pinned[0] == 1, "the copy to pinned memory was synchronous");
  atomic_store(&gate.open, 1);
  OK(cudaStreamSynchronize(s));
  CHECK(pinned[63] == 7, "the copy is missing");
  OK(cudaFreeHost(pinned));
  OK(cudaFree(device));
  OK(cudaStreamDestroy(s));
}

TEST(pinned_sources_are_read_late) {
  cudaStream_t s;
  gate_t gate = {0};
  int *pinned, *device, host = 0;
  OK(cudaStreamCreate(&s));
  OK(cudaHostAlloc((void **)&pinned, sizeof(int), 0));
  OK(cudaMalloc((void **)&device, sizeof(int)));
  *pinned = 1;
  OK(cudaLaunchHostFunc(s, passGate, &gate));
  OK(cudaMemcpyAsync(device, pinned, sizeof(int), cudaMemcpyHostToDevice, s));
  *pinned = 2;
  atomic_store(&gate.open, 1);
  OK(cudaStreamSynchronize(s));
  OK(cudaMemcpy(&host, device, sizeof(int), cudaMemcpyDeviceToHost));
  CHECK(host == 2, "host %d", host);
  OK(cudaFreeHost(pinned));
  OK(cudaFree(device));
  OK(cudaStreamDestroy(s));
}

TEST(streams_are_independent_until_an_event_joins_them) {
  cudaStream_t a, b;
  cudaEvent_t event;
  gate_t gate = {0}, after = {0};
  OK(cudaStreamCreate(&a));
  OK(cudaStreamCreate(&b));
  OK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  OK(cudaLaunchHostFunc(a, passGate, &gate));
  OK(cudaLaunchHostFunc(b, recordPassed, &after));
  OK(cudaStreamSynchronize(b));
  CHECK(atomic_load(&after.passed) == 1, "b waited for a");
  OK(cudaEventRecord(event, a));
  OK(cudaStreamWaitEvent(b, event, 0));
  OK(cudaEventRecord(event, b)); /* recorded again: the wait keeps the first record */
  OK(cudaLaunchHostFunc(b, recordPassed, &after));
  pauseMs(20);
  CHECK(atomic_load(&after.passed) == 1, "b did not wait for the event");
  CHECK(cudaEventQuery(event) == cudaErrorNotReady, "the event says it is passed");
  OK(cudaEventDestroy(event)); /* waits keep what they need */
  atomic_store(&gate.open, 1);
  OK(cudaStreamSynchronize(b));
  CHECK(atomic_load(&after.passed) == 2 && atomic_load(&gate.passed) == 1, "order");
  OK(cudaStreamDestroy(a));
  OK(cudaStreamDestroy(b));
}

TEST(the_null_stream_waits_for_blocking_streams_and_they_for_it) {
  cudaStream_t blocking, other, loose;
  gate_t gate = {0}, null = {0}, later = {0}, free = {0};
  OK(cudaStreamCreate(&blocking));
  OK(cudaStreamCreate(&other));
  OK(cudaStreamCreateWithFlags(&loose, cudaStreamNonBlocking));
  OK(cudaLaunchHostFunc(blocking, passGate, &gate));
  OK(cudaLaunchHostFunc(NULL, recordPassed, &null));
  OK(cudaLaunchHostFunc(other, recordPassed, &later));
  OK(cudaLaunchHostFunc(loose, recordPassed, &free));
  OK(cudaStreamSynchronize(loose));
  CHECK(atomic_load(&free.passed) == 1, "a non-blocking stream waited");
  pauseMs(20);
  CHECK(atomic_load(&null.passed) == 0, "the NULL stream did not wait for a blocking stream");
  CHECK(atomic_load(&later.passed) == 0, "a blocking stream did not wait for the NULL stream");
  atomic_store(&gate.open, 1);
  OK(cudaStreamSynchronize(other));
  CHECK(atomic_load(&null.passed) == 1 && atomic_load(&later.passed) == 1, "order");
  OK(cudaStreamDestroy(blocking));
  OK(cudaStreamDestroy(other));
  OK(cudaStreamDestroy(loose));
}

TEST(the_null_stream_does_not_wait_for_another_device) {
  cudaStream_t far;
  gate_t gate = {0}, near = {0};
  OK(cudaSetDevice(1));
  OK(cudaStreamCreate(&far));
  OK(cudaLaunchHostFunc(far, passGate, &gate));
  OK(cudaSetDevice(0));
  OK(cudaLaunchHostFunc(NULL, recordPassed, &near));
  OK(cudaDeviceSynchronize());
  CHECK(atomic_load(&near.passed) == 1, "passed %d", atomic_load(&near.passed));
  atomic_store(&gate.open, 1);
  OK(cudaStreamSynchronize(far));
  OK(cudaStreamDestroy(far));
}

TEST(the_per_thread_stream_is_the_threads_own) {
  gate_t gate = {0};
  int device = -1;
  unsigned long long a, b;
  OK(cudaLaunchHostFunc(cudaStreamPerThread, recordPassed, &gate));
  OK(cudaStreamSynchronize(cudaStreamPerThread));
  CHECK(atomic_load(&gate.passed) == 1, "did not run");
  OK(cudaStreamGetId(cudaStreamPerThread, &a));
  OK(cudaStreamGetId(cudaStreamLegacy, &b));
  OK(cudaStreamGetDevice(cudaStreamPerThread, &device));
  CHECK(a != b && device == 0, "ids %llu %llu device %d", a, b, device);
}

TEST(events_measure_real_time) {
  cudaStream_t s;
  cudaEvent_t start, end, never, untimed;
  gate_t gate = {0};
  float ms = -1;
  OK(cudaStreamCreate(&s));
  OK(cudaEventCreate(&start));
  OK(cudaEventCreate(&end));
  OK(cudaEventCreate(&never));
  OK(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming));
  OK(cudaEventRecord(start, s));
  OK(cudaLaunchHostFunc(s, passGate, &gate));
  OK(cudaEventRecord(end, s));
  CHECK(cudaEventElapsedTime(&ms, start, end) == cudaErrorNotReady && ms == -1, "ms %f", ms);
  OK(cudaEventSynchronize(start)); /* the stream's thread may begin late */
  pauseMs(30);
  atomic_store(&gate.open, 1);
  OK(cudaEventSynchronize(end));
  OK(cudaEventElapsedTime(&ms, start, end));
  CHECK(ms >= 29 && ms < 20000, "ms %f", ms);
  CHECK(cudaEventElapsedTime(&ms, never, end) == cudaErrorInvalidResourceHandle, "unrecorded");
  OK(cudaEventRecord(untimed, s));
  OK(cudaStreamSynchronize(s));
  CHECK(cudaEventElapsedTime(&ms, start, untimed) == cudaErrorInvalidResourceHandle, "untimed");
  CHECK(cudaEventQuery(never) == cudaSuccess, "an event that was never recorded is passed");
  OK(cudaEventDestroy(start));
  OK(cudaEventDestroy(end));
  OK(cudaEventDestroy(never));
  OK(cudaEventDestroy(untimed));
  OK(cudaStreamDestroy(s));
}

TEST(a_destroyed_stream_finishes_its_work) {
  cudaStream_t s;
  gate_t gate = {0};
  OK(cudaStreamCreate(&s));
  OK(cudaLaunchHostFunc(s, passGate, &gate));
  OK(cudaLaunchHostFunc(s, recordPassed, &gate));
  OK(cudaStreamDestroy(s));
  CHECK(cudaStreamSynchronize(s) == cudaErrorInvalidResourceHandle, "a dead stream was taken");
  CHECK(cudaStreamDestroy(s) == cudaErrorInvalidResourceHandle, "destroyed twice");
  atomic_store(&gate.open, 1);
  for (int i = 0; i < 5000 && atomic_load(&gate.passed) < 2; i++) pauseMs(1);
  CHECK(atomic_load(&gate.passed) == 2, "passed %d", atomic_load(&gate.passed));
}

static cudaError_t fromInside[3];
static void callsCuda(void *arg) {
  fromInside[0] = cudaMalloc((void **)arg, 16);
  fromInside[1] = cudaStreamSynchronize(NULL);
  fromInside[2] = cudaMemsetAsync(arg, 0, 4, NULL);
}

TEST(host_functions_may_not_call_cuda) {
  cudaStream_t s;
  void *p = NULL;
  OK(cudaStreamCreate(&s));
  OK(cudaLaunchHostFunc(s, callsCuda, &p));
  OK(cudaStreamSynchronize(s));
  CHECK(fromInside[0] == cudaErrorNotPermitted && fromInside[1] == cudaErrorNotPermitted &&
            fromInside[2] != cudaSuccess,
        "%d %d %d", fromInside[0], fromInside[1], fromInside[2]);
  OK(cudaStreamDestroy(s));
}

TEST(copies_check_their_sides) {
  char host[64], *device;
  OK(cudaMalloc((void **)&device, 64));
  cudaGetLastError();
  CHECK(cudaMemcpy(host, device, 65, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue, "overrun");
  CHECK(cudaPeekAtLastError() == cudaErrorInvalidValue, "not remembered");
  CHECK(strstr(cudaGetErrorString(cudaErrorInvalidValue), "64"), "no sentence: %s",
        cudaGetErrorString(cudaErrorInvalidValue));
  CHECK(cudaGetLastError() == cudaErrorInvalidValue && cudaGetLastError() == cudaSuccess, "clear");
  CHECK(cudaMemcpy(host, host + 32, 8, cudaMemcpyHostToDevice) == cudaErrorInvalidValue, "dst");
  CHECK(cudaMemcpy(device, device, 8, cudaMemcpyHostToDevice) == cudaErrorInvalidValue, "src");
  CHECK(cudaMemcpy(device, host, 8, (enum cudaMemcpyKind)9) == cudaErrorInvalidMemcpyDirection,
        "9");
  CHECK(cudaMemcpy(NULL, host, 8, cudaMemcpyHostToDevice) == cudaErrorInvalidValue, "NULL");
  CHECK(cudaMemset(host, 0, 8) == cudaErrorInvalidValue, "memset of host memory");
  CHECK(cudaMemcpy(NULL, NULL, 0, cudaMemcpyHostToDevice) == cudaSuccess, "no bytes");
  CHECK(cudaMemcpy(device, host, 64, cudaMemcpyDefault) == cudaSuccess, "default");
  OK(cudaFree(device));
  CHECK(cudaMemcpy(host, device, 8, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue, "freed");
}

TEST(two_dimensions) {
  unsigned char *device, host[5 * 7], back[5 * 9];
  size_t pitch;
  OK(cudaMallocPitch((void **)&device, &pitch, 5, 7));
  for (int i = 0; i < 35; i++) host[i] = (unsigned char)i;
  OK(cudaMemcpy2D(device, pitch, host, 5, 5, 7, cudaMemcpyHostToDevice));
  memset(back, 0xEE, sizeof back);
  OK(cudaMemcpy2D(back, 6, device, pitch, 5, 7, cudaMemcpyDeviceToHost));
  for (int y = 0; y < 7; y++)
    for (int x = 0; x < 6; x++)
      CHECK(back[y * 6 + x] == (x < 5 ? y * 5 + x : 0xEE), "at %d %d", x, y);
  CHECK(back[42] == 0xEE, "past the end");
  OK(cudaMemset2D(device, pitch, 9, 3, 2));
  OK(cudaMemcpy2D(back, 5, device, pitch, 5, 7, cudaMemcpyDeviceToHost));
  CHECK(back[2] == 9 && back[3] == 3 && back[5] == 9 && back[10] == 10, "fill");
  CHECK(cudaMemcpy2D(back, 4, device, pitch, 5, 7, cudaMemcpyDeviceToHost) ==
            cudaErrorInvalidPitchValue,
        "pitch");
  OK(cudaFree(device));
}

static void *hammer(void *arg) {
  cudaStream_t s = arg;
  gate_t gate = {0};
  for (int i = 0; i < 300; i++) {
    cudaLaunchHostFunc(s, recordPassed, &gate);
    if (i % 3 == 0) cudaStreamSynchronize(s);
  }
  cudaStreamSynchronize(s);
  return (void *)(intptr_t)atomic_load(&gate.passed);
}

TEST(many_threads_on_one_stream) {
  pthread_t threads[4];
  cudaStream_t s;
  OK(cudaStreamCreate(&s));
  for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, hammer, s);
  for (int i = 0; i < 4; i++) {
    void *count;
    pthread_join(threads[i], &count);
    CHECK((intptr_t)count == 300, "thread %d saw %d", i, (int)(intptr_t)count);
  }
  OK(cudaStreamDestroy(s));
}

TEST_MAIN()
