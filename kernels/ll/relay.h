/* Low latency across NVLink domains: what launches the relay. C and C++.
 *
 * The kernels of one domain store words and packets into a peer's exchange memory. What is for far ranks,
 * which no store reaches, goes into mirrors (mirror.cuh): memory of this rank, to which `peers` of far
 * ranks in ep_ll_group_t point, all of them. Further blocks of the launch are a relay. It takes what the
 * others store into the mirrors, packs it into one message a far rank and puts it there with a signal; of
 * messages that have come it stores words and packets into its own rank's exchange memory, as if the source
 * had done it. So the kernels of one domain do not change, and packets that carry flags never cross the
 * network unguarded. docs/kernels.md has the argument why no buffer is overwritten too early.
 *
 * By rails a dispatch has one message a far domain, to the rank p that is there what the source is in its
 * own. It holds the words for all ranks of that domain and each row once; p's relay stores them into the
 * exchange memory of all of them. */
#ifndef TREFOIL_KERNELS_LL_RELAY_H
#define TREFOIL_KERNELS_LL_RELAY_H

#include "kernels/ll/ll.h"
#include "kernels/net/net_port.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EP_LL_RELAY_CONTROL_BYTES 12288

#ifdef __CUDACC__
#define EP_LL_EITHER_SIDE static inline __host__ __device__
#else
#define EP_LL_EITHER_SIDE static inline
#endif

/* Which rank is the i-th far one of `rank`, and back. */
EP_LL_EITHER_SIDE int epLlFarRank(int perDomain, int rank, int i) {
  int first = rank / perDomain * perDomain;
  return i < first ? i : i + perDomain;
}
EP_LL_EITHER_SIDE int epLlFarIndex(int perDomain, int rank, int other) {
  return other < rank / perDomain * perDomain ? other : other - perDomain;
}

/* The same among the ranks that have this one's place in their domains: by rails it sends to no others. */
EP_LL_EITHER_SIDE int epLlRailRank(int perDomain, int rank, int i) {
  return (i < rank / perDomain ? i : i + 1) * perDomain + rank % perDomain;
}
EP_LL_EITHER_SIDE int epLlRailIndex(int perDomain, int rank, int other) {
  return other / perDomain - (other > rank);
}

/* By rails what `source`, of another domain, dispatches comes to `rank` through this rank of its domain.
 * -1: it comes directly, or is of the own domain. */
EP_LL_EITHER_SIDE int epLlRailVia(int perDomain, int rank, int source) {
  int here = rank / perDomain, via = here * perDomain + source % perDomain;
  return source / perDomain == here || via == rank ? -1 : via;
}

/* Messages: between a pair of ranks at most one of each per operation. */
typedef enum ep_ll_message {
  EP_LL_MESSAGE_DISPATCH = 0, /* routing words and rows; by rails to a far domain */
  EP_LL_MESSAGE_COMBINE = 1,  /* the announcement and rows */
  EP_LL_MESSAGE_WEIGHTS = 2,  /* partial sums: weights of tokens */
  EP_LL_MESSAGES = 3
} ep_ll_message_t;

/* Signals of the context, a rank each: of messages, and of receive-only launches, by parity. */
#define EP_LL_RELAY_SIGNALS(numRanks) (10 * (numRanks))

/* The part of the network's window that the relay uses: for each message, parity and rank at its other end a
 * buffer to send from and one to receive into. Equal on all ranks. */
typedef struct ep_ll_relay_layout {
  int numRanks, ranksPerDomain;
  int rails;                      /* dispatch goes by rails; not of groups with masks */
  int numPeers[EP_LL_MESSAGES];   /* ranks at the other ends */
  size_t message[EP_LL_MESSAGES]; /* bytes of a buffer */
  size_t at[EP_LL_MESSAGES];      /* of [out, in][parity][numPeers] */
  size_t bytes;
  size_t mirrorBytes; /* not of the window */
} ep_ll_relay_layout_t;

/* TREFOIL_INVALID_ARGUMENT with a sentence: epLlLayout's, domains that do not divide the ranks, or a message
 * of EP_NET_MOST_BYTES or more. */
trefoil_result_t epLlRelayLayout(const ep_ll_config_t *config, int ranksPerDomain, int rails,
                                 ep_ll_relay_layout_t *out);
/* Host bytes to copy into control memory; as epLlControlInit. */
void epLlRelayControlInit(void *bytes, uint64_t firstOperation);

typedef struct ep_ll_relay {
  ep_net_port_t port;
  ep_ll_relay_layout_t at;
  char *window;  /* this rank's; buffers begin at port.scratch + 128 */
  void *control; /* EP_LL_RELAY_CONTROL_BYTES on the device */
  int blocks;    /* more are taken if they have too few warps: one for each far rank and role */
} ep_ll_relay_t;

/* Blocks that suffice for any launch: its blocks have 6 warps or more for two roles, 8 for four. */
#define EP_LL_RELAY_LEAST_BLOCKS(numFar) (((numFar) + 1) / 2)

/* As in ll.h, over NCCL's GIN: port.comm is an ncclDevComm. A dispatch is generic, also if `op` does not
 * require it. What is ready may be reused as there. */
trefoil_result_t epLlFarLoad(void);
trefoil_result_t epLlFarPrepareDispatch(const ep_ll_dispatch_t *op, unsigned parts,
                                        ep_ll_ready_t *out);
trefoil_result_t epLlFarPrepareCombine(const ep_ll_combine_t *op, unsigned parts,
                                       ep_ll_ready_t *out);
trefoil_result_t epLlFarLaunch(const ep_ll_ready_t *ready, ep_ll_kind_t kind,
                               const ep_ll_relay_t *relay, void *cudaStream);

#ifdef __cplusplus
}
#endif
#endif
