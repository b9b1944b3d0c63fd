/* Before the memory goes that puts read from or land in. C and C++. */
#ifndef TREFOIL_KERNELS_NET_NET_DRAIN_H
#define TREFOIL_KERNELS_NET_NET_DRAIN_H

#include "kernels/net/net_port.h"
#include "trefoil/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Launches a kernel that waits, at most timeoutNs, until no put of this rank is under way. *late, on the
 * device: 1 + a rank that some are still under way to, or 0. Over NCCL's GIN. */
trefoil_result_t epNetDrain(const ep_net_port_t *port, uint64_t timeoutNs, int *late,
                            void *cudaStream);

#ifdef __cplusplus
}
#endif
#endif
