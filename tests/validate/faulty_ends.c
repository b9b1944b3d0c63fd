/* Faults that end a call, a process or a stream. */
#include "faulty_library.h"

#include <nccl_ep.h>

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_RANKS = 64, BEFORE = 2 };

int faultSoon(void) {
  return getenv("TREFOIL_FAULT_SOON") != NULL;
}

static void forever(void *context) {
  (void)context;
  for (;;) pause();
}

static int end(const char *kind, cudaStream_t stream) {
  static volatile uintptr_t nowhere = 8;
  if (!strcmp(kind, "error")) return ncclInvalidArgument;
  if (!strcmp(kind, "code")) return ncclInternalError;
  if (!strcmp(kind, "crash")) *(volatile int *)nowhere = 1;
  if (!strcmp(kind, "abort")) abort();
  if (!strcmp(kind, "exit0")) exit(0);
  if (!strcmp(kind, "exit1")) exit(1);
  if (!strcmp(kind, "_exit0")) _exit(0);
  if (!strcmp(kind, "kill")) kill(getpid(), SIGKILL);
  if (!strcmp(kind, "throw")) faultThrow();
  if (!strcmp(kind, "hang")) forever(NULL);
  if (!strcmp(kind, "stream")) cudaLaunchHostFunc(stream, forever, NULL);
  return 0;
}

int faultAt(const char *call, int rank, cudaStream_t stream) {
  static atomic_int times[MAX_RANKS];
  const char *fault = getenv("TREFOIL_FAULT"), *which = getenv("TREFOIL_FAULT_RANK");
  const char *colon = fault ? strchr(fault, ':') : NULL;
  char kind[16] = "";
  if (!colon || strcmp(colon + 1, call) || colon - fault >= (ptrdiff_t)sizeof kind) return 0;
  memcpy(kind, fault, (size_t)(colon - fault));
  if (!strcmp(kind, "print")) {
    printf("%s prints what nobody asked for\n", call);
    fprintf(stderr, "%s complains\n", call);
    fflush(stdout);
    return 0;
  }
  if (rank != (which ? atoi(which) : 1)) return 0;
  if (atomic_fetch_add(&times[rank], 1) < BEFORE && !faultSoon()) return 0;
  return faultRecord(rank, 0) ? end(kind, stream) : 0;
}
