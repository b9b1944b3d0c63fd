/* Control memory of the relay. */
#ifndef TREFOIL_KERNELS_LL_RELAY_CONTROL_H
#define TREFOIL_KERNELS_LL_RELAY_CONTROL_H

#include "kernels/ll/relay.h"

typedef struct ep_ll_relay_count {
  unsigned records, arrived, abandoned; /* of the message that blocks pack together */
  unsigned packed; /* of those that share a part of the mirrors: messages that are packed */
  unsigned landed,
      missed; /* of the message that a receive-only launch lands: warps that are done */
} ep_ll_relay_count_t;

#define EP_LL_RELAY_FREE EP_LL_MESSAGES /* + kind: signals of receive-only launches */

typedef struct ep_ll_relay_control {
  unsigned long long numbers[2]; /* operations sent, by kind */
  unsigned blocks[2];            /* by kind: of a launch that sends, those that have ended */
  ep_ll_relay_count_t counts[EP_LL_MESSAGES][EP_KERNEL_MAX_RANKS];
  unsigned long long signalled[EP_LL_MESSAGES + 2][2]
                              [EP_KERNEL_MAX_RANKS]; /* sum of what was added */
} ep_ll_relay_control_t;

#endif
