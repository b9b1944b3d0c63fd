/* The first difference in words. A wrong row is looked up among everything the operation could have
 * put there, so that the message says where it came from: payloads tell (rank, token) by content. */
#include "validate/check_report.h"

#include "trefoil/numerics.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct writer {
  char *text;
  size_t bytes, used;
} writer_t;

static void put(writer_t *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void put(writer_t *w, const char *format, ...) {
  va_list ap;
  if (w->used >= w->bytes) return;
  va_start(ap, format);
  int n = vsnprintf(w->text + w->used, w->bytes - w->used, format, ap);
  va_end(ap);
  if (n > 0) w->used += (size_t)n;
}

/* Bits of an element, as a number. */
static uint64_t bitsOf(const uint8_t *p, size_t bytes) {
  uint64_t bits = 0;
  for (size_t i = 0; i < bytes && i < 8; i++) bits |= (uint64_t)p[i] << 8 * i;
  return bits;
}

const char *epFormatValue(char text[EP_VALUE_TEXT], trefoil_dtype_t dtype, const void *element) {
  size_t bytes = trefoilDtypeBytes(dtype);
  uint64_t bits = bitsOf(element, bytes);
  float pair[2] = {0, 0};
  double wide;
  switch (dtype) {
  case TREFOIL_INT32:
    snprintf(text, EP_VALUE_TEXT, "%lld", (long long)(int32_t)bits);
    return text;
  case TREFOIL_INT64:
    snprintf(text, EP_VALUE_TEXT, "%lld", (long long)bits);
    return text;
  case TREFOIL_F64:
    memcpy(&wide, element, 8);
    snprintf(text, EP_VALUE_TEXT, "0x%016llx (%.17g)", (unsigned long long)bits, wide);
    return text;
  case TREFOIL_FP4X2:
    (void)trefoilWiden(dtype, element, 2, pair);
    snprintf(text, EP_VALUE_TEXT, "0x%02llx (%g and %g)", (unsigned long long)bits, (double)pair[0],
             (double)pair[1]);
    return text;
  default:
    if (trefoilWiden(dtype, element, 1, pair) == TREFOIL_OK)
      snprintf(text, EP_VALUE_TEXT, "0x%0*llx (%.*g)", (int)(2 * bytes), (unsigned long long)bits,
               dtype == TREFOIL_F32 ? 9 : 5, (double)pair[0]);
    else
      snprintf(text, EP_VALUE_TEXT, "%llu", (unsigned long long)bits);
    return text;
  }
}

static void putValue(writer_t *w, trefoil_dtype_t dtype, const uint8_t *element) {
  char text[EP_VALUE_TEXT];
  put(w, "%s", epFormatValue(text, dtype, element));
}

typedef struct difference {
  const ep_check_case_t *c;
  const ep_check_op_t *op;
  const ep_check_region_t *region;
  const ep_check_images_t *images;
  ep_check_dims_t dims;
  int round, rank;
  size_t at;     /* byte in the tensor */
  size_t row;    /* row in the tensor */
  size_t column; /* element in the row */
} difference_t;

/* The operation whose output a byte is: later operations may read an earlier one's region. */
static int isOutput(const ep_check_op_t *op, ep_tensor_id_t tensor, int highThroughput) {
  if (tensor == EP_T_OUT_WEIGHTS && op->kind == EP_OP_COMBINE)
    return highThroughput && op->backward;
  return tensor >= EP_T_OUT_TOKENS && tensor != EP_T_GRAD;
}

/* A row of the dispatch's inputs with this content. */
static int findSource(const difference_t *d, ep_tensor_id_t input, const uint8_t *content,
                      size_t bytes, int *src, int64_t *token) {
  const ep_check_region_t *in = &d->c->regions[d->op->region[input]];
  for (int r = 0; r < d->c->group->shape.numRanks; r++)
    for (int64_t t = 0; t < d->c->routings[d->op->routing].numTokens[r]; t++)
      if (!memcmp(d->images->expected[r] + in->offset + (size_t)t * bytes, content, bytes)) {
        *src = r;
        *token = t;
        return 1;
      }
  return 0;
}

static void putSlot(writer_t *w, const difference_t *d, const trefoil_slot_t *slot) {
  if (slot->src < 0) {
    put(w, slot->expert >= 0 ? "zeros (padding of local expert %d)" : "noise: an unused row",
        slot->expert);
    return;
  }
  put(w, "(rank %d, token %lld", slot->src, (long long)slot->token);
  if (slot->k >= 0) put(w, ", k %d", slot->k);
  put(w, ")");
  if (slot->expert >= 0) put(w, " of local expert %d", slot->expert);
  (void)d;
}

static int slotOfRow(const difference_t *d, trefoil_slot_t *slot) {
  trefoil_case_t rc;
  epReferenceCase(d->c, d->op, d->round, &rc);
  int64_t n = trefoilRefNumSlots(&rc, d->rank);
  *slot = (trefoil_slot_t){-1, -1, -1, -1};
  if ((int64_t)d->row >= n) return n >= 0;
  trefoil_slot_t *slots = malloc(sizeof *slots * (size_t)(n + 1));
  int ok = slots && trefoilRefSlots(&rc, d->rank, slots) == TREFOIL_OK;
  if (ok) *slot = slots[d->row];
  free(slots);
  return ok;
}

static void describeDispatched(writer_t *w, const difference_t *d) {
  const uint8_t *start = d->images->found + d->region->offset + d->row * d->dims.rowBytes;
  const uint8_t *wanted =
      d->images->expected[d->rank] + d->region->offset + d->row * d->dims.rowBytes;
  trefoil_slot_t slot;
  put(w, "slot %zu: expected ", d->row);
  if (slotOfRow(d, &slot)) putSlot(w, d, &slot);
  put(w, ", found ");
  int src;
  int64_t token;
  ep_tensor_id_t input = d->region->tensor == EP_T_OUT_TOKENS ? EP_T_IN_TOKENS : EP_T_IN_SCALES;
  int copies = d->op->quant != TREFOIL_QUANT_E4M3 && d->op->region[input] >= 0;
  if (copies && findSource(d, input, start, d->dims.rowBytes, &src, &token)) {
    put(w, "the row of (rank %d, token %lld)", src, (long long)token);
    return;
  }
  put(w, "a row that is nobody's: element %zu is ", d->column);
  size_t b = trefoilDtypeBytes(d->dims.dtype), at = d->column * b;
  putValue(w, d->dims.dtype, start + at);
  put(w, ", should be ");
  putValue(w, d->dims.dtype, wanted + at);
}

/* A combine's output row that belongs to another token. */
static void describeCombined(writer_t *w, const difference_t *d) {
  size_t rowBytes = d->dims.rowBytes, b = trefoilDtypeBytes(d->dims.dtype);
  const uint8_t *found = d->images->found + d->region->offset;
  const uint8_t *wanted = d->images->expected[d->rank] + d->region->offset;
  put(w, "token %zu of rank %d, element %zu: expected ", d->row, d->rank, d->column);
  putValue(w, d->dims.dtype, wanted + d->row * rowBytes + d->column * b);
  put(w, ", found ");
  putValue(w, d->dims.dtype, found + d->row * rowBytes + d->column * b);
  for (size_t t = 0; t < d->dims.sizes[0]; t++)
    if (t != d->row && !memcmp(wanted + t * rowBytes, found + d->row * rowBytes, rowBytes)) {
      put(w, " (the row that token %zu should have)", t);
      break;
    }
  const int32_t *ids = d->c->routings[d->op->routing].rows[d->round][d->rank];
  int K = d->c->routings[d->op->routing].topk;
  put(w, "; its experts:");
  for (int k = 0; k < K; k++) put(w, " %d", ids[(int64_t)d->row * K + k]);
}

static void describeNumber(writer_t *w, const difference_t *d) {
  size_t b = trefoilDtypeBytes(d->dims.dtype), at = d->row * d->dims.rowBytes + d->column * b;
  const uint8_t *found = d->images->found + d->region->offset + at;
  const uint8_t *wanted = d->images->expected[d->rank] + d->region->offset + at;
  if (d->dims.ndim > 1) put(w, "row %zu, ", d->row);
  put(w, "element %zu: expected ", d->column);
  putValue(w, d->dims.dtype, wanted);
  put(w, ", found ");
  putValue(w, d->dims.dtype, found);
}

/* A model's tensors lie one behind the other. */
static void describeUpdate(writer_t *w, const difference_t *d) {
  const ep_grad_model_t *m = &d->c->group->model;
  int64_t first = 0;
  int t = 0;
  for (; (int64_t)d->column >= first + m->sizes[t]; t++) first += m->sizes[t];
  put(w, "tensor %d at %lld, ", t, (long long)first);
  describeNumber(w, d);
}

static int describeGuard(writer_t *w, const ep_check_case_t *c, const uint8_t *wanted,
                         const uint8_t *found, size_t at) {
  const ep_check_region_t *before = NULL, *after = NULL;
  for (int i = 0; i < c->numRegions; i++) {
    if (c->regions[i].offset <= at) before = &c->regions[i];
    if (c->regions[i].offset > at && !after) after = &c->regions[i];
  }
  put(w, "a guard byte was overwritten, 0x%02x became 0x%02x,", wanted[at], found[at]);
  if (before)
    put(w, " %zu bytes past the start of %s of operation %d (which holds at most %zu)",
        at - before->offset, epTensorName(before->tensor), before->op, before->bytes);
  if (after)
    put(w, "%s %zu bytes before %s of operation %d", before ? "," : "", after->offset - at,
        epTensorName(after->tensor), after->op);
  return before ? 1 + (int)(before - c->regions) : 1;
}

static const char *opName(ep_op_kind_t kind) {
  static const char *const names[] = {
      "Update",    "Dispatch",  "Combine", "Complete",   "MaskUpdate",
      "MaskQuery", "MaskClean", "wait",    "A2SGD step", "A2SGD synchronisation"};
  return names[kind];
}

int epDescribeDifference(const ep_check_case_t *c, int round, int rank,
                         const ep_check_images_t *images, char *text, size_t textBytes) {
  const uint8_t *wanted = images->expected[rank], *found = images->found;
  writer_t w = {text, textBytes, 0};
  size_t at = 0;
  while (at < c->usedBytes && wanted[at] == found[at]) at++;
  if (at == c->usedBytes) return 0;
  difference_t d = {.c = c, .images = images, .round = round, .rank = rank};
  for (int i = 0; i < c->numRegions; i++) {
    const ep_check_region_t *region = &c->regions[i];
    ep_check_dims_t dims;
    epTensorDims(c, &c->ops[region->op], region->tensor, rank, &dims);
    if (at < region->offset || at >= region->offset + dims.bytes) continue;
    d.region = region;
    d.op = &c->ops[region->op];
    d.dims = dims;
    d.at = at - region->offset;
    d.row = d.at / dims.rowBytes;
    d.column = d.at % dims.rowBytes / trefoilDtypeBytes(dims.dtype);
  }
  if (c->captured) put(&w, "replay %d, ", round + 1);
  put(&w, "rank %d, ", rank);
  if (!d.region) {
    return describeGuard(&w, c, wanted, found, at);
  }
  put(&w, "operation %d (%s", d.region->op, opName(d.op->kind));
  if (d.op->handle >= 0) put(&w, ", handle %d", d.op->handle);
  put(&w, "), %s, ", epTensorName(d.region->tensor));
  if (!isOutput(d.op, d.region->tensor, c->group->highThroughput))
    put(&w, "an input was overwritten: byte %zu, 0x%02x became 0x%02x", d.at, wanted[at],
        found[at]);
  else if (d.op->kind == EP_OP_DISPATCH &&
           (d.region->tensor == EP_T_OUT_TOKENS || d.region->tensor == EP_T_OUT_SCALES))
    describeDispatched(&w, &d);
  else if (d.region->tensor == EP_T_OUT_TOKENS)
    describeCombined(&w, &d);
  else if (d.region->tensor == EP_T_UPDATE)
    describeUpdate(&w, &d);
  else
    describeNumber(&w, &d);
  return 1 + (int)(d.region - c->regions);
}

static void describeGradGroup(writer_t *w, const ep_check_group_t *g) {
  put(w, "A2SGD, %d ranks, %s, %s", g->shape.numRanks, trefoilDtypeName(g->model.dtype),
      g->model.scope ? "whole model" : "per tensor");
  if (g->enableMask) put(w, ", masks");
  if (g->useWindow) put(w, ", windows");
  if (g->maxSms) put(w, ", at most %u SMs", g->maxSms);
  if (g->syncPeriod) put(w, ", synchronised every %lld steps", (long long)g->syncPeriod);
  put(w, ", %d tensors:", g->model.numTensors);
  for (int t = 0; t < g->model.numTensors; t++) put(w, " %lld", (long long)g->model.sizes[t]);
}

void epDescribeGroup(const ep_check_group_t *g, char *text, size_t textBytes) {
  writer_t w = {text, textBytes, 0};
  if (g->isGrad) {
    describeGradGroup(&w, g);
    return;
  }
  put(&w, "%s, %d ranks (%d per node), %d experts, top-%d, <= %lld tokens, rows <= %zu bytes",
      g->highThroughput ? "HT" : "LL", g->shape.numRanks, g->shape.ranksPerNode,
      g->shape.numExperts, g->shape.topk, (long long)g->shape.maxTokens, g->maxTokenBytes);
  if (g->highThroughput && g->maxRecv)
    put(&w, ", max_recv %lld %s", (long long)g->maxRecv, g->drop ? "DROP" : "TRAP");
  if (g->highThroughput && !g->maxRecv) put(&w, ", eager");
  if (g->enableMask) put(&w, ", masks");
  if (g->customAlloc) put(&w, ", caller's allocator");
  if (g->partial) put(&w, ", partial combine");
  if (g->useWindow) put(&w, ", windows");
  if (g->zeroCopy) put(&w, ", zero copy %s", g->zeroCopy == NCCL_EP_ZERO_COPY_ON ? "on" : "off");
  for (int i = 0; i < g->numHandles; i++) {
    const ep_check_handle_t *h = &g->handles[i];
    put(&w, "; handle %d: %s, top-%d", i, trefoilModeName(h->mode), h->topk);
    if (h->alignment > 1) put(&w, ", alignment %zu", h->alignment);
    if (h->shareWith >= 0)
      put(&w, ", memory of handle %d", h->shareWith);
    else if (h->ownMemory)
      put(&w, ", caller's memory");
  }
}

void epDescribeScript(const ep_check_case_t *c, char *text, size_t textBytes) {
  static const char *const quants[] = {"", " with caller's scales", " to E4M3", " as NVFP4"};
  writer_t w = {text, textBytes, 0};
  if (c->captured) put(&w, "  captured into a graph, replayed with other contents\n");
  for (int i = 0; i < c->numOps; i++) {
    const ep_check_op_t *op = &c->ops[i];
    put(&w, "  %d %s", i, opName(op->kind));
    if (op->handle >= 0) put(&w, " handle %d", op->handle);
    if (op->kind == EP_OP_UPDATE) {
      put(&w, ", tokens");
      for (int r = 0; r < c->group->shape.numRanks; r++)
        put(&w, " %lld", (long long)c->routings[op->routing].numTokens[r]);
    }
    if (op->kind == EP_OP_DISPATCH || op->kind == EP_OP_COMBINE)
      put(&w, ", %lld x %s%s%s%s", (long long)op->width, trefoilDtypeName(op->dtype),
          quants[op->quant], op->backward ? ", backward" : "", op->sendOnly ? ", send_only" : "");
    if (op->kind == EP_OP_GRAD_STEP) {
      if (op->inPlace) put(&w, ", in place");
      if (op->from < 0) put(&w, ", values %s", epGradValuesName(op->values));
    }
    if (op->kind == EP_OP_GRAD_SYNC) put(&w, ", of step %lld", (long long)op->step);
    if (op->from >= 0) put(&w, ", reads the output of %d", op->from);
    put(&w, "\n");
  }
}
