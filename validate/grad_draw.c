#include "validate/grad_draw.h"

#include "trefoil/numerics.h"
#include "validate/rng.h"

#include <math.h>
#include <string.h>

const char *epGradValuesName(ep_grad_values_t values) {
  static const char *const names[EP_GRAD_NUM_VALUES] = {
      "mixed", "positive", "zeros", "not finite", "any bits", "negative", "extreme"};
  return names[values];
}

/* Kernels cut at runs, tiles and parts. */
static int64_t drawSize(ep_rng_t *rng, int64_t most) {
  static const int edges[] = {8, 256, 1024, 8192, 16384};
  int64_t edge = edges[epBelow(rng, 5)] * epRange(rng, 1, 3) + epRange(rng, -2, 2);
  switch (epBelow(rng, 4)) {
  case 0:
    return epBelow(rng, 20);
  case 1:
    return edge < most ? edge : most;
  default:
    return epRange(rng, 0, most);
  }
}

void epDrawGradModel(uint64_t key, int64_t most, ep_grad_model_t *m) {
  static const trefoil_dtype_t dtypes[] = {TREFOIL_F32, TREFOIL_F16, TREFOIL_BF16};
  ep_rng_t rng = epRng(key, 21, 0);
  memset(m, 0, sizeof *m);
  m->dtype = dtypes[epBelow(&rng, 3)];
  m->scope = epOneIn(&rng, 3) ? TREFOIL_GRAD_WHOLE_MODEL : TREFOIL_GRAD_PER_TENSOR;
  int isMany = epOneIn(&rng, 8);
  m->numTensors = (int)(isMany ? epRange(&rng, 30, EP_GRAD_MAX_TENSORS - 1) : epBelow(&rng, 5));
  for (int t = 0; t < m->numTensors; t++)
    m->sizes[t] = isMany ? epBelow(&rng, 60) : drawSize(&rng, most);
}

int64_t epGradModelElements(const ep_grad_model_t *m) {
  int64_t n = 0;
  for (int t = 0; t < m->numTensors; t++) n += m->sizes[t];
  return n;
}

trefoil_grad_config_t epGradModelConfig(const ep_grad_model_t *m, int numWorkers) {
  trefoil_grad_config_t c;
  memset(&c, 0, sizeof c);
  c.method = TREFOIL_GRAD_A2SGD;
  c.dtype = m->dtype;
  c.numWorkers = numWorkers;
  c.numTensors = m->numTensors;
  c.sizes = m->sizes;
  c.scope = m->scope;
  return c;
}

void epDrawGradRun(uint64_t key, ep_grad_run_t *out) {
  ep_rng_t rng = epRng(key, 22, 0);
  out->numSteps = (int)epRange(&rng, 1, 4);
  out->inPlace = epOneIn(&rng, 2);
  out->isReplayed = epOneIn(&rng, 3);
  out->values = (ep_grad_values_t)epBelow(&rng, EP_GRAD_NUM_VALUES);
}

static float notFinite(ep_rng_t *rng) {
  return epOneIn(rng, 3) ? NAN : epOneIn(rng, 2) ? INFINITY : -INFINITY;
}

static float drawNumber(ep_rng_t *rng, ep_grad_values_t values) {
  float x = (float)(int32_t)epRand(rng) * 0x1p-31f;
  switch (values) {
  case EP_GRAD_POSITIVE:
    return fabsf(x);
  case EP_GRAD_NEGATIVE:
    return -fabsf(x);
  case EP_GRAD_ZEROS:
    return x < 0 ? -0.0f : 0.0f;
  case EP_GRAD_NOT_FINITE:
    return epOneIn(rng, 100) ? notFinite(rng) : x;
  case EP_GRAD_EXTREME:
    return ldexpf(x, epOneIn(rng, 2) ? 127 : -135);
  default:
    return ldexpf(x, (int)epRange(rng, -14, 5));
  }
}

static uint32_t drawBits(ep_rng_t *rng, trefoil_dtype_t dtype, ep_grad_values_t values) {
  if (values == EP_GRAD_ANY_BITS) return (uint32_t)epRand(rng);
  float x = drawNumber(rng, values);
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return dtype == TREFOIL_F32   ? bits
         : dtype == TREFOIL_F16 ? trefoilF32ToF16(x)
                                : trefoilF32ToBf16(x);
}

void epFillGradient(const ep_grad_model_t *m, ep_grad_values_t values, uint64_t key, void *out) {
  ep_rng_t rng = epRng(key, 23, 0);
  size_t each = trefoilDtypeBytes(m->dtype), n = (size_t)epGradModelElements(m);
  for (size_t i = 0; i < n; i++) { /* little endian: the low bytes */
    uint32_t bits = drawBits(&rng, m->dtype, values);
    memcpy((char *)out + i * each, &bits, each);
  }
}
