/* Groups whose ranks form several NVLink domains: domains come from NCCL's properties alone, uneven nodes
 * become domains of the greatest common divisor, and without GIN a sentence says what is missing. One thread
 * makes all ranks; the library refuses before ranks would meet. */
#include <stdlib.h>
#include <string.h>

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

TEST_MAIN()
