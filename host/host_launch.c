/* Kernel launches, for who has given this runtime a launcher (trefoil_host.h); without one they fail and
 * say so. A launch is a piece of work of its stream like any other; a graph keeps it and runs it again. */
#include <stdlib.h>

#include "comm_internal.h"

typedef struct {
  atomic_int holders;
  const trefoil_host_launcher_t *launcher;
  void *launch;
} ep_launch_t;

static const trefoil_host_launcher_t *_Atomic chosen;

void trefoilHostSetLauncher(const trefoil_host_launcher_t *launcher) {
  atomic_store(&chosen, launcher);
}

bool epHasLauncher(void) {
  return atomic_load(&chosen) != NULL;
}

static void retain(void *shared) {
  atomic_fetch_add(&((ep_launch_t *)shared)->holders, 1);
}

static void release(void *shared) {
  ep_launch_t *l = shared;
  if (atomic_fetch_sub(&l->holders, 1) > 1) return;
  l->launcher->release(l->launch);
  free(l);
}

static void runLaunch(ep_op_t *op, cudaStream_t stream, uint64_t ticket) {
  (void)stream, (void)ticket;
  const ep_launch_t *l = op->shared;
  l->launcher->run(l->launch);
}

static cudaError_t queueLaunch(const void *func, const trefoil_host_launch_t *at,
                               cudaStream_t stream, const char *name) {
  const trefoil_host_launcher_t *launcher = atomic_load(&chosen);
  cudaStream_t s;
  EP_CUDA_CHECK(launcher, cudaErrorNotSupported, "%s is not implemented by the host runtime", name);
  EP_CUDA_TRY(epStreamResolve(stream, name, &s));
  EP_CUDA_CHECK(func, cudaErrorInvalidValue, "%s: the kernel is NULL", name);
  const unsigned threads = at->blockDim.x * at->blockDim.y * at->blockDim.z;
  EP_CUDA_CHECK(at->gridDim.x * at->gridDim.y * at->gridDim.z > 0 && threads > 0 && threads <= 1024,
                cudaErrorInvalidValue, "%s: %u blocks of %u threads", name,
                at->gridDim.x * at->gridDim.y * at->gridDim.z, threads);
  ep_launch_t *l = calloc(1, sizeof *l);
  ep_op_t *op = l ? epOpNew(cudaGraphNodeTypeKernel, runLaunch) : NULL;
  if (op) {
    l->launch = launcher->prepare(func, at);
    if (!l->launch) {
      free(op);
      free(l);
      return epCudaFail(cudaErrorInvalidValue, "%s: the launcher does not know this kernel", name);
    }
  }
  if (!op) {
    free(l);
    return epCudaFail(cudaErrorMemoryAllocation, "%s: out of memory", name);
  }
  atomic_store(&l->holders, 1);
  l->launcher = launcher;
  op->shared = l;
  op->retain = retain;
  op->release = release;
  return epEnqueue(s, op, name);
}

cudaError_t cudaLaunchKernel(const void *func, dim3 gridDim, dim3 blockDim, void **args,
                             size_t sharedMem, cudaStream_t stream) {
  const trefoil_host_launch_t at = {gridDim, blockDim, args, sharedMem};
  return queueLaunch(func, &at, stream, "cudaLaunchKernel");
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *func, void **args) {
  EP_CUDA_CHECK(config, cudaErrorInvalidValue, "cudaLaunchKernelExC: config is NULL");
  const trefoil_host_launch_t at = {config->gridDim, config->blockDim, args,
                                    config->dynamicSmemBytes};
  return queueLaunch(func, &at, config->stream, "cudaLaunchKernelExC");
}

cudaError_t cudaFuncSetAttribute(const void *func, enum cudaFuncAttribute attr, int value) {
  (void)attr, (void)value;
  EP_CUDA_CHECK(atomic_load(&chosen), cudaErrorNotSupported,
                "cudaFuncSetAttribute is not implemented by the host runtime");
  EP_CUDA_CHECK(func, cudaErrorInvalidValue, "cudaFuncSetAttribute: the kernel is NULL");
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attr, const void *func) {
  EP_CUDA_CHECK(atomic_load(&chosen), cudaErrorNotSupported,
                "cudaFuncGetAttributes is not implemented by the host runtime");
  EP_CUDA_CHECK(attr && func, cudaErrorInvalidValue, "cudaFuncGetAttributes: %s is NULL",
                attr ? "func" : "attr");
  *attr = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32};
  return cudaSuccess;
}
