/* Between the child process and SimGrid. */
#ifndef TREFOIL_SIM_SIMGRID_CALLS_H
#define TREFOIL_SIM_SIMGRID_CALLS_H

#include "sim/engine.h"

typedef struct ep_flows {
  const ep_replay_t *replay;
  const ep_fabric_t *fabric;
  const trefoil_shape_t *shape;
  ep_timing_t *timing;
  const char *platform; /* path of its XML */
} ep_flows_t;

/* Runs to the end and fills the timing. Once in a process: SimGrid holds one platform, and ends the
 * process where it meets an error. Returns 0 where memory ran out. */
int epSimGridReplay(const ep_flows_t *flows);

#endif
