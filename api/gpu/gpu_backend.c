/* The table of operations of the GPU library. */
#include "api/gpu/board.h"
#include "api/gpu/gpu.h"

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
    .readRouted = epGpuReadRouted,
    .receivedCount = epGpuReceivedCount,
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
