/* A build without SimGrid. */
#include "plan/error.h"
#include "sim/engine.h"

int trefoilSimHasSimGrid(void) {
  return 0;
}

trefoil_result_t epSimGridRun(const ep_replay_t *replay, const ep_fabric_t *fabric,
                              const trefoil_shape_t *shape, double timeoutS, ep_timing_t *timing) {
  (void)replay, (void)fabric, (void)shape, (void)timeoutS, (void)timing;
  return epFail(TREFOIL_INVALID_USAGE, "this build has no SimGrid (libsimgrid-dev)");
}
