/* From the record of the kernels' waits to the group's error.
 *
 * A page of host memory, mapped to the device: the page of the progress file where there is one and the
 * file system lets it be pinned, else a page of its own, which a thread copies into the file. Calls look
 * at it: a wait that gave up becomes the group's deferred error. Only with a file a small kernel follows each
 * operation and notes that it is finished. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "api/gpu/gpu.h"
#include "api/gpu/gpu_device.h"
#include "api/hang_file.h"

#define STATUS_AT (EP_GPU_RECORD_BYTES / 2) /* of the page; the progress record is shorter */
#define COUNTS_AT (STATUS_AT + 1024)
_Static_assert(sizeof(ep_hang_record_t) <= STATUS_AT, "STATUS_AT");
_Static_assert(STATUS_AT + sizeof(ep_ht_status_t) <= COUNTS_AT, "COUNTS_AT");
_Static_assert(COUNTS_AT + EP_GPU_COUNTS * sizeof(int64_t) <= EP_GPU_RECORD_BYTES, "COUNTS_AT");

struct ep_gpu_hang {
  ep_hang_file_t file;
  void *page;     /* pinned: the file's, or an own one */
  int registered; /* the file's */
  pthread_t copier;
  int copies;
  _Atomic int stop;
  ep_hang_device_t *device; /* in the page */
};

static void *copyForEver(void *arg) {
  struct ep_gpu_hang *h = arg;
  for (int last = 0; !last; usleep(20000)) {
    last = atomic_load(&h->stop);
    memcpy(&h->file.record->device, h->device, sizeof *h->device);
    if (last) break;
  }
  return NULL;
}

/* The file's page, if it can be pinned. */
static int pinFile(struct ep_gpu_hang *h) {
  if (!h->file.record) return 0;
  if (cudaHostRegister(h->file.record, EP_HANG_FILE_BYTES,
                       cudaHostRegisterMapped | cudaHostRegisterPortable) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  h->page = h->file.record;
  h->registered = 1;
  h->device = &h->file.record->device;
  return 1;
}

static trefoil_result_t pinOwn(struct ep_gpu_hang *h) {
  EP_CUDA(
      cudaHostAlloc(&h->page, EP_GPU_RECORD_BYTES, cudaHostAllocMapped | cudaHostAllocPortable));
  memset(h->page, 0, EP_GPU_RECORD_BYTES);
  h->device = h->page;
  return TREFOIL_OK;
}

static trefoil_result_t start(ep_gpu_group_t *g, struct ep_gpu_hang *h) {
  int pinned = pinFile(h);
  if (!pinned) EP_TRY(pinOwn(h));
  ep_hang_device_t *d = h->device;
  d->masks = !g->isHt && g->group->limits.enableMask != 0;
  d->rails = !g->isHt && g->group->llRails;
  if (h->file.record) EP_TRY(epGpuClockOffset(&d->clockOffsetNs));
  d->used = 1;
  void *onDevice = NULL;
  EP_CUDA(cudaHostGetDevicePointer(&onDevice, d, 0));
  ep_hang_device_t *dev = onDevice;
  g->record = &d->wait;
  g->status = (ep_ht_status_t *)((char *)h->page + STATUS_AT);
  g->ll.record = &dev->wait;
  EP_CUDA(cudaHostGetDevicePointer(&onDevice, g->status, 0));
  g->statusOnDevice = onDevice;
  g->counts = (int64_t *)((char *)h->page + COUNTS_AT);
  g->countsOnDevice = (int64_t *)((char *)onDevice + (COUNTS_AT - STATUS_AT));
  if (h->file.record) g->finished = dev->finished;
  if (h->file.record && !pinned) {
    epLog(g->group, "NCCL_EP_HANG_DIR: %s cannot be mapped to the GPU; copied every 20 ms",
          h->file.path);
    h->copies = pthread_create(&h->copier, NULL, copyForEver, h) == 0;
  }
  return TREFOIL_OK;
}

trefoil_result_t epGpuWatchOpen(ep_gpu_group_t *g) {
  struct ep_gpu_hang *h = calloc(1, sizeof *h);
  EP_CHECK(h, TREFOIL_SYSTEM_ERROR, "ncclEpCreateGroup: out of memory");
  g->hang = h;
  g->group->allocated[0][EP_MEMORY_HOST] += EP_GPU_RECORD_BYTES;
  epHangFileOpen(&h->file, g->group, epGpuCommHash(g->group->comm), g->id);
  return start(g, h);
}

void epGpuWatchClose(ep_gpu_group_t *g) {
  struct ep_gpu_hang *h = g->hang;
  if (!h) return;
  int failed = g->record && g->record->failed;
  if (h->copies) {
    atomic_store(&h->stop, 1);
    pthread_join(h->copier, NULL);
  }
  if (h->registered) {
    cudaHostUnregister(h->page);
  } else if (h->page) {
    cudaFreeHost(h->page);
  }
  epHangFileClose(&h->file, failed);
  g->group->allocated[0][EP_MEMORY_HOST] -= EP_GPU_RECORD_BYTES;
  free(h);
  g->hang = NULL;
  g->record = NULL;
}

/* ---- calls look ------------------------------------------------------------------------------ */

static const char *kindName(uint32_t kind) {
  static const char *const names[EP_HANG_KINDS] = {"Update", "Dispatch", "Combine"};
  return names[epHangKindOf(kind)];
}

static void pollStatus(ncclEpGroup_t group, ep_gpu_group_t *g) {
  const volatile ep_ht_status_t *n = g->status;
  ep_ht_status_t *seen = &g->statusSeen;
  uint32_t badIds = n->badIds, traps = n->traps, shorts = n->shorts;
  if (badIds != seen->badIds) {
    epReport(
        group, EP_DEFERRED_STICKY, TREFOIL_INVALID_ARGUMENT,
        "topk_idx of rank %d: %u entries are outside [0, %d) and not -1; they counted as unused",
        group->rank, badIds - seen->badIds, g->ht.numExperts);
  }
  if (traps != seen->traps) {
    epReport(group, EP_DEFERRED_STICKY, TREFOIL_INVALID_USAGE,
             "rank %d would receive %lld slots; max_recv_tokens_per_rank is %u (overflow_policy "
             "TRAP): nothing was written; call ncclEpErrorClear and raise the bound",
             group->rank, (long long)n->neededRows, group->limits.maxRecv);
  }
  if (shorts != seen->shorts) {
    epReport(
        group, EP_DEFERRED_STICKY, TREFOIL_INVALID_ARGUMENT,
        "rank %d has %lld slots; topk_weights has %lld rows: nothing was written or sent; call "
        "ncclEpErrorClear",
        group->rank, (long long)n->neededRows, (long long)n->rows);
  }
  *seen = (ep_ht_status_t){.badIds = badIds, .traps = traps, .shorts = shorts};
}

/* A wait that gave up writes the count first and the state last. With masks the state may have been
 * overwritten since, by a later wait. */
static int isComplete(const volatile ep_wait_record_t *r) {
  for (int i = 0; i < 100 && r->state != 2; i++) usleep(1);
  return r->state == 2;
}

/* What lay where the flag was expected; waits for rows of low latency do not tell. */
static void describeFlags(const volatile ep_wait_record_t *r, char *text, size_t bytes) {
  if (epHangHasReceived(r->kind, r->phase)) {
    snprintf(text, bytes, "flag expected %u, found %u", r->expected, r->received);
  } else {
    snprintf(text, bytes, "flag expected %u", r->expected);
  }
}

/* By rails the record alone does not tell a source that is missing from the rank that forwards for it. */
static void describeForwarder(ncclEpGroup_t group, const volatile ep_wait_record_t *r, char *text,
                              size_t bytes) {
  text[0] = 0;
  if (epIsHt(group) || !group->llRails || r->kind != EP_LL_DISPATCH || r->rank < 0) return;
  int via = epLlRailVia(group->ranksPerNode, group->rank, r->rank);
  if (via >= 0) snprintf(text, bytes, " (or rank %d, which forwards for it)", via);
}

/* In seconds; a wait in HT has a limit of its own besides the group's. */
static double waitLimit(ncclEpGroup_t group, const ep_gpu_group_t *g) {
  return (double)(g->isHt ? g->ht.timeoutNs : group->timeoutNs) * 1e-9;
}

void epGpuPoll(ncclEpGroup_t group) {
  ep_gpu_group_t *g = epGpu(group);
  const volatile ep_wait_record_t *r = g->record;
  uint32_t gaveUp = r->numGaveUp;
  if (g->isHt) pollStatus(group, g);
  if (gaveUp == g->gaveUpSeen) return;
  g->gaveUpSeen = gaveUp;
  int masks = !g->isHt && group->limits.enableMask != 0;
  if (!isComplete(r)) {
    epReport(group, masks ? EP_DEFERRED_FLAG : EP_DEFERRED_FATAL, TREFOIL_REMOTE_ERROR,
             "a rank did not answer within %.3g s%s", waitLimit(group, g),
             masks ? " and is masked now; ncclEpMaskQuery tells which" : "");
    return;
  }
  char flags[64], forwarder[64];
  describeFlags(r, flags, sizeof flags);
  describeForwarder(group, r, forwarder, sizeof forwarder);
  epReport(group, masks ? EP_DEFERRED_FLAG : EP_DEFERRED_FATAL, TREFOIL_REMOTE_ERROR,
           "rank %d%s did not answer within %.3g s: rank %d waited in %s %llu for its %s (%s)%s",
           r->rank, forwarder, waitLimit(group, g), group->rank, kindName(r->kind),
           (unsigned long long)r->operation, epHangPhase(r->phase), flags,
           masks     ? "; it is masked now"
           : g->isHt ? "; destroy the group"
                     : "; destroy the group (with enable_mask the others would go on without it)");
}

void epGpuErrorCleared(ncclEpGroup_t group) {
  (void)group;
}
