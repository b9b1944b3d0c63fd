/* The server of a process: one background thread behind an abstract unix socket that hands out file
 * descriptors to other processes of the same user: the board of a communicator that this process made
 * the id for, and memory segments that windows lie in. A request is one packet, the answer one packet
 * with one descriptor; nothing is kept open. The thread starts with the first unique id or window and
 * ends with the process. Abstract names leave no files behind. */
#include <errno.h>
#include <fcntl.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "comm_internal.h"

typedef enum { ASK_BOARD = 1, ASK_SEGMENT = 2 } ask_t;

typedef struct {
  uint32_t what;
  int32_t numRanks;
  uint64_t uid, id;
} request_t;

typedef struct {
  int32_t result; /* ncclResult_t */
  uint64_t bytes;
  char sentence[200];
} answer_t;

typedef struct pending {
  struct pending *next;
  uint64_t key;
  int numRanks, joined, fd;
} pending_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static ep_process_t self; /* uid 0: not started */
static int listenFd = -1;
static pending_t *pendings;

static socklen_t socketName(struct sockaddr_un *name, const char *address) {
  memset(name, 0, sizeof *name);
  name->sun_family = AF_UNIX;
  size_t length = strnlen(address, EP_ADDRESS_BYTES - 1);
  memcpy(name->sun_path + 1, address, length); /* sun_path[0] = 0: abstract */
  return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length);
}

/* The board of a key for one more rank; the first rank makes it, the last takes it off the list. */
static int takeBoard(uint64_t key, int numRanks, answer_t *answer) {
  pthread_mutex_lock(&lock);
  pending_t **at = &pendings;
  while (*at && (*at)->key != key) at = &(*at)->next;
  pending_t *p = *at;
  int fd = -1;
  if (p && p->numRanks != numRanks) {
    answer->result = ncclInvalidArgument;
    snprintf(answer->sentence, sizeof answer->sentence,
             "this rank says %d ranks, another with the same id said %d", numRanks, p->numRanks);
    pthread_mutex_unlock(&lock);
    return -1;
  }
  if (!p && (p = calloc(1, sizeof *p))) {
    p->key = key;
    p->numRanks = numRanks;
    p->fd = memfd_create("trefoil-board", MFD_CLOEXEC);
    if (p->fd < 0 || ftruncate(p->fd, (off_t)epBoardBytes(numRanks))) {
      if (p->fd >= 0) close(p->fd);
      free(p);
      p = NULL;
    } else {
      *at = p; /* at the end of the list */
    }
  }
  if (p) {
    fd = fcntl(p->fd, F_DUPFD_CLOEXEC, 0);
    if (fd >= 0 && ++p->joined == numRanks) {
      *at = p->next;
      close(p->fd);
      free(p);
    }
  }
  pthread_mutex_unlock(&lock);
  if (fd < 0) {
    answer->result = ncclSystemError;
    snprintf(answer->sentence, sizeof answer->sentence,
             "no shared memory or descriptor for a board of %d ranks", numRanks);
  }
  return fd;
}

static int takeDescriptor(const request_t *ask, answer_t *answer) {
  int fd = -1;
  size_t bytes = 0;
  if (ask->what == ASK_BOARD && ask->numRanks >= 1 && ask->numRanks <= EP_MAX_RANKS)
    return takeBoard(ask->id, ask->numRanks, answer);
  if (ask->what == ASK_SEGMENT) fd = epSegmentFd(ask->id, &bytes);
  answer->bytes = bytes;
  if (fd < 0) {
    answer->result = ncclInvalidUsage;
    snprintf(answer->sentence, sizeof answer->sentence,
             "the memory is not there any more (freed while it was being registered?)");
  }
  return fd;
}

static void serve(int fd) {
  struct ucred peer;
  socklen_t length = sizeof peer;
  struct timeval patience = {2, 0};
  request_t ask;
  answer_t answer = {0};
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) || peer.uid != geteuid()) return;
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  if (recv(fd, &ask, sizeof ask, 0) != (ssize_t)sizeof ask || ask.uid != self.uid) return;
  int given = takeDescriptor(&ask, &answer);
  struct iovec part = {&answer, sizeof answer};
  _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {0};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
  if (given >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(head), &given, sizeof given);
  }
  (void)!sendmsg(fd, &message, MSG_NOSIGNAL);
  if (given >= 0) close(given);
}

static sem_t running; /* the server's thread has begun */

static void *serverMain(void *arg) {
  int fd = (int)(intptr_t)arg;
  sem_post(&running);
  for (;;) {
    int client = accept4(fd, NULL, NULL, SOCK_CLOEXEC);
    if (client < 0 && (errno == EBADF || errno == EINVAL)) return NULL;
    if (client < 0) continue;
    serve(client);
    close(client);
  }
}

/* With the lock held. */
static bool startServer(void) {
  struct sockaddr_un name;
  ep_process_t me = {.uid = epRandom(), .pid = (int32_t)getpid()};
  snprintf(me.address, sizeof me.address, "trefoil-host-%d-%016llx", (int)me.pid,
           (unsigned long long)me.uid);
  socklen_t length = socketName(&name, me.address);
  int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  if (bind(fd, (struct sockaddr *)&name, length) || listen(fd, 1024)) {
    close(fd);
    return false;
  }
  sigset_t all, old;
  pthread_t thread;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old); /* the program's signals are not for this thread */
  self = me;
  sem_init(&running, 0, 0);
  int failed = pthread_create(&thread, NULL, serverMain, (void *)(intptr_t)fd);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  if (failed) {
    self.uid = 0;
    close(fd);
    return false;
  }
  pthread_detach(thread);
  /* A fork right after this call must not meet a thread that is being set up: allocators that are not
   * safe against fork (AddressSanitizer's) would leave their lock taken in the child. */
  while (sem_wait(&running) && errno == EINTR) continue;
  listenFd = fd;
  return true;
}

ncclResult_t epServerSelf(ep_process_t *out, const char *func) {
  pthread_mutex_lock(&lock);
  bool there = self.uid || startServer();
  if (there) *out = self;
  pthread_mutex_unlock(&lock);
  EP_NCCL_CHECK(there, ncclSystemError,
                "%s: no unix socket or thread for the process's server (%s)", func,
                strerror(errno));
  return ncclSuccess;
}

/* One request to another process. The answer's descriptor, or -1. */
static int exchange(const ep_process_t *owner, const request_t *ask, answer_t *answer,
                    const char *func) {
  struct sockaddr_un name;
  socklen_t length = socketName(&name, owner->address);
  struct timeval patience = {5, 0};
  int given = -1, fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  answer->result = ncclSystemError;
  snprintf(answer->sentence, sizeof answer->sentence, "process %d does not answer", owner->pid);
  if (fd < 0) return -1;
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  struct iovec part = {answer, sizeof *answer};
  _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  struct msghdr message = {
      .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
  if (connect(fd, (struct sockaddr *)&name, length)) {
    answer->result = ncclRemoteError;
    snprintf(answer->sentence, sizeof answer->sentence,
             "process %d, which made the id or owns the memory, is gone or on another machine",
             owner->pid);
  } else if (send(fd, ask, sizeof *ask, MSG_NOSIGNAL) == (ssize_t)sizeof *ask &&
             recvmsg(fd, &message, MSG_CMSG_CLOEXEC) == (ssize_t)sizeof *answer) {
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    if (head && head->cmsg_type == SCM_RIGHTS) memcpy(&given, CMSG_DATA(head), sizeof given);
  }
  close(fd);
  (void)func;
  return given;
}

static ncclResult_t ask(const ep_process_t *owner, const request_t *request, int *fd, size_t *bytes,
                        const char *func) {
  ep_process_t me;
  answer_t answer = {0};
  EP_NCCL_TRY(epServerSelf(&me, func));
  int given = owner->uid == me.uid ? takeDescriptor(request, &answer)
                                   : exchange(owner, request, &answer, func);
  EP_NCCL_CHECK(given >= 0, answer.result ? (ncclResult_t)answer.result : ncclSystemError, "%s: %s",
                func, answer.sentence);
  *fd = given;
  if (bytes) *bytes = (size_t)answer.bytes;
  return ncclSuccess;
}

ncclResult_t epServerAskBoard(const ep_process_t *owner, uint64_t key, int numRanks, int *fd,
                              const char *func) {
  request_t request = {ASK_BOARD, numRanks, owner->uid, key};
  return ask(owner, &request, fd, NULL, func);
}

ncclResult_t epServerAskSegment(const ep_process_t *owner, uint64_t segment, int *fd, size_t *bytes,
                                const char *func) {
  request_t request = {ASK_SEGMENT, 0, owner->uid, segment};
  return ask(owner, &request, fd, bytes, func);
}

/* In the child of a fork: the server's thread is the parent's; this process is another one. */
void epServerForked(void) {
  pthread_mutex_init(&lock, NULL);
  if (listenFd >= 0) close(listenFd);
  listenFd = -1;
  memset(&self, 0, sizeof self);
  for (pending_t *p = pendings; p; p = p->next) close(p->fd);
  pendings = NULL;
}
