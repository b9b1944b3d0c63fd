/* Combine for one source rank: the rows of its tokens come back from the slots where dispatch put
 * them and are summed in the order of the mode. docs/spec.md, sections C and S.
 *
 * All orders but two are one tree, ascending everywhere and rounded to the wire type at each level:
 *
 *     token = sum over nodes ( sum over ranks of the node ( sum over k of the rank ) )
 *
 * A level with one unweighted row passes it on as it is, so HT inside one node and LL's partial sums
 * (all ranks as one node) are the same tree. The other two are flat sums: LL expert-major by k, LL
 * rank-major by ranks in the order in which the token's row first names them. */
#include "ref/place.h"

#include "plan/error.h"
#include "ref/row.h"

#include <stdlib.h>
#include <string.h>

typedef struct job {
  const trefoil_case_t *c;
  const trefoil_expert_rows_t *experts;
  const float *weights; /* [B, K] LL expert-major */
  int rank;
  size_t rowBytes;
  int ranksPerNode;   /* of the tree */
  ep_place_t *places; /* [B, K] */
  int *numPlaces;     /* [B] */
  /* Scratch of the three levels: k, ranks, nodes. */
  float *acc[3];
  uint8_t *row[2];
  float *decoded;  /* NVFP4: a row as f32 */
  uint8_t *packed; /* NVFP4: a row on the wire, elements and then block scales */
} job_t;

static void freeJob(job_t *j) {
  free(j->places);
  free(j->numPlaces);
  free(j->acc[0]); /* the one block of all scratch */
}

static trefoil_result_t makeJob(job_t *j) {
  const trefoil_case_t *c = j->c;
  size_t B = (size_t)c->routing.numTokens[j->rank], K = (size_t)c->routing.shape.topk;
  size_t width = (size_t)c->width;
  j->rowBytes = width * trefoilDtypeBytes(c->dtype);
  j->ranksPerNode = epIsHt(c) ? c->routing.shape.ranksPerNode : c->routing.shape.numRanks;
  j->places = malloc(sizeof *j->places * (B * K + 1));
  j->numPlaces = malloc(sizeof *j->numPlaces * (B + 1));
  j->acc[0] = malloc(sizeof(float) * width * 7);
  EP_CHECK(j->places && j->numPlaces && j->acc[0], TREFOIL_SYSTEM_ERROR,
           "out of memory for the combine of %zu tokens", B);
  j->acc[1] = j->acc[0] + width;
  j->acc[2] = j->acc[1] + width;
  j->decoded = j->acc[2] + width;
  j->row[0] = (uint8_t *)(j->decoded + width);
  j->row[1] = j->row[0] + sizeof(float) * width;
  j->packed = j->row[1] + sizeof(float) * width;
  return TREFOIL_OK;
}

/* Walks all tokens up to this rank's last one: where did dispatch put each of its rows? A row
 * that was lost on the way back, because masks changed, is left out here. */
static trefoil_result_t findPlaces(const job_t *j) {
  const trefoil_case_t *c = j->c;
  int K = c->routing.shape.topk, R = c->routing.shape.numRanks;
  ep_placer_t placer;
  EP_TRY(epPlacerInit(&placer, c, -1));
  for (int src = 0; src <= j->rank; src++) {
    for (int64_t t = 0; t < c->routing.numTokens[src]; t++) {
      ep_place_t *places = src == j->rank ? j->places + t * K : j->places;
      int n = 0, numPlaces = epPlaceToken(&placer, src, t, places);
      for (int i = 0; i < numPlaces; i++) {
        if (epLinked(c->activeCombine, R, src, places[i].rank)) places[n++] = places[i];
      }
      if (src == j->rank) j->numPlaces[t] = n;
    }
  }
  epPlacerFree(&placer);
  return TREFOIL_OK;
}

static trefoil_result_t checkRows(const job_t *j, bool wantsWeights) {
  const trefoil_case_t *c = j->c;
  int K = c->routing.shape.topk;
  for (int64_t t = 0; t < c->routing.numTokens[j->rank]; t++) {
    for (int i = 0; i < j->numPlaces[t]; i++) {
      int d = j->places[t * K + i].rank;
      EP_CHECK(j->experts[d].tokens, TREFOIL_INVALID_ARGUMENT,
               "rank %d holds rows of rank %d, its tokens are NULL", d, j->rank);
      EP_CHECK(j->experts[d].scales || c->quant != TREFOIL_QUANT_NVFP4, TREFOIL_INVALID_ARGUMENT,
               "rank %d holds rows of rank %d, its scales are NULL", d, j->rank);
      EP_CHECK(j->experts[d].topkWeights || !wantsWeights, TREFOIL_INVALID_ARGUMENT,
               "rank %d holds rows of rank %d, its topkWeights are NULL", d, j->rank);
    }
  }
  return TREFOIL_OK;
}

static const uint8_t *rowAt(const job_t *j, const ep_place_t *p) {
  return (const uint8_t *)j->experts[p->rank].tokens + (size_t)p->slot * j->rowBytes;
}

static ep_sum_t sumOf(const job_t *j, int level) {
  return (ep_sum_t){.dtype = j->c->dtype, .width = j->c->width, .acc = j->acc[level]};
}

/* One row into a sum, with its weight in LL expert-major, through NVFP4 if that is asked for. */
static void addRow(const job_t *j, ep_sum_t *sum, int64_t t, const ep_place_t *p) {
  const trefoil_case_t *c = j->c;
  bool isWeighted = c->mode == TREFOIL_LL_EXPERT_MAJOR;
  float w = isWeighted ? j->weights[t * c->routing.shape.topk + p->k] : 1.0f;
  if (c->quant == TREFOIL_QUANT_NVFP4) {
    float g = j->experts[p->rank].scales[p->slot];
    uint8_t *blockScales = j->packed + c->width / 2;
    epRowEncodeNvfp4((const uint16_t *)rowAt(j, p), c->width, g, j->packed, blockScales);
    epRowDecodeNvfp4(j->packed, blockScales, g, c->width, j->decoded);
    if (isWeighted)
      epSumAddDecodedWeighted(sum, j->decoded, w);
    else
      epSumAddDecoded(sum, j->decoded);
  } else if (isWeighted) {
    epSumAddWeighted(sum, rowAt(j, p), w);
  } else {
    epSumAdd(sum, rowAt(j, p));
  }
}

/* LL: by ascending k, or by ranks as first named: the order in which places come. */
static void sumInOrder(const job_t *j, int64_t t, void *out) {
  ep_sum_t sum = sumOf(j, 0);
  epSumBegin(&sum, out);
  for (int i = 0; i < j->numPlaces[t]; i++) {
    addRow(j, &sum, t, &j->places[t * j->c->routing.shape.topk + i]);
  }
  epSumEnd(&sum);
}

/* Places by ascending rank, k still ascending within a rank. */
static void sortByRank(ep_place_t *places, int n) {
  for (int i = 1; i < n; i++) {
    ep_place_t p = places[i];
    int at = i;
    for (; at > 0 && places[at - 1].rank > p.rank; at--) places[at] = places[at - 1];
    places[at] = p;
  }
}

/* The partial sum of one rank: places [i, end) of the same rank; returns end. */
static int sumRank(const job_t *j, int64_t t, int i, void *out) {
  const ep_place_t *places = j->places + t * j->c->routing.shape.topk;
  int rank = places[i].rank;
  ep_sum_t sum = sumOf(j, 0);
  epSumBegin(&sum, out);
  for (; i < j->numPlaces[t] && places[i].rank == rank; i++) addRow(j, &sum, t, &places[i]);
  epSumEnd(&sum);
  return i;
}

static int sumNode(const job_t *j, int64_t t, int i, void *out) {
  const ep_place_t *places = j->places + t * j->c->routing.shape.topk;
  int node = places[i].rank / j->ranksPerNode;
  ep_sum_t sum = sumOf(j, 1);
  epSumBegin(&sum, out);
  while (i < j->numPlaces[t] && places[i].rank / j->ranksPerNode == node) {
    i = sumRank(j, t, i, j->row[0]);
    epSumAdd(&sum, j->row[0]);
  }
  epSumEnd(&sum);
  return i;
}

static void sumTree(const job_t *j, int64_t t, void *out) {
  sortByRank(j->places + t * j->c->routing.shape.topk, j->numPlaces[t]);
  ep_sum_t sum = sumOf(j, 2);
  epSumBegin(&sum, out);
  for (int i = 0; i < j->numPlaces[t];) {
    i = sumNode(j, t, i, j->row[1]);
    epSumAdd(&sum, j->row[1]);
  }
  epSumEnd(&sum);
}

/* Backward: each (t, k) gets the value of its expert's slot back; bits, never rounded. */
static void returnWeights(const job_t *j, int64_t t, float *out) {
  const trefoil_case_t *c = j->c;
  int K = c->routing.shape.topk, L = trefoilExpertsPerRank(&c->routing.shape);
  const int32_t *row = epRoutingRow(c, j->rank, t);
  memset(out, 0, sizeof *out * (size_t)K);
  for (int i = 0; i < j->numPlaces[t]; i++) {
    const ep_place_t *p = &j->places[t * K + i];
    const float *weights = j->experts[p->rank].topkWeights;
    if (c->mode == TREFOIL_HT_EXPERT_MAJOR) {
      out[p->k] = weights[p->slot];
      continue;
    }
    for (int k = 0; k < K; k++) { /* flat: the slot lists its rank's experts in ascending id */
      if (row[k] < 0 || row[k] / L != p->rank) continue;
      int before = 0;
      for (int m = 0; m < K; m++) before += row[m] >= 0 && row[m] / L == p->rank && row[m] < row[k];
      out[k] = weights[p->slot * K + before];
    }
  }
}

static void combineAll(const job_t *j, uint8_t *tokens, float *topkWeights) {
  const trefoil_case_t *c = j->c;
  bool isExact =
      c->mode == TREFOIL_LL_EXPERT_MAJOR && (!c->combinePartial || c->quant == TREFOIL_QUANT_NVFP4);
  bool inOrder = isExact || c->mode == TREFOIL_LL_RANK_MAJOR;
  for (int64_t t = 0; t < c->routing.numTokens[j->rank]; t++) {
    uint8_t *out = tokens + (size_t)t * j->rowBytes;
    if (inOrder)
      sumInOrder(j, t, out);
    else
      sumTree(j, t, out);
    if (topkWeights) returnWeights(j, t, topkWeights + t * c->routing.shape.topk);
  }
}

trefoil_result_t trefoilRefCombine(const trefoil_case_t *c, int rank,
                                   const trefoil_expert_rows_t *experts, const float *weights,
                                   void *tokens, float *topkWeights) {
  EP_TRY(epRankCheck(c, rank));
  EP_CHECK(c->quant == TREFOIL_QUANT_NONE || c->quant == TREFOIL_QUANT_NVFP4,
           TREFOIL_INVALID_ARGUMENT, "combine takes quant NONE or NVFP4, not %d", (int)c->quant);
  if (c->routing.numTokens[rank] == 0) return TREFOIL_OK;
  EP_CHECK(experts && tokens, TREFOIL_INVALID_ARGUMENT, "%s is NULL",
           experts ? "tokens" : "experts");
  EP_CHECK(weights || c->mode != TREFOIL_LL_EXPERT_MAJOR, TREFOIL_INVALID_ARGUMENT,
           "weights are NULL; %s sums with them", trefoilModeName(c->mode));
  if (!c->backward) topkWeights = NULL;
  job_t j = {.c = c, .experts = experts, .weights = weights, .rank = rank};
  trefoil_result_t result = makeJob(&j);
  if (result == TREFOIL_OK) result = findPlaces(&j);
  if (result == TREFOIL_OK) result = checkRows(&j, topkWeights != NULL);
  if (result == TREFOIL_OK) combineAll(&j, tokens, topkWeights);
  freeJob(&j);
  return result;
}
