/* The end of a group across NVLink domains: a rank whose puts may still be under way tells the others, and
 * nobody frees a window. The puts are to a rank that nothing more gets to (TREFOIL_NET_DEAD_RANK). */
#include <dlfcn.h>
#include <stdatomic.h>
#include <string.h>

#include "gpu_case.h"
#include "test.h"

enum { DEAD_SENDER = 0, RANKS = 3 };

#define IN_PLACE __attribute__((visibility("default"))) /* of the runtime's */

static _Atomic int freed; /* windows, and their memory, of this process */

IN_PLACE ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  ncclResult_t (*next)(ncclComm_t, ncclWindow_t);
  *(void **)&next = dlsym(RTLD_NEXT, "ncclCommWindowDeregister");
  freed++;
  return next(comm, window);
}

IN_PLACE ncclResult_t ncclMemFree(void *memory) {
  ncclResult_t (*next)(void *);
  *(void **)&next = dlsym(RTLD_NEXT, "ncclMemFree");
  freed++;
  return next(memory);
}

typedef struct scene {
  step_case_t c;
  int isStuck;
} scene_t;

static void checkEnd(team_rank_t *r, const scene_t *s, ncclResult_t result) {
  char sentence[64];
  if (!s->isStuck) {
    if (result != ncclSuccess || freed < 2)
      teamFail(r, "%d, %d freed: %s", result, freed, ncclEpGetLastError());
    return;
  }
  snprintf(sentence, sizeof sentence, "puts of rank %d to other NVLink domains", DEAD_SENDER);
  if (result != ncclRemoteError || !strstr(ncclEpGetLastError(), sentence) || freed)
    teamFail(r, "%d, %d freed: %s", result, freed, ncclEpGetLastError());
}

static void run(team_rank_t *r) {
  const scene_t *s = r->user;
  const step_case_t *c = &s->c;
  step_data_t *d = stepMake(c, r->rank, r->numRanks, 1);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  ncclEpGroupConfig_t config = stepGroupConfig(c, r->numRanks);
  config.timeout_ns = s->isStuck ? 3000000000u : 60000000000u;
  if (s->isStuck && r->rank == DEAD_SENDER) setenv("TREFOIL_NET_DEAD_RANK", "1:0", 1);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(c), NULL, c->topk, NULL));
  int queued = stepUpdate(d, h, r->stream) && stepDispatch(d, h, r->stream);
  if (!queued && !s->isStuck) teamFail(r, "%s", ncclEpGetLastError());
  cudaStreamSynchronize(r->stream);
  teamBarrier(r);
  teamOk(r, ncclEpHandleDestroy(h));
  freed = 0;
  checkEnd(r, s, ncclEpGroupDestroy(group));
  teamBarrier(r); /* no process ends while others look */
  stepFree(d);
}

static void play(trefoil_mode_t mode, int isStuck) {
  scene_t s = {smallCase(mode, 5), isStuck};
  const char *error = teamProcesses(RANKS, run, &s, 0);
  CHECK(!*error, "mode %d: %s", (int)mode, error);
}

TEST(windows_are_freed_once_all_puts_have_landed) {
  play(TREFOIL_LL_EXPERT_MAJOR, 0);
  play(TREFOIL_HT_FLAT, 0);
}

TEST(puts_under_way_keep_the_windows_of_all_ranks) {
  play(TREFOIL_LL_EXPERT_MAJOR, 1);
}

TEST(puts_of_high_throughput_do_so_too) {
  play(TREFOIL_HT_FLAT, 1);
}

TEST_MAIN()
