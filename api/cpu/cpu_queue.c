/* Records on streams. A record that is captured lives until its handle goes, because a graph may be
 * launched any number of times; others are freed when they have run. */
#include <stdlib.h>
#include <string.h>

#include "api/cpu/cpu.h"
#include "api/cpu/cpu_hang.h"

trefoil_result_t epNewRecord(ep_cpu_group_t *g, ep_cpu_handle_t *h, void (*run)(ep_record_t *),
                             ep_record_t **out) {
  size_t maskBytes = h ? 0 : (size_t)g->R * sizeof(int);
  ep_record_t *r = malloc(sizeof *r + maskBytes);
  EP_CHECK(r, TREFOIL_SYSTEM_ERROR, "out of memory: a queued operation");
  memset(r, 0, sizeof *r);
  r->run = run;
  r->g = g;
  r->h = h;
  r->stage = EP_STAGE_BOTH;
  r->counts = atomic_load_explicit(&g->counting, memory_order_relaxed);
  *out = r;
  return TREFOIL_OK;
}

static void countRecord(ep_cpu_group_t *g, ep_cpu_handle_t *h, int by) {
  pthread_mutex_lock(&g->lock);
  g->inFlight += by;
  if (h) h->inFlight += by;
  if (by < 0) pthread_cond_broadcast(&g->idle);
  pthread_mutex_unlock(&g->lock);
}

static void runRecord(void *argument) {
  ep_record_t *r = argument;
  ep_cpu_group_t *g = r->g;
  ep_cpu_handle_t *h = r->h;
  int captured = r->captured;
  if (captured) countRecord(g, h, 1);
  if (!atomic_load(&g->failed)) {
    r->run(r);
    if (atomic_load(&g->failed)) epWithdraw(g);
  }
  if (!captured) free(r);
  countRecord(g, h, -1);
}

trefoil_result_t epIsCapturing(cudaStream_t stream, int *capturing) {
  enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaError_t error = cudaStreamIsCapturing(stream, &status);
  EP_CHECK(error == cudaSuccess, TREFOIL_INVALID_USAGE, "the stream is not usable: %s",
           cudaGetErrorString(error));
  *capturing = status != cudaStreamCaptureStatusNone;
  return TREFOIL_OK;
}

/* Takes the record, also on failure. */
trefoil_result_t epQueue(ep_record_t *r, cudaStream_t stream) {
  ep_cpu_group_t *g = r->g;
  ep_cpu_handle_t *h = r->h;
  int captured = 0;
  trefoil_result_t result = epIsCapturing(stream, &captured);
  if (result != TREFOIL_OK) {
    free(r);
    return result;
  }
  r->captured = captured;
  if (!captured) countRecord(g, h, 1);
  cudaError_t error = cudaLaunchHostFunc(stream, runRecord, r);
  if (error != cudaSuccess) {
    if (!captured) countRecord(g, h, -1);
    free(r);
    return epFail(TREFOIL_SYSTEM_ERROR, "cannot queue on the stream: %s",
                  cudaGetErrorString(error));
  }
  if (captured) {
    ep_record_t **list = h ? &h->captured : &g->captured;
    r->next = *list;
    *list = r;
  }
  return TREFOIL_OK;
}

void epWaitIdle(ep_cpu_group_t *g, ep_cpu_handle_t *h) {
  pthread_mutex_lock(&g->lock);
  while (h ? h->inFlight : g->inFlight) pthread_cond_wait(&g->idle, &g->lock);
  pthread_mutex_unlock(&g->lock);
}
