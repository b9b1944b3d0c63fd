/* In place of gpu_tools.cu where there is no nvcc. */
#include "validate/gpu_tools.h"

#include "plan/error.h"

#define REFUSE()                                                                                   \
  return epFail(TREFOIL_INVALID_USAGE, "this build has no CUDA kernels: build it where nvcc of "   \
                                       "CUDA 13.0 or newer is (component KERNELS)")

int epGpuToolsBuilt(void) {
  return 0;
}
trefoil_result_t epGpuFacts(int device, ep_gpu_facts_t *out) {
  (void)device, (void)out;
  REFUSE();
}
trefoil_result_t epGpuTeam(int numRanks, ep_gpu_peers_t *out) {
  (void)numRanks, (void)out;
  REFUSE();
}
void epGpuTeamFree(ep_gpu_peers_t *team) {
  (void)team;
}
trefoil_result_t epGpuLockstep(const ep_gpu_peers_t *p, unsigned pauseNs, unsigned lateNs,
                               void *stream) {
  (void)p, (void)pauseNs, (void)lateNs, (void)stream;
  REFUSE();
}
trefoil_result_t epGpuCopy(const ep_gpu_peers_t *p, int kind, void *stream) {
  (void)p, (void)kind, (void)stream;
  REFUSE();
}
trefoil_result_t epGpuEmpty(void *stream) {
  (void)stream;
  REFUSE();
}
trefoil_result_t epGpuDelay(uint64_t ns, void *stream) {
  (void)ns, (void)stream;
  REFUSE();
}
trefoil_result_t epGpuBackgroundStart(const ep_gpu_peers_t *p, ep_gpu_background_t kind, int numSms,
                                      ep_gpu_worker_t **out) {
  (void)p, (void)kind, (void)numSms, (void)out;
  REFUSE();
}
size_t epGpuProductBytes(void) {
  return 0;
}
trefoil_result_t epGpuProduct(void *memory, int numSms, void *stream) {
  (void)memory, (void)numSms, (void)stream;
  REFUSE();
}
trefoil_result_t epGpuBackgroundStop(ep_gpu_worker_t *worker, double *perSecond) {
  (void)worker, (void)perSecond;
  REFUSE();
}
