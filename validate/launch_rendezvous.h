/* The conversation in which the ranks of a launch find each other. Rank 0 waits at a place, the others
 * come to it:
 *
 *   rank -> 0   handshake: magic, rank, number of ranks, hash of the launch, a cookie
 *   0 -> rank   answer: verdict, a cookie of its own, proof of the launch over both cookies
 *   rank -> 0   proof over both cookies: the rank is admitted
 *   0 -> rank   the end: all are here, or why not
 *
 * A proof is a keyed hash; the key is what the launch's processes have in their environment, so it keeps
 * out processes that do not know that. Within a machine both also ask the kernel for the other's user,
 * rank 0 when a connection comes, the other before its proof. Connections that say nothing, or something
 * else, cost a place among the clients for some seconds and nothing more. Shared by launch_rendezvous.c,
 * launch_clients.c, launch_peer.c, launch_proof.c. */
#ifndef TREFOIL_VALIDATE_LAUNCH_RENDEZVOUS_H
#define TREFOIL_VALIDATE_LAUNCH_RENDEZVOUS_H

#include "validate/launch.h"

#include <stdint.h>
#include <sys/socket.h>

#define EP_LAUNCH_MAGIC "trefoil1"

typedef enum ep_launch_verdict {
  EP_LAUNCH_WELCOME = 1,
  EP_LAUNCH_SEATED,
  EP_LAUNCH_OTHER,      /* of another launch */
  EP_LAUNCH_OTHER_SIZE, /* of this one, with another number of ranks */
  EP_LAUNCH_TWICE,      /* a rank was claimed by two: two launches of one name */
  EP_LAUNCH_MISSING     /* a rank did not come: `about` */
} ep_launch_verdict_t;

typedef struct ep_launch_handshake {
  char magic[8];
  uint32_t rank, numRanks;
  uint64_t job, cookie;
} ep_launch_handshake_t;

typedef struct ep_launch_answer {
  char magic[8];
  uint32_t verdict, numRanks;
  uint64_t cookie, proof;
} ep_launch_answer_t;

typedef struct ep_launch_end {
  uint32_t verdict, about, numForeign, zero;
} ep_launch_end_t;

typedef struct ep_launch_place {
  struct sockaddr_storage address;
  socklen_t bytes;
  char name[160]; /* for sentences */
} ep_launch_place_t;

/* What came, or answered, and is not of this launch. */
typedef struct ep_launch_foreign {
  int count;
  char last[160]; /* ", the last of process 17 of user 1000", or "" */
} ep_launch_foreign_t;

/* ---- launch_peer.c ---- */
typedef enum ep_launch_peer {
  EP_LAUNCH_FOREIGN, /* of another user, or on this machine and not to be told */
  EP_LAUNCH_OURS,
  EP_LAUNCH_ELSEWHERE /* on another machine, or the kernel's table is hidden and there is a secret */
} ep_launch_peer_t;
/* Over TCP once the other side has accepted: before, the kernel has no user for it. */
ep_launch_peer_t epLaunchPeer(const ep_launch_t *l, int socket, ep_launch_foreign_t *whose);

/* ---- launch_proof.c ---- */
/* The launch's name as a number that can be shown. */
uint64_t epLaunchJobHash(const ep_launch_t *l);
/* What only a process of this launch can say; by: 0 rank 0's, 1 the other's. */
uint64_t epLaunchProof(const ep_launch_t *l, const ep_launch_handshake_t *h, uint64_t cookie,
                       uint32_t verdict, int by);
uint64_t epLaunchCookie(void);
/* How long one connection may take for handshake and proof. */
int epLaunchHandshakeSeconds(const ep_launch_t *l);
/* Counts one; whose: of epLaunchPeer. */
void epLaunchCountForeign(ep_launch_foreign_t *f, const ep_launch_foreign_t *whose);
/* "; 2 connections not of this launch were dropped", or "". */
const char *epLaunchForeignText(const ep_launch_foreign_t *f, char *text, size_t bytes);
trefoil_result_t epLaunchTwice(const ep_launch_t *l, const char *what);

/* ---- launch_clients.c ---- */
/* Rank 0: fills l->sockets, or says which rank is missing. */
trefoil_result_t epLaunchReceive(ep_launch_t *l, int listener, const ep_launch_foreign_t *foreign);

#endif
