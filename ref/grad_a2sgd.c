/* A2SGD: two means a group travel, the distance of each element to its mean stays. */
#include "ref/grad.h"

#include "plan/error.h"

#define RUN    8
#define LEVELS 64

/* Sums terms >= 0 in the order of rule A3: level[l] holds the sum of 2^l runs where bit l of
 * numRuns is set. */
typedef struct pairwise {
  float level[LEVELS], run;
  uint64_t numRuns;
  int inRun;
} pairwise_t;

static void endRun(pairwise_t *p) {
  int l = 0;
  float sum = p->run;
  for (; p->numRuns >> l & 1; l++) sum = p->level[l] + sum;
  p->level[l] = sum;
  p->numRuns++;
  p->run = 0;
  p->inRun = 0;
}

static void addTerm(pairwise_t *p, float x) {
  p->run += x;
  if (++p->inRun == RUN) endRun(p);
}

static float endSum(pairwise_t *p) {
  float sum = 0;
  if (p->inRun) endRun(p);
  for (int l = 0; l < LEVELS; l++)
    if (p->numRuns >> l & 1) sum = p->level[l] + sum;
  return sum;
}

/* means[0]: of the elements that are not negative, NaN among them; [1]: of the others' magnitudes. */
static void twoMeans(const trefoil_grad_config_t *c, const ep_grad_group_t *g, const void *grad,
                     float *means) {
  pairwise_t sums[2] = {{.numRuns = 0}, {.numRuns = 0}};
  int64_t counts[2] = {0, 0};
  for (int64_t i = g->first; i < g->first + g->count; i++) {
    float x = epGradLoad(c->dtype, grad, i);
    int side = x < 0;
    counts[side]++;
    addTerm(&sums[side], fabsf(x));
    addTerm(&sums[!side], 0);
  }
  for (int s = 0; s < 2; s++) {
    float sum = endSum(&sums[s]);
    means[s] = counts[s] ? epCanonical(sum / (float)counts[s]) : 0;
  }
}

/* Moves each element by as much as its mean moves. */
static void shift(const trefoil_grad_config_t *c, const ep_grad_group_t *g, const void *grad,
                  const float *by, void *update) {
  for (int64_t i = g->first; i < g->first + g->count; i++) {
    float x = epGradLoad(c->dtype, grad, i);
    epGradStore(c->dtype, update, i, x < 0 ? x - by[1] : x + by[0]);
  }
}

void epGradStepA2sgd(const trefoil_grad_config_t *c, const ep_grad_group_t *g,
                     const trefoil_grad_workers_t *w) {
  float means[2][TREFOIL_GRAD_MAX_WORKERS];
  for (int r = 0; r < c->numWorkers; r++) {
    float own[2];
    twoMeans(c, g, w->grads[r], own);
    for (int s = 0; s < 2; s++) means[s][r] = own[s];
  }
  float all[2] = {epGradMean(means[0], c->numWorkers), epGradMean(means[1], c->numWorkers)};
  for (int r = 0; r < c->numWorkers; r++) {
    const float by[2] = {all[0] - means[0][r], all[1] - means[1][r]};
    shift(c, g, w->grads[r], by, w->updates[r]);
  }
}

trefoil_result_t trefoilGradTwoMeans(const trefoil_grad_config_t *c, const void *grad,
                                     float *means) {
  EP_TRY(trefoilGradCheck(c));
  EP_CHECK(grad || epGradElements(c) == 0, TREFOIL_INVALID_ARGUMENT, "%s is NULL", "grad");
  EP_CHECK(means, TREFOIL_INVALID_ARGUMENT, "%s is NULL", "means");
  for (ep_grad_group_t g = EP_GRAD_BEGIN; epGradNext(c, &g);)
    twoMeans(c, &g, grad, means + 2 * g.idx);
  return TREFOIL_OK;
}

static void moveFromMeans(const trefoil_grad_config_t *c, const ep_grad_group_t *g, int numGroups,
                          int worker, const float *means, const void *grad, void *update) {
  float terms[TREFOIL_GRAD_MAX_WORKERS], by[2];
  for (int s = 0; s < 2; s++) {
    for (int r = 0; r < c->numWorkers; r++)
      terms[r] = means[2 * ((size_t)r * (size_t)numGroups + (size_t)g->idx) + (size_t)s];
    by[s] = epGradMean(terms, c->numWorkers) - terms[worker];
  }
  shift(c, g, grad, by, update);
}

trefoil_result_t trefoilGradFromMeans(const trefoil_grad_config_t *c, int worker,
                                      const float *means, const void *grad, void *update) {
  trefoil_grad_sizes_t sizes;
  EP_TRY(trefoilGradSizes(c, &sizes));
  EP_CHECK(worker >= 0 && worker < c->numWorkers, TREFOIL_INVALID_ARGUMENT,
           "worker is %d, must be 0..%d", worker, c->numWorkers - 1);
  EP_CHECK(means || sizes.groups == 0, TREFOIL_INVALID_ARGUMENT, "%s is NULL", "means");
  EP_CHECK((grad && update) || sizes.elements == 0, TREFOIL_INVALID_ARGUMENT, "%s is NULL",
           grad ? "update" : "grad");
  for (ep_grad_group_t g = EP_GRAD_BEGIN; epGradNext(c, &g);)
    moveFromMeans(c, &g, (int)sizes.groups, worker, means, grad, update);
  return TREFOIL_OK;
}
