/* What compiled CUDA programs call and no header for programs declares: nvcc puts these calls into the
 * host code of __global__ functions and of __device__ and __managed__ variables (as CUDA 12 and 13
 * declare them in crt/host_runtime.h). */
#ifndef TREFOIL_HOST_KERNEL_H
#define TREFOIL_HOST_KERNEL_H

#include "host_internal.h"

struct uint3; /* only ever NULL */
typedef struct CUkern_st *ep_kernel_t;

#pragma GCC visibility push(default)
void **__cudaRegisterFatBinary(void *fatCubin);
void __cudaRegisterFatBinaryEnd(void **module);
void __cudaUnregisterFatBinary(void **module);
void __cudaRegisterFunction(void **module, const char *hostFun, char *deviceFun,
                            const char *deviceName, int threadLimit, struct uint3 *tid,
                            struct uint3 *bid, dim3 *bDim, dim3 *gDim, int *wSize);
void __cudaRegisterVar(void **module, char *hostVar, char *deviceAddress, const char *deviceName,
                       int ext, size_t size, int constant, int global);
void __cudaRegisterManagedVar(void **module, void **hostVarPtr, char *deviceAddress,
                              const char *deviceName, int ext, size_t size, int constant,
                              int global);
char __cudaInitModule(void **module);
unsigned __cudaPushCallConfiguration(dim3 gridDim, dim3 blockDim, size_t sharedMem,
                                     cudaStream_t stream);
cudaError_t __cudaPopCallConfiguration(dim3 *gridDim, dim3 *blockDim, size_t *sharedMem,
                                       void *stream);
cudaError_t __cudaGetKernel(ep_kernel_t *kernel, const void *hostFun);
cudaError_t __cudaLaunchKernel(ep_kernel_t kernel, dim3 gridDim, dim3 blockDim, void **args,
                               size_t sharedMem, cudaStream_t stream);
cudaError_t __cudaLaunchKernel_ptsz(ep_kernel_t kernel, dim3 gridDim, dim3 blockDim, void **args,
                                    size_t sharedMem, cudaStream_t stream);
#pragma GCC visibility pop

typedef struct ep_symbol {
  const char *name; /* as the compiler made it */
  const void *host; /* the program's function or variable that stands for it */
  size_t bytes;     /* of a variable; 0: a kernel */
} ep_symbol_t;
/* What the program registered at this address. */
bool epSymbolFind(const void *host, ep_symbol_t *out);
void epSymbolsForked(void);
void epSymbolCopiesForked(void); /* host_symbol.c */
/* A launch by any name; `func` is the program's function. */
cudaError_t epLaunch(const void *func, const cudaLaunchConfig_t *config, void **args,
                     const char *name);

#endif
