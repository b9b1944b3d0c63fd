/* Where CUPTI's headers were not there. */
#include "validate/cupti_times.h"

#include "plan/error.h"

trefoil_result_t epCuptiOpen(void) {
  return epFail(TREFOIL_SYSTEM_ERROR,
                "this build has no CUPTI: its headers come with the CUDA toolkit");
}

trefoil_result_t epCuptiStart(void) {
  return epCuptiOpen();
}

trefoil_result_t epCuptiStop(void) {
  return epCuptiOpen();
}

trefoil_result_t epCuptiCalls(int device, int numCalls, ep_cupti_call_t *calls) {
  (void)device, (void)numCalls, (void)calls;
  return epCuptiOpen();
}
