/* Byte counters and kernel times: off until asked for (trefoil/device.h). */
#include <stdlib.h>
#include <string.h>

#include "api/gpu/gpu.h"

trefoil_result_t epGpuCountBytes(ncclEpGroup_t group, int on) {
  ep_gpu_group_t *g = epGpu(group);
  g->ll.bytes = on ? (uint64_t *)(g->control + EP_GPU_BYTES_AT(g->isHt)) : NULL;
  g->ht.bytes = g->ll.bytes;
  g->version++;
  if (on) g->counted = 1;
  return TREFOIL_OK;
}

static trefoil_result_t readBytes(ep_gpu_group_t *g, int kind, uint64_t *bytes, int reset,
                                  cudaStream_t stream) {
  size_t size = (size_t)g->R * sizeof(uint64_t);
  uint64_t *counts = (uint64_t *)(g->control + EP_GPU_BYTES_AT(g->isHt)) + kind * g->R,
           copy[EP_KERNEL_MAX_RANKS];
  EP_CUDA(cudaMemcpyAsync(copy, counts, size, cudaMemcpyDeviceToHost, stream));
  EP_CUDA(cudaStreamSynchronize(stream));
  if (reset) {
    EP_CUDA(cudaMemsetAsync(counts, 0, size, stream));
    EP_CUDA(cudaStreamSynchronize(stream));
  }
  memcpy(bytes, copy, size);
  return TREFOIL_OK;
}

trefoil_result_t epGpuReadBytes(ncclEpGroup_t group, int kind, uint64_t *bytes, int reset,
                                cudaStream_t stream) {
  ep_gpu_group_t *g = epGpu(group);
  EP_CHECK(g->counted, TREFOIL_INVALID_USAGE,
           "ncclEpReadBytes: this group never counted; call ncclEpCountBytes(group, 1) first, or "
           "set NCCL_EP_COUNT_BYTES=1");
  int before;
  EP_TRY(epGpuEnter(g, &before));
  trefoil_result_t result = readBytes(g, kind, bytes, reset, stream);
  epGpuLeave(g, before);
  return result;
}

_Static_assert(NCCL_EP_PUT_DISPATCH == EP_NET_FOR_DISPATCH &&
                   NCCL_EP_PUT_COMBINE == EP_NET_FOR_COMBINE &&
                   NCCL_EP_PUT_WEIGHTS == EP_NET_FOR_WEIGHTS && NCCL_EP_PUT_IDS == EP_NET_FOR_IDS &&
                   NCCL_EP_PUT_SIGNAL == EP_NET_PURPOSES,
               "the same order");

/* Those that only signal are all others. */
static trefoil_result_t readPuts(const ep_gpu_group_t *g, int kind, uint64_t *puts,
                                 cudaStream_t stream) {
  uint64_t all[EP_GPU_RELAY_PUTS] = {0}, *of = all + EP_KERNEL_MAX_RANKS;
  const uint64_t *posted = epGpuFarPosted(g);
  if (posted) EP_CUDA(cudaMemcpyAsync(all, posted, sizeof all, cudaMemcpyDeviceToHost, stream));
  EP_CUDA(cudaStreamSynchronize(stream));
  for (int i = 0; kind == NCCL_EP_PUT_SIGNAL && i < EP_NET_PURPOSES * g->R; i++)
    all[i % g->R] -= of[i];
  memcpy(puts, kind == NCCL_EP_PUT_SIGNAL ? all : of + kind * g->R, (size_t)g->R * sizeof *puts);
  return TREFOIL_OK;
}

trefoil_result_t epGpuReadPuts(ncclEpGroup_t group, int kind, uint64_t *puts, cudaStream_t stream) {
  const ep_gpu_group_t *g = epGpu(group);
  int before;
  EP_TRY(epGpuEnter(g, &before));
  trefoil_result_t result = readPuts(g, kind, puts, stream);
  epGpuLeave(g, before);
  return result;
}

/* ---- times ----------------------------------------------------------------------------------- */

/* High throughput takes two blocks at least: one sends, one receives. */
static int mostBlocks(const ep_gpu_group_t *g) {
  return g->ll.numSms < 2 ? 2 : g->ll.numSms;
}

static size_t stampsOf(const ep_gpu_group_t *g) {
  return (size_t)mostBlocks(g) * 2;
}

static void forget(ep_gpu_times_t *t) {
  if (t->stamps) cudaFree(t->stamps);
  free(t->launches);
  *t = (ep_gpu_times_t){0};
}

static trefoil_result_t keep(ep_gpu_group_t *g, unsigned maxLaunches) {
  ep_gpu_times_t t = {.maxLaunches = maxLaunches};
  size_t bytes = maxLaunches * stampsOf(g) * sizeof(uint64_t);
  EP_CUDA(cudaDeviceSynchronize());
  if (maxLaunches) {
    void *p = NULL;
    EP_CUDA(cudaMalloc(&p, bytes));
    t.stamps = p;
    t.launches = calloc(maxLaunches, sizeof *t.launches);
    if (!t.launches || cudaMemset(p, 0, bytes) != cudaSuccess) {
      forget(&t);
      return epFail(TREFOIL_SYSTEM_ERROR, "ncclEpKeepTimes: out of memory");
    }
  }
  forget(&g->times);
  g->times = t;
  return TREFOIL_OK;
}

trefoil_result_t epGpuKeepTimes(ncclEpGroup_t group, unsigned maxLaunches) {
  ep_gpu_group_t *g = epGpu(group);
  if (!maxLaunches && !g->times.stamps) return TREFOIL_OK;
  int before;
  EP_TRY(epGpuEnter(g, &before));
  trefoil_result_t result = keep(g, maxLaunches);
  epGpuLeave(g, before);
  return result;
}

static int publicKind(unsigned kind) {
  if (kind == EP_HT_KIND_UPDATE) return NCCL_EP_KIND_UPDATE;
  if (kind == EP_HT_KIND_DISPATCH) return NCCL_EP_KIND_DISPATCH;
  return kind == EP_HT_KIND_COMBINE ? NCCL_EP_KIND_COMBINE : (int)kind;
}

uint64_t *epGpuStampsFor(ep_gpu_group_t *g, unsigned kind, unsigned parts) {
  ep_gpu_times_t *t = &g->times;
  if (!t->stamps) return NULL;
  uint64_t idx = t->numLaunches++ % t->maxLaunches;
  t->launches[idx] = (ep_gpu_launch_record_t){publicKind(kind), (int)parts};
  return t->stamps + idx * stampsOf(g);
}

static ncclEpKernelTime_t timeOf(const ep_gpu_group_t *g, const uint64_t *stamps,
                                 ep_gpu_launch_record_t status) {
  ncclEpKernelTime_t t = {.kind = status.kind, .parts = status.parts, .numBlocks = g->ll.numSms};
  uint64_t first = stamps[0];
  if (!first) return t; /* it has not run */
  t.startNs = first;
  t.numBlocks = 0;
  for (int b = 0; b < mostBlocks(g); b++) {
    if (stamps[2 * b + 1] < first)
      continue; /* no block of this launch: zero, or left by an older one */
    if (stamps[2 * b] < t.startNs) t.startNs = stamps[2 * b];
    if (stamps[2 * b + 1] > t.endNs) t.endNs = stamps[2 * b + 1];
    t.numBlocks++;
  }
  return t;
}

static trefoil_result_t readTimes(ep_gpu_group_t *g, ncclEpKernelTime_t *times, unsigned *count,
                                  cudaStream_t stream) {
  ep_gpu_times_t *t = &g->times;
  uint64_t last = t->numLaunches, first = t->numRead;
  if (last - first > t->maxLaunches) first = last - t->maxLaunches;
  if (last - first > *count) first = last - *count;
  size_t perLaunch = stampsOf(g), bytes = t->maxLaunches * perLaunch * sizeof(uint64_t);
  uint64_t *copy = malloc(bytes);
  EP_CHECK(copy, TREFOIL_SYSTEM_ERROR, "ncclEpReadTimes: out of memory");
  cudaError_t error = cudaMemcpyAsync(copy, t->stamps, bytes, cudaMemcpyDeviceToHost, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  for (uint64_t i = first; error == cudaSuccess && i < last; i++) {
    uint64_t idx = i % t->maxLaunches;
    times[i - first] = timeOf(g, copy + idx * perLaunch, t->launches[idx]);
  }
  free(copy);
  EP_CHECK(error == cudaSuccess, TREFOIL_SYSTEM_ERROR, "ncclEpReadTimes: %s",
           cudaGetErrorString(error));
  *count = (unsigned)(last - first);
  t->numRead = last;
  return TREFOIL_OK;
}

trefoil_result_t epGpuReadTimes(ncclEpGroup_t group, ncclEpKernelTime_t *times, unsigned *count,
                                cudaStream_t stream) {
  ep_gpu_group_t *g = epGpu(group);
  EP_CHECK(g->times.stamps, TREFOIL_INVALID_USAGE,
           "ncclEpReadTimes: no times are kept; call ncclEpKeepTimes first");
  int before;
  EP_TRY(epGpuEnter(g, &before));
  trefoil_result_t result = readTimes(g, times, count, stream);
  epGpuLeave(g, before);
  return result;
}
