// The receiving half of the short dispatch (receiver.cuh has the general one). A lane is a pair (source
// of a group of four, k) wherever rows are found or handed out; a warp waits for the four sources of a
// step at once and delivers whoever is there.
#ifndef TREFOIL_KERNELS_DEVICE_QUICK_RECEIVE_CUH
#define TREFOIL_KERNELS_DEVICE_QUICK_RECEIVE_CUH

#include "kernels/device/quick.cuh"

// Receiving warps, before anything that waits for a load.
EP_DEV void clearShared(const QuickArgs &a, const SlotMap &map, unsigned *owed, int warp,
                        int lane) {
  const int i0 = warp * 32 + lane, di = a.numRecv * 32;
  uint4 *bits = (uint4 *)map.bits;
#pragma unroll 1
  for (int i = i0; i < map.rows * map.stride / 4; i += di) bits[i] = make_uint4(0, 0, 0, 0);
#pragma unroll 1
  for (int i = i0; i < a.maxTokens * a.groups; i += di) owed[i] = 0;
}

template <bool RANKS, bool QUANT, bool SEGMENTS> struct QuickReceiver {
  const QuickArgs &a;
  const Op op;
  const unsigned active;
  const int warp, lane;
  // Shared memory of the block.
  volatile int
      *counts; // [R] tokens of each source, -1 until a word of it is here; [R] greatest lag
  SlotMap map;
  unsigned *owed;            // [N, groups] rows owed
  unsigned long long *route; // [R, N] byte k = local expert of (source, token), 255 = none

  EP_DEV bool keepsOwn() const { return a.op.handle.sum == EP_LL_SUM_PARTIAL; }

  // One thread: a routing word that has come.
  EP_DEV void takeWord(uint4 q, int src, int t) {
    counts[src] = min((int)(q.x & EP_LL_COUNT_MASK), a.maxTokens);
    if (t == 0) atomicMax((int *)&counts[a.numRanks], (int)(q.x >> EP_LL_LAG_SHIFT));
    route[src * a.maxTokens + t] = q.y | (unsigned long long)q.z << 32;
    const int bit = map.bitOf(src, t);
    unsigned *column = map.bits + (bit >> 5);
    const int n = QUICK_IDS - (__popc(__vcmpeq4(q.y, ~0u)) + __popc(__vcmpeq4(q.z, ~0u))) / 8;
#pragma unroll
    for (int k = 0; k < QUICK_IDS; k++) {
      const unsigned id = (k < 4 ? q.y : q.z) >> (k & 3) * 8 & 0xffu;
      if (!RANKS) orShared(id != 0xff, column + id * map.stride, 1u << (bit & 31));
    }
    if (!n) return;
    if (RANKS) atomicOr(column, 1u << (bit & 31));
    if (src == a.rank && !keepsOwn()) return;
    atomicAdd(&owed[t * a.groups + (src >> 2)],
              a.op.handle.sum == EP_LL_SUM_EXACT ? (unsigned)n : 1u);
  }

  // All lanes: waits for a routing word each, or until another word of the source has told that it has no
  // such token (the word of token 0 always comes). The lanes go round together: those whose words have
  // come take them at once, not one after the other.
  EP_DEV void readTokens(bool pending, int src, int t) {
    const char *word = a.mine + quickRouting(a, src, t, op.buf);
    Spin spin;
#pragma unroll 1
    while (__any_sync(FULL_WARP, pending)) {
      if (pending) {
        const int tokens = counts[src];
        const uint4 q = loadSys(word);
        if (q.w == op.mark) {
          takeWord(q, src, t);
          pending = false;
        } else if (tokens >= 0 && t >= tokens) {
          pending = false;
        } else {
          const ep_ll_phase_t phase = tokens < 0 ? EP_LL_PHASE_HELLO : EP_LL_PHASE_ROUTING;
          pending = keepWaiting(a.op.group, op, Awaited{EP_LL_DISPATCH, phase, src, q.w, t}, spin);
          if (!pending) route[src * a.maxTokens + t] = ~0ull;
        }
      }
    }
  }

  // All lanes of all receiving warps: tokens [from, to) of all sources, to - from <= 1 << log.
  EP_DEV void readRouting(int from, int to, int log) {
#pragma unroll 1
    for (int i0 = warp * 32; i0 < a.numRanks << log; i0 += a.numRecv * 32) {
      const int i = i0 + lane, src = i >> log, t = from + (i & ((1 << log) - 1));
      readTokens(src < a.numRanks && t < to && active >> src & 1, src, t);
    }
  }

  // All lanes: the lane's row, or -1.
  EP_DEV int findRow(int t, int group) const {
    const int src = group * SOURCES + (lane >> 3);
    if (src >= a.numRanks || t >= counts[src]) return -1;
    if (RANKS) {
      const int bit = map.bitOf(src, t);
      if (!(map.bits[bit >> 5] >> (bit & 31) & 1)) return -1;
      return src * a.maxTokens + map.countBetween(map.bitOf(src, 0), bit);
    }
    const unsigned id = expertOf(src, t);
    if (id == 0xff) return -1;
    return (int)id * a.numRanks * a.maxTokens + map.countBefore((int)id, map.bitOf(src, t));
  }

  EP_DEV unsigned expertOf(int src, int t) const {
    return ((const unsigned char *)route)[(src * a.maxTokens + t) * 8 + (lane & 7)];
  }

  // A step of the rows of four sources as a warp works on it.
  struct Step {
    Piece p;
    const char *slot; // of the first source
    uint4 v[SOURCES], own;
    bool isLoaded;
  };

  EP_DEV bool hasOwn(int group) const {
    return !QUANT && a.rank / SOURCES == group;
  }

  // All lanes: where step u is. The own row is read in place, unless rows are quantised.
  EP_DEV void begin(Step &x, int t, int group, int s) const {
    x.p = pieceOf(a.wire, s, lane);
    x.slot = a.mine + quickSlot(a, group * SOURCES, t, op.buf) + s * 512 + lane * 16;
    if (hasOwn(group) && t < a.numTokens) x.own = quickRead<SEGMENTS>(a, t, x.p, lane);
  }

  // All lanes, which have come together: a line is loaded in one piece.
  EP_DEV void load(Step &x, unsigned sources) const {
    const size_t stride = (size_t)a.maxTokens * a.rowStride;
    __syncwarp();
#pragma unroll
    for (int q = 0; q < SOURCES; q++) {
      if (sources >> q & 1 && x.p.on) x.v[q] = loadSys(x.slot + q * stride);
    }
  }

  // All lanes: a step as it comes. rows: bits of the lanes that have one.
  EP_DEV void takeStep(Step &x, int t, int group, int row, unsigned rows) {
    const QuickTarget<SEGMENTS> target(a, x.p, lane);
    unsigned waiting = 0, there = 0;
#pragma unroll
    for (int q = 0; q < SOURCES; q++) waiting |= rows >> q * 8 & 0xffu ? 1u << q : 0u;
    const int own = a.rank - group * SOURCES;
    if (hasOwn(group)) there = waiting & 1u << own;
    Spin spin;
#pragma unroll 1
    while (waiting) {
      const unsigned polled = waiting & ~there;
      if (!x.isLoaded) load(x, polled);
      x.isLoaded = false;
      unsigned missing = 0;
#pragma unroll
      for (int q = 0; q < SOURCES; q++) {
        missing |= isMissing(x.v[q], x.p, lane, op.mark) ? 1u << q : 0u;
        if (!QUANT && there && own == q) x.v[q] = x.own;
      }
      there |= polled & ~__reduce_or_sync(FULL_WARP, missing);
      waiting &= ~there;
#pragma unroll 1
      for (; there; there &= there - 1) {
        const int q = __ffs(there) - 1;
        uint4 w = x.v[0];
#pragma unroll
        for (int i = 1; i < SOURCES; i++) {
          if (q == i) w = x.v[i];
        }
#pragma unroll 1
        for (unsigned m = rows >> q * 8 & (RANKS ? 1u : 0xffu); m; m &= m - 1) {
          const int i = __ffs(m) - 1; // two rows at a time
          m &= m - 1;
          const int j = m ? __ffs(m) - 1 : i;
          const int row0 = __shfl_sync(FULL_WARP, row, q * 8 + i);
          const int row1 = __shfl_sync(FULL_WARP, row, q * 8 + j);
          target.put(row0, w);
          if (m) target.put(row1, w);
        }
      }
      if (!waiting) break;
      const Awaited w = {EP_LL_DISPATCH, EP_LL_PHASE_ROWS, group * SOURCES + __ffs(waiting) - 1, 0u,
                         t};
      if (!keepWarpWaiting(a.op.group, op, w, spin, lane)) waiting &= waiting - 1;
    }
  }

  // All lanes: what combine and the caller need to know about one (token, group of sources). The sources
  // of the owed rows go round from token to token and rank to rank.
  EP_DEV void note(int t, int group, int row) {
    const ep_ll_handle_t &h = a.op.handle;
    const int src = group * SOURCES + (lane >> 3), k = lane & 7;
    const bool exists = src < a.numRanks && t < counts[src] && k < a.topk;
    const unsigned id = exists ? expertOf(src, t) : 0xffu;
    int at = 0;
#pragma unroll 1
    for (int i = lane; i < t * a.groups + group; i += 32) at += (int)owed[i];
    at = __reduce_add_sync(FULL_WARP, at);
    if (exists) {
      int *table = rowOfTable(a.op.group, h) + (size_t)src * a.maxTokens * (RANKS ? 1 : a.topk);
      if (!RANKS) table[t * a.topk + k] = row;
      if (RANKS && k == 0) table[t] = row;
      if (RANKS && row >= 0) {
        a.op.outIdx[(size_t)row * a.topk + k] =
            id == 0xff ? -1 : (int)id + (a.op.globalIds ? a.rank * a.numLocal : 0);
      }
    }
    const unsigned found = __ballot_sync(FULL_WARP, id != 0xff) >> (lane & ~7) & 0xffu;
    const bool isOwed = id != 0xff && (src != a.rank || keepsOwn()) &&
                        (h.sum == EP_LL_SUM_EXACT || k == __ffs(found) - 1);
    const unsigned all = __ballot_sync(FULL_WARP, isOwed);
    const int turn = (a.rank + 1 + t) % SOURCES * 8;
    if (isOwed) {
      const unsigned before = __funnelshift_r(all, all, turn) & ((1u << ((lane - turn) & 31)) - 1);
      owedOf(h)[at + __popc(before)] = Owed{row, Owed::pack(src, k, t)};
    }
  }

  // One warp of each block that has work: counters and the ids of unused rows.
  EP_DEV void count(int numBlocks, int most) {
    const int at = (int)blockIdx.x, stride = numBlocks;
    if (!RANKS) {
#pragma unroll 1
      for (int e = at; e < a.numLocal; e += stride) {
        const int n = map.countAll(e, lane);
        if (lane == 0) a.op.counters[e] = n;
      }
    } else {
      const int parts = (a.maxTokens + 31) / 32, K = a.topk;
#pragma unroll 1
      for (int i = at; i < a.numRanks * parts; i += stride) {
        const int src = i / parts, j0 = (i - src * parts) * 32;
        const int n = map.countBetween(map.bitOf(src, 0), map.bitOf(src + 1, 0));
        if (a.op.counters && j0 == 0 && lane == 0) a.op.counters[src] = n;
        const int from = max(n, j0) * K, to = min(j0 + 32, a.maxTokens) * K;
#pragma unroll 1
        for (int q = from + lane; q < to; q += 32) {
          a.op.outIdx[(size_t)src * a.maxTokens * K + q] = -1;
        }
      }
    }
    if (blockIdx.x == 0) {
      int n = 0;
#pragma unroll 1
      for (int i = lane; i < most * a.groups; i += 32) n += (int)owed[i];
      n = __reduce_add_sync(FULL_WARP, n);
      if (lane == 0) headOf(a.op.handle).numOwed = n;
    }
  }

  // Reads the routing of all sources; returns the most tokens that one has, or -1 if this block has
  // nothing to do. Loads the warp's first step as soon as the words are here: its rows may be here too.
  EP_DEV int readAll(Step &x) {
    const int perToken = a.groups * a.wire.steps, threads = a.numRecv * 32;
    // Guess that the others have as many tokens as this rank, to read all their words at once.
    const bool guessed = (int)blockIdx.x < a.numTokens * perToken;
    int from = 0, to = guessed ? a.numTokens : 1, log = guessed ? a.guess : 0, most;
    const Share share = quickShare(a.recv);
    const int u = share.first + warp, i = quickToken(a, u);
    const int t = a.groups == 1 ? i : i / a.groups, group = i - t * a.groups;
    x.isLoaded = u < share.end;
    if (x.isLoaded) begin(x, t, group, u - i * a.wire.steps);
#pragma unroll 1
    for (;;) {
      readRouting(from, to, log);
      syncWarps(1, threads);
      if (from == 0 && x.isLoaded) {
        const unsigned all = (1u << min(a.numRanks - group * SOURCES, SOURCES)) - 1;
        load(x, hasOwn(group) ? all & ~(1u << a.rank % SOURCES) : all);
      }
      most = (int)__reduce_max_sync(FULL_WARP, lane < a.numRanks ? max(counts[lane], 0) : 0);
      if (blockIdx.x > 0 && (int)blockIdx.x >= most * perToken) return -1;
      if (from > 0 || most <= to) break;
      from = to;
      to = most;
      log = 32 - __clz(most - from);
    }
    if (map.chunks > 1) {
      map.scan(warp, a.numRecv, lane);
      syncWarps(1, threads);
    }
    return most;
  }

  // What is to be told besides the rows.
  EP_DEV void report(int numBlocks, int most) {
    if (blockIdx.x == 0 && lane == 0) {
      noteHellos(a.op.group, EP_LL_DISPATCH, op, (unsigned)counts[a.numRanks]);
    }
#pragma unroll 1
    for (int i = (int)blockIdx.x; i < most * a.groups; i += numBlocks) {
      const int t = a.groups == 1 ? i : i / a.groups, group = i - t * a.groups;
      note(t, group, findRow(t, group));
    }
    count(numBlocks, most);
  }

  // After clearShared. The last warp, which has the least to take, reports before it takes steps.
  EP_DEV void run() {
    const int thread = warp * 32 + lane;
    if (thread <= a.numRanks) {
      counts[thread] = thread < a.numRanks && active >> thread & 1 ? -1 : 0;
    }
    syncWarps(1, a.numRecv * 32);
    Step x;
    const int most = readAll(x);
    if (most < 0) return;
    const int units = most * a.groups * a.wire.steps;
    Share share = quickShare(a.recv);
    if (most != a.numTokens) {
      share = shareOf(units, blockIdx.x, gridDim.x);
      x.isLoaded = false;
    }
    if (__builtin_expect(warp == a.numRecv - 1, 0)) {
      report(max(1, min((int)gridDim.x, units)), most);
    }
    int last = -1, row = -1;
    unsigned rows = 0;
#pragma unroll 1
    for (int u = share.first + warp; u < share.end; u += a.numRecv) {
      const int i = quickToken(a, u);
      const int t = a.groups == 1 ? i : i / a.groups, group = i - t * a.groups;
      if (i != last) {
        row = findRow(t, group);
        rows = __ballot_sync(FULL_WARP, row >= 0);
        last = i;
      }
      if (!x.isLoaded) begin(x, t, group, u - i * a.wire.steps);
      takeStep(x, t, group, row, rows);
      x.isLoaded = false;
    }
  }
};

#endif
