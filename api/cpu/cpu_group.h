/* The backend's functions that cpu_backend.c lists. */
#ifndef TREFOIL_API_CPU_CPU_GROUP_H
#define TREFOIL_API_CPU_CPU_GROUP_H

#include <nccl_device.h>

#include "api/backend.h"

trefoil_result_t epCpuTopology(ncclComm_t comm, int *rank, int *numRanks, int *ranksPerNode);
void epCpuCallBegin(ncclComm_t comm);
void epCpuCallFail(ncclComm_t comm, trefoil_result_t code, const char *why);
trefoil_result_t epCpuCheckComm(ncclEpGroup_t group);
trefoil_result_t epCpuGroupCreate(ncclEpGroup_t group);
trefoil_result_t epCpuGroupDestroy(ncclEpGroup_t group);
trefoil_result_t epCpuHandleCreate(ncclEpHandle_t handle);
trefoil_result_t epCpuHandleDestroy(ncclEpHandle_t handle);
trefoil_result_t epCpuUpdate(ncclEpHandle_t handle, const ep_update_call_t *call,
                             cudaStream_t stream);
trefoil_result_t epCpuDispatch(ncclEpHandle_t handle, const ep_dispatch_call_t *call,
                               cudaStream_t stream);
trefoil_result_t epCpuCombine(ncclEpHandle_t handle, const ep_combine_call_t *call,
                              cudaStream_t stream);
trefoil_result_t epCpuComplete(ncclEpHandle_t handle, cudaStream_t stream);
trefoil_result_t epCpuReadRouted(ncclEpHandle_t handle, cudaStream_t stream, ep_routed_t *out);
trefoil_result_t epCpuReceivedCount(ncclEpHandle_t handle, cudaStream_t stream, int64_t *count);

#endif
