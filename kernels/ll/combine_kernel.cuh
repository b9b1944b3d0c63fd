// Low-latency combine of whole rows: expert-major exact and rank-major.
//
// Sending warps push the rows of dispatch's return list into the source's exchange memory, row
// (token, k). Work is partitioned over blocks and warps by the step, so that all have the same load
// whatever the routing (work_iterator.cuh). Receiving warps of the same block sum tokens as the rows come
// (terms.cuh). Own rows are read in place. As some pairs of ranks exchange no rows, every rank also
// sends every rank an announcement: the announcements of operation e of all ranks imply that all have
// finished e - 1 (docs/kernels.md).
//
// With few tokens the way from the launch to the first store is what counts, and there every
// instruction does: a sending warp has its first rows on their way before it works out which
// operation this is.
#ifndef TREFOIL_KERNELS_LL_COMBINE_KERNEL_CUH
#define TREFOIL_KERNELS_LL_COMBINE_KERNEL_CUH

#include "kernels/ll/terms.cuh"
#include "kernels/ll/ll_kernels.cuh"

constexpr int IN_FLIGHT = 2; // rows that a sending warp may load before it stores the first

// FAR: rows to other domains are the relay's.
template <bool FAR> struct RowSender {
  const CombineArgs &a;
  const ControlWords words;
  const Lane lane;
  bool started = false;
  unsigned flag = 0;
  int buf = 0;
  unsigned long long active = 0;

  // All lanes, between the first loads and the first store.
  EP_DEV void start() {
    const ep_ll_group_t &g = a.op.group;
    const Op op = nextOp(words);
    active = activeRanks(g, lane.lane);
    waitFree(g, EP_LL_COMBINE, op, active, lane.lane);
    flag = op.flag;
    buf = op.buf;
    started = true;
  }

  // Lane l gets entry `first + l` of the list.
  EP_DEV ReturnEntry entryOf(int first, int rows, uint4 guess) const {
    const int l = lane.lane, i = first + l;
    if (a.guesses && first + rows <= 64) {
      const unsigned r0 = __shfl_sync(FULL_WARP, guess.x, i >> 1),
                     f0 = __shfl_sync(FULL_WARP, guess.y, i >> 1),
                     r1 = __shfl_sync(FULL_WARP, guess.z, i >> 1),
                     f1 = __shfl_sync(FULL_WARP, guess.w, i >> 1);
      return i & 1 ? ReturnEntry{(int)r1, f1} : ReturnEntry{(int)r0, f0};
    }
    return l < rows ? returnsOf(a.op.handle)[i] : ReturnEntry{0, 0};
  }

  // Where the lane's row goes at its source; NULL if it is not sent.
  EP_DEV char *remoteRowOf(ReturnEntry e) const {
    if (!(active >> e.source() & 1)) return nullptr;
    if (FAR && isFar(a.op.group, e.source())) return nullptr;
    return combineRowAt(a.op.group, a.op.handle.numTopk, e.source(), e.token(), e.k(), buf);
  }

  // One warp's part of a partition of at most 32 rows.
  EP_DEV void send(const WorkIterator &work, ReturnEntry entry, int warp, int numWarps) {
    if (FAR && isFar(a.op.group, entry.source())) entry.slot = -1;
    char *remoteRow = started ? remoteRowOf(entry) : nullptr;
#pragma unroll 1
    for (int i = warp; i < work.count; i += numWarps * a.inFlight) {
      uint4 v[IN_FLIGHT];
      WorkIterator::Item u[IN_FLIGHT];
#pragma unroll
      for (int j = 0; j < IN_FLIGHT; j++) {
        if (j >= a.inFlight || i + j * numWarps >= work.count) break;
        u[j] = work.at(i + j * numWarps);
        const int row = __shfl_sync(FULL_WARP, entry.slot, u[j].row);
        v[j] = make_uint4(0, 0, 0, 0);
        if (FAR && row < 0) continue;
        v[j] = readRow((const char *)a.op.tokens + (size_t)row * a.op.rowBytes, lane, u[j].step);
      }
      if (!started) {
        start();
        remoteRow = remoteRowOf(entry);
      }
#pragma unroll
      for (int j = 0; j < IN_FLIGHT; j++) {
        if (j >= a.inFlight || i + j * numWarps >= work.count) break;
        char *to = (char *)__shfl_sync(FULL_WARP, (unsigned long long)remoteRow, u[j].row);
        v[j] = toWire(v[j], lane, flag);
        if (to) storeStep(to, lane, u[j].step, v[j]);
      }
    }
  }

  EP_DEV void run(int numReturns, uint4 guess, int warp, int numWarps) {
    const int steps = a.wire.steps;
    const Partition part = partitionBy(a.blocks, numReturns * steps);
#pragma unroll 1
    for (int u = part.first; u < part.end;) {
      const int end = min(part.end, ((int)a.perRow.quotient(u) + 32) * steps);
      const WorkIterator work = WorkIterator::of(u, end, a.perRow);
      const ReturnEntry entry = entryOf(work.first, work.rows, guess);
      send(work, entry, warp, numWarps);
      if (a.op.group.bytes && warp == 0) count(work);
      u = end;
    }
  }

  // All lanes of one warp: adds the rows that begin in this part to the byte counters.
  EP_DEV void count(const WorkIterator &work) const {
    const int l = lane.lane;
    if (l >= work.rows || (l == 0 && work.from > 0)) return;
    const int to = returnsOf(a.op.handle)[work.first + l].source();
    if (active >> to & 1) countBytes(a.op.group, EP_LL_COMBINE, to, a.op.rowBytes);
  }
};

// All threads of a block.
template <Elem T, ep_ll_sum_t SUM, bool FAR = false> EP_DEV void runCombine(const CombineArgs &a) {
  EP_SHARED(uint64_t, began); // here and not in registers, until the end
  EP_SHARED(Op, saved);
  const ep_ll_group_t &g = a.op.group;
  if (g.stamps && threadIdx.x == 0) began = clockNs();
  const CombineWarp self = combineWarp(a);
  const int lane = self.lane, w = self.number;
  const bool sends = self.sends, announces = self.announces;
  if (sends) {
    const uint4 guess = guessReturns(a, lane);
    const uint4 head = loadEarly(&headOf(a.op.handle).reached);
    const ControlWords words = loadControl(controlOf(g).kind[EP_LL_COMBINE]);
    RowSender<FAR>{a, words, laneOf(a.wire, lane)}.run((int)head.z, guess, w, a.roles.numSend);
    if (announces && !a.roles.numRecv) announce<FAR>(a);
  } else {
    if (announces && (a.roles.parts & EP_LL_SEND)) announce<FAR>(a);
    TermSum<T, SUM>{a, g, laneOf(a.wire, lane)}.run(w, a.roles.numRecv);
  }
  if (announces && (a.roles.parts & EP_LL_RECV) && sends == (a.roles.numSend > 0)) pollAcks(a);
  if (threadIdx.x == 0) saved = currentOp(g, a.op.handle, EP_LL_COMBINE, a.roles.parts);
  finishLaunch<FAR>(g, a.op.handle, EP_LL_COMBINE, saved, a.roles.parts, began);
}

#endif
