/* The script of a case whose order is open or that keeps to a profile: Update, Dispatch, Combine, one whole
 * operation after another. Rows differ from one another by content; what is combined has plain values. */
#include "validate/check_case.h"

#include <string.h>

ep_check_op_t *epAddOp(ep_check_case_t *c, ep_op_kind_t kind, int handle, int routing,
                       ep_rng_t *rng) {
  ep_check_op_t *op = &c->ops[c->numOps];
  memset(op, 0, sizeof *op);
  op->kind = kind;
  op->handle = handle;
  op->routing = routing;
  op->from = -1;
  op->payloadKey = epRand(rng);
  for (int i = 0; i < EP_NUM_TENSORS; i++) op->region[i] = -1;
  c->numOps++;
  return op;
}

void epMakeMasks(ep_check_case_t *c, ep_rng_t *rng) {
  int R = c->group->shape.numRanks;
  int classes = 1 + (int)epBelow(rng, 3);
  for (int r = 0; r < R; r++) c->maskClasses[r] = (int)epBelow(rng, classes);
  for (int r = 0; r < R; r++)
    for (int q = 0; q < R; q++) c->active[r * R + q] = c->maskClasses[r] == c->maskClasses[q];
}

/* What a limited dispatch is made of; without a profile's shapes, as everywhere. */
static void pickWidth(const ep_check_group_t *g, ep_check_op_t *op, ep_rng_t *rng) {
  int64_t b = (int64_t)trefoilDtypeBytes(op->dtype), most = (int64_t)g->maxTokenBytes / b;
  op->width = g->hidden && g->hidden < most ? g->hidden : most;
  if (!epUses(g, rng, EP_F_SHORT_ROWS, 3)) return;
  if (g->hidden)
    op->width = g->shortHidden ? g->shortHidden : op->width;
  else
    op->width = 16 / b * epRange(rng, 1, most * b / 16);
}

static void callerScales(const ep_check_group_t *g, ep_check_op_t *op, ep_rng_t *rng) {
  op->quant = TREFOIL_QUANT_CALLER;
  op->dtype = TREFOIL_E4M3;
  op->scaleDtype = TREFOIL_F32;
  op->width = g->hidden ? g->hidden : 16 * epRange(rng, 4, ((int64_t)g->maxTokenBytes - 64) / 16);
  op->scaleWidth = g->hidden ? g->hidden / 128 / 4 * 4 : 4 * epRange(rng, 1, 4);
  if (op->scaleWidth < 4) op->scaleWidth = 4;
}

static void pickTypes(const ep_check_group_t *g, ep_check_op_t *op, ep_rng_t *rng) {
  int isDispatch = op->kind == EP_OP_DISPATCH;
  op->dtype = TREFOIL_BF16;
  if (epUses(g, rng, EP_F_F16, 4)) op->dtype = TREFOIL_F16;
  if (epUses(g, rng, EP_F_F32, 4)) op->dtype = TREFOIL_F32;
  pickWidth(g, op, rng);
  if (isDispatch && g->maxTokenBytes >= 128 && epUses(g, rng, EP_F_CALLER_SCALES, 4)) {
    callerScales(g, op, rng);
    return;
  }
  int rounds = epUses(g, rng, EP_F_ROUND_SCALES, 4);
  if (isDispatch && !g->highThroughput && g->maxTokenBytes >= 1056 &&
      g->zeroCopy != NCCL_EP_ZERO_COPY_ON && (rounds || epUses(g, rng, EP_F_E4M3, 4))) {
    op->quant = TREFOIL_QUANT_E4M3;
    op->dtype = TREFOIL_BF16;
    op->width = g->hidden ? g->hidden : 512 * epRange(rng, 1, (int64_t)(g->maxTokenBytes / 1056));
    op->scaleDtype = TREFOIL_F32;
    op->scaleWidth = op->width / 128;
    op->roundScales = rounds;
  }
  if (!isDispatch && !g->highThroughput && !g->partial && (!g->gpuSubset || g->forced) &&
      g->maxTokenBytes >= 32 && epUses(g, rng, EP_F_NVFP4, 6)) {
    op->quant = TREFOIL_QUANT_NVFP4;
    op->dtype = TREFOIL_BF16;
    op->width = g->hidden ? g->hidden : 16 * epRange(rng, 1, (int64_t)g->maxTokenBytes / 32);
  }
}

/* Details that only our own interface promises (docs/spec.md, its last section) are left out: bits 0, 2
 * and 3; bit 1 gives HT's weights and ids all num_recv_slots rows, as NCCL EP's header wants them. */
static ep_check_op_t *addOp(ep_check_case_t *c, ep_op_kind_t kind, int handle, int routing,
                            ep_rng_t *rng) {
  ep_check_op_t *op = epAddOp(c, kind, handle, routing, rng);
  op->payloadKey = (op->payloadKey & ~(uint64_t)15) | 2;
  return op;
}

static void complete(ep_check_case_t *c, ep_check_op_t *op, ep_rng_t *rng) {
  if (c->group->highThroughput || !epUses(c->group, rng, EP_F_STAGED, 3)) return;
  op->sendOnly = 1;
  addOp(c, EP_OP_COMPLETE, op->handle, op->routing, rng);
}

static int addUpdate(ep_check_case_t *c, int handle, ep_rng_t *rng) {
  const ep_check_group_t *g = c->group;
  int routing = (int)epBelow(rng, c->numRoutings);
  ep_check_op_t *op = addOp(c, EP_OP_UPDATE, handle, routing, rng);
  if (epUses(g, rng, EP_F_COUNTERS, 2)) op->wantCounters = 7;
  if (epUses(g, rng, EP_F_WIDE_COUNTERS, 2)) op->wantCounters = 7, op->wideCounters = 1;
  if (!g->maxRecv) op->wantCounters |= 4; /* eager callers size their outputs by the total */
  return routing;
}

static void addThere(ep_check_case_t *c, int handle, int routing, int backward, ep_rng_t *rng) {
  const ep_check_group_t *g = c->group;
  ep_check_op_t *op = addOp(c, EP_OP_DISPATCH, handle, routing, rng);
  pickTypes(g, op, rng);
  op->backward = backward;
  op->payload = op->quant == TREFOIL_QUANT_E4M3 ? EP_PAYLOAD_FINITE : EP_PAYLOAD_BITS;
  op->globalIds = epUses(g, rng, EP_F_GLOBAL_IDS, 2);
  op->wantCounters = epOneIn(rng, 2) || g->handles[handle].mode == TREFOIL_LL_EXPERT_MAJOR;
  complete(c, op, rng);
}

static void addBack(ep_check_case_t *c, int handle, int routing, int backward, ep_rng_t *rng) {
  const ep_check_group_t *g = c->group;
  ep_check_op_t *op = addOp(c, EP_OP_COMBINE, handle, routing, rng);
  pickTypes(g, op, rng);
  op->backward = backward;
  op->payload = EP_PAYLOAD_FINITE;
  complete(c, op, rng);
}

void epMakeSteps(ep_check_case_t *c, ep_rng_t *rng) {
  const ep_check_group_t *g = c->group;
  int numSteps =
      g->hidden ? 1 + (g->allowed != g->forced && epOneIn(rng, 4)) : (int)epRange(rng, 1, 3);
  if (c->numMasks) {
    epMakeMasks(c, rng);
    addOp(c, EP_OP_MASK_UPDATE, -1, -1, rng);
    if (epOneIn(rng, 2)) addOp(c, EP_OP_MASK_QUERY, -1, -1, rng);
  }
  for (int i = 0; i < numSteps; i++) {
    int handle = c->freshHandle ? 0 : (int)epBelow(rng, g->numHandles);
    int shared = g->numHandles > 1 && g->handles[1].shareWith == 0 && !c->freshHandle;
    if (g->handles[handle].shareWith >= 0) handle = 0;
    int routing = addUpdate(c, handle, rng);
    int backward = g->highThroughput && epUses(g, rng, EP_F_BACKWARD, 3);
    addThere(c, handle, routing, backward, rng);
    addBack(c, handle, routing, backward, rng);
    if (!shared || handle != 0) continue;
    addThere(c, 1, routing, 1, rng);
    addBack(c, 1, routing, 1, rng);
  }
  if (!c->numMasks) return;
  addOp(c, EP_OP_MASK_CLEAN, -1, -1, rng);
  if (epOneIn(rng, 2)) addOp(c, EP_OP_MASK_QUERY, -1, -1, rng);
}
