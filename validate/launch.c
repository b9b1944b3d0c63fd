/* Rank 0 listens, the others connect and say who they are; then every exchange is a gather at rank 0
 * and the whole table back. Few bytes, few ranks: nothing cleverer is needed. */
#include "validate/launch.h"

#include "plan/error.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { MEET_SECONDS = 60 };

/* ---- What the environment says ---- */

/* 1: the variable is there and a number. */
static int number(const char *name, int *value) {
  const char *text = getenv(name);
  char *end;
  if (!text || !*text) return 0;
  long n = strtol(text, &end, 10);
  if (*end || n < 0 || n > 1 << 20) return 0;
  *value = (int)n;
  return 1;
}

static int firstNumber(const char *const *names, int *value) {
  for (; *names; names++)
    if (number(*names, value)) return 1;
  return 0;
}

trefoil_result_t epLaunchFind(ep_launch_t *launch) {
  static const char *const ranks[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", NULL};
  static const char *const sizes[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", NULL};
  static const char *const localRanks[] = {"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
                                           "LOCAL_RANK", "SLURM_LOCALID", NULL};
  static const char *const localSizes[] = {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS",
                                           "LOCAL_WORLD_SIZE", NULL};
  ep_launch_t l = {.numRanks = 1, .numLocal = 1};
  int hasMpi = firstNumber(ranks, &l.rank) && firstNumber(sizes, &l.numRanks);
  if (!hasMpi) {
    const char *rank = getenv("RANK"), *size = getenv("WORLD_SIZE");
    EP_CHECK(!rank == !size, TREFOIL_INVALID_ARGUMENT,
             "%s is set and %s is not: a launcher sets both", rank ? "RANK" : "WORLD_SIZE",
             rank ? "WORLD_SIZE" : "RANK");
    EP_CHECK(!rank || (number("RANK", &l.rank) && number("WORLD_SIZE", &l.numRanks)),
             TREFOIL_INVALID_ARGUMENT, "RANK=%s, WORLD_SIZE=%s: expected whole numbers", rank,
             size);
  }
  EP_CHECK(l.numRanks >= 1 && l.numRanks <= EP_LAUNCH_MAX_RANKS && l.rank < l.numRanks,
           TREFOIL_INVALID_ARGUMENT,
           "rank %d of %d processes: expected a rank below their number, "
           "and at most %d",
           l.rank, l.numRanks, EP_LAUNCH_MAX_RANKS);
  l.localRank = l.rank;
  l.numLocal = hasMpi || !getenv("MASTER_ADDR") ? l.numRanks : 0;
  firstNumber(localRanks, &l.localRank);
  firstNumber(localSizes, &l.numLocal);
  *launch = l;
  return TREFOIL_OK;
}

/* ---- Where they meet ---- */

typedef struct place {
  struct sockaddr_storage address;
  socklen_t bytes;
} place_t;

/* A name without a file, that the launch's processes share and no other launch has. */
static void localPlace(place_t *p) {
  static const char *const names[] = {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID",
                                      "TORCHELASTIC_RUN_ID", NULL};
  const char *job = NULL, *port = getenv("MASTER_PORT");
  for (int i = 0; names[i] && !job; i++) job = getenv(names[i]);
  struct sockaddr_un a = {.sun_family = AF_UNIX};
  int n = snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "trefoil-%ld-%.40s-%.8s", (long)getuid(),
                   job ? job : "", port ? port : "");
  if (!job && !port) /* started by one shell or script */
    n = snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "trefoil-%ld-parent-%ld", (long)getuid(),
                 (long)getppid());
  memset(p, 0, sizeof *p);
  memcpy(&p->address, &a, sizeof a);
  p->bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

static trefoil_result_t remotePlace(place_t *p) {
  const char *host = getenv("MASTER_ADDR");
  int port = 0;
  EP_CHECK(host && *host && number("MASTER_PORT", &port) && port > 0 && port < 65535,
           TREFOIL_INVALID_ARGUMENT,
           "the processes are on several hosts: MASTER_ADDR and MASTER_PORT must say where rank 0 "
           "is (mpirun -x MASTER_ADDR=... -x MASTER_PORT=...)");
  char service[16];
  snprintf(service, sizeof service, "%d", port + 1);
  struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found = NULL;
  int rc = getaddrinfo(host, service, &hints, &found);
  EP_CHECK(rc == 0, TREFOIL_SYSTEM_ERROR, "MASTER_ADDR=%s: %s", host, gai_strerror(rc));
  memset(p, 0, sizeof *p);
  memcpy(&p->address, found->ai_addr, found->ai_addrlen);
  p->bytes = found->ai_addrlen;
  freeaddrinfo(found);
  return TREFOIL_OK;
}

/* ---- Bytes ---- */

static int moveAll(int socket, void *data, size_t bytes, int out) {
  char *p = data;
  while (bytes > 0) {
    ssize_t n = out ? send(socket, p, bytes, MSG_NOSIGNAL) : recv(socket, p, bytes, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return 0;
    p += n;
    bytes -= (size_t)n;
  }
  return 1;
}

static double nowSeconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static trefoil_result_t acceptAll(ep_launch_t *l, int listener) {
  double end = nowSeconds() + MEET_SECONDS;
  for (int left = l->numRanks - 1; left > 0;) {
    struct pollfd ready = {.fd = listener, .events = POLLIN};
    int ms = (int)((end - nowSeconds()) * 1e3), rank = -1;
    if (ms <= 0 || poll(&ready, 1, ms) <= 0) {
      for (int r = 1; r < l->numRanks; r++)
        EP_CHECK(l->sockets[r] >= 0, TREFOIL_REMOTE_ERROR,
                 "rank %d did not come within %d s of the start", r, MEET_SECONDS);
    }
    int s = accept(listener, NULL, NULL);
    if (s < 0) continue;
    if (moveAll(s, &rank, sizeof rank, 0) && rank > 0 && rank < l->numRanks &&
        l->sockets[rank] < 0) {
      l->sockets[rank] = s;
      left--;
    } else {
      close(s);
    }
  }
  return TREFOIL_OK;
}

static trefoil_result_t connectOne(ep_launch_t *l, const place_t *p) {
  double end = nowSeconds() + MEET_SECONDS;
  struct timespec pause = {0, 20000000};
  for (;;) {
    int s = socket(p->address.ss_family, SOCK_STREAM, 0);
    if (s >= 0 && connect(s, (const struct sockaddr *)&p->address, p->bytes) == 0 &&
        moveAll(s, &l->rank, sizeof l->rank, 1)) {
      l->sockets[0] = s;
      return TREFOIL_OK;
    }
    if (s >= 0) close(s);
    EP_CHECK(nowSeconds() < end, TREFOIL_REMOTE_ERROR,
             "rank 0 could not be reached within %d s of the start", MEET_SECONDS);
    nanosleep(&pause, NULL);
  }
}

trefoil_result_t epLaunchOpen(ep_launch_t *l) {
  place_t place;
  for (int r = 0; r < EP_LAUNCH_MAX_RANKS; r++) l->sockets[r] = -1;
  if (l->numLocal == l->numRanks)
    localPlace(&place);
  else
    EP_TRY(remotePlace(&place));
  l->isOpen = 1;
  if (l->rank > 0) return connectOne(l, &place);
  int listener = socket(place.address.ss_family, SOCK_STREAM, 0), yes = 1;
  if (listener >= 0) setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  int ok = listener >= 0 &&
           bind(listener, (const struct sockaddr *)&place.address, place.bytes) == 0 &&
           listen(listener, EP_LAUNCH_MAX_RANKS) == 0;
  trefoil_result_t rc =
      ok ? acceptAll(l, listener)
         : epFail(TREFOIL_SYSTEM_ERROR, "rank 0 cannot wait for the others: %s", strerror(errno));
  if (listener >= 0) close(listener);
  return rc;
}

trefoil_result_t epLaunchGather(ep_launch_t *l, const void *mine, void *all, size_t bytes) {
  char *table = all;
  memcpy(table + (size_t)l->rank * bytes, mine, bytes);
  if (l->rank > 0) {
    EP_CHECK(moveAll(l->sockets[0], table + (size_t)l->rank * bytes, bytes, 1) &&
                 moveAll(l->sockets[0], table, bytes * (size_t)l->numRanks, 0),
             TREFOIL_REMOTE_ERROR, "rank 0's process has ended, or a process it waits for");
    return TREFOIL_OK;
  }
  for (int r = 1; r < l->numRanks; r++)
    EP_CHECK(moveAll(l->sockets[r], table + (size_t)r * bytes, bytes, 0), TREFOIL_REMOTE_ERROR,
             "the process of rank %d has ended", r);
  for (int r = 1; r < l->numRanks; r++)
    EP_CHECK(moveAll(l->sockets[r], table, bytes * (size_t)l->numRanks, 1), TREFOIL_REMOTE_ERROR,
             "the process of rank %d has ended", r);
  return TREFOIL_OK;
}

void epLaunchClose(ep_launch_t *l) {
  for (int r = 0; l->isOpen && r < EP_LAUNCH_MAX_RANKS; r++)
    if (l->sockets[r] >= 0) close(l->sockets[r]);
  l->isOpen = 0;
}
