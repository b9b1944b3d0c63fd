/* Back to back: thousands of random operations, data and routing changed each time, without the host
 * waiting once; the same with ranks held up at random; calls that return while nothing can run; more
 * handles than operations in flight; two operations in flight at once. Every byte of every operation is
 * compared at the end. */
#include "test.h"

#include "gpu_script.h"
#include "plan/error.h"
#include "validate/checker.h"
#include "validate/gpu_tools.h"

#include <time.h>

typedef struct burst {
  script_list_t *list;
  script_before_t before;
  ncclEpHandle_t (*pool)[EP_MAX_RANKS]; /* [handle][rank], or NULL */
  int numPool;
} burst_t;

static trefoil_result_t runBurst(gpu_rank_t *rank) {
  const burst_t *b = rank->run->context;
  return scriptListRun(rank, b->list, b->before);
}

/* Up to 5 ms on the device, or on the host, at one operation in sixty-four or so. */
static trefoil_result_t holdUp(gpu_rank_t *rank, const script_list_t *list, int caseIdx,
                               int opIdx) {
  (void)list;
  uint64_t dice =
      epMix((uint64_t)caseIdx * 64 + (uint64_t)opIdx + ((uint64_t)rank->rank.rank << 40));
  int64_t ns = (int64_t)(dice >> 20) % 5000000;
  if (dice % 128 == 0 && !gpuIsHost() && epGpuToolsBuilt())
    return epGpuDelay((uint64_t)ns, rank->rank.stream);
  if (dice % 128 != 1) return TREFOIL_OK;
  struct timespec pause = {0, ns};
  nanosleep(&pause, NULL);
  return TREFOIL_OK;
}

typedef struct burst_shape {
  int numCases, partial, highThroughput;
  int64_t maxTokens;
  size_t maxTokenBytes;
} burst_shape_t;

static void burst(int numRanks, const burst_shape_t *shape, uint64_t seed, script_before_t before) {
  ep_check_group_t g = (shape->highThroughput ? gpuGroupHt : gpuGroup)(numRanks, shape->maxTokens,
                                                                       shape->maxTokenBytes);
  int numCases = shape->numCases;
  script_list_t list;
  burst_t context = {&list, before, NULL, 0};
  gpu_run_t run = {.group = &g, .work = runBurst, .context = &context};
  g.partial = shape->partial;
  epBatchEnvironment(&g);
  REQUIRE(scriptListBegin(&list, &g, numCases) == TREFOIL_OK, "%s", trefoilLastError());
  REQUIRE(scriptListGenerate(&list, seed) == TREFOIL_OK, "%s", trefoilLastError());
  REQUIRE(scriptListExpect(&list) == TREFOIL_OK, "%s", trefoilLastError());
  gpuRun(&run, numRanks);
  CHECK(!*run.failure, "%s", run.failure);
  printf("%d ranks: %d scripts, %d dispatches and %d combines without waiting, %zu MB compared\n",
         numRanks, numCases, scriptListOps(&list, EP_OP_DISPATCH),
         scriptListOps(&list, EP_OP_COMBINE), (list.offsets[numCases] >> 20) * (size_t)numRanks);
  scriptListFree(&list);
}

TEST(ten_thousand_back_to_back) {
  GPU_RANKS(R, 1);
  burst(R, &(burst_shape_t){gpuScaled(10000, 600), 0, 0, 4, 128}, 1, NULL);
}

TEST(ten_thousand_with_partial_sums) {
  GPU_RANKS(R, 2);
  burst(R, &(burst_shape_t){gpuScaled(10000, 300), 1, 0, 4, 128}, 2, NULL);
}

TEST(ranks_are_held_up_at_random) {
  GPU_RANKS(R, 2);
  burst(R, &(burst_shape_t){gpuScaled(2000, 200), 0, 0, 4, 128}, 3, holdUp);
}

TEST(wide_rows_back_to_back) {
  GPU_RANKS(R, 1);
  burst(R, &(burst_shape_t){gpuScaled(300, 30), 0, 0, 12, 1056}, 4, NULL);
  burst(R, &(burst_shape_t){gpuScaled(100, 10), 0, 0, 12, 14784}, 5, NULL);
}

TEST(high_throughput_back_to_back) {
  GPU_RANKS(R, 1);
  burst(R, &(burst_shape_t){gpuScaled(4000, 200), 0, 1, 8, 128}, 6, NULL);
  burst(R, &(burst_shape_t){gpuScaled(1000, 100), 0, 1, 8, 128}, 7, holdUp);
  burst(R, &(burst_shape_t){gpuScaled(200, 20), 0, 1, 40, 2064}, 8, NULL);
}

/* ---- Calls return while the stream stands still ---- */

enum { HELD_SECONDS = 8 };

static struct held {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  int isReleased, timedOut;
} heldRanks[EP_MAX_RANKS];

/* In stream order: until the rank has made its last call but one, or too long. */
static void CUDART_CB hold(void *argument) {
  struct held *h = argument;
  struct timespec limit;
  clock_gettime(CLOCK_REALTIME, &limit);
  limit.tv_sec += HELD_SECONDS;
  pthread_mutex_lock(&h->mutex);
  while (!h->isReleased && !h->timedOut)
    h->timedOut = pthread_cond_timedwait(&h->changed, &h->mutex, &limit) != 0;
  pthread_mutex_unlock(&h->mutex);
}

static trefoil_result_t holdAllButTheLast(gpu_rank_t *rank, const script_list_t *list, int caseIdx,
                                          int opIdx) {
  struct held *h = &heldRanks[rank->rank.rank];
  ep_check_rank_t *k = &rank->rank;
  if (caseIdx == 0 && opIdx == 0) {
    k->doing = "cudaLaunchHostFunc";
    EP_TRY_CUDA(k, k->lib->cudaLaunchHostFunc(k->stream, hold, h));
  }
  int last = list->numCases - 1;
  if (caseIdx < last || opIdx < list->cases[last].numOps - 1) return TREFOIL_OK;
  pthread_mutex_lock(&h->mutex);
  int timedOut = h->timedOut;
  h->isReleased = 1;
  pthread_cond_broadcast(&h->changed);
  pthread_mutex_unlock(&h->mutex);
  EP_CHECK(!timedOut, TREFOIL_INTERNAL_ERROR, "a call returned only when the stream went on");
  return TREFOIL_OK;
}

/* So few that all of them can be queued: CUDA takes about a thousand. */
TEST(calls_return_while_the_stream_is_held) {
  GPU_RANKS(R, 1);
  for (int ht = 0; ht < 2; ht++) {
    for (int r = 0; r < EP_MAX_RANKS; r++) {
      heldRanks[r] = (struct held){.isReleased = 0};
      pthread_mutex_init(&heldRanks[r].mutex, NULL);
      pthread_cond_init(&heldRanks[r].changed, NULL);
    }
    burst(R, &(burst_shape_t){24, 0, ht, 8, 128}, 40 + (uint64_t)ht, holdAllButTheLast);
  }
}

/* Marks repeat after 2^32 - 2 operations, and buffers are cleared each 2^30: from a few operations before
 * each such place to some hundred after it. */
TEST(operation_numbers_wrap) {
  GPU_RANKS(R, 2);
  if (gpuIsCpuLibrary())
    SKIP("on GPUs alone: operations of the CPU library have no marks that could wrap");
  const uint64_t places[] = {1ull << 30, 1ull << 31,        3ull << 30, 0xfffffffeull,
                             1ull << 32, 2 * 0xfffffffeull, 1ull << 40};
  for (size_t i = 0; i < 3 * sizeof places / sizeof *places; i++) {
    char number[32];
    snprintf(number, sizeof number, "%llu", (unsigned long long)(places[i / 3] - 2 - i % 3));
    setenv("TREFOIL_TEST_FIRST_OPERATION", number, 1);
    burst(R, &(burst_shape_t){gpuScaled(100, 100), 0, 0, 4, 128}, 20 + i, NULL);
  }
  unsetenv("TREFOIL_TEST_FIRST_OPERATION");
}

/* ---- Two operations in flight ---- */

/* Both dispatches are sent before either is received, completed in either order; the combines likewise,
 * one of them with a dispatch of the other handle in between. */
static trefoil_result_t inFlight(ep_check_case_t *c, uint64_t dice) {
  int a = (int)(dice & 1), b = 1 - a, crossed = (int)(dice >> 1 & 1);
  scriptUpdate(c, a, 0);
  scriptUpdate(c, b, 1);
  scriptAdd(c, EP_OP_DISPATCH, a)->sendOnly = 1;
  scriptAdd(c, EP_OP_DISPATCH, b)->sendOnly = 1;
  scriptAdd(c, EP_OP_COMPLETE, crossed ? b : a);
  scriptAdd(c, EP_OP_COMPLETE, crossed ? a : b);
  scriptAdd(c, EP_OP_COMBINE, a)->sendOnly = 1;
  if (dice >> 2 & 1) {
    scriptAdd(c, EP_OP_DISPATCH, b)->sendOnly = 1;
    scriptAdd(c, EP_OP_COMPLETE, b);
  }
  scriptAdd(c, EP_OP_COMBINE, b)->sendOnly = 1;
  scriptAdd(c, EP_OP_COMPLETE, dice >> 3 & 1 ? b : a);
  scriptAdd(c, EP_OP_COMPLETE, dice >> 3 & 1 ? a : b);
  return scriptEnd(c);
}

TEST(two_operations_in_flight) {
  GPU_RANKS(R, 2);
  ep_check_group_t g = gpuGroup(R, 6, 256);
  script_list_t list;
  burst_t context = {&list, holdUp, NULL, 0};
  gpu_run_t run = {.group = &g, .work = runBurst, .context = &context};
  epBatchEnvironment(&g);
  REQUIRE(scriptListBegin(&list, &g, gpuScaled(1000, 200)) == TREFOIL_OK, "%s", trefoilLastError());
  for (int i = 0; i < list.numCases; i++)
    REQUIRE(scriptBegin(&list.cases[i], &g, (uint64_t)i, 1) == TREFOIL_OK &&
                inFlight(&list.cases[i], epMix((uint64_t)i)) == TREFOIL_OK,
            "%s", trefoilLastError());
  REQUIRE(scriptListExpect(&list) == TREFOIL_OK, "%s", trefoilLastError());
  gpuRun(&run, R);
  CHECK(!*run.failure, "%s", run.failure);
  scriptListFree(&list);
}

/* ---- Many handles ---- */

enum { NUM_POOL = 96 };
static ncclEpHandle_t pool[NUM_POOL][EP_MAX_RANKS];

static trefoil_result_t takeFromPool(gpu_rank_t *rank, const script_list_t *list, int caseIdx,
                                     int opIdx) {
  (void)list, (void)opIdx;
  rank->rank.handles[0] = pool[(caseIdx * 7 + opIdx / 3) % NUM_POOL][rank->rank.rank];
  return TREFOIL_OK;
}

static trefoil_result_t runPool(gpu_rank_t *rank) {
  ep_check_rank_t *k = &rank->rank;
  const burst_t *b = rank->run->context;
  ncclEpHandle_t first = k->handles[0];
  for (int i = 0; i < NUM_POOL; i++) {
    k->doing = "ncclEpInitHandle";
    EP_TRY_EP(k,
              k->lib->ncclEpInitHandle(&pool[i][k->rank], k->epGroup, NCCL_EP_LAYOUT_EXPERT_MAJOR,
                                       NULL, k->group->shape.topk, NULL));
  }
  EP_TRY(scriptListRun(rank, b->list, takeFromPool));
  k->handles[0] = first;
  k->doing = "ncclEpHandleDestroy";
  for (int i = 0; i < NUM_POOL; i++) EP_TRY_EP(k, k->lib->ncclEpHandleDestroy(pool[i][k->rank]));
  return TREFOIL_OK;
}

TEST(many_handles_of_one_group) {
  GPU_RANKS(R, 2);
  ep_check_group_t g = gpuGroup(R, 4, 128);
  script_list_t list;
  burst_t context = {&list, NULL, pool, NUM_POOL};
  gpu_run_t run = {.group = &g, .work = runPool, .context = &context};
  epBatchEnvironment(&g);
  REQUIRE(scriptListBegin(&list, &g, gpuScaled(3 * NUM_POOL, 3 * NUM_POOL)) == TREFOIL_OK, "%s",
          trefoilLastError());
  for (int i = 0; i < list.numCases; i++) {
    ep_check_case_t *c = &list.cases[i];
    REQUIRE(scriptBegin(c, &g, (uint64_t)i, 1) == TREFOIL_OK, "%s", trefoilLastError());
    for (int again = 0; again < 2; again++) { /* two handles of the pool, each bound anew */
      scriptUpdate(c, 0, again);
      scriptAdd(c, EP_OP_DISPATCH, 0);
      scriptAdd(c, EP_OP_COMBINE, 0);
    }
    REQUIRE(scriptEnd(c) == TREFOIL_OK, "%s", trefoilLastError());
  }
  REQUIRE(scriptListExpect(&list) == TREFOIL_OK, "%s", trefoilLastError());
  gpuRun(&run, R);
  CHECK(!*run.failure, "%s", run.failure);
  scriptListFree(&list);
}

/* ---- Every bit pattern ---- */

enum { PATTERNS_BYTES = 4096 };

/* Counting 16-bit words, or 32-bit ones near zero and near the top, where marks of a protocol are: the rows
 * of a case go on where those of the case before it ended. */
static void allPatterns(const ep_check_case_t *c, int caseIdx, int rank, uint8_t *image) {
  for (int i = 0; i < c->numOps; i++) {
    const ep_check_op_t *op = &c->ops[i];
    if (op->kind != EP_OP_DISPATCH && op->kind != EP_OP_COMBINE) continue;
    ep_check_dims_t d;
    epTensorDims(c, op, EP_T_IN_TOKENS, rank, &d);
    uint8_t *rows = image + c->regions[op->region[EP_T_IN_TOKENS]].offset;
    for (size_t at = 0; at + 4 <= d.bytes; at += 4) {
      uint32_t n = (uint32_t)(at / 4) + (uint32_t)caseIdx * 1021u;
      uint32_t low = (2 * n) & 0xffff, high = (2 * n + 1) & 0xffff;
      uint32_t word = caseIdx % 2 == 0 ? low | high << 16 : n & 1 ? 0u - (n & 0xfff) : n & 0xfff;
      memcpy(rows + at, &word, 4);
    }
  }
}

TEST(every_bit_pattern_of_a_payload) {
  GPU_RANKS(R, 1);
  ep_check_group_t g = gpuGroup(R, 32, PATTERNS_BYTES);
  if (R > 4) g.imageBytes *= 2; /* a slot for each row of each rank */
  script_list_t list;
  burst_t context = {&list, NULL, NULL, 0};
  gpu_run_t run = {.group = &g, .work = runBurst, .context = &context};
  epBatchEnvironment(&g);
  REQUIRE(scriptListBegin(&list, &g, gpuScaled(32, 8)) == TREFOIL_OK, "%s", trefoilLastError());
  list.change = allPatterns;
  for (int i = 0; i < list.numCases; i++) {
    ep_check_case_t *c = &list.cases[i];
    uint64_t seed = (uint64_t)i * 1000;
    do { /* a full rank 0: 32 rows of 2048 words are 65536 patterns */
      epFreeCase(c);
      REQUIRE(scriptBegin(c, &g, seed++, 1) == TREFOIL_OK, "%s", trefoilLastError());
    } while (c->routings[0].numTokens[0] < 32);
    int handle = i / 2 % 2; /* expert-major, rank-major */
    scriptUpdate(c, handle, 0);
    scriptAdd(c, EP_OP_DISPATCH, handle);
    scriptAdd(c, EP_OP_COMBINE, handle);
    REQUIRE(scriptEnd(c) == TREFOIL_OK, "%s", trefoilLastError());
  }
  REQUIRE(scriptListExpect(&list) == TREFOIL_OK, "%s", trefoilLastError());
  static uint8_t seen[65536];
  memset(seen, 0, sizeof seen);
  const ep_check_case_t *c = &list.cases[0];
  const uint8_t *rows = list.initial[0][0] + c->regions[c->ops[1].region[EP_T_IN_TOKENS]].offset;
  for (int i = 0; i < 32 * PATTERNS_BYTES; i += 2) seen[rows[i] | rows[i + 1] << 8] = 1;
  int distinct = 0;
  for (int i = 0; i < 65536; i++) distinct += seen[i];
  CHECK(distinct == 65536, "the payload has %d patterns", distinct);
  gpuRun(&run, R);
  CHECK(!*run.failure, "%s", run.failure);
  scriptListFree(&list);
}

TEST_MAIN()
