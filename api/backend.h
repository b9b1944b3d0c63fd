/* What a library has to bring: one table of operations. The checks in this folder come before every
 * call, so a backend may rely on them: handles are live, tensors have the right rank, sizes, types
 * and addresses, no operation is out of order. What only the device can see (ids out of range, a
 * count over max_recv, a rank that never comes) a backend reports through epReport.
 *
 * Objects have a part of this folder's (object.h) and a part of the backend's behind `state`.
 * Every function returns a result with its sentence recorded (plan/error.h). */
#ifndef TREFOIL_API_BACKEND_H
#define TREFOIL_API_BACKEND_H

#include "nccl_ep.h"

#include "plan/sizing.h"
#include "trefoil/a2sgd.h"
#include "trefoil/device.h"

/* A tensor as the backend needs it. */
typedef struct ep_view {
  void *data;
  unsigned ndim;
  ncclDataType_t dtype;
  size_t sizes[4];
  int64_t rows;    /* product of all dimensions but the last */
  size_t rowBytes; /* bytes of the last dimension */
  int windowed;    /* win_hdl was given */
} ep_view_t;

/* A counter tensor of either integer type; data NULL: not wanted. */
typedef struct ep_counter {
  void *data;
  int is64;
} ep_counter_t;

/* The routing that a handle's memory holds, as far as calls know. */
typedef struct ep_routed {
  int topk; /* 0: none */
  trefoil_mode_t mode;
  size_t alignment;
  int64_t numTokens; /* this rank's */
} ep_routed_t;

/* This rank's memory behind a window. */
typedef struct ep_window {
  char *base;
  size_t bytes;
  int symmetric; /* registered with NCCL_WIN_COLL_SYMMETRIC */
} ep_window_t;

/* The memory that an address lies in. */
typedef enum ep_place_kind {
  EP_PLACE_NONE, /* none that the runtime knows */
  EP_PLACE_FREED,
  EP_PLACE_DEVICE,
  EP_PLACE_MANAGED,
  EP_PLACE_PINNED,
  EP_PLACE_PEER, /* another process's */
  EP_PLACE_APART /* host memory that the device has at another address */
} ep_place_kind_t;
typedef struct ep_place {
  ep_place_kind_t kind;
  int device;
  uintptr_t base; /* of the allocation */
  size_t bytes;   /* of the allocation */
} ep_place_t;

typedef enum ep_quant {
  EP_QUANT_NONE = 0,
  EP_QUANT_CALLER = 1, /* tokens and scales travel side by side */
  EP_QUANT_E4M3 = 2,   /* LL dispatch */
  EP_QUANT_NVFP4 = 3   /* LL combine */
} ep_quant_t;

typedef struct ep_update_call {
  const void *topkIdx; /* [B, K] */
  int is64;
  int64_t numTokens;                                 /* B */
  int topk;                                          /* K */
  ep_counter_t expertCounters, expertOffsets, total; /* HT */
} ep_update_call_t;

typedef struct ep_dispatch_call {
  int64_t numTokens; /* B */
  int topk;          /* K of all weights and ids here; 0: there are none */
  int backward, sendOnly, roundScales, globalIds;
  ep_quant_t quant;
  trefoil_dtype_t dtype;         /* of inputs->tokens */
  size_t tokenBytes, scaleBytes; /* of one row as it travels */
  size_t inputRowBytes;          /* of one row of inputs->tokens */
  int64_t width;                 /* elements of an input row */
  const void *tokens, *scales;
  ncclWindow_t tokensWindow, scalesWindow; /* NULL: in none */
  uint64_t tokensOffset, scalesOffset;     /* in their windows */
  int hasWeights;       /* LL rank-major, HT forward: weights (NULL if B = 0) and out.weights */
  const float *weights; /* [B, K] */
  struct {
    void *tokens, *scales;
    float *weights;
    void *idx;                               /* LL rank-major int32, HT flat int64 */
    int64_t rows;                            /* of tokens */
    int64_t topkRows;                        /* of weights and idx */
    ncclWindow_t tokensWindow, scalesWindow; /* NULL: in none */
    uint64_t tokensOffset, scalesOffset;     /* in their windows */
  } out;
  ep_counter_t expertCounters, srcRankCounters; /* LL */
} ep_dispatch_call_t;

typedef struct ep_combine_call {
  int64_t numTokens; /* B */
  int topk;          /* K of all weights here; 0: there are none */
  int backward, sendOnly;
  ep_quant_t quant;
  trefoil_dtype_t dtype;
  int64_t width; /* elements of a row */
  const void *tokens;
  ncclWindow_t tokensWindow; /* NULL: in none */
  uint64_t tokensOffset;     /* in it */
  int64_t rows;              /* of tokens */
  const float *slotWeights;  /* HT backward */
  int64_t slotWeightRows;    /* */
  const float *slotScales;   /* NVFP4: [slots] */
  void *out;                 /* [B, width] */
  const float *weights;      /* LL expert-major: [B, K] */
  float *outWeights;         /* HT backward: [B, K] */
} ep_combine_call_t;

struct ep_grad_loss;
typedef struct ep_backend {
  int kind; /* ep_backend_kind_t */
  const char *name;
  int combineNvfp4; /* NVFP4 combine is there */
  trefoil_result_t (*sizing)(const ep_sizing_config_t *config, ep_sizing_t *out);
  trefoil_result_t (*topology)(ncclComm_t comm, int *rank, int *numRanks, int *ranksPerNode);
  /* Around a collective call (group, handle): it begins on this rank; it has failed, so that ranks
   * that wait for this one in the same call get the reason. Of no consequence if comm is not live. */
  void (*callBegin)(ncclComm_t comm);
  void (*callFail)(ncclComm_t comm, trefoil_result_t code, const char *why);
  /* Fails if the group's communicator is no longer the one that it was made on. */
  trefoil_result_t (*checkComm)(ncclEpGroup_t group);
  /* Collective. The group's config, comm, rank are set; compares settings, makes shared state. */
  trefoil_result_t (*groupCreate)(ncclEpGroup_t group);
  trefoil_result_t (*groupDestroy)(ncclEpGroup_t group);
  /* The handle's mode, sizing and handleMem are set; may be collective. */
  trefoil_result_t (*handleCreate)(ncclEpHandle_t handle);
  trefoil_result_t (*handleDestroy)(ncclEpHandle_t handle);
  /* Any handle may come: one that is no window of the group's communicator is refused. */
  trefoil_result_t (*findWindow)(ncclEpGroup_t group, ncclWindow_t window, ep_window_t *out);
  void (*findPlace)(const void *ptr, ep_place_t *out);
  trefoil_result_t (*update)(ncclEpHandle_t handle, const ep_update_call_t *call,
                             cudaStream_t stream);
  trefoil_result_t (*dispatch)(ncclEpHandle_t handle, const ep_dispatch_call_t *call,
                               cudaStream_t stream);
  trefoil_result_t (*combine)(ncclEpHandle_t handle, const ep_combine_call_t *call,
                              cudaStream_t stream);
  trefoil_result_t (*complete)(ncclEpHandle_t handle, cudaStream_t stream);
  /* HT, a caller's handle_mem that no Update of a live handle is known for: what it holds when the
   * stream's work is done (under capture: now). topk stays 0 if that is no routing of such a group. */
  trefoil_result_t (*readRouted)(ncclEpHandle_t handle, cudaStream_t stream, ep_routed_t *out);
  /* Eager sizing: waits for the handle's last Update and tells the true count; rows of topk
   * tensors follow from it. TREFOIL_INVALID_USAGE under capture. */
  trefoil_result_t (*receivedCount)(ncclEpHandle_t handle, cudaStream_t stream, int64_t *count);
  trefoil_result_t (*maskQuery)(ncclEpGroup_t group, int *deviceMask, cudaStream_t stream);
  trefoil_result_t (*maskUpdate)(ncclEpGroup_t group, const int *hostMask, cudaStream_t stream);
  trefoil_result_t (*maskClean)(ncclEpGroup_t group, cudaStream_t stream);
  /* May be NULL. Looks for failures that no epReport has returned yet; ErrorClear was called. */
  void (*poll)(ncclEpGroup_t group);
  void (*errorCleared)(ncclEpGroup_t group);
  /* A2SGD (trefoil/a2sgd.h): objects of gradBytes, whose beginning (grad_object.h) is filled but for the
   * ranks. Open is collective, with a hash of what must be equal; Close too, and keeps from Release what
   * others may still use. Lost: without masks a step waited in vain. */
  size_t (*gradBytes)(void);
  trefoil_result_t (*gradSizes)(const trefoil_grad_config_t *c, int numSms, size_t *exchangeBytes,
                                size_t *scratchBytes);
  trefoil_result_t (*gradOpen)(struct trefoil_grad_gpu *g, const trefoil_grad_config_t *c,
                               const trefoil_grad_gpu_options_t *o, uint64_t hash);
  trefoil_result_t (*gradStep)(struct trefoil_grad_gpu *g, const void *grad, void *update,
                               cudaStream_t stream);
  /* Where period divides the steps made when it runs; 0: in any case. */
  trefoil_result_t (*gradSync)(struct trefoil_grad_gpu *g, int64_t period, void *params,
                               cudaStream_t stream);
  int (*gradLost)(const struct trefoil_grad_gpu *g, struct ep_grad_loss *loss);
  trefoil_result_t (*gradGetMask)(struct trefoil_grad_gpu *g, int *active, cudaStream_t stream);
  trefoil_result_t (*gradSetMask)(struct trefoil_grad_gpu *g, const int *active,
                                  cudaStream_t stream);
  void (*gradClose)(struct trefoil_grad_gpu *g);
  void (*gradRelease)(struct trefoil_grad_gpu *g);
  /* trefoil/device.h; NULL: not in this library. */
  trefoil_result_t (*countBytes)(ncclEpGroup_t group, int on);
  trefoil_result_t (*readBytes)(ncclEpGroup_t group, int kind, uint64_t *bytes, int reset,
                                cudaStream_t stream);
  trefoil_result_t (*readPuts)(ncclEpGroup_t group, int kind, uint64_t *puts, cudaStream_t stream);
  trefoil_result_t (*keepTimes)(ncclEpGroup_t group, unsigned maxLaunches);
  trefoil_result_t (*readTimes)(ncclEpGroup_t group, ncclEpKernelTime_t *times, unsigned *count,
                                cudaStream_t stream);
} ep_backend_t;

/* The library's one backend: defined once per library. */
extern const ep_backend_t epBackend;

#endif
