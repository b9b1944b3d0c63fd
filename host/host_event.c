/* Events. Recording puts a record on the stream: a piece of work that notes the time. The event keeps its
 * last record; a wait keeps a reference, so that recording again or destroying the event does not
 * move what they wait for. Records in a capturing stream are kept as graph nodes instead. */
#include <stdlib.h>
#include <string.h>

#include "host_internal.h"

struct ep_event_record {
  _Atomic int refs;
  _Atomic uint64_t timeNs; /* 0 until it is passed */
  cudaStream_t stream;
  uint64_t seq;
};

static pthread_mutex_t freeLock = PTHREAD_MUTEX_INITIALIZER;
static cudaEvent_t freeEvents;

static void holdRecord(void *record) {
  atomic_fetch_add(&((ep_event_record_t *)record)->refs, 1);
}

static void dropRecord(void *record) {
  if (record && atomic_fetch_sub(&((ep_event_record_t *)record)->refs, 1) == 1) free(record);
}

static void runRecord(ep_stream_op_t *op, cudaStream_t stream, uint64_t ticket) {
  (void)stream, (void)ticket;
  atomic_store(&((ep_event_record_t *)op->shared)->timeNs, epMonotonicNs());
}

static void runWait(ep_stream_op_t *op, cudaStream_t stream, uint64_t ticket) {
  (void)stream, (void)ticket;
  ep_event_record_t *record = op->shared;
  epStreamWaitSeq(record->stream, record->seq, false);
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
  dropRecord(event->record);
  event->record = NULL;
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
  ep_event_record_t *record = calloc(1, sizeof *record);
  ep_stream_op_t *op = record ? epOpNew(cudaGraphNodeTypeEventRecord, runRecord) : NULL;
  if (!op) free(record);
  EP_CUDA_CHECK(op, cudaErrorMemoryAllocation, "cudaEventRecord: out of memory");
  record->stream = s;
  atomic_store(&record->refs, 2); /* the work's and the event's */
  op->shared = record;
  op->retain = holdRecord;
  op->release = dropRecord;
  cudaError_t error = epEnqueue(s, op, "cudaEventRecord");
  if (error != cudaSuccess) {
    dropRecord(record);
    return error;
  }
  record->seq = atomic_load(&s->submitted);
  pthread_mutex_lock(&event->lock);
  ep_event_record_t *old = event->record;
  event->record = record;
  event->captureId = 0;
  pthread_mutex_unlock(&event->lock);
  dropRecord(old);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

/* The event's last record with a reference, or NULL; *captured: the last record was in a capture. */
static ep_event_record_t *currentRecord(cudaEvent_t event, bool *captured) {
  pthread_mutex_lock(&event->lock);
  *captured = event->captureId != 0;
  ep_event_record_t *record = event->record;
  if (record) holdRecord(record);
  pthread_mutex_unlock(&event->lock);
  return record;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
  cudaStream_t s;
  EP_CUDA_TRY(epStreamResolve(stream, "cudaStreamWaitEvent", &s));
  EP_CUDA_TRY(epEventGet(event, "cudaStreamWaitEvent"));
  EP_CUDA_CHECK(!(flags & ~1u), cudaErrorInvalidValue, "cudaStreamWaitEvent: flags 0x%x", flags);
  bool captured;
  ep_event_record_t *record = currentRecord(event, &captured);
  if (captured || epCapturing(s)) {
    bool recorded = record || captured;
    dropRecord(record);
    if (captured) return epCaptureJoin(s, event, "cudaStreamWaitEvent");
    if (!recorded) return cudaSuccess;
    return epCaptureBreak(s, cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent");
  }
  if (!record) return cudaSuccess;
  ep_stream_op_t *op = epOpNew(cudaGraphNodeTypeWaitEvent, runWait);
  if (!op) dropRecord(record);
  EP_CUDA_CHECK(op, cudaErrorMemoryAllocation, "cudaStreamWaitEvent: out of memory");
  op->shared = record;
  op->retain = holdRecord;
  op->release = dropRecord;
  return epEnqueue(s, op, "cudaStreamWaitEvent");
}

static bool passed(ep_event_record_t *record) {
  return atomic_load(&record->stream->completed) >= record->seq;
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
  ep_event_record_t *record = currentRecord(event, &captured);
  bool ready = !record || passed(record);
  dropRecord(record);
  if (captured) return eventCaptured(event, "cudaEventQuery");
  return ready ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  EP_CUDA_TRY(epEventGet(event, "cudaEventSynchronize"));
  EP_CUDA_CHECK(!epInHostFunc(), cudaErrorNotPermitted,
                "cudaEventSynchronize was called from a host function");
  bool captured;
  ep_event_record_t *record = currentRecord(event, &captured);
  cudaError_t error = cudaSuccess;
  if (captured) {
    error = eventCaptured(event, "cudaEventSynchronize");
  } else if (record) {
    epStreamWaitSeq(record->stream, record->seq, true);
    error = epStreamTakeError(record->stream);
  }
  dropRecord(record);
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
  ep_event_record_t *a = currentRecord(start, &captured[0]), *b = currentRecord(end, &captured[1]);
  cudaError_t error = cudaSuccess;
  if (!a || !b || captured[0] || captured[1])
    error = epCudaFail(cudaErrorInvalidResourceHandle,
                       "cudaEventElapsedTime: an event was not recorded");
  else if (!passed(a) || !passed(b))
    error = cudaErrorNotReady;
  else
    *ms = (float)((double)((int64_t)(atomic_load(&b->timeNs) - atomic_load(&a->timeNs))) * 1e-6);
  dropRecord(a);
  dropRecord(b);
  return error;
}
