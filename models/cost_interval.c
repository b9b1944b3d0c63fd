/* How far to trust a prediction: the spread of measured over predicted times, of the rows that were
 * fitted and of those held out, whichever is wider. Fitted rows alone flatter: of rows that were held
 * out inside the range their quantiles hold two thirds, not nine tenths. */
#include <stdio.h>
#include <string.h>

#include "plan/error.h"
#include "trefoil/cost_record.h"

/* Adds "9 nodes (1 to 2)" to the text if the value lies outside. */
static void compare(char text[512], const char *what, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return;
  size_t used = strlen(text);
  snprintf(text + used, 512 - used, "%s%lld %s (fitted: %lld", used ? ", " : "", (long long)value,
           what, (long long)least);
  used = strlen(text);
  if (most > least)
    snprintf(text + used, 512 - used, " to %lld)", (long long)most);
  else
    snprintf(text + used, 512 - used, ")");
}

/* The network matters between nodes alone. */
static void comparePorts(char text[512], const trefoil_fit_point_t *point) {
  size_t used = strlen(text);
  int nvlink = point->otherPorts & TREFOIL_OTHER_NVLINK;
  int network = point->nodes > 1 && point->otherPorts & TREFOIL_OTHER_NETWORK;
  if (!nvlink && !network) return;
  snprintf(text + used, 512 - used, "%s%s of other rates than fitted", used ? ", " : "",
           nvlink && network ? "NVLink and network ports"
           : nvlink          ? "NVLink"
                             : "network ports");
}

trefoil_result_t trefoilCostRecordInterval(const trefoil_cost_record_t *record, trefoil_op_t op,
                                           const trefoil_fit_point_t *point, double us,
                                           trefoil_interval_t *interval) {
  EP_CHECK(record && point && interval, TREFOIL_INVALID_ARGUMENT, "an argument is NULL");
  EP_CHECK(op == TREFOIL_OP_DISPATCH || op == TREFOIL_OP_COMBINE, TREFOIL_INVALID_ARGUMENT,
           "operation %d is neither dispatch nor combine", (int)op);
  EP_CHECK(us >= 0, TREFOIL_INVALID_ARGUMENT, "a time of %g us: must not be negative", us);
  const trefoil_fit_range_t *r = &record->range;
  trefoil_interval_t found = {.n = record->inside[op].n};
  compare(found.outside, "nodes", point->nodes, r->nodes[0], r->nodes[1]);
  compare(found.outside, "ranks", point->ranks, r->ranks[0], r->ranks[1]);
  compare(found.outside, "tokens", point->tokens, r->tokens[0], r->tokens[1]);
  compare(found.outside, "hidden", point->hidden, r->hidden[0], r->hidden[1]);
  compare(found.outside, "experts", point->experts, r->experts[0], r->experts[1]);
  compare(found.outside, "top-k", point->topk, r->topk[0], r->topk[1]);
  int sms = point->sms ? point->sms : r->sms[0];
  int rowBytes = point->rowBytes ? point->rowBytes : r->rowBytes[op][0];
  compare(found.outside, "SMs", sms, r->sms[0], r->sms[1]);
  compare(found.outside, "bytes a row", rowBytes, r->rowBytes[op][0], r->rowBytes[op][1]);
  comparePorts(found.outside, point);
  found.isExtrapolated = found.outside[0] != 0;
  double low = record->inside[op].low, high = record->inside[op].high;
  if (record->outside[op].n > 0) {
    const trefoil_residuals_t *out = &record->outside[op];
    found.n += out->n;
    if (out->low < low) low = out->low;
    if (out->high > high) high = out->high;
  }
  found.lowUs = us * (low < 1 ? low : 1); /* the prediction itself belongs to its interval */
  found.highUs = us * (high > 1 ? high : 1);
  *interval = found;
  return TREFOIL_OK;
}
