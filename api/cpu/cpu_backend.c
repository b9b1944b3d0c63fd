/* The table of operations of the CPU library. */
#include "api/cpu/cpu.h"
#include "api/cpu/cpu_group.h"
#include "trefoil_host.h"

static trefoil_result_t findWindow(ncclEpGroup_t group, ncclWindow_t window, ep_window_t *out) {
  void *base = NULL;
  int flags = 0;
  ncclResult_t result = trefoilHostWindowRange(group->comm, window, &base, &out->bytes, &flags);
  EP_CHECK(result == ncclSuccess, TREFOIL_INVALID_ARGUMENT,
           "win_hdl %p is not a window of the group's communicator", (void *)window);
  out->base = base;
  out->symmetric = (flags & NCCL_WIN_COLL_SYMMETRIC) != 0;
  return TREFOIL_OK;
}

static void findPlace(const void *ptr, ep_place_t *out) {
  static const ep_place_kind_t kinds[] = {
      [trefoilHostMemoryNone] = EP_PLACE_NONE,     [trefoilHostMemoryFreed] = EP_PLACE_FREED,
      [trefoilHostMemoryDevice] = EP_PLACE_DEVICE, [trefoilHostMemoryManaged] = EP_PLACE_MANAGED,
      [trefoilHostMemoryPinned] = EP_PLACE_PINNED, [trefoilHostMemoryPeer] = EP_PLACE_PEER,
  };
  trefoil_host_memory_t memory;
  trefoilHostMemory(ptr, &memory);
  *out = (ep_place_t){kinds[memory.kind], memory.device, (uintptr_t)memory.base, memory.bytes};
}

const ep_backend_t epBackend = {
    .kind = EP_BACKEND_CPU,
    .name = "CPU",
    .combineNvfp4 = 1,
    .sizing = epSizing,
    .topology = epCpuTopology,
    .callBegin = epCpuCallBegin,
    .callFail = epCpuCallFail,
    .checkComm = epCpuCheckComm,
    .groupCreate = epCpuGroupCreate,
    .groupDestroy = epCpuGroupDestroy,
    .handleCreate = epCpuHandleCreate,
    .handleDestroy = epCpuHandleDestroy,
    .findWindow = findWindow,
    .findPlace = findPlace,
    .update = epCpuUpdate,
    .dispatch = epCpuDispatch,
    .combine = epCpuCombine,
    .complete = epCpuComplete,
    .readRouted = epCpuReadRouted,
    .receivedCount = epCpuReceivedCount,
    .maskQuery = epMaskQuery,
    .maskUpdate = epMaskUpdate,
    .maskClean = epMaskClean,
    .countBytes = epCpuCountBytes,
    .readBytes = epCpuReadBytes,
    .gradBytes = epCpuGradBytes,
    .gradSizes = epCpuGradSizes,
    .gradOpen = epCpuGradOpen,
    .gradStep = epCpuGradStep,
    .gradSync = epCpuGradSync,
    .gradLost = epCpuGradLost,
    .gradGetMask = epCpuGradGetMask,
    .gradSetMask = epCpuGradSetMask,
    .gradClose = epCpuGradClose,
    .gradRelease = epCpuGradRelease,
};
