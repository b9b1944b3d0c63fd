/* The fabric of one run: which ports and leaves a rank uses, and what a row takes of each. */
#ifndef TREFOIL_SIM_FABRIC_H
#define TREFOIL_SIM_FABRIC_H

#include "sim/replay.h"

typedef struct ep_fabric {
  int numRanks, numPorts, numLeaves;   /* numLeaves 0: no leaf blocks */
  int count[TREFOIL_NUM_RESOURCES];    /* of each kind */
  ep_fs_t *row[TREFOIL_NUM_RESOURCES]; /* [count] time of a row on it; 0 = it does not limit */
  ep_fs_t *start; /* [R] when a rank's first row may leave: late start, copy of its tokens, fixed */
  ep_fs_t called; /* the earliest call of a rank */
  ep_fs_t *rest;  /* [R] what a rank does after its last row has come */
  ep_fs_t *
      announced; /* [R] when a rank has all announcements, and takes rows; its start without announceUs */
  int ownRowsStay; /* rows of a rank to itself do not cross SEND */
  int32_t *portOf; /* [R] network port of a rank, after failures */
  int32_t *leafOf; /* [ports] */
  ep_fs_t latency[TREFOIL_NUM_TIERS];
  double *gbPerS[TREFOIL_NUM_RESOURCES]; /* [count] of ports and leaves: bytes alone */
  /* What flows of others leave (flows.c): up to until[p], left[kind][p * count + at] of a port. */
  int numParts; /* 0: all of it, always */
  ep_fs_t *until;
  double *left[TREFOIL_NUM_RESOURCES];
  void *memory, *flowMemory;
} ep_fabric_t;

/* Checks the run as far as it concerns the fabric. */
trefoil_result_t epFabricBuild(ep_fabric_t *fabric, const trefoil_sim_t *sim,
                               const trefoil_sim_run_t *run, trefoil_op_t op);
void epFabricFree(ep_fabric_t *fabric);

/* Takes the run's flows off the ports, and lets words wait for them. */
trefoil_result_t epFlowsApply(ep_fabric_t *fabric, const trefoil_shape_t *shape,
                              const trefoil_sim_run_t *run, const trefoil_op_costs_t *costs);
/* When a resource that begins so much work, as by itself, is done with it. */
ep_fs_t epServed(const ep_fabric_t *fabric, trefoil_resource_t kind, int at, ep_fs_t begin,
                 ep_fs_t work);
/* The part of a port's rate that flows leave in a part of the time. */
static inline double epLeftOf(const ep_fabric_t *f, trefoil_resource_t kind, int at, int part) {
  return f->left[kind][(size_t)part * (size_t)f->count[kind] + (size_t)at];
}
static inline int epIsPort(trefoil_resource_t kind) {
  return kind >= TREFOIL_RESOURCE_NVLINK_OUT && kind <= TREFOIL_RESOURCE_NIC_IN;
}

/* Whether a move goes through the leaves' uplinks. */
static inline int epCrossesLeaves(const ep_fabric_t *f, const ep_move_t *m) {
  return f->numLeaves > 0 && m->tier == TREFOIL_TIER_NET &&
         f->leafOf[f->portOf[m->src]] != f->leafOf[f->portOf[m->dst]];
}

/* Rows that a rank's SMs send. */
static inline int64_t epRowsToSend(const ep_fabric_t *f, const ep_replay_t *r, int rank) {
  return r->sentRows[rank] - (f->ownRowsStay ? r->ownRows[rank] : 0);
}

/* The resource of a kind that a move crosses, or -1. */
static inline int epResourceOf(const ep_fabric_t *f, const ep_move_t *m, trefoil_resource_t kind) {
  switch (kind) {
  case TREFOIL_RESOURCE_SEND:
    return epCrossesSend(m) && !(f->ownRowsStay && epIsOwn(m)) ? m->src : -1;
  case TREFOIL_RESOURCE_FORWARD:
    return epCrossesForward(m) ? epForwarder(m) : -1;
  case TREFOIL_RESOURCE_NVLINK_OUT:
    return m->tier == TREFOIL_TIER_NVLINK ? m->src : -1;
  case TREFOIL_RESOURCE_NVLINK_IN:
    return m->tier == TREFOIL_TIER_NVLINK ? m->dst : -1;
  case TREFOIL_RESOURCE_NIC_OUT:
    return m->tier == TREFOIL_TIER_NET ? f->portOf[m->src] : -1;
  case TREFOIL_RESOURCE_NIC_IN:
    return m->tier == TREFOIL_TIER_NET ? f->portOf[m->dst] : -1;
  case TREFOIL_RESOURCE_LEAF_UP:
    return epCrossesLeaves(f, m) ? f->leafOf[f->portOf[m->src]] : -1;
  case TREFOIL_RESOURCE_LEAF_DOWN:
    return epCrossesLeaves(f, m) ? f->leafOf[f->portOf[m->dst]] : -1;
  case TREFOIL_RESOURCE_RECEIVE:
    return epCrossesReceive(m) ? m->dst : -1;
  default:
    return -1;
  }
}

#endif
