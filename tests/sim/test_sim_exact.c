/* Cases that can be worked out by hand, with both engines. Rows, ways and fixed times are those of
 * sim_world.h: NVLink row 0.1 us and way 0.5, network row 0.2 and way 5, LL 3, HT 10. */
#include "sim_world.h"

TEST(one_transfer) {
  world_t w;
  worldInit(&w, 2, 2, TREFOIL_LL_EXPERT_MAJOR);
  worldSend(&w, 0, 1, 10);
  /* 3 + way 0.5 + 10 rows of 0.1 */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 4.5);
  CHECK_US(&w, TREFOIL_OP_COMBINE, 4.5);
}

TEST(one_transfer_over_the_network) {
  world_t w;
  worldInit(&w, 2, 1, TREFOIL_LL_EXPERT_MAJOR);
  worldSend(&w, 0, 1, 10);
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 5 + 10 * 0.2);
}

/* 2 nodes of 2 ranks: 10 tokens of rank 0 for rank 3 go to rank 2, which passes them on when all are
 * there. */
TEST(low_latency_by_rails) {
  world_t w;
  worldInit(&w, 4, 2, TREFOIL_LL_EXPERT_MAJOR);
  w.workload.variant = TREFOIL_VARIANT_RAILS;
  worldSend(&w, 0, 3, 10);
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + (5 + 10 * 0.2) + (0.5 + 10 * 0.1));
  CHECK_US(&w, TREFOIL_OP_COMBINE, 3 + 5 + 10 * 0.2); /* straight */
  /* rank 1's go over the other card, and from rank 3 to itself; 10 ns of the forwarders' SMs a row */
  worldSend(&w, 1, 3, 10);
  w.costs.op[0].sendRowNs = 10 * 0.5;
  w.costs.numSms = 1;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + (5 + 10 * 0.2) + (0.5 + 10 * 0.1));
}

TEST(nothing_to_send) {
  world_t w;
  worldInit(&w, 4, 2, TREFOIL_LL_EXPERT_MAJOR);
  /* every rank waits for the word of those of the other node, 5 us away */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 5);
}

TEST(rows_to_itself_cross_no_port) {
  world_t w;
  worldInit(&w, 2, 2, TREFOIL_LL_EXPERT_MAJOR);
  worldSend(&w, 0, 0, 50);
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5);
}

TEST(one_rank_alone) {
  world_t w;
  worldInit(&w, 1, 1, TREFOIL_LL_EXPERT_MAJOR);
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3);
  worldSend(&w, 0, 0, 10);
  w.costs.op[0].sendRowNs = 100;
  w.costs.op[0].receiveRowNs = 200; /* the slower half of the copy */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 10 * 0.2);
  worldInit(&w, 1, 1, TREFOIL_HT_FLAT);
  worldSend(&w, 0, 0, 10);
  CHECK_US(&w, TREFOIL_OP_COMBINE, 10);
}

TEST(incast) {
  world_t w;
  worldInit(&w, 5, 5, TREFOIL_LL_EXPERT_MAJOR);
  for (int r = 1; r < 5; r++) worldSend(&w, r, 0, 10);
  /* 40 rows into one port */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 40 * 0.1);
  /* and back out of it */
  CHECK_US(&w, TREFOIL_OP_COMBINE, 3 + 0.5 + 40 * 0.1);
}

TEST(port_out_and_in_at_the_same_time) {
  world_t w;
  worldInit(&w, 4, 4, TREFOIL_LL_EXPERT_MAJOR);
  worldSend(&w, 0, 1, 10);
  worldSend(&w, 0, 2, 20);
  worldSend(&w, 3, 1, 20);
  /* 30 rows out of rank 0 and 30 into rank 1: neither port is idle before 3 us. Fair shares: all
   * flows at half rate until 2.0, when 0 -> 1 is through; the others' last 10 rows at full rate. */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 3.0);
}

TEST(max_min_fair_thirds) {
  world_t w;
  worldInit(&w, 5, 5, TREFOIL_LL_EXPERT_MAJOR);
  worldSend(&w, 0, 4, 12);
  worldSend(&w, 1, 4, 12);
  worldSend(&w, 2, 4, 12);
  worldSend(&w, 2, 3, 32);
  if (!trefoilSimHasSimGrid()) SKIP("no SimGrid in this build");
  trefoil_sim_result_t r;
  trefoil_sim_t *sim = worldRun(&w, TREFOIL_ENGINE_SIMGRID, &r);
  REQUIRE(sim, "%s", trefoilLastError());
  /* into 4: thirds, through at 36 rows' time; 2 -> 3 has two thirds of its port, 24 rows by then, and
   * the whole port for the 8 that are left */
  CHECK(NEAR(r.op[0].finishUs[4], 3.5 + 3.6), "%.9g", r.op[0].finishUs[4]);
  CHECK(NEAR(r.op[0].finishUs[3], 3.5 + 3.6 + 0.8), "%.9g", r.op[0].finishUs[3]);
  trefoilSimDestroy(sim);
}

/* Four nodes of one GPU, two nodes a leaf. */
static void initLeaves(world_t *w) {
  worldInit(w, 4, 1, TREFOIL_LL_EXPERT_MAJOR);
  w->cluster.nodesPerLeaf = 2;
  worldSend(w, 0, 2, 10);
  worldSend(w, 1, 3, 10);
}

TEST(oversubscribed_leaf) {
  world_t w;
  initLeaves(&w);
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 5 + 10 * 0.2);
  /* 2:1: both go up through one uplink of a port's rate */
  w.cluster.leafOversubscription = 2;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 5 + 20 * 0.2);
  /* 4:1, as a question to the run */
  w.run.oversubscription = 4;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 5 + 20 * 0.4);
  w.run.oversubscription = 1;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 5 + 10 * 0.2);
}

TEST(leaf_of_neighbours_is_not_crossed) {
  world_t w;
  worldInit(&w, 4, 1, TREFOIL_LL_EXPERT_MAJOR);
  w.cluster.nodesPerLeaf = 2;
  w.cluster.leafOversubscription = 8;
  worldSend(&w, 0, 1, 10);
  worldSend(&w, 2, 3, 10);
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 5 + 10 * 0.2);
}

TEST(rail_leaves) {
  world_t w;
  worldInit(&w, 4, 2, TREFOIL_LL_EXPERT_MAJOR);
  w.cluster.nodesPerLeaf = 2;
  w.cluster.railLeaves = 1;
  w.cluster.leafOversubscription = 2;
  worldSend(&w, 0, 2, 10); /* the same rail: one leaf */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 5 + 10 * 0.2);
  worldSend(&w, 1, 2, 10); /* rail 1 to rail 0: up and down at half the leaf's two ports */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 5 + 20 * 0.2);
  worldSend(&w, 3, 0, 30); /* rail 1 again: 40 rows go up, into two different ports */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 5 + 40 * 0.2);
}

TEST(late_rank) {
  world_t w;
  worldInit(&w, 3, 3, TREFOIL_LL_EXPERT_MAJOR);
  worldSend(&w, 0, 1, 10);
  worldChange(&w, TREFOIL_CHANGE_START_US, 0, 7);
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 7 + 3 + 0.5 + 10 * 0.1);
  /* rank 2 has nothing to do with those rows, but waits for the word of rank 0 */
  trefoil_sim_result_t r;
  trefoil_sim_t *sim = worldRun(&w, TREFOIL_ENGINE_QUEUES, &r);
  REQUIRE(sim, "%s", trefoilLastError());
  CHECK(NEAR(r.op[0].finishUs[2], 7 + 3 + 0.5), "%.9g", r.op[0].finishUs[2]);
  trefoilSimDestroy(sim);
}

/* A link's share is of the whole operation: ranks 2 and 3 have long ended when 0's rows arrive. */
TEST(shares_of_links) {
  world_t w;
  worldInit(&w, 4, 4, TREFOIL_LL_EXPERT_MAJOR);
  worldSend(&w, 0, 1, 60);
  trefoil_sim_result_t r;
  trefoil_sim_t *sim = worldRun(&w, TREFOIL_ENGINE_QUEUES, &r);
  REQUIRE(sim, "%s", trefoilLastError());
  const trefoil_sim_op_t *o = &r.op[0];
  CHECK(NEAR(o->us, 9.5) && o->firstUs < 9.5, "%.9g, first %.9g", o->us, o->firstUs);
  int numPorts = 0;
  for (int i = 0; i < o->numLinks; i++) {
    trefoil_resource_t kind = o->links[i].kind;
    if (kind == TREFOIL_RESOURCE_SEND || kind == TREFOIL_RESOURCE_RECEIVE) continue;
    numPorts++;
    CHECK(NEAR(o->links[i].busyUs, 6) && NEAR(o->links[i].share, 6 / 9.5), "%s: %.9g us, %.9g",
          trefoilResourceName(kind), o->links[i].busyUs, o->links[i].share);
  }
  CHECK(numPorts == 2, "%d ports", numPorts);
  trefoilSimDestroy(sim);
}

/* Every rank waits for the last word of the others, the latest one for the second latest's. */
TEST(words_of_others) {
  world_t w;
  worldInit(&w, 4, 2, TREFOIL_LL_EXPERT_MAJOR);
  worldChange(&w, TREFOIL_CHANGE_START_US, 0, 6);
  worldChange(&w, TREFOIL_CHANGE_START_US, 1, 5.8);
  for (int e = firstEngine(); e <= TREFOIL_ENGINE_QUEUES; e++) {
    trefoil_sim_result_t r;
    trefoil_sim_t *sim = worldRun(&w, (trefoil_engine_t)e, &r);
    REQUIRE(sim, "%s", trefoilLastError());
    /* starts 9, 8.8, 3, 3; words take 0.5 within a node, 5 between them */
    const double ends[] = {9.3, 9.5, 14, 14};
    for (int k = 0; k < 4; k++) {
      CHECK(NEAR(r.op[0].finishUs[k], ends[k]), "rank %d at %.9g", k, r.op[0].finishUs[k]);
    }
    trefoilSimDestroy(sim);
  }
}

TEST(all_late_is_not_late) {
  world_t w;
  worldInit(&w, 2, 2, TREFOIL_LL_EXPERT_MAJOR);
  worldSend(&w, 0, 1, 10);
  worldChange(&w, TREFOIL_CHANGE_START_US, -1, 7);
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 4.5);
}

TEST(slow_sms) {
  world_t w;
  worldInit(&w, 2, 2, TREFOIL_LL_EXPERT_MAJOR);
  worldSend(&w, 0, 1, 10);
  w.costs.numSms = 2;
  w.costs.op[0].sendRowNs = 200; /* two SMs: 100 ns a row, as the port */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 4.5);
  worldChange(&w, TREFOIL_CHANGE_SM_RATE, 0, 0.5);
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 10 * 0.2);
  w.run.numSms = 1;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 10 * 0.4);
}

/* What the SMs of a straggler take is taken longer, too. */
TEST(straggler_receives) {
  world_t w;
  worldInit(&w, 3, 3, TREFOIL_LL_EXPERT_MAJOR);
  worldSend(&w, 1, 0, 10);
  worldSend(&w, 2, 0, 10);
  w.costs.numSms = 4;
  w.costs.op[0].receiveRowNs = 400;
  worldChange(&w, TREFOIL_CHANGE_SM_RATE, 0, 0.5);
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 20 * 0.2);
}

TEST(slow_receiver) {
  world_t w;
  worldInit(&w, 3, 3, TREFOIL_LL_EXPERT_MAJOR);
  worldSend(&w, 1, 0, 10);
  worldSend(&w, 2, 0, 10);
  w.costs.numSms = 4;
  w.costs.op[0].receiveRowNs = 400;
  w.costs.op[0].receiveGbPerSPerSm = 25; /* 10000 bytes in 400 ns: 800 in all, 200 of four SMs */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 20 * 0.2);
}

TEST(tokens_cost_before_their_rows) {
  world_t w;
  worldInit(&w, 2, 2, TREFOIL_LL_EXPERT_MAJOR);
  worldSend(&w, 0, 1, 10);
  w.costs.op[0].tokenNs = 300;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 10 * 0.3);
  w.costs.op[0].tokenNs = 0;
  w.costs.op[1].tokenNs = 300; /* combine: to write each token, where it is received */
  CHECK_US(&w, TREFOIL_OP_COMBINE, 3 + 0.5 + 10 * 0.3);
}

TEST(gaps_between_messages) {
  world_t w;
  worldInit(&w, 2, 1, TREFOIL_LL_EXPERT_MAJOR);
  worldSend(&w, 0, 1, 10);
  w.costs.netMessageNs = 120;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 5 + 10 * (0.2 + 0.12));
  w.costs.rowsPerMessage = 4;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 5 + 10 * (0.2 + 0.03));
  w.costs.nvlinkRowNs = 1000; /* no NVLink here */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 5 + 10 * (0.2 + 0.03));
}

TEST(gaps_between_nvlink_rows) {
  world_t w;
  worldInit(&w, 2, 2, TREFOIL_LL_EXPERT_MAJOR);
  worldSend(&w, 0, 1, 10);
  w.costs.nvlinkRowNs = 40;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 10 * (0.1 + 0.04));
}

TEST(rows_of_each_way_have_their_own_bytes) {
  world_t w;
  worldInit(&w, 2, 2, TREFOIL_LL_EXPERT_MAJOR);
  worldSend(&w, 0, 1, 10);
  w.workload.combineRowBytes = 2 * WORLD_ROW_BYTES;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 10 * 0.1);
  CHECK_US(&w, TREFOIL_OP_COMBINE, 3 + 0.5 + 10 * 0.2);
}

TEST(flags_are_part_of_the_fixed_time) {
  world_t w;
  worldInit(&w, 4, 2, TREFOIL_LL_EXPERT_MAJOR);
  worldSend(&w, 0, 2, 10);
  w.costs.op[0].signalNs = 100;
  /* one rank of the node, two of the other */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 3 * 0.1 + 5 + 10 * 0.2);
  w.costs.op[0].netSignalNs = 400;
  w.costs.op[0].nodeRoundUs = 2;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.1 + 2 * 0.4 + 2 + 5 + 10 * 0.2);
}

TEST(slow_and_failed_ports) {
  world_t w;
  worldInit(&w, 4, 2, TREFOIL_LL_EXPERT_MAJOR);
  worldSend(&w, 0, 2, 10);
  worldSend(&w, 1, 3, 10);
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 5 + 10 * 0.2);
  worldChange(&w, TREFOIL_CHANGE_NIC_RATE, 3, 0.25); /* the port of rank 3 */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 5 + 10 * 0.8);
  w.changes[0] = (trefoil_change_t){TREFOIL_CHANGE_RAIL_RATE, 0, 0.5};
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 5 + 10 * 0.4);
  /* a rail down: both ranks of a node share the port that is left */
  w.changes[0] = (trefoil_change_t){TREFOIL_CHANGE_RAIL_FAIL, 1, 0};
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 5 + 20 * 0.2);
  /* only one end has a port less: the same, for it is the end of both */
  w.changes[0] = (trefoil_change_t){TREFOIL_CHANGE_NIC_FAIL, 2, 0};
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 5 + 20 * 0.2);
}

/* A leaf has the uplinks of the ports that are up: 2:1 of two ports is one, of one it is half of one. */
TEST(leaf_of_a_failed_port) {
  world_t w;
  worldInit(&w, 4, 2, TREFOIL_LL_EXPERT_MAJOR);
  w.cluster.nodesPerLeaf = 1;
  w.cluster.leafOversubscription = 2;
  worldSend(&w, 0, 2, 10);
  worldSend(&w, 1, 3, 10);
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 5 + 20 * 0.2);
  worldChange(&w, TREFOIL_CHANGE_NIC_FAIL, 1, 0);
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 5 + 20 * 0.4);
}

TEST(slow_nvlink) {
  world_t w;
  worldInit(&w, 2, 2, TREFOIL_LL_EXPERT_MAJOR);
  worldSend(&w, 0, 1, 10);
  worldChange(&w, TREFOIL_CHANGE_NVLINK_RATE, 1, 0.5);
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 10 * 0.2);
}

TEST(gpus_that_share_a_port) {
  world_t w;
  worldInit(&w, 4, 2, TREFOIL_LL_EXPERT_MAJOR);
  w.cluster.gpusPerNic = 2;
  worldSend(&w, 0, 2, 10);
  worldSend(&w, 1, 3, 10);
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 5 + 20 * 0.2);
}

/* HT: rank 0 (node 0) to rank 3 (node 1) goes over rank 2, its rail's GPU there. */
TEST(two_chunks_are_pipelined) {
  world_t w;
  worldInit(&w, 4, 2, TREFOIL_HT_FLAT);
  w.workload.chunkTokens = 10;
  worldSend(&w, 0, 3, 20);
  /* chunks come to rank 2 at 10 + 5 + 2 and 2 later; the second is forwarded in 0.5 + 1 */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 19 + 1.5);
  /* back: at rank 2 at 10 + 0.5 + 1, the network is free for the first at once; 2 each after it */
  CHECK_US(&w, TREFOIL_OP_COMBINE, 11.5 + 5 + 2 * 2);
  /* as one chunk: 4 over the network, then 2 within the node */
  w.workload.chunkTokens = 64;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 10 + 5 + 4 + 0.5 + 2);
  CHECK_US(&w, TREFOIL_OP_COMBINE, 10 + 0.5 + 2 + 5 + 4);
}

TEST(two_rails) {
  world_t w;
  worldInit(&w, 4, 2, TREFOIL_HT_FLAT);
  worldSend(&w, 0, 3, 10);
  worldSend(&w, 1, 3, 10);
  /* each over its own rail: 10 + 5 + 2; rank 1's are there, rank 0's go on from rank 2 */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 17 + 0.5 + 1);
}

TEST(one_rail_first_come_or_fair) {
  world_t w;
  worldInit(&w, 4, 2, TREFOIL_HT_FLAT);
  w.cluster.gpusPerNic = 2;
  worldSend(&w, 0, 3, 10);
  worldSend(&w, 1, 3, 10);
  trefoil_sim_result_t r;
  trefoil_sim_t *sim = worldRun(&w, TREFOIL_ENGINE_QUEUES, &r);
  REQUIRE(sim, "%s", trefoilLastError());
  /* one after the other: rank 0's at 17, forwarded by 18.5; rank 1's at 19 */
  CHECK(NEAR(r.op[0].us, 19), "%.9g", r.op[0].us);
  trefoilSimDestroy(sim);
  if (!trefoilSimHasSimGrid()) return;
  sim = worldRun(&w, TREFOIL_ENGINE_SIMGRID, &r);
  REQUIRE(sim, "%s", trefoilLastError());
  /* half the port each: both at 19, rank 0's still have to be forwarded */
  CHECK(NEAR(r.op[0].us, 19 + 1.5), "%.9g", r.op[0].us);
  trefoilSimDestroy(sim);
}

TEST(combine_waits_for_the_last_return) {
  world_t w;
  worldInit(&w, 6, 3, TREFOIL_HT_FLAT);
  worldSend(&w, 0, 4, 10);
  worldSend(&w, 0, 5, 10);
  worldChange(&w, TREFOIL_CHANGE_START_US, 5, 4);
  /* rank 5's rows are at rank 3 at 4 + 10 + 0.5 + 1; then 20 rows of partial sums go back */
  CHECK_US(&w, TREFOIL_OP_COMBINE, 15.5 + 5 + 20 * 0.2);
}

/* SMs that take no time for a row still begin with their rank: what came before waits for it. */
TEST(late_rank_forwards_late) {
  world_t w;
  worldInit(&w, 4, 2, TREFOIL_HT_FLAT);
  worldSend(&w, 0, 3, 10);
  worldChange(&w, TREFOIL_CHANGE_START_US, 2, 30);
  for (int e = firstEngine(); e <= TREFOIL_ENGINE_QUEUES; e++) {
    trefoil_sim_result_t r;
    trefoil_sim_t *sim = worldRun(&w, (trefoil_engine_t)e, &r);
    REQUIRE(sim, "%s", trefoilLastError());
    CHECK(NEAR(r.op[0].finishUs[3], 30 + 10 + 0.5 + 10 * 0.1), "%.9g", r.op[0].finishUs[3]);
    trefoilSimDestroy(sim);
  }
}

/* When the rows from rank 0 to another have all arrived. */
static double endOf(const trefoil_sim_op_t *o, int dst) {
  for (int64_t i = 0; i < o->numSpans; i++) {
    if (o->spans[i].src == 0 && o->spans[i].dst == dst) return o->spans[i].endUs;
  }
  return -1;
}

/* Of a chunk the rows with the longer way are issued first. */
TEST(far_rows_first) {
  world_t w;
  worldInit(&w, 4, 2, TREFOIL_HT_FLAT);
  worldSend(&w, 0, 1, 10);
  worldSend(&w, 0, 2, 10);
  w.costs.numSms = 2;
  w.costs.op[0].forwardShare = 0.5;
  w.costs.op[0].sendRowNs = 300;
  w.run.maxSpans = 8;
  trefoil_sim_result_t r;
  trefoil_sim_t *sim = worldRun(&w, TREFOIL_ENGINE_QUEUES, &r);
  REQUIRE(sim, "%s", trefoilLastError());
  /* the last far row leaves at 3, the last near one at 6 */
  CHECK(NEAR(endOf(&r.op[0], 2), 10 + 3 + 5), "far: %.9g", endOf(&r.op[0], 2));
  CHECK(NEAR(endOf(&r.op[0], 1), 10 + 6 + 0.5), "near: %.9g", endOf(&r.op[0], 1));
  trefoilSimDestroy(sim);
}

/* LL goes through its tokens, a transfer each, and of rows that come at the same time the one from
 * the next rank round the ring is served first: 2's before 0's at rank 1. */
TEST(equals_go_round_the_ring) {
  world_t w;
  worldInit(&w, 3, 3, TREFOIL_LL_EXPERT_MAJOR);
  worldSend(&w, 0, 1, 4);
  worldSend(&w, 2, 1, 4);
  w.run.maxSpans = 8;
  trefoil_sim_result_t r;
  trefoil_sim_t *sim = worldRun(&w, TREFOIL_ENGINE_QUEUES, &r);
  REQUIRE(sim, "%s", trefoilLastError());
  CHECK(r.op[0].numTransfers == 8, "%lld transfers of 8 rows", (long long)r.op[0].numTransfers);
  CHECK(r.op[0].numSpans == 2, "%lld spans", (long long)r.op[0].numSpans);
  for (int i = 0; i < 2 && r.op[0].numSpans == 2; i++) {
    const trefoil_sim_span_t *s = &r.op[0].spans[i];
    double end = 3 + 0.5 + (s->src == 2 ? 7 : 8) * 0.1;
    CHECK(NEAR(s->endUs, end), "rank %d's end at %.9g, not %.9g", s->src, s->endUs, end);
  }
  trefoilSimDestroy(sim);
}

TEST(forwarding_sms) {
  world_t w;
  worldInit(&w, 4, 2, TREFOIL_HT_FLAT);
  worldSend(&w, 0, 3, 10);
  w.costs.numSms = 4;
  w.costs.op[0].forwardShare = w.costs.op[1].forwardShare = 0.25;
  w.costs.op[0].sendRowNs =
      150; /* 50 ns with three SMs that send, 150 with the one that forwards */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 10 + 5 + 2 + 0.5 + 10 * 0.15);
  w.costs.op[1].receiveRowNs = 300; /* combine: that SM sums, three write the result at rank 0 */
  CHECK_US(&w, TREFOIL_OP_COMBINE, 10 + 0.5 + 10 * 0.3 + 5 + 10 * 0.2);
}

TEST_MAIN()
