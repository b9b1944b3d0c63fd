/* Comparing a real shape. Two ranks at a time hold a reference; device memory is read in pieces.
 *
 * The dispatch: the whole of the received tensors, unused rows and guards included. On the way each
 * row is changed by its key (expert-major: its expert, else its rank) and written back: bits low
 * enough to leave a finite value finite. The combine's reference for a source rank needs only that
 * rank's rows: a case in which nobody else dispatches puts them into few slots, in the same order. */
#include "validate/real_work.h"

#include "plan/error.h"
#include "validate/check_report.h"
#include "validate/rng.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PIECE = 8 << 20 };

/* Memory whose pages exist only once touched: received tensors of LL are mostly unused rows. */
static void *sparse(size_t bytes) {
  void *p = mmap(NULL, bytes + 1, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? NULL : p;
}
static void freeSparse(void *p, size_t bytes) {
  if (p) munmap(p, bytes + 1);
}

static void takeTurn(real_t *run) {
  pthread_mutex_lock(&run->mutex);
  while (run->numComparing == run->maxComparing) pthread_cond_wait(&run->turn, &run->mutex);
  run->numComparing++;
  pthread_mutex_unlock(&run->mutex);
}
static void passTurn(real_t *run) {
  pthread_mutex_lock(&run->mutex);
  run->numComparing--;
  pthread_cond_signal(&run->turn);
  pthread_mutex_unlock(&run->mutex);
}

static trefoil_result_t copy(real_rank_t *rank, void *to, const void *from, size_t bytes,
                             enum cudaMemcpyKind kind) {
  const ep_library_t *lib = &rank->run->lib;
  cudaError_t rc = lib->cudaMemcpyAsync(to, from, bytes, kind, rank->stream);
  if (rc == cudaSuccess) rc = lib->cudaStreamSynchronize(rank->stream);
  EP_CHECK(rc == cudaSuccess, TREFOIL_SYSTEM_ERROR, "cudaMemcpyAsync: %s",
           lib->cudaGetErrorString(rc));
  return TREFOIL_OK;
}

/* Rows that a combine will read are changed on the way; quantised ones are not. */
static int isCombined(const real_t *run) {
  return epRealHasCombine(run->options);
}

static int keyOfSlot(const real_t *run, int rank, const trefoil_slot_t *slot) {
  if (run->rc.mode == TREFOIL_LL_EXPERT_MAJOR || run->rc.mode == TREFOIL_HT_EXPERT_MAJOR)
    return rank * trefoilExpertsPerRank(&run->rc.routing.shape) + slot->expert;
  return rank;
}

/* Flips up to seven low bits of each bf16. */
static void transformRow(uint8_t *row, size_t bytes, int key) {
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
static void slotWeights(const real_t *run, int rank, const trefoil_slot_t *slots, int64_t n,
                        float *weights) {
  int K = run->rc.mode == TREFOIL_HT_FLAT ? run->options->shape.topk : 1;
  for (int64_t i = 0; i < n; i++)
    for (int k = 0; k < K; k++)
      weights[i * K + k] =
          slots[i].src < 0 ? 0 : slotWeight(&slots[i], rank, K > 1 ? k : slots[i].k);
}

/* The first differing row of a piece in words. */
static void reportRow(real_rank_t *rank, const char *what, int64_t row, const uint8_t *found,
                      const trefoil_slot_t *slot) {
  real_t *run = rank->run;
  size_t rowBytes = rank->received.rowBytes;
  char expected[96] = "an untouched row", got[96] = "a row that is nobody's";
  if (slot && slot->src >= 0)
    snprintf(expected, sizeof expected, "the row of (rank %d, token %lld)", slot->src,
             (long long)slot->token);
  for (int r = 0; found && r < run->options->shape.numRanks; r++)
    for (int64_t t = 0; t < run->counts[r]; t++)
      if (!memcmp(run->tokens[r] + (size_t)t * rowBytes, found, rowBytes))
        snprintf(got, sizeof got, "the row of (rank %d, token %lld)", r, (long long)t);
  epRealFail(run, "rank %d, %s, slot %lld: expected %s, found %s", rank->rank, what, (long long)row,
             expected, got);
}

/* Compares a device tensor and its guard with host memory, piece by piece. */
static trefoil_result_t compareTensor(real_rank_t *rank, const real_tensor_t *t,
                                      const uint8_t *expected, const char *what) {
  uint8_t *found = malloc(t->bytes + 256);
  EP_CHECK(found, TREFOIL_SYSTEM_ERROR, "out of memory for a comparison");
  trefoil_result_t rc = copy(rank, found, t->data, t->bytes + 256, cudaMemcpyDeviceToHost);
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

/* The received rows: compare, change, write back. */
static trefoil_result_t compareRows(real_rank_t *rank, const uint8_t *expected,
                                    const trefoil_slot_t *slots, int64_t numSlots) {
  const real_tensor_t *t = &rank->received;
  int64_t rows = (int64_t)(t->bytes / t->rowBytes), perPiece = PIECE / (int64_t)t->rowBytes;
  if (perPiece < 1) perPiece = 1;
  uint8_t *piece = malloc((size_t)perPiece * t->rowBytes);
  EP_CHECK(piece, TREFOIL_SYSTEM_ERROR, "out of memory for a piece of rows");
  trefoil_result_t rc = TREFOIL_OK;
  for (int64_t first = 0; rc == TREFOIL_OK && first < rows; first += perPiece) {
    int64_t n = rows - first < perPiece ? rows - first : perPiece;
    size_t bytes = (size_t)n * t->rowBytes;
    uint8_t *device = (uint8_t *)t->data + (size_t)first * t->rowBytes;
    const uint8_t *wanted = expected + (size_t)first * t->rowBytes;
    rc = copy(rank, piece, device, bytes, cudaMemcpyDeviceToHost);
    if (rc == TREFOIL_OK && memcmp(piece, wanted, bytes) != 0)
      for (int64_t i = 0; i < n; i++)
        if (memcmp(piece + (size_t)i * t->rowBytes, wanted + (size_t)i * t->rowBytes,
                   t->rowBytes)) {
          reportRow(rank, "Dispatch", first + i, piece + (size_t)i * t->rowBytes,
                    first + i < numSlots ? &slots[first + i] : NULL);
          break;
        }
    int used = 0;
    for (int64_t i = 0; i < n && first + i < numSlots; i++) {
      const trefoil_slot_t *slot = &slots[first + i];
      if (slot->src < 0 || !isCombined(rank->run)) continue;
      transformRow(piece + (size_t)i * t->rowBytes, t->rowBytes,
                   keyOfSlot(rank->run, rank->rank, slot));
      used = 1;
    }
    if (rc == TREFOIL_OK && used) rc = copy(rank, device, piece, bytes, cudaMemcpyHostToDevice);
    atomic_fetch_add(&rank->run->compared, bytes);
  }
  free(piece);
  return rc;
}

static trefoil_result_t compareCounters(real_rank_t *rank) {
  real_t *run = rank->run;
  int64_t values[4096];
  EP_CHECK(rank->counters.sizes[0] <= 4096, TREFOIL_INVALID_ARGUMENT, "%zu counters: at most 4096",
           rank->counters.sizes[0]);
  trefoil_counters_t counters = {0};
  if (run->rc.mode == TREFOIL_LL_RANK_MAJOR)
    counters.srcRankCounters = values;
  else
    counters.expertCounters = values;
  EP_TRY(trefoilRefCounters(&run->rc, rank->rank, &counters));
  if (rank->counters.t.datatype == ncclInt32)
    for (size_t i = 0; i < rank->counters.sizes[0]; i++) {
      int32_t narrow = (int32_t)values[i];
      memcpy((uint8_t *)values + 4 * i, &narrow, 4);
    }
  return compareTensor(rank, &rank->counters, (uint8_t *)values, "counters");
}

typedef struct expected_t {
  uint8_t *tokens, *scales;
  float *weights;
  void *ids;
  trefoil_slot_t *slots;
} expected_t;

static trefoil_result_t referenceDispatch(real_rank_t *rank, expected_t *e) {
  real_t *run = rank->run;
  trefoil_source_t sources[EP_REAL_MAX_RANKS];
  for (int r = 0; r < run->options->shape.numRanks; r++)
    sources[r] = (trefoil_source_t){run->tokens[r], run->scales[r],
                                    run->rc.backward ? NULL : run->weights[r]};
  memset(e->tokens, EP_REAL_NOISE, rank->received.bytes);
  if (e->scales) memset(e->scales, EP_REAL_NOISE, rank->receivedScales.bytes);
  if (e->weights) memset(e->weights, EP_REAL_NOISE, rank->receivedWeights.bytes);
  if (e->ids) memset(e->ids, EP_REAL_NOISE, rank->receivedIds.bytes);
  trefoil_received_t out = {
      .tokens = e->tokens, .scales = e->scales, .topkWeights = e->weights, .topkIdx = e->ids};
  if (run->rc.mode >= TREFOIL_HT_FLAT) out.topkRows = run->maxRows;
  EP_TRY(trefoilRefDispatch(&run->rc, rank->rank, sources, &out));
  return trefoilRefSlots(&run->rc, rank->rank, e->slots);
}

/* Backward: the combine's weights, in place of what a dispatch forward would have brought. */
static trefoil_result_t giveWeights(real_rank_t *rank, const trefoil_slot_t *slots, int64_t n) {
  const real_tensor_t *t = &rank->receivedWeights;
  float *weights = calloc(1, t->bytes + 1);
  EP_CHECK(weights, TREFOIL_SYSTEM_ERROR, "out of memory for weights");
  slotWeights(rank->run, rank->rank, slots, n, weights);
  trefoil_result_t rc = copy(rank, t->data, weights, t->bytes, cudaMemcpyHostToDevice);
  free(weights);
  return rc;
}

trefoil_result_t epRealCompareDispatch(real_rank_t *rank) {
  real_t *run = rank->run;
  takeTurn(run);
  int64_t numSlots = trefoilRefNumSlots(&run->rc, rank->rank);
  expected_t e = {.tokens = sparse(rank->received.bytes),
                  .slots = malloc(sizeof(trefoil_slot_t) * (size_t)(numSlots + 1))};
  if (rank->receivedScales.data) e.scales = sparse(rank->receivedScales.bytes);
  if (rank->receivedWeights.data && !run->rc.backward)
    e.weights = malloc(rank->receivedWeights.bytes);
  if (rank->receivedIds.data) e.ids = malloc(rank->receivedIds.bytes);
  trefoil_result_t rc = e.tokens && e.slots
                            ? TREFOIL_OK
                            : epFail(TREFOIL_SYSTEM_ERROR, "out of memory for a rank's reference");
  if (rc == TREFOIL_OK) rc = referenceDispatch(rank, &e);
  if (rc == TREFOIL_OK) rc = compareRows(rank, e.tokens, e.slots, numSlots);
  if (rc == TREFOIL_OK && e.scales)
    rc = compareTensor(rank, &rank->receivedScales, e.scales, "received scales");
  if (rc == TREFOIL_OK && e.weights)
    rc = compareTensor(rank, &rank->receivedWeights, (uint8_t *)e.weights, "received weights");
  if (rc == TREFOIL_OK && e.ids)
    rc = compareTensor(rank, &rank->receivedIds, e.ids, "received topk_idx");
  if (rc == TREFOIL_OK) rc = compareCounters(rank);
  if (rc == TREFOIL_OK && run->rc.backward) rc = giveWeights(rank, e.slots, numSlots);
  freeSparse(e.tokens, rank->received.bytes);
  freeSparse(e.scales, rank->receivedScales.bytes);
  free(e.slots);
  free(e.weights);
  free(e.ids);
  passTurn(run);
  return rc;
}

/* ---- Combine ---- */

/* What `expertRank` holds of `source`'s rows alone, changed as on the device. */
static trefoil_result_t expertRows(const trefoil_case_t *alone, const real_t *run, int source,
                                   int expertRank, uint8_t *rows, float *weights) {
  size_t rowBytes = 2 * (size_t)alone->width;
  trefoil_source_t sources[EP_REAL_MAX_RANKS] = {{0}};
  sources[source] =
      (trefoil_source_t){run->tokens[source], NULL, alone->backward ? NULL : run->weights[source]};
  trefoil_received_t out = {.tokens = rows};
  EP_TRY(trefoilRefDispatch(alone, expertRank, sources, &out));
  int64_t n = trefoilRefNumSlots(alone, expertRank);
  trefoil_slot_t *slots = malloc(sizeof *slots * (size_t)(n + 1));
  EP_CHECK(slots, TREFOIL_SYSTEM_ERROR, "out of memory for slots");
  trefoil_result_t rc = trefoilRefSlots(alone, expertRank, slots);
  for (int64_t i = 0; rc == TREFOIL_OK && i < n; i++)
    if (slots[i].src >= 0)
      transformRow(rows + (size_t)i * rowBytes, rowBytes, keyOfSlot(run, expertRank, &slots[i]));
  if (rc == TREFOIL_OK && alone->backward) slotWeights(run, expertRank, slots, n, weights);
  free(slots);
  return rc;
}

trefoil_result_t epRealCompareCombine(real_rank_t *rank) {
  real_t *run = rank->run;
  int R = run->options->shape.numRanks;
  int64_t counts[EP_REAL_MAX_RANKS] = {0};
  const int32_t *ids[EP_REAL_MAX_RANKS] = {NULL};
  counts[rank->rank] = run->counts[rank->rank];
  ids[rank->rank] = run->ids[rank->rank];
  trefoil_case_t alone = run->rc;
  alone.routing.numTokens = counts;
  alone.routing.topkIdx = ids;
  size_t rowBytes = rank->combined.rowBytes, bytes[EP_REAL_MAX_RANKS];
  size_t weightBytes[EP_REAL_MAX_RANKS];
  int perSlot = run->rc.mode == TREFOIL_HT_FLAT ? run->options->shape.topk : 1;
  trefoil_expert_rows_t experts[EP_REAL_MAX_RANKS] = {{0}};
  trefoil_result_t rc = TREFOIL_OK;
  takeTurn(run);
  for (int r = 0; r < R; r++) {
    bytes[r] = rowBytes * (size_t)trefoilRefNumSlots(&alone, r);
    weightBytes[r] = sizeof(float) * (size_t)perSlot * (bytes[r] / rowBytes);
    uint8_t *rows = sparse(bytes[r]);
    float *weights = run->rc.backward ? sparse(weightBytes[r]) : NULL;
    experts[r].tokens = rows;
    experts[r].topkWeights = weights;
    if (rc == TREFOIL_OK)
      rc = rows && (weights || !run->rc.backward)
               ? expertRows(&alone, run, rank->rank, r, rows, weights)
               : epFail(TREFOIL_SYSTEM_ERROR, "out of memory for a rank's reference");
  }
  uint8_t *expected = malloc(rank->combined.bytes + 1);
  float *expectedWeights = malloc(rank->combinedWeights.bytes + 1);
  if (rc == TREFOIL_OK && !(expected && expectedWeights))
    rc = epFail(TREFOIL_SYSTEM_ERROR, "out of memory for a rank's reference");
  if (rc == TREFOIL_OK)
    rc =
        trefoilRefCombine(&alone, rank->rank, experts,
                          run->rc.mode == TREFOIL_LL_EXPERT_MAJOR ? run->weights[rank->rank] : NULL,
                          expected, run->rc.backward ? expectedWeights : NULL);
  for (int r = 0; r < R; r++) {
    freeSparse((void *)experts[r].tokens, bytes[r]);
    freeSparse((void *)experts[r].topkWeights, weightBytes[r]);
  }
  if (rc == TREFOIL_OK) rc = compareTensor(rank, &rank->combined, expected, "combined tokens");
  if (rc == TREFOIL_OK && run->rc.backward)
    rc = compareTensor(rank, &rank->combinedWeights, (uint8_t *)expectedWeights, "weights");
  free(expected);
  free(expectedWeights);
  passTurn(run);
  return rc;
}
