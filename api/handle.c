/* Handles: Init, Update, Create, Complete, Destroy. */
#include <stdlib.h>
#include <string.h>

#include "api/object.h"
#include "api/range.h"

static trefoil_result_t limitsOf(const char *function, ncclEpGroup_t g, ncclEpLayout_t layout,
                                 const ncclEpHandleConfig_t *config, int topk,
                                 ep_handle_limits_t *out) {
  ncclEpHandleConfig_t copy = NCCL_EP_HANDLE_CONFIG_INIT;
  if (config) {
    EP_TRY(epCopyStruct(&copy, config,
                        EP_STRUCT(ncclEpHandleConfig_t, NCCL_EP_HANDLE_CONFIG_V1_SIZE)));
  }
  *out = (ep_handle_limits_t){(unsigned)layout, copy.dispatch_output_per_expert_alignment, topk};
  ep_verdict_t verdict;
  if (epCheckHandleLimits(&g->limits, out, g->numRanks, &verdict)) return TREFOIL_OK;
  return epFail(verdict.code, "%s: %s", function, verdict.reason);
}

static trefoil_result_t sizingOf(ncclEpGroup_t g, const ep_handle_limits_t *limits,
                                 ep_sizing_t *out) {
  ep_sizing_config_t config = epSizingConfig(&g->limits, limits, g->numRanks, g->ranksPerNode);
  return epBackend.sizing(&config, out);
}

static trefoil_result_t handleMemSize(ncclEpGroup_t g, ncclEpLayout_t layout,
                                      const ncclEpHandleConfig_t *config, size_t *out, int topk) {
  EP_TRY(epCheckGroup(g, "ncclEpHandleMemSize"));
  EP_CHECK(out, TREFOIL_INVALID_ARGUMENT, "ncclEpHandleMemSize: size_out is NULL");
  ep_handle_limits_t limits;
  EP_TRY(limitsOf("ncclEpHandleMemSize", g, layout, config, topk, &limits));
  ep_sizing_t sizing;
  EP_TRY(sizingOf(g, &limits, &sizing));
  *out = sizing.buffers[EP_BUFFER_HANDLE_MEM].bytes;
  return TREFOIL_OK;
}

ncclResult_t ncclEpHandleMemSize(ncclEpGroup_t group, ncclEpLayout_t layout,
                                 const ncclEpHandleConfig_t *config, size_t *size_out,
                                 int num_topk) {
  return (ncclResult_t)handleMemSize(group, layout, config, size_out, num_topk);
}

/* Memory that live handles of the group use: HT handles may have all of it in common, to see each other's
 * routing. Anything else would be overwritten by the neighbour. */
static trefoil_result_t checkShared(const struct ncclEpHandle *h) {
  uintptr_t first = (uintptr_t)h->handleMem;
  uintptr_t end = first + h->sizing.buffers[EP_BUFFER_HANDLE_MEM].bytes;
  for (const struct ncclEpHandle *o = h->group->handles; o; o = o->next) {
    uintptr_t from = (uintptr_t)o->handleMem;
    uintptr_t to = from + o->sizing.buffers[EP_BUFFER_HANDLE_MEM].bytes;
    EP_CHECK(end <= from || to <= first || (epIsHt(h->group) && first == from && !o->ownsMem),
             TREFOIL_INVALID_ARGUMENT,
             "handle_mem: data is %p, %zu bytes from the start of the memory "
             "of live handle %p; %s",
             h->handleMem, (size_t)(first > from ? first - from : from - first), (const void *)o,
             epIsHt(h->group) ? "handles share all of it or nothing"
                              : "low-latency handles need memory of their own");
  }
  return TREFOIL_OK;
}

/* A handle as the caller described it; nothing is allocated yet. */
static trefoil_result_t describe(ncclEpGroup_t g, ncclEpLayout_t layout,
                                 const ncclEpHandleConfig_t *config, int topk,
                                 const ncclEpTensor_t *mem, struct ncclEpHandle *h) {
  ep_handle_limits_t limits;
  EP_TRY(limitsOf("ncclEpInitHandle", g, layout, config, topk, &limits));
  memset(h, 0, sizeof *h);
  h->group = g;
  h->mode = epModeOf(g->limits.algorithm, limits.layout);
  h->alignment = h->mode == TREFOIL_HT_EXPERT_MAJOR ? limits.alignment : 0;
  h->topk = topk;
  h->topkBound = epTopkBound(&g->limits, topk);
  EP_TRY(sizingOf(g, &limits, &h->sizing));
  if (!mem) return TREFOIL_OK;
  ep_tensor_rule_t rule = {.name = "handle_mem",
                           .ndim = 1,
                           .sizes = {h->sizing.buffers[EP_BUFFER_HANDLE_MEM].bytes},
                           .atLeast = 1,
                           .written = 1,
                           .alignment = 16,
                           .dtypes = EP_DTYPE(ncclUint8)};
  ep_view_t view;
  ep_ranges_t ranges;
  epRangesBegin(&ranges, g, "ncclEpInitHandle");
  EP_TRY(epViewTensor(&ranges, mem, &rule, &view));
  h->handleMem = view.data;
  return checkShared(h);
}

static trefoil_result_t build(ncclEpGroup_t g, const struct ncclEpHandle *like,
                              struct ncclEpHandle **out) {
  struct ncclEpHandle *h;
  const ep_buffer_t *buffers = like->sizing.buffers;
  void *object;
  EP_TRY(epAllocBuffer(g, &buffers[EP_BUFFER_HANDLE_OBJECT], &object));
  h = object;
  *h = *like;
  trefoil_result_t result = TREFOIL_OK;
  if (!h->handleMem) {
    result = epAllocBuffer(g, &buffers[EP_BUFFER_HANDLE_MEM], &h->handleMem);
    h->ownsMem = result == TREFOIL_OK;
  }
  if (result == TREFOIL_OK) result = epBackend.handleCreate(h);
  if (result == TREFOIL_OK) {
    result = epRegister(h, EP_OBJECT_HANDLE);
    if (result != TREFOIL_OK) epBackend.handleDestroy(h);
  }
  if (result != TREFOIL_OK) {
    if (h->ownsMem) epFreeBuffer(g, &like->sizing.buffers[EP_BUFFER_HANDLE_MEM], h->handleMem);
    epFreeBuffer(g, &like->sizing.buffers[EP_BUFFER_HANDLE_OBJECT], h);
    return result;
  }
  g->numHandles++;
  h->next = g->handles;
  g->handles = h;
  *out = h;
  return TREFOIL_OK;
}

static void logHandle(const struct ncclEpHandle *h) {
  epLog(h->group,
        "handle %p: %s, top-%d, alignment %zu; shared %zu, device %zu + %zu, host %zu + %zu bytes",
        (const void *)h, trefoilModeName(h->mode), h->topkBound, h->alignment,
        h->sizing.totals[0][EP_MEMORY_SHARED], h->sizing.totals[0][EP_MEMORY_DEVICE],
        h->sizing.totals[1][EP_MEMORY_DEVICE], h->sizing.totals[0][EP_MEMORY_HOST],
        h->sizing.totals[1][EP_MEMORY_HOST]);
}

/* `result` of a call that may be collective, between the two calls of the backend around it. */
static ncclResult_t endCall(ncclEpGroup_t g, trefoil_result_t result) {
  if (result != TREFOIL_OK) epBackend.callFail(g->comm, result, trefoilLastError());
  return (ncclResult_t)result;
}

static trefoil_result_t initHandle(ncclEpHandle_t *out, ncclEpGroup_t g, ncclEpLayout_t layout,
                                   const ncclEpHandleConfig_t *config, int topk,
                                   const ncclEpTensor_t *mem) {
  EP_CHECK(out, TREFOIL_INVALID_ARGUMENT, "ncclEpInitHandle: handle is NULL");
  struct ncclEpHandle like, *h = NULL;
  EP_TRY(describe(g, layout, config, topk, mem, &like));
  EP_TRY(epCheckDeferred(g));
  EP_TRY(build(g, &like, &h));
  for (struct ncclEpHandle *other = h->next; other && epIsHt(g); other = other->next) {
    if (other->handleMem != h->handleMem || !other->routed.topk) continue;
    h->routed = other->routed;
    break;
  }
  logHandle(h);
  *out = h;
  return TREFOIL_OK;
}

ncclResult_t ncclEpInitHandle(ncclEpHandle_t *handle, ncclEpGroup_t group, ncclEpLayout_t layout,
                              const ncclEpHandleConfig_t *config, int num_topk,
                              const ncclEpTensor_t *handle_mem) {
  EP_RANGE();
  trefoil_result_t result = epCheckGroup(group, "ncclEpInitHandle");
  if (result != TREFOIL_OK) return (ncclResult_t)result;
  epBackend.callBegin(group->comm);
  return endCall(group, initHandle(handle, group, layout, config, num_topk, handle_mem));
}

static trefoil_result_t viewRouting(ep_ranges_t *ranges, const struct ncclEpHandle *h,
                                    const ncclEpTensor_t *topkIdx, ep_update_call_t *call) {
  ncclEpGroup_t g = h->group;
  ep_tensor_rule_t rule = {.name = "topk_idx",
                           .ndim = 2,
                           .sizes = {EP_ANY, h->topk > 0 ? (size_t)h->topk : EP_ANY},
                           .dtypes = EP_DTYPE(ncclInt32) | EP_DTYPE(ncclInt64)};
  ep_view_t v;
  EP_TRY(epViewTensor(ranges, topkIdx, &rule, &v));
  EP_CHECK(v.sizes[0] <= g->limits.maxTokens, TREFOIL_INVALID_ARGUMENT,
           "topk_idx: sizes[0] is %zu; must be at most max_dispatch_tokens_per_rank (%u)",
           v.sizes[0], g->limits.maxTokens);
  EP_CHECK(v.sizes[1] >= 1, TREFOIL_INVALID_ARGUMENT,
           "topk_idx: sizes[1] is 0; must be at least 1");
  EP_CHECK(v.sizes[1] <= (size_t)h->topkBound, TREFOIL_INVALID_USAGE,
           "topk_idx: sizes[1] is %zu; the handle was made for top-k up to %d (%s)", v.sizes[1],
           h->topkBound, "give num_topk to ncclEpInitHandle or in the group's config");
  call->topkIdx = v.data;
  call->is64 = v.dtype == ncclInt64;
  call->numTokens = (int64_t)v.sizes[0];
  call->topk = (int)v.sizes[1];
  return TREFOIL_OK;
}

static trefoil_result_t viewCounters(ep_ranges_t *ranges, const struct ncclEpHandle *h,
                                     const ncclEpLayoutInfo_t *info, ep_update_call_t *call) {
  ncclEpGroup_t g = h->group;
  if (!info) return TREFOIL_OK;
  EP_CHECK(epIsHt(g), TREFOIL_INVALID_ARGUMENT,
           "layout_info must be NULL: low latency gives counters at ncclEpDispatch");
  ncclEpLayoutInfo_t i;
  EP_TRY(epCopyStruct(&i, info, EP_STRUCT(ncclEpLayoutInfo_t, NCCL_EP_LAYOUT_INFO_V1_SIZE)));
  size_t L = (size_t)trefoilExpertsPerRank(&h->sizing.config.shape);
  unsigned ints = EP_DTYPE(ncclInt32) | EP_DTYPE(ncclInt64);
  EP_TRY(epViewCounter(ranges, i.expert_counters, "layout_info->expert_counters", L, ints,
                       &call->expertCounters));
  EP_TRY(epViewCounter(ranges, i.recv_total_counter, "layout_info->recv_total_counter", 1, ints,
                       &call->total));
  if (h->mode != TREFOIL_HT_EXPERT_MAJOR) return TREFOIL_OK;
  return epViewCounter(ranges, i.expert_offsets, "layout_info->expert_offsets", L, ints,
                       &call->expertOffsets);
}

trefoil_result_t epCheckRouted(ncclEpHandle_t h, const char *function, cudaStream_t stream) {
  ep_routed_t *m = &h->routed;
  if (!m->topk && epIsHt(h->group) && !h->ownsMem) {
    EP_TRY(epBackend.readRouted(h, stream, m));
  }
  EP_CHECK(m->topk, TREFOIL_INVALID_USAGE,
           "%s: the handle has no routing; call ncclEpUpdateHandle first", function);
  EP_CHECK(
      m->mode == h->mode && m->alignment == h->alignment, TREFOIL_INVALID_USAGE,
      "%s: handle_mem holds the routing of a %s handle with alignment %zu; this one is %s with "
      "alignment %zu; must be equal",
      function, trefoilModeName(m->mode), m->alignment, trefoilModeName(h->mode), h->alignment);
  EP_CHECK(h->topk > 0 ? m->topk == h->topk : m->topk <= h->topkBound, TREFOIL_INVALID_USAGE,
           "%s: handle_mem holds a routing of top-%d; the handle was made for %s%d", function,
           m->topk, h->topk > 0 ? "top-" : "top-k up to ", h->topk > 0 ? h->topk : h->topkBound);
  return TREFOIL_OK;
}

static trefoil_result_t updateChecked(ncclEpHandle_t h, const ncclEpTensor_t *topkIdx,
                                      const ncclEpLayoutInfo_t *info, cudaStream_t stream) {
  ep_update_call_t call;
  memset(&call, 0, sizeof call);
  ep_ranges_t ranges;
  epRangesBegin(&ranges, h->group, "ncclEpUpdateHandle");
  EP_TRY(viewRouting(&ranges, h, topkIdx, &call));
  EP_TRY(viewCounters(&ranges, h, info, &call));
  if (h->group->checkTensors) EP_TRY(epRangeCheckMemory(&ranges, h));
  EP_CHECK(h->pending == EP_PENDING_NONE, TREFOIL_INVALID_USAGE,
           "ncclEpUpdateHandle: the handle's send_only operation is pending; call ncclEpComplete "
           "first");
  EP_TRY(epCheckDeferred(h->group));
  EP_TRY(epBackend.update(h, &call, stream));
  h->routing = call.topkIdx;
  h->routingBytes = (size_t)call.numTokens * (size_t)call.topk * (call.is64 ? 8 : 4);
  h->isDispatched = 0;
  /* handles on the same memory see this routing too */
  for (struct ncclEpHandle *other = h->group->handles; other; other = other->next) {
    if (other->handleMem != h->handleMem || (other != h && !epIsHt(h->group))) continue;
    other->routed = (ep_routed_t){call.topk, h->mode, h->alignment, call.numTokens};
  }
  return TREFOIL_OK;
}

ncclResult_t ncclEpUpdateHandle(ncclEpHandle_t handle, const ncclEpTensor_t *topk_idx,
                                const ncclEpLayoutInfo_t *layout_info, cudaStream_t stream) {
  EP_RANGE();
  trefoil_result_t result = epCheckHandle(handle, "ncclEpUpdateHandle");
  if (result == TREFOIL_OK) result = updateChecked(handle, topk_idx, layout_info, stream);
  return (ncclResult_t)result;
}

static trefoil_result_t destroyHandle(ncclEpHandle_t h) {
  EP_TRY(epCheckHandle(h, "ncclEpHandleDestroy"));
  int lost = atomic_load(&h->group->deferred) == EP_DEFERRED_FATAL;
  EP_CHECK(h->pending == EP_PENDING_NONE || lost, TREFOIL_INVALID_USAGE,
           "ncclEpHandleDestroy: the handle's send_only operation is pending; call ncclEpComplete "
           "first");
  EP_TRY(epBackend.handleDestroy(h));
  ncclEpGroup_t g = h->group;
  epUnregister(h, EP_OBJECT_HANDLE);
  if (h->pending != EP_PENDING_NONE) g->numPending--;
  g->numHandles--;
  struct ncclEpHandle **link = &g->handles;
  while (*link != h) link = &(*link)->next;
  *link = h->next;
  if (h->ownsMem) epFreeBuffer(g, &h->sizing.buffers[EP_BUFFER_HANDLE_MEM], h->handleMem);
  ep_buffer_t object = h->sizing.buffers[EP_BUFFER_HANDLE_OBJECT];
  epFreeBuffer(g, &object, h);
  return TREFOIL_OK;
}

ncclResult_t ncclEpHandleDestroy(ncclEpHandle_t handle) {
  EP_RANGE();
  return handle ? (ncclResult_t)destroyHandle(handle) : ncclSuccess;
}

/* Everything of Update is checked before Init, so that a failing call makes nothing. */
static trefoil_result_t createHandle(ncclEpHandle_t *out, ncclEpGroup_t g, ncclEpLayout_t layout,
                                     const ncclEpTensor_t *topkIdx, const ncclEpLayoutInfo_t *info,
                                     const ncclEpHandleConfig_t *config, cudaStream_t stream) {
  EP_CHECK(out, TREFOIL_INVALID_ARGUMENT, "ncclEpCreateHandle: handle is NULL");
  ep_tensor_rule_t rule = {.name = "topk_idx",
                           .ndim = 2,
                           .sizes = {EP_ANY, EP_ANY},
                           .dtypes = EP_DTYPE(ncclInt32) | EP_DTYPE(ncclInt64)};
  ep_view_t v;
  ep_ranges_t ranges;
  epRangesBegin(&ranges, g, "ncclEpCreateHandle");
  EP_TRY(epViewTensor(&ranges, topkIdx, &rule, &v));
  EP_CHECK(v.sizes[1] >= 1 && v.sizes[1] <= EP_MAX_TOPK, TREFOIL_INVALID_ARGUMENT,
           "topk_idx: sizes[1] is %zu; must be 1 to %d", v.sizes[1], EP_MAX_TOPK);
  struct ncclEpHandle like;
  ep_update_call_t call;
  memset(&call, 0, sizeof call);
  EP_TRY(describe(g, layout, config, (int)v.sizes[1], NULL, &like));
  epRangesBegin(&ranges, g, "ncclEpCreateHandle");
  EP_TRY(viewRouting(&ranges, &like, topkIdx, &call));
  EP_TRY(viewCounters(&ranges, &like, info, &call));
  ncclEpHandle_t h;
  EP_TRY(initHandle(&h, g, layout, config, (int)v.sizes[1], NULL));
  trefoil_result_t result = updateChecked(h, topkIdx, info, stream);
  if (result != TREFOIL_OK) {
    char sentence[400];
    strncpy(sentence, trefoilLastError(), sizeof sentence - 1);
    sentence[sizeof sentence - 1] = 0;
    destroyHandle(h);
    return epFail(result, "%s", sentence);
  }
  *out = h;
  return TREFOIL_OK;
}

ncclResult_t ncclEpCreateHandle(ncclEpHandle_t *handle, ncclEpGroup_t group, ncclEpLayout_t layout,
                                const ncclEpTensor_t *topk_idx,
                                const ncclEpLayoutInfo_t *layout_info,
                                const ncclEpHandleConfig_t *config, cudaStream_t stream) {
  EP_RANGE();
  trefoil_result_t result = epCheckGroup(group, "ncclEpCreateHandle");
  if (result != TREFOIL_OK) return (ncclResult_t)result;
  epBackend.callBegin(group->comm);
  result = createHandle(handle, group, layout, topk_idx, layout_info, config, stream);
  return endCall(group, result);
}

static trefoil_result_t complete(ncclEpHandle_t h, const ncclEpCompleteConfig_t *config,
                                 cudaStream_t stream) {
  EP_TRY(epCheckHandle(h, "ncclEpComplete"));
  if (config) {
    ncclEpCompleteConfig_t copy;
    EP_TRY(epCopyStruct(&copy, config,
                        EP_STRUCT(ncclEpCompleteConfig_t, NCCL_EP_COMPLETE_CONFIG_V1_SIZE)));
  }
  if (h->pending == EP_PENDING_NONE) return TREFOIL_OK;
  EP_TRY(epCheckDeferred(h->group));
  EP_TRY(epBackend.complete(h, stream));
  h->pending = EP_PENDING_NONE;
  h->group->numPending--;
  return TREFOIL_OK;
}

ncclResult_t ncclEpComplete(ncclEpHandle_t handle, const ncclEpCompleteConfig_t *config,
                            cudaStream_t stream) {
  EP_RANGE();
  return (ncclResult_t)complete(handle, config, stream);
}
