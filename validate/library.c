/* dlopen and dlsym of the three libraries; order: CUDA, NCCL, then the one that needs both. */
#include "validate/library.h"

#include "plan/error.h"
#include "validate/worker.h"

#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* CUDA and NCCL globally: the library under test finds them among what is loaded. It itself not: two of them
 * in one process call their own functions. */
static trefoil_result_t openOne(void **handle, const char *path, int scope) {
  EP_CHECK(*path, TREFOIL_INVALID_ARGUMENT, "the path of a library is empty");
  *handle = dlopen(path, RTLD_NOW | scope);
  EP_CHECK(*handle, TREFOIL_SYSTEM_ERROR, "cannot load %s: %s", path, dlerror());
  return TREFOIL_OK;
}

static trefoil_result_t findOne(void *handle, const char *path, const char *name, void *member) {
  void *symbol = dlsym(handle, name);
  EP_CHECK(symbol, TREFOIL_SYSTEM_ERROR, "%s has no function %s", path, name);
  memcpy(member, &symbol, sizeof symbol);
  return TREFOIL_OK;
}

/* The library under test. An undefined symbol is mostly an NCCL that is too old: said, too. */
static trefoil_result_t openLibrary(ep_library_t *l, const ep_library_paths_t *paths) {
  trefoil_result_t result = openOne(&l->handles[2], paths->library, RTLD_LOCAL);
  int version = epNcclVersion(l->handles[1]);
  if (result == TREFOIL_OK || !version || version >= EP_LIBRARY_OLDEST_NCCL) return result;
  char why[400];
  snprintf(why, sizeof why, "%s", trefoilLastError());
  return epFail(result, "%.300s; NCCL (%.80s) is %d.%d.%d here, libnccl_ep needs 2.30.7 or newer",
                why, paths->nccl, version / 10000, version / 100 % 100, version % 100);
}

/* The library under test asks the process for CUDA: what was loaded before, by LD_PRELOAD or as a framework
 * brings it, would answer instead of the host runtime. */
static trefoil_result_t checkAnswers(const ep_library_t *l) {
  static const char *const names[] = {"cudaLaunchHostFunc", "cudaMalloc", "ncclCommInitRank"};
  for (int i = 0; l->isHost && i < 3; i++) {
    void *first = dlsym(RTLD_DEFAULT, names[i]), *own = dlsym(l->handles[0], names[i]);
    EP_CHECK(!first || !own || first == own, TREFOIL_SYSTEM_ERROR,
             "%s is answered by %s, which was loaded before, and not by %s: load the host runtime "
             "first, or not the other",
             names[i], epLibraryFile(first), epLibraryFile(own));
  }
  return TREFOIL_OK;
}

trefoil_result_t epLibraryLoad(ep_library_t *lib, const ep_library_paths_t *paths) {
  ep_library_t l = {0};
  EP_TRY(openOne(&l.handles[0], paths->cuda, RTLD_GLOBAL));
  EP_TRY(openOne(&l.handles[1], paths->nccl, RTLD_GLOBAL));
  EP_TRY(openLibrary(&l, paths));
#define EP_FIND_EP(name, type, parameters)                                                         \
  EP_TRY(findOne(l.handles[2], paths->library, #name, &l.name));
#define EP_FIND_NCCL(name, type, parameters)                                                       \
  EP_TRY(findOne(l.handles[1], paths->nccl, #name, &l.name));
#define EP_FIND_CUDA(name, type, parameters)                                                       \
  EP_TRY(findOne(l.handles[0], paths->cuda, #name, &l.name));
  EP_LIBRARY_EP(EP_FIND_EP)
  EP_LIBRARY_NCCL(EP_FIND_NCCL)
  EP_LIBRARY_CUDA(EP_FIND_CUDA)
#define EP_FIND_OURS(name, type, parameters)                                                       \
  symbol = dlsym(l.handles[2], #name);                                                             \
  memcpy(&l.name, &symbol, sizeof symbol);
  void *symbol;
  EP_LIBRARY_OURS(EP_FIND_OURS)
  l.isHost = dlsym(l.handles[0], "trefoilHostLastError") != NULL;
  EP_TRY(checkAnswers(&l));
  l.windowFlags = l.isHost ? NCCL_WIN_COLL_SYMMETRIC : 0;
  *lib = l;
  return TREFOIL_OK;
}

void epLibraryHostDevices(int numDevices) {
  char number[16];
  snprintf(number, sizeof number, "%d", numDevices);
  setenv("TREFOIL_HOST_DEVICES", number, 0);
}

trefoil_result_t epLibraryDevices(const ep_library_t *lib, int *numDevices) {
  void *function;
  memcpy(&function, &lib->cudaGetDeviceCount, sizeof function);
  cudaError_t rc = lib->cudaGetDeviceCount(numDevices);
  EP_CHECK(rc == cudaSuccess && *numDevices > 0, TREFOIL_SYSTEM_ERROR, "%s finds no GPU here: %s",
           epLibraryFile(function), lib->cudaGetErrorString(rc));
  return TREFOIL_OK;
}

enum { PROBE_SECONDS = 120 }; /* drivers of eight GPUs take some */

/* What the child of a probe says. */
typedef struct probe {
  ep_library_facts_t facts;
  char sentence[512];
} probe_t;

static int probeHere(const ep_library_paths_t *paths, probe_t *p) {
  ep_library_t lib;
  if (epLibraryLoad(&lib, paths) == TREFOIL_OK) {
    if (lib.ncclEpGetVersion(&p->facts.version) != ncclSuccess) p->facts.version = 0;
    p->facts.isOurs = lib.ncclEpGetLastError != NULL;
    p->facts.isHost = lib.isHost;
    p->facts.hasGrad = epLibraryHasGrad(&lib) == TREFOIL_OK;
    if (epLibraryDevices(&lib, &p->facts.numDevices) == TREFOIL_OK) return 0;
  }
  snprintf(p->sentence, sizeof p->sentence, "%s", trefoilLastError());
  return 1;
}

/* Reads what the child says, waiting so long at most; 1: it came. */
static int readProbe(int end, probe_t *p) {
  struct pollfd ready = {.fd = end, .events = POLLIN};
  int came;
  do came = poll(&ready, 1, PROBE_SECONDS * 1000);
  while (came < 0 && errno == EINTR);
  if (came == 0)
    snprintf(p->sentence, sizeof p->sentence, "did not end within %d s", PROBE_SECONDS);
  return came > 0 && read(end, p, sizeof *p) == sizeof *p;
}

trefoil_result_t epLibraryAsk(const ep_library_paths_t *paths, ep_library_facts_t *facts) {
  int ends[2], status = 1;
  probe_t p = {0};
  EP_CHECK(pipe(ends) == 0, TREFOIL_SYSTEM_ERROR, "no pipe could be made");
  pid_t pid = epWorkerFork(1);
  if (pid == 0) {
    int bad = probeHere(paths, &p);
    if (write(ends[1], &p, sizeof p) < 0) _exit(2);
    _exit(bad);
  }
  close(ends[1]);
  EP_CHECK(pid > 0, TREFOIL_SYSTEM_ERROR, "a process could not be started");
  int isSaid = readProbe(ends[0], &p);
  close(ends[0]);
  if (*p.sentence && !isSaid) {
    epWorkerKill(pid);
    return epFail(TREFOIL_SYSTEM_ERROR, "loading %s %s", paths->library, p.sentence);
  }
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) continue;
  EP_CHECK(!WIFSIGNALED(status), TREFOIL_SYSTEM_ERROR, "loading %s ended with signal %d",
           paths->library, WTERMSIG(status));
  EP_CHECK(isSaid, TREFOIL_SYSTEM_ERROR, "loading %s ended the process with exit code %d",
           paths->library, WEXITSTATUS(status));
  EP_CHECK(status == 0, TREFOIL_SYSTEM_ERROR, "%s", p.sentence);
  *facts = p.facts;
  return TREFOIL_OK;
}

trefoil_result_t epLibraryProbe(const ep_library_paths_t *paths, int *numDevices) {
  ep_library_facts_t facts;
  EP_TRY(epLibraryAsk(paths, &facts));
  if (numDevices) *numDevices = facts.numDevices;
  return TREFOIL_OK;
}

trefoil_result_t epLibraryHasGrad(const ep_library_t *lib) {
  EP_CHECK(lib->trefoilGradGpuCreate && lib->trefoilGradGpuStep && lib->trefoilGradGpuSync &&
               lib->trefoilGradGpuGetMask && lib->trefoilGradGpuSetMask &&
               lib->trefoilGradGpuDestroy,
           TREFOIL_INVALID_ARGUMENT, "the library has no calls of A2SGD (trefoil/a2sgd.h)");
  return TREFOIL_OK;
}

const char *epLibraryError(const ep_library_t *lib, ncclResult_t result) {
  const char *sentence = lib->ncclEpGetLastError ? lib->ncclEpGetLastError() : NULL;
  return sentence && *sentence ? sentence : lib->ncclGetErrorString(result);
}

const char *epNcclError(const ep_library_t *lib, ncclComm_t comm, ncclResult_t result) {
  const char *sentence = lib->ncclGetLastError(comm);
  return sentence && *sentence ? sentence : lib->ncclGetErrorString(result);
}
