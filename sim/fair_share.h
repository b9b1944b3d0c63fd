/* Max-min fair rates of flows that come and go.
 *
 * A bundle is the flows that cross the same resources: they have the same rate, so they are one
 * unknown with a weight, their number. */
#ifndef TREFOIL_SIM_FAIR_SHARE_H
#define TREFOIL_SIM_FAIR_SHARE_H

#include <stdint.h>

enum { EP_SHARE_USES = 6 }; /* most resources of a bundle */

/* A level and 1, or 0 and 0 where it is HUGE_VAL: what sums add up. */
typedef double ep_given_t __attribute__((vector_size(16)));

typedef struct ep_share {
  int numResources, numBundles;
  double *capacity; /* [resources] */
  char *
      isCovered; /* [resources] never full while all of its flows cross ports: they let less through */
  int32_t *uses;   /* [bundles][EP_SHARE_USES]; -1 after the last; at least one */
  char *isBare;    /* [bundles] crosses no port */
  int32_t *weight; /* [bundles] flows that are there: epShareSetWeight */
  /* Solved: the full resources in ascending order of level, and the first of its uses in it that a bundle
   * has; its rate is that one's level, HUGE_VAL of those that are not full. */
  int32_t *order;
  int numOrder;
  double *level;
  ep_given_t *given;
  int32_t *fixedBy; /* [bundles] -1: not there */
  /* What the last solution changed: levels from order[firstNew] on, and these bundles' fixedBy. */
  int firstNew, numChanged;
  int32_t *changed, *fixedBefore;
  /* Bundles that are there, by resource: places first[p] .. first[p] + numOn[p], with weight and the other
   * uses of each. */
  int32_t *first, *numOn, *list, *place, *others;
  double *weights;
  int32_t *numBare;
  int32_t *position; /* [resources] in order, or past its end */
  int64_t *total;    /* [resources] flows on it */
  int64_t *count;    /* those without a rate yet */
  double *left;      /* capacity that is left for them */
  double *bound;     /* left / count, or less */
  int32_t *heap;
  int numHeap, numMoved, numOthers;
  int isStale, firstStale; /* since the last solution: 2: solve all, 1: from a place in order */
  void *memory[24];
} ep_share_t;

static inline double epShareRate(const ep_share_t *s, int bundle) {
  return s->fixedBy[bundle] >= 0 ? s->level[s->fixedBy[bundle]] : 0;
}

/* Returns 0 where memory ran out; the caller fills capacity, isCovered, uses and isBare, then Start. */
int epShareAllocate(ep_share_t *share, int numResources, int numBundles);
int epShareStart(ep_share_t *share);
void epShareFree(ep_share_t *share);

void epShareSetWeight(ep_share_t *share, int bundle, int weight);
/* After a change of capacities. */
void epShareForget(ep_share_t *share);
int epShareIsCurrent(const ep_share_t *share);
void epShareSolve(ep_share_t *share);

#endif
