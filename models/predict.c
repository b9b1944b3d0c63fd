/* Predictions: routing -> plan -> port loads -> closed form, for dispatch and combine. */
#include "plan/error.h"
#include "trefoil/models.h"
#include "trefoil/trace.h"

static trefoil_result_t predictOp(const trefoil_predict_spec_t *spec,
                                  const trefoil_routing_t *routing, trefoil_op_t op,
                                  trefoil_prediction_t *p) {
  trefoil_plan_config_t config = {.mode = spec->mode,
                                  .op = op,
                                  .variant = spec->variant,
                                  .combinePartial = spec->combinePartial};
  config.rowBytes = op == TREFOIL_OP_DISPATCH ? spec->dispatchRowBytes : spec->combineRowBytes;
  trefoil_plan_t *plan;
  EP_TRY(trefoilPlanCreate(&plan, routing, &config));
  trefoil_result_t result =
      trefoilPortLoads(plan, &routing->shape, spec->cluster->gpusPerNic, &p->loads[op]);
  trefoilPlanDestroy(plan);
  EP_TRY(result);
  return trefoilClosedForm(spec->cluster, spec->mode, &p->loads[op], &p->closedForm[op]);
}

trefoil_result_t trefoilPredictRouting(const trefoil_predict_spec_t *spec,
                                       const trefoil_routing_t *routing,
                                       trefoil_prediction_t *prediction) {
  EP_CHECK(spec && spec->cluster && routing && prediction, TREFOIL_INVALID_ARGUMENT,
           "the %s is NULL",
           !spec            ? "specification"
           : !spec->cluster ? "cluster"
           : !routing       ? "routing"
                            : "output");
  trefoil_prediction_t found;
  EP_TRY(predictOp(spec, routing, TREFOIL_OP_DISPATCH, &found));
  EP_TRY(predictOp(spec, routing, TREFOIL_OP_COMBINE, &found));
  *prediction = found;
  return TREFOIL_OK;
}

static trefoil_result_t predictStep(const trefoil_predict_spec_t *spec,
                                    const trefoil_trace_t *trace,
                                    trefoil_prediction_t *prediction) {
  trefoil_routing_t routing;
  EP_TRY(trefoilTraceRouting(trace, 0, &routing));
  return trefoilPredictRouting(spec, &routing, prediction);
}

static trefoil_result_t predictCopies(const trefoil_predict_spec_t *spec,
                                      const trefoil_trace_t *trace, int physical, uint64_t seed,
                                      trefoil_prediction_t *prediction) {
  if (physical <= trace->shape.numExperts) return predictStep(spec, trace, prediction);
  const trefoil_trace_t *copied;
  EP_TRY(trefoilTraceCopies(&copied, trace, physical, seed));
  trefoil_result_t result = predictStep(spec, copied, prediction);
  trefoilTraceDestroy(copied);
  return result;
}

trefoil_result_t trefoilPredictUniform(const trefoil_predict_spec_t *spec, const trefoil_moe_t *moe,
                                       const trefoil_predict_load_t *load,
                                       trefoil_prediction_t *prediction) {
  EP_CHECK(spec && spec->cluster && moe && load, TREFOIL_INVALID_ARGUMENT, "an argument is NULL");
  int physical = load->physicalExperts ? load->physicalExperts : moe->numExperts;
  EP_CHECK(physical >= moe->numExperts && physical <= TREFOIL_MAX_EXPERTS, TREFOIL_INVALID_ARGUMENT,
           "%d physical experts: must be at least the model's %d and at most %d", physical,
           moe->numExperts, TREFOIL_MAX_EXPERTS);
  EP_CHECK(load->epSize >= 1 && load->epSize <= physical, TREFOIL_INVALID_ARGUMENT,
           "an EP group of %d: must be in [1, %d], the number of physical experts", load->epSize,
           physical);
  trefoil_trace_spec_t t = {.numSteps = 1, .seed = load->seed};
  t.shape =
      (trefoil_shape_t){load->epSize, trefoilRanksPerNode(load->epSize, spec->cluster->gpusPerNode),
                        moe->numExperts, moe->topk, load->tokens};
  if (load->isGrouped) {
    t.numGroups = moe->numGroups;
    t.topkGroups = moe->topkGroups;
  }
  const trefoil_trace_t *trace;
  EP_TRY(trefoilTraceGenerate(&trace, &t));
  trefoil_result_t result = predictCopies(spec, trace, physical, load->seed, prediction);
  trefoilTraceDestroy(trace);
  return result;
}
