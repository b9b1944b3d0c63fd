/* High-throughput Update, dispatch and combine on NVIDIA GPUs of one NVLink domain: what launches them.
 * C and C++.
 *
 * The caller (api/gpu, or a test) owns all memory. Per rank of a group it provides
 *   - exchange memory of ep_ht_layout_t.bytes, zeroed before the first operation of any rank, at an
 *     address that every rank can store to (peers[]);
 *   - control memory of EP_HT_CONTROL_BYTES on the device, filled by epHtControlInit;
 *   - scratch of epHtScratchBytes on the device, zeroed, for Update and padding;
 *   - per handle, memory of epHtHandleBytes on the device; an Update fills it.
 * The kernels take one operation struct by value and nothing else: no communicator, so that R virtual
 * ranks can run on one GPU (numSms blocks each). The protocol is written down in docs/kernels_ht.md.
 *
 * Letters as in trefoil/shape.h. Every rank of the group launches the same operations in the same
 * order. Launches are stream-ordered, never synchronise with the host, and may be captured. Operations
 * of one kind must not overlap on a rank; a dispatch and a combine may, if both fit on the GPU. */
#ifndef TREFOIL_KERNELS_HT_H
#define TREFOIL_KERNELS_HT_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/common/protocol.h"
#include "kernels/common/waits.h"
#include "trefoil/ref.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EP_HT_MAX_RANKS      EP_KERNEL_MAX_RANKS
#define EP_HT_MAX_TOPK       64
#define EP_HT_MAX_TOKENS     (1 << 20)
#define EP_HT_CONTROL_BYTES  4096
#define EP_HT_IDENTITY_WORDS 6
#define EP_HT_CHUNK_BYTES    14336            /* rows travel in chunks of at most this */
#define EP_HT_MAX_TIMEOUT_NS 1800000000000ull /* greatest timeoutNs */

typedef struct ep_ht_config {
  int numRanks, numExperts, maxTopk;
  int64_t maxTokens;
  size_t maxTokenBytes; /* of one token's row, scales included */
  int fifoSlots;        /* chunks of each FIFO, a power of two; 0 = chosen from maxTokens */
  int windows;          /* dispatch pushes into windows as a rule: small FIFOs for it */
  int inputs;           /* room for a dispatch's input, which peers read there */
} ep_ht_config_t;

/* Where things lie in the exchange memory; equal on all ranks. Kinds: 0 dispatch, 1 combine. */
typedef struct ep_ht_layout {
  size_t header;     /* [2][R] words of 16 bytes: tokens of each source */
  size_t routing;    /* [2][R][N][idVectors] words */
  size_t flags[2];   /* [R][fifoSlots] u32, by source: the chunk is here */
  size_t credits[2]; /* [R][fifoSlots] u32, by destination: the chunk has been read there */
  size_t fifos[2];   /* [R][fifoSlots] FIFO slots of fifoSlotStride bytes, by source */
  /* W: a word of 16 bytes. */
  size_t announces[2]; /* [R][4] W, by rank: where its output or input lies */
  size_t dones[2];     /* [R] u32, by peer: blocks that no longer use this rank's memory */
  /* of dispatches with windows: */
  size_t remoteRows; /* [R][remoteRowWords] W, by destination: the own tokens' first rows there */
  size_t weights;    /* [R][N][weightWords] W, by source */
  size_t arrivals;   /* [R][N][rowChunks] u32, by source: the chunk lies in its first row */
  /* of combines that pull out of windows: */
  size_t gradients;     /* [R][N][weightWords] W, by expert's rank: of an own token's weights */
  size_t input;         /* config.inputs: [N] rows of the largest; else 0 */
  size_t fifoSlotBytes; /* payload of a FIFO slot; the token's weights follow it */
  size_t fifoSlotStride;
  int fifoSlots[2];
  int idVectors;
  int rowChunks, remoteRowWords,
      weightWords; /* chunks of the largest row; words of N rows, K weights */
  size_t bytes;
} ep_ht_layout_t;

/* TREFOIL_INVALID_ARGUMENT with a sentence: past the limits above, or no multiple of 16 bytes. */
trefoil_result_t epHtLayout(const ep_ht_config_t *config, ep_ht_layout_t *out);
size_t epHtHandleBytes(const ep_ht_config_t *config, int numTopk);
size_t epHtScratchBytes(const ep_ht_config_t *config);
/* Host bytes to copy into control memory. */
void epHtControlInit(void *bytes);

/* What operations report to the host: counts of what was found, and the last of it. In mapped host memory. */
typedef struct ep_ht_status {
  uint32_t badIds, traps;   /* ids that are none; dispatches of which maxRecv trapped this rank */
  uint32_t shorts, pad;     /* the caller's */
  int64_t neededRows, rows; /* of the last trap; the caller's */
} ep_ht_status_t;

typedef struct ep_ht_group {
  char *peers[EP_HT_MAX_RANKS]; /* every rank's exchange memory */
  ep_ht_layout_t at;
  void *control, *scratch;
  ep_wait_record_t *record; /* device address of mapped host memory, or NULL */
  ep_ht_status_t *status;   /* likewise */
  uint64_t *bytes;          /* NULL, or [2][R]: bytes sent to each rank, per kind, added up */
  uint64_t *stamps;         /* NULL, or [grid][2]: device clock at start and end of each block */
  uint64_t timeoutNs;
  int rank, numRanks, numExperts, numLocal; /* numLocal = ceil(E / R) */
  int maxTokens;
} ep_ht_group_t;

typedef struct ep_ht_handle {
  void *memory; /* epHtHandleBytes, 256-byte aligned */
  int numTopk, expertMajor, drop;
  int zeroCopyOn;    /* expert-major only: DROP by row alone */
  int64_t alignment; /* expert-major: of zones, a power of two; 0 and 1 = none */
  int64_t maxRecv;   /* rows of the output, padding included; 0 = unbounded */
} ep_ht_handle_t;

/* A counter of the caller, int32 or int64; NULL = not wanted. */
typedef struct ep_ht_counter {
  void *data;
  int is64;
} ep_ht_counter_t;

typedef struct ep_ht_update {
  ep_ht_group_t group;
  ep_ht_handle_t handle;
  const void *topkIdx; /* [B, K] int32 or int64 */
  int idx64, numTokens;
  ep_ht_counter_t expertCounters, expertOffsets, total; /* [L], [L], [1] */
  uint64_t *identityAt,
      identity[EP_HT_IDENTITY_WORDS]; /* of the handle memory; identityAt: NULL = not stored */
  int numSms;                         /* blocks; all must fit on the GPU at once */
} ep_ht_update_t;

/* Outputs of a dispatch that every rank can store to. Between two ranks that both have such outputs, in
 * the same windows (id), the sender pushes rows into the receiver's output; between others
 * through the FIFO. A rank whose rows exceed maxRecv counts as one without, here and below. */
typedef struct ep_ht_window {
  int is;      /* 0: this rank's outputs lie in none */
  uint64_t id; /* equal on all ranks that mean the same windows */
  char *tokens[EP_HT_MAX_RANKS],
      *scales[EP_HT_MAX_RANKS];        /* every rank's, as this rank reaches it */
  uint64_t tokensOffset, scalesOffset; /* of this rank's outputs in its own, multiples of 16 */
} ep_ht_window_t;

/* Inputs of a dispatch or a flat combine that every rank can read where they lie: so many bytes past this
 * rank's exchange memory. Between two ranks that both have such inputs, each reads the other's rows there;
 * between others they go through the FIFO. Such a dispatch does not use `window`. */
typedef struct ep_ht_input {
  int is;                 /* 0: no */
  int64_t tokens, scales; /* multiples of 16 */
} ep_ht_input_t;

typedef struct ep_ht_dispatch {
  ep_ht_group_t group;
  ep_ht_handle_t handle;
  const void *tokens, *scales; /* rows 16-byte aligned */
  const float *weights;        /* [B, K], or NULL: tokens only (backward) */
  void *outTokens, *outScales; /* [rows, .] */
  ep_ht_window_t window;
  ep_ht_input_t input;
  float *outWeights; /* flat [topkRows, K], expert-major [topkRows] */
  int64_t *outIdx;   /* flat [topkRows, K] */
  int64_t topkRows;
  int tokenBytes, scaleBytes; /* of a row, multiples of 16 */
  int globalIds;
  int numSms, numSenders; /* blocks, and how many of them send first; 0 = chosen */
} ep_ht_dispatch_t;

typedef struct ep_ht_combine {
  ep_ht_group_t group;
  ep_ht_handle_t handle;
  const void *tokens;      /* as the dispatch output */
  ep_ht_input_t input;     /* expert-major: not used */
  const float *rowWeights; /* backward: as dispatch's outWeights; else NULL */
  void *out;               /* [B, H] */
  float *outWeights;       /* backward: [B, K] */
  trefoil_dtype_t dtype;
  int rowBytes;
  int numSms, numSenders;
} ep_ht_combine_t;

/* TREFOIL_SYSTEM_ERROR: the launch failed. Nothing is compiled or allocated here. */
trefoil_result_t epHtUpdate(const ep_ht_update_t *op, void *cudaStream);
trefoil_result_t epHtDispatch(const ep_ht_dispatch_t *op, void *cudaStream);
trefoil_result_t epHtCombine(const ep_ht_combine_t *op, void *cudaStream);
/* Loads all kernels on the current device, so that no later launch waits for that. */
trefoil_result_t epHtLoad(void);

/* What an Update found, for the host and other kernels, in the handle's memory (on the device). */
typedef struct ep_ht_head {
  int64_t flatTotal;  /* tokens received, each counted once */
  int64_t rowTotal;   /* rows received, padding included: flatTotal when flat */
  int64_t numRows;    /* rows of the output that dispatch writes: rowTotal, or as far as maxRecv */
  int32_t trapped;    /* rowTotal > maxRecv and no drop: nothing is written, nothing is added */
  int32_t badIds;     /* entries that are no expert and not -1 */
  int32_t numTokens;  /* B */
  int32_t mostTokens; /* the greatest B of all ranks */
  int32_t numTopk, expertMajor;
  int32_t numPads;                    /* rows to be zeroed */
  int32_t sendCount[EP_HT_MAX_RANKS]; /* own tokens that go to a rank, itself included */
  int32_t recvCount[EP_HT_MAX_RANKS]; /* tokens of a rank that come here */
  int64_t recvBase[EP_HT_MAX_RANKS];  /* flat: row of the first of them */
} ep_ht_head_t;

#ifdef __cplusplus
}
#endif
#endif
