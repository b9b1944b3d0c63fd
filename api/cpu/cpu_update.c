/* Routing: published by each rank, read by all, kept in handle_mem, and the layout made from it.
 *
 * Ids are checked where they enter: a rank's own ids out of range, or named twice in a row, are
 * reported on that rank and count as unused, so peers never see them. */
#include <stdio.h>
#include <string.h>

#include "api/cpu/cpu.h"
#include "api/cpu/cpu_hang.h"

void epPlaceRows(ep_cpu_handle_t *h, int topk) {
  size_t stride = (size_t)h->handle->sizing.config.shape.maxTokens * (size_t)topk;
  for (int r = 0; r < h->g->R; r++) h->rows[r] = h->routing + (size_t)r * stride;
}

int epHoldsRouting(const ep_cpu_handle_t *h) {
  const ep_mem_head_t *head = h->head;
  const trefoil_shape_t *s = &h->handle->sizing.config.shape;
  return head->magic == NCCL_EP_MAGIC && head->numRanks == s->numRanks &&
         head->numExperts == s->numExperts && head->maxTokens == s->maxTokens;
}

static _Atomic uint64_t versions;

static int64_t idAt(const ep_update_call_t *call, int64_t i) {
  return call->is64 ? ((const int64_t *)call->topkIdx)[i] : ((const int32_t *)call->topkIdx)[i];
}

static void reportId(const ep_op_t *op, const ep_update_call_t *call, int64_t i, int duplicate) {
  int E = op->a->sizing.config.shape.numExperts;
  epReport(
      op->g->group, EP_DEFERRED_STICKY, TREFOIL_INVALID_ARGUMENT,
      duplicate ? "topk_idx of rank %d, token %lld, k = %d: expert %lld is named twice in the "
                  "row (%d experts); it counted as unused"
                : "topk_idx of rank %d, token %lld, k = %d: expert %lld is outside [0, %d) and "
                  "not -1; it counted as unused",
      op->g->me, (long long)(i / call->topk), (int)(i % call->topk), (long long)idAt(call, i), E);
}

void epCopyRouting(const ep_op_t *op, const ep_update_call_t *call, int32_t *out) {
  int64_t E = op->a->sizing.config.shape.numExperts;
  int K = call->topk;
  for (int64_t t = 0; t < call->numTokens; t++) {
    int32_t *row = out + t * K;
    for (int k = 0; k < K; k++) {
      int64_t id = idAt(call, t * K + k);
      int bad = id < -1 || id >= E, twice = 0;
      for (int j = 0; j < k && id >= 0; j++) twice |= row[j] == id;
      if (bad || twice) reportId(op, call, t * K + k, !bad);
      row[k] = bad || twice ? -1 : (int32_t)id;
    }
  }
}

int epComputeLayout(ep_cpu_handle_t *h, int topk) {
  ep_cpu_group_t *g = h->g;
  const ep_group_limits_t *limits = &g->group->limits;
  trefoil_routing_t routing = {
      .shape = h->handle->sizing.config.shape, .numTokens = h->numTokens, .topkIdx = h->rows};
  routing.shape.topk = topk;
  trefoil_layout_config_t config = {.mode = h->handle->mode, .alignment = h->handle->alignment};
  if (epIsHt(g->group)) {
    config.maxRecv = limits->maxRecv;
    config.drop = limits->overflowPolicy == NCCL_EP_OVERFLOW_DROP;
    config.zeroCopyOn = limits->zeroCopy == NCCL_EP_ZERO_COPY_ON;
  } else if (limits->enableMask) {
    config.active = h->active;
  }
  if (trefoilLayoutCompute(&h->layout, &routing, &config) == TREFOIL_OK) return 1;
  epReport(g->group, EP_DEFERRED_STICKY, TREFOIL_INTERNAL_ERROR, "layout: %s", trefoilLastError());
  return 0;
}

static void fillHead(const ep_op_t *op, int topk) {
  ep_cpu_handle_t *h = op->h;
  h->head->topk = topk;
  h->head->mode = (int64_t)h->handle->mode;
  h->head->alignment = (int64_t)h->handle->alignment;
  h->head->total = h->layout.total[op->g->me];
  h->head->numRanks = op->g->R;
  h->head->numExperts = h->handle->sizing.config.shape.numExperts;
  h->head->maxTokens = h->handle->sizing.config.shape.maxTokens;
  h->head->version = atomic_fetch_add(&versions, 1) + 1;
  h->head->magic = NCCL_EP_MAGIC;
  h->layoutVersion = h->head->version;
}

/* The third routing slot is the exchange's in low latency. */
static char *exchangeSlot(const ep_op_t *op, int r) {
  size_t slot = epIsHt(op->g->group) ? 0 : 2;
  return epBufferOf(op, r, EP_BUFFER_ROUTING) + slot * op->a->sizing.routingBytes;
}

static int readRouting(const ep_op_t *op, int r, int topk) {
  ep_cpu_handle_t *h = op->h;
  ep_arena_head_t *head = epHeadOf(op, r);
  h->numTokens[r] = 0;
  if (!epActive(op->g, r)) return 1;
  if (!epWait(op, r, &head->updatePublished, op->no, "routing")) return epActive(op->g, r) == 0;
  int masks = !epIsHt(op->g->group) && op->g->group->limits.enableMask;
  if (head->updateTopk != topk && masks) return 1;
  if (head->updateTopk != topk) {
    epReport(
        op->g->group, EP_DEFERRED_FATAL, TREFOIL_INVALID_ARGUMENT,
        "ncclEpUpdateHandle: top-k differs: %d on rank %d, %lld on rank %d; must be equal; the "
        "group is lost",
        topk, op->g->me, (long long)head->updateTopk, r);
    atomic_store(&op->g->failed, 1);
    return 0;
  }
  int64_t B = head->updateTokens, N = op->a->sizing.config.shape.maxTokens;
  if (B < 0 || B > N) B = 0;
  memcpy((void *)(uintptr_t)h->rows[r], exchangeSlot(op, r), (size_t)(B * topk) * sizeof(int32_t));
  h->numTokens[r] = B;
  if (!masks) return 1;
  atomic_thread_fence(memory_order_acquire);
  if (epLoad(&head->updatePublished) != op->no) {
    epWentOn(op, r);
    h->numTokens[r] = 0;
  }
  return 1;
}

int epExchangeRouting(const ep_op_t *op, const ep_update_call_t *call) {
  ep_cpu_group_t *g = op->g;
  int me = g->me, masks = !epIsHt(g->group) && g->group->limits.enableMask;
  for (int i = 1; i < g->R; i++) {
    int r = (me + i) % g->R;
    if (!epOwesReading(op, r, op->no - 1)) continue;
    ep_word_t *taken = epWordOf(op, r, EP_ARRAY_UPDATE_TAKEN, me);
    if (!epWait(op, r, taken, op->no - 1, "reading of the last routing") && !masks) return 0;
  }
  if (masks) epRecordMasked(op);
  ep_arena_head_t *head = epHeadOf(op, me);
  epCopyRouting(op, call, (int32_t *)exchangeSlot(op, me));
  head->updateTokens = call->numTokens;
  head->updateTopk = call->topk;
  epStore(&head->updatePublished, op->no);
  epRingAll(g, op->kind);
  epPlaceRows(op->h, call->topk);
  int ok = 1;
  for (int i = 0; i < g->R && ok; i++) {
    int r = (me + i) % g->R;
    ok = readRouting(op, r, call->topk);
    epStore(epWordOf(op, me, EP_ARRAY_UPDATE_TAKEN, r), op->no);
    if (r != me) epRing(g, r, op->kind);
  }
  if (!ok) return 0;
  for (int r = 0; r < g->R && op->h->active; r++) {
    uint8_t *row = op->h->active + (size_t)r * (size_t)g->R;
    memset(row, 1, (size_t)g->R);
    for (int s = 0; s < g->R && r == me; s++) row[s] = (uint8_t)epActive(g, s);
  }
  if (!epComputeLayout(op->h, call->topk)) return 0;
  fillHead(op, call->topk);
  return 1;
}

/* A number that int32 cannot hold is reported and saturates: padding alone may come to more. */
static void writeCounter(const ep_op_t *op, const ep_counter_t *c, const char *name, int64_t i,
                         int64_t value) {
  if (!c->data) return;
  if (c->is64) {
    ((int64_t *)c->data)[i] = value;
    return;
  }
  ((int32_t *)c->data)[i] = value > INT32_MAX ? INT32_MAX : (int32_t)value;
  if (value <= INT32_MAX) return;
  epReport(
      op->g->group, EP_DEFERRED_STICKY, TREFOIL_INVALID_ARGUMENT,
      "layout_info->%s[%lld] is %lld on rank %d, which int32 does not hold; give an int64 tensor",
      name, (long long)i, (long long)value, op->g->me);
}

void epRunUpdate(ep_record_t *r) {
  ep_cpu_handle_t *h = r->h;
  ep_cpu_group_t *g = r->g;
  ep_arena_t *a = &g->arenas[h->arenaIdx];
  ep_op_t op = {g, a, h, h->arenaIdx, EP_KIND_UPDATE, ++a->ops[EP_KIND_UPDATE], 0, 0};
  const ep_update_call_t *call = &r->call.update;
  epHangBegin(&op);
  if (epExchangeRouting(&op, call)) {
    int L = h->layout.numLocalExperts;
    for (int l = 0; l < L; l++) {
      writeCounter(&op, &call->expertCounters, "expert_counters", l,
                   h->layout.shownCount[g->me * L + l]);
      writeCounter(&op, &call->expertOffsets, "expert_offsets", l,
                   h->layout.shownOffset[g->me * L + l]);
    }
    writeCounter(&op, &call->total, "recv_total_counter", 0, h->layout.total[g->me]);
  }
  epHangEnd(&op);
  if (!r->captured) epStore(&h->updatesRun, epLoad(&h->updatesRun) + 1);
}

static int routingLost(const ep_op_t *op, const char *why) {
  epReport(op->g->group, EP_DEFERRED_FATAL, TREFOIL_INVALID_USAGE, "%s; the group is lost", why);
  atomic_store(&op->g->failed, 1);
  return 0;
}

/* Calls were checked against the routing that they knew of; a graph's replay or the caller's own writing
 * may have put another one there since. */
int epRefreshLayout(const ep_op_t *op, int64_t numTokens, int topk) {
  ep_cpu_handle_t *h = op->h;
  const ep_mem_head_t *head = h->head;
  const struct ncclEpHandle *handle = h->handle;
  char why[160];
  if (!epHoldsRouting(h) || head->mode != (int64_t)handle->mode ||
      head->alignment != (int64_t)handle->alignment || head->topk > handle->topkBound) {
    return routingLost(op, "handle_mem holds no routing of this layout, alignment and top-k");
  }
  if (topk && topk != head->topk) {
    snprintf(why, sizeof why, "the weights are of top-%d, the routing of top-%lld", topk,
             (long long)head->topk);
    return routingLost(op, why);
  }
  if (h->numTokens[op->g->me] != numTokens) {
    snprintf(why, sizeof why, "the tokens have %lld rows, the routing has %lld",
             (long long)numTokens, (long long)h->numTokens[op->g->me]);
    return routingLost(op, why);
  }
  if (h->layoutVersion == head->version) return 1;
  epPlaceRows(h, (int)head->topk);
  if (!epComputeLayout(h, (int)head->topk)) return 0;
  h->layoutVersion = head->version;
  return 1;
}
