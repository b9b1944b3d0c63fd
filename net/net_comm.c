#include "net_comm_internal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

/* ---- The link: how the engine's requests move ---- */

/* A ticket says by what way: nothing to wait for, a copy of the driver, a message that is answered. */
enum { AT_ONCE = 0, BY_COPY = 1, BY_MESSAGE = 2, WAYS = 4 };

static int copyNow(ep_net_comm_t *c, const ep_net_op_t *op, uint64_t to, uint64_t from,
                   uint64_t *ticket, char *why) {
  uint32_t copy;
  if (epNetCudaCopy(c->cuda, epNetSendStream(op->peer), to, from, op->bytes, &copy, why)) return -1;
  *ticket = (uint64_t)copy * WAYS + BY_COPY;
  return 1;
}

/* Both ends are mapped here. */
static int moveHere(ep_net_comm_t *c, const ep_net_op_t *op, uint64_t *ticket, char *why) {
  const ep_net_region_t *local = c->regions[op->local], *remote = c->regions[op->remote];
  uint64_t mine = (uint64_t)(uintptr_t)epNetAddress(local, op->localOffset);
  uint64_t theirs = remote->views[op->peer].address + op->remoteOffset;
  uint64_t to = op->kind == EP_NET_PUT ? theirs : mine,
           from = op->kind == EP_NET_PUT ? mine : theirs;
  if (local->memory.device || remote->memory.device) return copyNow(c, op, to, from, ticket, why);
  memmove((void *)(uintptr_t)to, (const void *)(uintptr_t)from, op->bytes);
  *ticket = AT_ONCE;
  return 1;
}

static int moveByMessage(ep_net_comm_t *c, const ep_net_op_t *op, uint64_t *ticket, char *why) {
  ep_net_peer_t *p = &c->peers[op->peer];
  ep_net_header_t h = {.kind = EP_NET_MSG_DATA, .region = op->remote, .from = op->local};
  h.offset = op->remoteOffset;
  h.fromOffset = op->localOffset;
  h.bytes = op->bytes;
  if (op->kind == EP_NET_GET)
    h = (ep_net_header_t){EP_NET_MSG_GET,  op->local,        op->remote, 0,
                          op->localOffset, op->remoteOffset, op->bytes,  0};
  if (epNetEnqueue(p, &h, why)) return -1;
  *ticket = (op->kind == EP_NET_GET ? ++p->getsSent : ++p->dataSent) * WAYS + BY_MESSAGE;
  return 1;
}

static int move(void *self, const ep_net_op_t *op, uint64_t *ticket, char *why) {
  ep_net_comm_t *c = self;
  if (!epNetRegionAt(c, op->local, op->localOffset, op->bytes) ||
      !epNetRegionAt(c, op->remote, 0, 0))
    return epNetFail(why, "rank %d: a region was deregistered before its request began", c->rank);
  bool here = c->regions[op->remote]->views[op->peer].address != 0;
  return here ? moveHere(c, op, ticket, why) : moveByMessage(c, op, ticket, why);
}

static ep_net_reach_t reachMessage(const ep_net_peer_t *p, const ep_net_op_t *op, uint64_t number) {
  if (op->kind == EP_NET_GET) return p->getsAnswered >= number ? EP_NET_PLACED : EP_NET_MOVING;
  return p->dataAcked >= number ? EP_NET_PLACED : EP_NET_ORDERED;
}

static ep_net_reach_t reach(void *self, const ep_net_op_t *op, uint64_t ticket) {
  ep_net_comm_t *c = self;
  uint64_t number = ticket / WAYS;
  if (ticket % WAYS == BY_MESSAGE) return reachMessage(&c->peers[op->peer], op, number);
  if (ticket % WAYS == AT_ONCE) return EP_NET_PLACED;
  bool there = epNetCudaFinished(c->cuda, epNetSendStream(op->peer), (uint32_t)number);
  return there ? EP_NET_PLACED : EP_NET_MOVING;
}

static int raiseSignal(void *self, const ep_net_op_t *op, char *why) {
  ep_net_comm_t *c = self;
  const ep_net_header_t h = {.kind = EP_NET_MSG_SIGNAL,
                             .region = op->signalRegion,
                             .offset = op->signalOffset,
                             .value = op->add};
  bool own = op->peer == c->rank;
  if (own ? epNetSignalAdd(c, h.region, h.offset, h.value, why)
          : epNetEnqueue(&c->peers[op->peer], &h, why))
    return -1;
  return 1;
}

/* ---- Life ---- */

static void freeComm(ep_net_comm_t *c) {
  char ignored[EP_NET_WHY];
  if (c->cuda) epNetCudaEnter(c->cuda, ignored);
  for (int p = 0; c->peers && p < c->numRanks; p++) epNetStreamFree(c, p);
  if (c->ends) epNetEndsClose(c->ends, c->numRanks);
  epNetSignalsFree(c);
  epNetRegionsFree(c);
  epNetCudaClose(c->cuda);
  epNetEngineDestroy(c->engine);
  pthread_mutex_destroy(&c->lock);
  pthread_mutex_destroy(&c->registering);
  free(c->ends);
  free(c->peers);
  free(c);
}

static ep_net_comm_t *newComm(const ep_net_settings_t *settings, int numRanks, int rank) {
  ep_net_comm_t *c = calloc(1, sizeof *c);
  if (!c) return NULL;
  c->rank = rank;
  c->numRanks = numRanks;
  c->settings = *settings;
  pthread_mutex_init(&c->lock, NULL);
  pthread_mutex_init(&c->registering, NULL);
  c->ends = calloc((size_t)numRanks, sizeof *c->ends);
  c->peers = calloc((size_t)numRanks, sizeof *c->peers);
  for (int p = 0; c->ends && p < numRanks; p++) c->ends[p] = (ep_net_ends_t){-1, -1};
  if (c->ends && c->peers) return c;
  freeComm(c);
  return NULL;
}

static int rendezvous(ep_net_comm_t *c, ep_net_listener_t *listener, void *const *handles,
                      char *why) {
  const ep_net_link_t link = {c, move, reach, raiseSignal};
  if (epNetEngineCreate(&c->settings, link, c->rank, c->numRanks, &c->engine, why)) return -1;
  if (epNetRendezvous(listener, handles, c->numRanks, c->rank, c->settings.limitNs, c->ends, why))
    return -1;
  for (int p = 0; p < c->numRanks; p++) c->peers[p].socket = c->ends[p].data;
  return 0;
}

int epNetConnect(const ep_net_settings_t *settings, ep_net_listener_t *listener,
                 void *const *handles, int numRanks, int rank, ep_net_comm_t **out, char *why) {
  if (rank < 0 || rank >= numRanks)
    return epNetFail(why, "rank %d is not in [0, %d)", rank, numRanks);
  ep_net_comm_t *c = newComm(settings, numRanks, rank);
  if (!c) return epNetFail(why, "no memory for a communicator of the network");
  if (rendezvous(c, listener, handles, why)) {
    freeComm(c);
    return -1;
  }
  *out = c;
  return 0;
}

/* ---- Progress ---- */

static int advance(ep_net_comm_t *c, char *why) {
  if (epNetEngineProgress(c->engine, epNetNow(), why)) return -1;
  for (int p = 0; p < c->numRanks; p++)
    if (p != c->rank && epNetStreamProgress(c, p, why)) return -1;
  return epNetSignalsProgress(c, why);
}

static int progress(ep_net_comm_t *c, char *why) {
  int mode = EP_NET_CAPTURE_RELAXED;
  if (!c->cuda) return advance(c, why);
  if (epNetCudaEnter(c->cuda, why) || epNetCudaExchangeMode(c->cuda, &mode, why)) return -1;
  int result = advance(c, why);
  return epNetCudaExchangeMode(c->cuda, &mode, why) ? -1 : result;
}

/* Keeps the first failure; later calls give its sentence. */
static int keep(ep_net_comm_t *c, int failed, char *why) {
  if (failed && !c->failed) memcpy(c->why, why, EP_NET_WHY);
  c->failed |= failed != 0;
  if (c->failed) memcpy(why, c->why, EP_NET_WHY);
  return c->failed ? -1 : 0;
}

int epNetProgress(ep_net_comm_t *c, char *why) {
  if (pthread_mutex_trylock(&c->lock)) return 0;
  int result = keep(c, c->failed || progress(c, why), why);
  pthread_mutex_unlock(&c->lock);
  return result;
}

bool epNetFailed(ep_net_comm_t *c) {
  pthread_mutex_lock(&c->lock);
  bool failed = c->failed;
  pthread_mutex_unlock(&c->lock);
  return failed;
}

/* ---- Closing ---- */

/* Whether all that was queued is sent, and the end of it said; *quiet: and all peers have said theirs. */
static bool sendEnd(ep_net_comm_t *c, bool *quiet) {
  bool sent = !c->signals.count;
  *quiet = true;
  for (int p = 0; p < c->numRanks; p++) {
    if (p == c->rank) continue;
    if (!c->peers[p].gone && c->peers[p].count) sent = false;
    *quiet = *quiet && c->peers[p].gone;
  }
  return sent;
}

static void shutAll(ep_net_comm_t *c) {
  for (int p = 0; p < c->numRanks; p++)
    if (p != c->rank) shutdown(c->peers[p].socket, SHUT_WR);
}

/* A socket that is closed with data unread resets the connection: the peer would lose our last messages. */
static void drain(ep_net_comm_t *c) {
  char ignored[EP_NET_WHY];
  int64_t end = epNetNow() + (c->settings.limitNs < 1000000000 ? c->settings.limitNs : 1000000000);
  bool shut = false, quiet = false;
  while (!c->failed && !(shut && quiet) && epNetNow() < end) {
    if (progress(c, ignored)) return;
    bool sent = sendEnd(c, &quiet);
    if (sent && !shut) shutAll(c);
    shut = shut || sent;
    nanosleep(&(struct timespec){0, 20000}, NULL);
  }
}

void epNetClose(ep_net_comm_t *c) {
  drain(c);
  freeComm(c);
}

/* ---- Posting ---- */

int epNetContexts(ep_net_comm_t *c, int count, int *first, char *why) {
  pthread_mutex_lock(&c->lock);
  int failed = epNetEngineContexts(c->engine, count, first, why);
  pthread_mutex_unlock(&c->lock);
  return failed;
}

void epNetForget(ep_net_comm_t *c, int first, int count) {
  pthread_mutex_lock(&c->lock);
  epNetEngineForget(c->engine, first, count);
  pthread_mutex_unlock(&c->lock);
}

static bool within(uint64_t offset, uint64_t bytes, uint64_t all) {
  return offset <= all && bytes <= all - offset;
}

static int outside(const ep_net_comm_t *c, const char *what, uint64_t offset, uint64_t bytes,
                   char *why) {
  return epNetFail(why,
                   "rank %d: the %s of a request, %llu bytes at %llu, is not inside its region",
                   c->rank, what, (unsigned long long)bytes, (unsigned long long)offset);
}

static int checkPost(const ep_net_comm_t *c, const ep_net_post_t *post, char *why) {
  const ep_net_op_t *op = &post->op;
  if (op->peer < 0 || op->peer >= c->numRanks)
    return epNetFail(why, "rank %d: a request to rank %d, which is not in [0, %d)", c->rank,
                     op->peer, c->numRanks);
  if (op->bytes && (!post->local || !within(op->localOffset, op->bytes, post->local->memory.bytes)))
    return outside(c, "local side", op->localOffset, op->bytes, why);
  if (op->bytes &&
      (!post->remote || !within(op->remoteOffset, op->bytes, post->remote->views[op->peer].bytes)))
    return outside(c, "remote side", op->remoteOffset, op->bytes, why);
  if (op->hasSignal && (!post->signal || op->signalOffset % 8 ||
                        !within(op->signalOffset, 8, post->signal->views[op->peer].bytes)))
    return outside(c, "signal", op->signalOffset, 8, why);
  return 0;
}

static int postLocked(ep_net_comm_t *c, int context, const ep_net_post_t *post,
                      ep_net_request_t **out, char *why) {
  ep_net_op_t op = post->op;
  if (op.bytes) {
    op.local = post->local->id;
    op.remote = post->remote->id;
  }
  if (op.hasSignal) op.signalRegion = post->signal->id;
  return epNetEnginePost(c->engine, context, &op, epNetNow(), out, why);
}

int epNetPost(ep_net_comm_t *c, int context, const ep_net_post_t *post, ep_net_request_t **out,
              char *why) {
  if (checkPost(c, post, why)) return -1;
  pthread_mutex_lock(&c->lock);
  int result = keep(c, 0, why) || postLocked(c, context, post, out, why) ? -1 : 0;
  pthread_mutex_unlock(&c->lock);
  return result;
}

int epNetTest(ep_net_comm_t *c, ep_net_request_t *request, bool *done, char *why) {
  pthread_mutex_lock(&c->lock);
  int result = keep(c, 0, why);
  *done = !result && epNetEngineTest(request);
  pthread_mutex_unlock(&c->lock);
  return result;
}
