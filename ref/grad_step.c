/* A step of gradient averaging: arguments, groups, and the choice of the method. */
#include "ref/grad.h"

#include "plan/error.h"

static trefoil_result_t checkStep(int64_t step) {
  EP_CHECK(step >= 0 && step <= UINT32_MAX, TREFOIL_INVALID_ARGUMENT,
           "step is %lld, must be 0..4294967295", (long long)step);
  return TREFOIL_OK;
}

/* Pointers to arrays with elements. */
static trefoil_result_t checkArrays(const trefoil_grad_config_t *c, const void *const *arrays,
                                    const char *name) {
  if (epGradElements(c) == 0) return TREFOIL_OK;
  EP_CHECK(arrays, TREFOIL_INVALID_ARGUMENT, "%s is NULL", name);
  for (int w = 0; w < c->numWorkers; w++)
    EP_CHECK(arrays[w], TREFOIL_INVALID_ARGUMENT, "%s[%d] is NULL", name, w);
  return TREFOIL_OK;
}

static void stepGroup(const trefoil_grad_config_t *c, const ep_grad_group_t *g, uint32_t step,
                      const trefoil_grad_workers_t *w) {
  if (c->method == TREFOIL_GRAD_A2SGD)
    epGradStepA2sgd(c, g, w);
  else if (c->method == TREFOIL_GRAD_TOPK)
    epGradStepTopk(c, g, w);
  else if (c->method == TREFOIL_GRAD_QSGD)
    epGradStepQsgd(c, g, step, w);
  else
    epGradMeanOf(c, g, w->grads, w->updates);
}

trefoil_result_t trefoilGradStep(const trefoil_grad_config_t *c, int64_t step,
                                 const trefoil_grad_workers_t *workers) {
  EP_TRY(trefoilGradCheck(c));
  EP_TRY(checkStep(step));
  EP_CHECK(workers, TREFOIL_INVALID_ARGUMENT, "%s is NULL", "workers");
  EP_TRY(checkArrays(c, workers->grads, "grads"));
  EP_TRY(checkArrays(c, (const void *const *)workers->updates, "updates"));
  if (c->method == TREFOIL_GRAD_TOPK)
    EP_TRY(checkArrays(c, (const void *const *)workers->states, "states"));
  for (ep_grad_group_t g = EP_GRAD_BEGIN; epGradNext(c, &g);)
    if (g.count > 0) stepGroup(c, &g, (uint32_t)step, workers);
  return TREFOIL_OK;
}

trefoil_result_t trefoilGradSync(const trefoil_grad_config_t *c, int64_t step,
                                 void *const *params) {
  EP_TRY(trefoilGradCheck(c));
  EP_TRY(checkStep(step));
  const void *const *in = (const void *const *)params;
  EP_TRY(checkArrays(c, in, "params"));
  bool isDue = c->method == TREFOIL_GRAD_A2SGD && c->syncPeriod && (step + 1) % c->syncPeriod == 0;
  for (ep_grad_group_t g = EP_GRAD_BEGIN; isDue && epGradNext(c, &g);)
    epGradMeanOf(c, &g, in, params);
  return TREFOIL_OK;
}
