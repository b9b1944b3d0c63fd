/* A rendezvous in shared memory: ranks of one NVLink domain are processes or threads of one machine.
 *
 * NCCL's own collective calls (window registration among them) wait for ever for a rank that does not
 * come, and cannot say which. So ranks first meet here, with a time limit, and go on to NCCL only when
 * everybody has come with the same call. plan/meeting.h holds the meetings; here are its memory, one file a
 * communicator in /dev/shm, named after its hash and removed as soon as all have it mapped, how a rank's
 * process is watched, and the comparison of calls. */
#include "api/gpu/rendezvous.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "api/gpu/gpu.h"
#include "api/own_file.h"
#include "plan/clock.h"
#include "plan/meeting.h"
#include "plan/process.h"

#define SECOND 1000000000ull

_Static_assert(sizeof(ep_rendezvous_word_t) <= EP_MEETING_BYTES, "a word fits into a record");

typedef struct seat {
  ep_meeting_seat_t meeting;
  _Atomic int32_t pid;       /* 0: it has not come yet */
  _Atomic int32_t isLocked;  /* its byte of the file; the kernel unlocks it at the process's end */
  _Atomic uint64_t pidSpace; /* where that pid means something */
} seat_t;

/* The file: of zeros at first. */
typedef struct shared_rendezvous {
  ep_meeting_place_t place;
  seat_t seats[EP_LL_MAX_RANKS];
} shared_rendezvous_t;

/* A rank's process. */
typedef struct watch {
  int32_t pid; /* 0: not watched */
  int fd;      /* of epProcessOpen */
} watch_t;

struct ep_rendezvous {
  struct ep_rendezvous *next;
  ncclComm_t comm;
  uint64_t hash;
  int rank, numRanks, users;
  int haveMet; /* the file is gone: nobody can come to this rendezvous any more */
  int file;    /* with the locks of the seats */
  uint64_t rounds;
  shared_rendezvous_t *shared;
  watch_t watches[EP_LL_MAX_RANKS];
  ep_meeting_t meeting;
};

/* This process's rendezvous, and the files that it may have left. */
static pthread_mutex_t listLock = PTHREAD_MUTEX_INITIALIZER;
static struct ep_rendezvous *rendezvousList;
static struct left_file {
  struct left_file *next;
  uint64_t hash;
} * leftFiles;

static void stopWatching(watch_t *watch) {
  if (watch->pid && watch->fd >= 0) close(watch->fd);
  watch->pid = 0;
}

/* A lock of the file's open description, so that ranks which are threads have one each. */
static int lockSeat(const struct ep_rendezvous *b, int rank, int command, short type) {
  struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
  return fcntl(b->file, command, &lock) == 0 ? lock.l_type : -1;
}

static void sitDown(struct ep_rendezvous *b) {
  seat_t *seat = &b->shared->seats[b->rank];
  atomic_store(&seat->pidSpace, epPidSpace());
  atomic_store(&seat->isLocked, lockSeat(b, b->rank, F_OFD_SETLK, F_WRLCK) >= 0);
  atomic_store(&seat->pid, (int32_t)getpid());
}

/* Ids of another namespace mean nothing here: there the lock tells. */
static int isGone(void *rendezvous, int rank) {
  struct ep_rendezvous *b = rendezvous;
  seat_t *seat = &b->shared->seats[rank];
  watch_t *watch = &b->watches[rank];
  int32_t pid = atomic_load(&seat->pid);
  uint64_t space = atomic_load(&seat->pidSpace);
  if (!pid) return 0;
  if (!space || space != epPidSpace())
    return atomic_load(&seat->isLocked) && lockSeat(b, rank, F_OFD_GETLK, F_WRLCK) == F_UNLCK;
  if (watch->pid != pid) {
    stopWatching(watch);
    *watch = (watch_t){pid, epProcessOpen(pid)};
  }
  return epProcessEnded(watch->fd, watch->pid);
}

static void nameOf(uint64_t hash, char name[64]) {
  snprintf(name, 64, "/dev/shm/nccl_ep.%u.%016llx", (unsigned)geteuid(), (unsigned long long)hash);
}

/* ---- the file -------------------------------------------------------------------------------- */

static void forgetFile(uint64_t hash) {
  for (struct left_file **link = &leftFiles, *f; (f = *link);) {
    if (f->hash == hash) {
      *link = f->next;
      free(f);
    } else {
      link = &f->next;
    }
  }
}

__attribute__((destructor)) static void removeLeftFiles(void) {
  char name[64];
  for (struct left_file *f = leftFiles; f; f = f->next) {
    nameOf(f->hash, name);
    unlink(name);
  }
}

/* Whoever makes the file gives it its size, all zeros; the others wait for that. */
static trefoil_result_t mapShared(int fd, shared_rendezvous_t **out) {
  struct stat info = {.st_nlink = 1};
  for (uint64_t since = epMonotonicNs();; usleep(200)) {
    if (fstat(fd, &info) == 0 && info.st_size >= (off_t)sizeof(shared_rendezvous_t)) break;
    EP_CHECK(info.st_nlink, TREFOIL_SYSTEM_ERROR,
             "another rank found no space in /dev/shm, where ranks meet");
    EP_CHECK(epMonotonicNs() - since < 5 * SECOND, TREFOIL_SYSTEM_ERROR,
             "a file of another run in /dev/shm is not ready; remove /dev/shm/nccl_ep.*");
  }
  void *p = mmap(NULL, sizeof(shared_rendezvous_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  EP_CHECK(p != MAP_FAILED, TREFOIL_SYSTEM_ERROR, "/dev/shm: cannot map: %s", strerror(errno));
  *out = p;
  return TREFOIL_OK;
}

static trefoil_result_t openShared(uint64_t hash, shared_rendezvous_t **out, int *file) {
  char name[64];
  nameOf(hash, name);
  struct left_file *left = malloc(sizeof *left);
  EP_CHECK(left, TREFOIL_SYSTEM_ERROR, "out of memory");
  int fd = epOwnFileNew(name, sizeof(shared_rendezvous_t)), made = fd >= 0;
  if (!made && errno == EEXIST) fd = epOwnFileOpen(name);
  if (fd < 0 && errno == ENOENT) { /* removed between the two */
    fd = epOwnFileNew(name, sizeof(shared_rendezvous_t));
    made = fd >= 0;
  }
  if (fd < 0) {
    free(left);
    return epFail(TREFOIL_SYSTEM_ERROR, "%s: %s", name,
                  errno == EPERM ? "another user's file, or a link; remove it" : strerror(errno));
  }
  trefoil_result_t result = mapShared(fd, out);
  if (result != TREFOIL_OK) {
    close(fd);
    if (made) unlink(name);
    free(left);
    return result;
  }
  *file = fd;
  left->hash = hash;
  left->next = leftFiles;
  leftFiles = left;
  return TREFOIL_OK;
}

void epRendezvousUnlink(struct ep_rendezvous *rendezvous) {
  char name[64];
  nameOf(rendezvous->hash, name);
  unlink(name);
  pthread_mutex_lock(&listLock);
  rendezvous->haveMet = 1;
  forgetFile(rendezvous->hash);
  pthread_mutex_unlock(&listLock);
}

/* ---- this process's rendezvous ------------------------------------------------------------------- */

static void drop(struct ep_rendezvous *b) {
  for (struct ep_rendezvous **link = &rendezvousList; *link; link = &(*link)->next) {
    if (*link != b) continue;
    *link = b->next;
    atomic_store(&b->shared->seats[b->rank].isLocked, 0);
    munmap(b->shared, sizeof *b->shared);
    close(b->file);
    for (int r = 0; r < b->numRanks; r++) stopWatching(&b->watches[r]);
    free(b);
    return;
  }
}

/* Under listLock. A rendezvous of a former communicator at the same address goes, if nobody uses it. */
static struct ep_rendezvous *find(ncclComm_t comm, uint64_t hash) {
  for (struct ep_rendezvous *b = rendezvousList, *next; b; b = next) {
    next = b->next;
    if (b->comm != comm) continue;
    if (b->hash == hash) return b;
    if (!b->users) drop(b);
  }
  return NULL;
}

static trefoil_result_t openLocked(ncclComm_t comm, uint64_t hash, int rank, int numRanks,
                                   struct ep_rendezvous **out) {
  struct ep_rendezvous *b = find(comm, hash);
  if (!b) {
    b = calloc(1, sizeof *b);
    EP_CHECK(b, TREFOIL_SYSTEM_ERROR, "out of memory");
    *b = (struct ep_rendezvous){.comm = comm, .hash = hash, .rank = rank, .numRanks = numRanks};
    trefoil_result_t result = openShared(hash, &b->shared, &b->file);
    if (result != TREFOIL_OK) {
      free(b);
      return result;
    }
    b->meeting = (ep_meeting_t){.place = &b->shared->place,
                                .seats = &b->shared->seats[0].meeting,
                                .stride = sizeof(seat_t),
                                .rank = rank,
                                .numRanks = numRanks,
                                .owner = b,
                                .isGone = isGone};
    b->next = rendezvousList;
    rendezvousList = b;
  }
  b->users++;
  *out = b;
  return TREFOIL_OK;
}

trefoil_result_t epRendezvousOpen(ncclComm_t comm, int rank, int numRanks,
                                  struct ep_rendezvous **out) {
  uint64_t hash = epGpuCommHash(comm);
  EP_CHECK(hash && numRanks <= EP_LL_MAX_RANKS, TREFOIL_INVALID_ARGUMENT,
           "ncclEpCreateGroup: comm is not usable");
  pthread_mutex_lock(&listLock);
  trefoil_result_t result = openLocked(comm, hash, rank, numRanks, out);
  pthread_mutex_unlock(&listLock);
  return result;
}

/* Before all have met it stays open, for the next try: it counts this rank's calls. */
void epRendezvousClose(struct ep_rendezvous *rendezvous) {
  if (!rendezvous) return;
  pthread_mutex_lock(&listLock);
  if (--rendezvous->users == 0 && rendezvous->haveMet) drop(rendezvous);
  pthread_mutex_unlock(&listLock);
}

/* ---- round --------------------------------------------------------------------------------- */

static const char *const callNames[] = {"",
                                        "ncclEpCreateGroup",
                                        "ncclEpCreateGroup",
                                        "ncclEpInitHandle",
                                        "ncclEpInitHandle",
                                        "ncclEpGroupDestroy"};

static trefoil_result_t checkSameCall(const ep_rendezvous_word_t *all, int numRanks) {
  for (int r = 1; r < numRanks; r++) {
    EP_CHECK(all[0].call == all[r].call, TREFOIL_INVALID_USAGE,
             "rank 0 calls %s, rank %d %s; all ranks make collective calls in the same order",
             callNames[all[0].call], r, callNames[all[r].call]);
  }
  return TREFOIL_OK;
}

static trefoil_result_t say(struct ep_rendezvous *b, const ep_meeting_outcome_t *o,
                            const char *call, uint64_t timeoutNs) {
  switch (o->end) {
  case EP_MEETING_HELD:
    return TREFOIL_OK;
  case EP_MEETING_GONE:
    return epFail(TREFOIL_REMOTE_ERROR, "%s: rank %d is gone (process %d)", call, o->rank,
                  atomic_load(&b->shared->seats[o->rank].pid));
  case EP_MEETING_FAILED:
    return epFail((trefoil_result_t)o->code, "%s: it failed on rank %d: %.300s", call, o->rank,
                  o->text);
  case EP_MEETING_LATE:
    return epFail(TREFOIL_REMOTE_ERROR,
                  "%s: rank %s did not come within %.1f s (ranks meet in /dev/shm)", call, o->text,
                  (double)timeoutNs * 1e-9);
  case EP_MEETING_LATE_ELSEWHERE:
    return epFail(TREFOIL_REMOTE_ERROR,
                  "%s: rank %d did not come within another rank's timeout (ranks meet in /dev/shm)",
                  call, o->rank);
  case EP_MEETING_LEFT:
  case EP_MEETING_ABORTED:
    break;
  }
  return epFail(TREFOIL_REMOTE_ERROR, "%s: another rank has stopped waiting for all to come", call);
}

trefoil_result_t epRendezvousWait(struct ep_rendezvous *b, const ep_rendezvous_word_t *mine,
                                  uint64_t timeoutNs, ep_rendezvous_word_t *all) {
  ep_meeting_outcome_t outcome;
  if (mine->call == EP_RENDEZVOUS_DESTROY_GROUP) epMeetingCallBegin(&b->meeting);
  sitDown(b);
  epMeetingJoin(&b->meeting, mine, sizeof *mine, all, timeoutNs, &outcome);
  EP_TRY(say(b, &outcome, callNames[mine->call], timeoutNs));
  b->rounds++;
  return checkSameCall(all, b->numRanks);
}

uint64_t epRendezvousRounds(const struct ep_rendezvous *b) {
  return b->rounds;
}

/* ---- around a call --------------------------------------------------------------------------- */

void epRendezvousCallBegin(ncclComm_t comm) {
  uint64_t hash = epGpuCommHash(comm);
  pthread_mutex_lock(&listLock);
  struct ep_rendezvous *b = hash ? find(comm, hash) : NULL;
  if (b) epMeetingCallBegin(&b->meeting);
  pthread_mutex_unlock(&listLock);
}

void epRendezvousCallFail(ncclComm_t comm, trefoil_result_t code, const char *why) {
  uint64_t hash = epGpuCommHash(comm);
  int rank = 0, numRanks = 0;
  if (!hash || ncclCommUserRank(comm, &rank) != ncclSuccess ||
      ncclCommCount(comm, &numRanks) != ncclSuccess || numRanks < 2 || numRanks > EP_LL_MAX_RANKS) {
    return;
  }
  char text[400];
  snprintf(text, sizeof text, "%s", why);
  struct ep_rendezvous *b = NULL;
  pthread_mutex_lock(&listLock);
  if (openLocked(comm, hash, rank, numRanks, &b) == TREFOIL_OK) {
    b->users--;
    sitDown(b);
    epMeetingCallFail(&b->meeting, (int)code, text);
  }
  pthread_mutex_unlock(&listLock);
  epFail(code, "%s", text); /* opening may have recorded another sentence */
}
