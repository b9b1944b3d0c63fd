/* Batches and cases of A2SGD: a model a batch; a case is a few steps, in place or not, on fresh gradients or
 * on what the step before left, and synchronisations of fresh parameters or of what a step left, with masks
 * or captured and replayed. */
#include "validate/check_case.h"

#include "plan/error.h"

void epMakeGradGroup(ep_check_group_t *g, ep_rng_t *rng) {
  int64_t most = epOneIn(rng, 16) ? 40000 : epOneIn(rng, 2) ? 3000 : 300;
  g->isGrad = 1;
  g->shape.ranksPerNode = g->shape.numRanks;
  epDrawGradModel(epRand(rng), most, &g->model);
  g->enableMask = epOneIn(rng, 3);
  g->useWindow = epOneIn(rng, 3);
  g->maxSms = epOneIn(rng, 2) ? (unsigned)epRange(rng, 1, 8) : 0;
  g->syncPeriod = epOneIn(rng, 3) ? 0 : epRange(rng, 1, 3);
  size_t arrays = 4 * 3; /* of a case */
  g->imageBytes = arrays * ((size_t)epGradModelElements(&g->model) * 4 + 256) + 4096;
}

static void addStep(ep_check_case_t *c, int last, ep_rng_t *rng) {
  ep_check_op_t *op = epAddOp(c, EP_OP_GRAD_STEP, -1, -1, rng);
  ep_grad_run_t run;
  epDrawGradRun(op->payloadKey, &run);
  op->inPlace = run.inPlace;
  op->values = run.values;
  op->dtype = c->group->model.dtype;
  if (last >= 0 && epOneIn(rng, 3)) op->from = last;
}

/* Of a step of any number: cases are run by themselves, too. The last one is known where all are due. */
static void addSync(ep_check_case_t *c, int last, ep_rng_t *rng) {
  ep_check_op_t *op = epAddOp(c, EP_OP_GRAD_SYNC, -1, -1, rng);
  ep_grad_run_t run;
  epDrawGradRun(op->payloadKey, &run);
  op->inPlace = 1;
  op->values = run.values;
  op->dtype = c->group->model.dtype;
  op->step = epRange(rng, 0, 5);
  if (c->group->syncPeriod == 1 && epOneIn(rng, 2)) op->step = TREFOIL_GRAD_LAST_STEP;
  if (epOneIn(rng, 2)) op->from = last;
}

static void addMaskOps(ep_check_case_t *c, ep_op_kind_t kind, ep_rng_t *rng) {
  if (!c->numMasks) return;
  epAddOp(c, kind, -1, -1, rng);
  if (epOneIn(rng, 2)) epAddOp(c, EP_OP_MASK_QUERY, -1, -1, rng);
}

trefoil_result_t epMakeGradCase(ep_check_case_t *c, ep_rng_t *rng) {
  const ep_check_group_t *g = c->group;
  ep_grad_run_t run;
  epDrawGradRun(epRand(rng), &run);
  c->numMasks = g->enableMask && epOneIn(rng, 2);
  c->captured = !c->numMasks && run.isReplayed;
  c->numRounds = c->captured ? EP_MAX_ROUNDS : 1;
  if (epOneIn(rng, 16)) c->delays = 1u << epBelow(rng, g->shape.numRanks);
  int last = -1, masked = (int)epBelow(rng, run.numSteps); /* the first step with a mask in force */
  if (c->numMasks) epMakeMasks(c, rng);
  for (int i = 0; i < run.numSteps; i++) {
    if (i == masked) addMaskOps(c, EP_OP_MASK_UPDATE, rng);
    addStep(c, last, rng);
    last = c->numOps - 1;
    if (epOneIn(rng, 2)) addSync(c, last, rng);
  }
  addMaskOps(c, EP_OP_MASK_CLEAN, rng); /* the next case's steps: ranks meet before it */
  EP_CHECK(epPlaceTensors(c, rng), TREFOIL_INTERNAL_ERROR, "case %llu does not fit its image",
           (unsigned long long)c->index);
  return TREFOIL_OK;
}

static void *at(const ep_check_case_t *c, int region, uint8_t *image) {
  return image + c->regions[region].offset;
}

static trefoil_result_t expectSync(const ep_check_case_t *c, const ep_check_op_t *op,
                                   trefoil_grad_config_t config, void *const *params) {
  config.syncPeriod = c->group->syncPeriod;
  return trefoilGradSync(&config, op->step < 0 ? 0 : op->step, params);
}

trefoil_result_t epExpectGrad(const ep_check_case_t *c, const ep_check_op_t *op, int isMasked,
                              uint8_t *const *images) {
  int R = c->group->shape.numRanks, from = op->region[op->inPlace ? EP_T_UPDATE : EP_T_GRAD];
  uint32_t left = (1u << R) - 1;
  while (left) { /* the ranks that see one another average among themselves */
    const void *grads[EP_MAX_RANKS];
    void *updates[EP_MAX_RANKS];
    int first = __builtin_ctz(left), n = 0;
    for (int r = first; r < R; r++) {
      if (isMasked && !c->active[first * R + r]) continue;
      grads[n] = at(c, from, images[r]);
      updates[n++] = at(c, op->region[EP_T_UPDATE], images[r]);
      left &= ~(1u << r);
    }
    const trefoil_grad_config_t config = epGradModelConfig(&c->group->model, n);
    const trefoil_grad_workers_t workers = {grads, NULL, updates};
    if (op->kind == EP_OP_GRAD_SYNC)
      EP_TRY(expectSync(c, op, config, updates));
    else
      EP_TRY(trefoilGradStep(&config, 0, &workers));
  }
  return TREFOIL_OK;
}
