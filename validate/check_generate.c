/* The case: a script that walks the states a handle can be in. Per handle: unbound -> bound (Update)
 * -> dispatched -> any number of further dispatches, combines, Updates; in LL an operation may be left
 * half done (send_only) until Complete, with at most one dispatch and one combine so in the group. */
#include "validate/check_case.h"

#include "plan/error.h"

#include <stdlib.h>
#include <string.h>

typedef struct handle_state {
  int routing;      /* bound routing, or -1 */
  int dispatched;   /* since the Update */
  int lastDispatch; /* op whose output a combine may read in place, or -1 */
  int pending;      /* a send_only operation is open */
} handle_state_t;

typedef struct script {
  ep_check_case_t *c;
  ep_rng_t *rng;
  handle_state_t handles[EP_MAX_HANDLES];
  int pendingDispatch, pendingCombine; /* handle, or -1 */
} script_t;

static ep_check_op_t *addOp(script_t *s, ep_op_kind_t kind, int handle) {
  return epAddOp(s->c, kind, handle, handle >= 0 ? s->handles[handle].routing : -1, s->rng);
}

static int64_t atMost(int64_t a, int64_t b) {
  return a < b ? a : b;
}

static trefoil_dtype_t plainType(ep_rng_t *rng) {
  static const trefoil_dtype_t types[] = {TREFOIL_BF16, TREFOIL_BF16, TREFOIL_F16, TREFOIL_F32};
  return types[epBelow(rng, 4)];
}

/* Width in elements of rows of at most `limit` bytes, a multiple of `unit` elements; most small. */
static int64_t pickWidth(ep_rng_t *rng, size_t limit, size_t elementBytes, int64_t unit) {
  int64_t most = (int64_t)(limit / elementBytes) / unit;
  if (epOneIn(rng, 3)) return most * unit;
  return epRange(rng, 1, most) * unit;
}

/* Elements in which a plain row grows. */
static int64_t plainUnit(const ep_check_group_t *g, trefoil_dtype_t dtype) {
  return g->gpuSubset ? (int64_t)(16 / trefoilDtypeBytes(dtype)) : 1;
}

static void pickDispatchTypes(script_t *s, ep_check_op_t *op) {
  static const trefoil_dtype_t quantised[] = {TREFOIL_E4M3, TREFOIL_E5M2, TREFOIL_FP4X2,
                                              TREFOIL_BF16, TREFOIL_F16,  TREFOIL_F32};
  static const trefoil_dtype_t scales[] = {TREFOIL_F32,  TREFOIL_UINT8, TREFOIL_E4M3,
                                           TREFOIL_BF16, TREFOIL_F16,   TREFOIL_E5M2};
  const ep_check_group_t *g = s->c->group;
  size_t limit = g->maxTokenBytes;
  int recipe = (int)epBelow(s->rng, 4);
  op->payload = (ep_payload_t)epBelow(s->rng, EP_NUM_PAYLOADS);
  if (recipe == 0 && limit >= 32) {
    op->quant = TREFOIL_QUANT_CALLER;
    op->dtype = quantised[epBelow(s->rng, 6)];
    op->scaleDtype = scales[epBelow(s->rng, 6)];
    size_t scaleBytes = 16 * (size_t)epRange(s->rng, 1, atMost((int64_t)limit / 16 - 1, 4));
    op->scaleWidth = (int64_t)(scaleBytes / trefoilDtypeBytes(op->scaleDtype));
    size_t b = trefoilDtypeBytes(op->dtype);
    op->width = pickWidth(s->rng, limit - scaleBytes, b, (int64_t)(16 / b));
    return;
  }
  if (recipe <= 2 && !g->highThroughput && limit >= 528 && g->zeroCopy != NCCL_EP_ZERO_COPY_ON) {
    op->quant = TREFOIL_QUANT_E4M3;
    op->dtype = TREFOIL_BF16;
    op->width = 512 * epRange(s->rng, 1, (int64_t)(limit / 528));
    op->scaleDtype = TREFOIL_F32;
    op->scaleWidth = op->width / 128;
    op->roundScales = (int)epBelow(s->rng, 2);
    if (op->payload > EP_PAYLOAD_FINITE) op->payload = EP_PAYLOAD_FINITE;
    return;
  }
  op->dtype = plainType(s->rng);
  op->width = pickWidth(s->rng, limit, trefoilDtypeBytes(op->dtype), plainUnit(g, op->dtype));
}

static void pickCombineTypes(script_t *s, ep_check_op_t *op, int lastDispatch) {
  const ep_check_group_t *g = s->c->group;
  const ep_check_op_t *last = lastDispatch >= 0 ? &s->c->ops[lastDispatch] : NULL;
  op->payload = (ep_payload_t)epBelow(s->rng, EP_NUM_PAYLOADS);
  if (last && last->quant == TREFOIL_QUANT_NONE && epOneIn(s->rng, 2)) {
    op->from = lastDispatch;
    op->dtype = last->dtype;
    op->width = last->width;
    return;
  }
  if (!g->highThroughput && g->maxTokenBytes >= 32 && epOneIn(s->rng, 6) && !g->partial &&
      !g->gpuSubset) {
    op->quant = TREFOIL_QUANT_NVFP4;
    op->dtype = TREFOIL_BF16;
    op->width = pickWidth(s->rng, g->maxTokenBytes, 2, 16);
    if (op->payload > EP_PAYLOAD_FINITE) op->payload = EP_PAYLOAD_FINITE;
    return;
  }
  op->dtype = plainType(s->rng);
  op->width =
      pickWidth(s->rng, g->maxTokenBytes, trefoilDtypeBytes(op->dtype), plainUnit(g, op->dtype));
}

static void addUpdate(script_t *s, int handle) {
  const ep_check_group_t *g = s->c->group;
  int candidates[EP_MAX_ROUTINGS], n = 0;
  for (int i = 0; i < s->c->numRoutings; i++)
    if (s->c->routings[i].topk == g->handles[handle].topk) candidates[n++] = i;
  handle_state_t *h = &s->handles[handle];
  h->routing = candidates[epBelow(s->rng, n)];
  h->dispatched = 0;
  h->lastDispatch = -1;
  ep_check_op_t *op = addOp(s, EP_OP_UPDATE, handle);
  op->wantCounters = (int)epBelow(s->rng, 8);
  op->wideCounters = (int)epBelow(s->rng, 2);
  if (!g->maxRecv) op->wantCounters |= 4; /* eager callers size their outputs by the total */
}

static void addDispatch(script_t *s, int handle) {
  const ep_check_group_t *g = s->c->group;
  ep_check_op_t *op = addOp(s, EP_OP_DISPATCH, handle);
  pickDispatchTypes(s, op);
  op->backward = g->highThroughput && epOneIn(s->rng, 3);
  op->globalIds = (int)epBelow(s->rng, 2);
  op->wantCounters = epOneIn(s->rng, 2) || g->handles[handle].mode == TREFOIL_LL_EXPERT_MAJOR;
  op->extraRows = epOneIn(s->rng, 2) ? 0 : (int)epBelow(s->rng, 4);
  if (!g->highThroughput && s->pendingDispatch < 0 && epOneIn(s->rng, 3)) {
    op->sendOnly = 1;
    s->pendingDispatch = handle;
    s->handles[handle].pending = 1;
  }
  s->handles[handle].dispatched = 1;
  s->handles[handle].lastDispatch = s->c->numOps - 1;
}

static void addCombine(script_t *s, int handle) {
  const ep_check_group_t *g = s->c->group;
  handle_state_t *h = &s->handles[handle];
  ep_check_op_t *op = addOp(s, EP_OP_COMBINE, handle);
  pickCombineTypes(s, op, h->lastDispatch);
  op->backward = g->highThroughput && epOneIn(s->rng, 3);
  op->wantCounters = g->highThroughput && !op->backward && epOneIn(s->rng, 8); /* ignored weights */
  if (op->from >= 0) op->extraRows = s->c->ops[op->from].extraRows;
  if (!g->highThroughput && s->pendingCombine < 0 && epOneIn(s->rng, 3)) {
    op->sendOnly = 1;
    s->pendingCombine = handle;
    h->pending = 1;
  }
}

static void addComplete(script_t *s, int handle) {
  addOp(s, EP_OP_COMPLETE, handle);
  s->handles[handle].pending = 0;
  if (s->pendingDispatch == handle) s->pendingDispatch = -1;
  if (s->pendingCombine == handle) s->pendingCombine = -1;
}

/* One step on a handle, whatever its state allows. */
static void addStep(script_t *s, int handle) {
  handle_state_t *h = &s->handles[handle];
  if (h->pending) {
    addComplete(s, handle);
  } else if (h->routing < 0 || (h->dispatched && epOneIn(s->rng, 6))) {
    addUpdate(s, handle);
  } else if (!h->dispatched || epOneIn(s->rng, 3)) {
    if (s->pendingDispatch >= 0)
      addComplete(s, s->pendingDispatch);
    else
      addDispatch(s, handle);
  } else if (s->pendingCombine >= 0) {
    addComplete(s, s->pendingCombine);
  } else {
    addCombine(s, handle);
  }
}

static void makeScript(ep_check_case_t *c, ep_rng_t *rng) {
  const ep_check_group_t *g = c->group;
  if (g->orderFree || g->limited) {
    epMakeSteps(c, rng);
    return;
  }
  script_t s = {.c = c, .rng = rng, .pendingDispatch = -1, .pendingCombine = -1};
  for (int i = 0; i < EP_MAX_HANDLES; i++) s.handles[i] = (handle_state_t){-1, 0, -1, 0};
  if (c->numMasks) {
    epMakeMasks(c, rng);
    addOp(&s, EP_OP_MASK_UPDATE, -1);
    if (epOneIn(rng, 2)) addOp(&s, EP_OP_MASK_QUERY, -1);
  }
  int numUsed = c->freshHandle ? 1 : (int)epRange(rng, 1, g->numHandles);
  int steps = (int)epRange(rng, 3, epOneIn(rng, 4) ? 12 : 5);
  for (int i = 0; i < steps && c->numOps < EP_MAX_OPS - 6; i++) {
    int handle = (int)epBelow(rng, numUsed);
    if (g->handles[handle].shareWith >= 0 && s.handles[0].routing >= 0 && epOneIn(rng, 2)) {
      /* The second handle on the same memory: backward without an Update of its own. */
      s.handles[handle].routing = s.handles[0].routing;
      ep_check_op_t *op;
      addDispatch(&s, handle);
      op = &c->ops[c->numOps - 1];
      op->backward = 1;
      addCombine(&s, handle);
      op = &c->ops[c->numOps - 1];
      op->backward = 1;
      op->wantCounters = 0;
      s.handles[handle].routing = -1;
      continue;
    }
    addStep(&s, g->handles[handle].shareWith >= 0 ? 0 : handle);
  }
  for (int i = 0; i < numUsed; i++)
    if (s.handles[i].pending) addComplete(&s, i);
  if (c->numMasks) {
    addOp(&s, EP_OP_MASK_CLEAN, -1);
    if (epOneIn(rng, 2)) addOp(&s, EP_OP_MASK_QUERY, -1);
  }
}

trefoil_result_t epCountSlots(ep_check_case_t *c) {
  const ep_check_group_t *g = c->group;
  for (int i = 0; i < c->numOps; i++) {
    const ep_check_op_t *op = &c->ops[i];
    if (op->routing < 0 || !g->highThroughput) continue;
    for (int round = 0; round < c->numRounds; round++) {
      trefoil_case_t rc;
      epReferenceCase(c, op, round, &rc);
      for (int r = 0; r < g->shape.numRanks; r++) {
        int64_t total;
        trefoil_counters_t counters = {.total = &total};
        EP_TRY(trefoilRefCounters(&rc, r, &counters));
        int64_t *slots = &c->slots[op->routing][op->handle][r];
        int64_t n = trefoilRefNumSlots(&rc, r);
        if (n > *slots) *slots = n;
        if (g->maxRecv && !g->drop && total > g->maxRecv) c->trapped |= 1u << r;
      }
    }
  }
  return TREFOIL_OK;
}

/* A case over max_recv with TRAP: bind, see the totals, dispatch, see which ranks stop. */
static void makeTrapScript(ep_check_case_t *c) {
  int update = 0;
  while (c->ops[update].kind != EP_OP_UPDATE) update++;
  ep_check_op_t bind = c->ops[update];
  c->captured = 0;
  c->numRounds = 1;
  c->trapped = 0;
  c->numOps = 0;
  c->ops[c->numOps++] = bind;
  ep_check_op_t sync = bind;
  sync.kind = EP_OP_SYNC;
  c->ops[c->numOps++] = sync;
  ep_check_op_t send = bind;
  send.kind = EP_OP_DISPATCH;
  send.dtype = TREFOIL_BF16;
  send.width = c->group->hidden ? c->group->hidden : (int64_t)(c->group->maxTokenBytes / 2);
  send.payload = EP_PAYLOAD_CODED;
  c->ops[c->numOps++] = send;
  c->ops[c->numOps++] = sync;
}

/* Takes the last dispatch or combine out of a script that is too large. Nothing later refers to it;
 * what is left is issued whole, so that no Complete is missed. Returns 0 if there is none. */
static int dropLastOp(ep_check_case_t *c) {
  for (int i = c->numOps - 1; i >= 0; i--) {
    if (c->ops[i].kind != EP_OP_DISPATCH && c->ops[i].kind != EP_OP_COMBINE) continue;
    memmove(&c->ops[i], &c->ops[i + 1], sizeof c->ops[0] * (size_t)(c->numOps - i - 1));
    c->numOps--;
    for (int j = 0; j < c->numOps; j++) c->ops[j].sendOnly = 0;
    return 1;
  }
  return 0;
}

trefoil_result_t epMakeCase(ep_check_case_t *c, const ep_check_group_t *g, uint64_t index) {
  ep_rng_t rng = epRng(g->seed, 2, index);
  memset(c, 0, offsetof(ep_check_case_t, ops));
  c->group = g;
  c->index = index;
  if (g->isGrad) return epMakeGradCase(c, &rng);
  int canCapture = !g->highThroughput || g->maxRecv > 0;
  c->numMasks = g->enableMask && epUses(g, &rng, EP_F_MASK, 2);
  c->captured = canCapture && !c->numMasks && epUses(g, &rng, EP_F_GRAPH, 6);
  c->numRounds = c->captured ? EP_MAX_ROUNDS : 1;
  c->freshHandle = !c->captured && epUses(g, &rng, EP_F_FRESH_HANDLE, 16);
  c->numRoutings = EP_MAX_ROUTINGS;
  if (epOneIn(&rng, 64) && !g->limited) c->delays = 1u << epBelow(&rng, g->shape.numRanks);
  /* Every handle in the script must find a routing of its top-k. */
  int topks[EP_MAX_HANDLES], numTopks = 0;
  for (int i = 0; i < g->numHandles; i++) {
    int seen = 0;
    for (int j = 0; j < numTopks; j++) seen |= topks[j] == g->handles[i].topk;
    if (!seen) topks[numTopks++] = g->handles[i].topk;
  }
  for (int i = 0; i < EP_MAX_ROUTINGS; i++) {
    c->routings[i].topk = topks[i < numTopks ? i : 0];
    EP_TRY(epMakeRouting(c, i, &rng));
  }
  c->numOps = c->numRegions = 0;
  makeScript(c, &rng);
  EP_TRY(epCountSlots(c));
  if (c->trapped) {
    makeTrapScript(c);
    memset(c->slots, 0, sizeof c->slots);
    EP_TRY(epCountSlots(c));
  }
  while (!epPlaceTensors(c, &rng))
    EP_CHECK(dropLastOp(c), TREFOIL_INTERNAL_ERROR, "case %llu does not fit its image",
             (unsigned long long)index);
  return TREFOIL_OK;
}

void epFreeCase(ep_check_case_t *c) {
  for (int i = 0; i < c->numRoutings; i++)
    for (int round = 0; round < EP_MAX_ROUNDS; round++) {
      free(c->routings[i].ids[round]);
      c->routings[i].ids[round] = NULL;
    }
}
