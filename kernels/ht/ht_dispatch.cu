// High-throughput dispatch, flat and expert-major, forward and backward: one launch, two pipelines.
//
//   senders    own token -> the FIFOs of the ranks that need it (one copy a rank crosses the link), with its
//              weights; flags. Or a push into their outputs
//   receivers  received chunk, or own token -> all its rows here; weights and ids; rows of padding
//
// A rank whose outputs, or inputs, lie in a window runs the kernel that pushes, or pulls, between pairs of
// ranks that have agreed (ht/ht_pairs.cuh), and uses FIFOs between others; it has two more warps a block, for
// weights. Where no pair needs a FIFO, a flat dispatch that pushes has no receivers, one that pulls no
// senders.
//
// A rank that is trapped writes nothing, but empties its FIFOs.
#include "kernels/ht/ht_dispatch_send.cuh"
#include "kernels/ht/ht_dispatch_receive.cuh"

#include <type_traits>

namespace {

// A rank's announcement of this dispatch, if it is here; loaded early, tested late.
EP_DEV uint4 readAnnounce(const ep_ht_group_t &g) {
  const int r = threadIdx.x;
  return r < g.numRanks ? loadSys(announceAt<EP_HT_KIND_DISPATCH>(g, g.rank, r))
                        : make_uint4(0, 0, ~0u, ~0u);
}

template <bool EXPERT_MAJOR, HtWay WAY>
__global__ void __launch_bounds__(htDispatchThreads(WAY), 1)
    dispatchKernel(const __grid_constant__ HtDispatchArgs a) {
  constexpr bool PUSHES = WAY == HT_PUSH, PULLS = WAY == HT_PULL, WINDOWS = PUSHES || PULLS;
  EP_DYNAMIC_SHARED(128, shared);
  const ep_ht_group_t &g = a.op.group;
  HtControl &c = htControl(g);
  const uint64_t began = g.stamps && threadIdx.x == 0 ? clockNs() : 0;
  const HtTables t = htTables(g, a.op.handle);
  if (loadVolatile(&c.wait.failed)) return;
  const unsigned long long number = loadVolatile(&c.numbers[0]) + 1;
  const int role = threadIdx.x >> 5;
  if (blockIdx.x == 0 && role == 3) sendAnnounces<WAY>(a, t, number);
  if (blockIdx.x == 0 && threadIdx.x == 0) recordTrap(g, t);
  HtPairs *pairs = (HtPairs *)(shared + a.pairsAt);
  bool noFifos = false;
  if constexpr (WINDOWS) {
    if (PUSHES && EXPERT_MAJOR) sendRemoteRows(a, t, number);
    if (!waitPeers<WAY>(a, t, number, *pairs)) return;
    noFifos = pairs->numFifos == 0;
  }
  const bool sends = (int)blockIdx.x < (noFifos ? a.pushSplit : a.split);
  const bool receives = EXPERT_MAJOR || PULLS || !noFifos;
  if (sends) {
    const HtShape &shape = noFifos ? a.push : a.sender;
    const HtBlock b = blockOf(shared, shape, a.room, a.stageStride);
    arm(b);
    if (WINDOWS && threadIdx.x >= HT_PIPE_THREADS)
      passWeights(a, t, *pairs, number, HT_PIPE_THREADS);
    else
      scatterPipe(b,
                  Sender<EXPERT_MAJOR, WAY>{a, t, c.fifos[0].sent, Divisor::of(a.row.numChunks),
                                            pairs, number},
                  shape, &c.work[0][0]);
    disarm(b);
  } else if (!WINDOWS && role == 3) {
    clearTail(a, t, (blockIdx.x - a.split) * 32 + (threadIdx.x & 31),
              (long long)(gridDim.x - a.split) * 32);
  }
  if (PUSHES) sendDones(g, *pairs);
  if (receives) {
    const HtBlock b = rowBlockOf(shared, a.receiver);
    arm(b);
    if (WINDOWS && threadIdx.x >= HT_PIPE_THREADS) {
      if (!sends) passWeights(a, t, *pairs, number, HT_PIPE_THREADS);
    } else {
      const HtCandidates all(a, t, !PULLS);
      const Receiver<EXPERT_MAJOR, WAY> receiver{
          a, t, c.fifos[0].received, all, Divisor::of(a.row.numChunks), pairs, number};
      rowPipe<HtCopies>(b, receiver, a.receiver, &c.work[0][1]);
    }
  }
  if constexpr (PULLS) {
    __syncthreads();
    sendDones(g, *pairs);
  }
  const uint4 announce = WINDOWS ? make_uint4(0, 0, 0, 0) : readAnnounce(g);
  leave<false>(
      g, t, a.row.numChunks, began,
      [&](int r) { return r != g.rank && !(WINDOWS && pairs->tokens[r]); },
      [&] {
        if constexpr (WINDOWS)
          waitDones<WAY>(a, t, *pairs);
        else
          waitAnnounce<EP_HT_KIND_DISPATCH>(g, threadIdx.x, number, announce);
        __syncthreads(); // the operation's number stays until no thread waits any more
      });
}

} // namespace

const void *epHtDispatchKernel(bool expertMajor, HtWay way) {
  const auto of = [way](auto em) {
    constexpr bool EM = decltype(em)::value;
    return way == HT_FIFOS  ? EP_KERNEL(dispatchKernel<EM, HT_FIFOS>)
           : way == HT_PUSH ? EP_KERNEL(dispatchKernel<EM, HT_PUSH>)
                            : EP_KERNEL(dispatchKernel<EM, HT_PULL>);
  };
  return expertMajor ? of(std::true_type()) : of(std::false_type());
}
