/* The reference's answer: the script's outputs, written into the images operation by operation. What
 * the meaning leaves untouched stays noise, and so is compared too. A combine that reads a dispatch's
 * output finds it where the dispatch before it wrote it. */
#include "validate/check_case.h"

#include <string.h>

typedef struct expect {
  const ep_check_case_t *c;
  int round;
  uint8_t *const *images;
  int masked; /* a mask is in force at this point of the script */
} expect_t;

static void *at(const expect_t *e, const ep_check_op_t *op, ep_tensor_id_t tensor, int rank) {
  int region = op->region[tensor];
  return region < 0 ? NULL : e->images[rank] + e->c->regions[region].offset;
}

/* Writes n counters as the tensor's type, the reference's int64. */
static void putCounters(const expect_t *e, const ep_check_op_t *op, ep_tensor_id_t tensor, int rank,
                        const int64_t *values, int n) {
  uint8_t *out = at(e, op, tensor, rank);
  if (!out) return;
  int wide = op->kind == EP_OP_UPDATE && op->wideCounters;
  for (int i = 0; i < n; i++) {
    int32_t narrow = (int32_t)values[i];
    if (wide)
      memcpy(out + 8 * i, &values[i], 8);
    else
      memcpy(out + 4 * i, &narrow, 4);
  }
}

static trefoil_result_t expectCounters(const expect_t *e, const ep_check_op_t *op,
                                       const trefoil_case_t *rc) {
  const trefoil_shape_t *s = &e->c->group->shape;
  int L = trefoilExpertsPerRank(s), R = s->numRanks;
  int64_t experts[1024], offsets[1024], sources[EP_MAX_RANKS], total = 0;
  trefoil_counters_t counters = {0};
  if (op->region[EP_T_EXPERT_COUNTERS] >= 0) counters.expertCounters = experts;
  if (op->region[EP_T_EXPERT_OFFSETS] >= 0) counters.expertOffsets = offsets;
  if (op->region[EP_T_TOTAL] >= 0) counters.total = &total;
  if (op->region[EP_T_SOURCE_COUNTERS] >= 0) counters.srcRankCounters = sources;
  for (int r = 0; r < R; r++) {
    trefoil_result_t result = trefoilRefCounters(rc, r, &counters);
    if (result != TREFOIL_OK) return result;
    putCounters(e, op, EP_T_EXPERT_COUNTERS, r, experts, L);
    putCounters(e, op, EP_T_EXPERT_OFFSETS, r, offsets, L);
    putCounters(e, op, EP_T_TOTAL, r, &total, 1);
    putCounters(e, op, EP_T_SOURCE_COUNTERS, r, sources, R);
  }
  return TREFOIL_OK;
}

static trefoil_result_t expectDispatch(const expect_t *e, const ep_check_op_t *op,
                                       const trefoil_case_t *rc) {
  int R = e->c->group->shape.numRanks;
  trefoil_source_t sources[EP_MAX_RANKS];
  for (int r = 0; r < R; r++)
    sources[r] = (trefoil_source_t){.tokens = at(e, op, EP_T_IN_TOKENS, r),
                                    .scales = at(e, op, EP_T_IN_SCALES, r),
                                    .topkWeights = at(e, op, EP_T_IN_WEIGHTS, r)};
  for (int r = 0; r < R; r++) {
    if (e->c->trapped >> r & 1) continue; /* writes nothing */
    trefoil_received_t out = {.tokens = at(e, op, EP_T_OUT_TOKENS, r),
                              .scales = at(e, op, EP_T_OUT_SCALES, r),
                              .topkWeights = at(e, op, EP_T_OUT_WEIGHTS, r),
                              .topkIdx = at(e, op, EP_T_OUT_IDX, r)};
    if (op->region[EP_T_OUT_WEIGHTS] >= 0 && e->c->group->highThroughput) {
      ep_check_dims_t d;
      epTensorDims(e->c, op, EP_T_OUT_WEIGHTS, r, &d);
      out.topkRows = (int64_t)d.sizes[0];
    }
    trefoil_result_t result = trefoilRefDispatch(rc, r, sources, &out);
    if (result != TREFOIL_OK) return result;
  }
  return expectCounters(e, op, rc);
}

static trefoil_result_t expectCombine(const expect_t *e, const ep_check_op_t *op,
                                      const trefoil_case_t *rc) {
  int R = e->c->group->shape.numRanks;
  trefoil_expert_rows_t experts[EP_MAX_RANKS];
  for (int r = 0; r < R; r++)
    experts[r] = (trefoil_expert_rows_t){.tokens = at(e, op, EP_T_IN_TOKENS, r),
                                         .topkWeights = at(e, op, EP_T_IN_WEIGHTS, r),
                                         .scales = at(e, op, EP_T_IN_SCALES, r)};
  for (int r = 0; r < R; r++) {
    float *weights = at(e, op, EP_T_OUT_WEIGHTS, r);
    int read = rc->mode == TREFOIL_LL_EXPERT_MAJOR;
    trefoil_result_t result =
        trefoilRefCombine(rc, r, experts, read ? weights : NULL, at(e, op, EP_T_OUT_TOKENS, r),
                          op->backward ? weights : NULL);
    if (result != TREFOIL_OK) return result;
  }
  return TREFOIL_OK;
}

static void expectMask(const expect_t *e, const ep_check_op_t *op) {
  int R = e->c->group->shape.numRanks;
  for (int r = 0; r < R; r++) {
    uint8_t *out = at(e, op, EP_T_MASK, r);
    for (int q = 0; q < R; q++) {
      int32_t active = e->masked ? e->c->active[r * R + q] : 1;
      memcpy(out + 4 * q, &active, 4);
    }
  }
}

trefoil_result_t epExpect(const ep_check_case_t *c, int round, uint8_t *const *images) {
  expect_t e = {.c = c, .round = round, .images = images};
  for (int i = 0; i < c->numOps; i++) {
    const ep_check_op_t *op = &c->ops[i];
    trefoil_case_t rc;
    trefoil_result_t result = TREFOIL_OK;
    if (op->handle >= 0 && op->routing >= 0) epReferenceCase(c, op, round, &rc);
    switch (op->kind) {
    case EP_OP_UPDATE:
      if (c->group->highThroughput) result = expectCounters(&e, op, &rc);
      break;
    case EP_OP_DISPATCH:
      result = expectDispatch(&e, op, &rc);
      break;
    case EP_OP_COMBINE:
      result = expectCombine(&e, op, &rc);
      break;
    case EP_OP_GRAD_STEP:
    case EP_OP_GRAD_SYNC:
      result = epExpectGrad(c, op, e.masked, images);
      break;
    case EP_OP_MASK_UPDATE:
      e.masked = 1;
      break;
    case EP_OP_MASK_CLEAN:
      e.masked = 0;
      break;
    case EP_OP_MASK_QUERY:
      expectMask(&e, op);
      break;
    default:
      break;
    }
    if (result != TREFOIL_OK) return result;
  }
  return TREFOIL_OK;
}
