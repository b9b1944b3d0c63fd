// Low-latency combine of whole rows: expert-major exact and rank-major.
//
// Sending warps push the rows that dispatch listed as owed into the source's exchange memory, slot
// (token, k). Rows are dealt to blocks and warps by the step, so that all have the same load
// whatever the routing (walk.cuh). Receiving warps of the same block sum tokens as the rows come
// (terms.cuh). Own rows are read in place. As some pairs of ranks exchange no rows, every rank also
// sends every rank a hello: whoever has heard all hellos of operation e knows that all have
// finished e - 1 (docs/kernels.md).
//
// With few tokens the way from the launch to the first store is what counts, and there every
// instruction does: a sending warp has its first rows on their way before it works out which
// operation this is.
#include "kernels/ll/terms.cuh"
#include "kernels/ll/ll_kernels.cuh"

namespace {

constexpr int IN_FLIGHT = 2; // rows that a sending warp may load before it stores the first

struct RowSender {
  const CombineArgs &a;
  const ControlWords words;
  const Lane lane;
  bool started = false;
  unsigned mark = 0;
  int buf = 0;
  unsigned long long active = 0;

  // All lanes, between the first loads and the first store.
  EP_DEV void start() {
    const ep_ll_group_t &g = a.op.group;
    const Op op = nextOp(words);
    active = activeRanks(g, lane.lane);
    awaitFree(g, EP_LL_COMBINE, op, active, lane.lane);
    mark = op.mark;
    buf = op.buf;
    started = true;
  }

  // Lane l gets entry `first + l` of the list.
  EP_DEV Owed entryOf(int first, int rows, uint4 guess) const {
    const int l = lane.lane, i = first + l;
    if (a.guesses && first + rows <= 64) {
      const unsigned r0 = __shfl_sync(FULL_WARP, guess.x, i >> 1),
                     f0 = __shfl_sync(FULL_WARP, guess.y, i >> 1),
                     r1 = __shfl_sync(FULL_WARP, guess.z, i >> 1),
                     f1 = __shfl_sync(FULL_WARP, guess.w, i >> 1);
      return i & 1 ? Owed{(int)r1, f1} : Owed{(int)r0, f0};
    }
    return l < rows ? owedOf(a.op.handle)[i] : Owed{0, 0};
  }

  // The lane's row's place at its source, NULL if it is not sent.
  EP_DEV char *placeOf(Owed e) const {
    if (!(active >> e.source() & 1)) return nullptr;
    return combineSlot(a.op.group, a.op.handle.numTopk, e.source(), e.token(), e.k(), buf);
  }

  // One warp's part of a share of at most 32 rows.
  EP_DEV void send(const Walk &walk, Owed entry, int warp, int numWarps) {
    char *place = started ? placeOf(entry) : nullptr;
#pragma unroll 1
    for (int i = warp; i < walk.count; i += numWarps * a.inFlight) {
      uint4 v[IN_FLIGHT];
      Walk::Unit u[IN_FLIGHT];
#pragma unroll
      for (int j = 0; j < IN_FLIGHT; j++) {
        if (j >= a.inFlight || i + j * numWarps >= walk.count) break;
        u[j] = walk.at(i + j * numWarps);
        const int row = __shfl_sync(FULL_WARP, entry.row, u[j].row);
        v[j] = readRow((const char *)a.op.tokens + (size_t)row * a.op.rowBytes, lane, u[j].step);
      }
      if (!started) {
        start();
        place = placeOf(entry);
      }
#pragma unroll
      for (int j = 0; j < IN_FLIGHT; j++) {
        if (j >= a.inFlight || i + j * numWarps >= walk.count) break;
        char *to = (char *)__shfl_sync(FULL_WARP, (unsigned long long)place, u[j].row);
        v[j] = toWire(v[j], lane, mark);
        if (to) storeStep(to, lane, u[j].step, v[j]);
      }
    }
  }

  EP_DEV void run(int numOwed, uint4 guess, int warp, int numWarps) {
    const int steps = a.wire.steps;
    const Share share = shareBy(a.blocks, numOwed * steps);
#pragma unroll 1
    for (int u = share.first; u < share.end;) {
      const int end = min(share.end, ((int)a.perRow.quotient(u) + 32) * steps);
      const Walk walk = Walk::of(u, end, a.perRow);
      const Owed entry = entryOf(walk.first, walk.rows, guess);
      send(walk, entry, warp, numWarps);
      if (a.op.group.bytes && warp == 0) count(walk);
      u = end;
    }
  }

  // All lanes of one warp: adds the rows that begin in this share to the byte counters.
  EP_DEV void count(const Walk &walk) const {
    const int l = lane.lane;
    if (l >= walk.rows || (l == 0 && walk.from > 0)) return;
    const int to = owedOf(a.op.handle)[walk.first + l].source();
    if (active >> to & 1) countBytes(a.op.group, EP_LL_COMBINE, to, a.op.rowBytes);
  }
};

template <Elem T, ep_ll_sum_t SUM>
__global__ void __launch_bounds__(COMBINE_THREADS, 1)
    combineKernel(const __grid_constant__ CombineArgs a) {
  EP_SHARED(uint64_t, began); // here and not in registers, until the end
  EP_SHARED(Op, saved);
  const ep_ll_group_t &g = a.op.group;
  if (g.stamps && threadIdx.x == 0) began = clockNs();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const bool sends = warp < a.roles.numSend;
  const int w = sends ? warp : warp - a.roles.numSend;
  // The last block has the least to do. Its last sending warp hears the hellos when its rows are
  // gone.
  const bool greets =
      blockIdx.x == gridDim.x - 1 && w == (sends ? a.roles.numSend : a.roles.numRecv) - 1;
  if (sends) {
    const uint4 guess = guessOwed(a, lane);
    const uint4 head = loadEarly(&headOf(a.op.handle).reached);
    const ControlWords words = loadControl(controlOf(g).kind[EP_LL_COMBINE]);
    RowSender{a, words, laneOf(a.wire, lane)}.run((int)head.z, guess, w, a.roles.numSend);
    if (greets && !a.roles.numRecv) greet(a);
  } else {
    if (greets && (a.roles.parts & EP_LL_SEND)) greet(a);
    TermSum<T, SUM>{a, g, laneOf(a.wire, lane)}.run(w, a.roles.numRecv);
  }
  if (greets && (a.roles.parts & EP_LL_RECV) && sends == (a.roles.numSend > 0)) hearAll(a);
  if (threadIdx.x == 0) saved = currentOp(g, a.op.handle, EP_LL_COMBINE, a.roles.parts);
  finishLaunch(g, a.op.handle, EP_LL_COMBINE, saved, a.roles.parts, began);
}

template <Elem T> const void *kernelOf(ep_ll_sum_t sum) {
  return sum == EP_LL_SUM_EXACT ? EP_KERNEL(combineKernel<T, EP_LL_SUM_EXACT>)
                                : EP_KERNEL(combineKernel<T, EP_LL_SUM_RANKS>);
}

} // namespace

const void *epLlCombineKernel(Elem elem, ep_ll_sum_t sum) {
  return elem == Elem::F32   ? kernelOf<Elem::F32>(sum)
         : elem == Elem::F16 ? kernelOf<Elem::F16>(sum)
                             : kernelOf<Elem::BF16>(sum);
}
