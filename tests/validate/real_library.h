/* The library that a test's library forwards to (TREFOIL_FAULT_LIBRARY): REAL(ncclEpDispatch)(...). */
#ifndef TREFOIL_TESTS_REAL_LIBRARY_H
#define TREFOIL_TESTS_REAL_LIBRARY_H

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>

static void *real;
static pthread_once_t realOnce = PTHREAD_ONCE_INIT;

static void openReal(void) {
  real = dlopen(getenv("TREFOIL_FAULT_LIBRARY"), RTLD_NOW | RTLD_GLOBAL);
}

static void *findReal(const char *name) {
  pthread_once(&realOnce, openReal);
  return dlsym(real, name);
}
#define REAL(name) ((__typeof__(&name))findReal(#name))

#endif
