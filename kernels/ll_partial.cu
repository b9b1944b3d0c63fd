// Low-latency combine by partial sums: a rank weighs and sums its own experts' rows of a token, rounds
// the partial to the wire type and sends one row per (token, rank).
//
// The weights are known at the source only, so they travel first, three in a 16-byte word with its mark.
// All warps send and then all receive: reading the experts' rows needs every warp's loads in flight. The
// rows of own tokens take the same way through the own exchange memory.
#include "kernels/device/terms.cuh"
#include "kernels/ll_kernels.cuh"

namespace {

constexpr int PAIRS = 8; // (source, token) pairs that a block prepares at once
constexpr int ROWS = 4;  // experts' rows that a warp has in flight

struct Pair {
  int n; // local experts of the token
  int row[EP_LL_MAX_TOPK];
  float weight[EP_LL_MAX_TOPK];
  unsigned char k[EP_LL_MAX_TOPK];
};

EP_DEV char *weightsAt(const CombineArgs &a, int at, int from, int t, int buf) {
  const ep_ll_group_t &g = a.op.group;
  return g.peers[at] + g.at.weights + buf * ((g.at.rows[0] - g.at.weights) >> 1) +
         ((size_t)from * g.maxTokens + t) * a.weightVectors * 16;
}

// One warp: the weights of token t to the ranks that need them.
EP_DEV void sendWeights(const CombineArgs &a, const Op &op, unsigned long long live, int t,
                        int lane) {
  const ep_ll_group_t &g = a.op.group;
  const int K = a.op.handle.numTopk;
  const unsigned long long to = ranksOfToken(g, a.op.handle, t, lane) & live & ~(1ull << g.rank);
#pragma unroll 1
  for (int i = lane; i < g.numRanks * a.weightVectors; i += 32) {
    const int d = i / a.weightVectors, v = i - d * a.weightVectors;
    unsigned w[3] = {0, 0, 0};
#pragma unroll
    for (int j = 0; j < 3; j++) {
      if (v * 3 + j < K) w[j] = __float_as_uint(a.op.weights[(size_t)t * K + v * 3 + j]);
    }
    if (!(to >> d & 1)) continue;
    storeSys(weightsAt(a, d, g.rank, t, op.buf) + v * 16, make_uint4(w[0], w[1], w[2], op.mark));
  }
}

// One warp: the rows of a pair, ascending k. All its lanes.
EP_DEV void findRows(const CombineArgs &a, Owed e, Pair &pair, int lane) {
  const ep_ll_group_t &g = a.op.group;
  const int K = a.op.handle.numTopk;
  const int *table =
      rowOfTable(g, a.op.handle) + ((size_t)e.source() * g.maxTokens + e.token()) * K;
  int n = 0;
#pragma unroll 1
  for (int k0 = 0; k0 < K; k0 += 32) {
    const int k = k0 + lane, row = k < K ? table[k] : -1;
    const unsigned m = __ballot_sync(FULL_WARP, row >= 0);
    if (row >= 0) {
      const int at = n + __popc(m & ((1u << lane) - 1));
      pair.row[at] = row;
      pair.k[at] = (unsigned char)k;
    }
    n += __popc(m);
  }
  if (lane == 0) pair.n = n;
  __syncwarp();
}

// One warp: the weights of a pair, from the source's words. False if they never came.
EP_DEV void findWeights(const CombineArgs &a, const Op &op, Owed e, Pair &pair, int lane) {
  const ep_ll_group_t &g = a.op.group;
  const int K = a.op.handle.numTopk, src = e.source(), t = e.token();
#pragma unroll 1
  for (int i = lane; i < pair.n; i += 32) {
    const int k = pair.k[i];
    if (src == g.rank) {
      pair.weight[i] = a.op.weights[(size_t)t * K + k];
      continue;
    }
    const char *word = weightsAt(a, g.rank, src, t, op.buf) + k / 3 * 16;
    Spin spin;
    uint4 q;
    for (;;) {
      q = loadSys(word);
      if (q.w == op.mark) break;
      const Awaited w = {EP_LL_COMBINE, EP_LL_PHASE_WEIGHTS, src, q.w, t};
      if (!keepWaiting(g, op, w, spin)) break;
    }
    pair.weight[i] = __uint_as_float(k % 3 == 0 ? q.x : k % 3 == 1 ? q.y : q.z);
  }
}

template <Elem T> struct Sender {
  const CombineArgs &a;
  const Op op;
  const unsigned long long active;
  const int warp, numWarps, lane;
  Pair *pairs;

  EP_DEV void loadSome(uint4 (&v)[ROWS], const Pair &pair, int from, const Piece &p) const {
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
      if (from + j >= pair.n) continue;
      const char *row = (const char *)a.op.tokens + (size_t)pair.row[from + j] * a.op.rowBytes;
      v[j] = readPiece(row, p, lane, op.mark);
    }
  }

  // All warps of the block: pairs [pair0, ...) of units [u0, end). The first rows of every warp are on
  // their way while a warp a pair waits for the weights.
  EP_DEV void sendPairs(const Owed *list, int s0, int steps, int u0, int end) {
    const ep_ll_group_t &g = a.op.group;
    const int pair0 = u0 / steps, numPairs = (end - 1) / steps - pair0 + 1;
    __syncthreads();
#pragma unroll 1
    for (int i = warp; i < numPairs; i += numWarps) findRows(a, list[pair0 + i], pairs[i], lane);
    __syncthreads();
    bool ready = false;
#pragma unroll 1
    for (int u = u0 + warp; u < end || !ready; u += numWarps) {
      const int at = min(u, end - 1) / steps, s = s0 + u - at * steps;
      const Pair &pair = pairs[at - pair0];
      const Owed e = list[at];
      const Piece p = pieceOf(a.wire, s, lane);
      const int n = u < end ? pair.n : 0;
      Sum<T> sum;
      sum.clear();
#pragma unroll 1
      for (int i = 0; i < n || !ready; i += ROWS) {
        uint4 v[ROWS];
        if (i < n) loadSome(v, pair, i, p);
        if (!ready) {
#pragma unroll 1
          for (int q = warp; q < numPairs; q += numWarps) {
            findWeights(a, op, list[pair0 + q], pairs[q], lane);
          }
          __syncthreads();
          ready = true;
        }
#pragma unroll
        for (int j = 0; j < ROWS; j++) {
          if (i + j < n) sum.addWeighted(v[j], pair.weight[i + j]);
        }
      }
      const int to = e.source();
      if (n == 0 || !(active >> to & 1)) continue;
      uint4 out = sum.round();
      if (isMarkLane(lane)) out.w = op.mark;
      storeStep(combineSlot(g, a.op.handle.numTopk, to, e.token(), e.k(), op.buf), p, s, lane, out);
      if (s == 0 && lane == 0) countBytes(g, EP_LL_COMBINE, to, a.op.rowBytes);
    }
  }

  EP_DEV void run() {
    const int numOwed = headOf(a.op.handle).numOwed;
#pragma unroll 1
    for (int s0 = 0; s0 < a.wire.steps; s0 += a.chunk) {
      const int len = min(a.chunk, a.wire.steps - s0);
      const Share share = shareOf(numOwed * len, blockIdx.x, gridDim.x);
#pragma unroll 1
      for (int u = share.first; u < share.end;) {
        const int end = min(share.end, (u / len + PAIRS) * len);
        sendPairs(owedOf(a.op.handle), s0, len, u, end);
        u = end;
      }
    }
  }
};

template <Elem T>
__global__ void __launch_bounds__(PARTIAL_THREADS, 1)
    partialKernel(const __grid_constant__ CombineArgs a) {
  extern __shared__ __align__(16) char shared[];
  __shared__ Pair pairs[PAIRS];
  const ep_ll_group_t &g = a.op.group;
  const uint64_t began = g.stamps && threadIdx.x == 0 ? clockNs() : 0;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, numWarps = blockDim.x >> 5;
  const Op op = currentOp(g, a.op.handle, EP_LL_COMBINE, a.roles.parts);
  const unsigned long long active = activeRanks(g, lane);
  const unsigned long long live = active & headOf(a.op.handle).reached;
  if (a.roles.parts & EP_LL_SEND) {
    awaitFree(g, EP_LL_COMBINE, op, active, lane);
#pragma unroll 1
    for (int t = blockIdx.x + gridDim.x * warp; t < a.op.numTokens; t += gridDim.x * numWarps) {
      sendWeights(a, op, live, t, lane);
    }
    if (blockIdx.x == 0 && warp == 0) {
      sendHello(g, EP_LL_COMBINE, op, active, lane);
      tellReceived(g, EP_LL_COMBINE, op, active, lane);
    }
    Sender<T>{a, op, active, warp, numWarps, lane, pairs}.run();
  }
  if (a.roles.parts & EP_LL_RECV) {
    Term *terms = (Term *)(shared + a.warpAt) + warp * a.op.handle.numTopk;
    TermSum<T, EP_LL_SUM_PARTIAL>{a, g, op, live, lane, terms}.run(warp, numWarps);
    if (blockIdx.x == 0 && warp == 0) {
      const unsigned lag = awaitHellos(g, EP_LL_COMBINE, op, active, lane);
      if (lane == 0) noteHellos(g, EP_LL_COMBINE, op, lag);
    }
  }
  finishLaunch(g, a.op.handle, EP_LL_COMBINE, op, a.roles.parts, began);
}

} // namespace

const void *epLlPartialKernel(Elem elem) {
  return elem == Elem::F32   ? (const void *)partialKernel<Elem::F32>
         : elem == Elem::F16 ? (const void *)partialKernel<Elem::F16>
                             : (const void *)partialKernel<Elem::BF16>;
}
