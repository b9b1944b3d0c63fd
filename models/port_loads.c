/* Bytes of every port, by one walk of the plan. */
#include "trefoil/models.h"

#include <stdlib.h>

#include "plan/error.h"

/* bytes[port][rank or network port], R each: there are at most as many network ports as ranks. */
typedef struct tally {
  const trefoil_shape_t *shape;
  int gpusPerNic, nicsPerNode;
  uint64_t *bytes;
} tally_t;

static uint64_t *at(const tally_t *t, trefoil_port_t port, int i) {
  return &t->bytes[(size_t)port * (size_t)t->shape->numRanks + (size_t)i];
}

static int nicOf(const tally_t *t, int rank) {
  return trefoilNodeOf(t->shape, rank) * t->nicsPerNode +
         trefoilRailOf(t->shape, rank) / t->gpusPerNic;
}

static void add(const tally_t *t, const trefoil_transfer_t *x, trefoil_port_loads_t *loads) {
  uint64_t bytes = (uint64_t)x->rows * x->rowBytes;
  loads->totalBytes[x->tier] += bytes;
  if (x->tier == TREFOIL_TIER_NVLINK) {
    *at(t, TREFOIL_PORT_NVLINK_OUT, x->src) += bytes;
    *at(t, TREFOIL_PORT_NVLINK_IN, x->dst) += bytes;
  } else if (x->tier == TREFOIL_TIER_NET) {
    *at(t, TREFOIL_PORT_NIC_OUT, nicOf(t, x->src)) += bytes;
    *at(t, TREFOIL_PORT_NIC_IN, nicOf(t, x->dst)) += bytes;
  }
}

static void findBusiest(const tally_t *t, trefoil_port_loads_t *loads) {
  for (int port = 0; port < TREFOIL_NUM_PORTS; port++) {
    loads->busiest[port] = -1;
    for (int i = 0; i < t->shape->numRanks; i++) {
      uint64_t bytes = *at(t, (trefoil_port_t)port, i);
      if (bytes <= loads->maxBytes[port]) continue;
      loads->maxBytes[port] = bytes;
      loads->busiest[port] = i;
    }
  }
}

trefoil_result_t trefoilPortLoads(trefoil_plan_t *plan, const trefoil_shape_t *shape,
                                  int gpusPerNic, trefoil_port_loads_t *loads) {
  EP_CHECK(plan && loads, TREFOIL_INVALID_ARGUMENT, "the %s is NULL", plan ? "output" : "plan");
  EP_TRY(trefoilShapeCheck(shape));
  EP_CHECK(gpusPerNic >= 1, TREFOIL_INVALID_ARGUMENT,
           "%d GPUs per network port: must be at least 1", gpusPerNic);
  tally_t t = {shape, gpusPerNic, (shape->ranksPerNode + gpusPerNic - 1) / gpusPerNic, NULL};
  t.bytes = calloc((size_t)TREFOIL_NUM_PORTS * (size_t)shape->numRanks, sizeof *t.bytes);
  EP_CHECK(t.bytes, TREFOIL_SYSTEM_ERROR, "out of memory for the ports of %d ranks",
           shape->numRanks);
  trefoil_port_loads_t found = {{0}, {0}, {0}};
  trefoil_transfer_t x;
  trefoilPlanRewind(plan);
  while (trefoilPlanNext(plan, &x)) add(&t, &x, &found);
  trefoilPlanRewind(plan);
  findBusiest(&t, &found);
  free(t.bytes);
  *loads = found;
  return TREFOIL_OK;
}
