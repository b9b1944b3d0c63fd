/* The library behind trefoil._c: the CPU library with its host runtime, linked in and hidden, or one that the
 * dynamic loader brings. */
#ifndef TREFOIL_PYTHON_LOADER_H
#define TREFOIL_PYTHON_LOADER_H

#include "nccl_ep.h"

#define EP_FUNCTIONS(X)                                                                            \
  X(ncclEpGetVersion)                                                                              \
  X(ncclEpCreateGroup)                                                                             \
  X(ncclEpGroupDestroy)                                                                            \
  X(ncclEpHandleMemSize)                                                                           \
  X(ncclEpInitHandle)                                                                              \
  X(ncclEpUpdateHandle)                                                                            \
  X(ncclEpCreateHandle)                                                                            \
  X(ncclEpHandleDestroy)                                                                           \
  X(ncclEpDispatch)                                                                                \
  X(ncclEpCombine)                                                                                 \
  X(ncclEpComplete)                                                                                \
  X(ncclEpMaskQuery)                                                                               \
  X(ncclEpMaskUpdate)                                                                              \
  X(ncclEpMaskClean)                                                                               \
  X(ncclEpGetAsyncError)                                                                           \
  X(ncclEpErrorClear)                                                                              \
  X(ncclEpGetLastError)                                                                            \
  X(ncclEpPreflight)                                                                               \
  X(ncclGetUniqueId)                                                                               \
  X(ncclCommInitRank)                                                                              \
  X(ncclCommDestroy)                                                                               \
  X(ncclCommAbort)                                                                                 \
  X(ncclCommCount)                                                                                 \
  X(ncclGetLastError)                                                                              \
  X(cudaGetDevice)                                                                                 \
  X(cudaSetDevice)                                                                                 \
  X(cudaGetDeviceCount)                                                                            \
  X(cudaGetErrorString)                                                                            \
  X(cudaDeviceSynchronize)                                                                         \
  X(cudaHostRegister)                                                                              \
  X(cudaHostUnregister)                                                                            \
  X(cudaPointerGetAttributes)                                                                      \
  X(cudaStreamCreate)                                                                              \
  X(cudaStreamDestroy)                                                                             \
  X(cudaStreamQuery)                                                                               \
  X(cudaStreamSynchronize)

typedef struct {
  int onHost; /* the host runtime's: a device's memory is the program's own */
#define EP_MEMBER(name) __typeof__(&name) name;
  EP_FUNCTIONS(EP_MEMBER)
#undef EP_MEMBER
} ep_library_t;

/* The one in use; the CPU library that is linked in until pyLoad. */
extern const ep_library_t *pyLibrary;
/* path NULL: the one linked in. NULL, or why it failed, valid until the next call. */
const char *pyLoad(const char *path);
/* The file of the library in use: its ncclEpGetVersion's. */
const char *pyLibraryPath(void);

#endif
