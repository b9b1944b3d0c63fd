/* The start of a group across NVLink domains. Its device communicator, which NCCL makes collectively and
 * without a limit, fails on one rank, or never comes back there: all are told within the limit, with that
 * rank's name, and the communicator can be aborted. And nodes with different numbers of ranks. */
#include <dlfcn.h>
#include <string.h>

#include "gpu_case.h"
#include "nccl_device.h"
#include "plan/clock.h"
#include "test.h"

enum { CULPRIT = 1, RANKS = 3, LIMIT_S = 5 };

typedef enum { FAILS, HANGS } fault_t;

static int hangs;

__attribute__((visibility("default"))) ncclResult_t
ncclDevCommCreate(ncclComm_t comm, const ncclDevCommRequirements_t *needs, ncclDevComm_t *out) {
  ncclResult_t (*next)(ncclComm_t, const ncclDevCommRequirements_t *, ncclDevComm_t *);
  *(void **)&next = dlsym(RTLD_NEXT, "ncclDevCommCreate");
  if (hangs) sleep(4 * LIMIT_S);
  return hangs ? ncclSystemError : next(comm, needs, out);
}

typedef struct scene {
  step_case_t c;
  fault_t fault;
} scene_t;

static void checkTold(team_rank_t *r, fault_t fault, ncclResult_t result, double seconds) {
  static const char *const WORDS[] = {
      "TREFOIL_NET_RAILS is '99'",
      "ncclDevCommCreate has not returned on rank 0, 1, 2 after 5.0 s"};
  const char *why = ncclEpGetLastError();
  teamCheck(r, result != ncclSuccess && strstr(why, WORDS[fault]), "%d: %s", result, why);
  teamCheck(r, fault == HANGS || r->rank == CULPRIT || strstr(why, "it failed on rank 1:"), "%s",
            why);
  teamCheck(r, seconds < 2 * LIMIT_S, "after %.1f s: %s", seconds, why);
}

static void run(team_rank_t *r) {
  const scene_t *s = r->user;
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  ncclEpGroupConfig_t config = stepGroupConfig(&s->c, r->numRanks);
  config.timeout_ns = LIMIT_S * 1000000000ull;
  if (r->rank == CULPRIT && s->fault == FAILS) setenv("TREFOIL_NET_RAILS", "99", 1);
  hangs = r->rank == CULPRIT && s->fault == HANGS;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  for (int again = 0; again < 2; again++) {
    uint64_t start = epMonotonicNs();
    ncclResult_t result = ncclEpInitHandle(&h, group, stepLayout(&s->c), NULL, s->c.topk, NULL);
    double seconds = (double)(epMonotonicNs() - start) * 1e-9;
    if (!again)
      checkTold(r, s->fault, result, seconds);
    else
      teamCheck(r, result != ncclSuccess && seconds < 2 * LIMIT_S, "again: %d", result);
  }
  teamOk(r, ncclEpGroupDestroy(group));
  teamBarrier(r);
  ncclCommAbort(r->comm);
  r->comm = NULL;
}

static void play(trefoil_mode_t mode, fault_t fault) {
  scene_t s = {smallCase(mode, 5), fault};
  const char *error = teamProcesses(RANKS, run, &s, 0);
  CHECK(!*error, "mode %d: %s", (int)mode, error);
}

TEST(a_rank_whose_call_fails_is_named_to_all) {
  play(TREFOIL_LL_EXPERT_MAJOR, FAILS);
  play(TREFOIL_HT_FLAT, FAILS);
}

TEST(a_rank_whose_call_hangs_is_named_within_the_limit) {
  play(TREFOIL_LL_EXPERT_MAJOR, HANGS);
}

/* ---- A rank without GIN ---- */

/* All are refused at once, and the one that lacks it says so. */
static void openWithout(team_rank_t *r) {
  const scene_t *s = r->user;
  ncclComm_t comm;
  ncclEpGroup_t group;
  ncclEpGroupConfig_t config = stepGroupConfig(&s->c, r->numRanks);
  config.timeout_ns = 60000000000u;
  if (r->rank == CULPRIT) setenv("NCCL_GIN_ENABLE", "0", 1);
  teamOk(r, ncclCommSplit(r->comm, 0, r->rank, &comm, NULL));
  uint64_t start = epMonotonicNs();
  ncclResult_t result = ncclEpCreateGroup(&group, comm, &config);
  double seconds = (double)(epMonotonicNs() - start) * 1e-9;
  const char *why = ncclEpGetLastError();
  teamCheck(r, result == ncclInvalidUsage && strstr(why, "there is no GIN between them"), "%d: %s",
            result, why);
  teamCheck(r, !strstr(why, "NCCL_GIN_ENABLE is 0 on rank 1, this one") == (r->rank != CULPRIT),
            "%s", why);
  teamCheck(r, seconds < LIMIT_S, "after %.1f s", seconds);
  teamOk(r, ncclCommDestroy(comm));
  teamBarrier(r);
}

TEST(without_gin_on_one_rank_all_are_refused_at_once) {
  scene_t s = {smallCase(TREFOIL_LL_EXPERT_MAJOR, 5), FAILS};
  const char *error = teamProcesses(RANKS, openWithout, &s, 0);
  CHECK(!*error, "%s", error);
}

/* ---- Uneven nodes ---- */

static char logFile[] = "/tmp/trefoil-uneven-XXXXXX";

static void openAlone(team_rank_t *r) {
  const scene_t *s = r->user;
  ncclEpGroup_t group;
  ncclEpGroupConfig_t config = stepGroupConfig(&s->c, r->numRanks);
  config.timeout_ns = 60000000000u;
  teamCheck(r, r->rank || freopen(logFile, "w", stderr), "no log");
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpGroupDestroy(group));
  fflush(stderr);
  teamBarrier(r);
}

/* What rank 0 logs, in `text`. */
static void logOf(int ranks, const char *perNode, char *text, size_t bytes) {
  scene_t s = {smallCase(TREFOIL_LL_EXPERT_MAJOR, 5), FAILS};
  setenv("NCCL_LSA_TEAM_SIZE", perNode, 1);
  setenv("NCCL_EP_DEBUG", "1", 1);
  const char *error = teamProcesses(ranks, openAlone, &s, 0);
  CHECK(!*error, "%s", error);
  FILE *f = fopen(logFile, "r");
  REQUIRE(f, "no log");
  text[fread(text, 1, bytes - 1, f)] = 0;
  fclose(f);
  unsetenv("NCCL_EP_DEBUG");
  setenv("NCCL_LSA_TEAM_SIZE", "1", 1);
}

TEST(the_log_says_that_a_machine_is_several_domains) {
  char text[2000];
  REQUIRE(mkstemp(logFile) >= 0, "no file");
  logOf(3, "2", text, sizeof text);
  CHECK(strstr(text, "the 3 ranks of this machine are 3 NVLink domains of 1"), "%s", text);
  CHECK(strstr(text, "the greatest common divisor"), "%s", text);
  logOf(2, "2", text, sizeof text);
  CHECK(strstr(text, "group ") && !strstr(text, "NVLink domains of"), "%s", text);
  unlink(logFile);
}

TEST_MAIN()
