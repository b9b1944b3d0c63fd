// The receiving half of every combine: out[t] = sum of terms, each a row in the exchange memory or,
// for own rows, in the caller's tensor.
//
// A warp holds the terms of a token one a lane, in the order of the sum, and waits for eight of
// them at once (one after the other would cost a round trip each, the first loads being stale by
// then). A term whose rank was given up is left out.
//
//     EXACT     lane = k                 every valid k
//     RANKS     lane = k                 the first k of every rank
//     PARTIAL   lane = rank              in the row of the rank's first k
#ifndef TREFOIL_KERNELS_LL_TERMS_CUH
#define TREFOIL_KERNELS_LL_TERMS_CUH

#include "kernels/ll/args.cuh"
#include "kernels/ll/combine_packet.cuh"
#include "kernels/ll/work_iterator.cuh"

constexpr int AT_ONCE = 8;

// The expert at an index of the routing, -1 if there is none; loaded where it is written. Of a wide
// id the low word says all.
EP_DEV int idOf(const CombineArgs &a, size_t at, bool is) {
  const char *p = (const char *)a.op.handle.topkIdx + at * (a.op.handle.idx64 ? 8 : 4);
  return (int)loadEarlyWordIf(p, is, ~0u);
}

EP_DEV int rankOfEntry(const CombineArgs &a, int t, int k) {
  const int K = a.op.handle.numTopk, e = idOf(a, (size_t)t * K + k, k < K);
  return isExpert(a.op.group, e) ? (int)a.perRank.quotient(e) : -1;
}

// All lanes, every 256 polls: go on waiting for term q of token t? Out of the way of the registers
// of those that do not wait long.
template <ep_ll_sum_t SUM>
static __device__ __noinline__ bool lookForRow(const CombineArgs &a, int q, int t, unsigned looks,
                                               uint64_t &since) {
  const ep_ll_group_t &g = a.op.group;
  const int rank = SUM == EP_LL_SUM_PARTIAL ? q : rankOfEntry(a, t, q);
  if (threadIdx.x % 32 == 0) {
    const Op op = currentOp(g, a.op.handle, EP_LL_COMBINE, a.roles.parts);
    const Awaited w = {EP_LL_COMBINE, EP_WAIT_ROWS, rank, 0u, t};
    since = checkLimit(g, op.number, w, looks ? since : 0);
  }
  return __shfl_sync(FULL_WARP, since != 0, 0);
}

// One thread, every 256 polls: go on waiting for the weights of token t of rank src?
static __device__ __noinline__ bool lookForWeights(const CombineArgs &a, int src, int t,
                                                   unsigned received, Spin &spin) {
  const ep_ll_group_t &g = a.op.group;
  const Op op = currentOp(g, a.op.handle, EP_LL_COMBINE, a.roles.parts);
  const Awaited w = {EP_LL_COMBINE, EP_WAIT_WEIGHTS, src, received, t};
  spin.since = checkLimit(g, op.number, w, spin.since);
  return spin.since != 0;
}

// A lane's state of one term.
struct Term {
  int where;           // EXACT, RANKS: own row; PARTIAL: k of the row
  float weight;        // EXACT
  unsigned valid, own; // of all lanes, as bits: there is such a term; it is read in place
};

// All lanes. RANKS: was the rank of entry k named by an earlier one?
EP_DEV bool isAgain(const CombineArgs &a, int t, int k, int rank, int lane) {
  const unsigned same = __match_any_sync(FULL_WARP, rank);
  bool again = __ffs(same) - 1 != lane;
#pragma unroll 1
  for (int q = 0; q < k - lane; q++) again = again || rankOfEntry(a, t, q) == rank;
  return again;
}

// All lanes. PARTIAL: the first k of rank `l`, -1 if there is none.
EP_DEV int firstOf(const CombineArgs &a, int t, int l, int lane) {
  int first = -1;
#pragma unroll 1
  for (int k0 = 0; k0 < a.op.handle.numTopk; k0 += 32) {
    const int rank = rankOfEntry(a, t, k0 + lane);
    const unsigned same = __match_any_sync(FULL_WARP, rank);
    unsigned firsts = __ballot_sync(FULL_WARP, rank >= 0 && __ffs(same) - 1 == lane);
#pragma unroll 1
    for (; firsts; firsts &= firsts - 1) {
      const int k = __ffs(firsts) - 1;
      if (__shfl_sync(FULL_WARP, rank, k) == l && first < 0) first = k0 + k;
    }
  }
  return first;
}

// All lanes: the terms of token t from `base` on. live: ranks that took part in the dispatch and
// are active now. All loads are under way before the first is looked at.
template <ep_ll_sum_t SUM>
static __device__ __noinline__ Term listTerms(const CombineArgs &a, int t, int base,
                                              unsigned long long live) {
  const ep_ll_group_t &g = a.op.group;
  const ep_ll_handle_t &h = a.op.handle;
  const int lane = threadIdx.x & 31, l = base + lane;
  Term q = {-1, 1.0f, 0, 0};
  if (SUM == EP_LL_SUM_PARTIAL) {
    q.where = firstOf(a, t, l, lane);
    q.valid = __ballot_sync(FULL_WARP, q.where >= 0 && live >> l & 1);
    return q;
  }
  const bool is = l < h.numTopk;
  const size_t at = (size_t)t * h.numTopk + l, perToken = h.rankMajor ? 1 : h.numTopk;
  const int *row =
      slotTable(g, h) + ((size_t)g.rank * g.maxTokens + t) * perToken + (h.rankMajor ? 0 : l);
  const int e = idOf(a, at, is);
  q.where = (int)loadEarlyWordIf(row, is, ~0u);
  if (SUM == EP_LL_SUM_EXACT) {
    q.weight = __uint_as_float(loadEarlyWordIf(a.op.weights + at, is, 0u));
  }
  const int rank = isExpert(g, e) ? (int)a.perRank.quotient(e) : -1;
  bool counts = rank >= 0 && live >> rank & 1;
  if (SUM == EP_LL_SUM_RANKS) counts = !isAgain(a, t, l, rank, lane) && counts;
  q.valid = __ballot_sync(FULL_WARP, counts);
  q.own = q.valid & __ballot_sync(FULL_WARP, rank == g.rank);
  return q;
}

template <Elem T, ep_ll_sum_t SUM> struct TermSum {
  const CombineArgs &a;
  const ep_ll_group_t &g;
  const Lane lane;
  unsigned flag = 0;
  const char *rows = nullptr;  // received, of the operation's buffer
  unsigned long long live = 0; // ranks that took part in the dispatch and are active now

  // Terms base .. base + 31 of token `token`.
  int token = -1, base = 0;
  Term term = {};

  EP_DEV int numTerms() const { // terms that there may be
    return SUM == EP_LL_SUM_PARTIAL ? g.numRanks : a.op.handle.numTopk;
  }

  // The lane's part of step s of k = 0.
  EP_DEV const char *receivedRowOf(int t, int s) const {
    return rows + (size_t)t * a.op.handle.numTopk * g.at.rowStride[1] + s * 512 + lane.lane * 16;
  }

  EP_DEV void list(int t, int from) {
    if (t == token && from == base) return;
    token = t;
    base = from;
    term = listTerms<SUM>(a, t, from, live);
  }

  // All lanes: loads terms j0 .. j0 + 7 of the 32 and waits for them; returns those that will not
  // come, as bits.
  EP_DEV unsigned take(uint4 (&v)[AT_ONCE], int j0, int t, int s) const {
    const unsigned mine = term.own >> j0 & 255;
    const unsigned stride = (unsigned)g.at.rowStride[1];
    const char *received = receivedRowOf(t, s);
    unsigned gone = 0;
    uint64_t since; // touched by lookForRow alone
#pragma unroll 1
    for (unsigned looks = 0;; looks++) { // nothing is kept in registers over a look round
      if (SUM != EP_LL_SUM_PARTIAL && mine) {
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
          if (!(mine >> j & 1)) continue;
          const int row = __shfl_sync(FULL_WARP, term.where, SUM == EP_LL_SUM_RANKS ? 0 : j0 + j);
          v[j] = readRow((const char *)a.op.tokens + (size_t)row * a.op.rowBytes, lane, s);
        }
      }
      unsigned need = (term.valid >> j0 & 255) & ~mine & ~gone;
#pragma unroll 1
      for (int polls = 0; need && polls < 256; polls++) {
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
          const int k =
              SUM == EP_LL_SUM_PARTIAL ? __shfl_sync(FULL_WARP, term.where, j0 + j) : base + j0 + j;
          loadSysIf(v[j], received, k, stride, need >> j & 1);
        }
        unsigned missing = 0;
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
          if (v[j].w != flag) missing |= 1u << j;
        }
        need = __reduce_or_sync(FULL_WARP, isFlagLane(lane.lane) ? missing & need : 0u);
      }
      if (!need) {
        if (SUM != EP_LL_SUM_PARTIAL && mine) {
#pragma unroll
          for (int j = 0; j < AT_ONCE; j++) {
            if (mine >> j & 1) v[j] = toWire(v[j], lane, flag);
          }
        }
        return gone;
      }
      if (!lookForRow<SUM>(a, base + j0 + __ffs(need) - 1, t, looks, since)) gone |= need & -need;
    }
  }

  // All lanes: one step of the result of token t.
  EP_DEV void step(int t, int s) {
    Sum<T> sum;
    int added = 0, last = 0;
    sum.clear();
#pragma unroll 1
    for (int i = 0; i < numTerms(); i += AT_ONCE) {
      list(t, i & ~31);
      const int j0 = i & 31;
      uint4 v[AT_ONCE];
      const unsigned use = (term.valid >> j0 & 255) & ~take(v, j0, t, s);
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        const float w = SUM == EP_LL_SUM_EXACT ? __shfl_sync(FULL_WARP, term.weight, j0 + j) : 0;
        if (!(use >> j & 1)) continue;
        if (SUM == EP_LL_SUM_EXACT)
          sum.addWeighted(v[j], w);
        else
          sum.add(v[j]);
      }
      added += __popc(use);
      if (use) last = i + __ffs(use) - 1;
    }
    char *out = (char *)a.op.out + (size_t)t * a.op.rowBytes;
    uint4 v = make_uint4(0, 0, 0, 0); // no row gives zeros
    if (added) v = sum.round();
    if (SUM != EP_LL_SUM_EXACT && added == 1) v = reload(t, last, s);
    writeRow(out, lane, s, fromWire(v, lane));
  }

  // All lanes: one unweighted row is copied, NaN payloads included.
  EP_DEV uint4 reload(int t, int i, int s) {
    uint4 v = make_uint4(0, 0, 0, 0);
    list(t, i & ~31);
    const int at = __shfl_sync(FULL_WARP, term.where, SUM == EP_LL_SUM_RANKS ? 0 : i & 31);
    if (SUM == EP_LL_SUM_RANKS && term.own >> (i & 31) & 1)
      return toWire(readRow((const char *)a.op.tokens + (size_t)at * a.op.rowBytes, lane, s), lane,
                    0);
    const int k = SUM == EP_LL_SUM_PARTIAL ? at : i;
    loadSysIf(v, receivedRowOf(t, s), k, (unsigned)g.at.rowStride[1], true);
    return v;
  }

  // Own rows do not travel; they are counted here.
  EP_DEV void countOwn(int t) {
    if (!g.bytes || SUM == EP_LL_SUM_PARTIAL) return;
#pragma unroll 1
    for (int i = 0; i < numTerms(); i += 32) {
      list(t, i);
      if (term.own >> lane.lane & 1) countBytes(g, EP_LL_COMBINE, g.rank, a.op.rowBytes);
    }
  }

  EP_DEV void run(int warp, int numWarps) {
    const ControlWords words = loadControl(controlOf(g).kind[EP_LL_COMBINE]);
    const uint4 head = loadEarly(&headOf(a.op.handle).reached);
    const Partition part = partitionBy(a.blocks, a.op.numTokens * a.wire.steps);
    if (part.first >= part.end) return;
    const WorkIterator work = WorkIterator::of(part.first, part.end, a.perRow);
    live = activeRanks(g, lane.lane) & (head.x | (unsigned long long)head.y << 32);
    if (warp < work.count) list(work.first + work.at(warp).row, 0);
    const Op op = a.roles.parts & EP_LL_SEND ? nextOp(words)
                                             : opOf(words, headOf(a.op.handle).sent[EP_LL_COMBINE]);
    flag = op.flag;
    rows = combineRowAt(g, a.op.handle.numTopk, g.rank, 0, 0, op.buf);
#pragma unroll 1
    for (int i = warp; i < work.count; i += numWarps) {
      const WorkIterator::Item u = work.at(i);
      if (u.step == 0) countOwn(work.first + u.row);
      step(work.first + u.row, u.step);
    }
  }
};

// The first 64 entries of the list, two a lane, loaded before the count is loaded:
// with few tokens that is one load less to wait for.
EP_DEV uint4 guessReturns(const CombineArgs &a, int lane) {
  uint4 v = make_uint4(0, 0, 0, 0);
  loadStreamIf(v, returnsOf(a.op.handle) + 2 * lane, a.guesses);
  return v;
}

// What a warp of a combine does: it is the `number`-th that sends, or that receives. The last block has the
// least to do: its last sending warp announces, and waits for the announcements when its rows are gone.
struct CombineWarp {
  int lane, number;
  bool sends, announces;
};
EP_DEV CombineWarp combineWarp(const CombineArgs &a) {
  const int warp = threadIdx.x >> 5;
  const bool sends = warp < a.roles.numSend;
  const int number = sends ? warp : warp - a.roles.numSend;
  const bool isLast = number == (sends ? a.roles.numSend : a.roles.numRecv) - 1;
  return CombineWarp{(int)threadIdx.x & 31, number, sends,
                     (int)blockIdx.x == a.op.group.numSms - 1 && isLast};
}

// One warp of the launch that sends.
template <bool FAR> static __device__ __noinline__ void announce(const CombineArgs &a) {
  const ep_ll_group_t &g = a.op.group;
  const int lane = threadIdx.x & 31;
  const Op op = currentOp(g, a.op.handle, EP_LL_COMBINE, a.roles.parts);
  const unsigned long long active = activeRanks(g, lane);
  waitFree(g, EP_LL_COMBINE, op, active, lane);
  sendAnnounce<FAR>(g, op, active, lane);
  sendAcks<FAR>(g, EP_LL_COMBINE, op, active, lane);
}

// One warp of the launch that receives, after its other work.
static __device__ __noinline__ void pollAcks(const CombineArgs &a) {
  const ep_ll_group_t &g = a.op.group;
  const int lane = threadIdx.x & 31;
  const Op op = currentOp(g, a.op.handle, EP_LL_COMBINE, a.roles.parts);
  const unsigned ackDistance = waitAnnounces(g, op, activeRanks(g, lane), lane);
  if (lane == 0) recordAcks(g, EP_LL_COMBINE, op, ackDistance);
}

#endif
