// High-throughput dispatch, flat and expert-major, forward and backward: one launch, two scatter pipelines.
//
//   senders    own token -> the FIFOs of the ranks that need it (one copy a rank crosses the link), with its
//              weights; flags. Or a push into their outputs
//   receivers  received chunk, or own token -> all its rows here; weights and ids; rows of padding
//
// A rank whose outputs lie in a window runs the pushing kernel, which does both, as each pair of ranks
// has agreed (ht/ht_push.cuh); it has two more warps a block, for weights. Where no pair needs a
// FIFO, a flat dispatch has no receivers at all.
//
// A rank that is trapped writes nothing, but empties its FIFOs.
#include "kernels/ht/ht_dispatch_send.cuh"
#include "kernels/ht/ht_dispatch_receive.cuh"

namespace {

// Whether a rank's announcement of this dispatch is here; asked for early, looked at late.
EP_DEV uint4 readAnnounce(const ep_ht_group_t &g, unsigned long long number) {
  const int r = threadIdx.x;
  return r < g.numRanks ? loadSys(announceAt(g, g.rank, r, number)) : packFlagged(0, number);
}
// All threads of the last block, through FIFOs only: all ranks are in this dispatch (ht_push.cuh, buffers).
EP_DEV void waitAnnounce(const ep_ht_group_t &g, uint4 seen, unsigned long long number) {
  if (isFlagged(seen, number)) return;
  const int r = threadIdx.x;
  const Awaited w = {EP_HT_KIND_DISPATCH, EP_WAIT_ANNOUNCE, r, 0, -1};
  unsigned long long ignored;
  waitFlagged(g, announceAt(g, g.rank, r, number), number, w, ignored);
}

template <bool EXPERT_MAJOR, bool PUSHES>
__global__ void __launch_bounds__(PUSHES ? HT_PUSH_THREADS : HT_SCATTER_THREADS, 1)
    dispatchKernel(const __grid_constant__ HtDispatchArgs a) {
  EP_DYNAMIC_SHARED(128, shared);
  const ep_ht_group_t &g = a.op.group;
  HtControl &c = htControl(g);
  const uint64_t began = g.stamps && threadIdx.x == 0 ? clockNs() : 0;
  const HtTables t = htTables(g, a.op.handle);
  if (loadVolatile(&c.wait.failed)) return;
  const unsigned long long number = loadVolatile(&c.numbers[0]) + 1;
  const int role = threadIdx.x >> 5;
  if (blockIdx.x == 0 && role == 3) sendAnnounces(a, t, number);
  if (blockIdx.x == 0 && threadIdx.x == 0) recordTrap(g, t);
  HtPushTargets *targets = (HtPushTargets *)(shared + a.targetsAt);
  bool onlyPushes = false;
  if constexpr (PUSHES) {
    if (EXPERT_MAJOR) sendRemoteRows(a, t, number);
    if (!waitPeers(a, t, number, *targets)) return;
    onlyPushes = targets->numFifos == 0;
  }
  const bool sends = (int)blockIdx.x < (onlyPushes ? a.pushSplit : a.split);
  const bool receives = EXPERT_MAJOR || !onlyPushes;
  if (sends) {
    const HtShape &shape = onlyPushes ? a.push : a.sender;
    const HtBlock b = blockOf(shared, shape, a.room, a.stageStride);
    arm(b);
    if (PUSHES && role >= 4)
      passWeights(a, t, *targets, number);
    else
      scatterPipe(b,
                  Sender<EXPERT_MAJOR, PUSHES>{a, t, c.fifos[0].sent, Divisor::of(a.row.numChunks),
                                               targets, number},
                  shape, &c.work[0][0]);
    disarm(b);
  } else if (!PUSHES && role == 3) {
    clearTail(a, t, (blockIdx.x - a.split) * 32 + (threadIdx.x & 31),
              (long long)(gridDim.x - a.split) * 32);
  }
  if (PUSHES) sendDone(g, *targets);
  if (receives) {
    const HtBlock b = blockOf(shared, a.receiver, a.room, a.stageStride);
    arm(b);
    if (PUSHES && role >= 4) {
      if (!sends) passWeights(a, t, *targets, number);
    } else {
      const int padGroups = (t.head->numPads + 7) / 8, tokens = max(t.head->mostTokens, 1);
      const int perToken = g.numRanks + (padGroups + tokens - 1) / tokens;
      scatterPipe(b,
                  Receiver<EXPERT_MAJOR, PUSHES>{a, t, c.fifos[0].received, padGroups, perToken,
                                                 Divisor::of(a.row.numChunks),
                                                 Divisor::of(perToken), targets, number},
                  a.receiver, &c.work[0][1]);
    }
  }
  const uint4 announce = PUSHES ? make_uint4(0, 0, 0, 0) : readAnnounce(g, number);
  leave<false>(
      g, t, a.row.numChunks, began,
      [&](int r) { return r != g.rank && !(PUSHES && targets->tokens[r]); },
      [&] {
        if (PUSHES)
          waitDone(g, *targets);
        else
          waitAnnounce(g, announce, number);
        __syncthreads(); // the operation's number stays until no thread waits any more
      });
}

} // namespace

const void *epHtDispatchKernel(bool expertMajor, bool push) {
  if (expertMajor) {
    return push ? EP_KERNEL(dispatchKernel<true, true>) : EP_KERNEL(dispatchKernel<true, false>);
  }
  return push ? EP_KERNEL(dispatchKernel<false, true>) : EP_KERNEL(dispatchKernel<false, false>);
}
