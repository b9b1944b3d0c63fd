#include "validate/puts.h"

#include "plan/error.h"
#include "trefoil/layout.h"

#include <stdlib.h>
#include <string.h>

const char *epPutName(int kind) {
  static const char *const names[NCCL_EP_PUT_KINDS] = {"dispatch", "combine", "weights", "ids",
                                                       "signals"};
  return names[kind];
}

ep_puts_t epPutsLoad(const _Atomic uint64_t *counted, const _Atomic uint64_t *least) {
  ep_puts_t puts;
  for (int k = 0; k < NCCL_EP_PUT_KINDS; k++) {
    puts.counted[k] = counted[k];
    puts.least[k] = least[k];
  }
  return puts;
}

void epPutsAdd(ep_puts_t *to, const ep_puts_t *puts) {
  for (int k = 0; k < NCCL_EP_PUT_KINDS; k++) {
    to->counted[k] += puts->counted[k];
    to->least[k] += puts->least[k];
  }
}

uint64_t epPutsCounted(const ep_puts_t *puts) {
  uint64_t sum = 0;
  for (int k = 0; k < NCCL_EP_PUT_KINDS; k++) sum += puts->counted[k];
  return sum;
}

trefoil_result_t epPutsCheck(const ep_puts_t *puts) {
  for (int k = 0; k < NCCL_EP_PUT_KINDS; k++)
    EP_CHECK(puts->counted[k] >= puts->least[k], TREFOIL_INTERNAL_ERROR,
             "%llu puts for %s counted by the library, expected at least %llu: one a peer in "
             "another domain and operation",
             (unsigned long long)puts->counted[k], epPutName(k),
             (unsigned long long)puts->least[k]);
  return TREFOIL_OK;
}

int epIsByRails(void) {
  const char *way = getenv("NCCL_EP_LL_DISPATCH");
  return way && !strcmp(way, "rails");
}

/* Of the puts of rank a: is there one to rank b? */
static int has(const uint64_t *bytes, int R, int kind, int a, int b) {
  return kind == NCCL_EP_PUT_WEIGHTS ? bytes[b * R + a] > 0 : bytes[a * R + b] > 0;
}

void epPutsNeed(const trefoil_shape_t *shape, const uint64_t *bytes, int kind, int isByDomain,
                ep_puts_t *of) {
  int R = shape->numRanks, G = shape->ranksPerNode;
  for (int a = 0; a < R; a++) {
    for (int first = 0; first < R; first += G) {
      int ranks = 0;
      for (int b = first; b < first + G && first != a / G * G; b++)
        ranks += has(bytes, R, kind, a, b);
      of[a].least[kind] += (uint64_t)(isByDomain ? ranks > 0 : ranks);
    }
  }
}

ncclResult_t epPutsRead(const ep_library_t *lib, ncclEpGroup_t group, int numRanks,
                        cudaStream_t stream, uint64_t *counted) {
  uint64_t to[TREFOIL_LAYOUT_MAX_RANKS] = {0};
  memset(counted, 0, NCCL_EP_PUT_KINDS * sizeof *counted);
  if (!lib->ncclEpReadPuts) return ncclInvalidUsage;
  for (int kind = 0; kind < NCCL_EP_PUT_KINDS; kind++) {
    ncclResult_t result = lib->ncclEpReadPuts(group, kind, to, stream);
    if (result != ncclSuccess) return result;
    for (int r = 0; r < numRanks; r++) counted[kind] += to[r];
  }
  return ncclSuccess;
}
