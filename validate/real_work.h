/* Inside of real_shape.c and real_compare.c. */
#ifndef TREFOIL_VALIDATE_REAL_WORK_H
#define TREFOIL_VALIDATE_REAL_WORK_H

#include "validate/real_shape.h"

#include <pthread.h>
#include <stdatomic.h>

typedef struct real_tensor {
  ncclEpTensor_t t;
  size_t sizes[3];
  size_t bytes, rowBytes;
  void *data;
} real_tensor_t;

typedef struct real_rank {
  struct real *run;
  int rank;
  ncclComm_t comm;
  ncclEpGroup_t group;
  ncclEpHandle_t handle;
  cudaStream_t stream;
  real_tensor_t ids, tokens, weights;                   /* at the source */
  real_tensor_t received, receivedWeights, receivedIds; /* at the experts */
  real_tensor_t combined, counters;
  const char *doing;
} real_rank_t;

typedef struct real {
  const ep_real_options_t *options;
  ep_real_result_t *result;
  ep_library_t lib;
  ncclUniqueId id;
  trefoil_case_t rc;
  int64_t maxRows; /* HT: rows of the received tensors */
  int64_t counts[EP_REAL_MAX_RANKS];
  int32_t *ids[EP_REAL_MAX_RANKS];
  uint8_t *tokens[EP_REAL_MAX_RANKS]; /* [B, H] of every rank */
  float *weights[EP_REAL_MAX_RANKS];
  pthread_barrier_t barrier;
  pthread_mutex_t mutex;
  pthread_cond_t turn;
  int numComparing, maxComparing;
  _Atomic int failed;
  _Atomic uint64_t compared;
  _Atomic uint64_t numDone; /* steps, for the progress display */
  double started[EP_REAL_MAX_RANKS], ended[EP_REAL_MAX_RANKS];
} real_t;

/* Records the first difference or failure. */
void epRealFail(real_t *run, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Compares what a rank received with the reference, and prepares it as the combine's input. */
trefoil_result_t epRealCompareDispatch(real_rank_t *rank);
trefoil_result_t epRealCompareCombine(real_rank_t *rank);

enum { EP_REAL_NOISE = 0xa5 };

#endif
