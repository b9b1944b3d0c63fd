/* Trefoil: the simulator: the plan of one dispatch and one combine, replayed in time. C99 and C++.
 *
 * The same plan that the CPU library carries bytes by (trefoil/plan.h) becomes transfers over the
 * ports of a cluster: SMs that issue, NVLink and network ports out and in, uplinks of leaf switches,
 * SMs that receive. Engines replay them: SimGrid (max-min fair flows; up to 1024 ranks), the same flows
 * by our own solver (hundreds of ranks), and port queues of our own (first come, first served; thousands
 * of ranks). The answer names its engine and stands beside a floor from exact loads and the same costs.
 * docs/sim.md has the equations. */
#ifndef TREFOIL_SIM_H
#define TREFOIL_SIM_H

#include "trefoil/costs.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- What is simulated ------------------------------------------------------------------------ */

typedef struct trefoil_sim_workload {
  const trefoil_routing_t *routing; /* read by trefoilSimCreate alone */
  trefoil_mode_t mode;
  trefoil_variant_t variant; /* of dispatch */
  int combinePartial;        /* LL expert-major */
  int chunkTokens;           /* HT: 0 = 64, doubled until the transfers are few enough to replay */
  size_t dispatchRowBytes;   /* token and scales */
  size_t combineRowBytes;
} trefoil_sim_workload_t;

typedef struct trefoil_sim trefoil_sim_t;

/* Reads the plans of both operations into transfers; costs and clusters may then vary from run to
 * run. Not for use by two threads at a time. */
TREFOIL_API trefoil_result_t trefoilSimCreate(trefoil_sim_t **sim,
                                              const trefoil_sim_workload_t *workload);
TREFOIL_API void trefoilSimDestroy(trefoil_sim_t *sim);

typedef enum trefoil_engine {
  TREFOIL_ENGINE_AUTO = 0,    /* SimGrid where it is built in and quick, else queues */
  TREFOIL_ENGINE_SIMGRID = 1, /* max-min fair flows; a child process of its own */
  TREFOIL_ENGINE_QUEUES = 2,  /* port queues, first come, first served */
  TREFOIL_ENGINE_FAIR = 3     /* SimGrid's flows by our own solver of max-min fairness */
} trefoil_engine_t;
TREFOIL_API const char *trefoilEngineName(trefoil_engine_t engine); /* "simgrid", "queues" */
/* 1 if SimGrid was there when the library was built. */
TREFOIL_API int trefoilSimHasSimGrid(void);

/* What differs from the cluster as it should be. */
typedef enum trefoil_change_kind {
  TREFOIL_CHANGE_NIC_RATE = 0,    /* network port `index`: rate times `factor`, > 0 */
  TREFOIL_CHANGE_RAIL_RATE = 1,   /* every network port of rail `index` */
  TREFOIL_CHANGE_NVLINK_RATE = 2, /* both ways of rank `index` */
  TREFOIL_CHANGE_SM_RATE = 3,     /* SMs of rank `index`: a straggler computes slower */
  TREFOIL_CHANGE_START_US = 4,    /* rank `index` starts `factor` microseconds late */
  TREFOIL_CHANGE_NIC_FAIL = 5,    /* port `index` is down: its GPUs use the node's next one */
  TREFOIL_CHANGE_RAIL_FAIL = 6    /* every network port of rail `index` is down */
} trefoil_change_kind_t;
#define TREFOIL_NUM_CHANGES 7

typedef struct trefoil_change {
  trefoil_change_kind_t kind;
  int index;     /* rank, network port (node * ports of a node + port), or rail; -1 = all */
  double factor; /* of the rate, or microseconds */
} trefoil_change_t;

/* Work of others beside the operation: bytes from rank to rank, say by copy engines, that pass no SM of the
 * operation and take a part of each port on their way. */
typedef struct trefoil_flow {
  int from, to;   /* ranks, not the same */
  double gbPerS;  /* what it wants; 0 = as much as it gets */
  double startUs; /* after the start of a rank that is not late */
  double endUs;   /* the same, more than startUs; 0 = it does not end */
} trefoil_flow_t;

typedef struct trefoil_sim_run {
  const trefoil_cluster_t *cluster;
  const trefoil_costs_t *costs; /* NULL: trefoilCostsIdeal */
  trefoil_engine_t engine;
  int numSms;              /* 0 = the costs' */
  double oversubscription; /* > 0: instead of the cluster's; 1 = the fabric does not block */
  double startSkewUs;      /* each rank starts at a seeded random time in [0, startSkewUs] */
  uint64_t seed;           /* of the skew */
  const trefoil_change_t *changes; /* [numChanges] */
  int numChanges;
  const trefoil_flow_t *flows; /* [numFlows] */
  int numFlows;
  int hasProducts;  /* 1: the SMs that the operation leaves multiply matrices (productShare) */
  int64_t maxSpans; /* keep a timeline of at most this many spans; 0 = none */
  double timeoutS;  /* SimGrid's child: wall clock; 0 = 600 */
} trefoil_sim_run_t;

/* ---- What comes out --------------------------------------------------------------------------- */

/* What a transfer crosses, in this order on the way of one row. */
typedef enum trefoil_resource {
  TREFOIL_RESOURCE_SEND = 0, /* SMs of a rank that send */
  TREFOIL_RESOURCE_FORWARD,  /* SMs of a rank that forward and sum for its node (HT) */
  TREFOIL_RESOURCE_NVLINK_OUT,
  TREFOIL_RESOURCE_NVLINK_IN,
  TREFOIL_RESOURCE_NIC_OUT,
  TREFOIL_RESOURCE_LEAF_UP,   /* from a leaf switch to the spines; only where they block */
  TREFOIL_RESOURCE_LEAF_DOWN, /* and back */
  TREFOIL_RESOURCE_NIC_IN,
  TREFOIL_RESOURCE_RECEIVE, /* SMs of a rank that copy or sum what came */
  TREFOIL_NUM_RESOURCES
} trefoil_resource_t;
TREFOIL_API const char *trefoilResourceName(trefoil_resource_t kind); /* "nvlink-out", ... */

typedef struct trefoil_sim_link {
  trefoil_resource_t kind;
  int index;      /* rank, network port or leaf */
  uint64_t bytes; /* of the plan's rows that crossed it */
  double busyUs;  /* time that these rows need of it */
  double share;   /* busyUs of the operation's time */
} trefoil_sim_link_t;

/* A stretch of the timeline: the rows of one (phase, chunk, origin, src, dst). */
typedef struct trefoil_sim_span {
  int phase, chunk, origin, src, dst, tier;
  int64_t rows;
  uint64_t bytes;
  double startUs; /* the first row is issued */
  double sentUs;  /* the last byte has left the sender's port */
  double endUs;   /* the last row has been received */
} trefoil_sim_span_t;

typedef struct trefoil_sim_op {
  trefoil_engine_t engine; /* that produced `us` */
  double us;               /* from the first rank's start to the last rank's end */
  double firstUs;          /* the first rank's end */
  double floorUs;          /* no schedule of these loads is faster at these costs; where they were
                                   fitted, a measurement can be */
  trefoil_resource_t floorKind; /* the resource that needs longest, and which one */
  int floorIndex;
  trefoil_closed_form_t closedForm; /* trefoilClosedForm: the cluster's own rates and fixed times */
  trefoil_port_loads_t loads;
  int chunkTokens;      /* of the replay */
  int64_t numTransfers; /* that were replayed */
  /* TREFOIL_ENGINE_FAIR: flows, and those that are left where flows over the same resources are one.
   * Else 0. */
  int64_t numFlows, numUnlike;
  double wallS; /* time that the engine took */
  int numRanks, numLinks;
  const double *finishUs;          /* [numRanks] */
  const trefoil_sim_link_t *links; /* [numLinks] with bytes, by kind and index */
  int64_t numSpans, leftOutSpans;
  const trefoil_sim_span_t *spans; /* [numSpans], by startUs */
} trefoil_sim_op_t;

typedef struct trefoil_sim_result {
  trefoil_sim_op_t op[2]; /* by trefoil_op_t */
} trefoil_sim_result_t;

/* The result's arrays belong to the simulation and last until its next run or its end. */
TREFOIL_API trefoil_result_t trefoilSimRun(trefoil_sim_t *sim, const trefoil_sim_run_t *run,
                                           trefoil_sim_result_t *result);

/* Bytes that were replayed, by (source, destination): bytes[src * R + dst], [R * R], zeroed first.
 * phase or tier < 0: all. */
TREFOIL_API trefoil_result_t trefoilSimTraffic(const trefoil_sim_t *sim, trefoil_op_t op, int phase,
                                               int tier, uint64_t *bytes);

/* ---- Platform files ---------------------------------------------------------------------------- */

/* Writes the platform that SimGrid replays an operation on, as XML that any SimGrid program loads:
 * hosts gR (NVLink side) and nR (network side) of each rank R, switches as routers, links with what
 * they carry of this operation's rows and without latency (docs/sim.md). Needs no SimGrid. */
TREFOIL_API trefoil_result_t trefoilSimWritePlatform(const trefoil_sim_t *sim,
                                                     const trefoil_sim_run_t *run, trefoil_op_t op,
                                                     const char *path);

#ifdef __cplusplus
}
#endif
#endif
