/* Kernel times of any library, by CUPTI's activity records: what a GPU ran between two of our lockstep
 * kernels belongs to the call between them. libcupti.so.13 is looked for when it is asked for; the
 * component is compiled where CUPTI's headers are, else (cupti_times_none.c) it says so. */
#ifndef TREFOIL_VALIDATE_CUPTI_TIMES_H
#define TREFOIL_VALIDATE_CUPTI_TIMES_H

#include "trefoil/base.h"

/* One call on one GPU, seconds. */
typedef struct ep_cupti_call {
  double span; /* first start of a kernel or copy to the last end */
  double sum;  /* of their own times: two that run side by side count twice */
  int numKernels, numCopies;
} ep_cupti_call_t;

/* Loads CUPTI, before the process touches a GPU. TREFOIL_SYSTEM_ERROR with a sentence: it is not there. */
trefoil_result_t epCuptiOpen(void);
/* From here on what GPUs run is recorded; until epCuptiStop, which waits for the records. Called by one
 * thread while nothing runs. */
trefoil_result_t epCuptiStart(void);
trefoil_result_t epCuptiStop(void);
/* After epCuptiStop: the calls of one GPU, in order. TREFOIL_SYSTEM_ERROR: there are not numCalls of them. */
trefoil_result_t epCuptiCalls(int device, int numCalls, ep_cupti_call_t *calls);

#endif
