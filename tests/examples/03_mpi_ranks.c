/* One process a rank under mpirun: `mpirun -n 4 03_mpi_ranks`. Rank-major layout.
 *
 * MPI only carries the communicator's id; everything else goes through NCCL EP. In the rank-major
 * layout a rank receives each token once, in the block of its source rank, with the source's whole
 * row of weights and the local ids of its own experts (-1 elsewhere), in the source's k order. */
#include "example.h"

#include <mpi.h>

enum { topk = 2, hidden = 16, maxTokens = 4, expertsPerRank = 3 };

static void fill(int rank, int numExperts, float (*x)[hidden], float (*w)[topk], int (*idx)[topk]) {
  for (int t = 0; t < maxTokens; t++) {
    idx[t][0] = (7 * rank + 5 * t) % numExperts;
    idx[t][1] = t == 2 ? -1 : (idx[t][0] + 1 + t) % numExperts;
    w[t][0] = 0.5f, w[t][1] = 2.0f;
    for (int h = 0; h < hidden; h++) x[t][h] = (float)(100 * rank + 10 * t + h);
  }
}

int main(int argc, char **argv) {
  int rank, numRanks;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &numRanks);
  ncclUniqueId id;
  if (rank == 0) NCCL(ncclGetUniqueId(&id));
  MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
  ncclComm_t comm;
  CUDA(cudaSetDevice(rank)); /* one machine here; on a cluster: the rank within the node */
  NCCL(ncclCommInitRank(&comm, numRanks, id, rank));

  const int numExperts = expertsPerRank * numRanks;
  const size_t R = (size_t)numRanks, N = maxTokens;
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.algorithm = NCCL_EP_ALGO_LOW_LATENCY;
  config.num_experts = (unsigned)numExperts;
  config.max_dispatch_tokens_per_rank = maxTokens;
  config.max_token_bytes = hidden * sizeof(float);
  ncclEpGroup_t group;
  ncclEpHandle_t handle;
  EP(ncclEpCreateGroup(&group, comm, &config));
  EP(ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_RANK_MAJOR, NULL, topk, NULL));
  cudaStream_t stream;
  CUDA(cudaStreamCreate(&stream));

  float x[maxTokens][hidden], w[maxTokens][topk], result[maxTokens][hidden];
  int idx[maxTokens][topk];
  fill(rank, numExperts, x, w, idx);
  ncclEpTensor_t tokens = TENSOR(onDevice(x, sizeof x), ncclFloat32, 2, N, hidden);
  ncclEpTensor_t weights = TENSOR(onDevice(w, sizeof w), ncclFloat32, 2, N, topk);
  ncclEpTensor_t routing = TENSOR(onDevice(idx, sizeof idx), ncclInt32, 2, N, topk);
  ncclEpTensor_t slots = TENSOR(onDevice(NULL, R * sizeof x), ncclFloat32, 3, R, N, hidden);
  ncclEpTensor_t slotWeights = TENSOR(onDevice(NULL, R * sizeof w), ncclFloat32, 3, R, N, topk);
  ncclEpTensor_t slotIdx = TENSOR(onDevice(NULL, R * sizeof idx), ncclInt32, 3, R, N, topk);
  ncclEpTensor_t counters = TENSOR(onDevice(NULL, R * sizeof(int)), ncclInt32, 1, R);
  ncclEpTensor_t out = TENSOR(onDevice(NULL, sizeof x), ncclFloat32, 2, N, hidden);

  ncclEpDispatchInputs_t dispatchIn = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t dispatchOut = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpLayoutInfo_t layout = NCCL_EP_LAYOUT_INFO_INIT;
  dispatchIn.tokens = &tokens, dispatchIn.topk_weights = &weights;
  dispatchOut.tokens = &slots, dispatchOut.topk_weights = &slotWeights;
  dispatchOut.topk_idx = &slotIdx;
  layout.src_rank_counters = &counters;
  EP(ncclEpUpdateHandle(handle, &routing, NULL, stream));
  EP(ncclEpDispatch(handle, &dispatchIn, &dispatchOut, &layout, NULL, stream));
  EP(ncclEpComplete(handle, NULL, stream));
  CUDA(cudaStreamSynchronize(stream));

  /* The experts: weight and sum this rank's share of each received token. */
  float(*rows)[hidden] = calloc(R * N, sizeof *rows),
  (*rowWeights)[topk] = calloc(R * N, sizeof w[0]);
  int(*rowIdx)[topk] = calloc(R * N, sizeof *rowIdx), *count = calloc(R, sizeof *count);
  toHost(rows, slots.data, R * sizeof x);
  toHost(rowWeights, slotWeights.data, R * sizeof w);
  toHost(rowIdx, slotIdx.data, R * sizeof idx);
  toHost(count, counters.data, R * sizeof *count);
  for (size_t source = 0; source < R; source++)
    for (size_t s = source * N; s < source * N + (size_t)count[source]; s++) {
      float factor = 0;
      for (int k = 0; k < topk; k++)
        if (rowIdx[s][k] >= 0)
          factor += rowWeights[s][k] * (float)(rank * expertsPerRank + rowIdx[s][k] + 1);
      for (int h = 0; h < hidden; h++) rows[s][h] *= factor;
    }
  CUDA(cudaMemcpy(slots.data, rows, R * sizeof x, cudaMemcpyHostToDevice));

  ncclEpCombineInputs_t combineIn = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t combineOut = NCCL_EP_COMBINE_OUTPUTS_INIT;
  combineIn.tokens = &slots;
  combineOut.tokens = &out;
  EP(ncclEpCombine(handle, &combineIn, &combineOut, NULL, stream));
  EP(ncclEpComplete(handle, NULL, stream));
  CUDA(cudaStreamSynchronize(stream));
  toHost(result, out.data, sizeof result);
  for (int t = 0; t < maxTokens; t++) {
    float factor = 0;
    for (int k = 0; k < topk; k++)
      if (idx[t][k] >= 0) factor += w[t][k] * (float)(idx[t][k] + 1);
    for (int h = 0; h < hidden; h++)
      if (result[t][h] != factor * x[t][h]) STOP("rank %d token %d differs", rank, t);
  }
  printf("rank %d of %d: %d tokens agree\n", rank, numRanks, maxTokens);

  EP(ncclEpHandleDestroy(handle));
  EP(ncclEpGroupDestroy(group));
  NCCL(ncclCommDestroy(comm));
  free(rows), free(rowWeights), free(rowIdx), free(count);
  MPI_Finalize();
  return 0;
}
