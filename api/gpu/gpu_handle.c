/* Handles: calls become the kernels' parameter structs.
 *
 * An Update only notes the routing's address. Dispatch leaves in the handle's memory what combine needs
 * (which rows go back to whom), so a Combine wants a Dispatch since the last Update. */
#include <stddef.h>
#include <string.h>

#include "api/gpu/gpu.h"

static ep_gpu_handle_t *stateOf(ncclEpHandle_t handle) {
  uintptr_t end = (uintptr_t)(handle + 1);
  return (ep_gpu_handle_t *)((end + 63) / 64 * 64);
}

/* A stream of the group's own: a capture on another one is no obstacle, nor does it notice. */
static trefoil_result_t clear(const ep_gpu_group_t *g, void *memory, size_t bytes) {
  EP_CUDA(cudaMemsetAsync(memory, 0, bytes, g->aside));
  EP_CUDA(cudaStreamSynchronize(g->aside));
  return TREFOIL_OK;
}

static trefoil_result_t makeMemory(ncclEpHandle_t handle) {
  ep_gpu_group_t *g = epGpu(handle->group);
  enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  EP_CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
  trefoil_result_t result;
  if (epIsHt(handle->group)) {
    ep_gpu_handle_t *h = handle->state;
    result = epGpuHtHandleCreate(h);
    if (result == TREFOIL_OK && handle->ownsMem) {
      result = clear(g, h->htHead, EP_GPU_HT_HEAD_BYTES);
    }
    epGpuCountTake(h);
  } else {
    result = clear(g, handle->handleMem, handle->sizing.buffers[EP_BUFFER_HANDLE_MEM].bytes);
  }
  cudaThreadExchangeStreamCaptureMode(&mode);
  EP_TRY(result);
  return epGpuArenaEnsure(g, &handle->sizing);
}

static void leaveHt(ep_gpu_handle_t *h) {
  epGpuHtHandleDestroy(h);
  epGpuCountLeave(h);
}

trefoil_result_t epGpuHandleCreate(ncclEpHandle_t handle) {
  ep_gpu_handle_t *h = stateOf(handle);
  memset(h, 0, sizeof *h);
  handle->state = h;
  h->handle = handle;
  h->g = epGpu(handle->group);
  h->pendingKind = -1;
  int rankMajor = handle->mode == TREFOIL_LL_RANK_MAJOR;
  h->ll = (ep_ll_handle_t){
      .memory = handle->handleMem,
      .numTopk = handle->topk,
      .rankMajor = rankMajor,
      .sum = rankMajor                  ? EP_LL_SUM_RANKS
             : handle->group->llPartial ? EP_LL_SUM_PARTIAL
                                        : EP_LL_SUM_EXACT,
  };
  int before;
  EP_TRY(epGpuEnter(h->g, &before));
  trefoil_result_t result = makeMemory(handle);
  if (result != TREFOIL_OK) leaveHt(h);
  epGpuLeave(h->g, before);
  return result;
}

trefoil_result_t epGpuHandleDestroy(ncclEpHandle_t handle) {
  ep_gpu_handle_t *h = handle->state;
  int before;
  EP_TRY(epGpuEnter(h->g, &before));
  cudaError_t error = cudaDeviceSynchronize();
  if (error == cudaSuccess) leaveHt(h);
  epGpuLeave(h->g, before);
  EP_CHECK(error == cudaSuccess, TREFOIL_SYSTEM_ERROR, "ncclEpHandleDestroy: %s",
           cudaGetErrorString(error));
  return TREFOIL_OK;
}

trefoil_result_t epGpuUpdate(ncclEpHandle_t handle, const ep_update_call_t *call,
                             cudaStream_t stream) {
  ep_gpu_handle_t *h = handle->state;
  if (h->g->isHt) {
    int before;
    EP_TRY(epGpuEnter(h->g, &before));
    ep_update_call_t counting = *call;
    counting.total = epGpuCountInto(h, call->total);
    trefoil_result_t result = epGpuHtUpdate(h, &counting, stream);
    epGpuLeave(h->g, before);
    return result;
  }
  h->ll.topkIdx = call->topkIdx;
  h->ll.idx64 = call->is64;
  return TREFOIL_OK;
}

/* ---- halves ---------------------------------------------------------------------------------- */

static trefoil_result_t receive(ep_gpu_handle_t *h, cudaStream_t stream) {
  ep_gpu_op_t op = {(unsigned)h->pendingKind, {.llDispatch = &h->pendingOp.dispatch}};
  if (op.kind == EP_LL_COMBINE) op.llCombine = &h->pendingOp.combine;
  return epGpuLaunch(h, op, EP_LL_RECV, stream);
}

/* Receives run in the order of the sends, and before a whole operation that follows them: two numbers
 * of a kind share a buffer. An older pending operation of this kind than send `no` is received
 * first; its outputs are the library's until its own Complete. */
static trefoil_result_t receiveOlder(ep_gpu_handle_t *h, ep_ll_kind_t kind, uint64_t no,
                                     cudaStream_t stream) {
  if (!h->handle->group->numPending) return TREFOIL_OK;
  unsigned long long capture;
  EP_TRY(epGpuCapture(stream, &capture));
  for (struct ncclEpHandle *other = h->handle->group->handles; other; other = other->next) {
    ep_gpu_handle_t *o = other->state;
    if (o->pendingKind != (int)kind || o->receivedEarly || o->pendingNo >= no) continue;
    EP_CHECK(capture == o->pendingCapture, TREFOIL_INVALID_USAGE,
             "an earlier send_only operation of this kind is pending, %s a graph, and would be "
             "received %s; call ncclEpComplete on its handle first",
             capture ? "sent outside" : "captured in", capture ? "in one" : "outside");
    EP_TRY(receive(o, stream));
    o->receivedEarly = 1;
    o->earlyStream = stream;
  }
  return TREFOIL_OK;
}

/* Two of a kind in flight. What a rank has received then is told by words in the exchange memory, so all
 * operations must use the same one: none of an older one may still lie in a graph. */
static trefoil_result_t checkSecond(ep_gpu_handle_t *h, ep_ll_kind_t kind, int captured) {
  if (!h->handle->group->numPending) return TREFOIL_OK;
  for (struct ncclEpHandle *other = h->handle->group->handles; other; other = other->next) {
    const ep_gpu_handle_t *o = other->state;
    if (o->pendingKind != (int)kind || o->receivedEarly) continue;
    EP_CHECK(h->g->numArenas == 1, TREFOIL_INVALID_USAGE,
             "another send_only operation of this kind is pending, and the group's buffers have "
             "grown while graphs use the smaller ones; complete it first, or make the handle with "
             "the largest num_topk first");
    h->g->capturedTwo |= captured;
  }
  return TREFOIL_OK;
}

static trefoil_result_t run(ep_gpu_handle_t *h, ep_gpu_op_t op, int sendOnly, cudaStream_t stream) {
  const ep_ll_kind_t kind = (ep_ll_kind_t)op.kind;
  if (!sendOnly) {
    EP_TRY(receiveOlder(h, kind, UINT64_MAX, stream));
    return epGpuLaunch(h, op, EP_LL_BOTH, stream);
  }
  unsigned long long capture;
  EP_TRY(epGpuCapture(stream, &capture));
  EP_TRY(checkSecond(h, kind, capture != 0));
  EP_TRY(epGpuLaunch(h, op, EP_LL_SEND, stream));
  if (kind == EP_LL_DISPATCH)
    h->pendingOp.dispatch = *op.llDispatch;
  else
    h->pendingOp.combine = *op.llCombine;
  h->pendingKind = (int)kind;
  h->pendingNo = ++h->g->numSends;
  h->pendingCapture = capture;
  h->receivedEarly = 0;
  return TREFOIL_OK;
}

/* A replay sends and receives, or neither: what it only sent no rank would receive, and the next one
 * would receive again what was sent once. Send and Complete may lie in two graphs. */
static trefoil_result_t checkCapture(const ep_gpu_handle_t *h, cudaStream_t stream) {
  unsigned long long capture;
  EP_TRY(epGpuCapture(stream, &capture));
  EP_CHECK(!capture == !h->pendingCapture, TREFOIL_INVALID_USAGE,
           "ncclEpComplete: the send_only operation was %s a graph, its Complete would be %s one; "
           "capture both or neither",
           capture ? "sent outside" : "captured in", capture ? "in" : "outside");
  return TREFOIL_OK;
}

trefoil_result_t epGpuComplete(ncclEpHandle_t handle, cudaStream_t stream) {
  ep_gpu_handle_t *h = handle->state;
  ep_ll_kind_t kind = (ep_ll_kind_t)h->pendingKind;
  EP_TRY(checkCapture(h, stream));
  if (h->receivedEarly) {
    EP_TRY(epGpuAfter(h->g, h->earlyStream, stream));
  } else {
    EP_TRY(receiveOlder(h, kind, h->pendingNo, stream));
    EP_TRY(receive(h, stream));
  }
  h->pendingKind = -1;
  h->receivedEarly = 0;
  return TREFOIL_OK;
}

/* ---- operations ------------------------------------------------------------------------------ */

trefoil_result_t epGpuDispatch(ncclEpHandle_t handle, const ep_dispatch_call_t *call,
                               cudaStream_t stream) {
  ep_gpu_handle_t *h = handle->state;
  ep_gpu_group_t *g = h->g;
  if (g->isHt) {
    int before;
    EP_TRY(epGpuEnter(g, &before));
    trefoil_result_t result = epGpuHtDispatch(h, call, stream);
    epGpuLeave(g, before);
    return result;
  }
  int e4m3 = call->quant == EP_QUANT_E4M3;
  ep_ll_dispatch_t op;
  memset(&op.tokens, 0, sizeof op - offsetof(ep_ll_dispatch_t, tokens)); /* not the group: gpu.h */
  op.handle = h->ll;
  op.tokens = call->tokens;
  op.scales = call->scales;
  op.weights = call->weights;
  op.outTokens = call->out.tokens;
  op.outScales = call->out.scales;
  op.outWeights = call->out.weights;
  op.outIdx = call->out.idx;
  op.counters = h->ll.rankMajor ? call->srcRankCounters.data : call->expertCounters.data;
  op.scratch = g->arenas[g->numArenas - 1].scratch;
  op.numTokens = (int)call->numTokens;
  op.tokenBytes = (int)call->tokenBytes;
  op.scaleBytes = (int)call->scaleBytes;
  op.quant = !e4m3               ? EP_LL_QUANT_NONE
             : call->roundScales ? EP_LL_QUANT_E4M3_POW2
                                 : EP_LL_QUANT_E4M3;
  op.globalIds = call->globalIds;
  op.generic = g->far != NULL;
  return run(h, (ep_gpu_op_t){EP_LL_DISPATCH, {.llDispatch = &op}}, call->sendOnly, stream);
}

trefoil_result_t epGpuCombine(ncclEpHandle_t handle, const ep_combine_call_t *call,
                              cudaStream_t stream) {
  ep_gpu_handle_t *h = handle->state;
  if (h->g->isHt) {
    int before;
    EP_TRY(epGpuEnter(h->g, &before));
    trefoil_result_t result = epGpuHtCombine(h, call, stream);
    epGpuLeave(h->g, before);
    return result;
  }
  ep_ll_combine_t op;
  memset(&op.tokens, 0, sizeof op - offsetof(ep_ll_combine_t, tokens));
  op.handle = h->ll;
  op.tokens = call->tokens;
  op.weights = call->weights;
  op.out = call->out;
  op.dtype = call->dtype;
  op.numTokens = (int)call->numTokens;
  op.rowBytes = (int)((size_t)call->width * trefoilDtypeBytes(call->dtype));
  return run(h, (ep_gpu_op_t){EP_LL_COMBINE, {.llCombine = &op}}, call->sendOnly, stream);
}
