#include "api/own_file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static int reserve(int fd, size_t bytes) {
  struct rlimit limit;
  if (!getrlimit(RLIMIT_FSIZE, &limit) && limit.rlim_cur < bytes) return EFBIG; /* not SIGXFSZ */
  int error;
  do {
    error = posix_fallocate(fd, 0, (off_t)bytes);
  } while (error == EINTR);
  return error;
}

static int closeWith(int fd, int error) {
  close(fd);
  errno = error;
  return -1;
}

int epOwnFileNew(const char *path, size_t bytes) {
  int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (fd < 0) return -1;
  int error = reserve(fd, bytes);
  if (!error) return fd;
  unlink(path);
  return closeWith(fd, error);
}

int epOwnFileOpen(const char *path) {
  struct stat info;
  int fd = open(path, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) {
    if (errno == ELOOP) errno = EPERM;
    return -1;
  }
  if (fstat(fd, &info)) return closeWith(fd, errno);
  int own = S_ISREG(info.st_mode) && info.st_uid == geteuid() && !(info.st_mode & 077);
  return own ? fd : closeWith(fd, EPERM);
}
