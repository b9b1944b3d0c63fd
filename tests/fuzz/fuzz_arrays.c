/* Fuzzes the arrays of a trace without the zip around them, whose checksums stop most changes:
 *   byte 0: which hints and statements; bytes 1-2, 3-4: lengths of the ids and the offsets; then the
 *   ids, the offsets and, in what is left, the weights, each an .npy (none if of length 0). */
#include <stdlib.h>

#include "plan/trace_import.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct bytes {
  const uint8_t *data;
  size_t size;
} bytes_t;

static bytes_t takeBytes(bytes_t *rest, size_t n) {
  if (n > rest->size) n = rest->size;
  bytes_t p = {rest->data, n};
  rest->data += n;
  rest->size -= n;
  return p;
}

static void tryImport(uint8_t choice, const ep_npy_t *idx, const ep_npy_t *offsets,
                      const ep_npy_t *weights) {
  trefoil_trace_hints_t hints = {.numExperts = choice & 1 ? 16 : 0, .numRanks = choice & 2 ? 2 : 0};
  if (choice & 4) hints.tokensPerRank = 1;
  ep_trace_parts_t parts = {.name = "fuzz", .idx = idx, .offsets = offsets, .weights = weights};
  if (choice & 8) parts.maxTokens = 3;
  if (choice & 16) parts.ranksPerNode = 1;
  if (choice & 32) parts.numExperts = 7;
  const trefoil_trace_t *trace = NULL;
  if (epTraceImport(&trace, &parts, &hints) != TREFOIL_OK) {
    if (trace || !trefoilLastError()[0]) abort();
    return;
  }
  trefoil_trace_stats_t stats;
  if (trefoilTraceDescribe(trace, -1, &stats)) abort();
  trefoilTraceDestroy(trace);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size < 5) return 0;
  bytes_t rest = {data + 5, size - 5};
  bytes_t i = takeBytes(&rest, (size_t)data[1] | (size_t)data[2] << 8);
  bytes_t o = takeBytes(&rest, (size_t)data[3] | (size_t)data[4] << 8);
  ep_npy_t idx, offsets, weights;
  if (epNpyParse("ids", i.data, i.size, &idx)) return 0;
  if (o.size && epNpyParse("offsets", o.data, o.size, &offsets)) return 0;
  if (rest.size && epNpyParse("weights", rest.data, rest.size, &weights)) return 0;
  tryImport(data[0], &idx, o.size ? &offsets : NULL, rest.size ? &weights : NULL);
  return 0;
}
