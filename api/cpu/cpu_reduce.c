/* Summing one chunk of messages: at the origin into the caller's tensor, at a relay (HT across
 * nodes) into a message of its own. Orders are the contract's (docs/spec.md): LL expert-major by
 * ascending k, LL rank-major by ranks as the token's row first names them, partial sums and HT by
 * ascending rank, across nodes each node's partial first, then nodes.
 *
 * Every message is sorted by tag, so a cursor per sender is all that is needed. */
#include <string.h>

#include "api/cpu/cpu.h"
#include "ref/row.h"

typedef struct reducer {
  const ep_op_t *op;
  const ep_combine_call_t *c;
  int K, L;
  size_t rowBytes, stride;
  float *acc[2];  /* ranks of a node; nodes */
  char *nodeRow;  /* own node's partial */
  float *decoded; /* NVFP4 */
  float *listAcc; /* partial sum of rows given by address */
  char *listRow;
} reducer_t;

static reducer_t makeReducer(const ep_op_t *op, const ep_combine_call_t *c) {
  const ep_sizing_t *s = &op->a->sizing;
  char *scratch = (char *)op->a->scratch + 2 * s->rowStride; /* the first part: writeSum's */
  reducer_t r = {.op = op, .c = c, .K = (int)op->h->head->topk};
  r.L = op->h->layout.numLocalExperts;
  r.rowBytes = (size_t)c->width * trefoilDtypeBytes(c->dtype);
  r.stride = s->rowStride;
  r.acc[0] = (float *)scratch;
  r.acc[1] = (float *)(scratch + 2 * s->rowStride);
  r.decoded = r.acc[1];
  r.nodeRow = scratch + 4 * s->rowStride;
  r.listRow = scratch + 5 * s->rowStride;
  r.listAcc = op->a->scratch;
  return r;
}

/* A rank's partial whose terms were given by address, in the order of the list. */
static char *sumList(const reducer_t *r, const char *list) {
  ep_sum_t sum = {.dtype = r->c->dtype, .width = r->c->width, .acc = r->listAcc};
  int64_t terms;
  memcpy(&terms, list, sizeof terms);
  epSumBegin(&sum, r->listRow);
  for (int64_t i = 0; i < terms; i++) {
    const char *row;
    memcpy(&row, list += sizeof row, sizeof row);
    epSumAdd(&sum, row);
  }
  epSumEnd(&sum);
  return r->listRow;
}

/* The sender's next row if its tag is in [least, end), and moves on; else NULL. */
static char *takeRow(const reducer_t *r, int sender, int64_t least, int64_t end, int64_t *rowIdx) {
  ep_peer_t *p = &r->op->g->peers[sender];
  char *message = (char *)(uintptr_t)p->message;
  if (!message) return NULL;
  const ep_message_t *head = (const ep_message_t *)message;
  if (p->cursor >= head->count) return NULL;
  int64_t raw = epMessageTags(r->op, message)[p->cursor],
          tag = raw & ~(EP_TAG_ADDRESS | EP_TAG_LIST);
  if (tag < least || tag >= end) return NULL;
  *rowIdx = p->cursor++;
  p->rowsFrom[1]++;
  char *row = epMessageRows(r->op, message) + (size_t)*rowIdx * r->stride;
  if (raw & EP_TAG_LIST) return sumList(r, row);
  if (raw & EP_TAG_ADDRESS) memcpy(&row, row, sizeof row);
  return row;
}

static void addRow(const reducer_t *r, ep_sum_t *sum, const char *row, const float *weight) {
  if (r->c->quant != EP_QUANT_NVFP4) {
    if (weight) {
      epSumAddWeighted(sum, row, *weight);
    } else {
      epSumAdd(sum, row);
    }
    return;
  }
  float g;
  const uint8_t *packed = (const uint8_t *)row + sizeof g;
  memcpy(&g, row, sizeof g);
  epRowDecodeNvfp4(packed, packed + r->c->width / 2, g, r->c->width, r->decoded);
  if (weight) {
    epSumAddDecodedWeighted(sum, r->decoded, *weight);
  } else {
    epSumAddDecoded(sum, r->decoded);
  }
}

static ep_sum_t sumInto(const reducer_t *r, int level, void *out) {
  ep_sum_t sum = {.dtype = r->c->dtype, .width = r->c->width, .acc = r->acc[level]};
  epSumBegin(&sum, out);
  return sum;
}

static void sumByK(const reducer_t *r, int64_t t, void *out) {
  const int32_t *ids = r->op->h->rows[r->op->g->me] + t * r->K;
  ep_sum_t sum = sumInto(r, 0, out);
  int64_t idx;
  for (int k = 0; k < r->K; k++) {
    if (ids[k] < 0) continue;
    int64_t tag = t * r->K + k;
    const char *row = takeRow(r, ids[k] / r->L, tag, tag + 1, &idx);
    if (row) addRow(r, &sum, row, &r->c->weights[tag]);
  }
  epSumEnd(&sum);
}

static void sumAsNamed(const reducer_t *r, int64_t t, void *out) {
  const int32_t *ids = r->op->h->rows[r->op->g->me] + t * r->K;
  ep_sum_t sum = sumInto(r, 0, out);
  int64_t idx;
  for (int k = 0; k < r->K; k++) {
    if (ids[k] < 0) continue;
    const char *row = takeRow(r, ids[k] / r->L, t * r->K, (t + 1) * r->K, &idx);
    if (row) addRow(r, &sum, row, NULL);
  }
  epSumEnd(&sum);
}

/* Weights of one more row of the token: each k comes from one rank only, the others gave 0. */
static void mergeWeights(const reducer_t *r, int sender, int64_t rowIdx, int64_t t, int tokenOwner,
                         float *out) {
  if (!out) return;
  const float *from =
      epMessageWeights(r->op, (char *)(uintptr_t)r->op->g->peers[sender].message) + rowIdx * r->K;
  const int32_t *ids = r->op->h->rows[tokenOwner] + t * r->K;
  int first = sender / r->op->g->G * r->op->g->G, G = r->op->g->G, me = r->op->g->me;
  int relayed = first != me / G * G; /* a relay's row speaks for its whole node */
  for (int k = 0; k < r->K; k++) {
    int rank = ids[k] < 0 ? -1 : ids[k] / r->L;
    if (rank == sender || (relayed && rank >= first && rank < first + G)) out[k] = from[k];
  }
}

/* Adds the rows of ranks [first, first + n) to the sum; how many there were. */
static int addRanks(const reducer_t *r, ep_sum_t *sum, int first, int n, int64_t t, int owner,
                    float *weights) {
  int64_t idx;
  int count = 0;
  for (int s = first; s < first + n; s++) {
    const char *row = takeRow(r, s, t * r->K, (t + 1) * r->K, &idx);
    if (!row) continue;
    addRow(r, sum, row, NULL);
    mergeWeights(r, s, idx, t, owner, weights);
    count++;
  }
  return count;
}

static void sumByRank(const reducer_t *r, int64_t t, void *out, float *weights) {
  ep_sum_t sum = sumInto(r, 0, out);
  addRanks(r, &sum, 0, r->op->g->R, t, r->op->g->me, weights);
  epSumEnd(&sum);
}

static void sumByNode(const reducer_t *r, int64_t t, void *out, float *weights) {
  ep_cpu_group_t *g = r->op->g;
  int myNode = g->me / g->G, rail = g->me % g->G;
  ep_sum_t sum = sumInto(r, 1, out);
  for (int n = 0; n < g->M; n++) {
    if (n != myNode) {
      addRanks(r, &sum, n * g->G + rail, 1, t, g->me, weights);
      continue;
    }
    ep_sum_t node = sumInto(r, 0, r->nodeRow);
    int count = addRanks(r, &node, n * g->G, g->G, t, g->me, weights);
    epSumEnd(&node);
    if (count) epSumAdd(&sum, r->nodeRow);
  }
  epSumEnd(&sum);
}

void epReduceChunk(const ep_op_t *op, const ep_combine_call_t *c, int64_t chunk) {
  reducer_t r = makeReducer(op, c);
  trefoil_mode_t mode = op->h->handle->mode;
  int64_t C = op->a->sizing.chunkTokens, first = chunk * C, end = first + C;
  if (end > c->numTokens) end = c->numTokens;
  for (int64_t t = first; t < end; t++) {
    char *out = (char *)c->out + (size_t)t * r.rowBytes;
    float *weights = c->backward ? c->outWeights + t * r.K : NULL;
    if (weights) memset(weights, 0, (size_t)r.K * sizeof *weights);
    if (mode == TREFOIL_LL_EXPERT_MAJOR && !epPartial(op, c)) {
      sumByK(&r, t, out);
    } else if (mode == TREFOIL_LL_RANK_MAJOR) {
      sumAsNamed(&r, t, out);
    } else if (epIsHt(op->g->group) && op->g->M > 1) {
      sumByNode(&r, t, out, weights);
    } else {
      sumByRank(&r, t, out, weights);
    }
  }
}

/* This node's partial of another node's tokens. */
void epRelayChunk(const ep_op_t *op, const ep_combine_call_t *c, int origin, int64_t chunk,
                  char *message) {
  reducer_t r = makeReducer(op, c);
  ep_cpu_group_t *g = op->g;
  int64_t C = op->a->sizing.chunkTokens, first = chunk * C, end = first + C, count = 0;
  int64_t *tags = epMessageTags(op, message);
  float *weights = epMessageWeights(op, message);
  char *rows = epMessageRows(op, message);
  if (end > op->h->numTokens[origin]) end = op->h->numTokens[origin];
  for (int64_t t = first; t < end; t++) {
    float *w = c->backward ? weights + count * r.K : NULL;
    if (w) memset(w, 0, (size_t)r.K * sizeof *w);
    ep_sum_t sum = sumInto(&r, 0, rows + (size_t)count * r.stride);
    if (!addRanks(&r, &sum, g->me / g->G * g->G, g->G, t, origin, w)) continue;
    epSumEnd(&sum);
    tags[count++] = t * r.K;
  }
  ep_message_t *head = (ep_message_t *)message;
  head->count = count;
  head->rowBytes = (int64_t)epWireBytes(c);
}
