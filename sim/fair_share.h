/* Max-min fair rates of flows that come and go.
 *
 * A bundle is the flows that cross the same resources: they have the same rate, so they are one
 * unknown with a weight, their number. */
#ifndef TREFOIL_SIM_FAIR_SHARE_H
#define TREFOIL_SIM_FAIR_SHARE_H

#include <stdint.h>

enum { EP_SHARE_USES = 6 }; /* most resources of a bundle */

typedef struct ep_share {
  int numResources, numBundles;
  double *capacity; /* [resources] */
  int32_t *uses;    /* [bundles][EP_SHARE_USES]; -1 after the last; at least one */
  int32_t *weight;  /* [bundles] flows that are there: epShareSetWeight */
  double *rate;     /* [bundles] of a flow, as solved last */
  int numSolved;    /* bundles whose rate the last solution worked out anew: */
  int32_t *solved;
  /* Bundles that are there, by resource: list[first[p] .. first[p] + numOn[p]). */
  int32_t *first, *numOn, *list, *place;
  int64_t *total; /* [resources] flows on it */
  int64_t *count; /* those without a rate yet */
  double *left;   /* capacity that is left for them */
  double *level;  /* left / count, or less */
  int32_t *fixedBy, *heap, *order;
  double *orderLevel;
  int numHeap, numOrder, numSinceAll;
  double lowest; /* no rate below it has changed since the last solution; 0: solve all */
  void *memory[17];
} ep_share_t;

/* Returns 0 where memory ran out; capacity and uses are the caller's to fill, then Start. */
int epShareAllocate(ep_share_t *share, int numResources, int numBundles);
void epShareStart(ep_share_t *share);
void epShareFree(ep_share_t *share);

void epShareSetWeight(ep_share_t *share, int bundle, int weight);
/* After a change of capacities. */
void epShareForget(ep_share_t *share);
int epShareIsCurrent(const ep_share_t *share);
void epShareSolve(ep_share_t *share);

#endif
