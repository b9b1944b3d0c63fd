/* What high throughput with eager sizing asks of the CUDA runtime: a dispatch and a combine wait for their
 * Update by its event, and make, copy and wait for nothing else. The runtime's functions are this program's
 * here: they count, then call the host runtime's. */
#include <dlfcn.h>
#include <stdint.h>

#include "nccl_ep.h"
#include "test.h"

enum { TOKENS = 16, WIDTH = 64, EXPERTS = 8, TOPK = 2, STEPS = 3, MANY = 70 };

static int made, copied, waited;

#define COUNTED(counter, name, parameters, arguments)                                              \
  cudaError_t name parameters {                                                                    \
    static cudaError_t(*own) parameters;                                                           \
    if (!own) *(void **)&own = dlsym(RTLD_NEXT, #name);                                            \
    (counter)++;                                                                                   \
    return own arguments;                                                                          \
  }
COUNTED(made, cudaStreamCreateWithFlags, (cudaStream_t * s, unsigned flags), (s, flags))
COUNTED(made, cudaStreamDestroy, (cudaStream_t s), (s))
COUNTED(made, cudaEventCreateWithFlags, (cudaEvent_t * e, unsigned flags), (e, flags))
COUNTED(made, cudaMalloc, (void **p, size_t bytes), (p, bytes))
COUNTED(made, cudaHostAlloc, (void **p, size_t bytes, unsigned flags), (p, bytes, flags))
COUNTED(copied, cudaMemcpyAsync,
        (void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t s),
        (to, from, bytes, kind, s))
COUNTED(waited, cudaStreamSynchronize, (cudaStream_t s), (s))
COUNTED(waited, cudaDeviceSynchronize, (void), ())

#define OK(call) REQUIRE((call) == ncclSuccess, "%s: %s", #call, ncclEpGetLastError())

typedef struct bed {
  ncclComm_t comm;
  cudaStream_t stream;
  ncclEpGroup_t group;
  ncclEpHandle_t handle;
  char *memory;
  int64_t *ids, *total;
  size_t rows[2], topk[2], one[1];
  ncclEpTensor_t idx, in, out, sum;
} bed_t;

static ncclEpTensor_t tensor(unsigned ndim, ncclDataType_t type, size_t *sizes, void *data) {
  return (ncclEpTensor_t){NCCL_EP_TENSOR_INIT_INLINE, .ndim = ndim, .datatype = type, .data = data,
                          .sizes = sizes};
}

static void fill(bed_t *b) {
  const size_t rowBytes = (size_t)TOKENS * WIDTH * 2;
  REQUIRE(!cudaMallocHost((void **)&b->memory, 1 << 16), "memory");
  b->ids = (int64_t *)(b->memory + 3 * rowBytes);
  b->total = b->ids + TOKENS * TOPK;
  for (int i = 0; i < TOKENS * TOPK; i++) b->ids[i] = i % TOPK;
  b->rows[0] = b->topk[0] = TOKENS;
  b->rows[1] = WIDTH;
  b->topk[1] = TOPK;
  b->one[0] = 1;
  b->idx = tensor(2, ncclInt64, b->topk, b->ids);
  b->in = tensor(2, ncclBfloat16, b->rows, b->memory);
  b->out = tensor(2, ncclBfloat16, b->rows, b->memory + rowBytes);
  b->sum = tensor(2, ncclBfloat16, b->rows, b->memory + 2 * rowBytes);
}

static void openBed(bed_t *b) {
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  ncclUniqueId id;
  config.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
  config.num_experts = EXPERTS;
  config.max_dispatch_tokens_per_rank = TOKENS;
  config.max_token_bytes = WIDTH * 2;
  config.num_topk = TOPK;
  fill(b);
  REQUIRE(!cudaStreamCreate(&b->stream), "stream");
  REQUIRE(!ncclGetUniqueId(&id) && !ncclCommInitRank(&b->comm, 1, id, 0), "communicator");
  OK(ncclEpCreateGroup(&b->group, b->comm, &config));
  OK(ncclEpInitHandle(&b->handle, b->group, NCCL_EP_LAYOUT_FLAT, NULL, TOPK, NULL));
}

static void closeBed(bed_t *b) {
  OK(ncclEpHandleDestroy(b->handle));
  OK(ncclEpGroupDestroy(b->group));
  ncclCommDestroy(b->comm);
  cudaStreamDestroy(b->stream);
  cudaFreeHost(b->memory);
}

static ncclResult_t dispatch(bed_t *b, ncclEpHandle_t handle) {
  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
  config.pass_direction = NCCL_EP_BWD_PASS;
  in.tokens = &b->in;
  out.tokens = &b->out;
  return ncclEpDispatch(handle, &in, &out, NULL, &config, b->stream);
}

static ncclResult_t combine(bed_t *b, ncclEpHandle_t handle) {
  ncclEpCombineInputs_t in = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t out = NCCL_EP_COMBINE_OUTPUTS_INIT;
  in.tokens = &b->out;
  out.tokens = &b->sum;
  return ncclEpCombine(handle, &in, &out, NULL, b->stream);
}

static void expect(const char *what, int copies) {
  CHECK(made == 0, "%s: %d objects or allocations, should be none", what, made);
  CHECK(copied == copies, "%s: %d copies, should be %d", what, copied, copies);
  CHECK(waited == copies, "%s: %d waits, should be %d", what, waited, copies);
  made = copied = waited = 0;
}

/* As many rows as arrive are taken, and no fewer. */
static void checkCount(bed_t *b, ncclEpHandle_t handle, size_t rows) {
  b->rows[0] = TOKENS;
  b->out.sizes = (size_t[]){rows - 1, WIDTH};
  CHECK(dispatch(b, handle) == ncclInvalidArgument, "%zu rows of %zu taken", rows - 1, rows);
  b->out.sizes = (size_t[]){rows, WIDTH};
  OK(dispatch(b, handle));
  b->out.sizes = b->rows;
}

TEST(a_step_waits_for_its_update_alone) {
  bed_t b;
  openBed(&b);
  if (testFailures) return;
  made = copied = waited = 0;
  for (int i = 0; i < STEPS; i++) {
    OK(ncclEpUpdateHandle(b.handle, &b.idx, NULL, b.stream));
    expect("Update", 0);
    OK(dispatch(&b, b.handle));
    expect("Dispatch", 0);
    OK(combine(&b, b.handle));
    expect("Combine", 0);
  }
  for (size_t rows = TOKENS; rows > 2; rows -= 7) {
    for (size_t t = rows; t < TOKENS; t++) b.ids[TOPK * t] = b.ids[TOPK * t + 1] = -1;
    OK(ncclEpUpdateHandle(b.handle, &b.idx, NULL, b.stream));
    checkCount(&b, b.handle, rows);
  }
  closeBed(&b);
}

/* The caller's number and the library's are one: then it is copied, once a call. */
TEST(a_caller_who_counts) {
  bed_t b;
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  openBed(&b);
  if (testFailures) return;
  ncclEpTensor_t total = tensor(1, ncclInt64, b.one, b.total);
  info.recv_total_counter = &total;
  OK(ncclEpUpdateHandle(b.handle, &b.idx, NULL, b.stream));
  cudaStreamSynchronize(b.stream);
  for (int t = 9; t < TOKENS; t++) b.ids[TOPK * t] = b.ids[TOPK * t + 1] = -1;
  OK(ncclEpUpdateHandle(b.handle, &b.idx, &info, b.stream));
  made = copied = waited = 0;
  b.out.sizes = (size_t[]){9, WIDTH};
  OK(dispatch(&b, b.handle));
  expect("Dispatch", 1);
  CHECK(*b.total == 9, "%lld rows told", (long long)*b.total);
  checkCount(&b, b.handle, 9);
  closeBed(&b);
}

/* More handles than the group has words for: each has its own number. */
TEST(many_handles) {
  bed_t b;
  ncclEpHandle_t handles[MANY];
  openBed(&b);
  if (testFailures) return;
  for (int i = 0; i < MANY; i++) {
    for (int t = 0; t < TOKENS; t++)
      b.ids[TOPK * t] = b.ids[TOPK * t + 1] = t <= 1 + i % 14 ? 0 : -1;
    OK(ncclEpInitHandle(&handles[i], b.group, NCCL_EP_LAYOUT_FLAT, NULL, TOPK, NULL));
    OK(ncclEpUpdateHandle(handles[i], &b.idx, NULL, b.stream));
    cudaStreamSynchronize(b.stream);
  }
  for (int i = 0; i < MANY; i++) checkCount(&b, handles[i], (size_t)(2 + i % 14));
  for (int i = 0; i < MANY; i++) OK(ncclEpHandleDestroy(handles[i]));
  OK(ncclEpUpdateHandle(b.handle, &b.idx, NULL, b.stream));
  checkCount(&b, b.handle, (size_t)(2 + (MANY - 1) % 14));
  closeBed(&b);
}

TEST_MAIN()
