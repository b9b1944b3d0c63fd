/* Summing one chunk of messages: at the origin into the caller's tensor, at a relay (HT across
 * nodes) into a message of its own. Orders are the contract's (docs/spec.md): LL expert-major by
 * ascending k, LL rank-major by ranks as the token's row first names them, partial sums and HT by
 * ascending rank, across nodes each node's partial first, then nodes.
 *
 * Every message is sorted by tag, so a cursor per sender is all that is needed. */
#include <string.h>

#include "api/cpu/cpu.h"
#include "ref/row.h"

/* The rows of a sum. At most K of them, and no group without rows. */
typedef struct terms {
  int numRows, numGroups, hasLists;
  const void *rows[EP_MAX_TOPK];
  float weights[EP_MAX_TOPK];
  int groups[EP_MAX_TOPK]; /* rows of each rank's message */
} terms_t;

typedef struct reducer {
  const ep_op_t *op;
  const ep_combine_call_t *c;
  int K, L;
  size_t rowBytes, stride;
  terms_t *terms;
  char *nodeRow;  /* own node's partial */
  float *acc;     /* NVFP4: sum, */
  float *decoded; /* and a row of it */
} reducer_t;

static reducer_t makeReducer(const ep_op_t *op, const ep_combine_call_t *c, terms_t *terms) {
  const ep_sizing_t *s = &op->a->sizing;
  char *scratch = op->a->scratch;
  reducer_t r = {.op = op, .c = c, .K = (int)op->h->head->topk, .terms = terms};
  r.L = op->h->layout.numLocalExperts;
  r.rowBytes = (size_t)c->width * trefoilDtypeBytes(c->dtype);
  r.stride = s->rowStride;
  r.acc = (float *)scratch;
  r.decoded = (float *)(scratch + 2 * s->rowStride);
  r.nodeRow = scratch + 4 * s->rowStride;
  return r;
}

/* The sender's next row if its tag is in [least, end), and moves on; else NULL. *raw: the tag's bits. */
static const char *takeRow(const reducer_t *r, int sender, int64_t least, int64_t end,
                           int64_t *rowIdx, int64_t *raw) {
  ep_peer_t *p = &r->op->g->peers[sender];
  char *message = (char *)(uintptr_t)p->message;
  if (!message) return NULL;
  const ep_message_t *head = (const ep_message_t *)message;
  if (p->cursor >= head->count) return NULL;
  *raw = epMessageTags(r->op, message)[p->cursor];
  int64_t tag = *raw & ~(EP_TAG_ADDRESS | EP_TAG_LIST);
  if (tag < least || tag >= end) return NULL;
  *rowIdx = p->cursor++;
  p->rowsFrom[1]++;
  if (head->counts) epTook(r->op, sender, (uint64_t)head->rowBytes);
  const char *row = epMessageRows(r->op, message) + (size_t)*rowIdx * r->stride;
  if (*raw & EP_TAG_ADDRESS) memcpy(&row, row, sizeof row);
  return row;
}

static void beginTerms(terms_t *t) {
  t->numRows = t->numGroups = t->hasLists = 0;
}

/* Adds the sender's row, or the rows that it gives by address as a group; 0: there is none. */
static int addTerm(const reducer_t *r, int sender, int64_t least, int64_t end, int64_t *rowIdx) {
  terms_t *t = r->terms;
  int64_t raw, terms = 1;
  if (t->numRows >= r->K) return 0; /* only where a masked rank overwrites what is read */
  const char *row = takeRow(r, sender, least, end, rowIdx, &raw);
  if (!row) return 0;
  if (raw & EP_TAG_LIST) {
    memcpy(&terms, row, sizeof terms);
    memcpy(&t->rows[t->numRows], row + sizeof terms, (size_t)terms * sizeof *t->rows);
    t->hasLists = 1;
  } else {
    t->rows[t->numRows] = row;
  }
  t->groups[t->numGroups++] = (int)terms;
  t->numRows += (int)terms;
  return 1;
}

static void sumTerms(const reducer_t *r, const float *weights, void *out) {
  const terms_t *t = r->terms;
  ep_terms_t sum = {.dtype = r->c->dtype,
                    .width = r->c->width,
                    .rows = t->rows,
                    .weights = weights,
                    .groups = t->hasLists ? t->groups : NULL,
                    .numRows = t->numRows,
                    .numGroups = t->numGroups};
  epSumTerms(&sum, out);
}

static void addDecoded(const reducer_t *r, ep_sum_t *sum, const char *row, const float *weight) {
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

/* LL, in the order of the token's entries: expert-major a weighted row for each, rank-major a row of
 * each rank that is named. */
static void sumByK(const reducer_t *r, int64_t t, void *out) {
  const int32_t *ids = r->op->h->rows[r->op->g->me] + t * r->K;
  int exact = r->op->h->handle->mode == TREFOIL_LL_EXPERT_MAJOR,
      coded = r->c->quant == EP_QUANT_NVFP4;
  terms_t *terms = r->terms;
  ep_sum_t sum = {.dtype = r->c->dtype, .width = r->c->width, .acc = r->acc};
  int64_t idx;
  if (coded) epSumBegin(&sum, out);
  beginTerms(terms);
  for (int k = 0; k < r->K; k++) {
    if (ids[k] < 0) continue;
    int64_t least = exact ? t * r->K + k : t * r->K, end = exact ? least + 1 : least + r->K;
    if (!addTerm(r, ids[k] / r->L, least, end, &idx)) continue;
    int last = terms->numRows - 1;
    if (exact) terms->weights[last] = r->c->weights[t * r->K + k];
    if (coded) addDecoded(r, &sum, terms->rows[last], exact ? &terms->weights[last] : NULL);
  }
  if (coded) {
    epSumEnd(&sum);
  } else {
    sumTerms(r, exact ? terms->weights : NULL, out);
  }
}

/* Weights of one more row of the token: each k comes from one rank only, the others gave 0. */
static void mergeWeights(const reducer_t *r, int sender, int64_t rowIdx, int64_t t, int tokenOwner,
                         float *out) {
  if (!out) return;
  const float *from =
      epMessageWeights(r->op, (char *)(uintptr_t)r->op->g->peers[sender].message) + rowIdx * r->K;
  const int32_t *ids = r->op->h->rows[tokenOwner] + t * r->K;
  int first = sender / r->op->g->G * r->op->g->G, G = r->op->g->G, me = r->op->g->me;
  int relayed = first != me / G * G; /* a relay's row stands for its whole node */
  for (int k = 0; k < r->K; k++) {
    int rank = ids[k] < 0 ? -1 : ids[k] / r->L;
    if (rank == sender || (relayed && rank >= first && rank < first + G)) out[k] = from[k];
  }
}

/* Adds the rows of ranks [first, first + n) to the terms. */
static void addRanks(const reducer_t *r, int first, int n, int64_t t, int owner, float *weights) {
  int64_t idx;
  for (int s = first; s < first + n; s++) {
    if (addTerm(r, s, t * r->K, (t + 1) * r->K, &idx)) mergeWeights(r, s, idx, t, owner, weights);
  }
}

static void sumByRank(const reducer_t *r, int64_t t, void *out, float *weights) {
  beginTerms(r->terms);
  addRanks(r, 0, r->op->g->R, t, r->op->g->me, weights);
  sumTerms(r, NULL, out);
}

static void sumByNode(const reducer_t *r, int64_t t, void *out, float *weights) {
  ep_cpu_group_t *g = r->op->g;
  int myNode = g->me / g->G, rail = g->me % g->G;
  terms_t *terms = r->terms;
  beginTerms(terms);
  addRanks(r, myNode * g->G, g->G, t, g->me, weights);
  int here = terms->numGroups > 0;
  if (here) sumTerms(r, NULL, r->nodeRow);
  beginTerms(terms);
  for (int n = 0; n < g->M; n++) {
    if (n != myNode) {
      addRanks(r, n * g->G + rail, 1, t, g->me, weights);
    } else if (here) {
      terms->rows[terms->numRows++] = r->nodeRow;
      terms->groups[terms->numGroups++] = 1;
    }
  }
  sumTerms(r, NULL, out);
}

void epReduceChunk(const ep_op_t *op, const ep_combine_call_t *c, int64_t chunk) {
  terms_t terms;
  reducer_t r = makeReducer(op, c, &terms);
  int64_t C = op->a->sizing.chunkTokens, first = chunk * C, end = first + C;
  if (end > c->numTokens) end = c->numTokens;
  for (int64_t t = first; t < end; t++) {
    char *out = (char *)c->out + (size_t)t * r.rowBytes;
    float *weights = c->backward ? c->outWeights + t * r.K : NULL;
    if (weights) memset(weights, 0, (size_t)r.K * sizeof *weights);
    if (!epIsHt(op->g->group) && !epPartial(op, c)) {
      sumByK(&r, t, out);
    } else if (op->g->M > 1 && epIsHt(op->g->group)) {
      sumByNode(&r, t, out, weights);
    } else {
      sumByRank(&r, t, out, weights);
    }
  }
}

/* This node's partial of another node's tokens. */
void epRelayChunk(const ep_op_t *op, const ep_combine_call_t *c, int origin, int64_t chunk,
                  char *message) {
  terms_t terms;
  reducer_t r = makeReducer(op, c, &terms);
  ep_cpu_group_t *g = op->g;
  int64_t C = op->a->sizing.chunkTokens, first = chunk * C, end = first + C, count = 0;
  int64_t *tags = epMessageTags(op, message);
  float *weights = epMessageWeights(op, message);
  char *rows = epMessageRows(op, message);
  if (end > op->h->numTokens[origin]) end = op->h->numTokens[origin];
  for (int64_t t = first; t < end; t++) {
    float *w = c->backward ? weights + count * r.K : NULL;
    if (w) memset(w, 0, (size_t)r.K * sizeof *w);
    beginTerms(&terms);
    addRanks(&r, g->me / g->G * g->G, g->G, t, origin, w);
    if (!terms.numGroups) continue;
    sumTerms(&r, NULL, rows + (size_t)count * r.stride);
    tags[count++] = t * r.K;
  }
  ep_message_t *head = (ep_message_t *)message;
  head->count = count;
  head->counts = op->counts;
  head->rowBytes = (int64_t)epWireBytes(c);
  head->meaning = epMeaning(c->backward, c->quant, c->dtype);
  for (int s = g->me / g->G * g->G; s < (g->me / g->G + 1) * g->G; s++) {
    const ep_message_t *part = (const ep_message_t *)g->peers[s].message;
    if (part->meaning == EP_MEANING_REFUSED) head->meaning = EP_MEANING_REFUSED;
  }
}
