/* Masks of low-latency groups. */
#include "api/object.h"
#include "api/range.h"

static trefoil_result_t checkMaskCall(ncclEpGroup_t g, const char *function) {
  EP_TRY(epCheckGroup(g, function));
  EP_CHECK(!epIsHt(g) && g->limits.enableMask, TREFOIL_INVALID_USAGE,
           "%s: masks are of low-latency groups with enable_mask 1", function);
  return epBackend.checkComm(g);
}

static trefoil_result_t maskQuery(ncclEpGroup_t g, int *deviceMask, cudaStream_t stream) {
  EP_TRY(checkMaskCall(g, "ncclEpMaskQuery"));
  EP_CHECK(deviceMask, TREFOIL_INVALID_ARGUMENT, "ncclEpMaskQuery: device_mask is NULL");
  if (g->checkTensors) {
    ep_ranges_t ranges;
    epRangesBegin(&ranges, g, "ncclEpMaskQuery");
    EP_TRY(epRangeCheck(&ranges, "device_mask", deviceMask, sizeof(int) * (size_t)g->numRanks, 1));
  }
  return epBackend.maskQuery(g, deviceMask, stream);
}

static trefoil_result_t maskUpdate(ncclEpGroup_t g, const int *hostMask, cudaStream_t stream) {
  EP_TRY(checkMaskCall(g, "ncclEpMaskUpdate"));
  EP_CHECK(hostMask, TREFOIL_INVALID_ARGUMENT, "ncclEpMaskUpdate: host_mask is NULL");
  for (int r = 0; r < g->numRanks; r++) {
    EP_CHECK(hostMask[r] == 0 || hostMask[r] == 1, TREFOIL_INVALID_ARGUMENT,
             "ncclEpMaskUpdate: host_mask[%d] is %d; must be 1 (active) or 0 (failed)", r,
             hostMask[r]);
  }
  EP_CHECK(hostMask[g->rank] == 1, TREFOIL_INVALID_ARGUMENT,
           "ncclEpMaskUpdate: host_mask[%d] is 0; a rank cannot mask itself", g->rank);
  return epBackend.maskUpdate(g, hostMask, stream);
}

static trefoil_result_t maskClean(ncclEpGroup_t g, cudaStream_t stream) {
  EP_TRY(checkMaskCall(g, "ncclEpMaskClean"));
  return epBackend.maskClean(g, stream);
}

ncclResult_t ncclEpMaskQuery(ncclEpGroup_t group, int *device_mask, cudaStream_t stream) {
  EP_RANGE();
  return (ncclResult_t)maskQuery(group, device_mask, stream);
}

ncclResult_t ncclEpMaskUpdate(ncclEpGroup_t group, const int *host_mask, cudaStream_t stream) {
  EP_RANGE();
  return (ncclResult_t)maskUpdate(group, host_mask, stream);
}

ncclResult_t ncclEpMaskClean(ncclEpGroup_t group, cudaStream_t stream) {
  EP_RANGE();
  return (ncclResult_t)maskClean(group, stream);
}
