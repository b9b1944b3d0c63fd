/* What makes a configuration of gradient averaging well-formed, its groups and its sizes. */
#include "ref/grad.h"

#include "plan/error.h"

#define MAX_ELEMENTS ((int64_t)1 << 40)

static trefoil_result_t checkTensors(const trefoil_grad_config_t *c) {
  int64_t total = 0;
  EP_CHECK(c->numTensors >= 0, TREFOIL_INVALID_ARGUMENT, "numTensors is %d, must be >= 0",
           c->numTensors);
  EP_CHECK(c->sizes || c->numTensors == 0, TREFOIL_INVALID_ARGUMENT,
           "sizes is NULL, numTensors is %d", c->numTensors);
  for (int t = 0; t < c->numTensors; t++) {
    EP_CHECK(c->sizes[t] >= 0 && c->sizes[t] <= MAX_ELEMENTS - total, TREFOIL_INVALID_ARGUMENT,
             "sizes[%d] is %lld; sizes must be >= 0, and 2^40 together at most", t,
             (long long)c->sizes[t]);
    total += c->sizes[t];
  }
  return TREFOIL_OK;
}

static trefoil_result_t checkMethod(const trefoil_grad_config_t *c) {
  switch (c->method) {
  case TREFOIL_GRAD_DENSE:
    return TREFOIL_OK;
  case TREFOIL_GRAD_A2SGD:
    EP_CHECK(c->syncPeriod >= 0, TREFOIL_INVALID_ARGUMENT,
             "syncPeriod is %lld, must be >= 0 (0 = parameters are never averaged)",
             (long long)c->syncPeriod);
    return TREFOIL_OK;
  case TREFOIL_GRAD_TOPK:
    EP_CHECK(c->topkPerMillion >= 1 && c->topkPerMillion <= 1000000, TREFOIL_INVALID_ARGUMENT,
             "topkPerMillion is %d, must be 1..1000000", c->topkPerMillion);
    return TREFOIL_OK;
  case TREFOIL_GRAD_QSGD:
    EP_CHECK(c->qsgdBits >= 2 && c->qsgdBits <= 8, TREFOIL_INVALID_ARGUMENT,
             "qsgdBits is %d, must be 2..8", c->qsgdBits);
    EP_CHECK(c->qsgdBucket >= 0, TREFOIL_INVALID_ARGUMENT,
             "qsgdBucket is %lld, must be >= 0 (0 = 512 elements)", (long long)c->qsgdBucket);
    return TREFOIL_OK;
  }
  return epFail(TREFOIL_INVALID_ARGUMENT, "method is %d, must be 0..%d", (int)c->method,
                TREFOIL_GRAD_NUM_METHODS - 1);
}

trefoil_result_t trefoilGradCheck(const trefoil_grad_config_t *c) {
  EP_CHECK(c, TREFOIL_INVALID_ARGUMENT, "the configuration of gradient averaging is NULL");
  EP_CHECK(c->dtype == TREFOIL_F32 || c->dtype == TREFOIL_F16 || c->dtype == TREFOIL_BF16,
           TREFOIL_INVALID_ARGUMENT, "dtype is %s; gradients must be f32, f16 or bf16",
           trefoilDtypeName(c->dtype));
  EP_CHECK(c->numWorkers >= 1 && c->numWorkers <= TREFOIL_GRAD_MAX_WORKERS,
           TREFOIL_INVALID_ARGUMENT, "numWorkers is %d, must be 1..%d", c->numWorkers,
           TREFOIL_GRAD_MAX_WORKERS);
  EP_CHECK(c->scope == TREFOIL_GRAD_PER_TENSOR || c->scope == TREFOIL_GRAD_WHOLE_MODEL,
           TREFOIL_INVALID_ARGUMENT, "scope is %d, must be 0 (per tensor) or 1 (whole model)",
           (int)c->scope);
  EP_TRY(checkTensors(c));
  return checkMethod(c);
}

int64_t epGradElements(const trefoil_grad_config_t *c) {
  int64_t total = 0;
  for (int t = 0; t < c->numTensors; t++) total += c->sizes[t];
  return total;
}

static int numGroups(const trefoil_grad_config_t *c) {
  return c->scope == TREFOIL_GRAD_WHOLE_MODEL ? 1 : c->numTensors;
}

bool epGradNext(const trefoil_grad_config_t *c, ep_grad_group_t *g) {
  g->first += g->count;
  if (++g->idx >= numGroups(c)) return false;
  g->count = c->scope == TREFOIL_GRAD_WHOLE_MODEL ? epGradElements(c) : c->sizes[g->idx];
  return true;
}

int64_t epGradNumSent(const trefoil_grad_config_t *c, int64_t count) {
  return (count * c->topkPerMillion + 999999) / 1000000;
}

int64_t epGradBucket(const trefoil_grad_config_t *c) {
  return c->qsgdBucket ? c->qsgdBucket : 512;
}

/* A scale for each bucket, and the elements' bits; each bucket begins at a byte. */
static int64_t qsgdBytes(const trefoil_grad_config_t *c, int64_t count) {
  int64_t bucket = epGradBucket(c), full = count / bucket, rest = count % bucket;
  int64_t bytes = full * 4 + (full ? full * ((bucket * c->qsgdBits + 7) / 8) : 0);
  return bytes + (rest ? 4 + (rest * c->qsgdBits + 7) / 8 : 0);
}

static int64_t sentBytes(const trefoil_grad_config_t *c, int64_t count) {
  int64_t element = (int64_t)trefoilDtypeBytes(c->dtype);
  int64_t index = count > (int64_t)1 << 32 ? 8 : 4;
  if (c->method == TREFOIL_GRAD_A2SGD) return 8;
  if (c->method == TREFOIL_GRAD_TOPK) return epGradNumSent(c, count) * (index + element);
  if (c->method == TREFOIL_GRAD_QSGD) return qsgdBytes(c, count);
  return count * element;
}

trefoil_result_t trefoilGradSizes(const trefoil_grad_config_t *c, trefoil_grad_sizes_t *out) {
  EP_TRY(trefoilGradCheck(c));
  EP_CHECK(out, TREFOIL_INVALID_ARGUMENT, "%s is NULL", "out");
  bool syncs = c->method == TREFOIL_GRAD_A2SGD && c->syncPeriod > 0;
  trefoil_grad_sizes_t sizes = {.elements = epGradElements(c), .groups = numGroups(c)};
  if (c->method == TREFOIL_GRAD_TOPK) sizes.stateBytes = sizes.elements * 4;
  if (syncs) sizes.syncBytes = sizes.elements * (int64_t)trefoilDtypeBytes(c->dtype);
  for (ep_grad_group_t g = EP_GRAD_BEGIN; epGradNext(c, &g);)
    sizes.sentBytes += sentBytes(c, g.count);
  *out = sizes;
  return TREFOIL_OK;
}
