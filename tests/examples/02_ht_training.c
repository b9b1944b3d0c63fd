/* A training step in high-throughput mode, forward and backward, four ranks as threads.
 *
 * Flat layout: a rank receives each token once, however many of its experts want it, and learns
 * from topk_idx and topk_weights which. It weights and sums them itself; the combine adds the ranks'
 * partial sums. Backward runs the same routing on gradients: dispatch sends d(out) to the experts,
 * combine brings back d(x) and, per (token, k), d(weight).
 *
 * Nobody says beforehand how many tokens may arrive: max_recv_tokens_per_rank stays AUTO, and the
 * outputs are sized from recv_total_counter once Update has told the number. */
#include "example.h"

#include <stdint.h>

enum { numExperts = 16, topk = 3, hidden = 32, maxTokens = 12 };

typedef struct {
  int firstExpert; /* the global id of this rank's expert 0 */
  size_t slots;
  float (*x)[hidden], (*weights)[topk];
  int64_t (*idx)[topk];
} received_t;

/* out[slot] = sum over this rank's experts of weight * (expert + 1) * in[slot]. */
static void experts(const received_t *r, float (*in)[hidden], float (*out)[hidden]) {
  for (size_t s = 0; s < r->slots; s++) {
    float factor = 0;
    for (int k = 0; k < topk && r->idx[s][k] >= 0; k++)
      factor += r->weights[s][k] * (float)(r->firstExpert + r->idx[s][k] + 1);
    for (int h = 0; h < hidden; h++) out[s][h] = factor * in[s][h];
  }
}

/* The gradient of each weight: (expert + 1) * <x, gradient>. */
static void weightGradients(const received_t *r, float (*gradient)[hidden], float (*out)[topk]) {
  for (size_t s = 0; s < r->slots; s++) {
    float dot = 0;
    for (int h = 0; h < hidden; h++) dot += r->x[s][h] * gradient[s][h];
    for (int k = 0; k < topk; k++)
      out[s][k] = r->idx[s][k] < 0 ? 0 : (float)(r->firstExpert + r->idx[s][k] + 1) * dot;
  }
}

typedef struct {
  int rank, numTokens;
  float x[maxTokens][hidden], gradient[maxTokens][hidden], weights[maxTokens][topk];
  int64_t idx[maxTokens][topk];
} batch_t;

static void makeBatch(int rank, batch_t *b) {
  b->rank = rank;
  b->numTokens = maxTokens - 3 * rank;
  for (int t = 0; t < b->numTokens; t++) {
    for (int k = 0; k < topk; k++) {
      b->idx[t][k] = (5 * rank + 3 * t + 2 * k) % numExperts;
      b->weights[t][k] = 0.5f / (float)(1 << k);
    }
    if (t == 1) b->idx[t][topk - 1] = -1; /* this token uses one expert less */
    for (int h = 0; h < hidden; h++) {
      b->x[t][h] = (float)(rank + t + h % 5);
      b->gradient[t][h] = (float)(1 + (t + h) % 3);
    }
  }
}

static void compare(const batch_t *b, float (*out)[hidden], float (*dx)[hidden],
                    float (*dw)[topk]) {
  for (int t = 0; t < b->numTokens; t++) {
    float factor = 0, dot = 0;
    for (int k = 0; k < topk; k++)
      if (b->idx[t][k] >= 0) factor += b->weights[t][k] * (float)(b->idx[t][k] + 1);
    for (int h = 0; h < hidden; h++) {
      dot += b->x[t][h] * b->gradient[t][h];
      if (out[t][h] != factor * b->x[t][h]) STOP("rank %d token %d: forward differs", b->rank, t);
      if (dx[t][h] != factor * b->gradient[t][h])
        STOP("rank %d token %d: the gradient of x differs", b->rank, t);
    }
    for (int k = 0; k < topk; k++)
      if (dw[t][k] != (b->idx[t][k] < 0 ? 0 : (float)(b->idx[t][k] + 1) * dot))
        STOP("rank %d token %d k %d: the gradient of the weight differs", b->rank, t, k);
  }
  printf("rank %d: forward and backward of %d tokens agree\n", b->rank, b->numTokens);
}

static void train(int rank, int numRanks, ncclComm_t comm) {
  batch_t batch;
  makeBatch(rank, &batch);
  const size_t B = (size_t)batch.numTokens;

  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
  config.num_experts = numExperts;
  config.max_dispatch_tokens_per_rank = maxTokens;
  config.max_token_bytes = hidden * sizeof(float);
  ncclEpGroup_t group;
  ncclEpHandle_t handle;
  EP(ncclEpCreateGroup(&group, comm, &config));
  EP(ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_FLAT, NULL, topk, NULL));
  cudaStream_t stream;
  CUDA(cudaStreamCreate(&stream)); /* in order with cudaMemcpy */

  /* Routing first: how many tokens will this rank receive? */
  ncclEpTensor_t routing =
      TENSOR(onDevice(batch.idx, B * sizeof *batch.idx), ncclInt64, 2, B, topk);
  ncclEpTensor_t total = TENSOR(onDevice(NULL, sizeof(int64_t)), ncclInt64, 1, 1);
  ncclEpLayoutInfo_t layout = NCCL_EP_LAYOUT_INFO_INIT;
  layout.recv_total_counter = &total;
  EP(ncclEpUpdateHandle(handle, &routing, &layout, stream));
  CUDA(cudaStreamSynchronize(stream));
  int64_t numReceived;
  toHost(&numReceived, total.data, sizeof numReceived);
  const size_t S = (size_t)numReceived;

  ncclEpTensor_t x = TENSOR(onDevice(batch.x, B * sizeof *batch.x), ncclFloat32, 2, B, hidden);
  ncclEpTensor_t w =
      TENSOR(onDevice(batch.weights, B * sizeof *batch.weights), ncclFloat32, 2, B, topk);
  ncclEpTensor_t slots = TENSOR(onDevice(NULL, S * hidden * 4), ncclFloat32, 2, S, hidden);
  ncclEpTensor_t slotWeights = TENSOR(onDevice(NULL, S * topk * 4), ncclFloat32, 2, S, topk);
  ncclEpTensor_t slotIdx = TENSOR(onDevice(NULL, S * topk * 8), ncclInt64, 2, S, topk);
  ncclEpTensor_t back = TENSOR(onDevice(NULL, B * hidden * 4), ncclFloat32, 2, B, hidden);
  ncclEpTensor_t backWeights = TENSOR(onDevice(NULL, B * topk * 4), ncclFloat32, 2, B, topk);

  /* Forward. */
  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  in.tokens = &x, in.topk_weights = &w;
  out.tokens = &slots, out.topk_weights = &slotWeights, out.topk_idx = &slotIdx;
  EP(ncclEpDispatch(handle, &in, &out, NULL, NULL, stream));
  CUDA(cudaStreamSynchronize(stream));

  float(*host)[hidden] = calloc(3 * S + 1, sizeof *host);
  received_t r = {.firstExpert = rank * (numExperts / numRanks), .slots = S, .x = host};
  r.weights = calloc(2 * S + 1, sizeof *r.weights);
  r.idx = calloc(S + 1, sizeof *r.idx);
  toHost(r.x, slots.data, S * sizeof *r.x);
  toHost(r.weights, slotWeights.data, S * sizeof *r.weights);
  toHost(r.idx, slotIdx.data, S * sizeof *r.idx);
  float(*y)[hidden] = host + S, (*gradient)[hidden] = host + 2 * S;
  experts(&r, r.x, y);
  CUDA(cudaMemcpy(slots.data, y, S * sizeof *y, cudaMemcpyHostToDevice));

  ncclEpCombineInputs_t combineIn = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t combineOut = NCCL_EP_COMBINE_OUTPUTS_INIT;
  combineIn.tokens = &slots;
  combineOut.tokens = &back;
  EP(ncclEpCombine(handle, &combineIn, &combineOut, NULL, stream));
  CUDA(cudaStreamSynchronize(stream));
  float forward[maxTokens][hidden], dx[maxTokens][hidden], dw[maxTokens][topk];
  toHost(forward, back.data, B * sizeof *forward);

  /* Backward: the gradient of the result goes where the tokens went. */
  ncclEpDispatchConfig_t dispatchConfig = NCCL_EP_DISPATCH_CONFIG_INIT;
  ncclEpCombineConfig_t combineConfig = NCCL_EP_COMBINE_CONFIG_INIT;
  dispatchConfig.pass_direction = combineConfig.pass_direction = NCCL_EP_BWD_PASS;
  CUDA(cudaMemcpy(x.data, batch.gradient, B * sizeof *batch.gradient, cudaMemcpyHostToDevice));
  in.topk_weights = NULL, out.topk_weights = NULL, out.topk_idx = NULL;
  EP(ncclEpDispatch(handle, &in, &out, NULL, &dispatchConfig, stream));
  CUDA(cudaStreamSynchronize(stream));

  toHost(gradient, slots.data, S * sizeof *gradient);
  experts(&r, gradient, y);
  CUDA(cudaMemcpy(slots.data, y, S * sizeof *y, cudaMemcpyHostToDevice));
  float(*slotGradients)[topk] = r.weights + S;
  weightGradients(&r, gradient, slotGradients);
  CUDA(cudaMemcpy(slotWeights.data, slotGradients, S * sizeof *r.weights, cudaMemcpyHostToDevice));
  combineIn.topk_weights = &slotWeights;
  combineOut.topk_weights = &backWeights;
  EP(ncclEpCombine(handle, &combineIn, &combineOut, &combineConfig, stream));
  CUDA(cudaStreamSynchronize(stream));
  toHost(dx, back.data, B * sizeof *dx);
  toHost(dw, backWeights.data, B * sizeof *dw);
  compare(&batch, forward, dx, dw);

  EP(ncclEpHandleDestroy(handle));
  EP(ncclEpGroupDestroy(group));
  void *const buffers[] = {routing.data,     total.data,   x.data,    w.data,          slots.data,
                           slotWeights.data, slotIdx.data, back.data, backWeights.data};
  for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) CUDA(cudaFree(buffers[i]));
  CUDA(cudaStreamDestroy(stream));
  free(host);
  free(r.weights);
  free(r.idx);
}

int main(void) {
  runRanks(4, train);
  return 0;
}
