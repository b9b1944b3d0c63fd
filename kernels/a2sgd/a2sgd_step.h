/* A2SGD on GPUs (docs/spec.md, A3 to A7, A14 to A17): what a step and a synchronisation are launched with.
 * C and C++.
 *
 * Two kernels a step. The first reads the gradient once: parts of groups are summed by blocks; the last
 * block of a group stores the group's two means into the exchange memory of every rank; the block that stores
 * the last group's waits for those of the others and works out by how much each group's elements move. The
 * second kernel moves them. Blocks wait for no other block, so any number of them fits on any GPU.
 *
 * A synchronisation is one kernel. The parameters are cut into chunks, which channels take in turn; a
 * block has a channel at a time, and no block waits for another of its launch (a2sgd_sync.cuh).
 *
 * Memory. exchange: [2][groups][ranks] words of 16 bytes {mean+, mean-, epoch}, by parity of the epoch;
 * one a rank, reached by all. With channels, of each: words, a stamp, two stages of a chunk, two slices of
 * its mean. scratch: this rank's own, control words and tables. */
#ifndef TREFOIL_KERNELS_A2SGD_A2SGD_STEP_H
#define TREFOIL_KERNELS_A2SGD_A2SGD_STEP_H

#include "kernels/common/protocol.h"
#include "kernels/common/waits.h"
#include "trefoil/base.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EP_A2SGD_RUN            8    /* elements that are added one after the other */
#define EP_A2SGD_WARP_TILE      1024 /* elements that a warp sums at a time: 128 runs */
#define EP_A2SGD_WARPS          8    /* of a block */
#define EP_A2SGD_THREADS        (EP_A2SGD_WARPS * 32)
#define EP_A2SGD_TILE           (EP_A2SGD_WARP_TILE * EP_A2SGD_WARPS)
#define EP_A2SGD_MAX_PART_SHIFT 5 /* a warp's tiles of a part: one a lane */
#define EP_A2SGD_MAX_ELEMENTS   ((int64_t)1 << 37)
#define EP_A2SGD_MASK_AT        64  /* int [EP_KERNEL_MAX_RANKS] in scratch */
#define EP_A2SGD_GROUPS_AT      320 /* ep_a2sgd_group_t [numGroups] in scratch */
#define EP_A2SGD_KIND_STEP      5u  /* ep_wait_record_t.kind */
#define EP_A2SGD_KIND_SYNC      6u
#define EP_A2SGD_CHANNELS       64 /* of a synchronisation, at most */
#define EP_A2SGD_CHUNK_BYTES    65536u

/* Elements [first, first + count) of the gradient; parts are numbered through all groups. */
typedef struct ep_a2sgd_group {
  int64_t first, count;
  uint32_t firstPart, numParts;
} ep_a2sgd_group_t;

typedef struct ep_a2sgd_layout {
  int numGroups, numFilled, numRanks; /* filled: groups that have elements */
  int partShift; /* a part: EP_A2SGD_TILE << partShift elements, the last of a group fewer */
  uint32_t numParts;
  int64_t elements;
  size_t exchangeBytes, scratchBytes, imageBytes; /* the image: the beginning of scratch */
  size_t done, parts, moves;                      /* offsets in scratch */
  int channels; /* of a synchronisation; 0: there is none, or nothing to average */
  uint32_t chunkBytes, sliceBytes, channelBytes;
  uint32_t stages; /* offset in a channel's memory */
  int64_t chunkElements;
  size_t sync; /* offset in exchange: [channels] of channelBytes */
} ep_a2sgd_layout_t;

/* Groups one behind the other; numSms: of the launches, which decides the size of parts. */
trefoil_result_t epA2sgdLayout(int numGroups, const int64_t *counts, int numRanks, int numSms,
                               ep_a2sgd_layout_t *out);
/* Adds exchange memory for synchronisations of the parameters: in chunks of chunkBytes, in at most so many
 * channels. */
void epA2sgdAddSync(ep_a2sgd_layout_t *at, trefoil_dtype_t dtype, int maxChannels,
                    uint32_t chunkBytes);
/* imageBytes at the beginning of scratch before the first step; what follows, and exchange memory,
 * starts as zeros. */
void epA2sgdImage(const ep_a2sgd_layout_t *at, const int64_t *counts, void *image);

typedef struct ep_a2sgd_step {
  ep_a2sgd_layout_t at;
  char *peers[EP_KERNEL_MAX_RANKS]; /* every rank's exchange memory */
  char *scratch;
  ep_wait_record_t *record; /* NULL: none */
  uint64_t *stamps;         /* NULL, or device clock [2]: all sent, all received */
  uint64_t timeoutNs;
  const void *grad;
  void *update;       /* may be grad */
  void *params;       /* of a synchronisation */
  int64_t syncPeriod; /* likewise: it averages where this divides the steps made; 0: in any case */
  int rank, enableMask, numSms;
  trefoil_dtype_t dtype;
} ep_a2sgd_step_t;

/* Loads the kernels, so that no launch does. */
trefoil_result_t epA2sgdLoad(void);
trefoil_result_t epA2sgdStep(const ep_a2sgd_step_t *step, void *stream);
trefoil_result_t epA2sgdSync(const ep_a2sgd_step_t *step, void *stream);
/* A step's two kernels by themselves, to time them. */
trefoil_result_t epA2sgdMeans(const ep_a2sgd_step_t *step, void *stream);
trefoil_result_t epA2sgdMove(const ep_a2sgd_step_t *step, void *stream);

#ifdef __cplusplus
}
#endif
#endif
