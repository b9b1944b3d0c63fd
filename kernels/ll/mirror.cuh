// Mirrors: where a launch stores what is for ranks of other domains (relay.h). It is one memory for all of
// them, at which their `peers` point:
//
//     words          as in exchange memory: what is for rank d lies where there lies what is from d
//     tokens' rows   [2][N], each once, whatever ranks it is for
//     partial sums   [2][far ranks][N], a row a token
//
// The relay takes whole rows of a combine out of the caller's tensor. FAR, of a kernel: there are such ranks.
#ifndef TREFOIL_KERNELS_LL_MIRROR_CUH
#define TREFOIL_KERNELS_LL_MIRROR_CUH

#include "kernels/common/ptx.cuh"
#include "kernels/ll/ll.h"

EP_DEV bool isFar(const ep_ll_group_t &g, int rank) {
  return (unsigned)(rank - g.firstNear) >= g.numNear;
}

// The source in whose place this rank's words lie in rank r's memory.
template <bool FAR> EP_DEV int sourceAt(const ep_ll_group_t &g, int r) {
  if constexpr (FAR) return isFar(g, r) ? r : g.rank;
  return g.rank;
}

EP_DEV size_t mirroredRow(const ep_ll_group_t &g, int t, int buf) {
  return g.at.rows[0] + ((size_t)buf * g.maxTokens + t) * g.at.rowStride[0];
}
EP_DEV size_t mirroredSum(const ep_ll_group_t &g, int rank, int t, int buf) {
  const int far = g.numRanks - g.numNear, i = rank < g.firstNear ? rank : rank - g.numNear;
  return mirroredRow(g, 0, 2) + ((size_t)(buf * far + i) * g.maxTokens + t) * g.at.rowStride[1];
}

#endif
