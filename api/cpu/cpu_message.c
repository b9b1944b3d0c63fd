/* Combine's messages: what an experts' rank has to give back to one origin for one chunk of its
 * tokens. A message describes itself: a tag per row (token * K, plus k where rows are per (token,
 * k)), in HT the backward weights per (row, k), then the rows. So the origin needs to know neither
 * slots nor what was dropped or masked there. */
#include <stdio.h>
#include <string.h>

#include "api/cpu/cpu.h"
#include "ref/row.h"

#define MESSAGE_HEAD 64

int64_t epNumChunks(const ep_op_t *op, int origin) {
  if (!epIsHt(op->g->group)) return 1;
  int64_t C = op->a->sizing.chunkTokens;
  return (op->h->numTokens[origin] + C - 1) / C;
}

char *epMessageAt(const ep_op_t *op, int sender, int ring, uint64_t seq) {
  const ep_sizing_t *s = &op->a->sizing;
  size_t slot = (size_t)ring * (size_t)s->combineSlots + seq % (uint64_t)s->combineSlots;
  return epBufferOf(op, sender, EP_BUFFER_COMBINE_RINGS) + slot * s->ringSlotBytes;
}

int64_t *epMessageTags(const ep_op_t *op, char *message) {
  (void)op;
  return (int64_t *)(message + MESSAGE_HEAD);
}

float *epMessageWeights(const ep_op_t *op, char *message) {
  return (float *)(message + MESSAGE_HEAD + op->a->sizing.ringTagBytes);
}

char *epMessageRows(const ep_op_t *op, char *message) {
  const ep_sizing_t *s = &op->a->sizing;
  return message + MESSAGE_HEAD + s->ringTagBytes + s->ringWeightBytes;
}

const char *epMeaningName(int64_t meaning, char text[60]) {
  static const char *const recipes[] = {"not quantised", "caller's scales", "DS_FP8", "NVFP4"};
  snprintf(text, 60, "%s pass, %s, %s", meaning & 1 ? "backward" : "forward",
           trefoilDtypeName((trefoil_dtype_t)(meaning >> 8)), recipes[meaning >> 1 & 3]);
  return text;
}

size_t epWireBytes(const ep_combine_call_t *c) {
  if (c->quant == EP_QUANT_NVFP4) return (size_t)(c->width / 2 + c->width / 16) + sizeof(float);
  return (size_t)c->width * trefoilDtypeBytes(c->dtype);
}

int epPartial(const ep_op_t *op, const ep_combine_call_t *c) {
  return op->g->group->llPartial && op->h->handle->mode == TREFOIL_LL_EXPERT_MAJOR &&
         c->quant == EP_QUANT_NONE;
}

typedef struct writer {
  const ep_op_t *op;
  const ep_combine_call_t *c;
  int origin, K, L, firstExpert;
  size_t rowBytes, stride;
  const int32_t *ids;   /* of the current token */
  const int64_t *slots; /* */
  int64_t token, count;
  int64_t *tags;
  float *weights;
  char *rows;
  const float *originWeights; /* LL partial: [B, K] */
  int byAddress;              /* HT in one process: rows that need no sum stay where they are */
} writer_t;

static int isLocal(const writer_t *w, int k) {
  return (uint32_t)(w->ids[k] - w->firstExpert) < (uint32_t)w->L && w->slots[k] >= 0;
}

static const char *slotRow(const writer_t *w, int64_t slot) {
  return (const char *)w->c->tokens + (size_t)slot * w->rowBytes;
}

static void copySlot(const writer_t *w, int64_t slot, char *to) {
  if (w->c->quant != EP_QUANT_NVFP4) {
    memcpy(to, slotRow(w, slot), w->rowBytes);
    return;
  }
  float g = w->c->slotScales[slot];
  int64_t width = w->c->width;
  memcpy(to, &g, sizeof g);
  epRowEncodeNvfp4((const uint16_t *)slotRow(w, slot), width, g, (uint8_t *)to + sizeof g,
                   (uint8_t *)to + sizeof g + width / 2);
}

static char *nextRow(writer_t *w, int k) {
  w->tags[w->count] = w->token * w->K + k;
  return w->rows + (size_t)w->count++ * w->stride;
}

static void giveAddress(writer_t *w, int64_t slot) {
  const char *row = slotRow(w, slot);
  memcpy(nextRow(w, 0), &row, sizeof row);
  w->tags[w->count - 1] |= EP_TAG_ADDRESS;
}

/* A row per (token, k). */
static void writeExact(writer_t *w) {
  for (int k = 0; k < w->K; k++) {
    if (isLocal(w, k)) copySlot(w, w->slots[k], nextRow(w, k));
  }
}

/* One row: all local entries share a slot. */
static void writeShared(writer_t *w) {
  for (int k = 0; k < w->K; k++) {
    if (!isLocal(w, k)) continue;
    if (w->byAddress) {
      giveAddress(w, w->slots[k]);
    } else {
      copySlot(w, w->slots[k], nextRow(w, 0));
    }
    return;
  }
}

/* The reader sums: addresses of the rows, ascending k. */
static void giveList(writer_t *w, const void *const *rows, int64_t terms) {
  char *to = nextRow(w, 0);
  w->tags[w->count - 1] |= EP_TAG_LIST;
  memcpy(to, &terms, sizeof terms);
  memcpy(to + sizeof terms, rows, (size_t)terms * sizeof *rows);
}

/* One row: the rank's partial, ascending k, rounded to the wire type. */
static void writeSum(writer_t *w) {
  const void *rows[EP_MAX_TOPK];
  float weights[EP_MAX_TOPK];
  int64_t slot = 0;
  int terms = 0;
  for (int k = 0; k < w->K; k++) {
    if (!isLocal(w, k)) continue;
    slot = w->slots[k];
    if (w->originWeights) weights[terms] = w->originWeights[w->token * w->K + k];
    rows[terms++] = slotRow(w, slot);
  }
  if (terms == 0) return;
  if (w->byAddress && terms == 1) {
    giveAddress(w, slot);
  } else if (w->byAddress && ((size_t)terms + 1) * sizeof(char *) <= w->stride) {
    giveList(w, rows, terms);
  } else {
    ep_terms_t sum = {.dtype = w->c->dtype,
                      .width = w->c->width,
                      .rows = rows,
                      .weights = w->originWeights ? weights : NULL,
                      .numRows = terms};
    epSumTerms(&sum, nextRow(w, 0));
  }
}

/* Backward: the value of each (token, k) whose expert is here; flat slots list them by ascending
 * id. */
static void writeWeights(const writer_t *w, float *out) {
  int flat = w->op->h->handle->mode == TREFOIL_HT_FLAT;
  for (int k = 0; k < w->K; k++) {
    out[k] = 0;
    if (!isLocal(w, k)) continue;
    int before = 0;
    for (int j = 0; j < w->K && flat; j++) before += isLocal(w, j) && w->ids[j] < w->ids[k];
    out[k] = w->c->slotWeights[flat ? w->slots[k] * w->K + before : w->slots[k]];
  }
}

static void writeToken(writer_t *w, trefoil_mode_t mode, int sums) {
  int64_t before = w->count;
  if (sums) {
    writeSum(w);
  } else if (mode == TREFOIL_LL_EXPERT_MAJOR) {
    writeExact(w);
  } else {
    writeShared(w);
  }
  if (w->c->backward && w->count > before) writeWeights(w, w->weights + before * w->K);
}

void epWriteMessage(const ep_op_t *op, const ep_combine_call_t *c, int origin, int64_t chunk,
                    char *message) {
  ep_cpu_handle_t *h = op->h;
  const ep_sizing_t *s = &op->a->sizing;
  int K = (int)h->head->topk, L = h->layout.numLocalExperts;
  writer_t w = {.op = op, .c = c, .origin = origin, .K = K, .L = L};
  w.firstExpert = op->g->me * L;
  w.rowBytes = (size_t)c->width * trefoilDtypeBytes(c->dtype);
  w.stride = s->rowStride;
  w.byAddress = op->g->oneProcess && epIsHt(op->g->group);
  w.tags = epMessageTags(op, message);
  w.weights = epMessageWeights(op, message);
  w.rows = epMessageRows(op, message);
  int partial = epPartial(op, c), sums = partial || h->handle->mode == TREFOIL_HT_EXPERT_MAJOR;
  if (partial) {
    w.originWeights = (const float *)(epBufferOf(op, origin, EP_BUFFER_COMBINE_WEIGHTS) +
                                      op->no % 2 * s->weightBytes);
  }
  int64_t first = chunk * s->chunkTokens, end = first + s->chunkTokens;
  if (end > h->numTokens[origin]) end = h->numTokens[origin];
  if (!epActive(op->g, origin) || op->refuses) end = first;
  for (int64_t t = first; t < end; t++) {
    w.token = t;
    w.ids = h->rows[origin] + t * K;
    w.slots = h->layout.slotOf[origin] + t * K;
    writeToken(&w, h->handle->mode, sums);
  }
  ep_message_t *head = (ep_message_t *)message;
  head->count = w.count;
  head->counts = op->counts;
  head->rowBytes = (int64_t)epWireBytes(c);
  head->meaning = op->refuses ? EP_MEANING_REFUSED : epMeaning(c->backward, c->quant, c->dtype);
}
