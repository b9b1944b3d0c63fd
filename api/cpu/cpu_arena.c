/* Windows: one for the control block, made with the group, and one arena per layout, made with the
 * first handle that needs it and made anew, larger, when a handle with a larger top-k comes. */
#include <string.h>

#include "api/cpu/cpu.h"
#include "trefoil_host.h"

static trefoil_result_t ncclFailed(const char *what, ncclResult_t result) {
  const char *why = trefoilHostLastError();
  trefoil_result_t code = result == ncclRemoteError || result == ncclInvalidUsage
                              ? (trefoil_result_t)result
                              : TREFOIL_SYSTEM_ERROR;
  return epFail(code, "%s: %s", what, why && *why ? why : ncclGetErrorString(result));
}

/* The first zeroBytes are zero before any peer can see them. */
trefoil_result_t epOpenWindow(ep_cpu_group_t *g, size_t bytes, size_t zeroBytes, char **memory,
                              ncclWindow_t *window) {
  void *p = NULL;
  ncclWindow_t w = NULL;
  ncclResult_t result = ncclMemAlloc(&p, bytes);
  if (result != ncclSuccess) return ncclFailed("shared memory of the group", result);
  memset(p, 0, zeroBytes);
  result = ncclCommWindowRegister(g->group->comm, p, bytes, &w, 0);
  if (result != ncclSuccess) {
    trefoil_result_t code = ncclFailed("window of the group", result);
    ncclMemFree(p);
    return code;
  }
  *memory = p;
  *window = w;
  g->group->allocated[0][EP_MEMORY_SHARED] += bytes;
  return TREFOIL_OK;
}

void epCloseWindow(ep_cpu_group_t *g, char *memory, ncclWindow_t window) {
  ncclCommWindowDeregister(g->group->comm, window);
  ncclMemFree(memory);
}

static size_t arenaBytes(const ep_sizing_t *s) {
  return s->totals[0][EP_MEMORY_SHARED] - s->buffers[EP_BUFFER_CONTROL].bytes;
}

void epArenaFree(ep_cpu_group_t *g, int arenaIdx) {
  ep_arena_t *a = &g->arenas[arenaIdx];
  if (!a->ready) return;
  epCloseWindow(g, a->memory, a->window);
  g->group->allocated[0][EP_MEMORY_SHARED] -= arenaBytes(&a->sizing);
  epFreeBuffer(g->group, &a->sizing.buffers[EP_BUFFER_SCRATCH], a->scratch);
  a->ready = 0;
}

static trefoil_result_t openArena(ep_cpu_group_t *g, int arenaIdx, const ep_sizing_t *sizing) {
  ep_arena_t *a = &g->arenas[arenaIdx];
  memset(a, 0, sizeof *a);
  a->sizing = *sizing;
  EP_TRY(epAllocBuffer(g->group, &a->sizing.buffers[EP_BUFFER_SCRATCH], &a->scratch));
  trefoil_result_t result = epOpenWindow(g, arenaBytes(sizing), 0, &a->memory, &a->window);
  if (result != TREFOIL_OK) {
    epFreeBuffer(g->group, &a->sizing.buffers[EP_BUFFER_SCRATCH], a->scratch);
    return result;
  }
  a->ready = 1;
  for (int r = 0; r < g->R; r++) {
    void *p = NULL;
    ncclResult_t error = trefoilHostPeerPointer(a->window, 0, r, &p);
    if (error != ncclSuccess || !p) return ncclFailed("a peer's window", error);
    g->peers[r].arena[arenaIdx] = p;
  }
  return TREFOIL_OK;
}

/* Counters start anew: between two barriers, each rank its own. */
static void resetCounters(ep_cpu_group_t *g, int arenaIdx) {
  ep_control_t *c = g->peers[g->me].control;
  int64_t topk = c->arenas[arenaIdx].initTopk;
  memset(&c->arenas[arenaIdx], 0, sizeof c->arenas[arenaIdx]);
  c->arenas[arenaIdx].initTopk = topk;
  for (int array = EP_ARRAY_ARENA; array < EP_NUM_ARRAYS; array++) {
    ep_word_t *words = epArray(c, g->R, (ep_array_t)array, arenaIdx);
    for (int r = 0; r < g->R; r++) epStore(&words[r], 0);
  }
  for (int r = 0; r < g->R; r++) g->peers[r].ringSeq[arenaIdx] = 0;
}

static trefoil_result_t compareTopk(ep_cpu_group_t *g, int arenaIdx) {
  for (int r = 0; r < g->R; r++) {
    int64_t mine = g->peers[g->me].control->arenas[arenaIdx].initTopk;
    int64_t theirs = g->peers[r].control->arenas[arenaIdx].initTopk;
    EP_CHECK(mine == theirs, TREFOIL_INVALID_ARGUMENT,
             "ncclEpInitHandle: num_topk differs: buffers for %lld on rank %d, %lld on rank %d; "
             "must be equal",
             (long long)mine, g->me, (long long)theirs, r);
  }
  return TREFOIL_OK;
}

trefoil_result_t epArenaEnsure(ep_cpu_group_t *g, int arenaIdx, const ep_sizing_t *sizing,
                               int topk) {
  ep_arena_t *a = &g->arenas[arenaIdx];
  if (a->ready && a->sizing.config.shape.topk >= topk) return TREFOIL_OK;
  uint64_t timeout = g->group->timeoutNs;
  epWaitIdle(g, NULL);
  g->peers[g->me].control->arenas[arenaIdx].initTopk = topk;
  EP_TRY(epBarrier(g, "ncclEpInitHandle", timeout));
  trefoil_result_t result = compareTopk(g, arenaIdx);
  EP_TRY(epBarrier(g, "ncclEpInitHandle", timeout));
  EP_TRY(result);
  epArenaFree(g, arenaIdx);
  resetCounters(g, arenaIdx);
  EP_TRY(openArena(g, arenaIdx, sizing));
  return epBarrier(g, "ncclEpInitHandle", timeout);
}
