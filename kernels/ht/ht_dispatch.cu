// High-throughput dispatch, flat and expert-major, forward and backward: one launch, two scatter pipelines.
//
//   feeders    own token -> the rings of the ranks that need it (one copy a rank crosses the link), with its
//              weights; flags. Or straight into their slots
//   followers  received piece, or own token -> all its slots here; weights and ids; rows of padding
//
// A rank whose outputs lie in a window runs the direct kernel, which does both ways, as each pair of ranks
// has agreed (ht/ht_direct.cuh); it has two more warps a block, for weights. Where no pair needs a
// ring, a flat dispatch has no followers at all.
//
// A rank that is trapped writes nothing, but empties its rings.
#include "kernels/ht/ht_feed.cuh"
#include "kernels/ht/ht_follow.cuh"

namespace {

// Whether a rank's hello of this dispatch is here; asked for early, looked at late.
EP_DEV uint4 lookForHello(const ep_ht_group_t &g, unsigned long long number) {
  const int r = threadIdx.x;
  return r < g.numRanks ? loadSys(helloAt(g, g.rank, r, number)) : packWord(0, number);
}
// All threads of the last block, through rings only: everybody is in this dispatch (ht_direct.cuh, buffers).
EP_DEV void awaitHello(const ep_ht_group_t &g, uint4 seen, unsigned long long number) {
  if (isWordOf(seen, number)) return;
  const int r = threadIdx.x;
  unsigned long long ignored;
  takeWord(g, helloAt(g, g.rank, r, number), number, awaitedHello(r, number), ignored);
}

// One thread, if the rank is trapped by maxRecv (any other trap is the caller's to tell of).
EP_DEV void noteTrap(const ep_ht_group_t &g, const HtTables &t) {
  volatile ep_ht_note_t *note = g.note;
  if (!note || t.head->trapped != 1) return;
  note->slots = t.head->slotTotal;
  __threadfence_system();
  note->traps = note->traps + 1;
}

template <bool EXPERT_MAJOR, bool DIRECT>
__global__ void __launch_bounds__(DIRECT ? HT_DIRECT_THREADS : HT_SCATTER_THREADS, 1)
    dispatchKernel(const __grid_constant__ HtDispatchArgs a) {
  EP_DYNAMIC_SHARED(128, shared);
  const ep_ht_group_t &g = a.op.group;
  HtControl &c = htControl(g);
  const uint64_t began = g.stamps && threadIdx.x == 0 ? clockNs() : 0;
  const HtTables t = htTables(g, a.op.handle);
  if (htVolatile(&c.failed)) return;
  const unsigned long long number = htVolatile(&c.numbers[0]) + 1;
  const int role = threadIdx.x >> 5;
  if (blockIdx.x == 0 && role == 3) sayHello(a, t, number);
  if (blockIdx.x == 0 && threadIdx.x == 0) noteTrap(g, t);
  HtPairs *pairs = (HtPairs *)(shared + a.pairsAt);
  bool onlyDirect = false;
  if constexpr (DIRECT) {
    if (EXPERT_MAJOR) givePlaces(a, t, number);
    if (!hearPeers(a, t, number, *pairs)) return;
    onlyDirect = pairs->numRings == 0;
  }
  const bool feeds = (int)blockIdx.x < (onlyDirect ? a.directSplit : a.split);
  const bool follows = EXPERT_MAJOR || !onlyDirect;
  if (feeds) {
    const HtShape &shape = onlyDirect ? a.direct : a.feed;
    const HtBlock b = blockOf(shared, shape, a.room, a.slotStride);
    arm(b, HT_SCATTER_READERS, 1, false);
    if (DIRECT && role >= 4)
      passWeights(a, t, *pairs, number);
    else
      scatterPipe(b,
                  Feed<EXPERT_MAJOR, DIRECT>{a, t, c.rings[0].sent, HtDivisor(a.row.numPieces),
                                             pairs, number},
                  shape, &c.work[0][0]);
    if (DIRECT) __syncthreads();
  } else if (!DIRECT && role == 3) {
    clearTail(a, t, (blockIdx.x - a.split) * 32 + (threadIdx.x & 31),
              (long long)(gridDim.x - a.split) * 32);
  }
  if (DIRECT) tellDone(g, *pairs);
  if (follows) {
    const HtBlock b = blockOf(shared, a.follow, a.room, a.slotStride);
    arm(b, HT_SCATTER_READERS, 1, feeds);
    if (DIRECT && role >= 4) {
      if (!feeds) passWeights(a, t, *pairs, number);
    } else {
      const int padGroups = (t.head->numPads + 7) / 8, tokens = max(t.head->mostTokens, 1);
      const int perToken = g.numRanks + (padGroups + tokens - 1) / tokens;
      scatterPipe(b,
                  Follow<EXPERT_MAJOR, DIRECT>{a, t, c.rings[0].received, padGroups, perToken,
                                               HtDivisor(a.row.numPieces), HtDivisor(perToken),
                                               pairs, number},
                  a.follow, &c.work[0][1]);
    }
  }
  const uint4 hello = DIRECT ? make_uint4(0, 0, 0, 0) : lookForHello(g, number);
  leave<false>(
      g, t, a.row.numPieces, began,
      [&](int r) { return r != g.rank && !(DIRECT && pairs->tokens[r]); },
      [&] {
        if (DIRECT)
          awaitDone(g, *pairs);
        else
          awaitHello(g, hello, number);
        __syncthreads(); // the number of the operation stands until nobody waits any more
      });
}

} // namespace

const void *epHtDispatchKernel(bool expertMajor, bool direct) {
  if (expertMajor) {
    return direct ? EP_KERNEL(dispatchKernel<true, true>) : EP_KERNEL(dispatchKernel<true, false>);
  }
  return direct ? EP_KERNEL(dispatchKernel<false, true>) : EP_KERNEL(dispatchKernel<false, false>);
}
