/* Trefoil: the communication plan of one dispatch or combine. C99 and C++.
 *
 * Pure data: which rows go from which rank to which rank, over which tier, in which phase and
 * chunk, after what. The CPU library carries bytes by it, the simulator replays it in time, the
 * closed form sums it, and the kernels' own byte counters must equal it. An iterator yields the
 * transfers without building a list of all. docs/plan.md explains the phases with a picture. */
#ifndef TREFOIL_PLAN_H
#define TREFOIL_PLAN_H

#include "trefoil/shape.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum trefoil_tier {
  TREFOIL_TIER_SELF = 0,   /* within the rank: never crosses a link, yielded all the same */
  TREFOIL_TIER_NVLINK = 1, /* another rank of the same node */
  TREFOIL_TIER_NET = 2     /* a rank of another node */
} trefoil_tier_t;
#define TREFOIL_NUM_TIERS 3

typedef enum trefoil_op { TREFOIL_OP_DISPATCH = 0, TREFOIL_OP_COMBINE = 1 } trefoil_op_t;

typedef enum trefoil_variant {
  TREFOIL_VARIANT_OURS = 0,
  TREFOIL_VARIANT_PER_EXPERT = 1, /* one dispatch row per (token, expert), as some public libraries
                                     send; across nodes in HT still one row a token and node. Combine
                                     is as in OURS */
  TREFOIL_VARIANT_RAILS = 2 /* LL dispatch across nodes goes as HT's: one row a token and node to p,
                               which forwards. Combine, and HT, are as in OURS */
} trefoil_variant_t;

typedef enum trefoil_phase {
  TREFOIL_PHASE_DIRECT = 0,  /* origin <-> expert rank straight: LL, HT inside the node */
  TREFOIL_PHASE_NET_OUT = 1, /* HT dispatch, LL's by rails: origin -> p = m*G + rail(origin), one
                                row a token */
  TREFOIL_PHASE_FORWARD = 2, /* the same: p -> each target of node m */
  TREFOIL_PHASE_RETURN = 3,  /* HT combine: target of node m -> p */
  TREFOIL_PHASE_NET_BACK = 4 /* HT combine: p -> origin, one rounded partial a token */
} trefoil_phase_t;
#define TREFOIL_NUM_PHASES 5

typedef struct trefoil_plan_config {
  trefoil_mode_t mode;
  trefoil_op_t op;
  trefoil_variant_t variant;
  int combinePartial; /* LL expert-major: partial sums at the experts' rank (one row per rank) */
  int chunkTokens;    /* tokens of a chunk; 0 = 64. LL has one chunk, of all its tokens */
  size_t rowBytes;    /* token bytes + scale bytes of a row */
} trefoil_plan_config_t;

/* What a transfer waits for: every transfer with these values, -1 standing for any. */
typedef struct trefoil_after {
  int phase, chunk, origin, src, dst;
} trefoil_after_t;

typedef struct trefoil_transfer {
  int phase;       /* trefoil_phase_t */
  int chunk;       /* source tokens [chunk*C, (chunk+1)*C) of origin */
  int origin;      /* the rank whose tokens these are */
  int src, dst;    /* from rank, to rank */
  int tier;        /* trefoil_tier_t */
  int64_t rows;    /* > 0 */
  size_t rowBytes; /* bytes of a row */
  int numAfter;    /* 0 or 1 */
  trefoil_after_t after[1];
} trefoil_transfer_t;

typedef struct trefoil_plan trefoil_plan_t;

/* Builds the plan of one operation. The routing is checked; its numTokens and topkIdx are borrowed
 * until destroy. A plan is walked by one thread at a time. */
TREFOIL_API trefoil_result_t trefoilPlanCreate(trefoil_plan_t **plan,
                                               const trefoil_routing_t *routing,
                                               const trefoil_plan_config_t *config);
TREFOIL_API void trefoilPlanDestroy(trefoil_plan_t *plan);

/* Iteration: transfers come by origin, then chunk, then phase, then src, then dst, all ascending:
 * the same order each time. trefoilPlanNext returns 1 and fills *transfer, or 0 at the end.
 * RewindTo restricts the walk to the tokens of some origins, so that a rank can walk its own. */
TREFOIL_API void trefoilPlanRewind(trefoil_plan_t *plan);
TREFOIL_API void trefoilPlanRewindTo(trefoil_plan_t *plan, int firstOrigin, int numOrigins);
TREFOIL_API int trefoilPlanNext(trefoil_plan_t *plan, trefoil_transfer_t *transfer);

/* A row of a transfer: token of the origin, and k where a row is a (token, k) (LL exact combine,
 * per-expert dispatch), else -1. */
typedef struct trefoil_row {
  int64_t token;
  int k;
} trefoil_row_t;
/* The rows of the transfer that trefoilPlanNext returned last, ascending by (token, k); rows must
 * have room for transfer.rows entries. */
TREFOIL_API void trefoilPlanRows(const trefoil_plan_t *plan, trefoil_row_t *rows);

/* Bytes per (src, dst): bytes[src * R + dst] over all tiers and phases, [R * R], zeroed first.
 * The tier of a pair follows from the shape. phase < 0: all phases. Walks the plan and leaves it
 * rewound. */
TREFOIL_API trefoil_result_t trefoilPlanTraffic(trefoil_plan_t *plan, int phase, uint64_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
