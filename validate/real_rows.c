/* What both comparisons of a real shape need: turns, memory, keys of rows, a tensor as a whole. */
#include "validate/real_work.h"

#include "plan/error.h"
#include "validate/check_report.h"
#include "validate/rng.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Memory whose pages exist only once touched: received tensors of LL are mostly unused rows. */
void *epRealSparse(size_t bytes) {
  void *p = mmap(NULL, bytes + 1, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? NULL : p;
}
void epRealFreeSparse(void *p, size_t bytes) {
  if (p) munmap(p, bytes + 1);
}

void epRealTakeTurn(real_t *run) {
  pthread_mutex_lock(&run->mutex);
  while (run->numComparing == run->maxComparing) pthread_cond_wait(&run->turn, &run->mutex);
  run->numComparing++;
  pthread_mutex_unlock(&run->mutex);
}
void epRealPassTurn(real_t *run) {
  pthread_mutex_lock(&run->mutex);
  run->numComparing--;
  pthread_cond_signal(&run->turn);
  pthread_mutex_unlock(&run->mutex);
}

trefoil_result_t epRealCopy(real_rank_t *rank, void *to, const void *from, size_t bytes,
                            enum cudaMemcpyKind kind) {
  const ep_library_t *lib = &rank->run->lib;
  cudaError_t rc = lib->cudaMemcpyAsync(to, from, bytes, kind, rank->stream);
  if (rc == cudaSuccess) rc = lib->cudaStreamSynchronize(rank->stream);
  EP_CHECK(rc == cudaSuccess, TREFOIL_SYSTEM_ERROR, "cudaMemcpyAsync: %s",
           lib->cudaGetErrorString(rc));
  return TREFOIL_OK;
}

int epRealKey(const real_t *run, int rank, const trefoil_slot_t *slot) {
  if (run->rc.mode == TREFOIL_LL_EXPERT_MAJOR || run->rc.mode == TREFOIL_HT_EXPERT_MAJOR)
    return rank * trefoilExpertsPerRank(&run->rc.routing.shape) + slot->expert;
  return rank;
}

/* Flips up to seven low bits of each bf16. */
void epRealChangeRow(uint8_t *row, size_t bytes, int key) {
  uint64_t pattern = (uint64_t)((unsigned)key * 37u % 127u + 1u) * 0x0001000100010001u;
  size_t at = 0;
  for (; at + 8 <= bytes; at += 8) {
    uint64_t word;
    memcpy(&word, row + at, 8);
    word ^= pattern;
    memcpy(row + at, &word, 8);
  }
  for (; at < bytes; at++) row[at] ^= (uint8_t)(pattern >> 8 * (at % 8));
}

/* Backward: what the weights of a slot are on the expert's rank, known from whose row it holds. */
static float slotWeight(const trefoil_slot_t *slot, int rank, int k) {
  ep_rng_t rng = epRng((uint64_t)slot->src, (uint64_t)slot->token, (uint64_t)(rank * 64 + k));
  return (float)epRange(&rng, 1, 1 << 20) * 0x1p-20f;
}

/* The weights of a rank's slots: flat [slots, K], expert-major [slots]. */
void epRealSlotWeights(const real_t *run, int rank, const trefoil_slot_t *slots, int64_t n,
                       float *weights) {
  int K = run->rc.mode == TREFOIL_HT_FLAT ? run->options->shape.topk : 1;
  for (int64_t i = 0; i < n; i++)
    for (int k = 0; k < K; k++)
      weights[i * K + k] =
          slots[i].src < 0 ? 0 : slotWeight(&slots[i], rank, K > 1 ? k : slots[i].k);
}

/* Compares a device tensor and its guard with host memory, chunk by chunk. */
trefoil_result_t epRealCompareTensor(real_rank_t *rank, const real_tensor_t *t,
                                     const uint8_t *expected, const char *what) {
  uint8_t *found = malloc(t->bytes + 256);
  EP_CHECK(found, TREFOIL_SYSTEM_ERROR, "out of memory for a comparison");
  trefoil_result_t rc = epRealCopy(rank, found, t->data, t->bytes + 256, cudaMemcpyDeviceToHost);
  size_t at = 0;
  while (rc == TREFOIL_OK && at < t->bytes && found[at] == expected[at]) at++;
  if (rc == TREFOIL_OK && at < t->bytes) {
    char wanted[EP_VALUE_TEXT], got[EP_VALUE_TEXT];
    trefoil_dtype_t dtype = (trefoil_dtype_t)t->t.datatype;
    size_t b = trefoilDtypeBytes(dtype), start = at - at % b;
    epRealFail(rank->run, "rank %d, %s, row %zu, element %zu: expected %s, found %s", rank->rank,
               what, at / t->rowBytes, at % t->rowBytes / b,
               epFormatValue(wanted, dtype, expected + start),
               epFormatValue(got, dtype, found + start));
  }
  for (size_t i = 0; rc == TREFOIL_OK && i < 256; i++)
    if (found[t->bytes + i] != EP_REAL_NOISE)
      epRealFail(rank->run, "rank %d, %s: byte %zu past its end was written", rank->rank, what, i);
  atomic_fetch_add(&rank->run->compared, t->bytes + 256);
  free(found);
  return rc;
}
