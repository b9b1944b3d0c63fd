/* The table of operations of the CPU library. */
#include "api/cpu/cpu.h"
#include "api/cpu/cpu_group.h"

static trefoil_result_t windowPointer(ncclEpGroup_t group, ncclWindow_t window, uint64_t offset,
                                      void **pointer) {
  void *base = NULL;
  ncclResult_t result = ncclWinGetUserPtr(group->comm, window, &base);
  EP_CHECK(result == ncclSuccess && base, TREFOIL_INVALID_ARGUMENT,
           "win_hdl %p is not a window of the group's communicator", (void *)window);
  *pointer = (char *)base + offset;
  return TREFOIL_OK;
}

const ep_backend_t epBackend = {
    .kind = EP_BACKEND_CPU,
    .name = "CPU",
    .combineNvfp4 = 1,
    .topology = epCpuTopology,
    .groupCreate = epCpuGroupCreate,
    .groupDestroy = epCpuGroupDestroy,
    .handleCreate = epCpuHandleCreate,
    .handleDestroy = epCpuHandleDestroy,
    .windowPointer = windowPointer,
    .update = epCpuUpdate,
    .dispatch = epCpuDispatch,
    .combine = epCpuCombine,
    .complete = epCpuComplete,
    .receivedCount = epCpuReceivedCount,
    .maskQuery = epMaskQuery,
    .maskUpdate = epMaskUpdate,
    .maskClean = epMaskClean,
};
