/* A rendezvous in shared memory: ranks of one NVLink domain are processes or threads of one machine.
 *
 * NCCL's own collective calls (window registration among them) wait for ever for a rank that does not
 * come, and cannot say which. So ranks first meet here, with a time limit, and go on to NCCL only when
 * everybody has come with the same call. One file a communicator in /dev/shm, named after its hash,
 * removed as soon as all have it mapped. Everything is decided under one robust lock, so a round succeeds
 * for all of its ranks or for none: the first to see that it cannot take place says so for all
 * who have come, unless the last one has come meanwhile; who comes later begins anew.
 *
 * A rank whose call fails on its own leaves a failure notice; a rank that waits for it takes the notice
 * over after a second, if it was left at about the time that the wait began. A failure that all ranks
 * share (they met and differ, somebody is missing) leaves none: it would be taken for one of the next
 * call. */
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
#include "plan/process.h"

#define RENDEZVOUS_MAGIC 0x3144524f42504531ull
#define SECOND           1000000000ull

typedef struct seat {
  ep_rendezvous_word_t
      words[2]; /* of even and odd rounds: a slow rank still reads the last one's */
  int32_t pid;
  int32_t failCode;
  uint64_t pidSpace; /* where that pid means something */
  int32_t isLocked;  /* its byte of the file; the kernel unlocks it at the process's end */
  uint64_t failNs;   /* 0: no failure notice */
  char failText[400];
} seat_t;

typedef struct shared_rendezvous {
  uint64_t magic;
  pthread_mutex_t lock;
  uint64_t rounds;   /* that took place */
  uint64_t present;  /* ranks that have come to the next one */
  uint64_t attempts; /* that were given up, and of the last two why */
  int32_t verdictCode[2];
  char verdict[2][400];
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
  int commonFailure; /* of the call in progress: no failure notice */
  int file;          /* with the locks of the seats */
  shared_rendezvous_t *shared;
  watch_t watches[EP_LL_MAX_RANKS];
};

/* This process's rendezvous, and the files that it may have left. */
static pthread_mutex_t listLock = PTHREAD_MUTEX_INITIALIZER;
static struct ep_rendezvous *rendezvousList;
static struct left_file {
  struct left_file *next;
  uint64_t hash;
} * leftFiles;

static uint64_t nowNs(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

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
  seat->pid = (int32_t)getpid();
  seat->pidSpace = epPidSpace();
  seat->isLocked = lockSeat(b, b->rank, F_OFD_SETLK, F_WRLCK) >= 0;
}

/* Ids of another namespace mean nothing here: there the lock tells. */
static int isGone(struct ep_rendezvous *b, int rank) {
  const seat_t *seat = &b->shared->seats[rank];
  watch_t *watch = &b->watches[rank];
  if (!seat->pid) return 0;
  if (!seat->pidSpace || seat->pidSpace != epPidSpace())
    return seat->isLocked && lockSeat(b, rank, F_OFD_GETLK, F_WRLCK) == F_UNLCK;
  if (watch->pid != seat->pid) {
    stopWatching(watch);
    *watch = (watch_t){seat->pid, epProcessOpen(seat->pid)};
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

static trefoil_result_t initShared(shared_rendezvous_t *b) {
  pthread_mutexattr_t a;
  pthread_mutexattr_init(&a);
  pthread_mutexattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
  int error = pthread_mutex_init(&b->lock, &a);
  pthread_mutexattr_destroy(&a);
  EP_CHECK(!error, TREFOIL_SYSTEM_ERROR, "a lock in shared memory: %s", strerror(error));
  __atomic_store_n(&b->magic, RENDEZVOUS_MAGIC, __ATOMIC_RELEASE);
  return TREFOIL_OK;
}

/* Whoever makes the file prepares it; the others wait for that. */
static trefoil_result_t mapShared(int fd, int made, shared_rendezvous_t **out) {
  struct stat info = {.st_nlink = 1};
  for (uint64_t since = nowNs();; usleep(200)) {
    if (fstat(fd, &info) == 0 && info.st_size >= (off_t)sizeof(shared_rendezvous_t)) break;
    EP_CHECK(info.st_nlink, TREFOIL_SYSTEM_ERROR,
             "another rank found no space in /dev/shm, where ranks meet");
    EP_CHECK(nowNs() - since < 5 * SECOND, TREFOIL_SYSTEM_ERROR,
             "a file of another run in /dev/shm is not ready; remove /dev/shm/nccl_ep.*");
  }
  void *p = mmap(NULL, sizeof(shared_rendezvous_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  EP_CHECK(p != MAP_FAILED, TREFOIL_SYSTEM_ERROR, "/dev/shm: cannot map: %s", strerror(errno));
  shared_rendezvous_t *b = p;
  trefoil_result_t result = made ? initShared(b) : TREFOIL_OK;
  for (uint64_t since = nowNs(); result == TREFOIL_OK; usleep(200)) {
    if (__atomic_load_n(&b->magic, __ATOMIC_ACQUIRE) == RENDEZVOUS_MAGIC) break;
    if (nowNs() - since > 5 * SECOND) {
      result = epFail(TREFOIL_SYSTEM_ERROR, "a file of another run in /dev/shm is not ready; "
                                            "remove /dev/shm/nccl_ep.*");
    }
  }
  if (result != TREFOIL_OK) {
    munmap(p, sizeof(shared_rendezvous_t));
    return result;
  }
  *out = b;
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
  trefoil_result_t result = mapShared(fd, made, out);
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
  forgetFile(rendezvous->hash);
  pthread_mutex_unlock(&listLock);
}

/* ---- this process's rendezvous ------------------------------------------------------------------- */

static void drop(struct ep_rendezvous *b) {
  for (struct ep_rendezvous **link = &rendezvousList; *link; link = &(*link)->next) {
    if (*link != b) continue;
    *link = b->next;
    b->shared->seats[b->rank].isLocked = 0;
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

void epRendezvousClose(struct ep_rendezvous *rendezvous) {
  if (!rendezvous) return;
  pthread_mutex_lock(&listLock);
  if (--rendezvous->users == 0 && !rendezvous->commonFailure)
    drop(rendezvous); /* else epRendezvousCallFail does */
  pthread_mutex_unlock(&listLock);
}

/* ---- round --------------------------------------------------------------------------------- */

static void lockRendezvous(shared_rendezvous_t *b) {
  if (pthread_mutex_lock(&b->lock) == EOWNERDEAD) pthread_mutex_consistent(&b->lock);
}

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

/* Under the lock: why this rank must not go on waiting; TREFOIL_OK: it may. */
static trefoil_result_t lookForTrouble(struct ep_rendezvous *b, const ep_rendezvous_word_t *mine,
                                       uint64_t since, uint64_t timeoutNs) {
  const shared_rendezvous_t *s = b->shared;
  uint64_t now = nowNs();
  char missing[200] = "";
  size_t used = 0;
  int last = -1;
  for (int r = 0; r < b->numRanks; r++) {
    if (s->present >> r & 1) continue;
    const seat_t *seat = &s->seats[r];
    uint64_t noted = seat->failNs > since ? seat->failNs : since;
    if (seat->failNs && seat->failNs + SECOND > since && now > noted + SECOND) {
      return epFail((trefoil_result_t)seat->failCode, "%s: it failed on rank %d: %.300s",
                    callNames[mine->call], r, seat->failText);
    }
    EP_CHECK(!isGone(b, r), TREFOIL_REMOTE_ERROR, "%s: rank %d is gone (process %d)",
             callNames[mine->call], r, seat->pid);
    if (used < sizeof missing - 12) {
      used += (size_t)snprintf(missing + used, sizeof missing - used, used ? ", %d" : "%d", r);
    }
    last = r;
  }
  if (now - since < timeoutNs || last < 0) return TREFOIL_OK;
  return epFail(TREFOIL_REMOTE_ERROR,
                "%s: rank %s did not come within %.1f s (ranks meet in /dev/shm)",
                callNames[mine->call], missing, (double)timeoutNs * 1e-9);
}

static void giveUp(shared_rendezvous_t *s, trefoil_result_t code) {
  uint64_t i = s->attempts++ & 1;
  s->verdictCode[i] = (int32_t)code;
  snprintf(s->verdict[i], sizeof s->verdict[i], "%s", trefoilLastError());
  s->present = 0;
}

static trefoil_result_t await(struct ep_rendezvous *b, const ep_rendezvous_word_t *mine,
                              uint64_t round, uint64_t attempt, uint64_t timeoutNs) {
  shared_rendezvous_t *s = b->shared;
  for (uint64_t since = nowNs();; usleep(nowNs() - since < SECOND / 20 ? 20 : 1000)) {
    if (__atomic_load_n(&s->rounds, __ATOMIC_ACQUIRE) > round) return TREFOIL_OK;
    lockRendezvous(s);
    trefoil_result_t result = TREFOIL_OK;
    if (s->rounds == round && s->attempts != attempt) {
      result = epFail((trefoil_result_t)s->verdictCode[attempt & 1], "%s", s->verdict[attempt & 1]);
    } else if (s->rounds == round) {
      result = lookForTrouble(b, mine, since, timeoutNs);
      if (result != TREFOIL_OK) giveUp(s, result);
    }
    pthread_mutex_unlock(&s->lock);
    if (result != TREFOIL_OK) return result;
  }
}

trefoil_result_t epRendezvousWait(struct ep_rendezvous *b, const ep_rendezvous_word_t *mine,
                                  uint64_t timeoutNs, ep_rendezvous_word_t *all) {
  shared_rendezvous_t *s = b->shared;
  seat_t *seat = &s->seats[b->rank];
  uint64_t everybody = b->numRanks == 64 ? ~0ull : (1ull << b->numRanks) - 1;
  lockRendezvous(s);
  uint64_t round = s->rounds, attempt = s->attempts;
  seat->words[round & 1] = *mine;
  sitDown(b);
  seat->failNs = 0;
  s->present |= 1ull << b->rank;
  if (s->present == everybody) {
    s->present = 0;
    __atomic_store_n(&s->rounds, round + 1, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&s->lock);
  trefoil_result_t result = await(b, mine, round, attempt, timeoutNs);
  if (result == TREFOIL_OK) {
    for (int r = 0; r < b->numRanks; r++) all[r] = s->seats[r].words[round & 1];
    result = checkSameCall(all, b->numRanks);
  }
  if (result != TREFOIL_OK) epRendezvousShareFailure(b);
  return result;
}

uint64_t epRendezvousRounds(const struct ep_rendezvous *b) {
  return __atomic_load_n(&b->shared->rounds, __ATOMIC_ACQUIRE);
}

void epRendezvousShareFailure(struct ep_rendezvous *b) {
  b->commonFailure = 1;
}

/* ---- around a call --------------------------------------------------------------------------- */

void epRendezvousCallBegin(ncclComm_t comm) {
  uint64_t hash = epGpuCommHash(comm);
  pthread_mutex_lock(&listLock);
  struct ep_rendezvous *b = hash ? find(comm, hash) : NULL;
  if (b) {
    b->commonFailure = 0;
    lockRendezvous(b->shared);
    b->shared->seats[b->rank].failNs = 0;
    pthread_mutex_unlock(&b->shared->lock);
  }
  pthread_mutex_unlock(&listLock);
}

/* The rendezvous stays open on this rank, for its next try. */
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
    if (b->commonFailure) {
      b->commonFailure = 0;
      if (!b->users) drop(b);
      pthread_mutex_unlock(&listLock);
      epFail(code, "%s", text);
      return;
    }
    lockRendezvous(b->shared);
    seat_t *seat = &b->shared->seats[rank];
    memcpy(seat->failText, text, sizeof text);
    seat->failCode = (int32_t)code;
    sitDown(b);
    seat->failNs = nowNs();
    pthread_mutex_unlock(&b->shared->lock);
  }
  pthread_mutex_unlock(&listLock);
  epFail(code, "%s", text); /* opening may have recorded another sentence */
}
