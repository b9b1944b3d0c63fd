/* Work of others beside an operation, with both engines in cases worked out by hand. Rows, ways and
 * fixed times are those of sim_world.h: NVLink row 0.1 us at 100 GB/s and way 0.5, network row 0.2 at
 * 50 and way 5, LL 3. SimGrid ends a flow when next to nothing of it is left, and others go on from
 * there, so times are within a tenth of a nanosecond. */
#define WORLD_NEAR_US 1e-4
#include "sim_world.h"

/* Rank 0 sends rows to rank 1, in a group of four ranks; its first row leaves at 3. */
static void initPair(world_t *w, int ranksPerNode, int numRows, trefoil_flow_t *flow) {
  worldInit(w, 4, ranksPerNode, TREFOIL_LL_EXPERT_MAJOR);
  worldSend(w, 0, 1, numRows);
  w->run.flows = flow;
  w->run.numFlows = 1;
}

TEST(a_flow_takes_its_share_of_a_port_that_both_want) {
  trefoil_flow_t flow = {.from = 0, .to = 1};
  world_t w;
  initPair(&w, 4, 40, &flow);
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 4 / 0.5); /* a half, where the costs say nothing */
  w.costs.op[0].flowShare = 0.6;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 4 / 0.4);
  flow.gbPerS = 20; /* it wants no more */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 4 / 0.8);
  flow.gbPerS = 90;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 4 / 0.4);
  w.costs.nvlinkGbPerS = 200; /* bytes of a flow are bytes: half the port now */
  flow.gbPerS = 100;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 2 / 0.5);
}

TEST(one_port_of_the_way_is_enough) {
  trefoil_flow_t flow = {.from = 0, .to = 2};
  world_t w;
  initPair(&w, 4, 40, &flow); /* out of rank 0 */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 4 / 0.5);
  flow.from = 2, flow.to = 1; /* into rank 1 */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 4 / 0.5);
  flow.from = 1, flow.to = 0; /* the other direction: a combine's */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 4);
  CHECK_US(&w, TREFOIL_OP_COMBINE, 3 + 0.5 + 4 / 0.5);
  flow.from = 3, flow.to = 2; /* ports that are idle */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 4);
}

/* Reading gets half of a port of 100 GB/s, a flow of 50 the other half of what is left. */
TEST(a_flow_takes_of_the_ports_rate_where_rows_are_pulled) {
  trefoil_flow_t flow = {.from = 0, .to = 1, .gbPerS = 50};
  world_t w;
  worldInit(&w, 2, 2, TREFOIL_HT_FLAT);
  worldSend(&w, 0, 1, 40);
  w.run.flows = &flow;
  w.run.numFlows = 1;
  w.costs.op[0].flowShare = 0.6;
  w.costs.op[0].pullSms = 4096;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 10 + 0.5 + 40 * 0.1 / 0.5);
  w.costs.op[0].pullPortShare = 0.5;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 10 + 0.5 + 40 * 0.1 / 0.5 / 0.5);
}

TEST(flows_take_more_among_more_than_two_ranks) {
  trefoil_flow_t flow = {.from = 0, .to = 1};
  world_t w;
  initPair(&w, 4, 40, &flow);
  w.costs.op[0].flowShare = 0.6;
  w.costs.op[0].peersFlowShare = 0.75;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 4 / 0.25);
  initPair(&w, 2, 40, &flow);
  w.costs.op[0].flowShare = 0.6;
  w.costs.op[0].peersFlowShare = 0.75;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 4 / 0.4);
}

TEST(last_words_wait_behind_flows) {
  trefoil_flow_t flow = {.from = 0, .to = 1};
  world_t w;
  initPair(&w, 4, 40, &flow);
  w.costs.op[0].flowWaitUs = 2;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 4 / 0.5 + 3 * 2); /* into rank 1: all three words */
  flow.to = 2;                                                  /* that of rank 0 alone */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 4 / 0.5 + 2);
  flow.from = 2, flow.to = 3; /* that of rank 2 */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 4 + 2);
  flow.startUs = 1; /* only those that are there from the start */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 4);
  flow.startUs = 0, flow.gbPerS = 20; /* and take all that they get */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 4);
  flow = (trefoil_flow_t){.from = 0, .to = 2}; /* over the network no word of NVLink */
  initPair(&w, 2, 40, &flow);
  w.costs.op[0].flowWaitUs = 2;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 5);
}

TEST(flows_divide_their_share_alike) {
  trefoil_flow_t flows[] = {{.from = 0, .to = 2}, {.from = 0, .to = 3, .gbPerS = 10}};
  world_t w;
  initPair(&w, 4, 40, flows);
  w.run.numFlows = 2;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 4 / 0.65); /* 25 and 10 of 100 GB/s */
  flows[1].gbPerS = 0;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 4 / 0.5);
  flows[1].startUs = 1e6;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 4 / 0.5);
}

TEST(a_flow_begins_and_ends_midway) {
  trefoil_flow_t flow = {.from = 0, .to = 1, .endUs = 6.5};
  world_t w;
  initPair(&w, 4, 40, &flow);
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 6.5 + 0.5 + 4 - 3.5 * 0.5); /* 3 to 6.5 at half the rate */
  flow.startUs = 4.5;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 6.5 + 0.5 + 4 - 1.5 - 2 * 0.5);
  flow.endUs = 0;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 4.5 + 0.5 + (4 - 1.5) / 0.5);
  flow.startUs = 7.5; /* all is there */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 4);
  flow = (trefoil_flow_t){.from = 2, .to = 1, .startUs = 3.5, .endUs = 5}; /* in alone: 4 to 5.5 */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 5.5 + 4 - 0.5 - 1.5 * 0.5);
  worldChange(&w, TREFOIL_CHANGE_START_US, 0, 10); /* the sender comes when it is over */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 10 + 0.5 + 4);
}

TEST(a_flow_over_the_network) {
  trefoil_flow_t flow = {.from = 0, .to = 1, .gbPerS = 10};
  world_t w;
  initPair(&w, 1, 40, &flow);
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 5 + 8 / 0.8);
  flow.endUs = 8;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 8 + 5 + 8 - 5 * 0.8);
  w.cluster.nodesPerLeaf = 2; /* ranks 0 and 1 under one leaf, of the other two a flow comes */
  w.run.oversubscription = 2; /* leaves of 50 GB/s: a row takes 0.2 us of them, too */
  w.numTokens[0] = 0;
  worldSend(&w, 0, 2, 40);
  flow = (trefoil_flow_t){.from = 1, .to = 3, .gbPerS = 20};
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 5 + 8 / 0.6);
}

TEST(products_slow_all_sms) {
  world_t w;
  worldInit(&w, 2, 2, TREFOIL_LL_EXPERT_MAJOR);
  worldSend(&w, 0, 1, 10);
  w.costs.op[0].receiveRowNs = 300;
  w.costs.productShare = 0.25;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 10 * 0.3);
  w.run.hasProducts = 1;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 10 * 0.4);
}

static void expectRefusal(world_t *w, const char *words) {
  trefoil_sim_result_t result;
  trefoil_sim_t *sim = worldRun(w, TREFOIL_ENGINE_QUEUES, &result);
  CHECK(!sim && strstr(trefoilLastError(), words), "expected \"%s\", got %s", words,
        sim ? "an answer" : trefoilLastError());
  trefoilSimDestroy(sim);
}

TEST(flows_that_make_no_sense) {
  trefoil_flow_t flow = {.from = 0, .to = 4};
  world_t w;
  initPair(&w, 4, 10, &flow);
  expectRefusal(&w, "a flow from rank 0 to 4: must be two ranks in [0, 4)");
  flow.to = 0;
  expectRefusal(&w, "must be two ranks");
  flow = (trefoil_flow_t){.from = 0, .to = 1, .gbPerS = -1};
  expectRefusal(&w, "a flow of -1 GB/s: must be in [0, 1e9]");
  flow = (trefoil_flow_t){.from = 0, .to = 1, .startUs = 2, .endUs = 1};
  expectRefusal(&w, "a flow from 2 us to 1 us");
  flow = (trefoil_flow_t){.from = 0, .to = 1, .startUs = NAN};
  expectRefusal(&w, "a flow from nan us");
  w.run.numFlows = -1;
  expectRefusal(&w, "-1 flows: must be in [0, 1024]");
  w.run.numFlows = 1, w.run.flows = NULL;
  expectRefusal(&w, "1 flows");
  w.run.numFlows = 0, w.run.hasProducts = 1;
  expectRefusal(&w, "do not know what background matrix products take: productShare is 0");
  w.run.hasProducts = 0, w.costs.op[1].flowShare = 1;
  expectRefusal(&w, "costs: flowShare 1 of combine: must be in [0, 1)");
  w.costs.op[1].flowShare = 0, w.costs.op[1].peersFlowShare = 1;
  expectRefusal(&w, "costs: peersFlowShare 1 of combine: must be in [0, 1)");
  w.costs.op[1].peersFlowShare = 0, w.costs.productShare = -0.5;
  expectRefusal(&w, "costs: productShare -0.5: must be in [0, 1)");
}

TEST_MAIN()
