/* Whether another process is there, for all waits for one. A process that was killed is gone,
 * also while its parent has not asked for its end (a zombie, which kill(pid, 0) still finds). */
#ifndef TREFOIL_PLAN_PROCESS_H
#define TREFOIL_PLAN_PROCESS_H

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { EP_PROCESS_GONE = -2, EP_PROCESS_NO_FD = -1 };

/* The namespace in which this process's ids mean something; 0: not known. */
static inline uint64_t epPidSpace(void) {
  struct stat info;
  return stat("/proc/self/ns/pid", &info) == 0 ? (uint64_t)info.st_ino : 0;
}

/* Without a descriptor, on kernels before 5.3 or where a filter forbids it: by its id and state. */
static inline int epPidEnded(int pid) {
  char path[32], line[512], *end;
  if (kill(pid, 0) != 0 && errno == ESRCH) return 1;
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  FILE *file = fopen(path, "re");
  if (!file) return 0;
  size_t n = fread(line, 1, sizeof line - 1, file);
  fclose(file);
  line[n] = 0;
  end = strrchr(line, ')'); /* the name before it is the program's to choose */
  return end && end[1] == ' ' && (end[2] == 'Z' || end[2] == 'X');
}

/* A descriptor that becomes readable when the process ends, EP_PROCESS_GONE or EP_PROCESS_NO_FD. */
static inline int epProcessOpen(int pid) {
  int fd = (int)syscall(SYS_pidfd_open, pid, 0);
  if (fd >= 0) return fd;
  return errno == ESRCH ? EP_PROCESS_GONE : EP_PROCESS_NO_FD;
}

/* fd: of epProcessOpen. */
static inline int epProcessEnded(int fd, int pid) {
  if (fd == EP_PROCESS_GONE) return 1;
  if (fd == EP_PROCESS_NO_FD) return epPidEnded(pid);
  struct pollfd poller = {fd, POLLIN, 0};
  return poll(&poller, 1, 0) > 0;
}

#endif
