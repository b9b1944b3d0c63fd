// The short dispatch: what a launch of it passes, and verbs of its own.
//
// A launch of few tokens is spent on first loads and on fetching instructions, so this variant keeps both
// short: what is read first lies together in front of the parameters, divisions become multiplications
// with what the host worked out, and one routing word of 8 ids fits into a register pair, which makes a
// lane of every (source of a group of four, k). It takes the shapes for which that holds (quickArgs in
// ll_quick_args.cu); everything else runs on the general kernel. Wire and memory are the same, so the ranks
// of one operation may run different ones.
#ifndef TREFOIL_KERNELS_DEVICE_QUICK_CUH
#define TREFOIL_KERNELS_DEVICE_QUICK_CUH

#include "kernels/device/args.cuh"

constexpr int QUICK_IDS = 8; // of a token: one routing word

// How `units` are dealt to n blocks in contiguous shares: the first `more` get one more than `each`.
struct Deal {
  int each, more;
};

struct QuickArgs {
  KindControl *control;
  const int *mask; // NULL: all ranks are active
  const void *topkIdx;
  const char *tokens;
  char *mine; // own exchange memory
  unsigned long long routing, routingHalf, rows, rowsHalf;
  int rank, numRanks, numTokens, maxTokens, topk, idx64, numLocal, numExperts, rowStride;
  unsigned rankTimes, stepTimes; // rank = expert * rankTimes >> 24, token = umulhi(unit, stepTimes)
  Wire wire;
  int tokenBytes, scaleBytes, inputBytes;
  Deal send, recv;
  int numSend, numRecv;
  int numWire, pace; // quantising: sending warps that store to peers
  int guess;         // log2 of numTokens, rounded up
  int groups, perSource, chunks;
  int perToken, tokenStride; // quantising: blocks on a token, tokens at once
  unsigned perTokenTimes;
  int rowAt, mapAt, beforeAt, owedAt, routeAt; // shared memory
  ep_ll_dispatch_t op;
};

EP_DEV int quickExpert(const QuickArgs &a, int t, int k) {
  const size_t i = (size_t)t * a.topk + k;
  return a.idx64 ? (int)((const long long *)a.topkIdx)[i] : ((const int *)a.topkIdx)[i];
}
EP_DEV bool quickIsExpert(const QuickArgs &a, int id) {
  return (unsigned)id < (unsigned)a.numExperts;
}
EP_DEV int quickRank(const QuickArgs &a, int expert) {
  return (int)((unsigned)expert * a.rankTimes >> 24);
}
EP_DEV int quickToken(const QuickArgs &a, int unit) {
  return (int)__umulhi((unsigned)unit, a.stepTimes);
}

EP_DEV Share quickShare(const Deal &d) {
  const int b = (int)blockIdx.x, first = b * d.each + min(b, d.more);
  return Share{first, first + d.each + (b < d.more ? 1 : 0)};
}

// What every warp needs first; in flight beside the loads that follow in its role.
struct FirstLoads {
  ControlWords control;
  int mask;
};

EP_DEV FirstLoads firstLoads(const QuickArgs &a, int lane) {
  return FirstLoads{loadControl(*a.control), a.mask && lane < a.numRanks ? a.mask[lane] : 1};
}

// All lanes: active ranks as bits.
EP_DEV unsigned quickActive(const QuickArgs &a, const FirstLoads &f, int lane) {
  return __ballot_sync(FULL_WARP, lane < a.numRanks && (f.mask != 0 || lane == a.rank));
}

EP_DEV size_t quickRouting(const QuickArgs &a, int from, int t, int buf) {
  return a.routing + (buf ? a.routingHalf : 0) + ((size_t)from * a.maxTokens + t) * 16;
}
EP_DEV size_t quickSlot(const QuickArgs &a, int from, int t, int buf) {
  return a.rows + (buf ? a.rowsHalf : 0) + (size_t)(from * a.maxTokens + t) * a.rowStride;
}

// Where the three words of a lane beside a mark belong, tokens, scales and weights being apart.
EP_DEV const char *quickWord(const QuickArgs &a, int t, int off) {
  if (off < a.tokenBytes) return a.tokens + (size_t)t * a.tokenBytes + off;
  off -= a.tokenBytes;
  if (off < a.scaleBytes) return (const char *)a.op.scales + (size_t)t * a.scaleBytes + off;
  off -= a.scaleBytes;
  return off < a.topk * 4 ? (const char *)a.op.weights + (size_t)t * a.topk * 4 + off : nullptr;
}

// A lane's part of a step of own token t; the word of the mark is left to the caller.
template <bool SEGMENTS>
EP_DEV uint4 quickRead(const QuickArgs &a, int t, const Piece &p, int lane) {
  uint4 v = make_uint4(0, 0, 0, 0);
  const char *row = a.tokens + (size_t)t * a.tokenBytes + p.off;
  if (!isMarkLane(lane)) {
    if (p.on) v = loadStream(row);
    return v;
  }
  unsigned w[3] = {0, 0, 0};
#pragma unroll
  for (int i = 0; i < 3; i++) {
    if (i >= p.words) continue;
    const char *q = SEGMENTS ? quickWord(a, t, p.off + 4 * i) : row + 4 * i;
    if (!SEGMENTS || q) w[i] = *(const unsigned *)q;
  }
  return make_uint4(w[0], w[1], w[2], 0);
}

// Where a lane's part of a step goes, for any row of the output. Branches would cost more than the stores,
// so each store has its own condition.
template <bool SEGMENTS> struct QuickTarget {
  static constexpr int PARTS = SEGMENTS ? 3 : 1;
  char *at[PARTS];
  int stride[PARTS];
  bool vector, first, second, third; // what this lane stores: 16 bytes, or up to three words

  EP_DEV QuickTarget(const QuickArgs &a, const Piece &p, int lane) {
    int words = isMarkLane(lane) ? p.words : 0;
    at[0] = (char *)a.op.outTokens + p.off;
    stride[0] = a.tokenBytes;
#pragma unroll
    for (int i = 0; SEGMENTS && i < PARTS; i++) {
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
    vector = p.on && !isMarkLane(lane);
    first = words > 0;
    second = words > 1;
    third = words > 2;
  }

  EP_DEV char *part(int i, int row) const {
    return SEGMENTS ? at[i % PARTS] + (size_t)row * stride[i % PARTS]
                    : at[0] + (size_t)row * stride[0] + 4 * i;
  }

  EP_DEV void put(int row, uint4 v) const {
    if (vector) storeStream(part(0, row), v);
    if (first) *(unsigned *)part(0, row) = v.x;
    if (second) *(unsigned *)part(1, row) = v.y;
    if (third) *(unsigned *)part(2, row) = v.z;
  }
};

#endif
