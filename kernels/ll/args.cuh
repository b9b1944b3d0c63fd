// What a launch passes by value: the caller's operation and what the host worked out from it once.
#ifndef TREFOIL_KERNELS_LL_ARGS_CUH
#define TREFOIL_KERNELS_LL_ARGS_CUH

#include "kernels/ll/packet.cuh"
#include "kernels/common/reduce.cuh"
#include "kernels/ll/slots.cuh"
#include "kernels/ll/wait.cuh"
#include "kernels/ll/work_iterator.cuh"

// Warps of a block. A launch of one part gives them all to that part.
struct Roles {
  int numSend, numRecv;
  unsigned parts;
};

struct CombineArgs {
  ep_ll_combine_t op;
  Wire wire;
  Roles roles;
  int weightVectors; // of a token: 3 weights each
  int pairs;         // partial sums: that a block works on together
  int guesses;       // the return list has room for 64, so they may be loaded unseen
  int inFlight;      // rows that a sending warp loads before it stores the first
  Divisor blocks;    // of the launch
  Divisor perRow;    // steps of a row
  Divisor perToken;  // weight vectors of a token
  Divisor perRank;   // experts of a rank
};

// Any other id stands for no expert.
EP_DEV bool isExpert(const ep_ll_group_t &g, int id) {
  return (unsigned)id < (unsigned)g.numExperts;
}

// A contiguous part of numItems for block b of n: [first, end).
struct Partition {
  int first, end;
};
EP_DEV Partition partitionOf(int numItems, int b, int n) {
  const int q = numItems / n, r = numItems - q * n, first = b * q + min(b, r);
  return Partition{first, first + q + (b < r ? 1 : 0)};
}

// The part of this block.
EP_DEV Partition partitionBy(const Divisor &blocks, int numItems) {
  const int b = blockIdx.x, q = (int)blocks.quotient(numItems), r = numItems - q * (int)blocks.n;
  const int first = b * q + min(b, r);
  return Partition{first, first + q + (b < r ? 1 : 0)};
}

EP_DEV ReturnEntry *returnsOf(const ep_ll_handle_t &h) {
  return (ReturnEntry *)((char *)h.memory + 64);
}
EP_DEV int *slotTable(const ep_ll_group_t &g, const ep_ll_handle_t &h) {
  return (int *)(returnsOf(h) + (size_t)g.numRanks * g.maxTokens * h.numTopk);
}

EP_DEV char *combineRowAt(const ep_ll_group_t &g, int numTopk, int at, int t, int k, int buf) {
  return g.peers[at] + g.at.rows[1] + buf * g.at.half[1] +
         ((size_t)t * numTopk + k) * g.at.rowStride[1];
}

// Union over the warp of a set given by one rank a lane (or -1).
EP_DEV unsigned long long warpRankSet(int rank, int numRanks) {
  const unsigned lo = __reduce_or_sync(FULL_WARP, rank >= 0 && rank < 32 ? 1u << rank : 0u);
  if (numRanks <= 32) return lo;
  const unsigned hi = __reduce_or_sync(FULL_WARP, rank >= 32 ? 1u << (rank - 32) : 0u);
  return lo | (unsigned long long)hi << 32;
}

EP_DEV void countBytes(const ep_ll_group_t &g, int kind, int to, int rowBytes) {
  if (g.bytes) {
    atomicAdd((unsigned long long *)g.bytes + kind * g.numRanks + to, (unsigned long long)rowBytes);
  }
}

#endif
