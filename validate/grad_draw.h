/* What is drawn at random for A2SGD: a model, its gradients, and how steps are called. The checker and the
 * kernels' own test programs draw from here. C and C++. */
#ifndef TREFOIL_VALIDATE_GRAD_DRAW_H
#define TREFOIL_VALIDATE_GRAD_DRAW_H

#include "trefoil/a2sgd.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { EP_GRAD_MAX_TENSORS = 80 };

typedef enum ep_grad_values {
  EP_GRAD_MIXED, /* numbers of both signs, of different size */
  EP_GRAD_POSITIVE,
  EP_GRAD_ZEROS,      /* of both signs */
  EP_GRAD_NOT_FINITE, /* a NaN or an infinity in a hundred */
  EP_GRAD_ANY_BITS,
  EP_GRAD_NEGATIVE,
  EP_GRAD_EXTREME, /* huge ones, whose sums overflow, and subnormal ones */
  EP_GRAD_NUM_VALUES
} ep_grad_values_t;
/* "mixed", "positive", ... */
const char *epGradValuesName(ep_grad_values_t values);

/* Few tensors, empty ones and none among them, with sizes near those at which kernels cut; or many tiny
 * ones. */
typedef struct ep_grad_model {
  trefoil_dtype_t dtype;
  trefoil_grad_scope_t scope;
  int numTensors;
  int64_t sizes[EP_GRAD_MAX_TENSORS];
} ep_grad_model_t;
/* most: elements of a tensor. */
void epDrawGradModel(uint64_t key, int64_t most, ep_grad_model_t *out);
int64_t epGradModelElements(const ep_grad_model_t *m);
/* Its sizes are m's. */
trefoil_grad_config_t epGradModelConfig(const ep_grad_model_t *m, int numWorkers);

typedef struct ep_grad_run {
  int numSteps; /* 1..4 */
  int inPlace, isReplayed;
  ep_grad_values_t values;
} ep_grad_run_t;
void epDrawGradRun(uint64_t key, ep_grad_run_t *out);

/* A worker's gradient of the model. */
void epFillGradient(const ep_grad_model_t *m, ep_grad_values_t values, uint64_t key, void *out);

#ifdef __cplusplus
}
#endif
#endif
