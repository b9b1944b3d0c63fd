/* What calls on the host ask of a routing: with eager sizing how many rows arrive, and of memory that a
 * caller gave what an Update left there.
 *
 * Update's kernel stores the number of rows in a word of host memory that is mapped to the device, one for
 * each handle with memory of its own, so that a call waits for the Update at most and copies nothing. Where
 * the caller wants that number itself, and in memory that other handles may update, it is copied. */
#include <stddef.h>

#include "api/gpu/gpu.h"
#include "api/gpu/gpu_device.h"

void epGpuCountTake(ep_gpu_handle_t *h) {
  ep_gpu_group_t *g = h->g;
  if (!h->handle->ownsMem || g->group->limits.maxRecv || !~g->countsTaken) return;
  int at = __builtin_ctzll(~g->countsTaken);
  g->countsTaken |= (uint64_t)1 << at;
  h->countAt = at + 1;
  g->counts[at] = -1;
}

void epGpuCountLeave(ep_gpu_handle_t *h) {
  if (h->countAt) h->g->countsTaken &= ~((uint64_t)1 << (h->countAt - 1));
  h->countAt = 0;
}

ep_counter_t epGpuCountInto(ep_gpu_handle_t *h, ep_counter_t asked) {
  if (asked.data) h->countElsewhere = 1; /* for good: a graph may replay this Update */
  if (asked.data || !h->countAt) return asked;
  return (ep_counter_t){h->g->countsOnDevice + h->countAt - 1, 1};
}

/* As mapped host memory has it; -1: this count is not there. */
static int64_t mappedCount(const ep_gpu_handle_t *h) {
  return h->countAt && !h->countElsewhere ? h->g->counts[h->countAt - 1] : -1;
}

static trefoil_result_t waitUnlessCaptured(cudaStream_t stream) {
  unsigned long long capture;
  EP_TRY(epGpuCapture(stream, &capture));
  if (!capture) EP_CUDA(cudaStreamSynchronize(stream));
  return TREFOIL_OK;
}

/* handle_mem's first part. */
typedef struct {
  _Alignas(EP_GPU_HT_HEAD_BYTES) ep_ht_memory_t memory;
  _Alignas(EP_GPU_HT_HEAD_BYTES) ep_ht_head_t head;
} front_t;

/* A capture on another stream is no obstacle to this copy. */
static trefoil_result_t readFront(const ep_gpu_handle_t *h, front_t *out, int *holds) {
  const ep_gpu_group_t *g = h->g;
  const ep_ht_memory_t *memory = &out->memory;
  size_t bytes = offsetof(front_t, head) + sizeof out->head;
  cudaError_t error = cudaMemcpyAsync(out, h->htHead, bytes, cudaMemcpyDeviceToHost, g->aside);
  if (error == cudaSuccess) error = cudaStreamSynchronize(g->aside);
  EP_CHECK(error == cudaSuccess, TREFOIL_SYSTEM_ERROR, "handle_mem: %s", cudaGetErrorString(error));
  *holds = memory->magic == EP_GPU_HT_MAGIC && memory->numRanks == g->R &&
           memory->numExperts == g->ht.numExperts &&
           memory->maxTokens == g->group->limits.maxTokens;
  return TREFOIL_OK;
}

trefoil_result_t epGpuReadRouted(ncclEpHandle_t handle, cudaStream_t stream, ep_routed_t *out) {
  ep_gpu_handle_t *h = handle->state;
  front_t f;
  int before, holds = 0;
  EP_TRY(epGpuEnter(h->g, &before));
  trefoil_result_t result = waitUnlessCaptured(stream);
  if (result == TREFOIL_OK) result = readFront(h, &f, &holds);
  epGpuLeave(h->g, before);
  EP_TRY(result);
  const ep_ht_memory_t *m = &f.memory;
  if (holds) *out = (ep_routed_t){m->topk, (trefoil_mode_t)m->mode, m->alignment, m->numTokens};
  return TREFOIL_OK;
}

static trefoil_result_t copyCount(const ep_gpu_handle_t *h, int64_t *out) {
  front_t f;
  int holds;
  EP_TRY(readFront(h, &f, &holds));
  EP_CHECK(holds, TREFOIL_INVALID_USAGE,
           "handle_mem holds no routing; call ncclEpUpdateHandle first");
  *out = f.head.rowTotal;
  return TREFOIL_OK;
}

static trefoil_result_t count(ep_gpu_handle_t *h, cudaStream_t stream, int64_t *out) {
  unsigned long long capture;
  EP_TRY(epGpuCapture(stream, &capture));
  EP_CHECK(!capture, TREFOIL_INVALID_USAGE,
           "eager sizing (max_recv_tokens_per_rank 0) cannot be captured: sizes are not known");
  if (!h->handle->ownsMem || !h->hasUpdated) EP_CUDA(cudaStreamSynchronize(stream));
  if (h->hasUpdated) EP_CUDA(cudaEventSynchronize(h->updated));
  EP_TRY(epCheckDeferred(h->handle->group));
  *out = mappedCount(h);
  return *out < 0 ? copyCount(h, out) : TREFOIL_OK;
}

trefoil_result_t epGpuReceivedCount(ncclEpHandle_t handle, cudaStream_t stream, int64_t *out) {
  ep_gpu_handle_t *h = handle->state;
  int before;
  EP_TRY(epGpuEnter(h->g, &before));
  trefoil_result_t result = count(h, stream, out);
  epGpuLeave(h->g, before);
  return result;
}
