/* High throughput: calls become the kernels' parameter structs (kernels/ht/ht.h).
 *
 * An Update leaves its tables in handle_mem, where every handle on that memory finds them. In front of
 * them lies what calls on the host must know of a routing (ep_ht_memory_t), stored in stream order, so
 * that a handle which never saw the Update can ask. What only the device finds out the kernels report to
 * the host (ep_ht_status_t): ids that are none, slots over max_recv; too few rows for weights is told by a
 * small kernel after the operation. */
#include <string.h>

#include "api/gpu/gpu.h"
#include "api/gpu/gpu_device.h"

static int defaultSms(const ep_gpu_group_t *g, int expertMajor, int inWindow) {
  if (g->far) return EP_GPU_HT_SMS_DOMAINS;
  if (expertMajor && g->R > 2) return EP_GPU_HT_SMS_LINK;
  if (expertMajor) return EP_GPU_HT_SMS_EXPERT_PAIR;
  return inWindow ? EP_GPU_HT_SMS_WINDOW : EP_GPU_HT_SMS;
}

static int numSmsOf(const ep_gpu_group_t *g, int expertMajor, int inWindow) {
  int sms = g->group->config.max_num_sms ? g->ll.numSms : defaultSms(g, expertMajor, inWindow);
  return sms < g->ll.numSms ? sms : g->ll.numSms;
}

static ep_ht_handle_t handleOf(const ep_gpu_handle_t *h, int topk) {
  const ncclEpHandle_t handle = h->handle;
  const ep_group_limits_t *l = &handle->group->limits;
  return (ep_ht_handle_t){
      .memory = h->htMemory,
      .numTopk = topk,
      .expertMajor = handle->mode == TREFOIL_HT_EXPERT_MAJOR,
      .drop = l->overflowPolicy == NCCL_EP_OVERFLOW_DROP,
      .zeroCopyOn = handle->mode == TREFOIL_HT_EXPERT_MAJOR && l->zeroCopy == NCCL_EP_ZERO_COPY_ON,
      .alignment = (int64_t)handle->alignment,
      .maxRecv = l->maxRecv,
  };
}

trefoil_result_t epGpuHtHandleCreate(ep_gpu_handle_t *h) {
  uintptr_t at = ((uintptr_t)h->handle->handleMem + 255) & ~(uintptr_t)255;
  h->htHead = (char *)at;
  h->htMemory = h->htHead + EP_GPU_HT_HEAD_BYTES;
  EP_CUDA(cudaEventCreateWithFlags(&h->updated, cudaEventDisableTiming));
  return TREFOIL_OK;
}

void epGpuHtHandleDestroy(ep_gpu_handle_t *h) {
  if (h->updated) cudaEventDestroy(h->updated);
}

trefoil_result_t epGpuHtUpdate(ep_gpu_handle_t *h, const ep_update_call_t *call,
                               cudaStream_t stream) {
  ep_gpu_group_t *g = h->g;
  ep_ht_update_t op = {.group = g->ht, .handle = handleOf(h, call->topk)};
  op.topkIdx = call->topkIdx;
  op.idx64 = call->is64;
  op.numTokens = (int)call->numTokens;
  op.expertCounters = (ep_ht_counter_t){call->expertCounters.data, call->expertCounters.is64};
  op.expertOffsets = (ep_ht_counter_t){call->expertOffsets.data, call->expertOffsets.is64};
  op.total = (ep_ht_counter_t){call->total.data, call->total.is64};
  op.numSms = g->ll.numSms;
  ep_ht_memory_t memory = {
      .magic = EP_GPU_HT_MAGIC,
      .alignment = h->handle->alignment,
      .maxTokens = g->group->limits.maxTokens,
      .topk = call->topk,
      .mode = (int)h->handle->mode,
      .numRanks = g->R,
      .numExperts = g->ht.numExperts,
      .numTokens = (int)call->numTokens,
  };
  _Static_assert(sizeof memory == sizeof op.identity, "EP_HT_IDENTITY_WORDS");
  op.identityAt = (uint64_t *)h->htHead;
  memcpy(op.identity, &memory, sizeof memory);
  EP_TRY(epGpuLaunch(h, (ep_gpu_op_t){EP_HT_KIND_UPDATE, {.htUpdate = &op}}, EP_GPU_WHOLE, stream));
  if (g->group->limits.maxRecv) return TREFOIL_OK; /* only eager sizing waits for the event */
  unsigned long long capture;
  EP_TRY(epGpuCapture(stream, &capture));
  if (capture) return TREFOIL_OK;
  EP_CUDA(cudaEventRecord(h->updated, stream));
  h->hasUpdated = 1;
  return TREFOIL_OK;
}

/* Fewer rows of weights than may arrive: then the device looks whether they suffice, and if not the rank is
 * treated as one over max_recv for this operation. */
static int64_t guardOf(const ep_gpu_handle_t *h, int hasRows, int64_t rows) {
  int64_t most = h->handle->group->limits.maxRecv;
  if (!hasRows || (most && rows >= most)) return -1;
  return rows;
}

/* Peers' addresses are asked for at every call, which is cheap, so that a window that was deregistered
 * and one that has taken its place are never mixed up. Windows of a communicator lie at the same distance
 * from one another on every rank: that from the group's own tells whether two ranks mean the same. */
static void findOutputs(const ep_gpu_group_t *g, const ep_dispatch_call_t *call,
                        ep_ht_window_t *w) {
  if (!call->out.tokensWindow || g->group->limits.zeroCopy == NCCL_EP_ZERO_COPY_OFF) return;
  const char *own = g->ht.peers[g->me];
  if (!epGpuReaches(call->out.tokensWindow, g->R, w->tokens)) return;
  w->id = (uint64_t)((uintptr_t)w->tokens[g->me] - (uintptr_t)own);
  if (call->scaleBytes) {
    if (!call->out.scalesWindow || !epGpuReaches(call->out.scalesWindow, g->R, w->scales)) return;
    /* A factor that spreads multiples over 64 bits: other two windows must not add up to the same. */
    const uint64_t spread = 0x9E3779B97F4A7C15u;
    w->id += spread * (uint64_t)((uintptr_t)w->scales[g->me] - (uintptr_t)own);
  }
  w->tokensOffset = call->out.tokensOffset;
  w->scalesOffset = call->out.scalesOffset;
  w->is = ((w->tokensOffset | w->scalesOffset) & 15) == 0;
}

/* Rows that peers may read where they lie, so far without the offset in their window. */
static int isReadable(const ep_gpu_group_t *g, ncclWindow_t window, int64_t *distance) {
  return g->group->limits.zeroCopy != NCCL_EP_ZERO_COPY_OFF &&
         epGpuIsAtOneDistance(g, window, distance);
}

/* With more ranks and SMs the link is the limit, and it takes stores faster than loads. */
static int pulls(const ep_gpu_group_t *g, const ep_ht_dispatch_t *op) {
  int sms = g->ll.numSms, pair = g->R <= EP_GPU_HT_PULLING_RANKS;
  int few = sms <= EP_GPU_HT_PULLING_SMS;
  if (op->handle.expertMajor) return few || pair;
  if (op->window.is) return 0;
  return pair ? few || !g->group->config.max_num_sms : sms <= EP_GPU_HT_PULLING_SMS_FLAT;
}

static void findDispatchInput(const ep_gpu_group_t *g, const ep_dispatch_call_t *call,
                              ep_ht_input_t *in) {
  if (!isReadable(g, call->tokensWindow, &in->tokens)) return;
  if (call->scaleBytes && !isReadable(g, call->scalesWindow, &in->scales)) return;
  in->tokens += (int64_t)call->tokensOffset;
  in->scales += (int64_t)call->scalesOffset;
  in->is = ((in->tokens | in->scales) & 15) == 0;
}

/* Rows outside windows are copied where that is faster than FIFOs, or than pushes into outputs in windows. */
static int stages(const ep_gpu_group_t *g, const ep_ht_dispatch_t *op) {
  int sms = g->ll.numSms, pair = g->R <= EP_GPU_HT_PULLING_RANKS;
  if (!g->ht.at.input) return 0;
  if (!op->handle.expertMajor) return sms <= EP_GPU_HT_STAGING_SMS_FLAT;
  return !op->window.is || (!pair && sms <= EP_GPU_HT_STAGING_SMS_PUSHED);
}

/* Where they are copied to. */
static void stageDispatchInput(const ep_gpu_group_t *g, const ep_dispatch_call_t *call,
                               ep_ht_input_t *in) {
  in->is = 1;
  in->tokens = (int64_t)g->ht.at.input;
  in->scales = in->tokens + call->numTokens * (int64_t)call->tokenBytes;
}

/* Rows, with their scales. */
static void offerDispatchInput(const ep_gpu_group_t *g, const ep_dispatch_call_t *call,
                               ep_ht_dispatch_t *op) {
  if (!pulls(g, op)) return;
  findDispatchInput(g, call, &op->input);
  if (!op->input.is && stages(g, op)) stageDispatchInput(g, call, &op->input);
}

trefoil_result_t epGpuHtDispatch(ep_gpu_handle_t *h, const ep_dispatch_call_t *call,
                                 cudaStream_t stream) {
  ep_gpu_group_t *g = h->g;
  ep_ht_dispatch_t op = {.group = g->ht, .handle = handleOf(h, h->handle->routed.topk)};
  op.tokens = call->tokens;
  op.scales = call->scales;
  op.weights = call->weights;
  /* a rank without tokens still receives weights: not NULL, which would say that there are none */
  if (call->hasWeights && !op.weights) op.weights = (const float *)g->ht.control;
  op.outTokens = call->out.tokens;
  op.outScales = call->out.scales;
  findOutputs(g, call, &op.window);
  offerDispatchInput(g, call, &op);
  op.outWeights = call->hasWeights ? call->out.weights : NULL;
  op.outIdx = call->out.idx;
  op.topkRows = call->out.topkRows;
  op.tokenBytes = (int)call->tokenBytes;
  op.scaleBytes = (int)call->scaleBytes;
  op.globalIds = call->globalIds;
  op.numSms = numSmsOf(g, op.handle.expertMajor, op.window.is || op.input.is);
  int64_t guard = guardOf(h, op.outWeights != NULL, op.topkRows);
  if (guard >= 0) EP_TRY(epGpuHtGuard(h->htMemory, guard, stream));
  EP_TRY(epGpuLaunch(h, (ep_gpu_op_t){EP_HT_KIND_DISPATCH, {.htDispatch = &op}}, EP_GPU_WHOLE,
                     stream));
  if (guard < 0) return TREFOIL_OK;
  return epGpuHtAfter(h->htMemory, guard, g->statusOnDevice, stream);
}

/* Flat rows. */
static void findCombineInput(const ep_gpu_group_t *g, const ep_combine_call_t *call,
                             ep_ht_combine_t *op) {
  ep_ht_input_t *in = &op->input;
  if (op->handle.expertMajor || !isReadable(g, call->tokensWindow, &in->tokens)) return;
  in->tokens += (int64_t)call->tokensOffset;
  in->is = (in->tokens & 15) == 0;
}

trefoil_result_t epGpuHtCombine(ep_gpu_handle_t *h, const ep_combine_call_t *call,
                                cudaStream_t stream) {
  ep_gpu_group_t *g = h->g;
  ep_ht_combine_t op = {.group = g->ht, .handle = handleOf(h, h->handle->routed.topk)};
  op.tokens = call->tokens;
  op.rowWeights = call->slotWeights;
  op.out = call->out;
  op.outWeights = call->outWeights;
  op.dtype = call->dtype;
  op.rowBytes = (int)((size_t)call->width * trefoilDtypeBytes(call->dtype));
  findCombineInput(g, call, &op);
  op.numSms = numSmsOf(g, op.handle.expertMajor, op.input.is);
  /* as with dispatch: a rank without slots takes part in the backward pass */
  if (call->backward && !op.rowWeights) op.rowWeights = (const float *)g->ht.control;
  int64_t guard = guardOf(h, call->backward, call->slotWeightRows);
  if (guard >= 0) EP_TRY(epGpuHtGuard(h->htMemory, guard, stream));
  EP_TRY(
      epGpuLaunch(h, (ep_gpu_op_t){EP_HT_KIND_COMBINE, {.htCombine = &op}}, EP_GPU_WHOLE, stream));
  if (guard < 0) return TREFOIL_OK;
  return epGpuHtAfter(h->htMemory, guard, g->statusOnDevice, stream);
}
