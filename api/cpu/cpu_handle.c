/* Handles: handle_mem, the layout's memory, and calls turned into records. */
#include <stdlib.h>
#include <string.h>

#include "api/cpu/cpu.h"
#include "api/cpu/cpu_group.h"

static ep_cpu_handle_t *stateOf(ncclEpHandle_t handle) {
  uintptr_t end = (uintptr_t)(handle + 1);
  return (ep_cpu_handle_t *)((end + 63) / 64 * 64);
}

static size_t align16(size_t bytes) {
  return (bytes + 15) / 16 * 16;
}

/* handle_mem: head (256) | numTokens [R] | LL: active [R, R] | routing [R][N * K]. Where a rank's routing
 * lies follows from the K of the Update, so that handles of other bounds find it. */
static void carveMem(ep_cpu_handle_t *h) {
  size_t R = (size_t)h->g->R;
  char *p = h->handle->handleMem;
  h->head = (ep_mem_head_t *)p;
  p += 256;
  h->numTokens = (int64_t *)p;
  p += align16(R * sizeof(int64_t));
  if (!epIsHt(h->g->group)) {
    h->active = (uint8_t *)p;
    p += align16(R * R);
  }
  h->routing = (int32_t *)p;
}

static trefoil_result_t makeHost(ep_cpu_handle_t *h) {
  const ep_buffer_t *b = &h->handle->sizing.buffers[EP_BUFFER_LAYOUT];
  EP_TRY(epAllocBuffer(h->g->group, b, &h->hostBlock));
  size_t pointers = align16((size_t)h->g->R * sizeof *h->rows);
  h->rows = h->hostBlock;
  h->layout.memory = (char *)h->hostBlock + pointers;
  h->layout.memoryBytes = b->bytes - pointers;
  epPlaceRows(h, h->handle->topkBound);
  return TREFOIL_OK;
}

trefoil_result_t epCpuHandleCreate(ncclEpHandle_t handle) {
  ep_cpu_handle_t *h = stateOf(handle);
  memset(h, 0, sizeof *h);
  handle->state = h;
  h->handle = handle;
  h->g = epCpu(handle->group);
  int expertMajor =
      handle->mode == TREFOIL_LL_EXPERT_MAJOR || handle->mode == TREFOIL_HT_EXPERT_MAJOR;
  h->arenaIdx = expertMajor ? 0 : 1;
  carveMem(h);
  if (handle->ownsMem) h->head->magic = 0;
  EP_TRY(makeHost(h));
  trefoil_result_t result = epArenaEnsure(h->g, h->arenaIdx, &handle->sizing, handle->topkBound);
  if (result != TREFOIL_OK) {
    epFreeBuffer(handle->group, &handle->sizing.buffers[EP_BUFFER_LAYOUT], h->hostBlock);
  }
  return result;
}

trefoil_result_t epCpuHandleDestroy(ncclEpHandle_t handle) {
  ep_cpu_handle_t *h = handle->state;
  epWaitIdle(h->g, h);
  free(h->pendingRecord);
  if (h->earlyEvent) cudaEventDestroy(h->earlyEvent);
  for (ep_record_t *r = h->captured, *next; r; r = next) {
    next = r->next;
    free(r);
  }
  epFreeBuffer(handle->group, &handle->sizing.buffers[EP_BUFFER_LAYOUT], h->hostBlock);
  return TREFOIL_OK;
}

trefoil_result_t epCpuUpdate(ncclEpHandle_t handle, const ep_update_call_t *call,
                             cudaStream_t stream) {
  ep_cpu_handle_t *h = handle->state;
  if (!epIsHt(handle->group)) {
    h->recorded = *call;
    h->recordedNo++;
    return TREFOIL_OK;
  }
  ep_record_t *r;
  int capturing;
  EP_TRY(epIsCapturing(stream, &capturing));
  EP_TRY(epNewRecord(h->g, h, epRunUpdate, &r));
  r->call.update = *call;
  EP_TRY(epQueue(r, stream));
  if (!capturing) h->updatesQueued++;
  return TREFOIL_OK;
}

static trefoil_result_t queueReceive(ep_cpu_handle_t *h, cudaStream_t stream) {
  ep_record_t *copy;
  EP_TRY(epNewRecord(h->g, h, h->pendingRecord->run, &copy));
  *copy = *h->pendingRecord;
  return epQueue(copy, stream);
}

/* Receives happen in the order of the sends, whatever the order of the Completes, and before a whole
 * operation that follows them (it acknowledges all before it, and the next one takes their slot): an
 * older operation of the same kind than send `no` is received first (its outputs are the library's
 * until its own Complete). */
static trefoil_result_t receiveOlder(ep_cpu_handle_t *h, void (*run)(ep_record_t *), uint64_t no,
                                     cudaStream_t stream) {
  int capturing;
  EP_TRY(epIsCapturing(stream, &capturing));
  for (struct ncclEpHandle *other = h->handle->group->handles; other; other = other->next) {
    ep_cpu_handle_t *o = other->state;
    if (!o->pendingRecord || o->receivedEarly || o->arenaIdx != h->arenaIdx) continue;
    if (o->pendingRecord->run != run || o->pendingNo >= no) continue;
    EP_CHECK(capturing == o->pendingCaptured, TREFOIL_INVALID_USAGE,
             "an earlier send_only operation of this kind is pending, %s a graph, and would be "
             "received %s; call ncclEpComplete on its handle first",
             capturing ? "sent outside" : "captured in", capturing ? "in one" : "outside");
    EP_TRY(queueReceive(o, stream));
    o->receivedEarly = 1;
    o->earlyStream = stream;
    o->earlyEvent = NULL;
    int same = cudaEventCreateWithFlags(&o->earlyEvent, cudaEventDisableTiming) == cudaSuccess &&
               cudaEventRecord(o->earlyEvent, stream) == cudaSuccess;
    EP_CHECK(same, TREFOIL_SYSTEM_ERROR, "cannot record an event on the stream");
  }
  return TREFOIL_OK;
}

static trefoil_result_t queueWhole(ep_cpu_handle_t *h, ep_record_t *r, cudaStream_t stream) {
  trefoil_result_t result = TREFOIL_OK;
  if (h->g->group->numPending) result = receiveOlder(h, r->run, UINT64_MAX, stream);
  if (result == TREFOIL_OK) return epQueue(r, stream);
  free(r);
  return result;
}

/* Queues the whole operation, or its first half and keeps the second for Complete. */
static trefoil_result_t queueHalves(ep_cpu_handle_t *h, ep_record_t *r, int sendOnly,
                                    cudaStream_t stream) {
  r->routing = h->recorded;
  r->routingNo = h->recordedNo;
  if (!sendOnly) return queueWhole(h, r, stream);
  ep_record_t *second;
  int capturing = 0;
  trefoil_result_t result = epIsCapturing(stream, &capturing);
  if (result == TREFOIL_OK) result = epNewRecord(h->g, h, r->run, &second);
  if (result != TREFOIL_OK) {
    free(r);
    return result;
  }
  *second = *r;
  r->stage = EP_STAGE_SEND;
  second->stage = EP_STAGE_RECEIVE;
  result = epQueue(r, stream);
  if (result != TREFOIL_OK) {
    free(second);
    return result;
  }
  h->pendingRecord = second;
  h->pendingCaptured = capturing;
  h->pendingNo = ++h->g->numSends;
  return TREFOIL_OK;
}

trefoil_result_t epCpuDispatch(ncclEpHandle_t handle, const ep_dispatch_call_t *call,
                               cudaStream_t stream) {
  ep_cpu_handle_t *h = handle->state;
  ep_record_t *r;
  EP_TRY(epNewRecord(h->g, h, epRunDispatch, &r));
  r->call.dispatch = *call;
  return queueHalves(h, r, call->sendOnly, stream);
}

trefoil_result_t epCpuCombine(ncclEpHandle_t handle, const ep_combine_call_t *call,
                              cudaStream_t stream) {
  ep_cpu_handle_t *h = handle->state;
  ep_record_t *r;
  EP_TRY(epNewRecord(h->g, h, epRunCombine, &r));
  r->call.combine = *call;
  return queueHalves(h, r, call->sendOnly, stream);
}

trefoil_result_t epCpuComplete(ncclEpHandle_t handle, cudaStream_t stream) {
  ep_cpu_handle_t *h = handle->state;
  if (h->receivedEarly) {
    cudaError_t error = h->earlyStream == stream || !h->earlyEvent
                            ? cudaSuccess
                            : cudaStreamWaitEvent(stream, h->earlyEvent, 0);
    EP_CHECK(error == cudaSuccess, TREFOIL_SYSTEM_ERROR, "cannot wait on the stream: %s",
             cudaGetErrorString(error));
    if (h->earlyEvent) cudaEventDestroy(h->earlyEvent);
    h->earlyEvent = NULL;
    h->receivedEarly = 0;
  } else {
    EP_TRY(receiveOlder(h, h->pendingRecord->run, h->pendingNo, stream));
    EP_TRY(queueReceive(h, stream));
  }
  free(h->pendingRecord);
  h->pendingRecord = NULL;
  return TREFOIL_OK;
}

trefoil_result_t epCpuReadRouted(ncclEpHandle_t handle, cudaStream_t stream, ep_routed_t *out) {
  ep_cpu_handle_t *h = handle->state;
  int capturing;
  EP_TRY(epIsCapturing(stream, &capturing));
  EP_CHECK(capturing || cudaStreamSynchronize(stream) == cudaSuccess, TREFOIL_SYSTEM_ERROR,
           "cannot wait for the stream: %s", cudaGetErrorString(cudaGetLastError()));
  if (!epHoldsRouting(h)) return TREFOIL_OK;
  const ep_mem_head_t *head = h->head;
  *out = (ep_routed_t){(int)head->topk, (trefoil_mode_t)head->mode, (size_t)head->alignment,
                       h->numTokens[h->g->me]};
  return TREFOIL_OK;
}

/* The count is known once the Update has run; a program that sized its tensors has waited for that
 * anyway. */
trefoil_result_t epCpuReceivedCount(ncclEpHandle_t handle, cudaStream_t stream, int64_t *count) {
  ep_cpu_handle_t *h = handle->state;
  int capturing;
  EP_TRY(epIsCapturing(stream, &capturing));
  EP_CHECK(!capturing, TREFOIL_INVALID_USAGE,
           "eager sizing (max_recv_tokens_per_rank 0) cannot be captured: sizes are not known");
  if (!handle->ownsMem) { /* another handle's Update may have been queued on it */
    EP_CHECK(cudaStreamSynchronize(stream) == cudaSuccess, TREFOIL_SYSTEM_ERROR,
             "cannot wait for the stream: %s", cudaGetErrorString(cudaGetLastError()));
  }
  pthread_mutex_lock(&h->g->lock);
  while (epLoad(&h->updatesRun) < h->updatesQueued && h->inFlight > 0) {
    pthread_cond_wait(&h->g->idle, &h->g->lock);
  }
  pthread_mutex_unlock(&h->g->lock);
  EP_TRY(epCheckDeferred(handle->group));
  EP_CHECK(epHoldsRouting(h), TREFOIL_INVALID_USAGE,
           "handle_mem holds no routing; call ncclEpUpdateHandle first");
  *count = h->head->total;
  return TREFOIL_OK;
}
