/* Progress records: one page a rank in NCCL_EP_HANG_DIR, mapped, so that it outlives the process. */
#include "api/hang_file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "api/own_file.h"

_Static_assert(sizeof(ep_hang_record_t) <= EP_HANG_FILE_BYTES, "EP_HANG_FILE_BYTES");

static _Atomic uint32_t numFiles;

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

void epHangFileOpen(ep_hang_file_t *file, const struct ncclEpGroup *g, uint64_t commHash,
                    uint64_t id) {
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
  fillRecord(file->record, g, commHash, (uint32_t)(id ^ id >> 32));
}

void epHangFileClose(ep_hang_file_t *file, int keep) {
  if (!file->record) return;
  if (!keep) unlink(file->path);
  munmap(file->record, EP_HANG_FILE_BYTES);
  file->record = NULL;
}
