/* Control memory of high throughput across NVLink domains. By far node. */
#ifndef TREFOIL_KERNELS_HT_FAR_CONTROL_H
#define TREFOIL_KERNELS_HT_FAR_CONTROL_H

#include "kernels/ht/ht_far.h"

#define EP_HT_FAR_NODES (EP_HT_MAX_RANKS - 1)

/* Both rings of a kind and far node. Slots count from the start of the rings, signals from that of the
 * communicator. */
typedef struct ep_ht_ring_count {
  unsigned long long sent, received;             /* slots of earlier operations */
  unsigned long long credited;                   /* slots whose words allow a refill */
  unsigned long long sentBefore, receivedBefore; /* signals: slots of earlier rings */
} ep_ht_ring_count_t;

typedef struct ep_ht_far_control {
  ep_ht_ring_count_t rings[2][EP_HT_FAR_NODES];
  unsigned long long signalled[2][EP_HT_FAR_NODES]; /* Update, by parity: sum of what was added */
  unsigned work[2];                                 /* next candidate of forwarders, reducers */
  unsigned idsSent; /* blocks of an Update that have stored their ids */
} ep_ht_far_control_t;

#endif
