/* The C API on GPUs: whose memory, how much, where tensors may lie, and what is counted. */
#include <string.h>

#include "gpu_case.h"
#include "test.h"
#include "trefoil/device.h"

/* ---- memory, counters, times ----------------------------------------------------------------- */

static void runMemory(team_rank_t *r) {
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.num_experts = 256;
  config.max_dispatch_tokens_per_rank = 128;
  config.max_token_bytes = 7168 * 2;
  ncclEpPreflight_t says = NCCL_EP_PREFLIGHT_INIT, is = NCCL_EP_PREFLIGHT_INIT;
  teamOk(r, ncclEpPreflight(&config, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, 8, r->numRanks, r->numRanks,
                            &says));
  size_t before = 0, after = 0, total;
  teamBarrier(r);
  cudaMemGetInfo(&before, &total);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, 8, NULL));
  cudaMemGetInfo(&after, &total);
  teamOk(r, ncclEpMemoryInUse(group, &is));
  teamCheck(r,
            is.group_device_bytes == says.group_device_bytes &&
                is.group_shared_bytes == says.group_shared_bytes &&
                is.group_host_bytes == says.group_host_bytes &&
                is.handle_device_bytes == says.handle_device_bytes &&
                is.handle_host_bytes == says.handle_host_bytes,
            "device %zu %zu, shared %zu %zu, host %zu %zu, handle %zu %zu", is.group_device_bytes,
            says.group_device_bytes, is.group_shared_bytes, says.group_shared_bytes,
            is.group_host_bytes, says.group_host_bytes, is.handle_device_bytes,
            says.handle_device_bytes);
  size_t sum = is.group_device_bytes + is.group_shared_bytes + is.handle_device_bytes;
  teamCheck(r, sum <= (size_t)64 << 20, "%zu bytes of device memory", sum);
  if (r->rank == 0) {
    printf(
        "memory, %d ranks, 128 tokens, hidden 7168, top-8 of 256: %zu bytes on the device (group "
        "%zu, shared %zu, handle %zu); free memory fell by %zu\n",
        r->numRanks, sum, is.group_device_bytes, is.group_shared_bytes, is.handle_device_bytes,
        before - after);
  }
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
}

/* Bytes of device memory of a high-throughput group with one handle, and that the preflight says so for
 * saidSms SMs. */
static void htMemory(team_rank_t *r, ncclEpZeroCopyMode_t zeroCopy, unsigned maxSms,
                     unsigned saidSms, size_t *bytes) {
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
  config.num_experts = 256;
  config.max_dispatch_tokens_per_rank = 4096;
  config.max_token_bytes = 7168 * 2;
  config.num_topk = 8;
  config.zero_copy = zeroCopy;
  config.max_num_sms = saidSms;
  ncclEpPreflight_t says = NCCL_EP_PREFLIGHT_INIT, is = NCCL_EP_PREFLIGHT_INIT;
  teamOk(r,
         ncclEpPreflight(&config, NCCL_EP_LAYOUT_FLAT, NULL, 8, r->numRanks, r->numRanks, &says));
  config.max_num_sms = maxSms;
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, NCCL_EP_LAYOUT_FLAT, NULL, 8, NULL));
  teamOk(r, ncclEpMemoryInUse(group, &is));
  *bytes = is.group_device_bytes + is.group_shared_bytes + is.handle_device_bytes;
  size_t said = says.group_device_bytes + says.group_shared_bytes + says.handle_device_bytes;
  teamCheck(r, *bytes == said, "%zu bytes of device memory, the preflight says %zu", *bytes, said);
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
}

static void runHtMemory(team_rank_t *r) {
  size_t any = 0, windows = 0;
  htMemory(r, NCCL_EP_ZERO_COPY_AUTO, 0, 0, &any);
  htMemory(r, NCCL_EP_ZERO_COPY_ON, 0, 0, &windows);
  teamCheck(r, any <= (size_t)300 << 20, "%zu bytes of device memory", any);
  /* One of two kinds of rings is small. */
  teamCheck(r, r->numRanks < 2 || windows < any * 6 / 10, "%zu bytes with windows, %zu without",
            windows, any);
  if (r->rank == 0) {
    printf("memory, %d ranks, 4096 tokens: %zu bytes, outputs in windows %zu\n", r->numRanks, any,
           windows);
  }
}

TEST(ht_memory_is_what_the_preflight_says_and_less_with_windows) {
  if (!numGpus()) SKIP("needs a GPU");
  const char *error = teamThreads(numGpus(), runHtMemory, NULL);
  CHECK(!*error, "%s", error);
}

/* Room for inputs outside windows, which peers read with few SMs: of all ranks or of none. */
static void runStaged(team_rank_t *r) {
  const size_t rows = (size_t)4096 * 7168 * 2;
  size_t any = 0, few = 0, windows = 0, unlike = 0;
  const unsigned most = 24;
  htMemory(r, NCCL_EP_ZERO_COPY_AUTO, most + 1, most + 1, &any);
  htMemory(r, NCCL_EP_ZERO_COPY_AUTO, most, most, &few);
  teamCheck(r, few == any + (r->numRanks > 1 ? rows : 0), "%zu bytes with %u SMs, %zu with more",
            few, most, any);
  htMemory(r, NCCL_EP_ZERO_COPY_ON, most, most, &windows);
  teamCheck(r, r->numRanks < 2 || windows < any * 6 / 10, "%zu bytes in windows", windows);
  htMemory(r, NCCL_EP_ZERO_COPY_AUTO, r->rank ? 8 : most, most, &unlike);
  teamCheck(r, unlike == few, "%zu bytes where ranks take unlike numbers of SMs", unlike);
  htMemory(r, NCCL_EP_ZERO_COPY_AUTO, r->rank ? most + 1 : 8, most + 1, &unlike);
  teamCheck(r, unlike == any, "%zu bytes where one rank takes more SMs", unlike);
  htMemory(r, NCCL_EP_ZERO_COPY_AUTO, r->rank ? 8 : 0, 0, &unlike);
  teamCheck(r, unlike == any, "%zu bytes where one rank takes any SMs", unlike);
}

TEST(inputs_of_few_sms_have_room) {
  if (!numGpus()) SKIP("needs a GPU");
  const char *error = teamThreads(numGpus(), runStaged, NULL);
  CHECK(!*error, "%s", error);
}

TEST(memory_is_what_the_preflight_says) {
  if (!numGpus()) SKIP("needs a GPU");
  const char *error = teamThreads(numGpus(), runMemory, NULL);
  CHECK(!*error, "%s", error);
}

static void runCounted(team_rank_t *r) {
  const step_case_t *c = r->user;
  step_data_t *d = stepMake(c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  ncclEpGroupConfig_t config = stepGroupConfig(c, r->numRanks);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(c), NULL, c->topk, NULL));
  teamCheck(r, stepUpdate(d, h, r->stream), "update");
  uint64_t bytes[64];
  int64_t rows[64 * 64];
  teamCheck(r, ncclEpReadBytes(group, 0, bytes, NULL, 0, r->stream) == ncclInvalidUsage, "read");
  teamOk(r, ncclEpCountBytes(group, 1));
  teamOk(r, ncclEpKeepTimes(group, 3));
  for (int i = 0; i < 2; i++) {
    teamCheck(r, stepDispatch(d, h, r->stream), "dispatch: %s", ncclEpGetLastError());
    teamCheck(r, stepCombine(d, h, r->stream), "combine: %s", ncclEpGetLastError());
  }
  for (int op = 0; op < 2; op++) {
    teamCheck(r, trefoilRefTraffic(&d->ref, op, rows) == TREFOIL_OK, "%s", trefoilLastError());
    teamOk(r, ncclEpReadBytes(group, op, bytes, NULL, 1, r->stream));
    for (int dst = 0; dst < r->numRanks; dst++) {
      unsigned long long want =
          2ull * (unsigned long long)rows[r->rank * r->numRanks + dst] * (unsigned)c->width * 2;
      teamCheck(r, bytes[dst] == want, "%s to rank %d: %llu bytes, the routing says %llu",
                op ? "combine" : "dispatch", dst, (unsigned long long)bytes[dst], want);
    }
    teamOk(r, ncclEpReadBytes(group, op, bytes, NULL, 0, r->stream));
    for (int dst = 0; dst < r->numRanks; dst++) teamCheck(r, !bytes[dst], "not reset");
  }
  ncclEpKernelTime_t t[4];
  unsigned count = 4;
  teamOk(r, ncclEpReadTimes(group, t, &count, r->stream));
  teamCheck(r, count == 3 && t[0].kind == 1 && t[1].kind == 0 && t[2].kind == 1, "%u times", count);
  for (int i = 0; i < 3; i++) {
    teamCheck(r,
              t[i].startNs && t[i].endNs > t[i].startNs && t[i].numBlocks >= 1 &&
                  t[i].endNs - t[i].startNs < 1000000000u && t[i].parts == 3,
              "time %d: %llu to %llu, %d blocks", i, (unsigned long long)t[i].startNs,
              (unsigned long long)t[i].endNs, t[i].numBlocks);
    /* High throughput: a block that sends and one that receives, whatever the limit. */
    if (c->maxSms == 1) {
      int want = c->mode >= TREFOIL_HT_FLAT ? 2 : 1;
      teamCheck(r, t[i].numBlocks == want, "%d blocks, %d run on one SM", t[i].numBlocks, want);
    }
    teamCheck(r, !i || t[i].startNs >= t[i - 1].endNs, "launch %d overlaps the one before", i);
  }
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
}

TEST(bytes_and_times) {
  if (!numGpus()) SKIP("needs a GPU");
  for (int i = 0; i < 8; i++) {
    step_case_t c = smallCase((trefoil_mode_t)(i % 4), 630);
    c.maxTokens = 40;
    c.maxSms = i < 4 ? 0 : 1;
    const char *error = teamThreads(numGpus(), runCounted, &c);
    CHECK(!*error, "mode %d, at most %u SMs: %s", i % 4, c.maxSms, error);
  }
}

/* ---- larger top-k later ---------------------------------------------------------------------- */

static void runPairs(team_rank_t *r, int count, step_data_t **d, ncclEpHandle_t *h) {
  for (int i = 0; i < count;
       i += 2) { /* neighbours in flight together, the last one may be alone */
    int end = i + 2 < count ? i + 2 : count;
    for (int j = i; j < end; j++) teamCheck(r, stepDispatch(d[j], h[j], r->stream), "dispatch");
    for (int j = i; j < end; j++) teamOk(r, ncclEpComplete(h[j], NULL, r->stream));
    for (int j = i; j < end; j++) teamCheck(r, stepCombine(d[j], h[j], r->stream), "combine");
    for (int j = i; j < end; j++) teamOk(r, ncclEpComplete(h[j], NULL, r->stream));
  }
}

/* Handles of top-1, 3 and 5 made one after the other, each time after operations of which two were in
 * flight, so that what peers have received was last said in the memory that goes. */
static void runGrown(team_rank_t *r) {
  const step_case_t *like = r->user;
  step_case_t c[3];
  step_data_t *d[3];
  ncclEpHandle_t h[3];
  ncclEpGroup_t group;
  ncclEpGroupConfig_t config = stepGroupConfig(like, r->numRanks);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  for (int made = 0; made < 3; made++) {
    c[made] = *like;
    c[made].topk = 1 + 2 * made;
    c[made].seed = like->seed + (uint64_t)made;
    c[made].sendOnly = 1;
    d[made] = stepMake(&c[made], r->rank, r->numRanks, r->numRanks);
    teamOk(r, ncclEpInitHandle(&h[made], group, stepLayout(like), NULL, c[made].topk, NULL));
    teamCheck(r, stepUpdate(d[made], h[made], r->stream), "update");
    for (int i = 0; i <= made; i++) stepPoison(d[i]);
    for (int round = 0; round < 5 && !r->error[0]; round++) runPairs(r, made + 1, d, h);
    if (r->error[0]) return;
    cudaError_t error = cudaStreamSynchronize(r->stream);
    teamCheck(r, error == cudaSuccess, "stream: %s", cudaGetErrorString(error));
    for (int i = 0; i <= made; i++) {
      teamCheck(r, !*stepCompareDispatch(d[i]), "%d of %d: %s", i, made, stepCompareDispatch(d[i]));
      teamCheck(r, !*stepCompareCombine(d[i]), "%d of %d: %s", i, made, stepCompareCombine(d[i]));
    }
  }
  ncclEpPreflight_t is = NCCL_EP_PREFLIGHT_INIT, says = NCCL_EP_PREFLIGHT_INIT;
  teamOk(r, ncclEpPreflight(&config, stepLayout(like), NULL, 5, r->numRanks, r->numRanks, &says));
  teamOk(r, ncclEpMemoryInUse(group, &is));
  teamCheck(r, is.group_shared_bytes == says.group_shared_bytes, "shared %zu, preflight %zu",
            is.group_shared_bytes, says.group_shared_bytes);
  for (int i = 0; i < 3; i++) {
    teamOk(r, ncclEpHandleDestroy(h[i]));
    stepFree(d[i]);
  }
  teamOk(r, ncclEpGroupDestroy(group));
}

TEST(top_k_grows) {
  if (!numGpus()) SKIP("needs a GPU");
  for (int mode = 0; mode < 2; mode++) {
    step_case_t c = smallCase((trefoil_mode_t)mode, 650);
    c.maxTokens = 20;
    c.width = 200;
    const char *error = teamThreads(numGpus(), runGrown, &c);
    CHECK(!*error, "mode %d: %s", mode, error);
  }
}

/* ---- a stream that is gone ------------------------------------------------------------------- */

static void runGone(team_rank_t *r) {
  const step_case_t *c = r->user;
  step_data_t *d = stepMake(c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  cudaStream_t s[3];
  ncclEpGroupConfig_t config = stepGroupConfig(c, r->numRanks);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(c), NULL, 3, NULL));
  for (int i = 0; i < 3; i++) {
    teamCheck(r, !cudaStreamCreateWithFlags(&s[i], cudaStreamNonBlocking), "stream");
  }
  for (int i = 0; i < 3; i++) {
    teamCheck(r, stepUpdate(d, h, s[i]), "update");
    teamCheck(r, stepDispatch(d, h, s[i]), "stream %d: %s", i, ncclEpGetLastError());
    teamCheck(r, stepCombine(d, h, s[i]), "stream %d: %s", i, ncclEpGetLastError());
    cudaStreamSynchronize(s[i]);
    cudaStreamDestroy(s[i]);
    teamCheck(r, !*stepCompareCombine(d), "stream %d: %s", i, stepCompareCombine(d));
    stepPoison(d);
  }
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
}

TEST(streams_may_go) {
  if (!numGpus()) SKIP("needs a GPU");
  step_case_t c = smallCase(TREFOIL_LL_EXPERT_MAJOR, 640);
  const char *error = teamThreads(numGpus(), runGone, &c);
  CHECK(!*error, "%s", error);
}

/* ---- the caller's allocator ------------------------------------------------------------------ */

typedef struct purse {
  size_t bytes, freed;
} purse_t;

static cudaError_t takeFrom(void **p, size_t bytes, void *context) {
  ((purse_t *)context)->bytes += bytes;
  return cudaMalloc(p, bytes);
}

static cudaError_t giveBack(void *p, void *context) {
  ((purse_t *)context)->freed++;
  return cudaFree(p);
}

static void runAllocator(team_rank_t *r) {
  const step_case_t *c = r->user;
  purse_t purse = {0, 0};
  step_data_t *d = stepMake(c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroupConfig_t config = stepGroupConfig(c, r->numRanks);
  config.alloc = (ncclEpAllocConfig_t){takeFrom, giveBack, &purse};
  ncclEpPreflight_t says = NCCL_EP_PREFLIGHT_INIT;
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  teamOk(r,
         ncclEpPreflight(&config, stepLayout(c), NULL, c->topk, r->numRanks, r->numRanks, &says));
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(c), NULL, c->topk, NULL));
  size_t want = says.group_device_bytes + says.handle_device_bytes;
  teamCheck(r, purse.bytes == want, "%zu bytes asked for, preflight %zu", purse.bytes, want);
  teamCheck(r, stepUpdate(d, h, r->stream), "update: %s", ncclEpGetLastError());
  teamCheck(r, stepDispatch(d, h, r->stream), "dispatch: %s", ncclEpGetLastError());
  teamCheck(r, stepCombine(d, h, r->stream), "combine: %s", ncclEpGetLastError());
  cudaStreamSynchronize(r->stream);
  teamCheck(r, !*stepCompareCombine(d), "%s", stepCompareCombine(d));
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  teamCheck(r, purse.freed >= 2, "%zu times given back", purse.freed);
  stepFree(d);
}

TEST(the_callers_allocator_gives_it_all) {
  if (!numGpus()) SKIP("needs a GPU");
  for (int mode = 0; mode < 4; mode++) {
    step_case_t c = smallCase((trefoil_mode_t)mode, 660);
    if (mode >= 2) c.maxRecv = 4 * 7 * 3 + 8;
    const char *error = teamThreads(numGpus(), runAllocator, &c);
    CHECK(!*error, "mode %d: %s", mode, error);
  }
}

typedef struct stingy {
  const step_case_t *c;
  int refuse; /* rank 1's request of this number, from 1 */
} stingy_t;

typedef struct counted_purse {
  int requests, refuse, live;
} counted_purse_t;

static cudaError_t takeUnlessRefused(void **p, size_t bytes, void *context) {
  counted_purse_t *purse = context;
  if (++purse->requests == purse->refuse) return cudaErrorMemoryAllocation;
  purse->live++;
  return cudaMalloc(p, bytes);
}

static cudaError_t giveBackCounted(void *p, void *context) {
  ((counted_purse_t *)context)->live--;
  return cudaFree(p);
}

/* One rank gets no memory: all are told, nothing is kept, and the next try succeeds. */
static void runRefused(team_rank_t *r) {
  const stingy_t *stingy = r->user;
  const step_case_t *c = stingy->c;
  counted_purse_t purse = {.refuse = r->rank == 1 ? stingy->refuse : 0};
  step_data_t *d = stepMake(c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroupConfig_t config = stepGroupConfig(c, r->numRanks);
  config.alloc = (ncclEpAllocConfig_t){takeUnlessRefused, giveBackCounted, &purse};
  ncclEpGroup_t group = NULL;
  ncclEpHandle_t h = NULL;
  int failures = 0;
  while (!group && failures < 2) {
    if (ncclEpCreateGroup(&group, r->comm, &config) == ncclSuccess) break;
    failures++;
    teamCheck(r, strstr(ncclEpGetLastError(), "alloc_fn"), "group: %s", ncclEpGetLastError());
    teamCheck(r, !group && !purse.live, "%d blocks are left of the group", purse.live);
    teamBarrier(r);
  }
  int before = purse.live;
  while (!h && failures < 2) {
    if (ncclEpInitHandle(&h, group, stepLayout(c), NULL, c->topk, NULL) == ncclSuccess) break;
    failures++;
    teamCheck(r, strstr(ncclEpGetLastError(), "alloc_fn"), "handle: %s", ncclEpGetLastError());
    teamCheck(r, !h && purse.live == before, "%d blocks are left of the handle",
              purse.live - before);
    teamBarrier(r);
  }
  teamCheck(r, h && failures == 1, "%d failures: %s", failures, ncclEpGetLastError());
  teamCheck(r, stepUpdate(d, h, r->stream), "update: %s", ncclEpGetLastError());
  teamCheck(r, stepDispatch(d, h, r->stream), "dispatch: %s", ncclEpGetLastError());
  teamCheck(r, stepCombine(d, h, r->stream), "combine: %s", ncclEpGetLastError());
  cudaStreamSynchronize(r->stream);
  teamCheck(r, !*stepCompareCombine(d), "%s", stepCompareCombine(d));
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  teamCheck(r, !purse.live, "%d blocks are left", purse.live);
  stepFree(d);
}

TEST(a_rank_without_memory_is_told_to_all) {
  if (numGpus() < 2) SKIP("needs two GPUs");
  for (int mode = 1; mode < 3; mode++) {
    step_case_t c = smallCase((trefoil_mode_t)mode, 665);
    if (mode == 2) c.maxRecv = 4 * 7;
    for (int refuse = 1; refuse <= mode + 1; refuse++) { /* control, handle, scratch */
      stingy_t stingy = {&c, refuse};
      const char *error = teamThreads(numGpus(), runRefused, &stingy);
      CHECK(!*error, "mode %d, request %d: %s", mode, refuse, error);
    }
  }
}

/* ---- tensors in a window --------------------------------------------------------------------- */

enum { N_ROWS = 24, ROW = 64, SLOT_BYTES = 1 << 20 };

/* The same dispatch with plain pointers and with tensors that lie in a window, data NULL. */
static void dispatchOnce(team_rank_t *r, ncclEpHandle_t h, void *tokens, void *out, void *counters,
                         ncclWindow_t window) {
  size_t sizes[3][3] = {{N_ROWS, ROW}, {8, (size_t)r->numRanks * N_ROWS, ROW}, {8}};
  sizes[1][0] = sizes[2][0] = (size_t)((8 + r->numRanks - 1) / r->numRanks);
  ncclEpTensor_t in = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, .datatype = ncclBfloat16,
                       .data = tokens, .sizes = sizes[0]};
  ncclEpTensor_t to = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 3, .datatype = ncclBfloat16, .data = out,
                       .sizes = sizes[1]};
  ncclEpTensor_t count = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 1, .datatype = ncclInt32,
                          .data = counters, .sizes = sizes[2]};
  if (window) {
    in.win_hdl = to.win_hdl = window;
    in.data = to.data = NULL;
    in.win_offset = 4096;
    to.win_offset = SLOT_BYTES;
  }
  ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  inputs.tokens = &in;
  outputs.tokens = &to;
  info.expert_counters = &count;
  teamOk(r, ncclEpDispatch(h, &inputs, &outputs, &info, NULL, r->stream));
  cudaStreamSynchronize(r->stream);
}

static void runWindow(team_rank_t *r) {
  size_t bytes = 3u * SLOT_BYTES, idxSizes[2] = {N_ROWS, 2};
  char *memory, *plain, *pinned;
  ncclWindow_t window = NULL;
  teamCheck(r, ncclMemAlloc((void **)&memory, bytes) == ncclSuccess, "ncclMemAlloc");
  teamCheck(r, !cudaMemset(memory, 0, bytes), "memset");
  teamCheck(r, ncclCommWindowRegister(r->comm, memory, bytes, &window, 0) == ncclSuccess, "window");
  teamCheck(r, !cudaMalloc((void **)&plain, bytes), "cudaMalloc");
  teamCheck(r, !cudaMemset(plain, 0, bytes), "memset");
  teamCheck(r, !cudaHostAlloc((void **)&pinned, bytes, cudaHostAllocPortable), "cudaHostAlloc");
  int32_t *idx = (int32_t *)pinned;
  for (int i = 0; i < N_ROWS; i++) {
    idx[2 * i] = (i * 3 + r->rank) % 8;
    idx[2 * i + 1] = (idx[2 * i] + 1 + i % 3) % 8;
  }
  uint16_t *rows = (uint16_t *)(pinned + 4096);
  for (int i = 0; i < N_ROWS * ROW; i++) rows[i] = (uint16_t)(i * 7 + r->rank * 1000);
  cudaMemcpy(memory + 4096, rows, N_ROWS * ROW * 2, cudaMemcpyHostToDevice);
  cudaMemcpy(plain, rows, N_ROWS * ROW * 2, cudaMemcpyHostToDevice);
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.num_experts = 8;
  config.max_dispatch_tokens_per_rank = N_ROWS;
  config.max_token_bytes = ROW * 2;
  config.timeout_ns = 10000000000u;
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  ncclEpTensor_t routing = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, .datatype = ncclInt32,
                            .data = idx, .sizes = idxSizes};
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, 2, NULL));
  teamOk(r, ncclEpUpdateHandle(h, &routing, NULL, r->stream));
  char *counters = plain + 2 * SLOT_BYTES;
  dispatchOnce(r, h, plain, plain + SLOT_BYTES, counters, NULL);
  dispatchOnce(r, h, NULL, NULL, counters, window);
  if (r->error[0]) return;
  char *one = pinned, *two = pinned + SLOT_BYTES;
  cudaMemcpy(one, plain + SLOT_BYTES, SLOT_BYTES, cudaMemcpyDeviceToHost);
  cudaMemcpy(two, memory + SLOT_BYTES, SLOT_BYTES, cudaMemcpyDeviceToHost);
  size_t filled = 0;
  for (size_t i = 0; i < SLOT_BYTES; i++) filled += one[i] != 0;
  teamCheck(r, !memcmp(one, two, SLOT_BYTES) && filled > 1000, "differs, or empty: %zu", filled);
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  ncclCommWindowDeregister(r->comm, window);
  ncclMemFree(memory);
  cudaFree(plain);
  cudaFreeHost(pinned);
}

TEST(tensors_may_lie_in_a_window) {
  if (!numGpus()) SKIP("needs a GPU");
  const char *error = teamThreads(numGpus(), runWindow, NULL);
  CHECK(!*error, "%s", error);
}

TEST_MAIN()
