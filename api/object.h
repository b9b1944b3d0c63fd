/* Groups, handles and the registry that knows which are alive. */
#ifndef TREFOIL_API_OBJECT_H
#define TREFOIL_API_OBJECT_H

#include <stdatomic.h>

#include "api/backend.h"
#include "plan/error.h"
#include "plan/preflight.h"

/* A queued operation's failure, kept until a call returns it. */
typedef enum ep_deferred_error {
  EP_DEFERRED_NONE = 0,
  EP_DEFERRED_FLAG = 1, /* a rank was masked: the async error only, calls go on */
  EP_DEFERRED_STICKY =
      2,                /* calls fail with the sentence until ErrorClear (LL without masks: once) */
  EP_DEFERRED_FATAL = 3 /* the group is lost: a rank is gone or late */
} ep_deferred_error_t;

struct ncclEpGroup {
  ncclComm_t comm;
  int rank, numRanks, ranksPerNode;
  ncclEpGroupConfig_t config; /* the caller's, newer fields zeroed */
  ep_group_limits_t limits;
  uint64_t timeoutNs;
  int llPartial; /* NCCL_EP_LL_COMBINE=partial */
  int llRails;   /* NCCL_EP_LL_DISPATCH=rails, and no masks */
  int debug;
  int checkTensors; /* of every call: where its tensors lie */
  int device;       /* with checkTensors: the communicator's */
  void *state;      /* the backend's */
  int numHandles;
  struct ncclEpHandle *handles;
  int numPending;         /* send_only operations not completed */
  size_t allocated[2][3]; /* bytes asked for, [of handle][memory]: equals the sizing table */
  /* written by queued operations, read by calls */
  _Atomic int asyncError; /* what ncclEpGetAsyncError tells */
  _Atomic int deferred;   /* ep_deferred_error_t */
  _Atomic int deferredLock;
  trefoil_result_t deferredCode;
  char deferredText[400];
};
_Static_assert(sizeof(struct ncclEpGroup) <= EP_GROUP_OBJECT_BYTES, "EP_GROUP_OBJECT_BYTES");

typedef enum ep_pending { EP_PENDING_NONE, EP_PENDING_DISPATCH, EP_PENDING_COMBINE } ep_pending_t;

struct ncclEpHandle {
  ncclEpGroup_t group;
  trefoil_mode_t mode;
  size_t alignment;
  int topk;      /* -1: taken from each Update */
  int topkBound; /* buffers are made for this many */
  ep_sizing_t sizing;
  void *handleMem;
  int ownsMem;
  void *state;               /* the backend's */
  ep_routed_t routed;        /* by the last Update on its memory, whichever handle's */
  struct ncclEpHandle *next; /* of the group */
  ep_pending_t pending;
  const void *routing; /* LL: topk_idx of the last Update, which operations read */
  size_t routingBytes;
  int isDispatched; /* since the last Update */
};

/* Registry of live objects, so that a stale pointer is told from a live one without touching it. */
typedef enum ep_object_kind {
  EP_OBJECT_GROUP = 1,
  EP_OBJECT_HANDLE,
  EP_OBJECT_TENSOR,
  EP_OBJECT_GRAD
} ep_object_kind_t;
trefoil_result_t epRegister(const void *object, ep_object_kind_t kind);
int epUnregister(const void *object, ep_object_kind_t kind); /* 1: it was there */
int epIsLive(const void *object, ep_object_kind_t kind);

/* Live, and of this kind; else a sentence. */
trefoil_result_t epCheckGroup(ncclEpGroup_t group, const char *function);
trefoil_result_t epCheckHandle(ncclEpHandle_t handle, const char *function);
/* The handle's memory holds a routing that this handle can use. */
trefoil_result_t epCheckRouted(ncclEpHandle_t handle, const char *function, cudaStream_t stream);
/* Fails with the recorded sentence if a queued operation failed before, or if the communicator went. */
trefoil_result_t epCheckDeferred(ncclEpGroup_t group);

/* For queued operations, any thread: records the first failure (a FATAL replaces lesser ones) and
 * sets the async error. */
void epReport(ncclEpGroup_t group, ep_deferred_error_t error, trefoil_result_t code,
              const char *format, ...) __attribute__((format(printf, 4, 5)));
void epClearDeferred(ncclEpGroup_t group);

/* Memory by the sizing table: counted in group->allocated; device memory by the caller's
 * allocator if there is one. Zeroed if host. */
trefoil_result_t epAllocBuffer(ncclEpGroup_t group, const ep_buffer_t *buffer, void **out);
void epFreeBuffer(ncclEpGroup_t group, const ep_buffer_t *buffer, void *memory);

/* Copies a versioned struct: min(size, known) bytes into a zeroed `out`. NULL, wrong magic or a
 * size below v1 fail with the struct's name. */
typedef struct ep_struct_type {
  const char *name;
  size_t v1Bytes, bytes;
} ep_struct_type_t;
trefoil_result_t epCopyStruct(void *out, const void *in, const ep_struct_type_t *type);
#define EP_STRUCT(type, v1) (&(const ep_struct_type_t){#type, (v1), sizeof(type)})

/* The memory that the tensors of one call take (tensor_range.c). */
typedef struct ep_extent {
  const char *name;
  uintptr_t first, end;
  int written;
} ep_extent_t;
typedef struct ep_ranges {
  ncclEpGroup_t group;
  const char *function;
  int count;
  ep_extent_t extents[12];
} ep_ranges_t;
static inline void epRangesBegin(ep_ranges_t *ranges, ncclEpGroup_t group, const char *function) {
  ranges->group = group;
  ranges->function = function;
  ranges->count = 0;
}
/* In a group that checks tensors: all of it lies in one live allocation that the device reads and writes,
 * and what is written overlaps nothing else of the call. */
trefoil_result_t epRangeCheck(ep_ranges_t *ranges, const char *name, const void *data, size_t bytes,
                              int written);
/* What operations use besides the call's tensors: a caller's handle_mem, and in LL also topk_idx. */
trefoil_result_t epRangeCheckMemory(ep_ranges_t *ranges, ncclEpHandle_t handle);
trefoil_result_t epRangeCheckHandle(ep_ranges_t *ranges, ncclEpHandle_t handle);

/* Rules of one tensor: rank, types, sizes. */
typedef struct ep_tensor_rule {
  const char *name; /* "inputs->tokens" */
  unsigned ndim;
  size_t sizes[4];  /* EP_ANY: any; else must be equal, or at least with `atLeast` */
  int atLeast;      /* the first dimension may be larger */
  int written;      /* the call writes it */
  size_t alignment; /* of data (and of win_offset); 0: that of the element */
  unsigned dtypes;  /* bit set of 1 << ncclDataType_t */
} ep_tensor_rule_t;
#define EP_ANY        SIZE_MAX
#define EP_DTYPE(d)   (1u << (unsigned)(d))
#define EP_DTYPES_SUM (EP_DTYPE(ncclFloat32) | EP_DTYPE(ncclFloat16) | EP_DTYPE(ncclBfloat16))

trefoil_result_t epViewTensor(ep_ranges_t *call, const ncclEpTensor_t *tensor,
                              const ep_tensor_rule_t *rule, ep_view_t *view);
/* The tensor must be NULL: `why` completes "inputs->scales must be NULL: <why>". */
trefoil_result_t epCheckAbsent(const ncclEpTensor_t *tensor, const char *name, const char *why);
/* An optional 1-D counter of at least `least` elements. */
trefoil_result_t epViewCounter(ep_ranges_t *call, const ncclEpTensor_t *tensor, const char *name,
                               size_t least, unsigned dtypes, ep_counter_t *out);

/* A group's settings as all ranks must have them (settings.c). */
typedef struct ep_settings {
  uint64_t values[20];
} ep_settings_t;
void epSettingsOf(const struct ncclEpGroup *group, ep_settings_t *out);
/* Compares all ranks'; the first difference names field, ranks and both values. */
trefoil_result_t epSettingsCompare(const ep_settings_t *all, int numRanks);

void epLog(ncclEpGroup_t group, const char *format, ...) __attribute__((format(printf, 2, 3)));

static inline int epIsHt(const struct ncclEpGroup *group) {
  return group->limits.algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT;
}

#endif
