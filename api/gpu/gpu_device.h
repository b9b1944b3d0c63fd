/* Small kernels of the GPU library itself. C and C++. */
#ifndef TREFOIL_API_GPU_GPU_DEVICE_H
#define TREFOIL_API_GPU_GPU_DEVICE_H

#include <stdint.h>

#include "kernels/ht/ht.h"
#include "trefoil/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* mask[r] = bit r of active, r < numRanks; stream-ordered. */
trefoil_result_t epGpuSetMask(int *mask, uint64_t active, int numRanks, void *stream);
/* Control memory of a group in which every operation sent was received, on all ranks: says so, as no word
 * in new exchange memory does. Waits. */
trefoil_result_t epGpuSettle(void *control, int ht);
/* All kinds of a high-throughput group: finished [3]. */
trefoil_result_t epGpuRecordFinishedHt(const void *control, uint64_t *finished, void *stream);

/* ---- high throughput -------------------------------------------------------------------------- */

/* What an Update noted in handle_mem for calls of other handles. */
typedef struct ep_ht_memory {
  uint64_t magic, alignment;
  int64_t maxTokens;
  int topk, mode, numRanks, numExperts, numTokens, pad;
} ep_ht_memory_t;

/* Before an operation: if more rows arrive than `rows`, the rank is trapped for it. */
trefoil_result_t epGpuHtGuard(void *head, int64_t rows, void *stream);
/* After it: undoes that, and notes it: too few rows of topk. */
trefoil_result_t epGpuHtAfter(void *head, int64_t rows, ep_ht_status_t *status, void *stream);

/* CLOCK_REALTIME minus the device clock (%globaltimer), nanoseconds; waits. */
trefoil_result_t epGpuClockOffset(int64_t *offsetNs);
/* *finished = the number of the operation of that kind that the handle sent last, if that is more: queued
 * after a launch that received it. `finished` is a device address. */
trefoil_result_t epGpuRecordFinished(const void *handleMem, int kind, uint64_t *finished,
                                     void *stream);
/* Loads these kernels, so that no later call does. */
trefoil_result_t epGpuLoadSmall(void);

#ifdef __cplusplus
}
#endif
#endif
