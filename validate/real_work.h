/* Inside of real_shape.c, real_run.c, real_compare.c and gpu_times.c. */
#ifndef TREFOIL_VALIDATE_REAL_WORK_H
#define TREFOIL_VALIDATE_REAL_WORK_H

#include "validate/real_shape.h"
#include "validate/worker.h"

#include <pthread.h>
#include <stdatomic.h>

typedef struct real_tensor {
  ncclEpTensor_t t;
  size_t sizes[3];
  size_t bytes, rowBytes;
  void *data;
  ncclWindow_t window; /* NULL: plain memory */
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
  real_tensor_t scales, receivedScales;
  real_tensor_t combined, combinedWeights, counters;
  const char *doing;
  ep_place_t *place;
} real_rank_t;

typedef struct real {
  const ep_real_options_t *options;
  ep_real_result_t *result;
  ep_watch_t *watch; /* shared with the parent */
  ep_library_t lib;
  ncclUniqueId id;
  trefoil_case_t rc;
  int64_t maxRows; /* HT: rows of the received tensors */
  int64_t counts[EP_REAL_MAX_RANKS];
  ep_puts_t puts[EP_REAL_MAX_RANKS]; /* the least, then what was counted */
  int32_t *ids[EP_REAL_MAX_RANKS];
  uint8_t *tokens[EP_REAL_MAX_RANKS]; /* [B, H] of every rank */
  uint8_t *scales[EP_REAL_MAX_RANKS]; /* fp8: [B, H / 128] f32 */
  float *weights[EP_REAL_MAX_RANKS];
  pthread_barrier_t barrier;
  pthread_mutex_t mutex;
  pthread_cond_t turn;
  int numComparing, maxComparing;
  _Atomic int failed;
  _Atomic int *told; /* shared with the parent: this run has failed, and its difference says how */
  _Atomic int rowsMoved, sumsMoved; /* order-free: not where, or what, the reference has */
  _Atomic uint64_t compared;
  _Atomic uint64_t *numDone; /* steps, for the progress display */
  ncclComm_t *comms;         /* [R], kept from run to run; NULL before the first */
  int isLast;                /* no run after it needs them */
  ep_gpu_peers_t *peers;     /* [R], to measure with; on GPUs */
  struct real *twin;         /* options->against: the same shape on the other library */
  struct real_rank *ranks;   /* [R] */
  ep_pair_times_t *pair;
  struct ep_gpu_rank *gpuRanks; /* [R], gpu_times.c */
  double started[EP_REAL_MAX_RANKS], ended[EP_REAL_MAX_RANKS];
} real_t;

/* Records the first difference or failure. */
void epRealFail(real_t *run, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Compares what a rank received with the reference, and prepares it as the combine's input. */
trefoil_result_t epRealCompareDispatch(real_rank_t *rank);
trefoil_result_t epRealCompareCombine(real_rank_t *rank);
/* What a rank gave is as it was, guards included. */
trefoil_result_t epRealCompareInputs(real_rank_t *rank);

/* ---- real_rows.c ---- */
/* Comparing takes memory: so many ranks at a time. */
void epRealTakeTurn(real_t *run);
void epRealPassTurn(real_t *run);
/* Memory whose pages exist only once touched: received tensors of LL are mostly unused rows. */
void *epRealSparse(size_t bytes);
void epRealFreeSparse(void *p, size_t bytes);
trefoil_result_t epRealCopy(real_rank_t *rank, void *to, const void *from, size_t bytes,
                            enum cudaMemcpyKind kind);
/* The key of a slot's row, and the row changed by it. */
int epRealKey(const real_t *run, int rank, const trefoil_slot_t *slot);
void epRealChangeRow(uint8_t *row, size_t bytes, int key);
/* Backward: the weights of a rank's slots: flat [slots, K], expert-major [slots]. */
void epRealSlotWeights(const real_t *run, int rank, const trefoil_slot_t *slots, int64_t n,
                       float *weights);
/* Compares a device tensor and its guard with host memory. */
trefoil_result_t epRealCompareTensor(real_rank_t *rank, const real_tensor_t *t,
                                     const uint8_t *expected, const char *what);

/* What all ranks know: routing and inputs; rows and bytes, by the plan and by the reference. */
trefoil_result_t epRealRouting(real_t *run);
trefoil_result_t epRealTraffic(real_t *run);

/* A rank: communicator, group, handle, tensors; then its calls, of which Dispatch and Combine are only
 * queued on its stream. */
trefoil_result_t epRealOpen(real_rank_t *rank);
trefoil_result_t epRealClose(real_rank_t *rank);
trefoil_result_t epRealSync(real_rank_t *rank);
trefoil_result_t epRealUpdate(real_rank_t *rank);
trefoil_result_t epRealDispatch(real_rank_t *rank);
trefoil_result_t epRealCombine(real_rank_t *rank);

/* Runs a phase on all ranks between barriers; on every rank the seconds of the slowest. */
typedef trefoil_result_t (*real_phase_t)(real_rank_t *rank);
double epRealPhase(real_rank_t *rank, real_phase_t phase, const char *name);

/* gpu_times.c: measures what has passed its check. Called by every rank's thread. */
void epGpuMeasure(real_rank_t *rank);

/* real_pair.c: the same for two libraries in turn; this rank of both. */
void epPairMeasure(real_rank_t *ranks[2]);

enum { EP_REAL_NOISE = 0xa5 };

#define EP_REAL_EP(rank, call)                                                                     \
  EP_TRY_PLACED(rank, ncclResult_t, call, TREFOIL_REMOTE_ERROR, (void)0,                           \
                epLibraryError(&(rank)->run->lib, epRc_))
#define EP_REAL_NCCL(rank, call)                                                                   \
  EP_TRY_PLACED(rank, ncclResult_t, call, TREFOIL_REMOTE_ERROR, (void)0,                           \
                epNcclError(&(rank)->run->lib, (rank)->comm, epRc_))
#define EP_REAL_CUDA(rank, call)                                                                   \
  EP_TRY_PLACED(rank, cudaError_t, call, TREFOIL_SYSTEM_ERROR, (void)0,                            \
                (rank)->run->lib.cudaGetErrorString(epRc_))

#endif
