/* What `trefoil simulate` says of memory is what a group and a handle take: of the GPU library (EMULATED)
 * within a node and between nodes; of the CPU library where the other does not take the shape. */
#include <stdlib.h>
#include <string.h>

#include "api/object.h" /* group->allocated */
#include "cli/memory_need.h"
#include "team.h"
#include "test.h"

enum { NUM_RANKS = 2 };
#ifdef EMULATED
#define LIBRARY "gpu"
static const trefoil_shape_t shapes[] = {{NUM_RANKS, 1, 4, 2, 8},
                                         {NUM_RANKS, 1, 61, 7, 33},
                                         {NUM_RANKS, 2, 4, 2, 8},
                                         {NUM_RANKS, 2, 61, 7, 33}};
#else
#define LIBRARY "cpu" /* a top-k over 64 */
static const trefoil_shape_t shapes[] = {{NUM_RANKS, 1, 66, 65, 8}, {NUM_RANKS, 1, 131, 70, 33}};
#endif
enum { NUM_SHAPES = sizeof shapes / sizeof *shapes };

static int perNode; /* of the communicator */

typedef struct needed {
  trefoil_mode_t mode;
  ncclEpLayout_t layout;
  trefoil_shape_t shape;
  size_t rowBytes;
} needed_t;

static void compareOne(team_rank_t *r, const needed_t *n) {
  const trefoil_predict_spec_t spec = {
      .mode = n->mode, .dispatchRowBytes = n->rowBytes, .combineRowBytes = n->rowBytes};
  int ht = n->mode == TREFOIL_HT_FLAT || n->mode == TREFOIL_HT_EXPERT_MAJOR;
  memory_need_t need;
  memoryNeed(&spec, &n->shape, 64, &need);
  teamCheck(r, need.known && !strcmp(need.library, LIBRARY), "library %s: %s", need.library,
            need.why);
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.algorithm = ht ? NCCL_EP_ALGO_HIGH_THROUGHPUT : NCCL_EP_ALGO_LOW_LATENCY;
  config.num_experts = (unsigned)n->shape.numExperts;
  config.max_dispatch_tokens_per_rank = (unsigned)n->shape.maxTokens;
  config.max_token_bytes = (unsigned)n->rowBytes;
  config.max_recv_tokens_per_rank = ht ? 64 : 0;
  config.timeout_ns = 20000000000u;
  ncclEpGroup_t group;
  ncclEpHandle_t handle;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&handle, group, n->layout, NULL, n->shape.topk, NULL));
  for (int i = 0; i < 6; i++)
    teamCheck(r, group->allocated[i / 3][i % 3] == need.totals[i / 3][i % 3],
              "%s, %d experts, top-%d: %s, memory %d: %zu bytes are taken, %zu were said",
              trefoilModeName(n->mode), n->shape.numExperts, n->shape.topk,
              i < 3 ? "group" : "handle", i % 3, group->allocated[i / 3][i % 3],
              need.totals[i / 3][i % 3]);
  teamOk(r, ncclEpHandleDestroy(handle));
  teamOk(r, ncclEpGroupDestroy(group));
}

static void compareAll(team_rank_t *r) {
  static const struct {
    trefoil_mode_t mode;
    ncclEpLayout_t layout;
  } modes[] = {{TREFOIL_LL_EXPERT_MAJOR, NCCL_EP_LAYOUT_EXPERT_MAJOR},
               {TREFOIL_LL_RANK_MAJOR, NCCL_EP_LAYOUT_RANK_MAJOR},
               {TREFOIL_HT_FLAT, NCCL_EP_LAYOUT_FLAT},
               {TREFOIL_HT_EXPERT_MAJOR, NCCL_EP_LAYOUT_EXPERT_MAJOR}};
  static const size_t rowBytes[] = {512, 7168};
  for (int m = 0; m < 4; m++)
    for (int s = 0; s < NUM_SHAPES && !r->error[0]; s++) {
      const needed_t n = {modes[m].mode, modes[m].layout, shapes[s], rowBytes[s % 2]};
      if (n.shape.ranksPerNode == perNode) compareOne(r, &n);
    }
}

static void saidIsTaken(int ranksPerNode) {
  perNode = ranksPerNode;
  setenv("NCCL_LSA_TEAM_SIZE", perNode == 1 ? "1" : "2", 1);
  const char *error = teamThreads(NUM_RANKS, compareAll, NULL);
  unsetenv("NCCL_LSA_TEAM_SIZE");
  CHECK(!*error, "%s", error);
}

TEST(memory_said_between_nodes_is_memory_taken) {
  saidIsTaken(1);
}

static size_t bytesOf(trefoil_mode_t mode, int ranks, const char *library) {
  const trefoil_predict_spec_t spec = {
      .mode = mode, .dispatchRowBytes = 14336, .combineRowBytes = 14336};
  const trefoil_shape_t shape = {ranks, 8, 4 * ranks, 8, 128};
  memory_need_t need;
  memoryNeed(&spec, &shape, 1024, &need);
  CHECK(need.known && !strcmp(need.library, library), "%d ranks: library %s, not %s: %s", ranks,
        need.library, library, need.why);
  size_t sum = 0;
  for (int i = 0; i < 6; i++) sum += need.totals[i / 3][i % 3];
  return sum;
}

/* Another node's ranks take in low latency what the last node's did, also past what the kernels take. */
TEST(memory_of_more_ranks_than_kernels_take) {
  static const trefoil_mode_t modes[] = {TREFOIL_LL_EXPERT_MAJOR, TREFOIL_LL_RANK_MAJOR};
  for (int m = 0; m < 2; m++) {
    size_t last = bytesOf(modes[m], 64, "gpu"), step = last - bytesOf(modes[m], 56, "gpu");
    for (int ranks = 72; ranks <= 256; ranks += 8) {
      size_t bytes = bytesOf(modes[m], ranks, "gpu-formula");
      CHECK(bytes + 4096 > last + step && bytes < last + step + 4096,
            "%d ranks: %zu bytes, %zu and %zu before", ranks, bytes, last, step);
      last = bytes;
    }
  }
  bytesOf(TREFOIL_HT_FLAT, 64, "gpu");
  bytesOf(TREFOIL_HT_FLAT, 72, "cpu");
}

#ifdef EMULATED
TEST(memory_said_within_a_node_is_memory_taken) {
  saidIsTaken(2);
}
#endif

TEST_MAIN()
