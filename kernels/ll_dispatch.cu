// Low-latency dispatch: one copy per (token, rank) on the wire; the receiver makes its experts' copies.
//
//   sending warps     rows, step by step, to every rank that needs them, each rank starting elsewhere
//   receiving warps   send the routing words (they have nothing else to do yet), read
//                     everybody's, derive the slots (slots.cuh), then take rows as they arrive
//
// A routing word says which of the destination's experts a token uses; it goes to every rank ahead of
// the row, so no counts are exchanged before sending. Work is dealt to blocks in equal contiguous shares
// of units: (token, step) for senders, (token, group of sources, step) for receivers. A warp waits for
// all sources of its unit at once and delivers whoever is there. The warp that has step 0 of a unit also
// writes what combine needs.
#include "kernels/device/announce.cuh"
#include "kernels/device/quantise.cuh"
#include "kernels/device/receiver.cuh"
#include "kernels/ll_kernels.cuh"

namespace {

// Rows as they are. One step at a time and few warps: that offers the link enough, and deeper store
// queues would hold up the routing words and the polls.
template <bool SEGMENTS>
EP_DEV void sendRows(const DispatchArgs &a, const Op &op, unsigned long long active, int warp,
                     int numWarps, int lane) {
  const ep_ll_group_t &g = a.op.group;
  const int steps = a.wire.steps;
  const Share share = shareOf(a.op.numTokens * steps, blockIdx.x, gridDim.x);
  unsigned long long to = 0;
  int last = -1;
#pragma unroll 1
  for (int u = share.first + warp; u < share.end; u += numWarps) {
    const int t = u / steps, s = u - t * steps;
    const uint4 v =
        readRow<SEGMENTS, false>(a, inputRow(a, t), pieceOf(a.wire, s, lane), lane, op.mark);
    if (t != last) to = ranksOfToken(g, a.op.handle, t, lane) & active & ~(1ull << g.rank);
    if (last < 0) awaitFree(g, EP_LL_DISPATCH, op, active, lane);
    last = t;
    sendStep(a, op, to, t, s, v, lane);
  }
}

// Rows quantised on the way: whole blocks work on a token, several if there are few tokens. Own rows
// take the same way, through the own exchange memory.
EP_DEV void sendQuantised(const DispatchArgs &a, const Op &op, unsigned long long active, int warp,
                          int numWarps, int lane) {
  EP_DYNAMIC_SHARED(16, shared);
  char *row = shared + a.rowAt;
  const int B = a.op.numTokens, grid = (int)gridDim.x, blk = (int)blockIdx.x;
  if (B == 0) return;
  const int perToken = max(1, min(a.wire.steps, grid / B)), stride = grid / perToken;
  const int part = blk % perToken, t0 = blk / perToken;
  awaitFree(a.op.group, EP_LL_DISPATCH, op, active, lane);
  if (t0 >= stride) return;
  for (int t = t0; t < B; t += stride) {
    if (t != t0) syncWarps(2, numWarps * 32);
    quantiseRow<4>((const char *)a.op.tokens + (size_t)t * a.op.tokenBytes * 2, a.op.tokenBytes,
                   a.op.quant == EP_LL_QUANT_E4M3_POW2, row, warp * 32 + lane, numWarps * 32);
    const unsigned long long to = ranksOfToken(a.op.group, a.op.handle, t, lane) & active;
    syncWarps(2, numWarps * 32);
    RowSource source = inputRow(a, t);
    source.tokens = row;
    source.scales = row + a.op.tokenBytes;
#pragma unroll 1
    for (int s = part + perToken * warp; s < a.wire.steps; s += perToken * numWarps) {
      const uint4 v = readRow<true, true>(a, source, pieceOf(a.wire, s, lane), lane, op.mark);
      sendStep(a, op, to, t, s, v, lane);
    }
  }
}

// SCRATCH: the slot map does not fit into shared memory and lies in the block's part of scratch. A
// variant of its own, so that the usual one has the instructions of shared memory.
template <bool QUANT, bool SEGMENTS, bool SCRATCH>
__global__ void __launch_bounds__(DISPATCH_THREADS, 1)
    dispatchKernel(const __grid_constant__ DispatchArgs a) {
  EP_DYNAMIC_SHARED(16, shared);
  const ep_ll_group_t &g = a.op.group;
  const uint64_t began = g.stamps && threadIdx.x == 0 ? clockNs() : 0;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const bool sends = warp < a.roles.numSend;
  const Op op = currentOp(g, a.op.handle, EP_LL_DISPATCH, a.roles.parts);
  const unsigned long long active = activeRanks(g, lane);
  char *mine = shared + a.warpAt + warp * a.warpBytes;
  const int w = sends ? warp : warp - a.roles.numSend;
  if (sends == (a.roles.numRecv == 0) && (a.roles.parts & EP_LL_SEND)) {
    announce(a, op, active, w, sends ? a.roles.numSend : a.roles.numRecv, (unsigned *)mine, lane);
  }
  if (sends) {
    if (QUANT)
      sendQuantised(a, op, active, w, a.roles.numSend, lane);
    else
      sendRows<SEGMENTS>(a, op, active, w, a.roles.numSend, lane);
  } else {
    char *big = shared + a.bigAt;
    if (SCRATCH) big = (char *)a.op.scratch + blockIdx.x * a.bigBytes;
    const SlotMap map = {
        (unsigned *)big, (unsigned *)(big + a.beforeAt), a.op.handle.rankMajor ? 1 : g.numLocal,
        a.chunks,        SlotMap::strideOf(a.chunks),    a.perSource};
    int *rows = (int *)mine;
    Receiver<QUANT, SEGMENTS> receiver = {a,
                                          g,
                                          op,
                                          active,
                                          w,
                                          a.roles.numRecv,
                                          lane,
                                          (int *)shared,
                                          rows,
                                          (unsigned *)(rows + SOURCES * a.copies),
                                          map,
                                          (unsigned *)(big + a.routeAt),
                                          (unsigned *)(big + a.owedAt)};
    receiver.run();
  }
  finishLaunch(g, a.op.handle, EP_LL_DISPATCH, op, a.roles.parts, began);
}

} // namespace

const void *epLlDispatchKernel(bool quantises, bool segments, bool scratch) {
  if (quantises) {
    return scratch ? EP_KERNEL(dispatchKernel<true, true, true>)
                   : EP_KERNEL(dispatchKernel<true, true, false>);
  }
  if (segments) {
    return scratch ? EP_KERNEL(dispatchKernel<false, true, true>)
                   : EP_KERNEL(dispatchKernel<false, true, false>);
  }
  return scratch ? EP_KERNEL(dispatchKernel<false, false, true>)
                 : EP_KERNEL(dispatchKernel<false, false, false>);
}
