/* Every exchange is a gather at rank 0 and the whole table back. Few bytes, few ranks: nothing cleverer is
 * needed. */
#include "validate/launch.h"

#include "plan/error.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int millisecondsTo(double end) {
  double ms = (end - epNow()) * 1e3;
  return ms <= 0 ? 0 : ms > 1e6 ? 1000000 : (int)ms + 1;
}

int epLaunchMove(int socket, void *data, size_t bytes, int out, double end) {
  char *p = data;
  while (bytes > 0) {
    ssize_t n = out ? send(socket, p, bytes, MSG_NOSIGNAL | MSG_DONTWAIT)
                    : recv(socket, p, bytes, MSG_DONTWAIT);
    if (n > 0) {
      p += n;
      bytes -= (size_t)n;
      continue;
    }
    if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) return 0;
    struct pollfd ready = {.fd = socket, .events = out ? POLLOUT : POLLIN};
    int ms = millisecondsTo(end);
    if (ms == 0) return -1;
    poll(&ready, 1, ms);
  }
  return 1;
}

/* Rank 0: one reading of every rank that has something, in any order; *left counts those still awaited. */
static trefoil_result_t readSome(ep_launch_t *l, char *table, size_t bytes, size_t *got, int *left,
                                 double end) {
  struct pollfd ready[EP_LAUNCH_MAX_RANKS];
  for (int r = 0; r < l->numRanks; r++)
    ready[r] =
        (struct pollfd){.fd = r > 0 && got[r] < bytes ? l->sockets[r] : -1, .events = POLLIN};
  int ms = millisecondsTo(end);
  if (ms > 0) poll(ready, (nfds_t)l->numRanks, ms);
  for (int r = 1; r < l->numRanks; r++) {
    if (got[r] == bytes) continue;
    ssize_t n =
        recv(l->sockets[r], table + (size_t)r * bytes + got[r], bytes - got[r], MSG_DONTWAIT);
    int isEnded = n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
    EP_CHECK(!isEnded, TREFOIL_REMOTE_ERROR, "the process of rank %d has ended", r);
    EP_CHECK(n > 0 || ms > 0, TREFOIL_REMOTE_ERROR,
             "the process of rank %d lives, but did not come to a barrier round of all ranks "
             "within %d s",
             r, l->gatherSeconds);
    if (n > 0) got[r] += (size_t)n;
    *left -= got[r] == bytes;
  }
  return TREFOIL_OK;
}

trefoil_result_t epLaunchGather(ep_launch_t *l, const void *mine, void *all, size_t bytes) {
  char *table = all;
  double end = epNow() + l->gatherSeconds;
  memcpy(table + (size_t)l->rank * bytes, mine, bytes);
  if (l->rank > 0) {
    int rc = epLaunchMove(l->sockets[0], table + (size_t)l->rank * bytes, bytes, 1, end);
    /* a little longer: rank 0 names the rank that is missing */
    if (rc > 0) rc = epLaunchMove(l->sockets[0], table, bytes * (size_t)l->numRanks, 0, end + 10);
    EP_CHECK(rc >= 0, TREFOIL_REMOTE_ERROR, "rank 0 gave no answer in a barrier round within %d s",
             l->gatherSeconds);
    EP_CHECK(rc > 0, TREFOIL_REMOTE_ERROR, "rank 0's process has ended, or a process it waits for");
    return TREFOIL_OK;
  }
  size_t got[EP_LAUNCH_MAX_RANKS] = {0};
  for (int left = bytes > 0 ? l->numRanks - 1 : 0; left > 0;)
    EP_TRY(readSome(l, table, bytes, got, &left, end));
  for (int r = 1; r < l->numRanks; r++)
    EP_CHECK(epLaunchMove(l->sockets[r], table, bytes * (size_t)l->numRanks, 1, end + 10) > 0,
             TREFOIL_REMOTE_ERROR, "the process of rank %d has ended", r);
  return TREFOIL_OK;
}

void epLaunchClose(ep_launch_t *l) {
  for (int r = 0; l->isOpen && r < EP_LAUNCH_MAX_RANKS; r++)
    if (l->sockets[r] >= 0) close(l->sockets[r]);
  l->isOpen = 0;
}
