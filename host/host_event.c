/* Events. Recording puts a mark on the stream: a piece of work that notes the time. The event keeps its
 * last mark; a wait keeps a reference, so that recording again or destroying the event does not
 * move what they wait for. Records in a capturing stream are kept as graph nodes instead. */
#include <stdlib.h>
#include <string.h>

#include "host_internal.h"

struct ep_mark {
  _Atomic int refs;
  _Atomic uint64_t timeNs; /* 0 until it is passed */
  cudaStream_t stream;
  uint64_t seq;
};

static pthread_mutex_t freeLock = PTHREAD_MUTEX_INITIALIZER;
static cudaEvent_t freeEvents;

static void holdMark(void *mark) {
  atomic_fetch_add(&((ep_mark_t *)mark)->refs, 1);
}

static void dropMark(void *mark) {
  if (mark && atomic_fetch_sub(&((ep_mark_t *)mark)->refs, 1) == 1) free(mark);
}

static void runMark(ep_stream_op_t *op, cudaStream_t stream, uint64_t ticket) {
  (void)stream, (void)ticket;
  atomic_store(&((ep_mark_t *)op->shared)->timeNs, epMonotonicNs());
}

static void runWait(ep_stream_op_t *op, cudaStream_t stream, uint64_t ticket) {
  (void)stream, (void)ticket;
  ep_mark_t *mark = op->shared;
  epStreamWaitSeq(mark->stream, mark->seq, false);
}

cudaError_t epEventGet(cudaEvent_t event, const char *func) {
  EP_CUDA_CHECK(event && ((uintptr_t)event & 7) == 0 &&
                    atomic_load(&event->magic) == EP_EVENT_MAGIC,
                cudaErrorInvalidResourceHandle, "%s: %p is not a live event", func, (void *)event);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags) {
  EP_CUDA_CHECK(event && !(flags & ~7u), cudaErrorInvalidValue,
                "cudaEventCreateWithFlags: flags 0x%x", flags);
  EP_CUDA_CHECK(!(flags & cudaEventInterprocess), cudaErrorNotSupported,
                "cudaEventCreateWithFlags: cudaEventInterprocess is not implemented");
  pthread_mutex_lock(&freeLock);
  cudaEvent_t e = freeEvents;
  if (e)
    freeEvents = e->nextFree;
  else if ((e = calloc(1, sizeof *e)))
    pthread_mutex_init(&e->lock, NULL);
  pthread_mutex_unlock(&freeLock);
  EP_CUDA_CHECK(e, cudaErrorMemoryAllocation, "no memory for an event");
  e->flags = flags;
  e->device = epCurrentDevice();
  e->captureId = 0;
  atomic_store(&e->magic, EP_EVENT_MAGIC);
  *event = e;
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
  return cudaEventCreateWithFlags(event, 0);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  EP_CUDA_TRY(epEventGet(event, "cudaEventDestroy"));
  pthread_mutex_lock(&event->lock);
  atomic_store(&event->magic, EP_DEAD_MAGIC);
  dropMark(event->mark);
  event->mark = NULL;
  free(event->nodes);
  event->nodes = NULL;
  pthread_mutex_unlock(&event->lock);
  pthread_mutex_lock(&freeLock);
  event->nextFree = freeEvents;
  freeEvents = event;
  pthread_mutex_unlock(&freeLock);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags) {
  cudaStream_t s;
  EP_CUDA_TRY(epEventGet(event, "cudaEventRecord"));
  EP_CUDA_TRY(epStreamResolve(stream, "cudaEventRecord", &s));
  EP_CUDA_CHECK(event->device == s->device, cudaErrorInvalidResourceHandle,
                "cudaEventRecord: the event is of device %d, the stream of device %d",
                event->device, s->device);
  if (epCapturing(s)) {
    EP_CUDA_CHECK(!(flags & cudaEventRecordExternal), cudaErrorNotSupported,
                  "cudaEventRecordExternal in a capture is not implemented");
    return epCaptureRecord(s, event);
  }
  ep_mark_t *mark = calloc(1, sizeof *mark);
  ep_stream_op_t *op = mark ? epOpNew(cudaGraphNodeTypeEventRecord, runMark) : NULL;
  if (!op) free(mark);
  EP_CUDA_CHECK(op, cudaErrorMemoryAllocation, "cudaEventRecord: out of memory");
  mark->stream = s;
  atomic_store(&mark->refs, 2); /* the work's and the event's */
  op->shared = mark;
  op->retain = holdMark;
  op->release = dropMark;
  cudaError_t error = epEnqueue(s, op, "cudaEventRecord");
  if (error != cudaSuccess) {
    dropMark(mark);
    return error;
  }
  mark->seq = atomic_load(&s->submitted);
  pthread_mutex_lock(&event->lock);
  ep_mark_t *old = event->mark;
  event->mark = mark;
  event->captureId = 0;
  pthread_mutex_unlock(&event->lock);
  dropMark(old);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

/* The event's last mark with a reference, or NULL; *captured: the last record was in a capture. */
static ep_mark_t *currentMark(cudaEvent_t event, bool *captured) {
  pthread_mutex_lock(&event->lock);
  *captured = event->captureId != 0;
  ep_mark_t *mark = event->mark;
  if (mark) holdMark(mark);
  pthread_mutex_unlock(&event->lock);
  return mark;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
  cudaStream_t s;
  EP_CUDA_TRY(epStreamResolve(stream, "cudaStreamWaitEvent", &s));
  EP_CUDA_TRY(epEventGet(event, "cudaStreamWaitEvent"));
  EP_CUDA_CHECK(!(flags & ~1u), cudaErrorInvalidValue, "cudaStreamWaitEvent: flags 0x%x", flags);
  bool captured;
  ep_mark_t *mark = currentMark(event, &captured);
  if (captured || epCapturing(s)) {
    bool recorded = mark || captured;
    dropMark(mark);
    if (captured) return epCaptureJoin(s, event, "cudaStreamWaitEvent");
    if (!recorded) return cudaSuccess;
    return epCaptureBreak(s, cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent");
  }
  if (!mark) return cudaSuccess;
  ep_stream_op_t *op = epOpNew(cudaGraphNodeTypeWaitEvent, runWait);
  if (!op) dropMark(mark);
  EP_CUDA_CHECK(op, cudaErrorMemoryAllocation, "cudaStreamWaitEvent: out of memory");
  op->shared = mark;
  op->retain = holdMark;
  op->release = dropMark;
  return epEnqueue(s, op, "cudaStreamWaitEvent");
}

static bool passed(ep_mark_t *mark) {
  return atomic_load(&mark->stream->completed) >= mark->seq;
}

static cudaError_t eventCaptured(cudaEvent_t event, const char *func) {
  (void)event;
  return epCudaFail(cudaErrorCapturedEvent, "%s: the event was last recorded in a stream capture",
                    func);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  EP_CUDA_TRY(epEventGet(event, "cudaEventQuery"));
  EP_CUDA_TRY(epCaptureForbids("cudaEventQuery"));
  bool captured;
  ep_mark_t *mark = currentMark(event, &captured);
  bool ready = !mark || passed(mark);
  dropMark(mark);
  if (captured) return eventCaptured(event, "cudaEventQuery");
  return ready ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  EP_CUDA_TRY(epEventGet(event, "cudaEventSynchronize"));
  EP_CUDA_CHECK(!epInHostFunc(), cudaErrorNotPermitted,
                "cudaEventSynchronize was called from a host function");
  bool captured;
  ep_mark_t *mark = currentMark(event, &captured);
  cudaError_t error = cudaSuccess;
  if (captured) {
    error = eventCaptured(event, "cudaEventSynchronize");
  } else if (mark) {
    epStreamWaitSeq(mark->stream, mark->seq, true);
    error = epStreamTakeError(mark->stream);
  }
  dropMark(mark);
  return error;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
  EP_CUDA_CHECK(ms, cudaErrorInvalidValue, "cudaEventElapsedTime: ms is NULL");
  EP_CUDA_TRY(epEventGet(start, "cudaEventElapsedTime"));
  EP_CUDA_TRY(epEventGet(end, "cudaEventElapsedTime"));
  EP_CUDA_CHECK(!((start->flags | end->flags) & cudaEventDisableTiming),
                cudaErrorInvalidResourceHandle,
                "cudaEventElapsedTime: an event was made with cudaEventDisableTiming");
  bool captured[2];
  ep_mark_t *a = currentMark(start, &captured[0]), *b = currentMark(end, &captured[1]);
  cudaError_t error = cudaSuccess;
  if (!a || !b || captured[0] || captured[1])
    error = epCudaFail(cudaErrorInvalidResourceHandle,
                       "cudaEventElapsedTime: an event was not recorded");
  else if (!passed(a) || !passed(b))
    error = cudaErrorNotReady;
  else
    *ms = (float)((double)((int64_t)(atomic_load(&b->timeNs) - atomic_load(&a->timeNs))) * 1e-6);
  dropMark(a);
  dropMark(b);
  return error;
}
