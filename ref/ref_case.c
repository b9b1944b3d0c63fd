/* What makes a case well-formed, beyond its shape and routing. */
#include "ref/place.h"

#include "plan/error.h"

static trefoil_result_t checkPayload(const trefoil_case_t *c) {
  trefoil_dtype_t d = c->dtype;
  bool isFloat = d == TREFOIL_F32 || d == TREFOIL_F16 || d == TREFOIL_BF16;
  bool isSmall = d == TREFOIL_E4M3 || d == TREFOIL_E5M2 || d == TREFOIL_FP4X2;
  EP_CHECK(c->width >= 1, TREFOIL_INVALID_ARGUMENT, "width is %lld, must be >= 1",
           (long long)c->width);
  switch (c->quant) {
  case TREFOIL_QUANT_NONE:
    EP_CHECK(isFloat, TREFOIL_INVALID_ARGUMENT,
             "dtype is %s; without quantisation it must be f32, f16 or bf16", trefoilDtypeName(d));
    return TREFOIL_OK;
  case TREFOIL_QUANT_CALLER:
    EP_CHECK(
        isFloat || isSmall, TREFOIL_INVALID_ARGUMENT,
        "dtype is %s; rows with the caller's scales must be f32, f16, bf16, e4m3, e5m2 or fp4x2",
        trefoilDtypeName(d));
    EP_CHECK(c->scaleBytes >= 1 && c->scaleBytes <= INT64_MAX / 2, TREFOIL_INVALID_ARGUMENT,
             "scaleBytes is %zu; rows with the caller's scales need at least 1", c->scaleBytes);
    return TREFOIL_OK;
  case TREFOIL_QUANT_E4M3:
  case TREFOIL_QUANT_NVFP4: {
    int block = c->quant == TREFOIL_QUANT_E4M3 ? 128 : 16;
    const char *name = c->quant == TREFOIL_QUANT_E4M3 ? "E4M3" : "NVFP4";
    EP_CHECK(!epIsHt(c), TREFOIL_INVALID_ARGUMENT, "%s exists in LL modes only, mode is %s", name,
             trefoilModeName(c->mode));
    EP_CHECK(d == TREFOIL_BF16, TREFOIL_INVALID_ARGUMENT, "dtype is %s; %s takes bf16",
             trefoilDtypeName(d), name);
    EP_CHECK(c->width % block == 0, TREFOIL_INVALID_ARGUMENT,
             "width is %lld; %s needs a multiple of %d", (long long)c->width, name, block);
    return TREFOIL_OK;
  }
  }
  return epFail(TREFOIL_INVALID_ARGUMENT, "quant is %d, must be 0..3", (int)c->quant);
}

/* Bytes of the largest output fit well into 63 bits, so that no index below can overflow. */
static trefoil_result_t checkSizes(const trefoil_case_t *c) {
  const trefoil_shape_t *s = &c->routing.shape;
  int64_t bytes, rowBytes;
  int64_t perRank = epIsExpertMajor(c) ? trefoilExpertsPerRank(s) : 1;
  bool over = __builtin_mul_overflow(c->width, (int64_t)8, &rowBytes);
  over |= c->quant == TREFOIL_QUANT_CALLER &&
          __builtin_add_overflow(rowBytes, (int64_t)c->scaleBytes, &rowBytes);
  over |= __builtin_add_overflow(rowBytes, (int64_t)s->topk * 8, &rowBytes);
  over |= __builtin_mul_overflow(s->maxTokens, (int64_t)s->numRanks, &bytes);
  over |= __builtin_mul_overflow(bytes, perRank, &bytes);
  if (c->mode == TREFOIL_HT_EXPERT_MAJOR && c->alignment > 1) {
    int64_t padding;
    over |= c->alignment > (size_t)1 << 40 ||
            __builtin_mul_overflow((int64_t)c->alignment, perRank, &padding) ||
            __builtin_add_overflow(bytes, padding, &bytes);
  }
  over |= __builtin_mul_overflow(bytes, rowBytes, &bytes);
  EP_CHECK(!over && bytes <= INT64_MAX / 2, TREFOIL_INVALID_ARGUMENT,
           "the output of a rank would exceed 2^62 bytes: maxTokens %lld, width %lld",
           (long long)s->maxTokens, (long long)c->width);
  return TREFOIL_OK;
}

trefoil_result_t trefoilCaseCheck(const trefoil_case_t *c) {
  EP_CHECK(c, TREFOIL_INVALID_ARGUMENT, "the case is NULL");
  EP_TRY(trefoilRoutingCheck(&c->routing));
  EP_CHECK((int)c->mode >= 0 && (int)c->mode < TREFOIL_NUM_MODES, TREFOIL_INVALID_ARGUMENT,
           "mode is %d, must be 0..%d", (int)c->mode, TREFOIL_NUM_MODES - 1);
  EP_TRY(checkPayload(c));
  EP_CHECK(!c->backward || epIsHt(c), TREFOIL_INVALID_ARGUMENT,
           "backward exists in HT modes only, mode is %s", trefoilModeName(c->mode));
  EP_CHECK((!c->active && !c->activeCombine) || !epIsHt(c), TREFOIL_INVALID_ARGUMENT,
           "masks exist in LL modes only, mode is %s", trefoilModeName(c->mode));
  EP_CHECK(!c->rails || (!c->active && !c->activeCombine), TREFOIL_INVALID_ARGUMENT,
           "rails with masks: a rank that is gone would cut its node off; set rails to 0");
  if (c->mode == TREFOIL_HT_EXPERT_MAJOR) {
    EP_CHECK((c->alignment & (c->alignment - 1)) == 0, TREFOIL_INVALID_ARGUMENT,
             "alignment is %zu, must be 0 or a power of two", c->alignment);
  }
  EP_CHECK(!epIsHt(c) || c->maxRecv >= 0, TREFOIL_INVALID_ARGUMENT,
           "maxRecv is %lld, must be >= 0 (0 = unbounded)", (long long)c->maxRecv);
  return checkSizes(c);
}

trefoil_result_t epRankCheck(const trefoil_case_t *c, int rank) {
  EP_TRY(trefoilCaseCheck(c));
  EP_CHECK(rank >= 0 && rank < c->routing.shape.numRanks, TREFOIL_INVALID_ARGUMENT,
           "rank is %d, must be 0..%d", rank, c->routing.shape.numRanks - 1);
  return TREFOIL_OK;
}
