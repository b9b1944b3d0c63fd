/* A case of A2SGD as calls of a library: trefoilGradGpu* of trefoil/a2sgd.h. */
#include "validate/check_rank.h"

#include "plan/error.h"

#include <string.h>

trefoil_result_t epGradOpen(ep_check_rank_t *rank) {
  const ep_check_group_t *g = rank->group;
  trefoil_grad_config_t config = epGradModelConfig(&g->model, g->shape.numRanks);
  config.syncPeriod = g->syncPeriod;
  const trefoil_grad_gpu_options_t options = {(int)g->maxSms, g->enableMask, rank->timeoutNs};
  rank->doing = "trefoilGradGpuCreate";
  EP_TRY(epLibraryHasGrad(rank->lib));
  EP_TRY_GRAD(rank,
              rank->lib->trefoilGradGpuCreate(&config, &options, rank->comm, &rank->gradients));
  return TREFOIL_OK;
}

trefoil_result_t epGradClose(ep_check_rank_t *rank) {
  rank->doing = "trefoilGradGpuDestroy";
  EP_TRY_GRAD(rank, rank->lib->trefoilGradGpuDestroy(rank->gradients));
  return TREFOIL_OK;
}

/* An empty model's arrays are NULL now and then. */
static void *arrayOf(const ep_check_rank_t *rank, const ep_check_case_t *c, const ep_check_op_t *op,
                     ep_tensor_id_t tensor) {
  int isNull = (op->payloadKey & 4) && epGradModelElements(&c->group->model) == 0;
  return isNull ? NULL : (uint8_t *)rank->image + c->regions[op->region[tensor]].offset;
}

static trefoil_result_t step(ep_check_rank_t *rank, const ep_check_case_t *c,
                             const ep_check_op_t *op) {
  const void *grad = arrayOf(rank, c, op, op->inPlace ? EP_T_UPDATE : EP_T_GRAD);
  void *update = arrayOf(rank, c, op, EP_T_UPDATE);
  rank->doing = "trefoilGradGpuStep";
  EP_TRY_GRAD(rank, rank->lib->trefoilGradGpuStep(rank->gradients, grad, update, rank->stream));
  return TREFOIL_OK;
}

static trefoil_result_t average(ep_check_rank_t *rank, const ep_check_case_t *c,
                                const ep_check_op_t *op) {
  void *params = arrayOf(rank, c, op, EP_T_UPDATE);
  rank->doing = "trefoilGradGpuSync";
  EP_TRY_GRAD(rank, rank->lib->trefoilGradGpuSync(rank->gradients, op->step, params, rank->stream));
  return TREFOIL_OK;
}

/* NULL: all ranks are active. */
static trefoil_result_t setMask(ep_check_rank_t *rank, const uint8_t *row) {
  int active[EP_MAX_RANKS];
  for (int q = 0; q < rank->group->shape.numRanks; q++) active[q] = row ? row[q] : 1;
  rank->doing = "trefoilGradGpuSetMask";
  EP_TRY_GRAD(rank, rank->lib->trefoilGradGpuSetMask(rank->gradients, active, rank->stream));
  memset(active, 0x55, sizeof active); /* read during the call only */
  return TREFOIL_OK;
}

/* What it says goes where all outputs are compared. */
static trefoil_result_t getMask(ep_check_rank_t *rank, const ep_check_case_t *c,
                                const ep_check_op_t *op) {
  int active[EP_MAX_RANKS];
  void *out = (uint8_t *)rank->image + c->regions[op->region[EP_T_MASK]].offset;
  size_t bytes = sizeof *active * (size_t)rank->group->shape.numRanks;
  rank->doing = "trefoilGradGpuGetMask";
  EP_TRY_GRAD(rank, rank->lib->trefoilGradGpuGetMask(rank->gradients, active, rank->stream));
  rank->doing = "cudaMemcpyAsync";
  EP_TRY_CUDA(rank,
              rank->lib->cudaMemcpyAsync(out, active, bytes, cudaMemcpyHostToDevice, rank->stream));
  rank->doing = "cudaStreamSynchronize";
  EP_TRY_CUDA(rank, rank->lib->cudaStreamSynchronize(rank->stream));
  return TREFOIL_OK;
}

trefoil_result_t epGradCall(ep_check_rank_t *rank, const ep_check_case_t *c,
                            const ep_check_op_t *op) {
  int R = c->group->shape.numRanks;
  switch (op->kind) {
  case EP_OP_MASK_UPDATE:
    return setMask(rank, c->active + (size_t)rank->rank * (size_t)R);
  case EP_OP_MASK_CLEAN:
    return setMask(rank, NULL);
  case EP_OP_MASK_QUERY:
    return getMask(rank, c, op);
  case EP_OP_GRAD_SYNC:
    return average(rank, c, op);
  default:
    return step(rank, c, op);
  }
}
