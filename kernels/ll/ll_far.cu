// Low latency across NVLink domains over NCCL's GIN.
#include "kernels/ll/far.cuh"
#include "kernels/net/gin.cuh"

extern "C" trefoil_result_t epLlFarLoad(void) {
  return FarKernels<GinWire>::load();
}

extern "C" trefoil_result_t epLlFarPrepareDispatch(const ep_ll_dispatch_t *op, unsigned parts,
                                                   ep_ll_ready_t *out) {
  EP_CHECK(op, TREFOIL_INVALID_ARGUMENT, "op is NULL");
  ep_ll_dispatch_t generic = *op;
  generic.generic = 1;
  return FarKernels<GinWire>::prepare(generic, parts, out);
}

extern "C" trefoil_result_t epLlFarPrepareCombine(const ep_ll_combine_t *op, unsigned parts,
                                                  ep_ll_ready_t *out) {
  EP_CHECK(op, TREFOIL_INVALID_ARGUMENT, "op is NULL");
  return FarKernels<GinWire>::prepare(*op, parts, out);
}

extern "C" trefoil_result_t epLlFarLaunch(const ep_ll_ready_t *ready, ep_ll_kind_t kind,
                                          const ep_ll_relay_t *relay, void *stream) {
  return FarKernels<GinWire>::launch(*ready, kind, *relay, (cudaStream_t)stream);
}
