/* Cost records: what is built in, what the reader refuses, the fixed part by hand, and intervals. */
#include "trefoil/cost_record.h"

#include "test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static int hasJson(void) {
  trefoil_cost_record_t r;
  return trefoilCostRecordLoad(&r, "trefoil-ll-h200") != TREFOIL_INVALID_USAGE;
}

TEST(all_records_load) {
  if (!hasJson()) SKIP("built without jansson");
  int n = 0;
  for (const char *name; (name = trefoilCostRecordName(n)); n++) {
    trefoil_cost_record_t r;
    REQUIRE(trefoilCostRecordLoad(&r, name) == TREFOIL_OK, "%s", trefoilLastError());
    CHECK(!strcmp(r.costs.name, name), "%s calls itself %s", name, r.costs.name);
    CHECK(trefoilCostsCheck(&r.costs) == TREFOIL_OK, "%s: %s", name, trefoilLastError());
    for (int op = 0; op < 2; op++) {
      CHECK(r.inside[op].n > 0 && r.inside[op].mapePct < 25, "%s: %d rows, %g %%", name,
            r.inside[op].n, r.inside[op].mapePct);
    }
  }
  CHECK(n >= 3, "%d records", n);
}

TEST(every_mode_has_a_record) {
  if (!hasJson()) SKIP("built without jansson");
  for (int mode = 0; mode < TREFOIL_NUM_MODES; mode++) {
    for (int v = 0; v <= TREFOIL_VARIANT_RAILS; v++) {
      trefoil_cost_record_t r;
      const char *name = trefoilCostRecordDefault((trefoil_mode_t)mode, (trefoil_variant_t)v);
      REQUIRE(trefoilCostRecordLoad(&r, name) == TREFOIL_OK, "%s", trefoilLastError());
      CHECK(r.isHt == (mode >= TREFOIL_HT_FLAT), "%s is of the other mode", name);
    }
  }
}

/* 4 nodes of 8 ranks, 256 experts, so 8 experts a rank. One flag a rank: 7 near of 10 ns, 24 far of
 * 100 ns, 2.47 us. One an expert: eight times as much. Rounds: log2(4) = 2 of 3 us; start 5 us. */
TEST(fixed_part_by_hand) {
  trefoil_costs_t c = {.numSms = 1};
  c.op[1] = (trefoil_op_costs_t){
      .launchUs = 4, .signalNs = 10, .netSignalNs = 100, .netStartUs = 5, .nodeRoundUs = 3};
  const trefoil_shape_t four = {32, 8, 256, 8, 128}, one = {8, 8, 256, 8, 128};
  double us = trefoilCostsFixedUs(&c, TREFOIL_OP_COMBINE, &four);
  CHECK(fabs(us - (4 + 5 + 2 * 3 + 2.47)) < 1e-9, "%.12g", us);
  us = trefoilCostsFixedUs(&c, TREFOIL_OP_COMBINE, &one);
  CHECK(fabs(us - (4 + 0.07)) < 1e-9, "one node: %.12g", us);
  c.op[1].rankRoundUs = 2; /* log2(8) = 3 */
  us = trefoilCostsFixedUs(&c, TREFOIL_OP_COMBINE, &one);
  CHECK(fabs(us - (4 + 0.07 + 3 * 2)) < 1e-9, "rounds of ranks: %.12g", us);
  c.op[1].rankRoundUs = 0;
  c.signalsPerExpert = 1;
  us = trefoilCostsFixedUs(&c, TREFOIL_OP_COMBINE, &four);
  CHECK(fabs(us - (15 + 8 * 2.47)) < 1e-9, "a flag an expert: %.12g", us);
  c.op[1].netSignalNs = 0; /* then far flags cost what near ones do */
  us = trefoilCostsFixedUs(&c, TREFOIL_OP_COMBINE, &four);
  CHECK(fabs(us - (15 + 8 * 0.31)) < 1e-9, "all flags alike: %.12g", us);
  CHECK(trefoilCostsFixedUs(&c, TREFOIL_OP_DISPATCH, &four) == 0, "dispatch costs nothing here");
}

/* The text of a built-in record with `from` replaced by `to` once; "" where it does not occur. */
static char *changed(const char *path, const char *from, const char *to) {
  static char text[1 << 16], made[1 << 16];
  FILE *file = fopen(path, "r");
  if (!file) return NULL;
  size_t n = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  text[n] = 0;
  char *at = strstr(text, from);
  if (!at) return NULL;
  snprintf(made, sizeof made, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
  return made;
}

static void expectRefused(const char *from, const char *to, const char *sentence) {
  trefoil_cost_record_t r = {.isHt = -7};
  char *text = changed(getenv("TREFOIL_RECORD"), from, to);
  REQUIRE(text, "the record has no %s", from);
  CHECK(trefoilCostRecordParse(&r, "f.json", text, strlen(text)) == TREFOIL_INVALID_ARGUMENT,
        "taken: %s for %s", to, from);
  CHECK(strstr(trefoilLastError(), sentence), "\"%s\" lacks \"%s\"", trefoilLastError(), sentence);
  CHECK(r.isHt == -7, "a failure wrote its out-parameter");
}

TEST(refused_with_a_sentence) {
  if (!hasJson()) SKIP("built without jansson");
  REQUIRE(getenv("TREFOIL_RECORD"), "TREFOIL_RECORD names no file");
  expectRefused("\"mode\": \"ll\"", "\"mode\": \"lt\"", "mode must be \"ll\" or \"ht\"");
  expectRefused("\"variant\"", "\"varient\"", "varient is not known in the record");
  expectRefused("\"launch_us\"", "\"launch_ns\"", "launch_ns is not known in dispatch");
  expectRefused("\"num_sms\": {\n    \"value\": 132", "\"num_sms\": {\n    \"value\": 133",
                "num_sms in the record is 133: its own bounds are [1, 132]");
  expectRefused("\"num_sms\": {\n    \"value\": 132", "\"num_sms\": {\n    \"value\": 131.5",
                "must be an integer");
  expectRefused("\"state\": \"given\"", "\"state\": \"guessed\"", "state one of");
  expectRefused("\"low\": 1,", "", "must be {\"value\"");
  expectRefused("\"tokens\": [\n      2,", "\"tokens\": [\n      200,", "must ascend");
  expectRefused("\"nodes\": [", "\"knots\": [", "nodes in fit must be [least, most]");
  expectRefused("\"n\": 3", "\"n\": -3", "dispatch of inside in fit must be");
  expectRefused("\"within\"", "\"with\"", "dispatch of within in fit must be");
  expectRefused("\"per_scale\"", "\"scale\"", "per_scale of dispatch in fit must be {\"value\"");
  expectRefused("\"growth\"", "\"growths\"", "per_doubling of dispatch in fit must be {\"value\"");
  expectRefused("\"across_nodes\": {\n          \"value\": 0", "\"across_nodes\": {\"value\": -0",
                "across_nodes of dispatch in fit must be {\"value\"");
  expectRefused("\"from\": ", "\"of\": ", "per_scale of dispatch in fit must be {\"value\"");
  expectRefused("\"name\": \"", "\"name\": \"x\", \"name\": \"", "line");
  trefoil_cost_record_t r;
  CHECK(trefoilCostRecordLoad(&r, "nobody") == TREFOIL_INVALID_ARGUMENT, "nobody");
  CHECK(strstr(trefoilLastError(), "deepep-ll-h100"), "%s", trefoilLastError());
  CHECK(trefoilCostRecordLoad(NULL, "nobody") == TREFOIL_INVALID_ARGUMENT, "NULL");
}

/* The text of the record without the first entry of a key, which must not be the last of its object. */
static char *without(const char *key) {
  char quoted[64];
  snprintf(quoted, sizeof quoted, "\"%s\": {", key);
  char *text = changed(getenv("TREFOIL_RECORD"), quoted, quoted);
  char *at = text ? strstr(text, quoted) : NULL, *end = at ? strstr(at, "},") : NULL;
  if (!end) return NULL;
  memmove(at, end + 2, strlen(end + 2) + 1);
  return text;
}

static void loadWithout(const char *key, trefoil_cost_record_t *r) {
  char *text = without(key);
  REQUIRE(text, "the record has no %s", key);
  REQUIRE(trefoilCostRecordParse(r, "f.json", text, strlen(text)) == TREFOIL_OK, "%s",
          trefoilLastError());
}

/* Costs that older records do not have are 0 there, and keep the rules of the others where they are. */
TEST(costs_that_may_be_missing) {
  if (!hasJson()) SKIP("built without jansson");
  REQUIRE(getenv("TREFOIL_RECORD"), "TREFOIL_RECORD names no file");
  trefoil_cost_record_t r;
  loadWithout("announce_us", &r);
  CHECK(r.costs.op[0].announceUs == 0 && r.costs.op[1].announceUs > 0, "%g, %g",
        r.costs.op[0].announceUs, r.costs.op[1].announceUs);
  loadWithout("nvlink_back_share", &r);
  CHECK(r.costs.nvlinkBackShare == 0 && r.costs.ownRowsStay == 1, "what is missing is not 0");
  expectRefused("\"send_share\": {\n      \"value\": 0,\n      \"low\": 0,\n      \"high\": 0",
                "\"send_share\": {\n      \"value\": 1,\n      \"low\": 0,\n      \"high\": 1",
                "send_share 1 and 0: must be less than 1 each");
  expectRefused("\"send_share\": {",
                "\"whole_sms_from\": {\"value\": 2, \"low\": 0, \"high\": 2, \"source\": \"x\", "
                "\"state\": \"given\"}, \"send_share\": {",
                "whole_sms_from 2 and 0: must be less than 1, and at most 1");
  expectRefused("\"send_share\": {",
                "\"peers_flow_share\": {\"value\": 1, \"low\": 0, \"high\": 1, \"source\": \"x\", "
                "\"state\": \"given\"}, \"send_share\": {",
                "peers_flow_share 1 and 0, whole_sms_from 0 and 0: must be");
  expectRefused("\"send_share\": {",
                "\"pull_port_share\": {\"value\": 2, \"low\": 0, \"high\": 2, \"source\": \"x\", "
                "\"state\": \"given\"}, \"send_share\": {",
                "pull_port_share 2 and 0: must be at most 1 each");
  expectRefused("\"slot_ns\": {\n      \"value\": 0", "\"slot_ns\": {\n      \"worth\": 0",
                "slot_ns in dispatch must be {\"value\"");
}

/* Measured / predicted was within [0.9, 1.05] where it was fitted and [0.95, 1.3] held out inside the
 * range; rows that were held out beyond it do not count here. */
TEST(intervals_by_hand) {
  trefoil_cost_record_t r = {
      .range = {{1, 2}, {8, 16}, {7168, 7168}, {256, 288}, {8, 8}, {1, 256}}};
  r.inside[0] = (trefoil_residuals_t){40, 0.9, 1.05, 3};
  r.within[0] = (trefoil_residuals_t){26, 0.95, 1.3, 6};
  r.outside[0] = (trefoil_residuals_t){52, 0.5, 2, 6};
  trefoil_fit_point_t p = {2, 16, 7168, 256, 8, 128, 0, 0, 0};
  trefoil_interval_t i;
  REQUIRE(trefoilCostRecordInterval(&r, TREFOIL_OP_DISPATCH, &p, 100, &i) == TREFOIL_OK, "%s",
          trefoilLastError());
  CHECK(fabs(i.lowUs - 90) < 1e-9 && fabs(i.highUs - 130) < 1e-9, "[%g, %g]", i.lowUs, i.highUs);
  CHECK(!i.isExtrapolated && i.n == 66 && !i.outside[0], "inside: %d rows, %s", i.n, i.outside);
  p.nodes = 4;
  p.ranks = 32;
  REQUIRE(trefoilCostRecordInterval(&r, TREFOIL_OP_DISPATCH, &p, 100, &i) == TREFOIL_OK, "%s",
          trefoilLastError());
  CHECK(fabs(i.lowUs - 90) < 1e-9 && fabs(i.highUs - 130) < 1e-9, "[%g, %g]", i.lowUs, i.highUs);
  CHECK(i.isExtrapolated && i.n == 66, "outside: %d rows", i.n);
  CHECK(!strcmp(i.outside, "4 nodes (fitted: 1 to 2), 32 ranks (fitted: 8 to 16)"), "%s",
        i.outside);
  /* A fit that is off to one side: the prediction still belongs to its interval. */
  r.inside[1] = (trefoil_residuals_t){40, 1.02, 1.05, 3};
  p.nodes = 2;
  p.ranks = 16;
  REQUIRE(trefoilCostRecordInterval(&r, TREFOIL_OP_COMBINE, &p, 100, &i) == TREFOIL_OK, "%s",
          trefoilLastError());
  CHECK(i.lowUs == 100 && fabs(i.highUs - 105) < 1e-9, "[%g, %g]", i.lowUs, i.highUs);
  CHECK(trefoilCostRecordInterval(&r, (trefoil_op_t)2, &p, 1, &i) == TREFOIL_INVALID_ARGUMENT, "2");
  CHECK(trefoilCostRecordInterval(&r, TREFOIL_OP_COMBINE, &p, NAN, &i) == TREFOIL_INVALID_ARGUMENT,
        "not a number");
}

/* log(0.8) and log(1.25) at the ends inside; outside more by 0.1 for each doubling. */
static int widensBy(const trefoil_cost_record_t *r, const trefoil_fit_point_t *p, double growth) {
  trefoil_interval_t i;
  if (trefoilCostRecordInterval(r, TREFOIL_OP_COMBINE, p, 100, &i) != TREFOIL_OK) return 0;
  double low = log(0.8) - log(i.lowUs / 100), high = log(i.highUs / 100) - log(1.25);
  return fabs(low - growth) < 1e-9 && fabs(high - growth) < 1e-9;
}

TEST(intervals_widen_with_the_distance) {
  const trefoil_fit_point_t home = {2, 16, 7168, 256, 8, 128, 20, 14336, 0};
  trefoil_cost_record_t r = {.range = {.nodes = {1, 2},
                                       .ranks = {8, 16},
                                       .hidden = {7168, 7168},
                                       .experts = {256, 256},
                                       .topk = {8, 8},
                                       .tokens = {4, 256},
                                       .sms = {4, 24},
                                       .rowBytes = {{7392, 7392}, {14336, 14336}}},
                             .perDoubling = {{9, 7}, {9, 0.1}},
                             .perScale = {{9, 7}, {9, 0.4}},
                             .acrossNodes = {{9, 7}, {9, 0.3}}};
  r.inside[1] = (trefoil_residuals_t){40, 0.8, 1.1, 3};
  r.within[1] = (trefoil_residuals_t){40, 0.9, 1.25, 3};
  trefoil_fit_point_t p = home;
  CHECK(widensBy(&r, &p, 0), "inside");
  p.nodes = 4, p.ranks = 32;
  CHECK(widensBy(&r, &p, 0.4), "nodes and ranks are one doubling");
  p.nodes = 8, p.ranks = 32;
  CHECK(widensBy(&r, &p, 0.8), "nodes are the farther");
  p.nodes = 2, p.ranks = 64;
  CHECK(widensBy(&r, &p, 0.8), "ranks are the farther");
  p.ranks = 32, p.experts = 512;
  CHECK(widensBy(&r, &p, 0.4), "a rank has as many experts as before");
  p.experts = 1024;
  CHECK(widensBy(&r, &p, 0.4 + 0.1), "a rank has twice as many experts");
  p.experts = 128;
  CHECK(widensBy(&r, &p, 0.4 + 0.1), "fewer experts than fitted, on more ranks");
  p = home, p.tokens = 384;
  CHECK(widensBy(&r, &p, 0.1 * log2(1.5)), "half as many tokens again");
  p.tokens = 1;
  CHECK(widensBy(&r, &p, 0.2), "below the least");
  p.tokens = 0;
  CHECK(widensBy(&r, &p, 0.2), "no tokens are as one");
  p = home, p.hidden = 3584, p.rowBytes = 3584;
  CHECK(widensBy(&r, &p, 0.2), "the row is four times smaller, hidden half");
  p = home, p.sms = 48, p.experts = 512, p.topk = 4;
  CHECK(widensBy(&r, &p, 0.3), "SMs, experts and top-k add up");
  p.sms = 0;
  CHECK(widensBy(&r, &p, 0.2), "SMs as fitted");
  p = home, p.otherPorts = TREFOIL_OTHER_NVLINK | TREFOIL_OTHER_NETWORK;
  CHECK(widensBy(&r, &p, 0.1), "other ports are one doubling");
  r.range.nodes[1] = 1, r.range.ranks[1] = 8;
  CHECK(widensBy(&r, &home, 0.3), "several nodes where one was fitted");
  p.nodes = 4, p.ranks = 32, p.otherPorts = 0;
  CHECK(widensBy(&r, &p, 2 * 0.3), "four nodes where one was fitted");
  p.ranks = 64;
  CHECK(widensBy(&r, &p, 2 * 0.3 + 0.4), "four nodes, and twice the ranks of a node");
  p = home, p.nodes = 1, p.ranks = 16;
  CHECK(widensBy(&r, &p, 0.4), "more ranks of one node");
}

static int saysOutside(const trefoil_cost_record_t *r, const trefoil_fit_point_t *p,
                       const char *words) {
  trefoil_interval_t i;
  if (trefoilCostRecordInterval(r, TREFOIL_OP_COMBINE, p, 100, &i) != TREFOIL_OK) return 0;
  return i.isExtrapolated == (words[0] != 0) && !strcmp(i.outside, words);
}

/* SMs, bytes of a row, and ports of another rate are outside as well; the longest text is whole. */
TEST(all_that_can_lie_outside) {
  trefoil_cost_record_t r = {.range = {.nodes = {1, 2},
                                       .ranks = {8, 16},
                                       .hidden = {7168, 7168},
                                       .experts = {256, 288},
                                       .topk = {8, 8},
                                       .tokens = {1, 256},
                                       .sms = {4, 24},
                                       .rowBytes = {{7392, 7392}, {4096, 14336}}},
                             .inside = {{9, 0.9, 1.1, 3}, {9, 0.9, 1.1, 3}}};
  trefoil_fit_point_t p = {1, 8, 7168, 256, 8, 128, 20, 14336, 0};
  CHECK(saysOutside(&r, &p, ""), "nothing lies outside");
  p.otherPorts = TREFOIL_OTHER_NETWORK; /* which one node does not use */
  CHECK(saysOutside(&r, &p, ""), "a network that is not used");
  p.otherPorts = TREFOIL_OTHER_NVLINK;
  CHECK(saysOutside(&r, &p, "NVLink of other rates than fitted"), "NVLink");
  p.otherPorts = 0, p.sms = 25;
  CHECK(saysOutside(&r, &p, "25 SMs (fitted: 4 to 24)"), "SMs");
  p.sms = 0, p.rowBytes = 16384;
  CHECK(saysOutside(&r, &p, "16384 bytes a row (fitted: 4096 to 14336)"), "bytes a row");
  p = (trefoil_fit_point_t){4, 32, 4096, 8, 2, 512, 132, 2048, 3};
  CHECK(
      saysOutside(&r, &p,
                  "4 nodes (fitted: 1 to 2), 32 ranks (fitted: 8 to 16), 512 tokens (fitted: 1 to "
                  "256), 4096 hidden (fitted: 7168), 8 experts (fitted: 256 to 288), 2 top-k "
                  "(fitted: 8), 132 SMs (fitted: 4 to 24), 2048 bytes a row (fitted: 4096 to "
                  "14336), NVLink and network ports of other rates than fitted"),
      "all of it");
}

/* 280 of 350 GB/s and 40 of 50 are shares of 0.8: on 160 GB/s 128, on 25 GB/s 20. */
TEST(ports_of_another_cluster) {
  if (!hasJson()) SKIP("built without jansson");
  trefoil_cost_record_t r = {.cluster = "dgx-h100"};
  r.costs.nvlinkGbPerS = 280, r.costs.nicGbPerS = 40, r.costs.numSms = 7;
  trefoil_cluster_t cluster;
  trefoil_costs_t c;
  int other = -1;
  REQUIRE(trefoilClusterLoad(&cluster, "h800") == TREFOIL_OK, "%s", trefoilLastError());
  cluster.nicGbPerS = 25;
  REQUIRE(trefoilCostRecordOnCluster(&r, &cluster, &c, &other) == TREFOIL_OK, "%s",
          trefoilLastError());
  CHECK(fabs(c.nvlinkGbPerS - 128) < 1e-9 && fabs(c.nicGbPerS - 20) < 1e-9 && c.numSms == 7,
        "%g and %g GB/s, %d SMs", c.nvlinkGbPerS, c.nicGbPerS, c.numSms);
  CHECK(other == (TREFOIL_OTHER_NVLINK | TREFOIL_OTHER_NETWORK), "%d", other);
  REQUIRE(trefoilClusterLoad(&cluster, "dgx-h100") == TREFOIL_OK, "%s", trefoilLastError());
  REQUIRE(trefoilCostRecordOnCluster(&r, &cluster, &c, &other) == TREFOIL_OK, "at home");
  CHECK(c.nvlinkGbPerS == 280 && c.nicGbPerS == 40 && other == 0, "at home: %g, %g, %d",
        c.nvlinkGbPerS, c.nicGbPerS, other);
  snprintf(r.cluster, sizeof r.cluster, "nowhere");
  c.numSms = -7;
  CHECK(trefoilCostRecordOnCluster(&r, &cluster, &c, NULL) == TREFOIL_INVALID_ARGUMENT, "nowhere");
  CHECK(c.numSms == -7, "a failure wrote its out-parameter");
}

TEST_MAIN()
