/* A2SGD's calls: their arguments, then the library's operations (backend.h). */
#include <stdlib.h>

#include "api/grad_object.h"
#include "ref/grad.h"

#define DEFAULT_TIMEOUT_NS 100000000000ull

static trefoil_result_t checkConfig(const trefoil_grad_config_t *c) {
  EP_TRY(trefoilGradCheck(c));
  EP_CHECK(c->method == TREFOIL_GRAD_A2SGD, TREFOIL_INVALID_ARGUMENT,
           "method is %d; on GPUs it must be 1 (A2SGD)", (int)c->method);
  return TREFOIL_OK;
}

trefoil_result_t trefoilGradGpuSizes(const trefoil_grad_config_t *c, int numSms,
                                     size_t *exchangeBytes, size_t *scratchBytes) {
  size_t exchange, scratch;
  EP_TRY(checkConfig(c));
  EP_CHECK(numSms >= 1, TREFOIL_INVALID_ARGUMENT, "numSms is %d, must be >= 1", numSms);
  EP_CHECK(exchangeBytes && scratchBytes, TREFOIL_INVALID_ARGUMENT, "%s is NULL",
           exchangeBytes ? "scratchBytes" : "exchangeBytes");
  EP_TRY(epBackend.gradSizes(c, numSms, &exchange, &scratch));
  *exchangeBytes = exchange;
  *scratchBytes = scratch;
  return TREFOIL_OK;
}

/* ---- create ---------------------------------------------------------------------------------- */

/* Of what must be equal on all ranks. */
static uint64_t hashOf(const trefoil_grad_config_t *c, int enableMask) {
  uint64_t h = 14695981039346656037ull;
  uint64_t head[] = {(uint64_t)c->dtype, (uint64_t)c->scope, (uint64_t)c->numTensors,
                     (uint64_t)c->syncPeriod, enableMask != 0};
  for (size_t i = 0; i < sizeof head / sizeof *head; i++) h = (h ^ head[i]) * 1099511628211ull;
  for (int t = 0; t < c->numTensors; t++) h = (h ^ (uint64_t)c->sizes[t]) * 1099511628211ull;
  return h;
}

static void release(struct trefoil_grad_gpu *g) {
  epUnregister(g, EP_OBJECT_GRAD);
  epBackend.gradRelease(g);
  free(g);
}

static trefoil_result_t create(const trefoil_grad_config_t *c, const trefoil_grad_gpu_options_t *o,
                               ncclComm_t comm, trefoil_grad_gpu_t *out) {
  EP_CHECK(out, TREFOIL_INVALID_ARGUMENT, "%s is NULL", "out");
  EP_CHECK(comm, TREFOIL_INVALID_ARGUMENT, "%s is NULL", "comm");
  EP_TRY(checkConfig(c));
  EP_CHECK(o->maxSms >= 0, TREFOIL_INVALID_ARGUMENT, "maxSms is %d, must be >= 0 (0 = all)",
           o->maxSms);
  struct trefoil_grad_gpu *g = calloc(1, epBackend.gradBytes());
  EP_CHECK(g, TREFOIL_SYSTEM_ERROR, "trefoilGradGpuCreate: out of memory");
  g->comm = comm;
  g->enableMask = o->enableMask != 0;
  g->dtype = c->dtype;
  g->elements = epGradElements(c);
  g->syncPeriod = c->syncPeriod;
  g->timeoutNs = o->timeoutNs ? o->timeoutNs : DEFAULT_TIMEOUT_NS;
  trefoil_result_t result = epRegister(g, EP_OBJECT_GRAD);
  if (result == TREFOIL_OK) result = epBackend.gradOpen(g, c, o, hashOf(c, o->enableMask));
  if (result == TREFOIL_OK)
    *out = g;
  else
    release(g);
  return result;
}

trefoil_result_t trefoilGradGpuCreate(const trefoil_grad_config_t *c,
                                      const trefoil_grad_gpu_options_t *options,
                                      struct ncclComm *comm, trefoil_grad_gpu_t *out) {
  trefoil_grad_gpu_options_t o = {0};
  if (options) o = *options;
  if (comm) epBackend.callBegin(comm);
  trefoil_result_t result = create(c, &o, comm, out);
  if (comm && result != TREFOIL_OK) epBackend.callFail(comm, result, trefoilLastError());
  return result;
}

trefoil_result_t epGradCheckRanks(const trefoil_grad_config_t *c, int numRanks, int perNode) {
  EP_CHECK(numRanks == c->numWorkers, TREFOIL_INVALID_ARGUMENT,
           "numWorkers is %d, the communicator has %d ranks; must be equal", c->numWorkers,
           numRanks);
  EP_CHECK(perNode == numRanks, TREFOIL_INVALID_USAGE,
           "trefoilGradGpuCreate: the ranks form %d NVLink domains; A2SGD on GPUs takes one",
           numRanks / perNode);
  return TREFOIL_OK;
}

trefoil_result_t epGradCompare(int rank, int isSame) {
  EP_CHECK(isSame, TREFOIL_INVALID_ARGUMENT,
           "trefoilGradGpuCreate: the configuration of rank %d differs from rank 0's", rank);
  return TREFOIL_OK;
}

/* ---- steps ----------------------------------------------------------------------------------- */

static trefoil_result_t checkAlive(trefoil_grad_gpu_t g) {
  EP_CHECK(epIsLive(g, EP_OBJECT_GRAD), TREFOIL_INVALID_ARGUMENT,
           "%p is not what trefoilGradGpuCreate gave, or was destroyed", (void *)g);
  return TREFOIL_OK;
}

static trefoil_result_t checkLost(const struct trefoil_grad_gpu *g) {
  ep_grad_loss_t loss;
  EP_CHECK(g->enableMask || !epBackend.gradLost(g, &loss), TREFOIL_REMOTE_ERROR,
           "rank %d did not answer within %.3g s: rank %d waited in A2SGD %s %llu for its %s %lld; "
           "make a new object (with enableMask the others would go on without it)",
           loss.rank, (double)loss.waitedNs * 1e-9, g->rank,
           loss.isSync ? "synchronisation" : "step", (unsigned long long)loss.number,
           loss.isSync ? "parameters from" : "means of group", (long long)loss.item);
  return TREFOIL_OK;
}

trefoil_result_t trefoilGradGpuStep(trefoil_grad_gpu_t g, const void *grad, void *update,
                                    struct CUstream_st *stream) {
  EP_TRY(checkAlive(g));
  EP_CHECK(g->elements == 0 || (grad && update), TREFOIL_INVALID_ARGUMENT, "%s is NULL",
           grad ? "update" : "grad");
  size_t each = trefoilDtypeBytes(g->dtype);
  EP_CHECK((uintptr_t)grad % each == 0 && (uintptr_t)update % each == 0, TREFOIL_INVALID_ARGUMENT,
           "grad and update must lie at multiples of %zu bytes", each);
  EP_TRY(checkLost(g));
  return epBackend.gradStep(g, grad, update, stream);
}

trefoil_result_t trefoilGradGpuSync(trefoil_grad_gpu_t g, int64_t step, void *params,
                                    struct CUstream_st *stream) {
  EP_TRY(checkAlive(g));
  EP_CHECK(step >= TREFOIL_GRAD_LAST_STEP && step <= UINT32_MAX, TREFOIL_INVALID_ARGUMENT,
           "step is %lld, must be 0..4294967295, or -1 for the last one that was made",
           (long long)step);
  EP_CHECK(g->elements == 0 || params, TREFOIL_INVALID_ARGUMENT, "%s is NULL", "params");
  size_t each = trefoilDtypeBytes(g->dtype);
  EP_CHECK((uintptr_t)params % each == 0, TREFOIL_INVALID_ARGUMENT,
           "params must lie at a multiple of %zu bytes", each);
  EP_TRY(checkLost(g));
  if (g->elements == 0 || g->syncPeriod == 0) return TREFOIL_OK;
  if (step == TREFOIL_GRAD_LAST_STEP) return epBackend.gradSync(g, g->syncPeriod, params, stream);
  return (step + 1) % g->syncPeriod ? TREFOIL_OK : epBackend.gradSync(g, 0, params, stream);
}

static trefoil_result_t checkMasks(trefoil_grad_gpu_t g, const int *active) {
  EP_TRY(checkAlive(g));
  EP_CHECK(g->enableMask, TREFOIL_INVALID_USAGE,
           "A2SGD has no masks: enableMask was 0 in trefoilGradGpuCreate");
  EP_CHECK(active, TREFOIL_INVALID_ARGUMENT, "%s is NULL", "active");
  return TREFOIL_OK;
}

trefoil_result_t trefoilGradGpuGetMask(trefoil_grad_gpu_t g, int *active,
                                       struct CUstream_st *stream) {
  EP_TRY(checkMasks(g, active));
  return epBackend.gradGetMask(g, active, stream);
}

trefoil_result_t trefoilGradGpuSetMask(trefoil_grad_gpu_t g, const int *active,
                                       struct CUstream_st *stream) {
  EP_TRY(checkMasks(g, active));
  return epBackend.gradSetMask(g, active, stream);
}

trefoil_result_t trefoilGradGpuDestroy(trefoil_grad_gpu_t g) {
  EP_TRY(checkAlive(g));
  epBackend.gradClose(g);
  release(g);
  return TREFOIL_OK;
}
