/* Trefoil: looking into the C API's operations: bytes per destination, kernel times, memory in use.
 * C99 and C++.
 *
 * These functions are exported by libnccl_ep.so.0 and libnccl_ep_cpu.so.0 beside those of nccl_ep.h,
 * and follow its rules: a result, a sentence for ncclEpGetLastError, out-parameters untouched on
 * failure. A library that cannot answer (the CPU library has no kernels, so no times) returns
 * ncclInvalidUsage. Nothing here is collective; everything is off until it is turned on, and costs
 * operations nothing while it is off. Not for use during stream capture, unless said otherwise. */
#ifndef TREFOIL_DEVICE_H
#define TREFOIL_DEVICE_H

#include "nccl_ep.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Kinds of operations. */
#define NCCL_EP_KIND_DISPATCH 0
#define NCCL_EP_KIND_COMBINE  1
#define NCCL_EP_KIND_UPDATE   2 /* high throughput; in kernel times only */

/* ---- Bytes ------------------------------------------------------------------------------------
 * Counted as rows move, for the sending side, per destination: token and scale bytes of the rows that
 * operations sent, as the plan counts them (trefoil/plan.h): rows that stay on this rank count for it;
 * routing, weights, marks and padding do not count. The matrix of all ranks is [src][dst] with each
 * rank's own array as a row, and equals trefoilPlanTraffic; ranks that are masked get no rows. */

/* on 1: operations called (or captured) from now on count; 0: they do not. Counts are kept. Also on
 * from the start with NCCL_EP_COUNT_BYTES=1 in the environment at ncclEpCreateGroup. Local. */
NCCL_EP_PUBLIC ncclResult_t ncclEpCountBytes(ncclEpGroup_t group, int on);
/* Waits for the stream (on the CPU library, where rows are pulled, also until they have been taken, at
 * most the group's timeout), then copies the counts of one kind since the last reset: bytes [R]. tiers
 * NULL, or [R]: trefoil_tier_t of the way from this rank to each. reset 1: sets that kind's counts to
 * zero. ncclInvalidUsage on a group that never counted. */
NCCL_EP_PUBLIC ncclResult_t ncclEpReadBytes(ncclEpGroup_t group, int kind, uint64_t *bytes,
                                            int *tiers, int reset, cudaStream_t stream);

/* What puts between NVLink domains are for. By rails a dispatch has one put a domain: in it NVLink passes
 * rows on. */
#define NCCL_EP_PUT_DISPATCH 0 /* rows that go to experts; in low latency also their routing */
#define NCCL_EP_PUT_COMBINE  1 /* rows that come back */
#define NCCL_EP_PUT_WEIGHTS  2 /* low latency, partial sums: weights to the ranks that apply them */
#define NCCL_EP_PUT_IDS      3 /* high throughput: an Update's topk_idx */
#define NCCL_EP_PUT_SIGNAL   4 /* no data: room in a buffer */
#define NCCL_EP_PUT_KINDS    5
/* Waits for the stream, then puts[R]: how many puts of that kind this rank's kernels have posted to each rank
 * since the group was made; 0 to ranks of its own domain. Always counted. */
NCCL_EP_PUBLIC ncclResult_t ncclEpReadPuts(ncclEpGroup_t group, int kind, uint64_t *puts,
                                           cudaStream_t stream);

/* ---- Kernel times -----------------------------------------------------------------------------
 * The device clock (%globaltimer, nanoseconds) at the start of a launch's first block and at the end
 * of its last. Clocks of different GPUs need not agree; differences on one GPU are times. */
typedef struct {
  uint64_t startNs, endNs; /* 0 and 0: the launch has not run (a captured one, not replayed) */
  int kind;                /* NCCL_EP_KIND_* */
  int parts;               /* 1 sends only, 2 receives only, 3 both */
  int numBlocks;           /* of the launch: the SMs it takes */
  int reserved;
} ncclEpKernelTime_t;

/* Keeps the times of the last maxLaunches (1 to 65536) launches from now on, and forgets earlier
 * ones; 0: off. Allocates device memory (16 bytes a block and launch), waits for the device. A captured
 * launch keeps the place it was given: its replays overwrite it. Graphs captured while times were kept
 * must not run after the next call of this function. */
NCCL_EP_PUBLIC ncclResult_t ncclEpKeepTimes(ncclEpGroup_t group, unsigned maxLaunches);
/* Waits for the stream, then fills times[0 .. *count) with the launches since the last ncclEpKeepTimes
 * or ncclEpReadTimes, oldest first; *count: room in times on entry, filled on return; if there are more
 * launches than room (or than are kept) the oldest are left out. */
NCCL_EP_PUBLIC ncclResult_t ncclEpReadTimes(ncclEpGroup_t group, ncclEpKernelTime_t *times,
                                            unsigned *count, cudaStream_t stream);

/* ---- Memory -----------------------------------------------------------------------------------
 * What the group and its live handles have asked for so far, in the fields of the preflight: group_*
 * and handle_* (sum over handles); the others are as after a successful ncclEpPreflight. The buffers
 * that a layout needs are made with the first handle, so group_* equals the preflight's from then on.
 * Memory of the functions above does not count. Both libraries. */
NCCL_EP_PUBLIC ncclResult_t ncclEpMemoryInUse(ncclEpGroup_t group, ncclEpPreflight_t *out);

#ifdef __cplusplus
}
#endif
#endif
