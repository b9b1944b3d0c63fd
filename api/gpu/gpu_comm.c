/* Queries of a communicator and its windows. */
#include <nccl.h>
#include <nccl_device.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "api/gpu/gpu.h"

#define OLDEST_NCCL 23007 /* 2.30.7 */

trefoil_result_t epGpuNccl(ncclComm_t comm, ncclResult_t result, const char *what) {
  if (result == ncclSuccess) return TREFOIL_OK;
  const char *why = ncclGetLastError(comm);
  trefoil_result_t code = result == ncclInvalidArgument ? TREFOIL_INVALID_ARGUMENT
                          : result == ncclInvalidUsage  ? TREFOIL_INVALID_USAGE
                          : result == ncclRemoteError   ? TREFOIL_REMOTE_ERROR
                                                        : TREFOIL_SYSTEM_ERROR;
  return epFail(code, "%s: %s%s%.200s", what, ncclGetErrorString(result), why && *why ? ": " : "",
                why && *why ? why : "");
}

static void startQuery(ncclCommProperties_t *p) {
  memset(p, 0, sizeof *p);
  p->size = sizeof *p;
  p->magic = NCCL_API_MAGIC;
  p->version = NCCL_VERSION_CODE;
}

/* An older one may lack functions that are called here: only this is called of it. */
static int versionOf(void) {
  int version = 0;
  return ncclGetVersion(&version) == ncclSuccess ? version : 0;
}

static trefoil_result_t query(ncclComm_t comm, ncclCommProperties_t *p) {
  int version = versionOf();
  EP_CHECK(version >= OLDEST_NCCL, TREFOIL_INVALID_USAGE,
           "ncclEpCreateGroup: the process has NCCL %d.%d.%d; libnccl_ep needs 2.30.7 or newer (an "
           "older library may come first in LD_LIBRARY_PATH or from another package)",
           version / 10000, version / 100 % 100, version % 100);
  startQuery(p);
  return epGpuNccl(comm, ncclCommQueryProperties(comm, p), "ncclEpCreateGroup: comm");
}

/* A communicator without GIN: all ranks are refused alike, before they would meet. Where one rank alone has
 * switched it off, NCCL 2.32.3 still reports it, and refuses that rank's device communicator: gpu_dev_comm.c
 * tells all. */
static trefoil_result_t checkGin(const ncclCommProperties_t *p, const char *call) {
  const char *enable = getenv("NCCL_GIN_ENABLE");
  char off[80] = "";
  if (enable && !strcmp(enable, "0"))
    snprintf(off, sizeof off, "; NCCL_GIN_ENABLE is 0 on rank %d, this one", p->rank);
  EP_CHECK(p->nLsaTeams <= 1 || p->ginType != NCCL_GIN_TYPE_NONE, TREFOIL_INVALID_USAGE,
           "%s: the ranks form %d NVLink domains (LSA teams of NCCL), and there is no GIN between "
           "them: on every rank it needs InfiniBand or RoCE with GPUDirect RDMA, or the TCP "
           "carrier of libnccl-rma-trefoil.so (TREFOIL_NET_CARRIER=tcp)%s",
           call, p->nLsaTeams, off);
  return TREFOIL_OK;
}

trefoil_result_t epGpuRanks(ncclComm_t comm, const char *call, int *rank, int *numRanks,
                            int *ranksPerNode) {
  ncclCommProperties_t p;
  EP_TRY(query(comm, &p));
  EP_TRY(checkGin(&p, call));
  EP_CHECK(p.deviceApiSupport, TREFOIL_INVALID_USAGE,
           "%s: NCCL has no device API on this communicator: some pair of its GPUs has no peer "
           "access (nvidia-smi topo -p2p r), or cuMem is off (NCCL_CUMEM_ENABLE)",
           call);
  int teams = p.nLsaTeams > 0 ? p.nLsaTeams : 1;
  EP_CHECK(p.nRanks % teams == 0, TREFOIL_INVALID_ARGUMENT,
           "%s: %d ranks in %d LSA teams; must divide evenly", call, p.nRanks, teams);
  *rank = p.rank;
  *numRanks = p.nRanks;
  *ranksPerNode = p.nRanks / teams;
  return TREFOIL_OK;
}

trefoil_result_t epGpuTopology(ncclComm_t comm, int *rank, int *numRanks, int *ranksPerNode) {
  return epGpuRanks(comm, "ncclEpCreateGroup", rank, numRanks, ranksPerNode);
}

/* 0 if it cannot be queried. */
static int tryQuery(ncclComm_t comm, ncclCommProperties_t *p) {
  startQuery(p);
  return versionOf() >= OLDEST_NCCL && ncclCommQueryProperties(comm, p) == ncclSuccess;
}

uint64_t epGpuCommHash(ncclComm_t comm) {
  ncclCommProperties_t p;
  return tryQuery(comm, &p) ? p.commHash : 0;
}

int epGpuCommDomains(ncclComm_t comm) {
  ncclCommProperties_t p;
  return !tryQuery(comm, &p) ? 0 : p.nLsaTeams > 1 ? p.nLsaTeams : 1;
}

/* An aborted communicator is no more, or another one is at its address. */
static trefoil_result_t checkAlive(ncclComm_t comm, uint64_t hash) {
  EP_CHECK(epGpuCommHash(comm) == hash, TREFOIL_REMOTE_ERROR,
           "ncclEpCreateGroup: the communicator was aborted while its ranks met");
  return TREFOIL_OK;
}

/* A communicator that does not block returns before the call is through. */
static trefoil_result_t waitUntilThrough(ncclComm_t comm, uint64_t hash, ncclResult_t result) {
  while (result == ncclInProgress) {
    nanosleep(&(struct timespec){0, 1000000}, NULL);
    EP_TRY(checkAlive(comm, hash));
    if (ncclCommGetAsyncError(comm, &result) != ncclSuccess) result = ncclInternalError;
  }
  return epGpuNccl(comm, result, "ncclEpCreateGroup: ncclBroadcast");
}

/* An abort ends the stream's work, too. */
static trefoil_result_t broadcastOn(ncclComm_t comm, void *device, void *bytes, size_t n,
                                    cudaStream_t stream) {
  uint64_t hash = epGpuCommHash(comm);
  EP_CUDA(cudaMemcpyAsync(device, bytes, n, cudaMemcpyHostToDevice, stream));
  EP_TRY(waitUntilThrough(comm, hash, ncclBroadcast(device, device, n, ncclInt8, 0, comm, stream)));
  EP_CUDA(cudaMemcpyAsync(bytes, device, n, cudaMemcpyDeviceToHost, stream));
  EP_CUDA(cudaStreamSynchronize(stream));
  return checkAlive(comm, hash);
}

trefoil_result_t epGpuBroadcast(ncclComm_t comm, void *bytes, size_t n) {
  int device;
  cudaStream_t stream;
  void *memory = NULL;
  EP_TRY(epGpuNccl(comm, ncclCommCuDevice(comm, &device), "ncclEpCreateGroup: comm"));
  EP_CUDA(cudaSetDevice(device));
  EP_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  trefoil_result_t result =
      cudaMalloc(&memory, n) == cudaSuccess
          ? broadcastOn(comm, memory, bytes, n, stream)
          : epFail(TREFOIL_SYSTEM_ERROR, "ncclEpCreateGroup: no memory for %zu bytes on the GPU",
                   n);
  cudaFree(memory);
  cudaStreamDestroy(stream);
  return result;
}

/* NCCL tells a window's address, not its length nor its flags: what lies past its end is the caller's. */
trefoil_result_t epGpuFindWindow(ncclEpGroup_t group, ncclWindow_t window, ep_window_t *out) {
  void *base = NULL;
  ncclResult_t result = ncclWinGetUserPtr(group->comm, window, &base);
  EP_CHECK(result == ncclSuccess && base, TREFOIL_INVALID_ARGUMENT,
           "win_hdl %p is not a window of the group's communicator", (void *)window);
  *out = (ep_window_t){.base = base, .bytes = SIZE_MAX, .symmetric = 1};
  return TREFOIL_OK;
}

int epGpuReaches(ncclWindow_t window, int numRanks, char **peers) {
  for (int r = 0; r < numRanks; r++) {
    void *p = NULL;
    if (ncclGetPeerDevicePointer(window, 0, r, &p) != ncclSuccess || !p) return 0;
    peers[r] = p;
  }
  return 1;
}

int epGpuIsAtOneDistance(const ep_gpu_group_t *g, ncclWindow_t window, int64_t *distance) {
  char *starts[EP_KERNEL_MAX_RANKS] = {NULL};
  if (!window || !epGpuReaches(window, g->R, starts)) return 0;
  *distance = (int64_t)((uintptr_t)starts[g->me] - (uintptr_t)g->ll.peers[g->me]);
  for (int r = 0; r < g->R; r++) {
    if ((int64_t)((uintptr_t)starts[r] - (uintptr_t)g->ll.peers[r]) != *distance) return 0;
  }
  return 1;
}

trefoil_result_t epGpuPeers(ncclEpGroup_t group, const ep_gpu_arena_t *a, char **peers) {
  int perNode = group->ranksPerNode, me = group->rank;
  for (int r = 0; r < group->numRanks; r++) {
    void *p = NULL;
    if (r / perNode != me / perNode && epIsHt(group)) {
      peers[r] = NULL;
      continue;
    }
    if (r / perNode != me / perNode) {
      peers[r] = a->mirrors;
      continue;
    }
    EP_TRY(epGpuNccl(group->comm, ncclGetPeerDevicePointer(a->window, 0, r, &p),
                     "ncclEpInitHandle: ncclGetPeerDevicePointer"));
    EP_CHECK(p, TREFOIL_INVALID_USAGE,
             "ncclEpInitHandle: rank %d's memory cannot be reached from rank %d, which is in the "
             "same NVLink domain by NCCL's properties",
             r, me);
    peers[r] = p;
  }
  return TREFOIL_OK;
}
