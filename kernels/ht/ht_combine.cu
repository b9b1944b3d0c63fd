// High-throughput combine, flat and expert-major, forward and backward: one launch, two pipelines.
//
//   senders    flat: a row -> the FIFO of the token's rank; expert-major: the sum of a token's rows here,
//              by ascending k, rounded, the same way, the own rank's tokens included
//   receivers  own token: the sum over its ranks, ascending, rounded; flat reads the own rank's row in place
//
// What a rank has dropped, or all of it if it was trapped, travels as flags alone and adds nothing.
//
// A rank whose flat input lies in a window runs the pulling kernel: between it and every other such
// rank receivers read rows where they lie (ht/ht_pull.cuh), between it and the rest senders and FIFOs do
// as ever. Where no pair needs a FIFO all blocks receive.
#include "kernels/ht/ht_combine_roles.cuh"

namespace {

template <Elem T, bool EXPERT_MAJOR, bool PULLS>
__global__ void __launch_bounds__(HT_PIPE_THREADS, 1)
    combineKernel(const __grid_constant__ HtCombineArgs a) {
  EP_DYNAMIC_SHARED(128, shared);
  const ep_ht_group_t &g = a.op.group;
  HtControl &c = htControl(g);
  const uint64_t began = g.stamps && threadIdx.x == 0 ? clockNs() : 0;
  const HtTables t = htTables(g, a.op.handle);
  if (loadVolatile(&c.wait.failed)) return;
  const unsigned long long number = loadVolatile(&c.numbers[1]) + 1;
  HtPullSources *sources = (HtPullSources *)(shared + a.sourcesAt);
  bool sends = (int)blockIdx.x < a.split;
  if (!EXPERT_MAJOR && blockIdx.x == 0 && threadIdx.x >> 5 == 3) announceInput<PULLS>(a, t, number);
  if constexpr (PULLS) {
    if (!waitInputs(a, number, *sources)) return;
    if (a.op.rowWeights) sendGradients(a, t, *sources, number);
    sends = sends && sources->numFifos > 0;
  }
  if (sends) {
    const CombineSender<EXPERT_MAJOR, PULLS> sender{
        a,
        t,
        c.fifos[1].sent,
        Divisor::of(a.row.numChunks),
        Divisor::of(max(g.numRanks - (EXPERT_MAJOR ? 0 : 1), 1)),
        sources};
    const HtBlock b = EXPERT_MAJOR ? rowBlockOf(shared, a.sender)
                                   : blockOf(shared, a.sender, a.room, a.stageStride);
    arm(b);
    if constexpr (EXPERT_MAJOR)
      rowPipe<HtPlainSum<T>>(b, sender, a.sender, &c.work[1][0]);
    else
      scatterPipe(b, sender, a.sender, &c.work[1][0]);
    disarm(b);
  }
  const HtBlock b = rowBlockOf(shared, a.receiver);
  arm(b);
  rowPipe<HtPlainSum<T>>(
      b,
      CombineReceiver<EXPERT_MAJOR, PULLS>{a, t, c.fifos[1].received, Divisor::of(a.row.numChunks),
                                           Divisor::of(g.numLocal), sources, number},
      a.receiver, &c.work[1][1]);
  if constexpr (PULLS) sendReadDones(g, *sources);
  leave<true>(
      g, t, a.row.numChunks, began,
      [&](int r) { return EXPERT_MAJOR || (r != g.rank && !(PULLS && sources->rows[r])); },
      [&] {
        if constexpr (PULLS) {
          waitReadDones(a, t, *sources);
          __syncthreads(); // the operation's number stays until no thread waits any more
        }
      });
}

} // namespace

const void *epHtCombineKernel(trefoil_dtype_t dtype, bool expertMajor, bool pulls) {
  return kernelOfDtype(dtype, [=](auto elem) {
    constexpr Elem T = decltype(elem)::value;
    return expertMajor ? EP_KERNEL(combineKernel<T, true, false>)
           : pulls     ? EP_KERNEL(combineKernel<T, false, true>)
                       : EP_KERNEL(combineKernel<T, false, false>);
  });
}
