/* A tmpfs of its own, small and mounted nowhere, so that a full file system can be tested without a mount
 * that others would see. Needs CAP_SYS_ADMIN. */
#ifndef TREFOIL_TESTS_SMALL_TMPFS_H
#define TREFOIL_TESTS_SMALL_TMPFS_H

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Its root, or -1 where this process may not make one. size: as for mount(8), "64k". */
static inline int smallTmpfs(const char *size) {
  enum { setString = 1, create = 6 }; /* FSCONFIG_ of linux/mount.h; glibc has names from 2.36 on */
  long root = -1, config = syscall(SYS_fsopen, "tmpfs", 0);
  if (config < 0) return -1;
  if (!syscall(SYS_fsconfig, (int)config, setString, "size", size, 0) &&
      !syscall(SYS_fsconfig, (int)config, create, NULL, NULL, 0)) {
    root = syscall(SYS_fsmount, (int)config, 0, 0);
  }
  close((int)config);
  return (int)root;
}

/* No byte fits into that folder any more. False: it could not be filled. */
static inline int fillFolder(int folder) {
  static const char zeros[4096];
  int fd = openat(folder, "filler", O_WRONLY | O_CREAT, 0600), blocks = 0;
  if (fd < 0) return 0;
  while (blocks < 1 << 20 && write(fd, zeros, sizeof zeros) > 0) blocks++;
  close(fd);
  return blocks < 1 << 20;
}

#endif
