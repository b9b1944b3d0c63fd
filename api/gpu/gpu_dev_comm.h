/* The device communicator of a group across NVLink domains. */
#ifndef TREFOIL_API_GPU_GPU_DEV_COMM_H
#define TREFOIL_API_GPU_GPU_DEV_COMM_H

#include <nccl.h>
#include <nccl_device.h>

#include "api/gpu/gpu.h"

/* Collective: ncclDevCommCreate with the group's time limit, on every rank the sentence of one that fails.
 * *givenUp: NCCL's call is still under way on this rank, and the communicator can only be aborted. */
trefoil_result_t epGpuDevComm(ep_gpu_group_t *g, const ncclDevCommRequirements_t *needs,
                              ncclDevComm_t *out, int *givenUp);

#endif
