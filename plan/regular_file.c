#include "plan/regular_file.h"

#include "plan/error.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

trefoil_result_t epOpenRegular(const char *path, FILE **file, uint64_t *size) {
  int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  EP_CHECK(fd >= 0, TREFOIL_SYSTEM_ERROR, "%s: cannot be opened: %s", path, strerror(errno));
  struct stat found;
  if (fstat(fd, &found) || !S_ISREG(found.st_mode)) {
    close(fd);
    return epFail(TREFOIL_INVALID_ARGUMENT, "%s: is not a regular file", path);
  }
  *file = fdopen(fd, "rb");
  if (!*file) close(fd);
  EP_CHECK(*file, TREFOIL_SYSTEM_ERROR, "%s: out of memory", path);
  if (size) *size = (uint64_t)found.st_size;
  return TREFOIL_OK;
}
