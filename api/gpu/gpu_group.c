/* Groups: what every rank has alone, then all together. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "api/gpu/rendezvous.h"
#include "api/gpu/gpu.h"
#include "api/gpu/gpu_device.h"

#define SECOND 1000000000ull

static ep_gpu_group_t *stateOf(ncclEpGroup_t group) {
  uintptr_t end = (uintptr_t)(group + 1);
  return (ep_gpu_group_t *)((end + 63) / 64 * 64);
}

/* NCCL has no way to tell a live communicator from a destroyed one. */
trefoil_result_t epGpuCheckComm(ncclEpGroup_t group) {
  (void)group;
  return TREFOIL_OK;
}

static trefoil_result_t findDevice(ep_gpu_group_t *g) {
  int major = 0;
  EP_TRY(epGpuNccl(g->group->comm, ncclCommCuDevice(g->group->comm, &g->device),
                   "ncclEpCreateGroup: comm"));
  EP_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, g->device));
  EP_CHECK(major >= 9, TREFOIL_INVALID_USAGE,
           "ncclEpCreateGroup: GPU %d has compute capability %d.x; libnccl_ep needs 9.0 (H100) or "
           "newer",
           g->device, major);
  EP_CUDA(cudaDeviceGetAttribute(&g->multiProcessors, cudaDevAttrMultiProcessorCount, g->device));
  return TREFOIL_OK;
}

static trefoil_result_t gpuName(const ep_gpu_group_t *g, ep_rendezvous_word_t *mine) {
  struct cudaDeviceProp p;
  EP_CUDA(cudaGetDeviceProperties(&p, g->device));
  memcpy(mine->gpu, p.uuid.bytes, sizeof mine->gpu);
  return TREFOIL_OK;
}

static uint64_t machineOf(void) {
  char name[256] = "";
  uint64_t hash = 14695981039346656037ull; /* FNV-1a */
  gethostname(name, sizeof name - 1);
  for (const char *c = name; *c; c++) hash = (hash ^ (unsigned char)*c) * 1099511628211ull;
  return hash;
}

/* Domains have one size: those of machines with different numbers of ranks are smaller than the machines. */
static void logDomains(const ep_gpu_group_t *g, const ep_rendezvous_word_t *all) {
  int here = 0, of = g->group->ranksPerNode;
  for (int r = 0; r < g->R; r++) here += all[r].machine == all[g->me].machine;
  if (here <= of) return;
  epLog(g->group,
        "the %d ranks of this machine are %d NVLink domains of %d: NCCL gives all domains one "
        "size, the greatest common divisor of uneven nodes (or of NCCL_LSA_TEAM_SIZE and the "
        "ranks)",
        here, here / of, of);
}

static int ranksOnGpu(const ep_rendezvous_word_t *all, int rank, int numRanks) {
  int n = 0;
  for (int r = 0; r < numRanks; r++) n += !memcmp(all[r].gpu, all[rank].gpu, sizeof all[r].gpu);
  return n;
}

/* Sizes of memory are equal on all ranks: the most that any may take; 0 is as many as it likes. */
static unsigned mostSms(const ep_rendezvous_word_t *all, int numRanks) {
  unsigned most = all[0].maxSms;
  for (int r = 1; r < numRanks && most; r++) {
    if (!all[r].maxSms || all[r].maxSms > most) most = all[r].maxSms;
  }
  return most;
}

/* Kernels of ranks that share a GPU wait for each other, so all of them must fit on it. */
static void chooseSms(ep_gpu_group_t *g) {
  unsigned most = g->group->config.max_num_sms;
  int share = g->multiProcessors / g->ranksOnGpu;
  int sms = share > EP_GPU_MAX_SMS ? EP_GPU_MAX_SMS : share > 1 ? share : 1;
  if (most && (int)most < sms) sms = (int)most;
  g->relayBlocks = epGpuFarBlocks(g, sms);
  g->ll.numSms = sms > g->relayBlocks ? sms - g->relayBlocks : 1;
  sms = g->ll.numSms + g->relayBlocks;
  g->fitsTwice = !g->isHt && 2 * sms <= share; /* an Update needs all its blocks */
}

/* Blocks of a launch wait for each other across domains. */
static trefoil_result_t checkSms(const ep_gpu_group_t *g) {
  if (!g->far) return TREFOIL_OK;
  int needed = g->isHt ? EP_HT_FAR_LEAST_SMS : 1 + g->relayBlocks;
  int share = g->multiProcessors / g->ranksOnGpu;
  EP_CHECK(needed <= share, TREFOIL_INVALID_USAGE,
           "ncclEpCreateGroup: %s with %d ranks in other NVLink domains takes %d SMs; this "
           "rank has %d (GPU of %d SMs for %d ranks)",
           g->isHt ? "high throughput" : "low latency", g->R - g->group->ranksPerNode, needed,
           share, g->multiProcessors, g->ranksOnGpu);
  EP_CHECK(!g->isHt || needed <= g->ll.numSms, TREFOIL_INVALID_USAGE,
           "ncclEpCreateGroup: max_num_sms is %u; high throughput with ranks in other NVLink "
           "domains takes %d or more",
           g->group->config.max_num_sms, needed);
  return TREFOIL_OK;
}

/* Operations are numbered from 1; tests start near a wrap of the flags (docs/kernels.md). */
static uint64_t firstOperation(void) {
  const char *first = getenv("TREFOIL_TEST_FIRST_OPERATION");
  return first ? strtoull(first, NULL, 10) : 0;
}

/* Control memory, kernels, events: everything that one rank can fail at alone. */
static trefoil_result_t prepare(ep_gpu_group_t *g, const ep_sizing_t *sizing) {
  ncclEpGroup_t group = g->group;
  const ep_buffer_t *control = &sizing->buffers[EP_BUFFER_CONTROL];
  EP_TRY(epGpuFarOpen(g, sizing, firstOperation()));
  chooseSms(g);
  EP_TRY(checkSms(g));
  EP_TRY(g->isHt ? g->far ? epHtFarLoad() : epHtLoad() : g->far ? epLlFarLoad() : epLlLoad());
  EP_TRY(epGpuLoadSmall());
  void *p;
  EP_TRY(epAllocBuffer(group, control, &p));
  g->control = p;
  char image[EP_GPU_CONTROL_BYTES(1)] = {0};
  if (g->isHt) {
    epHtControlInit(image);
  } else {
    epLlControlInit(image, firstOperation());
  }
  int *mask = (int *)(image + EP_GPU_MASK_AT(g->isHt));
  for (int r = 0; r < EP_KERNEL_MAX_RANKS; r++) mask[r] = 1;
  EP_CUDA(cudaMemcpy(g->control, image, EP_GPU_CONTROL_BYTES(g->isHt), cudaMemcpyHostToDevice));
  EP_CUDA(cudaStreamCreateWithFlags(&g->aside, cudaStreamNonBlocking));
  for (int i = 0; i < 2; i++) {
    EP_CUDA(cudaEventCreateWithFlags(&g->tail[i], cudaEventDisableTiming));
    EP_CUDA(cudaEventCreateWithFlags(&g->early[i], cudaEventDisableTiming));
  }
  EP_TRY(epGpuWatchOpen(g));
  ep_ll_group_t *ll = &g->ll;
  ll->control = g->control;
  ll->mask = (int *)(g->control + EP_GPU_MASK_AT(g->isHt));
  ll->timeoutNs = group->timeoutNs;
  ll->rank = g->me;
  ll->numRanks = g->R;
  ll->numExperts = (int)group->limits.numExperts;
  ll->numLocal = (ll->numExperts + g->R - 1) / g->R;
  ll->maxTokens = (int)group->limits.maxTokens;
  ll->enableMask = group->limits.enableMask != 0;
  g->ht = (ep_ht_group_t){.control = ll->control,
                          .record = ll->record,
                          .status = g->statusOnDevice,
                          .timeoutNs = ll->timeoutNs < EP_HT_MAX_TIMEOUT_NS ? ll->timeoutNs
                                                                            : EP_HT_MAX_TIMEOUT_NS,
                          .rank = ll->rank,
                          .numRanks = ll->numRanks,
                          .numExperts = ll->numExperts,
                          .numLocal = ll->numLocal,
                          .maxTokens = ll->maxTokens};
  const char *count = getenv("NCCL_EP_COUNT_BYTES");
  if (count && *count && strcmp(count, "0") != 0) return epGpuCountBytes(group, 1);
  return TREFOIL_OK;
}

static void release(ep_gpu_group_t *g, const ep_buffer_t *control) {
  epGpuWatchClose(g);
  epGpuKeepTimes(g->group, 0);
  if (g->aside) cudaStreamDestroy(g->aside);
  for (int i = 0; i < 2; i++) {
    if (g->tail[i]) cudaEventDestroy(g->tail[i]);
    if (g->early[i]) cudaEventDestroy(g->early[i]);
  }
  epGpuFarClose(g);
  if (g->control) epFreeBuffer(g->group, control, g->control);
}

/* Settings are compared before anything is made, and no rank goes on if one could not. */
static trefoil_result_t join(ep_gpu_group_t *g, const ep_sizing_t *sizing) {
  ep_rendezvous_word_t all[EP_KERNEL_MAX_RANKS], mine = {.call = EP_RENDEZVOUS_CREATE_GROUP};
  ep_settings_t settings[EP_KERNEL_MAX_RANKS];
  mine.maxSms = g->group->config.max_num_sms;
  mine.machine = machineOf();
  epSettingsOf(g->group, &mine.settings);
  EP_TRY(gpuName(g, &mine));
  EP_TRY(epRendezvousWait(g->rendezvous, &mine, g->group->timeoutNs, all));
  for (int r = 0; r < g->R; r++) settings[r] = all[r].settings;
  EP_TRY(epSettingsCompare(settings, g->R));
  g->ranksOnGpu = ranksOnGpu(all, g->me, g->R);
  g->group->limits.maxSms = mostSms(all, g->R);
  g->id = epRendezvousRounds(g->rendezvous);
  logDomains(g, all);
  EP_TRY(prepare(g, sizing));
  mine.call = EP_RENDEZVOUS_GROUP_READY;
  return epRendezvousWait(g->rendezvous, &mine, g->group->timeoutNs, all);
}

static trefoil_result_t create(ep_gpu_group_t *g) {
  ncclEpGroup_t group = g->group;
  ep_sizing_t sizing;
  ep_handle_limits_t any = {.layout = NCCL_EP_LAYOUT_EXPERT_MAJOR, .topk = 1};
  g->isHt = epIsHt(group);
  ep_sizing_config_t config = epSizingConfig(&group->limits, &any, g->R, group->ranksPerNode);
  EP_TRY(epGpuSizing(&config, &sizing));
  EP_TRY(epRendezvousOpen(group->comm, g->me, g->R, g->R / group->ranksPerNode, group->timeoutNs,
                          &g->rendezvous));
  trefoil_result_t result = join(g, &sizing);
  if (result == TREFOIL_OK) {
    epRendezvousAllCame(g->rendezvous);
    return TREFOIL_OK;
  }
  release(g, &sizing.buffers[EP_BUFFER_CONTROL]);
  epRendezvousClose(g->rendezvous);
  return result;
}

trefoil_result_t epGpuGroupCreate(ncclEpGroup_t group) {
  ep_gpu_group_t *g = stateOf(group);
  memset(g, 0, sizeof *g);
  group->state = g;
  g->group = group;
  g->me = group->rank;
  g->R = group->numRanks;
  int before;
  EP_TRY(findDevice(g));
  EP_TRY(epGpuEnter(g, &before));
  trefoil_result_t result = create(g);
  epGpuLeave(g, before);
  return result;
}

static uint64_t leaveTimeout(const ep_gpu_group_t *g) {
  uint64_t timeout = g->group->timeoutNs;
  return g->gaveUpSeen && timeout > SECOND ? SECOND : timeout;
}

/* A rank of a lost group may still store into this rank's window: then it stays, until the process
 * ends. *limitNs: how long all wait for what is under way, the least of the ranks' limits. */
static int everybodyLeft(const ep_gpu_group_t *g, uint64_t *limitNs) {
  ep_rendezvous_word_t all[EP_KERNEL_MAX_RANKS], mine = {.call = EP_RENDEZVOUS_DESTROY_GROUP};
  mine.limitNs = leaveTimeout(g);
  if (epRendezvousWait(g->rendezvous, &mine, mine.limitNs, all) != TREFOIL_OK) return 0;
  *limitNs = mine.limitNs;
  for (int r = 0; r < g->R; r++) {
    if (all[r].limitNs < *limitNs) *limitNs = all[r].limitNs;
  }
  return 1;
}

/* Puts land in other ranks' windows: a rank whose puts may be under way tells all. */
static trefoil_result_t drainTogether(ep_gpu_group_t *g, uint64_t limitNs) {
  ep_rendezvous_word_t all[EP_KERNEL_MAX_RANKS], mine = {.call = EP_RENDEZVOUS_GROUP_DRAINED};
  if (!g->far) return TREFOIL_OK;
  mine.undrained = epGpuFarDrain(g, limitNs, "ncclEpGroupDestroy") != TREFOIL_OK;
  EP_TRY(epRendezvousWait(g->rendezvous, &mine, limitNs + SECOND, all));
  for (int r = 0; r < g->R; r++) {
    EP_CHECK(!all[r].undrained, TREFOIL_REMOTE_ERROR,
             "ncclEpGroupDestroy: puts of rank %d to other NVLink domains may still be under way "
             "after %.1f s; the group is gone, but all ranks' windows stay until their processes "
             "end",
             r, (double)limitNs * 1e-9);
  }
  return TREFOIL_OK;
}

static trefoil_result_t freeWindows(ep_gpu_group_t *g) {
  uint64_t limitNs;
  if (!everybodyLeft(g, &limitNs)) return TREFOIL_OK;
  EP_TRY(drainTogether(g, limitNs));
  epGpuFarLeave(g);
  for (int i = 0; i < g->numArenas; i++) epGpuArenaFree(g, &g->arenas[i]);
  return TREFOIL_OK;
}

trefoil_result_t epGpuGroupDestroy(ncclEpGroup_t group) {
  ep_gpu_group_t *g = epGpu(group);
  int before;
  EP_TRY(epGpuEnter(g, &before));
  cudaError_t error = cudaDeviceSynchronize();
  epGpuPoll(group);
  trefoil_result_t result = freeWindows(g);
  ep_buffer_t control = {
      .name = "control", .memory = EP_MEMORY_DEVICE, .bytes = EP_GPU_CONTROL_BYTES(g->isHt)};
  release(g, &control);
  epRendezvousClose(g->rendezvous);
  epGpuLeave(g, before);
  if (error != cudaSuccess) cudaGetLastError();
  return result;
}
