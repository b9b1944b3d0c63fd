/* Level order-free: what LL leaves open in libraries other than ours.
 *
 * Received rows: in each zone (expert-major: a local expert; rank-major: a source rank) the library may
 * put the rows into any of the first `count` slots. Rows differ from one another by content, so the
 * order it chose is read from its output; the reference's image is brought into that order, and the
 * rows to combine are put where the library expects them. After that all is compared byte by byte.
 *
 * Combined tokens: every way of summing the same terms in fp32 with roundings to the wire type on the
 * way stays within |found - expected| <= S * (R + 2) * u, S the sum of the terms' magnitudes, u the
 * type's spacing at 1, R + 2 the roundings that can come one after another: both sides' are in it. S is
 * the reference's own combine, run on magnitudes. */
#include "validate/check_rank.h"

#include "plan/error.h"
#include "trefoil/numerics.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static uint8_t *tensorAt(const ep_check_case_t *c, const ep_check_op_t *op, ep_tensor_id_t tensor,
                         uint8_t *image) {
  return image + c->regions[op->region[tensor]].offset;
}

static void clearSigns(const ep_check_case_t *c, const ep_check_op_t *op, ep_tensor_id_t tensor,
                       int rank, uint8_t *image) {
  if (op->region[tensor] < 0) return;
  ep_check_dims_t d;
  epTensorDims(c, op, tensor, rank, &d);
  size_t b = trefoilDtypeBytes(d.dtype);
  uint8_t *p = tensorAt(c, op, tensor, image);
  for (size_t at = b - 1; at < d.bytes; at += b) p[at] &= 0x7f; /* little-endian */
}

void epMakeMagnitudes(const ep_check_case_t *c, int rank, uint8_t *image) {
  for (int i = 0; i < c->numOps; i++) {
    const ep_check_op_t *op = &c->ops[i];
    if (op->kind != EP_OP_COMBINE) continue;
    clearSigns(c, op, EP_T_IN_TOKENS, rank, image);
    clearSigns(c, op, EP_T_OUT_WEIGHTS, rank, image);
  }
}

/* ---- Slots ---- */

typedef struct match {
  const ep_check_case_t *c;
  const ep_check_op_t *op;
  int rank;
  int64_t numSlots, zoneSlots;
  trefoil_slot_t *slots;
  int64_t *to; /* reference's slot -> the library's, or itself */
} match_t;

static void permute(const match_t *m, const ep_check_op_t *op, ep_tensor_id_t tensor,
                    uint8_t *image) {
  if (op->region[tensor] < 0) return;
  ep_check_dims_t d;
  epTensorDims(m->c, op, tensor, m->rank, &d);
  uint8_t *rows = tensorAt(m->c, op, tensor, image), *copy = malloc(d.bytes + 1);
  if (!copy) return;
  memcpy(copy, rows, d.bytes);
  for (int64_t i = 0; i < m->numSlots; i++)
    memcpy(rows + (size_t)m->to[i] * d.rowBytes, copy + (size_t)i * d.rowBytes, d.rowBytes);
  free(copy);
}

static trefoil_result_t matchZone(match_t *m, int64_t first, uint8_t *expected, uint8_t *found) {
  ep_check_dims_t d;
  epTensorDims(m->c, m->op, EP_T_OUT_TOKENS, m->rank, &d);
  const uint8_t *wanted = tensorAt(m->c, m->op, EP_T_OUT_TOKENS, expected);
  const uint8_t *rows = tensorAt(m->c, m->op, EP_T_OUT_TOKENS, found);
  int64_t count = 0;
  while (count < m->zoneSlots && m->slots[first + count].src >= 0) count++;
  uint8_t *taken = calloc(1, (size_t)count + 1);
  EP_CHECK(taken, TREFOIL_SYSTEM_ERROR, "out of memory for a zone");
  for (int64_t i = first; i < first + count; i++) {
    int64_t j = first;
    while (j < first + count &&
           (taken[j - first] || memcmp(wanted + (size_t)i * d.rowBytes,
                                       rows + (size_t)j * d.rowBytes, d.rowBytes) != 0))
      j++;
    if (j == first + count) {
      free(taken);
      return epFail(
          TREFOIL_INTERNAL_ERROR,
          "operation %d (Dispatch), outputs->tokens: none of slots %lld to %lld holds the "
          "row of (rank %d, token %lld)",
          (int)(m->op - m->c->ops), (long long)first, (long long)(first + count - 1),
          m->slots[i].src, (long long)m->slots[i].token);
    }
    taken[j - first] = 1;
    m->to[i] = j;
  }
  free(taken);
  return TREFOIL_OK;
}

static trefoil_result_t matchDispatch(match_t *m, uint8_t *expected, uint8_t *found) {
  trefoil_case_t rc;
  epReferenceCase(m->c, m->op, 0, &rc);
  m->numSlots = trefoilRefNumSlots(&rc, m->rank);
  m->zoneSlots = rc.mode == TREFOIL_LL_EXPERT_MAJOR
                     ? rc.routing.shape.numRanks * rc.routing.shape.maxTokens
                     : rc.routing.shape.maxTokens;
  m->slots = malloc(sizeof *m->slots * (size_t)(m->numSlots + 1));
  m->to = malloc(sizeof *m->to * (size_t)(m->numSlots + 1));
  EP_CHECK(m->slots && m->to, TREFOIL_SYSTEM_ERROR, "out of memory for slots");
  EP_TRY(trefoilRefSlots(&rc, m->rank, m->slots));
  for (int64_t i = 0; i < m->numSlots; i++) m->to[i] = i;
  for (int64_t first = 0; first < m->numSlots; first += m->zoneSlots)
    EP_TRY(matchZone(m, first, expected, found));
  static const ep_tensor_id_t received[] = {EP_T_OUT_TOKENS, EP_T_OUT_SCALES, EP_T_OUT_WEIGHTS,
                                            EP_T_OUT_IDX};
  for (int i = 0; i < 4; i++) permute(m, m->op, received[i], expected);
  return TREFOIL_OK;
}

/* ---- Sums ---- */

static double valueAt(const uint8_t *p, trefoil_dtype_t dtype) {
  uint16_t half;
  float f;
  if (dtype == TREFOIL_F32) {
    memcpy(&f, p, 4);
    return (double)f;
  }
  memcpy(&half, p, 2);
  return (double)(dtype == TREFOIL_BF16 ? trefoilBf16ToF32(half) : trefoilF16ToF32(half));
}

static trefoil_result_t compareSums(const ep_check_rank_t *rank, const ep_check_case_t *c,
                                    const ep_check_op_t *op, uint8_t *expected,
                                    const uint8_t *bounds, const uint8_t *result) {
  ep_check_dims_t d;
  epTensorDims(c, op, EP_T_OUT_TOKENS, rank->rank, &d);
  size_t at = c->regions[op->region[EP_T_OUT_TOKENS]].offset, b = trefoilDtypeBytes(d.dtype);
  double u = d.dtype == TREFOIL_BF16 ? 0x1p-7 : d.dtype == TREFOIL_F16 ? 0x1p-10 : 0x1p-23;
  double least = d.dtype == TREFOIL_F16 ? 0x1p-24 : 0x1p-126; /* spacing of the smallest values */
  /* fp32 rounds after every term, too: no more than ranks and top-k together */
  u *= c->group->shape.numRanks + 2 + (d.dtype == TREFOIL_F32 ? 2 * c->group->shape.topk : 0);
  for (size_t i = 0; i < d.bytes; i += b) {
    double wanted = valueAt(expected + at + i, d.dtype), found = valueAt(result + at + i, d.dtype);
    double bound = u * valueAt(bounds + at + i, d.dtype) + 2 * least;
    EP_CHECK(
        fabs(found - wanted) <= bound, TREFOIL_INTERNAL_ERROR,
        "operation %d (Combine), token %zu of rank %d, element %zu: expected %.9g within %.3g, "
        "found %.9g",
        (int)(op - c->ops), i / d.rowBytes, rank->rank, i % d.rowBytes / b, wanted, bound, found);
  }
  memcpy(expected + at, result + at, d.bytes);
  return TREFOIL_OK;
}

static trefoil_result_t moveImage(ep_check_rank_t *rank, const ep_check_case_t *c, void *to,
                                  const void *from, enum cudaMemcpyKind kind) {
  rank->doing = "cudaMemcpyAsync";
  EP_TRY_CUDA(rank, rank->lib->cudaMemcpyAsync(to, from, c->usedBytes, kind, rank->stream));
  rank->doing = "cudaStreamSynchronize";
  EP_TRY_CUDA(rank, rank->lib->cudaStreamSynchronize(rank->stream));
  return TREFOIL_OK;
}

/* After an LL dispatch: find the order, bring the next combine's rows into it. */
static trefoil_result_t followOrder(ep_check_rank_t *rank, const ep_check_case_t *c, int opIdx,
                                    uint8_t *expected, uint8_t *result) {
  match_t m = {.c = c, .op = &c->ops[opIdx], .rank = rank->rank};
  EP_TRY(moveImage(rank, c, result, rank->image, cudaMemcpyDeviceToHost));
  trefoil_result_t rc = matchDispatch(&m, expected, result);
  if (rc == TREFOIL_OK && opIdx + 1 < c->numOps && c->ops[opIdx + 1].kind == EP_OP_COMBINE) {
    permute(&m, &c->ops[opIdx + 1], EP_T_IN_TOKENS, expected);
    permute(&m, &c->ops[opIdx + 1], EP_T_IN_TOKENS, result);
    rc = moveImage(rank, c, rank->image, result, cudaMemcpyHostToDevice);
  }
  free(m.slots);
  free(m.to);
  return rc;
}

trefoil_result_t epRankRunFree(ep_check_rank_t *rank, const ep_check_case_t *c, uint8_t *initial,
                               uint8_t *expected, const uint8_t *bounds, uint8_t *result) {
  EP_TRY(moveImage(rank, c, rank->image, initial, cudaMemcpyHostToDevice));
  for (int i = 0; i < c->numOps; i++) {
    EP_TRY(epCallOp(rank, c, &c->ops[i]));
    if (c->ops[i].kind == EP_OP_DISPATCH && !c->group->highThroughput)
      EP_TRY(followOrder(rank, c, i, expected, result));
  }
  EP_TRY(moveImage(rank, c, result, rank->image, cudaMemcpyDeviceToHost));
  for (int i = 0; i < c->numOps; i++)
    if (c->ops[i].kind == EP_OP_COMBINE && !c->trapped)
      EP_TRY(compareSums(rank, c, &c->ops[i], expected, bounds, result));
  return epRankEnd(rank, c);
}
