/* What ranks show each other before a collective call goes on. */
#ifndef TREFOIL_API_CPU_CPU_ROUND_H
#define TREFOIL_API_CPU_CPU_ROUND_H

#include "api/cpu/cpu.h"

typedef enum ep_call {
  EP_CALL_CREATE_GROUP,
  EP_CALL_INIT_HANDLE,
  EP_CALL_GRAD_CREATE,
  EP_CALL_GRAD_DESTROY
} ep_call_t;

typedef struct ep_notice {
  int32_t call;     /* ep_call_t */
  int32_t arenaIdx; /* InitHandle: which buffers grow, */
  int64_t topk;     /* for how many entries a row */
  uint64_t groupId; /* CreateGroup: rank 0's proposal; GradGpuCreate: a hash of the configuration */
  ep_settings_t settings; /* CreateGroup */
} ep_notice_t;
_Static_assert(sizeof(ep_notice_t) <= 256, "what a barrier round of the host runtime carries");

/* Shows this rank's notice, waits for all ranks and compares. The same result and the
 * same sentence on every rank that came. *notice becomes rank 0's (of use only if TREFOIL_OK). */
trefoil_result_t epCpuBarrierRound(ncclComm_t comm, int numRanks, uint64_t timeoutNs,
                                   ep_notice_t *notice);

#endif
