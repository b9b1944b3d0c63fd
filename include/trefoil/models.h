/* Trefoil: clusters, model shapes, and the closed form: time from exact port loads. C99 and C++.
 *
 * The presets models/clusters and models/moe are part of the library; a path reads a file of the
 * same form. docs/sim.md has the formula and says what it leaves out. Without jansson the load
 * functions exist and fail with a sentence. */
#ifndef TREFOIL_MODELS_H
#define TREFOIL_MODELS_H

#include "trefoil/plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Clusters and model shapes -------------------------------------------------------------- */

#define TREFOIL_MODEL_NAME_BYTES 64

typedef struct trefoil_cluster {
  char name[TREFOIL_MODEL_NAME_BYTES];
  int gpusPerNode;     /* of one NVLink domain */
  int maxGpus;         /* most that the preset covers */
  int gpusPerNic;      /* sharing one network port */
  double nvlinkGbPerS; /* 10^9 payload bytes a second out of, and into, one GPU */
  double nicGbPerS;    /* the same of one network port; 0 = no network */
  double netLatencyUs; /* one way */
  double llFixedUs;    /* an LL operation with no bytes */
  double htFixedUs;    /* an HT operation with no bytes */
  /* The fabric between network ports: a leaf switch joins nodesPerLeaf nodes (with railLeaves: one
   * port of each of them), all leaves join in one spine that does not block. */
  int nodesPerLeaf;            /* 0: one switch joins all ports, nothing below matters */
  int railLeaves;              /* 1: a leaf a rail */
  double leafOversubscription; /* rate of a leaf's ports to nodes / to the spine; 0 counts as 1 */
  double gpuMemoryGb;          /* 10^9 bytes of one GPU; 0: not stated */
  double nvlinkLineGbPerS; /* what no payload exceeds, one way; 0: nvlinkGbPerS. A network port's
                                  is nicGbPerS */
  /* Peak rates of one GPU; 0: not stated. */
  double gpuHbmGbPerS;  /* 10^9 bytes a second of its memory */
  double gpuBf16Tflops; /* dense products of bf16, 10^12 operations a second */
  double gpuFp8Tflops;  /* of fp8 */
  double gpuFp4Tflops;  /* of fp4 (nvfp4, mxfp4) */
  int gpusPerHost;      /* of one operating system; 0: a host is an NVLink domain */
  int gpuSms;           /* SMs of one GPU; 0: not stated */
} trefoil_cluster_t;

typedef struct trefoil_moe {
  char name[TREFOIL_MODEL_NAME_BYTES];
  int hidden;       /* H: elements of a token row */
  int numExperts;   /* routed */
  int topk;         /* */
  int numMoeLayers; /* */
  int expertHidden; /* width inside an expert */
  int numShared;    /* shared experts: no communication */
  /* Outside the routed experts, for memory and time of a whole step. numLayers 0: the file does not
   * state it, and `missing` says which key it would need. */
  int numLayers;           /* with and without experts */
  int denseHidden;         /* width of the layers without experts; 0 if there are none */
  int sharedHidden;        /* width of all shared experts together */
  int vocab;               /* tokens that there are */
  int tiedEmbeddings;      /* 1: the head's matrix is the embeddings' */
  int numHeads;            /* of attention */
  int numKvHeads, headDim; /* grouped-query attention (GQA); numKvHeads 0: it is MLA */
  int qLora, kvLora, nopeDim, ropeDim, vDim; /* MLA; qLora 0: queries straight from the row */
  int windowTokens, windowLayers;            /* so many layers see so many tokens; 0: all see all */
  int numGroups, topkGroups; /* experts of at most topkGroups of numGroups groups; 0: of all */
  int weightBits;            /* of an element of the published experts: 16, 8, 4; 0: not stated */
  char missing[TREFOIL_MODEL_NAME_BYTES];
} trefoil_moe_t;

/* nameOrPath: a preset's name, or a path (it has a '/' or ends in ".json"). Sentences name the file
 * and the key; an unknown name lists the known ones. A model's file may also be the config.json of
 * Hugging Face (the families that docs/sim.md names); its name is then that of its folder. */
TREFOIL_API trefoil_result_t trefoilClusterLoad(trefoil_cluster_t *cluster, const char *nameOrPath);
TREFOIL_API trefoil_result_t trefoilMoeLoad(trefoil_moe_t *moe, const char *nameOrPath);
/* The same from JSON text in memory; `name` stands for the file in sentences. */
TREFOIL_API trefoil_result_t trefoilClusterParse(trefoil_cluster_t *cluster, const char *name,
                                                 const char *text, size_t numBytes);
TREFOIL_API trefoil_result_t trefoilMoeParse(trefoil_moe_t *moe, const char *name, const char *text,
                                             size_t numBytes);
/* Names of the presets, in alphabetical order; NULL past the last. */
TREFOIL_API const char *trefoilClusterName(int i);
TREFOIL_API const char *trefoilMoeName(int i);

/* ---- Port loads and the closed form --------------------------------------------------------- */

typedef enum trefoil_port {
  TREFOIL_PORT_NONE = 0, /* no bytes leave a GPU: the fixed time is all */
  TREFOIL_PORT_NVLINK_OUT = 1,
  TREFOIL_PORT_NVLINK_IN = 2,
  TREFOIL_PORT_NIC_OUT = 3,
  TREFOIL_PORT_NIC_IN = 4
} trefoil_port_t;
#define TREFOIL_NUM_PORTS 5
TREFOIL_API const char *trefoilPortName(trefoil_port_t port); /* "nvlink-out", ... */

/* Bytes of the busiest port of each kind, all phases summed; [TREFOIL_PORT_NONE] is unused. */
typedef struct trefoil_port_loads {
  uint64_t maxBytes[TREFOIL_NUM_PORTS];
  int busiest[TREFOIL_NUM_PORTS];         /* rank, or number of the network port, -1 if none */
  uint64_t totalBytes[TREFOIL_NUM_TIERS]; /* by tier */
} trefoil_port_loads_t;

/* Walks the plan. Network port of a rank: its node's first plus rail / gpusPerNic. */
TREFOIL_API trefoil_result_t trefoilPortLoads(trefoil_plan_t *plan, const trefoil_shape_t *shape,
                                              int gpusPerNic, trefoil_port_loads_t *loads);

typedef struct trefoil_closed_form {
  double us;      /* fixed + latency + bytes of the limiting port / its rate */
  double fixedUs; /* the cluster's fixed time of the mode, plus latency where the net is used */
  trefoil_port_t limit; /* the port that takes longest */
} trefoil_closed_form_t;

/* Fails where bytes cross the net of a cluster that has none. */
TREFOIL_API trefoil_result_t trefoilClosedForm(const trefoil_cluster_t *cluster,
                                               trefoil_mode_t mode,
                                               const trefoil_port_loads_t *loads,
                                               trefoil_closed_form_t *found);

/* The bound: bytes of the busiest port over its line rate, and nothing that was measured. No schedule
 * and no kernel is faster. us; 0 where no bytes leave a GPU. usesNic 0: NVLink ports alone count. */
TREFOIL_API double trefoilLineBoundUs(const trefoil_cluster_t *cluster,
                                      const trefoil_port_loads_t *loads, int usesNic);

/* ---- How GPUs are cut into EP groups -------------------------------------------------------- */

/* The EP size for numGpus: the largest divisor of numGpus that is at most numExperts (physical
 * ones) and, if wanted > 0, at most wanted. */
TREFOIL_API int trefoilEpSize(int numGpus, int numExperts, int wanted);
/* Ranks of an NVLink domain of an EP group that is placed on as few nodes of gpusPerNode as it needs, with as
 * large domains as so few allow: all have one size, and a node holds whole ones. 12 ranks on nodes of
 * 8: two of 6; 20: five of 4. Nodes that are filled in turn have domains of the greatest common divisor
 * (docs/gpu.md): 12 ranks, 8 and 4, three of 4. Of what is less than 1: 1. */
TREFOIL_API int trefoilRanksPerNode(int epSize, int gpusPerNode);

/* ---- Predictions ---------------------------------------------------------------------------- */

typedef struct trefoil_predict_spec {
  const trefoil_cluster_t *cluster;
  trefoil_mode_t mode;
  trefoil_variant_t variant; /* of dispatch */
  int combinePartial;        /* LL expert-major */
  size_t dispatchRowBytes;   /* token and scales */
  size_t combineRowBytes;
} trefoil_predict_spec_t;

typedef struct trefoil_predict_load {
  int epSize, physicalExperts;
  int64_t tokens; /* of a rank */
  uint64_t seed;
  int isGrouped; /* 1: experts of the model's groups, if it has groups; 0: of any */
} trefoil_predict_load_t;

typedef struct trefoil_prediction {
  trefoil_port_loads_t loads[2]; /* by trefoil_op_t */
  trefoil_closed_form_t closedForm[2];
} trefoil_prediction_t;

/* One step of one EP group. */
TREFOIL_API trefoil_result_t trefoilPredictRouting(const trefoil_predict_spec_t *spec,
                                                   const trefoil_routing_t *routing,
                                                   trefoil_prediction_t *prediction);

/* Seeded uniform routing of a model's layer over epSize ranks with `tokens` each, at most
 * cluster->gpusPerNode of them a node. physicalExperts (0 = the model's): with more than the model
 * has, expert e has the copies e, e + E, ..., and each entry takes one of them at random. epSize must
 * not exceed them. */
TREFOIL_API trefoil_result_t trefoilPredictUniform(const trefoil_predict_spec_t *spec,
                                                   const trefoil_moe_t *moe,
                                                   const trefoil_predict_load_t *load,
                                                   trefoil_prediction_t *prediction);

#ifdef __cplusplus
}
#endif
#endif
