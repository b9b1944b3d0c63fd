/* Shared by net_comm.c (life, posting), net_region.c, net_stream.c (messages) and net_signal.c. */
#ifndef TREFOIL_NET_COMM_INTERNAL_H
#define TREFOIL_NET_COMM_INTERNAL_H

#include <pthread.h>

#include "net_comm.h"
#include "net_cuda.h"

enum { EP_NET_STAGE_BYTES = 1 << 20, EP_NET_SIGNAL_BATCH = 128 };

/* Of one region, what a peer has. address 0: not mapped here, its data go over the socket. */
typedef struct {
  uint64_t bytes, address, base, span;
} ep_net_view_t;

struct ep_net_region {
  uint32_t id;
  ep_net_memory_t memory;
  ep_net_view_t *views; /* [rank] */
  uint64_t *shadow;     /* of signals that are never reset, on a GPU */
};

typedef enum {
  EP_NET_MSG_DATA = 1,   /* bytes for a region; answered by ACK */
  EP_NET_MSG_ACK = 2,    /* value: number of DATA messages that are in place */
  EP_NET_MSG_SIGNAL = 3, /* add value */
  EP_NET_MSG_GET = 4,    /* bytes of `from` are wanted; answered by REPLY, in order */
  EP_NET_MSG_REPLY = 5
} ep_net_msg_t;

typedef struct {
  uint32_t kind, region, from, reserved;
  uint64_t offset, fromOffset, bytes, value;
} ep_net_header_t;

/* A part of a payload that is in pinned memory, between a socket and a GPU. */
typedef struct {
  char *memory;
  uint64_t filled; /* bytes in it */
  bool copying;
  uint32_t ticket;
} ep_net_stage_t;

typedef struct {
  int socket;
  bool gone;
  ep_net_header_t *queue; /* to be sent: first .. first + count - 1, modulo room */
  size_t first, count, room;
  uint64_t headerSent, payloadSent;
  ep_net_stage_t sending;
  ep_net_header_t header; /* being received */
  uint64_t headerGot, payloadGot;
  ep_net_stage_t receiving;
  uint64_t dataSent, dataAcked, getsSent, getsAnswered, dataTaken;
} ep_net_peer_t;

typedef struct {
  uint64_t *shadow;
  uint64_t address, add;
} ep_net_pending_t;

/* Signals in memory of a GPU: they are read, then written. */
typedef struct {
  ep_net_pending_t *items;
  size_t count, room;
  size_t batch; /* items being read */
  uint64_t *values;
  uint32_t ticket;
} ep_net_signals_t;

struct ep_net_comm {
  int rank, numRanks;
  ep_net_settings_t settings;
  pthread_mutex_t lock;        /* of all below but the control sockets */
  pthread_mutex_t registering; /* of the control sockets: one registration at a time */
  ep_net_ends_t *ends;
  ep_net_peer_t *peers;
  ep_net_region_t **regions;
  uint32_t numRegions;
  ep_net_cuda_t *cuda; /* NULL until memory of a GPU is registered */
  ep_net_engine_t *engine;
  ep_net_signals_t signals;
  bool failed;
  char why[EP_NET_WHY];
};

/* Streams of the driver: 0 for signals, then one per peer to send by, and one to receive by. */
static inline int epNetSendStream(int peer) {
  return 1 + 2 * peer;
}
static inline int epNetReceiveStream(int peer) {
  return 2 + 2 * peer;
}

/* NULL if there is no such region, or not these bytes of it. */
ep_net_region_t *epNetRegionAt(ep_net_comm_t *c, uint32_t id, uint64_t offset, uint64_t bytes);
static inline char *epNetAddress(const ep_net_region_t *r, uint64_t offset) {
  return (char *)r->memory.address + offset;
}
void epNetRegionsFree(ep_net_comm_t *c);

int epNetSignalAdd(ep_net_comm_t *c, uint32_t region, uint64_t offset, uint64_t add, char *why);
int epNetSignalsProgress(ep_net_comm_t *c, char *why);
void epNetSignalsFree(ep_net_comm_t *c);

int epNetEnqueue(ep_net_peer_t *p, const ep_net_header_t *header, char *why);
int epNetStreamProgress(ep_net_comm_t *c, int peer, char *why);
void epNetStreamFree(ep_net_comm_t *c, int peer);

#endif
