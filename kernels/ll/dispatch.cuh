// Low-latency dispatch: what a launch passes, what an instantiation of the kernel can do, and rows as they
// lie in the caller's tensors.
//
// A launch of few tokens is spent on first loads and on fetching instructions, so what is read first lies
// together in front of the parameters, divisions become multiplications with what the host worked out, and
// one routing word of 8 ids fits into a register pair, which makes a lane of every (source of a group of
// four, k). That is the fast path: the shapes for which it holds (isFast in dispatch_host.cuh). The generic
// path is the same code with wider types and loops where the fast one has one turn: more ranks, ids and
// words, one part of an operation, rows of any size, tables in scratch memory. Wire and memory are the same,
// so the ranks of one operation may take different paths.
#ifndef TREFOIL_KERNELS_LL_DISPATCH_CUH
#define TREFOIL_KERNELS_LL_DISPATCH_CUH

#include "kernels/ll/args.cuh"

#include <type_traits>

constexpr int SOURCES = 4;  // sources that a receiving warp waits for at once
constexpr int WORD_IDS = 8; // entries of a token beside each other: a lane of each, of each source

// How items are partitioned over n blocks, contiguously: the first `more` get one more than `each`.
struct Partitioning {
  int each, more;
};

struct DispatchArgs {
  KindControl *control;
  const int *mask; // NULL: all ranks are active
  const void *topkIdx;
  const char *tokens;
  char *mine; // own exchange memory
  unsigned long long routing, routingHalf, rows, rowsHalf;
  int rank, numRanks, numTokens, maxTokens, topk, idx64, numLocal, numExperts, rowStride;
  int numSms;              // op.group's; a copy among what is read first
  Divisor perRank, perRow; // experts of a rank, steps of a row
  Wire wire;               // tokens, scales, rank-major weights padded to 16 bytes
  int tokenBytes, scaleBytes, inputBytes;
  Partitioning send, recv;
  int numSend, numRecv;
  int numWire, pace;                              // quantising: sending warps that store to peers
  int guess;                                      // log2 of numTokens, rounded up
  int groups, perSource, spans;                   // of SOURCES sources; slots.cuh
  Divisor perToken;                               // quantising: blocks on a token
  int tokenStride;                                // tokens at once
  int rowAt, mapAt, beforeAt, returnsAt, routeAt; // shared memory
  ep_ll_dispatch_t op;
  // Generic path only.
  unsigned parts;
  int idBytes, idVectors; // of a routing word: local ids of 1 or 2 bytes, 12 bytes a vector
  int bigAt;              // shared memory from here on lies in scratch, if that is given
  unsigned long long bigBytes;
};

// What an instantiation takes.
//   GENERIC   any shape and either part; else the fast path
//   RANK_MAJOR  the layout
//   QUANT     E4M3 made on the way
//   SEGMENTS  rows have scales or weights besides tokens
//   COUNT     byte counters may be there (generic: always)
//   SCRATCH   generic: the slot map does not fit into shared memory. An instantiation of its own, so that the
//             usual one has the instructions of shared memory
template <bool GENERIC_, bool RANK_MAJOR_, bool QUANT_, bool SEGMENTS_, bool COUNT_, bool SCRATCH_>
struct DispatchTraits {
  static constexpr bool GENERIC = GENERIC_, RANK_MAJOR = RANK_MAJOR_, QUANT = QUANT_,
                        SEGMENTS = SEGMENTS_;
  static constexpr bool COUNT = COUNT_ || GENERIC_, SCRATCH = SCRATCH_, FAR = false;
  static constexpr int BLOCKS = GENERIC ? EP_LL_MAX_TOPK / WORD_IDS : 1; // of entries of a token
  static constexpr int ROW_BLOCKS = RANK_MAJOR ? 1 : BLOCKS;       // that have rows of their own
  static constexpr unsigned NO_EXPERT = GENERIC ? 0xffffu : 0xffu; // a local id
  using RankSet = std::conditional_t<GENERIC, unsigned long long, unsigned>; // a set, as bits
};

EP_DEV int firstBit(unsigned set) {
  return __ffs(set);
}
EP_DEV int firstBit(unsigned long long set) {
  return __ffsll(set);
}

EP_DEV int expertAt(const DispatchArgs &a, int t, int k) {
  const size_t i = (size_t)t * a.topk + k;
  return a.idx64 ? (int)((const long long *)a.topkIdx)[i] : ((const int *)a.topkIdx)[i];
}
EP_DEV bool isExpert(const DispatchArgs &a, int id) {
  return (unsigned)id < (unsigned)a.numExperts;
}
template <class T> EP_DEV int rankOf(const DispatchArgs &a, int expert) {
  return (int)(T::GENERIC ? a.perRank.quotient(expert) : a.perRank.smallQuotient(expert));
}
template <class T> EP_DEV int tokenOf(const DispatchArgs &a, int item) {
  return (int)(T::GENERIC ? a.perRow.quotient(item) : a.perRow.smallQuotient(item));
}

EP_DEV Partition partitionOf(const Partitioning &d) {
  const int b = (int)blockIdx.x, first = b * d.each + min(b, d.more);
  return Partition{first, first + d.each + (b < d.more ? 1 : 0)};
}

// What every warp needs first; in flight beside the loads that follow in its role.
struct FirstLoads {
  ControlWords control;
  int mask;
};

EP_DEV FirstLoads firstLoads(const DispatchArgs &a, int lane) {
  return FirstLoads{loadControl(*a.control), a.mask && lane < a.numRanks ? a.mask[lane] : 1};
}

template <class T> EP_DEV Op operationOf(const DispatchArgs &a, const FirstLoads &f) {
  if (!T::GENERIC || a.parts & EP_LL_SEND) return nextOp(f.control);
  return opOf(f.control, headOf(a.op.handle).sent[EP_LL_DISPATCH]);
}

// All lanes: active ranks.
template <class T>
EP_DEV typename T::RankSet activeOf(const DispatchArgs &a, const FirstLoads &f, int lane) {
  if constexpr (T::GENERIC) return activeRanks(a.op.group, lane);
  return __ballot_sync(FULL_WARP, lane < a.numRanks && (f.mask != 0 || lane == a.rank));
}

// Of the exchange memory of any rank.
template <class T> EP_DEV size_t routingOf(const DispatchArgs &a, int from, int t, int buf) {
  return a.routing + (buf ? a.routingHalf : 0) +
         ((size_t)from * a.maxTokens + t) * (T::GENERIC ? a.idVectors * 16 : 16);
}
EP_DEV size_t receivedRowOf(const DispatchArgs &a, int from, int t, int buf) {
  return a.rows + (buf ? a.rowsHalf : 0) + (size_t)(from * a.maxTokens + t) * a.rowStride;
}

// Where a word of own token t lies, tokens, scales and weights being apart; NULL: padding.
EP_DEV const char *wordAt(const DispatchArgs &a, int t, int off) {
  if (off < a.tokenBytes) return a.tokens + (size_t)t * a.tokenBytes + off;
  off -= a.tokenBytes;
  if (off < a.scaleBytes) return (const char *)a.op.scales + (size_t)t * a.scaleBytes + off;
  off -= a.scaleBytes;
  return off < a.topk * 4 ? (const char *)a.op.weights + (size_t)t * a.topk * 4 + off : nullptr;
}

// Whether a lane's part of a step is moved word by word. Fast: the parts beside the flags are, and all
// vectors are tokens.
template <class T> EP_DEV bool isSideData(const DispatchArgs &a, const RowVector &p, int lane) {
  return isFlagLane(lane) || (T::GENERIC && p.off + 16 > a.tokenBytes);
}
// Of the others: whether there is anything to move.
template <class T> EP_DEV bool isWhole(const RowVector &p) {
  return T::GENERIC ? p.words == 4 : p.on;
}

// A lane's part of a step of own token t; the word of the flag is left to the caller.
template <class T>
EP_DEV uint4 readInput(const DispatchArgs &a, int t, const RowVector &p, int lane) {
  constexpr int WORDS = T::GENERIC ? 4 : 3;
  uint4 v = make_uint4(0, 0, 0, 0);
  const char *row = a.tokens + (size_t)t * a.tokenBytes + p.off;
  if (!isSideData<T>(a, p, lane)) {
    if (isWhole<T>(p)) v = loadStream(row);
    return v;
  }
  unsigned w[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < WORDS; i++) {
    if (i >= p.words) continue;
    const char *q = T::SEGMENTS ? wordAt(a, t, p.off + 4 * i) : row + 4 * i;
    if (!T::SEGMENTS || q) w[i] = *(const unsigned *)q;
  }
  return make_uint4(w[0], w[1], w[2], w[3]);
}

// Where a lane's part of a step goes, for any row of the output. Branches would cost more than the stores,
// so each store has its own condition.
template <class T> struct OutputTarget {
  static constexpr int WORDS = T::GENERIC ? 4 : 3, PARTS = T::SEGMENTS ? WORDS : 1;
  char *at[PARTS];
  int stride[PARTS];
  bool vector, first, second, third, fourth; // what this lane stores: 16 bytes, or up to four words

  EP_DEV OutputTarget(const DispatchArgs &a, const RowVector &p, int lane) {
    int words = isSideData<T>(a, p, lane) ? p.words : 0;
    at[0] = (char *)a.op.outTokens + p.off;
    stride[0] = a.tokenBytes;
#pragma unroll
    for (int i = 0; T::SEGMENTS && i < PARTS; i++) {
      int off = p.off + 4 * i;
      at[i] = (char *)a.op.outTokens + off;
      stride[i] = a.tokenBytes;
      if (off < a.tokenBytes) continue;
      off -= a.tokenBytes;
      at[i] = (char *)a.op.outScales + off;
      stride[i] = a.scaleBytes;
      if (off < a.scaleBytes) continue;
      off -= a.scaleBytes;
      at[i] = (char *)a.op.outWeights + off;
      stride[i] = a.topk * 4;
      if (off >= a.topk * 4) words = min(words, i); // padding
    }
    vector = isWhole<T>(p) && !isSideData<T>(a, p, lane);
    first = words > 0;
    second = words > 1;
    third = words > 2;
    fourth = T::GENERIC && words > 3;
  }

  EP_DEV char *part(int i, int row) const {
    return T::SEGMENTS ? at[i % PARTS] + (size_t)row * stride[i % PARTS]
                       : at[0] + (size_t)row * stride[0] + 4 * i;
  }

  EP_DEV void put(int row, uint4 v) const {
    if (vector) storeStream(part(0, row), v);
    if (first) *(unsigned *)part(0, row) = v.x;
    if (second) *(unsigned *)part(1, row) = v.y;
    if (third) *(unsigned *)part(2, row) = v.z;
    if (T::GENERIC && fourth) *(unsigned *)part(3, row) = v.w;
  }
};

#endif
