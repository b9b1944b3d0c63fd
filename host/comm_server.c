/* The server of a process: one background thread behind an abstract unix socket that hands out file
 * descriptors to other processes of the same user and job (comm_wire.h): the shared memory of a communicator
 * that this process made the id for, and memory segments that windows lie in. The thread starts with the
 * first unique id or window and ends with the process. Abstract names leave no files behind.
 *
 * It serves all its clients at once. One that says nothing has REQUEST_NS, and when MAX_UNVERIFIED do, a
 * new one takes the place of the oldest: honest ones answer at once, and ask again if they were too slow.
 * A process that watches for this process's end stays connected. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm_wire.h"
#include "plan/process.h"

enum { MAX_UNVERIFIED = 64, MAX_CLIENTS = 2048 };
#define REQUEST_NS  2000000000ull /* for a client's request */
#define YOUNGEST_NS 200000000ull  /* no client's place is taken before */
#define PAUSE_NS    50000000ull   /* after a descriptor was lacking */

typedef struct pending {
  struct pending *next;
  uint64_t key, endNs; /* endNs: the ranks that asked have given up */
  int numRanks, joined, fd;
} pending_t;

typedef struct {
  int fd;
  bool watches; /* it has shown that it belongs here */
  uint64_t sinceNs;
  ep_challenge_t challenge;
} client_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static ep_process_t self; /* uid 0: not started */
static int listenFd = -1;
static pending_t *pendings;
static uint64_t
    rankTimeoutNs; /* of the ranks, when they asked last: the thread reads no environment */
static client_t clients[MAX_CLIENTS]; /* the thread's */
static int numClients, numUnverified;
static uint64_t pausedUntilNs;

/* ---- What is handed out ---- */

static void dropPending(pending_t **at) {
  pending_t *p = *at;
  *at = p->next;
  close(p->fd);
  free(p);
}

/* Shared memory that some rank never asked for. With the lock held. */
static void dropOldShm(void) {
  uint64_t now = epMonotonicNs();
  for (pending_t **at = &pendings; *at;) {
    if (now >= (*at)->endNs)
      dropPending(at);
    else
      at = &(*at)->next;
  }
}

static pending_t *newShm(uint64_t key, int numRanks) {
  pending_t *p = calloc(1, sizeof *p);
  if (!p) return NULL;
  p->key = key;
  p->numRanks = numRanks;
  p->fd = epMemfdNew("trefoil-comm", epCommShmBytes(numRanks));
  if (p->fd >= 0) return p;
  free(p);
  return NULL;
}

/* The shared memory of a key for one more rank; the first rank makes it, the last takes it off the list. */
static int takeShm(uint64_t key, int numRanks, ep_answer_t *answer) {
  int fd = -1;
  pthread_mutex_lock(&lock);
  dropOldShm();
  pending_t **at = &pendings;
  while (*at && (*at)->key != key) at = &(*at)->next;
  pending_t *p = *at;
  if (p && p->numRanks != numRanks) {
    answer->result = ncclInvalidArgument;
    snprintf(answer->sentence, sizeof answer->sentence,
             "this rank says %d ranks, another with the same id said %d", numRanks, p->numRanks);
    pthread_mutex_unlock(&lock);
    return -1;
  }
  if (!p) p = *at = newShm(key, numRanks); /* at the end of the list */
  if (p) {
    p->endNs = rankTimeoutNs < INT64_MAX / 4 ? epMonotonicNs() + 2 * rankTimeoutNs : UINT64_MAX;
    fd = fcntl(p->fd, F_DUPFD_CLOEXEC, 0);
    if (fd >= 0 && ++p->joined == numRanks) dropPending(at);
  }
  pthread_mutex_unlock(&lock);
  if (fd < 0) {
    answer->result = ncclSystemError;
    snprintf(answer->sentence, sizeof answer->sentence,
             "no shared memory or descriptor for a communicator of %d ranks", numRanks);
  }
  return fd;
}

int epServerTake(const ep_request_t *request, ep_answer_t *answer) {
  int fd = -1;
  size_t bytes = 0;
  memset(answer, 0, sizeof *answer);
  if (request->what == EP_ASK_WATCH) return -1;
  if (request->what == EP_ASK_BOARD && request->numRanks >= 1 && request->numRanks <= EP_MAX_RANKS)
    return takeShm(request->id, request->numRanks, answer);
  if (request->what == EP_ASK_SEGMENT) fd = epSegmentFd(request->id, &bytes);
  answer->bytes = bytes;
  if (fd < 0) {
    answer->result = ncclInvalidUsage;
    snprintf(answer->sentence, sizeof answer->sentence,
             "the memory is not there any more (freed while it was being registered?)");
  }
  return fd;
}

/* ---- One client ---- */

/* Off the list before it is closed: a fork between the two closes what is on the list. */
static void dropClient(int i) {
  int fd = clients[i].fd;
  if (!clients[i].watches) numUnverified--;
  clients[i] = clients[--numClients];
  close(fd);
}

/* The answer, and its descriptor if there is one. */
static bool sendAnswer(int socket, const ep_answer_t *answer, int given) {
  struct iovec part = {(void *)(uintptr_t)answer, sizeof *answer};
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
  return sendmsg(socket, &message, MSG_NOSIGNAL) == (ssize_t)sizeof *answer;
}

/* Answers a client that has said something; whether it stays. */
static bool serve(client_t *client) {
  ep_request_t request;
  ep_answer_t answer = {.refused = 1};
  unsigned char mac[EP_DIGEST_BYTES];
  ssize_t got = recv(client->fd, &request, sizeof request, MSG_TRUNC);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  if (client->watches || got <= 0) return false;
  if (got == (ssize_t)sizeof request)
    epWireMac(self.secret, &client->challenge, &request, NULL, mac);
  if (got != (ssize_t)sizeof request || !epSameBytes(mac, request.mac, sizeof mac) ||
      request.uid != self.uid) {
    sendAnswer(client->fd, &answer, -1);
    return false;
  }
  int given = epServerTake(&request, &answer);
  epWireMac(self.secret, &client->challenge, &request, &answer, answer.mac);
  bool sent = sendAnswer(client->fd, &answer, given);
  if (given >= 0) close(given);
  if (!sent || request.what != EP_ASK_WATCH) return false;
  client->watches = true;
  numUnverified--;
  return true;
}

static void challengeClient(int socket, uint64_t now) {
  struct ucred peer;
  socklen_t length = sizeof peer;
  client_t client = {.fd = socket, .sinceNs = now, .challenge.magic = EP_CHALLENGE_MAGIC};
  bool ours = !getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) &&
              peer.uid == geteuid() && numClients < MAX_CLIENTS;
  if (!ours || !epRandomBytes(client.challenge.nonce, sizeof client.challenge.nonce) ||
      send(socket, &client.challenge, sizeof client.challenge, MSG_NOSIGNAL) !=
          (ssize_t)sizeof client.challenge) {
    close(socket);
    return;
  }
  clients[numClients++] = client;
  numUnverified++;
}

/* ---- All of them ---- */

/* The client that has said nothing for longest, or -1. */
static int oldestUnverified(void) {
  int oldest = -1;
  for (int i = 0; i < numClients; i++)
    if (!clients[i].watches && (oldest < 0 || clients[i].sinceNs < clients[oldest].sinceNs))
      oldest = i;
  return oldest;
}

/* When there is something to do that no descriptor tells; UINT64_MAX: never. */
static uint64_t nextMoment(void) {
  uint64_t next = pausedUntilNs ? pausedUntilNs : UINT64_MAX;
  int oldest = oldestUnverified();
  if (oldest < 0) return next;
  uint64_t due =
      clients[oldest].sinceNs + (numUnverified >= MAX_UNVERIFIED ? YOUNGEST_NS : REQUEST_NS);
  return due < next ? due : next;
}

static void dropSilent(uint64_t now) {
  for (int i; (i = oldestUnverified()) >= 0;) {
    if (now - clients[i].sinceNs < (numUnverified >= MAX_UNVERIFIED ? YOUNGEST_NS : REQUEST_NS))
      return;
    dropClient(i);
  }
}

/* Whether the socket is still there. */
static bool acceptClients(int fd, uint64_t now) {
  while (numUnverified < MAX_UNVERIFIED) {
    int client = accept4(fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (client >= 0) {
      challengeClient(client, now);
      continue;
    }
    if (errno == EBADF || errno == EINVAL || errno == ENOTSOCK) return false;
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
      pausedUntilNs = now + PAUSE_NS;
    if (errno != EINTR && errno != ECONNABORTED) return true;
  }
  return true;
}

static sem_t running; /* the server's thread has begun */

static void *serverMain(void *arg) {
  static struct pollfd polls[MAX_CLIENTS + 1];
  int fd = (int)(intptr_t)arg;
  sem_post(&running);
  for (;;) {
    uint64_t now = epMonotonicNs(), next = nextMoment();
    bool open = numUnverified < MAX_UNVERIFIED && now >= pausedUntilNs;
    polls[0] = (struct pollfd){open ? fd : -1, POLLIN, 0};
    for (int i = 0; i < numClients; i++) polls[i + 1] = (struct pollfd){clients[i].fd, POLLIN, 0};
    int ms = next == UINT64_MAX ? -1 : next <= now ? 0 : (int)((next - now) / 1000000 + 1);
    int polled = numClients;
    if (poll(polls, (nfds_t)polled + 1, ms) < 0 && errno != EINTR) usleep(10000);
    now = epMonotonicNs();
    if (now >= pausedUntilNs) pausedUntilNs = 0;
    for (int i = polled - 1; i >= 0; i--) /* downwards: dropping one moves the last */
      if (polls[i + 1].revents && !serve(&clients[i])) dropClient(i);
    dropSilent(now);
    if (polls[0].revents && !acceptClients(fd, now)) return NULL;
  }
}

/* ---- Starting ---- */

static bool describeSelf(ep_process_t *me) {
  memset(me, 0, sizeof *me);
  me->uid = epRandom();
  me->pid = (int32_t)getpid();
  me->pidSpace = epPidSpace();
  snprintf(me->address, sizeof me->address, "trefoil-host-%d-%016llx", (int)me->pid,
           (unsigned long long)me->uid);
  return epRandomBytes(me->secret, sizeof me->secret);
}

static int openSocket(const char *address) {
  struct sockaddr_un name;
  socklen_t length = epSocketName(&name, address);
  int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return -1;
  if (!bind(fd, (struct sockaddr *)&name, length) && !listen(fd, 1024)) return fd;
  close(fd);
  return -1;
}

/* With the lock held. */
static bool startServer(void) {
  ep_process_t me;
  if (!describeSelf(&me)) return false;
  int fd = openSocket(me.address);
  if (fd < 0) return false;
  sigset_t all, old;
  pthread_t thread;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old); /* the program's signals are not for this thread */
  self = me;
  sem_init(&running, 0, 0);
  int failed = pthread_create(&thread, NULL, serverMain, (void *)(intptr_t)fd);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  if (failed) {
    memset(&self, 0, sizeof self);
    close(fd);
    errno = failed;
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
  rankTimeoutNs = trefoilHostTimeoutNs();
  dropOldShm();
  bool there = self.uid || startServer();
  if (there) *out = self;
  pthread_mutex_unlock(&lock);
  EP_NCCL_CHECK(there, ncclSystemError,
                "%s: no unix socket or thread for the process's server (%s)", func,
                strerror(errno));
  return ncclSuccess;
}

/* In the child of a fork: the server's thread is the parent's; this process is another one. What watches the
 * parent must see its end, and not wait for the child's. */
void epServerForked(void) {
  pthread_mutex_init(&lock, NULL);
  if (listenFd >= 0) close(listenFd);
  listenFd = -1;
  for (int i = 0; i < numClients; i++) close(clients[i].fd);
  numClients = numUnverified = 0;
  pausedUntilNs = 0;
  memset(&self, 0, sizeof self);
  for (pending_t *p = pendings; p; p = p->next) close(p->fd);
  pendings = NULL;
}
