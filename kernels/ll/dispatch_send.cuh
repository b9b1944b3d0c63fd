// The sending half of a dispatch: routing words, then rows, step by step, to every rank that needs them,
// each rank starting elsewhere.
//
// A routing word lists the destination's experts that a token uses; it goes to every rank ahead of the
// row, so no counts are exchanged before sending. The first word of a token is {B | ack distance << 21,
// ids, flag}.
#ifndef TREFOIL_KERNELS_LL_DISPATCH_SEND_CUH
#define TREFOIL_KERNELS_LL_DISPATCH_SEND_CUH

#include "kernels/ll/dispatch.cuh"
#include "kernels/ll/quantise.cuh"

// A lane's entries of a token: k and, generic, 32 + k.
template <class T> struct Experts { int id[T::GENERIC ? 2 : 1]; };
template <class T> EP_DEV Experts<T> expertsOf(const DispatchArgs &a, int t, int k, bool is) {
  Experts<T> e;
  e.id[0] = k < a.topk && is ? expertAt(a, t, k) : -1;
  if constexpr (T::GENERIC) e.id[1] = k + 32 < a.topk && is ? expertAt(a, t, k + 32) : -1;
  return e;
}

// All lanes: the ranks of `to` that have one of a token's experts, an entry a lane.
template <class T>
EP_DEV typename T::RankSet ranksOf(const DispatchArgs &a, const Experts<T> &e,
                                   typename T::RankSet to) {
  if constexpr (T::GENERIC) {
    unsigned long long set = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      set |= warpRankSet(isExpert(a, e.id[i]) ? rankOf<T>(a, e.id[i]) : -1, a.numRanks);
    }
    return set & to;
  } else {
    const unsigned one = isExpert(a, e.id[0]) ? 1u << rankOf<T>(a, e.id[0]) : 0u;
    return __reduce_or_sync(FULL_WARP, one) & to;
  }
}

// The same turned so that bit 0 is the next rank after this one.
template <class T>
EP_DEV typename T::RankSet targetsOf(const DispatchArgs &a, const Experts<T> &e,
                                     typename T::RankSet to) {
  typename T::RankSet set = ranksOf<T>(a, e, to);
  const int first = T::GENERIC && a.rank + 1 == a.numRanks ? 0 : a.rank + 1;
  if (T::GENERIC) { // up to 64 of 64
    set = set >> first | (first ? set << (a.numRanks - first) : 0);
    return a.numRanks < 64 ? set & ((1ull << a.numRanks) - 1) : set;
  }
  set = set >> first | set << (a.numRanks - first); // first <= numRanks <= 31
  return a.numRanks < 32 ? set & ((1u << a.numRanks) - 1) : set;
}

// All lanes, together: a packet is stored as a whole. Of other domains the first stands for all.
template <class T>
EP_DEV void storeToRanks(const DispatchArgs &a, typename T::RankSet turned, int buf, size_t at,
                         bool on, uint4 v) {
  const size_t own = receivedRowOf(a, a.rank, 0, buf), mirrored = mirroredRow(a.op.group, 0, buf);
  bool isMirrored = false;
#pragma unroll 1
  for (; turned; turned &= turned - 1) {
    int d = firstBit(turned) + a.rank;
    if (d >= a.numRanks) d -= a.numRanks;
    char *to = a.op.group.peers[d] + at;
    if (T::FAR && isFar(a.op.group, d)) {
      if (isMirrored) continue;
      isMirrored = true;
      to = a.op.group.peers[d] + mirrored + (at - own);
    }
    __syncwarp();
    if (on) storeSys(to, v);
  }
}

// Routing words of a token. Fast: lane = (destination of four, k).
template <class T>
EP_DEV void sendWord(const DispatchArgs &a, const Op &op, unsigned active, int e, size_t at,
                     int lane) {
  const int k = lane & 7, r = isExpert(a, e) ? rankOf<T>(a, e) : -1;
#pragma unroll 1
  for (int d0 = 0; d0 < a.numRanks; d0 += 4) {
    const int d = d0 + (lane >> 3);
    const unsigned id = r == d ? (unsigned)(e - r * a.numLocal) : 0xffu;
    unsigned w = id << (k & 3) * 8;
    w |= __shfl_xor_sync(FULL_WARP, w, 1);
    w |= __shfl_xor_sync(FULL_WARP, w, 2);
    const unsigned upper = __shfl_down_sync(FULL_WARP, w, 4);
    if (k == 0 && active >> d & 1) {
      storeSys(a.op.group.peers[d] + at,
               make_uint4((unsigned)a.numTokens | op.ackDistance << EP_LL_ACK_DISTANCE_SHIFT, w,
                          upper, op.flag));
    }
  }
}

// Generic: a lane is a vector of a destination, and shuffles from the lanes that have its entries.
template <class T>
EP_DEV void sendVectors(const DispatchArgs &a, const Op &op, unsigned long long active,
                        const Experts<T> &e, size_t at, int lane) {
  const int perWord = 4 / a.idBytes, bits = 8 * a.idBytes;
  unsigned entry[2]; // rank << 16 | local id
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int r = isExpert(a, e.id[i]) ? rankOf<T>(a, e.id[i]) : 0xffff;
    entry[i] = (unsigned)r << 16 | (r == 0xffff ? 0 : e.id[i] - r * a.numLocal);
  }
#pragma unroll 1
  for (int i0 = 0; i0 < a.numRanks * a.idVectors; i0 += 32) {
    const int i = i0 + lane, d = i / a.idVectors, v = i - d * a.idVectors;
    unsigned w[3] = {~0u, ~0u, ~0u};
#pragma unroll
    for (int q = 0; q < 12; q++) {
      const int j = q & 3, k = (v * 3 + q / 4 - 1) * perWord + j;
      const unsigned low = __shfl_sync(FULL_WARP, entry[0], k & 31),
                     high = __shfl_sync(FULL_WARP, entry[1], k & 31), m = k < 32 ? low : high;
      if (j < perWord && k >= 0 && k < a.topk && (int)(m >> 16) == d) {
        w[q / 4] ^= ((m ^ ~0u) & ((1u << bits) - 1)) << (j * bits);
      }
    }
    if (v == 0) w[0] = (unsigned)a.numTokens | op.ackDistance << EP_LL_ACK_DISTANCE_SHIFT;
    if (d < a.numRanks && active >> d & 1) {
      const int ahead =
          sourceAt<T::FAR>(a.op.group, d) - a.op.group.rank; // in the order of sources
      char *to = a.op.group.peers[d] + at + v * 16;
      if (T::FAR) to += (ptrdiff_t)ahead * a.maxTokens * a.idVectors * 16;
      storeSys(to, make_uint4(w[0], w[1], w[2], op.flag));
    }
  }
}

// The first experts of this block's tokens for a lane of the announcing warp, in flight before the rest.
template <class T> EP_DEV Experts<T> firstExperts(const DispatchArgs &a, int warp, int lane) {
  const int t = (int)blockIdx.x + a.numSms * warp;
  return expertsOf<T>(a, t, T::GENERIC ? lane : lane & 7, t < a.numTokens);
}

// One warp: routing words of this block's tokens to every active rank, itself included, by the warps of a
// role. COUNT: adds the bytes of their rows to the counters.
template <class T>
EP_DEV void announce(const DispatchArgs &a, const Op &op, typename T::RankSet active, Experts<T> e,
                     int warp, int lane) {
  int t = (int)blockIdx.x + a.numSms * warp;
  if (t >= max(1, a.numTokens)) return;
  const int k = T::GENERIC ? lane : lane & 7;
  waitFree(a.op.group, EP_LL_DISPATCH, op, active, lane);
  if (blockIdx.x == 0 && warp == 0 && lane == 0) headOf(a.op.handle).reached = active;
#pragma unroll 1
  for (;;) {
    const size_t at = routingOf<T>(a, a.rank, t, op.buf);
    if constexpr (T::GENERIC)
      sendVectors<T>(a, op, active, e, at, lane);
    else
      sendWord<T>(a, op, active, e.id[0], at, lane);
    if (T::COUNT && t < a.numTokens) {
      const typename T::RankSet to = ranksOf<T>(a, e, active);
#pragma unroll
      for (int d = lane; d < (T::GENERIC ? 64 : 32); d += 32) {
        if (to >> d & 1) countBytes(a.op.group, EP_LL_DISPATCH, d, a.tokenBytes + a.scaleBytes);
      }
    }
    t += a.numSms * (T::GENERIC && !a.numRecv ? a.numSend : a.numRecv);
    if (t >= a.numTokens) break;
    e = expertsOf<T>(a, t, k, true);
  }
  if (blockIdx.x == 0 && warp == 0) {
    sendAcks<T::FAR>(a.op.group, EP_LL_DISPATCH, op, active, lane);
  }
}

// Rows as they are. One step at a time and few warps: that offers the link enough, and deeper store
// queues would hold up the routing words and the polls.
template <class T>
EP_DEV void sendRows(const DispatchArgs &a, const FirstLoads &first, int warp, int lane) {
  const Partition part = partitionOf(a.send);
  int u = part.first + warp;
  if (u >= part.end) return;
  int t = tokenOf<T>(a, u), s = u - t * a.wire.steps;
  Experts<T> e = expertsOf<T>(a, t, lane, true);
  RowVector p = vectorOf(a.wire, s, lane);
  uint4 v = readInput<T>(a, t, p, lane);
  const Op op = nextOp(first.control);
  const typename T::RankSet active = activeOf<T>(a, first, lane),
                            others = active & ~((typename T::RankSet)1 << a.rank);
  waitFree(a.op.group, EP_LL_DISPATCH, op, active, lane);
  typename T::RankSet to = targetsOf<T>(a, e, others);
#pragma unroll 1
  for (;;) {
    if (isFlagLane(lane)) v.w = op.flag;
    const size_t at = receivedRowOf(a, a.rank, t, op.buf) + s * 512 + lane * 16;
    storeToRanks<T>(a, to, op.buf, at, p.on, v);
    u += a.numSend;
    if (u >= part.end) return;
    const int last = t;
    t = tokenOf<T>(a, u);
    s = u - t * a.wire.steps;
    p = vectorOf(a.wire, s, lane);
    v = readInput<T>(a, t, p, lane);
    if (t != last) {
      e = expertsOf<T>(a, t, lane, true);
      to = targetsOf<T>(a, e, others);
    }
  }
}

// The token that this block quantises first, or -1.
EP_DEV int firstToken(const DispatchArgs &a) {
  const int blk = (int)blockIdx.x;
  const int t = (int)a.perToken.smallQuotient(blk);
  return t < min(a.tokenStride, a.numTokens) ? t : -1;
}

// Barriers: 2 all warps that quantise the first token, 3 the senders. The first receiving warp announces
// instead.
template <class T> EP_DEV int quantisingThreads(const DispatchArgs &a) {
  return (a.numSend + (T::GENERIC && !a.numRecv ? 0 : a.numRecv - 1)) * 32;
}

// Receiving warps, which have nothing else to do at first: a share of the block's first token.
template <class T> EP_DEV void helpQuantise(const DispatchArgs &a, int warp, char *row, int lane) {
  const int t = firstToken(a);
  if (t < 0 || warp == 0) return;
  quantiseRow<2>(a.tokens + (size_t)t * a.inputBytes, a.tokenBytes,
                 a.op.quant == EP_LL_QUANT_E4M3_POW2, row, (a.numSend + warp - 1) * 32 + lane,
                 quantisingThreads<T>(a));
  arriveWarps(2, quantisingThreads<T>(a));
}

// One warp: the weights of token t behind its quantised row.
template <class T> EP_DEV void appendWeights(const DispatchArgs &a, int t, char *row, int lane) {
  const int end = a.tokenBytes + a.scaleBytes;
#pragma unroll
  for (int k = lane; k < (T::GENERIC ? EP_LL_MAX_TOPK : 32); k += 32) {
    if (end + k * 4 >= a.wire.rowBytes) return;
    *(float *)(row + end + k * 4) = k < a.topk ? a.op.weights[(size_t)t * a.topk + k] : 0.0f;
  }
}

// A lane's part of a step of a row in shared memory.
template <class T>
EP_DEV uint4 readShared(const char *row, const RowVector &p, int lane, unsigned flag) {
  uint4 v = make_uint4(0, 0, 0, flag);
  if (!isFlagLane(lane)) {
    if (isWhole<T>(p)) v = *(const uint4 *)(row + p.off);
  } else {
    const unsigned *q = (const unsigned *)(row + p.off);
    if (p.words > 0) v.x = q[0];
    if (p.words > 1) v.y = q[1];
    if (p.words > 2) v.z = q[2];
  }
  return v;
}

// Rows quantised on the way, in shared memory as they will travel. Own rows take the same way, through
// the own exchange memory. Few warps send, and each waits for a load after a step: what all of them could
// store at once would fill the queues to the link, and the polls would wait behind it.
template <class T>
EP_DEV void sendQuantised(const DispatchArgs &a, const FirstLoads &first, int warp, char *row,
                          int lane) {
  const int t0 = firstToken(a);
  if (t0 < 0) return;
  const int part = (int)blockIdx.x - t0 * (int)a.perToken.n, threads = a.numSend * 32;
  const bool pow2 = a.op.quant == EP_LL_QUANT_E4M3_POW2;
  const Op op = nextOp(first.control);
  const typename T::RankSet active = activeOf<T>(a, first, lane);
#pragma unroll 1
  for (int t = t0; t < a.numTokens; t += a.tokenStride) {
    if (t != t0) syncWarps(3, threads);
    const Experts<T> e = expertsOf<T>(a, t, lane, true);
    const char *x = a.tokens + (size_t)t * a.inputBytes;
    quantiseRow<2>(x, a.tokenBytes, pow2, row, warp * 32 + lane,
                   t == t0 ? quantisingThreads<T>(a) : threads);
    if (T::RANK_MAJOR && warp == 0) appendWeights<T>(a, t, row, lane);
    const typename T::RankSet to = targetsOf<T>(a, e, active);
    if (t == t0) waitFree(a.op.group, EP_LL_DISPATCH, op, active, lane);
    if (t == t0) {
      syncWarps(2, quantisingThreads<T>(a));
    } else {
      syncWarps(3, threads);
    }
    const size_t at = receivedRowOf(a, a.rank, t, op.buf) + lane * 16;
    const int stride = (int)a.perToken.n * a.numWire;
#pragma unroll 1
    for (int s = part + (int)a.perToken.n * warp; warp < a.numWire && s < a.wire.steps;
         s += stride) {
      const RowVector p = vectorOf(a.wire, s, lane);
      storeToRanks<T>(a, to, op.buf, at + s * 512, p.on, readShared<T>(row, p, lane, op.flag));
      if (a.pace && s + stride < a.wire.steps) settle(loadSys(x + s * 64).x);
    }
  }
}

#endif
