/* Every function against every bad argument: the result code, a sentence that names the field,
 * out-parameters untouched, and a group that works afterwards. One rank suffices: checks come before
 * any communication. Each line of a table spoils one thing of a call that is right otherwise. */
#include <stdint.h>
#include <string.h>

#include "test.h"
#include "team.h"

enum { E = 6, N = 8, B = 5, K = 3, H = 32 };

/* A call's tensors and structs, right as they are; `spoil` breaks one thing. */
typedef struct call {
  ncclEpDispatchInputs_t in;
  ncclEpDispatchOutputs_t out;
  ncclEpLayoutInfo_t info;
  ncclEpDispatchConfig_t config;
  ncclEpCombineInputs_t cin;
  ncclEpCombineOutputs_t cout;
  ncclEpCombineConfig_t cconfig;
  ncclEpTensor_t
      t[8]; /* in tokens, in weights, in scales, out tokens, weights, scales, idx, counters */
  size_t sizes[8][3];
  int passInfo, passConfig;
} call_t;
enum { IN, INW, INS, OUT, OUTW, OUTS, IDX, CNT };

static _Alignas(64) char memory[8][1 << 16];

static ncclEpTensor_t *set(call_t *c, int i, ncclDataType_t dtype, unsigned ndim, size_t a,
                           size_t b, size_t d) {
  c->sizes[i][0] = a;
  c->sizes[i][1] = b;
  c->sizes[i][2] = d;
  c->t[i] = (ncclEpTensor_t){NCCL_EP_TENSOR_INIT_INLINE, .ndim = ndim, .datatype = dtype,
                             .data = memory[i], .sizes = c->sizes[i]};
  return &c->t[i];
}

typedef enum kind { LL_EM, LL_RM, HT_FL, HT_EM } kind_t;

static void makeDispatch(call_t *c, kind_t kind) {
  memset(c, 0, sizeof *c);
  c->in = NCCL_EP_DISPATCH_INPUTS_INIT;
  c->out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  c->info = NCCL_EP_LAYOUT_INFO_INIT;
  c->config = NCCL_EP_DISPATCH_CONFIG_INIT;
  c->passInfo = c->passConfig = 1;
  c->in.tokens = set(c, IN, ncclBfloat16, 2, B, H, 0);
  if (kind == LL_EM) {
    c->out.tokens = set(c, OUT, ncclBfloat16, 3, E, N, H);
    c->info.expert_counters = set(c, CNT, ncclInt32, 1, E, 0, 0);
    return;
  }
  c->in.topk_weights = set(c, INW, ncclFloat32, 2, B, K, 0);
  if (kind == LL_RM) {
    c->out.tokens = set(c, OUT, ncclBfloat16, 3, 1, N, H);
    c->out.topk_weights = set(c, OUTW, ncclFloat32, 3, 1, N, K);
    c->out.topk_idx = set(c, IDX, ncclInt32, 3, 1, N, K);
  } else if (kind == HT_FL) {
    c->out.tokens = set(c, OUT, ncclBfloat16, 2, N * K, H, 0);
    c->out.topk_weights = set(c, OUTW, ncclFloat32, 2, N * K, K, 0);
    c->out.topk_idx = set(c, IDX, ncclInt64, 2, N * K, K, 0);
  } else {
    c->out.tokens = set(c, OUT, ncclBfloat16, 2, N * K, H, 0);
    c->out.topk_weights = set(c, OUTW, ncclFloat32, 1, N * K, 0, 0);
  }
}

static void makeCombine(call_t *c, kind_t kind) {
  memset(c, 0, sizeof *c);
  c->cin = NCCL_EP_COMBINE_INPUTS_INIT;
  c->cout = NCCL_EP_COMBINE_OUTPUTS_INIT;
  c->cconfig = NCCL_EP_COMBINE_CONFIG_INIT;
  c->passConfig = 1;
  c->cout.tokens = set(c, OUT, ncclBfloat16, 2, B, H, 0);
  if (kind == LL_EM) {
    c->cin.tokens = set(c, IN, ncclBfloat16, 3, E, N, H);
    c->cout.topk_weights = set(c, OUTW, ncclFloat32, 2, B, K, 0);
  } else if (kind == LL_RM) {
    c->cin.tokens = set(c, IN, ncclBfloat16, 3, 1, N, H);
  } else {
    c->cin.tokens = set(c, IN, ncclBfloat16, 2, N * K, H, 0);
  }
}

/* What to break: a tensor's field, or a struct's. */
typedef struct fault {
  const char *what; /* must occur in the sentence */
  int tensor;       /* index, or -1 */
  int how;          /* see spoil() */
  uint64_t value;
  int kinds;         /* bit set of kind_t */
  ncclResult_t code; /* 0: ncclInvalidArgument */
} fault_t;
enum {
  NDIM,
  DTYPE,
  SIZE0,
  SIZE1,
  SIZE2,
  DATA,
  MAGIC,
  STRUCT_SIZE,
  SIZES,
  OFFSET,
  FIELD_NULL,
  FIELD_SET,
  CONFIG
};
enum { ALL = 15, LL = 3, HT = 12 };

static void spoilTensor(call_t *c, const fault_t *f) {
  ncclEpTensor_t *t = &c->t[f->tensor];
  switch (f->how) {
  case NDIM:
    t->ndim = (unsigned)f->value;
    break;
  case DTYPE:
    t->datatype = (ncclDataType_t)f->value;
    break;
  case SIZE0:
    t->sizes[0] = f->value;
    break;
  case SIZE1:
    t->sizes[1] = f->value;
    break;
  case SIZE2:
    t->sizes[2] = f->value;
    break;
  case DATA:
    t->data = (void *)(uintptr_t)f->value;
    break;
  case MAGIC:
    t->magic = (unsigned)f->value;
    break;
  case STRUCT_SIZE:
    t->size = (unsigned)f->value;
    break;
  case SIZES:
    t->sizes = NULL;
    break;
  case OFFSET:
    t->data = (char *)t->data + f->value;
    break;
  }
}

static const fault_t dispatchFaults[] = {
    {"inputs->tokens", IN, NDIM, 3, ALL, 0},
    {"inputs->tokens", IN, DTYPE, ncclUint8, ALL, 0},
    {"inputs->tokens", IN, DTYPE, 99, ALL, 0},
    {"inputs->tokens", IN, SIZE0, B + 1, ALL, 0},
    {"inputs->tokens", IN, SIZE0, B - 1, ALL, 0},
    {"inputs->tokens", IN, SIZE1, 0, ALL, 0},
    {"max_token_bytes", IN, SIZE1, 33, ALL, 0},
    {"inputs->tokens", IN, SIZE1, SIZE_MAX / 2, ALL, 0},
    {"inputs->tokens", IN, SIZE1, SIZE_MAX / 2 + 1 + H, ALL, 0},
    {"inputs->tokens", IN, DATA, 0, ALL, 0},
    {"inputs->tokens", IN, MAGIC, 0xC00FFFEE, ALL, 0},
    {"inputs->tokens", IN, STRUCT_SIZE, 47, ALL, 0},
    {"inputs->tokens", IN, SIZES, 0, ALL, 0},
    {"inputs->tokens", IN, OFFSET, 1, ALL, 0},
    {"outputs->tokens", OUT, NDIM, 1, ALL, 0},
    {"outputs->tokens", OUT, DTYPE, ncclFloat16, ALL, 0},
    {"outputs->tokens", OUT, SIZE0, 0, ALL, 0},
    {"outputs->tokens", OUT, SIZE0, E - 1, 1 << LL_EM, 0},
    {"outputs->tokens", OUT, SIZE0, N *K - 1, HT, 0},
    {"outputs->tokens", OUT, SIZE1, N + 1, LL, 0},
    {"outputs->tokens", OUT, SIZE1, H / 2, HT, 0},
    {"outputs->tokens", OUT, SIZE2, H / 2, LL, 0},
    {"outputs->tokens", OUT, DATA, 0, ALL, 0},
    {"outputs->tokens", OUT, MAGIC, 1, ALL, 0},
    {"inputs->topk_weights", INW, DTYPE, ncclBfloat16, ALL & ~(1 << LL_EM), 0},
    {"inputs->topk_weights", INW, SIZE0, B - 1, ALL & ~(1 << LL_EM), 0},
    {"inputs->topk_weights", INW, SIZE1, K + 1, ALL & ~(1 << LL_EM), 0},
    {"inputs->topk_weights", INW, OFFSET, 2, ALL & ~(1 << LL_EM), 0},
    {"outputs->topk_weights", OUTW, NDIM, 4, ALL & ~(1 << LL_EM), 0},
    {"outputs->topk_weights", OUTW, SIZE1, K + 9, (1 << LL_RM) | (1 << HT_FL), 0},
    {"outputs->topk_weights", OUTW, SIZE0, 0, HT, 0},
    {"outputs->topk_idx", IDX, DTYPE, ncclFloat32, (1 << LL_RM) | (1 << HT_FL), 0},
    {"outputs->topk_idx", IDX, DTYPE, ncclInt32, 1 << HT_FL, 0},
    {"outputs->topk_idx", IDX, DTYPE, ncclInt64, 1 << LL_RM, 0},
    {"outputs->topk_idx", IDX, OFFSET, 4, 1 << HT_FL, 0},
    {"outputs->topk_idx", IDX, SIZE0, N *K - 1, 1 << HT_FL, 0},
    {"expert_counters", CNT, DTYPE, ncclInt64, 1 << LL_EM, 0},
    {"expert_counters", CNT, SIZE0, E - 1, 1 << LL_EM, 0},
    {"expert_counters", CNT, NDIM, 2, 1 << LL_EM, 0},
    {"expert_counters", CNT, DATA, 0, 1 << LL_EM, 0},
};

static const fault_t combineFaults[] = {
    {"inputs->tokens", IN, NDIM, 1, ALL, 0},
    {"inputs->tokens", IN, DTYPE, ncclFloat8e4m3, ALL, 0},
    {"inputs->tokens", IN, SIZE0, 0, ALL, 0},
    {"inputs->tokens", IN, SIZE0, N *K - 1, HT, 0},
    {"inputs->tokens", IN, SIZE1, N - 1, LL, 0},
    {"inputs->tokens", IN, SIZE2, 0, LL, 0},
    {"inputs->tokens", IN, DATA, 0, ALL, 0},
    {"inputs->tokens", IN, MAGIC, 0, ALL, 0},
    {"inputs->tokens", IN, STRUCT_SIZE, 8, ALL, 0},
    {"inputs->tokens", IN, OFFSET, 1, ALL, 0},
    {"outputs->tokens", OUT, NDIM, 3, ALL, 0},
    {"outputs->tokens", OUT, DTYPE, ncclFloat32, ALL, 0},
    {"outputs->tokens", OUT, SIZE0, B + 1, ALL, 0},
    {"outputs->tokens", OUT, SIZE1, H + 1, ALL, 0},
    {"outputs->tokens", OUT, DATA, 0, ALL, 0},
    {"outputs->topk_weights", OUTW, SIZE1, K - 1, 1 << LL_EM, 0},
    {"outputs->topk_weights", OUTW, SIZE0, B + 2, 1 << LL_EM, 0},
    {"outputs->topk_weights", OUTW, DTYPE, ncclFloat16, 1 << LL_EM, 0},
};

typedef struct context {
  ncclEpGroup_t group[2]; /* LL, HT */
  ncclEpHandle_t handle[4];
} context_t;

static ncclResult_t runDispatch(ncclEpHandle_t h, call_t *c, cudaStream_t stream) {
  return ncclEpDispatch(h, &c->in, &c->out, c->passInfo ? &c->info : NULL,
                        c->passConfig ? &c->config : NULL, stream);
}

static ncclResult_t runCombine(ncclEpHandle_t h, call_t *c, cudaStream_t stream) {
  return ncclEpCombine(h, &c->cin, &c->cout, c->passConfig ? &c->cconfig : NULL, stream);
}

#define refused(r, call, want, what)                                                               \
  do {                                                                                             \
    ncclResult_t got = (call);                                                                     \
    teamCheck(r, got == (want), "line %d: %s gave %d, want %d: %s", __LINE__, #call, (int)got,     \
              (int)(want), ncclEpGetLastError());                                                  \
    teamCheck(r, strstr(ncclEpGetLastError(), (what)), "line %d: '%s' is not in: %s", __LINE__,    \
              (what), ncclEpGetLastError());                                                       \
  } while (0)

static void makeGroups(team_rank_t *r, context_t *x) {
  teamPin(NULL, memory, sizeof memory);
  ncclEpGroupConfig_t g = NCCL_EP_GROUP_CONFIG_INIT;
  g.num_experts = E;
  g.max_dispatch_tokens_per_rank = N;
  g.max_token_bytes = H * 2;
  teamOk(r, ncclEpCreateGroup(&x->group[0], r->comm, &g));
  g.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
  g.max_recv_tokens_per_rank = N * K;
  g.num_topk = K;
  teamOk(r, ncclEpCreateGroup(&x->group[1], r->comm, &g));
  static int64_t ids[B * K];
  teamPin(NULL, ids, sizeof ids);
  for (int i = 0; i < B * K; i++) ids[i] = i % K + i / K % 3;
  size_t sizes[2] = {B, K};
  ncclEpTensor_t idx = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, .datatype = ncclInt64, .data = ids,
                        .sizes = sizes};
  ncclEpLayout_t layouts[4] = {NCCL_EP_LAYOUT_EXPERT_MAJOR, NCCL_EP_LAYOUT_RANK_MAJOR,
                               NCCL_EP_LAYOUT_FLAT, NCCL_EP_LAYOUT_EXPERT_MAJOR};
  for (int i = 0; i < 4; i++) {
    teamOk(r, ncclEpInitHandle(&x->handle[i], x->group[i / 2], layouts[i], NULL, K, NULL));
    call_t c;
    makeDispatch(&c, (kind_t)i);
    refused(r, runDispatch(x->handle[i], &c, r->stream), ncclInvalidUsage, "ncclEpUpdateHandle");
    teamOk(r, ncclEpUpdateHandle(x->handle[i], &idx, NULL, r->stream));
  }
}

static void dropGroups(team_rank_t *r, context_t *x) {
  for (int i = 0; i < 4; i++) teamOk(r, ncclEpHandleDestroy(x->handle[i]));
  for (int i = 0; i < 2; i++) teamOk(r, ncclEpGroupDestroy(x->group[i]));
}

static void tensorFaults(team_rank_t *r) {
  context_t x;
  makeGroups(r, &x);
  for (int kind = 0; kind < 4; kind++) {
    call_t c;
    for (size_t i = 0; i < sizeof dispatchFaults / sizeof *dispatchFaults; i++) {
      const fault_t *f = &dispatchFaults[i];
      if (!(f->kinds >> kind & 1)) continue;
      makeDispatch(&c, (kind_t)kind);
      spoilTensor(&c, f);
      ncclResult_t got = runDispatch(x.handle[kind], &c, r->stream);
      teamCheck(r, got == ncclInvalidArgument && strstr(ncclEpGetLastError(), f->what),
                "dispatch kind %d, fault %zu (%s): %d: %s", kind, i, f->what, (int)got,
                ncclEpGetLastError());
    }
    makeDispatch(&c, (kind_t)kind);
    teamOk(r, runDispatch(x.handle[kind], &c, r->stream));
    for (size_t i = 0; i < sizeof combineFaults / sizeof *combineFaults; i++) {
      const fault_t *f = &combineFaults[i];
      if (!(f->kinds >> kind & 1)) continue;
      makeCombine(&c, (kind_t)kind);
      spoilTensor(&c, f);
      ncclResult_t got = runCombine(x.handle[kind], &c, r->stream);
      teamCheck(r, got == ncclInvalidArgument && strstr(ncclEpGetLastError(), f->what),
                "combine kind %d, fault %zu (%s): %d: %s", kind, i, f->what, (int)got,
                ncclEpGetLastError());
    }
    makeCombine(&c, (kind_t)kind);
    teamOk(r, runCombine(x.handle[kind], &c, r->stream));
  }
  cudaStreamSynchronize(r->stream);
  dropGroups(r, &x);
}

TEST(tensors) {
  const char *error = teamThreads(1, tensorFaults, NULL);
  CHECK(!*error, "%s", error);
}

/* Structs, recipes and directions. */
static void structFaults(team_rank_t *r) {
  context_t x;
  makeGroups(r, &x);
  call_t c;
  for (int kind = 0; kind < 4; kind++) {
    ncclEpHandle_t h = x.handle[kind];
    makeDispatch(&c, (kind_t)kind);
    refused(r, ncclEpDispatch(NULL, &c.in, &c.out, NULL, NULL, r->stream), ncclInvalidArgument,
            "NULL");
    refused(r, ncclEpDispatch((ncclEpHandle_t)(void *)&c, &c.in, &c.out, NULL, NULL, r->stream),
            ncclInvalidArgument, "not a live handle");
    refused(r, ncclEpDispatch(h, NULL, &c.out, &c.info, NULL, r->stream), ncclInvalidArgument,
            "ncclEpDispatchInputs_t is NULL");
    refused(r, ncclEpDispatch(h, &c.in, NULL, &c.info, NULL, r->stream), ncclInvalidArgument,
            "ncclEpDispatchOutputs_t is NULL");
#define BREAK(field, value, code, what)                                                            \
  do {                                                                                             \
    makeDispatch(&c, (kind_t)kind);                                                                \
    c.field = (value);                                                                             \
    refused(r, runDispatch(h, &c, r->stream), code, what);                                         \
  } while (0)
    BREAK(in.size, 31, ncclInvalidArgument, "ncclEpDispatchInputs_t.size");
    BREAK(in.magic, 7, ncclInvalidArgument, "ncclEpDispatchInputs_t.magic");
    BREAK(out.size, 39, ncclInvalidArgument, "ncclEpDispatchOutputs_t.size");
    BREAK(info.size, 39, ncclInvalidArgument, "ncclEpLayoutInfo_t.size");
    BREAK(info.magic, NCCL_EP_TENSOR_MAGIC, ncclInvalidArgument, "ncclEpLayoutInfo_t.magic");
    BREAK(config.size, 19, ncclInvalidArgument, "ncclEpDispatchConfig_t.size");
    BREAK(config.pass_direction, (ncclEpPassDir_t)2, ncclInvalidArgument, "pass_direction");
    BREAK(config.quant_recipe, (ncclEpDispQuant_t)3, ncclInvalidArgument, "quant_recipe");
    BREAK(info.recv_topk_idx_kind, (ncclEpExpertIdKind_t)3, ncclInvalidArgument,
          "recv_topk_idx_kind");
    BREAK(in.tokens, NULL, ncclInvalidArgument, "inputs->tokens is NULL");
    BREAK(out.tokens, NULL, ncclInvalidArgument, "outputs->tokens is NULL");
    BREAK(in.scales, c.in.tokens, ncclInvalidArgument, "inputs->scales");
    BREAK(out.scales, c.in.tokens, ncclInvalidArgument, "outputs->scales");
    BREAK(config.quant_recipe, NCCL_EP_DISP_QUANT_FWD, ncclInvalidArgument, "inputs->scales");
    BREAK(config.quant_recipe, NCCL_EP_DISP_QUANT_DS_FP8E3M4, ncclInvalidArgument,
          kind < 2 ? "512" : "low latency");
    if (kind < 2) BREAK(config.pass_direction, NCCL_EP_BWD_PASS, ncclInvalidUsage, "backward");
    if (kind >= 2)
      BREAK(config.pass_direction, NCCL_EP_BWD_PASS, ncclInvalidArgument, "topk_weights");
    if (kind == LL_EM) {
      BREAK(passInfo, 0, ncclInvalidArgument, "expert_counters");
      BREAK(info.expert_counters, NULL, ncclInvalidArgument, "expert_counters");
      BREAK(in.topk_weights, c.in.tokens, ncclInvalidArgument, "inputs->topk_weights");
      BREAK(out.topk_idx, c.in.tokens, ncclInvalidArgument, "outputs->topk_idx");
    } else {
      BREAK(in.topk_weights, NULL, ncclInvalidArgument, "inputs->topk_weights is NULL");
      BREAK(out.topk_weights, NULL, ncclInvalidArgument, "outputs->topk_weights is NULL");
    }
    if (kind == HT_EM) BREAK(out.topk_idx, c.in.tokens, ncclInvalidArgument, "outputs->topk_idx");
#undef BREAK
    makeCombine(&c, (kind_t)kind);
    refused(r, ncclEpCombine(h, NULL, &c.cout, NULL, r->stream), ncclInvalidArgument, "is NULL");
    refused(r, ncclEpCombine(h, &c.cin, NULL, NULL, r->stream), ncclInvalidArgument, "is NULL");
#define BREAK(field, value, code, what)                                                            \
  do {                                                                                             \
    makeCombine(&c, (kind_t)kind);                                                                 \
    c.field = (value);                                                                             \
    refused(r, runCombine(h, &c, r->stream), code, what);                                          \
  } while (0)
    BREAK(cin.size, 23, ncclInvalidArgument, "ncclEpCombineInputs_t.size");
    BREAK(cout.magic, 0, ncclInvalidArgument, "ncclEpCombineOutputs_t.magic");
    BREAK(cconfig.size, 15, ncclInvalidArgument, "ncclEpCombineConfig_t.size");
    BREAK(cconfig.quant_recipe, (ncclEpCombQuant_t)2, ncclInvalidArgument, "quant_recipe");
    BREAK(cin.scales, c.cin.tokens, ncclInvalidArgument, "inputs->scales");
    BREAK(cin.topk_weights, c.cin.tokens, ncclInvalidArgument, "inputs->topk_weights");
    BREAK(cconfig.quant_recipe, NCCL_EP_COMB_QUANT_NVFP4,
          kind < 2 ? ncclInvalidArgument : ncclInvalidUsage, kind < 2 ? "inputs->scales" : "NVFP4");
    if (kind < 2) BREAK(cconfig.pass_direction, NCCL_EP_BWD_PASS, ncclInvalidUsage, "backward");
    if (kind >= 2)
      BREAK(cconfig.pass_direction, NCCL_EP_BWD_PASS, ncclInvalidArgument, "topk_weights");
#undef BREAK
    ncclEpCompleteConfig_t complete = NCCL_EP_COMPLETE_CONFIG_INIT;
    complete.size = 4;
    refused(r, ncclEpComplete(h, &complete, r->stream), ncclInvalidArgument, "size");
    refused(r, ncclEpComplete(NULL, NULL, r->stream), ncclInvalidArgument, "NULL");
    teamOk(r, ncclEpComplete(h, NULL, r->stream));
  }
  dropGroups(r, &x);
}

TEST(structs) {
  const char *error = teamThreads(1, structFaults, NULL);
  CHECK(!*error, "%s", error);
}

static cudaError_t someAlloc(void **p, size_t n, void *context) {
  (void)context;
  return cudaMalloc(p, n);
}

static void objectFaults(team_rank_t *r) {
  ncclEpGroupConfig_t g;
  ncclEpGroup_t group = (ncclEpGroup_t)(void *)&g, untouched = group;
  refused(r, ncclEpGetVersion(NULL), ncclInvalidArgument, "version");
#define BREAK(field, value, code, what)                                                            \
  do {                                                                                             \
    g = NCCL_EP_GROUP_CONFIG_INIT;                                                                 \
    g.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;                                                    \
    g.num_experts = E;                                                                             \
    g.max_dispatch_tokens_per_rank = N;                                                            \
    g.max_token_bytes = 64;                                                                        \
    g.field = (value);                                                                             \
    refused(r, ncclEpCreateGroup(&group, r->comm, &g), code, what);                                \
    teamCheck(r, group == untouched, "the group was touched: %s", what);                           \
  } while (0)
  BREAK(num_experts, 0, ncclInvalidArgument, "num_experts is 0");
  BREAK(max_dispatch_tokens_per_rank, 0, ncclInvalidArgument, "max_dispatch_tokens_per_rank");
  BREAK(max_token_bytes, 0, ncclInvalidArgument, "max_token_bytes");
  BREAK(max_token_bytes, 24, ncclInvalidArgument, "16");
  BREAK(max_recv_tokens_per_rank, N - 1, ncclInvalidArgument, "max_recv_tokens_per_rank");
  BREAK(algorithm, (ncclEpAlgorithm_t)2, ncclInvalidArgument, "algorithm");
  BREAK(zero_copy, (ncclEpZeroCopyMode_t)3, ncclInvalidArgument, "zero_copy");
  BREAK(overflow_policy, (ncclEpOverflowPolicy_t)3, ncclInvalidArgument, "overflow_policy");
  BREAK(overflow_policy, NCCL_EP_OVERFLOW_DROP, ncclInvalidArgument, "eager");
  BREAK(alloc.alloc_fn, someAlloc, ncclInvalidUsage, "alloc");
  BREAK(size, 95, ncclInvalidArgument, "ncclEpGroupConfig_t.size");
  BREAK(magic, 0, ncclInvalidArgument, "ncclEpGroupConfig_t.magic");
#undef BREAK
  refused(r, ncclEpCreateGroup(NULL, r->comm, &g), ncclInvalidArgument, "group");
  refused(r, ncclEpCreateGroup(&group, NULL, &g), ncclInvalidArgument, "comm");
  refused(r, ncclEpCreateGroup(&group, r->comm, NULL), ncclInvalidArgument, "NULL");
  context_t x;
  makeGroups(r, &x);
  ncclEpHandle_t h = (ncclEpHandle_t)(void *)&x, same = h;
  ncclEpHandleConfig_t hc = NCCL_EP_HANDLE_CONFIG_INIT;
  size_t bytes = 77;
  const ncclEpLayout_t EM = NCCL_EP_LAYOUT_EXPERT_MAJOR;
  refused(r, ncclEpInitHandle(NULL, x.group[0], EM, NULL, K, NULL), ncclInvalidArgument, "handle");
  refused(r, ncclEpInitHandle(&h, NULL, EM, NULL, K, NULL), ncclInvalidArgument, "group");
  refused(r, ncclEpInitHandle(&h, x.group[0], NCCL_EP_LAYOUT_FLAT, NULL, K, NULL),
          ncclInvalidArgument, "layout");
  refused(r, ncclEpInitHandle(&h, x.group[1], NCCL_EP_LAYOUT_RANK_MAJOR, NULL, K, NULL),
          ncclInvalidArgument, "layout");
  refused(r, ncclEpInitHandle(&h, x.group[0], EM, NULL, 0, NULL), ncclInvalidArgument, "num_topk");
  refused(r, ncclEpInitHandle(&h, x.group[0], EM, NULL, -1, NULL), ncclInvalidArgument, "num_topk");
  refused(r, ncclEpInitHandle(&h, x.group[1], EM, NULL, K + 1, NULL), ncclInvalidUsage, "num_topk");
  hc.dispatch_output_per_expert_alignment = 24;
  refused(r, ncclEpInitHandle(&h, x.group[1], EM, &hc, K, NULL), ncclInvalidArgument, "alignment");
  hc.size = 8;
  refused(r, ncclEpInitHandle(&h, x.group[1], EM, &hc, K, NULL), ncclInvalidArgument, "size");
  refused(r, ncclEpHandleMemSize(x.group[1], EM, NULL, NULL, K), ncclInvalidArgument, "size_out");
  refused(r, ncclEpHandleMemSize(x.group[1], EM, NULL, &bytes, 0), ncclInvalidArgument, "num_topk");
  teamCheck(r, bytes == 77 && h == same, "an out-parameter was touched");
  teamOk(r, ncclEpHandleMemSize(x.group[1], EM, NULL, &bytes, K));
  size_t less = bytes - 1;
  ncclEpTensor_t mem = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 1, .datatype = ncclUint8,
                        .data = memory[0], .sizes = &less};
  refused(r, ncclEpInitHandle(&h, x.group[1], EM, NULL, K, &mem), ncclInvalidArgument,
          "handle_mem");
  less = bytes;
  mem.data = memory[0] + 8;
  refused(r, ncclEpInitHandle(&h, x.group[1], EM, NULL, K, &mem), ncclInvalidArgument,
          "handle_mem");
  int mask[1] = {1}, flag = 5;
  refused(r, ncclEpMaskQuery(x.group[0], mask, r->stream), ncclInvalidUsage, "enable_mask");
  refused(r, ncclEpMaskUpdate(x.group[1], mask, r->stream), ncclInvalidUsage, "enable_mask");
  refused(r, ncclEpMaskClean(x.group[0], r->stream), ncclInvalidUsage, "enable_mask");
  refused(r, ncclEpGetAsyncError(x.group[0], &flag), ncclInvalidUsage, "enable_mask");
  refused(r, ncclEpErrorClear(x.group[0]), ncclInvalidUsage, "enable_mask");
  refused(r, ncclEpGetAsyncError(x.group[1], NULL), ncclInvalidArgument, "error");
  teamCheck(r, flag == 5, "an out-parameter was touched");
  teamOk(r, ncclEpGetAsyncError(x.group[1], &flag));
  teamCheck(r, flag == 0, "async error");
  ncclEpTensor_t *made = &mem, stack = mem;
  size_t sizes[2] = {2, 3};
  refused(r, ncclEpTensorAlloc(NULL, 2, ncclFloat32, sizes, NULL), ncclInvalidArgument, "tensor");
  refused(r, ncclEpTensorAlloc(&made, 0, ncclFloat32, sizes, NULL), ncclInvalidArgument, "ndim");
  refused(r, ncclEpTensorAlloc(&made, 2, ncclFloat32, NULL, NULL), ncclInvalidArgument, "sizes");
  teamCheck(r, made == &mem, "an out-parameter was touched");
  refused(r, ncclEpTensorDestroy(&stack), ncclInvalidArgument, "ncclEpTensorAlloc");
  teamOk(r, ncclEpTensorAlloc(&made, 2, ncclFloat32, sizes, NULL));
  sizes[0] = 99;
  teamCheck(r, made->sizes[0] == 2 && !made->data && !made->win_hdl && made->ndim == 2, "copied");
  teamOk(r, ncclEpTensorDestroy(made));
  refused(r, ncclEpTensorDestroy(made), ncclInvalidArgument, "destroyed before");
  teamOk(r, ncclEpTensorDestroy(NULL));
  teamOk(r, ncclEpHandleDestroy(NULL));
  teamOk(r, ncclEpGroupDestroy(NULL));
  ncclEpHandle_t gone = x.handle[0];
  call_t c;
  makeDispatch(&c, LL_EM);
  dropGroups(r, &x);
  refused(r, runDispatch(gone, &c, r->stream), ncclInvalidArgument, "destroyed");
  refused(r, ncclEpHandleMemSize(x.group[1], EM, NULL, &bytes, K), ncclInvalidArgument,
          "destroyed");
}

TEST(objects) {
  const char *error = teamThreads(1, objectFaults, NULL);
  CHECK(!*error, "%s", error);
}

/* Ids that only the device sees: reported on this rank, and the group goes on. */
static void badIds(team_rank_t *r) {
  context_t x;
  makeGroups(r, &x);
  static int32_t ids[B * K];
  teamPin(NULL, ids, sizeof ids);
  for (int i = 0; i < B * K; i++) ids[i] = i % K;
  ids[4] = E; /* token 1, k 1: out of range */
  size_t sizes[2] = {B, K};
  ncclEpTensor_t idx = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, .datatype = ncclInt32, .data = ids,
                        .sizes = sizes};
  int flag = 0;
  teamOk(r, ncclEpUpdateHandle(x.handle[2], &idx, NULL, r->stream));
  cudaStreamSynchronize(r->stream);
  teamOk(r, ncclEpGetAsyncError(x.group[1], &flag));
  teamCheck(r, flag == 1, "no async error");
  refused(r, ncclEpUpdateHandle(x.handle[2], &idx, NULL, r->stream), ncclInvalidArgument,
          "token 1, k = 1: expert 6");
  teamOk(r, ncclEpErrorClear(x.group[1]));
  ids[4] = 1;
  for (int first = 3; first < 5; first++) { /* named twice: k = 0 or 1 again at k = 2 */
    ids[5] = ids[first];
    teamOk(r, ncclEpUpdateHandle(x.handle[2], &idx, NULL, r->stream));
    cudaStreamSynchronize(r->stream);
    refused(r, ncclEpUpdateHandle(x.handle[2], &idx, NULL, r->stream), ncclInvalidArgument,
            "twice");
    teamOk(r, ncclEpErrorClear(x.group[1]));
  }
  ids[5] = 2;
  ids[4] = -1;
  call_t c;
  makeDispatch(&c, HT_FL);
  teamOk(r, ncclEpUpdateHandle(x.handle[2], &idx, NULL, r->stream));
  teamOk(r, runDispatch(x.handle[2], &c, r->stream));
  cudaStreamSynchronize(r->stream);
  teamOk(r, ncclEpGetAsyncError(x.group[1], &flag));
  teamCheck(r, flag == 0, "async error after a clean update");
  dropGroups(r, &x);
}

TEST(ids_on_the_device) {
  const char *error = teamThreads(1, badIds, NULL);
  CHECK(!*error, "%s", error);
}

TEST_MAIN()
