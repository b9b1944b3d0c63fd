/* Times of a shape on GPUs. All ranks are in lockstep before each operation, so that no figure holds one
 * rank's wait for another that was merely called later.
 *
 *   kernel   device clock, first block's start to last block's end (trefoil/device.h), slowest rank
 *   event    an event pair around the call, slowest rank; beside it the same pair around an empty kernel
 *   host     from call to return of calls one after the other, all ranks', one rank at a time
 *   back to back: events round many operations of a graph, per operation
 *
 * Each without a graph ("called") and replayed from one. */
#ifndef TREFOIL_VALIDATE_GPU_TIMES_H
#define TREFOIL_VALIDATE_GPU_TIMES_H

#include "validate/gpu_tools.h"

enum { EP_GPU_ITERATIONS = 200 };

typedef struct ep_gpu_spread {
  double p50, p99, min, max; /* seconds; 0: not measured */
} ep_gpu_spread_t;

typedef enum ep_gpu_what {
  EP_GPU_EMPTY, /* an empty kernel */
  EP_GPU_DISPATCH,
  EP_GPU_COMBINE,
  EP_GPU_BOTH, /* a dispatch and a combine, one after the other */
  EP_GPU_NUM_WHAT
} ep_gpu_what_t;

typedef struct ep_gpu_figures {
  ep_gpu_spread_t kernel[2], event[2]; /* [0] called, [1] replayed */
  ep_gpu_spread_t eventOverKernel[2];  /* event time - kernel time of the same operation */
  ep_gpu_spread_t host;
  double backToBack; /* seconds an operation */
  uint64_t
      portBytes; /* of the busiest port: what the plan sends through it, the larger direction */
  double ratio;  /* kernel[1].p50 / (portBytes / copyRate + 3.4 us); without kernel times the
                         event's */
} ep_gpu_figures_t;

typedef struct ep_gpu_times {
  int measured;
  int hasKernelTimes; /* 0: the library does not report them */
  int iterations;     /* of each measurement */
  double backgroundAlone,
      background; /* the background work, a second: bytes or floating-point operations of the
                                 slowest rank; alone, and while replayed operations were timed */
  ep_gpu_facts_t facts;
  int ncclVersion;
  double
      copyRate; /* bytes a second through a port: plain all-to-all stores, the better of two kernels */
  ep_gpu_figures_t of[EP_GPU_NUM_WHAT];
} ep_gpu_times_t;

#endif
