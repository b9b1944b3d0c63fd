/* What a call costs the host most: how many kernels it launches; and of how many blocks. The launcher here
 * counts launches and runs none. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "nccl_ep.h"
#include "test.h"
#include "trefoil_host.h"

enum { TOKENS = 16, WIDTH = 64, EXPERTS = 8, TOPK = 2, STEPS = 3 };

static atomic_int launches, mostBlocks, lastBlocks;
static _Thread_local int lastThreads; /* of a block of this rank's last launch */

static void *prepare(const void *function, const trefoil_host_launch_t *launch) {
  static int any;
  int blocks = (int)launch->gridDim.x;
  (void)function;
  if (blocks > atomic_load(&mostBlocks)) atomic_store(&mostBlocks, blocks);
  atomic_store(&lastBlocks, blocks);
  atomic_fetch_add(&launches, 1);
  lastThreads = (int)launch->blockDim.x;
  return &any;
}

static void pass(void *launch) {
  (void)launch;
}

/* Sizes of tensors and what they point to, for all modes: large enough for each. */
typedef struct bed {
  ncclComm_t comm;
  cudaStream_t stream;
  ncclEpGroup_t group;
  ncclEpHandle_t handle;
  char *memory;
  size_t rows[2], slots[3], topk[2], slotTopk[2], counts[1];
  ncclEpTensor_t idx, in, out, back, weights, outWeights, outIdx, counters;
} bed_t;

#define OK(call) REQUIRE((call) == ncclSuccess, "%s: %s", #call, ncclEpGetLastError())

static ncclEpTensor_t tensor(bed_t *b, unsigned ndim, ncclDataType_t type, size_t *sizes) {
  return (ncclEpTensor_t){NCCL_EP_TENSOR_INIT_INLINE, .ndim = ndim, .datatype = type,
                          .data = b->memory, .sizes = sizes};
}

static void fillTensors(bed_t *b, int ht) {
  size_t slots = (size_t)TOKENS * (ht ? TOPK : 1);
  b->rows[0] = b->topk[0] = TOKENS;
  b->rows[1] = WIDTH;
  b->topk[1] = b->slotTopk[1] = TOPK;
  b->slotTopk[0] = slots;
  b->counts[0] = EXPERTS;
  b->slots[0] = ht ? slots : EXPERTS;
  b->slots[1] = ht ? WIDTH : TOKENS;
  b->slots[2] = WIDTH;
  b->idx = tensor(b, 2, ncclInt32, b->topk);
  b->in = b->back = tensor(b, 2, ncclBfloat16, b->rows);
  b->out = tensor(b, ht ? 2 : 3, ncclBfloat16, b->slots);
  b->weights = tensor(b, 2, ncclFloat32, b->topk);
  b->outWeights = tensor(b, 2, ncclFloat32, b->slotTopk);
  b->outIdx = tensor(b, 2, ncclInt64, b->slotTopk);
  b->counters = tensor(b, 1, ncclInt32, b->counts);
}

static unsigned maxSms; /* 0: the library's choice */

static ncclEpGroupConfig_t configOf(int ht, unsigned maxRecv) {
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.algorithm = ht ? NCCL_EP_ALGO_HIGH_THROUGHPUT : NCCL_EP_ALGO_LOW_LATENCY;
  config.num_experts = EXPERTS;
  config.max_dispatch_tokens_per_rank = TOKENS;
  config.max_recv_tokens_per_rank = maxRecv;
  config.max_token_bytes = WIDTH * 2;
  config.max_num_sms = maxSms;
  return config;
}

static void openRank(bed_t *b, int ht, unsigned maxRecv, int rank, int numRanks, ncclUniqueId id) {
  static const trefoil_host_launcher_t counting = {prepare, pass, pass};
  memset(b, 0, sizeof *b);
  trefoilHostSetLauncher(&counting);
  ncclEpGroupConfig_t config = configOf(ht, maxRecv);
  REQUIRE(!cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking), "stream");
  REQUIRE(!cudaMalloc((void **)&b->memory, 1 << 20), "memory");
  REQUIRE(!cudaMemset(b->memory, 0, 1 << 20), "memory");
  REQUIRE(!ncclCommInitRank(&b->comm, numRanks, id, rank), "communicator");
  OK(ncclEpCreateGroup(&b->group, b->comm, &config));
  OK(ncclEpInitHandle(&b->handle, b->group, ht ? NCCL_EP_LAYOUT_FLAT : NCCL_EP_LAYOUT_EXPERT_MAJOR,
                      NULL, TOPK, NULL));
  fillTensors(b, ht);
}

static void openBed(bed_t *b, int ht, unsigned maxRecv) {
  ncclUniqueId id;
  REQUIRE(!ncclGetUniqueId(&id), "id");
  openRank(b, ht, maxRecv, 0, 1, id);
}

static void closeBed(bed_t *b) {
  OK(ncclEpHandleDestroy(b->handle));
  OK(ncclEpGroupDestroy(b->group));
  ncclCommDestroy(b->comm);
  cudaStreamDestroy(b->stream);
  cudaFree(b->memory);
}

static void expect(const char *call, int wanted) {
  int made = atomic_exchange(&launches, 0);
  CHECK(made == wanted, "%s: %d launches, should be %d", call, made, wanted);
}

static void steps(bed_t *b, int ht) {
  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  ncclEpCombineInputs_t from = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t to = NCCL_EP_COMBINE_OUTPUTS_INIT;
  in.tokens = &b->in;
  out.tokens = from.tokens = &b->out;
  to.tokens = &b->back;
  if (ht) {
    in.topk_weights = &b->weights;
    out.topk_weights = &b->outWeights;
    out.topk_idx = &b->outIdx;
  } else {
    info.expert_counters = &b->counters;
    to.topk_weights = &b->weights;
  }
  atomic_store(&launches, 0);
  for (int i = 0; i < STEPS; i++) {
    OK(ncclEpUpdateHandle(b->handle, &b->idx, NULL, b->stream));
    expect("Update", ht ? 1 : 0);
    OK(ncclEpDispatch(b->handle, &in, &out, ht ? NULL : &info, NULL, b->stream));
    expect("Dispatch", 1);
    OK(ncclEpCombine(b->handle, &from, &to, NULL, b->stream));
    expect("Combine", 1);
    OK(ncclEpComplete(b->handle, NULL, b->stream));
    expect("Complete", 0);
  }
}

TEST(low_latency) {
  bed_t b;
  openBed(&b, 0, 0);
  if (testFailures) return;
  steps(&b, 0);
  closeBed(&b);
}

/* With room for all slots, and where an overflow would be told. */
TEST(high_throughput) {
  for (unsigned maxRecv = TOKENS; maxRecv <= 2 * TOKENS; maxRecv += TOKENS) {
    bed_t b;
    openBed(&b, 1, maxRecv);
    if (testFailures) return;
    steps(&b, 1);
    closeBed(&b);
  }
}

/* ---- Blocks of high throughput by default ---- */

static void checkBlocks(bed_t *b, const char *how, int wanted) {
  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpCombineInputs_t from = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t to = NCCL_EP_COMBINE_OUTPUTS_INIT;
  in.tokens = &b->in;
  in.topk_weights = &b->weights;
  out.tokens = from.tokens = &b->out;
  out.topk_weights = &b->outWeights;
  if (b->outWeights.ndim == 2) out.topk_idx = &b->outIdx;
  to.tokens = &b->back;
  OK(ncclEpUpdateHandle(b->handle, &b->idx, NULL, b->stream));
  OK(ncclEpDispatch(b->handle, &in, &out, NULL, NULL, b->stream));
  CHECK(lastBlocks == wanted, "dispatch %s: %d blocks, should be %d", how, lastBlocks, wanted);
  OK(ncclEpCombine(b->handle, &from, &to, NULL, b->stream));
  CHECK(lastBlocks == wanted, "combine %s: %d blocks, should be %d", how, lastBlocks, wanted);
}

TEST(default_blocks_of_high_throughput) {
  bed_t b;
  void *memory;
  openBed(&b, 1, 2 * TOKENS);
  if (testFailures) return;
  checkBlocks(&b, "flat", 28);
  REQUIRE(!ncclMemAlloc(&memory, 1 << 16), "memory of a window");
  REQUIRE(!ncclCommWindowRegister(b.comm, memory, 1 << 16, &b.out.win_hdl, NCCL_WIN_COLL_SYMMETRIC),
          "window");
  b.out.data = memory;
  checkBlocks(&b, "flat, in windows", 16);
  REQUIRE(!ncclCommWindowDeregister(b.comm, b.out.win_hdl), "window");
  b.out.win_hdl = NULL;
  OK(ncclEpHandleDestroy(b.handle));
  OK(ncclEpInitHandle(&b.handle, b.group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, TOPK, NULL));
  b.outWeights.ndim = 1;
  checkBlocks(&b, "expert-major", 64);
  ncclMemFree(memory);
  closeBed(&b);
}

/* Halves: one launch each. */
TEST(send_only_and_complete) {
  bed_t b;
  openBed(&b, 0, 0);
  if (testFailures) return;
  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
  config.send_only = 1;
  in.tokens = &b.in;
  out.tokens = &b.out;
  info.expert_counters = &b.counters;
  atomic_store(&launches, 0);
  OK(ncclEpUpdateHandle(b.handle, &b.idx, NULL, b.stream));
  OK(ncclEpDispatch(b.handle, &in, &out, &info, &config, b.stream));
  expect("the sending half", 1);
  OK(ncclEpComplete(b.handle, NULL, b.stream));
  expect("the receiving half", 1);
  closeBed(&b);
}

/* ---- Ranks on one GPU ---- */

typedef struct pair {
  bed_t bed;
  ncclUniqueId id;
  int rank, device;
} pair_t;

static void dispatchOnce(pair_t *p) {
  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  bed_t *b = &p->bed;
  cudaSetDevice(p->device);
  openRank(b, 0, 0, p->rank, 2, p->id);
  if (testFailures) return;
  b->slots[0] = EXPERTS / 2;
  b->slots[1] = (size_t)2 * TOKENS;
  b->counts[0] = EXPERTS / 2;
  in.tokens = &b->in;
  out.tokens = &b->out;
  info.expert_counters = &b->counters;
  OK(ncclEpUpdateHandle(b->handle, &b->idx, NULL, b->stream));
  OK(ncclEpDispatch(b->handle, &in, &out, &info, NULL, b->stream));
  closeBed(b);
}

static void *pairMain(void *argument) {
  dispatchOnce(argument);
  return NULL;
}

/* ---- Who reads the peers' inputs ---- */

/* A dispatch of inputs and outputs in no window, which copies its rows first, or goes through FIFOs. */
typedef struct choice {
  unsigned sms;
  int ranks, expertMajor, copies;
} choice_t;

typedef struct chooser {
  pair_t at;
  const choice_t *choice;
} chooser_t;

static void chosen(const chooser_t *c) {
  enum { FIFO_THREADS = 576, WINDOW_THREADS = 640 }; /* htDispatchThreads */
  const choice_t *want = c->choice;
  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  pair_t p = c->at;
  bed_t *b = &p.bed;
  unsigned slots = (unsigned)want->ranks * TOKENS * TOPK;
  cudaSetDevice(p.device);
  openRank(b, 1, slots, p.rank, want->ranks, p.id);
  if (testFailures) return;
  if (want->expertMajor) {
    OK(ncclEpHandleDestroy(b->handle));
    OK(ncclEpInitHandle(&b->handle, b->group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, TOPK, NULL));
    b->outWeights.ndim = 1;
  }
  b->slots[0] = b->slotTopk[0] = slots;
  in.tokens = &b->in;
  in.topk_weights = &b->weights;
  out.tokens = &b->out;
  out.topk_weights = &b->outWeights;
  if (!want->expertMajor) out.topk_idx = &b->outIdx;
  OK(ncclEpUpdateHandle(b->handle, &b->idx, NULL, b->stream));
  OK(ncclEpDispatch(b->handle, &in, &out, NULL, NULL, b->stream));
  int wanted = want->copies ? WINDOW_THREADS : FIFO_THREADS;
  CHECK(lastThreads == wanted, "%d ranks, %u SMs, %s: blocks of %d threads, should be %d",
        want->ranks, want->sms, want->expertMajor ? "expert-major" : "flat", lastThreads, wanted);
  closeBed(b);
}

static void *chooserMain(void *argument) {
  chosen(argument);
  return NULL;
}

static void choose(const choice_t *choice) {
  ncclUniqueId id;
  pthread_t threads[3];
  chooser_t choosers[3];
  REQUIRE(!ncclGetUniqueId(&id), "id");
  maxSms = choice->sms;
  for (int r = 0; r < choice->ranks; r++) {
    choosers[r] = (chooser_t){{.id = id, .rank = r, .device = r}, choice};
    REQUIRE(!pthread_create(&threads[r], NULL, chooserMain, &choosers[r]), "thread");
  }
  for (int r = 0; r < choice->ranks; r++) pthread_join(threads[r], NULL);
  maxSms = 0;
}

TEST(who_copies_rows_first) {
  static const choice_t choices[] = {{20, 2, 0, 1}, {21, 2, 0, 0}, {0, 2, 0, 0},
                                     {16, 3, 0, 1}, {17, 3, 0, 0}, {48, 2, 1, 1},
                                     {49, 2, 1, 0}, {24, 3, 1, 1}, {25, 3, 1, 0}};
  for (size_t i = 0; i < sizeof choices / sizeof *choices && !testFailures; i++)
    choose(&choices[i]);
}

/* They wait for each other's kernels: each takes half of the SMs at most. */
TEST(ranks_that_share_a_gpu) {
  const char *sms = getenv("TREFOIL_HOST_SMS");
  REQUIRE(sms, "TREFOIL_HOST_SMS is not set");
  for (int shared = 0; shared < 2; shared++) {
    ncclUniqueId id;
    pthread_t threads[2];
    pair_t pairs[2];
    REQUIRE(!ncclGetUniqueId(&id), "id");
    atomic_store(&mostBlocks, 0);
    for (int r = 0; r < 2; r++) {
      pairs[r] = (pair_t){.id = id, .rank = r, .device = shared ? 0 : r};
      REQUIRE(!pthread_create(&threads[r], NULL, pairMain, &pairs[r]), "thread");
    }
    for (int r = 0; r < 2; r++) pthread_join(threads[r], NULL);
    int wanted = atoi(sms) / (shared ? 2 : 1), most = atomic_load(&mostBlocks);
    CHECK(most == wanted, "%d blocks, should be %d", most, wanted);
  }
}

TEST_MAIN()
