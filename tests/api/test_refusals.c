/* What test_arguments.c leaves: routing and its counters at Update, rows that the caller quantised,
 * and masks. As there, each line of a table spoils one thing of a
 * call that is right otherwise, and the same call works afterwards. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "test.h"
#include "team.h"

enum { E = 6, N = 8, B = 5, K = 3, H = 512, SLOTS = N * K };

static _Alignas(4096) char memory[8][SLOTS * H * 2];

/* A refusal: the code, and a word of its sentence. */
static void expect(team_rank_t *r, const char *what, ncclResult_t got, ncclResult_t want,
                   const char *word) {
  const char *sentence = ncclEpGetLastError();
  if (got != want) teamFail(r, "%s: gave %d, not %d: %s", what, (int)got, (int)want, sentence);
  if (got && !strstr(sentence, word)) teamFail(r, "%s: no '%s' in: %s", what, word, sentence);
}

typedef enum kind { LL_EM, LL_RM, HT_FL, HT_EM } kind_t;
enum { ALL = 15, LL = 3, HT = 12, EM = 9 };

static const ncclEpLayout_t layouts[4] = {NCCL_EP_LAYOUT_EXPERT_MAJOR, NCCL_EP_LAYOUT_RANK_MAJOR,
                                          NCCL_EP_LAYOUT_FLAT, NCCL_EP_LAYOUT_EXPERT_MAJOR};

static ncclEpGroupConfig_t configOf(kind_t kind) {
  ncclEpGroupConfig_t g = NCCL_EP_GROUP_CONFIG_INIT;
  g.num_experts = E;
  g.max_dispatch_tokens_per_rank = N;
  g.max_token_bytes = H * 2;
  if (kind < HT_FL) return g;
  g.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
  g.max_recv_tokens_per_rank = SLOTS;
  g.num_topk = K;
  return g;
}

/* A tensor that holds its sizes itself: set .sizes again after a copy. */
typedef struct shaped {
  ncclEpTensor_t t;
  size_t sizes[3];
} shaped_t;

static ncclEpTensor_t *shape(shaped_t *s, void *data, ncclDataType_t dtype, unsigned ndim, size_t a,
                             size_t b, size_t c) {
  s->sizes[0] = a;
  s->sizes[1] = b;
  s->sizes[2] = c;
  s->t = (ncclEpTensor_t){NCCL_EP_TENSOR_INIT_INLINE, .ndim = ndim, .datatype = dtype, .data = data,
                          .sizes = s->sizes};
  return &s->t;
}

static int64_t ids[(N + 1) * K]; /* a row more than is right */

/* Once, before the tests: queued Updates read them at any time. */
__attribute__((constructor)) static void makeIds(void) {
  teamPin(NULL, ids, sizeof ids);
  teamPin(NULL, memory, sizeof memory);
  for (int i = 0; i < (N + 1) * K; i++) ids[i] = i % K + i / K % 3;
}

static ncclEpTensor_t *routing(shaped_t *s) {
  return shape(s, ids, ncclInt64, 2, B, K, 0);
}

/* One fault of a tensor. */
typedef enum how { NDIM, DTYPE, SIZE0, SIZE1, SIZE2, DATA, SHIFT, MAGIC, NO_SIZES } how_t;

typedef struct fault {
  const char *what, *word;
  how_t how;
  uint64_t value;
  int kinds;
} fault_t;

static void spoil(ncclEpTensor_t *t, const fault_t *f, size_t *sizes) {
  if (f->how == NDIM) t->ndim = (unsigned)f->value;
  if (f->how == DTYPE) t->datatype = (ncclDataType_t)f->value;
  if (f->how >= SIZE0 && f->how <= SIZE2) sizes[f->how - SIZE0] = f->value;
  if (f->how == DATA) t->data = (void *)(uintptr_t)f->value;
  if (f->how == SHIFT) t->data = (char *)t->data + f->value;
  if (f->how == MAGIC) t->magic = (unsigned)f->value;
  if (f->how == NO_SIZES) t->sizes = NULL;
}

static const fault_t routingFaults[] = {
    {"one dimension", "ndim", NDIM, 1, ALL},
    {"three dimensions", "ndim", NDIM, 3, ALL},
    {"f32", "datatype", DTYPE, ncclFloat32, ALL},
    {"uint64", "datatype", DTYPE, ncclUint64, ALL},
    {"no such type", "datatype", DTYPE, 77, ALL},
    {"a token too many", "max_dispatch_tokens_per_rank", SIZE0, N + 1, ALL},
    {"2^64 - 1 tokens", "topk_idx", SIZE0, SIZE_MAX, ALL},
    {"top-4", "sizes[1]", SIZE1, K + 1, ALL},
    {"top-2", "sizes[1]", SIZE1, K - 1, ALL},
    {"top-0", "sizes[1]", SIZE1, 0, ALL},
    {"no data", "data is NULL", DATA, 0, ALL},
    {"misaligned", "multiple of 8", SHIFT, 4, ALL},
    {"magic", "magic", MAGIC, NCCL_EP_MAGIC, ALL},
    {"no sizes", "sizes is NULL", NO_SIZES, 0, ALL},
};

static const fault_t counterFaults[] = {
    {"short", "sizes[0]", SIZE0, 0, ALL},
    {"f32", "datatype", DTYPE, ncclFloat32, ALL},
    {"uint32", "datatype", DTYPE, ncclUint32, ALL},
    {"two dimensions", "ndim", NDIM, 2, ALL},
    {"no data", "data is NULL", DATA, 0, ALL},
    {"misaligned", "multiple of 4", SHIFT, 2, ALL},
    {"magic", "magic", MAGIC, 1, ALL},
    {"no sizes", "sizes is NULL", NO_SIZES, 0, ALL},
};
#define COUNT(array) (sizeof(array) / sizeof *(array))

/* One handle's Update, and CreateHandle, which is Init and Update. */
static void routingOf(team_rank_t *r, kind_t kind, ncclEpGroup_t g, ncclEpHandle_t h) {
  shaped_t idx;
  ncclEpHandle_t made = (ncclEpHandle_t)(void *)&idx, untouched = made;
  const ncclResult_t bad = ncclInvalidArgument;
  for (size_t i = 0; i < COUNT(routingFaults); i++) {
    const fault_t *f = &routingFaults[i];
    routing(&idx);
    spoil(&idx.t, f, idx.sizes);
    expect(r, f->what, ncclEpUpdateHandle(h, &idx.t, NULL, r->stream), bad, f->word);
    if (f->how == SIZE1) continue; /* CreateHandle's K is the routing's */
    expect(r, f->what, ncclEpCreateHandle(&made, g, layouts[kind], &idx.t, NULL, NULL, r->stream),
           bad, f->word);
  }
  routing(&idx);
  expect(r, "no handle", ncclEpUpdateHandle(NULL, &idx.t, NULL, r->stream), bad, "NULL");
  expect(r, "no topk_idx", ncclEpUpdateHandle(h, NULL, NULL, r->stream), bad, "topk_idx is NULL");
  expect(r, "not a handle", ncclEpUpdateHandle((ncclEpHandle_t)(void *)&idx, &idx.t, NULL, NULL),
         bad, "not a live handle");
#define CREATE(what, handle, group, tensor, word)                                                  \
  expect(r, what, ncclEpCreateHandle(handle, group, layouts[kind], tensor, NULL, NULL, r->stream), \
         bad, word)
  CREATE("create: no handle", NULL, g, &idx.t, "handle is NULL");
  CREATE("create: no group", &made, NULL, &idx.t, "NULL");
  CREATE("create: not a group", &made, (ncclEpGroup_t)h, &idx.t, "not a live group");
  CREATE("create: no topk_idx", &made, g, NULL, "topk_idx is NULL");
#undef CREATE
  teamCheck(r, made == untouched, "an out-parameter was touched");
}

static void countersOf(team_rank_t *r, kind_t kind, ncclEpHandle_t h) {
  shaped_t idx, counter;
  routing(&idx);
  const size_t lengths[3] = {E, E, 1};
  for (size_t which = 0; which < 3; which++) {
    const char *const names[3] = {"expert_counters", "expert_offsets", "recv_total_counter"};
    if (which == 1 && kind == HT_FL) continue; /* ignored there */
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
    *(which == 0   ? &info.expert_counters
      : which == 1 ? &info.expert_offsets
                   : &info.recv_total_counter) = &counter.t;
    for (size_t i = 0; i <= COUNT(counterFaults); i++) {
      shape(&counter, memory[which], ncclInt32, 1, lengths[which], 1, 0);
      fault_t one_short = {"one short", "sizes[0]", SIZE0, lengths[which] - 1, ALL};
      const fault_t *f = i < COUNT(counterFaults) ? &counterFaults[i] : &one_short;
      spoil(&counter.t, f, counter.sizes);
      ncclResult_t got = ncclEpUpdateHandle(h, &idx.t, &info, r->stream);
      int low = kind < HT_FL;
      expect(r, f->what, got, ncclInvalidArgument, low ? "layout_info must be NULL" : f->word);
      if (!low) expect(r, f->what, got, ncclInvalidArgument, names[which]);
    }
  }
}

static void updateFaults(team_rank_t *r) {
  for (int kind = 0; kind < 4; kind++) {
    ncclEpGroupConfig_t config = configOf((kind_t)kind);
    ncclEpGroup_t g;
    ncclEpHandle_t h;
    teamOk(r, ncclEpCreateGroup(&g, r->comm, &config));
    teamOk(r, ncclEpInitHandle(&h, g, layouts[kind], NULL, K, NULL));
    routingOf(r, (kind_t)kind, g, h);
    countersOf(r, (kind_t)kind, h);
    shaped_t idx;
    teamOk(r, ncclEpUpdateHandle(h, routing(&idx), NULL, r->stream));
    teamOk(r, ncclEpUpdateHandle(h, routing(&idx), NULL, r->stream));
    cudaStreamSynchronize(r->stream);
    teamOk(r, ncclEpHandleDestroy(h));
    teamOk(r, ncclEpGroupDestroy(g));
  }
}

TEST(routing_and_counters) {
  const char *error = teamThreads(1, updateFaults, NULL);
  CHECK(!*error, "%s", error);
}

/* An HT flat dispatch of rows that the caller quantised: [B, 64] bytes and [B, 16] of scales. */
typedef struct call {
  shaped_t in, inScales, inWeights, out, outScales, outWeights, outIdx;
  ncclEpDispatchInputs_t inputs;
  ncclEpDispatchOutputs_t outputs;
  ncclEpDispatchConfig_t config;
} call_t;

static void makeCall(call_t *c) {
  const ncclDataType_t rows = ncclFloat8e4m3;
  c->inputs = (ncclEpDispatchInputs_t)NCCL_EP_DISPATCH_INPUTS_INIT;
  c->outputs = (ncclEpDispatchOutputs_t)NCCL_EP_DISPATCH_OUTPUTS_INIT;
  c->config = (ncclEpDispatchConfig_t)NCCL_EP_DISPATCH_CONFIG_INIT;
  c->inputs.tokens = shape(&c->in, memory[0], rows, 2, B, 64, 0);
  c->inputs.topk_weights = shape(&c->inWeights, memory[1], ncclFloat32, 2, B, K, 0);
  c->outputs.tokens = shape(&c->out, memory[2], rows, 2, SLOTS, 64, 0);
  c->outputs.topk_weights = shape(&c->outWeights, memory[3], ncclFloat32, 2, SLOTS, K, 0);
  c->outputs.topk_idx = shape(&c->outIdx, memory[4], ncclInt64, 2, SLOTS, K, 0);
  c->config.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
  c->inputs.scales = shape(&c->inScales, memory[5], ncclUint8, 2, B, 16, 0);
  c->outputs.scales = shape(&c->outScales, memory[6], ncclUint8, 2, SLOTS, 16, 0);
}

static ncclResult_t run(team_rank_t *r, ncclEpHandle_t h, call_t *c) {
  return ncclEpDispatch(h, &c->inputs, &c->outputs, NULL, &c->config, r->stream);
}

/* A change to both sides, or to one. */
typedef struct quant_fault {
  const char *what, *word;
  size_t tensor[2]; /* offsets in call_t; 0 twice: one tensor */
  fault_t fault;
} quant_fault_t;

#define AT(field) offsetof(call_t, field)
#define ONE(a)                                                                                     \
  { AT(a), AT(a) }
#define BOTH(a, b)                                                                                 \
  { AT(a), AT(b) }
#define FAULT(how, value)                                                                          \
  { NULL, NULL, how, value, ALL }

static const quant_fault_t quantFaults[] = {
    {"rows at 8", "inputs->tokens: data", ONE(in), FAULT(SHIFT, 8)},
    {"scales at 4", "inputs->scales: data", ONE(inScales), FAULT(SHIFT, 4)},
    {"output rows at 8", "outputs->tokens: data", ONE(out), FAULT(SHIFT, 8)},
    {"output scales at 8", "outputs->scales: data", ONE(outScales), FAULT(SHIFT, 8)},
    {"rows of 24 bytes", "multiple of 16", BOTH(in, out), FAULT(SIZE1, 24)},
    {"scales of 8 bytes", "multiple of 16", BOTH(inScales, outScales), FAULT(SIZE1, 8)},
    {"scales of 0 bytes", "multiple of 16", BOTH(inScales, outScales), FAULT(SIZE1, 0)},
    {"rows of uint8", "inputs->tokens: datatype", BOTH(in, out), FAULT(DTYPE, ncclUint8)},
    {"rows of int32", "inputs->tokens: datatype", BOTH(in, out), FAULT(DTYPE, ncclInt32)},
    {"scales of FP4", "inputs->scales: datatype", BOTH(inScales, outScales),
     FAULT(DTYPE, ncclFloat4x2)},
    {"output of E5M2", "outputs->tokens: datatype", ONE(out), FAULT(DTYPE, ncclFloat8e5m2)},
    {"output scales of E4M3", "outputs->scales: datatype", ONE(outScales),
     FAULT(DTYPE, ncclFloat8e4m3)},
    {"narrow output", "outputs->tokens: sizes[1]", ONE(out), FAULT(SIZE1, 48)},
    {"wide output scales", "outputs->scales: sizes[1]", ONE(outScales), FAULT(SIZE1, 32)},
    {"short output scales", "outputs->scales: sizes[0]", ONE(outScales), FAULT(SIZE0, SLOTS - 1)},
    {"short scales", "inputs->scales: sizes[0]", ONE(inScales), FAULT(SIZE0, B - 1)},
    {"more than max_token_bytes", "max_token_bytes", BOTH(in, out), FAULT(SIZE1, H * 2)},
    {"weights for no row", "both or neither", ONE(outWeights), FAULT(SIZE0, 0)},
    {"ids for no row", "outputs->topk_idx", ONE(outIdx), FAULT(SIZE0, 0)},
};

static void quantisationFaults(team_rank_t *r) {
  ncclEpGroupConfig_t config = configOf(HT_FL);
  ncclEpGroup_t g;
  ncclEpHandle_t h;
  shaped_t idx;
  call_t c;
  teamOk(r, ncclEpCreateGroup(&g, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, g, NCCL_EP_LAYOUT_FLAT, NULL, K, NULL));
  teamOk(r, ncclEpUpdateHandle(h, routing(&idx), NULL, r->stream));
  for (size_t i = 0; i < COUNT(quantFaults); i++) {
    const quant_fault_t *f = &quantFaults[i];
    makeCall(&c);
    for (int side = 0; side < (f->tensor[0] == f->tensor[1] ? 1 : 2); side++) {
      shaped_t *s = (shaped_t *)(void *)((char *)&c + f->tensor[side]);
      spoil(&s->t, &f->fault, s->sizes);
    }
    expect(r, f->what, run(r, h, &c), ncclInvalidArgument, f->word);
  }
  makeCall(&c);
  c.config.round_scales = 1;
  expect(r, "round_scales", run(r, h, &c), ncclInvalidArgument, "round_scales");
  makeCall(&c);
  c.outputs.scales = NULL;
  expect(r, "no output scales", run(r, h, &c), ncclInvalidArgument, "outputs->scales is NULL");
  makeCall(&c);
  memset(memory[0], 7, B * 64);
  teamOk(r, run(r, h, &c));
  cudaStreamSynchronize(r->stream);
  teamCheck(r, memory[2][0] == 7 && memory[2][B * 64 - 1] == 7, "the right call brought no rows");
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(g));
}

TEST(callers_quantisation) {
  const char *error = teamThreads(1, quantisationFaults, NULL);
  CHECK(!*error, "%s", error);
}

/* LL's own quantisation. */
static void lowLatencyQuantisation(team_rank_t *r) {
  ncclEpGroupConfig_t config = configOf(LL_EM);
  ncclEpGroup_t g;
  ncclEpHandle_t h;
  shaped_t idx, counter;
  call_t c;
  teamOk(r, ncclEpCreateGroup(&g, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, g, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, K, NULL));
  teamOk(r, ncclEpUpdateHandle(h, routing(&idx), NULL, r->stream));
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  info.expert_counters = shape(&counter, memory[7], ncclInt32, 1, E, 0, 0);
  const struct {
    const char *what, *word;
    ncclDataType_t in, out, scales;
    size_t width, scaleWidth;
  } cases[] = {
      {"f32 rows", "inputs->tokens: datatype", ncclFloat32, ncclFloat8e4m3, ncclFloat32, H, 4},
      {"256 wide", "512", ncclBfloat16, ncclFloat8e4m3, ncclFloat32, H / 2, 2},
      {"too wide", "max_token_bytes", ncclBfloat16, ncclFloat8e4m3, ncclFloat32, 2 * H, 8},
      {"bf16 out", "outputs->tokens: datatype", ncclBfloat16, ncclBfloat16, ncclFloat32, H, 4},
      {"bf16 scales", "outputs->scales: datatype", ncclBfloat16, ncclFloat8e4m3, ncclBfloat16, H,
       4},
      {"5 scales", "outputs->scales: sizes[2]", ncclBfloat16, ncclFloat8e4m3, ncclFloat32, H, 5},
      {"right", "", ncclBfloat16, ncclFloat8e4m3, ncclFloat32, H, 4},
  };
  for (size_t i = 0; i < COUNT(cases); i++) {
    c.inputs = (ncclEpDispatchInputs_t)NCCL_EP_DISPATCH_INPUTS_INIT;
    c.outputs = (ncclEpDispatchOutputs_t)NCCL_EP_DISPATCH_OUTPUTS_INIT;
    c.config = (ncclEpDispatchConfig_t)NCCL_EP_DISPATCH_CONFIG_INIT;
    c.config.quant_recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4;
    size_t width = cases[i].width, scaleWidth = cases[i].scaleWidth;
    c.inputs.tokens = shape(&c.in, memory[0], cases[i].in, 2, B, width, 0);
    c.outputs.tokens = shape(&c.out, memory[1], cases[i].out, 3, E, N, width);
    c.outputs.scales = shape(&c.outScales, memory[3], cases[i].scales, 3, E, N, scaleWidth);
    ncclResult_t got = ncclEpDispatch(h, &c.inputs, &c.outputs, &info, &c.config, r->stream);
    expect(r, cases[i].what, got, *cases[i].word ? ncclInvalidArgument : ncclSuccess,
           cases[i].word);
  }
  c.outputs = (ncclEpDispatchOutputs_t)NCCL_EP_DISPATCH_OUTPUTS_INIT;
  c.config = (ncclEpDispatchConfig_t)NCCL_EP_DISPATCH_CONFIG_INIT;
  c.config.round_scales = 1; /* of no recipe: there would be nothing to round */
  c.outputs.tokens = shape(&c.out, memory[1], ncclBfloat16, 3, E, N, H);
  ncclResult_t got = ncclEpDispatch(h, &c.inputs, &c.outputs, &info, &c.config, r->stream);
  expect(r, "scales of no recipe", got, ncclInvalidArgument, "config.quant_recipe");
  cudaStreamSynchronize(r->stream);
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(g));
}

TEST(low_latency_quantisation) {
  const char *error = teamThreads(1, lowLatencyQuantisation, NULL);
  CHECK(!*error, "%s", error);
}

/* NVFP4: rows of bf16 in multiples of 16, a scale a slot. */
static void nvfp4Faults(team_rank_t *r) {
  ncclEpGroupConfig_t config = configOf(LL_RM);
  ncclEpGroup_t g;
  ncclEpHandle_t h;
  shaped_t idx, x, y, scales;
  teamOk(r, ncclEpCreateGroup(&g, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, g, NCCL_EP_LAYOUT_RANK_MAJOR, NULL, K, NULL));
  teamOk(r, ncclEpUpdateHandle(h, routing(&idx), NULL, r->stream));
  const struct {
    const char *what, *word;
    ncclDataType_t rows, scales;
    size_t width, slots, perSlot;
    int given;
  } cases[] = {
      {"f32 rows", "inputs->tokens: datatype", ncclFloat32, ncclFloat32, 32, N, 1, 1},
      {"f16 rows", "inputs->tokens: datatype", ncclFloat16, ncclFloat32, 32, N, 1, 1},
      {"24 wide", "16", ncclBfloat16, ncclFloat32, 24, N, 1, 1},
      {"no scales", "inputs->scales is NULL", ncclBfloat16, ncclFloat32, 32, N, 1, 0},
      {"bf16 scales", "inputs->scales: datatype", ncclBfloat16, ncclBfloat16, 32, N, 1, 1},
      {"short", "inputs->scales: sizes[1]", ncclBfloat16, ncclFloat32, 32, N - 1, 1, 1},
      {"two a slot", "inputs->scales: sizes[2]", ncclBfloat16, ncclFloat32, 32, N, 2, 1},
      {"right, but before a dispatch", "no ncclEpDispatch on this handle since", ncclBfloat16,
       ncclFloat32, 32, N, 1, 1},
  };
  memset(memory[0], 0, sizeof memory[0]);
  for (size_t i = 0; i < COUNT(cases); i++) {
    ncclEpCombineInputs_t in = NCCL_EP_COMBINE_INPUTS_INIT;
    ncclEpCombineOutputs_t out = NCCL_EP_COMBINE_OUTPUTS_INIT;
    ncclEpCombineConfig_t how = NCCL_EP_COMBINE_CONFIG_INIT;
    how.quant_recipe = NCCL_EP_COMB_QUANT_NVFP4;
    in.tokens = shape(&x, memory[0], cases[i].rows, 3, 1, N, cases[i].width);
    out.tokens = shape(&y, memory[1], cases[i].rows, 2, B, cases[i].width, 0);
    shape(&scales, memory[2], cases[i].scales, 3, 1, cases[i].slots, cases[i].perSlot);
    if (cases[i].given) in.scales = &scales.t;
    expect(r, cases[i].what, ncclEpCombine(h, &in, &out, &how, r->stream),
           i + 1 < COUNT(cases) ? ncclInvalidArgument : ncclInvalidUsage, cases[i].word);
  }
  cudaStreamSynchronize(r->stream);
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(g));
}

TEST(nvfp4_on_the_way_back) {
  const char *error = teamThreads(1, nvfp4Faults, NULL);
  CHECK(!*error, "%s", error);
}

/* HT gives its counters at Update; those in Dispatch's layout_info are not looked at. */
static void lateCounters(team_rank_t *r) {
  ncclEpGroupConfig_t config = configOf(HT_FL);
  ncclEpGroup_t g;
  ncclEpHandle_t h;
  shaped_t idx, counter;
  call_t c;
  teamOk(r, ncclEpCreateGroup(&g, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, g, NCCL_EP_LAYOUT_FLAT, NULL, K, NULL));
  teamOk(r, ncclEpUpdateHandle(h, routing(&idx), NULL, r->stream));
  memset(memory[7], 0x5A, 64);
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  info.expert_counters = info.expert_offsets = info.recv_total_counter = info.src_rank_counters =
      shape(&counter, memory[7], ncclInt32, 1, 1, 0, 0);
  makeCall(&c);
  teamOk(r, ncclEpDispatch(h, &c.inputs, &c.outputs, &info, &c.config, r->stream));
  cudaStreamSynchronize(r->stream);
  for (int i = 0; i < 64; i++) teamCheck(r, memory[7][i] == 0x5A, "byte %d was written", i);
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(g));
}

TEST(counters_at_dispatch) {
  const char *error = teamThreads(1, lateCounters, NULL);
  CHECK(!*error, "%s", error);
}

static void maskFaults(team_rank_t *r) {
  ncclEpGroupConfig_t config = configOf(LL_EM);
  config.enable_mask = 1;
  ncclEpGroup_t g;
  teamOk(r, ncclEpCreateGroup(&g, r->comm, &config));
  int mine[2] = {1, 1}, wrong[2] = {1, 1}, flag = 9, seen[2] = {9, 9};
  teamPin(r, seen, sizeof seen);
  const ncclResult_t bad = ncclInvalidArgument;
  ncclEpGroup_t none = NULL, garbage = (ncclEpGroup_t)(void *)mine;
  expect(r, "query: no mask", ncclEpMaskQuery(g, NULL, r->stream), bad, "device_mask is NULL");
  expect(r, "query: no group", ncclEpMaskQuery(none, seen, r->stream), bad, "NULL");
  expect(r, "query: garbage", ncclEpMaskQuery(garbage, seen, r->stream), bad, "not a live group");
  expect(r, "update: no mask", ncclEpMaskUpdate(g, NULL, r->stream), bad, "host_mask is NULL");
  expect(r, "update: no group", ncclEpMaskUpdate(none, mine, r->stream), bad, "NULL");
  expect(r, "update: garbage", ncclEpMaskUpdate(garbage, mine, r->stream), bad, "not a live group");
  wrong[1 - r->rank] = 5;
  expect(r, "a mask of 5", ncclEpMaskUpdate(g, wrong, r->stream), bad, "is 5");
  wrong[1 - r->rank] = -1;
  expect(r, "a mask of -1", ncclEpMaskUpdate(g, wrong, r->stream), bad, "is -1");
  wrong[1 - r->rank] = 1;
  wrong[r->rank] = 0;
  expect(r, "itself", ncclEpMaskUpdate(g, wrong, r->stream), bad, "cannot mask itself");
  expect(r, "clean: no group", ncclEpMaskClean(none, r->stream), bad, "NULL");
  expect(r, "clean: garbage", ncclEpMaskClean(garbage, r->stream), bad, "not a live group");
  expect(r, "error: no out", ncclEpGetAsyncError(g, NULL), bad, "NULL");
  expect(r, "error: no group", ncclEpGetAsyncError(none, &flag), bad, "NULL");
  expect(r, "error: garbage", ncclEpGetAsyncError(garbage, &flag), bad, "not a live group");
  expect(r, "clear: no group", ncclEpErrorClear(none), bad, "NULL");
  expect(r, "clear: garbage", ncclEpErrorClear(garbage), bad, "not a live group");
  teamCheck(r, flag == 9 && seen[0] == 9 && seen[1] == 9, "an out-parameter was touched");
  teamOk(r, ncclEpMaskQuery(g, seen, r->stream));
  cudaStreamSynchronize(r->stream);
  teamCheck(r, seen[0] == 1 && seen[1] == 1, "a refused update masked somebody");
  teamOk(r, ncclEpGetAsyncError(g, &flag));
  teamCheck(r, flag == 0, "async error %d after refusals", flag);
  teamOk(r, ncclEpMaskUpdate(g, mine, r->stream));
  teamOk(r, ncclEpMaskClean(g, r->stream));
  cudaStreamSynchronize(r->stream);
  teamOk(r, ncclEpGroupDestroy(g));
}

TEST(masks) {
  const char *error = teamThreads(2, maskFaults, NULL);
  CHECK(!*error, "%s", error);
}

TEST_MAIN()
