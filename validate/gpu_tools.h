/* The few kernels that measuring and testing on GPUs need, behind C: they are compiled with the component
 * KERNELS; without it (gpu_tools_none.c) every function is TREFOIL_INVALID_USAGE with a sentence.
 *
 * Ranks are threads of one process, a GPU each, that can store to one another's memory. Streams are
 * the caller's; launches are stream-ordered and may be captured. */
#ifndef TREFOIL_VALIDATE_GPU_TOOLS_H
#define TREFOIL_VALIDATE_GPU_TOOLS_H

#include "trefoil/base.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { EP_GPU_MAX_RANKS = 16, EP_GPU_NAME_BYTES = 128 };

/* What kernels of one rank know of the others: made by epGpuTeam. */
typedef struct ep_gpu_peers {
  unsigned *words[EP_GPU_MAX_RANKS]; /* a page each, then EP_GPU_COPY_BYTES for each source */
  unsigned *epoch;
  int rank, numRanks, numSms;
} ep_gpu_peers_t;

#define EP_GPU_COPY_BYTES ((size_t)24 << 20)
#define EP_GPU_PAGE_BYTES ((size_t)4096)

typedef struct ep_gpu_facts {
  char name[EP_GPU_NAME_BYTES];
  int driver, runtime, numSms; /* versions as CUDA numbers them */
} ep_gpu_facts_t;

/* 1: built with kernels. */
int epGpuToolsBuilt(void);
trefoil_result_t epGpuFacts(int device, ep_gpu_facts_t *out);
/* Memory of all ranks, mapped between the GPUs 0 .. numRanks - 1. Called by one thread. */
trefoil_result_t epGpuTeam(int numRanks, ep_gpu_peers_t *out);
void epGpuTeamFree(ep_gpu_peers_t *team);

/* All ranks leave it within about a microsecond; pauseNs: all wait so long first, so that what follows
 * is queued everywhere. lateNs: this rank leaves so much later. */
trefoil_result_t epGpuLockstep(const ep_gpu_peers_t *p, unsigned pauseNs, unsigned lateNs,
                               void *stream);
/* Every rank stores EP_GPU_COPY_BYTES to every other: kind 0 peer after peer, 1 all peers at once. */
trefoil_result_t epGpuCopy(const ep_gpu_peers_t *p, int kind, void *stream);
trefoil_result_t epGpuEmpty(void *stream);
/* Occupies the stream for so long. Before other kernels of the process wait for one another, launch it once
 * on every GPU: its module must not be loaded then. */
trefoil_result_t epGpuDelay(uint64_t ns, void *stream);

/* Background work of a measurement, on a stream and by a thread of its own, until it is stopped; the GPU is
 * p->rank's. COPIES: copy engines store to the next rank's memory (one rank: to its own), 24 MB at a
 * time. GEMM: products of bf16 matrices on tensor cores, one block on each of numSms SMs. */
typedef enum ep_gpu_background { EP_GPU_COPIES, EP_GPU_GEMM } ep_gpu_background_t;
typedef struct ep_gpu_worker ep_gpu_worker_t;
trefoil_result_t epGpuBackgroundStart(const ep_gpu_peers_t *p, ep_gpu_background_t kind, int numSms,
                                      ep_gpu_worker_t **out);
/* One such product, in stream order, in memory of epGpuProductBytes() on the current device. */
size_t epGpuProductBytes(void);
trefoil_result_t epGpuProduct(void *memory, int numSms, void *stream);
/* *perSecond: bytes, or floating-point operations. */
trefoil_result_t epGpuBackgroundStop(ep_gpu_worker_t *worker, double *perSecond);

#ifdef __cplusplus
}
#endif
#endif
