#include "gpu_team.h"

#include "plan/error.h"
#include "validate/gpu_tools.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static ep_library_t lib;
static ncclUniqueId ids[EP_MAX_RANKS + 1];
static ncclComm_t comms[EP_MAX_RANKS + 1][EP_MAX_RANKS]; /* [ranks][rank], kept from test to test */

/* Once: what the environment names. 0, or why not. */
static const char *load(void) {
  static int isDone;
  static char why[600];
  if (isDone) return *why ? why : NULL;
  isDone = 1;
  setvbuf(stdout, NULL, _IOLBF, 0); /* what was done is seen also if the rest hangs */
  ep_library_paths_t paths = {getenv("TREFOIL_LIBRARY"), getenv("TREFOIL_NCCL"),
                              getenv("TREFOIL_CUDA")};
  if (!paths.library) {
    snprintf(why, sizeof why, "TREFOIL_LIBRARY does not say what to test");
    return why;
  }
  if (!paths.nccl) paths.nccl = epLibraryFindNccl();
  if (!paths.cuda) paths.cuda = epLibraryFindCuda();
  epLibraryHostDevices(EP_MAX_RANKS);
  if (epLibraryProbe(&paths, NULL) != TREFOIL_OK || epLibraryLoad(&lib, &paths) != TREFOIL_OK)
    snprintf(why, sizeof why, "%s", trefoilLastError());
  return *why ? why : NULL;
}

int gpuTeam(char *why, size_t whyBytes) {
  const char *reason = load();
  if (reason) {
    const char *library = getenv("TREFOIL_LIBRARY");
    int isBroken = getenv("TREFOIL_CUDA") || /* all libraries are named: the host runtime */
                   (library && strstr(reason, library) && access("/dev/nvidia0", F_OK) == 0);
    snprintf(why, whyBytes, "%s", reason);
    return isBroken ? GPU_TEAM_BROKEN : -1;
  }
  int devices = 0;
  if (lib.cudaGetDeviceCount(&devices) != cudaSuccess) devices = 0;
  const char *wanted = getenv("TREFOIL_TEST_RANKS");
  int most = wanted ? atoi(wanted) : lib.isHost ? 3 : 4;
  return devices < most ? devices : most;
}

const ep_library_t *gpuLibrary(void) {
  return &lib;
}

int gpuIsHost(void) {
  return lib.isHost;
}

static int isEmulated(void) {
  return getenv("TREFOIL_EMULATED") != NULL;
}

int gpuIsCpuLibrary(void) {
  return lib.isHost && !isEmulated();
}

/* Seconds stay few on a laptop; a GPU does ten thousand in less. */
int gpuScaled(int onGpus, int onHost) {
  if (!lib.isHost) return onGpus;
  if (!isEmulated()) return onHost;
  return onHost < 80 ? (onHost + 3) / 4 : onHost / 8;
}

void gpuBarrier(gpu_rank_t *rank) {
  pthread_barrier_wait(&rank->run->barrier);
}

static void fail(gpu_rank_t *rank, const char *when) {
  gpu_run_t *run = rank->run;
  pthread_mutex_lock(&run->mutex);
  if (!*run->failure)
    snprintf(run->failure, sizeof run->failure, "rank %d, %s: %.2400s", rank->rank.rank, when,
             trefoilLastError());
  pthread_mutex_unlock(&run->mutex);
}

/* Loads the test's own kernels while nothing runs: a module loaded beside a kernel that waits for this rank
 * would wait for that kernel. */
static trefoil_result_t warmUp(ep_check_rank_t *k) {
  if (lib.isHost || !epGpuToolsBuilt()) return TREFOIL_OK;
  EP_TRY(epGpuDelay(0, k->stream));
  k->doing = "cudaStreamSynchronize";
  EP_TRY_CUDA(k, lib.cudaStreamSynchronize(k->stream));
  return TREFOIL_OK;
}

static void *rankMain(void *argument) {
  gpu_rank_t *rank = argument;
  gpu_run_t *run = rank->run;
  int isOpen = epRankOpen(&rank->rank, &ids[run->group->shape.numRanks]) == TREFOIL_OK;
  if (!isOpen || warmUp(&rank->rank) != TREFOIL_OK) fail(rank, "opening");
  gpuBarrier(rank);
  if (isOpen && !*run->failure && run->work(rank) != TREFOIL_OK) fail(rank, "at work");
  gpuBarrier(rank);
  if (isOpen && epRankClose(&rank->rank) != TREFOIL_OK && !run->isLossy) fail(rank, "closing");
  return NULL;
}

/* Of groups that nobody is late in; under compute-sanitizer all take longer. */
static uint64_t timeoutNs(void) {
  const char *ms = getenv("TREFOIL_TEST_TIMEOUT_MS");
  return (ms ? strtoull(ms, NULL, 10) : 10000) * 1000000u;
}

void gpuStart(gpu_run_t *run, int numRanks) {
  static int hasId[EP_MAX_RANKS + 1];
  *run->failure = 0;
  run->numRanks = 0;
  if (!hasId[numRanks] && lib.ncclGetUniqueId(&ids[numRanks]) != ncclSuccess) {
    snprintf(run->failure, sizeof run->failure, "ncclGetUniqueId failed");
    return;
  }
  hasId[numRanks] = 1;
  run->numRanks = numRanks;
  pthread_barrier_init(&run->barrier, NULL, (unsigned)numRanks);
  pthread_mutex_init(&run->mutex, NULL);
  for (int r = 0; r < numRanks; r++) {
    run->ranks[r] =
        (gpu_rank_t){.run = run,
                     .rank = {.lib = &lib,
                              .group = run->group,
                              .rank = r,
                              .device = r,
                              .timeoutNs = run->timeoutNs ? run->timeoutNs : timeoutNs(),
                              .kept = &comms[numRanks][r]}};
    if (pthread_create(&run->threads[r], NULL, rankMain, &run->ranks[r]) != 0) abort();
  }
}

void gpuJoin(gpu_run_t *run) {
  for (int r = 0; r < run->numRanks; r++) pthread_join(run->threads[r], NULL);
  if (run->numRanks) pthread_barrier_destroy(&run->barrier);
}

void gpuRun(gpu_run_t *run, int numRanks) {
  gpuStart(run, numRanks);
  gpuJoin(run);
}

/* Domains of so many ranks, if they divide the ranks. */
static int ranksPerNode(int numRanks) {
  const char *text = getenv("TREFOIL_TEST_RANKS_PER_NODE");
  int n = text ? atoi(text) : numRanks;
  return n > 0 && numRanks % n == 0 ? n : numRanks;
}

ep_check_group_t gpuGroup(int numRanks, int64_t maxTokens, size_t maxTokenBytes) {
  ep_check_group_t g = {
      .shape = {.numRanks = numRanks,
                .ranksPerNode = ranksPerNode(numRanks),
                .numExperts = 4 * numRanks,
                .topk = 4,
                .maxTokens = maxTokens},
      .gpuSubset = 1,
      .maxTokenBytes = maxTokenBytes,
      .imageBytes = (size_t)8 << 20,
      .numHandles = 3,
  };
  const trefoil_mode_t modes[] = {TREFOIL_LL_EXPERT_MAJOR, TREFOIL_LL_RANK_MAJOR,
                                  TREFOIL_LL_EXPERT_MAJOR};
  for (int i = 0; i < g.numHandles; i++)
    g.handles[i] = (ep_check_handle_t){
        .mode = modes[i], .topk = i == 2 ? 2 : 4, .initTopk = i == 2 ? 2 : 4, .shareWith = -1};
  return g;
}

ep_check_group_t gpuGroupHt(int numRanks, int64_t maxTokens, size_t maxTokenBytes) {
  ep_check_group_t g = gpuGroup(numRanks, maxTokens, maxTokenBytes);
  const trefoil_mode_t modes[] = {TREFOIL_HT_FLAT, TREFOIL_HT_EXPERT_MAJOR, TREFOIL_HT_FLAT};
  int L = trefoilExpertsPerRank(&g.shape);
  g.highThroughput = 1;
  g.numTopk = g.shape.topk;
  g.maxRecv = maxTokens * numRanks * (g.shape.topk < L ? g.shape.topk : L) + 31 * L;
  for (int i = 0; i < g.numHandles; i++) {
    g.handles[i].mode = modes[i];
    g.handles[i].alignment = modes[i] == TREFOIL_HT_EXPERT_MAJOR ? 8 : 0;
  }
  return g;
}
