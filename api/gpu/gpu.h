/* The GPU library: NCCL gives ranks and windows, kernels/ll/ll.h carries the bytes.
 *
 * Memory. A group's exchange memory is one window (ncclMemAlloc, ncclCommWindowRegister with flag 0), made
 * together with the first handle, because top-k decides its size, and made anew if a later handle needs
 * more. Peers' addresses come from ncclGetLsaDevicePointer. Control memory is this rank's own. Both
 * layouts of low latency share all of it: operations are numbered per kind, not per layout.
 *
 * Launches. An operation's parameter struct is the group's (ep_ll_group_t, kept ready), the handle's and
 * the call's. Nothing is allocated, copied or waited for at a call. A handle keeps the last whole operation
 * of each kind as it was launched; the next one of the same sizes only gets its addresses.
 *
 * Two launches that wait must not keep each other off the GPU: a dispatch takes all SMs, and a combine on
 * another stream would wait for them while the peer has it the other way round. So launches of a group run
 * in the order of the calls, also across streams (gpu_launch.c), unless max_num_sms leaves room for two.
 *
 * Failures. What waits find goes to a record in host memory; calls look at it (gpu_watch.c). */
#ifndef TREFOIL_API_GPU_GPU_H
#define TREFOIL_API_GPU_GPU_H

#include "api/gpu/gpu_device.h"
#include "api/gpu/gpu_sizing.h"
#include "api/hang_record.h"
#include "api/object.h"
#include "kernels/ht/ht_far.h"
#include "kernels/ll/relay.h"

/* Blocks of a high-throughput dispatch or combine by default: the fewest within 3 % of the best time that was
 * measured (docs/results.md); expert-major with more than two ranks: by the link. */
#define EP_GPU_HT_SMS             28
#define EP_GPU_HT_SMS_WINDOW      16 /* flat, tensors in windows */
#define EP_GPU_HT_SMS_EXPERT_PAIR 64
#define EP_GPU_HT_SMS_LINK        32
#define EP_GPU_HT_SMS_DOMAINS     40

/* An operation to launch: its kind, ep_ll_kind_t or EP_HT_KIND_*, and the struct of that kind. */
typedef struct ep_gpu_op {
  unsigned kind;
  union {
    ep_ll_dispatch_t *llDispatch;
    ep_ll_combine_t *llCombine;
    ep_ht_update_t *htUpdate;
    ep_ht_dispatch_t *htDispatch;
    ep_ht_combine_t *htCombine;
  };
} ep_gpu_op_t;

/* The window of one size; older ones stay while captured launches may use them. */
typedef struct ep_gpu_arena {
  ep_sizing_config_t config;
  ep_buffer_t exchange, scratchBuffer;
  ep_buffer_t messages, mirrorBuffer; /* several domains, gpu_far.c; else of 0 bytes */
  char *memory;                       /* exchange, then messages */
  ncclWindow_t window;
  void *scratch, *mirrors;
} ep_gpu_arena_t;
#define EP_GPU_MAX_ARENAS 4

typedef struct ep_gpu_launch_record {
  int kind, parts;
} ep_gpu_launch_record_t;

/* Kernel times that are kept (gpu_count.c). */
typedef struct ep_gpu_times {
  uint64_t *stamps; /* on the device: [maxLaunches][numSms][2] */
  ep_gpu_launch_record_t *launches;
  unsigned maxLaunches;
  uint64_t numLaunches, numRead;
} ep_gpu_times_t;

struct ep_rendezvous;
struct ep_gpu_hang;
struct ep_gpu_far;

#define EP_GPU_COUNTS   64                    /* bits of countsTaken */
#define EP_GPU_HT_MAGIC 0x5448504545435254ull /* in front of a routing in handle_mem */

typedef struct ep_gpu_group {
  struct ncclEpGroup *group;
  int device, R, me;
  uint64_t id; /* the same on all ranks, another for each group of the communicator */
  int multiProcessors, ranksOnGpu; /* of this group, this rank too */
  int relayBlocks;                 /* of a launch */
  int isHt;
  ep_ll_group_t ll; /* as launches get it; stamps are set per launch. In high throughput only */
  ep_ht_group_t ht; /* what both have: sizes, control, mask, record, peers; and this is passed */
  uint64_t version; /* counts changes of `ll`, from 1 */
  struct ep_rendezvous *rendezvous;
  struct ep_gpu_far *far; /* NULL: one NVLink domain */
  char *control;          /* EP_GPU_CONTROL_BYTES */
  ep_wait_record_t *record;
  ep_ht_status_t *status, *statusOnDevice; /* in the same page */
  ep_ht_status_t statusSeen;
  volatile int64_t *counts; /* there, too: EP_GPU_COUNTS rows that arrive, of a handle each */
  int64_t *countsOnDevice;
  uint64_t countsTaken;     /* bits */
  struct ep_gpu_hang *hang; /* NULL: no file */
  uint64_t *finished;       /* with a file: on the device, [kind] operations finished */
  uint32_t gaveUpSeen;
  ep_gpu_arena_t arenas[EP_GPU_MAX_ARENAS];
  int numArenas;   /* the last one is in use */
  int captured;    /* a launch was captured, */
  int capturedTwo; /* while another one's receive was pending */
  int counted;     /* bytes were counted at some time */
  ep_gpu_times_t times;
  /* order of launches across streams */
  int fitsTwice; /* two launches fit on the GPU together */
  int hasLast;
  cudaStream_t lastStream;
  unsigned long long lastCapture;
  cudaStream_t aside;   /* what is no launch: captures do not see it */
  cudaEvent_t tail[2];  /* of launches outside and in captures */
  cudaEvent_t early[2]; /* likewise, for a Complete after an early receive */
  uint64_t numSends;
} ep_gpu_group_t;
_Static_assert(sizeof(struct ncclEpGroup) + 64 + sizeof(ep_gpu_group_t) <= EP_GROUP_OBJECT_BYTES,
               "EP_GROUP_OBJECT_BYTES");

typedef struct ep_gpu_handle {
  struct ncclEpHandle *handle;
  ep_gpu_group_t *g;
  ep_ll_handle_t ll;
  ep_ll_ready_t ready[2];   /* [kind]: the last whole operation, */
  uint64_t readyVersion[2]; /* launched with this version of the group */
  union {
    ep_ll_dispatch_t dispatch;
    ep_ll_combine_t combine;
  } pendingOp;
  int pendingKind; /* ep_ll_kind_t of a send without its receive, -1: none */
  uint64_t pendingNo;
  unsigned long long pendingCapture;
  /* high throughput */
  char *htHead, *htMemory; /* in handle_mem */
  cudaEvent_t updated;     /* eager sizing: after the last Update that was not captured */
  int hasUpdated;
  int countAt;              /* 1 + index in the group's counts, 0: none */
  int countElsewhere;       /* an Update stored its count where the caller wanted it */
  int receivedEarly;        /* by a younger operation of its kind, */
  cudaStream_t earlyStream; /* on this stream */
} ep_gpu_handle_t;
_Static_assert(sizeof(struct ncclEpHandle) + 64 + sizeof(ep_gpu_handle_t) <=
                   EP_GPU_HANDLE_OBJECT_BYTES,
               "EP_GPU_HANDLE_OBJECT_BYTES");

static inline ep_gpu_group_t *epGpu(struct ncclEpGroup *g) {
  return g->state;
}

/* TREFOIL_SYSTEM_ERROR with the call's name. */
#define EP_CUDA(call)                                                                              \
  do {                                                                                             \
    cudaError_t epCudaError = (call);                                                              \
    EP_CHECK(epCudaError == cudaSuccess, TREFOIL_SYSTEM_ERROR, "%s: %s", #call,                    \
             cudaGetErrorString(epCudaError));                                                     \
  } while (0)

/* ---- gpu_sizing.c ---- */
trefoil_result_t epGpuSizing(const ep_sizing_config_t *config, ep_sizing_t *out);

/* ---- gpu_comm.c ---- */
trefoil_result_t epGpuTopology(ncclComm_t comm, int *rank, int *numRanks, int *ranksPerNode);
/* The same for another call, whose name its sentences begin with. */
trefoil_result_t epGpuRanks(ncclComm_t comm, const char *call, int *rank, int *numRanks,
                            int *ranksPerNode);
/* 0: the communicator does not tell. */
uint64_t epGpuCommHash(ncclComm_t comm);
int epGpuCommDomains(ncclComm_t comm); /* NVLink domains */
/* Rank 0's bytes to all ranks, by NCCL: waits for all of them, without a limit, so it has a thread of its
 * own. On the communicator's device, whatever the thread's current one. */
trefoil_result_t epGpuBroadcast(ncclComm_t comm, void *bytes, size_t n);
trefoil_result_t epGpuFindWindow(ncclEpGroup_t group, ncclWindow_t window, ep_window_t *out);
/* Every rank's address of the start of a window of ours; of a far rank the mirrors, in high throughput
 * NULL. */
trefoil_result_t epGpuPeers(ncclEpGroup_t group, const ep_gpu_arena_t *a, char **peers);
/* The same of a window of the caller's; 0: some rank's cannot be reached. */
int epGpuReaches(ncclWindow_t window, int numRanks, char **peers);
/* Whether a window of the caller's (NULL: none) lies as far from the exchange memory on every rank, seen
 * from here, as on this one; and how far. Asked at every call, as in gpu_ht.c. */
int epGpuIsAtOneDistance(const ep_gpu_group_t *g, ncclWindow_t window, int64_t *distance);
trefoil_result_t epGpuNccl(ncclComm_t comm, ncclResult_t result, const char *what);

/* ---- gpu_place.c ---- */
void epGpuFindPlace(const void *ptr, ep_place_t *out);

/* ---- gpu_group.c ---- */
trefoil_result_t epGpuGroupCreate(ncclEpGroup_t group);
trefoil_result_t epGpuGroupDestroy(ncclEpGroup_t group);
trefoil_result_t epGpuCheckComm(ncclEpGroup_t group);
/* Makes the group's GPU the current one, and back: pass what the first returned. */
trefoil_result_t epGpuEnter(const ep_gpu_group_t *g, int *before);
void epGpuLeave(const ep_gpu_group_t *g, int before);

/* ---- gpu_arena.c ---- */
/* Collective if the window has to be made. */
trefoil_result_t epGpuArenaEnsure(ep_gpu_group_t *g, const ep_sizing_t *sizing);
void epGpuArenaFree(ep_gpu_group_t *g, ep_gpu_arena_t *a);

/* ---- gpu_far.c: several NVLink domains ---- */
/* This rank's part; nothing in one domain. */
trefoil_result_t epGpuFarOpen(ep_gpu_group_t *g, const ep_sizing_t *sizing,
                              uint64_t firstOperation);
void epGpuFarClose(ep_gpu_group_t *g);
/* Blocks of a launch that the relay takes: 0 in one domain. `most`: that a launch may have. */
int epGpuFarBlocks(const ep_gpu_group_t *g, int most);
/* Collective, after a window's registration: the device communicator, once; and its end. */
trefoil_result_t epGpuFarJoin(ep_gpu_group_t *g);
/* That call failed and is still under way: nothing may be done on the communicator. */
int epGpuFarIsGivenUp(const ep_gpu_group_t *g);
void epGpuFarLeave(ep_gpu_group_t *g);
/* Waits until no put of this rank is under way: before a window goes, while no operation runs. */
trefoil_result_t epGpuFarDrain(ep_gpu_group_t *g, uint64_t timeoutNs, const char *call);
/* Nothing is under way on any rank: what follows goes through new memory. */
trefoil_result_t epGpuFarSettle(ep_gpu_group_t *g);
/* Launches use this window from now on. */
void epGpuFarUse(ep_gpu_group_t *g, const ep_gpu_arena_t *a);
/* Puts to each rank so far, on the device; NULL: one domain. */
const uint64_t *epGpuFarPosted(const ep_gpu_group_t *g);
/* As epLlPrepare* and epLlLaunch, with a relay in the launch. */
trefoil_result_t epGpuFarPrepare(ep_gpu_op_t op, unsigned parts, ep_ll_ready_t *out);
trefoil_result_t epGpuFarLaunch(const ep_gpu_group_t *g, unsigned kind, const ep_ll_ready_t *ready,
                                cudaStream_t stream);
/* As epHtUpdate, epHtDispatch, epHtCombine. */
trefoil_result_t epGpuFarLaunchHt(const ep_gpu_group_t *g, ep_gpu_op_t op, cudaStream_t stream);

/* ---- gpu_handle.c ---- */
trefoil_result_t epGpuHandleCreate(ncclEpHandle_t handle);
trefoil_result_t epGpuHandleDestroy(ncclEpHandle_t handle);
trefoil_result_t epGpuUpdate(ncclEpHandle_t handle, const ep_update_call_t *call,
                             cudaStream_t stream);
trefoil_result_t epGpuDispatch(ncclEpHandle_t handle, const ep_dispatch_call_t *call,
                               cudaStream_t stream);
trefoil_result_t epGpuCombine(ncclEpHandle_t handle, const ep_combine_call_t *call,
                              cudaStream_t stream);
trefoil_result_t epGpuComplete(ncclEpHandle_t handle, cudaStream_t stream);

/* ---- gpu_stage.c ---- */
/* Copies the rows of a dispatch that lie in no window to where peers read them, if it is such a one. */
trefoil_result_t epGpuHtStage(const ep_ht_dispatch_t *op, cudaStream_t stream);

/* ---- gpu_ht.c ---- */
trefoil_result_t epGpuHtHandleCreate(ep_gpu_handle_t *h);
void epGpuHtHandleDestroy(ep_gpu_handle_t *h);
trefoil_result_t epGpuHtUpdate(ep_gpu_handle_t *h, const ep_update_call_t *call,
                               cudaStream_t stream);
trefoil_result_t epGpuHtDispatch(ep_gpu_handle_t *h, const ep_dispatch_call_t *call,
                                 cudaStream_t stream);
trefoil_result_t epGpuHtCombine(ep_gpu_handle_t *h, const ep_combine_call_t *call,
                                cudaStream_t stream);

/* ---- gpu_eager.c ---- */
/* A word of the group's for the rows that arrive, if one is free and the handle may use it. */
void epGpuCountTake(ep_gpu_handle_t *h);
void epGpuCountLeave(ep_gpu_handle_t *h);
/* Where an Update counts the rows that arrive: where the caller asked, else in that word, if any. */
ep_counter_t epGpuCountInto(ep_gpu_handle_t *h, ep_counter_t asked);
trefoil_result_t epGpuReadRouted(ncclEpHandle_t handle, cudaStream_t stream, ep_routed_t *out);
trefoil_result_t epGpuReceivedCount(ncclEpHandle_t handle, cudaStream_t stream, int64_t *count);

/* ---- gpu_launch.c ---- */
/* 0: not capturing. */
trefoil_result_t epGpuCapture(cudaStream_t stream, unsigned long long *capture);
/* Launches h's operation after the group's launches before it. Low latency: the operation's group is filled
 * here, if it is needed. parts: of EP_LL_SEND and EP_LL_RECV; EP_GPU_WHOLE in high throughput. */
#define EP_GPU_WHOLE EP_LL_BOTH
trefoil_result_t epGpuLaunch(ep_gpu_handle_t *h, ep_gpu_op_t op, unsigned parts,
                             cudaStream_t stream);

/* What is queued on `stream` from now on comes after what is queued on `before`. */
trefoil_result_t epGpuAfter(ep_gpu_group_t *g, cudaStream_t before, cudaStream_t stream);

/* ---- gpu_watch.c ---- */
trefoil_result_t epGpuWatchOpen(ep_gpu_group_t *g);
void epGpuWatchClose(ep_gpu_group_t *g);
void epGpuPoll(ncclEpGroup_t group);
void epGpuErrorCleared(ncclEpGroup_t group);

/* ---- gpu_mask.c ---- */
trefoil_result_t epGpuMaskQuery(ncclEpGroup_t group, int *deviceMask, cudaStream_t stream);
trefoil_result_t epGpuMaskUpdate(ncclEpGroup_t group, const int *hostMask, cudaStream_t stream);
trefoil_result_t epGpuMaskClean(ncclEpGroup_t group, cudaStream_t stream);

/* ---- gpu_count.c ---- */
trefoil_result_t epGpuCountBytes(ncclEpGroup_t group, int on);
trefoil_result_t epGpuReadBytes(ncclEpGroup_t group, int kind, uint64_t *bytes, int reset,
                                cudaStream_t stream);
trefoil_result_t epGpuReadPuts(ncclEpGroup_t group, int kind, uint64_t *puts, cudaStream_t stream);
trefoil_result_t epGpuKeepTimes(ncclEpGroup_t group, unsigned maxLaunches);
trefoil_result_t epGpuReadTimes(ncclEpGroup_t group, ncclEpKernelTime_t *times, unsigned *count,
                                cudaStream_t stream);
/* Where this launch's blocks leave their times; NULL: not kept. */
uint64_t *epGpuStampsFor(ep_gpu_group_t *g, unsigned kind, unsigned parts);

/* ---- gpu_grad.c ---- */
size_t epGpuGradBytes(void);
trefoil_result_t epGpuGradSizes(const trefoil_grad_config_t *c, int numSms, size_t *exchangeBytes,
                                size_t *scratchBytes);
trefoil_result_t epGpuGradOpen(struct trefoil_grad_gpu *g, const trefoil_grad_config_t *c,
                               const trefoil_grad_gpu_options_t *o, uint64_t hash);
trefoil_result_t epGpuGradStep(struct trefoil_grad_gpu *g, const void *grad, void *update,
                               cudaStream_t stream);
trefoil_result_t epGpuGradSync(struct trefoil_grad_gpu *g, int64_t period, void *params,
                               cudaStream_t stream);
int epGpuGradLost(const struct trefoil_grad_gpu *g, struct ep_grad_loss *loss);
trefoil_result_t epGpuGradGetMask(struct trefoil_grad_gpu *g, int *active, cudaStream_t stream);
trefoil_result_t epGpuGradSetMask(struct trefoil_grad_gpu *g, const int *active,
                                  cudaStream_t stream);
void epGpuGradClose(struct trefoil_grad_gpu *g);
void epGpuGradRelease(struct trefoil_grad_gpu *g);

#endif
