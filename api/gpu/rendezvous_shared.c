/* Barrier rounds in shared memory: the ranks are processes or threads of one machine. One file a communicator
 * in /dev/shm, named after its hash and removed as soon as all have it mapped. A rank's process is watched by
 * its id, or, from another process-id namespace, by a lock on a byte of the file. */
#include "api/gpu/rendezvous_site.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "api/own_file.h"
#include "kernels/common/protocol.h"
#include "plan/clock.h"
#include "plan/process.h"

#define SECOND 1000000000ull

typedef struct entry {
  ep_round_entry_t round;
  _Atomic int32_t pid;       /* 0: it has not come yet */
  _Atomic int32_t isLocked;  /* its byte of the file; the kernel unlocks it at the process's end */
  _Atomic uint64_t pidSpace; /* where that pid means something */
} entry_t;

/* The file: of zeros at first. */
typedef struct shared_file {
  ep_round_shared_t state;
  entry_t entries[EP_KERNEL_MAX_RANKS];
} shared_file_t;

/* A rank's process. */
typedef struct watch {
  int32_t pid; /* 0: not watched */
  int fd;      /* of epProcessOpen */
} watch_t;

typedef struct site {
  ep_site_t base;
  uint64_t hash;
  int rank, numRanks, file; /* with the locks of the entries */
  shared_file_t *shared;
  watch_t watches[EP_KERNEL_MAX_RANKS];
  ep_round_t round;
} site_t;

/* The files that this process may have left. */
static pthread_mutex_t filesLock = PTHREAD_MUTEX_INITIALIZER;
static struct left_file {
  struct left_file *next;
  uint64_t hash;
} * leftFiles;

static void stopWatching(watch_t *watch) {
  if (watch->pid && watch->fd >= 0) close(watch->fd);
  watch->pid = 0;
}

/* A lock of the file's open description, so that ranks which are threads have one each. */
static int lockEntry(const site_t *b, int rank, int command, short type) {
  struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
  return fcntl(b->file, command, &lock) == 0 ? lock.l_type : -1;
}

static void sitDown(site_t *b) {
  entry_t *entry = &b->shared->entries[b->rank];
  atomic_store(&entry->pidSpace, epPidSpace());
  atomic_store(&entry->isLocked, lockEntry(b, b->rank, F_OFD_SETLK, F_WRLCK) >= 0);
  atomic_store(&entry->pid, (int32_t)getpid());
}

/* Ids of another namespace mean nothing here: there the lock tells. */
static int isGone(void *owner, int rank) {
  site_t *b = owner;
  entry_t *entry = &b->shared->entries[rank];
  watch_t *watch = &b->watches[rank];
  int32_t pid = atomic_load(&entry->pid);
  uint64_t space = atomic_load(&entry->pidSpace);
  if (!pid) return 0;
  if (!space || space != epPidSpace())
    return atomic_load(&entry->isLocked) && lockEntry(b, rank, F_OFD_GETLK, F_WRLCK) == F_UNLCK;
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

/* The rank that creates the file sets its size, all zeros; the others wait for that. */
static trefoil_result_t mapShared(int fd, shared_file_t **out) {
  struct stat info = {.st_nlink = 1};
  for (uint64_t since = epMonotonicNs();; usleep(200)) {
    if (fstat(fd, &info) == 0 && info.st_size >= (off_t)sizeof(shared_file_t)) break;
    EP_CHECK(info.st_nlink, TREFOIL_SYSTEM_ERROR,
             "another rank found no space in /dev/shm, where ranks meet");
    EP_CHECK(epMonotonicNs() - since < 5 * SECOND, TREFOIL_SYSTEM_ERROR,
             "a file of another run in /dev/shm is not ready; remove /dev/shm/nccl_ep.*");
  }
  void *p = mmap(NULL, sizeof(shared_file_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  EP_CHECK(p != MAP_FAILED, TREFOIL_SYSTEM_ERROR, "/dev/shm: cannot map: %s", strerror(errno));
  *out = p;
  return TREFOIL_OK;
}

static trefoil_result_t openShared(uint64_t hash, shared_file_t **out, int *file) {
  char name[64];
  nameOf(hash, name);
  struct left_file *left = malloc(sizeof *left);
  EP_CHECK(left, TREFOIL_SYSTEM_ERROR, "out of memory");
  int fd = epOwnFileNew(name, sizeof(shared_file_t)), made = fd >= 0;
  if (!made && errno == EEXIST) fd = epOwnFileOpen(name);
  if (fd < 0 && errno == ENOENT) { /* removed between the two */
    fd = epOwnFileNew(name, sizeof(shared_file_t));
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

/* ---- the kind ---------------------------------------------------------------------------------- */

static site_t *siteOf(ep_site_t *base) {
  return (site_t *)(void *)base;
}

static void callBegin(ep_site_t *base) {
  epRoundCallBegin(&siteOf(base)->round);
}

static void callFail(ep_site_t *base, int code, const char *why) {
  sitDown(siteOf(base));
  epRoundCallFail(&siteOf(base)->round, code, why);
}

static void join(ep_site_t *base, const void *mine, size_t bytes, void *all, uint64_t timeoutNs,
                 ep_round_outcome_t *out) {
  sitDown(siteOf(base));
  epRoundJoin(&siteOf(base)->round, mine, bytes, all, timeoutNs, out);
}

static int processOf(const ep_site_t *base, int rank) {
  const site_t *b = (const site_t *)(const void *)base;
  return atomic_load(&b->shared->entries[rank].pid);
}

static trefoil_result_t await(ep_site_t *base, uint64_t timeoutNs) {
  (void)base, (void)timeoutNs;
  return TREFOIL_OK;
}

static void removeFile(ep_site_t *base) {
  char name[64];
  nameOf(siteOf(base)->hash, name);
  unlink(name);
  pthread_mutex_lock(&filesLock);
  forgetFile(siteOf(base)->hash);
  pthread_mutex_unlock(&filesLock);
}

static void closeSite(ep_site_t *base) {
  site_t *b = siteOf(base);
  atomic_store(&b->shared->entries[b->rank].isLocked, 0);
  munmap(b->shared, sizeof *b->shared);
  close(b->file);
  for (int r = 0; r < b->numRanks; r++) stopWatching(&b->watches[r]);
  free(b);
}

static const ep_site_kind_t kind = {.where = "in /dev/shm",
                                    .callBegin = callBegin,
                                    .callFail = callFail,
                                    .join = join,
                                    .processOf = processOf,
                                    .await = await,
                                    .allCame = removeFile,
                                    .close = closeSite};

trefoil_result_t epSharedSiteOpen(uint64_t hash, int rank, int numRanks, ep_site_t **out) {
  site_t *b = calloc(1, sizeof *b);
  EP_CHECK(b, TREFOIL_SYSTEM_ERROR, "out of memory");
  *b = (site_t){.base = {&kind}, .hash = hash, .rank = rank, .numRanks = numRanks};
  pthread_mutex_lock(&filesLock);
  trefoil_result_t result = openShared(hash, &b->shared, &b->file);
  pthread_mutex_unlock(&filesLock);
  if (result != TREFOIL_OK) {
    free(b);
    return result;
  }
  b->round = (ep_round_t){.shared = &b->shared->state,
                          .entries = &b->shared->entries[0].round,
                          .stride = sizeof(entry_t),
                          .rank = rank,
                          .numRanks = numRanks,
                          .owner = b,
                          .isGone = isGone};
  *out = &b->base;
  return TREFOIL_OK;
}
