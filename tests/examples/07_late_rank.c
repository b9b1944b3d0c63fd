/* A rank that does not come: nobody hangs, and the others learn who it was.
 *
 *     07_late_rank              rank 2 comes after the timeout of 1.5 s: the others' next call fails
 *     07_late_rank masks        the group has masks: the others go on without it
 *     07_late_rank never        it never comes, and the program must be killed; with
 *                               NCCL_EP_HANG_DIR=DIR the records in DIR say who it was
 */
#include "example.h"

#include <string.h>
#include <unistd.h>

enum { numExperts = 4, hidden = 16, lateRank = 2 };

static int masks, never;
static pthread_barrier_t allCame;

static void step(int rank, int numRanks, ncclComm_t comm) {
  const size_t L = (size_t)(numExperts / numRanks), R = (size_t)numRanks;
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.num_experts = numExperts;
  config.max_dispatch_tokens_per_rank = 1;
  config.max_token_bytes = hidden * sizeof(float);
  config.timeout_ns = 1500 * 1000 * 1000;
  config.enable_mask = (unsigned)masks;
  ncclEpGroup_t group;
  ncclEpHandle_t handle;
  EP(ncclEpCreateGroup(&group, comm, &config));
  EP(ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, 1, NULL));

  int expert = (rank + 1) % numExperts, active[64];
  ncclEpTensor_t routing = TENSOR(onDevice(&expert, sizeof expert), ncclInt32, 2, 1, 1);
  ncclEpTensor_t tokens = TENSOR(onDevice(NULL, hidden * sizeof(float)), ncclFloat32, 2, 1, hidden);
  ncclEpTensor_t received =
      TENSOR(onDevice(NULL, L * R * hidden * sizeof(float)), ncclFloat32, 3, L, R, hidden);
  ncclEpTensor_t counters = TENSOR(onDevice(NULL, L * sizeof(int)), ncclInt32, 1, L);
  int *mask = onDevice(NULL, R * sizeof *mask);
  cudaStream_t stream;
  CUDA(cudaStreamCreate(&stream));
  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpLayoutInfo_t layout = NCCL_EP_LAYOUT_INFO_INIT;
  in.tokens = &tokens, out.tokens = &received, layout.expert_counters = &counters;
  EP(ncclEpUpdateHandle(handle, &routing, NULL, stream));

  if (rank == lateRank && never) pause();
  if (rank == lateRank) sleep(4);
  ncclResult_t first = ncclEpDispatch(handle, &in, &out, &layout, NULL, stream);
  if (first != ncclSuccess && rank != lateRank) STOP("rank %d: %s", rank, ncclEpGetLastError());
  (void)cudaStreamSynchronize(stream); /* returns at the timeout at the latest */

  if (masks && rank != lateRank) {
    EP(ncclEpMaskQuery(group, mask, stream));
    CUDA(cudaStreamSynchronize(stream));
    toHost(active, mask, R * sizeof *active);
    if (active[lateRank]) STOP("rank %d does not know that rank %d is late", rank, lateRank);
    printf("rank %d went on without rank %d\n", rank, lateRank);
  } else if (rank != lateRank) {
    ncclResult_t result = ncclEpDispatch(handle, &in, &out, &layout, NULL, stream);
    if (result != ncclRemoteError) STOP("rank %d: the result is %d", rank, (int)result);
    printf("rank %d: %s\n", rank, ncclEpGetLastError());
  } else {
    printf("rank %d came, too late\n", rank);
  }
  /* A lost group frees at once what no rank of the process can read any more: so all, here. */
  if (!never) pthread_barrier_wait(&allCame);
  EP(ncclEpHandleDestroy(handle));
  EP(ncclEpGroupDestroy(group));
  void *const buffers[] = {tokens.data, routing.data, received.data, counters.data, mask};
  for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) CUDA(cudaFree(buffers[i]));
  CUDA(cudaStreamDestroy(stream));
}

int main(int argc, char **argv) {
  masks = argc > 1 && !strcmp(argv[1], "masks");
  never = argc > 1 && !strcmp(argv[1], "never");
  pthread_barrier_init(&allCame, NULL, 4);
  runRanks(4, step);
  pthread_barrier_destroy(&allCame);
  return 0;
}
