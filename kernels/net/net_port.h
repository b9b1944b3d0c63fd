/* A kernel's argument for the network between NVLink domains: one context of a device communicator, and
 * this rank's memory behind it. C and C++. */
#ifndef TREFOIL_KERNELS_NET_NET_PORT_H
#define TREFOIL_KERNELS_NET_NET_PORT_H

#include <stdint.h>

#define EP_NET_MOST_PUTS     16 /* under way to a peer, below the least queue of NCCL's proxy, 32 */
#define EP_NET_MOST_BYTES    (1 << 30) /* of a put: NCCL splits larger ones */
#define EP_NET_SCRATCH_BYTES 16        /* what a signal without data carries */

/* What puts with data are for. */
typedef enum ep_net_purpose {
  EP_NET_FOR_DISPATCH, /* rows, in low latency with their routing */
  EP_NET_FOR_COMBINE,
  EP_NET_FOR_WEIGHTS, /* low latency's partial sums: to the ranks that weight them */
  EP_NET_FOR_IDS,     /* high throughput's Update */
  EP_NET_PURPOSES
} ep_net_purpose_t;

typedef struct ep_net_port {
  const void *comm;   /* of the implementation, in device memory: NCCL's is an ncclDevComm */
  void *window;       /* ncclWindow_t: offsets of puts count from its start */
  uint64_t *posted;   /* [numRanks] on the device, zero at the start: puts to each peer so far */
  uint64_t *purposes; /* [EP_NET_PURPOSES][numRanks], those of them with data; NULL: not counted */
  uint64_t scratch; /* offset of EP_NET_SCRATCH_BYTES in the window, written by the network alone */
  int rank, numRanks;
  int context; /* has signals 0 .. and a counter for each peer, 0 .. numRanks - 1 */
} ep_net_port_t;

#endif
