/* Where the messages of low latency's relay lie. Pure, no CUDA. */
#include "kernels/ll/relay.h"
#include "kernels/ll/relay_control.h"

#include "plan/error.h"

#include <string.h>

_Static_assert(sizeof(ep_ll_relay_control_t) <= EP_LL_RELAY_CONTROL_BYTES, "control memory");

static size_t roundUp(size_t n, size_t to) {
  return (n + to - 1) / to * to;
}

static size_t records(size_t count, size_t bytes) {
  return 128 + count * roundUp(bytes, 128);
}

trefoil_result_t epLlRelayLayout(const ep_ll_config_t *c, int ranksPerDomain, int rails,
                                 ep_ll_relay_layout_t *out) {
  ep_ll_layout_t near;
  EP_TRY(epLlLayout(c, &near));
  EP_CHECK(out && ranksPerDomain >= 1 && ranksPerDomain < c->numRanks &&
               c->numRanks % ranksPerDomain == 0,
           TREFOIL_INVALID_ARGUMENT, "%d ranks do not form several domains of %d", c->numRanks,
           ranksPerDomain);
  size_t R = (size_t)c->numRanks, N = (size_t)c->maxTokens, K = (size_t)c->maxTopk;
  size_t L = ((size_t)c->numExperts + R - 1) / R;       /* a token's row once an expert */
  size_t words = (near.weights - near.routing) / 2 / R; /* of a source, rounded up */
  int far = c->numRanks - ranksPerDomain;
  ep_ll_relay_layout_t at = {.numRanks = c->numRanks, .ranksPerDomain = ranksPerDomain};
  at.rails = rails != 0;
  at.numPeers[EP_LL_MESSAGE_DISPATCH] = rails ? far / ranksPerDomain : far;
  at.numPeers[EP_LL_MESSAGE_COMBINE] = at.numPeers[EP_LL_MESSAGE_WEIGHTS] = far;
  if (rails) words *= (size_t)ranksPerDomain;
  at.message[EP_LL_MESSAGE_DISPATCH] =
      roundUp(words + 128, 128) + records(N, 128 + near.rowStride[0]);
  at.message[EP_LL_MESSAGE_COMBINE] = records(N * (K < L ? K : L), 128 + near.rowStride[1]);
  at.message[EP_LL_MESSAGE_WEIGHTS] = c->partial ? records(N, 16 + (K + 2) / 3 * 16) : 0;
  size_t next = 0;
  for (int m = 0; m < EP_LL_MESSAGES; m++) {
    at.message[m] = roundUp(at.message[m], 512);
    EP_CHECK(at.message[m] < EP_NET_MOST_BYTES, TREFOIL_INVALID_ARGUMENT,
             "a message of %zu bytes to a far rank: at most %d", at.message[m], EP_NET_MOST_BYTES);
    at.at[m] = next;
    next += 4 * (size_t)at.numPeers[m] * at.message[m];
  }
  at.bytes = next;
  at.mirrorBytes = near.rows[0] + 2 * N * near.rowStride[0];
  if (c->partial) at.mirrorBytes += 2 * (size_t)far * N * near.rowStride[1];
  *out = at;
  return TREFOIL_OK;
}

void epLlRelayControlInit(void *bytes, uint64_t firstOperation) {
  memset(bytes, 0, EP_LL_RELAY_CONTROL_BYTES);
  ep_ll_relay_control_t *c = bytes;
  c->numbers[0] = c->numbers[1] = firstOperation;
}
