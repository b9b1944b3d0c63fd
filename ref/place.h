/* Where rows land: the one place where the reference decides on slots.
 *
 * A placer walks the tokens in the order of the contract, source ranks ascending and tokens ascending
 * within a source, and says for each where its rows go. Everything follows from that order: a
 * slot is the number of rows that came before it in its zone, plus the zone's first slot.
 *
 *   LL expert-major   zone = local expert, R*N slots each        one row per (token, expert)
 *   LL rank-major     zone = source rank, N slots each           one row per (token, rank)
 *   HT flat           one zone                                   one row per (token, rank)
 *   HT expert-major   zone = local expert, padded true counts    one row per (token, expert)
 *
 * Counting comes first (epPlacerInit), because the zones of HT expert-major and the decision
 * whether a rank overflows need the true counts of all sources. */
#ifndef TREFOIL_REF_PLACE_H
#define TREFOIL_REF_PLACE_H

#include "trefoil/ref.h"

#include <stdbool.h>

typedef struct ep_place {
  int rank;     /* where the row goes */
  int k;        /* k of its expert (expert-major); first k that names the rank (others) */
  int expert;   /* local expert (expert-major), else -1 */
  int64_t slot; /* of the rank's dispatch output */
} ep_place_t;

typedef struct ep_placer {
  const trefoil_case_t *c;
  int numLocal;      /* L */
  int firstRank;     /* ranks [firstRank, endRank) are placed, others skipped */
  int endRank;       /* */
  int64_t *count;    /* [R*L] rows per expert, true */
  int64_t *offset;   /* [R*L] first slot of the expert's zone (expert-major), true */
  int64_t *next;     /* [R*L] rows placed so far per expert */
  int64_t *received; /* [R] tokens per rank, true */
  int64_t *total;    /* [R] HT: slots per rank, padding included, true */
  int64_t *flat;     /* [R] tokens walked so far per rank; LL rank-major: of the current source */
  int lastSrc;
} ep_placer_t;

/* For one rank (0 <= rank < R), or for all with rank -1. */
trefoil_result_t epPlacerInit(ep_placer_t *p, const trefoil_case_t *c, int rank);
void epPlacerFree(ep_placer_t *p);

/* The places of a token's rows, ascending by k, at most K; dropped and masked rows have none.
 * Must be called for all tokens of all sources in order, up to the last one of interest. */
int epPlaceToken(ep_placer_t *p, int src, int64_t token, ep_place_t *places);

/* HT: slots below which rows are kept on rank d: its total, at most maxRecv; 0 if it traps. */
int64_t epKeptSlots(const ep_placer_t *p, int d);

/* Rows travel between two ranks if each regards the other as alive. */
static inline bool epLinked(const uint8_t *active, int numRanks, int a, int b) {
  return !active || (active[a * numRanks + b] && active[b * numRanks + a]);
}
static inline bool epIsHt(const trefoil_case_t *c) {
  return c->mode >= TREFOIL_HT_FLAT;
}
static inline bool epIsExpertMajor(const trefoil_case_t *c) {
  return c->mode == TREFOIL_LL_EXPERT_MAJOR || c->mode == TREFOIL_HT_EXPERT_MAJOR;
}
static inline const int32_t *epRoutingRow(const trefoil_case_t *c, int src, int64_t token) {
  return c->routing.topkIdx[src] + token * c->routing.shape.topk;
}
static inline int64_t epPadded(const trefoil_case_t *c, int64_t count) {
  int64_t a = c->alignment > 1 ? (int64_t)c->alignment : 1;
  return (count + a - 1) / a * a;
}
/* Rank in [0, R), else the sentence. */
trefoil_result_t epRankCheck(const trefoil_case_t *c, int rank);

#endif
