/* Dispatch, the sending half: rows, weights and (LL) routing into this rank's own slot, then the
 * number. The slot is free when every receiver has taken what it held before. */
#include <string.h>

#include "api/cpu/cpu.h"
#include "api/cpu/cpu_hang.h"
#include "api/cpu/cpu_dispatch.h"
#include "ref/row.h"

static int64_t routedTopk(const ep_op_t *op, const ep_record_t *r) {
  return epIsHt(op->g->group) ? op->h->head->topk : r->routing.topk;
}

/* A row of tokens, and its scales next to it. */
static void exposeRow(const ep_dispatch_call_t *c, int64_t t, char *to) {
  const char *row = (const char *)c->tokens + (size_t)t * c->inputRowBytes;
  if (c->quant == EP_QUANT_E4M3) {
    /* both parts are read as they are written: scales lie 4-byte aligned, H % 512 = 0 */
    epRowQuantiseE4m3((const uint16_t *)row, c->width, c->roundScales, (uint8_t *)to,
                      (float *)(to + c->tokenBytes));
    return;
  }
  memcpy(to, row, c->tokenBytes);
  if (c->scaleBytes) {
    memcpy(to + c->tokenBytes, (const char *)c->scales + (size_t)t * c->scaleBytes, c->scaleBytes);
  }
}

static void exposeRows(const ep_op_t *op, const ep_dispatch_call_t *c, const int32_t *routing,
                       int64_t K) {
  size_t stride = op->a->sizing.rowStride;
  char *rows = epDispatchRows(op, op->g->me);
  for (int64_t t = 0; t < c->numTokens; t++) {
    int used = 0;
    for (int64_t k = 0; k < K; k++) used |= routing[t * K + k] >= 0;
    if (used) exposeRow(c, t, rows + (size_t)t * stride);
  }
  if (c->hasWeights && c->numTokens > 0) {
    memcpy(epDispatchWeights(op, op->g->me), c->weights,
           (size_t)(c->numTokens * K) * sizeof(float));
  }
}

static int waitForSlot(const ep_op_t *op) {
  ep_cpu_group_t *g = op->g;
  uint64_t S = (uint64_t)op->a->sizing.dispatchSlots;
  int masks = !epIsHt(g->group) && g->group->limits.enableMask;
  if (op->no <= S) return 1;
  for (int i = 1; i < g->R; i++) {
    int r = (g->me + i) % g->R;
    if (!epOwesReading(op, r, op->no - S)) continue;
    ep_word_t *taken = epWordOf(op, r, EP_ARRAY_DISPATCH_TAKEN, g->me);
    if (!epWait(op, r, taken, op->no - S, "reading of an earlier dispatch") && !masks) return 0;
  }
  return 1;
}

static int sendHalf(const ep_op_t *op, const ep_record_t *r) {
  ep_cpu_group_t *g = op->g;
  const ep_dispatch_call_t *c = &r->call.dispatch;
  int ht = epIsHt(g->group);
  if (ht && !epRefreshLayout(op, c->numTokens, c->topk)) return 0;
  if (!waitForSlot(op)) return 0;
  if (!ht) epRecordMasked(op);
  ep_dispatch_head_t *head = epDispatchHead(op, g->me);
  head->numTokens = c->numTokens;
  head->topk = routedTopk(op, r);
  head->tokenBytes = (int64_t)c->tokenBytes;
  head->scaleBytes = (int64_t)c->scaleBytes;
  head->meaning = epMeaning(c->backward, c->quant, c->dtype);
  head->counts = op->counts;
  for (int i = 0; i < g->R; i++) head->active[i] = (uint8_t)epActive(g, i);
  const int32_t *routing = op->h->rows[g->me];
  if (!ht) {
    int32_t *own = epDispatchRouting(op, g->me);
    epCopyRouting(op, &r->routing, own);
    routing = own;
  }
  exposeRows(op, c, routing, head->topk);
  epStore(&epHeadOf(op, g->me)->dispatchPublished, op->no);
  epRingAll(g, op->kind);
  return 1;
}

void epRunDispatch(ep_record_t *r) {
  ep_cpu_handle_t *h = r->h;
  ep_cpu_group_t *g = r->g;
  ep_arena_t *a = &g->arenas[h->arenaIdx];
  ep_op_t op = {g, a, h, h->arenaIdx, EP_KIND_DISPATCH, 0, 0, r->counts};
  int ok = 1;
  if (r->stage & EP_STAGE_SEND) {
    op.no = h->flightOps[EP_KIND_DISPATCH] = ++a->ops[EP_KIND_DISPATCH];
    epHangBegin(&op);
    ok = sendHalf(&op, r);
  }
  op.no = h->flightOps[EP_KIND_DISPATCH];
  if (ok && r->stage & EP_STAGE_RECEIVE) {
    if (!epWasSent(&op)) return;
    h->flightOps[EP_KIND_DISPATCH] = 0;
    if (r->stage == EP_STAGE_RECEIVE) epHangBegin(&op);
    if (epReceiveRouting(&op, r)) epReceiveRows(&op, &r->call.dispatch);
    h->layoutNo = r->routingNo;
  }
  epHangEnd(&op);
}
