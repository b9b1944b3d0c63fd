/* The costs of what kernels do beside moving rows, each with both engines in a case worked out by
 * hand. Rows, ways and fixed times are those of sim_world.h: NVLink row 0.1 us and way 0.5, LL 3,
 * HT 10. */
#include "sim_world.h"

static void initPair(world_t *w, trefoil_mode_t mode, int numRows) {
  worldInit(w, 2, 2, mode);
  worldSend(w, 0, 1, numRows);
}

/* Ten tokens of rank 0, each to both experts of rank 1: two places for a token where the layout is
 * expert-major, else one. */
static void initTwoExperts(world_t *w, trefoil_mode_t mode) {
  initPair(w, mode, 0);
  w->routing.shape.numExperts = 4;
  w->routing.shape.topk = 2;
  w->numTokens[0] = 10;
  for (int i = 0; i < 20; i++) w->idx[0][i] = 2 + i % 2;
}

TEST(rows_of_the_other_direction_take_a_share_of_a_port) {
  world_t w;
  initPair(&w, TREFOIL_LL_EXPERT_MAJOR, 10);
  w.costs.nvlinkBackShare = 0.25;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 10 * 0.1); /* nothing comes back */
  worldSend(&w, 1, 0, 4);
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + (10 + 0.25 * 4) * 0.1);
  CHECK_US(&w, TREFOIL_OP_COMBINE, 3 + 0.5 + (10 + 0.25 * 4) * 0.1);
  worldSend(&w, 1, 0, 16); /* now rank 1 sends twice as many */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + (20 + 0.25 * 10) * 0.1);
}

TEST(own_rows_pass_no_sm_that_sends) {
  world_t w;
  initPair(&w, TREFOIL_LL_EXPERT_MAJOR, 10);
  worldSend(&w, 0, 0, 10);
  w.costs.op[0].sendRowNs = 200;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 20 * 0.2);
  w.costs.ownRowsStay = 1;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 10 * 0.2);
  w.costs.op[0].receiveRowNs = 400; /* rank 0 takes its own meanwhile */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 10 * 0.4);
  worldSend(&w, 0, 0, 20); /* and now is the last to end */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 30 * 0.4);
}

TEST(own_rows_of_a_rank_alone) {
  world_t w;
  worldInit(&w, 1, 1, TREFOIL_HT_FLAT);
  worldSend(&w, 0, 0, 10);
  w.costs.ownRowsStay = 1;
  w.costs.op[0].sendRowNs = 5000;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 10);
  w.costs.op[0].receiveRowNs = 100;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 10 + 10 * 0.1);
}

TEST(some_sms_send_and_the_others_receive) {
  world_t w;
  initPair(&w, TREFOIL_LL_EXPERT_MAJOR, 10);
  w.costs.numSms = 8;
  w.costs.op[0].sendShare = 0.25;
  w.costs.op[0].sendRowNs = 600; /* two SMs: 300 ns a row */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 10 * 0.3);
  w.costs.op[0].receiveRowNs = 2400; /* six: 400 */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 10 * 0.4);
  w.run.numSms = 24; /* six and eighteen: 100 and 133 1/3 */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 10 * 2.4 / 18);
  w.costs.op[0].mostSendSms = 2; /* two and twenty-two: 300 */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 10 * 0.3);
  w.run.numSms = 4; /* one and three: the bound is not reached */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 10 * 0.8);
}

/* Rank 0 sends 30 rows of 1200 ns, rank 1 takes them at 2400: a third of the SMs sends. */
TEST(sms_are_shared_by_the_work_of_either_side) {
  world_t w;
  initPair(&w, TREFOIL_LL_EXPERT_MAJOR, 30);
  w.costs.numSms = 9;
  w.costs.op[0].sendRowNs = 1200;
  w.costs.op[0].receiveRowNs = 2400;
  w.costs.op[0].mostSendSms = 9;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 30 * 0.4);
  w.costs.op[0].mostSendSms = 2;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 30 * 0.6);
  w.costs.op[0].receiveRowNs = 0; /* one SM is left to receive all the same */
  w.costs.op[0].mostSendSms = 9;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 30 * 0.15);
}

/* The same rows: 36 us of SMs to send, 72 to take. */
TEST(whole_sms_send_and_then_receive) {
  world_t w;
  initPair(&w, TREFOIL_LL_EXPERT_MAJOR, 30);
  w.costs.numSms = 8;
  w.costs.op[0].sendRowNs = 1200;
  w.costs.op[0].receiveRowNs = 2400;
  w.costs.op[0].mostSendSms = 8;
  w.costs.op[0].wholeSmsFrom = 0.5; /* a third is 2.7, so three: they are done after 12 us */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 30 * 3.6 / 8);
  w.costs.op[0].wholeSmsFrom = 1; /* two: the others wait for their rows */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 30 * 0.6);
  w.costs.op[0].wholeSmsFrom = 0.5;
  w.costs.op[0].mostSendSms = 2;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 30 * 0.6);
  w.costs.op[0].mostSendSms = 8;
  w.costs.op[0].sendShare = 0.5;
  w.costs.numSms = 5; /* 2.5 are three, three parts of work of five */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 30 * 3.6 / 5);
  w.costs.op[0].receiveRowNs = 240; /* two receive: three send 12 us */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 30 * 0.4);
  w.costs.op[0].sendShare = 0.05; /* a quarter of one: one sends all the same */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 30 * 1.2);
  w.costs.op[0].sendShare = 0.95; /* and one is left */
  w.costs.op[0].sendRowNs = 4800;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 30 * 1.2);
}

/* Rank 1 reads the tokens of rank 0; with more SMs one side sends, the other receives. */
TEST(rows_are_pulled_with_few_sms) {
  world_t w;
  initPair(&w, TREFOIL_HT_FLAT, 30);
  w.costs.numSms = 4;
  w.costs.op[0].sendRowNs = 1200;
  w.costs.op[0].receiveRowNs = 2400;
  w.costs.op[0].mostSendSms = 8;
  w.costs.op[0].pullSms = 4;
  w.costs.op[0].pullRowNs = 800;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 10 + 0.5 + 30 * 0.8 / 4);
  w.costs.op[0].pullSmsOfTwo = 3; /* of two ranks: a third of the SMs sends */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 10 + 0.5 + 30 * 3.6 / 4);
  w.costs.op[0].pullSmsOfTwo = 4;
  w.costs.op[0].pullGbPerSPerSm = 25; /* 400 ns more for 10000 bytes */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 10 + 0.5 + 30 * 1.2 / 4);
  w.costs.op[0].stageGbPerS = 20; /* rank 0 copies 10000 bytes in 0.5 us before it starts */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 10 + 30 * 0.5 + 0.5 + 30 * 1.2 / 4);
  worldSend(&w, 1, 0, 30); /* both ranks copy */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 10 + 30 * 0.5 + 0.5 + 30 * 1.2 / 4);
  w.costs.op[0].stageGbPerS = 0;
  w.costs.op[0].pullPortShare = 0.01; /* the port is slower than the SMs */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 10 + 0.5 + 30 * 0.1 / 0.01);
  w.costs.op[1] = w.costs.op[0];
  w.costs.op[1].pullRowNs = 9000; /* no combine pulls: a third of the SMs sends */
  CHECK_US(&w, TREFOIL_OP_COMBINE, 10 + 0.5 + 30 * 3.6 / 4);
  w.workload.mode = TREFOIL_HT_EXPERT_MAJOR; /* it never pulls */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 10 + 0.5 + 30 * 3.6 / 4);
}

TEST(places_are_written_by_who_receives_a_dispatch) {
  world_t w;
  initTwoExperts(&w, TREFOIL_LL_EXPERT_MAJOR);
  w.costs.op[0].slotNs = 150;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 20 * 0.15);
  w.costs.op[0].slotGbPerSPerSm = 200; /* 50 ns more for 10000 bytes */
  w.costs.op[0].receiveRowNs = 100;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 20 * 0.2 + 10 * 0.1);
  initTwoExperts(&w, TREFOIL_HT_EXPERT_MAJOR);
  w.costs.op[0].slotNs = 150;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 10 + 0.5 + 20 * 0.15);
  w.workload.mode = TREFOIL_HT_FLAT; /* one place a token */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 10 + 0.5 + 10 * 0.15);
}

TEST(places_are_read_by_who_sends_a_combine) {
  world_t w;
  initTwoExperts(&w, TREFOIL_HT_EXPERT_MAJOR);
  w.costs.op[1].slotNs = 150;
  CHECK_US(&w, TREFOIL_OP_COMBINE, 10 + 0.5 + 20 * 0.15);
  w.workload.mode = TREFOIL_HT_FLAT;
  CHECK_US(&w, TREFOIL_OP_COMBINE, 10 + 0.5 + 10 * 0.15);
  w.workload.mode = TREFOIL_LL_EXPERT_MAJOR; /* exact: twenty rows */
  w.cluster.llFixedUs = 3, w.costs.op[1].launchUs = 3;
  CHECK_US(&w, TREFOIL_OP_COMBINE, 3 + 0.5 + 20 * 0.15);
}

TEST(receivers_begin_when_they_have_heard_of_all) {
  world_t w;
  initPair(&w, TREFOIL_LL_EXPERT_MAJOR, 0);
  w.costs.op[0].announceUs = 2;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 2 + 0.5);
  worldSend(&w, 0, 1, 10); /* rows are under way meanwhile */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 2 + 0.5);
  worldSend(&w, 0, 1, 20);
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 30 * 0.1);
  w.costs.op[0].receiveRowNs = 90; /* less than the port, but later */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 2 + 0.5 + 30 * 0.09);
  worldChange(&w, TREFOIL_CHANGE_START_US, 1, 7); /* the word of who is late comes last */
  w.costs.op[0].receiveRowNs = 0;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 7 + 2 + 0.5);
}

TEST(what_transfers_do_not_hide_comes_after_the_last_row) {
  world_t w;
  initPair(&w, TREFOIL_LL_EXPERT_MAJOR, 10);
  w.costs.op[0].restGbPerSPerSm = 10; /* 1 us for the bytes of a row */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 10 * 0.1 + 10);
  w.costs.numSms = 5;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 10 * 0.1 + 2);
  worldSend(&w, 1, 1, 20); /* own rows came, too; those of rank 1 lie there */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 10 * 0.1 + 6);
  w.costs.op[1].restGbPerSPerSm = 10; /* a combine: tokens of the rank, here the 20 of rank 1 */
  CHECK_US(&w, TREFOIL_OP_COMBINE, 3 + 4);
  initTwoExperts(&w, TREFOIL_LL_EXPERT_MAJOR); /* ten tokens, twenty rows */
  w.costs.op[1].restGbPerSPerSm = 10;
  CHECK_US(&w, TREFOIL_OP_COMBINE, 3 + 0.5 + 20 * 0.1 + 10);
}

/* A row of 10000 bytes takes 0.1 us of a port: a head of a tenth makes it 0.11. The plan's bytes stay. */
TEST(a_head_goes_with_every_row) {
  world_t w;
  initPair(&w, TREFOIL_LL_EXPERT_MAJOR, 10);
  w.costs.op[0].rowHeadBytes = 1000;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 10 * 0.11);
  CHECK_US(&w, TREFOIL_OP_COMBINE, 3 + 0.5 + 10 * 0.1); /* none of the combine's rows has one */
  w.costs.op[0].sendGbPerSPerSm = 20;                   /* 0.55 us of an SM */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 10 * 0.55);
  w.costs.op[0].receiveGbPerSPerSm = 10;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 10 * 1.1);
  w.costs.op[0].receiveGbPerSPerSm = 0, w.costs.op[0].sendGbPerSPerSm = 0;
  w.costs.op[0].restGbPerSPerSm = 10; /* what is copied out has no head */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 10 * 0.11 + 10);
}

TEST(a_rank_with_fewer_tokens_than_another_looks_again) {
  world_t w;
  initPair(&w, TREFOIL_LL_EXPERT_MAJOR, 20);
  w.costs.op[0].missingUs = 4;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 20 * 0.1); /* rank 1 has none, and knows */
  worldSend(&w, 1, 0, 19);
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 20 * 0.1 + 4);
  worldSend(&w, 1, 0, 1);
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 20 * 0.1);
}

TEST(rows_of_several_ranks_are_taken_as_a_batch) {
  world_t w;
  initPair(&w, TREFOIL_LL_EXPERT_MAJOR, 10);
  w.costs.op[0].batchGbPerSPerSm = 10; /* 1 us for the bytes of a row */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 10 * 0.1);
  w.costs.op[0].batchSources = 4;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 10);
  w.costs.numSms = 5;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 2);
  w.costs.op[0].batchSources = 1; /* one for either rank, though one has no tokens */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 4);
  w.costs.op[0].receiveRowNs = 500;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 4 + 10 * 0.1);
}

/* 16 groups of 4 ranks and ten token numbers; ten of 640 rows are there. */
TEST(batches_without_a_row_cost_nothing) {
  world_t w;
  worldInit(&w, 64, 64, TREFOIL_LL_EXPERT_MAJOR);
  worldSend(&w, 0, 1, 10);
  w.costs.op[0].batchGbPerSPerSm = 10;
  w.costs.op[0].batchSources = 4;
  double share = 1 - pow(1 - 1 / 64.0, 4), mean = 160 * share;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + mean + 2 * sqrt(mean * (1 - share)));
}

TEST(memory_bounds_how_fast_all_sms_write_places) {
  world_t w;
  initTwoExperts(&w, TREFOIL_LL_EXPERT_MAJOR);
  w.costs.op[0].slotGbPerS = 50; /* 200 ns for the bytes of a row */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 20 * 0.2);
  w.costs.numSms = 8;
  w.costs.op[0].slotGbPerSPerSm = 10; /* 125 ns with eight */
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 20 * 0.2);
  w.costs.op[0].slotGbPerSPerSm = 5;
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 20 * 0.25);
}

TEST(own_tokens_are_summed_in_whole_rounds) {
  world_t w;
  initPair(&w, TREFOIL_LL_EXPERT_MAJOR, 10);
  for (int op = 0; op < 2; op++) {
    w.costs.op[op].roundUs = 2;
    w.costs.op[op].roundBytes = 20000; /* two tokens */
  }
  CHECK_US(&w, TREFOIL_OP_DISPATCH, 3 + 0.5 + 10 * 0.1);
  CHECK_US(&w, TREFOIL_OP_COMBINE,
           3 + 0.5 + 10 * 0.1 + 4 * 2); /* five rounds, four after the first */
  w.costs.numSms = 2;
  CHECK_US(&w, TREFOIL_OP_COMBINE, 3 + 0.5 + 10 * 0.1 + 2 * 2);
  w.costs.op[1].fewTokens = 11;
  w.costs.op[1].fewRoundBytes = 10000;
  CHECK_US(&w, TREFOIL_OP_COMBINE, 3 + 0.5 + 10 * 0.1 + 4 * 2);
  w.costs.op[1].fewTokens = 10;
  CHECK_US(&w, TREFOIL_OP_COMBINE, 3 + 0.5 + 10 * 0.1 + 2 * 2);
}

TEST_MAIN()
