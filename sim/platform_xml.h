/* The platform of a fabric as SimGrid's XML. */
#ifndef TREFOIL_SIM_PLATFORM_XML_H
#define TREFOIL_SIM_PLATFORM_XML_H

#include <stdio.h>

#include "sim/fabric.h"

/* Between these hosts runs what flows of others take of a port in a part of the time, over a link of that
 * rate and the port: kind, index, part. */
#define EP_BACKGROUND_NAME(letter) letter "%d-%d-%d"

/* Hosts of rank R, each with the links that one role of the rank crosses:
 *   gR  NVLink, as an origin or a target        nR  network, the same
 *   fR  NVLink, as a forwarder for its node     bR  network, the same (HT over nodes only)
 *   sR, uR  where rows end that a rank sends to itself (to its RECEIVE, to its FORWARD)
 * Fails only where writing fails: then 0 is returned. */
int epPlatformWrite(FILE *file, const ep_fabric_t *fabric, const ep_replay_t *replay,
                    const trefoil_shape_t *shape);

#endif
