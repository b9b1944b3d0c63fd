/* What the environment says about the network: TREFOIL_NET_*, described in docs/net.md. */
#ifndef TREFOIL_NET_SETTINGS_H
#define TREFOIL_NET_SETTINGS_H

#include <stdint.h>

enum { EP_NET_WHY = 256, EP_NET_MAX_RAILS = 16 };

typedef enum { EP_NET_COPY = 0, EP_NET_TCP = 1 } ep_net_carrier_t;
typedef enum { EP_NET_DEAD_ERROR = 0, EP_NET_DEAD_DROP = 1 } ep_net_on_dead_t;

/* Times in ns. A chance of 1,000,000 is certainty. */
typedef struct {
  int64_t carrier, onDead; /* ep_net_carrier_t, ep_net_on_dead_t */
  int64_t limitNs;         /* of every wait, and of every request */
  int64_t mbps;            /* of all rails together, Mb/s; 0: not limited */
  int64_t latencyNs, jitterNs;
  int64_t reorder; /* chance of a message, per million */
  int64_t reorderNs;
  int64_t inFlight; /* messages a rank; 0: not limited */
  int64_t rails;
  int64_t slowRail, slowFactor;  /* slowRail -1: none */
  int64_t failingRail, failures; /* failingRail -1: none; chance of a message, per million */
  int64_t retryNs;
  int64_t deadRank, deadAfter; /* deadRank -1: none; after so many messages to it */
  int64_t seed;
  char address[64]; /* of the TCP carrier; "": the first interface that is up */
} ep_net_settings_t;

/* Records the sentence (at most EP_NET_WHY - 1 characters) and returns -1. */
int epNetFail(char *why, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Reads them by `get` (getenv). 0, or -1 and why. */
int epNetSettings(char *(*get)(const char *), ep_net_settings_t *out, char *why);

#endif
