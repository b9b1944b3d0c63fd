/* Tensors: their shapes by mode and their places in the image. */
#include "validate/check_case.h"

#include <string.h>

const char *epTensorName(ep_tensor_id_t tensor) {
  static const char *const names[EP_NUM_TENSORS] = {
      "topk_idx",
      "inputs->tokens",
      "inputs->topk_weights",
      "inputs->scales",
      "outputs->tokens",
      "outputs->topk_weights",
      "outputs->scales",
      "outputs->topk_idx",
      "layout_info->expert_counters",
      "layout_info->expert_offsets",
      "layout_info->recv_total_counter",
      "layout_info->src_rank_counters",
      "mask",
      "grad",
      "update",
  };
  return names[tensor];
}

void epReferenceCase(const ep_check_case_t *c, const ep_check_op_t *op, int round,
                     trefoil_case_t *out) {
  const ep_check_group_t *g = c->group;
  const ep_check_handle_t *h = &g->handles[op->handle];
  const ep_check_routing_t *routing = &c->routings[op->routing];
  *out = (trefoil_case_t){
      .routing = {.shape = g->shape,
                  .numTokens = routing->numTokens,
                  .topkIdx = routing->rows[round]},
      .mode = h->mode,
      .width = op->width ? op->width : 1,
      .dtype = op->width ? op->dtype : TREFOIL_BF16,
      .quant = op->quant,
      .roundScales = op->roundScales,
      .backward = op->backward,
      .alignment = h->alignment,
      .globalIds = op->globalIds,
      .maxRecv = g->maxRecv,
      .drop = g->drop,
      .zeroCopyOn = g->zeroCopy == NCCL_EP_ZERO_COPY_ON,
      .combinePartial = g->partial && h->mode == TREFOIL_LL_EXPERT_MAJOR,
      .active = c->numMasks ? c->active : NULL,
  };
  out->routing.shape.topk = h->topk;
  if (op->quant == TREFOIL_QUANT_CALLER)
    out->scaleBytes = (size_t)op->scaleWidth * trefoilDtypeBytes(op->scaleDtype);
}

/* Rows of the HT tensors a rank gives: all that may come, or, eager, all that do. */
static size_t receiveRows(const ep_check_case_t *c, const ep_check_op_t *op, int rank) {
  int64_t rows = c->group->maxRecv ? c->group->maxRecv : c->slots[op->routing][op->handle][rank];
  return (size_t)(rows + op->extraRows);
}

/* Rows of the HT topk tensors: at least what arrives, so that not always all of tokens' rows. */
static size_t weightRows(const ep_check_case_t *c, const ep_check_op_t *op, int rank) {
  size_t rows = receiveRows(c, op, rank);
  size_t least = (size_t)c->slots[op->routing][op->handle][rank];
  if (least == 0 && rows > 0) least = 1; /* both empty or neither */
  return op->payloadKey & 2 ? rows : least;
}

/* The leading dimensions of a received tensor. */
static unsigned receivedShape(const ep_check_case_t *c, const ep_check_op_t *op, int rank,
                              size_t *sizes) {
  const trefoil_shape_t *s = &c->group->shape;
  switch (c->group->handles[op->handle].mode) {
  case TREFOIL_LL_EXPERT_MAJOR:
    sizes[0] = (size_t)trefoilExpertsPerRank(s);
    sizes[1] = (size_t)(s->numRanks * s->maxTokens);
    return 2;
  case TREFOIL_LL_RANK_MAJOR:
    sizes[0] = (size_t)s->numRanks;
    sizes[1] = (size_t)s->maxTokens;
    return 2;
  default:
    sizes[0] = receiveRows(c, op, rank);
    return 1;
  }
}

static void appendRow(ep_check_dims_t *d, int64_t width, trefoil_dtype_t dtype) {
  d->sizes[d->ndim++] = (size_t)width;
  d->dtype = dtype;
}

static void receivedWeights(const ep_check_case_t *c, const ep_check_op_t *op, int rank,
                            ep_check_dims_t *d) {
  const ep_check_handle_t *h = &c->group->handles[op->handle];
  if (h->mode == TREFOIL_LL_RANK_MAJOR) {
    d->ndim = receivedShape(c, op, rank, d->sizes);
    appendRow(d, h->topk, TREFOIL_F32);
    return;
  }
  d->sizes[d->ndim++] = weightRows(c, op, rank);
  d->dtype = TREFOIL_F32;
  if (h->mode == TREFOIL_HT_FLAT) appendRow(d, h->topk, TREFOIL_F32);
}

static size_t counterLength(const ep_check_case_t *c, const ep_check_op_t *op,
                            ep_tensor_id_t tensor) {
  const trefoil_shape_t *s = &c->group->shape;
  size_t n = tensor == EP_T_TOTAL             ? 1
             : tensor == EP_T_SOURCE_COUNTERS ? (size_t)s->numRanks
                                              : (size_t)trefoilExpertsPerRank(s);
  return n + (op->payloadKey & 1); /* longer tensors are allowed */
}

void epTensorDims(const ep_check_case_t *c, const ep_check_op_t *op, ep_tensor_id_t tensor,
                  int rank, ep_check_dims_t *d) {
  int combine = op->kind == EP_OP_COMBINE;
  int K = op->handle >= 0 ? c->group->handles[op->handle].topk : 0;
  int64_t B = op->routing >= 0 ? c->routings[op->routing].numTokens[rank] : 0;
  memset(d, 0, sizeof *d);
  switch (tensor) {
  case EP_T_IDX:
    d->sizes[d->ndim++] = (size_t)B;
    appendRow(d, K, c->routings[op->routing].wideIds ? TREFOIL_INT64 : TREFOIL_INT32);
    break;
  case EP_T_IN_TOKENS:
  case EP_T_OUT_TOKENS:
    if ((tensor == EP_T_OUT_TOKENS) == combine) /* at the source */
      d->sizes[d->ndim++] = (size_t)B;
    else
      d->ndim = receivedShape(c, op, rank, d->sizes);
    appendRow(d, op->width,
              op->quant == TREFOIL_QUANT_E4M3 && tensor == EP_T_OUT_TOKENS ? TREFOIL_E4M3
                                                                           : op->dtype);
    break;
  case EP_T_IN_WEIGHTS:
  case EP_T_OUT_WEIGHTS:
    if ((tensor == EP_T_OUT_WEIGHTS) == combine) {
      d->sizes[d->ndim++] = (size_t)B;
      appendRow(d, K, TREFOIL_F32);
    } else {
      receivedWeights(c, op, rank, d);
    }
    break;
  case EP_T_IN_SCALES:
    if (combine) { /* NVFP4 */
      d->ndim = receivedShape(c, op, rank, d->sizes);
      appendRow(d, 1, TREFOIL_F32);
    } else {
      d->sizes[d->ndim++] = (size_t)B;
      appendRow(d, op->scaleWidth, op->scaleDtype);
    }
    break;
  case EP_T_OUT_SCALES:
    d->ndim = receivedShape(c, op, rank, d->sizes);
    appendRow(d, op->scaleWidth, op->scaleDtype);
    break;
  case EP_T_OUT_IDX:
    if (c->group->highThroughput)
      d->sizes[d->ndim++] = weightRows(c, op, rank);
    else
      d->ndim = receivedShape(c, op, rank, d->sizes);
    appendRow(d, K, c->group->highThroughput ? TREFOIL_INT64 : TREFOIL_INT32);
    break;
  case EP_T_MASK:
    d->sizes[d->ndim++] = (size_t)c->group->shape.numRanks;
    d->dtype = TREFOIL_INT32;
    break;
  case EP_T_GRAD:
  case EP_T_UPDATE:
    appendRow(d, epGradModelElements(&c->group->model), op->dtype);
    break;
  default:
    d->sizes[d->ndim++] = counterLength(c, op, tensor);
    d->dtype = op->kind == EP_OP_UPDATE && op->wideCounters ? TREFOIL_INT64 : TREFOIL_INT32;
    break;
  }
  d->rowBytes = trefoilDtypeBytes(d->dtype) * d->sizes[d->ndim - 1];
  d->bytes = trefoilDtypeBytes(d->dtype);
  for (unsigned i = 0; i < d->ndim; i++) d->bytes *= d->sizes[i];
}

/* Which tensors a call has: one bit each. */
static unsigned tensorsOf(const ep_check_case_t *c, const ep_check_op_t *op) {
#define BIT(t) (1u << (t))
  trefoil_mode_t mode = op->handle >= 0 ? c->group->handles[op->handle].mode : 0;
  int forwardHt = mode >= TREFOIL_HT_FLAT && !op->backward;
  unsigned set = 0;
  switch (op->kind) {
  case EP_OP_UPDATE:
    set = BIT(EP_T_IDX);
    if (mode < TREFOIL_HT_FLAT) break;
    if (op->wantCounters & 1) set |= BIT(EP_T_EXPERT_COUNTERS);
    if ((op->wantCounters & 2) && mode == TREFOIL_HT_EXPERT_MAJOR) set |= BIT(EP_T_EXPERT_OFFSETS);
    if (op->wantCounters & 4) set |= BIT(EP_T_TOTAL);
    break;
  case EP_OP_DISPATCH:
    set = BIT(EP_T_IN_TOKENS) | BIT(EP_T_OUT_TOKENS);
    if (mode == TREFOIL_LL_RANK_MAJOR || forwardHt)
      set |= BIT(EP_T_IN_WEIGHTS) | BIT(EP_T_OUT_WEIGHTS);
    if (mode == TREFOIL_LL_RANK_MAJOR || (forwardHt && mode == TREFOIL_HT_FLAT))
      set |= BIT(EP_T_OUT_IDX);
    if (op->quant == TREFOIL_QUANT_CALLER) set |= BIT(EP_T_IN_SCALES);
    if (op->quant != TREFOIL_QUANT_NONE) set |= BIT(EP_T_OUT_SCALES);
    if (mode == TREFOIL_LL_EXPERT_MAJOR) set |= BIT(EP_T_EXPERT_COUNTERS);
    if (mode == TREFOIL_LL_RANK_MAJOR && op->wantCounters) set |= BIT(EP_T_SOURCE_COUNTERS);
    break;
  case EP_OP_COMBINE:
    set = BIT(EP_T_IN_TOKENS) | BIT(EP_T_OUT_TOKENS);
    if (op->quant == TREFOIL_QUANT_NVFP4) set |= BIT(EP_T_IN_SCALES);
    if (mode == TREFOIL_LL_EXPERT_MAJOR || op->wantCounters) set |= BIT(EP_T_OUT_WEIGHTS);
    if (op->backward) set |= BIT(EP_T_IN_WEIGHTS) | BIT(EP_T_OUT_WEIGHTS);
    break;
  case EP_OP_MASK_QUERY:
    set = BIT(EP_T_MASK);
    break;
  case EP_OP_GRAD_STEP:
    set = BIT(EP_T_UPDATE);
    if (!op->inPlace) set |= BIT(EP_T_GRAD);
    break;
  case EP_OP_GRAD_SYNC:
    set = BIT(EP_T_UPDATE);
    break;
  default:
    break;
  }
#undef BIT
  return set;
}

/* Alignment of a tensor's data: 16 where the meaning asks for it, else sometimes just its element. */
static size_t pickAlignment(const ep_check_case_t *c, const ep_check_op_t *op,
                            ep_tensor_id_t tensor, ep_rng_t *rng) {
  ep_check_dims_t d;
  epTensorDims(c, op, tensor, 0, &d);
  int isRow = tensor == EP_T_IN_TOKENS || tensor == EP_T_OUT_TOKENS || tensor == EP_T_IN_SCALES ||
              tensor == EP_T_OUT_SCALES;
  if (c->group->gpuSubset && isRow) return 16;
  if (op->quant == TREFOIL_QUANT_CALLER || epOneIn(rng, 2)) return 16;
  return trefoilDtypeBytes(d.dtype);
}

static int placeOne(ep_check_case_t *c, int opIdx, ep_tensor_id_t tensor, ep_rng_t *rng) {
  const ep_check_group_t *g = c->group;
  ep_check_op_t *op = &c->ops[opIdx];
  ep_check_dims_t d;
  size_t most = 0;
  for (int r = 0; r < g->shape.numRanks; r++) {
    epTensorDims(c, op, tensor, r, &d);
    if (d.bytes > most) most = d.bytes;
  }
  size_t align = pickAlignment(c, op, tensor, rng);
  size_t guard = (size_t)epRange(rng, 16, 64);
  size_t offset = (c->usedBytes + guard + 15) & ~(size_t)15;
  if (align < 16) offset += align * (size_t)epBelow(rng, (int64_t)(16 / align));
  if (c->numRegions == EP_MAX_REGIONS || offset + most + 64 > g->imageBytes) return 0;
  c->regions[c->numRegions] = (ep_check_region_t){offset, most, opIdx, tensor};
  op->region[tensor] = c->numRegions++;
  c->usedBytes = offset + most;
  return 1;
}

/* Where an earlier operation's output is this one's tensor; -1: it is none. */
static int givenRegion(const ep_check_case_t *c, const ep_check_op_t *op, ep_tensor_id_t tensor) {
  if (op->from < 0) return -1;
  const int *outputs = c->ops[op->from].region;
  if (tensor == EP_T_IN_TOKENS) return outputs[EP_T_OUT_TOKENS];
  return tensor == (op->inPlace ? EP_T_UPDATE : EP_T_GRAD) ? outputs[EP_T_UPDATE] : -1;
}

int epPlaceTensors(ep_check_case_t *c, ep_rng_t *rng) {
  ep_rng_t start = *rng;
  c->numRegions = 0;
  c->usedBytes = 0;
  for (int i = 0; i < c->numOps; i++) {
    ep_check_op_t *op = &c->ops[i];
    unsigned set = tensorsOf(c, op);
    for (int t = 0; t < EP_NUM_TENSORS; t++) {
      op->region[t] = -1;
      if (!(set & (1u << t))) continue;
      int given = givenRegion(c, op, (ep_tensor_id_t)t);
      if (given >= 0) {
        op->region[t] = given;
        continue;
      }
      if (!placeOne(c, i, (ep_tensor_id_t)t, &start)) return 0;
    }
  }
  c->usedBytes = (c->usedBytes + 64 + 63) & ~(size_t)63;
  return 1;
}
