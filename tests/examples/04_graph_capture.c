/* A low-latency step captured into a CUDA graph and replayed, two ranks as threads.
 *
 * Tokens, routing and weights live at fixed addresses; before each replay the program writes new ones
 * there. Low-latency mode reads the routing when the graph runs, so each replay routes anew. */
#include "example.h"

enum { numExperts = 6, topk = 2, hidden = 16, maxTokens = 5, numReplays = 4 };

typedef struct {
  ncclEpHandle_t handle;
  ncclEpTensor_t *tokens, *routing, *weights, *slots, *counters, *result;
} step_t;

static void enqueueStep(const step_t *s, cudaStream_t stream) {
  ncclEpDispatchInputs_t dispatchIn = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t dispatchOut = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpLayoutInfo_t layout = NCCL_EP_LAYOUT_INFO_INIT;
  ncclEpCombineInputs_t combineIn = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t combineOut = NCCL_EP_COMBINE_OUTPUTS_INIT;
  dispatchIn.tokens = s->tokens;
  dispatchOut.tokens = s->slots;
  layout.expert_counters = s->counters;
  combineIn.tokens = s->slots;
  combineOut.tokens = s->result;
  combineOut.topk_weights = s->weights;
  EP(ncclEpUpdateHandle(s->handle, s->routing, NULL, stream));
  EP(ncclEpDispatch(s->handle, &dispatchIn, &dispatchOut, &layout, NULL, stream));
  EP(ncclEpComplete(s->handle, NULL, stream));
  /* The experts' kernels would stand here; these experts return what they got. */
  EP(ncclEpCombine(s->handle, &combineIn, &combineOut, NULL, stream));
  EP(ncclEpComplete(s->handle, NULL, stream));
}

static void replay(int rank, int numRanks, ncclComm_t comm) {
  const size_t B = maxTokens, L = numExperts / (size_t)numRanks, slots = (size_t)numRanks * B;
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.algorithm = NCCL_EP_ALGO_LOW_LATENCY;
  config.num_experts = numExperts;
  config.max_dispatch_tokens_per_rank = maxTokens;
  config.max_token_bytes = hidden * sizeof(float);
  ncclEpGroup_t group;
  step_t s;
  EP(ncclEpCreateGroup(&group, comm, &config));
  EP(ncclEpInitHandle(&s.handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, topk, NULL));

  float x[maxTokens][hidden], w[maxTokens][topk], out[maxTokens][hidden];
  int idx[maxTokens][topk];
  ncclEpTensor_t tokens = TENSOR(onDevice(NULL, sizeof x), ncclFloat32, 2, B, hidden);
  ncclEpTensor_t routing = TENSOR(onDevice(NULL, sizeof idx), ncclInt32, 2, B, topk);
  ncclEpTensor_t weights = TENSOR(onDevice(NULL, sizeof w), ncclFloat32, 2, B, topk);
  ncclEpTensor_t received =
      TENSOR(onDevice(NULL, L * slots * sizeof *x), ncclFloat32, 3, L, slots, hidden);
  ncclEpTensor_t counters = TENSOR(onDevice(NULL, L * sizeof(int)), ncclInt32, 1, L);
  ncclEpTensor_t result = TENSOR(onDevice(NULL, sizeof x), ncclFloat32, 2, B, hidden);
  s.tokens = &tokens, s.routing = &routing, s.weights = &weights;
  s.slots = &received, s.counters = &counters, s.result = &result;

  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  enqueueStep(&s, stream);
  CUDA(cudaStreamEndCapture(stream, &graph));
  CUDA(cudaGraphInstantiateWithFlags(&exec, graph, 0));

  for (int n = 0; n < numReplays; n++) {
    for (int t = 0; t < maxTokens; t++) {
      idx[t][0] = (rank + t + n) % numExperts;
      idx[t][1] = (idx[t][0] + 1 + n) % numExperts;
      w[t][0] = 0.5f, w[t][1] = (float)n;
      for (int h = 0; h < hidden; h++) x[t][h] = (float)(1000 * n + 100 * rank + 10 * t + h);
    }
    CUDA(cudaMemcpyAsync(tokens.data, x, sizeof x, cudaMemcpyHostToDevice, stream));
    CUDA(cudaMemcpyAsync(routing.data, idx, sizeof idx, cudaMemcpyHostToDevice, stream));
    CUDA(cudaMemcpyAsync(weights.data, w, sizeof w, cudaMemcpyHostToDevice, stream));
    CUDA(cudaGraphLaunch(exec, stream));
    CUDA(cudaMemcpyAsync(out, result.data, sizeof out, cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamSynchronize(stream));
    for (int t = 0; t < maxTokens; t++)
      for (int h = 0; h < hidden; h++)
        if (out[t][h] != x[t][h] * (0.5f + (float)n))
          STOP("rank %d replay %d token %d: %g", rank, n, t, (double)out[t][h]);
  }
  printf("rank %d: %d replays of one graph agree\n", rank, numReplays);

  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
  EP(ncclEpHandleDestroy(s.handle));
  EP(ncclEpGroupDestroy(group));
  void *const buffers[] = {tokens.data,   routing.data,  weights.data,
                           received.data, counters.data, result.data};
  for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) CUDA(cudaFree(buffers[i]));
  CUDA(cudaStreamDestroy(stream));
}

int main(void) {
  runRanks(2, replay);
  return 0;
}
