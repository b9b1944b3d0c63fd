/* trefoilGradGpu*, of the GPU library on emulated kernels and of the CPU library (ON_CPU): a thread a rank,
 * against the reference. */
#include <cuda_runtime.h>
#include <nccl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "nccl_ep.h"
#include "test.h"
#include "trefoil/a2sgd.h"

enum { RANKS = 3, TENSORS = 4, ELEMENTS = 9000 + 5 + 0 + 131, STEPS = 3 };
/* Of a wait for a rank that stays away; the emulator's clock is slow. */
#ifdef ON_CPU
#define LIMIT_NS 1000000000
#else
#define LIMIT_NS 20000000
#endif
static const int64_t sizes[TENSORS] = {9000, 5, 0, 131};

typedef struct rank {
  ncclComm_t comm;
  int me, stays; /* stays: makes no step */
  trefoil_grad_gpu_options_t options;
  trefoil_grad_config_t config;
  trefoil_result_t created, stepped, later, destroyed, again;
  char sentence[256];
  int mask[RANKS];
  float grad[STEPS][ELEMENTS], update[STEPS][ELEMENTS];
} rank_t;

static trefoil_grad_config_t configOf(void) {
  return (trefoil_grad_config_t){.method = TREFOIL_GRAD_A2SGD,
                                 .dtype = TREFOIL_F32,
                                 .numWorkers = RANKS,
                                 .numTensors = TENSORS,
                                 .sizes = sizes};
}

static void recordLater(rank_t *k) {
  if (!k->sentence[0]) snprintf(k->sentence, sizeof k->sentence, "%s", ncclEpGetLastError());
}

static void makeSteps(rank_t *k, trefoil_grad_gpu_t g, cudaStream_t stream, float *memory) {
  for (int i = 0; i < STEPS && k->stepped == TREFOIL_OK; i++) {
    cudaMemcpy(memory, k->grad[i], sizeof k->grad[i], cudaMemcpyHostToDevice);
    k->stepped = trefoilGradGpuStep(g, memory, memory, stream);
    cudaStreamSynchronize(stream);
    cudaMemcpy(k->update[i], memory, sizeof k->update[i], cudaMemcpyDeviceToHost);
  }
}

static void *runRank(void *arg) {
  rank_t *k = arg;
  trefoil_grad_gpu_t g = NULL;
  cudaStream_t stream;
  float *memory;
  cudaSetDevice(k->me);
  k->created = trefoilGradGpuCreate(&k->config, &k->options, k->comm, &g);
  if (k->created != TREFOIL_OK) {
    recordLater(k);
    return NULL;
  }
  cudaStreamCreate(&stream);
  cudaMalloc((void **)&memory, sizeof k->grad[0]);
  if (!k->stays) makeSteps(k, g, stream, memory);
  k->later = k->stays ? TREFOIL_OK : trefoilGradGpuStep(g, memory, memory, stream);
  if (k->later != TREFOIL_OK) recordLater(k);
  cudaStreamSynchronize(stream);
  if (k->options.enableMask) trefoilGradGpuGetMask(g, k->mask, stream);
  k->destroyed = trefoilGradGpuDestroy(g);
  k->again = trefoilGradGpuDestroy(g);
  cudaFree(memory);
  cudaStreamDestroy(stream);
  return NULL;
}

static rank_t *ranksOf(int enableMask, uint64_t timeoutNs) {
  ncclComm_t comms[RANKS];
  rank_t *ranks = calloc(RANKS, sizeof *ranks);
  if (ncclCommInitAll(comms, RANKS, NULL) != ncclSuccess) abort();
  for (int r = 0; r < RANKS; r++) {
    ranks[r].comm = comms[r];
    ranks[r].me = r;
    ranks[r].config = configOf();
    ranks[r].options.enableMask = enableMask;
    ranks[r].options.timeoutNs = timeoutNs;
    for (int i = 0; i < STEPS * ELEMENTS; i++)
      ranks[r].grad[i / ELEMENTS][i % ELEMENTS] =
          (float)((i * 7919 + r * 104729) % 2003 - 1000) * 0.01f;
  }
  return ranks;
}

static void runAll(rank_t *ranks) {
  pthread_t threads[RANKS];
  for (int r = 0; r < RANKS; r++) pthread_create(&threads[r], NULL, runRank, &ranks[r]);
  for (int r = 0; r < RANKS; r++) pthread_join(threads[r], NULL);
  for (int r = 0; r < RANKS; r++) ncclCommDestroy(ranks[r].comm);
}

/* Of the first `numWorkers` ranks. */
static void checkUpdates(const rank_t *ranks, int numWorkers) {
  static float want[RANKS][ELEMENTS];
  trefoil_grad_config_t c = configOf();
  c.numWorkers = numWorkers;
  for (int i = 0; i < STEPS; i++) {
    const void *grads[RANKS];
    void *updates[RANKS];
    for (int r = 0; r < RANKS; r++) {
      grads[r] = ranks[r].grad[i];
      updates[r] = want[r];
    }
    trefoil_grad_workers_t workers = {grads, NULL, updates};
    REQUIRE(trefoilGradStep(&c, i, &workers) == TREFOIL_OK, "%s", trefoilLastError());
    for (int r = 0; r < numWorkers; r++)
      CHECK(!memcmp(ranks[r].update[i], want[r], sizeof want[r]), "rank %d, step %d differs", r, i);
  }
}

TEST(steps_equal_the_reference) {
  rank_t *ranks = ranksOf(0, 0);
  runAll(ranks);
  for (int r = 0; r < RANKS; r++)
    CHECK(!ranks[r].created && !ranks[r].stepped && !ranks[r].later, "rank %d: %s", r,
          ranks[r].sentence);
  for (int r = 0; r < RANKS; r++)
    CHECK(!ranks[r].destroyed && ranks[r].again == TREFOIL_INVALID_ARGUMENT, "twice: %d, %d",
          ranks[r].destroyed, ranks[r].again);
  checkUpdates(ranks, RANKS);
  free(ranks);
}

TEST(a_lost_rank_is_named_and_nothing_is_written) {
  rank_t *ranks = ranksOf(0, LIMIT_NS);
  ranks[2].stays = 1;
  runAll(ranks);
  for (int r = 0; r < 2; r++) {
    CHECK(ranks[r].later == TREFOIL_REMOTE_ERROR, "rank %d: %d", r, ranks[r].later);
    CHECK(strstr(ranks[r].sentence, "rank 2 did not answer"), "%s", ranks[r].sentence);
    CHECK(!memcmp(ranks[r].update[0], ranks[r].grad[0], sizeof ranks[r].grad[0]), "written");
  }
  free(ranks);
}

TEST(a_lost_rank_is_masked) {
  rank_t *ranks = ranksOf(1, LIMIT_NS);
  ranks[2].stays = 1;
  runAll(ranks);
  for (int r = 0; r < 2; r++) {
    CHECK(!ranks[r].stepped && !ranks[r].later, "rank %d: %s", r, ranks[r].sentence);
    CHECK(ranks[r].mask[0] && ranks[r].mask[1] && !ranks[r].mask[2], "the mask of rank %d", r);
  }
  checkUpdates(ranks, 2);
  free(ranks);
}

TEST(configurations_that_differ_fail_everywhere) {
  static const int64_t other[TENSORS] = {9000, 5, 1, 130};
  rank_t *ranks = ranksOf(0, 2000000000);
  ranks[1].config.sizes = other;
  runAll(ranks);
  for (int r = 0; r < RANKS; r++) {
    CHECK(ranks[r].created == TREFOIL_INVALID_ARGUMENT, "rank %d: %d", r, ranks[r].created);
    CHECK(strstr(ranks[r].sentence, "rank 1 differs from rank 0's"), "%s", ranks[r].sentence);
  }
  free(ranks);
}

TEST(sizes_and_bad_arguments) {
  trefoil_grad_config_t c = configOf();
  size_t exchange = 0, scratch = 0;
  CHECK(!trefoilGradGpuSizes(&c, 132, &exchange, &scratch), "%s", ncclEpGetLastError());
#ifdef ON_CPU
  CHECK(exchange == 2 * RANKS * (TENSORS * 8 + 8), "%zu bytes", exchange);
#else
  size_t more = 0;
  CHECK(exchange == 2 * TENSORS * RANKS * 16, "%zu bytes", exchange);
  const int64_t huge = ((int64_t)1 << 31) + 3, tooHuge = (int64_t)1 << 38;
  c.sizes = &huge;
  c.numTensors = 1;
  CHECK(!trefoilGradGpuSizes(&c, 132, &exchange, &more) && more > scratch, "2^31 elements");
  c.sizes = &tooHuge;
  CHECK(trefoilGradGpuSizes(&c, 132, &exchange, &more), "2^38 elements");
  CHECK(strstr(ncclEpGetLastError(), "at most 2^37"), "%s", ncclEpGetLastError());
#endif
  c = configOf();
  c.method = TREFOIL_GRAD_TOPK;
  c.topkPerMillion = 1;
  CHECK(trefoilGradGpuSizes(&c, 132, &exchange, &scratch), "Top-K");
  CHECK(strstr(ncclEpGetLastError(), "must be 1 (A2SGD)"), "%s", ncclEpGetLastError());
  CHECK(trefoilGradGpuStep(NULL, NULL, NULL, NULL) == TREFOIL_INVALID_ARGUMENT, "NULL");
  c = configOf();
  CHECK(trefoilGradGpuCreate(&c, NULL, NULL, NULL) == TREFOIL_INVALID_ARGUMENT, "out is NULL");
  _Alignas(16) char other[512] = {0};
  trefoil_grad_gpu_t none = (trefoil_grad_gpu_t)(void *)other;
  CHECK(trefoilGradGpuDestroy(none) == TREFOIL_INVALID_ARGUMENT, "never made");
}

TEST_MAIN()
