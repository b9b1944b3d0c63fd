/* Rows of a dispatch outside windows on their way to where peers read them. */
#include "api/gpu/gpu.h"

static trefoil_result_t copyRows(char *to, const void *from, int64_t bytes, cudaStream_t stream) {
  if (!bytes) return TREFOIL_OK;
  EP_CUDA(cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDefault, stream));
  return TREFOIL_OK;
}

trefoil_result_t epGpuHtStage(const ep_ht_dispatch_t *op, cudaStream_t stream) {
  const ep_ht_input_t *in = &op->input;
  char *own = op->group.peers[op->group.rank];
  int64_t bytes = in->scales - in->tokens;
  if (!in->is || !op->group.at.input || in->tokens != (int64_t)op->group.at.input)
    return TREFOIL_OK;
  EP_TRY(copyRows(own + in->tokens, op->tokens, bytes, stream));
  return copyRows(own + in->scales, op->scales, bytes / op->tokenBytes * op->scaleBytes, stream);
}
