/* An object of A2SGD (trefoil/a2sgd.h): this folder's part, at the beginning of the backend's. */
#ifndef TREFOIL_API_GRAD_OBJECT_H
#define TREFOIL_API_GRAD_OBJECT_H

#include "api/object.h"
#include "trefoil/a2sgd.h"

struct trefoil_grad_gpu {
  ncclComm_t comm;
  int rank, numRanks, enableMask;
  trefoil_dtype_t dtype;
  int64_t elements, syncPeriod;
  uint64_t timeoutNs;
};

/* For gradOpen: the communicator is the configuration's; rank's is as rank 0's. */
trefoil_result_t epGradCheckRanks(const trefoil_grad_config_t *c, int numRanks, int perNode);
trefoil_result_t epGradCompare(int rank, int isSame);

/* A rank that a step or a synchronisation waited for in vain: the how manieth it is, and of which group or
 * from which element on. */
typedef struct ep_grad_loss {
  int rank, isSync;
  uint64_t waitedNs, number;
  int64_t item;
} ep_grad_loss_t;

#endif
