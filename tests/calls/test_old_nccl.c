/* A process may have an older NCCL loaded than libnccl_ep needs (frameworks bring their own), without
 * functions that it calls: then a sentence, not the end of the process. The libraries are named by
 * OLD_NCCL and EP_LIBRARY. */
#include <dlfcn.h>
#include <string.h>

#include "nccl_ep.h"
#include "test.h"

typedef ncclResult_t (*create_group_t)(ncclEpGroup_t *, ncclComm_t, const ncclEpGroupConfig_t *);
typedef const char *(*last_error_t)(void);

TEST(an_older_nccl_is_named) {
  void *nccl = dlopen(OLD_NCCL, RTLD_NOW | RTLD_GLOBAL); /* before the real one: of the same name */
  CHECK(nccl, "%s", dlerror());
  void *ep = nccl ? dlopen(EP_LIBRARY, RTLD_LAZY) : NULL;
  CHECK(ep, "%s", dlerror());
  if (!ep) return;
  create_group_t createGroup = (create_group_t)dlsym(ep, "ncclEpCreateGroup");
  last_error_t lastError = (last_error_t)dlsym(ep, "ncclEpGetLastError");
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.num_experts = 256;
  config.max_dispatch_tokens_per_rank = 128;
  config.max_token_bytes = 14336;
  ncclEpGroup_t group = NULL;
  int someComm = 0;
  ncclResult_t result = createGroup(&group, (ncclComm_t)&someComm, &config);
  CHECK(result == ncclInvalidUsage && !group, "%d", (int)result);
  CHECK(strstr(lastError(), "2.28.7") && strstr(lastError(), "2.30.7"), "%s", lastError());
}

TEST_MAIN()
