/* Included ahead of tests/api's step.c: its memory becomes host memory that GPUs read and write where
 * it lies, so that the same steps and comparisons run on the GPU library. Slow, and exact. */
#ifndef TREFOIL_TESTS_GPU_PINNED_H
#define TREFOIL_TESTS_GPU_PINNED_H

#include <stdlib.h>
#include <string.h>

#include <cuda_runtime.h>

static inline void *pinnedCalloc(size_t count, size_t size) {
  void *p = NULL;
  if (cudaHostAlloc(&p, count * size + 64, cudaHostAllocPortable | cudaHostAllocMapped)) abort();
  memset(p, 0, count * size + 64);
  return p;
}

static inline void *pinnedAligned(size_t alignment, size_t bytes) {
  (void)alignment; /* cudaHostAlloc gives pages */
  return pinnedCalloc(1, bytes);
}

static inline void pinnedFree(void *p) {
  if (p) cudaFreeHost(p);
}

#define calloc        pinnedCalloc
#define aligned_alloc pinnedAligned
#define free          pinnedFree
#endif
