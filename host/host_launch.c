/* Kernel launches, for programs that have given this runtime a launcher (trefoil_host.h); without one
 * they fail and say so. A launch is a piece of work of its stream like any other; a graph keeps it and
 * runs it again. */
#include <stdio.h>
#include <stdlib.h>

#include "comm_internal.h"
#include "host_kernel.h"

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

static void runLaunch(ep_stream_op_t *op, cudaStream_t stream, uint64_t ticket) {
  (void)stream, (void)ticket;
  const ep_launch_t *l = op->shared;
  l->launcher->run(l->launch);
}

/* The compiler's name for a kernel, readable where the program has the C++ library. */
// NOLINTNEXTLINE(bugprone-reserved-identifier): its name
extern char *__cxa_demangle(const char *name, char *buffer, size_t *bytes, int *status)
    __attribute__((weak));

static void nameKernel(const void *func, char *text, size_t bytes) {
  ep_symbol_t symbol;
  if (!epSymbolFind(func, &symbol)) {
    snprintf(text, bytes, "the kernel at %p", func);
    return;
  }
  char *readable = __cxa_demangle ? __cxa_demangle(symbol.name, NULL, NULL, NULL) : NULL;
  snprintf(text, bytes, "%s", readable ? readable : symbol.name);
  free(readable);
}

/* A launch that fails is missing from what its stream captures. */
static cudaError_t refuse(cudaStream_t stream, cudaError_t code, const void *func, const char *name,
                          const char *why) {
  char kernel[300];
  nameKernel(func, kernel, sizeof kernel);
  if (epCapturing(stream)) epCaptureBreak(stream, code, name);
  return epCudaFail(code, "%s: %s did not run: %s", name, kernel, why);
}

/* Of a block: 227 KiB as on sm_90, less half a KiB for what a kernel has by name. */
#define MOST_SHARED (232448 - 512)

static bool fits(const cudaLaunchConfig_t *c) {
  const uint64_t threads = (uint64_t)c->blockDim.x * c->blockDim.y * c->blockDim.z;
  return c->gridDim.x && c->gridDim.y && c->gridDim.z && threads > 0 && threads <= 1024;
}

cudaError_t epLaunch(const void *func, const cudaLaunchConfig_t *c, void **args, const char *name) {
  const trefoil_host_launcher_t *launcher = atomic_load(&chosen);
  cudaStream_t s;
  EP_CUDA_TRY(epStreamResolve(c->stream, name, &s));
  if (!launcher)
    return refuse(s, cudaErrorNotSupported, func, name,
                  "the host runtime runs no kernels, and the program has given it no launcher "
                  "(trefoilHostSetLauncher)");
  EP_CUDA_CHECK(func, cudaErrorInvalidDeviceFunction, "%s: the kernel is NULL", name);
  EP_CUDA_CHECK(fits(c), cudaErrorInvalidConfiguration,
                "%s: %u x %u x %u blocks of %u x %u x %u threads", name, c->gridDim.x, c->gridDim.y,
                c->gridDim.z, c->blockDim.x, c->blockDim.y, c->blockDim.z);
  EP_CUDA_CHECK(c->dynamicSmemBytes <= MOST_SHARED, cudaErrorInvalidValue,
                "%s: %zu bytes of dynamic shared memory, a block has at most %d", name,
                c->dynamicSmemBytes, MOST_SHARED);
  const trefoil_host_launch_t at = {c->gridDim, c->blockDim, args, c->dynamicSmemBytes};
  ep_launch_t *l = calloc(1, sizeof *l);
  ep_stream_op_t *op = l ? epOpNew(cudaGraphNodeTypeKernel, runLaunch) : NULL;
  if (op) {
    l->launch = launcher->prepare(func, &at);
    if (!l->launch) {
      free(op);
      free(l);
      return refuse(s, cudaErrorInvalidDeviceFunction, func, name, "the launcher does not know it");
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

static cudaError_t launchPlain(const void *func, dim3 gridDim, dim3 blockDim, void **args,
                               size_t sharedMem, cudaStream_t stream, const char *name) {
  const cudaLaunchConfig_t config = {
      .gridDim = gridDim, .blockDim = blockDim, .dynamicSmemBytes = sharedMem, .stream = stream};
  return epLaunch(func, &config, args, name);
}

cudaError_t cudaLaunchKernel(const void *func, dim3 gridDim, dim3 blockDim, void **args,
                             size_t sharedMem, cudaStream_t stream) {
  return launchPlain(func, gridDim, blockDim, args, sharedMem, stream, "cudaLaunchKernel");
}

/* Whether all blocks are there together is the launcher's to keep. */
cudaError_t cudaLaunchCooperativeKernel(const void *func, dim3 gridDim, dim3 blockDim, void **args,
                                        size_t sharedMem, cudaStream_t stream) {
  return launchPlain(func, gridDim, blockDim, args, sharedMem, stream,
                     "cudaLaunchCooperativeKernel");
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *func, void **args) {
  EP_CUDA_CHECK(config, cudaErrorInvalidValue, "cudaLaunchKernelExC: config is NULL");
  return epLaunch(func, config, args, "cudaLaunchKernelExC");
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

/* ---- f<<<grid, block, shared, stream>>>(arguments) ---- */

/* Between the brackets and the call: arguments may launch kernels of their own meanwhile. */
enum { EP_MAX_NESTED = 64 };
static _Thread_local struct {
  dim3 gridDim, blockDim;
  size_t sharedBytes;
  cudaStream_t stream;
} pushed[EP_MAX_NESTED];
static _Thread_local int numPushed;

unsigned __cudaPushCallConfiguration(dim3 gridDim, dim3 blockDim, size_t sharedMem,
                                     cudaStream_t stream) {
  EP_CUDA_CHECK(numPushed < EP_MAX_NESTED, cudaErrorInvalidConfiguration,
                "kernel<<<...>>>: %d launches have been configured and not made", numPushed);
  pushed[numPushed].gridDim = gridDim;
  pushed[numPushed].blockDim = blockDim;
  pushed[numPushed].sharedBytes = sharedMem;
  pushed[numPushed++].stream = stream;
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *gridDim, dim3 *blockDim, size_t *sharedMem,
                                       void *stream) {
  EP_CUDA_CHECK(numPushed > 0, cudaErrorInvalidConfiguration,
                "a kernel's function was called without <<<...>>>");
  numPushed--;
  *gridDim = pushed[numPushed].gridDim;
  *blockDim = pushed[numPushed].blockDim;
  *sharedMem = pushed[numPushed].sharedBytes;
  *(cudaStream_t *)stream = pushed[numPushed].stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(ep_kernel_t *kernel, const void *hostFun) {
  *kernel = (ep_kernel_t)(uintptr_t)hostFun;
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(ep_kernel_t kernel, dim3 gridDim, dim3 blockDim, void **args,
                               size_t sharedMem, cudaStream_t stream) {
  const cudaLaunchConfig_t config = {
      .gridDim = gridDim, .blockDim = blockDim, .dynamicSmemBytes = sharedMem, .stream = stream};
  return epLaunch(kernel, &config, args, "kernel<<<...>>>");
}

cudaError_t __cudaLaunchKernel_ptsz(ep_kernel_t kernel, dim3 gridDim, dim3 blockDim, void **args,
                                    size_t sharedMem, cudaStream_t stream) {
  return __cudaLaunchKernel(kernel, gridDim, blockDim, args, sharedMem,
                            stream ? stream : cudaStreamPerThread);
}
