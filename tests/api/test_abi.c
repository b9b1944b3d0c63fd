/* Both versions of the interface on one library, and what a binding looks for in the file. */
#include <dlfcn.h>
#include <string.h>

#include "team.h"
#include "test.h"

int abiC99(void);
int abiCxx17(void);
int abiV1(ncclComm_t comm, cudaStream_t stream);
int abiV2(ncclComm_t comm, cudaStream_t stream);

TEST(initialisers) {
  CHECK(abiC99(), "C99");
  CHECK(abiCxx17(), "C++17");
}

static void runBoth(team_rank_t *r) {
  int v1 = abiV1(r->comm, r->stream), v2 = abiV2(r->comm, r->stream);
  teamCheck(r, v1 == 0, "version 1: %d: %s", v1, ncclEpGetLastError());
  teamCheck(r, v2 == 0, "version 2: %d: %s", v2, ncclEpGetLastError());
}

TEST(programs_of_both_versions) {
  const char *error = teamThreads(1, runBoth, NULL);
  CHECK(!*error, "%s", error);
}

TEST(version) {
  int version = 0;
  CHECK(ncclEpGetVersion(&version) == ncclSuccess && version == 200, "%d", version);
}

TEST(banner) {
  Dl_info info;
  REQUIRE(dladdr((void *)(uintptr_t)ncclEpGetVersion, &info) != 0, "dladdr");
  FILE *f = fopen(info.dli_fname, "rb");
  REQUIRE(f != NULL, "%s", info.dli_fname);
  static const char want[] = "NCCL EP version 0.2.0+cuda13.0";
  size_t at = 0;
  int c, found = 0;
  while (!found && (c = fgetc(f)) != EOF) {
    at = c == want[at] ? at + 1 : c == want[0] ? 1 : 0;
    found = at == sizeof want - 1;
  }
  fclose(f);
  CHECK(found, "the text is not in %s", info.dli_fname);
}

TEST_MAIN()
