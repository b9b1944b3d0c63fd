/* NCCL EP: expert-parallel dispatch and combine for Mixture-of-Experts. C99 and C++, 64-bit Linux.
 *
 * This header is Trefoil's own text for NVIDIA's NCCL EP interface: names, enum values, struct
 * layouts and meanings are those of NCCL EP 0.2, so that a program compiled against NVIDIA's header
 * runs on our libnccl_ep.so.0 (GPUs) or on libnccl_ep_cpu.so.0 with libtrefoil_host.so.0 (no GPU).
 * docs/spec.md has the meaning as numbered rules; functions below the line "Trefoil's own" are ours.
 *
 * Letters: R ranks, E experts, L = ceil(E / R) local experts, B tokens of this rank (0 <= B <= N),
 * N = max_dispatch_tokens_per_rank, K top-k, H hidden. LL low latency, HT high throughput.
 *
 * A step of an MoE layer:
 *     ncclEpCreateGroup                                once, collective
 *     ncclEpInitHandle                                 once per layer
 *     ncclEpUpdateHandle                               each step: binds the routing
 *     ncclEpDispatch, ncclEpComplete                   tokens to their experts' ranks
 *     (the caller's experts run on the received slots)
 *     ncclEpCombine, ncclEpComplete                    and back, summed
 *
 * Every function returns ncclSuccess or an error and then records a sentence for
 * ncclEpGetLastError(). Arguments are checked before any communication; a failing call leaves its
 * out-parameters and the group as they were. Nothing prints, aborts or exits. Unless a function says
 * otherwise it is not collective, does not block, and may be called from any thread, but not on
 * the same group from two threads at once. "Stream-ordered": the work is queued on the stream and the
 * call returns at once. "Graph-safe": may be captured into a CUDA graph. */
#ifndef NCCL_EP_H
#define NCCL_EP_H

#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime.h>
#include <nccl.h>

#define NCCL_EP_MAJOR        0
#define NCCL_EP_MINOR        2
#define NCCL_EP_PATCH        0
#define NCCL_EP_VERSION_CODE (NCCL_EP_MAJOR * 10000 + NCCL_EP_MINOR * 100 + NCCL_EP_PATCH)

#define NCCL_EP_API_VERSION  2
#define NCCL_EP_MAGIC        0xC00FFFEEu
#define NCCL_EP_TENSOR_MAGIC 0xCAFECAFEu
#define NCCL_EP_AUTO         0 /* "choose for me" in every field that takes it */

/* One byte of two FP4 (E2M1) values, the first in the low half. */
#define ncclFloat4x2 ((ncclDataType_t)12)

/* Offset just past a field; whether the caller's (versioned) struct has the field. */
#define NCCL_EP_FIELD_END(type, field)      (offsetof(type, field) + sizeof(((type *)0)->field))
#define NCCL_EP_HAS_FIELD(ptr, type, field) ((ptr)->size >= NCCL_EP_FIELD_END(type, field))

/* ---- Enums ---------------------------------------------------------------------------------- */

typedef enum {
  NCCL_EP_ALGO_LOW_LATENCY = 0,    /* decoding: 1 to a few hundred tokens a rank */
  NCCL_EP_ALGO_HIGH_THROUGHPUT = 1 /* prefill and training: thousands of tokens a rank */
} ncclEpAlgorithm_t;

typedef enum {
  NCCL_EP_LAYOUT_UNSET = 0,        /* not a layout */
  NCCL_EP_LAYOUT_EXPERT_MAJOR = 1, /* LL: [L, R*N, H]; HT: [slots, H] in zones per local expert */
  NCCL_EP_LAYOUT_RANK_MAJOR = 2,   /* LL only: [R, N, H] */
  NCCL_EP_LAYOUT_FLAT = 3          /* HT only: [slots, H], one row per (token, this rank) */
} ncclEpLayout_t;

typedef enum {
  NCCL_EP_FWD_PASS = 0,
  NCCL_EP_BWD_PASS = 1 /* HT only: gradients, with the routing of the last Update */
} ncclEpPassDir_t;

typedef enum {
  NCCL_EP_OVERFLOW_AUTO = 0, /* TRAP */
  NCCL_EP_OVERFLOW_TRAP = 1, /* a rank over max_recv writes nothing and reports an async error */
  NCCL_EP_OVERFLOW_DROP = 2  /* the first max_recv tokens are kept; dropped slots add nothing */
} ncclEpOverflowPolicy_t;

typedef enum {
  NCCL_EP_ZERO_COPY_AUTO = 0, /* windows are used where given */
  NCCL_EP_ZERO_COPY_OFF = 1,
  NCCL_EP_ZERO_COPY_ON = 2 /* windows required (ncclEpDispatch, ncclEpCombine) */
} ncclEpZeroCopyMode_t;

typedef enum {
  NCCL_EP_EXPERT_ID_AUTO = 0,  /* LOCAL */
  NCCL_EP_EXPERT_ID_LOCAL = 1, /* received topk_idx holds ids in [0, L) */
  NCCL_EP_EXPERT_ID_GLOBAL = 2 /* received topk_idx holds ids in [0, E) */
} ncclEpExpertIdKind_t;

typedef enum {
  NCCL_EP_DISP_QUANT_NONE = 0,      /* f32, f16, bf16 rows, no scales */
  NCCL_EP_DISP_QUANT_FWD = 1,       /* the caller's quantised rows and scales travel side by side */
  NCCL_EP_DISP_QUANT_DS_FP8E3M4 = 2 /* LL: bf16 in; E4M3 (despite the published name) and one f32
                                       scale per 128 elements out */
} ncclEpDispQuant_t;

typedef enum {
  NCCL_EP_COMB_QUANT_NONE = 0,
  NCCL_EP_COMB_QUANT_NVFP4 = 1 /* LL, experimental: rows cross the wire as E2M1 per 16 */
} ncclEpCombQuant_t;

/* ---- Structs: every one starts with its size and a magic, set by its initialiser --------------
 * A struct of a smaller, older version is accepted from its V1 size on; fields past `size` read as
 * zero. Bytes past what the library knows are ignored. */

/* A tensor the caller describes: C-contiguous, sizes[0] slowest. The struct and sizes are read
 * during the call only; data must live as long as the work that uses it. */
typedef struct {
  unsigned size;           /* sizeof(ncclEpTensor_t) */
  unsigned magic;          /* NCCL_EP_TENSOR_MAGIC */
  unsigned ndim;           /* >= 1 */
  ncclDataType_t datatype; /* element type */
  void *data;              /* local device address, all of it in one allocation; may be NULL if a
                              dimension is 0, or if win_hdl is set; then it is the window's user
                              pointer + win_offset. What a call writes overlaps nothing else of it */
  ncclWindow_t win_hdl;    /* NULL, or the ncclCommWindowRegister window that holds the data */
  uint64_t win_offset;     /* bytes into the window, the same on all ranks */
  size_t *sizes;           /* [ndim] elements */
} ncclEpTensor_t;

typedef struct {
  unsigned size, magic;
} ncclEpTensorAllocConfig_t;

typedef struct {
  unsigned size, magic;
} ncclEpCompleteConfig_t;

/* The caller's allocator for the library's memory that is not registered with NCCL: both functions
 * or none. Called during Create, Init, buffer growth and Destroy, never from a stream. */
typedef cudaError_t (*ncclEpAllocFn_t)(void **ptr, size_t size, void *context);
typedef cudaError_t (*ncclEpFreeFn_t)(void *ptr, void *context);
typedef struct {
  ncclEpAllocFn_t alloc_fn; /* NULL: the library allocates */
  ncclEpFreeFn_t free_fn;
  void *context; /* passed back */
} ncclEpAllocConfig_t;

/* What decides meaning or buffers must be equal on all ranks: algorithm, num_experts, the limits,
 * enable_mask, zero_copy, overflow_policy, num_topk (and NCCL_EP_LL_COMBINE, NCCL_EP_LL_DISPATCH); a
 * difference is ncclInvalidArgument naming the field and both values. Hints, alloc and timeout_ns may
 * differ. */
typedef struct {
  unsigned size, magic;
  unsigned version;                      /* NCCL_EP_API_VERSION; others than 1 and 2 only warn */
  ncclEpAlgorithm_t algorithm;           /* */
  unsigned num_experts;                  /* E >= 1; need not be divisible by R */
  unsigned max_dispatch_tokens_per_rank; /* N >= 1 */
  unsigned max_recv_tokens_per_rank;     /* HT: slots a rank may receive, >= N; AUTO = eager: bound
                                            R*N*max(num_topk, 1), outputs sized from the counters.
                                            LL ignores it */
  unsigned max_token_bytes;              /* bytes of one token row plus its scales, either way, > 0;
                                            HT: a multiple of 16 */
  unsigned long rdma_buffer_size;        /* a hint; 0 = AUTO; ours sizes buffers exactly */
  unsigned num_qp_per_rank;              /* a hint; 0 = AUTO */
  unsigned num_channels;                 /* a hint; 0 = AUTO */
  unsigned max_num_sms;                  /* most SMs a kernel may take; 0 = AUTO */
  ncclEpAllocConfig_t alloc;             /* */
  unsigned enable_mask;                  /* LL: 1 = late ranks are masked and skipped; default 0 */
  uint64_t timeout_ns;                   /* 0 = 100 s; environment NCCL_EP_TIMEOUT_MS overrides;
                                            HT on GPUs: half an hour at most */
  /* since version 2 */
  ncclEpZeroCopyMode_t zero_copy;         /* default AUTO */
  ncclEpOverflowPolicy_t overflow_policy; /* HT; default TRAP */
  unsigned num_topk;                      /* HT: bound on the handles' K; 0 = none */
  unsigned char padding_v2[4];
} ncclEpGroupConfig_t;

/* Where counters are written: 1-D int32 or int64 tensors in device memory, in stream order; longer
 * tensors than needed are allowed. NULL = not wanted, where not said to be required. */
typedef struct {
  unsigned size, magic;
  ncclEpTensor_t *expert_counters;    /* [L] LL expert-major: at Dispatch, int32, required.
                                         HT: at Update; flat: tokens that use the expert;
                                         expert-major: padded counts */
  ncclEpTensor_t *src_rank_counters;  /* [R] LL rank-major: at Dispatch, int32 */
  ncclEpTensor_t *expert_offsets;     /* [L] HT expert-major, at Update: first slot of each zone */
  ncclEpTensor_t *recv_total_counter; /* [1] HT, at Update: flat: tokens received; expert-major:
                                         padded slots. The true number, also over max_recv */
  /* since version 2 */
  ncclEpExpertIdKind_t recv_topk_idx_kind; /* at Dispatch: kind of ids in outputs->topk_idx */
  unsigned char padding_v2[4];
} ncclEpLayoutInfo_t;

typedef struct {
  unsigned size, magic;
  ncclEpTensor_t *tokens;       /* [B, H] */
  ncclEpTensor_t *topk_weights; /* [B, K] f32: LL rank-major and HT forward; else NULL */
  ncclEpTensor_t *scales;       /* [B, S]: NCCL_EP_DISP_QUANT_FWD; else NULL */
} ncclEpDispatchInputs_t;

typedef struct {
  unsigned size, magic;
  ncclEpTensor_t *tokens;       /* see ncclEpDispatch */
  ncclEpTensor_t *topk_weights; /* LL rank-major [R, N, K], HT forward flat [slots, K],
                                   expert-major [slots]: f32 */
  ncclEpTensor_t *scales;       /* quantised dispatch; else NULL */
  ncclEpTensor_t *topk_idx;     /* LL rank-major [R, N, K] int32, HT flat forward
                                   [slots, K] int64 */
} ncclEpDispatchOutputs_t;

typedef struct {
  unsigned size, magic;
  ncclEpTensor_t *tokens;       /* shape of the dispatch output */
  ncclEpTensor_t *topk_weights; /* HT backward: flat [slots, K], expert-major [slots]; else NULL */
  /* since version 2 */
  ncclEpTensor_t *scales; /* NCCL_EP_COMB_QUANT_NVFP4: f32 [L, R*N, 1] or [R, N, 1]; else NULL */
} ncclEpCombineInputs_t;

typedef struct {
  unsigned size, magic;
  ncclEpTensor_t *tokens;       /* [B, H], dtype of the inputs */
  ncclEpTensor_t *topk_weights; /* [B, K] f32. LL expert-major: read, the weights of the sum.
                                   HT backward: written, each (t, k) from its expert's slot */
} ncclEpCombineOutputs_t;

typedef struct {
  unsigned size, magic;
  /* HT expert-major: zones are padded up to it; a power of two; 0 and 1 = none. */
  size_t dispatch_output_per_expert_alignment;
} ncclEpHandleConfig_t;

typedef struct {
  unsigned size, magic;
  unsigned send_only;             /* LL: return after the sends; ncclEpComplete receives */
  unsigned round_scales;          /* DS_FP8: scales are powers of two; else 0 */
  ncclEpPassDir_t pass_direction; /* default forward */
  /* since version 2 */
  ncclEpDispQuant_t quant_recipe; /* default NONE */
} ncclEpDispatchConfig_t;

typedef struct {
  unsigned size, magic;
  unsigned send_only;
  ncclEpPassDir_t pass_direction;
  /* since version 2 */
  ncclEpCombQuant_t quant_recipe;
} ncclEpCombineConfig_t;

/* Bytes of each struct: now, and in each version of the interface. */
#define NCCL_EP_TENSOR_SIZE                         sizeof(ncclEpTensor_t)
#define NCCL_EP_TENSOR_V1_SIZE                      NCCL_EP_FIELD_END(ncclEpTensor_t, sizes)
#define NCCL_EP_TENSOR_CURRENT_VERSION              1
#define NCCL_EP_TENSOR_ALLOC_CONFIG_SIZE            sizeof(ncclEpTensorAllocConfig_t)
#define NCCL_EP_TENSOR_ALLOC_CONFIG_V1_SIZE         NCCL_EP_FIELD_END(ncclEpTensorAllocConfig_t, magic)
#define NCCL_EP_TENSOR_ALLOC_CONFIG_CURRENT_VERSION 1
#define NCCL_EP_COMPLETE_CONFIG_SIZE                sizeof(ncclEpCompleteConfig_t)
#define NCCL_EP_COMPLETE_CONFIG_V1_SIZE             NCCL_EP_FIELD_END(ncclEpCompleteConfig_t, magic)
#define NCCL_EP_COMPLETE_CONFIG_CURRENT_VERSION     1
#define NCCL_EP_GROUP_CONFIG_SIZE                   sizeof(ncclEpGroupConfig_t)
#define NCCL_EP_GROUP_CONFIG_V1_SIZE                NCCL_EP_FIELD_END(ncclEpGroupConfig_t, timeout_ns)
#define NCCL_EP_GROUP_CONFIG_V2_SIZE                NCCL_EP_FIELD_END(ncclEpGroupConfig_t, padding_v2)
#define NCCL_EP_GROUP_CONFIG_CURRENT_VERSION        2
#define NCCL_EP_LAYOUT_INFO_SIZE                    sizeof(ncclEpLayoutInfo_t)
#define NCCL_EP_LAYOUT_INFO_V1_SIZE                 NCCL_EP_FIELD_END(ncclEpLayoutInfo_t, recv_total_counter)
#define NCCL_EP_LAYOUT_INFO_V2_SIZE                 NCCL_EP_FIELD_END(ncclEpLayoutInfo_t, padding_v2)
#define NCCL_EP_LAYOUT_INFO_CURRENT_VERSION         2
#define NCCL_EP_DISPATCH_INPUTS_SIZE                sizeof(ncclEpDispatchInputs_t)
#define NCCL_EP_DISPATCH_INPUTS_V1_SIZE             NCCL_EP_FIELD_END(ncclEpDispatchInputs_t, scales)
#define NCCL_EP_DISPATCH_INPUTS_CURRENT_VERSION     1
#define NCCL_EP_DISPATCH_OUTPUTS_SIZE               sizeof(ncclEpDispatchOutputs_t)
#define NCCL_EP_DISPATCH_OUTPUTS_V1_SIZE            NCCL_EP_FIELD_END(ncclEpDispatchOutputs_t, topk_idx)
#define NCCL_EP_DISPATCH_OUTPUTS_CURRENT_VERSION    1
#define NCCL_EP_COMBINE_INPUTS_SIZE                 sizeof(ncclEpCombineInputs_t)
#define NCCL_EP_COMBINE_INPUTS_V1_SIZE              NCCL_EP_FIELD_END(ncclEpCombineInputs_t, topk_weights)
#define NCCL_EP_COMBINE_INPUTS_V2_SIZE              NCCL_EP_FIELD_END(ncclEpCombineInputs_t, scales)
#define NCCL_EP_COMBINE_INPUTS_CURRENT_VERSION      2
#define NCCL_EP_COMBINE_OUTPUTS_SIZE                sizeof(ncclEpCombineOutputs_t)
#define NCCL_EP_COMBINE_OUTPUTS_V1_SIZE             NCCL_EP_FIELD_END(ncclEpCombineOutputs_t, topk_weights)
#define NCCL_EP_COMBINE_OUTPUTS_CURRENT_VERSION     1
#define NCCL_EP_HANDLE_CONFIG_SIZE                  sizeof(ncclEpHandleConfig_t)
#define NCCL_EP_HANDLE_CONFIG_V1_SIZE                                                              \
  NCCL_EP_FIELD_END(ncclEpHandleConfig_t, dispatch_output_per_expert_alignment)
#define NCCL_EP_HANDLE_CONFIG_CURRENT_VERSION   1
#define NCCL_EP_DISPATCH_CONFIG_SIZE            sizeof(ncclEpDispatchConfig_t)
#define NCCL_EP_DISPATCH_CONFIG_V1_SIZE         NCCL_EP_FIELD_END(ncclEpDispatchConfig_t, pass_direction)
#define NCCL_EP_DISPATCH_CONFIG_V2_SIZE         NCCL_EP_FIELD_END(ncclEpDispatchConfig_t, quant_recipe)
#define NCCL_EP_DISPATCH_CONFIG_CURRENT_VERSION 2
#define NCCL_EP_COMBINE_CONFIG_SIZE             sizeof(ncclEpCombineConfig_t)
#define NCCL_EP_COMBINE_CONFIG_V1_SIZE          NCCL_EP_FIELD_END(ncclEpCombineConfig_t, pass_direction)
#define NCCL_EP_COMBINE_CONFIG_V2_SIZE          NCCL_EP_FIELD_END(ncclEpCombineConfig_t, quant_recipe)
#define NCCL_EP_COMBINE_CONFIG_CURRENT_VERSION  2

/* Initialisers: size and magic set (and the group's version), everything else zero. In C compound
 * literals; in C++ values of the same type. */
#ifdef __cplusplus
extern "C++" {
template <typename T> inline T ncclEpStructInit(unsigned magic) {
  T value = T();
  value.size = (unsigned)sizeof(T);
  value.magic = magic;
  return value;
}
inline ncclEpGroupConfig_t ncclEpGroupConfigInit() {
  ncclEpGroupConfig_t value = ncclEpStructInit<ncclEpGroupConfig_t>(NCCL_EP_MAGIC);
  value.version = NCCL_EP_API_VERSION;
  return value;
}
}
#define NCCL_EP_STRUCT_INIT(type, magic_value) (ncclEpStructInit<type>(magic_value))
#define NCCL_EP_GROUP_CONFIG_INIT              (ncclEpGroupConfigInit())
#else
#define NCCL_EP_STRUCT_INIT(type, magic_value)                                                     \
  ((type){.size = (unsigned)sizeof(type), .magic = (magic_value)})
#define NCCL_EP_GROUP_CONFIG_INIT                                                                  \
  ((ncclEpGroupConfig_t){                                                                          \
      .size = (unsigned)sizeof(ncclEpGroupConfig_t),                                               \
      .magic = NCCL_EP_MAGIC,                                                                      \
      .version = NCCL_EP_API_VERSION,                                                              \
  })
#endif
/* The two designators alone: ncclEpTensor_t t = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, ...}; */
#define NCCL_EP_TENSOR_INIT_INLINE                                                                 \
  .size = (unsigned)sizeof(ncclEpTensor_t), .magic = NCCL_EP_TENSOR_MAGIC
#define NCCL_EP_TENSOR_INIT NCCL_EP_STRUCT_INIT(ncclEpTensor_t, NCCL_EP_TENSOR_MAGIC)
#define NCCL_EP_TENSOR_ALLOC_CONFIG_INIT                                                           \
  NCCL_EP_STRUCT_INIT(ncclEpTensorAllocConfig_t, NCCL_EP_MAGIC)
#define NCCL_EP_COMPLETE_CONFIG_INIT  NCCL_EP_STRUCT_INIT(ncclEpCompleteConfig_t, NCCL_EP_MAGIC)
#define NCCL_EP_LAYOUT_INFO_INIT      NCCL_EP_STRUCT_INIT(ncclEpLayoutInfo_t, NCCL_EP_MAGIC)
#define NCCL_EP_DISPATCH_INPUTS_INIT  NCCL_EP_STRUCT_INIT(ncclEpDispatchInputs_t, NCCL_EP_MAGIC)
#define NCCL_EP_DISPATCH_OUTPUTS_INIT NCCL_EP_STRUCT_INIT(ncclEpDispatchOutputs_t, NCCL_EP_MAGIC)
#define NCCL_EP_COMBINE_INPUTS_INIT   NCCL_EP_STRUCT_INIT(ncclEpCombineInputs_t, NCCL_EP_MAGIC)
#define NCCL_EP_COMBINE_OUTPUTS_INIT  NCCL_EP_STRUCT_INIT(ncclEpCombineOutputs_t, NCCL_EP_MAGIC)
#define NCCL_EP_HANDLE_CONFIG_INIT    NCCL_EP_STRUCT_INIT(ncclEpHandleConfig_t, NCCL_EP_MAGIC)
#define NCCL_EP_DISPATCH_CONFIG_INIT  NCCL_EP_STRUCT_INIT(ncclEpDispatchConfig_t, NCCL_EP_MAGIC)
#define NCCL_EP_COMBINE_CONFIG_INIT   NCCL_EP_STRUCT_INIT(ncclEpCombineConfig_t, NCCL_EP_MAGIC)

/* ---- Functions -------------------------------------------------------------------------------- */

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define NCCL_EP_PUBLIC __attribute__((visibility("default")))
#else
#define NCCL_EP_PUBLIC
#endif

typedef struct ncclEpGroup *ncclEpGroup_t;   /* ranks, limits and buffers */
typedef struct ncclEpHandle *ncclEpHandle_t; /* a layout and its current routing */

/* *version = NCCL_EP_VERSION_CODE (200). NULL: ncclInvalidArgument. */
NCCL_EP_PUBLIC ncclResult_t ncclEpGetVersion(int *version);

/* Makes a tensor descriptor: sizes are copied, data and window stay empty for the caller to fill.
 * config may be NULL. ndim 0 or sizes NULL: ncclInvalidArgument. */
NCCL_EP_PUBLIC ncclResult_t ncclEpTensorAlloc(ncclEpTensor_t **tensor, unsigned ndim,
                                              ncclDataType_t datatype, const size_t *sizes,
                                              const ncclEpTensorAllocConfig_t *config);
/* Frees a descriptor made by ncclEpTensorAlloc (never its data); NULL is allowed. */
NCCL_EP_PUBLIC ncclResult_t ncclEpTensorDestroy(ncclEpTensor_t *tensor);

/* Collective over comm, blocks. Allocates what operations need: they never allocate. comm must outlive
 * the group; several groups may share one. ncclInvalidArgument: a field breaks its rule or differs
 * between ranks; ncclInvalidUsage: half an allocator; ncclSystemError: out of memory;
 * ncclRemoteError: a rank did not come within the timeout, named. */
NCCL_EP_PUBLIC ncclResult_t ncclEpCreateGroup(ncclEpGroup_t *group, ncclComm_t comm,
                                              const ncclEpGroupConfig_t *config);
/* Collective, blocks until the group's work is done. ncclInvalidUsage while handles live. NULL is
 * allowed. ncclRemoteError: the group is gone, but not the memory that other ranks may still write to. */
NCCL_EP_PUBLIC ncclResult_t ncclEpGroupDestroy(ncclEpGroup_t group);

/* Bytes that a handle needs; num_topk as in ncclEpInitHandle; config may be NULL. */
NCCL_EP_PUBLIC ncclResult_t ncclEpHandleMemSize(ncclEpGroup_t group, ncclEpLayout_t layout,
                                                const ncclEpHandleConfig_t *config,
                                                size_t *size_out, int num_topk);
/* Makes a handle without routing. May be collective (all ranks in the same order), may allocate, not
 * graph-safe. num_topk: K > 0; HT also -1 (taken from each Update's topk_idx; expert-major with
 * eager sizing needs the group's num_topk). handle_mem NULL: the library allocates; else a 1-D
 * uint8 device tensor of at least ncclEpHandleMemSize bytes, 16-byte aligned, which must outlive the
 * handle. A second HT handle on the same handle_mem sees its routing; LL handles need memory of their
 * own. */
NCCL_EP_PUBLIC ncclResult_t ncclEpInitHandle(ncclEpHandle_t *handle, ncclEpGroup_t group,
                                             ncclEpLayout_t layout,
                                             const ncclEpHandleConfig_t *config, int num_topk,
                                             const ncclEpTensor_t *handle_mem);
/* Binds the routing: topk_idx [B, K] int32 or int64, ids in [0, E) or -1, no duplicate in a row; B
 * may differ from rank to rank and call to call. Stream-ordered, graph-safe.
 * LL: layout_info NULL; only notes the pointer: Dispatch and Combine read topk_idx in stream order, so
 * it must live on, and a graph replay sees its content of that time.
 * HT: collective in stream order; copies the routing; fills layout_info's counters. */
NCCL_EP_PUBLIC ncclResult_t ncclEpUpdateHandle(ncclEpHandle_t handle,
                                               const ncclEpTensor_t *topk_idx,
                                               const ncclEpLayoutInfo_t *layout_info,
                                               cudaStream_t stream);
/* ncclEpInitHandle (K from topk_idx, handle_mem NULL) and ncclEpUpdateHandle. */
NCCL_EP_PUBLIC ncclResult_t ncclEpCreateHandle(ncclEpHandle_t *handle, ncclEpGroup_t group,
                                               ncclEpLayout_t layout,
                                               const ncclEpTensor_t *topk_idx,
                                               const ncclEpLayoutInfo_t *layout_info,
                                               const ncclEpHandleConfig_t *config,
                                               cudaStream_t stream);
/* Blocks until the handle's work is done. NULL is allowed. ncclInvalidUsage while its send_only operation
 * is pending (unless the group is lost). */
NCCL_EP_PUBLIC ncclResult_t ncclEpHandleDestroy(ncclEpHandle_t handle);

/* Sends tokens to the ranks of their experts and receives into outputs->tokens:
 *   LL expert-major [L, R*N, H]   LL rank-major [R, N, H]
 *   HT [rows >= max_recv (eager: >= the true count), H]
 * Slots ascend by (source rank, source token index) in every layout. Rows past the count stay
 * untouched (docs/spec.md has the exceptions). Collective in stream order, stream-ordered, graph-safe.
 * layout_info: LL: counters (expert-major required); HT: only recv_topk_idx_kind; may be NULL where
 * nothing is required. config may be NULL. */
NCCL_EP_PUBLIC ncclResult_t ncclEpDispatch(ncclEpHandle_t handle,
                                           const ncclEpDispatchInputs_t *inputs,
                                           const ncclEpDispatchOutputs_t *outputs,
                                           const ncclEpLayoutInfo_t *layout_info,
                                           const ncclEpDispatchConfig_t *config,
                                           cudaStream_t stream);
/* Brings every slot's row back to its source and sums, in the order and with the rounding that
 * docs/spec.md fixes. Collective in stream order, stream-ordered, graph-safe. config may be NULL. */
NCCL_EP_PUBLIC ncclResult_t ncclEpCombine(ncclEpHandle_t handle,
                                          const ncclEpCombineInputs_t *inputs,
                                          const ncclEpCombineOutputs_t *outputs,
                                          const ncclEpCombineConfig_t *config, cudaStream_t stream);
/* Finishes the handle's send_only operation; with nothing pending, and always in HT, a no-op.
 * Stream-ordered, graph-safe. config may be NULL. */
NCCL_EP_PUBLIC ncclResult_t ncclEpComplete(ncclEpHandle_t handle,
                                           const ncclEpCompleteConfig_t *config,
                                           cudaStream_t stream);

/* The mask of an LL group with enable_mask (else ncclInvalidUsage): int [R], 1 = active, 0 = failed,
 * this rank's own view. Query writes device memory in stream order; Update reads host memory during
 * the call and takes effect in stream order; Clean is collective over the unmasked ranks and sets all to
 * 1. */
NCCL_EP_PUBLIC ncclResult_t ncclEpMaskQuery(ncclEpGroup_t group, int *device_mask,
                                            cudaStream_t stream);
NCCL_EP_PUBLIC ncclResult_t ncclEpMaskUpdate(ncclEpGroup_t group, const int *host_mask,
                                             cudaStream_t stream);
NCCL_EP_PUBLIC ncclResult_t ncclEpMaskClean(ncclEpGroup_t group, cudaStream_t stream);
/* *error = 1 if a queued operation failed since the last ErrorClear (a rank masked or lost, bad ids, HT
 * slots over max_recv under TRAP), else 0. LL without enable_mask: ncclInvalidUsage. ErrorClear lowers
 * it and takes its sentence back, but for a group that lost a rank: that can only be destroyed. */
NCCL_EP_PUBLIC ncclResult_t ncclEpGetAsyncError(ncclEpGroup_t group, int *error);
NCCL_EP_PUBLIC ncclResult_t ncclEpErrorClear(ncclEpGroup_t group);

/* ---- Trefoil's own: not in NVIDIA's library --------------------------------------------------- */

/* Why the last failing ncclEp call on this thread failed and what to change, one sentence; "" before
 * the first failure. Valid until the next failing call on this thread. */
NCCL_EP_PUBLIC const char *ncclEpGetLastError(void);

/* What a group and handle would need. Filled by ncclEpPreflight; the caller sets size and magic
 * (NCCL_EP_PREFLIGHT_INIT). Bytes are per rank, exactly what this library's allocators will ask for. */
typedef struct {
  unsigned size, magic;
  int supported;    /* 1, or 0: reason, limit and nearest say why and what would be legal */
  char reason[256]; /* one sentence; "" if supported */
  char limit[64];   /* the field or argument that is out of its range; "" if supported */
  unsigned long long nearest; /* nearest legal value of that field; 0 if no single value helps */
  size_t group_device_bytes;  /* device memory that is not registered with NCCL */
  size_t group_shared_bytes;  /* memory registered with NCCL, readable by peers */
  size_t group_host_bytes;    /* host memory */
  size_t handle_device_bytes; /* = ncclEpHandleMemSize; 0 extra if the caller gives handle_mem */
  size_t handle_shared_bytes;
  size_t handle_host_bytes;
  size_t nccl_bytes; /* an estimate of what NCCL itself adds (rounding of its allocator) */
} ncclEpPreflight_t;
#define NCCL_EP_PREFLIGHT_INIT NCCL_EP_STRUCT_INIT(ncclEpPreflight_t, NCCL_EP_MAGIC)

/* Pure: no communicator, no GPU, no allocation. handle_config may be NULL. Returns ncclSuccess with
 * out->supported 0 for a configuration that cannot run; ncclInvalidArgument only for NULL, a wrong
 * magic or a size below V1. */
NCCL_EP_PUBLIC ncclResult_t ncclEpPreflight(const ncclEpGroupConfig_t *config,
                                            ncclEpLayout_t layout,
                                            const ncclEpHandleConfig_t *handle_config, int num_topk,
                                            int num_ranks, int ranks_per_node,
                                            ncclEpPreflight_t *out);

#ifdef __cplusplus
}
#endif
#endif
