/* Predictions: from routing to both operations' bounds, redundant experts, what must not change. */
#include "trefoil/models.h"

#include "test.h"

#include <math.h>

static const trefoil_moe_t smallMoe = {.name = "small",
                                       .hidden = 1024,
                                       .numExperts = 64,
                                       .topk = 4,
                                       .numMoeLayers = 1,
                                       .expertHidden = 1};

static trefoil_cluster_t fabric(int gpusPerNode) {
  trefoil_cluster_t c = {.name = "fabric", .gpusPerNode = gpusPerNode, .maxGpus = 1024};
  c.gpusPerNic = 1;
  c.nvlinkGbPerS = 350;
  c.nicGbPerS = 50;
  c.netLatencyUs = 8;
  c.llFixedUs = 3.4;
  c.htFixedUs = 11;
  return c;
}

static trefoil_prediction_t predict(const trefoil_cluster_t *c, trefoil_mode_t mode, int ep,
                                    int physical) {
  trefoil_predict_spec_t spec = {
      .cluster = c, .mode = mode, .dispatchRowBytes = 2048, .combineRowBytes = 2048};
  trefoil_predict_load_t load = {ep, physical, 50, 3, 0};
  trefoil_prediction_t p = {0};
  CHECK(trefoilPredictUniform(&spec, &smallMoe, &load, &p) == TREFOIL_OK, "%s", trefoilLastError());
  return p;
}

/* Every entry of exact LL combine is a row: 16 ranks * 50 tokens * 4 entries, by tier together. */
TEST(bytes_are_conserved) {
  trefoil_cluster_t c = fabric(8);
  for (int physical = 0; physical <= 128; physical += 64) {
    trefoil_prediction_t p = predict(&c, TREFOIL_LL_EXPERT_MAJOR, 16, physical);
    const uint64_t *tier = p.loads[TREFOIL_OP_COMBINE].totalBytes;
    CHECK(tier[0] + tier[1] + tier[2] == 16ull * 50 * 4 * 2048, "%d physical experts", physical);
    CHECK(p.closedForm[0].fixedUs == 3.4 + 8 && p.closedForm[0].us > p.closedForm[0].fixedUs, "%g",
          p.closedForm[0].us);
  }
}

/* 128 ranks with one of 128 physical experts each, two copies of every expert: if entries did not
 * choose among the copies, half of the ranks would receive nothing and the others twice the mean. */
TEST(redundant_experts_spread) {
  trefoil_cluster_t c = fabric(8);
  trefoil_prediction_t copies = predict(&c, TREFOIL_LL_EXPERT_MAJOR, 128, 128);
  const trefoil_port_loads_t *l = &copies.loads[TREFOIL_OP_DISPATCH];
  /* a rank receives 200 rows on average, 120 of 128 of them from other nodes */
  double mean = 50 * 4 * 2048 * 120.0 / 128;
  CHECK((double)l->maxBytes[TREFOIL_PORT_NIC_IN] < 1.5 * mean, "%llu bytes, mean %g",
        (unsigned long long)l->maxBytes[TREFOIL_PORT_NIC_IN], mean);
  CHECK((double)l->totalBytes[TREFOIL_TIER_NET] > 0.9 * 128 * mean, "all ranks receive");
}

TEST(one_node_uses_no_net) {
  trefoil_cluster_t c = fabric(72);
  c.nicGbPerS = 0;
  trefoil_prediction_t p = predict(&c, TREFOIL_HT_FLAT, 64, 0);
  CHECK(p.loads[0].totalBytes[TREFOIL_TIER_NET] == 0 && p.closedForm[0].fixedUs == 11,
        "net in a rack");
  CHECK(p.closedForm[0].limit == TREFOIL_PORT_NVLINK_OUT ||
            p.closedForm[0].limit == TREFOIL_PORT_NVLINK_IN,
        "limit %s", trefoilPortName(p.closedForm[0].limit));
  /* combine mirrors dispatch: the same rows the other way */
  CHECK(p.loads[0].maxBytes[TREFOIL_PORT_NVLINK_OUT] == p.loads[1].maxBytes[TREFOIL_PORT_NVLINK_IN],
        "mirror");
}

/* Partial sums: a row a (token, rank), in combine alone. */
TEST(partial_sums_are_fewer_rows) {
  trefoil_cluster_t c = fabric(8);
  trefoil_predict_spec_t spec = {.cluster = &c,
                                 .mode = TREFOIL_LL_EXPERT_MAJOR,
                                 .combinePartial = 1,
                                 .dispatchRowBytes = 2048,
                                 .combineRowBytes = 2048};
  trefoil_predict_load_t load = {2, 0, 50, 3, 0};
  trefoil_prediction_t partial = {0}, exact = predict(&c, TREFOIL_LL_EXPERT_MAJOR, 2, 0);
  CHECK(trefoilPredictUniform(&spec, &smallMoe, &load, &partial) == TREFOIL_OK, "%s",
        trefoilLastError());
  for (int tier = 0; tier < 3; tier++) {
    uint64_t sent = exact.loads[TREFOIL_OP_DISPATCH].totalBytes[tier];
    CHECK(partial.loads[TREFOIL_OP_DISPATCH].totalBytes[tier] == sent, "dispatch, tier %d", tier);
    CHECK(partial.loads[TREFOIL_OP_COMBINE].totalBytes[tier] == sent, "combine, tier %d", tier);
  }
  CHECK(exact.loads[TREFOIL_OP_COMBINE].totalBytes[1] >
            partial.loads[TREFOIL_OP_COMBINE].totalBytes[1],
        "exact sums are as few rows");
}

/* 4 nodes of 2, a group of 16 experts a node: of one group, HT sends a token to at most one node. */
TEST(groups_send_less_over_the_net) {
  trefoil_cluster_t c = fabric(2);
  trefoil_moe_t moe = smallMoe;
  moe.numGroups = 4;
  moe.topkGroups = 1;
  trefoil_predict_spec_t spec = {
      .cluster = &c, .mode = TREFOIL_HT_FLAT, .dispatchRowBytes = 2048, .combineRowBytes = 2048};
  trefoil_predict_load_t load = {8, 0, 500, 3, 0};
  trefoil_prediction_t any, one;
  REQUIRE(trefoilPredictUniform(&spec, &moe, &load, &any) == TREFOIL_OK, "%s", trefoilLastError());
  load.isGrouped = 1;
  REQUIRE(trefoilPredictUniform(&spec, &moe, &load, &one) == TREFOIL_OK, "%s", trefoilLastError());
  double sent = (double)one.loads[0].totalBytes[TREFOIL_TIER_NET] / (8 * 500 * 2048.0);
  CHECK(sent > 0.72 && sent < 0.78, "%g nodes a token: three groups of four are elsewhere", sent);
  CHECK(any.loads[0].totalBytes[TREFOIL_TIER_NET] > 2 * one.loads[0].totalBytes[TREFOIL_TIER_NET],
        "any of 4 groups sends as little");
}

TEST(bad_input) {
  trefoil_cluster_t c = fabric(8);
  trefoil_predict_spec_t spec = {.cluster = &c, .mode = TREFOIL_HT_FLAT, .dispatchRowBytes = 1};
  trefoil_prediction_t p = {.closedForm = {{.us = -7}}};
  trefoil_predict_load_t load = {128, 0, 50, 3, 0};
  CHECK(trefoilPredictUniform(&spec, &smallMoe, &load, &p) == TREFOIL_INVALID_ARGUMENT,
        "EP 128 of 64");
  load = (trefoil_predict_load_t){8, 32, 50, 3, 0};
  CHECK(trefoilPredictUniform(&spec, &smallMoe, &load, &p) == TREFOIL_INVALID_ARGUMENT, "32 of 64");
  load = (trefoil_predict_load_t){8, 0, 0, 3, 0};
  CHECK(trefoilPredictUniform(&spec, &smallMoe, &load, &p) == TREFOIL_INVALID_ARGUMENT,
        "no tokens");
  CHECK(trefoilPredictUniform(NULL, &smallMoe, &load, &p) == TREFOIL_INVALID_ARGUMENT, "NULL");
  CHECK(trefoilPredictRouting(&spec, NULL, &p) == TREFOIL_INVALID_ARGUMENT, "NULL");
  c.nicGbPerS = 0;
  load = (trefoil_predict_load_t){16, 0, 5, 3, 0};
  CHECK(trefoilPredictUniform(&spec, &smallMoe, &load, &p) == TREFOIL_INVALID_ARGUMENT,
        "no network");
  CHECK(p.closedForm[0].us == -7, "a failure wrote its out-parameter");
}

TEST_MAIN()
