/* A decoding step in low-latency mode, four ranks as threads of this process.
 *
 * Each rank has a few tokens, each token goes to two of eight experts (two experts a rank), expert e
 * multiplies by e + 1, and the combine sums with the router's weights. The last rank has no tokens in
 * this step: it still takes part. */
#include "example.h"

enum { numExperts = 8, topk = 2, hidden = 64, maxTokens = 8 };

/* The experts of this rank. A GPU program launches a kernel here; we take a detour over the host. */
static void runExperts(int rank, int numLocal, size_t slotsPerExpert, void *tokens,
                       const int *counters, cudaStream_t stream) {
  size_t zone = slotsPerExpert * hidden;
  float *rows = malloc(zone * sizeof *rows);
  int count[numExperts];
  CUDA(cudaStreamSynchronize(stream));
  toHost(count, counters, (size_t)numLocal * sizeof *count);
  for (int e = 0; e < numLocal; e++) {
    float *device = (float *)tokens + (size_t)e * zone;
    size_t used = (size_t)count[e] * hidden; /* packed from slot 0 of the expert's zone */
    toHost(rows, device, used * sizeof *rows);
    for (size_t i = 0; i < used; i++) rows[i] *= (float)(rank * numLocal + e + 1);
    CUDA(cudaMemcpy(device, rows, used * sizeof *rows, cudaMemcpyHostToDevice));
  }
  free(rows);
}

static void step(int rank, int numRanks, ncclComm_t comm) {
  const int numLocal = numExperts / numRanks, numTokens = rank == numRanks - 1 ? 0 : 3 + rank;
  const size_t B = (size_t)numTokens, slots = (size_t)numRanks * maxTokens;

  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.algorithm = NCCL_EP_ALGO_LOW_LATENCY;
  config.num_experts = numExperts;
  config.max_dispatch_tokens_per_rank = maxTokens;
  config.max_token_bytes = hidden * sizeof(float);
  ncclEpGroup_t group;
  ncclEpHandle_t handle;
  EP(ncclEpCreateGroup(&group, comm, &config));
  EP(ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, topk, NULL));

  float x[maxTokens][hidden], w[maxTokens][topk], out[maxTokens][hidden];
  int idx[maxTokens][topk];
  for (int t = 0; t < numTokens; t++) {
    idx[t][0] = (rank + t) % numExperts;
    idx[t][1] = (idx[t][0] + 1 + t) % numExperts;
    w[t][0] = 0.75f, w[t][1] = 0.25f;
    for (int h = 0; h < hidden; h++) x[t][h] = (float)(1000 * rank + 100 * t + h);
  }
  ncclEpTensor_t tokens = TENSOR(onDevice(x, B * sizeof *x), ncclFloat32, 2, B, hidden);
  ncclEpTensor_t routing = TENSOR(onDevice(idx, B * sizeof *idx), ncclInt32, 2, B, topk);
  ncclEpTensor_t weights = TENSOR(onDevice(w, B * sizeof *w), ncclFloat32, 2, B, topk);
  ncclEpTensor_t result = TENSOR(onDevice(NULL, B * sizeof *x), ncclFloat32, 2, B, hidden);
  size_t receivedBytes = (size_t)numLocal * slots * sizeof *x;
  ncclEpTensor_t received =
      TENSOR(onDevice(NULL, receivedBytes), ncclFloat32, 3, (size_t)numLocal, slots, hidden);
  ncclEpTensor_t counters =
      TENSOR(onDevice(NULL, (size_t)numLocal * sizeof(int)), ncclInt32, 1, (size_t)numLocal);

  cudaStream_t stream;
  CUDA(cudaStreamCreate(&stream)); /* in order with cudaMemcpy */
  EP(ncclEpUpdateHandle(handle, &routing, NULL, stream));

  ncclEpDispatchInputs_t dispatchIn = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t dispatchOut = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpLayoutInfo_t layout = NCCL_EP_LAYOUT_INFO_INIT;
  dispatchIn.tokens = &tokens;
  dispatchOut.tokens = &received;
  layout.expert_counters = &counters;
  EP(ncclEpDispatch(handle, &dispatchIn, &dispatchOut, &layout, NULL, stream));
  EP(ncclEpComplete(handle, NULL, stream));

  runExperts(rank, numLocal, slots, received.data, counters.data, stream);

  ncclEpCombineInputs_t combineIn = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t combineOut = NCCL_EP_COMBINE_OUTPUTS_INIT;
  combineIn.tokens = &received;
  combineOut.tokens = &result;
  combineOut.topk_weights = &weights;
  EP(ncclEpCombine(handle, &combineIn, &combineOut, NULL, stream));
  EP(ncclEpComplete(handle, NULL, stream));
  CUDA(cudaStreamSynchronize(stream));

  toHost(out, result.data, B * sizeof *out);
  for (int t = 0; t < numTokens; t++) {
    float factor = w[t][0] * (float)(idx[t][0] + 1) + w[t][1] * (float)(idx[t][1] + 1);
    for (int h = 0; h < hidden; h++)
      if (out[t][h] != factor * x[t][h])
        STOP("rank %d token %d element %d: %g, expected %g", rank, t, h, (double)out[t][h],
             (double)(factor * x[t][h]));
  }
  printf("rank %d: %d tokens went to their experts and came back\n", rank, numTokens);

  EP(ncclEpHandleDestroy(handle));
  EP(ncclEpGroupDestroy(group));
  void *const buffers[] = {tokens.data, routing.data,  weights.data,
                           result.data, received.data, counters.data};
  for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) CUDA(cudaFree(buffers[i]));
  CUDA(cudaStreamDestroy(stream));
}

int main(void) {
  runRanks(4, step);
  return 0;
}
