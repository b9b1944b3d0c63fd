/* Comparing a real shape's combine. The reference for a source rank needs only that rank's rows: a case in
 * which nobody else dispatches puts them into few slots, in the same order. */
#include "validate/real_work.h"

#include "plan/error.h"

#include <stdlib.h>
#include <string.h>

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
      epRealChangeRow(rows + (size_t)i * rowBytes, rowBytes, epRealKey(run, expertRank, &slots[i]));
  if (rc == TREFOIL_OK && alone->backward) epRealSlotWeights(run, expertRank, slots, n, weights);
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
    uint8_t *rows = epRealSparse(b->bytes[r]);
    float *weights = run->rc.backward ? epRealSparse(b->weightBytes[r]) : NULL;
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
  trefoil_result_t rc = epRealCopy(rank, sums, t->data, t->bytes, cudaMemcpyDeviceToHost);
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
  epRealTakeTurn(run);
  b->expected = malloc(rank->combined.bytes + 1);
  b->weights = malloc(rank->combinedWeights.bytes + 1);
  if (isOpen) b->magnitudes = malloc(rank->combined.bytes + 1);
  trefoil_result_t rc = b->expected && b->weights && (b->magnitudes || !isOpen)
                            ? gatherRows(rank, b)
                            : epFail(TREFOIL_SYSTEM_ERROR, "out of memory for a rank's reference");
  if (rc == TREFOIL_OK) rc = sumRows(rank, b, b->expected);
  if (rc == TREFOIL_OK && isOpen) rc = boundSums(rank, b);
  for (int r = 0; r < run->options->shape.numRanks; r++) {
    epRealFreeSparse((void *)b->experts[r].tokens, b->bytes[r]);
    epRealFreeSparse((void *)b->experts[r].topkWeights, b->weightBytes[r]);
  }
  if (rc == TREFOIL_OK)
    rc = epRealCompareTensor(rank, &rank->combined, b->expected, "combined tokens");
  if (rc == TREFOIL_OK && run->rc.backward)
    rc = epRealCompareTensor(rank, &rank->combinedWeights, (uint8_t *)b->weights, "weights");
  free(b->expected);
  free(b->magnitudes);
  free(b->weights);
  free(b);
  epRealPassTurn(run);
  return rc;
}
