/* Making a trace part by part: for the generator and the file reader. */
#ifndef TREFOIL_PLAN_TRACE_OBJECT_H
#define TREFOIL_PLAN_TRACE_OBJECT_H

#include "trefoil/trace.h"

/* A zeroed trace of this size; the maker writes offsets, topkIdx and weights through casts, sets the
 * provenance, and calls Finish. Sizes must have been checked. */
trefoil_result_t epTraceNew(trefoil_trace_t **trace, const trefoil_shape_t *shape, int numSteps,
                            int64_t numTokens, int withWeights);
/* Copies the provenance; NULL is "{}". */
trefoil_result_t epTraceSetProvenance(trefoil_trace_t *trace, const char *provenance);
/* Ascending, without gaps, ending at numTokens (negative: anywhere). */
trefoil_result_t epTraceCheckOffsets(const int64_t *offsets, int numSteps, int numRanks,
                                     int64_t numTokens);
/* Makes the routings of all steps and checks them. */
trefoil_result_t epTraceFinish(trefoil_trace_t *trace);

#endif
