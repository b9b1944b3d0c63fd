/* zero_copy ON: which tensors must lie in windows, per algorithm and direction. What lacks one is
 * refused by name; with it the same call brings rows. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "test.h"
#include "team.h"

enum { E = 4, N = 4, K = 2, H = 512, SLOTS = 2 * N * K, MEMORY = SLOTS * H * 2 };

typedef struct side {
  team_rank_t *r;
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  ncclWindow_t rows, scales;
  void *rowMemory, *scaleMemory;
} side_t;

static void expect(team_rank_t *r, const char *what, ncclResult_t got, const char *word) {
  ncclResult_t want = *word ? ncclInvalidArgument : ncclSuccess;
  const char *sentence = ncclEpGetLastError();
  if (got != want) teamFail(r, "%s: gave %d, not %d: %s", what, (int)got, (int)want, sentence);
  if (got && !strstr(sentence, word)) teamFail(r, "%s: no '%s' in: %s", what, word, sentence);
}

static ncclWindow_t window(team_rank_t *r, void **memory) {
  ncclWindow_t w = NULL;
  if (ncclMemAlloc(memory, MEMORY) ||
      ncclCommWindowRegister(r->comm, *memory, MEMORY, &w, NCCL_WIN_COLL_SYMMETRIC)) {
    teamFail(r, "window");
  }
  return w;
}

static int32_t ids[N * K] = {0, 2, 0, 2, 0, 2, 0, 2}; /* one expert of each rank */

/* Memory of a rank that lies in no window. */
typedef struct own {
  _Alignas(64) char in[MEMORY], inScales[MEMORY], out[MEMORY], outScales[MEMORY];
  float weights[N * K], outWeights[SLOTS * K];
  int64_t ids[SLOTS * K];
  int32_t counters[E];
} own_t;

static own_t owns[2];

static void openSide(team_rank_t *r, int ht, ncclEpLayout_t layout, side_t *s) {
  s->r = r;
  s->rows = window(r, &s->rowMemory);
  s->scales = window(r, &s->scaleMemory);
  ncclEpGroupConfig_t g = NCCL_EP_GROUP_CONFIG_INIT;
  g.num_experts = E;
  g.max_dispatch_tokens_per_rank = N;
  g.max_token_bytes = H * 2;
  g.zero_copy = r->user ? *(ncclEpZeroCopyMode_t *)r->user : NCCL_EP_ZERO_COPY_ON;
  if (ht) {
    g.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
    g.max_recv_tokens_per_rank = SLOTS;
    g.num_topk = K;
  }
  ncclEpTensor_t idx = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, .datatype = ncclInt32, .data = ids,
                        .sizes = (size_t[]){N, K}};
  teamPin(NULL, ids, sizeof ids);
  teamPin(NULL, owns, sizeof owns);
  teamOk(r, ncclEpCreateGroup(&s->group, r->comm, &g));
  teamOk(r, ncclEpInitHandle(&s->h, s->group, layout, NULL, K, NULL));
  teamOk(r, ncclEpUpdateHandle(s->h, &idx, NULL, r->stream));
}

static void closeSide(side_t *s) {
  team_rank_t *r = s->r;
  cudaStreamSynchronize(r->stream);
  teamOk(r, ncclEpHandleDestroy(s->h));
  teamOk(r, ncclEpGroupDestroy(s->group));
  teamCheck(r, !ncclCommWindowDeregister(r->comm, s->rows), "deregister");
  teamCheck(r, !ncclCommWindowDeregister(r->comm, s->scales), "deregister");
  teamCheck(r, !ncclMemFree(s->rowMemory) && !ncclMemFree(s->scaleMemory), "free");
}

/* Shapes of a call: the dimensions in front of a row's. */
typedef struct dims {
  unsigned n;
  size_t d[2];
} dims_t;

static ncclEpTensor_t tensor(dims_t dims, size_t width, ncclDataType_t dtype, void *data,
                             size_t sizes[3]) {
  for (unsigned i = 0; i < dims.n; i++) sizes[i] = dims.d[i];
  sizes[dims.n] = width;
  return (ncclEpTensor_t){NCCL_EP_TENSOR_INIT_INLINE, .ndim = dims.n + 1, .datatype = dtype,
                          .data = data, .sizes = sizes};
}

typedef struct placed {
  ncclEpDispQuant_t recipe;
  int rows, scales; /* outputs in windows */
} placed_t;

static void inWindow(ncclEpTensor_t *t, ncclWindow_t w) {
  t->data = NULL;
  t->win_hdl = w;
}

static ncclResult_t dispatch(const side_t *s, ncclEpLayout_t layout, placed_t at) {
  own_t *o = &owns[s->r->rank];
  int ht = layout == NCCL_EP_LAYOUT_FLAT, expertMajor = layout == NCCL_EP_LAYOUT_EXPERT_MAJOR;
  int caller = at.recipe == NCCL_EP_DISP_QUANT_FWD;
  int own8 = at.recipe == NCCL_EP_DISP_QUANT_DS_FP8E3M4;
  dims_t in = {1, {N, 0}}, out = {2, {2, expertMajor ? 2 * N : N}};
  if (ht) out = (dims_t){1, {SLOTS, 0}};
  ncclDataType_t rowType = caller ? ncclFloat8e4m3 : ncclBfloat16;
  ncclDataType_t scaleType = own8 ? ncclFloat32 : ncclUint8;
  size_t z[8][3];
  ncclEpTensor_t x = tensor(in, H, rowType, o->in, z[0]);
  ncclEpTensor_t xs = tensor(in, 16, scaleType, o->inScales, z[1]);
  ncclEpTensor_t w = tensor(in, K, ncclFloat32, o->weights, z[2]);
  ncclEpTensor_t y = tensor(out, H, own8 ? ncclFloat8e4m3 : rowType, o->out, z[3]);
  ncclEpTensor_t ys = tensor(out, own8 ? H / 128 : 16, scaleType, o->outScales, z[4]);
  ncclEpTensor_t yw = tensor(out, K, ncclFloat32, o->outWeights, z[5]);
  ncclEpTensor_t yi = tensor(out, K, ht ? ncclInt64 : ncclInt32, o->ids, z[6]);
  ncclEpTensor_t count = tensor((dims_t){0, {0, 0}}, E, ncclInt32, o->counters, z[7]);
  if (at.rows) inWindow(&y, s->rows);
  if (at.scales) inWindow(&ys, s->scales);
  ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  config.quant_recipe = at.recipe;
  inputs.tokens = &x;
  outputs.tokens = &y;
  if (caller) inputs.scales = &xs;
  if (caller || own8) outputs.scales = &ys;
  if (expertMajor) info.expert_counters = &count;
  if (!expertMajor) {
    inputs.topk_weights = &w;
    outputs.topk_weights = &yw;
    outputs.topk_idx = &yi;
  }
  return ncclEpDispatch(s->h, &inputs, &outputs, expertMajor ? &info : NULL, &config, s->r->stream);
}

/* The first row of rank 0's tokens, all bytes 7, must be where outputs->tokens says. */
static void dispatched(const side_t *s, ncclEpLayout_t layout, placed_t at, const char *word) {
  team_rank_t *r = s->r;
  char what[80];
  snprintf(what, sizeof what, "layout %d, recipe %d, rows %d, scales %d", (int)layout,
           (int)at.recipe, at.rows, at.scales);
  memset(owns[r->rank].in, 7, MEMORY);
  memset(owns[r->rank].out, 0, MEMORY);
  memset(s->rowMemory, 0, MEMORY);
  teamBarrier(r);
  expect(r, what, dispatch(s, layout, at), word);
  cudaStreamSynchronize(r->stream);
  const char *out = at.rows ? s->rowMemory : owns[r->rank].out;
  teamCheck(r, *out == (*word ? 0 : 7), "%s: the first byte is %d", what, *out);
}

static void combined(const side_t *s, ncclEpLayout_t layout, int window, const char *word) {
  own_t *o = &owns[s->r->rank];
  dims_t in = {2, {2, N}}, out = {1, {N, 0}};
  if (layout == NCCL_EP_LAYOUT_FLAT) in = (dims_t){1, {SLOTS, 0}};
  size_t z[2][3];
  ncclEpTensor_t x = tensor(in, H, ncclBfloat16, o->in, z[0]);
  ncclEpTensor_t y = tensor(out, H, ncclBfloat16, o->out, z[1]);
  if (window) inWindow(&x, s->rows);
  ncclEpCombineInputs_t inputs = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t outputs = NCCL_EP_COMBINE_OUTPUTS_INIT;
  inputs.tokens = &x;
  outputs.tokens = &y;
  expect(s->r, "combine", ncclEpCombine(s->h, &inputs, &outputs, NULL, s->r->stream), word);
}

static const ncclEpDispQuant_t NONE = NCCL_EP_DISP_QUANT_NONE, FWD = NCCL_EP_DISP_QUANT_FWD,
                               DS = NCCL_EP_DISP_QUANT_DS_FP8E3M4;

static void highThroughput(team_rank_t *r) {
  const ncclEpLayout_t flat = NCCL_EP_LAYOUT_FLAT;
  side_t s;
  openSide(r, 1, flat, &s);
  dispatched(&s, flat, (placed_t){NONE, 0, 0}, "outputs->tokens: zero_copy ON needs a window");
  dispatched(&s, flat, (placed_t){NONE, 1, 0}, "");
  dispatched(&s, flat, (placed_t){FWD, 0, 0}, "outputs->tokens: zero_copy ON needs a window");
  dispatched(&s, flat, (placed_t){FWD, 1, 0}, "for both or for neither");
  dispatched(&s, flat, (placed_t){FWD, 0, 1}, "for both or for neither");
  dispatched(&s, flat, (placed_t){FWD, 1, 1}, "");
  combined(&s, flat, 0, "inputs->tokens: zero_copy ON needs a window");
  combined(&s, flat, 1, "");
  closeSide(&s);
}

static void lowLatency(team_rank_t *r) {
  const ncclEpLayout_t rank = NCCL_EP_LAYOUT_RANK_MAJOR, expert = NCCL_EP_LAYOUT_EXPERT_MAJOR;
  side_t s;
  openSide(r, 0, rank, &s);
  dispatched(&s, rank, (placed_t){NONE, 0, 0}, "outputs->tokens or outputs->scales");
  dispatched(&s, rank, (placed_t){NONE, 1, 0}, "");
  dispatched(&s, rank, (placed_t){FWD, 0, 0}, "outputs->tokens or outputs->scales");
  dispatched(&s, rank, (placed_t){FWD, 0, 1}, "");
  dispatched(&s, rank, (placed_t){DS, 1, 1}, "DS_FP8E3M4");
  combined(&s, rank, 0, "");
  closeSide(&s);
  openSide(r, 0, expert, &s);
  dispatched(&s, expert, (placed_t){NONE, 1, 0}, "only the rank-major layout");
  closeSide(&s);
}

static void twoDomains(team_rank_t *r) {
  side_t s;
  openSide(r, 0, NCCL_EP_LAYOUT_RANK_MAJOR, &s);
  dispatched(&s, NCCL_EP_LAYOUT_RANK_MAJOR, (placed_t){NONE, 1, 0}, "one NVLink domain");
  closeSide(&s);
}

TEST(windows_of_high_throughput) {
  const char *error = teamThreads(2, highThroughput, NULL);
  CHECK(!*error, "%s", error);
}

TEST(windows_of_low_latency) {
  const char *error = teamThreads(2, lowLatency, NULL);
  CHECK(!*error, "%s", error);
}

TEST(low_latency_over_two_domains) {
  setenv("NCCL_LSA_TEAM_SIZE", "1", 1);
  const char *error = teamThreads(2, twoDomains, NULL);
  unsetenv("NCCL_LSA_TEAM_SIZE");
  CHECK(!*error, "%s", error);
}

/* Zero copy off: windows as one likes, the pair of Q1 apart. */
static void withoutZeroCopy(team_rank_t *r) {
  const ncclEpLayout_t flat = NCCL_EP_LAYOUT_FLAT;
  side_t s;
  openSide(r, 1, flat, &s);
  dispatched(&s, flat, (placed_t){NONE, 0, 0}, "");
  dispatched(&s, flat, (placed_t){NONE, 1, 0}, "");
  dispatched(&s, flat, (placed_t){FWD, 1, 0}, "for both or for neither");
  dispatched(&s, flat, (placed_t){FWD, 0, 0}, "");
  combined(&s, flat, 0, "");
  closeSide(&s);
}

TEST(off_needs_no_windows) {
  ncclEpZeroCopyMode_t off = NCCL_EP_ZERO_COPY_OFF;
  const char *error = teamThreads(2, withoutZeroCopy, &off);
  CHECK(!*error, "%s", error);
}

TEST_MAIN()
