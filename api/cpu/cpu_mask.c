/* Masks: which ranks are alive, as this rank sees it. */
#include <stdlib.h>
#include <string.h>

#include "api/cpu/cpu.h"

static void runQuery(ep_record_t *r) {
  for (int i = 0; i < r->g->R; i++) r->call.deviceMask[i] = epActive(r->g, i);
}

static void runUpdate(ep_record_t *r) {
  for (int i = 0; i < r->g->R; i++) atomic_store(&r->g->peers[i].active, r->mask[i]);
}

static void runClean(ep_record_t *r) {
  if (!epCleanBarrier(r->g)) return;
  for (int i = 0; i < r->g->R; i++) atomic_store(&r->g->peers[i].active, 1);
}

trefoil_result_t epMaskQuery(ncclEpGroup_t group, int *deviceMask, cudaStream_t stream) {
  ep_record_t *r;
  EP_TRY(epNewRecord(epCpu(group), NULL, runQuery, &r));
  r->call.deviceMask = deviceMask;
  return epQueue(r, stream);
}

trefoil_result_t epMaskUpdate(ncclEpGroup_t group, const int *hostMask, cudaStream_t stream) {
  ep_record_t *r;
  EP_TRY(epNewRecord(epCpu(group), NULL, runUpdate, &r));
  memcpy(r->mask, hostMask, (size_t)group->numRanks * sizeof *hostMask);
  return epQueue(r, stream);
}

trefoil_result_t epMaskClean(ncclEpGroup_t group, cudaStream_t stream) {
  ep_record_t *r;
  EP_TRY(epNewRecord(epCpu(group), NULL, runClean, &r));
  return epQueue(r, stream);
}
