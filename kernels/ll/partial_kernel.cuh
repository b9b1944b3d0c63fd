// Low-latency combine by partial sums: a rank weighs and sums its own experts' rows of a token,
// rounds the partial to the wire type and sends one row per (token, rank).
//
// The weights are known at the source only, so they travel first, three in a 16-byte word with its
// flag. The experts' rows lie all over a large tensor and are read much faster than they are sent:
// the copy engine brings a block's part of them into shared memory, all of it at once if it fits,
// while the weights are on their way. From then on the wire is what takes time. The rows of own
// tokens take the same way through the own exchange memory.
//
//     receiving warps   weights to the experts' ranks; then sum tokens as partials come (terms.cuh)
//     sending warps     find the rows of their pairs, start the copies, wait for the weights, then weigh,
//                       sum, round and send, step by step (work_iterator.cuh)
//
// A block takes its pairs (source, token) in batches. The steps of a batch go through STAGES pieces
// of shared memory in passes; a pass holds the same few steps of all rows of the batch.
#ifndef TREFOIL_KERNELS_LL_PARTIAL_KERNEL_CUH
#define TREFOIL_KERNELS_LL_PARTIAL_KERNEL_CUH

#include "kernels/common/bulk.cuh"
#include "kernels/ll/terms.cuh"
#include "kernels/ll/ll_kernels.cuh"

struct PartialBatch {
  uint64_t arrived[PARTIAL_STAGES];
  int numRows;
  ReturnEntry pair[PARTIAL_PAIRS];
  int first[PARTIAL_PAIRS], n[PARTIAL_PAIRS]; // rows of a pair
  int row[PARTIAL_ROWS];
  float weight[PARTIAL_ROWS];
  unsigned char k[PARTIAL_ROWS];
};

EP_DEV char *weightsAt(const CombineArgs &a, int at, int from, int t, int buf) {
  const ep_ll_group_t &g = a.op.group;
  return g.peers[at] + g.at.weights + buf * ((g.at.rows[0] - g.at.weights) >> 1) +
         ((size_t)from * g.maxTokens + t) * a.weightVectors * 16;
}

// What a lane needs to send the weights of a token, loaded before the operation's number is known.
struct EarlyWeights {
  unsigned w[3];
  int expert;
};

EP_DEV EarlyWeights loadWeights(const CombineArgs &a, int t, int i, int lane) {
  const int K = a.op.handle.numTopk, v = i - (int)a.perToken.quotient(i) * a.weightVectors;
  const bool is = t < a.op.numTokens;
  EarlyWeights q;
#pragma unroll
  for (int j = 0; j < 3; j++) {
    q.w[j] = loadEarlyWordIf(a.op.weights + (size_t)t * K + v * 3 + j, is && v * 3 + j < K, 0u);
  }
  q.expert = idOf(a, (size_t)t * K + lane, is && lane < K);
  return q;
}

// One warp: the weights of token t to the ranks that need them.
template <bool FAR>
EP_DEV void sendWeights(const CombineArgs &a, const Op &op, unsigned long long live, int t,
                        EarlyWeights q, int lane) {
  const ep_ll_group_t &g = a.op.group;
  unsigned long long to =
      warpRankSet(isExpert(g, q.expert) ? (int)a.perRank.quotient(q.expert) : -1, g.numRanks);
#pragma unroll 1
  for (int k0 = 32; k0 < a.op.handle.numTopk; k0 += 32) {
    to |= warpRankSet(rankOfEntry(a, t, k0 + lane), g.numRanks);
  }
  to &= live & ~(1ull << g.rank);
#pragma unroll 1
  for (int i = lane;;) {
    const int d = (int)a.perToken.quotient(i), v = i - d * a.weightVectors;
    if (d < g.numRanks && to >> d & 1) {
      storeSys(weightsAt(a, d, sourceAt<FAR>(g, d), t, op.buf) + v * 16,
               make_uint4(q.w[0], q.w[1], q.w[2], op.flag));
    }
    i += 32;
    if (i - lane >= g.numRanks * a.weightVectors) return;
    q = loadWeights(a, t, i, lane);
  }
}

template <Elem T, bool FAR> struct PartialSender {
  const CombineArgs &a;
  const ep_ll_group_t &g;
  const ControlWords words;
  const int warp, numWarps;
  const Lane lane;
  PartialBatch &batch;
  char *stages;
  unsigned passes = 0; // so far, of all batches
  unsigned flag = 0;
  int buf = 0;
  unsigned long long active = 0;

  EP_DEV void sync() const { syncWarps(2, numWarps * 32); }

  // The lane's entries of a pair in the table of rows, of k = lane and k = 32 + lane.
  struct Rows {
    int low, high;
  };
  EP_DEV Rows loadRows(ReturnEntry e, bool is) const {
    const int K = a.op.handle.numTopk, l = lane.lane;
    const int *table =
        slotTable(g, a.op.handle) + ((size_t)e.source() * g.maxTokens + e.token()) * K;
    return Rows{(int)loadEarlyWordIf(table + l, is && l < K, ~0u),
                (int)loadEarlyWordIf(table + 32 + l, is && l + 32 < K, ~0u)};
  }

  // One warp: lists the rows of pair i, ascending k.
  EP_DEV void recordRows(int i, ReturnEntry e, Rows r) {
    const int l = lane.lane;
    const unsigned m0 = __ballot_sync(FULL_WARP, r.low >= 0),
                   m1 = __ballot_sync(FULL_WARP, r.high >= 0), before = (1u << l) - 1;
    const int n = __popc(m0) + __popc(m1);
    int at = 0;
    if (l == 0) {
      at = atomicAdd(&batch.numRows, n);
      batch.pair[i] = e;
      batch.first[i] = at;
      batch.n[i] = n;
    }
    at = __shfl_sync(FULL_WARP, at, 0);
    const int at0 = at + __popc(m0 & before), at1 = at + __popc(m0) + __popc(m1 & before);
    if (r.low >= 0) {
      batch.row[at0] = r.low;
      batch.k[at0] = (unsigned char)l;
    }
    if (r.high >= 0) {
      batch.row[at1] = r.high;
      batch.k[at1] = (unsigned char)(l + 32);
    }
  }

  // One warp: the weights of a pair, from the source's words.
  EP_DEV void findWeights(int i) {
    const ReturnEntry e = batch.pair[i];
    const int src = e.source(), t = e.token(), K = a.op.handle.numTopk;
    if (!(active >> src & 1)) return;
#pragma unroll 1
    for (int j = lane.lane; j < batch.n[i]; j += 32) {
      const int at = batch.first[i] + j, k = batch.k[at];
      if (src == g.rank) {
        batch.weight[at] = a.op.weights[(size_t)t * K + k];
        continue;
      }
      const char *word = weightsAt(a, g.rank, src, t, buf) + k / 3 * 16;
      Spin spin;
      uint4 q;
      for (;;) {
        q = loadSys(word);
        if (q.w == flag) break;
        if (!(++spin.polls & 255) && !lookForWeights(a, src, t, q.w, spin)) break;
      }
      batch.weight[at] = __uint_as_float(k % 3 == 0 ? q.x : k % 3 == 1 ? q.y : q.z);
    }
  }

  static constexpr int ROOM = FRONT + TAIL; // of a step

  // Steps [from, to) of a batch, `len` a pass. In a stage a row has the front parts of its len
  // steps, then the tail parts (packet.cuh).
  struct Passes {
    int from, to, len, count;
    EP_DEV int begin(int p) const { return from + p * len; }
    EP_DEV int end(int p) const { return min(to, from + (p + 1) * len); }
  };

  EP_DEV Passes passesOf(const WorkIterator &work) const {
    Passes p;
    p.from = work.rows == 1 ? work.from : 0;
    p.to = work.rows == 1 ? work.to : a.wire.steps;
    const int n = p.to - p.from, most = PARTIAL_STAGE_BYTES / (ROOM * max(1, batch.numRows));
    p.count = (n + most - 1) / most;
    p.len = (n + p.count - 1) / p.count;
    return p;
  }

  EP_DEV char *stageOf(unsigned pass) const {
    return stages + pass % PARTIAL_STAGES * (size_t)PARTIAL_STAGE_BYTES;
  }

  // What a pass copies of every row of pair i.
  struct Slice {
    int front, frontBytes, tail, tailBytes; // bytes of the row
  };
  EP_DEV Slice sliceOf(const WorkIterator &work, const Passes &p, int pass, int i,
                       int &skipped) const {
    const int b = max(p.begin(pass), i == 0 ? work.from : 0),
              e = min(p.end(pass), i == work.rows - 1 ? work.to : a.wire.steps);
    const int front = frontBytes(a.wire);
    skipped = b - p.begin(pass);
    Slice s = {b * FRONT, 0, front + b * TAIL, 0};
    if (b >= e) return s;
    s.frontBytes = max(0, min(e * FRONT, min(a.wire.rowBytes, front)) - s.front);
    s.tailBytes = max(0, min(s.tail + (e - b) * TAIL, a.wire.rowBytes) - s.tail);
    return s;
  }

  // All sending warps: starts the copies of a pass, each those of its pairs.
  EP_DEV void copy(const WorkIterator &work, const Passes &p, int pass) {
    uint64_t *bar = &batch.arrived[(passes + pass) % PARTIAL_STAGES];
    const uint32_t stage = sharedAddress(stageOf(passes + pass));
    unsigned bytes = 0;
    int skipped;
#pragma unroll 1
    for (int i = warp; i < work.rows; i += numWarps) {
      const Slice s = sliceOf(work, p, pass, i, skipped);
      bytes += batch.n[i] * (s.frontBytes + s.tailBytes);
    }
    if (lane.lane == 0) barrierExpect(bar, (int)bytes);
    __syncwarp();
#pragma unroll 1
    for (int i = warp; i < work.rows; i += numWarps) {
      const Slice s = sliceOf(work, p, pass, i, skipped);
#pragma unroll 1
      for (int j = lane.lane; j < batch.n[i]; j += 32) {
        const int at = batch.first[i] + j;
        const char *row = (const char *)a.op.tokens + (size_t)batch.row[at] * a.op.rowBytes;
        const uint32_t to = stage + at * p.len * ROOM;
        if (s.frontBytes) bulkLoad(to + skipped * FRONT, row + s.front, s.frontBytes, bar);
        if (s.tailBytes)
          bulkLoad(to + p.len * FRONT + skipped * TAIL, row + s.tail, s.tailBytes, bar);
      }
    }
  }

  EP_DEV void sendUnit(const Passes &p, int pass, int i, int s) {
    const ReturnEntry e = batch.pair[i];
    if (!(active >> e.source() & 1)) return;
    const int l = lane.lane, space = p.len * ROOM, at = batch.first[i], n = batch.n[i];
    const char *row =
        stageOf(passes + pass) + at * space +
        (isFlagLane(l) ? p.len * FRONT + min(l >> 3, 2) * 16 : (l >> 3) * 112 + (l & 7) * 16) +
        (s - p.begin(pass)) * lane.stride;
    Sum<T> sum;
    sum.clear();
#pragma unroll 2
    for (int j = 0; j < n; j++) {
      sum.addWeighted(*(const uint4 *)(row + j * space), batch.weight[at + j]);
    }
    char *to = combineRowAt(g, a.op.handle.numTopk, e.source(), e.token(), e.k(), buf);
    if (FAR && isFar(g, e.source()))
      to = g.peers[e.source()] + mirroredSum(g, e.source(), e.token(), buf);
    storeStep(to, lane, s, toWire(sum.round(), lane, flag));
    if (s == 0 && l == 0) countBytes(g, EP_LL_COMBINE, e.source(), a.op.rowBytes);
  }

  // Entry i of the list, of which `guess` holds the first 64 (guessReturns).
  EP_DEV ReturnEntry entryAt(int i, uint4 guess) const {
    if (!a.guesses || i >= 64) return returnsOf(a.op.handle)[i];
    const int r = __shfl_sync(FULL_WARP, (int)(i & 1 ? guess.z : guess.x), i >> 1);
    const unsigned f = __shfl_sync(FULL_WARP, i & 1 ? guess.w : guess.y, i >> 1);
    return ReturnEntry{r, f};
  }

  // All sending warps. What takes long is started first: rows, then weights, then the rest of the
  // rows.
  EP_DEV void send(const WorkIterator &work, uint4 guess) {
    const bool has = warp < work.rows;
    const ReturnEntry e = has ? entryAt(work.first + warp, guess) : ReturnEntry{0, 0};
    const Rows rows = loadRows(e, has);
    if (!flag) start();
    sync(); // the last batch is done
    if (has) recordRows(warp, e, rows);
#pragma unroll 1
    for (int i = warp + numWarps; i < work.rows; i += numWarps) {
      const ReturnEntry more = returnsOf(a.op.handle)[work.first + i];
      recordRows(i, more, loadRows(more, true));
    }
    sync();
    const Passes p = passesOf(work);
    copy(work, p, 0);
#pragma unroll 1
    for (int i = numWarps - 1 - warp; i < work.rows; i += numWarps) findWeights(i);
    sync();
    if (warp == 0 && lane.lane == 0) batch.numRows = 0; // of the next batch
#pragma unroll 1
    for (int pass = 1; pass < min(p.count, PARTIAL_STAGES); pass++) copy(work, p, pass);
    int i = warp;
#pragma unroll 1
    for (int pass = 0; pass < p.count; pass++) {
      const unsigned n = passes + pass;
      while (!barrierTry(&batch.arrived[n % PARTIAL_STAGES], n / PARTIAL_STAGES & 1)) {
      } // ends with the copies, which wait for no rank
      const int end = work.before(p.end(pass));
#pragma unroll 1
      for (; i < end; i += numWarps) {
        const WorkIterator::Item u = work.at(i);
        sendUnit(p, pass, u.row, u.step);
      }
      if (pass + PARTIAL_STAGES >= p.count) continue;
      sync();
      copy(work, p, pass + PARTIAL_STAGES);
    }
    passes += p.count;
  }

  EP_DEV void start() {
    const Op op = nextOp(words);
    active = activeRanks(g, lane.lane);
    waitFree(g, EP_LL_COMBINE, op, active, lane.lane);
    flag = op.flag;
    buf = op.buf;
  }

  EP_DEV void run(int numReturns, uint4 guess) {
    const int steps = a.wire.steps;
    const Partition part = partitionBy(a.blocks, numReturns * steps);
#pragma unroll 1
    for (int u = part.first; u < part.end;) {
      const int end = min(part.end, ((int)a.perRow.quotient(u) + a.pairs) * steps);
      send(WorkIterator::of(u, end, a.perRow), guess);
      u = end;
    }
  }
};

// The warps that send weights: those that receive, else all.
template <bool FAR> EP_DEV void weigh(const CombineArgs &a, int warp, int numWarps, int lane) {
  const ep_ll_group_t &g = a.op.group;
  int t = blockIdx.x + g.numSms * warp;
  EarlyWeights early = loadWeights(a, t, lane, lane);
  const uint4 head = loadEarly(&headOf(a.op.handle).reached);
  const ControlWords words = loadControl(controlOf(g).kind[EP_LL_COMBINE]);
  if (t >= a.op.numTokens) return;
  const Op op = nextOp(words);
  const unsigned long long active = activeRanks(g, lane),
                           live = active & (head.x | (unsigned long long)head.y << 32);
  waitFree(g, EP_LL_COMBINE, op, active, lane);
#pragma unroll 1
  while (t < a.op.numTokens) {
    sendWeights<FAR>(a, op, live, t, early, lane);
    t += g.numSms * numWarps;
    early = loadWeights(a, t, lane, lane);
  }
}

// All threads of a block.
template <Elem T, bool FAR = false> EP_DEV void runPartial(const CombineArgs &a) {
  EP_DYNAMIC_SHARED(16, shared);
  EP_SHARED(PartialBatch, batch);
  EP_SHARED(uint64_t, began);
  EP_SHARED(Op, saved);
  const ep_ll_group_t &g = a.op.group;
  if (g.stamps && threadIdx.x == 0) began = clockNs();
  const CombineWarp self = combineWarp(a);
  const int lane = self.lane, w = self.number;
  const bool sends = self.sends, announces = self.announces;
  const bool weighs = (a.roles.parts & EP_LL_SEND) && sends == !a.roles.numRecv;
  if (weighs) weigh<FAR>(a, w, sends ? a.roles.numSend : a.roles.numRecv, lane);
  if (weighs && announces) announce<FAR>(a);
  if (sends) {
    const uint4 guess = guessReturns(a, lane);
    const uint4 head = loadEarly(&headOf(a.op.handle).reached);
    const ControlWords words = loadControl(controlOf(g).kind[EP_LL_COMBINE]);
    if (threadIdx.x == 0) {
      batch.numRows = 0;
#pragma unroll
      for (int i = 0; i < PARTIAL_STAGES; i++) barrierInit(&batch.arrived[i], a.roles.numSend);
      barrierInitFence();
    }
    PartialSender<T, FAR>{a, g, words, w, a.roles.numSend, laneOf(a.wire, lane), batch, shared}.run(
        (int)head.z, guess);
  } else {
    TermSum<T, EP_LL_SUM_PARTIAL>{a, g, laneOf(a.wire, lane)}.run(w, a.roles.numRecv);
  }
  if (announces && (a.roles.parts & EP_LL_RECV) && sends == (a.roles.numSend > 0)) pollAcks(a);
  if (threadIdx.x == 0) saved = currentOp(g, a.op.handle, EP_LL_COMBINE, a.roles.parts);
  finishLaunch<FAR>(g, a.op.handle, EP_LL_COMBINE, saved, a.roles.parts, began);
}

#endif
