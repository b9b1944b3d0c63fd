/* Barrier rounds over TCP, for ranks of several NVLink domains: no memory is shared. Rank 0's process has the
 * shared state and the clients, and a thread for each other rank, which meets in that rank's name
 * (plan/barrier_round.h) while the rank waits for its answer. So a late rank is named whichever it is, rank 0
 * too: its process answers also while rank 0 does not come. A connection that ends without a farewell says
 * that its rank is gone.
 *
 * Rank 0's address and a secret come to all by a broadcast of NCCL, which has no time limit. A thread waits
 * for it; calls wait for the thread, with theirs. A rank that could not connect tries again in its next call,
 * with the address that it has; if rank 0 has none, all need another broadcast and know it. */
#include "api/gpu/rendezvous_site.h"

#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "api/gpu/gpu.h"
#include "net/net_rendezvous.h"
#include "plan/clock.h"

#define SECOND 1000000000ll
enum { LINGER_MS = 2000, LOOK_MS = 100 };

/* ---- What goes over a connection ---- */

typedef enum { ASK_BEGIN = 1, ASK_FAIL, ASK_JOIN, ASK_LEAVE } ask_t;

typedef struct request {
  int32_t what, code;
  uint64_t timeoutNs;
  uint64_t bytes; /* ASK_JOIN: of the record, in body; ASK_FAIL: body is the sentence */
  char body[400];
} request_t;

/* Then, if the round is complete, the records of all ranks. */
typedef struct answer {
  int32_t end, rank, code, pad;
  char text[sizeof((ep_round_outcome_t *)0)->text];
} answer_t;

_Static_assert(EP_ROUND_BYTES <= sizeof((request_t *)0)->body, "a record fits");

static int64_t deadlineOf(uint64_t timeoutNs, int64_t more) {
  int64_t most = 1000000 * SECOND;
  return epNetNow() + (timeoutNs < (uint64_t)most ? (int64_t)timeoutNs : most) + more;
}

/* ---- Rank 0's process ---- */

struct server;

typedef struct client {
  ep_round_entry_t entry;
  struct server *server;
  int rank, socket;
  ep_round_t round;
  pthread_t thread;
  _Atomic int state;
} client_t;
typedef enum { CLIENT_EMPTY, CLIENT_TAKEN, CLIENT_LEFT, CLIENT_GONE } client_state_t;

typedef struct server {
  ep_net_listener_t *listener;
  pthread_t thread;
  int numRanks;
  _Atomic int isClosing;
  ep_round_shared_t shared;
  client_t clients[EP_KERNEL_MAX_RANKS];
} server_t;

static int isGone(void *owner, int rank) {
  const client_t *mine = owner;
  return atomic_load(&mine->server->clients[rank].state) == CLIENT_GONE;
}

/* The rank in whose name this client's thread waits has ended, which the others must find when they wake up;
 * or the place closes. */
static int isAborted(void *owner) {
  client_t *mine = owner;
  char byte;
  if (mine->socket < 0) return 0;
  ssize_t n = recv(mine->socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  int hasEnded = n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
  if (hasEnded) atomic_store(&mine->state, CLIENT_GONE);
  return hasEnded || atomic_load(&mine->server->isClosing);
}

static int answerJoin(client_t *client, const request_t *r) {
  ep_round_outcome_t o = {0};
  char why[EP_NET_WHY], *all = calloc((size_t)client->server->numRanks, EP_ROUND_BYTES);
  if (!all || r->bytes > EP_ROUND_BYTES) {
    free(all);
    return -1;
  }
  epRoundJoin(&client->round, r->body, r->bytes, all, r->timeoutNs, &o);
  answer_t a = {.end = (int32_t)o.end, .rank = o.rank, .code = o.code};
  memcpy(a.text, o.text, sizeof a.text);
  int64_t deadline = epNetNow() + 5 * SECOND;
  int failed = epNetSendRecord(client->socket, &a, sizeof a, -1, deadline, why);
  if (!failed && o.end == EP_ROUND_COMPLETE) {
    failed = epNetSendRecord(client->socket, all, (size_t)client->server->numRanks * r->bytes, -1,
                             deadline, why);
  }
  free(all);
  return failed;
}

/* -1: the connection has ended. */
static int takeRequest(const client_t *client, request_t *r) {
  char why[EP_NET_WHY];
  int none;
  struct pollfd p = {client->socket, POLLIN, 0};
  while (poll(&p, 1, LOOK_MS) == 0) {
    if (atomic_load(&client->server->isClosing)) return -1;
  }
  int failed =
      epNetReceiveRecord(client->socket, r, sizeof *r, &none, epNetNow() + 5 * SECOND, why);
  if (none >= 0) close(none);
  return failed;
}

static void *serveClient(void *argument) {
  client_t *client = argument;
  request_t r;
  int state = CLIENT_GONE, failed = 0;
  while (!failed && state == CLIENT_GONE && !takeRequest(client, &r)) {
    r.body[sizeof r.body - 1] = 0;
    switch ((ask_t)r.what) {
    case ASK_BEGIN:
      epRoundCallBegin(&client->round);
      break;
    case ASK_FAIL:
      epRoundCallFail(&client->round, r.code, r.body);
      break;
    case ASK_JOIN:
      failed = answerJoin(client, &r);
      break;
    case ASK_LEAVE:
      state = CLIENT_LEFT;
      break;
    default:
      failed = 1;
    }
  }
  atomic_store(&client->state, state);
  close(client->socket);
  return NULL;
}

static void openClient(client_t *client, server_t *server, int rank, int socket) {
  client->server = server;
  client->rank = rank;
  client->socket = socket;
  client->round = (ep_round_t){.shared = &server->shared,
                               .entries = &server->clients[0].entry,
                               .stride = sizeof(client_t),
                               .rank = rank,
                               .numRanks = server->numRanks,
                               .owner = client,
                               .isGone = isGone,
                               .isAborted = isAborted};
}

static void *acceptAll(void *argument) {
  server_t *server = argument;
  char why[EP_NET_WHY];
  for (int missing = server->numRanks - 1; missing && !atomic_load(&server->isClosing);) {
    int rank, purpose, socket;
    int64_t deadline = epNetNow() + LOOK_MS * SECOND / 1000;
    if (epNetAccept(server->listener, deadline, &rank, &purpose, &socket, why) != 1) continue;
    client_t *client = rank > 0 && rank < server->numRanks ? &server->clients[rank] : NULL;
    if (!client || atomic_load(&client->state) != CLIENT_EMPTY) {
      close(socket);
      continue;
    }
    openClient(client, server, rank, socket);
    atomic_store(&client->state, CLIENT_TAKEN);
    missing--;
    if (pthread_create(&client->thread, NULL, serveClient, client) == 0) continue;
    client->thread = 0;
    atomic_store(&client->state, CLIENT_GONE);
    close(socket);
  }
  return NULL;
}

static server_t *openHub(int numRanks, void *handle, char *why) {
  const char *address = getenv("TREFOIL_NET_ADDRESS");
  ep_net_settings_t settings = {.carrier = EP_NET_TCP};
  snprintf(settings.address, sizeof settings.address, "%s", address ? address : "");
  server_t *server = calloc(1, sizeof *server);
  if (!server) {
    epNetFail(why, "out of memory");
    return NULL;
  }
  server->numRanks = numRanks;
  openClient(&server->clients[0], server, 0, -1);
  if (!epNetListen(&settings, handle, &server->listener, why)) {
    if (pthread_create(&server->thread, NULL, acceptAll, server) == 0) return server;
    epNetFail(why, "a thread could not be started");
    epNetListenClose(server->listener);
  }
  memset(handle, 0, EP_NET_HANDLE_BYTES);
  free(server);
  return NULL;
}

static int hasTalkers(const server_t *server) {
  for (int r = 1; r < server->numRanks; r++) {
    if (atomic_load(&server->clients[r].state) == CLIENT_TAKEN) return 1;
  }
  return 0;
}

/* The others' last answers are on their way: they say farewell once they have them. */
static void closeHub(server_t *server) {
  for (int ms = 0; ms < LINGER_MS && hasTalkers(server); ms++) {
    nanosleep(&(struct timespec){0, 1000000}, NULL);
  }
  atomic_store(&server->isClosing, 1);
  pthread_join(server->thread, NULL);
  for (int r = 1; r < server->numRanks; r++) {
    if (server->clients[r].thread) pthread_join(server->clients[r].thread, NULL);
  }
  epNetListenClose(server->listener);
  free(server);
}

/* ---- A rank ---- */

typedef struct site {
  ep_site_t base;
  ncclComm_t comm;
  int rank, numRanks;
  int hasHandle; /* of rank 0; it is not zeros */
  char handle[EP_NET_HANDLE_BYTES];
  int numBegun;           /* calls that are not counted yet */
  server_t *server;       /* rank 0's, once open */
  int socket;             /* of the others, once open; -1: it has ended */
  _Atomic int references; /* the rendezvous', and the thread's that opens it */
  pthread_mutex_t lock;
  pthread_cond_t changed;
  enum { OPENING, OPEN, FAILED } state; /* with the lock held */
  char why[400];
} site_t;

static site_t *siteOf(ep_site_t *base) {
  return (site_t *)(void *)base;
}

static void release(site_t *p) {
  if (atomic_fetch_sub(&p->references, 1) != 1) return;
  if (p->server) closeHub(p->server);
  if (p->socket >= 0) close(p->socket);
  pthread_cond_destroy(&p->changed);
  pthread_mutex_destroy(&p->lock);
  free(p);
}

/* Whether it worked; else why, or the reason that rank 0 has no address: then the handle is zeros. */
static int shareHandle(site_t *p, char *why, char *reason) {
  if (p->rank == 0 && !p->server) p->server = openHub(p->numRanks, p->handle, reason);
  if (epGpuBroadcast(p->comm, p->handle, sizeof p->handle) != TREFOIL_OK) {
    snprintf(why, sizeof p->why, "%s", trefoilLastError());
    return 0;
  }
  static const char zeros[EP_NET_HANDLE_BYTES];
  p->hasHandle = memcmp(p->handle, zeros, sizeof zeros) != 0;
  return 1;
}

/* Whether it worked; else a sentence. */
static int openBody(site_t *p, char *why) {
  char reason[EP_NET_WHY] = "";
  if (!p->hasHandle && !shareHandle(p, why, reason)) return 0;
  int failed = p->rank == 0
                   ? !p->server
                   : epNetDial(p->handle, 0, p->rank, epNetNow() + 30 * SECOND, &p->socket, reason);
  if (!failed) return 1;
  snprintf(why, sizeof p->why,
           "ncclEpCreateGroup: ranks of several NVLink domains meet over TCP at rank 0, and rank "
           "%d cannot: %.200s (TREFOIL_NET_ADDRESS on rank 0, or NCCL_SOCKET_IFNAME, chooses the "
           "address)",
           p->rank, reason);
  return 0;
}

static void *openSite(void *argument) {
  site_t *p = argument;
  char why[sizeof p->why] = "";
  int opened = openBody(p, why);
  pthread_mutex_lock(&p->lock);
  p->state = opened ? OPEN : FAILED;
  memcpy(p->why, why, sizeof why);
  pthread_cond_broadcast(&p->changed);
  pthread_mutex_unlock(&p->lock);
  release(p);
  return NULL;
}

/* Whether a thread opens it; until that is done it is OPENING. */
static int startOpening(site_t *p) {
  pthread_t thread;
  p->state = OPENING;
  atomic_fetch_add(&p->references, 1);
  if (pthread_create(&thread, NULL, openSite, p) == 0) return !pthread_detach(thread);
  atomic_fetch_sub(&p->references, 1);
  p->state = FAILED;
  return 0;
}

static int stateOf(site_t *p) {
  pthread_mutex_lock(&p->lock);
  int state = p->state;
  pthread_mutex_unlock(&p->lock);
  return state;
}

static void hangUp(site_t *p) {
  close(p->socket);
  p->socket = -1;
}

static int sendRequest(site_t *p, const request_t *r) {
  char why[EP_NET_WHY];
  if (p->socket < 0) return -1;
  if (!epNetSendRecord(p->socket, r, sizeof *r, -1, epNetNow() + 5 * SECOND, why)) return 0;
  hangUp(p);
  return -1;
}

static void countCall(site_t *p) {
  request_t r = {.what = ASK_BEGIN};
  if (p->server)
    epRoundCallBegin(&p->server->clients[0].round);
  else
    sendRequest(p, &r);
}

/* What could not be opened in an earlier call is tried again. */
static void callBegin(ep_site_t *base) {
  site_t *p = siteOf(base);
  if (stateOf(p) == OPEN) {
    countCall(p);
    return;
  }
  p->numBegun++;
  if (stateOf(p) == FAILED) startOpening(p);
}

static trefoil_result_t await(ep_site_t *base, uint64_t timeoutNs) {
  site_t *p = siteOf(base);
  uint64_t most = 1000000ull * SECOND,
           until = epMonotonicNs() + (timeoutNs < most ? timeoutNs : most);
  struct timespec t = {(time_t)(until / SECOND), (long)(until % SECOND)};
  pthread_mutex_lock(&p->lock);
  while (p->state == OPENING && pthread_cond_timedwait(&p->changed, &p->lock, &t) == 0) {
  }
  int state = p->state;
  pthread_mutex_unlock(&p->lock);
  EP_CHECK(state != FAILED, TREFOIL_REMOTE_ERROR, "%s", p->why);
  EP_CHECK(state == OPEN, TREFOIL_REMOTE_ERROR,
           "ncclEpCreateGroup: some rank did not come within %.1f s (NCCL's broadcast of rank 0's "
           "address is not through, and does not say which); try again, or abort the communicator",
           (double)timeoutNs * 1e-9);
  for (; p->numBegun; p->numBegun--) countCall(p);
  return TREFOIL_OK;
}

static void callFail(ep_site_t *base, int code, const char *why) {
  site_t *p = siteOf(base);
  request_t r = {.what = ASK_FAIL, .code = code};
  snprintf(r.body, sizeof r.body, "%s", why);
  if (p->server)
    epRoundCallFail(&p->server->clients[0].round, code, why);
  else
    sendRequest(p, &r);
}

static int receive(site_t *p, void *data, size_t bytes, int64_t deadline) {
  char why[EP_NET_WHY];
  int none, failed = epNetReceiveRecord(p->socket, data, bytes, &none, deadline, why);
  if (none >= 0) close(none);
  return failed;
}

/* Rank 0's process answers within the limit and a moment, or it is gone, or hangs. */
static void joinRemotely(site_t *p, const request_t *r, void *all, ep_round_outcome_t *out) {
  answer_t a;
  int64_t deadline = deadlineOf(r->timeoutNs, 5 * SECOND);
  *out = (ep_round_outcome_t){.end = EP_ROUND_GONE, .rank = 0};
  if (sendRequest(p, r)) return;
  int failed = receive(p, &a, sizeof a, deadline);
  if (!failed && a.end == EP_ROUND_COMPLETE)
    failed = receive(p, all, (size_t)p->numRanks * r->bytes, deadline);
  if (failed) {
    if (epNetNow() >= deadline) {
      out->end = EP_ROUND_LATE;
      snprintf(out->text, sizeof out->text, "0");
    }
    hangUp(p);
    return;
  }
  *out = (ep_round_outcome_t){.end = (ep_round_end_t)a.end, .rank = a.rank, .code = a.code};
  memcpy(out->text, a.text, sizeof out->text);
  out->text[sizeof out->text - 1] = 0;
}

static void join(ep_site_t *base, const void *mine, size_t bytes, void *all, uint64_t timeoutNs,
                 ep_round_outcome_t *out) {
  site_t *p = siteOf(base);
  if (p->server) {
    epRoundJoin(&p->server->clients[0].round, mine, bytes, all, timeoutNs, out);
    return;
  }
  request_t r = {.what = ASK_JOIN, .timeoutNs = timeoutNs, .bytes = bytes};
  memcpy(r.body, mine, bytes);
  joinRemotely(p, &r, all, out);
}

static int processOf(const ep_site_t *base, int rank) {
  (void)base, (void)rank;
  return 0;
}

static void allCame(ep_site_t *base) {
  (void)base;
}

static void closeSite(ep_site_t *base) {
  site_t *p = siteOf(base);
  request_t r = {.what = ASK_LEAVE};
  if (stateOf(p) == OPEN && !p->server) sendRequest(p, &r);
  release(p);
}

static const ep_site_kind_t kind = {.where = "over TCP, at rank 0",
                                    .callBegin = callBegin,
                                    .callFail = callFail,
                                    .join = join,
                                    .processOf = processOf,
                                    .await = await,
                                    .allCame = allCame,
                                    .close = closeSite};

static void makeCondition(site_t *p) {
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&p->changed, &monotonic);
  pthread_condattr_destroy(&monotonic);
  pthread_mutex_init(&p->lock, NULL);
}

trefoil_result_t epNetSiteOpen(ncclComm_t comm, int rank, int numRanks, ep_site_t **out) {
  site_t *p = malloc(sizeof *p);
  EP_CHECK(p, TREFOIL_SYSTEM_ERROR, "out of memory");
  *p = (site_t){.base = {&kind},
                .comm = comm,
                .rank = rank,
                .numRanks = numRanks,
                .socket = -1,
                .references = 1};
  makeCondition(p);
  if (!startOpening(p)) {
    release(p);
    return epFail(TREFOIL_SYSTEM_ERROR, "ncclEpCreateGroup: a thread could not be started");
  }
  *out = &p->base;
  return TREFOIL_OK;
}
