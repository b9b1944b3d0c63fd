/* A rank's life in a batch. Operations of a case are issued back to back; the host waits once, at the
 * end of the case, so a missing order between operations shows. */
#include "validate/check_rank.h"

#include "plan/error.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

static cudaError_t countedAlloc(void **ptr, size_t size, void *context) {
  ep_check_rank_t *rank = context;
  cudaError_t rc = rank->lib->cudaMalloc(ptr, size);
  if (rc == cudaSuccess) rank->allocated++;
  return rc;
}

static cudaError_t countedFree(void *ptr, void *context) {
  ep_check_rank_t *rank = context;
  if (ptr) rank->allocated--;
  return rank->lib->cudaFree(ptr);
}

static trefoil_result_t openGroup(ep_check_rank_t *rank) {
  const ep_check_group_t *g = rank->group;
  if (g->isGrad) return epGradOpen(rank);
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.algorithm = g->highThroughput ? NCCL_EP_ALGO_HIGH_THROUGHPUT : NCCL_EP_ALGO_LOW_LATENCY;
  config.num_experts = (unsigned)g->shape.numExperts;
  config.max_dispatch_tokens_per_rank = (unsigned)g->shape.maxTokens;
  config.max_recv_tokens_per_rank = (unsigned)g->maxRecv;
  config.max_token_bytes = (unsigned)g->maxTokenBytes;
  config.enable_mask = (unsigned)g->enableMask;
  config.timeout_ns = rank->timeoutNs;
  config.zero_copy = g->zeroCopy;
  config.overflow_policy = g->drop        ? NCCL_EP_OVERFLOW_DROP
                           : g->batch % 2 ? NCCL_EP_OVERFLOW_TRAP
                                          : NCCL_EP_OVERFLOW_AUTO;
  config.num_topk = (unsigned)g->numTopk;
  config.max_num_sms = g->maxSms;
  if (g->customAlloc) config.alloc = (ncclEpAllocConfig_t){countedAlloc, countedFree, rank};
  rank->doing = "ncclEpCreateGroup";
  EP_TRY_EP(rank, rank->lib->ncclEpCreateGroup(&rank->epGroup, rank->comm, &config));
  return TREFOIL_OK;
}

static trefoil_result_t openHandle(ep_check_rank_t *rank, int i) {
  const ep_check_handle_t *h = &rank->group->handles[i];
  ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
  config.dispatch_output_per_expert_alignment = h->alignment;
  size_t bytes = 0;
  ncclEpTensor_t memory = NCCL_EP_TENSOR_INIT;
  if (h->ownMemory) {
    rank->doing = "ncclEpHandleMemSize";
    EP_TRY_EP(rank, rank->lib->ncclEpHandleMemSize(rank->epGroup, epLayoutOf(h->mode), &config,
                                                   &bytes, h->initTopk));
    if (h->shareWith < 0) {
      rank->doing = "cudaMalloc";
      EP_TRY_CUDA(rank, rank->lib->cudaMalloc(&rank->memory[i], bytes ? bytes : 1));
      rank->doing = "cudaStreamSynchronize";
      EP_TRY_CUDA(
          rank, rank->lib->cudaMemsetAsync(rank->memory[i], 0xa5, bytes ? bytes : 1, rank->stream));
      EP_TRY_CUDA(rank, rank->lib->cudaStreamSynchronize(rank->stream));
    }
    memory.ndim = 1;
    memory.datatype = ncclUint8;
    memory.sizes = &bytes;
    memory.data = rank->memory[h->shareWith < 0 ? i : h->shareWith];
  }
  rank->doing = "ncclEpInitHandle";
  EP_TRY_EP(rank, rank->lib->ncclEpInitHandle(&rank->handles[i], rank->epGroup, epLayoutOf(h->mode),
                                              h->alignment || i ? &config : NULL, h->initTopk,
                                              h->ownMemory ? &memory : NULL));
  return TREFOIL_OK;
}

trefoil_result_t epRankOpen(ep_check_rank_t *rank, const ncclUniqueId *id) {
  const ep_library_t *lib = rank->lib;
  const ep_check_group_t *g = rank->group;
  rank->doing = "cudaSetDevice";
  EP_TRY_CUDA(rank, lib->cudaSetDevice(rank->device));
  rank->comm = rank->kept ? *rank->kept : NULL;
  if (!rank->comm) {
    rank->doing = "ncclCommInitRank";
    EP_TRY_NCCL(rank, lib->ncclCommInitRank(&rank->comm, g->shape.numRanks, *id, rank->rank));
    if (rank->kept) *rank->kept = rank->comm;
  }
  rank->doing = "cudaStreamCreateWithFlags";
  EP_TRY_CUDA(rank, lib->cudaStreamCreateWithFlags(&rank->stream, cudaStreamNonBlocking));
  if (g->useWindow) {
    rank->doing = "ncclMemAlloc";
    EP_TRY_NCCL(rank, lib->ncclMemAlloc(&rank->image, g->imageBytes));
    rank->doing = "ncclCommWindowRegister";
    EP_TRY_NCCL(rank, lib->ncclCommWindowRegister(rank->comm, rank->image, g->imageBytes,
                                                  &rank->window, lib->windowFlags));
  } else {
    rank->doing = "cudaMalloc";
    EP_TRY_CUDA(rank, lib->cudaMalloc(&rank->image, g->imageBytes));
  }
  EP_TRY(openGroup(rank));
  memset(rank->putsBefore, 0, sizeof rank->putsBefore);
  rank->doing = "ncclEpCountBytes";
  if (rank->counts) EP_TRY_EP(rank, lib->ncclEpCountBytes(rank->epGroup, 1));
  for (int i = 0; i < g->numHandles; i++) EP_TRY(openHandle(rank, i));
  return TREFOIL_OK;
}

static trefoil_result_t closeGroup(ep_check_rank_t *rank) {
  if (rank->group->isGrad) return epGradClose(rank);
  rank->doing = "ncclEpGroupDestroy";
  EP_TRY_EP(rank, rank->lib->ncclEpGroupDestroy(rank->epGroup));
  EP_CHECK(rank->allocated == 0, TREFOIL_INTERNAL_ERROR,
           "%lld blocks from the caller's allocator are still live after ncclEpGroupDestroy",
           (long long)rank->allocated);
  return TREFOIL_OK;
}

trefoil_result_t epRankClose(ep_check_rank_t *rank) {
  const ep_library_t *lib = rank->lib;
  for (int i = 0; i < rank->group->numHandles; i++) {
    rank->doing = "ncclEpHandleDestroy";
    EP_TRY_EP(rank, lib->ncclEpHandleDestroy(rank->handles[i]));
    rank->doing = "cudaFree";
    if (rank->memory[i]) EP_TRY_CUDA(rank, lib->cudaFree(rank->memory[i]));
  }
  EP_TRY(closeGroup(rank));
  if (rank->window) {
    rank->doing = "ncclCommWindowDeregister";
    EP_TRY_NCCL(rank, lib->ncclCommWindowDeregister(rank->comm, rank->window));
    rank->doing = "ncclMemFree";
    EP_TRY_NCCL(rank, lib->ncclMemFree(rank->image));
  } else {
    rank->doing = "cudaFree";
    EP_TRY_CUDA(rank, lib->cudaFree(rank->image));
  }
  rank->doing = "cudaStreamDestroy";
  EP_TRY_CUDA(rank, lib->cudaStreamDestroy(rank->stream));
  rank->doing = "ncclCommDestroy";
  if (!rank->kept) EP_TRY_NCCL(rank, lib->ncclCommDestroy(rank->comm));
  return TREFOIL_OK;
}

/* After a TRAP: the flag is up on the ranks that overflowed and there alone, the next call fails there
 * with a sentence, and ErrorClear makes the group usable. */
static trefoil_result_t checkAsync(ep_check_rank_t *rank, const ep_check_case_t *c) {
  const ep_library_t *lib = rank->lib;
  if (!c->group->highThroughput && !c->group->enableMask) return TREFOIL_OK;
  /* NCCL EP's header promises the flag with masks alone */
  if (c->group->limited && !c->group->enableMask && !c->trapped) return TREFOIL_OK;
  int flag = -1, wanted = c->trapped >> rank->rank & 1;
  rank->doing = "ncclEpGetAsyncError";
  EP_TRY_EP(rank, lib->ncclEpGetAsyncError(rank->epGroup, &flag));
  EP_CHECK(flag || !wanted, TREFOIL_INTERNAL_ERROR,
           "the async error flag is 0, expected 1: slots over max_recv with TRAP");
  if (flag && !wanted) { /* the next call tells why */
    const char *why = epCallOp(rank, c, &c->ops[0]) == TREFOIL_OK ? "" : trefoilLastError();
    rank->failedBy = EP_FAILED_BY_NOTHING;
    return epFail(TREFOIL_INTERNAL_ERROR, "the async error flag is %d, expected 0; %.300s", flag,
                  why);
  }
  if (!wanted) return TREFOIL_OK;
  ncclResult_t rc = epCallOp(rank, c, &c->ops[0]) == TREFOIL_OK ? ncclSuccess : ncclInvalidUsage;
  EP_CHECK(rc != ncclSuccess, TREFOIL_INTERNAL_ERROR,
           "ncclEpUpdateHandle succeeded after a TRAP, before ncclEpErrorClear");
  rank->failedBy = EP_FAILED_BY_NOTHING; /* as it must */
  rank->doing = "ncclEpErrorClear";
  EP_TRY_EP(rank, lib->ncclEpErrorClear(rank->epGroup));
  return TREFOIL_OK;
}

/* Low latency without masks has no flag: only a later call tells that the last ones lost a rank. */
static trefoil_result_t askForLoss(ep_check_rank_t *rank, const ep_check_case_t *c) {
  if (c->group->isGrad || c->group->highThroughput || c->group->enableMask) return TREFOIL_OK;
  return epCallOp(rank, c, &c->ops[0]);
}

trefoil_result_t epRankEnd(ep_check_rank_t *rank, const ep_check_case_t *c) {
  if (!c->group->isGrad) EP_TRY(checkAsync(rank, c));
  EP_TRY(askForLoss(rank, c));
  if (!rank->fresh) return TREFOIL_OK;
  rank->doing = "ncclEpHandleDestroy";
  ncclEpHandle_t fresh = rank->fresh;
  rank->fresh = NULL;
  EP_TRY_EP(rank, rank->lib->ncclEpHandleDestroy(fresh));
  return TREFOIL_OK;
}

static trefoil_result_t runScript(ep_check_rank_t *rank, const ep_check_case_t *c) {
  for (int i = 0; i < c->numOps; i++) EP_TRY(epCallOp(rank, c, &c->ops[i]));
  return TREFOIL_OK;
}

static trefoil_result_t capture(ep_check_rank_t *rank, const ep_check_case_t *c,
                                cudaGraphExec_t *exec) {
  const ep_library_t *lib = rank->lib;
  cudaGraph_t graph = NULL;
  rank->doing = "cudaStreamBeginCapture";
  EP_TRY_CUDA(rank, lib->cudaStreamBeginCapture(rank->stream, cudaStreamCaptureModeRelaxed));
  EP_TRY(runScript(rank, c));
  rank->doing = "cudaStreamEndCapture";
  EP_TRY_CUDA(rank, lib->cudaStreamEndCapture(rank->stream, &graph));
  rank->doing = "cudaGraphInstantiateWithFlags";
  EP_TRY_CUDA(rank, lib->cudaGraphInstantiateWithFlags(exec, graph, 0));
  EP_TRY_CUDA(rank, lib->cudaGraphDestroy(graph));
  return TREFOIL_OK;
}

static void comeLate(const ep_check_rank_t *rank, const ep_check_case_t *c) {
  if (!(c->delays >> rank->rank & 1)) return;
  struct timespec pause = {0, 200000};
  nanosleep(&pause, NULL);
}

/* After all that is queued: a copy from or to pageable memory would wait for it inside the driver, which then
 * lets no other thread of the process in, and a network's copies neither. */
static trefoil_result_t copyImage(ep_check_rank_t *rank, void *to, const void *from, size_t bytes,
                                  enum cudaMemcpyKind kind) {
  rank->doing = "cudaStreamSynchronize";
  EP_TRY_CUDA(rank, rank->lib->cudaStreamSynchronize(rank->stream));
  rank->doing = "cudaMemcpyAsync";
  EP_TRY_CUDA(rank, rank->lib->cudaMemcpyAsync(to, from, bytes, kind, rank->stream));
  return TREFOIL_OK;
}

trefoil_result_t epRankRun(ep_check_rank_t *rank, const ep_check_case_t *c, uint8_t *const *initial,
                           uint8_t *const *result) {
  const ep_library_t *lib = rank->lib;
  cudaGraphExec_t exec = NULL;
  comeLate(rank, c);
  if (c->captured) EP_TRY(capture(rank, c, &exec));
  for (int round = 0; round < c->numRounds; round++) {
    EP_TRY(copyImage(rank, rank->image, initial[round], c->usedBytes, cudaMemcpyHostToDevice));
    if (exec) {
      rank->doing = "cudaGraphLaunch";
      EP_TRY_CUDA(rank, lib->cudaGraphLaunch(exec, rank->stream));
    } else {
      EP_TRY(runScript(rank, c));
    }
    EP_TRY(copyImage(rank, result[round], rank->image, c->usedBytes, cudaMemcpyDeviceToHost));
  }
  if (rank->place) atomic_store(&rank->place->op, c->numOps);
  rank->doing = "cudaStreamSynchronize";
  EP_TRY_CUDA(rank, lib->cudaStreamSynchronize(rank->stream));
  rank->doing = "cudaGraphExecDestroy";
  if (exec) EP_TRY_CUDA(rank, lib->cudaGraphExecDestroy(exec));
  return epRankEnd(rank, c);
}
