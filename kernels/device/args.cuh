// What a launch passes by value: the caller's operation and what the host worked out from it once.
#ifndef TREFOIL_KERNELS_DEVICE_ARGS_CUH
#define TREFOIL_KERNELS_DEVICE_ARGS_CUH

#include "kernels/device/line.cuh"
#include "kernels/device/reduce.cuh"
#include "kernels/device/slots.cuh"
#include "kernels/device/wait.cuh"
#include "kernels/device/walk.cuh"

constexpr int SOURCES = 4; // sources that a receiving warp of dispatch waits for at once

// Warps of a block. A launch of one part gives them all to that part.
struct Roles {
  int numSend, numRecv;
  unsigned parts;
};

struct DispatchArgs {
  ep_ll_dispatch_t op;
  Wire wire; // tokens, scales, rank-major weights padded to 16 bytes
  Roles roles;
  int idBytes, idVectors;        // of a routing word: local ids of 1 or 2 bytes, 12 bytes a vector
  int copies;                    // entries of rowOf a token: K, rank-major 1
  int groups;                    // of SOURCES sources
  int perSource, chunks;         // slots.cuh
  int warpAt, warpBytes;         // shared memory, bytes: token counts of 64 ranks, then
  int rowAt;                     // the quantised row, then
  int bigAt;                     // the parts that scratch replaces if they are too large
  int beforeAt, routeAt, owedAt; // relative to big
  unsigned long long bigBytes;
};

struct CombineArgs {
  ep_ll_combine_t op;
  Wire wire;
  Roles roles;
  int weightVectors; // of a token: 3 weights each
  int pairs;         // partial sums: that a block works on together
  int guesses;       // the list of owed rows has room for 64, so they may be loaded unseen
  int inFlight;      // rows that a sending warp loads before it stores the first
  Divisor blocks;    // of the launch
  Divisor perRow;    // steps of a row
  Divisor perToken;  // weight vectors of a token
  Divisor perRank;   // experts of a rank
};

EP_DEV int rankOf(const ep_ll_group_t &g, int expert) {
  return expert / g.numLocal;
}

// Any other id stands for no expert.
EP_DEV bool isExpert(const ep_ll_group_t &g, int id) {
  return (unsigned)id < (unsigned)g.numExperts;
}

EP_DEV int expertAt(const ep_ll_handle_t &h, int t, int k) {
  const size_t i = (size_t)t * h.numTopk + k;
  return h.idx64 ? (int)((const long long *)h.topkIdx)[i] : ((const int *)h.topkIdx)[i];
}

// A contiguous share of numUnits for block b of n: [first, end).
struct Share {
  int first, end;
};
EP_DEV Share shareOf(int numUnits, int b, int n) {
  const int q = numUnits / n, r = numUnits - q * n, first = b * q + min(b, r);
  return Share{first, first + q + (b < r ? 1 : 0)};
}

// The share of this block.
EP_DEV Share shareBy(const Divisor &blocks, int numUnits) {
  const int b = blockIdx.x, q = (int)blocks.quotient(numUnits), r = numUnits - q * (int)blocks.n;
  const int first = b * q + min(b, r);
  return Share{first, first + q + (b < r ? 1 : 0)};
}

EP_DEV Owed *owedOf(const ep_ll_handle_t &h) {
  return (Owed *)((char *)h.memory + 64);
}
EP_DEV int *rowOfTable(const ep_ll_group_t &g, const ep_ll_handle_t &h) {
  return (int *)(owedOf(h) + (size_t)g.numRanks * g.maxTokens * h.numTopk);
}

EP_DEV char *dispatchSlot(const ep_ll_group_t &g, int at, int from, int t, int buf) {
  return g.peers[at] + g.at.rows[0] + buf * g.at.half[0] +
         ((size_t)from * g.maxTokens + t) * g.at.rowStride[0];
}
EP_DEV char *combineSlot(const ep_ll_group_t &g, int numTopk, int at, int t, int k, int buf) {
  return g.peers[at] + g.at.rows[1] + buf * g.at.half[1] +
         ((size_t)t * numTopk + k) * g.at.rowStride[1];
}

// Calls f(rank) for every rank in the set, starting at `first` and going round.
template <typename F> EP_DEV void forRanks(unsigned long long set, int first, int numRanks, F f) {
  unsigned long long m = set >> first | (first ? set << (numRanks - first) : 0);
  if (numRanks < 64) m &= (1ull << numRanks) - 1;
#pragma unroll 1
  for (; m; m &= m - 1) {
    const int d = __ffsll(m) - 1 + first;
    f(d < numRanks ? d : d - numRanks);
  }
}

// Union over the warp of a set given by one rank a lane (or -1).
EP_DEV unsigned long long warpRankSet(int rank, int numRanks) {
  const unsigned lo = __reduce_or_sync(FULL_WARP, rank >= 0 && rank < 32 ? 1u << rank : 0u);
  if (numRanks <= 32) return lo;
  const unsigned hi = __reduce_or_sync(FULL_WARP, rank >= 32 ? 1u << (rank - 32) : 0u);
  return lo | (unsigned long long)hi << 32;
}

// Ranks that token t has an expert on. All lanes.
EP_DEV unsigned long long ranksOfToken(const ep_ll_group_t &g, const ep_ll_handle_t &h, int t,
                                       int lane) {
  unsigned long long set = 0;
#pragma unroll 1
  for (int k0 = 0; k0 < h.numTopk; k0 += 32) {
    const int e = k0 + lane < h.numTopk ? expertAt(h, t, k0 + lane) : -1;
    set |= warpRankSet(isExpert(g, e) ? rankOf(g, e) : -1, g.numRanks);
  }
  return set;
}

EP_DEV void countBytes(const ep_ll_group_t &g, int kind, int to, int rowBytes) {
  if (g.bytes) {
    atomicAdd((unsigned long long *)g.bytes + kind * g.numRanks + to, (unsigned long long)rowBytes);
  }
}

#endif
