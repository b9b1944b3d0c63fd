/* The mean of an element, or of a group of elements, over the workers. */
#include "ref/grad.h"

float epGradMean(const float *terms, int numWorkers) {
  double sum = 0;
  for (int w = 0; w < numWorkers; w++) sum += terms[w];
  return (float)(sum / numWorkers);
}

void epGradMeanOf(const trefoil_grad_config_t *c, const ep_grad_group_t *g, const void *const *in,
                  void *const *out) {
  float terms[TREFOIL_GRAD_MAX_WORKERS];
  for (int64_t i = g->first; i < g->first + g->count; i++) {
    for (int w = 0; w < c->numWorkers; w++) terms[w] = epGradLoad(c->dtype, in[w], i);
    float mean = epGradMean(terms, c->numWorkers);
    for (int w = 0; w < c->numWorkers; w++) epGradStore(c->dtype, out[w], i, mean);
  }
}
