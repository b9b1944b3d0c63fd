/* What `trefoil simulate` says of memory is what a group and a handle take: of the GPU library (with EMULATED)
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

#ifdef EMULATED
TEST(memory_said_within_a_node_is_memory_taken) {
  saidIsTaken(2);
}
#endif

TEST_MAIN()
