/* Whose process is at the other end of a connection: the kernel's word. A local socket carries it
 * (SO_PEERCRED); of a TCP connection within this machine /proc/net/tcp names the user of each end. */
#include "validate/launch_rendezvous.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef struct end {
  uint32_t address[4]; /* as IPv6, IPv4 mapped; in network order */
  unsigned port;
} end_t;

static int endOf(const struct sockaddr *a, end_t *e) {
  *e = (end_t){{0}, 0};
  if (a->sa_family == AF_INET6) {
    const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)(const void *)a;
    memcpy(e->address, &in6->sin6_addr, sizeof e->address);
    e->port = ntohs(in6->sin6_port);
  } else if (a->sa_family == AF_INET) {
    const struct sockaddr_in *in = (const struct sockaddr_in *)(const void *)a;
    e->address[2] = htonl(0xffff);
    e->address[3] = in->sin_addr.s_addr;
    e->port = ntohs(in->sin_port);
  }
  return a->sa_family == AF_INET6 || a->sa_family == AF_INET;
}

static int isSameAddress(const end_t *a, const end_t *b) {
  return !memcmp(a->address, b->address, sizeof a->address);
}

static int isSameEnd(const end_t *a, const end_t *b) {
  return isSameAddress(a, b) && a->port == b->port;
}

/* Loopback, or an address of an interface of this machine. */
static int isHere(const end_t *e) {
  struct ifaddrs *all = NULL;
  end_t own;
  int isMapped = !e->address[0] && !e->address[1] && e->address[2] == htonl(0xffff);
  int is = isMapped && ntohl(e->address[3]) >> 24 == 127;
  if (getifaddrs(&all) != 0) return is;
  for (struct ifaddrs *i = all; i && !is; i = i->ifa_next)
    is = i->ifa_addr && endOf(i->ifa_addr, &own) && isSameAddress(&own, e);
  freeifaddrs(all);
  return is;
}

/* "0100007F:1F91" or 32 digits: an end as /proc/net has it, words as they lie in memory. */
static int readEnd(const char *text, end_t *e) {
  const char *colon = strchr(text, ':');
  *e = (end_t){{0}, 0};
  if (!colon || sscanf(colon + 1, "%x", &e->port) != 1) return 0;
  if (colon - text == 8) {
    e->address[2] = htonl(0xffff);
    return sscanf(text, "%8x", &e->address[3]) == 1;
  }
  return colon - text == 32 && sscanf(text, "%8x%8x%8x%8x", &e->address[0], &e->address[1],
                                      &e->address[2], &e->address[3]) == 4;
}

/* The user of the connection `from` -> `to` in that table, established or in any state; 0: not there. */
enum { ESTABLISHED = 1, ANY_STATE = 0 };
static int findIn(const char *table, const end_t *from, const end_t *to, unsigned wanted,
                  uid_t *user) {
  char line[512], local[64], remote[64];
  unsigned state, uid;
  int isFound = 0;
  end_t a, b;
  FILE *f = fopen(table, "re");
  while (f && !isFound && fgets(line, sizeof line, f)) {
    isFound = sscanf(line, " %*d: %63s %63s %x %*s %*s %*s %u", local, remote, &state, &uid) == 4 &&
              (wanted == ANY_STATE || state == wanted) && readEnd(local, &a) &&
              readEnd(remote, &b) && isSameEnd(&a, from) && isSameEnd(&b, to);
  }
  if (f) fclose(f);
  if (isFound) *user = uid;
  return isFound;
}

static int findUser(const end_t *from, const end_t *to, unsigned state, uid_t *user) {
  return findIn("/proc/net/tcp", from, to, state, user) ||
         findIn("/proc/net/tcp6", from, to, state, user);
}

/* A table that lacks our own end is not the kernel's: unreadable, or hidden by who made the container. */
static ep_launch_peer_t tcpPeer(const ep_launch_t *l, int socket, ep_launch_foreign_t *whose) {
  struct sockaddr_storage mine = {0}, theirs = {0};
  socklen_t mineBytes = sizeof mine, theirBytes = sizeof theirs;
  end_t here, there;
  uid_t user = 0;
  if (getsockname(socket, (struct sockaddr *)&mine, &mineBytes) != 0 ||
      getpeername(socket, (struct sockaddr *)&theirs, &theirBytes) != 0 ||
      !endOf((struct sockaddr *)&mine, &here) || !endOf((struct sockaddr *)&theirs, &there))
    return EP_LAUNCH_FOREIGN;
  if (findUser(&there, &here, ESTABLISHED, &user)) {
    snprintf(whose->last, sizeof whose->last, ", the last of user %u", user);
    return user == getuid() ? EP_LAUNCH_OURS : EP_LAUNCH_FOREIGN;
  }
  if (!isSameAddress(&here, &there) && !isHere(&there)) return EP_LAUNCH_ELSEWHERE;
  if (findUser(&here, &there, ANY_STATE, &user)) return EP_LAUNCH_FOREIGN; /* it has closed */
  if (l->hasSecret) return EP_LAUNCH_ELSEWHERE;
  snprintf(whose->last, sizeof whose->last,
           ", whose user /proc/net/tcp does not tell (it is hidden here): set "
           "TREFOIL_LAUNCH_SECRET on all ranks");
  return EP_LAUNCH_FOREIGN;
}

ep_launch_peer_t epLaunchPeer(const ep_launch_t *l, int socket, ep_launch_foreign_t *whose) {
  struct ucred peer = {0};
  struct sockaddr_storage a = {0};
  socklen_t bytes = sizeof a, peerBytes = sizeof peer;
  *whose = (ep_launch_foreign_t){0};
  if (getsockname(socket, (struct sockaddr *)&a, &bytes) != 0) return EP_LAUNCH_FOREIGN;
  if (a.ss_family != AF_UNIX) return tcpPeer(l, socket, whose);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &peerBytes) != 0) return EP_LAUNCH_FOREIGN;
  snprintf(whose->last, sizeof whose->last, ", the last of process %d of user %u", (int)peer.pid,
           peer.uid);
  return peer.uid == getuid() ? EP_LAUNCH_OURS : EP_LAUNCH_FOREIGN;
}
