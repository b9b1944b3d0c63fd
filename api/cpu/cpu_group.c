/* Groups: the control window, the settings of all ranks compared, and the way out. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>

#include "api/cpu/cpu_group.h"
#include "api/cpu/cpu_hang.h"
#include "api/cpu/cpu_round.h"
#include "trefoil_host.h"

static void prepareQuery(ncclCommProperties_t *p) {
  memset(p, 0, sizeof *p);
  p->size = sizeof *p;
  p->magic = NCCL_API_MAGIC;
  p->version = NCCL_VERSION_CODE;
}

/* What was loaded before, as a framework brings it, answers this library's calls instead of the host
 * runtime. */
static trefoil_result_t checkAnswers(const char *call) {
  Dl_info cuda, nccl, host;
  int known = dladdr((void *)(uintptr_t)&cudaLaunchHostFunc, &cuda) &&
              dladdr((void *)(uintptr_t)&ncclCommQueryProperties, &nccl) &&
              dladdr((void *)(uintptr_t)&trefoilHostLastError, &host);
  /* a program's own entry of a call it takes the address of leads to the right one */
  Dl_info program = {.dli_fbase = NULL};
  dladdr((void *)getauxval(AT_PHDR), &program);
  if (known && cuda.dli_fbase == program.dli_fbase) cuda = host;
  if (known && nccl.dli_fbase == program.dli_fbase) nccl = host;
  int isCuda = known && cuda.dli_fbase != host.dli_fbase;
  EP_CHECK(!known || (!isCuda && nccl.dli_fbase == host.dli_fbase), TREFOIL_SYSTEM_ERROR,
           "%s: %s is answered by %s, which was loaded before, and not by %s: load "
           "the host runtime first (LD_PRELOAD=libtrefoil_host.so.0), or not the other",
           call, isCuda ? "cudaLaunchHostFunc" : "ncclCommQueryProperties",
           isCuda ? cuda.dli_fname : nccl.dli_fname, host.dli_fname);
  return TREFOIL_OK;
}

trefoil_result_t epCpuRanks(ncclComm_t comm, const char *call, int *rank, int *numRanks,
                            int *ranksPerNode) {
  ncclCommProperties_t p;
  prepareQuery(&p);
  EP_TRY(checkAnswers(call));
  int me = 0, R = 0;
  if (ncclCommUserRank(comm, &me) != ncclSuccess || ncclCommCount(comm, &R) != ncclSuccess ||
      ncclCommQueryProperties(comm, &p) != ncclSuccess) {
    const char *why = trefoilHostLastError();
    return epFail(TREFOIL_INVALID_ARGUMENT, "%s: comm is not usable: %s", call,
                  why && *why ? why : "NCCL gave no reason");
  }
  int nodes = p.nLsaTeams > 0 ? p.nLsaTeams : 1;
  EP_CHECK(R % nodes == 0, TREFOIL_INVALID_ARGUMENT, "%s: %d ranks on %d nodes; must divide evenly",
           call, R, nodes);
  *rank = me;
  *numRanks = R;
  *ranksPerNode = R / nodes;
  return TREFOIL_OK;
}

trefoil_result_t epCpuTopology(ncclComm_t comm, int *rank, int *numRanks, int *ranksPerNode) {
  return epCpuRanks(comm, "ncclEpCreateGroup", rank, numRanks, ranksPerNode);
}

/* 0: not a live communicator. */
static uint64_t commHashOf(ncclComm_t comm) {
  ncclCommProperties_t p;
  prepareQuery(&p);
  return ncclCommQueryProperties(comm, &p) == ncclSuccess ? p.commHash : 0;
}

trefoil_result_t epCpuCheckComm(ncclEpGroup_t group) {
  EP_CHECK(
      commHashOf(group->comm) == epCpu(group)->commHash, TREFOIL_INVALID_USAGE,
      "the group's communicator was destroyed or aborted before the group, and its windows with "
      "it; destroy handles, then the group, then the communicator");
  return TREFOIL_OK;
}

static ep_cpu_group_t *stateOf(ncclEpGroup_t group) {
  uintptr_t end = (uintptr_t)(group + 1);
  return (ep_cpu_group_t *)((end + 63) / 64 * 64);
}

/* Alone: what can fail on one rank. */
static trefoil_result_t allocControl(ep_cpu_group_t *g) {
  size_t bytes = g->controlBuffer.bytes;
  EP_TRY(epAllocBuffer(g->group, &g->tableBuffer, (void **)&g->peers));
  return epAllocShared(g, bytes, bytes, &g->controlMemory);
}

static trefoil_result_t openControl(ep_cpu_group_t *g) {
  EP_TRY(epOpenWindow(g, g->controlMemory, g->controlBuffer.bytes, &g->controlWindow));
  for (int r = 0; r < g->R; r++) {
    void *p = NULL;
    EP_CHECK(trefoilHostPeerPointer(g->controlWindow, 0, r, &p) == ncclSuccess && p,
             TREFOIL_SYSTEM_ERROR, "ncclEpCreateGroup: rank %d's window: %s", r,
             trefoilHostLastError());
    g->peers[r].control = p;
    atomic_store(&g->peers[r].active, 1);
  }
  return TREFOIL_OK;
}

static void closeControl(ep_cpu_group_t *g) {
  epFreeShared(g, g->controlMemory, g->controlBuffer.bytes, g->controlWindow);
  epFreeBuffer(g->group, &g->tableBuffer, g->peers);
}

/* Settings are compared before anything is shared. */
static trefoil_result_t joinGroup(ep_cpu_group_t *g) {
  ep_notice_t notice = {.call = EP_CALL_CREATE_GROUP, .groupId = epMonotonicNs()};
  epSettingsOf(g->group, &notice.settings);
  EP_TRY(epCpuBarrierRound(g->group->comm, g->R, g->group->timeoutNs, &notice));
  g->id = notice.groupId;
  return openControl(g);
}

trefoil_result_t epCpuGroupCreate(ncclEpGroup_t group) {
  ep_cpu_group_t *g = stateOf(group);
  memset(g, 0, sizeof *g);
  group->state = g;
  g->group = group;
  g->me = group->rank;
  g->R = group->numRanks;
  g->G = group->ranksPerNode;
  g->M = g->R / g->G;
  g->commHash = commHashOf(group->comm);
  ep_sizing_t sizing;
  ep_handle_limits_t any = {.layout = NCCL_EP_LAYOUT_EXPERT_MAJOR, .topk = 1};
  ep_sizing_config_t config = epSizingConfig(&group->limits, &any, g->R, g->G);
  EP_TRY(epSizing(&config, &sizing));
  g->controlBuffer = sizing.buffers[EP_BUFFER_CONTROL];
  g->tableBuffer = sizing.buffers[EP_BUFFER_PEER_TABLES];
  trefoil_result_t result = allocControl(g);
  if (result == TREFOIL_OK) result = joinGroup(g);
  if (result != TREFOIL_OK) {
    closeControl(g);
    return result;
  }
  g->oneProcess = 1;
  for (int r = 0; r < g->R; r++) {
    if (trefoilHostSameProcess(group->comm, r) != 1) g->oneProcess = 0;
  }
  pthread_mutex_init(&g->lock, NULL);
  pthread_cond_init(&g->idle, NULL);
  epHangOpen(g);
  const char *count = getenv("NCCL_EP_COUNT_BYTES");
  if (count && *count && strcmp(count, "0") != 0) return epCpuCountBytes(group, 1);
  return TREFOIL_OK;
}

/* A group that lost a rank has no sign of when that rank, if it lives in this process, stops reading:
 * then its windows stay mapped until the process ends. */
static int everybodyLeft(ep_cpu_group_t *g) {
  int failed = atomic_load(&g->failed), dead = 0;
  for (int r = 0; r < g->R; r++) dead |= !epActive(g, r);
  uint64_t timeout = g->group->timeoutNs, second = 1000000000u;
  if ((failed || dead) && timeout > second) timeout = second;
  return epLeave(g, timeout);
}

static int missingInProcess(const ep_cpu_group_t *g) {
  for (int r = 0; r < g->R; r++) {
    if (r != g->me && trefoilHostSameProcess(g->group->comm, r) == 1) return 1;
  }
  return 0;
}

trefoil_result_t epCpuGroupDestroy(ncclEpGroup_t group) {
  ep_cpu_group_t *g = epCpu(group);
  epWaitIdle(g, NULL);
  int keep = !everybodyLeft(g) && missingInProcess(g);
  epHangClose(g);
  if (!keep) {
    for (int a = 0; a < 2; a++) epArenaFree(g, a);
    closeControl(g);
  }
  for (ep_record_t *r = g->captured, *next; r; r = next) {
    next = r->next;
    free(r);
  }
  pthread_mutex_destroy(&g->lock);
  pthread_cond_destroy(&g->idle);
  return TREFOIL_OK;
}
