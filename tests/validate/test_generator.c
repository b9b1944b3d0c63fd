/* The generator and the report, without any library: a case is fixed by (seed, index), every kind of
 * case comes up, scripts keep the rules of calls, and a difference is told where it is. */
#include "test.h"

#include "validate/check_case.h"
#include "validate/check_report.h"

static ep_check_case_t theCase, other;

TEST(same_seed_same_case) {
  ep_check_choice_t choice = {.seed = 11};
  for (uint64_t i = 0; i < 640; i += 7) {
    ep_check_group_t a, b;
    epMakeGroup(&a, &choice, i / EP_BATCH_CASES);
    epMakeGroup(&b, &choice, i / EP_BATCH_CASES);
    CHECK(!memcmp(&a, &b, sizeof a), "batch of case %d", (int)i);
    REQUIRE(epMakeCase(&theCase, &a, i) == TREFOIL_OK, "%s", trefoilLastError());
    REQUIRE(epMakeCase(&other, &b, i) == TREFOIL_OK, "%s", trefoilLastError());
    CHECK(theCase.numOps == other.numOps && theCase.usedBytes == other.usedBytes, "case %d",
          (int)i);
    uint8_t *x = calloc(1, theCase.usedBytes), *y = calloc(1, theCase.usedBytes);
    epFillImage(&theCase, 0, a.shape.numRanks - 1, x);
    epFillImage(&other, 0, a.shape.numRanks - 1, y);
    CHECK(!memcmp(x, y, theCase.usedBytes), "image of case %d", (int)i);
    free(x);
    free(y);
    epFreeCase(&theCase);
    epFreeCase(&other);
  }
}

enum {
  SEEN_MODE = 0,
  SEEN_QUANT = 4,
  SEEN_PAYLOAD = 8,
  SEEN_KIND = 12,
  SEEN_BACKWARD = 20,
  SEEN_SEND,
  SEEN_CAPTURED,
  SEEN_TRAPPED,
  SEEN_FRESH,
  SEEN_INPLACE,
  SEEN_NODES,
  SEEN_EAGER,
  SEEN_DROP,
  SEEN_SHARED,
  SEEN_UNEVEN,
  SEEN_EMPTY_RANK,
  SEEN_UNUSED,
  SEEN_WINDOW,
  SEEN_PARTIAL,
  SEEN_ALIGNED,
  SEEN_WIDE_IDS,
  SEEN_ODD_WIDTH,
  NUM_SEEN
};

static void lookAt(const ep_check_case_t *c, int *seen) {
  const ep_check_group_t *g = c->group;
  seen[SEEN_CAPTURED] += c->captured;
  seen[SEEN_TRAPPED] += c->trapped != 0;
  seen[SEEN_FRESH] += c->freshHandle;
  seen[SEEN_NODES] += g->shape.ranksPerNode < g->shape.numRanks;
  seen[SEEN_EAGER] += g->highThroughput && !g->maxRecv;
  seen[SEEN_DROP] += g->drop;
  seen[SEEN_UNEVEN] += g->shape.numExperts % g->shape.numRanks != 0;
  seen[SEEN_WINDOW] += g->useWindow;
  seen[SEEN_PARTIAL] += g->partial;
  for (int i = 0; i < c->numOps; i++) {
    const ep_check_op_t *op = &c->ops[i];
    seen[SEEN_KIND + op->kind]++;
    if (op->handle < 0) continue;
    const ep_check_handle_t *h = &g->handles[op->handle];
    seen[SEEN_MODE + h->mode]++;
    seen[SEEN_SHARED] += h->shareWith >= 0;
    seen[SEEN_ALIGNED] += h->alignment > 1;
    const ep_check_routing_t *routing = &c->routings[op->routing];
    seen[SEEN_WIDE_IDS] += routing->wideIds;
    for (int r = 0; r < g->shape.numRanks; r++) {
      seen[SEEN_EMPTY_RANK] += routing->numTokens[r] == 0;
      for (int64_t k = 0; k < routing->numTokens[r] * routing->topk; k++)
        seen[SEEN_UNUSED] += routing->rows[0][r][k] < 0;
    }
    if (op->kind != EP_OP_DISPATCH && op->kind != EP_OP_COMBINE) continue;
    seen[SEEN_QUANT + op->quant]++;
    seen[SEEN_PAYLOAD + op->payload]++;
    seen[SEEN_BACKWARD] += op->backward;
    seen[SEEN_SEND] += op->sendOnly;
    seen[SEEN_INPLACE] += op->from >= 0;
    seen[SEEN_ODD_WIDTH] += op->width % 2;
  }
}

/* At most one open dispatch and one open combine; nothing but Complete on a handle that has one. */
static void checkScript(const ep_check_case_t *c) {
  int open[EP_MAX_HANDLES] = {0}, openKinds[2] = {0};
  for (int i = 0; i < c->numOps; i++) {
    const ep_check_op_t *op = &c->ops[i];
    if (op->handle < 0) continue;
    if (op->kind == EP_OP_COMPLETE) {
      if (open[op->handle]) openKinds[open[op->handle] - 1] = 0;
      open[op->handle] = 0;
      continue;
    }
    CHECK(!open[op->handle], "case %d, operation %d: the handle has an open operation",
          (int)c->index, i);
    if (op->kind == EP_OP_DISPATCH)
      CHECK(!openKinds[0], "case %d, operation %d: two dispatches", (int)c->index, i);
    if (op->kind == EP_OP_COMBINE)
      CHECK(!openKinds[1], "case %d, operation %d: two combines", (int)c->index, i);
    if (!op->sendOnly) continue;
    int kind = op->kind == EP_OP_COMBINE;
    open[op->handle] = 1 + kind;
    openKinds[kind] = 1;
  }
  for (int i = 0; i < EP_MAX_HANDLES; i++)
    CHECK(!open[i], "case %d ends with an open operation", (int)c->index);
}

/* Tensors lie apart, with a guard between them. */
static void checkPlaces(const ep_check_case_t *c) {
  for (int i = 0; i < c->numRegions; i++) {
    size_t before = i ? c->regions[i - 1].offset + c->regions[i - 1].bytes : 0;
    CHECK(c->regions[i].offset >= before + 16, "case %d, region %d", (int)c->index, i);
    CHECK(c->regions[i].offset + c->regions[i].bytes + 16 <= c->usedBytes, "case %d, region %d",
          (int)c->index, i);
  }
}

TEST(every_kind_comes_up_and_keeps_the_rules) {
  ep_check_choice_t choice = {.seed = 5};
  int seen[NUM_SEEN] = {0};
  for (uint64_t batch = 0; batch < 300; batch++) {
    ep_check_group_t g;
    epMakeGroup(&g, &choice, batch);
    for (uint64_t i = 0; i < 8; i++) {
      uint64_t index = batch * EP_BATCH_CASES + i;
      REQUIRE(epMakeCase(&theCase, &g, index) == TREFOIL_OK, "case %d: %s", (int)index,
              trefoilLastError());
      lookAt(&theCase, seen);
      checkScript(&theCase);
      checkPlaces(&theCase);
      epFreeCase(&theCase);
    }
  }
  for (int i = 0; i < NUM_SEEN; i++) CHECK(seen[i] > 0, "kind %d never came up", i);
}

/* The first dispatch with at least two rows on a rank; returns the rank, or -1. */
static int findDispatch(const ep_check_choice_t *choice, ep_check_group_t *g, int *opIdx) {
  for (uint64_t index = 0; index < 6400; index++) {
    if (index % EP_BATCH_CASES == 0) epMakeGroup(g, choice, index / EP_BATCH_CASES);
    if (epMakeCase(&theCase, g, index) != TREFOIL_OK) return -1;
    for (int i = 0; i < theCase.numOps; i++) {
      const ep_check_op_t *op = &theCase.ops[i];
      if (op->kind != EP_OP_DISPATCH || op->quant != TREFOIL_QUANT_NONE || op->width < 16 ||
          theCase.trapped || op->payload != EP_PAYLOAD_BITS)
        continue;
      trefoil_case_t rc;
      epReferenceCase(&theCase, op, 0, &rc);
      for (int r = 0; r < g->shape.numRanks; r++)
        if (trefoilRefNumSlots(&rc, r) >= 2) {
          *opIdx = i;
          return r;
        }
    }
    epFreeCase(&theCase);
  }
  return -1;
}

/* ---- A2SGD ---- */

typedef struct grad_seen {
  int groups, others, empty, emptyTensor, whole, masked, captured, chained, inPlace, dtypes[10];
  int due, notDue, last, ofStep;
  int values[EP_GRAD_NUM_VALUES];
} grad_seen_t;

static void lookAtGradModel(const ep_grad_model_t *m, grad_seen_t *seen) {
  seen->empty += epGradModelElements(m) == 0;
  seen->whole += m->scope == TREFOIL_GRAD_WHOLE_MODEL;
  seen->dtypes[m->dtype]++;
  for (int t = 0; t < m->numTensors; t++) seen->emptyTensor += m->sizes[t] == 0;
}

static void lookAtSync(const ep_check_case_t *c, const ep_check_op_t *op, grad_seen_t *seen) {
  int64_t period = c->group->syncPeriod;
  seen->last += op->step < 0;
  seen->ofStep += op->from >= 0;
  if (period && (op->step + 1) % period == 0)
    seen->due++;
  else
    seen->notDue++;
  CHECK(op->step >= 0 || period == 1, "the step is not known");
}

static void lookAtGradCase(const ep_check_case_t *c, grad_seen_t *seen) {
  seen->captured += c->captured;
  seen->masked += c->numMasks != 0;
  CHECK(!c->captured || !c->numMasks, "masks in a graph");
  for (int i = 0; i < c->numOps; i++) {
    const ep_check_op_t *op = &c->ops[i];
    if (op->kind == EP_OP_GRAD_SYNC) lookAtSync(c, op, seen);
    if (op->kind != EP_OP_GRAD_STEP) continue;
    seen->chained += op->from >= 0;
    seen->inPlace += op->inPlace;
    seen->values[op->values]++;
    CHECK(op->from < i, "a step reads a later one's update");
    CHECK((op->region[EP_T_GRAD] < 0) == op->inPlace, "the gradient's place");
  }
}

TEST(steps_of_a2sgd_come_up) {
  const ep_check_choice_t choice = {.seed = 4, .modes = 3 | EP_MODE_A2SGD};
  static grad_seen_t seen;
  for (uint64_t batch = 0; batch < 120; batch++) {
    ep_check_group_t g;
    epMakeGroup(&g, &choice, batch);
    seen.groups += g.isGrad;
    seen.others += !g.isGrad;
    if (!g.isGrad) continue;
    lookAtGradModel(&g.model, &seen);
    for (uint64_t i = 0; i < EP_BATCH_CASES; i += 3) {
      REQUIRE(epMakeCase(&theCase, &g, batch * EP_BATCH_CASES + i) == TREFOIL_OK, "%s",
              trefoilLastError());
      lookAtGradCase(&theCase, &seen);
      epFreeCase(&theCase);
    }
  }
  CHECK(seen.groups && seen.others && seen.empty && seen.emptyTensor && seen.whole && seen.masked &&
            seen.captured && seen.chained && seen.inPlace && seen.due && seen.notDue && seen.last &&
            seen.ofStep,
        "something never comes up");
  CHECK(seen.dtypes[TREFOIL_F32] && seen.dtypes[TREFOIL_F16] && seen.dtypes[TREFOIL_BF16],
        "dtypes");
  for (int v = 0; v < EP_GRAD_NUM_VALUES; v++) CHECK(seen.values[v], "values %d", v);
}

TEST(a_swapped_row_is_named) {
  ep_check_choice_t choice = {.seed = 3, .modes = 1u << TREFOIL_HT_FLAT};
  ep_check_group_t g;
  int opIdx, rank = findDispatch(&choice, &g, &opIdx);
  REQUIRE(rank >= 0, "no such case");
  uint8_t *images[EP_MAX_RANKS];
  for (int r = 0; r < g.shape.numRanks; r++) {
    images[r] = malloc(theCase.usedBytes);
    epFillImage(&theCase, 0, r, images[r]);
  }
  REQUIRE(epExpect(&theCase, 0, images) == TREFOIL_OK, "%s", trefoilLastError());
  uint8_t *found = malloc(theCase.usedBytes);
  memcpy(found, images[rank], theCase.usedBytes);
  ep_check_images_t pair = {images, found};
  char text[2048], wanted[128];
  CHECK(!epDescribeDifference(&theCase, 0, rank, &pair, text, sizeof text), "%s", text);

  const ep_check_op_t *op = &theCase.ops[opIdx];
  size_t at = theCase.regions[op->region[EP_T_OUT_TOKENS]].offset;
  ep_check_dims_t d;
  epTensorDims(&theCase, op, EP_T_OUT_TOKENS, rank, &d);
  trefoil_case_t rc;
  epReferenceCase(&theCase, op, 0, &rc);
  trefoil_slot_t *slots = malloc(sizeof *slots * (size_t)trefoilRefNumSlots(&rc, rank));
  REQUIRE(trefoilRefSlots(&rc, rank, slots) == TREFOIL_OK, "%s", trefoilLastError());
  memcpy(found + at, images[rank] + at + d.rowBytes, d.rowBytes);
  CHECK(epDescribeDifference(&theCase, 0, rank, &pair, text, sizeof text), "not seen");
  snprintf(wanted, sizeof wanted,
           "slot 0: expected (rank %d, token %d), found the row of (rank %d, "
           "token %d)",
           slots[0].src, (int)slots[0].token, slots[1].src, (int)slots[1].token);
  CHECK(strstr(text, wanted), "'%s' is not in '%s'", wanted, text);

  memcpy(found, images[rank], theCase.usedBytes);
  found[at - 1] ^= 1;
  CHECK(epDescribeDifference(&theCase, 0, rank, &pair, text, sizeof text), "not seen");
  CHECK(strstr(text, "guard") && strstr(text, "1 bytes before outputs->tokens"), "%s", text);
  for (int r = 0; r < g.shape.numRanks; r++) free(images[r]);
  free(slots);
  free(found);
  epFreeCase(&theCase);
}

TEST_MAIN()
