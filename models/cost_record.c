/* Cost records from JSON. Every number is an object
 *
 *   {"value", "low", "high", "source", "state"}
 *
 * with the physical bounds beside the value, and a state that says whether it was given or fitted
 * and whether the fit ran into a bound. The reader is strict, like that of the other presets. */
#include "trefoil/cost_record.h"

#include <string.h>

#include "models/preset.h"
#include "plan/error.h"

const char *trefoilCostRecordName(int i) {
  return epPresetName(epCosts, i);
}

const char *trefoilCostRecordDefault(trefoil_mode_t mode, trefoil_variant_t variant) {
  int ht = mode == TREFOIL_HT_FLAT || mode == TREFOIL_HT_EXPERT_MAJOR;
  if (ht) return "deepep-ht-h100";
  return variant == TREFOIL_VARIANT_PER_EXPERT ? "deepep-ll-h100" : "trefoil-ll-h200";
}

#ifndef TREFOIL_HAVE_JSON

trefoil_result_t trefoilCostRecordLoad(trefoil_cost_record_t *record, const char *nameOrPath) {
  (void)record, (void)nameOrPath;
  return epFail(TREFOIL_INVALID_USAGE,
                "this build reads no cost records: it was made without jansson");
}
trefoil_result_t trefoilCostRecordParse(trefoil_cost_record_t *record, const char *name,
                                        const char *text, size_t numBytes) {
  (void)name, (void)text, (void)numBytes;
  return trefoilCostRecordLoad(record, NULL);
}

#else

#include <math.h>
#include <stddef.h>
#include <stdlib.h>

#include <jansson.h>

/* Where a number goes. */
typedef struct cost_field {
  const char *key;
  size_t offset;
  int isInt, isOptional; /* optional: 0 where it is missing */
} cost_field_t;

#define COST(key, member, isInt)                                                                   \
  { key, offsetof(trefoil_costs_t, member), isInt, 0 }
#define OP_COST(key, member)                                                                       \
  { key, offsetof(trefoil_op_costs_t, member), 0, 0 }
#define OPTIONAL_COST(key, member)                                                                 \
  { key, offsetof(trefoil_op_costs_t, member), 0, 1 }
static const cost_field_t costFields[] = {
    COST("num_sms", numSms, 1),
    COST("nvlink_gb_per_s", nvlinkGbPerS, 0),
    COST("nic_gb_per_s", nicGbPerS, 0),
    COST("nvlink_latency_ns", nvlinkLatencyNs, 0),
    COST("net_latency_ns", netLatencyNs, 0),
    COST("nvlink_row_ns", nvlinkRowNs, 0),
    COST("net_message_ns", netMessageNs, 0),
    COST("rows_per_message", rowsPerMessage, 0),
    COST("signals_per_expert", signalsPerExpert, 1),
    {"nvlink_back_share", offsetof(trefoil_costs_t, nvlinkBackShare), 0, 1},
    {"own_rows_stay", offsetof(trefoil_costs_t, ownRowsStay), 1, 1},
    {"product_share", offsetof(trefoil_costs_t, productShare), 0, 1},
};
static const cost_field_t opFields[] = {
    OP_COST("launch_us", launchUs),
    OP_COST("token_ns", tokenNs),
    OP_COST("send_row_ns", sendRowNs),
    OP_COST("send_gb_per_s_per_sm", sendGbPerSPerSm),
    OP_COST("receive_row_ns", receiveRowNs),
    OP_COST("receive_gb_per_s_per_sm", receiveGbPerSPerSm),
    OP_COST("forward_share", forwardShare),
    OP_COST("signal_ns", signalNs),
    OP_COST("net_signal_ns", netSignalNs),
    OP_COST("net_start_us", netStartUs),
    OP_COST("node_round_us", nodeRoundUs),
    OPTIONAL_COST("send_share", sendShare),
    OPTIONAL_COST("most_send_sms", mostSendSms),
    OPTIONAL_COST("peers_flow_share", peersFlowShare),
    OPTIONAL_COST("whole_sms_from", wholeSmsFrom),
    OPTIONAL_COST("slot_ns", slotNs),
    OPTIONAL_COST("slot_gb_per_s_per_sm", slotGbPerSPerSm),
    OPTIONAL_COST("announce_us", announceUs),
    OPTIONAL_COST("rest_gb_per_s_per_sm", restGbPerSPerSm),
    OPTIONAL_COST("missing_us", missingUs),
    OPTIONAL_COST("flow_share", flowShare),
    OPTIONAL_COST("row_head_bytes", rowHeadBytes),
    OPTIONAL_COST("batch_sources", batchSources),
    OPTIONAL_COST("batch_gb_per_s_per_sm", batchGbPerSPerSm),
    OPTIONAL_COST("slot_gb_per_s", slotGbPerS),
    OPTIONAL_COST("round_us", roundUs),
    OPTIONAL_COST("round_bytes", roundBytes),
    OPTIONAL_COST("few_tokens", fewTokens),
    OPTIONAL_COST("few_round_bytes", fewRoundBytes),
    OPTIONAL_COST("rank_round_us", rankRoundUs),
    OPTIONAL_COST("flow_wait_us", flowWaitUs),
    OPTIONAL_COST("pull_sms", pullSms),
    OPTIONAL_COST("pull_sms_of_two", pullSmsOfTwo),
    OPTIONAL_COST("pull_row_ns", pullRowNs),
    OPTIONAL_COST("pull_gb_per_s_per_sm", pullGbPerSPerSm),
    OPTIONAL_COST("pull_port_share", pullPortShare),
    OPTIONAL_COST("stage_gb_per_s", stageGbPerS),
};
enum {
  numCostFields = sizeof costFields / sizeof *costFields,
  numOpFields = sizeof opFields / sizeof *opFields
};
static const char *const opKeys[] = {"dispatch", "combine"};
static const char *const textKeys[] = {"name",    "about",  "mode", "variant",
                                       "cluster", "engine", "fit"};

static int isOneOf(const char *text, const char *const *known, int n) {
  for (int i = 0; text && i < n; i++)
    if (!strcmp(text, known[i])) return 1;
  return 0;
}

/* Only the keys of the fields, and some others. */
static trefoil_result_t checkKeys(json_t *object, const char *file, const char *where,
                                  const cost_field_t *fields, int numFields) {
  const char *key;
  json_t *value;
  int top = fields == costFields;
  EP_CHECK(json_is_object(object), TREFOIL_INVALID_ARGUMENT, "%s: %s must be an object", file,
           where);
  json_object_foreach(object, key, value) {
    int known = top && (isOneOf(key, textKeys, 7) || isOneOf(key, opKeys, 2));
    for (int i = 0; i < numFields; i++) known |= !strcmp(key, fields[i].key);
    EP_CHECK(known, TREFOIL_INVALID_ARGUMENT, "%s: the key %.60s is not known in %s", file, key,
             where);
  }
  return TREFOIL_OK;
}

static trefoil_result_t takeNumber(const json_t *object, const char *file, const char *where,
                                   const cost_field_t *field, char *out) {
  static const char *const states[] = {"given", "fitted", "at-low", "at-high", "unidentified"};
  const json_t *entry = json_object_get(object, field->key);
  const json_t *value = json_object_get(entry, "value");
  const json_t *low = json_object_get(entry, "low"), *high = json_object_get(entry, "high");
  const char *source = json_string_value(json_object_get(entry, "source"));
  if (!entry && field->isOptional) return TREFOIL_OK;
  EP_CHECK(entry, TREFOIL_INVALID_ARGUMENT, "%s: %s in %s is missing", file, field->key, where);
  EP_CHECK(
      json_object_size(entry) == 5 && json_is_number(value) && json_is_number(low) &&
          json_is_number(high) && source && source[0] &&
          isOneOf(json_string_value(json_object_get(entry, "state")), states, 5),
      TREFOIL_INVALID_ARGUMENT,
      "%s: %s in %s must be {\"value\", \"low\", \"high\", \"source\", \"state\"}, state one of "
      "given, fitted, at-low, at-high, unidentified",
      file, field->key, where);
  double number = json_number_value(value);
  EP_CHECK(number >= json_number_value(low) && number <= json_number_value(high),
           TREFOIL_INVALID_ARGUMENT, "%s: %s in %s is %g: its own bounds are [%g, %g]", file,
           field->key, where, number, json_number_value(low), json_number_value(high));
  EP_CHECK(number >= 0 || !strcmp(field->key, "net_latency_ns"), TREFOIL_INVALID_ARGUMENT,
           "%s: %s in %s is %g: must not be negative", file, field->key, where, number);
  EP_CHECK(!field->isInt || (number == floor(number) && fabs(number) < 1e9),
           TREFOIL_INVALID_ARGUMENT, "%s: %s in %s must be an integer", file, field->key, where);
  if (field->isInt) {
    int whole = (int)number;
    memcpy(out + field->offset, &whole, sizeof whole);
  } else {
    memcpy(out + field->offset, &number, sizeof number);
  }
  return TREFOIL_OK;
}

/* "key": [least, most], integers. */
static trefoil_result_t takeRange(const json_t *fit, const char *file, const char *key,
                                  int64_t range[2]) {
  const json_t *list = json_object_get(fit, key);
  EP_CHECK(json_is_array(list) && json_array_size(list) == 2 &&
               json_is_integer(json_array_get(list, 0)) && json_is_integer(json_array_get(list, 1)),
           TREFOIL_INVALID_ARGUMENT, "%s: %s in fit must be [least, most]", file, key);
  for (int i = 0; i < 2; i++) range[i] = json_integer_value(json_array_get(list, (size_t)i));
  EP_CHECK(range[0] >= 0 && range[0] <= range[1] && range[1] <= TREFOIL_MAX_TOKENS,
           TREFOIL_INVALID_ARGUMENT, "%s: %s in fit is [%lld, %lld]: must ascend from 0", file, key,
           (long long)range[0], (long long)range[1]);
  return TREFOIL_OK;
}

static trefoil_result_t takeIntRange(const json_t *fit, const char *file, const char *key,
                                     int range[2]) {
  int64_t wide[2];
  EP_TRY(takeRange(fit, file, key, wide));
  EP_CHECK(wide[1] <= 1 << 30, TREFOIL_INVALID_ARGUMENT, "%s: %s in fit is too large", file, key);
  for (int i = 0; i < 2; i++) range[i] = (int)wide[i];
  return TREFOIL_OK;
}

static trefoil_result_t takeResiduals(const json_t *fit, const char *file, const char *where,
                                      int op, trefoil_residuals_t *out) {
  const json_t *r = json_object_get(json_object_get(fit, where), opKeys[op]);
  const json_t *n = json_object_get(r, "n"), *mape = json_object_get(r, "mape_percent");
  double low = json_number_value(json_object_get(r, "low"));
  double high = json_number_value(json_object_get(r, "high"));
  int legal = json_is_integer(n) && json_integer_value(n) >= 0 && json_integer_value(n) < 1 << 30 &&
              json_is_number(mape) && json_number_value(mape) >= 0 && low > 0 && low <= high;
  EP_CHECK(
      legal, TREFOIL_INVALID_ARGUMENT,
      "%s: %s of %s in fit must be {\"n\", \"low\", \"high\", \"mape_percent\"} with 0 < low <= "
      "high",
      file, opKeys[op], where);
  *out = (trefoil_residuals_t){(int)json_integer_value(n), low, high, json_number_value(mape)};
  return TREFOIL_OK;
}

/* "key": {"value", "n"}, and "from", the record that it is taken from, if n is 0. */
static trefoil_result_t takeGrowth(const json_t *fit, const char *file, const char *key, int op,
                                   trefoil_growth_t *out) {
  const json_t *g =
      json_object_get(json_object_get(json_object_get(fit, "growth"), opKeys[op]), key);
  const json_t *n = json_object_get(g, "n"), *value = json_object_get(g, "value");
  const char *from = json_string_value(json_object_get(g, "from"));
  int64_t rows = json_is_integer(n) ? json_integer_value(n) : -1;
  int legal = rows >= 0 && rows < 1 << 30 && json_is_number(value) &&
              json_number_value(value) >= 0 && json_number_value(value) <= 10 &&
              (rows > 0 || (from && from[0])) && json_object_size(g) == (from ? 3 : 2);
  EP_CHECK(
      legal, TREFOIL_INVALID_ARGUMENT,
      "%s: %s of %s in fit must be {\"value\", \"n\"}, value in [0, 10], with \"from\" where n "
      "is 0",
      file, key, opKeys[op]);
  *out = (trefoil_growth_t){(int)rows, json_number_value(value)};
  return TREFOIL_OK;
}

static trefoil_result_t takeFit(const json_t *fit, const char *file, trefoil_cost_record_t *r) {
  trefoil_fit_range_t *range = &r->range;
  EP_TRY(takeIntRange(fit, file, "nodes", range->nodes));
  EP_TRY(takeIntRange(fit, file, "ranks", range->ranks));
  EP_TRY(takeIntRange(fit, file, "hidden", range->hidden));
  EP_TRY(takeIntRange(fit, file, "experts", range->experts));
  EP_TRY(takeIntRange(fit, file, "topk", range->topk));
  EP_TRY(takeRange(fit, file, "tokens", range->tokens));
  EP_TRY(takeIntRange(fit, file, "sms", range->sms));
  EP_TRY(takeIntRange(fit, file, "dispatch_row_bytes", range->rowBytes[TREFOIL_OP_DISPATCH]));
  EP_TRY(takeIntRange(fit, file, "combine_row_bytes", range->rowBytes[TREFOIL_OP_COMBINE]));
  for (int op = 0; op < 2; op++) {
    EP_TRY(takeResiduals(fit, file, "inside", op, &r->inside[op]));
    EP_TRY(takeResiduals(fit, file, "outside", op, &r->outside[op]));
    EP_TRY(takeResiduals(fit, file, "within", op, &r->within[op]));
    EP_TRY(takeGrowth(fit, file, "per_doubling", op, &r->perDoubling[op]));
    EP_TRY(takeGrowth(fit, file, "per_scale", op, &r->perScale[op]));
    EP_TRY(takeGrowth(fit, file, "across_nodes", op, &r->acrossNodes[op]));
  }
  return TREFOIL_OK;
}

static trefoil_result_t takeWord(const json_t *root, const char *file, const char *key,
                                 const char *const words[2], int *idx) {
  const char *word = json_string_value(json_object_get(root, key));
  EP_CHECK(isOneOf(word, words, 2), TREFOIL_INVALID_ARGUMENT, "%s: %s must be \"%s\" or \"%s\"",
           file, key, words[0], words[1]);
  *idx = !strcmp(word, words[1]);
  return TREFOIL_OK;
}

static trefoil_result_t takeAll(json_t *root, const char *file, trefoil_cost_record_t *r) {
  static const char *const modes[] = {"ll", "ht"}, *const variants[] = {"ours", "per-expert"};
  int perExpert;
  EP_TRY(checkKeys(root, file, "the record", costFields, numCostFields));
  for (int i = 0; i < 6; i++) {
    const char *text = json_string_value(json_object_get(root, textKeys[i]));
    EP_CHECK(text && text[0], TREFOIL_INVALID_ARGUMENT, "%s: %s must be a text", file, textKeys[i]);
  }
  const char *name = json_string_value(json_object_get(root, "name"));
  EP_CHECK(strlen(name) < TREFOIL_MODEL_NAME_BYTES, TREFOIL_INVALID_ARGUMENT,
           "%s: the name is longer than %d characters", file, TREFOIL_MODEL_NAME_BYTES - 1);
  strcpy(r->costs.name, name);
  const char *cluster = json_string_value(json_object_get(root, "cluster"));
  EP_CHECK(strlen(cluster) < sizeof r->cluster, TREFOIL_INVALID_ARGUMENT,
           "%s: the cluster's name is longer than %zu characters", file, sizeof r->cluster - 1);
  strcpy(r->cluster, cluster);
  EP_TRY(takeWord(root, file, "mode", modes, &r->isHt));
  EP_TRY(takeWord(root, file, "variant", variants, &perExpert));
  r->variant = perExpert ? TREFOIL_VARIANT_PER_EXPERT : TREFOIL_VARIANT_OURS;
  for (int i = 0; i < numCostFields; i++) {
    EP_TRY(takeNumber(root, file, "the record", &costFields[i], (char *)&r->costs));
  }
  for (int op = 0; op < 2; op++) {
    json_t *object = json_object_get(root, opKeys[op]);
    EP_TRY(checkKeys(object, file, opKeys[op], opFields, numOpFields));
    for (int i = 0; i < numOpFields; i++) {
      EP_TRY(takeNumber(object, file, opKeys[op], &opFields[i], (char *)&r->costs.op[op]));
    }
  }
  EP_TRY(takeFit(json_object_get(root, "fit"), file, r));
  const trefoil_costs_t *c = &r->costs;
  EP_CHECK(c->numSms >= 1 && c->op[0].forwardShare < 1 && c->op[1].forwardShare < 1,
           TREFOIL_INVALID_ARGUMENT,
           "%s: %d SMs, forward_share %g and %g: must be at least 1, and less than 1 each", file,
           c->numSms, c->op[0].forwardShare, c->op[1].forwardShare);
  EP_CHECK(c->nvlinkBackShare < 1 && c->op[0].sendShare < 1 && c->op[1].sendShare < 1,
           TREFOIL_INVALID_ARGUMENT,
           "%s: nvlink_back_share %g, send_share %g and %g: must be less than 1 each", file,
           c->nvlinkBackShare, c->op[0].sendShare, c->op[1].sendShare);
  EP_CHECK(c->productShare < 1 && c->op[0].flowShare < 1 && c->op[1].flowShare < 1,
           TREFOIL_INVALID_ARGUMENT,
           "%s: product_share %g, flow_share %g and %g: must be less than 1 each", file,
           c->productShare, c->op[0].flowShare, c->op[1].flowShare);
  EP_CHECK(c->op[0].peersFlowShare < 1 && c->op[1].peersFlowShare < 1 &&
               c->op[0].wholeSmsFrom <= 1 && c->op[1].wholeSmsFrom <= 1,
           TREFOIL_INVALID_ARGUMENT,
           "%s: peers_flow_share %g and %g, whole_sms_from %g and %g: must be less than 1, and at "
           "most 1",
           file, c->op[0].peersFlowShare, c->op[1].peersFlowShare, c->op[0].wholeSmsFrom,
           c->op[1].wholeSmsFrom);
  EP_CHECK(c->op[0].pullPortShare <= 1 && c->op[1].pullPortShare <= 1, TREFOIL_INVALID_ARGUMENT,
           "%s: pull_port_share %g and %g: must be at most 1 each", file, c->op[0].pullPortShare,
           c->op[1].pullPortShare);
  return TREFOIL_OK;
}

trefoil_result_t trefoilCostRecordParse(trefoil_cost_record_t *record, const char *name,
                                        const char *text, size_t numBytes) {
  EP_CHECK(record && name && text, TREFOIL_INVALID_ARGUMENT, "an argument is NULL");
  json_error_t error;
  json_t *root = json_loadb(text, numBytes, JSON_REJECT_DUPLICATES, &error);
  EP_CHECK(root, TREFOIL_INVALID_ARGUMENT, "%s, line %d: %s", name, error.line, error.text);
  trefoil_cost_record_t found = {.isHt = 0};
  trefoil_result_t result = takeAll(root, name, &found);
  json_decref(root);
  EP_TRY(result);
  *record = found;
  return TREFOIL_OK;
}

trefoil_result_t trefoilCostRecordLoad(trefoil_cost_record_t *record, const char *nameOrPath) {
  ep_text_t text;
  EP_CHECK(record, TREFOIL_INVALID_ARGUMENT, "the cost record's out-parameter is NULL");
  EP_TRY(epPresetRead("cost record", epCosts, nameOrPath, &text));
  trefoil_result_t result = trefoilCostRecordParse(record, nameOrPath, text.chars, text.numBytes);
  free(text.owned);
  return result;
}

#endif
