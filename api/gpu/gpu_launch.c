/* Launches of a group in the order of its calls.
 *
 * A stream orders its own launches. When a call comes on another stream than the last one, that stream
 * first waits for the launches before: otherwise a dispatch and a combine could keep each other off the
 * SMs, on one rank this way round and on another that way, and all would wait. All ranks call in
 * the same order, so this order cannot lock. The event for that is recorded with every launch: a stream may
 * be gone when the next one comes. A group with one handle records none: operations of a handle depend on
 * one another, so the caller orders them. If two launches fit on the GPU together (max_num_sms
 * at most half of its SMs) nothing is ordered, except receives after their sends, which is the
 * caller's own order.
 *
 * In captures the same, among launches of one capture; a launch outside and one inside cannot be
 * ordered, and a program that replays a graph beside other launches orders them itself. */
#include "api/gpu/gpu.h"
#include "api/gpu/gpu_device.h"

trefoil_result_t epGpuCapture(cudaStream_t stream, unsigned long long *capture) {
  if (!stream || stream == cudaStreamLegacy) { /* it cannot be captured, and asking takes time */
    *capture = 0;
    return TREFOIL_OK;
  }
  enum cudaStreamCaptureStatus status;
  unsigned long long id = 0;
  cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, &id, NULL, NULL, NULL, NULL);
  EP_CHECK(error == cudaSuccess, TREFOIL_SYSTEM_ERROR, "the stream: %s", cudaGetErrorString(error));
  EP_CHECK(status != cudaStreamCaptureStatusInvalidated, TREFOIL_INVALID_USAGE,
           "the stream's capture has failed before");
  *capture = status == cudaStreamCaptureStatusActive ? id : 0;
  return TREFOIL_OK;
}

static trefoil_result_t waitForLast(ep_gpu_group_t *g, cudaStream_t stream,
                                    unsigned long long capture) {
  if (!g->hasLast || g->lastStream == stream || g->lastCapture != capture) {
    return TREFOIL_OK;
  }
  EP_CUDA(cudaStreamWaitEvent(stream, g->tail[capture != 0], 0));
  return TREFOIL_OK;
}

static trefoil_result_t queueAfter(ep_gpu_group_t *g, cudaStream_t before, cudaStream_t stream) {
  unsigned long long capture;
  EP_TRY(epGpuCapture(stream, &capture));
  cudaEvent_t event = g->early[capture != 0];
  EP_CUDA(cudaEventRecord(event, before));
  EP_CUDA(cudaStreamWaitEvent(stream, event, 0));
  return TREFOIL_OK;
}

trefoil_result_t epGpuAfter(ep_gpu_group_t *g, cudaStream_t before, cudaStream_t stream) {
  if (before == stream) return TREFOIL_OK;
  int device;
  EP_TRY(epGpuEnter(g, &device));
  trefoil_result_t result = queueAfter(g, before, stream);
  epGpuLeave(g, device);
  return result;
}

static void setStamps(ep_gpu_op_t op, uint64_t *stamps) {
  switch (op.kind) {
  case EP_LL_DISPATCH:
    op.llDispatch->group.stamps = stamps;
    break;
  case EP_LL_COMBINE:
    op.llCombine->group.stamps = stamps;
    break;
  case EP_HT_KIND_UPDATE:
    op.htUpdate->group.stamps = stamps;
    break;
  case EP_HT_KIND_DISPATCH:
    op.htDispatch->group.stamps = stamps;
    break;
  default:
    op.htCombine->group.stamps = stamps;
  }
}

static trefoil_result_t launchHt(const ep_gpu_group_t *g, ep_gpu_op_t op, cudaStream_t stream) {
  if (g->far) return epGpuFarLaunchHt(g, op, stream);
  if (op.kind == EP_HT_KIND_UPDATE) return epHtUpdate(op.htUpdate, stream);
  if (op.kind == EP_HT_KIND_DISPATCH) {
    EP_TRY(epGpuHtStage(op.htDispatch, stream)); /* behind the launches that read the last rows */
    return epHtDispatch(op.htDispatch, stream);
  }
  return epHtCombine(op.htCombine, stream);
}

static trefoil_result_t prepare(const ep_gpu_group_t *g, ep_gpu_op_t op, unsigned parts,
                                ep_ll_ready_t *out) {
  ep_ll_group_t *group = op.kind == EP_LL_DISPATCH ? &op.llDispatch->group : &op.llCombine->group;
  uint64_t *stamps = group->stamps;
  *group = g->ll;
  group->stamps = stamps;
  if (g->far) return epGpuFarPrepare(op, parts, out);
  return op.kind == EP_LL_DISPATCH ? epLlPrepareDispatch(op.llDispatch, parts, out)
                                   : epLlPrepareCombine(op.llCombine, parts, out);
}

static trefoil_result_t launchReady(const ep_gpu_group_t *g, unsigned kind,
                                    const ep_ll_ready_t *ready, cudaStream_t stream) {
  return g->far ? epGpuFarLaunch(g, kind, ready, stream) : epLlLaunch(ready, stream);
}

static trefoil_result_t launchLl(ep_gpu_handle_t *h, ep_gpu_op_t op, unsigned parts,
                                 cudaStream_t stream) {
  ep_gpu_group_t *g = h->g;
  if (parts != EP_LL_BOTH) {
    ep_ll_ready_t once;
    EP_TRY(prepare(g, op, parts, &once));
    return launchReady(g, op.kind, &once, stream);
  }
  ep_ll_ready_t *ready = &h->ready[op.kind];
  if (h->readyVersion[op.kind] != g->version ||
      !(op.kind == EP_LL_DISPATCH ? epLlReuseDispatch(ready, op.llDispatch)
                                  : epLlReuseCombine(ready, op.llCombine))) {
    EP_TRY(prepare(g, op, parts, ready));
    h->readyVersion[op.kind] = g->version;
  }
  return launchReady(g, op.kind, ready, stream);
}

/* With a progress file: the operation is finished. */
static trefoil_result_t recordFinished(ep_gpu_handle_t *h, unsigned kind, unsigned parts,
                                       cudaStream_t stream) {
  ep_gpu_group_t *g = h->g;
  if (!g->finished || !(parts & EP_LL_RECV)) return TREFOIL_OK;
  if (g->isHt) return epGpuRecordFinishedHt(g->control, g->finished, stream);
  return epGpuRecordFinished(h->ll.memory, (int)kind, g->finished + kind, stream);
}

static trefoil_result_t launch(ep_gpu_handle_t *h, ep_gpu_op_t op, unsigned parts,
                               cudaStream_t stream) {
  ep_gpu_group_t *g = h->g;
  unsigned long long capture;
  EP_TRY(epGpuCapture(stream, &capture));
  EP_TRY(waitForLast(g, stream, capture));
  setStamps(op, epGpuStampsFor(g, op.kind, parts));
  EP_TRY(g->isHt ? launchHt(g, op, stream) : launchLl(h, op, parts, stream));
  EP_TRY(recordFinished(h, op.kind, parts, stream));
  g->hasLast = !g->fitsTwice && g->group->numHandles > 1;
  if (g->hasLast) EP_CUDA(cudaEventRecord(g->tail[capture != 0], stream));
  g->lastStream = stream;
  g->lastCapture = capture;
  if (capture) g->captured = 1;
  return TREFOIL_OK;
}

trefoil_result_t epGpuLaunch(ep_gpu_handle_t *h, ep_gpu_op_t op, unsigned parts,
                             cudaStream_t stream) {
  if (h->g->isHt) return launch(h, op, parts, stream); /* the caller has entered */
  int before;
  EP_TRY(epGpuEnter(h->g, &before));
  trefoil_result_t result = launch(h, op, parts, stream);
  epGpuLeave(h->g, before);
  return result;
}
