/* Comparing a real shape: what was not to be touched. */
#include "validate/real_work.h"

#include "plan/error.h"

#include <stdlib.h>

/* From byte `first` on: the input as given, and the guard behind every tensor. */
static trefoil_result_t compareFrom(real_rank_t *rank, const real_tensor_t *t, size_t first,
                                    const uint8_t *wanted, const char *name) {
  size_t n = t->bytes + 256 - first, given = wanted ? t->bytes : 0, at = 0;
  if (!t->data) return TREFOIL_OK;
  uint8_t *found = malloc(n);
  EP_CHECK(found, TREFOIL_SYSTEM_ERROR, "out of memory for a comparison");
  cudaError_t code = rank->run->lib.cudaMemcpyAsync(found, (uint8_t *)t->data + first, n,
                                                    cudaMemcpyDeviceToHost, rank->stream);
  trefoil_result_t rc = code == cudaSuccess ? epRealSync(rank)
                                            : epFail(TREFOIL_SYSTEM_ERROR, "cudaMemcpyAsync: %s",
                                                     rank->run->lib.cudaGetErrorString(code));
  while (rc == TREFOIL_OK && at < n &&
         found[at] == (first + at < given ? wanted[first + at] : EP_REAL_NOISE))
    at++;
  if (rc == TREFOIL_OK && first + at < given)
    epRealFail(
        rank->run, "rank %d, %s, row %zu: an input was overwritten: byte %zu, 0x%02x became 0x%02x",
        rank->rank, name, (first + at) / t->rowBytes, first + at, wanted[first + at], found[at]);
  else if (rc == TREFOIL_OK && at < n)
    epRealFail(rank->run, "rank %d, %s: byte %zu past its end was written", rank->rank, name,
               first + at - t->bytes);
  free(found);
  return rc;
}

static trefoil_result_t compareInput(real_rank_t *rank, const real_tensor_t *t, const void *wanted,
                                     const char *name) {
  return compareFrom(rank, t, 0, wanted, name);
}

trefoil_result_t epRealCompareInputs(real_rank_t *rank) {
  const real_t *run = rank->run;
  int r = rank->rank;
  EP_TRY(compareFrom(rank, &rank->received, rank->received.bytes, NULL, "outputs->tokens"));
  EP_TRY(compareInput(rank, &rank->ids, run->ids[r], "topk_idx"));
  EP_TRY(compareInput(rank, &rank->tokens, run->tokens[r], "inputs->tokens"));
  EP_TRY(compareInput(rank, &rank->weights, run->weights[r], "topk_weights"));
  return compareInput(rank, &rank->scales, run->scales[r], "inputs->scales");
}
