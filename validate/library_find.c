/* Which NCCL and which CUDA runtime a library on GPUs gets when nothing is said: one rule for every verb of
 * the command, and for the tests. */
#include "validate/library.h"

#include <dlfcn.h>
#include <string.h>

/* Where they were when this was built; other machines have them elsewhere. */
#ifndef TREFOIL_NCCL_LIBRARY
#define TREFOIL_NCCL_LIBRARY ""
#endif
#ifndef TREFOIL_CUDART_LIBRARY
#define TREFOIL_CUDART_LIBRARY ""
#endif
static const char *const ncclNames[] = {"libnccl.so.2", TREFOIL_NCCL_LIBRARY, NULL};
static const char *const cudaNames[] = {"libcudart.so.13", "libcudart.so", TREFOIL_CUDART_LIBRARY,
                                        "/usr/local/cuda/lib64/libcudart.so.13", NULL};

static int askVersion(void *handle, const char *function) {
  int (*ask)(int *) = NULL, version = 0;
  void *symbol = handle ? dlsym(handle, function) : NULL;
  memcpy(&ask, &symbol, sizeof symbol);
  return ask && ask(&version) == 0 ? version : 0;
}

int epNcclVersion(void *handle) {
  return askVersion(handle, "ncclGetVersion");
}

int epCudaVersion(void *handle) {
  return askVersion(handle, "cudaRuntimeGetVersion");
}

/* The first that can be loaded and is new enough, else the first that can be loaded, else the first:
 * systems often have an old one besides. */
static const char *firstThatFits(const char *const *names, int (*version)(void *), int oldest) {
  const char *old = NULL;
  for (int i = 0; names[i]; i++) {
    void *handle = *names[i] ? dlopen(names[i], RTLD_LAZY | RTLD_LOCAL) : NULL;
    if (!handle) continue;
    int fits = version(handle) >= oldest;
    dlclose(handle);
    if (fits) return names[i];
    if (!old) old = names[i];
  }
  return old ? old : names[0];
}

const char *epLibraryFindNccl(void) {
  return firstThatFits(ncclNames, epNcclVersion, EP_LIBRARY_OLDEST_NCCL);
}

const char *epLibraryFindCuda(void) {
  return firstThatFits(cudaNames, epCudaVersion, EP_LIBRARY_OLDEST_CUDA);
}

const char *epLibraryFile(void *function) {
  Dl_info info;
  return dladdr(function, &info) && info.dli_fname ? info.dli_fname : "an unknown library";
}
