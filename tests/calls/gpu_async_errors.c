/* The C API on GPUs: what only the device finds out, and how the host hears of it. */
#include <string.h>

#include "gpu_case.h"
#include "test.h"

static void expectAsyncError(team_rank_t *r, step_data_t *d, ncclEpGroup_t group, ncclEpHandle_t h,
                             const char *text) {
  int error = 9;
  teamOk(r, ncclEpGetAsyncError(group, &error));
  teamCheck(r, error == 1, "the error is not told: %d", error);
  teamCheck(r, !stepUpdate(d, h, r->stream), "the next call was taken");
  teamCheck(r, strstr(ncclEpGetLastError(), text), "%s", ncclEpGetLastError());
  teamOk(r, ncclEpErrorClear(group));
  teamOk(r, ncclEpGetAsyncError(group, &error));
  teamCheck(r, error == 0, "not cleared");
}

/* A wrong id, then more slots than max_recv, then all is well again. */
static void runAsyncErrors(team_rank_t *r) {
  const step_case_t *c = r->user;
  step_data_t *d = stepMake(c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  ncclEpGroupConfig_t config = stepGroupConfig(c, r->numRanks);
  ncclEpHandleConfig_t handleConfig = stepHandleConfig(c);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(c), &handleConfig, c->topk, NULL));
  int has = d->numTokens[r->rank] > 0;
  int32_t *first = &d->idx[r->rank][0], kept = *first;
  int64_t total = 0;
  for (int i = 0; has && i < 1; i++) *first = c->numExperts + 3;
  if (has && d->wide) d->wide[0] = *first;
  teamCheck(r, stepUpdate(d, h, r->stream), "update: %s", ncclEpGetLastError());
  cudaStreamSynchronize(r->stream);
  if (has) expectAsyncError(r, d, group, h, "outside [0, ");
  if (r->error[0]) return;
  if (has) *first = kept;
  if (has && d->wide) d->wide[0] = kept;
  teamBarrier(r);
  teamCheck(r, stepUpdate(d, h, r->stream), "update: %s", ncclEpGetLastError());
  teamCheck(r, stepDispatch(d, h, r->stream), "dispatch: %s", ncclEpGetLastError());
  cudaStreamSynchronize(r->stream);
  total = d->total[0];
  if (total > c->maxRecv) expectAsyncError(r, d, group, h, "TRAP");
  int error = 9;
  teamOk(r, ncclEpGetAsyncError(group, &error));
  teamCheck(r, error == 0, "told without a reason: %s", ncclEpGetLastError());
  teamCheck(r, r->numRanks < 2 || r->rank || total > c->maxRecv, "nothing was over: %lld",
            (long long)total);
  teamBarrier(r);
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
}

TEST(high_throughput_tells_ids_and_overflow) {
  if (!numGpus()) SKIP("needs a GPU");
  step_case_t c = {
      .mode = TREFOIL_HT_FLAT, .topk = 8, .numExperts = 8, .maxTokens = 64, .width = 64};
  c.seed = 670;
  c.maxRecv = 64;
  const char *error = teamThreads(numGpus(), runAsyncErrors, &c);
  CHECK(!*error, "%s", error);
}

/* Rank 0 gives one row of weights too few for its slots: it is told, the others go on, and after ErrorClear
 * the same combine is right. */
static void runFew(team_rank_t *r) {
  const step_case_t *c = r->user;
  step_data_t *d = stepMake(c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  ncclEpGroupConfig_t config = stepGroupConfig(c, r->numRanks);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(c), NULL, c->topk, NULL));
  teamCheck(r, stepUpdate(d, h, r->stream), "update: %s", ncclEpGetLastError());
  teamCheck(r, stepDispatch(d, h, r->stream), "dispatch: %s", ncclEpGetLastError());
  cudaStreamSynchronize(r->stream);
  teamCheck(r, d->rows > 1 && d->rows < d->slots, "the case has %lld rows", (long long)d->rows);
  size_t few = (size_t)(r->rank ? d->slots : d->rows - 1), K = (size_t)c->topk;
  size_t slots[] = {(size_t)d->slots, (size_t)c->width}, weights[] = {few, K};
  size_t rows[] = {(size_t)d->numTokens[r->rank], (size_t)c->width}, topk[] = {rows[0], K};
  ncclEpTensor_t y = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, .datatype = ncclBfloat16,
                      .data = d->expertRows[r->rank], .sizes = slots};
  ncclEpTensor_t w = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = c->mode == TREFOIL_HT_FLAT ? 2 : 1,
                      .datatype = ncclFloat32, .data = d->slotWeights[r->rank], .sizes = weights};
  ncclEpTensor_t out = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, .datatype = ncclBfloat16,
                        .data = d->combined, .sizes = rows};
  ncclEpTensor_t outW = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, .datatype = ncclFloat32,
                         .data = d->combinedWeights, .sizes = topk};
  ncclEpCombineInputs_t inputs = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t outputs = NCCL_EP_COMBINE_OUTPUTS_INIT;
  ncclEpCombineConfig_t backward = NCCL_EP_COMBINE_CONFIG_INIT;
  inputs.tokens = &y;
  inputs.topk_weights = &w;
  outputs.tokens = &out;
  outputs.topk_weights = &outW;
  backward.pass_direction = NCCL_EP_BWD_PASS;
  for (int i = 0; i < 2 && !r->error[0]; i++) {
    teamOk(r, ncclEpCombine(h, &inputs, &outputs, &backward, r->stream));
    cudaError_t error = cudaStreamSynchronize(r->stream);
    teamCheck(r, error == cudaSuccess, "stream: %s", cudaGetErrorString(error));
    if (r->rank == 0) expectAsyncError(r, d, group, h, "topk_weights has");
    teamBarrier(r);
  }
  if (r->error[0]) return;
  stepPoison(d);
  teamCheck(r, stepCombine(d, h, r->stream), "combine: %s", ncclEpGetLastError());
  cudaStreamSynchronize(r->stream);
  teamCheck(r, !*stepCompareCombine(d), "%s", stepCompareCombine(d));
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
}

TEST(too_few_weights_are_told) {
  if (!numGpus()) SKIP("needs a GPU");
  for (int mode = 2; mode < 4; mode++) {
    step_case_t c = {.mode = (trefoil_mode_t)mode,
                     .topk = 3,
                     .numExperts = 8,
                     .maxTokens = 80,
                     .width = 16,
                     .maxRecv = 1000,
                     .backward = 1};
    c.seed = 6;
    const char *error = teamThreads(numGpus(), runFew, &c);
    CHECK(!*error, "mode %d: %s", mode, error);
  }
}

TEST_MAIN()
