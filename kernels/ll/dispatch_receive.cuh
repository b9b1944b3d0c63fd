// The receiving half of a dispatch: routing words, slots, rows as they come, and the metadata for combine
// and the caller. A lane is a pair (source of a group of four, k) wherever rows are found or handed out, in
// blocks of eight k; a warp waits for the four sources of a step at once and delivers what has arrived.
#ifndef TREFOIL_KERNELS_LL_DISPATCH_RECEIVE_CUH
#define TREFOIL_KERNELS_LL_DISPATCH_RECEIVE_CUH

#include "kernels/ll/dispatch.cuh"

// Receiving warps, before anything that waits for a load.
EP_DEV void clearShared(const DispatchArgs &a, const SlotMap &map, unsigned *returns, int warp,
                        int lane) {
  const int i0 = warp * 32 + lane, di = a.numRecv * 32;
  uint4 *bits = (uint4 *)map.bits;
#pragma unroll 1
  for (int i = i0; i < map.numBitmaps * map.stride / 4; i += di) bits[i] = make_uint4(0, 0, 0, 0);
#pragma unroll 1
  for (int i = i0; i < a.maxTokens * a.groups; i += di) returns[i] = 0;
}

// The local ids of all tokens as they travelled. Fast: one routing word, byte k is the k-th.
template <class T> struct RoutingTable {
  const DispatchArgs &a;
  unsigned *words; // fast [R, N, 2], generic [R, N, idVectors, 3]

  EP_DEV unsigned long long &pair(int src, int t) const {
    return ((unsigned long long *)words)[src * a.maxTokens + t];
  }
  EP_DEV unsigned *token(int src, int t) const {
    return words + (src * a.maxTokens + t) * a.idVectors * 3;
  }
  EP_DEV void keep(int src, int t, int v, uint4 q) const {
    if (!T::GENERIC) {
      pair(src, t) = q.y | (unsigned long long)q.z << 32;
      return;
    }
    unsigned *w = token(src, t) + v * 3;
    w[0] = q.x;
    w[1] = q.y;
    w[2] = q.z;
  }
  EP_DEV void forget(int src, int t) const {
    if (!T::GENERIC) pair(src, t) = ~0ull;
#pragma unroll 1
    for (int i = 0; T::GENERIC && i < a.idVectors * 3; i++) token(src, t)[i] = ~0u;
  }
  // T::NO_EXPERT: none.
  EP_DEV unsigned id(int src, int t, int k) const {
    if (!T::GENERIC) return ((const unsigned char *)words)[(src * a.maxTokens + t) * 8 + k];
    const unsigned *w = token(src, t) + 1;
    if (a.idBytes == 2) return w[k >> 1] >> (k & 1) * 16 & 0xffffu;
    const unsigned id = w[k >> 2] >> (k & 3) * 8 & 0xffu;
    return id == 0xff ? T::NO_EXPERT : id;
  }
};

template <class T> struct Receiver {
  const DispatchArgs &a;
  const Op op;
  typename T::RankSet active; // sources that are waited for
  const int warp, lane;
  // Shared memory of the block; map, returns and routing perhaps scratch.
  volatile int *
      counts; // [R] tokens of each source, -1 until a word of it is here; [R] greatest ack distance
  SlotMap map;
  unsigned *returns; // [N, groups] rows to return
  RoutingTable<T> routing;

  EP_DEV bool keepsOwn() const { return a.op.handle.sum == EP_LL_SUM_PARTIAL; }

  // One thread, fast: the ids of a routing word into the slot map; returns how many there are.
  EP_DEV int takeIds(uint4 q, unsigned *column, int bit) {
    const int n = WORD_IDS - (__popc(__vcmpeq4(q.y, ~0u)) + __popc(__vcmpeq4(q.z, ~0u))) / 8;
#pragma unroll
    for (int k = 0; k < WORD_IDS; k++) {
      const unsigned id = (k < 4 ? q.y : q.z) >> (k & 3) * 8 & 0xffu;
      if (!T::RANK_MAJOR) orShared(id != 0xff, column + id * map.stride, 1u << (bit & 31));
    }
    return n;
  }
  // The same of any vector; unused entries read as no expert.
  EP_DEV int takeVector(uint4 q, int v, unsigned *column, int bit) {
    const unsigned w[3] = {v == 0 ? ~0u : q.x, q.y, q.z};
    const unsigned none = a.idBytes == 2 ? 0xffffu : 0xffu, width = 8 * a.idBytes;
    int n = 0;
#pragma unroll
    for (int i = 0; i < 3; i++) {
#pragma unroll 1
      for (unsigned rest = w[i]; rest != ~0u; rest = rest >> width | none << (32 - width)) {
        const unsigned id = rest & none;
        if (id == none) continue;
        n++;
        if (!T::RANK_MAJOR) atomicOr(column + id * map.stride, 1u << (bit & 31));
      }
    }
    return n;
  }

  // One thread: vector v of a routing word has come; n: local experts in the vectors before it. Returns
  // whether it is the last.
  EP_DEV bool takeWord(uint4 q, int src, int t, int v, int &n) {
    if (v == 0) {
      counts[src] = min((int)(q.x & EP_LL_COUNT_MASK), a.maxTokens);
      if (t == 0) atomicMax((int *)&counts[a.numRanks], (int)(q.x >> EP_LL_ACK_DISTANCE_SHIFT));
    }
    routing.keep(src, t, v, q);
    const int bit = map.bitOf(src, t);
    unsigned *column = map.bits + (bit >> 5);
    if constexpr (T::GENERIC)
      n += takeVector(q, v, column, bit);
    else
      n = takeIds(q, column, bit);
    if (T::GENERIC && v + 1 < a.idVectors) return false;
    if (!n) return true;
    if (T::RANK_MAJOR) atomicOr(column, 1u << (bit & 31));
    if (src == a.rank && !keepsOwn()) return true;
    atomicAdd(&returns[t * a.groups + (src >> 2)],
              a.op.handle.sum == EP_LL_SUM_EXACT ? (unsigned)n : 1u);
    return true;
  }

  // All lanes: waits for a token's routing words each, or until another word of the source shows that it
  // has no such token (the word of token 0 always comes). The lanes go round together: those whose words
  // have come take them at once, not one after the other.
  EP_DEV void readTokens(bool pending, int src, int t) {
    const char *word = a.mine + routingOf<T>(a, src, t, op.buf);
    int v = 0, n = 0;
    Spin spin;
#pragma unroll 1
    while (__any_sync(FULL_WARP, pending)) {
      if (pending) {
        const int tokens = counts[src];
        const uint4 q = loadSys(T::GENERIC ? word + v * 16 : word);
        if (q.w == op.flag) {
          pending = !takeWord(q, src, t, v, n);
          if (T::GENERIC) v++;
        } else if (tokens >= 0 && t >= tokens) {
          pending = false;
        } else {
          const ep_wait_phase_t phase = tokens < 0 ? EP_WAIT_ANNOUNCE : EP_WAIT_ROUTING;
          const Awaited w = {EP_LL_DISPATCH, phase, src, q.w, t};
          pending = keepWaiting(a.op.group, op, w, spin);
          if (!pending) routing.forget(src, t);
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

  // All lanes: the active sources of which a word has come.
  EP_DEV typename T::RankSet sourcesAnnounced() const {
    typename T::RankSet announced =
        __ballot_sync(FULL_WARP, lane < a.numRanks && counts[lane] >= 0);
    if constexpr (T::GENERIC) {
      const unsigned past =
          __ballot_sync(FULL_WARP, lane + 32 < a.numRanks && counts[lane + 32] >= 0);
      announced |= (typename T::RankSet)past << 32;
    }
    return active & announced;
  }

  // Slots of the lane's (source, k), a block of eight k each; -1 = none.
  struct Slots {
    int slot[T::ROW_BLOCKS];
    unsigned first; // lanes that have one, of block 0
    // All lanes. Not kept of every block: eight registers over the polling loop would be too many.
    EP_DEV unsigned has(int b) const {
      return T::GENERIC ? __ballot_sync(FULL_WARP, slot[b] >= 0) : first;
    }
  };

  EP_DEV bool isBlock(int b) const {
    return !T::GENERIC || b * WORD_IDS < a.topk;
  }

  EP_DEV int findSlot(int src, int t, int k) const {
    if (src >= a.numRanks || t >= counts[src] || (T::GENERIC && k >= a.topk)) return -1;
    if (T::RANK_MAJOR) {
      const int bit = map.bitOf(src, t);
      if (!(map.bits[bit >> 5] >> (bit & 31) & 1)) return -1;
      return src * a.maxTokens + map.countBetween(map.bitOf(src, 0), bit);
    }
    const unsigned id = routing.id(src, t, k);
    if (id == T::NO_EXPERT) return -1;
    return (int)id * a.numRanks * a.maxTokens + map.countBefore((int)id, map.bitOf(src, t));
  }

  EP_DEV Slots findSlots(int t, int group) const {
    Slots r;
#pragma unroll
    for (int b = 0; b < T::ROW_BLOCKS; b++) {
      r.slot[b] =
          findSlot(group * SOURCES + (lane >> 3), t, T::RANK_MAJOR ? 0 : (lane & 7) + b * 8);
    }
    return r;
  }

  // A step of the rows of four sources as a warp works on it.
  struct Step {
    RowVector p;
    const char *received; // of the first source
    uint4 v[SOURCES], own;
    bool isLoaded;
  };

  EP_DEV bool hasOwn(int group) const {
    return !T::QUANT && a.rank / SOURCES == group;
  }

  // All lanes: where step u is. The own row is read in place, unless rows are quantised.
  EP_DEV void begin(Step &x, int t, int group, int s) const {
    x.p = vectorOf(a.wire, s, lane);
    x.received = a.mine + receivedRowOf(a, group * SOURCES, t, op.buf) + s * 512 + lane * 16;
    if (hasOwn(group) && t < a.numTokens) x.own = readInput<T>(a, t, x.p, lane);
  }

  // All lanes, which have come together: a packet is loaded as a whole.
  EP_DEV void load(Step &x, unsigned sources) const {
    const size_t stride = (size_t)a.maxTokens * a.rowStride;
    __syncwarp();
#pragma unroll
    for (int q = 0; q < SOURCES; q++) {
      if (sources >> q & 1 && x.p.on) x.v[q] = loadSys(x.received + q * stride);
    }
  }

  // All lanes: v to the rows of source q.
  EP_DEV void deliver(const OutputTarget<T> &target, int q, uint4 v, const Slots &slots) const {
#pragma unroll
    for (int b = 0; b < T::ROW_BLOCKS; b++) {
      if (!isBlock(b)) continue;
#pragma unroll 1
      for (unsigned m = slots.has(b) >> q * 8 & (T::RANK_MAJOR ? 1u : 0xffu); m; m &= m - 1) {
        const int i = __ffs(m) - 1; // two rows at a time
        m &= m - 1;
        const int j = m ? __ffs(m) - 1 : i;
        const int row0 = __shfl_sync(FULL_WARP, slots.slot[b], q * 8 + i);
        const int row1 = __shfl_sync(FULL_WARP, slots.slot[b], q * 8 + j);
        target.put(row0, v);
        if (m) target.put(row1, v);
      }
    }
  }

  // All lanes: a step as it comes.
  EP_DEV void takeStep(Step &x, int t, int group, const Slots &slots) {
    const OutputTarget<T> target(a, x.p, lane);
    unsigned waiting = 0, there = 0;
#pragma unroll
    for (int b = 0; b < T::ROW_BLOCKS; b++) {
      if (!isBlock(b)) continue;
      const unsigned has = slots.has(b);
#pragma unroll
      for (int q = 0; q < SOURCES; q++) waiting |= has >> q * 8 & 0xffu ? 1u << q : 0u;
    }
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
        missing |= isMissing(x.v[q], x.p, lane, op.flag) ? 1u << q : 0u;
        if (!T::QUANT && there && own == q) x.v[q] = x.own;
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
        deliver(target, q, w, slots);
      }
      if (!waiting) break;
      const Awaited w = {EP_LL_DISPATCH, EP_WAIT_ROWS, group * SOURCES + __ffs(waiting) - 1, 0u, t};
      if (!keepWarpWaiting(a.op.group, op, w, spin, lane)) waiting &= waiting - 1;
    }
  }

  // The metadata of one of the lane's entries.
  struct Entry {
    int k;
    bool exists;
    unsigned id;
  };
  EP_DEV Entry entryOf(int src, int t, int b) const {
    Entry e;
    e.k = (lane & 7) + b * 8;
    e.exists = src < a.numRanks && t < counts[src] && e.k < a.topk;
    e.id = e.exists ? routing.id(src, t, e.k) : T::NO_EXPERT;
    return e;
  }

  EP_DEV void writeEntry(int src, int t, const Entry &e, int row) const {
    int *table = slotTable(a.op.group, a.op.handle) +
                 (size_t)src * a.maxTokens * (T::RANK_MAJOR ? 1 : a.topk);
    if (!T::RANK_MAJOR) table[t * a.topk + e.k] = row;
    if (T::RANK_MAJOR && e.k == 0) table[t] = row;
    if (T::RANK_MAJOR && row >= 0) {
      a.op.outIdx[(size_t)row * a.topk + e.k] =
          e.id == T::NO_EXPERT ? -1 : (int)e.id + (a.op.globalIds ? a.rank * a.numLocal : 0);
    }
  }

  // All lanes: the metadata of one (token, group of sources) for combine and the caller. The sources
  // of the returned rows go round from token to token and rank to rank: if all ranks sent back in the same
  // order, all would send to the same rank at once.
  EP_DEV void writeMetadata(int t, int group, const Slots &slots) {
    const ep_ll_handle_t &h = a.op.handle;
    const int src = group * SOURCES + (lane >> 3);
    Entry e[T::BLOCKS];
    unsigned all[T::BLOCKS]; // lanes whose entry is returned
    bool isReturned[T::BLOCKS], hasEarlier = false;
#pragma unroll
    for (int b = 0; b < T::BLOCKS; b++) e[b] = entryOf(src, t, b);
    int at = 0;
#pragma unroll 1
    for (int i = lane; i < t * a.groups + group; i += 32) at += (int)returns[i];
    at = __reduce_add_sync(FULL_WARP, at);
#pragma unroll
    for (int b = 0; b < T::BLOCKS; b++) {
      const bool is = e[b].id != T::NO_EXPERT;
      if (e[b].exists) writeEntry(src, t, e[b], slots.slot[b % T::ROW_BLOCKS]);
      const unsigned found = __ballot_sync(FULL_WARP, is) >> (lane & ~7) & 0xffu;
      isReturned[b] = is && (src != a.rank || keepsOwn()) &&
                      (h.sum == EP_LL_SUM_EXACT || (!hasEarlier && (lane & 7) == __ffs(found) - 1));
      if (T::GENERIC) hasEarlier = hasEarlier || found;
      all[b] = __ballot_sync(FULL_WARP, isReturned[b]);
    }
    const int turn = (a.rank + 1 + t) % SOURCES * 8, turned = (lane - turn) & 31;
#pragma unroll
    for (int b = 0; b < T::BLOCKS; b++) {
      if (!isReturned[b]) continue;
      int before = 0;
#pragma unroll
      for (int i = 0; i < T::BLOCKS; i++) { // by source, then k
        const unsigned front = i < b   ? (2u << (turned | 7)) - 1
                               : i > b ? (1u << (turned & ~7)) - 1
                                       : (1u << turned) - 1;
        before += __popc(__funnelshift_r(all[i], all[i], turn) & front);
      }
      returnsOf(h)[at + before] =
          ReturnEntry{slots.slot[b % T::ROW_BLOCKS], ReturnEntry::pack(src, e[b].k, t)};
    }
  }

  // All lanes, rank-major: tokens of a source that come here.
  EP_DEV int countSource(int src) const {
    const int from = map.bitOf(src, 0), to = map.bitOf(src + 1, 0);
    if (!T::GENERIC) return map.countBetween(from, to);
    int n = 0;
#pragma unroll 1
    for (int w = (from >> 5) + lane; w < to >> 5; w += 32) n += __popc(map.bits[w]);
    return __reduce_add_sync(FULL_WARP, n);
  }

  // One warp of each block that has work: counters and the ids of unused rows.
  EP_DEV void count(int numBlocks, int most) {
    const int at = (int)blockIdx.x, stride = numBlocks;
    if (!T::RANK_MAJOR) {
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
        const int n = countSource(src);
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
      for (int i = lane; i < most * a.groups; i += 32) n += (int)returns[i];
      n = __reduce_add_sync(FULL_WARP, n);
      if (lane == 0) headOf(a.op.handle).numReturns = n;
    }
  }

  // The most tokens of a source.
  EP_DEV int mostTokens() const {
    int n = lane < a.numRanks ? max(counts[lane], 0) : 0;
    if (T::GENERIC && lane + 32 < a.numRanks) n = max(n, counts[lane + 32]);
    return (int)__reduce_max_sync(FULL_WARP, n);
  }

  // Reads the routing of all sources; returns the most tokens that one has, or -1 if this block has
  // nothing to do. Loads the warp's first step as soon as the words are here: its rows may be here too.
  EP_DEV int readAll(Step &x) {
    const int perToken = a.groups * a.wire.steps, threads = a.numRecv * 32;
    // Guess that the others have as many tokens as this rank, to read all their words at once.
    const bool guessed = (int)blockIdx.x < a.numTokens * perToken;
    int from = 0, to = guessed ? a.numTokens : 1, log = guessed ? a.guess : 0, most;
    const Partition part = partitionOf(a.recv);
    const int u = part.first + warp, i = tokenOf<T>(a, u);
    const int t = a.groups == 1 ? i : i / a.groups, group = i - t * a.groups;
    x.isLoaded = u < part.end;
    if (x.isLoaded) begin(x, t, group, u - i * a.wire.steps);
#pragma unroll 1
    for (;;) {
      readRouting(from, to, log);
      syncWarps(1, threads);
      if (from == 0 && x.isLoaded) {
        const unsigned all = (1u << min(a.numRanks - group * SOURCES, SOURCES)) - 1;
        load(x, hasOwn(group) ? all & ~(1u << a.rank % SOURCES) : all);
      }
      most = mostTokens();
      if (blockIdx.x > 0 && (int)blockIdx.x >= most * perToken) return -1;
      if (from > 0 || most <= to) break;
      // A source that was given up may come after all: no warp would wait for all of its tokens.
      active = sourcesAnnounced();
      from = to;
      to = most;
      log = 32 - __clz(most - from);
    }
    if (map.spans > 1) {
      map.scan(warp, a.numRecv, lane);
      syncWarps(1, threads);
    }
    return most;
  }

  // Metadata besides the rows.
  EP_DEV void report(int numBlocks, int most) {
    if (blockIdx.x == 0 && lane == 0) {
      recordAcks(a.op.group, EP_LL_DISPATCH, op, (unsigned)counts[a.numRanks]);
    }
#pragma unroll 1
    for (int i = (int)blockIdx.x; i < most * a.groups; i += numBlocks) {
      const int t = a.groups == 1 ? i : i / a.groups, group = i - t * a.groups;
      writeMetadata(t, group, findSlots(t, group));
    }
    count(numBlocks, most);
  }

  EP_DEV void clearCounts() const {
    int i = warp * 32 + lane;
    do {
      if (i <= a.numRanks) counts[i] = i < a.numRanks && active >> i & 1 ? -1 : 0;
      i += a.numRecv * 32;
    } while (T::GENERIC && i <= a.numRanks);
  }

  // After clearShared. The last warp, which has the least to take, reports before it takes steps.
  EP_DEV void run() {
    clearCounts();
    syncWarps(1, a.numRecv * 32);
    Step x;
    const int most = readAll(x);
    if (most < 0) return;
    const int items = most * a.groups * a.wire.steps;
    Partition part = partitionOf(a.recv);
    if (most != a.numTokens) {
      part = partitionOf(items, blockIdx.x, a.numSms);
      x.isLoaded = false;
    }
    if (__builtin_expect(warp == a.numRecv - 1, 0)) {
      report(max(1, min(a.numSms, items)), most);
    }
    int last = -1;
    Slots slots;
#pragma unroll 1
    for (int u = part.first + warp; u < part.end; u += a.numRecv) {
      const int i = tokenOf<T>(a, u);
      const int t = a.groups == 1 ? i : i / a.groups, group = i - t * a.groups;
      if (i != last) {
        slots = findSlots(t, group);
        if (!T::GENERIC) slots.first = __ballot_sync(FULL_WARP, slots.slot[0] >= 0);
        last = i;
      }
      if (!x.isLoaded) begin(x, t, group, u - i * a.wire.steps);
      takeStep(x, t, group, slots);
      x.isLoaded = false;
    }
  }
};

#endif
