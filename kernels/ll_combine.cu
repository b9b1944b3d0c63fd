// Low-latency combine of whole rows: expert-major exact and rank-major.
//
// Sending warps push the rows that dispatch listed as owed into the source's exchange memory, slot
// (token, k). Rows are dealt to blocks and warps by the step, so that all have the same load whatever the
// routing. Receiving warps of the same block sum tokens as the rows come (terms.cuh). Own rows are read in
// place. As some pairs of ranks exchange no rows, every rank also sends every rank a hello: whoever
// has heard all hellos of operation e knows that all have finished e - 1 (docs/kernels.md).
#include "kernels/device/terms.cuh"
#include "kernels/ll_kernels.cuh"

namespace {

// Steps [s0, s0 + len) of all rows. A warp's units are known ahead: lane i holds the list entry of its
// i-th unit.
EP_DEV void sendChunk(const CombineArgs &a, const Op &op, unsigned long long active, int s0,
                      int len, int warp, int lane) {
  const ep_ll_group_t &g = a.op.group;
  const int numWarps = a.roles.numSend;
  const Share share = shareOf(headOf(a.op.handle).numOwed * len, blockIdx.x, gridDim.x);
  const Owed *list = owedOf(a.op.handle);
#pragma unroll 1
  for (int u0 = share.first + warp; u0 < share.end; u0 += numWarps * 32) {
    const int u = u0 + lane * numWarps;
    Owed entry = {0, 0};
    if (u < share.end) entry = list[u / len];
    const int n = min(32, (share.end - u0 + numWarps - 1) / numWarps);
#pragma unroll 1
    for (int i = 0; i < n; i++) {
      const int s = s0 + (u0 + i * numWarps) % len;
      const Owed e = {__shfl_sync(FULL_WARP, entry.row, i), __shfl_sync(FULL_WARP, entry.from, i)};
      const int to = e.source();
      if (!(active >> to & 1)) continue;
      const Piece p = pieceOf(a.wire, s, lane);
      const char *row = (const char *)a.op.tokens + (size_t)e.row * a.op.rowBytes;
      const uint4 v = readPiece(row, p, lane, op.mark);
      awaitFree(g, EP_LL_COMBINE, op, active, lane);
      storeStep(combineSlot(g, a.op.handle.numTopk, to, e.token(), e.k(), op.buf), p, s, lane, v);
      if (s == 0 && lane == 0) countBytes(g, EP_LL_COMBINE, to, a.op.rowBytes);
    }
  }
}

template <Elem T, ep_ll_sum_t SUM>
__global__ void __launch_bounds__(COMBINE_THREADS, 1)
    combineKernel(const __grid_constant__ CombineArgs a) {
  extern __shared__ __align__(16) char shared[];
  const ep_ll_group_t &g = a.op.group;
  const uint64_t began = g.stamps && threadIdx.x == 0 ? clockNs() : 0;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const Op op = currentOp(g, a.op.handle, EP_LL_COMBINE, a.roles.parts);
  const unsigned long long active = activeRanks(g, lane);
  const int w = warp - a.roles.numSend;
  const bool greets = blockIdx.x == 0 && (a.roles.numRecv && a.roles.numSend ? w == 0 : warp == 0);
  if (greets && (a.roles.parts & EP_LL_SEND)) {
    awaitFree(g, EP_LL_COMBINE, op, active, lane);
    sendHello(g, EP_LL_COMBINE, op, active, lane);
    tellReceived(g, EP_LL_COMBINE, op, active, lane);
  }
  if (w < 0) {
#pragma unroll 1
    for (int s0 = 0; s0 < a.wire.steps; s0 += a.chunk) {
      sendChunk(a, op, active, s0, min(a.chunk, a.wire.steps - s0), warp, lane);
    }
  } else {
    const unsigned long long live = active & headOf(a.op.handle).reached;
    Term *terms = (Term *)(shared + a.warpAt) + w * a.op.handle.numTopk;
    TermSum<T, SUM>{a, g, op, live, lane, terms}.run(w, a.roles.numRecv);
    if (greets) {
      const unsigned lag = awaitHellos(g, EP_LL_COMBINE, op, active, lane);
      if (lane == 0) noteHellos(g, EP_LL_COMBINE, op, lag);
    }
  }
  finishLaunch(g, a.op.handle, EP_LL_COMBINE, op, a.roles.parts, began);
}

template <Elem T> const void *kernelOf(ep_ll_sum_t sum) {
  return sum == EP_LL_SUM_EXACT ? (const void *)combineKernel<T, EP_LL_SUM_EXACT>
                                : (const void *)combineKernel<T, EP_LL_SUM_RANKS>;
}

} // namespace

const void *epLlCombineKernel(Elem elem, ep_ll_sum_t sum) {
  return elem == Elem::F32   ? kernelOf<Elem::F32>(sum)
         : elem == Elem::F16 ? kernelOf<Elem::F16>(sum)
                             : kernelOf<Elem::BF16>(sum);
}
