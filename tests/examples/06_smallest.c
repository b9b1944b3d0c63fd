/* The smallest whole program: one rank, one token, two experts that return what they get.
 *
 *     cc 06_smallest.c $(pkg-config --cflags --libs nccl_ep_cpu)
 */
#include <nccl_ep.h>
#include <stdio.h>

#define TRY(call)                                                                                  \
  if ((call) != 0) return fprintf(stderr, "%s: %s\n", #call, ncclEpGetLastError()), 1

int main(void) {
  float token[4] = {1, 2, 3, 4}, weight[2] = {0.5f, 0.25f}, result[4];
  int experts[2] = {1, 0}, count[2];
  float *x, *slots, *w, *out;
  int *idx, *counters;
  ncclComm_t comm;
  TRY(ncclCommInitAll(&comm, 1, NULL));
  TRY(cudaMalloc((void **)&x, sizeof token));
  TRY(cudaMalloc((void **)&out, sizeof token));
  TRY(cudaMalloc((void **)&slots, 2 * sizeof token));
  TRY(cudaMalloc((void **)&w, sizeof weight));
  TRY(cudaMalloc((void **)&idx, sizeof experts));
  TRY(cudaMalloc((void **)&counters, sizeof count));
  TRY(cudaMemcpy(x, token, sizeof token, cudaMemcpyHostToDevice));
  TRY(cudaMemcpy(w, weight, sizeof weight, cudaMemcpyHostToDevice));
  TRY(cudaMemcpy(idx, experts, sizeof experts, cudaMemcpyHostToDevice));

#define TENSOR(p, type, dims, ...)                                                                 \
  &(ncclEpTensor_t) {                                                                              \
    NCCL_EP_TENSOR_INIT_INLINE, .ndim = dims, .datatype = type, .data = p, .sizes = (size_t[]) {   \
      __VA_ARGS__                                                                                  \
    }                                                                                              \
  }
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT; /* low latency is the default, 0 */
  config.num_experts = 2;
  config.max_dispatch_tokens_per_rank = 1;
  config.max_token_bytes = sizeof token;
  ncclEpGroup_t group;
  ncclEpHandle_t handle;
  TRY(ncclEpCreateGroup(&group, comm, &config));
  TRY(ncclEpCreateHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR,
                         TENSOR(idx, ncclInt32, 2, 1, 2), NULL, NULL, NULL));

  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t got = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpLayoutInfo_t layout = NCCL_EP_LAYOUT_INFO_INIT;
  ncclEpCombineInputs_t give = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t sum = NCCL_EP_COMBINE_OUTPUTS_INIT;
  in.tokens = TENSOR(x, ncclFloat32, 2, 1, 4);
  got.tokens = give.tokens = TENSOR(slots, ncclFloat32, 3, 2, 1, 4);
  layout.expert_counters = TENSOR(counters, ncclInt32, 1, 2);
  sum.tokens = TENSOR(out, ncclFloat32, 2, 1, 4);
  sum.topk_weights = TENSOR(w, ncclFloat32, 2, 1, 2);
  TRY(ncclEpDispatch(handle, &in, &got, &layout, NULL, NULL));
  TRY(ncclEpCombine(handle, &give, &sum, NULL, NULL));
  TRY(cudaDeviceSynchronize());
  TRY(cudaMemcpy(result, out, sizeof result, cudaMemcpyDeviceToHost));
  TRY(cudaMemcpy(count, counters, sizeof count, cudaMemcpyDeviceToHost));
  printf("%g %g %g %g\n", (double)result[0], (double)result[1], (double)result[2],
         (double)result[3]);
  TRY(ncclEpHandleDestroy(handle));
  TRY(ncclEpGroupDestroy(group));
  TRY(ncclCommDestroy(comm));
  /* 0.75 of the token, and one token for each expert. */
  return !(result[0] == 0.75f && result[3] == 3.0f && count[0] == 1 && count[1] == 1);
}
