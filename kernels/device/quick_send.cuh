// The sending half of the short dispatch: routing words, then rows, step by step, to every rank that
// needs them.
#ifndef TREFOIL_KERNELS_DEVICE_QUICK_SEND_CUH
#define TREFOIL_KERNELS_DEVICE_QUICK_SEND_CUH

#include "kernels/device/quantise.cuh"
#include "kernels/device/quick.cuh"

// The ranks of a token that are sent to, as bits, turned so that bit 0 is the next rank after this one.
EP_DEV unsigned quickTargets(const QuickArgs &a, int expert, unsigned to) {
  const unsigned one = quickIsExpert(a, expert) ? 1u << quickRank(a, expert) : 0u;
  unsigned set = __reduce_or_sync(FULL_WARP, one) & to;
  const int first = a.rank + 1;
  set = set >> first | set << (a.numRanks - first); // first <= numRanks <= 31, or 32 of 32 below
  return a.numRanks < 32 ? set & ((1u << a.numRanks) - 1) : set;
}

// All lanes, together: a line is stored in one piece.
EP_DEV void quickStore(const QuickArgs &a, unsigned turned, size_t at, bool on, uint4 v) {
#pragma unroll 1
  for (; turned; turned &= turned - 1) {
    int d = __ffs(turned) + a.rank;
    if (d >= a.numRanks) d -= a.numRanks;
    char *to = a.op.group.peers[d] + at;
    __syncwarp();
    if (on) storeSys(to, v);
  }
}

// The first expert of this block's tokens for a lane of the announcing warp, in flight before the rest.
EP_DEV int firstExpert(const QuickArgs &a, int warp, int lane) {
  const int t = (int)blockIdx.x + (int)gridDim.x * warp, k = lane & 7;
  return k < a.topk && t < a.numTokens ? quickExpert(a, t, k) : -1;
}

// One warp: routing words of this block's tokens; lane = (destination of four, k). COUNT: adds the bytes of
// their rows to the counters.
template <bool COUNT>
EP_DEV void quickAnnounce(const QuickArgs &a, const Op &op, unsigned active, int e, int warp,
                          int lane) {
  int t = (int)blockIdx.x + (int)gridDim.x * warp;
  if (t >= max(1, a.numTokens)) return;
  const int k = lane & 7;
  awaitFree(a.op.group, EP_LL_DISPATCH, op, active, lane);
  if (blockIdx.x == 0 && warp == 0 && lane == 0) headOf(a.op.handle).reached = active;
#pragma unroll 1
  for (;;) {
    const int r = quickIsExpert(a, e) ? quickRank(a, e) : -1;
    const size_t at = quickRouting(a, a.rank, t, op.buf);
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
                 make_uint4((unsigned)a.numTokens | op.lag << EP_LL_LAG_SHIFT, w, upper, op.mark));
      }
    }
    if (COUNT && t < a.numTokens) {
      const unsigned to = __reduce_or_sync(FULL_WARP, r >= 0 ? 1u << r : 0u) & active;
      if (to >> lane & 1) countBytes(a.op.group, EP_LL_DISPATCH, lane, a.tokenBytes + a.scaleBytes);
    }
    t += gridDim.x * a.numRecv;
    if (t >= a.numTokens) break;
    e = k < a.topk ? quickExpert(a, t, k) : -1;
  }
  if (blockIdx.x == 0 && warp == 0) {
    tellReceived(a.op.group, EP_LL_DISPATCH, op, active, lane);
  }
}

// Rows as they are. One step at a time and few warps: that offers the link enough, and deeper store
// queues would hold up the routing words and the polls.
template <bool SEGMENTS>
EP_DEV void quickSendRows(const QuickArgs &a, const FirstLoads &first, int warp, int lane) {
  const Share share = quickShare(a.send);
  int u = share.first + warp;
  if (u >= share.end) return;
  int t = quickToken(a, u), s = u - t * a.wire.steps;
  int e = lane < a.topk ? quickExpert(a, t, lane) : -1;
  Piece p = pieceOf(a.wire, s, lane);
  uint4 v = quickRead<SEGMENTS>(a, t, p, lane);
  const Op op = nextOp(first.control);
  const unsigned active = quickActive(a, first, lane), others = active & ~(1u << a.rank);
  awaitFree(a.op.group, EP_LL_DISPATCH, op, active, lane);
  unsigned to = quickTargets(a, e, others);
#pragma unroll 1
  for (;;) {
    if (isMarkLane(lane)) v.w = op.mark;
    const size_t at = quickSlot(a, a.rank, t, op.buf) + s * 512 + lane * 16;
    quickStore(a, to, at, p.on, v);
    u += a.numSend;
    if (u >= share.end) return;
    const int last = t;
    t = quickToken(a, u);
    s = u - t * a.wire.steps;
    p = pieceOf(a.wire, s, lane);
    v = quickRead<SEGMENTS>(a, t, p, lane);
    if (t != last) {
      e = lane < a.topk ? quickExpert(a, t, lane) : -1;
      to = quickTargets(a, e, others);
    }
  }
}

// The token that this block quantises first, or -1.
EP_DEV int quickFirstToken(const QuickArgs &a) {
  const int blk = (int)blockIdx.x;
  const int t = a.perToken == 1 ? blk : (int)__umulhi((unsigned)blk, a.perTokenTimes);
  return t < min(a.tokenStride, a.numTokens) ? t : -1;
}

// Barriers: 2 all warps that quantise the first token, 3 the senders. The first receiving warp announces
// instead.
EP_DEV int quantisingThreads(const QuickArgs &a) {
  return (a.numSend + a.numRecv - 1) * 32;
}

// Receiving warps, which have nothing else to do at first: a share of the block's first token.
EP_DEV void helpQuantise(const QuickArgs &a, int warp, char *row, int lane) {
  const int t = quickFirstToken(a);
  if (t < 0 || warp == 0) return;
  quantiseRow<2>(a.tokens + (size_t)t * a.inputBytes, a.tokenBytes,
                 a.op.quant == EP_LL_QUANT_E4M3_POW2, row, (a.numSend + warp - 1) * 32 + lane,
                 quantisingThreads(a));
  arriveWarps(2, quantisingThreads(a));
}

// Rows quantised on the way, in shared memory as they will travel. Own rows take the same way, through
// the own exchange memory. Few warps send, and each waits for a load after a step: what all of them could
// store at once would fill the queues to the link, and the polls would wait behind it.
template <bool WEIGHTS>
EP_DEV void quickSendQuantised(const QuickArgs &a, const FirstLoads &first, int warp, char *row,
                               int lane) {
  const int t0 = quickFirstToken(a);
  if (t0 < 0) return;
  const int part = (int)blockIdx.x - t0 * a.perToken, threads = a.numSend * 32;
  const bool pow2 = a.op.quant == EP_LL_QUANT_E4M3_POW2;
  const Op op = nextOp(first.control);
  const unsigned active = quickActive(a, first, lane);
#pragma unroll 1
  for (int t = t0; t < a.numTokens; t += a.tokenStride) {
    if (t != t0) syncWarps(3, threads);
    const int e = lane < a.topk ? quickExpert(a, t, lane) : -1;
    const char *x = a.tokens + (size_t)t * a.inputBytes;
    quantiseRow<2>(x, a.tokenBytes, pow2, row, warp * 32 + lane,
                   t == t0 ? quantisingThreads(a) : threads);
    if (WEIGHTS && warp == 0 && a.tokenBytes + a.scaleBytes + lane * 4 < a.wire.rowBytes) {
      *(float *)(row + a.tokenBytes + a.scaleBytes + lane * 4) =
          lane < a.topk ? a.op.weights[(size_t)t * a.topk + lane] : 0.0f;
    }
    const unsigned to = quickTargets(a, e, active);
    if (t == t0) awaitFree(a.op.group, EP_LL_DISPATCH, op, active, lane);
    if (t == t0) {
      syncWarps(2, quantisingThreads(a));
    } else {
      syncWarps(3, threads);
    }
    const size_t at = quickSlot(a, a.rank, t, op.buf) + lane * 16;
    const int stride = a.perToken * a.numWire;
#pragma unroll 1
    for (int s = part + a.perToken * warp; warp < a.numWire && s < a.wire.steps; s += stride) {
      const Piece p = pieceOf(a.wire, s, lane);
      uint4 v = make_uint4(0, 0, 0, op.mark);
      if (!isMarkLane(lane)) {
        if (p.on) v = *(const uint4 *)(row + p.off);
      } else {
        const unsigned *q = (const unsigned *)(row + p.off);
        if (p.words > 0) v.x = q[0];
        if (p.words > 1) v.y = q[1];
        if (p.words > 2) v.z = q[2];
      }
      quickStore(a, to, at + s * 512, p.on, v);
      if (a.pace && s + stride < a.wire.steps) settle(loadSys(x + s * 64).x);
    }
  }
}

#endif
