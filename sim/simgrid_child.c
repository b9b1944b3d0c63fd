/* SimGrid in a process of its own.
 *
 * SimGrid takes one platform in the life of a process and ends the process on an error, so each
 * replay is a child: forked, it writes its times into memory shared with the parent, sets `isDone`,
 * and leaves without running the parent's exit handlers. What it prints goes to a file in memory,
 * and returns the message of a failure. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "plan/error.h"
#include "sim/platform_xml.h"
#include "sim/simgrid_calls.h"

enum { MAX_SIMGRID_RANKS = 1024, LINE_BYTES = 240 };

int trefoilSimHasSimGrid(void) {
  return 1;
}

/* What both processes see; the arrays follow. */
typedef struct shared {
  volatile int isDone, hadMemory;
  char padding[56];
} shared_t;

typedef struct child {
  ep_flows_t flows;
  ep_timing_t timing; /* in shared memory */
  shared_t *shared;
  size_t sharedBytes;
  int platformFd, outputFd, pipe[2];
  pid_t pid;
} child_t;

static void runChild(child_t *c) {
  prctl(PR_SET_PDEATHSIG, SIGKILL); /* nobody would read the answer */
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", c->platformFd);
  c->flows.platform = path;
  dup2(c->outputFd, STDOUT_FILENO);
  dup2(c->outputFd, STDERR_FILENO);
  c->shared->hadMemory = epSimGridReplay(&c->flows);
  c->shared->isDone = 1;
  _exit(0);
}

/* The line that says why: the first that SimGrid calls critical, else the last one. */
static void readReason(const child_t *c, char *line, size_t room) {
  char text[8192];
  ssize_t n = pread(c->outputFd, text, sizeof text - 1, 0);
  text[n > 0 ? n : 0] = '\0';
  char *found = NULL, *rest = NULL;
  for (char *l = strtok_r(text, "\n", &rest); l; l = strtok_r(NULL, "\n", &rest)) {
    if (!found || !strstr(found, "CRITICAL")) found = l;
  }
  snprintf(line, room, "%s", found ? found : "it printed nothing");
}

/* Waits for the pipe's end, which the child holds open as long as it lives. 0: too late. */
static int waitForEnd(const child_t *c, double timeoutS) {
  struct timespec now, begin;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  struct pollfd end = {.fd = c->pipe[0], .events = POLLIN};
  for (;;) {
    clock_gettime(CLOCK_MONOTONIC, &now);
    double left = timeoutS - (double)(now.tv_sec - begin.tv_sec) -
                  1e-9 * (double)(now.tv_nsec - begin.tv_nsec);
    if (left <= 0) return 0;
    int got = poll(&end, 1, left > 1000 ? 1000000 : 1 + (int)(left * 1e3));
    if (got > 0 || (got < 0 && errno != EINTR)) return 1;
  }
}

static trefoil_result_t follow(child_t *c, double timeoutS) {
  close(c->pipe[1]);
  c->pipe[1] = -1;
  int inTime = waitForEnd(c, timeoutS), status = 0;
  if (!inTime) kill(c->pid, SIGKILL);
  pid_t got;
  while ((got = waitpid(c->pid, &status, 0)) < 0 && errno == EINTR) continue;
  EP_CHECK(inTime, TREFOIL_SYSTEM_ERROR,
           "SimGrid did not finish within %.6g s: allow more, or use the engine fair (the same "
           "flows) or queues",
           timeoutS);
  if (c->shared->isDone) {
    EP_CHECK(c->shared->hadMemory, TREFOIL_SYSTEM_ERROR, "SimGrid's process ran out of memory");
    return TREFOIL_OK;
  }
  char line[LINE_BYTES];
  readReason(c, line, sizeof line);
  if (got == c->pid && WIFSIGNALED(status)) {
    return epFail(TREFOIL_SYSTEM_ERROR, "SimGrid's process died of signal %d (%s): %s",
                  WTERMSIG(status), strsignal(WTERMSIG(status)), line);
  }
  return epFail(TREFOIL_SYSTEM_ERROR, "SimGrid's process ended early: %s", line);
}

static trefoil_result_t writePlatform(const child_t *c) {
  int fd = dup(c->platformFd);
  FILE *file = fd >= 0 ? fdopen(fd, "w") : NULL;
  EP_CHECK(file, TREFOIL_SYSTEM_ERROR, "cannot write a platform: %s", strerror(errno));
  errno = 0;
  int isWritten = epPlatformWrite(file, c->flows.fabric, c->flows.replay, c->flows.shape);
  isWritten = fclose(file) == 0 && isWritten;
  EP_CHECK(isWritten, TREFOIL_SYSTEM_ERROR, "cannot write a platform: %s", strerror(errno));
  return TREFOIL_OK;
}

static trefoil_result_t share(child_t *c, int64_t numTimes) {
  size_t finish = (size_t)c->flows.shape->numRanks * sizeof(ep_fs_t);
  c->sharedBytes = sizeof(shared_t) + finish + (size_t)numTimes * sizeof(ep_move_times_t);
  void *p = mmap(NULL, c->sharedBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  EP_CHECK(p != MAP_FAILED, TREFOIL_SYSTEM_ERROR, "out of memory: %zu shared bytes",
           c->sharedBytes);
  c->shared = p;
  c->timing.finish = (ep_fs_t *)(c->shared + 1);
  c->timing.numTimes = numTimes;
  if (numTimes > 0) c->timing.moves = (ep_move_times_t *)((char *)(c->shared + 1) + finish);
  return TREFOIL_OK;
}

static trefoil_result_t start(child_t *c, const ep_timing_t *timing) {
  EP_TRY(share(c, timing->moves ? timing->numTimes : 0));
  c->platformFd = memfd_create("platform.xml", MFD_CLOEXEC);
  c->outputFd = memfd_create("output", MFD_CLOEXEC);
  EP_CHECK(c->platformFd >= 0 && c->outputFd >= 0 && pipe2(c->pipe, O_CLOEXEC) == 0,
           TREFOIL_SYSTEM_ERROR, "cannot prepare SimGrid's process: %s", strerror(errno));
  EP_TRY(writePlatform(c));
  c->pid = fork();
  EP_CHECK(c->pid >= 0, TREFOIL_SYSTEM_ERROR, "cannot start SimGrid's process: %s",
           strerror(errno));
  if (c->pid == 0) runChild(c);
  return TREFOIL_OK;
}

static void closeAll(child_t *c) {
  int fds[] = {c->platformFd, c->outputFd, c->pipe[0], c->pipe[1]};
  for (int i = 0; i < 4; i++) {
    if (fds[i] >= 0) close(fds[i]);
  }
  if (c->shared) munmap(c->shared, c->sharedBytes);
}

trefoil_result_t epSimGridRun(const ep_replay_t *replay, const ep_fabric_t *fabric,
                              const trefoil_shape_t *shape, double timeoutS, ep_timing_t *timing) {
  EP_CHECK(shape->numRanks <= MAX_SIMGRID_RANKS, TREFOIL_INVALID_ARGUMENT,
           "%d ranks are too many for SimGrid, which takes %d here: use the engine of queues",
           shape->numRanks, MAX_SIMGRID_RANKS);
  child_t c = {.platformFd = -1, .outputFd = -1, .pipe = {-1, -1}};
  c.flows = (ep_flows_t){replay, fabric, shape, &c.timing, NULL};
  trefoil_result_t result = start(&c, timing);
  if (result == TREFOIL_OK) result = follow(&c, timeoutS);
  if (result == TREFOIL_OK) {
    memcpy(timing->finish, c.timing.finish, (size_t)shape->numRanks * sizeof *timing->finish);
    if (c.timing.moves) {
      memcpy(timing->moves, c.timing.moves, (size_t)c.timing.numTimes * sizeof *timing->moves);
    }
  }
  closeAll(&c);
  return result;
}
