#include "loader.h"

#include <dlfcn.h>
#include <stdio.h>

static const ep_library_t linkedIn = {.onHost = 1,
#define EP_LINKED(name) .name = name,
                                      EP_FUNCTIONS(EP_LINKED)
#undef EP_LINKED
};
const ep_library_t *pyLibrary = &linkedIn;

static ep_library_t loaded;
static char why[512];

/* The library's own names come first, whatever the process has loaded: AddressSanitizer refuses that. */
#ifdef __SANITIZE_ADDRESS__
#define OWN_NAMES_FIRST 0
#else
#define OWN_NAMES_FIRST RTLD_DEEPBIND
#endif

static void *open(const char *path) {
  return dlopen(path, RTLD_NOW | RTLD_LOCAL | OWN_NAMES_FIRST);
}

/* The CUDA runtime of a library that has one of its own, inside. */
static void *openRuntime(void *library) {
  if (dlsym(library, "cudaGetDevice")) return library;
  void *runtime = open("libcudart.so.13");
  return runtime ? runtime : open("libcudart.so.12");
}

static int find(void *library, void *runtime, const char *name, void *slot) {
  void *found = dlsym(library, name);
  if (!found) found = dlsym(runtime, name);
  *(void **)slot = found;
  if (!found) snprintf(why, sizeof why, "it lacks %s", name);
  return found != NULL;
}

static int fill(void *library, void *runtime, ep_library_t *out) {
  out->onHost = dlsym(library, "trefoilHostLastError") != NULL;
#define EP_FIND(name) &&find(library, runtime, #name, &out->name)
  return 1 EP_FUNCTIONS(EP_FIND);
#undef EP_FIND
}

static const char *loadFrom(const char *path) {
  void *library = open(path);
  void *runtime = library ? openRuntime(library) : NULL;
  if (!runtime) {
    snprintf(why, sizeof why, "%s", dlerror());
    return why;
  }
  ep_library_t found;
  if (!fill(library, runtime, &found)) return why;
  loaded = found;
  pyLibrary = &loaded;
  return NULL;
}

const char *pyLoad(const char *path) {
  if (path) return loadFrom(path);
  pyLibrary = &linkedIn;
  return NULL;
}

const char *pyLibraryPath(void) {
  Dl_info info;
  return dladdr((void *)pyLibrary->ncclEpGetVersion, &info) && info.dli_fname ? info.dli_fname : "";
}
