/* A2SGD on GPUs behind trefoil/a2sgd.h: memory, a window of the communicator, steps, and what waits found.
 * Kernels: kernels/a2sgd. */
#include <stdlib.h>
#include <string.h>

#include "api/gpu/gpu.h"
#include "api/gpu/rendezvous.h"
#include "api/grad_object.h"
#include "kernels/a2sgd/a2sgd_step.h"
#include "ref/grad.h"

typedef struct gpu_grad {
  struct trefoil_grad_gpu head;
  int device;
  int64_t *counts; /* elements of each group */
  ep_a2sgd_step_t step;
  char *exchange;
  ncclWindow_t window;
  ep_wait_record_t *record;
  struct ep_rendezvous *rendezvous;
} gpu_grad_t;

/* The layout of groups; their counts are for free(). */
static trefoil_result_t layOut(const trefoil_grad_config_t *c, int numSms, ep_a2sgd_layout_t *at,
                               int64_t **counts) {
  int n = c->scope == TREFOIL_GRAD_WHOLE_MODEL ? 1 : c->numTensors;
  *counts = malloc(sizeof **counts * (size_t)(n + 1));
  EP_CHECK(*counts, TREFOIL_SYSTEM_ERROR, "trefoilGradGpuCreate: out of memory");
  for (ep_grad_group_t g = EP_GRAD_BEGIN; epGradNext(c, &g);) (*counts)[g.idx] = g.count;
  trefoil_result_t result = epA2sgdLayout(n, *counts, c->numWorkers, numSms, at);
  if (result == TREFOIL_OK && c->syncPeriod)
    epA2sgdAddSync(at, c->dtype, EP_A2SGD_CHANNELS, EP_A2SGD_CHUNK_BYTES);
  if (result == TREFOIL_OK) return TREFOIL_OK;
  free(*counts);
  *counts = NULL;
  return result;
}

trefoil_result_t epGpuGradSizes(const trefoil_grad_config_t *c, int numSms, size_t *exchangeBytes,
                                size_t *scratchBytes) {
  ep_a2sgd_layout_t at;
  int64_t *counts;
  EP_TRY(layOut(c, numSms, &at, &counts));
  free(counts);
  *exchangeBytes = at.exchangeBytes;
  *scratchBytes = at.scratchBytes;
  return TREFOIL_OK;
}

/* ---- open ------------------------------------------------------------------------------------ */

static trefoil_result_t findRank(gpu_grad_t *g, const trefoil_grad_config_t *c) {
  int numRanks, perNode;
  EP_TRY(epGpuRanks(g->head.comm, "trefoilGradGpuCreate", &g->step.rank, &numRanks, &perNode));
  g->head.rank = g->step.rank;
  g->head.numRanks = numRanks;
  EP_TRY(epGradCheckRanks(c, numRanks, perNode));
  return epGpuNccl(g->head.comm, ncclCommCuDevice(g->head.comm, &g->device),
                   "trefoilGradGpuCreate: comm");
}

static trefoil_result_t allocate(gpu_grad_t *g) {
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

static trefoil_result_t barrierRound(gpu_grad_t *g, ep_rendezvous_call_t call, uint64_t hash) {
  ep_rendezvous_word_t all[EP_KERNEL_MAX_RANKS], mine = {.call = call, .groupId = hash};
  EP_TRY(epRendezvousWait(g->rendezvous, &mine, g->step.timeoutNs, all));
  for (int r = 1; r < g->step.at.numRanks; r++)
    EP_TRY(epGradCompare(r, all[r].groupId == all[0].groupId));
  return TREFOIL_OK;
}

/* What failed alone fails the others before NCCL's collective, which has no time limit. */
static trefoil_result_t join(gpu_grad_t *g, uint64_t hash) {
  size_t bytes = g->step.at.exchangeBytes ? g->step.at.exchangeBytes : 16;
  EP_TRY(barrierRound(g, EP_RENDEZVOUS_GRAD_CREATE, hash));
  EP_TRY(epGpuNccl(g->head.comm,
                   ncclCommWindowRegister(g->head.comm, g->exchange, bytes, &g->window, 0),
                   "trefoilGradGpuCreate: ncclCommWindowRegister"));
  EP_CHECK(g->window && epGpuReaches(g->window, g->step.at.numRanks, g->step.peers),
           TREFOIL_INVALID_USAGE,
           "trefoilGradGpuCreate: some rank's memory cannot be reached from rank %d "
           "(NCCL_CUMEM_ENABLE, NCCL_WIN_ENABLE)",
           g->step.rank);
  EP_TRY(barrierRound(g, EP_RENDEZVOUS_GRAD_READY, hash));
  epRendezvousAllCame(g->rendezvous);
  return TREFOIL_OK;
}

void epGpuGradRelease(struct trefoil_grad_gpu *head) {
  gpu_grad_t *g = (gpu_grad_t *)head;
  int before;
  cudaGetDevice(&before);
  if (g->exchange) cudaSetDevice(g->device);
  if (g->window) ncclCommWindowDeregister(head->comm, g->window);
  if (g->exchange) ncclMemFree(g->exchange);
  cudaFree(g->step.scratch);
  if (g->record) cudaFreeHost(g->record);
  if (g->rendezvous) epRendezvousClose(g->rendezvous);
  free(g->counts);
  cudaSetDevice(before);
}

static trefoil_result_t openObject(gpu_grad_t *g, const trefoil_grad_config_t *c,
                                   const trefoil_grad_gpu_options_t *o, uint64_t hash) {
  int sms;
  g->step.dtype = c->dtype;
  g->step.enableMask = g->head.enableMask;
  g->step.timeoutNs = g->head.timeoutNs;
  EP_TRY(findRank(g, c));
  EP_CUDA(cudaSetDevice(g->device));
  EP_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, g->device));
  g->step.numSms = o->maxSms && o->maxSms < sms ? o->maxSms : sms;
  EP_TRY(layOut(c, g->step.numSms, &g->step.at, &g->counts));
  EP_TRY(epRendezvousOpen(g->head.comm, g->step.rank, c->numWorkers, 1, g->step.timeoutNs,
                          &g->rendezvous));
  EP_TRY(allocate(g));
  return join(g, hash);
}

trefoil_result_t epGpuGradOpen(struct trefoil_grad_gpu *head, const trefoil_grad_config_t *c,
                               const trefoil_grad_gpu_options_t *o, uint64_t hash) {
  int before;
  cudaGetDevice(&before);
  trefoil_result_t result = openObject((gpu_grad_t *)head, c, o, hash);
  cudaSetDevice(before);
  return result;
}

/* ---- steps ----------------------------------------------------------------------------------- */

int epGpuGradLost(const struct trefoil_grad_gpu *head, ep_grad_loss_t *loss) {
  const volatile ep_wait_record_t *r = ((const gpu_grad_t *)head)->record;
  if (!r->failed) return 0;
  *loss = (ep_grad_loss_t){r->rank, r->kind == EP_A2SGD_KIND_SYNC, r->nowNs - r->sinceNs,
                           r->operation, r->item};
  return 1;
}

/* On the object's device. */
static trefoil_result_t launch(const gpu_grad_t *g, const ep_a2sgd_step_t *step,
                               trefoil_result_t (*what)(const ep_a2sgd_step_t *, void *),
                               cudaStream_t stream) {
  int before;
  EP_CUDA(cudaGetDevice(&before));
  if (before != g->device) EP_CUDA(cudaSetDevice(g->device));
  trefoil_result_t result = what(step, stream);
  if (before != g->device) cudaSetDevice(before);
  return result;
}

trefoil_result_t epGpuGradStep(struct trefoil_grad_gpu *head, const void *grad, void *update,
                               cudaStream_t stream) {
  const gpu_grad_t *g = (const gpu_grad_t *)head;
  ep_a2sgd_step_t step = g->step;
  step.grad = grad;
  step.update = update;
  return launch(g, &step, epA2sgdStep, stream);
}

trefoil_result_t epGpuGradSync(struct trefoil_grad_gpu *head, int64_t period, void *params,
                               cudaStream_t stream) {
  const gpu_grad_t *g = (const gpu_grad_t *)head;
  ep_a2sgd_step_t step = g->step;
  step.params = params;
  step.syncPeriod = period;
  return launch(g, &step, epA2sgdSync, stream);
}

trefoil_result_t epGpuGradGetMask(struct trefoil_grad_gpu *head, int *active, cudaStream_t stream) {
  const gpu_grad_t *g = (const gpu_grad_t *)head;
  int mask[EP_KERNEL_MAX_RANKS];
  size_t bytes = sizeof *mask * (size_t)g->step.at.numRanks;
  EP_CUDA(cudaMemcpyAsync(mask, g->step.scratch + EP_A2SGD_MASK_AT, bytes, cudaMemcpyDeviceToHost,
                          stream));
  EP_CUDA(cudaStreamSynchronize(stream));
  memcpy(active, mask, bytes);
  return TREFOIL_OK;
}

trefoil_result_t epGpuGradSetMask(struct trefoil_grad_gpu *head, const int *active,
                                  cudaStream_t stream) {
  const gpu_grad_t *g = (const gpu_grad_t *)head;
  uint64_t bits = 0;
  for (int r = 0; r < g->step.at.numRanks; r++) bits |= (uint64_t)(active[r] != 0) << r;
  return epGpuSetMask((int *)(g->step.scratch + EP_A2SGD_MASK_AT), bits, g->step.at.numRanks,
                      stream);
}

/* Where not all have left, a rank may still store into this one's memory: then it stays. */
void epGpuGradClose(struct trefoil_grad_gpu *head) {
  gpu_grad_t *g = (gpu_grad_t *)head;
  int before;
  cudaGetDevice(&before);
  cudaSetDevice(g->device);
  cudaError_t error = cudaDeviceSynchronize();
  if (g->record->failed && g->step.timeoutNs > 1000000000u) g->step.timeoutNs = 1000000000u;
  if (barrierRound(g, EP_RENDEZVOUS_GRAD_DESTROY, 0) != TREFOIL_OK) {
    g->window = NULL;
    g->exchange = NULL;
  }
  cudaSetDevice(before);
  if (error != cudaSuccess) cudaGetLastError();
}

size_t epGpuGradBytes(void) {
  return sizeof(gpu_grad_t);
}
