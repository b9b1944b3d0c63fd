/* Predictions: routing -> plan -> port loads -> closed form, for dispatch and combine. */
#include <stdlib.h>
#include <string.h>

#include "plan/error.h"
#include "plan/philox.h"
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
  return trefoilBound(spec->cluster, spec->mode, &p->loads[op], &p->bound[op]);
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

/* Copies of expert e among physical experts: e, e + E, ... below physical. */
static void chooseCopies(const trefoil_trace_t *trace, int physical, uint64_t seed, int32_t *out) {
  int E = trace->shape.numExperts, K = trace->shape.topk;
  for (int64_t i = 0; i < trace->numTokens * K; i++) {
    int32_t e = trace->topkIdx[i];
    int copies = (physical - e + E - 1) / E;
    ep_philox_t p = epPhilox(seed, (uint32_t)i, (uint32_t)((uint64_t)i >> 32), 0, UINT32_MAX);
    out[i] = e < 0 ? -1 : e + E * (int32_t)((uint64_t)p.word[0] * (uint32_t)copies >> 32);
  }
}

static trefoil_result_t predictCopies(const trefoil_predict_spec_t *spec,
                                      const trefoil_trace_t *trace,
                                      const trefoil_predict_load_t *load,
                                      trefoil_prediction_t *prediction) {
  trefoil_routing_t routing;
  EP_TRY(trefoilTraceRouting(trace, 0, &routing));
  if (load->physicalExperts <= trace->shape.numExperts) {
    return trefoilPredictRouting(spec, &routing, prediction);
  }
  size_t entries = (size_t)(trace->numTokens * trace->shape.topk);
  int32_t *idx = malloc(entries * sizeof *idx);
  const int32_t **rows = malloc((size_t)load->epSize * sizeof *rows);
  trefoil_result_t result = TREFOIL_SYSTEM_ERROR;
  if (idx && rows) {
    chooseCopies(trace, load->physicalExperts, load->seed, idx);
    for (int r = 0; r < load->epSize; r++) {
      rows[r] = idx + trace->offsets[r] * trace->shape.topk;
    }
    routing.shape.numExperts = load->physicalExperts;
    routing.topkIdx = rows;
    result = trefoilPredictRouting(spec, &routing, prediction);
  } else {
    epFail(result, "out of memory for %zu entries", entries);
  }
  free(idx);
  free(rows);
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
  const trefoil_trace_t *trace;
  EP_TRY(trefoilTraceGenerate(&trace, &t));
  trefoil_predict_load_t whole = *load;
  whole.physicalExperts = physical;
  trefoil_result_t result = predictCopies(spec, trace, &whole, prediction);
  trefoilTraceDestroy(trace);
  return result;
}
