/* Exchange memory: one window a group, made anew when a handle needs a larger top-k.
 *
 * Two rounds frame it: before NCCL's collective registration, because that waits for ever for a rank
 * that failed; and after the memory is zeroed, because a peer may store as soon as it returns. Launches
 * that were captured have the old addresses in them; so in a group that captured something an old
 * window stays as long as the group. Operation numbers are the group's, so its flags stay valid.
 * Operation numbers go on; that all have received what was sent so far is noted in control memory, as
 * the words that say it lie in the old window. Later only operations of which two were in flight would read
 * such words: once there are two windows they are refused, and so is a second window if a graph holds
 * them. */
#include "api/gpu/rendezvous.h"
#include "api/gpu/gpu.h"
#include "api/gpu/gpu_device.h"

static size_t windowBytes(const ep_gpu_arena_t *a) {
  return a->exchange.bytes + a->messages.bytes;
}

void epGpuArenaFree(ep_gpu_group_t *g, ep_gpu_arena_t *a) {
  ncclEpGroup_t group = g->group;
  if (a->window) ncclCommWindowDeregister(group->comm, a->window);
  if (a->memory) {
    ncclMemFree(a->memory);
    group->allocated[0][EP_MEMORY_SHARED] -= windowBytes(a);
  }
  if (a->scratch) epFreeBuffer(group, &a->scratchBuffer, a->scratch);
  if (a->mirrors) epFreeBuffer(group, &a->mirrorBuffer, a->mirrors);
  *a = (ep_gpu_arena_t){0};
}

static trefoil_result_t allocAlone(ep_gpu_group_t *g, ep_gpu_arena_t *a) {
  void *p = NULL;
  if (a->scratchBuffer.bytes) {
    EP_TRY(epAllocBuffer(g->group, &a->scratchBuffer, &a->scratch));
    EP_CUDA(cudaMemset(a->scratch, 0, a->scratchBuffer.bytes));
  }
  if (a->mirrorBuffer.bytes) {
    EP_TRY(epAllocBuffer(g->group, &a->mirrorBuffer, &a->mirrors));
    EP_CUDA(cudaMemset(a->mirrors, 0, a->mirrorBuffer.bytes));
  }
  size_t bytes = windowBytes(a);
  EP_TRY(epGpuNccl(NULL, ncclMemAlloc(&p, bytes), "ncclEpInitHandle: ncclMemAlloc"));
  a->memory = p;
  g->group->allocated[0][EP_MEMORY_SHARED] += bytes;
  EP_CUDA(cudaMemset(p, 0, bytes));
  EP_CUDA(cudaDeviceSynchronize());
  return TREFOIL_OK;
}

static trefoil_result_t compare(const ep_rendezvous_word_t *all, int numRanks) {
  for (int r = 1; r < numRanks; r++) {
    EP_CHECK(all[0].topk == all[r].topk, TREFOIL_INVALID_ARGUMENT,
             "ncclEpInitHandle: num_topk differs: buffers for %u on rank 0, %u on rank %d; must be "
             "equal",
             all[0].topk, all[r].topk, r);
    EP_CHECK(all[0].groupId == all[r].groupId, TREFOIL_INVALID_USAGE,
             "ncclEpInitHandle: rank 0 and rank %d name different groups; all ranks make "
             "collective calls in the same order",
             r);
  }
  return TREFOIL_OK;
}

static trefoil_result_t barrierRound(ep_gpu_group_t *g, ep_rendezvous_call_t call, int topk) {
  ep_rendezvous_word_t all[EP_KERNEL_MAX_RANKS], mine = {.call = call, .topk = (uint32_t)topk};
  mine.groupId = g->id;
  EP_TRY(epRendezvousWait(g->rendezvous, &mine, g->group->timeoutNs, all));
  return compare(all, g->R);
}

static trefoil_result_t openTogether(ep_gpu_group_t *g, ep_gpu_arena_t *a) {
  ncclComm_t comm = g->group->comm;
  size_t bytes = windowBytes(a);
  EP_TRY(epGpuNccl(comm, ncclCommWindowRegister(comm, a->memory, bytes, &a->window, 0),
                   "ncclEpInitHandle: ncclCommWindowRegister"));
  EP_CHECK(a->window, TREFOIL_INVALID_USAGE,
           "ncclEpInitHandle: NCCL gave no window: its memory is not peer-accessible "
           "(NCCL_CUMEM_ENABLE, NCCL_WIN_ENABLE)");
  /* NCCL has no limit: a rank without a window must not leave the others in its next call. */
  if (g->far && !g->numArenas)
    EP_TRY(barrierRound(g, EP_RENDEZVOUS_WINDOW_READY, a->config.shape.topk));
  EP_TRY(epGpuFarJoin(g));
  return epGpuPeers(g->group, a, g->ll.peers);
}

static int needsNew(const ep_gpu_group_t *g, const ep_sizing_t *sizing) {
  if (!g->numArenas) return 1;
  const ep_gpu_arena_t *a = &g->arenas[g->numArenas - 1];
  return sizing->config.shape.topk > a->config.shape.topk ||
         sizing->buffers[EP_BUFFER_SCRATCH].bytes > a->scratchBuffer.bytes;
}

/* The last window may go if no captured launch knows it. */
static void dropOld(ep_gpu_group_t *g) {
  if (!g->numArenas || g->captured) return;
  epGpuArenaFree(g, &g->arenas[--g->numArenas]);
}

/* It was checked when the bytes were worked out. */
static void setLayout(ep_gpu_group_t *g, const ep_sizing_config_t *config) {
  ep_ll_config_t ll = epGpuConfig(config);
  ep_ht_config_t ht = epGpuHtConfig(config);
  if (g->isHt) {
    epHtLayout(&ht, &g->ht.at);
  } else {
    epLlLayout(&ll, &g->ll.at);
  }
}

/* Until the process ends. */
static void keepWindow(ep_gpu_arena_t *a) {
  a->window = NULL;
  a->memory = NULL;
}

static trefoil_result_t waitForDevice(void) {
  cudaError_t error = cudaDeviceSynchronize();
  EP_CHECK(error != cudaErrorStreamCaptureUnsupported, TREFOIL_INVALID_USAGE,
           "ncclEpInitHandle: the buffers must grow, which a capture does not allow; make a handle "
           "with the largest num_topk before it begins");
  EP_CHECK(error == cudaSuccess, TREFOIL_SYSTEM_ERROR, "ncclEpInitHandle: %s",
           cudaGetErrorString(error));
  return TREFOIL_OK;
}

trefoil_result_t epGpuArenaEnsure(ep_gpu_group_t *g, const ep_sizing_t *sizing) {
  if (!needsNew(g, sizing)) return TREFOIL_OK;
  EP_CHECK(!epGpuFarIsGivenUp(g), TREFOIL_INVALID_USAGE,
           "ncclEpInitHandle: an earlier call failed and NCCL's part of it is still under way; "
           "abort the communicator");
  EP_CHECK(g->group->numPending == 0, TREFOIL_INVALID_USAGE,
           "ncclEpInitHandle: a send_only operation is pending and the buffers must grow; call "
           "ncclEpComplete first");
  EP_CHECK(g->numArenas < EP_GPU_MAX_ARENAS, TREFOIL_INVALID_USAGE,
           "ncclEpInitHandle: captured operations use %d buffers of smaller top-k; make the handle "
           "with the largest num_topk first",
           g->numArenas);
  EP_CHECK(!g->isHt || !g->numArenas || !g->captured, TREFOIL_INVALID_USAGE,
           "ncclEpInitHandle: the buffers must grow, but captured operations use them; make the "
           "handle with the largest num_topk first, or give num_topk to the group");
  EP_CHECK(!g->capturedTwo, TREFOIL_INVALID_USAGE,
           "ncclEpInitHandle: the buffers must grow, but graphs with two send_only operations in "
           "flight use them; make the handle with the largest num_topk first");
  ep_gpu_arena_t a = {.config = sizing->config,
                      .exchange = sizing->buffers[EP_BUFFER_EXCHANGE],
                      .scratchBuffer = sizing->buffers[EP_BUFFER_SCRATCH],
                      .messages = sizing->buffers[EP_BUFFER_MESSAGES],
                      .mirrorBuffer = sizing->buffers[EP_BUFFER_MIRRORS]};
  EP_TRY(waitForDevice());
  EP_TRY(epGpuFarDrain(g, g->group->timeoutNs, "ncclEpInitHandle"));
  trefoil_result_t result = allocAlone(g, &a);
  if (result == TREFOIL_OK) {
    result = barrierRound(g, EP_RENDEZVOUS_INIT_HANDLE, sizing->config.shape.topk);
  }
  char *before[EP_KERNEL_MAX_RANKS];
  for (int r = 0; r < g->R; r++) before[r] = g->ll.peers[r];
  if (result == TREFOIL_OK) result = openTogether(g, &a);
  if (result == TREFOIL_OK) {
    result = barrierRound(g, EP_RENDEZVOUS_HANDLE_READY, sizing->config.shape.topk);
  }
  /* This rank's own memory alone, and only once the new window is certain. */
  if (result == TREFOIL_OK && g->numArenas) result = epGpuSettle(g->control, g->isHt);
  if (result == TREFOIL_OK && g->numArenas) result = epGpuFarSettle(g);
  if (result != TREFOIL_OK) {
    for (int r = 0; r < g->R; r++) g->ll.peers[r] = before[r];
    if (!g->numArenas) epGpuFarLeave(g);
    if (epGpuFarIsGivenUp(g)) keepWindow(&a);
    epGpuArenaFree(g, &a);
    return result;
  }
  dropOld(g);
  g->arenas[g->numArenas++] = a;
  setLayout(g, &a.config);
  epGpuFarUse(g, &a);
  g->ht.scratch = a.scratch;
  for (int r = 0; r < g->R; r++) g->ht.peers[r] = g->ll.peers[r];
  g->version++;
  return TREFOIL_OK;
}
