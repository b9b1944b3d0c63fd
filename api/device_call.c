/* The functions of trefoil/device.h: checks, then the backend. */
#include "trefoil/device.h"

#include <string.h>

#include "api/object.h"
#include "trefoil/plan.h"

static trefoil_result_t checkOffered(int offered, const char *function) {
  EP_CHECK(offered, TREFOIL_INVALID_USAGE, "%s: the %s library cannot tell; libnccl_ep can",
           function, epBackend.name);
  return TREFOIL_OK;
}

static trefoil_result_t countBytes(ncclEpGroup_t g, int on) {
  EP_TRY(epCheckGroup(g, "ncclEpCountBytes"));
  EP_TRY(checkOffered(epBackend.countBytes != NULL, "ncclEpCountBytes"));
  return epBackend.countBytes(g, on != 0);
}

ncclResult_t ncclEpCountBytes(ncclEpGroup_t group, int on) {
  return (ncclResult_t)countBytes(group, on);
}

static trefoil_result_t readBytes(ncclEpGroup_t g, int kind, uint64_t *bytes, int *tiers, int reset,
                                  cudaStream_t stream) {
  EP_TRY(epCheckGroup(g, "ncclEpReadBytes"));
  EP_TRY(checkOffered(epBackend.readBytes != NULL, "ncclEpReadBytes"));
  EP_CHECK(kind == NCCL_EP_KIND_DISPATCH || kind == NCCL_EP_KIND_COMBINE, TREFOIL_INVALID_ARGUMENT,
           "ncclEpReadBytes: kind is %d; must be 0 (dispatch) or 1 (combine)", kind);
  EP_CHECK(bytes, TREFOIL_INVALID_ARGUMENT, "ncclEpReadBytes: bytes is NULL");
  EP_TRY(epBackend.readBytes(g, kind, bytes, reset, stream));
  int G = g->ranksPerNode;
  for (int r = 0; tiers && r < g->numRanks; r++) {
    tiers[r] = r == g->rank           ? TREFOIL_TIER_SELF
               : r / G == g->rank / G ? TREFOIL_TIER_NVLINK
                                      : TREFOIL_TIER_NET;
  }
  return TREFOIL_OK;
}

ncclResult_t ncclEpReadBytes(ncclEpGroup_t group, int kind, uint64_t *bytes, int *tiers, int reset,
                             cudaStream_t stream) {
  return (ncclResult_t)readBytes(group, kind, bytes, tiers, reset, stream);
}

static trefoil_result_t readPuts(ncclEpGroup_t g, int kind, uint64_t *puts, cudaStream_t stream) {
  EP_TRY(epCheckGroup(g, "ncclEpReadPuts"));
  EP_TRY(checkOffered(epBackend.readPuts != NULL, "ncclEpReadPuts"));
  EP_CHECK(kind >= 0 && kind < NCCL_EP_PUT_KINDS, TREFOIL_INVALID_ARGUMENT,
           "ncclEpReadPuts: kind is %d; must be 0 to %d", kind, NCCL_EP_PUT_KINDS - 1);
  EP_CHECK(puts, TREFOIL_INVALID_ARGUMENT, "ncclEpReadPuts: puts is NULL");
  return epBackend.readPuts(g, kind, puts, stream);
}

ncclResult_t ncclEpReadPuts(ncclEpGroup_t group, int kind, uint64_t *puts, cudaStream_t stream) {
  return (ncclResult_t)readPuts(group, kind, puts, stream);
}

static trefoil_result_t keepTimes(ncclEpGroup_t g, unsigned maxLaunches) {
  EP_TRY(epCheckGroup(g, "ncclEpKeepTimes"));
  EP_TRY(checkOffered(epBackend.keepTimes != NULL, "ncclEpKeepTimes"));
  EP_CHECK(maxLaunches <= 65536, TREFOIL_INVALID_ARGUMENT,
           "ncclEpKeepTimes: maxLaunches is %u; must be at most 65536", maxLaunches);
  return epBackend.keepTimes(g, maxLaunches);
}

ncclResult_t ncclEpKeepTimes(ncclEpGroup_t group, unsigned maxLaunches) {
  return (ncclResult_t)keepTimes(group, maxLaunches);
}

static trefoil_result_t readTimes(ncclEpGroup_t g, ncclEpKernelTime_t *times, unsigned *count,
                                  cudaStream_t stream) {
  EP_TRY(epCheckGroup(g, "ncclEpReadTimes"));
  EP_TRY(checkOffered(epBackend.readTimes != NULL, "ncclEpReadTimes"));
  EP_CHECK(times && count, TREFOIL_INVALID_ARGUMENT, "ncclEpReadTimes: %s is NULL",
           times ? "count" : "times");
  return epBackend.readTimes(g, times, count, stream);
}

ncclResult_t ncclEpReadTimes(ncclEpGroup_t group, ncclEpKernelTime_t *times, unsigned *count,
                             cudaStream_t stream) {
  return (ncclResult_t)readTimes(group, times, count, stream);
}

static trefoil_result_t memoryInUse(ncclEpGroup_t g, ncclEpPreflight_t *out) {
  EP_TRY(epCheckGroup(g, "ncclEpMemoryInUse"));
  EP_CHECK(out, TREFOIL_INVALID_ARGUMENT, "ncclEpMemoryInUse: out is NULL");
  EP_CHECK(out->magic == NCCL_EP_MAGIC && out->size >= sizeof *out, TREFOIL_INVALID_ARGUMENT,
           "ncclEpMemoryInUse: out->magic is 0x%X, size %u; must be 0x%X and at least %zu "
           "(NCCL_EP_PREFLIGHT_INIT)",
           out->magic, out->size, NCCL_EP_MAGIC, sizeof *out);
  ncclEpPreflight_t p = {.size = out->size, .magic = out->magic, .supported = 1};
  p.group_device_bytes = g->allocated[0][EP_MEMORY_DEVICE];
  p.group_shared_bytes = g->allocated[0][EP_MEMORY_SHARED];
  p.group_host_bytes = g->allocated[0][EP_MEMORY_HOST];
  p.handle_device_bytes = g->allocated[1][EP_MEMORY_DEVICE];
  p.handle_shared_bytes = g->allocated[1][EP_MEMORY_SHARED];
  p.handle_host_bytes = g->allocated[1][EP_MEMORY_HOST];
  memcpy(out, &p, sizeof p);
  return TREFOIL_OK;
}

ncclResult_t ncclEpMemoryInUse(ncclEpGroup_t group, ncclEpPreflight_t *out) {
  return (ncclResult_t)memoryInUse(group, out);
}
