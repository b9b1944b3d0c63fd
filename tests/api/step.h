/* One dispatch and combine of a small random case through the C API, compared with the reference. */
#ifndef TREFOIL_TESTS_API_STEP_H
#define TREFOIL_TESTS_API_STEP_H

#include "team.h"
#include "trefoil/ref.h"

typedef struct step_case {
  trefoil_mode_t mode;
  int topk, numExperts;
  int64_t maxTokens;
  int64_t width;
  uint64_t seed;
  int sendOnly, backward, wideIds, globalIds, drop, partial;
  size_t alignment;
  int64_t maxRecv; /* HT: 0 eager */
  trefoil_quant_t quant, combineQuant;
  int roundScales;
  unsigned maxSms; /* 0: the library's choice */
} step_case_t;

/* Everything of a case on all ranks, made from the seed alone. */
typedef struct step_data {
  const step_case_t *c;
  int R, L, me;
  trefoil_case_t ref;
  int64_t *numTokens;
  int32_t **idx;
  int64_t *wide; /* own rows as int64 */
  uint16_t **tokens;
  uint8_t **scales;
  float **weights;
  int64_t slots;         /* rows of this rank's output tensors */
  int64_t rows;          /* of those, rows that arrive (HT) */
  uint16_t **expertRows; /* [R] combine's input of every rank */
  float **slotWeights;   /* [R] HT backward */
  float **slotScales;    /* [R] NVFP4 */
  void *outTokens, *outScales, *wantTokens, *wantScales;
  float *outWeights, *wantWeights;
  void *outIdx, *wantIdx;
  int64_t *counters, *offsets, *total, *wantCounters, *wantOffsets, *wantTotal;
  int32_t *counters32, *sources32;
  int64_t *wantSources;
  uint16_t *combined, *wantCombined;
  float *combinedWeights, *wantCombinedWeights;
} step_data_t;

step_data_t *stepMake(const step_case_t *c, int me, int numRanks, int ranksPerNode);
void stepFree(step_data_t *d);
/* What should come out, again: after a change of d->ref (masks). Poison what is wanted first. */
void stepExpect(step_data_t *d);
void stepPoisonWanted(step_data_t *d);

ncclEpGroupConfig_t stepGroupConfig(const step_case_t *c, int numRanks);
ncclEpLayout_t stepLayout(const step_case_t *c);
ncclEpHandleConfig_t stepHandleConfig(const step_case_t *c);

/* Each queues its call(s) on the stream; 1 = the call succeeded. */
int stepUpdate(step_data_t *d, ncclEpHandle_t handle, cudaStream_t stream);
int stepDispatch(step_data_t *d, ncclEpHandle_t handle, cudaStream_t stream);
int stepCombine(step_data_t *d, ncclEpHandle_t handle, cudaStream_t stream);
/* After synchronising: "" or the first difference. */
const char *stepCompareDispatch(step_data_t *d);
const char *stepCompareCombine(step_data_t *d);
void stepPoison(step_data_t *d);

#endif
