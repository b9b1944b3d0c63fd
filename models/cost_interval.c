/* How far to trust a prediction: the spread of measured over predicted times, of the rows that were
 * fitted and of those held out, whichever is wider. Fitted rows alone flatter: of rows that were held
 * out inside the range their quantiles hold two thirds, not nine tenths. Outside the range the spread
 * grows with the distance. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "plan/error.h"
#include "trefoil/cost_record.h"

/* How many doublings the value lies outside; if any, adds "9 nodes (fitted: 1 to 2)" to the text. */
static double beyond(char text[512], const char *what, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return 0;
  size_t used = strlen(text);
  snprintf(text + used, 512 - used, "%s%lld %s (fitted: %lld", used ? ", " : "", (long long)value,
           what, (long long)least);
  used = strlen(text);
  if (most > least)
    snprintf(text + used, 512 - used, " to %lld)", (long long)most);
  else
    snprintf(text + used, 512 - used, ")");
  double end = (double)(value > most ? most : least); /* 0 counts as 1 */
  return fabs(log2(fmax((double)value, 1)) - log2(fmax(end, 1)));
}

/* One doubling, if ports have other rates; the network matters between nodes alone. */
static double beyondPorts(char text[512], const trefoil_fit_point_t *point) {
  size_t used = strlen(text);
  int nvlink = point->otherPorts & TREFOIL_OTHER_NVLINK;
  int network = point->nodes > 1 && point->otherPorts & TREFOIL_OTHER_NETWORK;
  if (!nvlink && !network) return 0;
  snprintf(text + used, 512 - used, "%s%s of other rates than fitted", used ? ", " : "",
           nvlink && network ? "NVLink and network ports"
           : nvlink          ? "NVLink"
                             : "network ports");
  return 1;
}

/* The sum over what can differ by itself: ranks grow with nodes, bytes of a row with hidden. */
static double doublingsBeyond(char text[512], const trefoil_fit_range_t *r, trefoil_op_t op,
                              const trefoil_fit_point_t *point) {
  double scale = beyond(text, "nodes", point->nodes, r->nodes[0], r->nodes[1]);
  scale = fmax(scale, beyond(text, "ranks", point->ranks, r->ranks[0], r->ranks[1]));
  double rest = beyond(text, "tokens", point->tokens, r->tokens[0], r->tokens[1]);
  double row = beyond(text, "hidden", point->hidden, r->hidden[0], r->hidden[1]);
  rest += beyond(text, "experts", point->experts, r->experts[0], r->experts[1]);
  rest += beyond(text, "top-k", point->topk, r->topk[0], r->topk[1]);
  int sms = point->sms ? point->sms : r->sms[0];
  int rowBytes = point->rowBytes ? point->rowBytes : r->rowBytes[op][0];
  rest += beyond(text, "SMs", sms, r->sms[0], r->sms[1]);
  row = fmax(row, beyond(text, "bytes a row", rowBytes, r->rowBytes[op][0], r->rowBytes[op][1]));
  return scale + rest + row + beyondPorts(text, point);
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
  found.doublings = doublingsBeyond(found.outside, r, op, point);
  found.isExtrapolated = found.outside[0] != 0;
  double low = fmin(record->inside[op].low, 1); /* the prediction itself belongs to its interval */
  double high = fmax(record->inside[op].high, 1);
  if (record->outside[op].n > 0) {
    found.n += record->outside[op].n;
    low = fmin(low, record->outside[op].low);
    high = fmax(high, record->outside[op].high);
  }
  double growth = record->perDoubling[op].value * found.doublings;
  if (point->nodes > 1 && r->nodes[1] == 1)
    growth += record->acrossNodes[op].value * log2(point->nodes);
  found.lowUs = us * low * exp(-growth);
  found.highUs = us * high * exp(growth);
  *interval = found;
  return TREFOIL_OK;
}
