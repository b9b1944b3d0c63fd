/* How ranks find each other: a listener's handle goes to all ranks, which then join every pair of them by two
 * sockets. Unix sockets for the copy carrier (descriptors of memory go over them), TCP for the other one.
 * A handle holds a secret: a process that does not know it is not let in. */
#ifndef TREFOIL_NET_RENDEZVOUS_H
#define TREFOIL_NET_RENDEZVOUS_H

#include <stddef.h>
#include <stdint.h>

#include "net_settings.h"

enum { EP_NET_HANDLE_BYTES = 128 };
enum { EP_NET_CONTROL = 0, EP_NET_DATA = 1 }; /* purposes of a connection */

typedef struct ep_net_listener ep_net_listener_t;

/* Of a pair of ranks: control is for registration alone, data for everything in progress. */
typedef struct {
  int control, data;
} ep_net_ends_t;

int64_t epNetNow(void); /* monotonic, ns */

/* Each returns 0, or -1 and why. */
int epNetListen(const ep_net_settings_t *settings, void *handle, ep_net_listener_t **out,
                char *why);
void epNetListenClose(ep_net_listener_t *listener);
/* ends[numRanks]; those of `rank` itself are -1. Non-blocking sockets. */
int epNetRendezvous(ep_net_listener_t *listener, void *const *handles, int numRanks, int rank,
                    int64_t limitNs, ep_net_ends_t *ends, char *why);
/* One connection to the listener of a handle, that of rank `owner`: a control socket, non-blocking. */
int epNetDial(const void *handle, int owner, int rank, int64_t deadline, int *socket, char *why);
/* Takes a connection: 1; 0 if it was none of ours; -1 if none came until the deadline. The rank is what the
 * other side says: any number. */
int epNetAccept(ep_net_listener_t *listener, int64_t deadline, int *rank, int *purpose, int *socket,
                char *why);
void epNetEndsClose(ep_net_ends_t *ends, int numRanks);

/* A record over a control socket, with a descriptor (-1: none). */
int epNetSendRecord(int socket, const void *data, size_t bytes, int descriptor, int64_t deadline,
                    char *why);
int epNetReceiveRecord(int socket, void *data, size_t bytes, int *descriptor, int64_t deadline,
                       char *why);

#endif
