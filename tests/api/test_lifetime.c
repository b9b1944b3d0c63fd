/* Who owns what for how long: live handles keep their group, a caller's allocator gets every block back,
 * and older structs are read no further than they say. */
#include <pthread.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#include "test.h"
#include "team.h"

static ncclEpGroupConfig_t smallGroup(void) {
  ncclEpGroupConfig_t g = NCCL_EP_GROUP_CONFIG_INIT;
  g.num_experts = 4;
  g.max_dispatch_tokens_per_rank = 4;
  g.max_token_bytes = 64;
  return g;
}

static void liveHandle(team_rank_t *r) {
  ncclEpGroupConfig_t config = smallGroup();
  ncclEpGroup_t group;
  ncclEpHandle_t handle;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, 2, NULL));
  teamCheck(r, ncclEpGroupDestroy(group) == ncclInvalidUsage, "a group with a handle went");
  teamCheck(r, strstr(ncclEpGetLastError(), "1 handle"), "%s", ncclEpGetLastError());
  teamOk(r, ncclEpHandleDestroy(handle)); /* the group is as it was */
  teamOk(r, ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_RANK_MAJOR, NULL, 2, NULL));
  teamOk(r, ncclEpHandleDestroy(handle));
  teamOk(r, ncclEpGroupDestroy(group));
}

TEST(live_handles_keep_the_group) {
  const char *error = teamThreads(2, liveHandle, NULL);
  CHECK(!*error, "%s", error);
}

/* The communicator goes first: calls say so, also where its windows were another process's memory, and even
 * if a new communicator has taken the old one's place. */
static void commFirst(team_rank_t *r) {
  ncclEpGroupConfig_t config = smallGroup();
  ncclEpGroup_t group;
  ncclEpHandle_t handle;
  int32_t ids[2] = {0, 1};
  size_t sizes[2] = {1, 2};
  ncclEpTensor_t idx = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, .datatype = ncclInt32,
                        .sizes = sizes};
  ncclComm_t old = NULL;
  idx.data = ids;
  teamPin(r, ids, sizeof ids);
  teamCheck(r, ncclCommSplit(r->comm, 0, r->rank, &old, NULL) == ncclSuccess, "split");
  teamOk(r, ncclEpCreateGroup(&group, old, &config));
  teamOk(r, ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, 2, NULL));
  teamBarrier(r);
  ncclCommDestroy(old);
  for (int again = 0; again < 2; again++) {
    ncclResult_t result = ncclEpUpdateHandle(handle, &idx, NULL, r->stream);
    const char *why = ncclEpGetLastError();
    teamCheck(r, result == ncclInvalidUsage && strstr(why, "communicator"), "%d: %s", (int)result,
              why);
    result = ncclEpGroupDestroy(group);
    why = ncclEpGetLastError();
    teamCheck(r, result == ncclInvalidUsage, "%d: %s", (int)result, why);
    if (!again)
      teamCheck(r, ncclCommSplit(r->comm, 0, r->rank, &old, NULL) == ncclSuccess, "split");
  }
  teamOk(r, ncclEpHandleDestroy(handle));
  teamCheck(r, ncclEpGroupDestroy(group) == ncclInvalidUsage, "destroyed");
  teamCheck(r, strstr(ncclEpGetLastError(), "communicator"), "%s", ncclEpGetLastError());
  ncclCommDestroy(old);
}

TEST(a_communicator_that_goes_first) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  SKIP("such a group's memory is lost, and a process with threads forks");
#endif
  const char *error = teamThreads(2, commFirst, NULL);
  CHECK(!*error, "%s", error);
  error = teamProcesses(2, commFirst, NULL, 0);
  CHECK(!*error, "processes: %s", error);
}

typedef struct blocks {
  int taken, given;
} blocks_t;

static cudaError_t take(void **p, size_t n, void *context) {
  ((blocks_t *)context)->taken++;
  return cudaMalloc(p, n);
}
static cudaError_t give(void *p, void *context) {
  ((blocks_t *)context)->given++;
  return cudaFree(p);
}

static void allocator(team_rank_t *r) {
  ncclEpGroupConfig_t config = smallGroup();
  blocks_t blocks = {0};
  ncclEpGroup_t group;
  ncclEpHandle_t handle;
  config.alloc = (ncclEpAllocConfig_t){take, give, &blocks};
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, 2, NULL));
  teamCheck(r, blocks.taken > 0, "the caller's allocator was not asked");
  teamOk(r, ncclEpHandleDestroy(handle));
  teamOk(r, ncclEpGroupDestroy(group));
  teamCheck(r, blocks.given == blocks.taken, "%d blocks of %d came back", blocks.given,
            blocks.taken);
}

TEST(a_callers_allocator_gets_all_back) {
  const char *error = teamThreads(1, allocator, NULL);
  CHECK(!*error, "%s", error);
}

/* A first-version struct ends before zero_copy: whatever lies behind it is not read. A later one may be
 * longer than the library knows. */
static void structVersions(team_rank_t *r) {
  struct {
    ncclEpGroupConfig_t config;
    unsigned char more[64];
  } x;
  memset(&x, 0xEE, sizeof x);
  x.config = smallGroup();
  x.config.size = (unsigned)NCCL_EP_GROUP_CONFIG_V1_SIZE;
  memset((char *)&x.config + NCCL_EP_GROUP_CONFIG_V1_SIZE, 0xEE,
         sizeof x.config - NCCL_EP_GROUP_CONFIG_V1_SIZE);
  ncclEpGroup_t group;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &x.config));
  teamOk(r, ncclEpGroupDestroy(group));
  x.config = smallGroup();
  x.config.size = (unsigned)sizeof x;
  x.config.version = 7; /* warns at most */
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &x.config));
  teamOk(r, ncclEpGroupDestroy(group));
}

/* Thousands of objects that come and go in any order: each is alive from its making to its end. */
TEST(many_objects) {
  enum { MANY = 5000 };
  static ncclEpTensor_t *tensors[MANY];
  const size_t sizes[1] = {4};
  uint32_t state = 1;
  for (int round = 0; round < 3; round++) {
    for (int i = 0; i < MANY; i++) {
      if (tensors[i]) continue;
      REQUIRE(ncclEpTensorAlloc(&tensors[i], 1, ncclInt32, sizes, NULL) == ncclSuccess, "%s",
              ncclEpGetLastError());
    }
    for (int n = 0; n < MANY; n++) {
      state = state * 1664525u + 1013904223u;
      int i = (int)((state >> 8) % MANY), alive = tensors[i] != NULL;
      if (!alive) continue;
      REQUIRE(ncclEpTensorDestroy(tensors[i]) == ncclSuccess, "round %d, tensor %d: %s", round, i,
              ncclEpGetLastError());
      REQUIRE(ncclEpTensorDestroy(tensors[i]) == ncclInvalidArgument, "destroyed twice");
      tensors[i] = NULL;
    }
  }
  for (int i = 0; i < MANY; i++) {
    if (tensors[i]) CHECK(ncclEpTensorDestroy(tensors[i]) == ncclSuccess, "tensor %d", i);
  }
}

TEST(structs_of_any_version) {
  const char *error = teamThreads(1, structVersions, NULL);
  CHECK(!*error, "%s", error);
}

/* A thread aborts the communicator of rank 0, which waits in a collective call that rank 1 does not make: the
 * call fails with that sentence, and nobody reads what the abort has freed. */
static void *abortSoon(void *comm) {
  usleep(50000);
  return (void *)(intptr_t)ncclCommAbort(comm);
}

static void runAborted(team_rank_t *r) {
  const int *waitsInHandle = r->user;
  ncclEpGroupConfig_t config = smallGroup();
  ncclEpGroup_t group = NULL;
  ncclEpHandle_t handle = NULL;
  ncclComm_t comm = NULL;
  teamCheck(r, ncclCommSplit(r->comm, 0, r->rank, &comm, NULL) == ncclSuccess, "split");
  if (*waitsInHandle) teamOk(r, ncclEpCreateGroup(&group, comm, &config));
  if (r->rank == 0) {
    pthread_t thread;
    void *aborted = NULL;
    teamCheck(r, pthread_create(&thread, NULL, abortSoon, comm) == 0, "no thread");
    ncclResult_t result =
        *waitsInHandle
            ? ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, 2, NULL)
            : ncclEpCreateGroup(&group, comm, &config);
    const char *why = ncclEpGetLastError();
    int said = result == ncclInvalidUsage && strstr(why, "the communicator was aborted");
    pthread_join(thread, &aborted);
    teamCheck(r, said, "%d: %s", (int)result, why);
    teamCheck(r, (intptr_t)aborted == ncclSuccess, "the abort failed: %d", (int)(intptr_t)aborted);
  }
  teamBarrier(r);
  if (r->rank == 1) teamCheck(r, ncclCommDestroy(comm) == ncclSuccess, "destroy");
}

TEST(an_abort_ends_a_collective_call_that_waits) {
  for (int waitsInHandle = 0; waitsInHandle < 2; waitsInHandle++) {
    for (int round = 0; round < 5; round++) {
      const char *error = teamThreads(2, runAborted, &waitsInHandle);
      CHECK(!*error, "%s: %s", waitsInHandle ? "InitHandle" : "CreateGroup", error);
      error = teamProcesses(2, runAborted, &waitsInHandle, 0);
      CHECK(!*error, "%s, processes: %s", waitsInHandle ? "InitHandle" : "CreateGroup", error);
    }
  }
}

static void version(team_rank_t *r) {
  int v = 0;
  teamOk(r, ncclEpGetVersion(&v));
  teamCheck(r, v == 200 && v == NCCL_EP_VERSION_CODE, "version %d", v);
}

TEST(version_is_200) {
  const char *error = teamThreads(1, version, NULL);
  CHECK(!*error, "%s", error);
}

TEST_MAIN()
