/* Messages between two ranks, over one socket: they are taken in the order in which they were queued, so a
 * signal behind data is seen after them. Payloads of GPUs pass through a stage of pinned memory. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "net_comm_internal.h"

/* ---- The queue ---- */

static int grow(ep_net_peer_t *p, char *why) {
  size_t room = p->room ? 2 * p->room : 64;
  ep_net_header_t *queue = malloc(room * sizeof *queue);
  if (!queue) return epNetFail(why, "no memory for messages of the network");
  for (size_t i = 0; i < p->count; i++) queue[i] = p->queue[(p->first + i) % p->room];
  free(p->queue);
  p->queue = queue;
  p->room = room;
  p->first = 0;
  return 0;
}

int epNetEnqueue(ep_net_peer_t *p, const ep_net_header_t *header, char *why) {
  if (p->count == p->room && grow(p, why)) return -1;
  p->queue[(p->first + p->count++) % p->room] = *header;
  return 0;
}

static int enqueueAck(ep_net_peer_t *p, char *why) {
  const ep_net_header_t ack = {.kind = EP_NET_MSG_ACK, .value = ++p->dataTaken};
  ep_net_header_t *last = p->count ? &p->queue[(p->first + p->count - 1) % p->room] : NULL;
  if (p->count < 2 || last->kind != EP_NET_MSG_ACK) return epNetEnqueue(p, &ack, why);
  *last = ack; /* not begun yet: only the first of the queue is */
  return 0;
}

static void dequeue(ep_net_peer_t *p) {
  p->first = (p->first + 1) % p->room;
  p->count--;
  p->headerSent = p->payloadSent = 0;
}

static bool carriesPayload(const ep_net_header_t *h) {
  return h->kind == EP_NET_MSG_DATA || h->kind == EP_NET_MSG_REPLY;
}

void epNetStreamFree(ep_net_comm_t *c, int peer) {
  ep_net_peer_t *p = &c->peers[peer];
  if (p->sending.memory) epNetCudaUnpin(c->cuda, p->sending.memory);
  if (p->receiving.memory) epNetCudaUnpin(c->cuda, p->receiving.memory);
  free(p->queue);
}

/* ---- Sockets ---- */

/* Bytes that a call on the socket moved, 0 for none now; a connection that ends makes the peer gone. */
static uint64_t moved(ep_net_comm_t *c, int peer, ssize_t n) {
  if (n > 0) return (uint64_t)n;
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
  c->peers[peer].gone = true;
  epNetEngineGone(c->engine, peer);
  return 0;
}

static uint64_t sendBytes(ep_net_comm_t *c, int peer, const char *data, uint64_t bytes, int more) {
  int flags = MSG_NOSIGNAL | MSG_DONTWAIT | more;
  return moved(c, peer, send(c->peers[peer].socket, data, bytes, flags));
}

static uint64_t receiveBytes(ep_net_comm_t *c, int peer, char *data, uint64_t bytes) {
  return moved(c, peer, recv(c->peers[peer].socket, data, bytes, MSG_DONTWAIT));
}

/* ---- Sending ---- */

static uint64_t least(uint64_t a, uint64_t b) {
  return a < b ? a : b;
}

static int pin(ep_net_comm_t *c, ep_net_stage_t *stage, char *why) {
  void *memory = NULL;
  if (stage->memory) return 0;
  if (epNetCudaPinned(c->cuda, EP_NET_STAGE_BYTES, &memory, why)) return -1;
  stage->memory = memory;
  return 0;
}

/* Copies the next part of a payload out of a GPU. */
static int fillStage(ep_net_comm_t *c, int peer, const char *from, uint64_t bytes, char *why) {
  ep_net_stage_t *s = &c->peers[peer].sending;
  if (pin(c, s, why)) return -1;
  s->filled = least(bytes, EP_NET_STAGE_BYTES);
  s->copying = true;
  return epNetCudaCopy(c->cuda, epNetSendStream(peer), (uint64_t)(uintptr_t)s->memory,
                       (uint64_t)(uintptr_t)from, s->filled, &s->ticket, why);
}

static bool copied(ep_net_comm_t *c, int stream, ep_net_stage_t *s) {
  if (s->copying && !epNetCudaFinished(c->cuda, stream, s->ticket)) return false;
  s->copying = false;
  return true;
}

/* What can be sent now of a payload: *from and *bytes (0: nothing yet). */
static int payloadPart(ep_net_comm_t *c, int peer, const ep_net_region_t *r, const char **from,
                       uint64_t *bytes, char *why) {
  ep_net_peer_t *p = &c->peers[peer];
  const ep_net_header_t *h = &p->queue[p->first];
  uint64_t left = h->bytes - p->payloadSent, inStage = p->payloadSent % EP_NET_STAGE_BYTES;
  *from = epNetAddress(r, h->fromOffset + p->payloadSent);
  *bytes = left;
  if (!r->memory.device) return 0;
  if (!p->sending.filled && fillStage(c, peer, *from, left, why)) return -1;
  *from = p->sending.memory + inStage;
  *bytes = copied(c, epNetSendStream(peer), &p->sending) ? p->sending.filled - inStage : 0;
  return 0;
}

/* 1: something was sent, 0: not now. */
static int sendPayload(ep_net_comm_t *c, int peer, char *why) {
  ep_net_peer_t *p = &c->peers[peer];
  const ep_net_header_t *h = &p->queue[p->first];
  const ep_net_region_t *r = epNetRegionAt(c, h->from, h->fromOffset, h->bytes);
  const char *from;
  uint64_t bytes;
  if (!r)
    return epNetFail(why, "rank %d: region %u was deregistered with data on their way", c->rank,
                     h->from);
  if (payloadPart(c, peer, r, &from, &bytes, why)) return -1;
  uint64_t sent = bytes ? sendBytes(c, peer, from, bytes, 0) : 0;
  p->payloadSent += sent;
  if (sent == bytes && sent) p->sending.filled = 0;
  return sent > 0;
}

static int sendHeader(ep_net_comm_t *c, int peer) {
  ep_net_peer_t *p = &c->peers[peer];
  const ep_net_header_t *h = &p->queue[p->first];
  int more = carriesPayload(h) ? MSG_MORE : 0;
  uint64_t sent =
      sendBytes(c, peer, (const char *)h + p->headerSent, sizeof *h - p->headerSent, more);
  p->headerSent += sent;
  return sent > 0;
}

static bool wholeMessageSent(const ep_net_peer_t *p) {
  const ep_net_header_t *h = &p->queue[p->first];
  return p->headerSent == sizeof *h && (!carriesPayload(h) || p->payloadSent == h->bytes);
}

static int sendSome(ep_net_comm_t *c, int peer, char *why) {
  ep_net_peer_t *p = &c->peers[peer];
  for (int turn = 0; turn < 64 && p->count && !p->gone; turn++) {
    int sent = p->headerSent < sizeof *p->queue ? sendHeader(c, peer) : sendPayload(c, peer, why);
    if (sent <= 0) return sent;
    if (wholeMessageSent(p)) dequeue(p);
  }
  return 0;
}

/* ---- Receiving ---- */

static int wrong(const ep_net_comm_t *c, int peer, const ep_net_header_t *h, char *why) {
  return epNetFail(
      why, "rank %d: message %u of rank %d names %llu bytes at %llu of region %u: not there",
      c->rank, h->kind, peer, (unsigned long long)h->bytes, (unsigned long long)h->offset,
      h->region);
}

static int answer(ep_net_comm_t *c, int peer, const ep_net_header_t *h, char *why) {
  ep_net_header_t reply = *h;
  reply.kind = EP_NET_MSG_REPLY;
  if (!epNetRegionAt(c, h->from, h->fromOffset, h->bytes)) return wrong(c, peer, h, why);
  return epNetEnqueue(&c->peers[peer], &reply, why);
}

/* A message is complete. */
static int take(ep_net_comm_t *c, int peer, char *why) {
  ep_net_peer_t *p = &c->peers[peer];
  const ep_net_header_t *h = &p->header;
  p->headerGot = p->payloadGot = 0;
  switch (h->kind) {
  case EP_NET_MSG_DATA:
    return enqueueAck(p, why);
  case EP_NET_MSG_ACK:
    p->dataAcked = h->value;
    return 0;
  case EP_NET_MSG_SIGNAL:
    return epNetSignalAdd(c, h->region, h->offset, h->value, why);
  case EP_NET_MSG_GET:
    return answer(c, peer, h, why);
  case EP_NET_MSG_REPLY:
    p->getsAnswered++;
    return 0;
  default:
    return wrong(c, peer, h, why);
  }
}

/* Copies a full stage, or the last part, into a GPU. */
static int emptyStage(ep_net_comm_t *c, int peer, char *to, char *why) {
  ep_net_stage_t *s = &c->peers[peer].receiving;
  s->copying = true;
  uint64_t bytes = s->filled;
  s->filled = 0;
  return epNetCudaCopy(c->cuda, epNetReceiveStream(peer), (uint64_t)(uintptr_t)to,
                       (uint64_t)(uintptr_t)s->memory, bytes, &s->ticket, why);
}

static int receiveToGpu(ep_net_comm_t *c, int peer, const ep_net_region_t *r, char *why) {
  ep_net_peer_t *p = &c->peers[peer];
  ep_net_stage_t *s = &p->receiving;
  uint64_t left = p->header.bytes - p->payloadGot;
  if (pin(c, s, why)) return -1;
  if (!copied(c, epNetReceiveStream(peer), s)) return 0;
  uint64_t got =
      receiveBytes(c, peer, s->memory + s->filled, least(left, EP_NET_STAGE_BYTES - s->filled));
  s->filled += got;
  p->payloadGot += got;
  bool full = s->filled == EP_NET_STAGE_BYTES || p->payloadGot == p->header.bytes;
  char *to = epNetAddress(r, p->header.offset + p->payloadGot - s->filled);
  if (got && full && emptyStage(c, peer, to, why)) return -1;
  return got > 0;
}

static int receivePayload(ep_net_comm_t *c, int peer, char *why) {
  ep_net_peer_t *p = &c->peers[peer];
  const ep_net_header_t *h = &p->header;
  const ep_net_region_t *r = epNetRegionAt(c, h->region, h->offset, h->bytes);
  if (!r) return wrong(c, peer, h, why);
  if (r->memory.device) return receiveToGpu(c, peer, r, why);
  uint64_t got =
      receiveBytes(c, peer, epNetAddress(r, h->offset + p->payloadGot), h->bytes - p->payloadGot);
  p->payloadGot += got;
  return got > 0;
}

static int receiveHeader(ep_net_comm_t *c, int peer) {
  ep_net_peer_t *p = &c->peers[peer];
  uint64_t got =
      receiveBytes(c, peer, (char *)&p->header + p->headerGot, sizeof p->header - p->headerGot);
  p->headerGot += got;
  return got > 0;
}

/* 1: the message is complete, payload in place, 0: not yet. */
static bool wholeMessageHere(ep_net_comm_t *c, int peer) {
  ep_net_peer_t *p = &c->peers[peer];
  if (p->headerGot < sizeof p->header) return false;
  if (!carriesPayload(&p->header)) return true;
  return p->payloadGot == p->header.bytes && copied(c, epNetReceiveStream(peer), &p->receiving);
}

static int receiveSome(ep_net_comm_t *c, int peer, char *why) {
  ep_net_peer_t *p = &c->peers[peer];
  for (int turn = 0; turn < 64; turn++) {
    if (wholeMessageHere(c, peer)) {
      if (take(c, peer, why)) return -1;
      continue;
    }
    if (p->headerGot == sizeof p->header && p->payloadGot == p->header.bytes)
      return 0; /* into the GPU */
    if (p->gone) return 0;
    int got =
        p->headerGot < sizeof p->header ? receiveHeader(c, peer) : receivePayload(c, peer, why);
    if (got <= 0) return got;
  }
  return 0;
}

int epNetStreamProgress(ep_net_comm_t *c, int peer, char *why) {
  if (receiveSome(c, peer, why)) return -1;
  return sendSome(c, peer, why);
}
