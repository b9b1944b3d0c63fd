/* Two libraries on one real shape, in one process, timed in turn: block by block first the one, then the
 * other, so that what drifts (clocks, neighbours) meets both. Both have passed their check before.
 *
 *   event    an event pair around the call, GPUs in lockstep before it; slowest rank
 *   host     from call to return, all ranks calling at the same time; slowest rank
 *   span     CUPTI: first start of a kernel or copy of the call to the last end; slowest rank
 *   sum      CUPTI: of their own times; slowest rank
 *   wall     without a GPU: barrier to the end of the slowest rank's stream
 *
 * A ratio is the second library's p50 over the first's, block by block. */
#ifndef TREFOIL_VALIDATE_REAL_PAIR_H
#define TREFOIL_VALIDATE_REAL_PAIR_H

#include "validate/gpu_times.h"

enum { EP_PAIR_BLOCKS = 8, EP_PAIR_ITERATIONS = 20 }; /* of each library and operation */

typedef enum ep_pair_figure {
  EP_PAIR_EVENT,
  EP_PAIR_HOST,
  EP_PAIR_SPAN,
  EP_PAIR_SUM,
  EP_PAIR_WALL,
  EP_PAIR_NUM_FIGURES
} ep_pair_figure_t;

typedef struct ep_pair_ratio {
  double p50, min, max; /* of the blocks; 0: not measured */
} ep_pair_ratio_t;

typedef struct ep_pair_operation {
  ep_gpu_spread_t of[2][EP_PAIR_NUM_FIGURES]; /* [library] */
  ep_pair_ratio_t ratio[EP_PAIR_NUM_FIGURES];
  int numKernels[2], numCopies[2]; /* of a call, CUPTI's count on rank 0's GPU */
} ep_pair_operation_t;

typedef struct ep_pair_times {
  int measured;
  int culprit;         /* not measured: the library (0, 1) whose check failed, or -1 */
  int moved[2];        /* order-free: rows in another order, or sums rounded otherwise */
  char noKernels[200]; /* why there are no kernel times, or "" */
  ep_gpu_facts_t facts;
  int ncclVersion, blocks, iterations;
  ep_pair_operation_t operations[2]; /* dispatch, combine */
} ep_pair_times_t;

#endif
