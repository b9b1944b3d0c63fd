/* The library under test, and the CUDA and NCCL it runs on, all found at run time: the checker links
 * none of them, so one checker serves the CPU library, our GPU library and any other with this ABI.
 *
 * Called by: everything in validate/. Loading is done once per process, before threads start. */
#ifndef TREFOIL_VALIDATE_LIBRARY_H
#define TREFOIL_VALIDATE_LIBRARY_H

#include <nccl_ep.h>

#include "trefoil/a2sgd.h"
#include "trefoil/base.h"
#include "trefoil/device.h"

/* name, result type, parameters: one list for the table and the loader. */
#define EP_LIBRARY_EP(X)                                                                           \
  X(ncclEpGetVersion, ncclResult_t, (int *))                                                       \
  X(ncclEpCreateGroup, ncclResult_t, (ncclEpGroup_t *, ncclComm_t, const ncclEpGroupConfig_t *))   \
  X(ncclEpGroupDestroy, ncclResult_t, (ncclEpGroup_t))                                             \
  X(ncclEpHandleMemSize, ncclResult_t,                                                             \
    (ncclEpGroup_t, ncclEpLayout_t, const ncclEpHandleConfig_t *, size_t *, int))                  \
  X(ncclEpInitHandle, ncclResult_t,                                                                \
    (ncclEpHandle_t *, ncclEpGroup_t, ncclEpLayout_t, const ncclEpHandleConfig_t *, int,           \
     const ncclEpTensor_t *))                                                                      \
  X(ncclEpUpdateHandle, ncclResult_t,                                                              \
    (ncclEpHandle_t, const ncclEpTensor_t *, const ncclEpLayoutInfo_t *, cudaStream_t))            \
  X(ncclEpCreateHandle, ncclResult_t,                                                              \
    (ncclEpHandle_t *, ncclEpGroup_t, ncclEpLayout_t, const ncclEpTensor_t *,                      \
     const ncclEpLayoutInfo_t *, const ncclEpHandleConfig_t *, cudaStream_t))                      \
  X(ncclEpHandleDestroy, ncclResult_t, (ncclEpHandle_t))                                           \
  X(ncclEpDispatch, ncclResult_t,                                                                  \
    (ncclEpHandle_t, const ncclEpDispatchInputs_t *, const ncclEpDispatchOutputs_t *,              \
     const ncclEpLayoutInfo_t *, const ncclEpDispatchConfig_t *, cudaStream_t))                    \
  X(ncclEpCombine, ncclResult_t,                                                                   \
    (ncclEpHandle_t, const ncclEpCombineInputs_t *, const ncclEpCombineOutputs_t *,                \
     const ncclEpCombineConfig_t *, cudaStream_t))                                                 \
  X(ncclEpComplete, ncclResult_t, (ncclEpHandle_t, const ncclEpCompleteConfig_t *, cudaStream_t))  \
  X(ncclEpMaskQuery, ncclResult_t, (ncclEpGroup_t, int *, cudaStream_t))                           \
  X(ncclEpMaskUpdate, ncclResult_t, (ncclEpGroup_t, const int *, cudaStream_t))                    \
  X(ncclEpMaskClean, ncclResult_t, (ncclEpGroup_t, cudaStream_t))                                  \
  X(ncclEpGetAsyncError, ncclResult_t, (ncclEpGroup_t, int *))                                     \
  X(ncclEpErrorClear, ncclResult_t, (ncclEpGroup_t))
#define EP_LIBRARY_NCCL(X)                                                                         \
  X(ncclGetVersion, ncclResult_t, (int *))                                                         \
  X(ncclGetUniqueId, ncclResult_t, (ncclUniqueId *))                                               \
  X(ncclCommInitRank, ncclResult_t, (ncclComm_t *, int, ncclUniqueId, int))                        \
  X(ncclCommDestroy, ncclResult_t, (ncclComm_t))                                                   \
  X(ncclMemAlloc, ncclResult_t, (void **, size_t))                                                 \
  X(ncclMemFree, ncclResult_t, (void *))                                                           \
  X(ncclCommWindowRegister, ncclResult_t, (ncclComm_t, void *, size_t, ncclWindow_t *, int))       \
  X(ncclCommWindowDeregister, ncclResult_t, (ncclComm_t, ncclWindow_t))                            \
  X(ncclGetErrorString, const char *, (ncclResult_t))                                              \
  X(ncclGetLastError, const char *, (ncclComm_t))
#define EP_LIBRARY_CUDA(X)                                                                         \
  X(cudaGetDeviceCount, cudaError_t, (int *))                                                      \
  X(cudaSetDevice, cudaError_t, (int))                                                             \
  X(cudaMalloc, cudaError_t, (void **, size_t))                                                    \
  X(cudaFree, cudaError_t, (void *))                                                               \
  X(cudaMallocHost, cudaError_t, (void **, size_t))                                                \
  X(cudaFreeHost, cudaError_t, (void *))                                                           \
  X(cudaMemcpyAsync, cudaError_t,                                                                  \
    (void *, const void *, size_t, enum cudaMemcpyKind, cudaStream_t))                             \
  X(cudaMemsetAsync, cudaError_t, (void *, int, size_t, cudaStream_t))                             \
  X(cudaStreamCreateWithFlags, cudaError_t, (cudaStream_t *, unsigned))                            \
  X(cudaStreamDestroy, cudaError_t, (cudaStream_t))                                                \
  X(cudaStreamSynchronize, cudaError_t, (cudaStream_t))                                            \
  X(cudaStreamBeginCapture, cudaError_t, (cudaStream_t, enum cudaStreamCaptureMode))               \
  X(cudaStreamEndCapture, cudaError_t, (cudaStream_t, cudaGraph_t *))                              \
  X(cudaGraphInstantiateWithFlags, cudaError_t,                                                    \
    (cudaGraphExec_t *, cudaGraph_t, unsigned long long))                                          \
  X(cudaGraphLaunch, cudaError_t, (cudaGraphExec_t, cudaStream_t))                                 \
  X(cudaGraphExecDestroy, cudaError_t, (cudaGraphExec_t))                                          \
  X(cudaGraphDestroy, cudaError_t, (cudaGraph_t))                                                  \
  X(cudaEventCreateWithFlags, cudaError_t, (cudaEvent_t *, unsigned))                              \
  X(cudaEventRecord, cudaError_t, (cudaEvent_t, cudaStream_t))                                     \
  X(cudaEventRecordWithFlags, cudaError_t, (cudaEvent_t, cudaStream_t, unsigned))                  \
  X(cudaEventSynchronize, cudaError_t, (cudaEvent_t))                                              \
  X(cudaEventElapsedTime, cudaError_t, (float *, cudaEvent_t, cudaEvent_t))                        \
  X(cudaEventDestroy, cudaError_t, (cudaEvent_t))                                                  \
  X(cudaStreamWaitEvent, cudaError_t, (cudaStream_t, cudaEvent_t, unsigned))                       \
  X(cudaLaunchHostFunc, cudaError_t, (cudaStream_t, cudaHostFn_t, void *))                         \
  X(cudaGetErrorString, const char *, (cudaError_t))

/* Ours alone (trefoil/device.h, trefoil/a2sgd.h and ncclEpGetLastError): NULL in other libraries. */
#define EP_LIBRARY_OURS(X)                                                                         \
  X(ncclEpGetLastError, const char *, (void))                                                      \
  X(ncclEpCountBytes, ncclResult_t, (ncclEpGroup_t, int))                                          \
  X(ncclEpReadBytes, ncclResult_t, (ncclEpGroup_t, int, uint64_t *, int *, int, cudaStream_t))     \
  X(ncclEpReadPuts, ncclResult_t, (ncclEpGroup_t, int, uint64_t *, cudaStream_t))                  \
  X(ncclEpKeepTimes, ncclResult_t, (ncclEpGroup_t, unsigned))                                      \
  X(ncclEpReadTimes, ncclResult_t,                                                                 \
    (ncclEpGroup_t, ncclEpKernelTime_t *, unsigned *, cudaStream_t))                               \
  X(ncclEpMemoryInUse, ncclResult_t, (ncclEpGroup_t, ncclEpPreflight_t *))                         \
  X(ncclEpPreflight, ncclResult_t,                                                                 \
    (const ncclEpGroupConfig_t *, ncclEpLayout_t, const ncclEpHandleConfig_t *, int, int, int,     \
     ncclEpPreflight_t *))                                                                         \
  X(trefoilGradGpuCreate, trefoil_result_t,                                                        \
    (const trefoil_grad_config_t *, const trefoil_grad_gpu_options_t *, ncclComm_t,                \
     trefoil_grad_gpu_t *))                                                                        \
  X(trefoilGradGpuStep, trefoil_result_t,                                                          \
    (trefoil_grad_gpu_t, const void *, void *, cudaStream_t))                                      \
  X(trefoilGradGpuSync, trefoil_result_t, (trefoil_grad_gpu_t, int64_t, void *, cudaStream_t))     \
  X(trefoilGradGpuGetMask, trefoil_result_t, (trefoil_grad_gpu_t, int *, cudaStream_t))            \
  X(trefoilGradGpuSetMask, trefoil_result_t, (trefoil_grad_gpu_t, const int *, cudaStream_t))      \
  X(trefoilGradGpuDestroy, trefoil_result_t, (trefoil_grad_gpu_t))

typedef struct ep_library {
#define EP_MEMBER(name, type, parameters) type(*name) parameters;
  EP_LIBRARY_EP(EP_MEMBER)
  EP_LIBRARY_NCCL(EP_MEMBER)
  EP_LIBRARY_CUDA(EP_MEMBER)
  EP_LIBRARY_OURS(EP_MEMBER)
#undef EP_MEMBER
  void *handles[3]; /* CUDA, NCCL, the library */
  int isHost;       /* CUDA is the host runtime: no GPU */
  int windowFlags; /* for windows that hold tensors; on GPUs 0: peers can map the memory just so, and no
                      multicast object is made */
} ep_library_t;

/* Paths or bare names, all required. TREFOIL_SYSTEM_ERROR with a sentence: a file or a function is
 * missing. */
typedef struct ep_library_paths {
  const char *library; /* the library under test */
  const char *nccl;    /* NCCL: libtrefoil_host.so.0 or libnccl.so.2 */
  const char *cuda;    /* CUDA runtime: the same host runtime, or libcudart.so */
} ep_library_paths_t;
trefoil_result_t epLibraryLoad(ep_library_t *lib, const ep_library_paths_t *paths);

/* What a loaded NCCL or CUDA runtime (dlopen's handle, or NULL) says, 23203 for 2.32.3, 13000 for 13.0; 0:
 * nothing. */
int epNcclVersion(void *handle);
int epCudaVersion(void *handle);
#define EP_LIBRARY_OLDEST_NCCL 23007 /* that libnccl_ep works with */
#define EP_LIBRARY_OLDEST_CUDA 13000

/* Which of them a library on GPUs gets when nothing is said: the loader's, else where it was when this was
 * built; one that is too old only if there is no other. */
const char *epLibraryFindNccl(void);
const char *epLibraryFindCuda(void);
/* The file that a function came from. */
const char *epLibraryFile(void *function);

/* What a library is, found out in a child process. */
typedef struct ep_library_facts {
  int numDevices; /* GPUs, or devices of the host runtime */
  int version;    /* ncclEpGetVersion; 0: it failed */
  int isOurs;     /* it has ncclEpGetLastError */
  int isHost;
  int hasGrad; /* it has A2SGD's calls */
} ep_library_facts_t;
trefoil_result_t epLibraryAsk(const ep_library_paths_t *paths, ep_library_facts_t *facts);

/* The same in a child process, to see whether it can be done; *numDevices (NULL: not wanted) GPUs, or
 * devices of the host runtime. TREFOIL_SYSTEM_ERROR also if there is none. */
trefoil_result_t epLibraryProbe(const ep_library_paths_t *paths, int *numDevices);

/* GPUs, or devices of the host runtime, one at least; else TREFOIL_SYSTEM_ERROR with CUDA's reason. */
trefoil_result_t epLibraryDevices(const ep_library_t *lib, int *numDevices);

/* Asks the host runtime, if it is what will be loaded, for at least so many devices. Before loading. */
void epLibraryHostDevices(int numDevices);

/* A library without A2SGD's calls: TREFOIL_INVALID_ARGUMENT. */
trefoil_result_t epLibraryHasGrad(const ep_library_t *lib);

/* The sentence of the last failing call on this thread, or the result's name. */
const char *epLibraryError(const ep_library_t *lib, ncclResult_t result);

/* The same for a call of NCCL; comm may be NULL. */
const char *epNcclError(const ep_library_t *lib, ncclComm_t comm, ncclResult_t result);

#endif
