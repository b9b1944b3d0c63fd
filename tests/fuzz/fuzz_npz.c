/* Fuzzes whole files, .npz or .npy: whatever the bytes, a trace that obeys its own rules or a sentence. */
#include <stdlib.h>
#include <string.h>

#include "plan/trace_import.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const trefoil_trace_hints_t hints = {.numExperts = 16};
  for (int i = 0; i < 2; i++) {
    const trefoil_trace_t *trace = NULL;
    if (epTraceLoadBytes(&trace, data, size, i ? &hints : NULL) != TREFOIL_OK) {
      if (trace || !trefoilLastError()[0]) abort();
      continue;
    }
    for (int step = 0; step < trace->numSteps && step < 100; step++) {
      trefoil_routing_t routing;
      if (trefoilTraceRouting(trace, step, &routing) || trefoilRoutingCheck(&routing)) abort();
    }
    trefoilTraceDestroy(trace);
  }
  return 0;
}
