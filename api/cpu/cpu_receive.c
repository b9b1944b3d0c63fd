/* Dispatch, the receiving half: LL reads every source's routing and makes the layout; then each
 * row this rank's experts want is copied from its source (HT on another node: from the same-rail
 * rank of this node) into its slots. When all is read, every source is notified.
 *
 * With masks a source that does not come is left out, and one that went on without us (its number has
 * passed the slot's next use) too: then everything is placed again without it. */
#include <string.h>

#include "api/cpu/cpu.h"
#include "api/cpu/cpu_dispatch.h"

typedef struct receiver {
  const ep_op_t *op;
  const ep_dispatch_call_t *c;
  const trefoil_layout_t *layout;
  int K, L, firstExpert;
  int64_t N;
  size_t stride;
} receiver_t;

static int hasMasks(const ep_op_t *op) {
  return !epIsHt(op->g->group) && op->g->group->limits.enableMask;
}

/* The source's rows must be of our kind. */
static int checkHead(const ep_op_t *op, int src, const ep_dispatch_call_t *c, int64_t topk) {
  const ep_dispatch_head_t *head = epDispatchHead(op, src);
  int64_t meaning = epMeaning(c->backward, c->quant, c->dtype);
  char theirs[60], ours[60];
  if (head->tokenBytes == (int64_t)c->tokenBytes && head->scaleBytes == (int64_t)c->scaleBytes &&
      head->topk == topk && head->meaning == meaning) {
    return 1;
  }
  if (hasMasks(op)) {
    uint64_t S = (uint64_t)op->a->sizing.dispatchSlots;
    int wentOn = epLoad(&epHeadOf(op, src)->dispatchPublished) >= op->no + S;
    if (!wentOn) epGiveUp(op, src, "sends rows of another size, kind or top-k", "rows");
    return wentOn;
  }
  epReport(op->g->group, EP_DEFERRED_FATAL, TREFOIL_INVALID_ARGUMENT,
           "ncclEpDispatch: rank %d sends %lld + %lld bytes a token (%s) and top-%lld, rank %d %zu "
           "+ %zu (%s) and top-%lld; must be equal; the group is lost",
           src, (long long)head->tokenBytes, (long long)head->scaleBytes,
           epMeaningName(head->meaning, theirs), (long long)head->topk, op->g->me, c->tokenBytes,
           c->scaleBytes, epMeaningName(meaning, ours), (long long)topk);
  atomic_store(&op->g->failed, 1);
  return 0;
}

static int readRouting(const ep_op_t *op, int src, const ep_record_t *r) {
  ep_cpu_handle_t *h = op->h;
  ep_cpu_group_t *g = op->g;
  size_t R = (size_t)g->R;
  h->numTokens[src] = 0;
  memset(h->active + (size_t)src * R, 1, R);
  if (!epActive(g, src)) return 1;
  int came = epWait(op, src, &epHeadOf(op, src)->dispatchPublished, op->no, "rows");
  if (!came || !checkHead(op, src, &r->call.dispatch, r->routing.topk)) return hasMasks(op);
  const ep_dispatch_head_t *head = epDispatchHead(op, src);
  int64_t B = head->numTokens, N = op->a->sizing.config.shape.maxTokens;
  if (B < 0 || B > N) B = 0; /* overwritten while we read: noticed below */
  memcpy((void *)(uintptr_t)h->rows[src], epDispatchRouting(op, src),
         (size_t)(B * r->routing.topk) * sizeof(int32_t));
  h->numTokens[src] = B;
  memcpy(h->active + (size_t)src * R, head->active, R);
  return 1;
}

/* What was read while its source overwrote it may be anything: it counts as nothing. 1: there was
 * such a source. */
static int dropStale(const ep_op_t *op) {
  ep_cpu_group_t *g = op->g;
  ep_cpu_handle_t *h = op->h;
  size_t R = (size_t)g->R, me = (size_t)g->me;
  uint64_t S = (uint64_t)op->a->sizing.dispatchSlots;
  int changed = 0;
  for (int src = 0; src < g->R; src++) {
    int stale = src != g->me && epActive(g, src) && h->active[(size_t)src * R + me] &&
                epLoad(&epHeadOf(op, src)->dispatchPublished) >= op->no + S;
    if (stale) epWentOn(op, src);
    if (stale) h->active[(size_t)src * R + me] = 0;
    if (stale || !epActive(g, src)) {
      changed |= h->numTokens[src] != 0;
      h->numTokens[src] = 0;
    }
    h->active[me * R + (size_t)src] = (uint8_t)epActive(g, src);
  }
  return changed;
}

int epReceiveRouting(const ep_op_t *op, ep_record_t *r) {
  ep_cpu_group_t *g = op->g;
  if (epIsHt(g->group)) return 1;
  for (int i = 0; i < g->R; i++) {
    if (!readRouting(op, (g->me + i) % g->R, r)) return 0;
  }
  if (hasMasks(op)) {
    atomic_thread_fence(memory_order_acquire);
    dropStale(op);
  }
  op->h->head->topk = r->routing.topk;
  return epComputeLayout(op->h, r->routing.topk);
}

/* ---- rows ------------------------------------------------------------------------------------ */

static int isLocal(const receiver_t *v, int32_t e) {
  return (uint32_t)(e - v->firstExpert) < (uint32_t)v->L;
}

static void putRow(const receiver_t *v, const char *row, int64_t slot) {
  const ep_dispatch_call_t *c = v->c;
  memcpy((char *)c->out.tokens + (size_t)slot * c->tokenBytes, row, c->tokenBytes);
  if (c->scaleBytes) {
    memcpy((char *)c->out.scales + (size_t)slot * c->scaleBytes, row + c->tokenBytes,
           c->scaleBytes);
  }
}

static void putRankMajorTopk(const receiver_t *v, const int32_t *ids, const float *w,
                             int64_t slot) {
  memcpy(v->c->out.weights + slot * v->K, w, (size_t)v->K * sizeof *w);
  int32_t *out = (int32_t *)v->c->out.idx + slot * v->K;
  for (int k = 0; k < v->K; k++) {
    out[k] = !isLocal(v, ids[k]) ? -1 : v->c->globalIds ? ids[k] : ids[k] - v->firstExpert;
  }
}

/* Local experts by ascending id, then -1 with weight 0. */
static void putFlatTopk(const receiver_t *v, const int32_t *ids, const float *w, int64_t slot) {
  float *outW = v->c->out.weights + slot * v->K;
  int64_t *out = (int64_t *)v->c->out.idx + slot * v->K;
  int n = 0, bias = v->c->globalIds ? 0 : v->firstExpert;
  for (int k = 0; k < v->K; k++) {
    if (!isLocal(v, ids[k])) continue;
    int at = n++;
    for (; at > 0 && out[at - 1] > ids[k] - bias; at--) {
      out[at] = out[at - 1];
      outW[at] = outW[at - 1];
    }
    out[at] = ids[k] - bias;
    outW[at] = w[k];
  }
  for (; n < v->K; n++) {
    out[n] = -1;
    outW[n] = 0;
  }
}

/* 1: the token has a slot here (its row was read). */
static int putToken(const receiver_t *v, int src, int64_t t, const char *row, const float *w) {
  const int32_t *ids = v->op->h->rows[src] + t * v->K;
  const int64_t *slots = v->layout->slotOf[src] + t * v->K;
  trefoil_mode_t mode = v->op->h->handle->mode;
  int expertMajor = mode == TREFOIL_LL_EXPERT_MAJOR || mode == TREFOIL_HT_EXPERT_MAJOR, put = 0;
  for (int k = 0; k < v->K; k++) {
    if (!isLocal(v, ids[k]) || slots[k] < 0) continue;
    putRow(v, row, slots[k]);
    put = 1;
    if (mode == TREFOIL_HT_EXPERT_MAJOR && w) v->c->out.weights[slots[k]] = w[k];
    if (mode == TREFOIL_LL_RANK_MAJOR) putRankMajorTopk(v, ids, w, slots[k]);
    if (mode == TREFOIL_HT_FLAT && w) putFlatTopk(v, ids, w, slots[k]);
    if (!expertMajor) break;
  }
  return put;
}

/* Rows that were taken from rank r, which says whether its sends count. */
static void tookRows(const receiver_t *v, int r, uint64_t numRows) {
  const ep_dispatch_head_t *head = epDispatchHead(v->op, r);
  v->op->g->peers[r].rowsFrom[0] += numRows;
  if (head->counts) epTook(v->op, r, numRows * (v->c->tokenBytes + v->c->scaleBytes));
}

static const float *weightsOf(const receiver_t *v, int src) {
  return v->c->hasWeights ? epDispatchWeights(v->op, src) : NULL;
}

static void putSource(const receiver_t *v, int src) {
  const char *rows = epDispatchRows(v->op, src);
  const float *weights = weightsOf(v, src);
  uint64_t numRows = 0;
  for (int64_t t = 0; t < v->op->h->numTokens[src]; t++) {
    numRows += (uint64_t)putToken(v, src, t, rows + (size_t)t * v->stride,
                                  weights ? weights + t * v->K : NULL);
  }
  tookRows(v, src, numRows);
}

/* ---- HT across nodes: p copies net rows into its forward area, its node reads them there ------ */

static char *forwardRows(const receiver_t *v, int p, int node) {
  int area = node < p / v->op->g->G ? node : node - 1;
  return epBufferOf(v->op, p, EP_BUFFER_FORWARD_ROWS) + (size_t)area * (size_t)v->N * v->stride;
}

static int wantedByNode(const receiver_t *v, const int32_t *ids) {
  int G = v->op->g->G, first = v->op->g->me / G * G * v->L;
  for (int k = 0; k < v->K; k++) {
    if (ids[k] >= first && ids[k] < first + G * v->L) return 1;
  }
  return 0;
}

static void forwardNode(const receiver_t *v, int node) {
  const ep_op_t *op = v->op;
  ep_cpu_group_t *g = op->g;
  int origin = node * g->G + g->me % g->G, myNode = g->me / g->G;
  char *to = forwardRows(v, g->me, node);
  const char *from = epDispatchRows(op, origin);
  int64_t B = op->h->numTokens[origin];
  size_t bytes = v->c->tokenBytes + v->c->scaleBytes;
  ep_word_t *done = epWordOf(op, g->me, EP_ARRAY_FORWARD, node);
  uint64_t numRows = 0;
  for (int64_t t = 0; t < B; t++) {
    if (wantedByNode(v, op->h->rows[origin] + t * v->K)) {
      memcpy(to + (size_t)t * v->stride, from + (size_t)t * v->stride, bytes);
      numRows++;
    }
    if ((t + 1) % EP_HT_CHUNK_TOKENS && t + 1 < B) continue;
    epStore(done, op->no << 32 | (uint64_t)(t / EP_HT_CHUNK_TOKENS + 1));
    for (int r = myNode * g->G; r < (myNode + 1) * g->G; r++) {
      if (r != g->me) epRing(g, r, op->kind);
    }
  }
  tookRows(v, origin, numRows);
}

static int forwardAll(const receiver_t *v) {
  const ep_op_t *op = v->op;
  ep_cpu_group_t *g = op->g;
  int myNode = g->me / g->G, rail = g->me % g->G;
  for (int r = myNode * g->G; r < (myNode + 1) * g->G; r++) {
    ep_word_t *taken = epWordOf(op, r, EP_ARRAY_FORWARD_TAKEN, rail);
    if (r != g->me && !epWait(op, r, taken, op->no - 1, "reading of forwarded rows")) return 0;
  }
  for (int i = 1; i < g->M; i++) {
    int node = (myNode + i) % g->M, origin = node * g->G + rail;
    if (!epWait(op, origin, &epHeadOf(op, origin)->dispatchPublished, op->no, "rows")) return 0;
    if (!checkHead(op, origin, v->c, v->K)) return 0;
    forwardNode(v, node);
  }
  return 1;
}

static int putForwarded(const receiver_t *v, int src) {
  const ep_op_t *op = v->op;
  ep_cpu_group_t *g = op->g;
  int node = src / g->G, p = g->me / g->G * g->G + src % g->G;
  const char *rows = forwardRows(v, p, node);
  const float *weights = weightsOf(v, src);
  const ep_word_t *done = epWordOf(op, p, EP_ARRAY_FORWARD, node);
  uint64_t numRows = 0;
  for (int64_t t = 0; t < op->h->numTokens[src]; t++) {
    if (t % EP_HT_CHUNK_TOKENS == 0) {
      uint64_t want = op->no << 32 | (uint64_t)(t / EP_HT_CHUNK_TOKENS + 1);
      if (!epWait(op, p, done, want, "forwarded rows")) return 0;
    }
    numRows += (uint64_t)putToken(v, src, t, rows + (size_t)t * v->stride,
                                  weights ? weights + t * v->K : NULL);
  }
  tookRows(v, p, numRows);
  return 1;
}

/* ---- what the meaning says of other rows, and the whole -------------------------------------- */

static void zeroPadding(const receiver_t *v) {
  const trefoil_layout_t *l = v->layout;
  const ep_dispatch_call_t *c = v->c;
  int me = v->op->g->me;
  for (int e = me * v->L; e < (me + 1) * v->L; e++) {
    int64_t first = l->zoneOffset[e] + l->expertFilled[e],
            end = l->zoneOffset[e] + l->expertPadded[e];
    if (end > l->numSlots[me]) end = l->numSlots[me];
    if (first >= end) continue;
    size_t n = (size_t)(end - first);
    memset((char *)c->out.tokens + (size_t)first * c->tokenBytes, 0, n * c->tokenBytes);
    if (c->scaleBytes)
      memset((char *)c->out.scales + (size_t)first * c->scaleBytes, 0, n * c->scaleBytes);
    if (c->hasWeights) memset(c->out.weights + first, 0, n * sizeof(float));
  }
}

static void endTopk(const receiver_t *v) {
  const ep_dispatch_call_t *c = v->c;
  int64_t first = v->layout->numSlots[v->op->g->me], end = c->out.topkRows;
  int64_t maxRecv = v->op->g->group->limits.maxRecv;
  int64_t perRow = v->op->h->handle->mode == TREFOIL_HT_FLAT ? v->K : 1;
  if (maxRecv && end > maxRecv) end = maxRecv;
  for (int64_t i = first * perRow; i < end * perRow; i++) {
    c->out.weights[i] = 0;
    if (c->out.idx) ((int64_t *)c->out.idx)[i] = -1;
  }
}

/* HT: may this rank's outputs be written? */
static int fits(const receiver_t *v) {
  const ep_op_t *op = v->op;
  int me = op->g->me;
  long long total = (long long)v->layout->total[me], rows = (long long)v->layout->numSlots[me];
  int drop = op->g->group->limits.overflowPolicy == NCCL_EP_OVERFLOW_DROP;
  if (v->layout->overflowed[me] && !drop) {
    epReport(op->g->group, EP_DEFERRED_STICKY, TREFOIL_INVALID_USAGE,
             "rank %d would receive %lld slots; max_recv_tokens_per_rank is %u (overflow_policy "
             "TRAP): nothing was written; call ncclEpErrorClear and raise the bound",
             me, total, op->g->group->limits.maxRecv);
    return 0;
  }
  if (v->c->out.rows < rows || (v->c->hasWeights && v->c->out.topkRows < rows)) {
    epReport(op->g->group, EP_DEFERRED_STICKY, TREFOIL_INVALID_ARGUMENT,
             "rank %d receives %lld slots; outputs->tokens has %lld rows, outputs->topk_weights "
             "%lld: nothing was written",
             me, rows, (long long)v->c->out.rows, (long long)v->c->out.topkRows);
    return 0;
  }
  return 1;
}

static int putAll(const receiver_t *v, int write) {
  ep_cpu_group_t *g = v->op->g;
  for (int i = 0; i < g->R && write; i++) {
    int src = (g->me + i) % g->R;
    if (!epActive(g, src) || !v->layout->rowsFrom[g->me * g->R + src]) continue;
    if (epIsHt(g->group)) {
      if (!epWait(v->op, src, &epHeadOf(v->op, src)->dispatchPublished, v->op->no, "rows"))
        return 0;
      if (!checkHead(v->op, src, v->c, v->K)) return 0;
    }
    if (epIsHt(g->group) && src / g->G != g->me / g->G) {
      if (!putForwarded(v, src)) return 0;
    } else {
      putSource(v, src);
    }
  }
  return 1;
}

static void acknowledge(const receiver_t *v) {
  const ep_op_t *op = v->op;
  ep_cpu_group_t *g = op->g;
  for (int r = 0; r < g->R; r++) {
    epStore(epWordOf(op, g->me, EP_ARRAY_DISPATCH_TAKEN, r), op->no);
    if (g->M > 1 && r / g->G == g->me / g->G) {
      epStore(epWordOf(op, g->me, EP_ARRAY_FORWARD_TAKEN, r % g->G), op->no);
    }
  }
  epRingAll(g, op->kind);
}

static void writeLlCounters(const receiver_t *v) {
  const ep_dispatch_call_t *c = v->c;
  int me = v->op->g->me, R = v->op->g->R;
  int32_t *experts = c->expertCounters.data, *sources = c->srcRankCounters.data;
  for (int l = 0; experts && l < v->L; l++)
    experts[l] = (int32_t)v->layout->shownCount[me * v->L + l];
  for (int r = 0; sources && r < R; r++) sources[r] = (int32_t)v->layout->rowsFrom[me * R + r];
}

/* Did a source overwrite its slot while we read? Then all is placed again without it. */
static int lostOne(const receiver_t *v) {
  if (!hasMasks(v->op)) return 0;
  atomic_thread_fence(memory_order_acquire);
  return dropStale(v->op) && epComputeLayout(v->op->h, v->K);
}

void epReceiveRows(const ep_op_t *op, const ep_dispatch_call_t *c) {
  ep_cpu_handle_t *h = op->h;
  int L = h->layout.numLocalExperts, ht = epIsHt(op->g->group);
  receiver_t v = {.op = op,
                  .c = c,
                  .layout = &h->layout,
                  .K = (int)h->head->topk,
                  .L = L,
                  .firstExpert = op->g->me * L,
                  .N = op->a->sizing.config.shape.maxTokens,
                  .stride = op->a->sizing.rowStride};
  int write = !ht || fits(&v);
  epForgetTaken(op);
  if (ht && op->g->M > 1 && !forwardAll(&v)) return;
  do {
    if (!ht) epForgetTaken(op); /* once more: a source was lost meanwhile */
    if (h->handle->mode == TREFOIL_LL_RANK_MAJOR) {
      memset(c->out.idx, 0xFF, (size_t)(op->g->R * v.N * v.K) * sizeof(int32_t));
    }
    if (!putAll(&v, write)) return;
  } while (lostOne(&v));
  epPublishTaken(op);
  acknowledge(&v);
  if (!ht) {
    writeLlCounters(&v);
  } else if (write) {
    if (h->handle->mode == TREFOIL_HT_EXPERT_MAJOR) zeroPadding(&v);
    if (c->hasWeights) endTopk(&v);
  }
}
