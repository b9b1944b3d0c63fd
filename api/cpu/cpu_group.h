/* The backend's functions that cpu_backend.c lists. */
#ifndef TREFOIL_API_CPU_CPU_GROUP_H
#define TREFOIL_API_CPU_CPU_GROUP_H

#include <nccl_device.h>

#include "api/backend.h"

trefoil_result_t epCpuTopology(ncclComm_t comm, int *rank, int *numRanks, int *ranksPerNode);
trefoil_result_t epCpuRanks(ncclComm_t comm, const char *call, int *rank, int *numRanks,
                            int *ranksPerNode);
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

/* ---- cpu_grad.c ---- */
size_t epCpuGradBytes(void);
trefoil_result_t epCpuGradSizes(const trefoil_grad_config_t *c, int numSms, size_t *exchangeBytes,
                                size_t *scratchBytes);
trefoil_result_t epCpuGradOpen(struct trefoil_grad_gpu *g, const trefoil_grad_config_t *c,
                               const trefoil_grad_gpu_options_t *o, uint64_t hash);
trefoil_result_t epCpuGradStep(struct trefoil_grad_gpu *g, const void *grad, void *update,
                               cudaStream_t stream);
trefoil_result_t epCpuGradSync(struct trefoil_grad_gpu *g, int64_t period, void *params,
                               cudaStream_t stream);
int epCpuGradLost(const struct trefoil_grad_gpu *g, struct ep_grad_loss *loss);
trefoil_result_t epCpuGradGetMask(struct trefoil_grad_gpu *g, int *active, cudaStream_t stream);
trefoil_result_t epCpuGradSetMask(struct trefoil_grad_gpu *g, const int *active,
                                  cudaStream_t stream);
void epCpuGradClose(struct trefoil_grad_gpu *g);
void epCpuGradRelease(struct trefoil_grad_gpu *g);

#endif
