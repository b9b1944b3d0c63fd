/* Several NVLink domains: what a launch is given besides, for the relay in it (kernels/ll/relay.h), or the
 * poster (kernels/ht/ht_far.h).
 *
 * A group's window holds exchange memory, then messages, in high throughput rings. In low latency far
 * ranks' peers are the mirrors in this rank's memory; high throughput has none, and its words of rings are
 * there. One device communicator a group, made with its first window, has the signals; their numbers and
 * those of operations go on when the window is made anew. */
#include <stdlib.h>
#include <string.h>

#include "api/gpu/gpu_dev_comm.h"
#include "kernels/net/net_drain.h"

enum { MOST_RELAY_BLOCKS = 32 };

struct ep_gpu_far {
  ncclDevComm_t comm;
  int hasComm, givenUp; /* givenUp: NCCL still makes it, though this group no longer waits */
  ep_buffer_t buffer;
  char *memory; /* EP_GPU_RELAY_BYTES on the device */
  ep_ll_relay_t relay;
  ep_ht_far_t ht;
};
_Static_assert(EP_HT_FAR_CONTROL_BYTES <= EP_LL_RELAY_CONTROL_BYTES, "the same memory");
_Static_assert(EP_GPU_RELAY_COMM_AT + sizeof(ncclDevComm_t) <= EP_GPU_RELAY_LATE_AT &&
                   EP_GPU_RELAY_COMM_AT % 16 == 0,
               "a copy of the device communicator");

static int numFar(const ep_gpu_group_t *g) {
  return g->R - g->group->ranksPerNode;
}

int epGpuFarBlocks(const ep_gpu_group_t *g, int most) {
  if (!g->far || g->isHt) return 0;
  int least = EP_LL_RELAY_LEAST_BLOCKS(numFar(g)), blocks = most / 3;
  if (blocks > MOST_RELAY_BLOCKS) blocks = MOST_RELAY_BLOCKS;
  return blocks > least ? blocks : least;
}

/* Launches on any stream find it there. */
static trefoil_result_t copyIn(void *to, const void *from, size_t bytes) {
  EP_CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
  EP_CUDA(cudaDeviceSynchronize());
  return TREFOIL_OK;
}

trefoil_result_t epGpuFarOpen(ep_gpu_group_t *g, const ep_sizing_t *sizing,
                              uint64_t firstOperation) {
  if (g->group->ranksPerNode == g->R) return TREFOIL_OK;
  struct ep_gpu_far *f = calloc(1, sizeof *f);
  EP_CHECK(f, TREFOIL_SYSTEM_ERROR, "out of memory");
  g->far = f;
  f->buffer = sizing->buffers[EP_BUFFER_RELAY];
  void *p;
  EP_TRY(epAllocBuffer(g->group, &f->buffer, &p));
  f->memory = p;
  char control[EP_LL_RELAY_CONTROL_BYTES];
  epLlRelayControlInit(control, firstOperation);
  EP_CUDA(cudaMemset(p, 0, f->buffer.bytes));
  if (!g->isHt) EP_TRY(copyIn(p, control, sizeof control));
  ep_net_port_t port = {.comm = f->memory + EP_GPU_RELAY_COMM_AT,
                        .posted = (uint64_t *)(f->memory + EP_GPU_RELAY_POSTED_AT),
                        .purposes =
                            (uint64_t *)(f->memory + EP_GPU_RELAY_POSTED_AT) + EP_KERNEL_MAX_RANKS,
                        .rank = g->me,
                        .numRanks = g->R};
  f->relay = (ep_ll_relay_t){.port = port, .control = f->memory};
  g->ll.numNear = (uint16_t)g->group->ranksPerNode;
  g->ll.firstNear = (uint16_t)(g->me / g->ll.numNear * g->ll.numNear);
  f->ht = (ep_ht_far_t){.port = port, .control = f->memory};
  return TREFOIL_OK;
}

void epGpuFarLeave(ep_gpu_group_t *g) {
  if (!g->far || !g->far->hasComm) return;
  ncclDevCommDestroy(g->group->comm, &g->far->comm);
  g->far->hasComm = 0;
}

void epGpuFarClose(ep_gpu_group_t *g) {
  if (!g->far) return;
  if (g->far->memory) epFreeBuffer(g->group, &g->far->buffer, g->far->memory);
  free(g->far);
  g->far = NULL;
}

const uint64_t *epGpuFarPosted(const ep_gpu_group_t *g) {
  return g->far ? g->far->relay.port.posted : NULL;
}

int epGpuFarIsGivenUp(const ep_gpu_group_t *g) {
  return g->far && g->far->givenUp;
}

trefoil_result_t epGpuFarJoin(ep_gpu_group_t *g) {
  struct ep_gpu_far *f = g->far;
  if (!f || f->hasComm) return TREFOIL_OK;
  ncclDevCommRequirements_t needs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  needs.ginConnectionType = g->isHt ? NCCL_GIN_CONNECTION_RAIL : NCCL_GIN_CONNECTION_FULL;
  needs.ginContextCount = 1;
  needs.ginSignalCount =
      g->isHt ? EP_HT_FAR_SIGNALS(g->R / g->group->ranksPerNode) : EP_LL_RELAY_SIGNALS(g->R);
  needs.ginCounterCount = g->R;
  EP_TRY(epGpuDevComm(g, &needs, &f->comm, &f->givenUp));
  f->hasComm = 1;
  return copyIn(f->memory + EP_GPU_RELAY_COMM_AT, &f->comm, sizeof f->comm);
}

static void useRings(ep_gpu_group_t *g, const ep_gpu_arena_t *a) {
  ep_ht_far_t *far = &g->far->ht;
  ep_ht_config_t config = epGpuHtConfig(&a->config);
  epHtFarLayout(&config, g->group->ranksPerNode, 0, &far->at); /* it was checked by the sizing */
  far->port.window = a->window;
  far->port.scratch = a->exchange.bytes;
  far->window = a->memory;
  far->words = a->mirrors;
}

trefoil_result_t epGpuFarSettle(ep_gpu_group_t *g) {
  if (!g->far || !g->isHt) return TREFOIL_OK;
  uint64_t control[EP_HT_FAR_CONTROL_BYTES / 8];
  EP_CUDA(cudaMemcpy(control, g->far->memory, sizeof control, cudaMemcpyDeviceToHost));
  epHtFarRestart(control);
  return copyIn(g->far->memory, control, sizeof control);
}

trefoil_result_t epGpuFarDrain(ep_gpu_group_t *g, uint64_t timeoutNs, const char *call) {
  struct ep_gpu_far *f = g->far;
  if (!f || !f->hasComm) return TREFOIL_OK;
  int late = 0, *at = (int *)(f->memory + EP_GPU_RELAY_LATE_AT);
  EP_TRY(epNetDrain(g->isHt ? &f->ht.port : &f->relay.port, timeoutNs, at, g->aside));
  EP_CUDA(cudaStreamSynchronize(g->aside));
  EP_CUDA(cudaMemcpy(&late, at, sizeof late, cudaMemcpyDeviceToHost));
  EP_CHECK(!late, TREFOIL_REMOTE_ERROR,
           "%s: puts to rank %d, in another NVLink domain, are still under way after %.1f s", call,
           late - 1, (double)timeoutNs * 1e-9);
  return TREFOIL_OK;
}

void epGpuFarUse(ep_gpu_group_t *g, const ep_gpu_arena_t *a) {
  if (!g->far) return;
  if (g->isHt) {
    useRings(g, a);
    return;
  }
  ep_ll_relay_t *relay = &g->far->relay;
  ep_ll_config_t config = epGpuConfig(&a->config);
  /* it was checked by the sizing */
  epLlRelayLayout(&config, g->group->ranksPerNode, g->group->llRails, &relay->at);
  relay->port.window = a->window;
  relay->port.scratch = a->exchange.bytes;
  relay->window = a->memory;
  relay->blocks = g->relayBlocks;
}

trefoil_result_t epGpuFarPrepare(ep_gpu_op_t op, unsigned parts, ep_ll_ready_t *out) {
  return op.kind == EP_LL_DISPATCH ? epLlFarPrepareDispatch(op.llDispatch, parts, out)
                                   : epLlFarPrepareCombine(op.llCombine, parts, out);
}

trefoil_result_t epGpuFarLaunch(const ep_gpu_group_t *g, unsigned kind, const ep_ll_ready_t *ready,
                                cudaStream_t stream) {
  return epLlFarLaunch(ready, (ep_ll_kind_t)kind, &g->far->relay, stream);
}

trefoil_result_t epGpuFarLaunchHt(const ep_gpu_group_t *g, ep_gpu_op_t op, cudaStream_t stream) {
  const ep_ht_far_t *far = &g->far->ht;
  if (op.kind == EP_HT_KIND_UPDATE) return epHtFarUpdate(op.htUpdate, far, stream);
  if (op.kind == EP_HT_KIND_DISPATCH) return epHtFarDispatch(op.htDispatch, far, stream);
  return epHtFarCombine(op.htCombine, far, stream);
}
