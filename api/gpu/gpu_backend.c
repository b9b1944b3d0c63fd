/* The table of operations of the GPU library. */
#include "api/gpu/board.h"
#include "api/gpu/gpu.h"

/* High throughput's: no handle of it can exist (the preflight's rules refuse the group). */
static trefoil_result_t noRouted(ncclEpHandle_t handle, cudaStream_t stream, ep_routed_t *out) {
  (void)handle, (void)stream, (void)out;
  return epFail(TREFOIL_INVALID_USAGE, "high-throughput mode is not in this build of libnccl_ep");
}

static trefoil_result_t noCount(ncclEpHandle_t handle, cudaStream_t stream, int64_t *count) {
  (void)handle, (void)stream, (void)count;
  return epFail(TREFOIL_INVALID_USAGE, "high-throughput mode is not in this build of libnccl_ep");
}

const ep_backend_t epBackend = {
    .kind = EP_BACKEND_GPU,
    .name = "GPU",
    .combineNvfp4 = 0,
    .sizing = epGpuSizing,
    .topology = epGpuTopology,
    .callBegin = epBoardCallBegin,
    .callFail = epBoardCallFail,
    .checkComm = epGpuCheckComm,
    .groupCreate = epGpuGroupCreate,
    .groupDestroy = epGpuGroupDestroy,
    .handleCreate = epGpuHandleCreate,
    .handleDestroy = epGpuHandleDestroy,
    .findWindow = epGpuFindWindow,
    .update = epGpuUpdate,
    .dispatch = epGpuDispatch,
    .combine = epGpuCombine,
    .complete = epGpuComplete,
    .readRouted = noRouted,
    .receivedCount = noCount,
    .maskQuery = epGpuMaskQuery,
    .maskUpdate = epGpuMaskUpdate,
    .maskClean = epGpuMaskClean,
    .poll = epGpuPoll,
    .errorCleared = epGpuErrorCleared,
    .countBytes = epGpuCountBytes,
    .readBytes = epGpuReadBytes,
    .keepTimes = epGpuKeepTimes,
    .readTimes = epGpuReadTimes,
};
