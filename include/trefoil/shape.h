/* Trefoil: the shape of an expert-parallel group and the routing of one step. C99 and C++.
 *
 * Letters used everywhere: R ranks, G ranks per node, E experts, L = ceil(E / R) local experts,
 * K top-k, N = most tokens a rank may dispatch, B_r = tokens rank r dispatches (0 <= B_r <= N),
 * H hidden. Expert e lives on rank e / L: the last rank with experts may have fewer than L, ranks
 * past the last expert have none. node(r) = r / G, rail(r) = r mod G. */
#ifndef TREFOIL_SHAPE_H
#define TREFOIL_SHAPE_H

#include "trefoil/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The four ways of receiving tokens (docs/spec.md). */
typedef enum trefoil_mode {
  TREFOIL_LL_EXPERT_MAJOR = 0, /* [L, R*N, H]: per local expert, packed from slot 0 */
  TREFOIL_LL_RANK_MAJOR = 1,   /* [R, N, H]: per source rank, packed from slot 0 */
  TREFOIL_HT_FLAT = 2,         /* [slots, H]: one row per (token, this rank) */
  TREFOIL_HT_EXPERT_MAJOR = 3  /* [slots, H]: a zone per local expert, padded to the alignment */
} trefoil_mode_t;
#define TREFOIL_NUM_MODES 4

/* Upper limits of a shape: far past any machine, low enough that no product of a shape's numbers
 * overflows int64_t. */
#define TREFOIL_MAX_RANKS   65536
#define TREFOIL_MAX_EXPERTS (1 << 20)
#define TREFOIL_MAX_TOPK    1024
#define TREFOIL_MAX_TOKENS  ((int64_t)1 << 32)

typedef struct trefoil_shape {
  int numRanks;      /* R in [1, TREFOIL_MAX_RANKS] */
  int ranksPerNode;  /* G >= 1, divides R */
  int numExperts;    /* E in [1, TREFOIL_MAX_EXPERTS] */
  int topk;          /* K in [1, TREFOIL_MAX_TOPK]; may exceed E (rows then hold -1) */
  int64_t maxTokens; /* N in [1, TREFOIL_MAX_TOKENS] */
} trefoil_shape_t;

/* Whether each field is in its range; the sentence names the first that is not. */
TREFOIL_API trefoil_result_t trefoilShapeCheck(const trefoil_shape_t *shape);
TREFOIL_API const char *trefoilModeName(trefoil_mode_t mode); /* "ll-expert-major", ... */

/* L = ceil(E / R); the rank of an expert, its number there; the node of a rank, its number there. */
static inline int trefoilExpertsPerRank(const trefoil_shape_t *s) {
  return (int)(((int64_t)s->numExperts + s->numRanks - 1) / s->numRanks);
}
static inline int trefoilRankOfExpert(const trefoil_shape_t *s, int32_t expert) {
  return (int)(expert / trefoilExpertsPerRank(s));
}
static inline int trefoilLocalExpert(const trefoil_shape_t *s, int32_t expert) {
  return (int)(expert % trefoilExpertsPerRank(s));
}
static inline int trefoilNodeOf(const trefoil_shape_t *s, int rank) {
  return rank / s->ranksPerNode;
}
static inline int trefoilRailOf(const trefoil_shape_t *s, int rank) {
  return rank % s->ranksPerNode;
}

/* Who goes where in one step: borrowed pointers, the caller keeps the memory. */
typedef struct trefoil_routing {
  trefoil_shape_t shape;
  const int64_t *numTokens;      /* [R] B_r, 0 <= B_r <= N */
  const int32_t *const *topkIdx; /* [R] pointers to [B_r, K]: expert in [0, E) or -1 (unused);
                                    an expert at most once in a row; may be NULL where B_r = 0 */
} trefoil_routing_t;

/* Checks shape, counts, ranges and duplicates; the sentence names rank, token and k. */
TREFOIL_API trefoil_result_t trefoilRoutingCheck(const trefoil_routing_t *routing);

#ifdef __cplusplus
}
#endif
#endif
