/* ncclEpPreflight: the pure rules and the sizing table behind the C API. */
#include "api/preflight_call.h"

#include <string.h>

void epLimitsOf(const ncclEpGroupConfig_t *c, ep_group_limits_t *out) {
  *out = (ep_group_limits_t){
      .backend = (ep_backend_kind_t)epBackend.kind,
      .sizing = epBackend.sizing,
      .algorithm = (unsigned)c->algorithm,
      .numExperts = c->num_experts,
      .maxTokens = c->max_dispatch_tokens_per_rank,
      .maxRecv = c->max_recv_tokens_per_rank,
      .maxTokenBytes = c->max_token_bytes,
      .halfAllocator = !c->alloc.alloc_fn != !c->alloc.free_fn,
      .enableMask = c->enable_mask != 0,
      .zeroCopy = (unsigned)c->zero_copy,
      .overflowPolicy = (unsigned)c->overflow_policy,
      .numTopk = c->num_topk,
      .maxSms = c->max_num_sms,
  };
}

static size_t roundingOf(const ep_sizing_t *s) {
  /* ncclMemAlloc rounds to 2 MiB granules; a group asks for one block, on the CPU for two */
  const ep_buffer_t *b = &s->buffers[EP_BUFFER_CONTROL];
  size_t control = b->memory == EP_MEMORY_SHARED ? b->bytes : 0;
  size_t arena = s->totals[0][EP_MEMORY_SHARED] - control;
  size_t granule = (size_t)2 << 20;
  return (granule - control % granule) % granule + (granule - arena % granule) % granule;
}

static trefoil_result_t checkOut(const ncclEpPreflight_t *out) {
  EP_CHECK(out, TREFOIL_INVALID_ARGUMENT, "ncclEpPreflight: out is NULL");
  EP_CHECK(out->magic == NCCL_EP_MAGIC, TREFOIL_INVALID_ARGUMENT,
           "ncclEpPreflight: out->magic is 0x%X; must be 0x%X (NCCL_EP_PREFLIGHT_INIT)", out->magic,
           NCCL_EP_MAGIC);
  EP_CHECK(out->size >= sizeof *out, TREFOIL_INVALID_ARGUMENT,
           "ncclEpPreflight: out->size is %u; must be at least %zu", out->size, sizeof *out);
  return TREFOIL_OK;
}

static void fill(ncclEpPreflight_t *out, const ep_verdict_t *verdict, const ep_sizing_t *sizing) {
  ncclEpPreflight_t p = {.size = out->size, .magic = out->magic};
  p.supported = verdict->code == TREFOIL_OK;
  memcpy(p.reason, verdict->reason, sizeof p.reason);
  memcpy(p.limit, verdict->limit, sizeof p.limit);
  p.nearest = verdict->nearest;
  if (p.supported) {
    p.group_device_bytes = sizing->totals[0][EP_MEMORY_DEVICE];
    p.group_shared_bytes = sizing->totals[0][EP_MEMORY_SHARED];
    p.group_host_bytes = sizing->totals[0][EP_MEMORY_HOST];
    p.handle_device_bytes = sizing->totals[1][EP_MEMORY_DEVICE];
    p.handle_shared_bytes = sizing->totals[1][EP_MEMORY_SHARED];
    p.handle_host_bytes = sizing->totals[1][EP_MEMORY_HOST];
    p.nccl_bytes = roundingOf(sizing);
  }
  *out = p;
}

ncclResult_t ncclEpPreflight(const ncclEpGroupConfig_t *config, ncclEpLayout_t layout,
                             const ncclEpHandleConfig_t *handle_config, int num_topk, int num_ranks,
                             int ranks_per_node, ncclEpPreflight_t *out) {
  ncclEpGroupConfig_t group;
  ncclEpHandleConfig_t handle = NCCL_EP_HANDLE_CONFIG_INIT;
  trefoil_result_t result = checkOut(out);
  if (result == TREFOIL_OK) {
    result =
        epCopyStruct(&group, config, EP_STRUCT(ncclEpGroupConfig_t, NCCL_EP_GROUP_CONFIG_V1_SIZE));
  }
  if (result == TREFOIL_OK && handle_config) {
    result = epCopyStruct(&handle, handle_config,
                          EP_STRUCT(ncclEpHandleConfig_t, NCCL_EP_HANDLE_CONFIG_V1_SIZE));
  }
  if (result != TREFOIL_OK) return (ncclResult_t)result;
  ep_group_limits_t g;
  epLimitsOf(&group, &g);
  ep_handle_limits_t h = {(unsigned)layout, handle.dispatch_output_per_expert_alignment, num_topk};
  ep_verdict_t verdict;
  ep_sizing_t sizing;
  epPreflight(&g, &h, num_ranks, ranks_per_node, &verdict, &sizing);
  fill(out, &verdict, &sizing);
  return ncclSuccess;
}
