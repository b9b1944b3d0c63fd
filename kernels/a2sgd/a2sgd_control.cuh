// What the kernels of A2SGD share: control words, groups, and words of the exchange.
#ifndef TREFOIL_KERNELS_A2SGD_A2SGD_CONTROL_CUH
#define TREFOIL_KERNELS_A2SGD_A2SGD_CONTROL_CUH

#include "kernels/a2sgd/a2sgd_step.h"
#include "kernels/common/wait_record.cuh"

// At the beginning of scratch.
struct A2sgdControl {
  WaitControl wait;
  unsigned long long epoch; // steps that are exchanged
  unsigned arrived;     // groups whose means are sent; blocks of a synchronisation that have ended
  unsigned nextChannel; // of a synchronisation, that no block has taken
  unsigned long long syncs; // synchronisations that are made
};
static_assert(sizeof(A2sgdControl) <= EP_A2SGD_MASK_AT, "EP_A2SGD_MASK_AT");
static_assert(EP_A2SGD_MASK_AT + 4 * EP_KERNEL_MAX_RANKS <= EP_A2SGD_GROUPS_AT,
              "EP_A2SGD_GROUPS_AT");

EP_DEV A2sgdControl &controlOf(const ep_a2sgd_step_t &s) {
  return *(A2sgdControl *)s.scratch;
}
EP_DEV int *maskOf(const ep_a2sgd_step_t &s) {
  return (int *)(s.scratch + EP_A2SGD_MASK_AT);
}
EP_DEV const ep_a2sgd_group_t *groupsOf(const ep_a2sgd_step_t &s) {
  return (const ep_a2sgd_group_t *)(s.scratch + EP_A2SGD_GROUPS_AT);
}
EP_DEV float2 *movesOf(const ep_a2sgd_step_t &s) {
  return (float2 *)(s.scratch + s.at.moves);
}

EP_DEV bool isActive(const ep_a2sgd_step_t &s, int rank) {
  return rank == s.rank || !s.enableMask || loadVolatile(maskOf(s) + rank) != 0;
}

// Where rank `from` stores a group's means for rank `to`.
EP_DEV char *meansAt(const ep_a2sgd_step_t &s, int to, unsigned long long epoch, int group,
                     int from) {
  const size_t word = ((epoch & 1) * s.at.numGroups + group) * s.at.numRanks + from;
  return s.peers[to] + word * 16;
}

// The group of a part: all lanes of a warp, which look at 32 groups at a time.
EP_DEV int groupOfPart(const ep_a2sgd_step_t &s, uint32_t part, int lane) {
  const ep_a2sgd_group_t *groups = groupsOf(s);
  int from = 0, left = s.at.numGroups;
  while (left > 1) {
    const int step = (left + 31) / 32, at = lane * step;
    const bool isBefore = at < left && groups[from + at].firstPart <= part;
    const int skipped = (__popc(__ballot_sync(FULL_WARP, isBefore)) - 1) * step;
    from += skipped;
    left = min(step, left - skipped);
  }
  return from;
}

// The same, and what it is. The only group of a model is known without a load.
EP_DEV int loadGroup(const ep_a2sgd_step_t &s, uint32_t part, int lane, ep_a2sgd_group_t &g) {
  if (s.at.numGroups == 1) {
    g = ep_a2sgd_group_t{0, s.at.elements, 0, s.at.numParts};
    return 0;
  }
  const int group = groupOfPart(s, part, lane);
  g = groupsOf(s)[group];
  return group;
}

EP_DEV bool isEmpty(const ep_a2sgd_step_t &s, int group) {
  return s.at.numFilled < s.at.numGroups && groupsOf(s)[group].count == 0;
}

#endif
