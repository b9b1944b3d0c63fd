/* Windows: one for the control block, made with the group, and one arena per layout, made with the
 * first handle that needs it and made anew, larger, when a handle with a larger top-k comes. */
#include <string.h>

#include "api/cpu/cpu_round.h"
#include "trefoil_host.h"

trefoil_result_t epNcclFailed(const char *what, ncclResult_t result) {
  const char *why = trefoilHostLastError();
  trefoil_result_t code = result == ncclRemoteError || result == ncclInvalidUsage
                              ? (trefoil_result_t)result
                              : TREFOIL_SYSTEM_ERROR;
  return epFail(code, "%s: %s", what, why && *why ? why : ncclGetErrorString(result));
}

/* The first zeroBytes are zero before any peer can see them. */
trefoil_result_t epAllocShared(ep_cpu_group_t *g, size_t bytes, size_t zeroBytes, char **memory) {
  void *p = NULL;
  ncclResult_t result = ncclMemAlloc(&p, bytes);
  if (result != ncclSuccess) return epNcclFailed("shared memory of the group", result);
  memset(p, 0, zeroBytes);
  *memory = p;
  g->group->allocated[0][EP_MEMORY_SHARED] += bytes;
  return TREFOIL_OK;
}

trefoil_result_t epOpenWindow(ep_cpu_group_t *g, char *memory, size_t bytes, ncclWindow_t *window) {
  ncclWindow_t w = NULL;
  ncclResult_t result = ncclCommWindowRegister(g->group->comm, memory, bytes, &w, 0);
  if (result != ncclSuccess) return epNcclFailed("window of the group", result);
  *window = w;
  return TREFOIL_OK;
}

void epFreeShared(ep_cpu_group_t *g, char *memory, size_t bytes, ncclWindow_t window) {
  if (!memory) return;
  if (window) ncclCommWindowDeregister(g->group->comm, window);
  ncclMemFree(memory);
  g->group->allocated[0][EP_MEMORY_SHARED] -= bytes;
}

static size_t arenaBytes(const ep_sizing_t *s) {
  return s->totals[0][EP_MEMORY_SHARED] - s->buffers[EP_BUFFER_CONTROL].bytes;
}

static void freeArena(ep_cpu_group_t *g, ep_arena_t *a) {
  epFreeShared(g, a->memory, arenaBytes(&a->sizing), a->window);
  epFreeBuffer(g->group, &a->sizing.buffers[EP_BUFFER_SCRATCH], a->scratch);
  memset(a, 0, sizeof *a);
}

void epArenaFree(ep_cpu_group_t *g, int arenaIdx) {
  if (g->arenas[arenaIdx].ready) freeArena(g, &g->arenas[arenaIdx]);
}

static trefoil_result_t allocArena(ep_cpu_group_t *g, ep_arena_t *a) {
  EP_TRY(epAllocBuffer(g->group, &a->sizing.buffers[EP_BUFFER_SCRATCH], &a->scratch));
  return epAllocShared(g, arenaBytes(&a->sizing), 0, &a->memory);
}

/* Counters start anew, each rank its own, while all ranks are idle and none has left the call. */
static void resetCounters(ep_cpu_group_t *g, int arenaIdx) {
  ep_control_t *c = g->peers[g->me].control;
  memset(&c->arenas[arenaIdx], 0, sizeof c->arenas[arenaIdx]);
  for (int array = EP_ARRAY_ARENA; array < EP_NUM_ARRAYS; array++) {
    ep_word_t *words = epArray(c, g->R, (ep_array_t)array, arenaIdx);
    for (int r = 0; r < g->R; r++) epStore(&words[r], 0);
  }
  for (int r = 0; r < g->R; r++) g->peers[r].ringSeq[arenaIdx] = 0;
  memset(g->arenas[arenaIdx].ops, 0, sizeof g->arenas[arenaIdx].ops);
}

/* All ranks are here and idle. Registering ends on all or fails on all; no rank leaves it before all have
 * reset their counters, which is right for the old arena too, should it stay. */
static trefoil_result_t openArena(ep_cpu_group_t *g, int arenaIdx, ep_arena_t *a) {
  resetCounters(g, arenaIdx);
  EP_TRY(epOpenWindow(g, a->memory, arenaBytes(&a->sizing), &a->window));
  for (int r = 0; r < g->R; r++) {
    void *p = NULL;
    ncclResult_t error = trefoilHostPeerPointer(a->window, 0, r, &p);
    if (error != ncclSuccess || !p) return epNcclFailed("a peer's window", error);
    g->peers[r].arena[arenaIdx] = p;
  }
  a->ready = 1;
  return TREFOIL_OK;
}

/* What is allocated alone comes before the ranks meet: a rank that lacks memory is named there, and
 * the arena that is in use stays until the new one is. */
trefoil_result_t epArenaEnsure(ep_cpu_group_t *g, int arenaIdx, const ep_sizing_t *sizing,
                               int topk) {
  ep_arena_t *a = &g->arenas[arenaIdx], larger = {.sizing = *sizing};
  if (a->ready && a->sizing.config.shape.topk >= topk) return TREFOIL_OK;
  EP_CHECK(
      !a->ready || g->group->numPending == 0, TREFOIL_INVALID_USAGE,
      "ncclEpInitHandle: buffers for top-%d have to grow for top-%d, but a send_only operation "
      "is pending; call ncclEpComplete first",
      a->sizing.config.shape.topk, topk);
  epWaitIdle(g, NULL);
  if (atomic_load(&g->failed)) EP_TRY(epCheckDeferred(g->group));
  ep_notice_t notice = {EP_CALL_INIT_HANDLE, arenaIdx, topk, g->id, {{0}}};
  trefoil_result_t result = allocArena(g, &larger);
  if (result == TREFOIL_OK)
    result = epCpuBarrierRound(g->group->comm, g->R, g->group->timeoutNs, &notice);
  if (result == TREFOIL_OK) result = openArena(g, arenaIdx, &larger);
  if (result != TREFOIL_OK) {
    freeArena(g, &larger);
    return result;
  }
  epArenaFree(g, arenaIdx);
  *a = larger;
  return TREFOIL_OK;
}
