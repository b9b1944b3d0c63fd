#include <stdlib.h>
#include <unistd.h>

#include "net_comm_internal.h"

/* What ranks tell each other of a region. */
typedef struct {
  uint64_t bytes;
  uint32_t id, shared;
  ep_net_share_t share;
} record_t;

ep_net_region_t *epNetRegionAt(ep_net_comm_t *c, uint32_t id, uint64_t offset, uint64_t bytes) {
  ep_net_region_t *r = id < c->numRegions ? c->regions[id] : NULL;
  bool inside = r && offset <= r->memory.bytes && bytes <= r->memory.bytes - offset;
  return inside ? r : NULL;
}

static void unmap(ep_net_comm_t *c, const ep_net_view_t *view) {
  if (view->base) epNetCudaUnmap(c->cuda, view->base, view->span);
}

static void freeRegion(ep_net_comm_t *c, ep_net_region_t *r) {
  for (int i = 0; r && r->views && i < c->numRanks; i++) unmap(c, &r->views[i]);
  if (!r) return;
  free(r->views);
  free(r->shadow);
  free(r);
}

void epNetRegionsFree(ep_net_comm_t *c) {
  for (uint32_t i = 0; i < c->numRegions; i++) freeRegion(c, c->regions[i]);
  free(c->regions);
}

static ep_net_region_t *newRegion(ep_net_comm_t *c, const ep_net_memory_t *memory) {
  ep_net_region_t *r = calloc(1, sizeof *r);
  if (!r) return NULL;
  r->memory = *memory;
  r->views = calloc((size_t)c->numRanks, sizeof *r->views);
  if (memory->device && memory->neverReset) r->shadow = calloc(memory->bytes / 8 + 1, 8);
  if (r->views && (r->shadow || !memory->device || !memory->neverReset)) return r;
  freeRegion(c, r);
  return NULL;
}

/* Numbers are not used again. The lock is held. */
static int enter(ep_net_comm_t *c, ep_net_region_t *r, char *why) {
  ep_net_region_t **regions = realloc(c->regions, (c->numRegions + 1) * sizeof *regions);
  if (!regions) return epNetFail(why, "no memory for a region of the network");
  c->regions = regions;
  r->id = c->numRegions;
  regions[c->numRegions++] = r;
  return 0;
}

/* The driver is there from the first region of a GPU on. The lock is held. */
static int openCuda(ep_net_comm_t *c, bool device, char *why) {
  if (!device) return 0;
  if (c->cuda) return epNetCudaEnter(c->cuda, why);
  return epNetCudaOpen(epNetReceiveStream(c->numRanks - 1) + 1, &c->cuda, why);
}

static int enterRegion(ep_net_comm_t *c, ep_net_region_t *r, record_t *mine, char *why) {
  pthread_mutex_lock(&c->lock);
  int failed = openCuda(c, r->memory.device, why) || enter(c, r, why);
  bool share = r->memory.device && c->settings.carrier == EP_NET_COPY;
  if (!failed && share)
    failed = epNetCudaExport(c->cuda, (uint64_t)(uintptr_t)r->memory.address, &mine->share, why);
  pthread_mutex_unlock(&c->lock);
  mine->bytes = r->memory.bytes;
  mine->id = r->id;
  mine->shared = mine->share.descriptor >= 0;
  return failed ? -1 : 0;
}

static int import(ep_net_comm_t *c, ep_net_share_t *share, ep_net_view_t *view, char *why) {
  pthread_mutex_lock(&c->lock);
  int failed = epNetCudaImport(c->cuda, share, &view->base, why);
  pthread_mutex_unlock(&c->lock);
  view->span = share->span;
  if (!failed) view->address = view->base + share->offset;
  return failed;
}

/* Sees what a peer registered. */
static int view(ep_net_comm_t *c, ep_net_region_t *r, int peer, int64_t deadline, char *why) {
  record_t record;
  int descriptor, failed = 0;
  if (epNetReceiveRecord(c->ends[peer].control, &record, sizeof record, &descriptor, deadline, why))
    return -1;
  record.share.descriptor = descriptor;
  r->views[peer].bytes = record.bytes;
  if (record.id != r->id)
    failed =
        epNetFail(why, "rank %d registers its region %u, rank %d its region %u: the order differs",
                  c->rank, r->id, peer, record.id);
  else if (descriptor >= 0 && r->memory.device)
    failed = import(c, &record.share, &r->views[peer], why);
  if (descriptor >= 0) close(descriptor);
  return failed;
}

static int exchange(ep_net_comm_t *c, ep_net_region_t *r, const record_t *mine, char *why) {
  int64_t deadline = epNetNow() + c->settings.limitNs;
  int descriptor = mine->share.descriptor;
  r->views[c->rank] = (ep_net_view_t){mine->bytes, (uint64_t)(uintptr_t)r->memory.address, 0, 0};
  for (int p = 0; p < c->numRanks; p++)
    if (p != c->rank &&
        epNetSendRecord(c->ends[p].control, mine, sizeof *mine, descriptor, deadline, why))
      return -1;
  for (int p = 0; p < c->numRanks; p++)
    if (p != c->rank && view(c, r, p, deadline, why)) return -1;
  return 0;
}

static int registerIt(ep_net_comm_t *c, ep_net_region_t *r, char *why) {
  record_t mine = {.share = {.descriptor = -1}};
  pthread_mutex_lock(&c->registering);
  int failed = enterRegion(c, r, &mine, why) || exchange(c, r, &mine, why);
  pthread_mutex_unlock(&c->registering);
  if (mine.share.descriptor >= 0) close(mine.share.descriptor);
  return failed ? -1 : 0;
}

int epNetRegister(ep_net_comm_t *c, const ep_net_memory_t *memory, ep_net_region_t **out,
                  char *why) {
  ep_net_region_t *r = newRegion(c, memory);
  if (!r) return epNetFail(why, "no memory for a region of the network");
  if (registerIt(c, r, why)) {
    epNetDeregister(c, r);
    return -1;
  }
  *out = r;
  return 0;
}

void epNetDeregister(ep_net_comm_t *c, ep_net_region_t *r) {
  char ignored[EP_NET_WHY];
  pthread_mutex_lock(&c->lock);
  if (r->id < c->numRegions && c->regions[r->id] == r) c->regions[r->id] = NULL;
  if (c->cuda) epNetCudaEnter(c->cuda, ignored);
  freeRegion(c, r);
  pthread_mutex_unlock(&c->lock);
}
