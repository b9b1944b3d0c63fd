/* Numbers of CUDA 13.0 and NCCL 2.32 that programs are compiled with, checked at compile time against
 * whichever headers are on the include path: ours, or the real ones of CUDA 13.0 and up. C11, C++11. */
#ifndef TREFOIL_TESTS_HOST_ABI_FACTS_H
#define TREFOIL_TESTS_HOST_ABI_FACTS_H

#include <stddef.h>

#include <cuda_runtime.h>

#ifdef __cplusplus
#define FACT(cond) static_assert(cond, #cond)
#else
#define FACT(cond) _Static_assert(cond, #cond)
#endif

#include <nvtx3/nvToolsExt.h>
FACT(sizeof(nvtxEventAttributes_t) == 48 && offsetof(nvtxEventAttributes_t, message) == 40);
FACT(NVTX_MESSAGE_TYPE_REGISTERED == 3 && NVTX_NO_PUSH_POP_TRACKING == -2 && NVTX_VERSION == 3);
FACT(NVTX_COLOR_ARGB == 1 && NVTX_PAYLOAD_TYPE_FLOAT == 6 && sizeof(nvtxRangeId_t) == 8);

FACT(CUDART_VERSION >= 13000);
FACT(cudaErrorInvalidValue == 1 && cudaErrorMemoryAllocation == 2 && cudaErrorInvalidDevice == 101);
FACT(cudaErrorInvalidResourceHandle == 400 && cudaErrorIllegalState == 401);
FACT(cudaErrorNotReady == 600 && cudaErrorIllegalAddress == 700 && cudaErrorNotPermitted == 800);
FACT(cudaErrorNotSupported == 801 && cudaErrorStreamCaptureUnsupported == 900);
FACT(cudaErrorStreamCaptureInvalidated == 901 && cudaErrorStreamCaptureMerge == 902);
FACT(cudaErrorStreamCaptureUnmatched == 903 && cudaErrorStreamCaptureUnjoined == 904);
FACT(cudaErrorStreamCaptureIsolation == 905 && cudaErrorStreamCaptureImplicit == 906);
FACT(cudaErrorCapturedEvent == 907 && cudaErrorExternalDevice == 911 && cudaErrorUnknown == 999);
FACT(cudaMemcpyHostToDevice == 1 && cudaMemcpyDeviceToHost == 2 && cudaMemcpyDeviceToDevice == 3);
FACT(cudaMemcpyDefault == 4 && cudaMemoryTypeDevice == 2 && cudaMemoryTypeManaged == 3);
FACT(cudaStreamCaptureModeThreadLocal == 1 && cudaStreamCaptureModeRelaxed == 2);
FACT(cudaStreamNonBlocking == 1 && cudaEventDisableTiming == 2 && cudaHostAllocMapped == 2);
FACT(cudaDevAttrMultiProcessorCount == 16 && cudaDevAttrComputeCapabilityMajor == 75);
FACT(cudaDevAttrMaxSharedMemoryPerBlockOptin == 97 && cudaDevAttrClusterLaunch == 120);
FACT(cudaGraphNodeTypeMemcpy == 1 && cudaGraphNodeTypeHost == 3 && cudaGraphNodeTypeEmpty == 5);
FACT(sizeof(struct cudaPointerAttributes) == 88);
FACT(offsetof(struct cudaPointerAttributes, devicePointer) == 8);
FACT(sizeof(struct cudaDeviceProp) == 1008);
FACT(offsetof(struct cudaDeviceProp, totalGlobalMem) == 288);
FACT(offsetof(struct cudaDeviceProp, major) == 360);
FACT(offsetof(struct cudaDeviceProp, multiProcessorCount) == 384);
FACT(offsetof(struct cudaDeviceProp, clusterLaunch) == 748);
FACT(sizeof(struct cudaMemPoolProps) == 88 && offsetof(struct cudaMemPoolProps, maxSize) == 24);
FACT(sizeof(struct cudaMemcpy3DParms) == 160 && offsetof(struct cudaMemcpy3DParms, kind) == 152);
FACT(sizeof(struct cudaMemcpy3DPeerParms) == 168);
FACT(offsetof(struct cudaMemcpy3DPeerParms, dstDevice) == 136);
FACT(sizeof(cudaGraphExecUpdateResultInfo) == 24 && sizeof(struct cudaMemAccessDesc) == 12);
FACT(cudaGraphExecUpdateErrorTopologyChanged == 2 && cudaGraphExecUpdateErrorNotSupported == 6);
FACT(cudaMemPoolAttrReleaseThreshold == 4 && cudaMemPoolAttrUsedMemHigh == 8);
FACT(cudaMemAccessFlagsProtReadWrite == 3 && cudaDevP2PAttrCudaArrayAccessSupported == 4);
FACT(cudaDriverEntryPointSymbolNotFound == 1 && cudaErrorGraphExecUpdateFailure == 910);

#if !defined(FACTS_WITHOUT_NCCL)
#include <nccl.h>
FACT(sizeof(ncclUniqueId) == 128 && sizeof(ncclConfig_t) >= 48);
FACT(offsetof(ncclConfig_t, blocking) == 16 && offsetof(ncclConfig_t, netName) == 32);
FACT(ncclInvalidArgument == 4 && ncclInvalidUsage == 5 && ncclRemoteError == 6);
FACT(ncclInProgress == 7 && ncclSum == 0 && ncclAvg == 4 && ncclNumOps == 5);
FACT(ncclInt8 == 0 && ncclInt64 == 4 && ncclFloat16 == 6 && ncclFloat32 == 7 && ncclBfloat16 == 9);
FACT(ncclFloat8e4m3 == 10 && ncclFloat8e5m2 == 11);
#if NCCL_VERSION_CODE >= 23200
FACT(sizeof(ncclCollConfig_t) == 72 && offsetof(ncclCollConfig_t, algSelection) == 40);
FACT(offsetof(ncclCollConfig_t, launchCompletionEvent) == 64);
#endif
FACT(NCCL_WIN_COLL_SYMMETRIC == 1 && NCCL_SPLIT_NOCOLOR == -1);
#endif
#endif
