/* Runs a function as every rank: as threads of this process, or as forked processes. */
#ifndef TREFOIL_TESTS_HOST_RANKS_H
#define TREFOIL_TESTS_HOST_RANKS_H

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <nccl.h>
#include <nccl_device.h>

#include "test.h"

typedef struct {
  int rank, numRanks;
  ncclUniqueId id;
  void *arg;
  void (*body)(int rank, int numRanks, const ncclUniqueId *id, void *arg);
} rank_call_t;

typedef void (*rank_body_t)(int rank, int numRanks, const ncclUniqueId *id, void *arg);

static void *rankThread(void *arg) {
  rank_call_t *call = (rank_call_t *)arg;
  cudaSetDevice(call->rank % 8);
  call->body(call->rank, call->numRanks, &call->id, call->arg);
  return NULL;
}

__attribute__((unused)) static void runThreads(int numRanks, rank_body_t body, void *arg) {
  pthread_t threads[64];
  rank_call_t calls[64];
  ncclUniqueId id;
  REQUIRE(ncclGetUniqueId(&id) == ncclSuccess, "%s", ncclGetLastError(NULL));
  for (int r = 0; r < numRanks; r++) {
    calls[r] = (rank_call_t){r, numRanks, id, arg, body};
    pthread_create(&threads[r], NULL, rankThread, &calls[r]);
  }
  for (int r = 0; r < numRanks; r++) pthread_join(threads[r], NULL);
}

/* Forks the ranks; each exits with 0 if no CHECK failed in it. The parent makes the id, and so serves it on
 * a thread: the ranks start when all have been forked, so that this thread is idle at each fork. (A child
 * forked while it allocates would find AddressSanitizer's allocator locked for good.) */
__attribute__((unused)) static void startProcesses(int numRanks, rank_body_t body, void *arg,
                                                   pid_t *pids) {
  ncclUniqueId id;
  int start[2];
  REQUIRE(pipe(start) == 0, "pipe: %s", strerror(errno));
  REQUIRE(ncclGetUniqueId(&id) == ncclSuccess, "%s", ncclGetLastError(NULL));
  fflush(NULL);
  for (int r = 0; r < numRanks; r++) {
    pids[r] = fork();
    if (pids[r] == 0) {
      char none;
      testFailures = 0;
      close(start[1]);
      if (read(start[0], &none, 1) != 0) _exit(2); /* until the parent has closed it */
      close(start[0]);
      cudaSetDevice(r % 8);
      body(r, numRanks, &id, arg);
      fflush(NULL);
      _exit(testFailures ? 1 : 0);
    }
  }
  close(start[0]);
  close(start[1]);
}

__attribute__((unused)) static void runProcesses(int numRanks, rank_body_t body, void *arg) {
  pid_t pids[64];
  startProcesses(numRanks, body, arg, pids);
  for (int r = 0; r < numRanks; r++) {
    int status = -1;
    waitpid(pids[r], &status, 0);
    CHECK(status == 0, "process of rank %d: status 0x%x", r, status);
  }
}

#endif
