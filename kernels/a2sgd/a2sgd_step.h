/* A2SGD on GPUs (docs/spec.md, A3 to A6, A14 to A16): what a step is launched with. C and C++.
 *
 * Two kernels a step. The first reads the gradient once: parts of groups are summed by blocks; the last
 * block of a group stores the group's two means into the exchange memory of every rank; the last block
 * of the launch waits for those of the others and works out by how much each group's elements move. The
 * second kernel moves them. Blocks wait for no other block, so any number of them fits on any GPU.
 *
 * Memory. exchange: [2][groups][ranks] words of 16 bytes {mean+, mean-, epoch}, by parity of the epoch;
 * one a rank, reached by all. scratch: this rank's own, control words and tables. */
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

/* Elements [first, first + count) of the gradient; parts are numbered through all groups. */
typedef struct ep_a2sgd_group {
  int64_t first, count;
  uint32_t firstPart, numParts;
} ep_a2sgd_group_t;

typedef struct ep_a2sgd_layout {
  int numGroups, numRanks;
  int partShift; /* a part: EP_A2SGD_TILE << partShift elements, the last of a group fewer */
  uint32_t numParts;
  int64_t elements;
  size_t exchangeBytes, scratchBytes, imageBytes; /* the image: the beginning of scratch */
  size_t done, parts, moves;                      /* offsets in scratch */
} ep_a2sgd_layout_t;

/* Groups one behind the other; numSms: of the launches, which decides the size of parts. */
trefoil_result_t epA2sgdLayout(int numGroups, const int64_t *counts, int numRanks, int numSms,
                               ep_a2sgd_layout_t *out);
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
  void *update; /* may be grad */
  int rank, enableMask, numSms;
  trefoil_dtype_t dtype;
} ep_a2sgd_step_t;

/* Loads the kernels, so that no launch does. */
trefoil_result_t epA2sgdLoad(void);
trefoil_result_t epA2sgdStep(const ep_a2sgd_step_t *step, void *stream);
/* The two kernels by themselves, to time them. */
trefoil_result_t epA2sgdMeans(const ep_a2sgd_step_t *step, void *stream);
trefoil_result_t epA2sgdMove(const ep_a2sgd_step_t *step, void *stream);

#ifdef __cplusplus
}
#endif
#endif
