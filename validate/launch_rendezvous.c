/* Where the ranks of a launch meet, and how a rank goes to rank 0 (the conversation: launch_rendezvous.h). */
#include "validate/launch_rendezvous.h"

#include "plan/error.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

/* ---- Where they meet ---- */

/* A name without a file, that the launch's processes share and no other launch has. */
static void localPlace(const ep_launch_t *l, ep_launch_place_t *p) {
  struct sockaddr_un a = {.sun_family = AF_UNIX};
  int n = snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "trefoil-%ld-%016llx", (long)getuid(),
                   (unsigned long long)epLaunchJobHash(l));
  memset(p, 0, sizeof *p);
  memcpy(&p->address, &a, sizeof a);
  p->bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
  snprintf(p->name, sizeof p->name, "the socket @%s", a.sun_path + 1);
}

static trefoil_result_t remotePlace(ep_launch_place_t *p) {
  const char *host = getenv("MASTER_ADDR"), *port = getenv("MASTER_PORT");
  char *end = NULL, service[16];
  long number = port && *port ? strtol(port, &end, 10) : 0;
  EP_CHECK(host && *host && end && !*end && number > 0 && number < 65535, TREFOIL_INVALID_ARGUMENT,
           "the processes are on several hosts: MASTER_ADDR and MASTER_PORT must say where rank 0 "
           "is (mpirun -x MASTER_ADDR=... -x MASTER_PORT=...; under srun: export MASTER_PORT=29500 "
           "MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1))");
  snprintf(service, sizeof service, "%ld", number + 1);
  struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found = NULL;
  int rc = getaddrinfo(host, service, &hints, &found);
  EP_CHECK(rc == 0, TREFOIL_SYSTEM_ERROR, "MASTER_ADDR=%s: %s", host, gai_strerror(rc));
  memset(p, 0, sizeof *p);
  memcpy(&p->address, found->ai_addr, found->ai_addrlen);
  p->bytes = found->ai_addrlen;
  snprintf(p->name, sizeof p->name, "port %ld of %.100s", number + 1, host);
  freeaddrinfo(found);
  return TREFOIL_OK;
}

/* ---- A rank goes to rank 0 ---- */

/* A socket that is connected to the place, or -1. */
static int callPlace(const ep_launch_t *l, const ep_launch_place_t *p) {
  int s = socket(p->address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), error = 0;
  socklen_t bytes = sizeof error;
  if (s < 0) return -1;
  if (connect(s, (const struct sockaddr *)&p->address, p->bytes) == 0) return s;
  struct pollfd ready = {.fd = s, .events = POLLOUT};
  if (errno == EINPROGRESS && poll(&ready, 1, epLaunchHandshakeSeconds(l) * 1000) == 1 &&
      getsockopt(s, SOL_SOCKET, SO_ERROR, &error, &bytes) == 0 && error == 0)
    return s;
  close(s);
  return -1;
}

/* Handshake and answer. What listens at a local place is asked for before it is told anything; over TCP the
 * kernel knows the other's user once it has answered. */
static int converse(ep_launch_t *l, const ep_launch_place_t *p, int s,
                    ep_launch_handshake_t *handshake, ep_launch_answer_t *said,
                    ep_launch_foreign_t *peer) {
  double end = epNow() + epLaunchHandshakeSeconds(l);
  if (p->address.ss_family == AF_UNIX && epLaunchPeer(l, s, peer) == EP_LAUNCH_FOREIGN) return 0;
  if (epLaunchMove(s, handshake, sizeof *handshake, 1, end) <= 0 ||
      epLaunchMove(s, said, sizeof *said, 0, end) <= 0)
    return 0;
  ep_launch_peer_t who = epLaunchPeer(l, s, peer);
  l->numElsewhere = who == EP_LAUNCH_ELSEWHERE;
  return who != EP_LAUNCH_FOREIGN && !memcmp(said->magic, EP_LAUNCH_MAGIC, sizeof said->magic) &&
         said->proof == epLaunchProof(l, handshake, said->cookie, said->verdict, 0);
}

/* One conversation as far as the proofs. The socket (verdict WELCOME or OTHER_SIZE), or -1: try again. */
static int introduce(ep_launch_t *l, const ep_launch_place_t *p, ep_launch_foreign_t *foreign,
                     ep_launch_answer_t *said) {
  ep_launch_handshake_t handshake = {.magic = EP_LAUNCH_MAGIC,
                                     .rank = (uint32_t)l->rank,
                                     .numRanks = (uint32_t)l->numRanks,
                                     .job = epLaunchJobHash(l),
                                     .cookie = epLaunchCookie()};
  ep_launch_foreign_t peer = {0};
  int s = callPlace(l, p);
  if (s < 0) return -1;
  if (!converse(l, p, s, &handshake, said, &peer)) {
    epLaunchCountForeign(foreign, &peer);
  } else if (said->verdict == EP_LAUNCH_OTHER_SIZE) {
    return s;
  } else {
    uint64_t proof = epLaunchProof(l, &handshake, said->cookie, EP_LAUNCH_WELCOME, 1);
    if (epLaunchMove(s, &proof, sizeof proof, 1, epNow() + epLaunchHandshakeSeconds(l)) > 0)
      return s;
  }
  close(s);
  return -1;
}

/* Waits for rank 0's last word. */
static trefoil_result_t waitForAll(ep_launch_t *l, int s) {
  ep_launch_end_t f = {0};
  char foreign[280];
  int rc = epLaunchMove(s, &f, sizeof f, 0,
                        epNow() + l->rendezvousSeconds + epLaunchHandshakeSeconds(l));
  if (rc > 0 && f.verdict == EP_LAUNCH_SEATED) {
    l->sockets[0] = s;
    return TREFOIL_OK;
  }
  close(s);
  EP_CHECK(rc >= 0, TREFOIL_REMOTE_ERROR, "rank 0 gave no answer in a barrier round within %d s",
           l->rendezvousSeconds);
  EP_CHECK(rc > 0, TREFOIL_REMOTE_ERROR, "rank 0's process has ended, or a process it waits for");
  if (f.verdict == EP_LAUNCH_TWICE)
    return epLaunchTwice(l, "its rank, or rank 0, was claimed twice");
  ep_launch_foreign_t a = {.count = (int)f.numForeign};
  return epFail(TREFOIL_REMOTE_ERROR, "rank %d did not come within %d s of the start%s",
                (int)f.about, l->rendezvousSeconds,
                epLaunchForeignText(&a, foreign, sizeof foreign));
}

static trefoil_result_t goToRank0(ep_launch_t *l, const ep_launch_place_t *p) {
  double end = epNow() + l->rendezvousSeconds;
  struct timespec pause = {0, 20000000};
  ep_launch_foreign_t a = {0};
  ep_launch_answer_t said = {.verdict = 0};
  char foreign[280];
  for (;;) {
    int s = introduce(l, p, &a, &said);
    if (s >= 0 && said.verdict == EP_LAUNCH_WELCOME) return waitForAll(l, s);
    if (s >= 0) {
      close(s);
      return epFail(
          TREFOIL_INVALID_ARGUMENT,
          "this process was told of %d ranks, and rank 0 of %d: all must be told the same",
          l->numRanks, (int)said.numRanks);
    }
    EP_CHECK(epNow() < end, TREFOIL_REMOTE_ERROR,
             "rank 0 could not be reached within %d s of the start, at %s%s%s",
             l->rendezvousSeconds, p->name, epLaunchForeignText(&a, foreign, sizeof foreign),
             p->address.ss_family == AF_UNIX
                 ? "; ranks on several hosts need MASTER_ADDR and MASTER_PORT"
                 : "");
    pause.tv_nsec =
        a.count ? 200000000 : 20000000; /* no flood of handshakes to unknown processes */
    nanosleep(&pause, NULL);
  }
}

/* ---- Rank 0 opens the place ---- */

/* The place is taken: by another launch for a while, by a squatter, or by a launch with our very name. */
static trefoil_result_t takenPlace(ep_launch_t *l, const ep_launch_place_t *p,
                                   ep_launch_foreign_t *a, double end) {
  ep_launch_answer_t said = {.verdict = 0};
  char foreign[280];
  int s = introduce(l, p, a, &said);
  if (s >= 0) {
    close(s);
    return epLaunchTwice(l, "another process is rank 0");
  }
  EP_CHECK(epNow() < end, TREFOIL_SYSTEM_ERROR,
           "rank 0 cannot wait for the others: %s is taken%s; give each launch its own MASTER_PORT",
           p->name, epLaunchForeignText(a, foreign, sizeof foreign));
  return TREFOIL_OK;
}

static trefoil_result_t waitForRanks(ep_launch_t *l, const ep_launch_place_t *p) {
  double end = epNow() + l->rendezvousSeconds;
  struct timespec pause = {0, 100000000};
  int family = p->address.ss_family, yes = 1, s;
  ep_launch_foreign_t a = {0};
  for (;;) {
    s = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (s >= 0 && family != AF_UNIX) setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (s >= 0 && bind(s, (const struct sockaddr *)&p->address, p->bytes) == 0 &&
        listen(s, EP_LAUNCH_MAX_RANKS) == 0)
      break;
    int why = errno;
    if (s >= 0) close(s);
    EP_CHECK(why == EADDRINUSE, TREFOIL_SYSTEM_ERROR, "rank 0 cannot wait for the others: %s",
             strerror(why));
    EP_TRY(takenPlace(l, p, &a, end));
    nanosleep(&pause, NULL);
  }
  trefoil_result_t rc = epLaunchReceive(l, s, &a);
  close(s);
  return rc;
}

trefoil_result_t epLaunchOpen(ep_launch_t *l) {
  ep_launch_place_t place;
  for (int r = 0; r < EP_LAUNCH_MAX_RANKS; r++) l->sockets[r] = -1;
  if (l->numLocal == l->numRanks)
    localPlace(l, &place);
  else
    EP_TRY(remotePlace(&place));
  l->isOpen = 1;
  trefoil_result_t rc = l->rank > 0 ? goToRank0(l, &place) : waitForRanks(l, &place);
  if (rc != TREFOIL_OK) epLaunchClose(l);
  return rc;
}
