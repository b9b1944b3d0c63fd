/* Asking the server of another process (comm_wire.h). Nothing that comes is believed before its sender has
 * shown that it is of the same user and knows the secret, and no memory before its size is right: the name of
 * a process that has ended can be bound by any process in the network namespace. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "comm_wire.h"

/* One question and how it goes. */
typedef struct {
  const ep_process_t *owner;
  ep_request_t request;
  ep_answer_t answer;
  uint64_t deadlineNs;
  int socket, given;
  ncclResult_t failure; /* FAILED: with a sentence */
} asking_t;

typedef enum { ANSWERED, AGAIN, FAILED } outcome_t;

/* The sentence is the thread's. */
static outcome_t failed(asking_t *a, ncclResult_t result) {
  a->failure = result;
  return FAILED;
}

/* The time that is left, for the socket's calls. */
static bool setSocketTimeout(const asking_t *a) {
  uint64_t now = epMonotonicNs();
  if (now >= a->deadlineNs) return false;
  uint64_t us = (a->deadlineNs - now) / 1000 + 1;
  if (us > 1000000000000u) us = 1000000000000u;
  struct timeval timeout = {(time_t)(us / 1000000), (suseconds_t)(us % 1000000)};
  return !setsockopt(a->socket, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout) &&
         !setsockopt(a->socket, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout);
}

static bool isLate(void) {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

/* The answer's descriptor into a->given; the number of bytes. */
static ssize_t receiveAnswer(asking_t *a) {
  struct iovec part = {&a->answer, sizeof a->answer};
  _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  struct msghdr message = {
      .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
  ssize_t got = recvmsg(a->socket, &message, MSG_CMSG_CLOEXEC);
  if (got <= 0) return got;
  struct cmsghdr *head = CMSG_FIRSTHDR(&message);
  if (head && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS &&
      head->cmsg_len == CMSG_LEN(sizeof(int)))
    memcpy(&a->given, CMSG_DATA(head), sizeof a->given);
  if (a->given < 0 && (message.msg_flags & MSG_CTRUNC)) {
    errno = EMFILE;
    return -1;
  }
  return got;
}

static outcome_t failForeign(asking_t *a) {
  return failed(a, epNcclFail(ncclRemoteError,
                              "process %d does not know the id's secret: the id is damaged, or of "
                              "another version, or the process has ended and another has its name",
                              a->owner->pid));
}

static outcome_t failGone(asking_t *a) {
  return failed(a, epNcclFail(ncclRemoteError,
                              "process %d, which made the id or owns the memory, is gone or on "
                              "another machine",
                              a->owner->pid));
}

static outcome_t failErrno(asking_t *a) {
  return failed(a, epNcclFail(ncclSystemError, "process %d cannot be asked: %s", a->owner->pid,
                              strerror(errno)));
}

/* On a connected socket: challenge, request, answer. */
static outcome_t handshake(asking_t *a) {
  ep_challenge_t challenge;
  unsigned char mac[EP_DIGEST_BYTES];
  ssize_t got = recv(a->socket, &challenge, sizeof challenge, 0);
  if (got != (ssize_t)sizeof challenge) /* 0: dropped for others that came later */
    return got <= 0 ? AGAIN : failForeign(a);
  if (challenge.magic != EP_CHALLENGE_MAGIC) return failForeign(a);
  epWireMac(a->owner->secret, &challenge, &a->request, NULL, a->request.mac);
  if (send(a->socket, &a->request, sizeof a->request, MSG_NOSIGNAL) != (ssize_t)sizeof a->request)
    return AGAIN;
  got = receiveAnswer(a);
  if (got < 0 && errno == EMFILE) return failErrno(a);
  if (got <= 0) return AGAIN;
  epWireMac(a->owner->secret, &challenge, &a->request, &a->answer, mac);
  if (got != (ssize_t)sizeof a->answer || a->answer.refused ||
      !epSameBytes(mac, a->answer.mac, sizeof mac))
    return failForeign(a);
  a->answer.sentence[sizeof a->answer.sentence - 1] = 0;
  return ANSWERED;
}

static outcome_t connectOnce(asking_t *a) {
  struct sockaddr_un name;
  socklen_t length = epSocketName(&name, a->owner->address);
  struct ucred peer;
  socklen_t peerBytes = sizeof peer;
  a->socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (a->socket < 0) return failErrno(a);
  if (!setSocketTimeout(a)) return AGAIN;
  if (connect(a->socket, (struct sockaddr *)&name, length))
    return isLate() ? AGAIN : errno == ECONNREFUSED ? failGone(a) : failErrno(a);
  if (getsockopt(a->socket, SOL_SOCKET, SO_PEERCRED, &peer, &peerBytes) || peer.uid != geteuid())
    return failed(a, epNcclFail(ncclRemoteError,
                                "process %d is gone: a process of another user has its name",
                                a->owner->pid));
  return handshake(a);
}

/* Asks until there is an answer or the time is over. The socket stays open only where keep says so. */
static outcome_t exchange(asking_t *a, bool keep) {
  for (;;) {
    a->given = a->socket = -1;
    outcome_t outcome = epRandomBytes(a->request.nonce, sizeof a->request.nonce)
                            ? connectOnce(a)
                            : failed(a, epNcclFail(ncclSystemError, "no random numbers"));
    if (outcome == ANSWERED && keep) return outcome;
    if (a->socket >= 0) close(a->socket);
    a->socket = -1;
    if (outcome != ANSWERED && a->given >= 0) {
      close(a->given);
      a->given = -1;
    }
    if (outcome != AGAIN) return outcome;
    if (epMonotonicNs() >= a->deadlineNs)
      return failed(
          a, epNcclFail(ncclSystemError, "process %d does not answer in time", a->owner->pid));
    usleep(5000);
  }
}

static void begin(asking_t *a, const ep_process_t *owner, ep_ask_t what, uint64_t id,
                  uint64_t timeoutNs) {
  uint64_t now = epMonotonicNs();
  memset(a, 0, sizeof *a);
  a->owner = owner;
  a->request.what = what;
  a->request.uid = owner->uid;
  a->request.id = id;
  a->given = a->socket = -1;
  a->deadlineNs = timeoutNs < UINT64_MAX - now ? now + timeoutNs : UINT64_MAX;
}

/* needed: bytes that the memory must have at least; 0: as many as the owner says. */
static ncclResult_t ask(asking_t *a, size_t needed, const char *func) {
  ep_process_t me;
  EP_NCCL_TRY(epServerSelf(&me, func));
  if (a->owner->uid == me.uid)
    a->given = epServerTake(&a->request, &a->answer);
  else if (exchange(a, false) != ANSWERED)
    return epNcclFail(a->failure, "%s: %s", func, epSentence());
  EP_NCCL_CHECK(a->given >= 0, a->answer.result ? (ncclResult_t)a->answer.result : ncclSystemError,
                "%s: %s", func, a->answer.sentence);
  if (epMemfdHolds(a->given, needed ? needed : (size_t)a->answer.bytes)) return ncclSuccess;
  close(a->given);
  return epNcclFail(ncclRemoteError,
                    "%s: the memory of process %d is smaller than it says, or can "
                    "shrink: it is not mapped",
                    func, a->owner->pid);
}

ncclResult_t epServerAskShm(const ep_process_t *owner, uint64_t key, int numRanks, int *fd,
                            const char *func) {
  asking_t a;
  begin(&a, owner, EP_ASK_BOARD, key, trefoilHostTimeoutNs());
  a.request.numRanks = numRanks;
  EP_NCCL_TRY(ask(&a, epCommShmBytes(numRanks), func));
  *fd = a.given;
  return ncclSuccess;
}

ncclResult_t epServerAskSegment(const ep_process_t *owner, uint64_t segment, int *fd, size_t *bytes,
                                const char *func) {
  asking_t a;
  begin(&a, owner, EP_ASK_SEGMENT, segment, trefoilHostTimeoutNs());
  EP_NCCL_TRY(ask(&a, 0, func));
  *fd = a.given;
  *bytes = (size_t)a.answer.bytes;
  return ncclSuccess;
}

ncclResult_t epServerWatch(const ep_process_t *owner, int *fd) {
  asking_t a;
  char sentence[512];
  snprintf(sentence, sizeof sentence, "%s", epSentence());
  begin(&a, owner, EP_ASK_WATCH, 0, 1000000000u);
  outcome_t outcome = exchange(&a, true);
  if (a.given >= 0) close(a.given);
  epSetSentence("%s", sentence);
  if (outcome == FAILED) return a.failure;
  if (a.answer.result) close(a.socket);
  *fd = a.socket;
  return (ncclResult_t)a.answer.result;
}
