/* Case after case: each operation's workload through every leg, each table against row 0's. */
#include "validate/legs.h"

#include "plan/clock.h"
#include "plan/error.h"
#include "validate/check_report.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const tierNames[] = {"within the rank", "nvlink", "net"};
static const char *const phaseNames[] = {"direct", "net-out", "forward", "return", "net-back"};
static const char *const opNames[] = {"dispatch", "combine"};
static const char *const portNames[] = {"nvlink-out", "nvlink-in", "nic-out", "nic-in"};

enum {
  NUM_BYTES = 2 * TREFOIL_NUM_TIERS * TREFOIL_NUM_PHASES * EP_MAX_RANKS * EP_MAX_RANKS,
  NUM_PORTS = 2 * EP_LEG_NUM_PORTS * EP_MAX_RANKS,
  WHERE_BYTES = 256
};

typedef struct legs {
  const ep_legs_options_t *options;
  ep_legs_outcome_t *out;
  ep_check_group_t group;
  ep_check_case_t theCase;
  ep_leg_table_t tables[EP_MAX_LEGS];
  uint64_t *pairs; /* [2, R, R] of row 0, over tiers and phases */
} legs_t;

/* ---- Comparing ---------------------------------------------------------------------------------- */

typedef struct difference {
  char where[WHERE_BYTES];
  uint64_t wanted, found;
} difference_t;

static void sumPairs(const ep_leg_table_t *t, uint64_t *pairs) {
  size_t n = (size_t)t->numRanks * (size_t)t->numRanks;
  memset(pairs, 0, 2 * n * sizeof *pairs);
  for (int op = 0; op < 2; op++)
    for (int tier = 0; tier < TREFOIL_NUM_TIERS; tier++)
      for (int phase = 0; phase < TREFOIL_NUM_PHASES; phase++)
        for (size_t i = 0; i < n; i++)
          pairs[(size_t)op * n + i] += t->bytes[epLegAt(t, op, tier, phase) + i];
}

static void sumPorts(ep_leg_table_t *t) {
  if (t->hasPorts) return;
  static const int portOf[TREFOIL_NUM_TIERS][2] = {
      {-1, -1}, {EP_LEG_NVLINK_OUT, EP_LEG_NVLINK_IN}, {EP_LEG_NIC_OUT, EP_LEG_NIC_IN}};
  int R = t->numRanks;
  for (int op = 0; op < 2; op++)
    for (int tier = TREFOIL_TIER_NVLINK; tier < TREFOIL_NUM_TIERS; tier++)
      for (int phase = 0; phase < TREFOIL_NUM_PHASES; phase++) {
        const uint64_t *bytes = t->bytes + epLegAt(t, op, tier, phase);
        for (int i = 0; i < R * R; i++) {
          t->ports[epLegPortAt(t, op, portOf[tier][0]) + (size_t)(i / R)] += bytes[i];
          t->ports[epLegPortAt(t, op, portOf[tier][1]) + (size_t)(i % R)] += bytes[i];
        }
      }
}

/* The first of n numbers that differs, or n; counts those that are not both zero. */
static size_t firstDifference(const uint64_t *wanted, const uint64_t *found, size_t n,
                              difference_t *d, uint64_t *numbers) {
  for (size_t i = 0; i < n; i++) {
    if (wanted[i] || found[i]) ++*numbers;
    if (wanted[i] == found[i]) continue;
    d->wanted = wanted[i];
    d->found = found[i];
    return i;
  }
  return n;
}

static int comparePairs(const legs_t *l, const ep_leg_table_t *t, difference_t *d) {
  size_t R = (size_t)t->numRanks, n = R * R;
  uint64_t pairs[2 * EP_MAX_RANKS * EP_MAX_RANKS];
  sumPairs(t, pairs);
  size_t i = firstDifference(l->pairs, pairs, 2 * n, d, &l->out->numbers);
  if (i == 2 * n) return 0;
  snprintf(d->where, sizeof d->where, "%s, rank %zu to rank %zu", opNames[i / n], i % n / R, i % R);
  return 1;
}

static int compareCells(const legs_t *l, const ep_leg_table_t *t, difference_t *d) {
  size_t R = (size_t)t->numRanks, n = R * R;
  for (int op = 0; op < 2; op++)
    for (int tier = 0; tier < TREFOIL_NUM_TIERS; tier++)
      for (int phase = 0; phase < TREFOIL_NUM_PHASES; phase++) {
        size_t at = epLegAt(t, op, tier, phase);
        size_t i = firstDifference(l->tables[0].bytes + at, t->bytes + at, n, d, &l->out->numbers);
        if (i == n) continue;
        snprintf(d->where, sizeof d->where, "%s, rank %zu to rank %zu, %s, phase %s", opNames[op],
                 i / R, i % R, tierNames[tier], phaseNames[phase]);
        return 1;
      }
  return 0;
}

static int comparePorts(const legs_t *l, const ep_leg_table_t *t, difference_t *d) {
  size_t R = (size_t)t->numRanks;
  for (int op = 0; op < 2; op++)
    for (int port = 0; port < EP_LEG_NUM_PORTS; port++) {
      size_t at = epLegPortAt(t, op, port);
      size_t i = firstDifference(l->tables[0].ports + at, t->ports + at, R, d, &l->out->numbers);
      if (i == R) continue;
      snprintf(d->where, sizeof d->where, "%s, link %s of rank %zu", opNames[op], portNames[port],
               i);
      return 1;
    }
  return 0;
}

static void report(legs_t *l, const trefoil_sim_workload_t *w, const ep_leg_t *leg,
                   const difference_t *d) {
  ep_legs_outcome_t *out = l->out;
  char group[512];
  out->failed = 1;
  out->failedCase = l->theCase.index;
  epDescribeGroup(&l->group, group, sizeof group);
  snprintf(out->text, sizeof out->text,
           "case %llu: %s%s: %s: %llu bytes by %s, %llu by %s\n%s\nreplay: %s --case %llu",
           (unsigned long long)l->theCase.index, trefoilModeName(w->mode),
           w->combinePartial ? ", partial combine" : "", d->where, (unsigned long long)d->wanted,
           l->options->legs[0].name, (unsigned long long)d->found, leg->name, group,
           l->options->replay, (unsigned long long)l->theCase.index);
}

/* ---- Workloads ---------------------------------------------------------------------------------- */

static trefoil_result_t fill(legs_t *l, int i, const trefoil_sim_workload_t *w) {
  ep_leg_table_t *t = &l->tables[i];
  t->numRanks = w->routing->shape.numRanks;
  t->hasPorts = 0;
  memset(t->bytes, 0, NUM_BYTES * sizeof *t->bytes);
  memset(t->ports, 0, NUM_PORTS * sizeof *t->ports);
  EP_TRY(l->options->legs[i].fill(w, t));
  sumPorts(t);
  l->out->tables[i]++;
  return TREFOIL_OK;
}

static trefoil_result_t compareLegs(legs_t *l, const trefoil_sim_workload_t *w) {
  EP_TRY(fill(l, 0, w));
  sumPairs(&l->tables[0], l->pairs);
  int n = l->tables[0].numRanks * l->tables[0].numRanks;
  for (int i = 0; i < 2 * n; i++) l->out->bytes += l->pairs[i];
  l->out->workloads++;
  for (int i = 1; i < l->options->numLegs; i++) {
    const ep_leg_t *leg = &l->options->legs[i];
    /* the first workload of a case that is asked for alone always takes part */
    if (leg->every > 1 && (l->out->workloads - 1) % (uint64_t)leg->every) continue;
    EP_TRY(fill(l, i, w));
    difference_t d;
    int differs = leg->pairsOnly
                      ? comparePairs(l, &l->tables[i], &d)
                      : compareCells(l, &l->tables[i], &d) || comparePorts(l, &l->tables[i], &d);
    if (!differs) continue;
    report(l, w, leg, &d);
    return TREFOIL_OK;
  }
  return TREFOIL_OK;
}

/* Bytes of a row as they travel: token and scales. */
static size_t rowBytesOf(const ep_check_op_t *op) {
  size_t row = (size_t)op->width * trefoilDtypeBytes(op->dtype);
  if (op->kind == EP_OP_DISPATCH && op->quant == TREFOIL_QUANT_E4M3) row = (size_t)op->width;
  if (op->kind == EP_OP_DISPATCH && op->quant != TREFOIL_QUANT_NONE)
    row += (size_t)op->scaleWidth * trefoilDtypeBytes(op->scaleDtype);
  return row;
}

/* A dispatch of the script, and the combine after it on the same handle if there is one. */
static size_t combineAfter(const ep_check_case_t *c, int dispatch, size_t otherwise) {
  for (int i = dispatch + 1; i < c->numOps; i++) {
    const ep_check_op_t *op = &c->ops[i];
    if (op->handle != c->ops[dispatch].handle || op->kind == EP_OP_COMPLETE) continue;
    return op->kind == EP_OP_COMBINE ? rowBytesOf(op) : otherwise;
  }
  return otherwise;
}

static trefoil_result_t runCase(legs_t *l, uint64_t index) {
  const ep_check_case_t *c = &l->theCase;
  EP_TRY(epMakeCase(&l->theCase, &l->group, index));
  trefoil_result_t result = TREFOIL_OK;
  for (int i = 0; i < c->numOps && result == TREFOIL_OK && !l->out->failed; i++) {
    if (c->ops[i].kind != EP_OP_DISPATCH) continue;
    for (int round = 0; round < c->numRounds && !l->out->failed; round++) {
      trefoil_case_t rc;
      epReferenceCase(c, &c->ops[i], round, &rc);
      size_t row = rowBytesOf(&c->ops[i]);
      trefoil_sim_workload_t w = {.routing = &rc.routing,
                                  .mode = rc.mode,
                                  .variant =
                                      index & 1 ? TREFOIL_VARIANT_RAILS : TREFOIL_VARIANT_OURS,
                                  .combinePartial = rc.combinePartial,
                                  .chunkTokens = 1 + (int)(index % 8),
                                  .dispatchRowBytes = row,
                                  .combineRowBytes = combineAfter(c, i, row)};
      result = compareLegs(l, &w);
      if (result != TREFOIL_OK) break;
    }
  }
  epFreeCase(&l->theCase);
  return result;
}

/* ---- The run ------------------------------------------------------------------------------------ */

static trefoil_result_t runCases(legs_t *l) {
  const ep_legs_options_t *o = l->options;
  double start = epNow();
  uint64_t batch = UINT64_MAX;
  for (uint64_t i = o->firstCase; i < o->firstCase + o->numCases && !l->out->failed; i++) {
    if (o->interrupted && *o->interrupted) {
      l->out->interrupted = *o->interrupted;
      return TREFOIL_OK;
    }
    if (i / EP_BATCH_CASES != batch) {
      batch = i / EP_BATCH_CASES;
      epMakeGroup(&l->group, &o->choice, batch);
    }
    EP_TRY(runCase(l, i));
    l->out->cases++;
    l->out->seconds = epNow() - start;
    if (o->progress) o->progress(o->context, l->out->cases);
  }
  if (l->out->failed || l->out->cases == o->numCases) return TREFOIL_OK;
  l->out->failed = 1;
  snprintf(l->out->text, sizeof l->out->text, "%llu of %llu cases were done",
           (unsigned long long)l->out->cases, (unsigned long long)o->numCases);
  return TREFOIL_OK;
}

trefoil_result_t epLegsRun(const ep_legs_options_t *options, ep_legs_outcome_t *outcome) {
  EP_CHECK(options->numLegs >= 2 && options->numLegs <= EP_MAX_LEGS, TREFOIL_INVALID_ARGUMENT,
           "%d legs: must be in [2, %d]", options->numLegs, EP_MAX_LEGS);
  EP_CHECK(options->choice.maxRanks <= EP_MAX_RANKS, TREFOIL_INVALID_ARGUMENT,
           "%d ranks: at most %d", options->choice.maxRanks, EP_MAX_RANKS);
  EP_CHECK(options->numCases > 0, TREFOIL_INVALID_ARGUMENT, "no cases");
  size_t each = NUM_BYTES + NUM_PORTS, n = (size_t)options->numLegs;
  legs_t *l = calloc(1, sizeof *l);
  uint64_t *memory = malloc((n * each + 2 * EP_MAX_RANKS * EP_MAX_RANKS) * sizeof *memory);
  trefoil_result_t result = TREFOIL_SYSTEM_ERROR;
  if (l && memory) {
    memset(outcome, 0, sizeof *outcome);
    l->options = options;
    l->out = outcome;
    for (size_t i = 0; i < n; i++) {
      l->tables[i].bytes = memory + i * each;
      l->tables[i].ports = l->tables[i].bytes + NUM_BYTES;
    }
    l->pairs = memory + n * each;
    result = runCases(l);
  } else {
    epFail(result, "out of memory for %zu tables", n);
  }
  free(memory);
  free(l);
  return result;
}
