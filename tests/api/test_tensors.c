/* Where tensors lie: every tensor of every call in memory of every wrong kind is refused by the call, with a
 * sentence that names call, tensor, address, allocation and rank, and nothing has been written; in memory of
 * every right kind the call works. Also run over the GPU library (tests/emulator), whose groups check tensors
 * with NCCL_EP_CHECK_TENSORS. */
#include <stdint.h>

#include "team.h"
#include "test.h"

enum { E = 4, N = 8, B = 5, K = 2, H = 64, SLOTS = 16, SCALES = 16, ROOM = 1 << 16 };
typedef enum mode { LL_EM, LL_RM, HT_FL, HT_EM } mode_t_;
typedef enum what { UPDATE, DISPATCH, COMBINE } what_t;

typedef struct item {
  const char *name;
  ncclEpTensor_t t;
  size_t sizes[3], bytes;
  int written;
} item_t;

typedef struct call {
  what_t what;
  const char *function;
  item_t items[10];
  int count;
  ncclEpTensor_t *idx;
  ncclEpLayoutInfo_t info;
  ncclEpDispatchInputs_t in;
  ncclEpDispatchOutputs_t out;
  ncclEpDispatchConfig_t config;
  ncclEpCombineInputs_t cin;
  ncclEpCombineOutputs_t cout;
  ncclEpCombineConfig_t cconfig;
} call_t;

static ncclEpTensor_t *add(call_t *c, const char *name, int written, ncclDataType_t dtype,
                           unsigned ndim, size_t a, size_t b, size_t d) {
  static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  item_t *i = &c->items[c->count++];
  *i = (item_t){.name = name, .sizes = {a, b, d}, .bytes = bytes[dtype], .written = written};
  for (unsigned n = 0; n < ndim; n++) i->bytes *= i->sizes[n];
  i->t = (ncclEpTensor_t){NCCL_EP_TENSOR_INIT_INLINE, .ndim = ndim, .datatype = dtype,
                          .sizes = i->sizes};
  return &i->t;
}

/* A tensor of slots with `last` elements each. */
static ncclEpTensor_t *slots(call_t *c, mode_t_ m, const char *name, int written,
                             ncclDataType_t dtype, size_t last) {
  if (m >= HT_FL) return add(c, name, written, dtype, 2, SLOTS, last, 0);
  return add(c, name, written, dtype, 3, m == LL_EM ? E : 1, N, last);
}

static ncclEpTensor_t *slotWeights(call_t *c, mode_t_ m, const char *name, int written) {
  if (m == HT_EM) return add(c, name, written, ncclFloat32, 1, SLOTS, 0, 0);
  return slots(c, m, name, written, ncclFloat32, K);
}

static void makeUpdate(call_t *c, mode_t_ m) {
  c->function = "ncclEpUpdateHandle";
  c->idx = add(c, "topk_idx", 0, ncclInt32, 2, B, K, 0);
  if (m < HT_FL) return;
  c->info.expert_counters = add(c, "layout_info->expert_counters", 1, ncclInt64, 1, E, 0, 0);
  c->info.recv_total_counter = add(c, "layout_info->recv_total_counter", 1, ncclInt32, 1, 1, 0, 0);
  if (m == HT_EM)
    c->info.expert_offsets = add(c, "layout_info->expert_offsets", 1, ncclInt32, 1, E, 0, 0);
}

static void makeDispatch(call_t *c, mode_t_ m) {
  c->function = "ncclEpDispatch";
  c->config.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
  c->in.tokens = add(c, "inputs->tokens", 0, ncclBfloat16, 2, B, H, 0);
  c->in.scales = add(c, "inputs->scales", 0, ncclUint8, 2, B, SCALES, 0);
  c->out.tokens = slots(c, m, "outputs->tokens", 1, ncclBfloat16, H);
  c->out.scales = slots(c, m, "outputs->scales", 1, ncclUint8, SCALES);
  if (m == LL_EM) {
    c->info.expert_counters = add(c, "layout_info->expert_counters", 1, ncclInt32, 1, E, 0, 0);
    return;
  }
  if (m == LL_RM)
    c->info.src_rank_counters = add(c, "layout_info->src_rank_counters", 1, ncclInt32, 1, 1, 0, 0);
  c->in.topk_weights = add(c, "inputs->topk_weights", 0, ncclFloat32, 2, B, K, 0);
  c->out.topk_weights = slotWeights(c, m, "outputs->topk_weights", 1);
  if (m == LL_RM) c->out.topk_idx = slots(c, m, "outputs->topk_idx", 1, ncclInt32, K);
  if (m == HT_FL) c->out.topk_idx = slots(c, m, "outputs->topk_idx", 1, ncclInt64, K);
}

static void makeCombine(call_t *c, mode_t_ m) {
  c->function = "ncclEpCombine";
  c->cin.tokens = slots(c, m, "inputs->tokens", 0, ncclBfloat16, H);
  c->cout.tokens = add(c, "outputs->tokens", 1, ncclBfloat16, 2, B, H, 0);
  if (m == LL_EM) {
    c->cout.topk_weights = add(c, "outputs->topk_weights", 0, ncclFloat32, 2, B, K, 0);
  } else if (m >= HT_FL) {
    c->cconfig.pass_direction = NCCL_EP_BWD_PASS;
    c->cin.topk_weights = slotWeights(c, m, "inputs->topk_weights", 0);
    c->cout.topk_weights = add(c, "outputs->topk_weights", 1, ncclFloat32, 2, B, K, 0);
  }
#ifndef EMULATED
  if (m >= HT_FL) return;
  c->cconfig.quant_recipe = NCCL_EP_COMB_QUANT_NVFP4;
  c->cin.scales = slots(c, m, "inputs->scales", 0, ncclFloat32, 1);
#endif
}

/* All tensors of the call in `memory`, one right after the other but for alignment. */
static void makeCall(call_t *c, what_t what, mode_t_ m, char *memory) {
  memset(c, 0, sizeof *c);
  c->what = what;
  c->info = NCCL_EP_LAYOUT_INFO_INIT;
  c->in = NCCL_EP_DISPATCH_INPUTS_INIT;
  c->out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  c->config = NCCL_EP_DISPATCH_CONFIG_INIT;
  c->cin = NCCL_EP_COMBINE_INPUTS_INIT;
  c->cout = NCCL_EP_COMBINE_OUTPUTS_INIT;
  c->cconfig = NCCL_EP_COMBINE_CONFIG_INIT;
  (what == UPDATE ? makeUpdate : what == DISPATCH ? makeDispatch : makeCombine)(c, m);
  for (int i = 0; i < c->count; i++) {
    c->items[i].t.data = memory;
    memory += (c->items[i].bytes + 15) & ~(size_t)15;
  }
}

typedef struct world {
  team_rank_t *r;
  mode_t_ mode;
  ncclEpGroup_t group;
  ncclEpHandle_t handle;
  char *memory;              /* ROOM bytes on the device */
  char *plain, *freed, *far; /* not pinned; freed; on device 5 */
} world_t;

static ncclResult_t run(const world_t *w, call_t *c) {
  if (c->what == UPDATE)
    return ncclEpUpdateHandle(w->handle, c->idx, w->mode >= HT_FL ? &c->info : NULL, w->r->stream);
  if (c->what == DISPATCH)
    return ncclEpDispatch(w->handle, &c->in, &c->out, &c->info, &c->config, w->r->stream);
  return ncclEpCombine(w->handle, &c->cin, &c->cout, &c->cconfig, w->r->stream);
}

/* The call is refused with these words, and no byte of the memory that it was given has changed. */
static void refused(const world_t *w, call_t *c, const char *name, const char *word) {
  static char before[ROOM];
  team_rank_t *r = w->r;
  memcpy(before, w->memory, ROOM);
  ncclResult_t got = run(w, c);
  const char *why = ncclEpGetLastError();
  teamCheck(r, got == ncclInvalidArgument, "mode %d: %s, %s, '%s': gave %d", (int)w->mode,
            c->function, name, word, (int)got);
  teamCheck(r,
            strstr(why, c->function) == why && strstr(why, name) && strstr(why, word) &&
                strstr(why, "rank 0") && strstr(why, "0x"),
            "%s, %s, '%s': %s", c->function, name, word, why);
  cudaStreamSynchronize(r->stream);
  teamCheck(r, !memcmp(before, w->memory, ROOM), "%s, %s, '%s': it wrote", c->function, name, word);
}

static void works(const world_t *w, call_t *c, const char *what) {
  team_rank_t *r = w->r;
  ncclResult_t got = run(w, c);
  teamCheck(r, got == ncclSuccess, "mode %d: %s, %s: %d: %s", (int)w->mode, c->function, what,
            (int)got, ncclEpGetLastError());
  cudaStreamSynchronize(r->stream);
}

static void wrongKinds(const world_t *w, what_t what) {
  char stack[4096];
  call_t c;
  makeCall(&c, what, w->mode, w->memory);
  for (int i = 0; i < c.count; i++) {
    item_t *t = &c.items[i];
    void *right = t->t.data, *small;
    t->t.data = w->plain;
    refused(w, &c, t->name, "host memory that is not pinned");
    t->t.data = (void *)(((uintptr_t)stack + 63) & ~(uintptr_t)63);
    refused(w, &c, t->name, "host memory that is not pinned");
    t->t.data = w->freed;
    refused(w, &c, t->name, "freed");
    t->t.data = w->far;
    refused(w, &c, t->name, "on device 5");
    cudaMalloc(&small, t->bytes - 1);
    t->t.data = small;
    refused(w, &c, t->name, "do not fit the allocation");
    cudaFree(small);
    t->t.data = w->memory + ROOM - (t->bytes > 16 ? 16 : 0) - 16;
    if (t->bytes > 32) refused(w, &c, t->name, "do not fit the allocation");
    t->t.data = right;
  }
  works(w, &c, "after refusals");
}

static void overlaps(const world_t *w, what_t what) {
  call_t c;
  makeCall(&c, what, w->mode, w->memory);
  for (int i = 0; i < c.count; i++) {
    item_t *t = &c.items[i];
    void *right = t->t.data;
    for (int j = 0; j < c.count; j++) {
      const item_t *o = &c.items[j];
      if (i == j || !(t->written || o->written)) continue;
      t->t.data = o->t.data;
      refused(w, &c, t->name, "overlaps");
      t->t.data = (char *)o->t.data + ((o->bytes - 1) & ~(size_t)15);
      refused(w, &c, t->name, "overlaps");
    }
    t->t.data = right;
  }
  works(w, &c, "after overlaps");
}

/* Managed, pinned and registered memory is a device's too. */
static void rightKinds(const world_t *w, what_t what) {
  static _Alignas(64) char own[ROOM];
  char *managed, *pinned;
  team_rank_t *r = w->r;
  teamCheck(r,
            !cudaMallocManaged((void **)&managed, ROOM, cudaMemAttachGlobal) &&
                !cudaHostAlloc((void **)&pinned, ROOM, 0) && !cudaHostRegister(own, ROOM, 0),
            "memory");
  char *const places[] = {managed, pinned, own};
  call_t c;
  makeCall(&c, what, w->mode, w->memory);
  for (int i = 0; i < c.count; i++) {
    char *right = c.items[i].t.data;
    for (int p = 0; p < 3; p++) {
      memcpy(places[p], right, c.items[i].bytes);
      c.items[i].t.data = places[p];
      works(w, &c, "another kind of memory");
    }
    c.items[i].t.data = right;
  }
  works(w, &c, "device memory again"); /* nothing in use below */
  cudaFree(managed);
  cudaFreeHost(pinned);
  cudaHostUnregister(own);
}

/* What a tensor without elements points to does not matter. */
static void nothingAnywhere(const world_t *w) {
  call_t u, c;
  makeCall(&u, UPDATE, w->mode, w->memory);
  u.items[0].sizes[0] = 0;
  u.items[0].t.data = w->plain;
  works(w, &u, "no tokens");
  makeCall(&c, DISPATCH, w->mode, w->memory);
  for (int i = 0; i < c.count; i++) {
    if (c.items[i].written || c.items[i].sizes[0] != B) continue;
    c.items[i].sizes[0] = 0;
    c.items[i].t.data = i & 1 ? (void *)w->freed : (void *)w->memory;
  }
  works(w, &c, "no tokens");
  makeCall(&c, COMBINE, w->mode, w->memory);
  for (int i = 0; i < c.count; i++) {
    if (c.items[i].sizes[0] != B) continue;
    c.items[i].sizes[0] = 0;
    c.items[i].t.data = w->plain;
  }
  works(w, &c, "no tokens");
}

static void fillIds(char *memory) {
  int32_t ids[B * K];
  for (int i = 0; i < B * K; i++) ids[i] = i % E;
  memcpy(memory, ids, sizeof ids);
}

/* LL reads topk_idx later: it still lives, and nobody writes it. */
static void notedRouting(const world_t *w) {
  team_rank_t *r = w->r;
  call_t u, c;
  char *ids;
  teamCheck(r, !cudaMalloc((void **)&ids, 4096), "memory");
  fillIds(ids);
  makeCall(&u, UPDATE, w->mode, ids);
  works(w, &u, "ids of their own");
  makeCall(&c, DISPATCH, w->mode, w->memory);
  works(w, &c, "ids of their own");
  void *right = c.out.tokens->data;
  cudaFree(ids);
  refused(w, &c, "topk_idx of the last ncclEpUpdateHandle", "freed");
  makeCall(&u, UPDATE, w->mode, (char *)right);
  fillIds(right);
  works(w, &u, "ids where tokens will be");
  refused(w, &c, "topk_idx of the last ncclEpUpdateHandle", "overlaps outputs->tokens");
}

static void openWorld(world_t *w, team_rank_t *r, mode_t_ m) {
  static const ncclEpLayout_t layouts[] = {NCCL_EP_LAYOUT_EXPERT_MAJOR, NCCL_EP_LAYOUT_RANK_MAJOR,
                                           NCCL_EP_LAYOUT_FLAT, NCCL_EP_LAYOUT_EXPERT_MAJOR};
  *w = (world_t){.r = r, .mode = m};
  ncclEpGroupConfig_t g = NCCL_EP_GROUP_CONFIG_INIT;
  g.num_experts = E;
  g.max_dispatch_tokens_per_rank = N;
  g.max_token_bytes = H * 2 + SCALES;
  g.enable_mask = m < HT_FL;
  if (m >= HT_FL) {
    g.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
    g.max_recv_tokens_per_rank = SLOTS;
    g.num_topk = K;
  }
  teamOk(r, ncclEpCreateGroup(&w->group, r->comm, &g));
  teamOk(r, ncclEpInitHandle(&w->handle, w->group, layouts[m], NULL, K, NULL));
  w->plain = aligned_alloc(64, ROOM);
  teamCheck(r, w->plain && !cudaMalloc((void **)&w->memory, ROOM), "memory");
  memset(w->plain, 0, ROOM);
  cudaSetDevice(5);
  cudaMalloc((void **)&w->far, ROOM);
  cudaSetDevice(0);
  cudaMalloc((void **)&w->freed, ROOM);
  cudaFree(w->freed);
  memset(w->memory, 0, ROOM);
  fillIds(w->memory);
}

static void closeWorld(world_t *w) {
  team_rank_t *r = w->r;
  cudaStreamSynchronize(r->stream);
  cudaFree(w->memory);
  cudaFree(w->far);
  free(w->plain);
  teamOk(r, ncclEpHandleDestroy(w->handle));
  teamOk(r, ncclEpGroupDestroy(w->group));
}

static void allOfMode(team_rank_t *r) {
  world_t w;
  openWorld(&w, r, *(mode_t_ *)r->user);
  for (what_t what = UPDATE; what <= COMBINE && !r->error[0]; what++) {
    if (what == UPDATE) memset(w.memory, 0, ROOM), fillIds(w.memory);
    wrongKinds(&w, what);
    overlaps(&w, what);
    rightKinds(&w, what);
    char *ids = w.plain; /* LL keeps reading the ids: away from what calls write */
    if (what == UPDATE && cudaMalloc((void **)&ids, 4096) == cudaSuccess) {
      call_t u;
      fillIds(ids);
      makeCall(&u, UPDATE, w.mode, ids);
      works(&w, &u, "ids for what follows");
    }
  }
  if (!r->error[0]) nothingAnywhere(&w);
  if (!r->error[0] && w.mode < HT_FL) notedRouting(&w);
  closeWorld(&w);
}

TEST(every_tensor_of_every_call) {
  for (mode_t_ m = LL_EM; m <= HT_EM; m++) {
    const char *error = teamThreads(1, allOfMode, &m);
    CHECK(!*error, "mode %d: %s", (int)m, error);
  }
}

#define refuse(r, call, ...)                                                                       \
  do {                                                                                             \
    ncclResult_t got = (call);                                                                     \
    const char *words[] = {__VA_ARGS__}, *why = ncclEpGetLastError();                              \
    teamCheck(r, got == ncclInvalidArgument, "line %d: %s gave %d", __LINE__, #call, (int)got);    \
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)                                      \
      teamCheck(r, strstr(why, words[i]), "line %d: no '%s' in: %s", __LINE__, words[i], why);     \
  } while (0)

/* A caller's handle_mem: at Init, and as long as the handle lives. */
static void handleMemory(team_rank_t *r) {
  world_t w;
  mode_t_ m = *(mode_t_ *)r->user;
  ncclEpLayout_t layout = m == HT_FL ? NCCL_EP_LAYOUT_FLAT : NCCL_EP_LAYOUT_EXPERT_MAJOR;
  openWorld(&w, r, m);
  size_t bytes;
  ncclEpHandle_t own = NULL, usual = w.handle;
  teamOk(r, ncclEpHandleMemSize(w.group, layout, NULL, &bytes, K));
  ncclEpTensor_t mem = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 1, .datatype = ncclUint8,
                        .data = w.plain, .sizes = &bytes};
  refuse(r, ncclEpInitHandle(&own, w.group, layout, NULL, K, &mem), "ncclEpInitHandle",
         "handle_mem", "not pinned");
  mem.data = w.freed;
  refuse(r, ncclEpInitHandle(&own, w.group, layout, NULL, K, &mem), "handle_mem", "freed");
  mem.data = w.far;
  refuse(r, ncclEpInitHandle(&own, w.group, layout, NULL, K, &mem), "handle_mem", "device 5");
  void *less;
  cudaMalloc(&less, bytes - 16);
  mem.data = less;
  refuse(r, ncclEpInitHandle(&own, w.group, layout, NULL, K, &mem), "handle_mem", "do not fit");
  cudaFree(less);
  teamCheck(r, !own, "a handle was made");
  cudaMalloc(&mem.data, bytes + ROOM);
  teamOk(r, ncclEpInitHandle(&own, w.group, layout, NULL, K, &mem));
  w.handle = own;
  call_t u, c;
  makeCall(&u, UPDATE, m, w.memory);
  works(&w, &u, "handle_mem");
  makeCall(&c, DISPATCH, m, w.memory + 4096);
  works(&w, &c, "handle_mem");
  void *right = c.out.tokens->data;
  c.out.tokens->data = (char *)mem.data + (bytes - 16) / 64 * 64;
  refused(&w, &c, "handle_mem", "overlaps outputs->tokens");
  c.out.tokens->data = right;
  works(&w, &c, "handle_mem");
  cudaStreamSynchronize(r->stream);
  cudaFree(mem.data);
  refused(&w, &u, "handle_mem", "freed");
  refused(&w, &c, "handle_mem", "freed");
  teamOk(r, ncclEpHandleDestroy(own));
  w.handle = usual;
  closeWorld(&w);
}

TEST(handle_memory) {
  for (mode_t_ m = LL_EM; m <= HT_FL; m += 2) {
    const char *error = teamThreads(1, handleMemory, &m);
    CHECK(!*error, "mode %d: %s", (int)m, error);
  }
}

static void masksAndCreate(team_rank_t *r) {
  world_t w;
  openWorld(&w, r, LL_EM);
  ncclEpHandle_t h = NULL;
  ncclEpTensor_t idx = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, .datatype = ncclInt32,
                        .data = w.plain, .sizes = (size_t[]){B, K}};
  refuse(r,
         ncclEpCreateHandle(&h, w.group, NCCL_EP_LAYOUT_EXPERT_MAJOR, &idx, NULL, NULL, r->stream),
         "ncclEpCreateHandle: topk_idx", "not pinned");
  teamCheck(r, !h, "a handle was made");
  refuse(r, ncclEpMaskQuery(w.group, (int *)(void *)w.plain, r->stream), "ncclEpMaskQuery",
         "device_mask", "not pinned");
  refuse(r, ncclEpMaskQuery(w.group, (int *)(void *)(w.memory + ROOM - 2), r->stream),
         "device_mask", "do not fit");
  teamOk(r, ncclEpMaskQuery(w.group, (int *)(void *)w.memory, r->stream));
  closeWorld(&w);
}

TEST(masks_and_create) {
  const char *error = teamThreads(1, masksAndCreate, NULL);
  CHECK(!*error, "%s", error);
}

TEST_MAIN()
