/* Rows on every resource of a fabric, and what follows from them without replaying anything. */
#ifndef TREFOIL_SIM_RESOURCE_LOADS_H
#define TREFOIL_SIM_RESOURCE_LOADS_H

#include "sim/fabric.h"

typedef struct ep_loads {
  int64_t *rows[TREFOIL_NUM_RESOURCES]; /* [count of the kind] */
  void *memory;
} ep_loads_t;

trefoil_result_t epLoadsCount(ep_loads_t *loads, const ep_replay_t *replay,
                              const ep_fabric_t *fabric);
void epLoadsFree(ep_loads_t *loads);

typedef struct ep_floor {
  ep_fs_t time;
  trefoil_resource_t kind;
  int index;
} ep_floor_t;

/* No schedule ends earlier at these costs: each resource needs its rows' time, none before the first
 * rank starts, and what leaves a port is visible a latency later. */
ep_floor_t epFloor(const ep_loads_t *loads, const ep_fabric_t *fabric,
                   const trefoil_shape_t *shape);

/* The closed form's loads: ports as the cluster should be, no failures. Equal trefoilPortLoads. */
trefoil_result_t epPortLoads(const ep_replay_t *replay, const trefoil_shape_t *shape,
                             int gpusPerNic, trefoil_port_loads_t *loads);

#endif
