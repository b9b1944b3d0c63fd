/* What the files of gradient averaging share. docs/spec.md, section A. */
#ifndef TREFOIL_REF_GRAD_H
#define TREFOIL_REF_GRAD_H

#include "trefoil/a2sgd.h"

#include "ref/bits.h"

#include <math.h>
#include <stdbool.h>

/* A group: elements [first, first + count) of the model. Starts as EP_GRAD_BEGIN. */
typedef struct ep_grad_group {
  int64_t first, count;
  int idx;
} ep_grad_group_t;
#define EP_GRAD_BEGIN ((ep_grad_group_t){0, 0, -1})

int64_t epGradElements(const trefoil_grad_config_t *c);
/* Goes on to the next group; false after the last. */
bool epGradNext(const trefoil_grad_config_t *c, ep_grad_group_t *g);
int64_t epGradNumSent(const trefoil_grad_config_t *c, int64_t count); /* Top-K, of a group */
int64_t epGradBucket(const trefoil_grad_config_t *c);

static inline float epGradLoad(trefoil_dtype_t dtype, const void *array, int64_t i) {
  if (dtype == TREFOIL_F32) return ((const float *)array)[i];
  uint16_t bits = ((const uint16_t *)array)[i];
  return dtype == TREFOIL_F16 ? epF16ToF32(bits) : epBf16ToF32(bits);
}
static inline void epGradStore(trefoil_dtype_t dtype, void *array, int64_t i, float x) {
  if (dtype == TREFOIL_F32)
    ((float *)array)[i] = epCanonical(x);
  else
    ((uint16_t *)array)[i] = dtype == TREFOIL_F16 ? epF32ToF16(x) : epF32ToBf16(x);
}

/* Orders numbers by magnitude; NaN is the largest. */
static inline uint32_t epGradKey(float x) {
  return epBits(epCanonical(fabsf(x)));
}

/* The mean of [numWorkers] numbers. */
float epGradMean(const float *terms, int numWorkers);
/* out[w][i] = the mean of in[.][i], for all i of the group. */
void epGradMeanOf(const trefoil_grad_config_t *c, const ep_grad_group_t *g, const void *const *in,
                  void *const *out);
/* A step of one group, which has elements. */
void epGradStepA2sgd(const trefoil_grad_config_t *c, const ep_grad_group_t *g,
                     const trefoil_grad_workers_t *w);
void epGradStepTopk(const trefoil_grad_config_t *c, const ep_grad_group_t *g,
                    const trefoil_grad_workers_t *w);
void epGradStepQsgd(const trefoil_grad_config_t *c, const ep_grad_group_t *g, uint32_t step,
                    const trefoil_grad_workers_t *w);

#endif
