/* Shared memory without a file, that cannot shrink or grow once it is made: a process that maps it
 * cannot meet its end (SIGBUS). */
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "host_internal.h"

enum { SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL };

int epMemfdNew(const char *name, size_t bytes) {
  struct rlimit limit;
  if (!getrlimit(RLIMIT_FSIZE, &limit) && limit.rlim_cur < bytes) { /* it would be SIGXFSZ */
    errno = EFBIG;
    return -1;
  }
  int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return -1;
  if (ftruncate(fd, (off_t)bytes) || fcntl(fd, F_ADD_SEALS, SEALS)) {
    int error = errno;
    close(fd);
    errno = error;
    return -1;
  }
  return fd;
}

bool epMemfdHolds(int fd, size_t bytes) {
  struct stat info;
  int seals = fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) && !fstat(fd, &info) && S_ISREG(info.st_mode) &&
         (uint64_t)info.st_size >= bytes;
}
