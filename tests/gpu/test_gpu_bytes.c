/* What a library tells about its operations (trefoil/device.h): bytes per (source, destination,
 * tier) equal the plan's, and are gone when they are off; memory in use is what the preflight said,
 * to the byte; kernel times are there, ordered, and shorter than what was waited for them; the CPU
 * library has no kernels and must say so. */
#include "test.h"

#include "gpu_script.h"
#include "plan/error.h"
#include "trefoil/plan.h"
#include "validate/checker.h"

typedef struct counted {
  script_list_t *list;
  uint64_t bytes[2][EP_MAX_RANKS * EP_MAX_RANKS]; /* by the library, [kind][src][dst] */
} counted_t;

static trefoil_tier_t tierTo(const ep_check_rank_t *k, int to) {
  int perNode = k->group->shape.ranksPerNode;
  if (to == k->rank) return TREFOIL_TIER_SELF;
  return to / perNode == k->rank / perNode ? TREFOIL_TIER_NVLINK : TREFOIL_TIER_NET;
}

/* Combines by partial sums: of expert-major handles. */
static uint64_t numPartial(const ep_check_group_t *g, const script_list_t *list) {
  uint64_t n = 0;
  for (int i = 0; i < list->numCases && g->partial; i++)
    for (int j = 0; j < list->cases[i].numOps; j++) {
      const ep_check_op_t *op = &list->cases[i].ops[j];
      n += op->kind == EP_OP_COMBINE && g->handles[op->handle].mode == TREFOIL_LL_EXPERT_MAJOR;
    }
  return n;
}

/* Low latency has one put for each operation to each rank of other domains, and one for the weights of
 * partial sums; high throughput one for an Update's ids, and as many for rows as it takes, to the rank of
 * its rail. */
static uint64_t mostPuts(const ep_check_rank_t *k, const counted_t *counted, int kind) {
  const ep_check_group_t *g = k->group;
  uint64_t updates = (uint64_t)scriptListOps(counted->list, EP_OP_UPDATE),
           dispatches = (uint64_t)scriptListOps(counted->list, EP_OP_DISPATCH),
           combines = (uint64_t)scriptListOps(counted->list, EP_OP_COMBINE);
  if (kind == NCCL_EP_PUT_SIGNAL) return UINT64_MAX;
  if (g->highThroughput)
    return kind == NCCL_EP_PUT_IDS ? updates : kind == NCCL_EP_PUT_WEIGHTS ? 0 : UINT64_MAX;
  return kind == NCCL_EP_PUT_DISPATCH  ? dispatches
         : kind == NCCL_EP_PUT_COMBINE ? combines
         : kind == NCCL_EP_PUT_WEIGHTS ? numPartial(g, counted->list)
                                       : 0;
}

/* Puts go to other domains alone, to all ranks there that get rows, and are of the right kinds. */
static trefoil_result_t comparePuts(ep_check_rank_t *k, const counted_t *counted) {
  uint64_t puts[EP_MAX_RANKS];
  int R = k->group->shape.numRanks;
  EP_CHECK(k->lib->ncclEpReadPuts, TREFOIL_INTERNAL_ERROR, "the library has no ncclEpReadPuts");
  ncclResult_t rc = k->lib->ncclEpReadPuts(k->epGroup, NCCL_EP_PUT_KINDS, puts, k->stream);
  EP_CHECK(rc == (gpuIsCpuLibrary() ? ncclInvalidUsage : ncclInvalidArgument),
           TREFOIL_INTERNAL_ERROR, "ncclEpReadPuts returned %d", (int)rc);
  k->doing = "ncclEpReadPuts";
  for (int kind = 0; kind < NCCL_EP_PUT_KINDS && !gpuIsCpuLibrary(); kind++) {
    uint64_t most = mostPuts(k, counted, kind);
    EP_TRY_EP(k, k->lib->ncclEpReadPuts(k->epGroup, kind, puts, k->stream));
    for (int q = 0; q < R; q++) {
      int isNet = tierTo(k, q) == TREFOIL_TIER_NET;
      uint64_t least = isNet && kind < 2 && counted->bytes[kind][k->rank * R + q];
      int isRail = (q - k->rank) % k->group->shape.ranksPerNode == 0; /* what HT's network joins */
      if (isNet && most < UINT64_MAX && (isRail || !k->group->highThroughput)) least = most;
      EP_CHECK(puts[q] >= least && puts[q] <= (isNet ? most : 0), TREFOIL_INTERNAL_ERROR,
               "%llu puts for %s to rank %d, expected %llu to %llu", (unsigned long long)puts[q],
               epPutName(kind), q, (unsigned long long)least, (unsigned long long)most);
    }
  }
  return TREFOIL_OK;
}

static trefoil_result_t runCounted(gpu_rank_t *rank) {
  ep_check_rank_t *k = &rank->rank;
  const ep_library_t *lib = k->lib;
  counted_t *counted = rank->run->context;
  int R = k->group->shape.numRanks, tiers[EP_MAX_RANKS];
  EP_CHECK(lib->ncclEpCountBytes && lib->ncclEpReadBytes, TREFOIL_INTERNAL_ERROR,
           "the library has no ncclEpCountBytes");
  k->doing = "ncclEpCountBytes";
  EP_TRY_EP(k, lib->ncclEpCountBytes(k->epGroup, 1));
  EP_TRY(scriptListRun(rank, counted->list, NULL));
  k->doing = "ncclEpReadBytes";
  for (int kind = 0; kind < 2; kind++)
    EP_TRY_EP(k, lib->ncclEpReadBytes(k->epGroup, kind, &counted->bytes[kind][k->rank * R], tiers,
                                      1, k->stream));
  for (int q = 0; q < R; q++)
    EP_CHECK(tiers[q] == (int)tierTo(k, q), TREFOIL_INTERNAL_ERROR, "tier %d of the way to rank %d",
             tiers[q], q);
  EP_TRY(comparePuts(k, counted));
  /* off: the same work leaves the counts at zero */
  k->doing = "ncclEpCountBytes";
  EP_TRY_EP(k, lib->ncclEpCountBytes(k->epGroup, 0));
  EP_TRY(scriptListRun(rank, counted->list, NULL));
  for (int kind = 0; kind < 2; kind++) {
    uint64_t more[EP_MAX_RANKS];
    EP_TRY_EP(k, lib->ncclEpReadBytes(k->epGroup, kind, more, NULL, 0, k->stream));
    for (int q = 0; q < R; q++)
      EP_CHECK(more[q] == 0, TREFOIL_INTERNAL_ERROR, "%llu bytes to rank %d counted while off",
               (unsigned long long)more[q], q);
  }
  return TREFOIL_OK;
}

/* What the plan says of an operation, added up. */
static trefoil_result_t addPlan(const ep_check_case_t *c, const ep_check_op_t *op,
                                uint64_t *bytes) {
  trefoil_case_t rc;
  int isCombine = op->kind == EP_OP_COMBINE, R = c->group->shape.numRanks;
  epReferenceCase(c, op, 0, &rc);
  size_t row = (size_t)op->width * trefoilDtypeBytes(op->dtype);
  if (!isCombine && op->quant == TREFOIL_QUANT_E4M3) row = (size_t)op->width;
  if (!isCombine && op->quant != TREFOIL_QUANT_NONE)
    row += (size_t)op->scaleWidth * trefoilDtypeBytes(op->scaleDtype);
  trefoil_plan_config_t config = {.mode = rc.mode,
                                  .op = isCombine ? TREFOIL_OP_COMBINE : TREFOIL_OP_DISPATCH,
                                  .rowBytes = row,
                                  .combinePartial = rc.combinePartial};
  trefoil_plan_t *plan = NULL;
  uint64_t once[EP_MAX_RANKS * EP_MAX_RANKS];
  EP_TRY(trefoilPlanCreate(&plan, &rc.routing, &config));
  trefoil_result_t result = trefoilPlanTraffic(plan, -1, once);
  trefoilPlanDestroy(plan);
  for (int i = 0; result == TREFOIL_OK && i < R * R; i++) bytes[i] += once[i];
  return result;
}

static void countAll(int numRanks, int partial, int highThroughput) {
  ep_check_group_t g = (highThroughput ? gpuGroupHt : gpuGroup)(numRanks, 12, 1056);
  script_list_t list;
  static counted_t counted;
  memset(&counted, 0, sizeof counted);
  counted.list = &list;
  gpu_run_t run = {.group = &g, .work = runCounted, .context = &counted};
  g.partial = partial;
  epBatchEnvironment(&g);
  REQUIRE(scriptListBegin(&list, &g, gpuScaled(120, 120)) == TREFOIL_OK, "%s", trefoilLastError());
  REQUIRE(scriptListGenerate(&list, 70 + (uint64_t)(partial + 2 * highThroughput)) == TREFOIL_OK,
          "%s", trefoilLastError());
  REQUIRE(scriptListExpect(&list) == TREFOIL_OK, "%s", trefoilLastError());
  gpuRun(&run, numRanks);
  CHECK(!*run.failure, "%s", run.failure);
  uint64_t planned[2][EP_MAX_RANKS * EP_MAX_RANKS] = {{0}};
  for (int i = 0; i < list.numCases; i++)
    for (int j = 0; j < list.cases[i].numOps; j++) {
      const ep_check_op_t *op = &list.cases[i].ops[j];
      if (op->kind != EP_OP_DISPATCH && op->kind != EP_OP_COMBINE) continue;
      REQUIRE(addPlan(&list.cases[i], op, planned[op->kind == EP_OP_COMBINE]) == TREFOIL_OK, "%s",
              trefoilLastError());
    }
  for (int kind = 0; kind < 2 && !*run.failure; kind++)
    for (int i = 0; i < numRanks * numRanks; i++)
      CHECK(counted.bytes[kind][i] == planned[kind][i],
            "%s, rank %d to rank %d: %llu bytes counted, %llu planned",
            kind ? "combine" : "dispatch", i / numRanks, i % numRanks,
            (unsigned long long)counted.bytes[kind][i], (unsigned long long)planned[kind][i]);
  scriptListFree(&list);
}

TEST(bytes_equal_the_plan) {
  GPU_RANKS(R, 1);
  countAll(R, 0, 0);
}

TEST(bytes_of_partial_sums_equal_the_plan) {
  GPU_RANKS(R, 2);
  countAll(R, 1, 0);
}

TEST(bytes_of_high_throughput_equal_the_plan) {
  GPU_RANKS(R, 1);
  countAll(R, 0, 1);
}

/* ---- Memory ---- */

/* The group's configuration, as check_rank.c opens it. */
static ncclEpGroupConfig_t configOf(const ep_check_group_t *g) {
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.algorithm = g->highThroughput ? NCCL_EP_ALGO_HIGH_THROUGHPUT : NCCL_EP_ALGO_LOW_LATENCY;
  config.max_recv_tokens_per_rank = (unsigned)g->maxRecv;
  config.num_topk = (unsigned)g->numTopk;
  config.num_experts = (unsigned)g->shape.numExperts;
  config.max_dispatch_tokens_per_rank = (unsigned)g->shape.maxTokens;
  config.max_token_bytes = (unsigned)g->maxTokenBytes;
  return config;
}

static trefoil_result_t compareMemory(gpu_rank_t *rank) {
  ep_check_rank_t *k = &rank->rank;
  const ep_library_t *lib = k->lib;
  const ep_check_group_t *g = k->group;
  ncclEpPreflight_t said = NCCL_EP_PREFLIGHT_INIT, used = NCCL_EP_PREFLIGHT_INIT;
  ncclEpGroupConfig_t config = configOf(g);
  k->doing = "ncclEpPreflight";
  EP_TRY_EP(k, lib->ncclEpPreflight(&config, epLayoutOf(g->handles[0].mode), NULL, g->shape.topk,
                                    g->shape.numRanks, g->shape.ranksPerNode, &said));
  EP_CHECK(said.supported, TREFOIL_INTERNAL_ERROR, "%s", said.reason);
  k->doing = "ncclEpMemoryInUse";
  EP_TRY_EP(k, lib->ncclEpMemoryInUse(k->epGroup, &used));
#define SAME(field)                                                                                \
  EP_CHECK(said.field == used.field, TREFOIL_INTERNAL_ERROR,                                       \
           #field ": %zu bytes said, %zu in use", said.field, used.field)
  SAME(group_device_bytes);
  SAME(group_shared_bytes);
  SAME(group_host_bytes);
  SAME(handle_device_bytes);
  SAME(handle_shared_bytes);
#undef SAME
  if (k->rank == 0)
    printf(
        "hidden %zu, %lld tokens, top-%d of %d, %d ranks: group %.2f MB, handle %.2f MB of device "
        "memory\n",
        g->maxTokenBytes / 2, (long long)g->shape.maxTokens, g->shape.topk, g->shape.numExperts,
        g->shape.numRanks, 1e-6 * (double)(used.group_device_bytes + used.group_shared_bytes),
        1e-6 * (double)(used.handle_device_bytes + used.handle_shared_bytes));
  size_t all = used.group_device_bytes + used.group_shared_bytes + used.handle_device_bytes +
               used.handle_shared_bytes;
  size_t most = g->shape.maxTokens == 128 ? 64000000 : g->shape.maxTokens == 4096 ? 300000000 : all;
  int isGoal = !gpuIsCpuLibrary() && g->shape.ranksPerNode == g->shape.numRanks;
  EP_CHECK(!isGoal || all <= most, TREFOIL_INTERNAL_ERROR,
           "%zu bytes of device memory: at most %zu", all, most);
  return TREFOIL_OK;
}

static void memory(int numRanks, trefoil_mode_t mode, int64_t maxTokens) {
  ep_check_group_t g = gpuGroup(numRanks, maxTokens, 14336);
  g.shape.numExperts = 256;
  g.shape.topk = 8;
  g.numHandles = 1;
  g.handles[0] = (ep_check_handle_t){.mode = mode, .topk = 8, .initTopk = 8, .shareWith = -1};
  if (mode == TREFOIL_HT_FLAT || mode == TREFOIL_HT_EXPERT_MAJOR) {
    g.highThroughput = 1;
    g.numTopk = 8;
    g.maxRecv = maxTokens * numRanks * (mode == TREFOIL_HT_FLAT ? 1 : 8);
  }
  gpu_run_t run = {.group = &g, .work = compareMemory};
  epBatchEnvironment(&g);
  gpuRun(&run, numRanks);
  CHECK(!*run.failure, "%s", run.failure);
}

TEST(memory_is_what_the_preflight_says) {
  GPU_RANKS(R, 1);
  memory(R, TREFOIL_LL_EXPERT_MAJOR, 128);
  memory(R, TREFOIL_LL_RANK_MAJOR, 128);
  memory(R, TREFOIL_LL_EXPERT_MAJOR, 1);
  memory(R, TREFOIL_HT_FLAT, 4096);
  memory(R, TREFOIL_HT_EXPERT_MAJOR, 4096);
  memory(R, TREFOIL_HT_FLAT, 1);
}

/* ---- Kernel times ---- */

static trefoil_result_t readTimes(gpu_rank_t *rank) {
  ep_check_rank_t *k = &rank->rank;
  const ep_library_t *lib = k->lib;
  const counted_t *counted = rank->run->context;
  enum { ROOM = 64 };
  ncclEpKernelTime_t times[ROOM];
  unsigned count = ROOM;
  EP_CHECK(lib->ncclEpKeepTimes && lib->ncclEpReadTimes, TREFOIL_INTERNAL_ERROR,
           "the library has no ncclEpKeepTimes");
  ncclResult_t rc = lib->ncclEpKeepTimes(k->epGroup, ROOM);
  if (gpuIsCpuLibrary()) {
    EP_CHECK(rc == ncclInvalidUsage, TREFOIL_INTERNAL_ERROR, "ncclEpKeepTimes returned %d",
             (int)rc);
    return TREFOIL_OK;
  }
  k->doing = "ncclEpKeepTimes";
  EP_TRY_EP(k, rc);
  double start = epNow();
  EP_TRY(scriptListRun(rank, counted->list, NULL));
  double waited = epNow() - start;
  k->doing = "ncclEpReadTimes";
  EP_TRY_EP(k, lib->ncclEpReadTimes(k->epGroup, times, &count, k->stream));
  int wanted =
      scriptListOps(counted->list, EP_OP_DISPATCH) + scriptListOps(counted->list, EP_OP_COMBINE);
  EP_CHECK((int)count == wanted, TREFOIL_INTERNAL_ERROR, "%u launches told, %d made", count,
           wanted);
  for (unsigned i = 0; i < count; i++) {
    EP_CHECK(times[i].kind == (int)(i % 2) && times[i].parts == 3 && times[i].numBlocks > 0,
             TREFOIL_INTERNAL_ERROR, "launch %u: kind %d, parts %d, %d blocks", i, times[i].kind,
             times[i].parts, times[i].numBlocks);
    EP_CHECK(times[i].startNs > 0 && times[i].endNs > times[i].startNs &&
                 (i == 0 || times[i].startNs >= times[i - 1].endNs),
             TREFOIL_INTERNAL_ERROR,
             "launch %u: from %llu to %llu ns, the one before ended at %llu", i,
             (unsigned long long)times[i].startNs, (unsigned long long)times[i].endNs,
             (unsigned long long)(i ? times[i - 1].endNs : 0));
  }
  double ran = 1e-9 * (double)(times[count - 1].endNs - times[0].startNs);
  EP_CHECK(ran < waited, TREFOIL_INTERNAL_ERROR, "%.6f s of launches in %.6f s", ran, waited);
  k->doing = "ncclEpKeepTimes";
  EP_TRY_EP(k, lib->ncclEpKeepTimes(k->epGroup, 0));
  return TREFOIL_OK;
}

TEST(kernel_times_are_told_in_order) {
  GPU_RANKS(R, 1);
  ep_check_group_t g = gpuGroup(R, 16, 1024);
  script_list_t list;
  static counted_t counted;
  counted.list = &list;
  gpu_run_t run = {.group = &g, .work = readTimes, .context = &counted};
  epBatchEnvironment(&g);
  REQUIRE(scriptListBegin(&list, &g, 20) == TREFOIL_OK, "%s", trefoilLastError());
  for (int i = 0; i < list.numCases; i++) {
    ep_check_case_t *c = &list.cases[i];
    REQUIRE(scriptBegin(c, &g, 300 + (uint64_t)i, 1) == TREFOIL_OK, "%s", trefoilLastError());
    scriptUpdate(c, i % 2, 0);
    scriptAdd(c, EP_OP_DISPATCH, i % 2);
    scriptAdd(c, EP_OP_COMBINE, i % 2);
    REQUIRE(scriptEnd(c) == TREFOIL_OK, "%s", trefoilLastError());
  }
  REQUIRE(scriptListExpect(&list) == TREFOIL_OK, "%s", trefoilLastError());
  gpuRun(&run, R);
  CHECK(!*run.failure, "%s", run.failure);
  scriptListFree(&list);
}

TEST_MAIN()
