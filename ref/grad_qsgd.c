/* QSGD: an element becomes one of 2^(bits - 1) levels of its bucket's maximum, and a sign. */
#include "ref/grad.h"

#include "plan/philox.h"

/* The largest magnitude of a bucket; NaN if it holds one. */
static float bucketScale(const trefoil_grad_config_t *c, const ep_grad_group_t *bucket,
                         const void *grad) {
  uint32_t largest = 0;
  for (int64_t i = bucket->first; i < bucket->first + bucket->count; i++) {
    uint32_t key = epGradKey(epGradLoad(c->dtype, grad, i));
    largest = key > largest ? key : largest;
  }
  return epFloat(largest);
}

/* A draw in [0, 1) that belongs to an element of the model, a step and a worker. */
static float draw(uint64_t seed, int64_t element, uint32_t step, int worker) {
  uint64_t four = (uint64_t)element / 4;
  ep_philox_t x = epPhilox(seed, (uint32_t)four, (uint32_t)(four >> 32), step, (uint32_t)worker);
  return (float)(x.word[element % 4] >> 8) * 0x1p-24f;
}

/* What the receivers read: one of the levels of the scale; NaN if the scale is not finite. */
static float quantised(float x, float scale, float numLevels, float random) {
  float at = scale > 0 ? fabsf(x) / scale * numLevels : 0;
  float level = floorf(at);
  if (random < at - level) level++;
  return copysignf(level / numLevels * scale, x);
}

static void stepBucket(const trefoil_grad_config_t *c, const ep_grad_group_t *bucket, uint32_t step,
                       const trefoil_grad_workers_t *w) {
  float scales[TREFOIL_GRAD_MAX_WORKERS], terms[TREFOIL_GRAD_MAX_WORKERS];
  float numLevels = (float)((1 << (c->qsgdBits - 1)) - 1);
  for (int r = 0; r < c->numWorkers; r++) scales[r] = bucketScale(c, bucket, w->grads[r]);
  for (int64_t i = bucket->first; i < bucket->first + bucket->count; i++) {
    for (int r = 0; r < c->numWorkers; r++) {
      float x = epGradLoad(c->dtype, w->grads[r], i);
      terms[r] = quantised(x, scales[r], numLevels, draw(c->seed, i, step, r));
    }
    float mean = epGradMean(terms, c->numWorkers);
    for (int r = 0; r < c->numWorkers; r++) epGradStore(c->dtype, w->updates[r], i, mean);
  }
}

void epGradStepQsgd(const trefoil_grad_config_t *c, const ep_grad_group_t *g, uint32_t step,
                    const trefoil_grad_workers_t *w) {
  int64_t most = epGradBucket(c);
  for (int64_t done = 0; done < g->count;) {
    int64_t rest = g->count - done;
    ep_grad_group_t bucket = {g->first + done, rest < most ? rest : most, 0};
    stepBucket(c, &bucket, step, w);
    done += bucket.count;
  }
}
