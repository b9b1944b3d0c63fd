/* Low-latency dispatch and combine on NVIDIA GPUs of one NVLink domain: what launches them. C and C++.
 *
 * The caller (api/gpu, or a test) owns all memory. Per rank of a group it provides
 *   - exchange memory of ep_ll_layout_t.bytes, zeroed before the first operation of any rank, at an
 *     address that every rank can store to (peers[]);
 *   - control memory of EP_LL_CONTROL_BYTES on the device, filled by epLlControlInit;
 *   - per handle, memory of epLlHandleBytes on the device, zeroed.
 * The kernels take one of the two operation structs below by value and nothing else: no communicator,
 * so that R virtual ranks can run on one GPU. The protocol is written down in docs/kernels.md.
 *
 * Letters as in trefoil/shape.h. Every rank of the group launches the same operations in the same
 * order. Launches are stream-ordered, never synchronise with the host, and may be captured. */
#ifndef TREFOIL_KERNELS_LL_H
#define TREFOIL_KERNELS_LL_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/common/protocol.h"
#include "kernels/common/waits.h"
#include "trefoil/ref.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EP_LL_MAX_RANKS     EP_KERNEL_MAX_RANKS
#define EP_LL_MAX_TOPK      64
#define EP_LL_MAX_TOKENS    (1 << 20)
#define EP_LL_CONTROL_BYTES 1024
#define EP_LL_ARGS_WORDS    144 /* of 8 bytes, that a kernel gets at most */

/* A launch does the sending part, the receiving part, or both. */
#define EP_LL_SEND 1u
#define EP_LL_RECV 2u
#define EP_LL_BOTH 3u

/* How combine sums. EXACT and PARTIAL follow an expert-major dispatch, RANKS a rank-major one. */
typedef enum ep_ll_sum {
  EP_LL_SUM_EXACT = 0,  /* every (token, expert) row travels; weights at the source */
  EP_LL_SUM_RANKS = 1,  /* one row per (token, rank), in the order the routing names the ranks */
  EP_LL_SUM_PARTIAL = 2 /* weighted and summed at the experts' rank, then ranks ascending */
} ep_ll_sum_t;

typedef enum ep_ll_quant {
  EP_LL_QUANT_NONE = 0, /* token bytes, and scale bytes beside them if scaleBytes > 0 */
  EP_LL_QUANT_E4M3 = 1, /* bf16 in, E4M3 and f32 scales out */
  EP_LL_QUANT_E4M3_POW2 = 2
} ep_ll_quant_t;

/* Where things lie in the exchange memory; equal on all ranks. */
typedef struct ep_ll_layout {
  size_t announce;     /* combine: [2][R] words of 16 bytes */
  size_t free[2];      /* [kind]: [2][R] words: a peer's buffer may be written again */
  size_t wait;         /* 3 words: whether this rank waits, for its peers to read */
  size_t routing;      /* [2][R][N][idVectors] */
  size_t weights;      /* [2][R][N][weightVectors], partial sums */
  size_t rows[2];      /* dispatch [2][R][N], combine [2][N][K] rows of rowStride */
  size_t half[2];      /* bytes of one of the two buffers of rows */
  size_t rowStride[2]; /* bytes of such a row */
  size_t bytes;
} ep_ll_layout_t;

typedef struct ep_ll_config {
  int numRanks, numExperts, maxTopk;
  int64_t maxTokens;
  size_t maxTokenBytes; /* of one token's row, scales included */
  int partial;          /* weights travel */
  int anyRanks;         /* for sizes alone: more ranks than the kernels take, too */
} ep_ll_config_t;

/* TREFOIL_INVALID_ARGUMENT with a sentence: past the limits above, or no multiple of 16 bytes. */
trefoil_result_t epLlLayout(const ep_ll_config_t *config, ep_ll_layout_t *out);
size_t epLlHandleBytes(const ep_ll_config_t *config, int numTopk);
/* Host bytes to copy into control memory; firstOperation is 0 except where tests start near a wrap,
 * and equal on all ranks. */
void epLlControlInit(void *bytes, uint64_t firstOperation);

typedef struct ep_ll_group {
  char *peers[EP_LL_MAX_RANKS]; /* every rank's exchange memory */
  ep_ll_layout_t at;
  void *control;
  int *mask;                /* [R] on the device: 1 active, 0 failed; all 1 without enableMask */
  ep_wait_record_t *record; /* device address of mapped host memory */
  uint64_t *bytes;          /* NULL, or [2][R]: bytes sent to each rank, per kind, added up */
  uint64_t *stamps;         /* NULL, or [grid][2]: device clock at start and end of each block */
  uint64_t timeoutNs;
  int rank, numRanks, numExperts, numLocal; /* numLocal = ceil(E / R) */
  int maxTokens, enableMask;
  int numSms; /* blocks of a launch, <= 1023; all of them must fit on the GPU at once */
  uint16_t firstNear, numNear; /* several domains (relay.h): the ranks of this one's */
} ep_ll_group_t;

typedef struct ep_ll_handle {
  const void *topkIdx; /* [B, K] int32 or int64 */
  void *memory;        /* epLlHandleBytes */
  int numTopk, idx64, rankMajor;
  ep_ll_sum_t sum; /* which combine will follow; equal on all ranks */
} ep_ll_handle_t;

typedef struct ep_ll_dispatch {
  ep_ll_group_t group;
  ep_ll_handle_t handle;
  const void *tokens, *scales; /* rows 16-byte aligned */
  const float *weights;        /* rank-major: [B, K] */
  void *outTokens, *outScales; /* expert-major [L, R*N, .], rank-major [R, N, .] */
  float *outWeights;           /* rank-major [R, N, K] */
  int32_t *outIdx;             /* rank-major [R, N, K] */
  int32_t *counters;           /* expert-major [L]; rank-major [R] or NULL */
  void *scratch;               /* NULL, or epLlDispatchScratch bytes */
  int numTokens;               /* B */
  int tokenBytes, scaleBytes;  /* of an output row; E4M3: H and H/32 */
  ep_ll_quant_t quant;
  int globalIds;
  int sendWarps, recvWarps; /* of a block; 0 = chosen from the number of tokens */
  int generic;              /* 1: never the fast path (tests) */
} ep_ll_dispatch_t;

typedef struct ep_ll_combine {
  ep_ll_group_t group;
  ep_ll_handle_t handle;
  const void *tokens;   /* as the dispatch output */
  const float *weights; /* [B, K]; NULL for EP_LL_SUM_RANKS */
  void *out;            /* [B, H] */
  trefoil_dtype_t dtype;
  int numTokens, rowBytes;
  int sendWarps, recvWarps; /* of a block; 0 = chosen from the number of tokens */
} ep_ll_combine_t;

/* Bytes of scratch that this dispatch needs on the device: 0 unless E * N is very large. */
size_t epLlDispatchScratch(const ep_ll_group_t *group, const ep_ll_handle_t *handle,
                           size_t rowBytes);

/* parts: EP_LL_BOTH; or EP_LL_SEND now and EP_LL_RECV with the same arguments later. At most two
 * operations of a kind may be sent and not yet received. TREFOIL_SYSTEM_ERROR: the launch failed.
 * Nothing is compiled or allocated here. */
trefoil_result_t epLlDispatch(const ep_ll_dispatch_t *op, unsigned parts, void *cudaStream);
trefoil_result_t epLlCombine(const ep_ll_combine_t *op, unsigned parts, void *cudaStream);

/* The same in two steps, so that a caller that keeps the first one's result computes nothing for
 * the next operation like it: Prepare, or Reuse if that returns 1, then Launch. */
typedef struct ep_ll_ready {
  const void *kernel; /* NULL: zeroed, nothing is kept */
  void *driver;       /* the driver's handle of it; NULL: none */
  size_t shared;
  int blocks, warps, isFast;
  uint64_t args[EP_LL_ARGS_WORDS]; /* what the kernel gets */
} ep_ll_ready_t;

trefoil_result_t epLlPrepareDispatch(const ep_ll_dispatch_t *op, unsigned parts,
                                     ep_ll_ready_t *out);
trefoil_result_t epLlPrepareCombine(const ep_ll_combine_t *op, unsigned parts, ep_ll_ready_t *out);
/* 1: *ready now has op's addresses; what it keeps differs from op in nothing else. 0: it is another
 * operation, and nothing was touched. Of op->group only stamps are read, of op->handle only the
 * routing: the caller guarantees that the rest is as it was, and prepares the same parts. */
int epLlReuseDispatch(ep_ll_ready_t *ready, const ep_ll_dispatch_t *op);
int epLlReuseCombine(ep_ll_ready_t *ready, const ep_ll_combine_t *op);
trefoil_result_t epLlLaunch(const ep_ll_ready_t *ready, void *cudaStream);

/* 1 if this dispatch takes the fast path, 0 if the generic one; the result is the same. */
int epLlDispatchIsFast(const ep_ll_dispatch_t *op, unsigned parts);
/* Loads all kernels on the current device, so that no later launch waits for that. */
trefoil_result_t epLlLoad(void);

#ifdef __cplusplus
}
#endif
#endif
