/* When a message moves and when its signal is raised: the order of GIN, and the faults of a network.
 *
 * A request belongs to a context and a peer. Its data begin to move at one time and are due at another,
 * both computed when it is posted (rails, bandwidth, latency, jitter, reordering; random numbers
 * depend on seed, rank, context, peer and the request's number only, so a run can be repeated). The
 * engine starts data through a link and asks it how far they are:
 *   - a weak signal is raised when its own data are in place and due;
 *   - a strong one when, besides, all earlier requests of its context to that peer are;
 *   - a flush is done when all earlier requests of its context to that peer are.
 * Puts and gets are not ordered among themselves.
 *
 * The engine knows neither memory nor clocks: the caller says what time it is. One thread at a time. */
#ifndef TREFOIL_NET_ENGINE_H
#define TREFOIL_NET_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

#include "net_settings.h"

enum { EP_NET_DEPTH = 512 }; /* requests per context and peer */

typedef enum { EP_NET_PUT = 0, EP_NET_GET = 1, EP_NET_FLUSH = 2 } ep_net_kind_t;

typedef struct {
  ep_net_kind_t kind;
  int peer;
  uint32_t local, remote; /* regions */
  uint64_t localOffset, remoteOffset, bytes;
  bool hasSignal, strong;
  uint32_t signalRegion;
  uint64_t signalOffset, add;
} ep_net_op_t;

/* How far data are. ORDERED: a signal that is raised now is seen after them. */
typedef enum { EP_NET_MOVING = 0, EP_NET_ORDERED = 1, EP_NET_PLACED = 2 } ep_net_reach_t;

typedef struct {
  void *self;
  /* Begins to move the data of an operation. 1 begun, 0 no room now, -1 and why. */
  int (*move)(void *self, const ep_net_op_t *op, uint64_t *ticket, char *why);
  ep_net_reach_t (*reach)(void *self, const ep_net_op_t *op, uint64_t ticket);
  /* Adds to the peer's signal. 1 on its way, 0 no room now, -1 and why. */
  int (*raise)(void *self, const ep_net_op_t *op, char *why);
} ep_net_link_t;

typedef struct ep_net_engine ep_net_engine_t;
typedef struct ep_net_request ep_net_request_t;

/* 0, or -1 and why. */
int epNetEngineCreate(const ep_net_settings_t *settings, ep_net_link_t link, int rank, int numRanks,
                      ep_net_engine_t **out, char *why);
void epNetEngineDestroy(ep_net_engine_t *engine);

/* Adds contexts; *first is the number of the first one. Numbers are not used again. */
int epNetEngineContexts(ep_net_engine_t *engine, int count, int *first, char *why);
/* What these contexts still have outstanding is forgotten. */
void epNetEngineForget(ep_net_engine_t *engine, int first, int count);

int epNetEnginePost(ep_net_engine_t *engine, int context, const ep_net_op_t *op, int64_t now,
                    ep_net_request_t **out, char *why);
/* Done once, then the request is no more. */
bool epNetEngineTest(ep_net_request_t *request);
/* Goes on with all contexts. 0, or -1 and why: after that nothing moves any more. */
int epNetEngineProgress(ep_net_engine_t *engine, int64_t now, char *why);
/* The peer is gone: what goes to it fails, or is dropped (TREFOIL_NET_ON_DEAD). */
void epNetEngineGone(ep_net_engine_t *engine, int peer);

#endif
