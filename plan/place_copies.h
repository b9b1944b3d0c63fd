/* Where copies of experts are: EPLB's two policies, from its public description. */
#ifndef TREFOIL_PLAN_PLACE_COPIES_H
#define TREFOIL_PLAN_PLACE_COPIES_H

#include "trefoil/trace.h"

/* Which physical experts are copies of which expert: of e those at [first[e], first[e + 1]). */
typedef struct ep_copies {
  int *first, *physical;
} ep_copies_t;

/* By the entries of each expert in all steps, or all alike, as the placement says. */
trefoil_result_t epPlaceCopies(const trefoil_trace_t *from, const trefoil_placement_t *how,
                               const ep_copies_t *of);

#endif
