/* Bytes as the library under test counts them (trefoil/device.h), against the plan. */
#ifndef TREFOIL_VALIDATE_CHECK_COUNTS_H
#define TREFOIL_VALIDATE_CHECK_COUNTS_H

#include "validate/check_rank.h"
#include "validate/puts.h"

/* What the plan says of a whole script, all rounds. */
typedef struct ep_check_counts {
  int isPlanned;                                  /* 0: this case is not compared */
  uint64_t bytes[2][EP_MAX_RANKS * EP_MAX_RANKS]; /* [dispatch, combine][src, dst] */
  ep_puts_t puts[EP_MAX_RANKS];                   /* the least that each rank's rows need */
} ep_check_counts_t;

/* Of one rank in a case. */
typedef struct ep_check_compared {
  uint64_t bytes;
  ep_puts_t puts;
} ep_check_compared_t;

int epCanCount(const ep_library_t *lib);
trefoil_result_t epPlanCounts(const ep_check_case_t *c, ep_check_counts_t *counts);
/* After epRankRun, on a rank that counts: reads this rank's counts, sets them to zero, compares, and gives
 * what was compared. Puts between domains, where the library counts them: of no kind fewer than the least. */
trefoil_result_t epRankCompareCounts(ep_check_rank_t *rank, const ep_check_counts_t *planned,
                                     ep_check_compared_t *out);

#endif
