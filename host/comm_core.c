/* Communicator objects: what every function needs of them, waiting for the doorbell, and noticing that a
 * rank is gone (its process ended, it destroyed or aborted its communicator, or it failed). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm_internal.h"
#include "plan/process.h"

/* In place of a descriptor. */
typedef enum { WATCH_BY_PID = -1, WATCH_UNOPENED = -2, WATCH_GONE = -3 } watch_t;

static pthread_mutex_t freeLock = PTHREAD_MUTEX_INITIALIZER;
static ncclComm_t freeComms;
static uint64_t lastLife;

ncclResult_t epCommGet(ncclComm_t comm, const char *func) {
  EP_NCCL_CHECK(comm && ((uintptr_t)comm & 7) == 0 && atomic_load(&comm->magic) == EP_COMM_MAGIC,
                ncclInvalidArgument, "%s: %p is not a live communicator", func, (void *)comm);
  return ncclSuccess;
}

ep_rank_entry_t *epCommEntry(ncclComm_t comm, int rank) {
  return &comm->shm->ranks[rank];
}

bool epCommSameProcess(ncclComm_t comm, int rank) {
  return epCommEntry(comm, rank)->process.uid == comm->self.uid;
}

/* ---- Doorbells ---- */

void epCommRing(ncclComm_t comm, int rank) {
  epDoorbellRing(&epCommEntry(comm, rank)->doorbell, 0, EP_FUTEX_SHARED);
}

void epCommRingAll(ncclComm_t comm) {
  for (int r = 0; r < comm->numRanks; r++) epCommRing(comm, r);
}

uint32_t epCommDoorbell(ncclComm_t comm) {
  return epDoorbellRead(&epCommEntry(comm, comm->rank)->doorbell);
}

void epCommSleep(ncclComm_t comm, uint32_t seen, uint64_t maxNs) {
  ep_doorbell_t *mine = &epCommEntry(comm, comm->rank)->doorbell;
  if (!epSpin(&mine->rings, seen)) epDoorbellSleep(mine, seen, maxNs, 0, EP_FUTEX_SHARED);
}

/* ---- Which ranks are there ---- */

/* A descriptor that becomes readable when the rank's process ends, or a watch_t. Ids of processes of another
 * namespace mean nothing here, or another process: those are asked for a connection to be held. */
static int openWatch(const ep_process_t *process, uint64_t mySpace) {
  int fd;
  if (mySpace && process->pidSpace == mySpace) {
    fd = epProcessOpen(process->pid);
    return fd >= 0 ? fd : fd == EP_PROCESS_GONE ? WATCH_GONE : WATCH_BY_PID;
  }
  ncclResult_t result = epServerWatch(process, &fd);
  return result == ncclSuccess ? fd : result == ncclRemoteError ? WATCH_GONE : WATCH_UNOPENED;
}

static bool processLives(ncclComm_t comm, int rank) {
  const ep_process_t *process = &epCommEntry(comm, rank)->process;
  int fd = atomic_load(&comm->watches[rank]);
  if (epCommSameProcess(comm, rank)) return true;
  if (fd == WATCH_UNOPENED) {
    int opened = openWatch(process, comm->self.pidSpace);
    if (opened == WATCH_UNOPENED) return true; /* not to be told now */
    if (atomic_compare_exchange_strong(&comm->watches[rank], &fd, opened))
      fd = opened;
    else if (opened >= 0)
      close(opened); /* another thread was faster */
  }
  if (fd == WATCH_GONE) return false;
  return !epProcessEnded(fd == WATCH_BY_PID ? EP_PROCESS_NO_FD : fd, process->pid);
}

/* A rank that gave up on a dead one may have ended, too: all whose processes are gone are named. */
static void setEndedSentence(ncclComm_t comm, int rank) {
  char others[160] = "";
  size_t n = 0;
  for (int r = 0; r < comm->numRanks && n < sizeof others - 16; r++) {
    if (r == rank || atomic_load(&epCommEntry(comm, r)->state) != EP_RANK_THERE) continue;
    if (processLives(comm, r)) continue;
    n += (size_t)snprintf(others + n, sizeof others - n, "%s %d", n ? "," : "; so has that of rank",
                          r);
  }
  epSetSentence("rank %d is gone: its process %d has ended%s", rank,
                epCommEntry(comm, rank)->process.pid, others);
}

bool epCommPeerThere(ncclComm_t comm, int rank) {
  switch ((ep_rank_state_t)atomic_load(&epCommEntry(comm, rank)->state)) {
  case EP_RANK_EXPECTED:
    return true;
  case EP_RANK_THERE:
    if (processLives(comm, rank)) return true;
    if (atomic_load(&epCommEntry(comm, rank)->state) != EP_RANK_THERE)
      return epCommPeerThere(comm, rank); /* it said why before it ended */
    setEndedSentence(comm, rank);
    return false;
  case EP_RANK_DESTROYED:
    epSetSentence("rank %d is gone: it destroyed its communicator", rank);
    break;
  case EP_RANK_ABORTED:
    epSetSentence("rank %d is gone: it aborted its communicator", rank);
    break;
  case EP_RANK_FAILED:
    epSetSentence("%s", epCommEntry(comm, rank)->why);
    break;
  }
  return false;
}

bool epCommPeerLeft(ncclComm_t comm, int rank) {
  for (int i = 0; i < 50; i++) {
    if (!epCommPeerThere(comm, rank)) return true;
    usleep(4000);
  }
  return false;
}

/* ---- Errors of stream-ordered work ---- */

void epCommSetAsync(ncclComm_t comm, ncclResult_t result, const char *sentence) {
  pthread_mutex_lock(&comm->lock);
  bool first = atomic_load(&comm->asyncError) == ncclSuccess;
  if (first) {
    snprintf(comm->sentence, sizeof comm->sentence, "%s", sentence);
    atomic_store(&comm->asyncError, result);
  }
  pthread_mutex_unlock(&comm->lock);
  if (!first) return;
  ep_rank_entry_t *mine = epCommEntry(comm, comm->rank);
  uint32_t there = EP_RANK_THERE;
  if (strstr(sentence, "(found by rank"))
    snprintf(mine->why, sizeof mine->why, "%s", sentence);
  else
    snprintf(mine->why, sizeof mine->why, "%.150s (found by rank %d)", sentence, comm->rank);
  atomic_compare_exchange_strong(&mine->state, &there, EP_RANK_FAILED);
  epCommRingAll(comm);
}

ncclResult_t epCommUsable(ncclComm_t comm, const char *func) {
  EP_NCCL_TRY(epCommGet(comm, func));
  ncclResult_t error = (ncclResult_t)atomic_load(&comm->asyncError);
  if (error == ncclSuccess) return error;
  pthread_mutex_lock(&comm->lock);
  epNcclFail(error, "%s: the communicator failed earlier: %s", func, comm->sentence);
  pthread_mutex_unlock(&comm->lock);
  return error;
}

ncclResult_t epCommDrain(ncclComm_t comm, const char *func) {
  uint64_t start = epMonotonicNs(), timeout = trefoilHostTimeoutNs();
  timeout = timeout < INT64_MAX / 4 ? 2 * timeout + 5000000000u : INT64_MAX;
  for (;;) {
    uint32_t turn = atomic_load(&comm->turn);
    if (atomic_load(&comm->served) >= atomic_load(&comm->issued)) return ncclSuccess;
    EP_NCCL_CHECK(epMonotonicNs() - start < timeout, ncclInternalError,
                  "%s: work queued on the communicator does not finish", func);
    epFutexWait(&comm->turn, turn, 50000000u, EP_FUTEX_SHARED);
  }
}

/* ---- Making and freeing the object ---- */

static ncclComm_t takeObject(void) {
  pthread_mutex_lock(&freeLock);
  ncclComm_t comm = freeComms;
  if (comm)
    freeComms = comm->nextFree;
  else if ((comm = calloc(1, sizeof *comm)))
    pthread_mutex_init(&comm->lock, NULL);
  if (comm) comm->life = ++lastLife;
  pthread_mutex_unlock(&freeLock);
  return comm;
}

static void giveObject(ncclComm_t comm) {
  free(comm->watches);
  comm->watches = NULL;
  pthread_mutex_lock(&freeLock);
  comm->nextFree = freeComms;
  freeComms = comm;
  pthread_mutex_unlock(&freeLock);
}

static ncclResult_t takeEntry(ncclComm_t comm, const char *func) {
  ep_rank_entry_t *mine = epCommEntry(comm, comm->rank);
  uint64_t nobody = 0;
  EP_NCCL_CHECK(atomic_compare_exchange_strong(&mine->owner, &nobody, epRandom()),
                ncclInvalidArgument, "%s: rank %d has joined already", func, comm->rank);
  mine->process = comm->self;
  mine->device = comm->device;
  mine->lsaSize = comm->lsaSize;
  atomic_store(&mine->state, EP_RANK_THERE);
  epCommRingAll(comm);
  return ncclSuccess;
}

ncclResult_t epCommNew(const ep_process_t *owner, uint64_t key, int numRanks, int rank,
                       const char *func, ncclComm_t *out) {
  ep_process_t self;
  EP_NCCL_TRY(epServerSelf(&self, func));
  ncclComm_t comm = takeObject();
  _Atomic int *watches = comm ? malloc((size_t)numRanks * sizeof *watches) : NULL;
  if (comm) comm->watches = watches;
  if (!watches) {
    if (comm) giveObject(comm);
    return epNcclFail(ncclSystemError, "%s: out of memory", func);
  }
  for (int r = 0; r < numRanks; r++) atomic_init(&watches[r], WATCH_UNOPENED);
  comm->rank = rank;
  comm->numRanks = numRanks;
  comm->device = epCurrentDevice();
  comm->lsaSize = (int)epEnvInt("NCCL_LSA_TEAM_SIZE", 0);
  comm->self = self;
  comm->numExchanges = 0;
  comm->round = (ep_round_t){0};
  comm->windows = NULL;
  comm->gins = NULL;
  comm->freeWindows = NULL;
  comm->freeGins = NULL;
  comm->sentence[0] = 0;
  atomic_store(&comm->issued, 0);
  atomic_store(&comm->served, 0);
  atomic_store(&comm->asyncError, ncclSuccess);
  atomic_store(&comm->aborting, false);
  atomic_store(&comm->refs, 1);
  comm->numShrinks = 0;
  ncclResult_t result = epCommShmJoin(owner, key, numRanks, &comm->shm, func);
  if (result == ncclSuccess) {
    result = takeEntry(comm, func);
    if (result != ncclSuccess) epCommShmLeave(comm->shm);
  }
  if (result != ncclSuccess) {
    giveObject(comm);
    return result;
  }
  *out = comm;
  return ncclSuccess;
}

bool epCommEnter(ncclComm_t comm) {
  int refs = atomic_load(&comm->refs);
  while (refs > 0)
    if (atomic_compare_exchange_weak(&comm->refs, &refs, refs + 1)) return true;
  return false;
}

void epCommLeave(ncclComm_t comm) {
  if (atomic_fetch_sub(&comm->refs, 1) != 1) return;
  if (comm->freeGins) comm->freeGins(comm);
  if (comm->freeWindows) comm->freeWindows(comm);
  for (int r = 0; r < comm->numRanks; r++)
    if (comm->watches[r] >= 0) close(comm->watches[r]);
  epCommShmLeave(comm->shm);
  giveObject(comm);
}

void epCommFree(ncclComm_t comm, ep_rank_state_t lastState) {
  atomic_store(&comm->magic, EP_DEAD_MAGIC);
  _Atomic uint32_t *state = &epCommEntry(comm, comm->rank)->state;
  if (atomic_load(state) != EP_RANK_FAILED) atomic_store(state, lastState); /* the cause stays */
  epCommRingAll(comm);
  epCommLeave(comm);
}

void epCommsForked(void) {
  pthread_mutex_init(&freeLock, NULL);
  freeComms = NULL;
}

/* ---- trefoil_host.h ---- */

int trefoilHostPeerAlive(ncclComm_t comm, int rank) {
  if (epCommGet(comm, "trefoilHostPeerAlive") != ncclSuccess) return -1;
  if (rank < 0 || rank >= comm->numRanks) {
    epSetSentence("trefoilHostPeerAlive: rank %d is not in [0, %d)", rank, comm->numRanks);
    return -1;
  }
  return epCommPeerThere(comm, rank);
}

int trefoilHostSameProcess(ncclComm_t comm, int rank) {
  if (epCommGet(comm, "trefoilHostSameProcess") != ncclSuccess) return -1;
  if (rank < 0 || rank >= comm->numRanks) {
    epSetSentence("trefoilHostSameProcess: rank %d is not in [0, %d)", rank, comm->numRanks);
    return -1;
  }
  return epCommSameProcess(comm, rank);
}

static ncclResult_t waitChange(ncclComm_t comm, int peer, const _Atomic uint32_t *flag,
                               uint32_t seen, uint64_t timeoutNs) {
  uint64_t start = epMonotonicNs(), slice = 1000000;
  for (;;) {
    uint64_t waited = epMonotonicNs() - start;
    EP_NCCL_CHECK(waited < timeoutNs, ncclTimeout, "waited %.3f s for rank %d",
                  (double)timeoutNs * 1e-9, peer);
    uint64_t left = timeoutNs - waited;
    epFutexWait(flag, seen, left < slice ? left : slice, EP_FUTEX_SHARED);
    if (atomic_load_explicit(flag, memory_order_acquire) != seen) return ncclSuccess;
    if (peer >= 0 && !epCommPeerThere(comm, peer))
      return atomic_load_explicit(flag, memory_order_acquire) != seen ? ncclSuccess
                                                                      : ncclRemoteError;
    EP_NCCL_CHECK(!atomic_load(&comm->aborting), ncclInvalidUsage, "the communicator was aborted");
    if (slice < 16000000) slice *= 2;
  }
}

ncclResult_t trefoilHostWaitChange(ncclComm_t comm, int peer, const uint32_t *word, uint32_t seen,
                                   uint64_t timeoutNs) {
  const char *func = "trefoilHostWaitChange";
  const _Atomic uint32_t *flag = (const _Atomic uint32_t *)word;
  if (atomic_load_explicit(flag, memory_order_acquire) != seen || epSpin(flag, seen))
    return ncclSuccess;
  EP_NCCL_TRY(epCommGet(comm, func));
  EP_NCCL_CHECK(peer >= -1 && peer < comm->numRanks, ncclInvalidArgument,
                "%s: rank %d is not in [0, %d)", func, peer, comm->numRanks);
  EP_NCCL_CHECK(epCommEnter(comm), ncclInvalidUsage, "%s: the communicator was aborted", func);
  ncclResult_t result = waitChange(comm, peer, flag, seen, timeoutNs);
  epCommLeave(comm);
  return result;
}

void trefoilHostWake(const uint32_t *word) {
  epFutexWake((const _Atomic uint32_t *)word, EP_FUTEX_SHARED);
}
