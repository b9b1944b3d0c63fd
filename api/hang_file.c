/* Progress records: one page a rank in NCCL_EP_HANG_DIR, mapped, so that it outlives the process. */
#include "api/hang_file.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "api/own_file.h"

_Static_assert(sizeof(ep_hang_record_t) <= EP_HANG_FILE_BYTES, "EP_HANG_FILE_BYTES");

static _Atomic uint32_t numFiles;

/* Groups that this rank of this communicator has made before: the same number on all its ranks, also
 * where several of them are threads of one process. 0 if it cannot be kept. */
static uint32_t countGroup(uint64_t groupId, int rank) {
  typedef struct seen {
    uint64_t groupId;
    int rank;
    uint32_t count;
    struct seen *next;
  } seen_t;
  static seen_t *first;
  static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&mutex);
  seen_t *s = first;
  while (s && (s->groupId != groupId || s->rank != rank)) s = s->next;
  if (!s && (s = calloc(1, sizeof *s))) {
    *s = (seen_t){groupId, rank, 0, first};
    first = s;
  }
  uint32_t no = s ? s->count++ : 0;
  pthread_mutex_unlock(&mutex);
  return no;
}

static uint64_t realNs(void) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* A new file. One of an earlier process with the same id that this user left gives way. */
static ep_hang_record_t *mapFile(const char *path) {
  int fd = epOwnFileNew(path, EP_HANG_FILE_BYTES);
  if (fd < 0 && errno == EEXIST) {
    int left = epOwnFileOpen(path);
    if (left >= 0) {
      unlink(path);
      close(left);
      fd = epOwnFileNew(path, EP_HANG_FILE_BYTES);
    }
  }
  if (fd < 0) return NULL;
  void *p = mmap(NULL, EP_HANG_FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  int error = errno;
  close(fd);
  if (p != MAP_FAILED) return p;
  unlink(path);
  errno = error;
  return NULL;
}

static void fillRecord(ep_hang_record_t *r, const struct ncclEpGroup *g, uint64_t groupId,
                       uint32_t groupNo) {
  r->groupId = groupId;
  r->version = EP_HANG_VERSION;
  r->bytes = sizeof *r;
  r->rank = g->rank;
  r->numRanks = g->numRanks;
  r->ranksPerNode = g->ranksPerNode;
  r->pid = (int32_t)getpid();
  r->groupNo = groupNo;
  r->algorithm = g->limits.algorithm;
  r->startNs = realNs();
  r->timeoutNs = g->timeoutNs;
  r->culprit = -1;
  gethostname(r->host, sizeof r->host - 1);
  for (int k = 0; k < EP_HANG_KINDS; k++) r->kinds[k].peer = -1;
  r->magic = EP_HANG_MAGIC;
}

void epHangFileOpen(ep_hang_file_t *file, const struct ncclEpGroup *g, uint64_t groupId) {
  const char *dir = getenv("NCCL_EP_HANG_DIR");
  file->record = NULL;
  if (!dir || !*dir) return;
  char host[64] = "host";
  gethostname(host, sizeof host - 1);
  uint32_t no = atomic_fetch_add(&numFiles, 1);
  int n = snprintf(file->path, sizeof file->path, "%s/nccl_ep.%s.%d.%u.%d.hang", dir, host,
                   (int)getpid(), no, g->rank);
  errno = ENAMETOOLONG;
  file->record = n < (int)sizeof file->path ? mapFile(file->path) : NULL;
  if (!file->record) {
    epFail(TREFOIL_SYSTEM_ERROR,
           "the group is there, but NCCL_EP_HANG_DIR: cannot write %s (%s); no record is kept",
           file->path, errno == EPERM ? "another user's file, or a link" : strerror(errno));
    epLog((ncclEpGroup_t)(uintptr_t)g, "%s", trefoilLastError());
    return;
  }
  fillRecord(file->record, g, groupId, countGroup(groupId, g->rank));
}

void epHangFileClose(ep_hang_file_t *file, int keep) {
  if (!file->record) return;
  if (!keep) unlink(file->path);
  munmap(file->record, EP_HANG_FILE_BYTES);
  file->record = NULL;
}
