#include "net_rendezvous.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define MAGIC 0x6c69666f65727401ull
enum { SECRET_BYTES = 16, ADDRESS_BYTES = 64 };

typedef struct {
  uint64_t magic;
  uint32_t length, reserved;
  unsigned char address[ADDRESS_BYTES]; /* a sockaddr */
  unsigned char secret[SECRET_BYTES];
} handle_t;
_Static_assert(sizeof(handle_t) <= EP_NET_HANDLE_BYTES, "NCCL's handles have this size");

/* The first record of a connection. */
typedef struct {
  unsigned char secret[SECRET_BYTES];
  int32_t rank, purpose;
} handshake_t;

struct ep_net_listener {
  int socket;
  handle_t handle;
};

int64_t epNetNow(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* ---- Records ---- */

/* Waits until the socket is ready. */
static int ready(int socket, short events, int64_t deadline, char *why) {
  struct pollfd p = {socket, events, 0};
  int64_t left = deadline - epNetNow();
  if (left <= 0 || poll(&p, 1, (int)(left / 1000000) + 1) == 0)
    return epNetFail(why, "a rank did not answer in time, while connections or memory were set up");
  return 0;
}

static int broken(int error, char *why) {
  return epNetFail(why, "a connection ended while connections or memory were set up: %s",
                   strerror(error));
}

/* Whether to try again. */
static bool again(void) {
  return errno == EAGAIN || errno == EINTR;
}

static void attach(struct msghdr *message, void *room, int descriptor) {
  message->msg_control = room;
  message->msg_controllen = CMSG_SPACE(sizeof(int));
  struct cmsghdr *c = CMSG_FIRSTHDR(message);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(sizeof(int));
  memcpy(CMSG_DATA(c), &descriptor, sizeof descriptor);
}

int epNetSendRecord(int socket, const void *data, size_t bytes, int descriptor, int64_t deadline,
                    char *why) {
  for (size_t sent = 0; sent < bytes;) {
    _Alignas(struct cmsghdr) char room[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec part = {(char *)(uintptr_t)data + sent, bytes - sent};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (descriptor >= 0 && !sent) attach(&message, room, descriptor);
    ssize_t n = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0)
      sent += (size_t)n;
    else if (!again())
      return broken(errno, why);
    else if (ready(socket, POLLOUT, deadline, why))
      return -1;
  }
  return 0;
}

static void detach(struct msghdr *message, int *descriptor) {
  struct cmsghdr *c = CMSG_FIRSTHDR(message);
  if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
    memcpy(descriptor, CMSG_DATA(c), sizeof *descriptor);
}

int epNetReceiveRecord(int socket, void *data, size_t bytes, int *descriptor, int64_t deadline,
                       char *why) {
  *descriptor = -1;
  for (size_t got = 0; got < bytes;) {
    _Alignas(struct cmsghdr) char room[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec part = {(char *)data + got, bytes - got};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    message.msg_control = room;
    message.msg_controllen = sizeof room;
    ssize_t n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (n > 0) detach(&message, descriptor);
    if (n > 0)
      got += (size_t)n;
    else if (n == 0 || !again())
      return broken(n == 0 ? ECONNRESET : errno, why);
    else if (ready(socket, POLLIN, deadline, why))
      return -1;
  }
  return 0;
}

/* ---- Listening ---- */

/* NCCL_SOCKET_IFNAME as NCCL reads it: prefixes, "=" before them: whole names, "^": all but these. */
static bool isWanted(const char *name) {
  const char *list = getenv("NCCL_SOCKET_IFNAME");
  if (!list || !*list) return strncmp(name, "docker", 6) != 0;
  bool unwanted = *list == '^', found = false;
  list += unwanted;
  bool whole = *list == '=';
  list += whole;
  for (size_t n; *list && !found; list += n + (list[n] == ',')) {
    n = strcspn(list, ",");
    found = n && !strncmp(name, list, n) && (!whole || !name[n]);
  }
  return found != unwanted;
}

/* The address of an interface that other machines may reach; loopback if there is none. */
static struct in_addr anyAddress(void) {
  struct in_addr found = {htonl(INADDR_LOOPBACK)};
  struct ifaddrs *all = NULL;
  if (getifaddrs(&all)) return found;
  for (struct ifaddrs *i = all; i; i = i->ifa_next) {
    unsigned usable = i->ifa_flags & (IFF_UP | IFF_LOOPBACK);
    if (!i->ifa_addr || i->ifa_addr->sa_family != AF_INET || usable != IFF_UP) continue;
    if (!isWanted(i->ifa_name)) continue;
    found = ((struct sockaddr_in *)(void *)i->ifa_addr)->sin_addr;
    break;
  }
  freeifaddrs(all);
  return found;
}

static int tcpAddress(const ep_net_settings_t *s, handle_t *h, char *why) {
  struct sockaddr_in a = {.sin_family = AF_INET};
  if (!s->address[0])
    a.sin_addr = anyAddress();
  else if (inet_pton(AF_INET, s->address, &a.sin_addr) != 1)
    return epNetFail(why, "TREFOIL_NET_ADDRESS is '%s'; must be an IPv4 address of this machine",
                     s->address);
  h->length = sizeof a;
  memcpy(h->address, &a, sizeof a);
  return 0;
}

static int unixAddress(handle_t *h, char *why) {
  struct sockaddr_un a = {.sun_family = AF_UNIX};
  uint64_t name;
  if (getrandom(&name, sizeof name, 0) != sizeof name)
    return epNetFail(why, "the system gives no random numbers");
  int n = snprintf(a.sun_path + 1, 40, "trefoil-net-%016llx", (unsigned long long)name);
  h->length = (uint32_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
  memcpy(h->address, &a, h->length);
  return 0;
}

static int makeHandle(const ep_net_settings_t *s, handle_t *h, char *why) {
  *h = (handle_t){.magic = MAGIC};
  if (getrandom(h->secret, SECRET_BYTES, 0) != SECRET_BYTES)
    return epNetFail(why, "the system gives no random numbers");
  return s->carrier == EP_NET_TCP ? tcpAddress(s, h, why) : unixAddress(h, why);
}

static int family(const handle_t *h) {
  struct sockaddr a;
  memcpy(&a, h->address, sizeof a);
  return a.sa_family;
}

static int newSocket(const handle_t *h, struct sockaddr_storage *address) {
  memset(address, 0, sizeof *address);
  memcpy(address, h->address, h->length);
  return socket(address->ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

/* Binds the socket and writes down the port that it got. */
static int bindHandle(int socket, struct sockaddr_storage *address, handle_t *h) {
  socklen_t length = h->length;
  if (bind(socket, (struct sockaddr *)address, length) || listen(socket, 4096)) return -1;
  if (address->ss_family == AF_UNIX) return 0;
  if (getsockname(socket, (struct sockaddr *)address, &length)) return -1;
  memcpy(h->address, address, h->length);
  return 0;
}

int epNetListen(const ep_net_settings_t *settings, void *handle, ep_net_listener_t **out,
                char *why) {
  struct sockaddr_storage address;
  handle_t h;
  if (makeHandle(settings, &h, why)) return -1;
  ep_net_listener_t *l = calloc(1, sizeof *l);
  if (!l) return epNetFail(why, "no memory for a listener of the network");
  l->socket = newSocket(&h, &address);
  if (l->socket < 0 || bindHandle(l->socket, &address, &h)) {
    epNetFail(why, "no socket to listen on: %s", strerror(errno));
    epNetListenClose(l);
    return -1;
  }
  l->handle = h;
  memset(handle, 0, EP_NET_HANDLE_BYTES);
  memcpy(handle, &h, sizeof h);
  *out = l;
  return 0;
}

void epNetListenClose(ep_net_listener_t *l) {
  if (l->socket >= 0) close(l->socket);
  free(l);
}

/* ---- Rendezvous ---- */

static void setNoDelay(int socket) {
  int on = 1; /* fails on Unix sockets, which do not wait anyhow */
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

static int connected(int socket, char *why) {
  int error = 0;
  socklen_t length = sizeof error;
  if (!getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &length) && !error) return 0;
  return epNetFail(why, "a rank's listener cannot be reached: %s", strerror(error));
}

/* Connects; a Unix listener whose queue is full says EAGAIN. */
static int reachOut(int socket, const struct sockaddr_storage *a, uint32_t length, int64_t limit,
                    char *why) {
  while (connect(socket, (const struct sockaddr *)a, length)) {
    if (errno == EINPROGRESS)
      return ready(socket, POLLOUT, limit, why) ? -1 : connected(socket, why);
    if (errno != EAGAIN && errno != EINTR)
      return epNetFail(why, "a rank's listener cannot be reached: %s", strerror(errno));
    if (epNetNow() > limit) return ready(socket, POLLOUT, limit, why);
    nanosleep(&(struct timespec){0, 1000000}, NULL);
  }
  return 0;
}

static int dial(const handle_t *to, int rank, int purpose, int64_t deadline, int *out, char *why) {
  struct sockaddr_storage address;
  handshake_t handshake = {.rank = rank, .purpose = purpose};
  memcpy(handshake.secret, to->secret, SECRET_BYTES);
  *out = newSocket(to, &address);
  if (*out < 0) return epNetFail(why, "no socket to connect with: %s", strerror(errno));
  setNoDelay(*out);
  if (reachOut(*out, &address, to->length, deadline, why)) return -1;
  return epNetSendRecord(*out, &handshake, sizeof handshake, -1, deadline, why);
}

static int dialBoth(const handle_t *to, int rank, int64_t deadline, ep_net_ends_t *ends,
                    char *why) {
  if (dial(to, rank, EP_NET_CONTROL, deadline, &ends->control, why)) return -1;
  return dial(to, rank, EP_NET_DATA, deadline, &ends->data, why);
}

static int parseHandle(const void *from, int rank, handle_t *h, char *why) {
  memcpy(h, from, sizeof *h);
  if (h->magic == MAGIC && h->length <= ADDRESS_BYTES) return 0;
  return epNetFail(why, "the handle of rank %d is none of this network", rank);
}

int epNetDial(const void *handle, int owner, int rank, int64_t deadline, int *out, char *why) {
  handle_t h;
  *out = -1;
  if (parseHandle(handle, owner, &h, why)) return -1;
  if (!dial(&h, rank, EP_NET_CONTROL, deadline, out, why)) return 0;
  if (*out >= 0) close(*out);
  *out = -1;
  return -1;
}

int epNetAccept(ep_net_listener_t *l, int64_t deadline, int *rank, int *purpose, int *out,
                char *why) {
  handshake_t handshake;
  char ignored[EP_NET_WHY];
  int none;
  if (ready(l->socket, POLLIN, deadline, why)) return -1;
  int socket = accept4(l->socket, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (socket < 0) return 0;
  int64_t soon = epNetNow() + 2000000000; /* whatever is left: a stranger may say nothing */
  bool said = !epNetReceiveRecord(socket, &handshake, sizeof handshake, &none, soon, ignored);
  if (none >= 0) close(none);
  if (!said || memcmp(handshake.secret, l->handle.secret, SECRET_BYTES)) {
    close(socket);
    return 0;
  }
  setNoDelay(socket);
  *rank = handshake.rank;
  *purpose = handshake.purpose;
  *out = socket;
  return 1;
}

/* Takes one connection; 1 if it belongs to these ends. */
static int takeOne(ep_net_listener_t *l, int rank, int numRanks, int64_t deadline,
                   ep_net_ends_t *ends, char *why) {
  int from, purpose, socket, taken = epNetAccept(l, deadline, &from, &purpose, &socket, why);
  if (taken != 1) return taken;
  int *place = NULL;
  if (from > rank && from < numRanks)
    place = purpose == EP_NET_DATA ? &ends[from].data : &ends[from].control;
  if (place && *place < 0) {
    *place = socket;
    return 1;
  }
  close(socket);
  return 0;
}

static int readHandle(const ep_net_listener_t *l, const void *from, int rank, handle_t *h,
                      char *why) {
  if (parseHandle(from, rank, h, why)) return -1;
  if (family(h) == family(&l->handle)) return 0;
  return epNetFail(
      why, "rank %d has another carrier: TREFOIL_NET_CARRIER must be the same on all ranks", rank);
}

/* Of the ranks that connect to this one. */
static int failMissing(const ep_net_ends_t *ends, int rank, int numRanks, int64_t deadline,
                       char *why) {
  int r = rank + 1;
  while (r < numRanks && ends[r].control >= 0 && ends[r].data >= 0) r++;
  if (epNetNow() < deadline) return -1;
  return epNetFail(why,
                   "rank %d: rank %d did not connect within TREFOIL_NET_TIMEOUT_MS; its own log "
                   "says why",
                   rank, r);
}

static int failUnreached(int rank, int to, char *why) {
  char reason[EP_NET_WHY];
  memcpy(reason, why, sizeof reason);
  return epNetFail(why, "rank %d, to rank %d: %.200s", rank, to, reason);
}

static int connectAll(ep_net_listener_t *l, void *const *handles, int numRanks, int rank,
                      int64_t deadline, ep_net_ends_t *ends, char *why) {
  handle_t h;
  for (int r = 0; r < numRanks; r++)
    if (readHandle(l, handles[r], r, &h, why)) return -1;
  for (int r = 0; r < rank; r++) {
    memcpy(&h, handles[r], sizeof h);
    if (dialBoth(&h, rank, deadline, &ends[r], why)) return failUnreached(rank, r, why);
  }
  for (int missing = 2 * (numRanks - 1 - rank); missing;) {
    int taken = takeOne(l, rank, numRanks, deadline, ends, why);
    if (taken < 0) return failMissing(ends, rank, numRanks, deadline, why);
    missing -= taken;
  }
  return 0;
}

void epNetEndsClose(ep_net_ends_t *ends, int numRanks) {
  for (int r = 0; r < numRanks; r++) {
    if (ends[r].control >= 0) close(ends[r].control);
    if (ends[r].data >= 0) close(ends[r].data);
  }
}

int epNetRendezvous(ep_net_listener_t *l, void *const *handles, int numRanks, int rank,
                    int64_t limitNs, ep_net_ends_t *ends, char *why) {
  for (int r = 0; r < numRanks; r++) ends[r] = (ep_net_ends_t){-1, -1};
  if (!connectAll(l, handles, numRanks, rank, epNetNow() + limitNs, ends, why)) return 0;
  epNetEndsClose(ends, numRanks);
  return -1;
}
