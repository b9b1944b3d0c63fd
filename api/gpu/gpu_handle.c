/* Handles: calls become the kernels' parameter structs.
 *
 * An Update only notes the routing's address. Dispatch leaves in the handle's memory what combine needs
 * (which rows are owed to whom), so a Combine wants a Dispatch since the last Update. */
#include <stddef.h>
#include <string.h>

#include "api/gpu/gpu.h"

static ep_gpu_handle_t *stateOf(ncclEpHandle_t handle) {
  uintptr_t end = (uintptr_t)(handle + 1);
  return (ep_gpu_handle_t *)((end + 63) / 64 * 64);
}

static trefoil_result_t makeMemory(ncclEpHandle_t handle) {
  if (epIsHt(handle->group)) {
    EP_TRY(epGpuHtHandleCreate(handle->state));
    EP_CUDA(cudaDeviceSynchronize());
    return epGpuArenaEnsure(epGpu(handle->group), &handle->sizing);
  }
  EP_CUDA(cudaMemset(handle->handleMem, 0, handle->sizing.buffers[EP_BUFFER_HANDLE_MEM].bytes));
  EP_CUDA(cudaDeviceSynchronize());
  return epGpuArenaEnsure(epGpu(handle->group), &handle->sizing);
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
  if (result != TREFOIL_OK) epGpuHtHandleDestroy(h);
  epGpuLeave(h->g, before);
  return result;
}

trefoil_result_t epGpuHandleDestroy(ncclEpHandle_t handle) {
  ep_gpu_handle_t *h = handle->state;
  int before;
  EP_TRY(epGpuEnter(h->g, &before));
  cudaError_t error = cudaDeviceSynchronize();
  if (error == cudaSuccess) epGpuHtHandleDestroy(h);
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
    trefoil_result_t result = epGpuHtUpdate(h, call, stream);
    epGpuLeave(h->g, before);
    return result;
  }
  h->ll.topkIdx = call->topkIdx;
  h->ll.idx64 = call->is64;
  h->notedNo++;
  return TREFOIL_OK;
}

/* ---- halves ---------------------------------------------------------------------------------- */

static trefoil_result_t receive(ep_gpu_handle_t *h, cudaStream_t stream) {
  return epGpuLaunch(h, (ep_ll_kind_t)h->pendingKind, &h->pendingOp, EP_LL_RECV, stream);
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

static trefoil_result_t run(ep_gpu_handle_t *h, ep_ll_kind_t kind, void *op, size_t bytes,
                            int sendOnly, cudaStream_t stream) {
  if (!sendOnly) {
    EP_TRY(receiveOlder(h, kind, UINT64_MAX, stream));
    return epGpuLaunch(h, kind, op, EP_LL_BOTH, stream);
  }
  unsigned long long capture;
  EP_TRY(epGpuCapture(stream, &capture));
  EP_TRY(checkSecond(h, kind, capture != 0));
  EP_TRY(epGpuLaunch(h, kind, op, EP_LL_SEND, stream));
  memcpy(&h->pendingOp, op, bytes);
  h->pendingKind = (int)kind;
  h->pendingNo = ++h->g->numSends;
  h->pendingCapture = capture;
  h->receivedEarly = 0;
  return TREFOIL_OK;
}

/* A replay sends and receives, or neither: what it only sent nobody would receive, and the next one
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

/* Outputs that peers may write: all bytes that travel, in windows. Nothing is asked where nothing
 * would come of it, as that takes its time on the host. Not where launches of two handles are left
 * unordered: a send could come before this rank's own receive of the last but one, whose counters it
 * looks up. */
static void findOutputs(const ep_gpu_group_t *g, const ep_dispatch_call_t *call,
                        ep_ll_dispatch_t *op) {
  const ep_group_limits_t *limits = &g->group->limits;
  ep_ll_window_t *w = &op->window;
  w->way = limits->zeroCopy == NCCL_EP_ZERO_COPY_ON    ? EP_LL_WAY_STRAIGHT
           : limits->zeroCopy == NCCL_EP_ZERO_COPY_OFF ? EP_LL_WAY_LINES
                                                       : EP_LL_WAY_AUTO;
  unsigned parts = call->sendOnly ? EP_LL_SEND : EP_LL_BOTH;
  if (!op->handle.rankMajor || op->quant || w->way == EP_LL_WAY_LINES || limits->enableMask ||
      (g->fitsTwice && g->group->numHandles > 1) ||
      (w->way == EP_LL_WAY_AUTO &&
       !epLlPrefersStraight(op->numTokens, (size_t)(op->tokenBytes + op->scaleBytes), parts)) ||
      !epGpuIsAtOneDistance(g, call->out.tokensWindow, &w->tokens) ||
      (op->scaleBytes && !epGpuIsAtOneDistance(g, call->out.scalesWindow, &w->scales))) {
    return;
  }
  w->tokens += (int64_t)call->out.tokensOffset;
  w->scales += op->scaleBytes ? (int64_t)call->out.scalesOffset : 0;
  w->is = ((w->tokens | w->scales) & 15) == 0;
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
  findOutputs(g, call, &op);
  EP_TRY(run(h, EP_LL_DISPATCH, &op, sizeof op, call->sendOnly, stream));
  h->dispatchedNo = h->notedNo;
  return TREFOIL_OK;
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
  EP_CHECK(h->dispatchedNo == h->notedNo, TREFOIL_INVALID_USAGE,
           "ncclEpCombine: no ncclEpDispatch on this handle since its ncclEpUpdateHandle; low "
           "latency on GPUs learns there which rows are owed to whom");
  ep_ll_combine_t op;
  memset(&op.tokens, 0, sizeof op - offsetof(ep_ll_combine_t, tokens));
  op.handle = h->ll;
  op.tokens = call->tokens;
  op.weights = call->weights;
  op.out = call->out;
  op.dtype = call->dtype;
  op.numTokens = (int)call->numTokens;
  op.rowBytes = (int)((size_t)call->width * trefoilDtypeBytes(call->dtype));
  return run(h, EP_LL_COMBINE, &op, sizeof op, call->sendOnly, stream);
}
