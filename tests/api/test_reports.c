/* What only the operation sees and must tell: ranks that mean different things by the same bytes, and
 * numbers that a counter cannot hold. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "step.h"
#include "test.h"

typedef struct differ {
  step_case_t c;
  int inCombine; /* or ranks a node */
} differ_t;

/* Rank 1 runs the other pass: both hear of it, with both passes named. */
static void otherPass(team_rank_t *r) {
  const differ_t *x = r->user;
  step_data_t *d = stepMake(&x->c, r->rank, r->numRanks, r->numRanks);
  step_case_t turned = x->c;
  turned.backward = !x->c.backward;
  step_data_t *t = stepMake(&turned, r->rank, r->numRanks, r->numRanks);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  ncclEpGroupConfig_t config = stepGroupConfig(&x->c, r->numRanks);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(&x->c), NULL, x->c.topk, NULL));
  teamCheck(r, stepUpdate(d, h, r->stream), "update");
  step_data_t *mine = r->rank == 1 ? t : d;
  if (x->inCombine) {
    teamCheck(r, stepDispatch(d, h, r->stream), "dispatch: %s", ncclEpGetLastError());
    teamCheck(r, stepCombine(mine, h, r->stream), "combine: %s", ncclEpGetLastError());
  } else {
    teamCheck(r, stepDispatch(mine, h, r->stream), "dispatch: %s", ncclEpGetLastError());
  }
  cudaStreamSynchronize(r->stream);
  teamCheck(r, !stepUpdate(d, h, r->stream), "a call was taken after passes that differ");
  const char *why = ncclEpGetLastError();
  teamCheck(r, strstr(why, "forward pass") && strstr(why, "backward pass"), "%s", why);
  int flag = 0;
  teamOk(r, ncclEpErrorClear(group));
  teamOk(r, ncclEpGetAsyncError(group, &flag));
  teamCheck(r, flag == 1, "a lost group's error was cleared");
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
  stepFree(t);
}

TEST(passes_that_differ) {
  for (int mode = 2; mode < 4; mode++) {
    for (int inCombine = 0; inCombine < 2; inCombine++) {
      differ_t x = {.inCombine = inCombine};
      x.c = (step_case_t){.mode = (trefoil_mode_t)mode,
                          .topk = 3,
                          .numExperts = 8,
                          .maxTokens = 40,
                          .width = 16,
                          .maxRecv = 400,
                          .seed = 5};
      const char *error = teamThreads(2, otherPass, &x);
      CHECK(!*error, "mode %d, %s: %s", mode, inCombine ? "combine" : "dispatch", error);
    }
  }
}

static ncclEpTensor_t tensor(void *data, ncclDataType_t dtype, unsigned ndim, size_t *sizes) {
  return (ncclEpTensor_t){NCCL_EP_TENSOR_INIT_INLINE, .ndim = ndim, .datatype = dtype, .data = data,
                          .sizes = sizes};
}

/* f16 on rank 1, bf16 on the others: as many bytes, other numbers. */
static void otherType(team_rank_t *r) {
  enum { N = 4, H = 16 };
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.num_experts = 2;
  config.max_dispatch_tokens_per_rank = N;
  config.max_token_bytes = H * 2;
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, 1, NULL));
  int32_t ids[N] = {0, 1, 0, 1}, counts[1];
  uint16_t in[N * H] = {0}, out[2 * N * H];
  teamPin(r, ids, sizeof ids);
  teamPin(r, counts, sizeof counts);
  teamPin(r, in, sizeof in);
  teamPin(r, out, sizeof out);
  ncclDataType_t dtype = r->rank == 1 ? ncclFloat16 : ncclBfloat16;
  ncclEpTensor_t idx = tensor(ids, ncclInt32, 2, (size_t[]){N, 1});
  ncclEpTensor_t x = tensor(in, dtype, 2, (size_t[]){N, H});
  ncclEpTensor_t y = tensor(out, dtype, 3, (size_t[]){1, 2 * N, H});
  ncclEpTensor_t count = tensor(counts, ncclInt32, 1, (size_t[]){1});
  ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  inputs.tokens = &x;
  outputs.tokens = &y;
  info.expert_counters = &count;
  teamOk(r, ncclEpUpdateHandle(h, &idx, NULL, r->stream));
  teamOk(r, ncclEpDispatch(h, &inputs, &outputs, &info, NULL, r->stream));
  cudaStreamSynchronize(r->stream);
  teamCheck(r, ncclEpUpdateHandle(h, &idx, NULL, r->stream) != ncclSuccess, "types were mixed");
  const char *why = ncclEpGetLastError();
  teamCheck(r, strstr(why, " bf16,") && strstr(why, " f16,"), "%s", why);
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
}

TEST(datatypes_that_differ) {
  const char *error = teamThreads(2, otherType, NULL);
  CHECK(!*error, "%s", error);
}

/* Rank 1 gives one weight too few for its slots: nobody's group is lost, all hear of it, and the same
 * combine is right after ErrorClear. On one node and on two. */
static void fewWeights(team_rank_t *r) {
  const differ_t *x = r->user;
  step_data_t *d = stepMake(&x->c, r->rank, r->numRanks, x->inCombine);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  ncclEpGroupConfig_t config = stepGroupConfig(&x->c, r->numRanks);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(&x->c), NULL, x->c.topk, NULL));
  teamCheck(r, stepUpdate(d, h, r->stream), "update");
  teamCheck(r, stepDispatch(d, h, r->stream), "dispatch: %s", ncclEpGetLastError());
  cudaStreamSynchronize(r->stream);
  size_t K = (size_t)x->c.topk, H = (size_t)x->c.width, B = (size_t)d->numTokens[r->rank];
  int flat = x->c.mode == TREFOIL_HT_FLAT, flag = 0;
  size_t slots = (size_t)d->slots, few = (size_t)(r->rank == 1 ? d->rows - 1 : d->slots);
  teamCheck(r, d->rows > 1, "the case has too few rows");
  ncclEpTensor_t y = tensor(d->expertRows[r->rank], ncclBfloat16, 2, (size_t[]){slots, H});
  ncclEpTensor_t w = tensor(d->slotWeights[r->rank], ncclFloat32, flat ? 2 : 1, (size_t[]){few, K});
  ncclEpTensor_t out = tensor(d->combined, ncclBfloat16, 2, (size_t[]){B, H});
  ncclEpTensor_t outW = tensor(d->combinedWeights, ncclFloat32, 2, (size_t[]){B, K});
  ncclEpCombineInputs_t inputs = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t outputs = NCCL_EP_COMBINE_OUTPUTS_INIT;
  ncclEpCombineConfig_t backward = NCCL_EP_COMBINE_CONFIG_INIT;
  inputs.tokens = &y;
  inputs.topk_weights = &w;
  outputs.tokens = &out;
  outputs.topk_weights = &outW;
  backward.pass_direction = NCCL_EP_BWD_PASS;
  teamOk(r, ncclEpCombine(h, &inputs, &outputs, &backward, r->stream));
  cudaStreamSynchronize(r->stream);
  teamOk(r, ncclEpGetAsyncError(group, &flag));
  teamCheck(r, flag == 1, "no async error");
  teamCheck(r, !stepCombine(d, h, r->stream), "a call was taken before ErrorClear");
  const char *why = ncclEpGetLastError();
  teamCheck(r, strstr(why, r->rank == 1 ? "it sent none" : "lacks rows"), "%s", why);
  teamOk(r, ncclEpErrorClear(group));
  teamCheck(r, stepCombine(d, h, r->stream), "combine: %s", ncclEpGetLastError());
  cudaStreamSynchronize(r->stream);
  teamOk(r, ncclEpGetAsyncError(group, &flag));
  teamCheck(r, flag == 0, "async error");
  teamCheck(r, !*stepCompareCombine(d), "%s", stepCompareCombine(d));
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
}

TEST(too_few_weights_lose_nothing) {
  for (int mode = 2; mode < 4; mode++) {
    for (int perNode = 2; perNode <= 4; perNode += 2) {
      differ_t x = {.inCombine = perNode};
      x.c = (step_case_t){.mode = (trefoil_mode_t)mode,
                          .topk = 3,
                          .numExperts = 8,
                          .maxTokens = 80,
                          .width = 16,
                          .maxRecv = 1000,
                          .seed = 6};
      x.c.backward = 1;
      setenv("NCCL_LSA_TEAM_SIZE", perNode == 2 ? "2" : "4", 1);
      const char *error = teamThreads(4, fewWeights, &x);
      unsetenv("NCCL_LSA_TEAM_SIZE");
      CHECK(!*error, "mode %d, %d ranks a node: %s", mode, perNode, error);
    }
  }
}

/* Eager sizing on a rank that nothing came to: it may give no rows, but then no weights either. */
static void emptyTogether(team_rank_t *r) {
  enum { E = 4, H = 16, K = 2, ROOM = 5 };
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
  config.num_experts = E;
  config.max_dispatch_tokens_per_rank = 8;
  config.max_token_bytes = H * 2;
  config.num_topk = K;
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, NCCL_EP_LAYOUT_FLAT, NULL, K, NULL));
  static uint16_t rows[ROOM * H];
  static float weights[ROOM * K];
  static int32_t ids[K];
  teamPin(NULL, rows, sizeof rows);
  teamPin(NULL, weights, sizeof weights);
  ncclEpTensor_t idx = tensor(ids, ncclInt32, 2, (size_t[]){0, K});
  teamOk(r, ncclEpUpdateHandle(h, &idx, NULL, r->stream));
  ncclEpCombineConfig_t backward = NCCL_EP_COMBINE_CONFIG_INIT;
  backward.pass_direction = NCCL_EP_BWD_PASS;
  for (int i = 1; i <= 4; i++) {
    size_t numRows = i & 1 ? ROOM : 0, numWeights = i & 2 ? ROOM : 0;
    ncclEpTensor_t y = tensor(rows, ncclBfloat16, 2, (size_t[]){numRows, H});
    ncclEpTensor_t w = tensor(weights, ncclFloat32, 2, (size_t[]){numWeights, K});
    ncclEpTensor_t out = tensor(rows, ncclBfloat16, 2, (size_t[]){0, H});
    ncclEpTensor_t outW = tensor(weights, ncclFloat32, 2, (size_t[]){0, K});
    ncclEpCombineInputs_t inputs = NCCL_EP_COMBINE_INPUTS_INIT;
    ncclEpCombineOutputs_t outputs = NCCL_EP_COMBINE_OUTPUTS_INIT;
    inputs.tokens = &y;
    inputs.topk_weights = &w;
    outputs.tokens = &out;
    outputs.topk_weights = &outW;
    ncclResult_t got = ncclEpCombine(h, &inputs, &outputs, &backward, r->stream);
    int equal = numRows == numWeights;
    teamCheck(r, got == (equal ? ncclSuccess : ncclInvalidArgument),
              "%zu rows, %zu weights: %d: %s", numRows, numWeights, (int)got, ncclEpGetLastError());
    teamCheck(r, equal || strstr(ncclEpGetLastError(), "both or neither"), "%s",
              ncclEpGetLastError());
  }
  cudaStreamSynchronize(r->stream);
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
}

TEST(rows_and_weights_are_empty_together) {
  const char *error = teamThreads(1, emptyTogether, NULL);
  CHECK(!*error, "%s", error);
}

/* Zones of 2^30 slots: four of them are more than int32 counts. */
static void hugeZones(team_rank_t *r) {
  enum { E = 4, N = 8 };
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
  config.num_experts = E;
  config.max_dispatch_tokens_per_rank = N;
  config.max_recv_tokens_per_rank = 2 * N;
  config.max_token_bytes = 64;
  ncclEpHandleConfig_t zones = NCCL_EP_HANDLE_CONFIG_INIT;
  zones.dispatch_output_per_expert_alignment = (size_t)1 << 30;
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, &zones, 1, NULL));
  int32_t ids[N], total32 = 0, offsets32[E];
  int64_t total64 = 0;
  teamPin(r, ids, sizeof ids);
  teamPin(r, &total32, sizeof total32);
  teamPin(r, offsets32, sizeof offsets32);
  teamPin(r, &total64, sizeof total64);
  for (int i = 0; i < N; i++) ids[i] = i % E;
  ncclEpTensor_t idx = tensor(ids, ncclInt32, 2, (size_t[]){N, 1});
  ncclEpTensor_t total = tensor(&total32, ncclInt32, 1, (size_t[]){1});
  ncclEpTensor_t offsets = tensor(offsets32, ncclInt32, 1, (size_t[]){E});
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  info.recv_total_counter = &total;
  info.expert_offsets = &offsets;
  int flag = 0;
  teamOk(r, ncclEpUpdateHandle(h, &idx, &info, r->stream));
  cudaStreamSynchronize(r->stream);
  teamOk(r, ncclEpGetAsyncError(group, &flag));
  teamCheck(r, flag == 1, "no async error");
  teamCheck(r, total32 == INT32_MAX && offsets32[1] == 1 << 30 && offsets32[3] == INT32_MAX,
            "total %d, offsets %d, %d", total32, offsets32[1], offsets32[3]);
  info.expert_offsets = NULL;
  total = tensor(&total64, ncclInt64, 1, (size_t[]){1});
  teamCheck(r, ncclEpUpdateHandle(h, &idx, &info, r->stream) == ncclInvalidArgument, "not told");
  teamCheck(r, strstr(ncclEpGetLastError(), "expert_offsets[2] is 2147483648"), "%s",
            ncclEpGetLastError());
  teamOk(r, ncclEpErrorClear(group));
  teamOk(r, ncclEpUpdateHandle(h, &idx, &info, r->stream));
  cudaStreamSynchronize(r->stream);
  teamOk(r, ncclEpGetAsyncError(group, &flag));
  teamCheck(r, flag == 0 && total64 == (int64_t)E << 30, "total %lld", (long long)total64);
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
}

TEST(counters_that_are_too_small) {
  const char *error = teamThreads(1, hugeZones, NULL);
  CHECK(!*error, "%s", error);
}

TEST_MAIN()
