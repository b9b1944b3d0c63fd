/* Preflight: its bytes are what group and handle ask for, its verdict is the group's, and the
 * nearest legal value is legal. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/object.h" /* group->allocated */
#include "team.h"
#include "test.h"

typedef struct counted {
  _Atomic size_t device;
} counted_t;

static cudaError_t countAlloc(void **p, size_t n, void *context) {
  atomic_fetch_add(&((counted_t *)context)->device, n);
  return cudaMalloc(p, n);
}

static cudaError_t countFree(void *p, void *context) {
  (void)context;
  return cudaFree(p);
}

static uint64_t state = 1;

static unsigned draw(unsigned n) {
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (unsigned)(state >> 33) % n;
}

typedef struct drawn {
  ncclEpGroupConfig_t g;
  ncclEpLayout_t layout;
  ncclEpHandleConfig_t h;
  int topk;
} drawn_t;

static drawn_t drawConfig(void) {
  drawn_t d = {NCCL_EP_GROUP_CONFIG_INIT, NCCL_EP_LAYOUT_EXPERT_MAJOR, NCCL_EP_HANDLE_CONFIG_INIT,
               0};
  int ht = (int)draw(2);
  d.g.algorithm = (ncclEpAlgorithm_t)ht;
  d.g.num_experts = 1 + draw(300);
  d.g.max_dispatch_tokens_per_rank = 1 + draw(200);
  d.g.max_token_bytes = ht ? 16 * (1 + draw(40)) : 1 + draw(600);
  d.g.max_recv_tokens_per_rank = ht && draw(2) ? 200 + draw(500) : 0;
  d.topk = 1 + (int)draw(12);
  d.g.num_topk = ht && (draw(2) || !d.g.max_recv_tokens_per_rank) ? (unsigned)d.topk + draw(3) : 0;
  if (ht && draw(4) == 0) d.topk = -1;
  d.h.dispatch_output_per_expert_alignment = draw(2) ? (size_t)1 << draw(7) : 0;
  if (draw(2)) d.layout = ht ? NCCL_EP_LAYOUT_FLAT : NCCL_EP_LAYOUT_RANK_MAJOR;
  return d;
}

/* One configuration: preflight's six numbers against what a group and a handle of it took. Every
 * rank compares its own. */
static void compareOne(team_rank_t *r, drawn_t d, int perNode, int i) {
  counted_t counted = {0};
  ncclEpPreflight_t p = NCCL_EP_PREFLIGHT_INIT;
  ncclEpGroup_t group;
  ncclEpHandle_t handle;
  d.g.alloc.alloc_fn = countAlloc;
  d.g.alloc.free_fn = countFree;
  d.g.alloc.context = &counted;
  d.g.timeout_ns = 20000000000u; /* a rank that finds a difference leaves the others waiting */
  teamOk(r, ncclEpPreflight(&d.g, d.layout, &d.h, d.topk, r->numRanks, perNode, &p));
  teamCheck(r, p.supported, "case %d: %s", i, p.reason);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &d.g));
  teamOk(r, ncclEpInitHandle(&handle, group, d.layout, &d.h, d.topk, NULL));
  size_t(*a)[3] = group->allocated;
  teamCheck(r, counted.device == p.group_device_bytes + p.handle_device_bytes,
            "case %d: the allocator gave %zu, preflight says %zu + %zu", i, counted.device,
            p.group_device_bytes, p.handle_device_bytes);
  teamCheck(r,
            a[0][0] == p.group_device_bytes && a[0][1] == p.group_shared_bytes &&
                a[0][2] == p.group_host_bytes && a[1][0] == p.handle_device_bytes &&
                a[1][1] == p.handle_shared_bytes && a[1][2] == p.handle_host_bytes,
            "case %d: took %zu %zu %zu / %zu %zu %zu, preflight says %zu %zu %zu / %zu %zu %zu", i,
            a[0][0], a[0][1], a[0][2], a[1][0], a[1][1], a[1][2], p.group_device_bytes,
            p.group_shared_bytes, p.group_host_bytes, p.handle_device_bytes, p.handle_shared_bytes,
            p.handle_host_bytes);
  size_t size = 0;
  teamOk(r, ncclEpHandleMemSize(group, d.layout, &d.h, &size, d.topk));
  teamCheck(r, size == p.handle_device_bytes, "case %d: HandleMemSize %zu", i, size);
  teamOk(r, ncclEpHandleDestroy(handle));
  teamCheck(r, a[1][0] == 0 && a[1][2] == 0, "case %d: the handle gave not all back", i);
  teamOk(r, ncclEpGroupDestroy(group));
}

/* The same configurations on every rank, drawn before the ranks start. */
typedef struct drawn_cases {
  int numCases, perNode;
  drawn_t *cases;
} drawn_cases_t;

static void compareAll(team_rank_t *r) {
  drawn_cases_t *all = r->user;
  for (int i = 0; i < all->numCases && !r->error[0]; i++)
    compareOne(r, all->cases[i], all->perNode, i);
}

static void compareBytes(int numRanks, int perNode, int numCases) {
  drawn_cases_t all = {numCases, perNode, calloc((size_t)numCases, sizeof *all.cases)};
  REQUIRE(all.cases, "out of memory");
  for (int i = 0; i < numCases; i++) all.cases[i] = drawConfig();
  char text[12];
  snprintf(text, sizeof text, "%d", perNode);
  setenv("NCCL_LSA_TEAM_SIZE", text, 1);
  const char *error = teamThreads(numRanks, compareAll, &all);
  unsetenv("NCCL_LSA_TEAM_SIZE");
  CHECK(!*error, "%d ranks, %d a node: %s", numRanks, perNode, error);
  free(all.cases);
}

TEST(bytes_are_what_is_allocated) {
  compareBytes(1, 1, 2000);
}

/* Every number of ranks to 8 and every node that divides it. */
TEST(bytes_on_several_ranks) {
  for (int ranks = 2; ranks <= 8; ranks++) {
    for (int perNode = 1; perNode <= ranks; perNode++) {
      if (ranks % perNode == 0) compareBytes(ranks, perNode, 100);
    }
  }
}

/* One field out of range at a time: refused by name, and the nearest value makes it legal. */
TEST(nearest_value_is_legal) {
  for (int i = 0; i < 4000; i++) {
    drawn_t d = drawConfig();
    int ranks = 1 + (int)draw(8), perNode = ranks;
    ncclEpPreflight_t p = NCCL_EP_PREFLIGHT_INIT;
    int field = (int)draw(8), ht = d.g.algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT;
    if (field == 0) d.g.num_experts = draw(2) ? 0 : 1u << 31;
    if (field == 1) d.g.max_dispatch_tokens_per_rank = draw(2) ? 0 : 1u << 30;
    if (field == 2) d.g.max_token_bytes = ht ? 1 + draw(15) + 16 * draw(2) : 0;
    if (field == 3) perNode = ranks + 1;
    if (field == 4) d.topk = 0;
    if (field == 5) d.h.dispatch_output_per_expert_alignment = 24 + draw(7);
    if (field == 6) d.layout = ht ? NCCL_EP_LAYOUT_RANK_MAJOR : NCCL_EP_LAYOUT_FLAT;
    if (field == 7) ranks = perNode = -3;
    for (int tries = 0; tries < 3; tries++) {
      REQUIRE(ncclEpPreflight(&d.g, d.layout, &d.h, d.topk, ranks, perNode, &p) == ncclSuccess,
              "%s", ncclEpGetLastError());
      if (tries == 0) CHECK(!p.supported, "field %d was taken", field);
      if (p.supported) break;
      CHECK(p.reason[0] && p.nearest > 0, "field %d: %s", field, p.reason);
      if (!strcmp(p.limit, "num_experts")) d.g.num_experts = (unsigned)p.nearest;
      if (!strcmp(p.limit, "max_dispatch_tokens_per_rank"))
        d.g.max_dispatch_tokens_per_rank = (unsigned)p.nearest;
      if (!strcmp(p.limit, "max_recv_tokens_per_rank"))
        d.g.max_recv_tokens_per_rank = (unsigned)p.nearest;
      if (!strcmp(p.limit, "max_token_bytes")) d.g.max_token_bytes = (unsigned)p.nearest;
      if (!strcmp(p.limit, "ranks_per_node")) perNode = (int)p.nearest;
      if (!strcmp(p.limit, "num_ranks")) ranks = perNode = (int)p.nearest;
      if (!strcmp(p.limit, "num_topk")) d.topk = (int)p.nearest;
      if (!strcmp(p.limit, "dispatch_output_per_expert_alignment"))
        d.h.dispatch_output_per_expert_alignment = (size_t)p.nearest;
      if (!strcmp(p.limit, "layout")) d.layout = (ncclEpLayout_t)p.nearest;
    }
    CHECK(p.supported, "field %d: still refused: %s", field, p.reason);
  }
}

/* Eager sizing bounds expert-major slots by the top-k, so one must be named. */
TEST(eager_expert_major_needs_a_top_k) {
  ncclEpGroupConfig_t g = NCCL_EP_GROUP_CONFIG_INIT;
  g.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
  g.num_experts = 8;
  g.max_dispatch_tokens_per_rank = 4;
  g.max_token_bytes = 64;
  for (int i = 0; i < 8; i++) {
    ncclEpLayout_t layout = i & 1 ? NCCL_EP_LAYOUT_EXPERT_MAJOR : NCCL_EP_LAYOUT_FLAT;
    g.num_topk = i & 2 ? 3 : 0;
    g.max_recv_tokens_per_rank = i & 4 ? 100 : 0;
    ncclEpPreflight_t p = NCCL_EP_PREFLIGHT_INIT;
    REQUIRE(ncclEpPreflight(&g, layout, NULL, -1, 2, 2, &p) == ncclSuccess, "%s",
            ncclEpGetLastError());
    CHECK(p.supported == (i != 1), "case %d: %s", i, p.reason);
    if (i == 1) CHECK(strstr(p.reason, "num_topk"), "%s", p.reason);
  }
}

TEST(uneven_nodes_are_told_of_their_domains) {
  drawn_t d = drawConfig();
  ncclEpPreflight_t p = NCCL_EP_PREFLIGHT_INIT;
  REQUIRE(ncclEpPreflight(&d.g, d.layout, &d.h, d.topk, 6, 4, &p) == ncclSuccess, "%s",
          ncclEpGetLastError());
  CHECK(!p.supported && strstr(p.reason, "of the greatest common divisor, here 2"), "%s", p.reason);
}

TEST(bad_calls) {
  drawn_t d = drawConfig();
  ncclEpPreflight_t p = NCCL_EP_PREFLIGHT_INIT;
  CHECK(ncclEpPreflight(NULL, d.layout, NULL, 2, 2, 2, &p) == ncclInvalidArgument, "NULL config");
  CHECK(ncclEpPreflight(&d.g, d.layout, NULL, 2, 2, 2, NULL) == ncclInvalidArgument, "NULL out");
  p.magic = 0;
  CHECK(ncclEpPreflight(&d.g, d.layout, NULL, 2, 2, 2, &p) == ncclInvalidArgument, "magic");
}

TEST_MAIN()
