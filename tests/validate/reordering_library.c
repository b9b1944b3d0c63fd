/* A library that uses what level order-free leaves open, or a little more. It forwards to the real one
 * (TREFOIL_FAULT_LIBRARY). LL: after a dispatch the rows of each zone go into another order, with what
 * lies beside them; before a combine the rows come back from it; sums are off by one unit of the wire
 * type's last place. HT flat: after a dispatch what is past the slots that arrive is noise.
 * TREFOIL_REORDER says what it does wrong besides, each time it can:
 *   zones      two rows of different zones change places
 *   extra      a row stands in the first unused slot of its zone, too, and is not counted
 *   twice      a row stands in the place of another one of its zone
 *   side-data  rows move, their side data (weights, ids, scales) does not
 *   sums       a sum is off by far more than its bound
 *   arrived    HT flat: the last slot that arrives has noise for weights, too
 *   abort      the third dispatch ends the process
 *   refuse     every third dispatch returns ncclInvalidArgument */
#include "real_library.h"

#include <nccl_ep.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static int wrong(const char *how) {
  const char *what = getenv("TREFOIL_REORDER");
  return what && !strcmp(what, how);
}

/* ---- Handles ---- */

typedef struct shape {
  int isLow, ranks, tokens, experts; /* of the group */
} shape_t;
typedef struct known {
  void *object;
  shape_t shape;
  ncclEpLayout_t layout;
  int64_t *to; /* slot of the real library -> ours, since the last dispatch */
  int64_t numSlots;
  void *pending; /* the work that a Complete will bring */
} known_t;
enum { MAX_KNOWN = 4096 };
static known_t table[MAX_KNOWN];
static int numKnown;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static known_t *remember(void *object, shape_t shape, ncclEpLayout_t layout) {
  pthread_mutex_lock(&lock);
  known_t *k = &table[numKnown++ % MAX_KNOWN];
  *k = (known_t){.object = object, .shape = shape, .layout = layout};
  pthread_mutex_unlock(&lock);
  return k;
}
static known_t *knownOf(void *object) {
  known_t *k = NULL;
  pthread_mutex_lock(&lock);
  for (int i = numKnown - 1, left = MAX_KNOWN; i >= 0 && left > 0 && !k; i--, left--)
    if (table[i % MAX_KNOWN].object == object) k = &table[i % MAX_KNOWN];
  pthread_mutex_unlock(&lock);
  return k;
}

/* ---- Rows ---- */

static size_t elementBytes(ncclDataType_t type) {
  static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1, 1};
  return bytes[type];
}

typedef struct rows {
  uint8_t *data;
  size_t rowBytes;
} rows_t;

static rows_t rowsOf(const ncclEpTensor_t *t) {
  if (!t || !t->data) return (rows_t){NULL, 0};
  return (rows_t){t->data, elementBytes(t->datatype) * t->sizes[t->ndim - 1]};
}

static void permute(rows_t r, const int64_t *to, int64_t n, int back) {
  if (!r.data) return;
  uint8_t *copy = malloc(r.rowBytes * (size_t)n + 1);
  memcpy(copy, r.data, r.rowBytes * (size_t)n);
  for (int64_t i = 0; i < n; i++)
    memcpy(r.data + r.rowBytes * (size_t)(back ? i : to[i]),
           copy + r.rowBytes * (size_t)(back ? to[i] : i), r.rowBytes);
  free(copy);
}

typedef struct work {
  known_t *handle;
  rows_t tokens, sideData[3];
  const int32_t *counters; /* of the zones */
  int64_t numZones, zoneSlots;
  size_t sums; /* combine: elements of the output */
  ncclDataType_t type;
} work_t;

/* Rotates each zone's rows; the seed is what the first row holds, so that replays differ. */
static void chooseOrder(work_t *w) {
  known_t *h = w->handle;
  h->numSlots = w->numZones * w->zoneSlots;
  free(h->to);
  h->to = NULL;
  if (!w->counters) { /* where a zone ends is not known: the order stays */
    h->numSlots = 0;
    return;
  }
  h->to = malloc(sizeof *h->to * (size_t)(h->numSlots + 1));
  for (int64_t i = 0; i < h->numSlots; i++) h->to[i] = i;
  for (int64_t z = 0; z < w->numZones; z++) {
    int64_t first = z * w->zoneSlots, n = w->counters[z];
    if (n < 2) continue;
    int64_t by = 1 + w->tokens.data[(size_t)first * w->tokens.rowBytes] % (n - 1);
    for (int64_t i = 0; i < n; i++) h->to[first + i] = first + (i + by) % n;
  }
}

static void swapRows(rows_t r, int64_t a, int64_t b) {
  uint8_t *x = r.data + r.rowBytes * (size_t)a, *y = r.data + r.rowBytes * (size_t)b;
  for (size_t i = 0; i < r.rowBytes; i++) {
    uint8_t keep = x[i];
    x[i] = y[i];
    y[i] = keep;
  }
}

static void spoilRows(work_t *w) {
  rows_t r = w->tokens;
  for (int64_t z = 0; z < w->numZones; z++) {
    int64_t first = z * w->zoneSlots, n = w->counters[z];
    if (wrong("twice") && n > 1)
      memcpy(r.data + r.rowBytes * (size_t)(first + 1), r.data + r.rowBytes * (size_t)first,
             r.rowBytes);
    if (wrong("extra") && n > 0 && n < w->zoneSlots)
      memcpy(r.data + r.rowBytes * (size_t)(first + n), r.data + r.rowBytes * (size_t)first,
             r.rowBytes);
    if (wrong("zones") && n > 0)
      for (int64_t y = z + 1; y < w->numZones; y++)
        if (w->counters[y] > 0) {
          swapRows(r, first, y * w->zoneSlots);
          return;
        }
  }
}

static void afterDispatch(void *context) {
  work_t *w = context;
  chooseOrder(w);
  if (!w->counters) return;
  permute(w->tokens, w->handle->to, w->handle->numSlots, 0);
  for (int i = 0; i < 3 && !wrong("side-data"); i++)
    permute(w->sideData[i], w->handle->to, w->handle->numSlots, 0);
  spoilRows(w);
}

static void beforeCombine(void *context) {
  work_t *w = context;
  permute(w->tokens, w->handle->to, w->handle->numSlots, 1);
  permute(w->sideData[0], w->handle->to, w->handle->numSlots, 1);
}

/* The input is given back as it was; sums change in their last place. */
static void afterCombine(void *context) {
  work_t *w = context;
  permute(w->tokens, w->handle->to, w->handle->numSlots, 0);
  permute(w->sideData[0], w->handle->to, w->handle->numSlots, 0);
  uint8_t *out = w->sideData[1].data;
  size_t b = elementBytes(w->type);
  for (size_t i = 0; i < w->sums; i++) {
    uint32_t bits = 0;
    memcpy(&bits, out + b * i, b);
    if (bits & 1) bits ^= 1; /* towards zero by one place, or not at all */
    if (wrong("sums") && i == 0) bits ^= (uint32_t)1 << (8 * b - 3);
    memcpy(out + b * i, &bits, b);
  }
}

/* ---- Past the slots that arrive ---- */

typedef struct past {
  uint8_t *weights, *ids;
  size_t numRows, topk, idBytes;
  rows_t tokens;
} past_t;

/* From the last row on: rows without an expert of this rank. */
static void spoilPast(void *context) {
  const past_t *p = context;
  static const uint8_t none[8] = {255, 255, 255, 255, 255, 255, 255, 255};
  for (size_t row = p->numRows; row-- > 0;) {
    uint8_t *ids = p->ids + row * p->topk * p->idBytes;
    int arrived = 0;
    for (size_t k = 0; k < p->topk; k++) arrived |= memcmp(ids + k * p->idBytes, none, p->idBytes);
    if (!arrived) memset(ids, 0x5a, p->topk * p->idBytes);
    if (!arrived && p->tokens.data)
      memset(p->tokens.data + row * p->tokens.rowBytes, 0x5a, p->tokens.rowBytes);
    if (!arrived || wrong("arrived")) memset(p->weights + row * p->topk * 4, 0x5a, p->topk * 4);
    if (arrived) return;
  }
}

static void noisePast(const ncclEpDispatchOutputs_t *out, cudaStream_t stream) {
  if (!out->topk_idx || !out->topk_idx->data || !out->topk_weights) return;
  past_t *p = malloc(sizeof *p); /* as long as the process lives: replays use it again */
  *p = (past_t){out->topk_weights->data,
                out->topk_idx->data,
                out->topk_idx->sizes[0],
                out->topk_idx->sizes[1],
                elementBytes(out->topk_idx->datatype),
                rowsOf(out->tokens)};
  if (p->weights) cudaLaunchHostFunc(stream, spoilPast, p);
}

/* ---- The calls ---- */

ncclResult_t ncclEpGetVersion(int *version) {
  return REAL(ncclEpGetVersion)(version);
}
ncclResult_t ncclEpCreateGroup(ncclEpGroup_t *group, ncclComm_t comm,
                               const ncclEpGroupConfig_t *config) {
  ncclResult_t rc = REAL(ncclEpCreateGroup)(group, comm, config);
  int ranks = 1;
  ncclCommCount(comm, &ranks);
  shape_t s = {config->algorithm == NCCL_EP_ALGO_LOW_LATENCY, ranks,
               (int)config->max_dispatch_tokens_per_rank,
               ((int)config->num_experts + ranks - 1) / ranks};
  if (rc == ncclSuccess) remember(*group, s, NCCL_EP_LAYOUT_UNSET);
  return rc;
}
ncclResult_t ncclEpGroupDestroy(ncclEpGroup_t group) {
  return REAL(ncclEpGroupDestroy)(group);
}
ncclResult_t ncclEpHandleMemSize(ncclEpGroup_t group, ncclEpLayout_t layout,
                                 const ncclEpHandleConfig_t *config, size_t *size, int topk) {
  return REAL(ncclEpHandleMemSize)(group, layout, config, size, topk);
}
ncclResult_t ncclEpInitHandle(ncclEpHandle_t *handle, ncclEpGroup_t group, ncclEpLayout_t layout,
                              const ncclEpHandleConfig_t *config, int topk,
                              const ncclEpTensor_t *memory) {
  ncclResult_t rc = REAL(ncclEpInitHandle)(handle, group, layout, config, topk, memory);
  if (rc == ncclSuccess) remember(*handle, knownOf(group)->shape, layout);
  return rc;
}
ncclResult_t ncclEpCreateHandle(ncclEpHandle_t *handle, ncclEpGroup_t group, ncclEpLayout_t layout,
                                const ncclEpTensor_t *idx, const ncclEpLayoutInfo_t *info,
                                const ncclEpHandleConfig_t *config, cudaStream_t stream) {
  ncclResult_t rc = REAL(ncclEpCreateHandle)(handle, group, layout, idx, info, config, stream);
  if (rc == ncclSuccess) remember(*handle, knownOf(group)->shape, layout);
  return rc;
}
ncclResult_t ncclEpHandleDestroy(ncclEpHandle_t handle) {
  return REAL(ncclEpHandleDestroy)(handle);
}
ncclResult_t ncclEpUpdateHandle(ncclEpHandle_t handle, const ncclEpTensor_t *idx,
                                const ncclEpLayoutInfo_t *info, cudaStream_t stream) {
  return REAL(ncclEpUpdateHandle)(handle, idx, info, stream);
}

/* Work as long as the process lives: replays use it again. */
static work_t *newWork(known_t *handle, const ncclEpTensor_t *tokens) {
  work_t *w = calloc(1, sizeof *w);
  w->handle = handle;
  w->tokens = rowsOf(tokens);
  return w;
}

ncclResult_t ncclEpDispatch(ncclEpHandle_t handle, const ncclEpDispatchInputs_t *in,
                            const ncclEpDispatchOutputs_t *out, const ncclEpLayoutInfo_t *info,
                            const ncclEpDispatchConfig_t *config, cudaStream_t stream) {
  static atomic_int numCalls;
  int number = atomic_fetch_add(&numCalls, 1);
  if (wrong("abort") && number >= 8) abort();
  if (wrong("refuse") && number % 6 > 3) return ncclInvalidArgument;
  ncclResult_t rc = REAL(ncclEpDispatch)(handle, in, out, info, config, stream);
  known_t *k = knownOf(handle);
  int isRank = k->layout == NCCL_EP_LAYOUT_RANK_MAJOR;
  const ncclEpTensor_t *counters =
      info ? isRank ? info->src_rank_counters : info->expert_counters : NULL;
  if (rc == ncclSuccess && !k->shape.isLow) noisePast(out, stream);
  if (rc != ncclSuccess || !k->shape.isLow || !out->tokens->data) return rc;
  work_t *w = newWork(k, out->tokens);
  w->sideData[0] = rowsOf(out->scales);
  w->sideData[1] = rowsOf(out->topk_weights);
  w->sideData[2] = rowsOf(out->topk_idx);
  w->counters = counters ? counters->data : NULL;
  w->numZones = isRank ? k->shape.ranks : k->shape.experts;
  w->zoneSlots = isRank ? k->shape.tokens : k->shape.ranks * k->shape.tokens;
  if (config && config->send_only) {
    k->pending = w;
    return rc;
  }
  cudaLaunchHostFunc(stream, afterDispatch, w);
  return rc;
}

ncclResult_t ncclEpCombine(ncclEpHandle_t handle, const ncclEpCombineInputs_t *in,
                           const ncclEpCombineOutputs_t *out, const ncclEpCombineConfig_t *config,
                           cudaStream_t stream) {
  known_t *k = knownOf(handle);
  int isMine = k->shape.isLow && in->tokens->data;
  work_t *w = isMine ? newWork(k, in->tokens) : NULL;
  if (w) {
    w->sideData[0] = rowsOf(in->scales);
    w->sideData[1] = rowsOf(out->tokens);
    w->type = out->tokens->datatype;
    w->sums = w->sideData[1].data ? out->tokens->sizes[0] * out->tokens->sizes[1] : 0;
    cudaLaunchHostFunc(stream, beforeCombine, w);
  }
  ncclResult_t rc = REAL(ncclEpCombine)(handle, in, out, config, stream);
  if (w && config && config->send_only) w->sums = 0; /* they come later */
  if (w) cudaLaunchHostFunc(stream, afterCombine, w);
  return rc;
}

ncclResult_t ncclEpComplete(ncclEpHandle_t handle, const ncclEpCompleteConfig_t *config,
                            cudaStream_t stream) {
  ncclResult_t rc = REAL(ncclEpComplete)(handle, config, stream);
  known_t *k = knownOf(handle);
  if (k->pending) cudaLaunchHostFunc(stream, afterDispatch, k->pending);
  k->pending = NULL;
  return rc;
}
ncclResult_t ncclEpMaskQuery(ncclEpGroup_t group, int *mask, cudaStream_t stream) {
  return REAL(ncclEpMaskQuery)(group, mask, stream);
}
ncclResult_t ncclEpMaskUpdate(ncclEpGroup_t group, const int *mask, cudaStream_t stream) {
  return REAL(ncclEpMaskUpdate)(group, mask, stream);
}
ncclResult_t ncclEpMaskClean(ncclEpGroup_t group, cudaStream_t stream) {
  return REAL(ncclEpMaskClean)(group, stream);
}
ncclResult_t ncclEpGetAsyncError(ncclEpGroup_t group, int *flag) {
  return REAL(ncclEpGetAsyncError)(group, flag);
}
ncclResult_t ncclEpErrorClear(ncclEpGroup_t group) {
  return REAL(ncclEpErrorClear)(group);
}
