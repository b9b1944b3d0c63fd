/* Comparing a real shape. Two ranks at a time hold a reference; device memory is read in pieces.
 *
 * The dispatch: the whole of the received tensors, unused rows and guards included. On the way each
 * row is changed by its key (expert-major: its expert, else its rank) and written back: bits low
 * enough to leave a finite value finite. The combine's reference for a source rank needs only that
 * rank's rows: a case in which nobody else dispatches puts them into few slots, in the same order. */
#include "validate/order_free.h"
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

/* What a rank should have received, and where the library put it. */
typedef struct expected_t {
  uint8_t *tokens, *scales;
  float *weights;
  void *ids;
  trefoil_slot_t *slots;
  int64_t numSlots;
  int64_t *to; /* order-free: the reference's slot -> the library's; else NULL */
} expected_t;

/* Rows that a combine will read get their keys and go back to the device. */
static trefoil_result_t giveKeys(real_rank_t *rank, const expected_t *e, uint8_t *piece,
                                 int64_t first, int64_t n) {
  const real_tensor_t *t = &rank->received;
  int used = 0;
  for (int64_t i = 0; i < n && first + i < e->numSlots; i++) {
    const trefoil_slot_t *slot = &e->slots[first + i];
    if (slot->src < 0 || !isCombined(rank->run)) continue;
    transformRow(piece + (size_t)i * t->rowBytes, t->rowBytes,
                 keyOfSlot(rank->run, rank->rank, slot));
    used = 1;
  }
  if (!used) return TREFOIL_OK;
  return copy(rank, (uint8_t *)t->data + (size_t)first * t->rowBytes, piece,
              (size_t)n * t->rowBytes, cudaMemcpyHostToDevice);
}

/* Rows [first, first + n) of the received tensor: read, compare, change, write back. */
static trefoil_result_t comparePiece(real_rank_t *rank, const expected_t *e, uint8_t *piece,
                                     int64_t first, int64_t n) {
  const real_tensor_t *t = &rank->received;
  size_t bytes = (size_t)n * t->rowBytes;
  const uint8_t *wanted = e->tokens + (size_t)first * t->rowBytes;
  EP_TRY(copy(rank, piece, (uint8_t *)t->data + (size_t)first * t->rowBytes, bytes,
              cudaMemcpyDeviceToHost));
  atomic_fetch_add(&rank->run->compared, bytes);
  if (memcmp(piece, wanted, bytes) != 0)
    for (int64_t i = 0; i < n; i++) {
      size_t at = (size_t)i * t->rowBytes;
      if (!memcmp(piece + at, wanted + at, t->rowBytes)) continue;
      reportRow(rank, "Dispatch", first + i, piece + at,
                first + i < e->numSlots ? &e->slots[first + i] : NULL);
      break;
    }
  return giveKeys(rank, e, piece, first, n);
}

/* Order-free, one zone: finds where its rows lie; then all is compared in the library's order. */
static trefoil_result_t matchPiece(real_rank_t *rank, const expected_t *e, uint8_t *piece,
                                   ep_zone_t *zone, int64_t end) {
  const real_tensor_t *t = &rank->received;
  int64_t first = zone->first, other;
  int moved = 0;
  EP_TRY(copy(rank, piece, (uint8_t *)t->data + (size_t)first * t->rowBytes,
              (size_t)(end - first) * t->rowBytes, cudaMemcpyDeviceToHost));
  zone->expected = e->tokens + (size_t)first * t->rowBytes;
  zone->found = piece;
  zone->rowBytes = t->rowBytes;
  int64_t missing = epMatchZone(zone, e->to, &moved, &other);
  EP_CHECK(missing != -2, TREFOIL_SYSTEM_ERROR, "out of memory for a zone");
  if (moved) atomic_store(&rank->run->rowsMoved, 1);
  if (missing < 0) return TREFOIL_OK;
  reportRow(rank, "Dispatch, rows of a zone as a set", other,
            piece + (size_t)(other - first) * t->rowBytes, &e->slots[missing]);
  return TREFOIL_OK;
}

static trefoil_result_t matchRows(real_rank_t *rank, const expected_t *e, uint8_t *piece,
                                  int64_t *used) {
  ep_zone_t zone = {.used = used};
  for (int64_t first = 0, end; first < e->numSlots; first = end) {
    end = epZoneEnd(&rank->run->rc, e->slots, e->numSlots, first, used, &zone.numUsed);
    zone.first = first;
    EP_TRY(matchPiece(rank, e, piece, &zone, end));
  }
  EP_CHECK(epPermuteRows(e->tokens, rank->received.rowBytes, e->numSlots, e->to),
           TREFOIL_SYSTEM_ERROR, "out of memory for the received rows");
  return TREFOIL_OK;
}

/* The slots, too, as the library has them. */
static trefoil_result_t permuteSlots(real_rank_t *rank, const expected_t *e) {
  const real_tensor_t *const beside[] = {&rank->receivedScales, &rank->receivedWeights,
                                         &rank->receivedIds};
  void *const rows[] = {e->scales, e->weights, e->ids};
  int enough = epPermuteRows((uint8_t *)e->slots, sizeof *e->slots, e->numSlots, e->to);
  for (int i = 0; i < 3; i++)
    if (rows[i])
      enough &= epPermuteRows(rows[i], beside[i]->t.ndim > 1 ? beside[i]->rowBytes : sizeof(float),
                              e->numSlots, e->to);
  EP_CHECK(enough, TREFOIL_SYSTEM_ERROR, "out of memory for the received rows");
  return TREFOIL_OK;
}

/* The received rows: compare, change, write back. */
static trefoil_result_t compareRows(real_rank_t *rank, expected_t *e) {
  const real_tensor_t *t = &rank->received;
  int64_t rows = (int64_t)(t->bytes / t->rowBytes), perPiece = PIECE / (int64_t)t->rowBytes;
  if (perPiece < 1) perPiece = 1;
  uint8_t *piece = e->to ? sparse(t->bytes) : malloc((size_t)perPiece * t->rowBytes);
  int64_t *used = malloc(sizeof *used * (size_t)(e->numSlots + 1));
  trefoil_result_t rc = piece && used
                            ? TREFOIL_OK
                            : epFail(TREFOIL_SYSTEM_ERROR, "out of memory for a piece of rows");
  if (rc == TREFOIL_OK && e->to) {
    for (int64_t i = 0; i < e->numSlots; i++) e->to[i] = i;
    rc = matchRows(rank, e, piece, used);
    if (rc == TREFOIL_OK) rc = permuteSlots(rank, e);
  }
  for (int64_t first = 0; rc == TREFOIL_OK && first < rows; first += perPiece)
    rc = comparePiece(rank, e, piece, first, rows - first < perPiece ? rows - first : perPiece);
  if (e->to)
    freeSparse(piece, t->bytes);
  else
    free(piece);
  free(used);
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
  int isOpen = epRowsAreOpen(run->options->open, run->rc.mode);
  expected_t e = {.tokens = sparse(rank->received.bytes),
                  .slots = malloc(sizeof(trefoil_slot_t) * (size_t)(numSlots + 1)),
                  .numSlots = numSlots};
  if (isOpen) e.to = malloc(sizeof *e.to * (size_t)(numSlots + 1));
  if (rank->receivedScales.data) e.scales = sparse(rank->receivedScales.bytes);
  if (rank->receivedWeights.data && !run->rc.backward)
    e.weights = malloc(rank->receivedWeights.bytes);
  if (rank->receivedIds.data) e.ids = malloc(rank->receivedIds.bytes);
  trefoil_result_t rc = e.tokens && e.slots && (e.to || !isOpen)
                            ? TREFOIL_OK
                            : epFail(TREFOIL_SYSTEM_ERROR, "out of memory for a rank's reference");
  if (rc == TREFOIL_OK) rc = referenceDispatch(rank, &e);
  if (rc == TREFOIL_OK) rc = compareRows(rank, &e);
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
  free(e.to);
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

/* A source rank's combine by the reference: what each rank holds of its rows, and what comes of it. */
typedef struct back_t {
  trefoil_case_t alone;
  int64_t counts[EP_REAL_MAX_RANKS];
  const int32_t *ids[EP_REAL_MAX_RANKS];
  size_t bytes[EP_REAL_MAX_RANKS], weightBytes[EP_REAL_MAX_RANKS];
  trefoil_expert_rows_t experts[EP_REAL_MAX_RANKS];
  uint8_t *expected, *magnitudes;
  float *weights;
} back_t;

static trefoil_result_t gatherRows(real_rank_t *rank, back_t *b) {
  real_t *run = rank->run;
  int perSlot = run->rc.mode == TREFOIL_HT_FLAT ? run->options->shape.topk : 1;
  b->counts[rank->rank] = run->counts[rank->rank];
  b->ids[rank->rank] = run->ids[rank->rank];
  b->alone = run->rc;
  b->alone.routing.numTokens = b->counts;
  b->alone.routing.topkIdx = b->ids;
  for (int r = 0; r < run->options->shape.numRanks; r++) {
    size_t numSlots = (size_t)trefoilRefNumSlots(&b->alone, r);
    b->bytes[r] = rank->combined.rowBytes * numSlots;
    b->weightBytes[r] = sizeof(float) * (size_t)perSlot * numSlots;
    uint8_t *rows = sparse(b->bytes[r]);
    float *weights = run->rc.backward ? sparse(b->weightBytes[r]) : NULL;
    b->experts[r].tokens = rows;
    b->experts[r].topkWeights = weights;
    EP_CHECK(rows && (weights || !run->rc.backward), TREFOIL_SYSTEM_ERROR,
             "out of memory for a rank's reference");
    EP_TRY(expertRows(&b->alone, run, rank->rank, r, rows, weights));
  }
  return TREFOIL_OK;
}

static trefoil_result_t sumRows(real_rank_t *rank, back_t *b, uint8_t *out) {
  real_t *run = rank->run;
  return trefoilRefCombine(&b->alone, rank->rank, b->experts,
                           run->rc.mode == TREFOIL_LL_EXPERT_MAJOR ? run->weights[rank->rank]
                                                                   : NULL,
                           out, run->rc.backward ? b->weights : NULL);
}

/* Order-free: each sum within its bound; then what the library has is what is expected. */
static trefoil_result_t boundSums(real_rank_t *rank, back_t *b) {
  real_t *run = rank->run;
  const real_tensor_t *t = &rank->combined;
  int moved = 0;
  double wanted, found, bound;
  for (int r = 0; r < run->options->shape.numRanks; r++) /* all weights are positive */
    epClearSigns((uint8_t *)b->experts[r].tokens, b->bytes[r], TREFOIL_BF16);
  EP_TRY(sumRows(rank, b, b->magnitudes));
  uint8_t *sums = malloc(t->bytes + 1);
  EP_CHECK(sums, TREFOIL_SYSTEM_ERROR, "out of memory for a comparison");
  trefoil_result_t rc = copy(rank, sums, t->data, t->bytes, cudaMemcpyDeviceToHost);
  ep_sums_t s = {.dtype = TREFOIL_BF16,
                 .numRanks = run->options->shape.numRanks,
                 .topk = run->options->shape.topk,
                 .bytes = t->bytes,
                 .expected = b->expected,
                 .magnitudes = b->magnitudes,
                 .found = sums};
  int64_t at = rc == TREFOIL_OK ? epCompareSums(&s, &moved, &wanted, &found, &bound) : -1;
  if (moved) atomic_store(&run->sumsMoved, 1);
  if (at >= 0)
    epRealFail(run,
               "rank %d, combined tokens, row %zu, element %zu: expected %.9g within %.3g, found "
               "%.9g",
               rank->rank, 2 * (size_t)at / t->rowBytes, (size_t)at % (t->rowBytes / 2), wanted,
               bound, found);
  else if (rc == TREFOIL_OK)
    memcpy(b->expected, sums, t->bytes);
  free(sums);
  return rc;
}

trefoil_result_t epRealCompareCombine(real_rank_t *rank) {
  real_t *run = rank->run;
  int isOpen = run->options->open != 0;
  back_t *b = calloc(1, sizeof *b);
  EP_CHECK(b, TREFOIL_SYSTEM_ERROR, "out of memory for a rank's reference");
  takeTurn(run);
  b->expected = malloc(rank->combined.bytes + 1);
  b->weights = malloc(rank->combinedWeights.bytes + 1);
  if (isOpen) b->magnitudes = malloc(rank->combined.bytes + 1);
  trefoil_result_t rc = b->expected && b->weights && (b->magnitudes || !isOpen)
                            ? gatherRows(rank, b)
                            : epFail(TREFOIL_SYSTEM_ERROR, "out of memory for a rank's reference");
  if (rc == TREFOIL_OK) rc = sumRows(rank, b, b->expected);
  if (rc == TREFOIL_OK && isOpen) rc = boundSums(rank, b);
  for (int r = 0; r < run->options->shape.numRanks; r++) {
    freeSparse((void *)b->experts[r].tokens, b->bytes[r]);
    freeSparse((void *)b->experts[r].topkWeights, b->weightBytes[r]);
  }
  if (rc == TREFOIL_OK) rc = compareTensor(rank, &rank->combined, b->expected, "combined tokens");
  if (rc == TREFOIL_OK && run->rc.backward)
    rc = compareTensor(rank, &rank->combinedWeights, (uint8_t *)b->weights, "weights");
  free(b->expected);
  free(b->magnitudes);
  free(b->weights);
  free(b);
  passTurn(run);
  return rc;
}
