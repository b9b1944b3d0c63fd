/* The GPU library asked to look where tensors lie (NCCL_EP_CHECK_TENSORS), by what CUDA says of addresses:
 * tensors in right memory pass, wrong ones are refused by name. The full table: tests/api/test_tensors.c. */
#include "gpu_case.h"
#include "test.h"

enum { E = 2, N = 32, K = 1, H = 256 };
#define BUFFER ((size_t)4 << 20)

typedef struct one {
  team_rank_t *r;
  ncclEpHandle_t h;
  ncclEpTensor_t in, weights, out, outWeights, outIdx;
} one_t;

static ncclResult_t dispatch(one_t *o) {
  ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  inputs.tokens = &o->in;
  inputs.topk_weights = &o->weights;
  outputs.tokens = &o->out;
  outputs.topk_weights = &o->outWeights;
  outputs.topk_idx = &o->outIdx;
  return ncclEpDispatch(o->h, &inputs, &outputs, NULL, NULL, o->r->stream);
}

/* "": it works. */
static void expect(one_t *o, const char *what, const char *word) {
  team_rank_t *r = o->r;
  ncclResult_t got = dispatch(o);
  const char *why = ncclEpGetLastError();
  if (!*word) {
    teamCheck(r, got == ncclSuccess, "%s: %s", what, why);
    teamCheck(r, cudaStreamSynchronize(r->stream) == cudaSuccess, "%s: the stream", what);
    return;
  }
  teamCheck(r, got == ncclInvalidArgument, "%s: gave %d", what, (int)got);
  teamCheck(r, strstr(why, "ncclEpDispatch: ") == why && strstr(why, word), "%s: %s", what, why);
  teamCheck(r, cudaGetLastError() == cudaSuccess, "%s: CUDA's last error is left", what);
}

static void places(team_rank_t *r) {
  _Alignas(64) char stack[512];
  char *big, *ids, *pinned, *managed, *freed, *plain = aligned_alloc(64, N * H * 2);
  teamCheck(r,
            !cudaMalloc((void **)&big, BUFFER) && !cudaMalloc((void **)&ids, 4096) &&
                !cudaMallocManaged((void **)&managed, BUFFER, cudaMemAttachGlobal) &&
                !cudaHostAlloc((void **)&pinned, BUFFER, cudaHostAllocMapped) &&
                !cudaMalloc((void **)&freed, 8 * BUFFER) && !cudaFree(freed) && plain,
            "memory");
  cudaMemset(ids, 0, 4096);
  cudaDeviceSynchronize();
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.num_experts = E;
  config.max_dispatch_tokens_per_rank = N;
  config.max_token_bytes = H * 2;
  ncclEpGroup_t group;
  one_t o = {.r = r};
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&o.h, group, NCCL_EP_LAYOUT_RANK_MAJOR, NULL, K, NULL));
  size_t rows[] = {N, H}, topk[] = {N, K}, slots[] = {1, N, H}, slotTopk[] = {1, N, K};
#define TENSOR(dims, type, where, shape)                                                           \
  (ncclEpTensor_t){NCCL_EP_TENSOR_INIT_INLINE, .ndim = dims, .datatype = type, .data = where,      \
                   .sizes = shape}
  ncclEpTensor_t idx = TENSOR(2, ncclInt32, ids, topk);
  o.in = TENSOR(2, ncclBfloat16, big, rows);
  o.weights = TENSOR(2, ncclFloat32, big + 65536, topk);
  o.out = TENSOR(3, ncclBfloat16, big + 131072, slots);
  o.outWeights = TENSOR(3, ncclFloat32, big + 262144, slotTopk);
  o.outIdx = TENSOR(3, ncclInt32, big + 266240, slotTopk);
  teamOk(r, ncclEpUpdateHandle(o.h, &idx, NULL, r->stream));
  expect(&o, "device memory", "");
  void *right = o.in.data;
  o.in.data = pinned;
  expect(&o, "pinned", "");
  o.in.data = managed;
  expect(&o, "managed", "");
  o.in.data = plain;
  expect(&o, "malloc", "inputs->tokens: data");
  o.in.data = freed;
  expect(&o, "freed", "freed");
  o.in.data = right;
  o.weights.data = stack;
  expect(&o, "the stack", "inputs->topk_weights: data");
  o.weights.data = big + 65536;
  o.out.data = big + BUFFER - 512;
  expect(&o, "past the end", "do not fit the allocation");
  o.out.data = big + N * H * 2 - 512;
  expect(&o, "an input's last row", "outputs->tokens");
  o.out.data = big;
  expect(&o, "in place", "overlaps");
  o.out.data = big + 131072;
  expect(&o, "device memory again", "");
  teamOk(r, ncclEpHandleDestroy(o.h));
  teamOk(r, ncclEpGroupDestroy(group));
  cudaFree(big);
  cudaFree(ids);
  cudaFree(managed);
  cudaFreeHost(pinned);
  free(plain);
}

TEST(places_of_tensors) {
  if (!numGpus()) SKIP("needs a GPU");
  setenv("NCCL_EP_CHECK_TENSORS", "1", 1);
  const char *error = teamThreads(1, places, NULL);
  unsetenv("NCCL_EP_CHECK_TENSORS");
  CHECK(!*error, "%s", error);
}

TEST_MAIN()
