/* The library's own counts of bytes (trefoil/device.h) against the plan's: what each rank sent to each
 * destination in a case, dispatch and combine apart. A library that counts none is not asked.
 *
 * Not compared, though read and set to zero: cases with masks, and those in which a rank would get more
 * than max_recv slots. What then moves is the library's affair, as long as results are right. */
#include "validate/check_counts.h"

#include "plan/error.h"
#include "trefoil/plan.h"

#include <stdlib.h>
#include <string.h>

static const char *const kindNames[] = {"dispatch", "combine"};
static const char *const tierNames[] = {"within the rank", "nvlink", "net"};

int epCanCount(const ep_library_t *lib) {
  return lib->ncclEpCountBytes && lib->ncclEpReadBytes;
}

/* Bytes of a row as they travel: token and scales. An Update's routing is of rows to come. */
static size_t rowBytesOf(const ep_check_op_t *op) {
  if (op->kind == EP_OP_UPDATE) return 1;
  size_t width = (size_t)op->width, row = width * trefoilDtypeBytes(op->dtype);
  if (op->kind == EP_OP_COMBINE)
    return op->quant == TREFOIL_QUANT_NVFP4 ? width / 2 + width / 16 + sizeof(float) : row;
  if (op->quant == TREFOIL_QUANT_E4M3) row = width;
  if (op->quant != TREFOIL_QUANT_NONE)
    row += (size_t)op->scaleWidth * trefoilDtypeBytes(op->scaleDtype);
  return row;
}

/* The way of low latency's dispatch between domains, which the user may choose for GPUs. */
static trefoil_variant_t variantOf(const ep_check_group_t *g) {
  int isRails = epIsByRails() && g->gpuSubset && !g->enableMask;
  return isRails ? TREFOIL_VARIANT_RAILS : TREFOIL_VARIANT_OURS;
}

/* An Update of high throughput tells the ids to where a dispatch sends rows. */
static void addPuts(const trefoil_case_t *rc, const ep_check_op_t *op, const uint64_t *bytes,
                    ep_puts_t *puts) {
  int kind = op->kind == EP_OP_UPDATE    ? NCCL_EP_PUT_IDS
             : op->kind == EP_OP_COMBINE ? NCCL_EP_PUT_COMBINE
                                         : NCCL_EP_PUT_DISPATCH;
  epPutsNeed(&rc->routing.shape, bytes, kind, 0, puts);
  if (kind == NCCL_EP_PUT_COMBINE && rc->combinePartial)
    epPutsNeed(&rc->routing.shape, bytes, NCCL_EP_PUT_WEIGHTS, 0, puts);
}

static trefoil_result_t addPlan(const ep_check_case_t *c, const ep_check_op_t *op, int round,
                                ep_check_counts_t *counts) {
  trefoil_case_t rc;
  int isCombine = op->kind == EP_OP_COMBINE, R = c->group->shape.numRanks;
  epReferenceCase(c, op, round, &rc);
  trefoil_plan_config_t config = {.mode = rc.mode,
                                  .op = isCombine ? TREFOIL_OP_COMBINE : TREFOIL_OP_DISPATCH,
                                  .variant = variantOf(c->group),
                                  .rowBytes = rowBytesOf(op),
                                  .combinePartial = rc.combinePartial};
  trefoil_plan_t *plan = NULL;
  uint64_t once[EP_MAX_RANKS * EP_MAX_RANKS];
  EP_TRY(trefoilPlanCreate(&plan, &rc.routing, &config));
  trefoil_result_t result = trefoilPlanTraffic(plan, -1, once);
  trefoilPlanDestroy(plan);
  if (result != TREFOIL_OK) return result;
  addPuts(&rc, op, once, counts->puts);
  for (int i = 0; op->kind != EP_OP_UPDATE && i < R * R; i++)
    counts->bytes[isCombine][i] += once[i];
  return TREFOIL_OK;
}

static int isOverfull(const ep_check_case_t *c) {
  const ep_check_group_t *g = c->group;
  int over = c->trapped != 0;
  for (int i = 0; g->highThroughput && g->maxRecv && i < c->numRoutings; i++)
    for (int h = 0; h < g->numHandles; h++)
      for (int r = 0; r < g->shape.numRanks; r++) over |= c->slots[i][h][r] >= g->maxRecv;
  return over;
}

trefoil_result_t epPlanCounts(const ep_check_case_t *c, ep_check_counts_t *counts) {
  memset(counts, 0, sizeof *counts);
  if (c->numMasks || isOverfull(c)) return TREFOIL_OK;
  counts->isPlanned = 1;
  for (int i = 0; i < c->numOps; i++) {
    const ep_check_op_t *op = &c->ops[i];
    int tellsIds = op->kind == EP_OP_UPDATE && c->group->highThroughput;
    if (!tellsIds && op->kind != EP_OP_DISPATCH && op->kind != EP_OP_COMBINE) continue;
    for (int round = 0; round < c->numRounds; round++) EP_TRY(addPlan(c, op, round, counts));
  }
  return TREFOIL_OK;
}

/* Since the last time. */
static trefoil_result_t comparePuts(ep_check_rank_t *rank, const ep_check_counts_t *planned,
                                    ep_check_compared_t *out) {
  uint64_t all[NCCL_EP_PUT_KINDS];
  const trefoil_shape_t *s = &rank->group->shape;
  ep_puts_t puts = planned->puts[rank->rank];
  if (s->ranksPerNode == s->numRanks) return TREFOIL_OK;
  rank->doing = "ncclEpReadPuts";
  ncclResult_t result = epPutsRead(rank->lib, rank->epGroup, s->numRanks, rank->stream, all);
  if (result == ncclInvalidUsage) return TREFOIL_OK;
  EP_TRY_EP(rank, result);
  for (int k = 0; k < NCCL_EP_PUT_KINDS; k++) {
    puts.counted[k] = all[k] - rank->putsBefore[k];
    rank->putsBefore[k] = all[k];
  }
  if (!planned->isPlanned) return TREFOIL_OK;
  out->puts = puts;
  return epPutsCheck(&puts);
}

trefoil_result_t epRankCompareCounts(ep_check_rank_t *rank, const ep_check_counts_t *planned,
                                     ep_check_compared_t *out) {
  int R = rank->group->shape.numRanks, tiers[EP_MAX_RANKS];
  uint64_t counted[EP_MAX_RANKS];
  for (int kind = 0; kind < 2; kind++) {
    rank->doing = "ncclEpReadBytes";
    EP_TRY_EP(rank,
              rank->lib->ncclEpReadBytes(rank->epGroup, kind, counted, tiers, 1, rank->stream));
    const uint64_t *wanted = &planned->bytes[kind][rank->rank * R];
    for (int q = 0; q < R && planned->isPlanned; q++) {
      EP_CHECK(counted[q] == wanted[q], TREFOIL_INTERNAL_ERROR,
               "%s, to rank %d, %s: %llu bytes counted by the library, expected %llu by the plan",
               kindNames[kind], q,
               (unsigned)tiers[q] < TREFOIL_NUM_TIERS ? tierNames[tiers[q]] : "an unknown tier",
               (unsigned long long)counted[q], (unsigned long long)wanted[q]);
      out->bytes += counted[q];
    }
  }
  return comparePuts(rank, planned, out);
}
