/* Groups whose ranks form several NVLink domains: domains come from NCCL's properties alone, uneven nodes
 * become domains of the greatest common divisor, and without GIN a sentence says what is missing. One thread
 * makes all ranks; the library refuses before ranks would meet. And a communicator that is aborted while its
 * ranks meet. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "nccl_ep.h"
#include "nccl_device.h"
#include "test.h"

enum { MAX_RANKS = 8 };

/* What the first rank's high-throughput group is told, among `ranks` ranks in nodes of `perNode`. */
static void told(int ranks, const char *perNode, const char *gin, int teams, const char *sentence) {
  ncclComm_t comms[MAX_RANKS];
  ncclCommProperties_t p = NCCL_COMM_PROPERTIES_INITIALIZER;
  ncclEpGroup_t group = NULL;
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  setenv("NCCL_LSA_TEAM_SIZE", perNode, 1);
  setenv("NCCL_GIN_ENABLE", gin, 1);
  REQUIRE(ncclCommInitAll(comms, ranks, NULL) == ncclSuccess, "%s", ncclGetLastError(NULL));
  REQUIRE(ncclCommQueryProperties(comms[0], &p) == ncclSuccess, "%s", ncclGetLastError(NULL));
  CHECK(p.nLsaTeams == teams, "%d ranks in nodes of %s: %d domains", ranks, perNode, p.nLsaTeams);
  config.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
  config.num_experts = 24;
  config.max_dispatch_tokens_per_rank = 4;
  config.max_token_bytes = 64;
  ncclResult_t result = ncclEpCreateGroup(&group, comms[0], &config);
  CHECK(result == ncclInvalidUsage && !group, "%d ranks in nodes of %s: %d", ranks, perNode,
        result);
  CHECK(strstr(ncclEpGetLastError(), sentence), "%s", ncclEpGetLastError());
  CHECK(!strstr(ncclEpGetLastError(), "peer access"), "%s", ncclEpGetLastError());
  for (int r = 0; r < ranks; r++) ncclCommDestroy(comms[r]);
  unsetenv("NCCL_LSA_TEAM_SIZE");
  unsetenv("NCCL_GIN_ENABLE");
}

TEST(without_gin_the_sentence_names_it_and_the_tcp_carrier) {
  told(4, "2", "0", 2, "form 2 NVLink domains (LSA teams of NCCL), and there is no GIN");
  told(4, "2", "0", 2, "TREFOIL_NET_CARRIER=tcp");
  told(6, "1", "0", 6, "form 6 NVLink domains");
}

TEST(uneven_nodes_are_domains_of_the_greatest_common_divisor) {
  told(6, "4", "0", 3, "form 3 NVLink domains");
}

/* A communicator that does not block, as NCCL has them: its broadcast is under way for ever. */
static _Atomic int neverThrough;

__attribute__((visibility("default"))) ncclResult_t ncclBroadcast(const void *from, void *to,
                                                                  size_t n, ncclDataType_t type,
                                                                  int root, ncclComm_t comm,
                                                                  cudaStream_t stream) {
  ncclResult_t (*next)(const void *, void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
  *(void **)&next = dlsym(RTLD_NEXT, "ncclBroadcast");
  return neverThrough ? ncclInProgress : next(from, to, n, type, root, comm, stream);
}

__attribute__((visibility("default"))) ncclResult_t ncclCommGetAsyncError(ncclComm_t comm,
                                                                          ncclResult_t *error) {
  (void)comm;
  *error = ncclInProgress;
  return ncclSuccess;
}

static ncclResult_t result;
static char why[400];

static void *createAlone(void *comm) {
  ncclEpGroup_t group = NULL;
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.num_experts = 24;
  config.max_dispatch_tokens_per_rank = 4;
  config.max_token_bytes = 64;
  config.timeout_ns = 60000000000u;
  result = ncclEpCreateGroup(&group, comm, &config);
  snprintf(why, sizeof why, "%s", ncclEpGetLastError());
  return NULL;
}

/* The other rank does not come; the communicator is aborted meanwhile. */
static void abortedAlone(int isBlocking) {
  ncclComm_t comms[2];
  pthread_t thread;
  struct timespec limit;
  setenv("NCCL_LSA_TEAM_SIZE", "1", 1);
  REQUIRE(ncclCommInitAll(comms, 2, NULL) == ncclSuccess, "%s", ncclGetLastError(NULL));
  neverThrough = !isBlocking;
  pthread_create(&thread, NULL, createAlone, comms[1]);
  nanosleep(&(struct timespec){0, 500000000}, NULL);
  ncclCommAbort(comms[1]);
  clock_gettime(CLOCK_REALTIME, &limit);
  limit.tv_sec += 10;
  REQUIRE(!pthread_timedjoin_np(thread, NULL, &limit), "CreateGroup waits on");
  CHECK(result == ncclRemoteError && strstr(why, "was aborted"), "%d: %s", result, why);
  neverThrough = 0;
  ncclCommAbort(comms[0]);
  unsetenv("NCCL_LSA_TEAM_SIZE");
}

TEST(an_aborted_communicator_ends_the_call) {
  abortedAlone(1);
}

TEST(so_does_one_that_does_not_block) {
  abortedAlone(0);
}

TEST_MAIN()
