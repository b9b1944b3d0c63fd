/* NCCL makes a device communicator collectively and waits without a limit: a rank whose call fails leaves the
 * others in theirs. So the call has a thread of its own, and meanwhile the ranks go on with barrier rounds,
 * until it has returned on all of them, has failed on one, or takes too long. A call that is given up ends
 * when the communicator is aborted. */
#include "api/gpu/gpu_dev_comm.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/gpu/rendezvous.h"
#include "plan/clock.h"

#define SECOND   1000000000ull
#define FIRST_NS (SECOND / 20) /* between two rounds; later up to a second */

/* The thread's and its caller's: the last one frees it. */
typedef struct call {
  ncclComm_t comm;
  ncclDevCommRequirements_t needs;
  int device;
  _Atomic int references;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  int hasReturned; /* with the lock held */
  trefoil_result_t result;
  char why[400];
  ncclDevComm_t made;
} call_t;

typedef enum { RETURNED, RUNNING, LATE, FAILED } state_t;

static void release(call_t *c) {
  if (atomic_fetch_sub(&c->references, 1) != 1) return;
  pthread_cond_destroy(&c->changed);
  pthread_mutex_destroy(&c->lock);
  free(c);
}

static trefoil_result_t create(call_t *c) {
  enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  EP_CUDA(cudaSetDevice(c->device));
  EP_CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
  return epGpuNccl(c->comm, ncclDevCommCreate(c->comm, &c->needs, &c->made),
                   "ncclEpInitHandle: ncclDevCommCreate");
}

static void *makeIt(void *argument) {
  call_t *c = argument;
  trefoil_result_t result = create(c);
  pthread_mutex_lock(&c->lock);
  c->result = result;
  if (result != TREFOIL_OK) snprintf(c->why, sizeof c->why, "%s", trefoilLastError());
  c->hasReturned = 1;
  pthread_cond_signal(&c->changed);
  pthread_mutex_unlock(&c->lock);
  release(c);
  return NULL;
}

static call_t *newCall(const ep_gpu_group_t *g, const ncclDevCommRequirements_t *needs) {
  pthread_condattr_t monotonic;
  call_t *c = calloc(1, sizeof *c);
  if (!c) return NULL;
  c->comm = g->group->comm;
  c->needs = *needs;
  c->device = g->device;
  c->references = 2;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&c->changed, &monotonic);
  pthread_condattr_destroy(&monotonic);
  pthread_mutex_init(&c->lock, NULL);
  return c;
}

static call_t *start(const ep_gpu_group_t *g, const ncclDevCommRequirements_t *needs) {
  pthread_t thread;
  call_t *c = newCall(g, needs);
  if (!c) return NULL;
  if (pthread_create(&thread, NULL, makeIt, c) == 0) {
    pthread_detach(thread);
    return c;
  }
  c->references = 1; /* no thread has it */
  release(c);
  return NULL;
}

static int hasReturnedBy(call_t *c, uint64_t until) {
  struct timespec t = {(time_t)(until / SECOND), (long)(until % SECOND)};
  pthread_mutex_lock(&c->lock);
  while (!c->hasReturned && pthread_cond_timedwait(&c->changed, &c->lock, &t) == 0) {
  }
  int hasReturned = c->hasReturned;
  pthread_mutex_unlock(&c->lock);
  return hasReturned;
}

static int countOf(const ep_rendezvous_word_t *all, int numRanks, state_t state) {
  int n = 0;
  for (int r = 0; r < numRanks; r++) n += all[r].pending == (int)state;
  return n;
}

static trefoil_result_t failLate(const ep_rendezvous_word_t *all, int numRanks,
                                 uint64_t timeoutNs) {
  char late[200] = "";
  for (int r = 0; r < numRanks; r++) {
    size_t n = strlen(late);
    if (all[r].pending != RETURNED && n < sizeof late - 8)
      snprintf(late + n, sizeof late - n, n ? ", %d" : "%d", r);
  }
  return epFail(
      TREFOIL_REMOTE_ERROR,
      "ncclEpInitHandle: ncclDevCommCreate has not returned on rank %s after %.1f s; abort "
      "the communicator",
      late, (double)timeoutNs * 1e-9);
}

static trefoil_result_t compare(const ep_gpu_group_t *g, const ep_rendezvous_word_t *all) {
  for (int r = 0; r < g->R; r++) {
    EP_CHECK(all[r].pending != FAILED, TREFOIL_REMOTE_ERROR,
             "ncclEpInitHandle: it failed on rank %d: %.175s; abort the communicator", r,
             all[r].why);
  }
  return countOf(all, g->R, LATE) ? failLate(all, g->R, g->group->timeoutNs) : TREFOIL_OK;
}

static state_t stateOf(call_t *c, uint64_t pauseNs, uint64_t untilNs) {
  uint64_t now = epMonotonicNs();
  if (hasReturnedBy(c, now + pauseNs < untilNs ? now + pauseNs : untilNs))
    return c->result == TREFOIL_OK ? RETURNED : FAILED;
  return epMonotonicNs() < untilNs ? RUNNING : LATE;
}

/* One barrier round. */
static trefoil_result_t barrierRound(ep_gpu_group_t *g, const call_t *c, state_t state,
                                     int *allReturned) {
  ep_rendezvous_word_t all[EP_KERNEL_MAX_RANKS], mine = {.call = EP_RENDEZVOUS_DEVICE_READY};
  mine.groupId = g->id;
  mine.pending = (int)state;
  if (state == FAILED) snprintf(mine.why, sizeof mine.why, "%.175s", c->why);
  trefoil_result_t result = epRendezvousWait(g->rendezvous, &mine, g->group->timeoutNs, all);
  if (state == FAILED) return epFail(c->result, "%s", c->why);
  EP_TRY(result);
  *allReturned = countOf(all, g->R, RETURNED) == g->R;
  return compare(g, all);
}

static trefoil_result_t await(ep_gpu_group_t *g, call_t *c, state_t *state) {
  uint64_t now = epMonotonicNs(), limit = g->group->timeoutNs, pause = FIRST_NS;
  uint64_t until = limit < UINT64_MAX - now ? now + limit : UINT64_MAX;
  for (int allReturned = 0; !allReturned; pause = pause < SECOND / 2 ? 2 * pause : SECOND) {
    *state = stateOf(c, pause, until);
    EP_TRY(barrierRound(g, c, *state, &allReturned));
  }
  return TREFOIL_OK;
}

trefoil_result_t epGpuDevComm(ep_gpu_group_t *g, const ncclDevCommRequirements_t *needs,
                              ncclDevComm_t *out, int *givenUp) {
  state_t state = RUNNING;
  call_t *c = start(g, needs);
  EP_CHECK(c, TREFOIL_SYSTEM_ERROR, "ncclEpInitHandle: a thread could not be started");
  trefoil_result_t result = await(g, c, &state);
  *givenUp = state == RUNNING || state == LATE;
  if (result == TREFOIL_OK)
    *out = c->made;
  else if (state == RETURNED)
    ncclDevCommDestroy(g->group->comm, &c->made);
  release(c);
  return result;
}
