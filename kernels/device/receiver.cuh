// The receiving half of a dispatch: routing words, slots, rows as they come, and what combine and the
// caller need to know. One object a warp; the pointers are the block's shared memory unless they say "the
// warp's".
#ifndef TREFOIL_KERNELS_DEVICE_RECEIVER_CUH
#define TREFOIL_KERNELS_DEVICE_RECEIVER_CUH

#include "kernels/device/rows.cuh"

constexpr unsigned NO_EXPERT = 0xffffu;

template <bool QUANT, bool SEGMENTS> struct Receiver {
  const DispatchArgs &a;
  const ep_ll_group_t &g;
  const Op op;
  const unsigned long long active;
  const int warp, numWarps, lane;
  volatile int
      *counts; // [R] tokens of each source, -1 until a word of it is here; [R] the greatest lag
  int *rows;   // the warp's: slot of (source of the group, k) or -1
  unsigned *rowBits; // the warp's: the same as bits
  SlotMap map;
  unsigned *route; // [R, N, idVectors * 3] local ids as they travelled
  unsigned *owed;  // [N, groups] rows owed

  EP_DEV unsigned *routeOf(int src, int t) const {
    return route + (src * g.maxTokens + t) * a.idVectors * 3;
  }

  EP_DEV unsigned localId(int src, int t, int k) const {
    const unsigned *r = routeOf(src, t);
    if (a.idBytes == 2) return r[1 + (k >> 1)] >> (k & 1) * 16 & 0xffffu;
    const unsigned id = r[1 + (k >> 2)] >> (k & 3) * 8 & 0xffu;
    return id == 0xff ? NO_EXPERT : id;
  }

  // Rows that combine will send back for (source, token) with n local experts.
  EP_DEV int numOwed(int src, int n) const {
    if (a.op.handle.sum == EP_LL_SUM_EXACT) return src == g.rank ? 0 : n;
    return n > 0 && (src != g.rank || a.op.handle.sum == EP_LL_SUM_PARTIAL);
  }

  EP_DEV void clear() {
    const int i0 = warp * 32 + lane, di = numWarps * 32;
#pragma unroll 1
    for (int i = i0; i < map.rows * map.stride; i += di) map.bits[i] = 0;
#pragma unroll 1
    for (int i = i0; i < g.maxTokens * a.groups; i += di) owed[i] = 0;
#pragma unroll 1
    for (int i = i0; i <= g.numRanks; i += di)
      counts[i] = i < g.numRanks && active >> i & 1 ? -1 : 0;
  }

  // One thread: the ids in one vector of a routing word; unused entries read as no expert.
  EP_DEV int takeIds(uint4 q, int src, int t, int v) {
    unsigned *r = routeOf(src, t) + v * 3;
    r[0] = q.x;
    r[1] = q.y;
    r[2] = q.z;
    if (v == 0) {
      counts[src] = min((int)(q.x & EP_LL_COUNT_MASK), g.maxTokens);
      if (t == 0) atomicMax((int *)&counts[g.numRanks], (int)(q.x >> EP_LL_LAG_SHIFT));
    }
    const unsigned w[3] = {q.x, q.y, q.z};
    const unsigned none = a.idBytes == 2 ? NO_EXPERT : 0xffu, width = 8 * a.idBytes;
    const unsigned bit = map.bitOf(src, t), mask = 1u << (bit & 31);
    unsigned *column = map.bits + (bit >> 5);
    int n = 0;
#pragma unroll
    for (int i = 0; i < 3; i++) {
      unsigned rest = v == 0 && i == 0 ? ~0u : w[i];
#pragma unroll 1
      for (; rest != ~0u; rest = width == 16 ? rest >> 16 | 0xffff0000u : rest >> 8 | 0xff000000u) {
        const unsigned id = rest & none;
        if (id == none) continue;
        n++;
        if (!a.op.handle.rankMajor) atomicOr(column + id * map.stride, mask);
      }
    }
    return n;
  }

  // One thread: waits for one token's routing word, or until another word of the source has told that it
  // has no such token. The word of token 0 always comes.
  EP_DEV void readToken(int src, int t) {
    int n = 0;
#pragma unroll 1
    for (int v = 0; v < a.idVectors; v++) {
      const char *word = routingAt(a, g.rank, src, t, op.buf) + v * 16;
      Spin spin;
      for (;;) {
        const int tokens = counts[src];
        const uint4 q = loadSys(word);
        if (q.w == op.mark) {
          n += takeIds(q, src, t, v);
          break;
        }
        if (tokens >= 0 && t >= tokens) return;
        const ep_ll_phase_t phase = tokens < 0 ? EP_LL_PHASE_HELLO : EP_LL_PHASE_ROUTING;
        if (!keepWaiting(g, op, Awaited{EP_LL_DISPATCH, phase, src, q.w, t}, spin)) {
#pragma unroll 1
          for (int i = 0; i < a.idVectors * 3; i++) routeOf(src, t)[i] = ~0u;
          return;
        }
      }
    }
    if (n > 0 && a.op.handle.rankMajor) map.set(0, map.bitOf(src, t));
    if (const int rowsOwed = numOwed(src, n)) {
      atomicAdd(&owed[t * a.groups + src / SOURCES], (unsigned)rowsOwed);
    }
  }

  EP_DEV void readRouting(int from, int to, int thread, int numThreads) {
    const int n = to - from;
#pragma unroll 1
    for (int i = thread; i < g.numRanks * n; i += numThreads) {
      const int src = i / n, t = from + (i - src * n);
      if (active >> src & 1) readToken(src, t);
    }
  }

  EP_DEV int slotOf(unsigned id, int src, int t) const {
    if (a.op.handle.rankMajor) {
      return src * g.maxTokens + map.countBetween(map.bitOf(src, 0), map.bitOf(src, t));
    }
    return (int)id * g.numRanks * g.maxTokens + map.countBefore((int)id, map.bitOf(src, t));
  }

  // All lanes: fills rows and rowBits for the sources of one group.
  EP_DEV void findRows(int t, int group) {
    __syncwarp();
#pragma unroll 1
    for (int j0 = 0; j0 < SOURCES * a.copies; j0 += 32) {
      const int j = j0 + lane, src = group * SOURCES + j / a.copies, k = j % a.copies;
      int row = -1;
      if (j < SOURCES * a.copies && src < g.numRanks && t < counts[src]) {
        unsigned id = NO_EXPERT;
        if (a.op.handle.rankMajor) {
          if (map.bits[map.bitOf(src, t) >> 5] >> (map.bitOf(src, t) & 31) & 1) id = 0;
        } else {
          id = localId(src, t, k);
        }
        if (id != NO_EXPERT) row = slotOf(id, src, t);
      }
      if (j < SOURCES * a.copies) rows[j] = row;
      const unsigned bits = __ballot_sync(FULL_WARP, row >= 0);
      if (lane == 0) rowBits[j0 >> 5] = bits;
    }
    if (lane == 0) rowBits[(SOURCES * a.copies + 31) >> 5] = 0;
    __syncwarp();
  }

  // Calls f(row) for the rows of source q of the group; stops when f says so.
  template <typename F> EP_DEV void forRows(int q, F f) const {
    const int end = (q + 1) * a.copies;
#pragma unroll 1
    for (int i = q * a.copies; i < end;) {
      const int n = min(32 - (i & 31), end - i);
      unsigned m = rowBits[i >> 5] >> (i & 31) & (n == 32 ? ~0u : (1u << n) - 1);
#pragma unroll 1
      for (; m; m &= m - 1) {
        if (f(rows[i + __ffs(m) - 1])) return;
      }
      i += n;
    }
  }

  EP_DEV bool hasRow(int q) const {
    bool has = false;
    forRows(q, [&](int) { return has = true; });
    return has;
  }

  // The sources of the group that have a row, as bits.
  EP_DEV unsigned present() const {
    unsigned set = 0;
    if (SOURCES * a.copies <= 32) {
      const unsigned bits = rowBits[0],
                     mask = SOURCES * a.copies == 32 ? 0xffu : (1u << a.copies) - 1;
#pragma unroll
      for (int q = 0; q < SOURCES; q++) set |= bits >> (q * a.copies) & mask ? 1u << q : 0u;
      return set;
    }
#pragma unroll 1
    for (int q = 0; q < SOURCES; q++) set |= hasRow(q) ? 1u << q : 0u;
    return set;
  }

  EP_DEV void deliver(int q, const Piece &p, uint4 v) const {
    forRows(q, [&](int row) {
      writeRow<SEGMENTS>(a, row, p, lane, v);
      return false;
    });
  }

  static EP_DEV uint4 pick(const uint4 (&v)[SOURCES], int q) {
    uint4 w = v[0];
#pragma unroll
    for (int i = 1; i < SOURCES; i++) {
      if (q == i) w = v[i];
    }
    return w;
  }

  // All lanes: one step of the rows of up to SOURCES sources, as they come.
  EP_DEV void takeStep(int t, int group, int s, unsigned waiting) {
    const int own = g.rank - group * SOURCES; // in place, unless rows are quantised
    unsigned there = 0;
    if (!QUANT && own >= 0 && own < SOURCES && waiting >> own & 1) there = 1u << own;
    takePiece(pieceOf(a.wire, s, lane), t, group, s, waiting, there);
  }

  // `there`: the own rank's bit, if its row is to be read in place.
  EP_DEV void takePiece(const Piece &p, int t, int group, int s, unsigned waiting, unsigned there) {
    const char *slot = dispatchSlot(g, g.rank, group * SOURCES, t, op.buf);
    const size_t stride = g.maxTokens * g.at.rowStride[0];
    uint4 v[SOURCES];
    Spin spin;
    while (waiting) {
#pragma unroll
      for (int q = 0; q < SOURCES; q++) {
        if ((waiting & ~there) >> q & 1) v[q] = loadStep(slot + q * stride, p, s, lane);
      }
      if (there) {
        const uint4 w = readRow<SEGMENTS, false>(a, inputRow(a, t), p, lane, op.mark);
#pragma unroll
        for (int q = 0; q < SOURCES; q++) {
          if (there >> q & 1) v[q] = w;
        }
      }
#pragma unroll
      for (int q = 0; q < SOURCES; q++) {
        if ((waiting & ~there) >> q & 1 &&
            !__any_sync(FULL_WARP, isMissing(v[q], p, lane, op.mark))) {
          there |= 1u << q;
        }
      }
      waiting &= ~there;
#pragma unroll 1
      for (; there; there &= there - 1) deliver(__ffs(there) - 1, p, pick(v, __ffs(there) - 1));
      if (!waiting) break;
      const Awaited w = {EP_LL_DISPATCH, EP_LL_PHASE_ROWS, group * SOURCES + __ffs(waiting) - 1, 0u,
                         t};
      if (!keepWarpWaiting(g, op, w, spin, lane)) waiting &= waiting - 1;
    }
  }

  // The sources go round from token to token and rank to rank: if all ranks sent back in the same order,
  // all would send to the same rank at once.
  // All lanes: what combine and the caller need to know about one (token, group of sources).
  EP_DEV void note(int t, int group, unsigned sources) {
    const ep_ll_handle_t &h = a.op.handle;
    const int me = g.rank, K = h.numTopk;
    int *table = rowOfTable(g, h);
#pragma unroll 1
    for (int j = lane; j < SOURCES * a.copies; j += 32) {
      const int src = group * SOURCES + j / a.copies, k = j % a.copies;
      if (src < g.numRanks && t < counts[src]) {
        table[((size_t)src * g.maxTokens + t) * a.copies + k] = rows[j];
      }
    }
    int at = 0;
#pragma unroll 1
    for (int i = lane; i < t * a.groups + group; i += 32) at += (int)owed[i];
    at = __reduce_add_sync(FULL_WARP, at);
    Owed *list = owedOf(h);
#pragma unroll 1
    for (int i = 0; i < SOURCES; i++) {
      const int q = (i + me + 1 + t) % SOURCES, src = group * SOURCES + q;
      if (!(sources >> q & 1)) continue;
      const bool each = h.sum == EP_LL_SUM_EXACT;
      bool found = false;
#pragma unroll 1
      for (int k0 = 0; k0 < K; k0 += 32) {
        const int k = k0 + lane;
        const unsigned id = k < K ? localId(src, t, k) : NO_EXPERT;
        const unsigned m = __ballot_sync(FULL_WARP, id != NO_EXPERT);
        if (h.rankMajor && k < K) {
          const int local = id == NO_EXPERT ? -1 : (int)id + (a.op.globalIds ? me * g.numLocal : 0);
          a.op.outIdx[(size_t)rows[q] * K + k] = local;
        }
        const bool mine = m >> lane & 1 && (each || (!found && lane == __ffs(m) - 1));
        found |= m != 0;
        if (numOwed(src, 1) == 0) continue;
        const unsigned all = __ballot_sync(FULL_WARP, mine);
        if (mine) {
          list[at + __popc(all & ((1u << lane) - 1))] =
              Owed{rows[h.rankMajor ? q : q * K + k], Owed::pack(src, k, t)};
        }
        at += __popc(all);
      }
    }
  }

  // Counters and the ids of unused rows, spread over the blocks that have work.
  EP_DEV void count(int numBlocks, int maxCount) {
    const ep_ll_handle_t &h = a.op.handle;
    const int at = blockIdx.x + numBlocks * warp, stride = numBlocks * numWarps;
    if (!h.rankMajor) {
#pragma unroll 1
      for (int e = at; e < g.numLocal; e += stride) {
        const int n = map.countAll(e, lane);
        if (lane == 0) a.op.counters[e] = n;
      }
    } else {
      const int parts = (g.maxTokens + 31) / 32, K = h.numTopk;
#pragma unroll 1
      for (int i = at; i < g.numRanks * parts; i += stride) {
        const int src = i / parts, j0 = (i - src * parts) * 32;
        int n = 0;
#pragma unroll 1
        for (int w = lane; w < a.perSource / 32; w += 32) {
          n += __popc(map.bits[src * (a.perSource / 32) + w]);
        }
        n = __reduce_add_sync(FULL_WARP, n);
        if (a.op.counters && j0 == 0 && lane == 0) a.op.counters[src] = n;
        const int from = max(n, j0) * K, to = min(j0 + 32, g.maxTokens) * K;
#pragma unroll 1
        for (int q = from + lane; q < to; q += 32) {
          a.op.outIdx[(size_t)src * g.maxTokens * K + q] = -1;
        }
      }
    }
    if (blockIdx.x == 0 && warp == numWarps - 1) {
      int n = 0;
#pragma unroll 1
      for (int i = lane; i < maxCount * a.groups; i += 32) n += (int)owed[i];
      n = __reduce_add_sync(FULL_WARP, n);
      if (lane == 0) headOf(h).numOwed = n;
    }
  }

  // All routing words that this block needs; returns the most tokens of a rank.
  EP_DEV int learn(int steps) {
    const int threads = numWarps * 32, thread = warp * 32 + lane;
    clear();
    syncWarps(1, threads);
    // Guess that the others have as many tokens as this rank, to read all their words at once.
    const bool guessed = (int)blockIdx.x < a.op.numTokens * a.groups * steps;
    const int have = guessed ? a.op.numTokens : 1;
    int most = 0;
#pragma unroll 1
    for (int from = 0, to = have; from < to; from = to, to = most) {
      readRouting(from, to, thread, threads);
      syncWarps(1, threads);
      if (from > 0) break;
#pragma unroll 1
      for (int r = lane; r < g.numRanks; r += 32) most = max(most, counts[r]);
      most = __reduce_max_sync(FULL_WARP, most);
      if (blockIdx.x > 0 && (int)blockIdx.x >= most * a.groups * steps) break;
    }
    if (blockIdx.x == 0 && thread == 0) {
      noteHellos(g, EP_LL_DISPATCH, op, (unsigned)counts[g.numRanks]);
    }
    return most;
  }

  // Rows of `steps` steps, each taken by take(t, group, step, sources). The last warp, which has the least
  // of the rest to do, writes the notes.
  template <typename F> EP_DEV void work(int most, int steps, F take) {
    const bool isLast = warp == numWarps - 1;
    const int units = most * a.groups * steps, numBlocks = max(1, min((int)gridDim.x, units));
    if ((int)blockIdx.x >= numBlocks) return;
    if (map.chunks > 1) {
      map.scan(warp, numWarps, lane);
      syncWarps(1, numWarps * 32);
    }
    const Share share = shareOf(units, blockIdx.x, gridDim.x);
    int last = -1, u = share.first + warp, noted = isLast ? blockIdx.x : most * a.groups;
    unsigned sources = 0;
    for (;;) { // notes first, then steps
      const bool notes = noted < most * a.groups;
      if (!notes && u >= share.end) break;
      const int i = notes ? noted : u / steps, t = i / a.groups, group = i - t * a.groups;
      if (i != last) {
        findRows(t, group);
        sources = present();
      }
      last = i;
      if (notes) {
        note(t, group, sources);
        noted += numBlocks;
      } else {
        take(t, group, u - i * steps, sources);
        u += numWarps;
      }
    }
    count(numBlocks, most);
  }

  EP_DEV void run() {
    const int most = learn(a.wire.steps);
    work(most, a.wire.steps,
         [&](int t, int group, int s, unsigned sources) { takeStep(t, group, s, sources); });
  }
};

#endif
