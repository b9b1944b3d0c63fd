/* Where the words of A2SGD lie, and how groups are cut into parts. */
#include "kernels/a2sgd/a2sgd_step.h"

#include <string.h>

#include "plan/error.h"

#define PARTS_PER_SM 24 /* enough that the last ones leave few blocks idle */

static uint32_t partsOf(int64_t count, int partShift) {
  int64_t part = (int64_t)EP_A2SGD_TILE << partShift;
  return (uint32_t)((count + part - 1) / part);
}

static int chooseShift(int64_t elements, int numSms) {
  int shift = 0;
  int64_t most = (int64_t)numSms * PARTS_PER_SM;
  while (shift < EP_A2SGD_MAX_PART_SHIFT && partsOf(elements, shift) > most) shift++;
  return shift;
}

static trefoil_result_t countElements(int numGroups, const int64_t *counts, int64_t *elements) {
  *elements = 0;
  for (int g = 0; g < numGroups; g++) {
    EP_CHECK(
        counts[g] >= 0 && counts[g] <= EP_A2SGD_MAX_ELEMENTS - *elements, TREFOIL_INVALID_ARGUMENT,
        "group %d has %lld elements; on GPUs a model has at most 2^37", g, (long long)counts[g]);
    *elements += counts[g];
  }
  return TREFOIL_OK;
}

static size_t aligned(size_t bytes) {
  return (bytes + 127) / 128 * 128;
}

trefoil_result_t epA2sgdLayout(int numGroups, const int64_t *counts, int numRanks, int numSms,
                               ep_a2sgd_layout_t *out) {
  ep_a2sgd_layout_t at = {.numGroups = numGroups, .numRanks = numRanks};
  size_t groups = (size_t)numGroups;
  EP_CHECK(numRanks >= 1 && numRanks <= EP_KERNEL_MAX_RANKS, TREFOIL_INVALID_ARGUMENT,
           "%d ranks; A2SGD on GPUs takes 1..%d", numRanks, EP_KERNEL_MAX_RANKS);
  EP_TRY(countElements(numGroups, counts, &at.elements));
  at.partShift = chooseShift(at.elements, numSms);
  for (int g = 0; g < numGroups; g++) {
    at.numParts += partsOf(counts[g], at.partShift);
    at.numFilled += counts[g] > 0;
  }
  at.imageBytes = EP_A2SGD_GROUPS_AT + groups * sizeof(ep_a2sgd_group_t);
  at.done = aligned(at.imageBytes);
  at.moves = aligned(at.done + groups * sizeof(uint32_t));
  at.parts = aligned(at.moves + groups * 2 * sizeof(float));
  at.scratchBytes = aligned(at.parts + (size_t)at.numParts * 16);
  at.exchangeBytes = aligned(2 * groups * (size_t)numRanks * 16);
  *out = at;
  return TREFOIL_OK;
}

void epA2sgdAddSync(ep_a2sgd_layout_t *at, trefoil_dtype_t dtype, int maxChannels,
                    uint32_t chunkBytes) {
  uint32_t R = (uint32_t)at->numRanks, vectors = chunkBytes / 16;
  at->chunkBytes = chunkBytes; /* whole vectors */
  at->chunkElements = chunkBytes / (int64_t)trefoilDtypeBytes(dtype);
  at->sliceBytes = (vectors + R - 1) / R * 16;
  at->stages = (uint32_t)aligned((4 * R + 1) * 16);
  at->channelBytes = (uint32_t)aligned(at->stages + 2 * (at->chunkBytes + at->sliceBytes));
  int64_t chunks = (at->elements + at->chunkElements - 1) / at->chunkElements;
  at->channels = (int)(chunks < maxChannels ? chunks : maxChannels);
  at->sync = at->exchangeBytes;
  at->exchangeBytes = aligned(at->sync + (size_t)at->channels * at->channelBytes);
}

void epA2sgdImage(const ep_a2sgd_layout_t *at, const int64_t *counts, void *image) {
  int *mask = (int *)((char *)image + EP_A2SGD_MASK_AT);
  ep_a2sgd_group_t *groups = (ep_a2sgd_group_t *)((char *)image + EP_A2SGD_GROUPS_AT);
  int64_t first = 0;
  uint32_t firstPart = 0;
  memset(image, 0, EP_A2SGD_GROUPS_AT);
  for (int r = 0; r < EP_KERNEL_MAX_RANKS; r++) mask[r] = 1;
  for (int g = 0; g < at->numGroups; g++) {
    uint32_t parts = partsOf(counts[g], at->partShift);
    groups[g] = (ep_a2sgd_group_t){first, counts[g], firstPart, parts};
    first += counts[g];
    firstPart += parts;
  }
}
