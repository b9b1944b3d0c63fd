// High throughput across NVLink domains over NCCL's GIN.
#include "kernels/ht/ht_far.cuh"
#include "kernels/net/gin.cuh"

extern "C" trefoil_result_t epHtFarLoad(void) {
  return HtFarKernels<GinWire>::load();
}

extern "C" trefoil_result_t epHtFarUpdate(const ep_ht_update_t *op, const ep_ht_far_t *far,
                                          void *stream) {
  EP_CHECK(op && far, TREFOIL_INVALID_ARGUMENT, "op or far is NULL");
  return HtFarKernels<GinWire>::update(*op, *far, stream);
}

extern "C" trefoil_result_t epHtFarDispatch(const ep_ht_dispatch_t *op, const ep_ht_far_t *far,
                                            void *stream) {
  EP_CHECK(op && far, TREFOIL_INVALID_ARGUMENT, "op or far is NULL");
  return HtFarKernels<GinWire>::dispatch(*op, *far, stream);
}

extern "C" trefoil_result_t epHtFarCombine(const ep_ht_combine_t *op, const ep_ht_far_t *far,
                                           void *stream) {
  EP_CHECK(op && far, TREFOIL_INVALID_ARGUMENT, "op or far is NULL");
  return HtFarKernels<GinWire>::combine(*op, *far, stream);
}
