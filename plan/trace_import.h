/* From arrays to a trace: what the file states, what the caller hints, and what follows. */
#ifndef TREFOIL_PLAN_TRACE_IMPORT_H
#define TREFOIL_PLAN_TRACE_IMPORT_H

#include "plan/npy.h"
#include "trefoil/trace.h"

typedef struct ep_trace_parts {
  const char *name;                        /* of the file, for sentences */
  const ep_npy_t *idx, *offsets, *weights; /* the last two may be NULL */
  /* stated by trefoil.json, or 0 */
  int64_t numRanks, ranksPerNode, numExperts, topk, maxTokens, numSteps;
  const char *provenance; /* JSON object in text, or NULL */
} ep_trace_parts_t;

/* hints may be NULL. */
trefoil_result_t epTraceImport(const trefoil_trace_t **trace, const ep_trace_parts_t *parts,
                               const trefoil_trace_hints_t *hints);

/* Loads a whole .npz or .npy in memory, as trefoilTraceLoad does a file. */
trefoil_result_t epTraceLoadBytes(const trefoil_trace_t **trace, const uint8_t *bytes,
                                  size_t numBytes, const trefoil_trace_hints_t *hints);

#endif
