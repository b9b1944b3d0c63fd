/* Trefoil: cost records: fitted costs with what they were fitted to, and how far to trust them. C99
 * and C++.
 *
 * A record describes the kernels of one library on one platform, in LL or in HT. The records in
 * models/costs are part of the library; a path reads a file of the same form. `trefoil fit` makes
 * them (docs/fit.md). Without jansson the load functions exist and fail with a sentence. */
#ifndef TREFOIL_COST_RECORD_H
#define TREFOIL_COST_RECORD_H

#include "trefoil/costs.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of measured time / predicted time over n rows: [low, high] held about 90 % of them. */
typedef struct trefoil_residuals {
  int n;          /* 0: none were measured */
  double low;     /* 5 % quantile */
  double high;    /* 95 % quantile */
  double mapePct; /* mean absolute error, percent of the measured time */
} trefoil_residuals_t;

/* What was measured where the costs were fitted; each from least to most. */
typedef struct trefoil_fit_range {
  int nodes[2], ranks[2], hidden[2], experts[2], topk[2];
  int64_t tokens[2]; /* of a rank */
  int sms[2];
  int rowBytes[2][2]; /* by trefoil_op_t */
} trefoil_fit_range_t;

/* How an interval widens outside the range, as a logarithm of time; found by fits to parts of the
 * range. */
typedef struct trefoil_growth {
  int n;        /* rows beyond such parts; 0: taken from another record */
  double value; /* not negative */
} trefoil_growth_t;

#define TREFOIL_RECORD_CLUSTER_BYTES 256

typedef struct trefoil_cost_record {
  trefoil_costs_t costs;
  int isHt;                  /* 0: LL */
  trefoil_variant_t variant; /* of dispatch, in the kernels that were measured */
  trefoil_fit_range_t range;
  trefoil_residuals_t inside[2];              /* by trefoil_op_t: the rows that were fitted */
  trefoil_residuals_t outside[2];             /* the rows of the split that were held out */
  trefoil_residuals_t within[2];              /* of these, those that lie inside the range */
  char cluster[TREFOIL_RECORD_CLUSTER_BYTES]; /* where they were measured: a preset or a path */
  trefoil_growth_t perDoubling[2]; /* by trefoil_op_t: of each doubling of a shape or of SMs */
  trefoil_growth_t perScale[2];    /* of each doubling of nodes or ranks */
  trefoil_growth_t acrossNodes[2]; /* of each doubling of nodes, where one node was fitted */
} trefoil_cost_record_t;

/* The record's costs on another cluster: ports reach the same share of the cluster's own rates as
 * where they were measured. otherPorts (or NULL): which of them have another rate there. */
TREFOIL_API trefoil_result_t trefoilCostRecordOnCluster(const trefoil_cost_record_t *record,
                                                        const trefoil_cluster_t *cluster,
                                                        trefoil_costs_t *costs, int *otherPorts);
#define TREFOIL_OTHER_NVLINK  1
#define TREFOIL_OTHER_NETWORK 2

/* nameOrPath as in trefoilClusterLoad. Each value must lie within the physical bounds that the
 * record itself states. */
TREFOIL_API trefoil_result_t trefoilCostRecordLoad(trefoil_cost_record_t *record,
                                                   const char *nameOrPath);
TREFOIL_API trefoil_result_t trefoilCostRecordParse(trefoil_cost_record_t *record, const char *name,
                                                    const char *text, size_t numBytes);
/* Names in alphabetical order; NULL past the last. */
TREFOIL_API const char *trefoilCostRecordName(int i);
/* The name of the default record of a mode and variant:
 * measured on H100 or H200, whatever the cluster is. */
TREFOIL_API const char *trefoilCostRecordDefault(trefoil_mode_t mode, trefoil_variant_t variant);

/* ---- Intervals -------------------------------------------------------------------------------- */

/* The case that is predicted. */
typedef struct trefoil_fit_point {
  int nodes, ranks, hidden, experts, topk;
  int64_t tokens;    /* of a rank */
  int sms, rowBytes; /* of the operation; 0 = as where it was fitted */
  int otherPorts;    /* TREFOIL_OTHER_NVLINK | TREFOIL_OTHER_NETWORK */
} trefoil_fit_point_t;

typedef struct trefoil_interval {
  double lowUs, highUs; /* about 90 %; lowUs <= us <= highUs */
  int isExtrapolated;   /* the point lies outside the record's range */
  int n;                /* rows that the interval comes from */
  char outside[512];    /* "4 nodes (fitted: 1 to 2), 512 tokens (1 to 256)", or "" */
  double doublings;     /* how far outside the point lies */
} trefoil_interval_t;

/* The interval round a predicted time `us`: from the wider of the fitted rows' residuals and those
 * of the rows held out inside the range. Outside the range it widens on either side by the factor
 *
 *     exp(perScale x scale + acrossNodes x nodes + perDoubling x rest)
 *
 * in doublings from the nearest end of the range. scale: the farther of nodes and ranks. nodes: where
 * one node was fitted, log2(nodes), which scale then has less. rest: the sum of tokens, size of a row
 * (the farther of hidden and bytes), experts (more than fitted: only as far as ranks are not, too),
 * top-k and SMs; ports of other rates than fitted count as one. */
TREFOIL_API trefoil_result_t trefoilCostRecordInterval(const trefoil_cost_record_t *record,
                                                       trefoil_op_t op,
                                                       const trefoil_fit_point_t *point, double us,
                                                       trefoil_interval_t *interval);

#ifdef __cplusplus
}
#endif
#endif
