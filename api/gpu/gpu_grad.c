/* A2SGD on GPUs behind trefoil/a2sgd.h: memory, a window of the communicator, steps, and what waits found.
 * Kernels: kernels/a2sgd. */
#include <stdlib.h>
#include <string.h>

#include "api/gpu/gpu.h"
#include "api/gpu/rendezvous.h"
#include "api/object.h"
#include "kernels/a2sgd/a2sgd_step.h"
#include "ref/grad.h"

#define DEFAULT_TIMEOUT_NS 100000000000ull

struct trefoil_grad_gpu {
  ncclComm_t comm;
  int device;
  int64_t *counts; /* elements of each group */
  ep_a2sgd_step_t step;
  char *exchange;
  ncclWindow_t window;
  ep_wait_record_t *record;
  struct ep_rendezvous *rendezvous;
};

static trefoil_result_t checkConfig(const trefoil_grad_config_t *c) {
  EP_TRY(trefoilGradCheck(c));
  EP_CHECK(c->method == TREFOIL_GRAD_A2SGD, TREFOIL_INVALID_ARGUMENT,
           "method is %d; on GPUs it must be 1 (A2SGD)", (int)c->method);
  return TREFOIL_OK;
}

/* The layout of groups; their counts are for free(). */
static trefoil_result_t layOut(const trefoil_grad_config_t *c, int numSms, ep_a2sgd_layout_t *at,
                               int64_t **counts) {
  int n = c->scope == TREFOIL_GRAD_WHOLE_MODEL ? 1 : c->numTensors;
  *counts = malloc(sizeof **counts * (size_t)(n + 1));
  EP_CHECK(*counts, TREFOIL_SYSTEM_ERROR, "trefoilGradGpuCreate: out of memory");
  for (ep_grad_group_t g = EP_GRAD_BEGIN; epGradNext(c, &g);) (*counts)[g.idx] = g.count;
  trefoil_result_t result = epA2sgdLayout(n, *counts, c->numWorkers, numSms, at);
  if (result == TREFOIL_OK) return TREFOIL_OK;
  free(*counts);
  *counts = NULL;
  return result;
}

trefoil_result_t trefoilGradGpuSizes(const trefoil_grad_config_t *c, int numSms,
                                     size_t *exchangeBytes, size_t *scratchBytes) {
  ep_a2sgd_layout_t at;
  int64_t *counts;
  EP_TRY(checkConfig(c));
  EP_CHECK(numSms >= 1, TREFOIL_INVALID_ARGUMENT, "numSms is %d, must be >= 1", numSms);
  EP_CHECK(exchangeBytes && scratchBytes, TREFOIL_INVALID_ARGUMENT, "%s is NULL",
           exchangeBytes ? "scratchBytes" : "exchangeBytes");
  EP_TRY(layOut(c, numSms, &at, &counts));
  free(counts);
  *exchangeBytes = at.exchangeBytes;
  *scratchBytes = at.scratchBytes;
  return TREFOIL_OK;
}

/* ---- create ---------------------------------------------------------------------------------- */

/* Of what must be equal on all ranks. */
static uint64_t hashOf(const trefoil_grad_config_t *c, const trefoil_grad_gpu_options_t *o) {
  uint64_t h = 14695981039346656037ull;
  uint64_t head[] = {(uint64_t)c->dtype, (uint64_t)c->scope, (uint64_t)c->numTensors,
                     o->enableMask != 0};
  for (size_t i = 0; i < sizeof head / sizeof *head; i++) h = (h ^ head[i]) * 1099511628211ull;
  for (int t = 0; t < c->numTensors; t++) h = (h ^ (uint64_t)c->sizes[t]) * 1099511628211ull;
  return h;
}

static trefoil_result_t findRank(struct trefoil_grad_gpu *g, const trefoil_grad_config_t *c) {
  int numRanks, perNode;
  EP_TRY(epGpuRanks(g->comm, "trefoilGradGpuCreate", &g->step.rank, &numRanks, &perNode));
  EP_CHECK(numRanks == c->numWorkers, TREFOIL_INVALID_ARGUMENT,
           "numWorkers is %d, the communicator has %d ranks; must be equal", c->numWorkers,
           numRanks);
  EP_CHECK(perNode == numRanks, TREFOIL_INVALID_USAGE,
           "trefoilGradGpuCreate: the ranks form %d NVLink domains; A2SGD on GPUs takes one",
           numRanks / perNode);
  return epGpuNccl(g->comm, ncclCommCuDevice(g->comm, &g->device), "trefoilGradGpuCreate: comm");
}

static trefoil_result_t allocate(struct trefoil_grad_gpu *g) {
  ep_a2sgd_step_t *s = &g->step;
  size_t bytes = s->at.exchangeBytes ? s->at.exchangeBytes : 16;
  void *p = NULL;
  EP_TRY(epGpuNccl(NULL, ncclMemAlloc(&p, bytes), "trefoilGradGpuCreate: ncclMemAlloc"));
  g->exchange = p;
  EP_CUDA(cudaMemset(p, 0, bytes));
  EP_CUDA(cudaMalloc((void **)&s->scratch, s->at.scratchBytes));
  EP_CUDA(cudaMemset(s->scratch, 0, s->at.scratchBytes));
  EP_CUDA(cudaHostAlloc((void **)&g->record, sizeof *g->record,
                        cudaHostAllocMapped | cudaHostAllocPortable));
  memset(g->record, 0, sizeof *g->record);
  EP_CUDA(cudaHostGetDevicePointer((void **)&s->record, g->record, 0));
  void *image = malloc(s->at.imageBytes);
  EP_CHECK(image, TREFOIL_SYSTEM_ERROR, "trefoilGradGpuCreate: out of memory");
  epA2sgdImage(&s->at, g->counts, image);
  cudaError_t error = cudaMemcpy(s->scratch, image, s->at.imageBytes, cudaMemcpyHostToDevice);
  free(image);
  EP_CUDA(error);
  EP_CUDA(cudaDeviceSynchronize());
  return epA2sgdLoad();
}

static trefoil_result_t meet(struct trefoil_grad_gpu *g, ep_rendezvous_call_t call, uint64_t hash) {
  ep_rendezvous_word_t all[EP_KERNEL_MAX_RANKS], mine = {.call = call, .groupId = hash};
  EP_TRY(epRendezvousWait(g->rendezvous, &mine, g->step.timeoutNs, all));
  for (int r = 1; r < g->step.at.numRanks; r++)
    EP_CHECK(all[r].groupId == all[0].groupId, TREFOIL_INVALID_ARGUMENT,
             "trefoilGradGpuCreate: the configuration of rank %d differs from rank 0's", r);
  return TREFOIL_OK;
}

/* What failed alone fails the others before NCCL's collective, which has no time limit. */
static trefoil_result_t join(struct trefoil_grad_gpu *g, uint64_t hash) {
  size_t bytes = g->step.at.exchangeBytes ? g->step.at.exchangeBytes : 16;
  EP_TRY(meet(g, EP_RENDEZVOUS_GRAD_CREATE, hash));
  EP_TRY(epGpuNccl(g->comm, ncclCommWindowRegister(g->comm, g->exchange, bytes, &g->window, 0),
                   "trefoilGradGpuCreate: ncclCommWindowRegister"));
  EP_CHECK(g->window && epGpuReaches(g->window, g->step.at.numRanks, g->step.peers),
           TREFOIL_INVALID_USAGE,
           "trefoilGradGpuCreate: some rank's memory cannot be reached from rank %d "
           "(NCCL_CUMEM_ENABLE, NCCL_WIN_ENABLE)",
           g->step.rank);
  EP_TRY(meet(g, EP_RENDEZVOUS_GRAD_READY, hash));
  epRendezvousAllCame(g->rendezvous);
  return TREFOIL_OK;
}

static void release(struct trefoil_grad_gpu *g) {
  epUnregister(g, EP_OBJECT_GRAD);
  if (g->window) ncclCommWindowDeregister(g->comm, g->window);
  if (g->exchange) ncclMemFree(g->exchange);
  cudaFree(g->step.scratch);
  if (g->record) cudaFreeHost(g->record);
  if (g->rendezvous) epRendezvousClose(g->rendezvous);
  free(g->counts);
  free(g);
}

static trefoil_result_t open(struct trefoil_grad_gpu *g, const trefoil_grad_config_t *c,
                             const trefoil_grad_gpu_options_t *o) {
  int sms;
  g->step.dtype = c->dtype;
  g->step.enableMask = o->enableMask != 0;
  g->step.timeoutNs = o->timeoutNs ? o->timeoutNs : DEFAULT_TIMEOUT_NS;
  EP_TRY(findRank(g, c));
  EP_CUDA(cudaSetDevice(g->device));
  EP_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, g->device));
  g->step.numSms = o->maxSms && o->maxSms < sms ? o->maxSms : sms;
  EP_TRY(layOut(c, g->step.numSms, &g->step.at, &g->counts));
  EP_TRY(
      epRendezvousOpen(g->comm, g->step.rank, c->numWorkers, 1, g->step.timeoutNs, &g->rendezvous));
  EP_TRY(allocate(g));
  return join(g, hashOf(c, o));
}

static trefoil_result_t create(const trefoil_grad_config_t *c, const trefoil_grad_gpu_options_t *o,
                               ncclComm_t comm, trefoil_grad_gpu_t *out) {
  EP_CHECK(out, TREFOIL_INVALID_ARGUMENT, "%s is NULL", "out");
  EP_CHECK(comm, TREFOIL_INVALID_ARGUMENT, "%s is NULL", "comm");
  EP_TRY(checkConfig(c));
  EP_CHECK(o->maxSms >= 0, TREFOIL_INVALID_ARGUMENT, "maxSms is %d, must be >= 0 (0 = all)",
           o->maxSms);
  struct trefoil_grad_gpu *g = calloc(1, sizeof *g);
  EP_CHECK(g, TREFOIL_SYSTEM_ERROR, "trefoilGradGpuCreate: out of memory");
  int before;
  g->comm = comm;
  cudaGetDevice(&before);
  trefoil_result_t result = epRegister(g, EP_OBJECT_GRAD);
  if (result == TREFOIL_OK) result = open(g, c, o);
  if (result == TREFOIL_OK)
    *out = g;
  else
    release(g);
  cudaSetDevice(before);
  return result;
}

trefoil_result_t trefoilGradGpuCreate(const trefoil_grad_config_t *c,
                                      const trefoil_grad_gpu_options_t *options,
                                      struct ncclComm *comm, trefoil_grad_gpu_t *out) {
  trefoil_grad_gpu_options_t o = {0};
  if (options) o = *options;
  if (comm) epRendezvousCallBegin(comm);
  trefoil_result_t result = create(c, &o, comm, out);
  if (comm && result != TREFOIL_OK) epRendezvousCallFail(comm, result, trefoilLastError());
  return result;
}

/* ---- steps ----------------------------------------------------------------------------------- */

static trefoil_result_t checkAlive(trefoil_grad_gpu_t g) {
  EP_CHECK(epIsLive(g, EP_OBJECT_GRAD), TREFOIL_INVALID_ARGUMENT,
           "%p is not what trefoilGradGpuCreate gave, or was destroyed", (void *)g);
  return TREFOIL_OK;
}

static trefoil_result_t checkLost(const struct trefoil_grad_gpu *g) {
  const volatile ep_wait_record_t *r = g->record;
  EP_CHECK(g->step.enableMask || !r->failed, TREFOIL_REMOTE_ERROR,
           "rank %d did not answer within %.3g s: rank %d waited in A2SGD step %llu for its means "
           "of group %lld; make a new object (with enableMask the others would go on without it)",
           r->rank, (double)(r->nowNs - r->sinceNs) * 1e-9, g->step.rank,
           (unsigned long long)r->operation, (long long)r->item);
  return TREFOIL_OK;
}

trefoil_result_t trefoilGradGpuStep(trefoil_grad_gpu_t g, const void *grad, void *update,
                                    struct CUstream_st *stream) {
  EP_TRY(checkAlive(g));
  EP_CHECK(g->step.at.elements == 0 || (grad && update), TREFOIL_INVALID_ARGUMENT, "%s is NULL",
           grad ? "update" : "grad");
  size_t each = trefoilDtypeBytes(g->step.dtype);
  EP_CHECK((uintptr_t)grad % each == 0 && (uintptr_t)update % each == 0, TREFOIL_INVALID_ARGUMENT,
           "grad and update must lie at multiples of %zu bytes", each);
  EP_TRY(checkLost(g));
  ep_a2sgd_step_t step = g->step;
  int before;
  step.grad = grad;
  step.update = update;
  EP_CUDA(cudaGetDevice(&before));
  if (before != g->device) EP_CUDA(cudaSetDevice(g->device));
  trefoil_result_t result = epA2sgdStep(&step, stream);
  if (before != g->device) cudaSetDevice(before);
  return result;
}

static trefoil_result_t checkMasks(trefoil_grad_gpu_t g, const int *active) {
  EP_TRY(checkAlive(g));
  EP_CHECK(g->step.enableMask, TREFOIL_INVALID_USAGE,
           "A2SGD has no masks: enableMask was 0 in trefoilGradGpuCreate");
  EP_CHECK(active, TREFOIL_INVALID_ARGUMENT, "%s is NULL", "active");
  return TREFOIL_OK;
}

trefoil_result_t trefoilGradGpuGetMask(trefoil_grad_gpu_t g, int *active,
                                       struct CUstream_st *stream) {
  int mask[EP_KERNEL_MAX_RANKS];
  EP_TRY(checkMasks(g, active));
  size_t bytes = sizeof *mask * (size_t)g->step.at.numRanks;
  EP_CUDA(cudaMemcpyAsync(mask, g->step.scratch + EP_A2SGD_MASK_AT, bytes, cudaMemcpyDeviceToHost,
                          stream));
  EP_CUDA(cudaStreamSynchronize(stream));
  memcpy(active, mask, bytes);
  return TREFOIL_OK;
}

trefoil_result_t trefoilGradGpuSetMask(trefoil_grad_gpu_t g, const int *active,
                                       struct CUstream_st *stream) {
  uint64_t bits = 0;
  EP_TRY(checkMasks(g, active));
  for (int r = 0; r < g->step.at.numRanks; r++) bits |= (uint64_t)(active[r] != 0) << r;
  return epGpuSetMask((int *)(g->step.scratch + EP_A2SGD_MASK_AT), bits, g->step.at.numRanks,
                      stream);
}

/* Where not all have left, a rank may still store into this one's memory: then it stays. */
trefoil_result_t trefoilGradGpuDestroy(trefoil_grad_gpu_t g) {
  int before;
  EP_TRY(checkAlive(g));
  EP_CUDA(cudaGetDevice(&before));
  EP_CUDA(cudaSetDevice(g->device));
  cudaError_t error = cudaDeviceSynchronize();
  if (g->record->failed && g->step.timeoutNs > 1000000000u) g->step.timeoutNs = 1000000000u;
  if (meet(g, EP_RENDEZVOUS_GRAD_DESTROY, 0) != TREFOIL_OK) {
    g->window = NULL;
    g->exchange = NULL;
  }
  release(g);
  cudaSetDevice(before);
  if (error != cudaSuccess) cudaGetLastError();
  return TREFOIL_OK;
}
