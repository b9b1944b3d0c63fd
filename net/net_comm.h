/* A communicator of the network: ranks that have met, their regions of memory, and the engine that carries
 * requests between them. Any thread may call, several at once; a failure is kept, and all later calls
 * fail with its sentence. Each function returns 0, or -1 and why (EP_NET_WHY characters). */
#ifndef TREFOIL_NET_COMM_H
#define TREFOIL_NET_COMM_H

#include "net_engine.h"
#include "net_rendezvous.h"

typedef struct ep_net_comm ep_net_comm_t;
typedef struct ep_net_region ep_net_region_t;

/* Collective. */
int epNetConnect(const ep_net_settings_t *settings, ep_net_listener_t *listener,
                 void *const *handles, int numRanks, int rank, ep_net_comm_t **out, char *why);
/* Sends what is on its way, and waits a second at most for the peers to close, too. */
void epNetClose(ep_net_comm_t *comm);

typedef struct {
  void *address;
  uint64_t bytes;
  bool device;     /* memory of a GPU */
  bool neverReset; /* signals in it are written by the network alone */
} ep_net_memory_t;
/* Collective: all ranks register in one order, and a region is what the others registered with it. */
int epNetRegister(ep_net_comm_t *comm, const ep_net_memory_t *memory, ep_net_region_t **out,
                  char *why);
void epNetDeregister(ep_net_comm_t *comm, ep_net_region_t *region);

int epNetContexts(ep_net_comm_t *comm, int count, int *first, char *why);
void epNetForget(ep_net_comm_t *comm, int first, int count);

/* An operation on regions (NULL where there is none); its region numbers are filled in. */
typedef struct {
  ep_net_op_t op;
  const ep_net_region_t *local, *remote, *signal;
} ep_net_post_t;
int epNetPost(ep_net_comm_t *comm, int context, const ep_net_post_t *post, ep_net_request_t **out,
              char *why);
int epNetTest(ep_net_comm_t *comm, ep_net_request_t *request, bool *done, char *why);
/* Returns at once if another thread is at it. */
int epNetProgress(ep_net_comm_t *comm, char *why);
bool epNetFailed(ep_net_comm_t *comm);

#endif
