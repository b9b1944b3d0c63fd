// Low-latency dispatch straight into windows: rank-major outputs of ranks that both go straight are written
// by the sender (device/straight.cuh has the protocol); between other ranks rows travel as lines, as in
// ll_dispatch.cu, whose routing words, slots and notes these are.
//
//   sending warps     while they wait to be told where outputs lie, count the rows that go to each rank
//                     before the block's first token; then rows, read once and stored to all that need
//                     them, the own output included; as lines the weights, and rows of pairs that do
//                     not go straight
//   receiving warps   send the routing words, read everybody's, take lines as they arrive (Complete has one
//                     warp of the others that only hears which pairs there are)
//
// Work is dealt by (token, step) of the row as lines, whoever goes straight, so that a block knows its share
// before it knows the pairs. Step s of that stands for 512 bytes s of the row as it lies, and for step s
// of its weights.
#include "kernels/device/announce.cuh"
#include "kernels/device/receiver.cuh"
#include "kernels/device/straight.cuh"
#include "kernels/ll_kernels.cuh"

namespace {

constexpr int STRAIGHT_AHEAD = 4;     // steps that a warp loads before it stores the first
constexpr int SENDERS = 2, HEARD = 3; // barriers

// The lane's part of the weights of a row, as lines of their own.
EP_DEV Piece weightsPiece(const StraightArgs &s, int step, int lane) {
  Piece p = pieceOf(s.weights, step, lane);
  p.off += s.d.op.tokenBytes + s.d.op.scaleBytes;
  return p;
}

// Between ranks of which one does not go straight.
static __device__ __noinline__ void sendLines(const DispatchArgs &a, Op op,
                                              unsigned long long lines, int t, int step, int lane) {
  const uint4 v =
      readRow<true, false>(a, inputRow(a, t), pieceOf(a.wire, step, lane), lane, op.mark);
  __syncwarp();
  sendStep(a, op, lines, t, step, v, lane);
}

struct StraightSender {
  const StraightArgs &s;
  const DispatchArgs &a;
  const ep_ll_group_t &g;
  const Op op;
  StraightPairs &pairs; // the block's, and:
  int *counts;          // [numWarps][R]
  const int warp, numWarps, lane;
  bool tellsReceivers = false;
  // Rows that go to ranks `lane` and `lane + 32` before token `at`, and where that one goes.
  int before0 = 0, before1 = 0, at = 0;
  unsigned long long to = 0;

  // One lane: the ranks of a token.
  EP_DEV unsigned long long ranksOf(int t) const {
    unsigned long long set = 0;
#pragma unroll 4
    for (int k = 0; k < a.op.handle.numTopk; k++) {
      const int e = expertAt(a.op.handle, t, k);
      if (isExpert(g, e)) set |= 1ull << rankOf(g, e);
    }
    return set;
  }

  // This warp's part of the tokens in front of `end`.
  EP_DEV void countRows(int end) {
    int n0 = 0, n1 = 0;
#pragma unroll 1
    for (int t0 = warp * 32; t0 < end; t0 += numWarps * 32) {
      const unsigned long long set = t0 + lane < end ? ranksOf(t0 + lane) : 0;
#pragma unroll 1
      for (int d = 0; d < g.numRanks; d++) {
        const int n = __popc(__ballot_sync(FULL_WARP, (set >> d & 1) != 0));
        if (d == lane) n0 += n;
        if (d == lane + 32) n1 += n;
      }
    }
    if (lane < g.numRanks) counts[warp * g.numRanks + lane] = n0;
    if (lane + 32 < g.numRanks) counts[warp * g.numRanks + lane + 32] = n1;
  }

  // All lanes of all sending warps, between their first loads and their first stores.
  EP_DEV void start(int firstToken) {
    countRows(firstToken);
    awaitFree(g, EP_LL_DISPATCH, op, ~0ull, lane);
    if (warp == 0) hearPeers(s, op, pairs, lane);
    if (warp == 0 && tellsReceivers) arriveWarps(HEARD, (a.roles.numRecv + 1) * 32);
    syncWarps(SENDERS, numWarps * 32);
#pragma unroll 1
    for (int w = 0; w < numWarps; w++) {
      if (lane < g.numRanks) before0 += counts[w * g.numRanks + lane];
      if (lane + 32 < g.numRanks) before1 += counts[w * g.numRanks + lane + 32];
    }
    at = firstToken - 1;
  }

  EP_DEV void moveTo(int t) {
#pragma unroll 1
    while (at < t) {
      before0 += (int)(to >> lane & 1);
      before1 += (int)(to >> lane >> 32 & 1);
      to = ranksOfToken(g, a.op.handle, ++at, lane);
    }
  }

  EP_DEV int slotAt(int d) const {
    return __shfl_sync(FULL_WARP, d < 32 ? before0 : before1, d & 31);
  }

  EP_DEV uint4 load(int t, int step) const {
    const int off = step * 512 + lane * 16, tb = a.op.tokenBytes, sb = a.op.scaleBytes;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (step >= s.rowSteps) return v;
    const char *from = off < tb ? (const char *)a.op.tokens + (size_t)t * tb + off
                                : (const char *)a.op.scales + (size_t)t * sb + (off - tb);
    loadStreamIf(v, from, off < tb + sb);
    return v;
  }

  EP_DEV void storeRow(unsigned long long ranks, int first, int step, uint4 v) const {
    const int off = step * 512 + lane * 16, tb = a.op.tokenBytes, sb = a.op.scaleBytes;
    forRanks(ranks, first, g.numRanks, [&](int d) {
      const size_t slot = slotAt(d);
      char *p =
          off < tb ? pairs.tokens[d] + slot * tb + off : pairs.scales[d] + slot * sb + (off - tb);
      storeStreamIf(p, v, off < tb + sb);
    });
  }

  // Of token `at`.
  EP_DEV void storeWeights(unsigned long long ranks, int first, int step) const {
    const Piece p = pieceOf(s.weights, step, lane);
    const int K = a.op.handle.numTopk, k = p.off >> 2, n = min(p.words, K - k);
    const float *row = a.op.weights + (size_t)at * K + k;
    unsigned v[4] = {0, 0, 0, isMarkLane(lane) ? op.mark : 0u};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i < n) v[i] = __float_as_uint(row[i]);
    }
    forRanks(ranks, first, g.numRanks, [&](int d) {
      const int slot = slotAt(d);
      if (d != g.rank) {
        __syncwarp();
        storeStep(dispatchSlot(g, d, g.rank, at, op.buf), p, step, lane,
                  make_uint4(v[0], v[1], v[2], v[3]));
        return;
      }
      float *own = a.op.outWeights + ((size_t)g.rank * g.maxTokens + slot) * K + k;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (i < n) own[i] = __uint_as_float(v[i]);
      }
    });
  }

  EP_DEV void send(int t, int step, uint4 v) {
    moveTo(t);
    const unsigned long long straight = to & pairs.set, lines = to & ~straight;
    const int first = g.rank + 1 == g.numRanks ? 0 : g.rank + 1;
    if (step < s.weights.steps) storeWeights(straight, first, step);
    if (step < s.rowSteps) storeRow(straight, first, step, v);
    if (lines) sendLines(a, op, lines, t, step, lane);
  }

  // A choice instead of a copy of the code for each.
  static EP_DEV uint4 pick(const uint4 (&v)[STRAIGHT_AHEAD], int j) {
    uint4 w = v[0];
#pragma unroll
    for (int i = 1; i < STRAIGHT_AHEAD; i++) {
      if (i == j) w = v[i];
    }
    return w;
  }

  EP_DEV void run() {
    const int steps = a.wire.steps;
    const Share share = shareOf(a.op.numTokens * steps, blockIdx.x, gridDim.x);
    int u = share.first + warp;
    bool started = false;
    do {
      uint4 v[STRAIGHT_AHEAD];
#pragma unroll
      for (int j = 0; j < STRAIGHT_AHEAD; j++) {
        const int i = u + j * numWarps, t = (int)s.perRow.quotient(i);
        if (i < share.end) v[j] = load(t, i - t * steps);
      }
      if (!started) start(share.first < share.end ? (int)s.perRow.quotient(share.first) : 0);
      started = true;
#pragma unroll 1
      for (int j = 0; j < STRAIGHT_AHEAD; j++) {
        const int i = u + j * numWarps, t = (int)s.perRow.quotient(i);
        if (i >= share.end) break;
        send(t, i - t * steps, pick(v, j));
      }
      u += STRAIGHT_AHEAD * numWarps;
    } while (u < share.end);
    syncWarps(SENDERS, numWarps * 32);
    if (warp == 0) tellDone(s, op, pairs.set, lane);
  }
};

struct StraightReceiver {
  const StraightArgs &s;
  Receiver<false, true> &r;
  StraightPairs &pairs;

  // All lanes: own rows are where they belong.
  EP_DEV void take(int t, int group, int step, unsigned sources) {
    const int own = r.g.rank - group * SOURCES;
    if (own >= 0 && own < SOURCES) sources &= ~(1u << own);
    const unsigned straight = sources & (unsigned)(pairs.set >> group * SOURCES);
#pragma unroll 1
    for (int lines = 1; lines >= 0; lines--) {
      const unsigned waiting = lines ? sources & ~straight : straight;
      if (!waiting || (!lines && step >= s.weights.steps)) continue;
      const Piece p = lines ? pieceOf(s.d.wire, step, r.lane) : weightsPiece(s, step, r.lane);
      r.takePiece(p, t, group, step, waiting, 0);
    }
  }

  EP_DEV void run() {
    const int R = r.g.numRanks;
    const int most = r.learn(s.d.wire.steps);
    syncWarps(HEARD, (r.numWarps + 1) * 32);
    const unsigned long long all = R == 64 ? ~0ull : (1ull << R) - 1, set = pairs.set;
    r.work(most, set == all ? s.weights.steps : s.d.wire.steps,
           [&](int t, int group, int step, unsigned sources) { take(t, group, step, sources); });
    if (blockIdx.x == 0 && r.warp == 0) awaitDone(s, r.op, set, r.lane);
  }
};

__global__ void __launch_bounds__(STRAIGHT_THREADS, 1)
    straightKernel(const __grid_constant__ StraightArgs s) {
  EP_DYNAMIC_SHARED(16, shared);
  const DispatchArgs &a = s.d;
  const ep_ll_group_t &g = a.op.group;
  const uint64_t began = g.stamps && threadIdx.x == 0 ? clockNs() : 0;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const bool sends = warp < a.roles.numSend;
  const int w = sends ? warp : warp - a.roles.numSend;
  const bool announces = sends == (a.roles.numRecv == 0) && (a.roles.parts & EP_LL_SEND);
  unsigned dones[2] = {0, 0};
  if (announces && blockIdx.x == 0 && w == 0) lookAtDones(g, dones, lane);
  const Op op = currentOp(g, a.op.handle, EP_LL_DISPATCH, a.roles.parts);
  const unsigned long long active = activeRanks(g, lane);
  char *mine = shared + a.warpAt + warp * a.warpBytes;
  StraightPairs &pairs = *(StraightPairs *)(shared + s.pairsAt);
  if (announces) {
    announce(a, op, active, w, sends ? a.roles.numSend : a.roles.numRecv, (unsigned *)mine, lane,
             EP_LL_STRAIGHT, [&] { sayHello(s, op, op.buf ? dones[1] : dones[0], lane); });
  }
  if (sends && !(a.roles.parts & EP_LL_SEND)) { // Complete: one warp that hears for the others
    hearPeers(s, op, pairs, lane);
    arriveWarps(HEARD, (a.roles.numRecv + 1) * 32);
  } else if (sends) {
    StraightSender sender = {s, a, g, op, pairs, (int *)(&pairs + 1), w, a.roles.numSend, lane};
    sender.tellsReceivers = a.roles.numRecv > 0;
    sender.run();
  } else {
    char *big = shared + a.bigAt;
    const SlotMap map = {(unsigned *)big, (unsigned *)(big + a.beforeAt), 1,
                         a.chunks,        SlotMap::strideOf(a.chunks),    a.perSource};
    int *rows = (int *)mine;
    Receiver<false, true> receiver = {a,
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
    StraightReceiver{s, receiver, pairs}.run();
  }
  finishLaunch(g, a.op.handle, EP_LL_DISPATCH, op, a.roles.parts, began);
}

} // namespace

const void *epLlStraightKernel() {
  return EP_KERNEL(straightKernel);
}
