/* Level order-free for random cases: after a dispatch whose order is open the library's order is read from
 * its output; the reference's image is brought into that order, and the rows to combine are put where
 * the library expects them. After that all is compared byte by byte, but for the sums. What is open, and
 * the bound of a sum, are in order_free.h. */
#include "validate/order_free.h"

#include "plan/error.h"
#include "validate/check_rank.h"

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
  epClearSigns(tensorAt(c, op, tensor, image), d.bytes, d.dtype);
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
  int64_t numSlots;
  trefoil_slot_t *slots;
  int64_t *used;
  int64_t *to; /* reference's slot -> the library's, or itself */
} match_t;

static trefoil_result_t permute(const match_t *m, const ep_check_op_t *op, ep_tensor_id_t tensor,
                                uint8_t *image) {
  if (op->region[tensor] < 0) return TREFOIL_OK;
  ep_check_dims_t d;
  epTensorDims(m->c, op, tensor, m->rank, &d);
  size_t rowBytes = d.ndim > 1 ? d.rowBytes : trefoilDtypeBytes(d.dtype);
  EP_CHECK(epPermuteRows(tensorAt(m->c, op, tensor, image), rowBytes, m->numSlots, m->to),
           TREFOIL_SYSTEM_ERROR, "out of memory for the rows of a dispatch");
  return TREFOIL_OK;
}

static trefoil_result_t matchZones(match_t *m, const trefoil_case_t *rc, const uint8_t *expected,
                                   const uint8_t *found, int *moved) {
  ep_check_dims_t d;
  epTensorDims(m->c, m->op, EP_T_OUT_TOKENS, m->rank, &d);
  size_t at = m->c->regions[m->op->region[EP_T_OUT_TOKENS]].offset;
  ep_zone_t zone = {.rowBytes = d.rowBytes, .used = m->used};
  for (int64_t end; zone.first < m->numSlots; zone.first = end) {
    end = epZoneEnd(rc, m->slots, m->numSlots, zone.first, m->used, &zone.numUsed);
    zone.expected = expected + at + (size_t)zone.first * d.rowBytes;
    zone.found = found + at + (size_t)zone.first * d.rowBytes;
    int64_t other, missing = epMatchZone(&zone, m->to, moved, &other);
    EP_CHECK(missing != -2, TREFOIL_SYSTEM_ERROR, "out of memory for a zone");
    EP_CHECK(missing < 0, TREFOIL_INTERNAL_ERROR,
             "operation %d (Dispatch), outputs->tokens: none of slots %lld to %lld holds the "
             "row of (rank %d, token %lld); slot %lld holds one that does not belong there",
             (int)(m->op - m->c->ops), (long long)zone.first, (long long)end - 1,
             m->slots[missing].src, (long long)m->slots[missing].token, (long long)other);
  }
  return TREFOIL_OK;
}

static trefoil_result_t matchDispatch(match_t *m, int round, uint8_t *expected, uint8_t *found,
                                      int *moved) {
  trefoil_case_t rc;
  epReferenceCase(m->c, m->op, round, &rc);
  m->numSlots = trefoilRefNumSlots(&rc, m->rank);
  size_t room = (size_t)m->numSlots + 1;
  m->slots = malloc(sizeof *m->slots * room);
  m->to = malloc(sizeof *m->to * room);
  m->used = malloc(sizeof *m->used * room);
  EP_CHECK(m->slots && m->to && m->used, TREFOIL_SYSTEM_ERROR, "out of memory for slots");
  EP_TRY(trefoilRefSlots(&rc, m->rank, m->slots));
  for (int64_t i = 0; i < m->numSlots; i++) m->to[i] = i;
  EP_TRY(matchZones(m, &rc, expected, found, moved));
  static const ep_tensor_id_t received[] = {EP_T_OUT_TOKENS, EP_T_OUT_SCALES, EP_T_OUT_WEIGHTS,
                                            EP_T_OUT_IDX};
  for (int i = 0; i < 4; i++) EP_TRY(permute(m, m->op, received[i], expected));
  return TREFOIL_OK;
}

/* ---- Sums ---- */

static trefoil_result_t compareSums(ep_check_rank_t *rank, const ep_check_case_t *c,
                                    const ep_check_op_t *op, uint8_t *expected,
                                    const uint8_t *bounds, const uint8_t *result) {
  ep_check_dims_t d;
  epTensorDims(c, op, EP_T_OUT_TOKENS, rank->rank, &d);
  size_t at = c->regions[op->region[EP_T_OUT_TOKENS]].offset, b = trefoilDtypeBytes(d.dtype);
  double wanted, found, bound;
  ep_sums_t sums = {.dtype = d.dtype,
                    .numRanks = c->group->shape.numRanks,
                    .topk = c->group->shape.topk,
                    .bytes = d.bytes,
                    .expected = expected + at,
                    .magnitudes = bounds + at,
                    .found = result + at};
  int64_t bad = epCompareSums(&sums, &rank->orderOpen, &wanted, &found, &bound);
  size_t element = (size_t)bad * b;
  EP_CHECK(bad < 0, TREFOIL_INTERNAL_ERROR,
           "operation %d (Combine), token %zu of rank %d, element %zu: expected %.9g within %.3g, "
           "found %.9g",
           (int)(op - c->ops), element / d.rowBytes, rank->rank, element % d.rowBytes / b, wanted,
           bound, found);
  memcpy(expected + at, result + at, d.bytes);
  return TREFOIL_OK;
}

/* ---- Past the slots that arrive ---- */

/* A run of a script in one round. */
typedef struct round {
  ep_check_rank_t *rank;
  const ep_check_case_t *c;
  int number;
  uint8_t *expected, *result;
} round_t;

static trefoil_result_t leavePastOpen(const round_t *r, const ep_check_op_t *op) {
  static const ep_tensor_id_t past[] = {EP_T_OUT_TOKENS, EP_T_OUT_SCALES, EP_T_OUT_WEIGHTS,
                                        EP_T_OUT_IDX};
  const ep_check_case_t *c = r->c;
  int rank = r->rank->rank;
  if (!epPastIsOpen(c->group->orderFree, c->group->handles[op->handle].mode)) return TREFOIL_OK;
  trefoil_case_t rc;
  epReferenceCase(c, op, r->number, &rc);
  int64_t slots = trefoilRefNumSlots(&rc, rank);
  for (int i = 0; i < 4; i++) {
    if (op->region[past[i]] < 0) continue;
    ep_check_dims_t d;
    epTensorDims(c, op, past[i], rank, &d);
    size_t at = (d.ndim > 1 ? d.rowBytes : trefoilDtypeBytes(d.dtype)) * (size_t)slots;
    if (slots >= 0 && at < d.bytes)
      memcpy(tensorAt(c, op, past[i], r->expected) + at, tensorAt(c, op, past[i], r->result) + at,
             d.bytes - at);
  }
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

/* The combines that read rows in the order of dispatch i: up to the handle's next dispatch. */
static trefoil_result_t giveOrder(const round_t *r, const match_t *m, int i) {
  const ep_check_case_t *c = r->c;
  int handle = c->ops[i].handle, given = 0;
  for (int j = i + 1; j < c->numOps; j++) {
    const ep_check_op_t *op = &c->ops[j];
    if (op->handle == handle && op->kind == EP_OP_DISPATCH) break;
    if (op->handle != handle || op->kind != EP_OP_COMBINE) continue;
    static const ep_tensor_id_t rows[] = {EP_T_IN_TOKENS, EP_T_IN_SCALES, EP_T_IN_WEIGHTS};
    for (int t = 0; t < 3; t++) {
      EP_TRY(permute(m, op, rows[t], r->expected));
      EP_TRY(permute(m, op, rows[t], r->result));
    }
    given = 1;
  }
  return given ? moveImage(r->rank, c, r->rank->image, r->result, cudaMemcpyHostToDevice)
               : TREFOIL_OK;
}

/* After a dispatch: find the order, bring the next combine's rows into it. */
static trefoil_result_t followOrder(const round_t *r, int i) {
  int moved = 0;
  match_t m = {.c = r->c, .op = &r->c->ops[i], .rank = r->rank->rank};
  EP_TRY(moveImage(r->rank, r->c, r->result, r->rank->image, cudaMemcpyDeviceToHost));
  trefoil_result_t rc = matchDispatch(&m, r->number, r->expected, r->result, &moved);
  if (rc == TREFOIL_OK && moved) rc = giveOrder(r, &m, i);
  r->rank->orderOpen |= moved;
  free(m.slots);
  free(m.to);
  free(m.used);
  return rc;
}

/* Operations that are issued, or captured, together: up to a dispatch whose order is to be found, the
 * Complete of a staged one included. Returns the end; *dispatch is that dispatch, or -1. */
static int segmentEnd(const ep_check_case_t *c, int first, int *dispatch) {
  const ep_check_group_t *g = c->group;
  *dispatch = -1;
  for (int i = first; i < c->numOps; i++) {
    const ep_check_op_t *op = &c->ops[i];
    if (op->kind != EP_OP_DISPATCH || c->trapped) continue;
    if (!epRowsAreOpen(g->orderFree, g->handles[op->handle].mode)) continue;
    *dispatch = i;
    return i + 1 + op->sendOnly; /* its Complete is next */
  }
  return c->numOps;
}

static trefoil_result_t captureSegment(ep_check_rank_t *rank, const ep_check_case_t *c, int first,
                                       int end, cudaGraphExec_t *exec) {
  cudaGraph_t graph = NULL;
  rank->doing = "cudaStreamBeginCapture";
  EP_TRY_CUDA(rank, rank->lib->cudaStreamBeginCapture(rank->stream, cudaStreamCaptureModeRelaxed));
  for (int i = first; i < end; i++) EP_TRY(epCallOp(rank, c, &c->ops[i]));
  rank->doing = "cudaStreamEndCapture";
  EP_TRY_CUDA(rank, rank->lib->cudaStreamEndCapture(rank->stream, &graph));
  rank->doing = "cudaGraphInstantiateWithFlags";
  EP_TRY_CUDA(rank, rank->lib->cudaGraphInstantiateWithFlags(exec, graph, 0));
  EP_TRY_CUDA(rank, rank->lib->cudaGraphDestroy(graph));
  return TREFOIL_OK;
}

static trefoil_result_t runSegments(const round_t *r, cudaGraphExec_t *graphs) {
  ep_check_rank_t *rank = r->rank;
  const ep_check_case_t *c = r->c;
  for (int first = 0, end, dispatch, n = 0; first < c->numOps; first = end, n++) {
    end = segmentEnd(c, first, &dispatch);
    if (c->captured) {
      if (!graphs[n]) EP_TRY(captureSegment(rank, c, first, end, &graphs[n]));
      rank->doing = "cudaGraphLaunch";
      EP_TRY_CUDA(rank, rank->lib->cudaGraphLaunch(graphs[n], rank->stream));
    } else {
      for (int i = first; i < end; i++) EP_TRY(epCallOp(rank, c, &c->ops[i]));
    }
    if (dispatch >= 0) EP_TRY(followOrder(r, dispatch));
  }
  return TREFOIL_OK;
}

/* The script once without a graph, as a program does with a library that compiles in its first calls. */
static trefoil_result_t warmUp(ep_check_rank_t *rank, const ep_check_case_t *c, uint8_t *initial) {
  EP_TRY(moveImage(rank, c, rank->image, initial, cudaMemcpyHostToDevice));
  for (int i = 0; i < c->numOps; i++) EP_TRY(epCallOp(rank, c, &c->ops[i]));
  rank->doing = "cudaStreamSynchronize";
  EP_TRY_CUDA(rank, rank->lib->cudaStreamSynchronize(rank->stream));
  return TREFOIL_OK;
}

trefoil_result_t epRankRunFree(ep_check_rank_t *rank, const ep_check_case_t *c,
                               const ep_free_images_t *images) {
  cudaGraphExec_t graphs[EP_MAX_OPS] = {NULL};
  rank->orderOpen = 0;
  if (c->captured && c->group->warmUp) EP_TRY(warmUp(rank, c, images->initial[0]));
  for (int number = 0; number < c->numRounds; number++) {
    round_t r = {rank, c, number, images->expected[number], images->result[number]};
    EP_TRY(moveImage(rank, c, rank->image, images->initial[number], cudaMemcpyHostToDevice));
    if (rank->watch) epWatchBarrier(rank->watch, rank->rank, c->group->shape.numRanks, rank->stop);
    EP_TRY(runSegments(&r, graphs));
    EP_TRY(moveImage(rank, c, r.result, rank->image, cudaMemcpyDeviceToHost));
    for (int i = 0; i < c->numOps; i++)
      if (c->ops[i].kind == EP_OP_COMBINE && !c->trapped)
        EP_TRY(compareSums(rank, c, &c->ops[i], r.expected, images->bounds[number], r.result));
    for (int i = 0; i < c->numOps; i++)
      if (c->ops[i].kind == EP_OP_DISPATCH) EP_TRY(leavePastOpen(&r, &c->ops[i]));
  }
  rank->doing = "cudaGraphExecDestroy";
  for (int i = 0; i < EP_MAX_OPS; i++)
    if (graphs[i]) EP_TRY_CUDA(rank, rank->lib->cudaGraphExecDestroy(graphs[i]));
  return epRankEnd(rank, c);
}
