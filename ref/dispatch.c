/* Dispatch to one rank: every row that is placed there is copied (or quantised) into its slot, and
 * what the meaning says about the other rows is written after that. docs/spec.md, sections D and T. */
#include "ref/place.h"

#include "plan/error.h"
#include "ref/row.h"

#include <stdlib.h>
#include <string.h>

typedef struct job {
  const trefoil_case_t *c;
  const trefoil_source_t *sources;
  const trefoil_received_t *out;
  ep_placer_t placer;
  ep_place_t *places; /* [K] of the current token */
  int rank;
  size_t rowBytes;   /* of an input row */
  size_t outBytes;   /* of an output row */
  size_t scaleBytes; /* of an output row's scales; 0 = none */
  int64_t *kept;     /* [L] HT expert-major: rows kept in each zone */
} job_t;

/* Does the mode carry the source's weights? */
static bool hasWeights(const trefoil_case_t *c) {
  return c->mode == TREFOIL_LL_RANK_MAJOR || (epIsHt(c) && !c->backward);
}

static trefoil_result_t checkSource(const job_t *j, int src) {
  const trefoil_source_t *s = &j->sources[src];
  EP_CHECK(s->tokens, TREFOIL_INVALID_ARGUMENT, "rank %d sends rank %d rows, its tokens are NULL",
           src, j->rank);
  EP_CHECK(s->scales || j->c->quant != TREFOIL_QUANT_CALLER, TREFOIL_INVALID_ARGUMENT,
           "rank %d sends rank %d rows, its scales are NULL", src, j->rank);
  EP_CHECK(s->topkWeights || !hasWeights(j->c) || !j->out->topkWeights, TREFOIL_INVALID_ARGUMENT,
           "rank %d sends rank %d rows, its topkWeights are NULL", src, j->rank);
  return TREFOIL_OK;
}

static trefoil_result_t checkArguments(const job_t *j) {
  const trefoil_case_t *c = j->c;
  EP_CHECK(j->sources && j->out, TREFOIL_INVALID_ARGUMENT, "%s is NULL",
           j->sources ? "out" : "sources");
  EP_CHECK(c->quant != TREFOIL_QUANT_NVFP4, TREFOIL_INVALID_ARGUMENT,
           "NVFP4 is a quantisation of combine, not of dispatch");
  EP_CHECK(c->quant != TREFOIL_QUANT_E4M3 || !j->out->tokens == !j->out->scales,
           TREFOIL_INVALID_ARGUMENT, "E4M3 writes tokens and scales, %s is NULL",
           j->out->tokens ? "scales" : "tokens");
  if (epIsHt(c) && !c->backward && (j->out->topkWeights || j->out->topkIdx)) {
    EP_CHECK(j->out->topkRows >= epKeptSlots(&j->placer, j->rank), TREFOIL_INVALID_ARGUMENT,
             "topkRows is %lld, rank %d receives %lld slots", (long long)j->out->topkRows, j->rank,
             (long long)epKeptSlots(&j->placer, j->rank));
  }
  int L = j->placer.numLocal, firstExpert = j->rank * L, endExpert = firstExpert + L;
  for (int src = 0; src < c->routing.shape.numRanks; src++) {
    int64_t numEntries = c->routing.numTokens[src] * c->routing.shape.topk;
    if (!epLinked(c->active, c->routing.shape.numRanks, src, j->rank)) continue;
    for (int64_t i = 0; i < numEntries; i++) {
      int32_t e = c->routing.topkIdx[src][i];
      if (e < firstExpert || e >= endExpert) continue;
      EP_TRY(checkSource(j, src));
      break;
    }
  }
  return TREFOIL_OK;
}

static void writeRow(const job_t *j, int src, int64_t t, int64_t slot) {
  const trefoil_case_t *c = j->c;
  const trefoil_source_t *s = &j->sources[src];
  const uint8_t *row = (const uint8_t *)s->tokens + (size_t)t * j->rowBytes;
  uint8_t *tokens = j->out->tokens ? (uint8_t *)j->out->tokens + (size_t)slot * j->outBytes : NULL;
  uint8_t *scales =
      j->out->scales ? (uint8_t *)j->out->scales + (size_t)slot * j->scaleBytes : NULL;
  if (c->quant == TREFOIL_QUANT_E4M3) {
    if (!tokens) return;
    epRowQuantiseE4m3((const uint16_t *)row, c->width, c->roundScales, tokens, (float *)scales);
    return;
  }
  if (tokens) memcpy(tokens, row, j->outBytes);
  if (scales && j->scaleBytes) {
    memcpy(scales, (const uint8_t *)s->scales + (size_t)t * j->scaleBytes, j->scaleBytes);
  }
}

/* LL rank-major: the source's whole row of weights; ids of this rank's experts, order of k kept. */
static void writeRankMajorTopk(const job_t *j, int src, int64_t t, int64_t slot) {
  const trefoil_case_t *c = j->c;
  int K = c->routing.shape.topk, L = j->placer.numLocal;
  const int32_t *row = epRoutingRow(c, src, t);
  for (int k = 0; k < K; k++) {
    bool here = row[k] >= 0 && row[k] / L == j->rank;
    if (j->out->topkWeights) {
      j->out->topkWeights[slot * K + k] = j->sources[src].topkWeights[t * K + k];
    }
    if (j->out->topkIdx) {
      ((int32_t *)j->out->topkIdx)[slot * K + k] = !here ? -1 : c->globalIds ? row[k] : row[k] % L;
    }
  }
}

/* HT flat: this rank's experts in ascending id with their weights, then -1 with weight 0. */
static void writeFlatTopk(const job_t *j, int src, int64_t t, int64_t slot) {
  const trefoil_case_t *c = j->c;
  int K = c->routing.shape.topk, L = j->placer.numLocal;
  const int32_t *row = epRoutingRow(c, src, t);
  float *weights = j->out->topkWeights ? j->out->topkWeights + slot * K : NULL;
  int64_t *ids = j->out->topkIdx ? (int64_t *)j->out->topkIdx + slot * K : NULL;
  for (int k = 0; k < K; k++) {
    if (weights) weights[k] = 0;
    if (ids) ids[k] = -1;
  }
  for (int k = 0; k < K; k++) {
    if (row[k] < 0 || row[k] / L != j->rank) continue;
    int before = 0; /* experts of this rank with a smaller id */
    for (int i = 0; i < K; i++) before += row[i] >= 0 && row[i] / L == j->rank && row[i] < row[k];
    if (weights) weights[before] = j->sources[src].topkWeights[t * K + k];
    if (ids) ids[before] = c->globalIds ? row[k] : row[k] % L;
  }
}

static void writeToken(job_t *j, int src, int64_t t) {
  const trefoil_case_t *c = j->c;
  int numPlaces = epPlaceToken(&j->placer, src, t, j->places);
  for (int i = 0; i < numPlaces; i++) {
    const ep_place_t *p = &j->places[i];
    writeRow(j, src, t, p->slot);
    if (c->mode == TREFOIL_LL_RANK_MAJOR) writeRankMajorTopk(j, src, t, p->slot);
    if (c->mode == TREFOIL_HT_FLAT && !c->backward) writeFlatTopk(j, src, t, p->slot);
    if (c->mode == TREFOIL_HT_EXPERT_MAJOR) {
      j->kept[p->expert]++;
      if (!c->backward && j->out->topkWeights) {
        int64_t entry = t * c->routing.shape.topk + p->k;
        j->out->topkWeights[p->slot] = j->sources[src].topkWeights[entry];
      }
    }
  }
}

/* HT expert-major: padding, and under DROP rows that lost their token, are zero. */
static void zeroUnfilled(const job_t *j) {
  int64_t numSlots = epKeptSlots(&j->placer, j->rank);
  for (int l = 0; l < j->placer.numLocal; l++) {
    int64_t zone = (int64_t)j->rank * j->placer.numLocal + l;
    int64_t first = j->placer.offset[zone] + j->kept[l];
    int64_t end = j->placer.offset[zone] + epPadded(j->c, j->placer.count[zone]);
    if (end > numSlots) end = numSlots;
    for (int64_t slot = first; slot < end; slot++) {
      if (j->out->tokens) {
        memset((uint8_t *)j->out->tokens + (size_t)slot * j->outBytes, 0, j->outBytes);
      }
      if (j->out->scales && j->scaleBytes) {
        memset((uint8_t *)j->out->scales + (size_t)slot * j->scaleBytes, 0, j->scaleBytes);
      }
      if (j->out->topkWeights && !j->c->backward) j->out->topkWeights[slot] = 0;
    }
  }
}

/* Rows past the count: HT weights 0 and ids -1, never past maxRecv, and nothing where it traps. */
static void endHtTopk(const job_t *j) {
  const trefoil_case_t *c = j->c;
  int64_t first = epKeptSlots(&j->placer, j->rank), end = j->out->topkRows;
  if (c->maxRecv > 0 && end > c->maxRecv) end = c->maxRecv;
  bool traps = first < j->placer.total[j->rank] && !c->drop;
  if (traps || c->backward) return;
  int64_t perRow = c->mode == TREFOIL_HT_FLAT ? c->routing.shape.topk : 1;
  for (int64_t i = first * perRow; i < end * perRow; i++) {
    if (j->out->topkWeights) j->out->topkWeights[i] = 0;
    if (j->out->topkIdx && c->mode == TREFOIL_HT_FLAT) ((int64_t *)j->out->topkIdx)[i] = -1;
  }
}

static void dispatchAll(job_t *j) {
  const trefoil_shape_t *s = &j->c->routing.shape;
  if (j->c->mode == TREFOIL_LL_RANK_MAJOR && j->out->topkIdx) {
    int32_t *ids = j->out->topkIdx;
    for (int64_t i = 0; i < s->numRanks * s->maxTokens * s->topk; i++) ids[i] = -1;
  }
  for (int src = 0; src < s->numRanks; src++) {
    for (int64_t t = 0; t < j->c->routing.numTokens[src]; t++) writeToken(j, src, t);
  }
  if (j->c->mode == TREFOIL_HT_EXPERT_MAJOR) zeroUnfilled(j);
  if (epIsHt(j->c)) endHtTopk(j);
}

trefoil_result_t trefoilRefDispatch(const trefoil_case_t *c, int rank,
                                    const trefoil_source_t *sources,
                                    const trefoil_received_t *out) {
  EP_TRY(epRankCheck(c, rank));
  job_t j = {.c = c, .sources = sources, .out = out, .rank = rank};
  j.rowBytes = (size_t)c->width * trefoilDtypeBytes(c->dtype);
  j.outBytes = c->quant == TREFOIL_QUANT_E4M3 ? (size_t)c->width : j.rowBytes;
  if (c->quant == TREFOIL_QUANT_E4M3) j.scaleBytes = (size_t)c->width / 128 * sizeof(float);
  if (c->quant == TREFOIL_QUANT_CALLER) j.scaleBytes = c->scaleBytes;
  EP_TRY(epPlacerInit(&j.placer, c, rank));
  trefoil_result_t result = checkArguments(&j);
  if (result == TREFOIL_OK) {
    j.places = malloc(sizeof *j.places * (size_t)c->routing.shape.topk);
    j.kept = calloc((size_t)j.placer.numLocal, sizeof *j.kept);
    if (j.places && j.kept)
      dispatchAll(&j);
    else
      result = epFail(TREFOIL_SYSTEM_ERROR, "out of memory for a dispatch");
  }
  free(j.places);
  free(j.kept);
  epPlacerFree(&j.placer);
  return result;
}
