/* Rank 0 and its clients (the conversation: launch_rendezvous.h). All are served at once, so that one that
 * is silent holds up no other. */
#include "validate/launch_rendezvous.h"

#include "plan/error.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MAX_CLIENTS = 128 };
#define SETTLE_SECONDS 0.5 /* by hand: time for a second launch of the same name to show itself */

typedef struct client {
  int socket; /* -1: none */
  double end;
  int isChallenged; /* handshake has come, its proof is awaited */
  size_t got;
  ep_launch_handshake_t handshake;
  uint64_t proof, cookie;
  uint32_t verdict; /* on its handshake */
  ep_launch_peer_t who;
  ep_launch_foreign_t peer;
} client_t;

typedef struct acceptor {
  ep_launch_t *launch;
  int listener;
  client_t clients[MAX_CLIENTS];
  ep_launch_foreign_t foreign;
  int isTwice; /* a rank was claimed by two */
} acceptor_t;

static void reject(acceptor_t *d, client_t *g, int isForeign) {
  if (isForeign) epLaunchCountForeign(&d->foreign, &g->peer);
  close(g->socket);
  g->socket = -1;
}

/* A new connection takes a free place, or the one that has been here longest. */
static void acceptClient(acceptor_t *d) {
  struct timespec pause = {0, 5000000};
  int s = accept4(d->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (s < 0) { /* out of descriptors: they become free when clients are sent away */
    nanosleep(&pause, NULL);
    return;
  }
  client_t *place = &d->clients[0];
  for (int i = 1; i < MAX_CLIENTS && place->socket >= 0; i++)
    if (d->clients[i].socket < 0 || d->clients[i].end < place->end) place = &d->clients[i];
  if (place->socket >= 0) reject(d, place, 1);
  *place = (client_t){.socket = s, .end = epNow() + epLaunchHandshakeSeconds(d->launch)};
  place->who = epLaunchPeer(d->launch, s, &place->peer);
  if (place->who == EP_LAUNCH_FOREIGN) reject(d, place, 1);
}

/* The handshake is complete: tells which process rank 0 is. A rank of another size closes the connection:
 * it asks the kernel whose the other end is after it has read the answer. */
static void challengeClient(acceptor_t *d, client_t *g) {
  const ep_launch_t *l = d->launch;
  if (memcmp(g->handshake.magic, EP_LAUNCH_MAGIC, sizeof g->handshake.magic)) {
    reject(d, g, 1);
    return;
  }
  g->cookie = epLaunchCookie();
  int isOther = g->handshake.job != epLaunchJobHash(l), R = l->numRanks;
  uint32_t verdict = isOther ? EP_LAUNCH_OTHER
                     : g->handshake.numRanks != (uint32_t)R || g->handshake.rank >= (uint32_t)R
                         ? EP_LAUNCH_OTHER_SIZE
                         : EP_LAUNCH_WELCOME;
  ep_launch_answer_t a = {
      .magic = EP_LAUNCH_MAGIC, .verdict = verdict, .numRanks = (uint32_t)R, .cookie = g->cookie};
  a.proof = isOther ? 0 : epLaunchProof(l, &g->handshake, g->cookie, verdict, 0);
  g->isChallenged = 1;
  g->verdict = verdict;
  g->got = 0;
  if (epLaunchMove(g->socket, &a, sizeof a, 1, 0) <= 0 || isOther) reject(d, g, 1);
}

/* The proof is complete: the rank is admitted. */
static void admit(acceptor_t *d, client_t *g) {
  ep_launch_t *l = d->launch;
  uint32_t rank = g->handshake.rank;
  char byte;
  if (g->verdict != EP_LAUNCH_WELCOME ||
      g->proof != epLaunchProof(l, &g->handshake, g->cookie, EP_LAUNCH_WELCOME, 1)) {
    reject(d, g, 1);
    return;
  }
  int old = rank > 0 ? l->sockets[rank] : -1;
  ssize_t peeked = old >= 0 ? recv(old, &byte, 1, MSG_PEEK | MSG_DONTWAIT) : 0;
  int isGone = old >= 0 && (peeked == 0 || (peeked < 0 && errno != EAGAIN && errno != EWOULDBLOCK));
  if (rank == 0 || (old >= 0 && !isGone)) {
    d->isTwice = 1; /* the client stays to learn of it */
    return;
  }
  if (isGone) close(old);
  if (old < 0) l->numElsewhere += g->who == EP_LAUNCH_ELSEWHERE;
  l->sockets[rank] = g->socket;
  g->socket = -1;
}

static void readClient(acceptor_t *d, client_t *g) {
  void *into = g->isChallenged ? (void *)&g->proof : (void *)&g->handshake;
  size_t bytes = g->isChallenged ? sizeof g->proof : sizeof g->handshake;
  ssize_t n = recv(g->socket, (char *)into + g->got, bytes - g->got, MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  if (n <= 0) {
    reject(d, g, 1);
    return;
  }
  g->got += (size_t)n;
  if (g->got < bytes) return;
  if (g->isChallenged)
    admit(d, g);
  else
    challengeClient(d, g);
}

/* Looks at listener and clients once, for `ms` at most. */
static void pollOnce(acceptor_t *d, int ms) {
  struct pollfd ready[MAX_CLIENTS + 1];
  for (int i = 0; i < MAX_CLIENTS; i++)
    ready[i] = (struct pollfd){.fd = d->clients[i].socket, .events = POLLIN};
  ready[MAX_CLIENTS] = (struct pollfd){.fd = d->listener, .events = POLLIN};
  if (poll(ready, MAX_CLIENTS + 1, ms) < 0) return;
  double now = epNow();
  for (int i = 0; i < MAX_CLIENTS; i++) {
    client_t *g = &d->clients[i];
    if (g->socket >= 0 && ready[i].revents) readClient(d, g);
    if (g->socket >= 0 && !d->isTwice && now > g->end) reject(d, g, 1);
  }
  if (ready[MAX_CLIENTS].revents & POLLIN) acceptClient(d);
}

static int firstMissing(const ep_launch_t *l) {
  for (int r = 1; r < l->numRanks; r++)
    if (l->sockets[r] < 0) return r;
  return 0;
}

/* The last message to all ranks, and to clients that wait for one. */
static void reportAll(acceptor_t *d, ep_launch_end_t *f) {
  double end = epNow() + 1;
  for (int r = 1; r < d->launch->numRanks; r++)
    if (d->launch->sockets[r] >= 0) epLaunchMove(d->launch->sockets[r], f, sizeof *f, 1, end);
  for (int i = 0; i < MAX_CLIENTS; i++) {
    client_t *g = &d->clients[i];
    if (g->socket >= 0 && d->isTwice && g->isChallenged)
      epLaunchMove(g->socket, f, sizeof *f, 1, end);
    if (g->socket >= 0) reject(d, g, 0);
  }
}

static trefoil_result_t receiveAll(acceptor_t *d) {
  ep_launch_t *l = d->launch;
  double end = epNow() + l->rendezvousSeconds, settled = 0;
  char foreign[280];
  ep_launch_end_t f = {.verdict = EP_LAUNCH_SEATED};
  while (!d->isTwice) {
    double now = epNow(), until = end;
    int missing = firstMissing(l);
    if (!missing && settled == 0) settled = now + (l->byHand ? SETTLE_SECONDS : 0);
    if (missing) settled = 0;
    if (!missing) until = settled;
    if (now >= until) break;
    double ms = (until - now) * 1e3;
    pollOnce(d, ms > 1000 ? 1000 : (int)ms + 1);
  }
  for (int i = 0; i < MAX_CLIENTS; i++)
    if (d->clients[i].socket >= 0 && !d->isTwice) reject(d, &d->clients[i], 1);
  f.about = (uint32_t)firstMissing(l);
  f.numForeign = (uint32_t)d->foreign.count;
  if (f.about) f.verdict = EP_LAUNCH_MISSING;
  if (d->isTwice) f.verdict = EP_LAUNCH_TWICE;
  reportAll(d, &f);
  if (d->isTwice) return epLaunchTwice(l, "a rank was claimed twice");
  EP_CHECK(!f.about, TREFOIL_REMOTE_ERROR, "rank %d did not come within %d s of the start%s",
           (int)f.about, l->rendezvousSeconds,
           epLaunchForeignText(&d->foreign, foreign, sizeof foreign));
  return TREFOIL_OK;
}

trefoil_result_t epLaunchReceive(ep_launch_t *l, int listener, const ep_launch_foreign_t *foreign) {
  acceptor_t *d = calloc(1, sizeof *d);
  EP_CHECK(d, TREFOIL_SYSTEM_ERROR, "out of memory");
  d->launch = l;
  d->listener = listener;
  d->foreign = *foreign;
  for (int i = 0; i < MAX_CLIENTS; i++) d->clients[i].socket = -1;
  trefoil_result_t rc = receiveAll(d);
  free(d);
  return rc;
}
