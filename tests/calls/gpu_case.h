/* What the programs of this folder share: how many ranks, and a small case. */
#ifndef TREFOIL_TESTS_CALLS_GPU_CASE_H
#define TREFOIL_TESTS_CALLS_GPU_CASE_H

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "step.h"

/* Without touching CUDA: the tests with processes fork first. TREFOIL_EMULATED_RANKS: kernels run on the CPU
 * (tests/emulator). */
static inline int numGpus(void) {
#ifdef TREFOIL_EMULATED_RANKS
  int n = TREFOIL_EMULATED_RANKS;
#else
  char path[32];
  int n = 0;
  for (int i = 0; i < 16; i++) {
    snprintf(path, sizeof path, "/dev/nvidia%d", i);
    n += access(path, F_OK) == 0;
  }
#endif
  const char *most = getenv("GPU_CALLS_RANKS");
  return most && atoi(most) < n ? atoi(most) : n < 4 ? n : 4;
}

static inline step_case_t smallCase(trefoil_mode_t mode, uint64_t seed) {
  step_case_t c = {.mode = mode, .topk = 3, .numExperts = 8, .maxTokens = 7, .width = 16};
  c.seed = seed;
  return c;
}

#endif
