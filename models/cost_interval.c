/* How far to trust a prediction: the spread of measured over predicted times, of the rows that were
 * fitted and of those held out inside the range, whichever is wider. Fitted rows alone flatter: of rows
 * that were held out there their quantiles hold two thirds, not nine tenths. Outside the range the
 * spread grows with the distance; rows held out there say how much, and count once. */
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

/* More experts than fitted count as far as ranks are not as many more: a rank has what it had. */
static double expertsBeyond(char text[512], const trefoil_fit_range_t *r,
                            const trefoil_fit_point_t *point) {
  double experts = beyond(text, "experts", point->experts, r->experts[0], r->experts[1]);
  if (point->experts <= r->experts[1] || point->ranks <= r->ranks[1]) return experts;
  return fmax(experts - log2((double)point->ranks / r->ranks[1]), 0);
}

/* Of nodes and ranks, which grow together; and the sum over what else can differ by itself. */
typedef struct distance {
  double scale, rest;
} distance_t;

static distance_t distanceOf(char text[512], const trefoil_fit_range_t *r, trefoil_op_t op,
                             const trefoil_fit_point_t *point) {
  double scale = beyond(text, "nodes", point->nodes, r->nodes[0], r->nodes[1]);
  scale = fmax(scale, beyond(text, "ranks", point->ranks, r->ranks[0], r->ranks[1]));
  double rest = beyond(text, "tokens", point->tokens, r->tokens[0], r->tokens[1]);
  double row = beyond(text, "hidden", point->hidden, r->hidden[0], r->hidden[1]);
  rest += expertsBeyond(text, r, point);
  rest += beyond(text, "top-k", point->topk, r->topk[0], r->topk[1]);
  int sms = point->sms ? point->sms : r->sms[0];
  int rowBytes = point->rowBytes ? point->rowBytes : r->rowBytes[op][0];
  rest += beyond(text, "SMs", sms, r->sms[0], r->sms[1]);
  row = fmax(row, beyond(text, "bytes a row", rowBytes, r->rowBytes[op][0], r->rowBytes[op][1]));
  return (distance_t){scale, rest + row + beyondPorts(text, point)};
}

static double growthOf(const trefoil_cost_record_t *record, trefoil_op_t op,
                       const trefoil_fit_point_t *point, distance_t far) {
  int isAcross = point->nodes > 1 && record->range.nodes[1] == 1;
  double nodes = isAcross ? log2(point->nodes) : 0;
  return record->perScale[op].value * fmax(far.scale - nodes, 0) +
         record->acrossNodes[op].value * nodes + record->perDoubling[op].value * far.rest;
}

trefoil_result_t trefoilCostRecordInterval(const trefoil_cost_record_t *record, trefoil_op_t op,
                                           const trefoil_fit_point_t *point, double us,
                                           trefoil_interval_t *interval) {
  EP_CHECK(record && point && interval, TREFOIL_INVALID_ARGUMENT, "an argument is NULL");
  EP_CHECK(op == TREFOIL_OP_DISPATCH || op == TREFOIL_OP_COMBINE, TREFOIL_INVALID_ARGUMENT,
           "operation %d is neither dispatch nor combine", (int)op);
  EP_CHECK(us >= 0, TREFOIL_INVALID_ARGUMENT, "a time of %g us: must not be negative", us);
  trefoil_interval_t found = {.n = record->inside[op].n};
  distance_t far = distanceOf(found.outside, &record->range, op, point);
  found.doublings = far.scale + far.rest;
  found.isExtrapolated = found.outside[0] != 0;
  double low = fmin(record->inside[op].low, 1); /* the prediction itself belongs to its interval */
  double high = fmax(record->inside[op].high, 1);
  if (record->within[op].n > 0) {
    found.n += record->within[op].n;
    low = fmin(low, record->within[op].low);
    high = fmax(high, record->within[op].high);
  }
  double growth = growthOf(record, op, point, far);
  found.lowUs = us * low * exp(-growth);
  found.highUs = us * high * exp(growth);
  *interval = found;
  return TREFOIL_OK;
}
