/* Comparing a real shape's dispatch. Two ranks at a time hold a reference; device memory is read in chunks:
 * the whole of the received tensors, unused rows and guards included. On the way each row is changed by
 * its key (expert-major: its expert, else its rank) and written back: bits low enough to leave a finite
 * value finite. */
#include "validate/real_work.h"

#include "plan/error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = 8 << 20 };

/* Rows that a combine will read are changed on the way; quantised ones are not. */
static int isCombined(const real_t *run) {
  return epRealHasCombine(run->options);
}

/* The first differing row of a chunk in words. */
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
static trefoil_result_t giveKeys(real_rank_t *rank, const expected_t *e, uint8_t *chunk,
                                 int64_t first, int64_t n) {
  const real_tensor_t *t = &rank->received;
  int used = 0;
  for (int64_t i = 0; i < n && first + i < e->numSlots; i++) {
    const trefoil_slot_t *slot = &e->slots[first + i];
    if (slot->src < 0 || !isCombined(rank->run)) continue;
    epRealChangeRow(chunk + (size_t)i * t->rowBytes, t->rowBytes,
                    epRealKey(rank->run, rank->rank, slot));
    used = 1;
  }
  if (!used) return TREFOIL_OK;
  return epRealCopy(rank, (uint8_t *)t->data + (size_t)first * t->rowBytes, chunk,
                    (size_t)n * t->rowBytes, cudaMemcpyHostToDevice);
}

/* Rows [first, first + n) of the received tensor: read, compare, change, write back. */
static trefoil_result_t compareChunk(real_rank_t *rank, const expected_t *e, uint8_t *chunk,
                                     int64_t first, int64_t n) {
  const real_tensor_t *t = &rank->received;
  size_t bytes = (size_t)n * t->rowBytes;
  const uint8_t *wanted = e->tokens + (size_t)first * t->rowBytes;
  EP_TRY(epRealCopy(rank, chunk, (uint8_t *)t->data + (size_t)first * t->rowBytes, bytes,
                    cudaMemcpyDeviceToHost));
  atomic_fetch_add(&rank->run->compared, bytes);
  if (memcmp(chunk, wanted, bytes) != 0)
    for (int64_t i = 0; i < n; i++) {
      size_t at = (size_t)i * t->rowBytes;
      if (!memcmp(chunk + at, wanted + at, t->rowBytes)) continue;
      if (first + i >= e->numSlots && epPastIsOpen(rank->run->options->open, rank->run->rc.mode))
        break;
      reportRow(rank, "Dispatch", first + i, chunk + at,
                first + i < e->numSlots ? &e->slots[first + i] : NULL);
      break;
    }
  return giveKeys(rank, e, chunk, first, n);
}

/* Order-free, one zone: finds where its rows lie; then all is compared in the library's order. */
static trefoil_result_t matchChunk(real_rank_t *rank, const expected_t *e, uint8_t *chunk,
                                   ep_zone_t *zone, int64_t end) {
  const real_tensor_t *t = &rank->received;
  int64_t first = zone->first, other;
  int moved = 0;
  EP_TRY(epRealCopy(rank, chunk, (uint8_t *)t->data + (size_t)first * t->rowBytes,
                    (size_t)(end - first) * t->rowBytes, cudaMemcpyDeviceToHost));
  zone->expected = e->tokens + (size_t)first * t->rowBytes;
  zone->found = chunk;
  zone->rowBytes = t->rowBytes;
  int64_t missing = epMatchZone(zone, e->to, &moved, &other);
  EP_CHECK(missing != -2, TREFOIL_SYSTEM_ERROR, "out of memory for a zone");
  if (moved) atomic_store(&rank->run->rowsMoved, 1);
  if (missing < 0) return TREFOIL_OK;
  reportRow(rank, "Dispatch, rows of a zone as a set", other,
            chunk + (size_t)(other - first) * t->rowBytes, &e->slots[missing]);
  return TREFOIL_OK;
}

static trefoil_result_t matchRows(real_rank_t *rank, const expected_t *e, uint8_t *chunk,
                                  int64_t *used) {
  ep_zone_t zone = {.used = used};
  for (int64_t first = 0, end; first < e->numSlots; first = end) {
    end = epZoneEnd(&rank->run->rc, e->slots, e->numSlots, first, used, &zone.numUsed);
    zone.first = first;
    EP_TRY(matchChunk(rank, e, chunk, &zone, end));
  }
  EP_CHECK(epPermuteRows(e->tokens, rank->received.rowBytes, e->numSlots, e->to),
           TREFOIL_SYSTEM_ERROR, "out of memory for the received rows");
  return TREFOIL_OK;
}

/* The slots, too, as the library has them. */
static trefoil_result_t permuteSlots(real_rank_t *rank, const expected_t *e) {
  const real_tensor_t *const sideData[] = {&rank->receivedScales, &rank->receivedWeights,
                                           &rank->receivedIds};
  void *const rows[] = {e->scales, e->weights, e->ids};
  int enough = epPermuteRows((uint8_t *)e->slots, sizeof *e->slots, e->numSlots, e->to);
  for (int i = 0; i < 3; i++)
    if (rows[i])
      enough &=
          epPermuteRows(rows[i], sideData[i]->t.ndim > 1 ? sideData[i]->rowBytes : sizeof(float),
                        e->numSlots, e->to);
  EP_CHECK(enough, TREFOIL_SYSTEM_ERROR, "out of memory for the received rows");
  return TREFOIL_OK;
}

/* The received rows: compare, change, write back. */
static trefoil_result_t compareRows(real_rank_t *rank, expected_t *e) {
  const real_tensor_t *t = &rank->received;
  int64_t rows = (int64_t)(t->bytes / t->rowBytes), perChunk = CHUNK / (int64_t)t->rowBytes;
  if (perChunk < 1) perChunk = 1;
  uint8_t *chunk = e->to ? epRealSparse(t->bytes) : malloc((size_t)perChunk * t->rowBytes);
  int64_t *used = malloc(sizeof *used * (size_t)(e->numSlots + 1));
  trefoil_result_t rc = chunk && used
                            ? TREFOIL_OK
                            : epFail(TREFOIL_SYSTEM_ERROR, "out of memory for a chunk of rows");
  if (rc == TREFOIL_OK && e->to) {
    for (int64_t i = 0; i < e->numSlots; i++) e->to[i] = i;
    rc = matchRows(rank, e, chunk, used);
    if (rc == TREFOIL_OK) rc = permuteSlots(rank, e);
  }
  for (int64_t first = 0; rc == TREFOIL_OK && first < rows; first += perChunk)
    rc = compareChunk(rank, e, chunk, first, rows - first < perChunk ? rows - first : perChunk);
  if (e->to)
    epRealFreeSparse(chunk, t->bytes);
  else
    free(chunk);
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
  return epRealCompareTensor(rank, &rank->counters, (uint8_t *)values, "counters");
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
  epRealSlotWeights(rank->run, rank->rank, slots, n, weights);
  trefoil_result_t rc = epRealCopy(rank, t->data, weights, t->bytes, cudaMemcpyHostToDevice);
  free(weights);
  return rc;
}

/* HT, order-free: what lies past the slots that arrive is left open. */
static trefoil_result_t leavePastOpen(real_rank_t *rank, const real_tensor_t *t, void *expected,
                                      int64_t numSlots) {
  if (!expected || !epPastIsOpen(rank->run->options->open, rank->run->rc.mode)) return TREFOIL_OK;
  size_t row = t->t.ndim > 1 ? t->rowBytes : sizeof(float), at = row * (size_t)numSlots;
  if (at >= t->bytes) return TREFOIL_OK;
  return epRealCopy(rank, (uint8_t *)expected + at, (uint8_t *)t->data + at, t->bytes - at,
                    cudaMemcpyDeviceToHost);
}

trefoil_result_t epRealCompareDispatch(real_rank_t *rank) {
  real_t *run = rank->run;
  epRealTakeTurn(run);
  int64_t numSlots = trefoilRefNumSlots(&run->rc, rank->rank);
  int isOpen = epRowsAreOpen(run->options->open, run->rc.mode);
  expected_t e = {.tokens = epRealSparse(rank->received.bytes),
                  .slots = malloc(sizeof(trefoil_slot_t) * (size_t)(numSlots + 1)),
                  .numSlots = numSlots};
  if (isOpen) e.to = malloc(sizeof *e.to * (size_t)(numSlots + 1));
  if (rank->receivedScales.data) e.scales = epRealSparse(rank->receivedScales.bytes);
  if (rank->receivedWeights.data && !run->rc.backward)
    e.weights = malloc(rank->receivedWeights.bytes);
  if (rank->receivedIds.data) e.ids = malloc(rank->receivedIds.bytes);
  trefoil_result_t rc = e.tokens && e.slots && (e.to || !isOpen)
                            ? TREFOIL_OK
                            : epFail(TREFOIL_SYSTEM_ERROR, "out of memory for a rank's reference");
  if (rc == TREFOIL_OK) rc = referenceDispatch(rank, &e);
  if (rc == TREFOIL_OK) rc = compareRows(rank, &e);
  if (rc == TREFOIL_OK) rc = leavePastOpen(rank, &rank->receivedWeights, e.weights, numSlots);
  if (rc == TREFOIL_OK) rc = leavePastOpen(rank, &rank->receivedIds, e.ids, numSlots);
  if (rc == TREFOIL_OK) rc = leavePastOpen(rank, &rank->receivedScales, e.scales, numSlots);
  if (rc == TREFOIL_OK && e.scales)
    rc = epRealCompareTensor(rank, &rank->receivedScales, e.scales, "received scales");
  if (rc == TREFOIL_OK && e.weights)
    rc =
        epRealCompareTensor(rank, &rank->receivedWeights, (uint8_t *)e.weights, "received weights");
  if (rc == TREFOIL_OK && e.ids)
    rc = epRealCompareTensor(rank, &rank->receivedIds, e.ids, "received topk_idx");
  if (rc == TREFOIL_OK) rc = compareCounters(rank);
  if (rc == TREFOIL_OK && run->rc.backward) rc = giveWeights(rank, e.slots, numSlots);
  epRealFreeSparse(e.tokens, rank->received.bytes);
  epRealFreeSparse(e.scales, rank->receivedScales.bytes);
  free(e.slots);
  free(e.to);
  free(e.weights);
  free(e.ids);
  epRealPassTurn(run);
  return rc;
}
