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
    counts[src] = min((int)(q.x & 0x1fffff), a.maxTokens);
    if (t == 0) atomicMax((int *)&counts[a.numRanks], (int)(q.x >> 21));
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

  // One thread: waits for one token's routing word, or until another word of the source has told that it
  // has no such token. The word of token 0 always comes.
  EP_DEV void readToken(int src, int t) {
    const char *word = a.mine + quickRouting(a, src, t, op.buf);
    Spin spin;
    for (;;) {
      const int tokens = counts[src];
      const uint4 q = loadSys(word);
      if (q.w == op.mark) {
        takeWord(q, src, t);
        return;
      }
      if (tokens >= 0 && t >= tokens) return;
      const ep_ll_phase_t phase = tokens < 0 ? EP_LL_PHASE_HELLO : EP_LL_PHASE_ROUTING;
      if (!keepWaiting(a.op.group, op, Awaited{EP_LL_DISPATCH, phase, src, q.w, t}, spin)) {
        route[src * a.maxTokens + t] = ~0ull;
        return;
      }
    }
  }

  // Tokens [from, to) of all sources, to - from <= 1 << log.
  EP_DEV void readRouting(int from, int to, int log) {
#pragma unroll 1
    for (int i = warp * 32 + lane; i < a.numRanks << log; i += a.numRecv * 32) {
      const int src = i >> log, t = from + (i & ((1 << log) - 1));
      if (t < to && active >> src & 1) readToken(src, t);
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

  // All lanes: one step of the rows of four sources, as they come. rows: bits of the lanes that have one.
  // The own row is read in place, unless rows are quantised.
  EP_DEV void takeStep(int t, int group, int s, int row, unsigned rows) {
    const Piece p = pieceOf(a.wire, s, lane);
    const char *slot = a.mine + quickSlot(a, group * SOURCES, t, op.buf) + s * 512 + lane * 16;
    const size_t stride = (size_t)a.maxTokens * a.rowStride;
    uint4 v[SOURCES], mine;
    unsigned waiting = 0, there = 0;
#pragma unroll
    for (int q = 0; q < SOURCES; q++) waiting |= rows >> q * 8 & 0xffu ? 1u << q : 0u;
    const int own = a.rank - group * SOURCES;
    if (!QUANT && (unsigned)own < SOURCES) there = waiting & 1u << own;
    if (there) mine = quickRead<SEGMENTS>(a, t, p, lane);
    const QuickTarget<SEGMENTS> target(a, p, lane);
    Spin spin;
#pragma unroll 1
    while (waiting) {
      const unsigned polled = waiting & ~there;
      __syncwarp(); // a line is loaded in one piece
#pragma unroll
      for (int q = 0; q < SOURCES; q++) {
        if (polled >> q & 1 && p.on) v[q] = loadSys(slot + q * stride);
      }
      unsigned missing = 0;
#pragma unroll
      for (int q = 0; q < SOURCES; q++) {
        missing |= isMissing(v[q], p, lane, op.mark) ? 1u << q : 0u;
        if (!QUANT && there && own == q) v[q] = mine;
      }
      there |= polled & ~__reduce_or_sync(FULL_WARP, missing);
      waiting &= ~there;
#pragma unroll 1
      for (; there; there &= there - 1) {
        const int q = __ffs(there) - 1;
        uint4 w = v[0];
#pragma unroll
        for (int i = 1; i < SOURCES; i++) {
          if (q == i) w = v[i];
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

  // Counters and the ids of unused rows, spread over the blocks that have work.
  EP_DEV void count(int numBlocks, int most) {
    const int at = (int)blockIdx.x + numBlocks * (a.numRecv - 1 - warp);
    const int stride = numBlocks * a.numRecv;
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
    if (blockIdx.x == 0 && warp == a.numRecv - 1) {
      int n = 0;
#pragma unroll 1
      for (int i = lane; i < most * a.groups; i += 32) n += (int)owed[i];
      n = __reduce_add_sync(FULL_WARP, n);
      if (lane == 0) headOf(a.op.handle).numOwed = n;
    }
  }

  // Reads the routing of all sources; returns the most tokens that one has, or -1 if this block has
  // nothing to do.
  EP_DEV int readAll() {
    const int perToken = a.groups * a.wire.steps, threads = a.numRecv * 32;
    // Guess that the others have as many tokens as this rank, to read all their words at once.
    const bool guessed = (int)blockIdx.x < a.numTokens * perToken;
    int from = 0, to = guessed ? a.numTokens : 1, log = guessed ? a.guess : 0, most;
#pragma unroll 1
    for (;;) {
      readRouting(from, to, log);
      syncWarps(1, threads);
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

  // After clearShared. The last warps, which have the least to take, count and write the notes, before they
  // take steps.
  EP_DEV void run() {
    const int thread = warp * 32 + lane;
    if (thread <= a.numRanks) {
      counts[thread] = thread < a.numRanks && active >> thread & 1 ? -1 : 0;
    }
    syncWarps(1, a.numRecv * 32);
    const int most = readAll();
    if (most < 0) return;
    if (blockIdx.x == 0 && thread == 0) {
      noteHellos(a.op.group, EP_LL_DISPATCH, op, (unsigned)counts[a.numRanks]);
    }
    const int pairs = most * a.groups, units = pairs * a.wire.steps;
    const int numBlocks = max(1, min((int)gridDim.x, units));
    const bool isLast = warp == a.numRecv - 1;
    const Share share =
        most == a.numTokens ? quickShare(a.recv) : shareOf(units, blockIdx.x, gridDim.x);
    count(numBlocks, most);
    int noted = isLast ? (int)blockIdx.x : pairs, u = share.first + warp;
    int last = -1, row = -1;
    unsigned rows = 0;
#pragma unroll 1
    for (;;) { // notes first, then steps
      const bool notes = noted < pairs;
      if (!notes && u >= share.end) break;
      const int i = notes ? noted : quickToken(a, u);
      const int t = a.groups == 1 ? i : i / a.groups, group = i - t * a.groups;
      if (i != last) {
        row = findRow(t, group);
        rows = __ballot_sync(FULL_WARP, row >= 0);
      }
      last = i;
      if (notes) {
        note(t, group, row);
        noted += numBlocks;
      } else {
        takeStep(t, group, u - i * a.wire.steps, row, rows);
        u += a.numRecv;
      }
    }
  }
};

#endif
