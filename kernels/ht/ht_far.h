/* High throughput across NVLink domains: what launches it. C and C++.
 *
 * Of each domain ("node") the ranks are numbered alike, and ranks with the same number form a rail. A rank
 * uses the network to its rail alone. To each other node it has rings: slots of a chunk and a token's
 * weights, one ring to send from and one to land in, for each kind of operation. A block of every dispatch
 * and combine is the poster: it puts what the others have filled, and raises words for what has landed and
 * what may be filled again. docs/kernels_ht.md has the protocol.
 *
 * The caller provides what ht.h says, with peers[] of its own domain only, and for each rank besides
 *   - a window of the network with ep_ht_far_layout_t.bytes from port.scratch + 128 on;
 *   - EP_HT_FAR_CONTROL_BYTES and ep_ht_far_layout_t.wordBytes on the device, zero at the start;
 *   - scratch and handles of epHtFarScratchBytes and epHtFarHandleBytes. */
#ifndef TREFOIL_KERNELS_HT_FAR_H
#define TREFOIL_KERNELS_HT_FAR_H

#include "kernels/ht/ht.h"
#include "kernels/net/net_port.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EP_HT_FAR_CONTROL_BYTES 8192
#define EP_HT_FAR_LEAST_SMS                                                                        \
  4 /* of a launch: one that sends, forwards or reduces, receives, posts */

/* Signals of the context: of each kind slots and credits, of Updates by parity; a node each. */
#define EP_HT_FAR_SIGNALS(numNodes) (6 * (numNodes))

/* Where things lie; equal on all ranks. Far nodes are numbered without the own one. */
typedef struct ep_ht_far_layout {
  int numRanks, ranksPerDomain, numFar; /* numFar: other nodes */
  int ringSlots[2];                     /* by kind, a power of two */
  int batchSlots[2];                    /* with puts under way, so many are waited for */
  size_t slotBytes; /* chunk, weights, a word: its epoch if it stands for nothing */
  size_t voidAt;    /* of that word */
  /* in the window, after 128 bytes: */
  size_t rings[2][2]; /* [kind][out, in]: [far node][ringSlots] */
  size_t ids[2];      /* [out, in]: messages of an Update, [parity] and [parity][far node] */
  size_t idsBytes;    /* of a message */
  size_t bytes;
  /* words of the rings, in this rank's memory: [kind] [what][far node][ringSlots] u32 */
  size_t words[2];
  size_t wordBytes;
} ep_ht_far_layout_t;

/* ringSlots: of each ring, a power of two; 0 = chosen. TREFOIL_INVALID_ARGUMENT with a sentence:
 * epHtLayout's, domains that do not divide the ranks, or a message of EP_NET_MOST_BYTES or more. */
trefoil_result_t epHtFarLayout(const ep_ht_config_t *config, int ranksPerDomain, int ringSlots,
                               ep_ht_far_layout_t *out);
size_t epHtFarHandleBytes(const ep_ht_config_t *config, int ranksPerDomain, int numTopk);
size_t epHtFarScratchBytes(const ep_ht_config_t *config, int ranksPerDomain);
/* Control memory on the host: rings begin anew, in a window that is all zero, when no operation is under way
 * on any rank. Signals go on. */
void epHtFarRestart(void *control);

typedef struct ep_ht_far {
  ep_net_port_t port; /* puts go to ranks of the rail alone */
  ep_ht_far_layout_t at;
  char *window; /* this rank's */
  void *control, *words;
} ep_ht_far_t;

/* As in ht.h, over NCCL's GIN: port.comm is an ncclDevComm. No windows: rows of the caller go through FIFOs.
 * numSms: at least EP_HT_FAR_LEAST_SMS of a dispatch or combine. */
trefoil_result_t epHtFarLoad(void);
trefoil_result_t epHtFarUpdate(const ep_ht_update_t *op, const ep_ht_far_t *far, void *cudaStream);
trefoil_result_t epHtFarDispatch(const ep_ht_dispatch_t *op, const ep_ht_far_t *far,
                                 void *cudaStream);
trefoil_result_t epHtFarCombine(const ep_ht_combine_t *op, const ep_ht_far_t *far,
                                void *cudaStream);

#ifdef __cplusplus
}
#endif
#endif
