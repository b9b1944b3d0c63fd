/* Ranks for the tests that run a library through the C API: threads of this process, a device each, on
 * real GPUs or on the host runtime. TREFOIL_LIBRARY, TREFOIL_NCCL and TREFOIL_CUDA say what is loaded;
 * TREFOIL_TEST_RANKS how many ranks (default: one a GPU, at most 4), TREFOIL_TEST_RANKS_PER_NODE how many of
 * them make an NVLink domain (default: all), TREFOIL_TEST_TIMEOUT_MS how long ranks wait for one another in
 * groups without a fault. */
#ifndef TREFOIL_TESTS_GPU_TEAM_H
#define TREFOIL_TESTS_GPU_TEAM_H

#include "validate/check_rank.h"

#include <pthread.h>

typedef struct gpu_run gpu_run_t;

/* A rank at work. */
typedef struct gpu_rank {
  ep_check_rank_t rank; /* opened: communicator, group, handles */
  gpu_run_t *run;
} gpu_rank_t;

/* The life of one group: every rank opens, works, closes. */
struct gpu_run {
  const ep_check_group_t *group;
  trefoil_result_t (*work)(gpu_rank_t *rank);
  void *context;
  uint64_t timeoutNs; /* 0: 10 s, or TREFOIL_TEST_TIMEOUT_MS */
  int isLossy;        /* the group may be lost by the end: then closing may fail */
  pthread_barrier_t barrier;
  pthread_mutex_t mutex;
  char failure[2600]; /* of the first rank that failed; "" if none did */
  int numRanks;       /* gpuStart's */
  gpu_rank_t ranks[EP_MAX_RANKS];
  pthread_t threads[EP_MAX_RANKS];
};

/* Loads the libraries; the number of ranks; -1 and the reason in why where there is nothing to run on;
 * GPU_TEAM_BROKEN where there is, but the library under test cannot be loaded. */
#define GPU_TEAM_BROKEN -2
int gpuTeam(char *why, size_t whyBytes);
const ep_library_t *gpuLibrary(void);
int gpuIsHost(void);       /* no GPU: the CPU library, or the GPU library with emulated kernels */
int gpuIsCpuLibrary(void); /* which has no launches, no marks, and other buffers */
/* So many on GPUs, so many on the host; fewer where kernels are emulated. */
int gpuScaled(int onGpus, int onHost);
/* Runs the group on so many ranks; failure is empty if all went well. */
void gpuRun(gpu_run_t *run, int numRanks);
/* The same in two halves; *run stays where it is in between. */
void gpuStart(gpu_run_t *run, int numRanks);
void gpuJoin(gpu_run_t *run);
void gpuBarrier(gpu_rank_t *rank);
/* A group of LL with three handles (expert-major top-k, rank-major top-k, expert-major half of it). */
ep_check_group_t gpuGroup(int numRanks, int64_t maxTokens, size_t maxTokenBytes);

/* The same in high throughput: flat, expert-major with zones of 8, flat; nothing overflows. */
ep_check_group_t gpuGroupHt(int numRanks, int64_t maxTokens, size_t maxTokenBytes);

/* A test on as many ranks as there are: skips with the reason where there is nothing to run on. */
#define GPU_RANKS(numRanks, least)                                                                 \
  char gpuWhy[600];                                                                                \
  int numRanks = gpuTeam(gpuWhy, sizeof gpuWhy);                                                   \
  REQUIRE(numRanks != GPU_TEAM_BROKEN, "%s", gpuWhy);                                              \
  if (numRanks < 0) SKIP("%s", gpuWhy);                                                            \
  if (numRanks < (least)) SKIP("%d GPUs here, %d needed", numRanks, least);

#endif
