/* Trefoil: averaging the gradients of data-parallel workers, in four methods (docs/spec.md, section A).
 * C99 and C++. The reference: all workers' gradients in one process, in a fixed order of every sum.
 *
 * A worker's gradient is one array: its tensors one behind the other. A step turns the workers'
 * gradients into the updates that their optimizers apply. */
#ifndef TREFOIL_A2SGD_H
#define TREFOIL_A2SGD_H

#include "trefoil/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum trefoil_grad_method {
  TREFOIL_GRAD_DENSE = 0, /* the mean of all elements */
  TREFOIL_GRAD_A2SGD = 1, /* two means a group are averaged, the rest stays local */
  TREFOIL_GRAD_TOPK = 2,  /* the largest elements of each group, with error feedback */
  TREFOIL_GRAD_QSGD = 3   /* levels of a bucket's maximum, rounded stochastically */
} trefoil_grad_method_t;
#define TREFOIL_GRAD_NUM_METHODS 4
#define TREFOIL_GRAD_MAX_WORKERS 4096

/* What A2SGD averages over and Top-K selects from; buckets of QSGD do not cross groups. */
typedef enum trefoil_grad_scope {
  TREFOIL_GRAD_PER_TENSOR = 0,
  TREFOIL_GRAD_WHOLE_MODEL = 1
} trefoil_grad_scope_t;

/* Fields of another method than the chosen one are ignored. */
typedef struct trefoil_grad_config {
  trefoil_grad_method_t method;
  trefoil_dtype_t dtype; /* of gradients, updates and parameters: f32, f16 or bf16 */
  int numWorkers;        /* 1..TREFOIL_GRAD_MAX_WORKERS */
  int numTensors;        /* >= 0 */
  const int64_t *sizes;  /* [numTensors] elements, each >= 0, 2^40 together at most */
  trefoil_grad_scope_t scope;
  int64_t syncPeriod; /* A2SGD: trefoilGradSync averages the parameters after every syncPeriod
                         steps; 0 = never */
  int topkPerMillion; /* Top-K: share of a group that is sent, rounded up; 1..1000000 */
  int qsgdBits;       /* QSGD: bits of an element, its sign among them; 2..8 */
  int64_t qsgdBucket; /* QSGD: elements with one scale, >= 1; 0 = 512 */
  uint64_t seed;      /* QSGD: of the stochastic rounding */
} trefoil_grad_config_t;

/* TREFOIL_INVALID_ARGUMENT: a field outside its range. */
TREFOIL_API trefoil_result_t trefoilGradCheck(const trefoil_grad_config_t *c);

/* Of one worker. Bytes sent are those of its own contribution, whatever collective carries it. */
typedef struct trefoil_grad_sizes {
  int64_t elements;   /* of its gradient */
  int64_t groups;     /* over which A2SGD averages and from which Top-K selects */
  int64_t stateBytes; /* that it keeps from step to step */
  int64_t sentBytes;  /* in a step */
  int64_t syncBytes;  /* sent in a synchronisation of parameters; 0 without syncPeriod */
} trefoil_grad_sizes_t;
TREFOIL_API trefoil_result_t trefoilGradSizes(const trefoil_grad_config_t *c,
                                              trefoil_grad_sizes_t *out);

/* Pointers [numWorkers]; none is needed of a model without elements. updates[w] may be grads[w];
 * apart from that no two arrays overlap. */
typedef struct trefoil_grad_workers {
  const void *const *grads;
  float *const *states; /* Top-K: [elements], zeros before the first step; else ignored */
  void *const *updates;
} trefoil_grad_workers_t;

/* One step, numbered from 0 (at most 2^32 - 1): fills the updates, and brings the states forward. */
TREFOIL_API trefoil_result_t trefoilGradStep(const trefoil_grad_config_t *c, int64_t step,
                                             const trefoil_grad_workers_t *workers);

/* To be called after the optimizers have applied the updates of `step`: where syncPeriod divides
 * step + 1 each worker's parameters become the workers' mean; else they stay untouched. */
TREFOIL_API trefoil_result_t trefoilGradSync(const trefoil_grad_config_t *c, int64_t step,
                                             void *const *params);

/* What a worker of A2SGD sends: for each group the mean of the elements that are not negative, and
 * the mean magnitude of the negative ones. means: [groups][2]. The method is not looked at. */
TREFOIL_API trefoil_result_t trefoilGradTwoMeans(const trefoil_grad_config_t *c, const void *grad,
                                                 float *means);

/* The update of one worker from all workers' means, [numWorkers][groups][2] in the order of workers: with
 * trefoilGradTwoMeans and an exchange in between, a step of A2SGD where each worker has its own process.
 * update may be grad. */
TREFOIL_API trefoil_result_t trefoilGradFromMeans(const trefoil_grad_config_t *c, int worker,
                                                  const float *means, const void *grad,
                                                  void *update);

/* ---- A2SGD on GPUs, in libnccl_ep.so.0; over the host runtime also in libnccl_ep_cpu.so.0 --------
 *
 * A rank a worker, on the ranks of an NCCL communicator in one NVLink domain. Results equal
 * trefoilGradStep's bit for bit. Sentences of failures: ncclEpGetLastError (nccl_ep.h). */
#if defined(__GNUC__)
#define TREFOIL_GPU_API __attribute__((visibility("default")))
#else
#define TREFOIL_GPU_API
#endif
struct ncclComm;
struct CUstream_st;
typedef struct trefoil_grad_gpu *trefoil_grad_gpu_t;

typedef struct trefoil_grad_gpu_options {
  int maxSms;         /* SMs that a launch may take; 0 = all */
  int enableMask;     /* 1: a rank that does not come is masked, and the others go on without it */
  uint64_t timeoutNs; /* of a wait for a rank; 0 = 100 s */
} trefoil_grad_gpu_options_t;

/* Bytes of a rank that Create takes on a GPU of numSms SMs: memory that the other ranks reach, and its
 * own. Of c method must be TREFOIL_GRAD_A2SGD. A syncPeriod takes exchange memory, bounded whatever the
 * model's size is. Needs no GPU. */
TREFOIL_GPU_API trefoil_result_t trefoilGradGpuSizes(const trefoil_grad_config_t *c, int numSms,
                                                     size_t *exchangeBytes, size_t *scratchBytes);
/* Collective, with equal c on all ranks and as many workers as ranks. options: NULL = all 0. */
TREFOIL_GPU_API trefoil_result_t trefoilGradGpuCreate(const trefoil_grad_config_t *c,
                                                      const trefoil_grad_gpu_options_t *options,
                                                      struct ncclComm *comm,
                                                      trefoil_grad_gpu_t *out);
/* Queues a step on the stream; may be captured. grad and update: [elements] in device memory, update may
 * be grad. All ranks make the same steps in the same order, one at a time. TREFOIL_REMOTE_ERROR: an
 * earlier step lost a rank, named by the sentence; its update and later ones were not written. */
TREFOIL_GPU_API trefoil_result_t trefoilGradGpuStep(trefoil_grad_gpu_t g, const void *grad,
                                                    void *update, struct CUstream_st *stream);
/* The step that trefoilGradGpuSync counts by itself. */
#define TREFOIL_GRAD_LAST_STEP (-1)
/* What trefoilGradSync does, between the ranks: to be queued after the updates of `step` are applied. Where
 * syncPeriod divides step + 1, params, [elements] in device memory, become the mean over the ranks that a
 * rank regards as active, in place; else they stay untouched, and nothing is queued.
 * TREFOIL_GRAD_LAST_STEP: the last step that this object has made when the call comes to run; captured once
 * and replayed after each step, it averages after every syncPeriod-th. All ranks make the same steps and
 * synchronisations in the same order. TREFOIL_REMOTE_ERROR: as of trefoilGradGpuStep. If a rank is lost in
 * the midst of a call each parameter is the mean or as before; if it does not come at all, as before. */
TREFOIL_GPU_API trefoil_result_t trefoilGradGpuSync(trefoil_grad_gpu_t g, int64_t step,
                                                    void *params, struct CUstream_st *stream);
/* With enableMask: active[numWorkers], 0 = masked. Get waits for the stream; Set may be captured. The
 * means are over the ranks that a rank regards as active. Ranks that masked one another are set active again
 * when both have made as many steps and synchronisations, and these are through: one that is ahead would
 * write over means that the other still reads. */
TREFOIL_GPU_API trefoil_result_t trefoilGradGpuGetMask(trefoil_grad_gpu_t g, int *active,
                                                       struct CUstream_st *stream);
TREFOIL_GPU_API trefoil_result_t trefoilGradGpuSetMask(trefoil_grad_gpu_t g, const int *active,
                                                       struct CUstream_st *stream);
/* Collective; waits for the GPU. */
TREFOIL_GPU_API trefoil_result_t trefoilGradGpuDestroy(trefoil_grad_gpu_t g);

#ifdef __cplusplus
}
#endif
#endif
