// High-throughput Update: an all-gather of the routing, after which every rank computes where its
// tokens go and what comes to it. One launch.
//
//   1. send      each own token's experts to every rank, as words {8 bytes of ids, number of the Update}:
//                a word is a flagged 16-byte store (no fence, no reset)
//   2. count     a block takes a tile of 256 tokens of one source: one bit per (set, token), where the sets
//                are the local experts, "comes here", and for own tokens each rank; it stores the counts
//   3. barrier   of all blocks of the launch
//   4. number    a token's number in a set is the sum of the counts of the tiles before and the bits before
//                its own, so numbers ascend by (source, token) whatever the order of the blocks
//
// Words of Update e lie in buffer e mod 2. A rank that sends e has received e - 1 from all ranks, each sent
// after its sender had finished e - 2: what e overwrites has been read.
//
// Across NVLink domains (ht_far_update.cuh) the ids of far ranks come by way of a rank of the own domain, as
// words like the others', and there are more sets.
#ifndef TREFOIL_KERNELS_HT_UPDATE_CUH
#define TREFOIL_KERNELS_HT_UPDATE_CUH

#include "kernels/ht/ht_control.cuh"
#include "kernels/ht/ht_kernels.cuh"

constexpr int HT_TILE = 256, HT_TILE_WORDS = HT_TILE / 32;

struct UpdateShared {
  unsigned *bits;      // [sets][HT_TILE_WORDS]
  int *before, *total; // [sets] of tiles before this one, of all
  int *zone;           // [L + 1] first row of each expert's zone
  unsigned *kept;      // [HT_TILE_WORDS] tokens of the tile that DROP leaves
  int *firstOf;        // [R + 1] flat: row of each source's first token
};

EP_DEV char *headerAt(const ep_ht_group_t &g, int at, int from, int buf) {
  return g.peers[at] + g.at.header + (size_t)(buf * g.numRanks + from) * 16;
}
EP_DEV char *wordAt(const ep_ht_group_t &g, int at, int from, long long t, int buf) {
  return g.peers[at] + g.at.routing +
         ((size_t)(buf * g.numRanks + from) * g.maxTokens + t) * g.at.idVectors * 16;
}

// What a word of this Update is waited for as.
EP_DEV Awaited awaited(ep_wait_phase_t phase, int src, long long item) {
  return Awaited{EP_HT_KIND_UPDATE, phase, src, 0, item};
}

EP_DEV int readId(const ep_ht_update_t &o, size_t i) {
  const long long e = o.idx64 ? ((const long long *)o.topkIdx)[i] : ((const int *)o.topkIdx)[i];
  return e >= 0 && e < o.group.numExperts ? (int)e : e == -1 ? -1 : -2;
}

// Word `vector` of own token t for rank d; for the own rank, ids that are none are counted.
EP_DEV unsigned long long packIds(const UpdateArgs &a, long long t, int vector, int d) {
  const ep_ht_update_t &o = a.op;
  const int K = o.handle.numTopk, k0 = vector * a.perWord;
  unsigned long long data = ~0ull;
  for (int j = 0; j < a.perWord && k0 + j < K; j++) {
    const int e = readId(o, (size_t)t * K + k0 + j);
    if (e == -2 && d == o.group.rank) atomicAdd(&htControl(o.group).badIds, 1u);
    const unsigned long long field = ~0ull >> (64 - a.idBits);
    if (e >= 0) data ^= (field ^ (unsigned)e) << (j * a.idBits);
  }
  return data;
}

EP_DEV void sendIds(const UpdateArgs &a, unsigned long long number) {
  const ep_ht_update_t &o = a.op;
  const ep_ht_group_t &g = o.group;
  const int V = g.at.idVectors, buf = (int)(number & 1);
  const long long perRank = (long long)o.numTokens * V;
  if (blockIdx.x == 0 && threadIdx.x < g.numRanks) {
    storeSys(headerAt(g, threadIdx.x, g.rank, buf), packFlagged(o.numTokens, number));
  }
  for (long long i = (long long)blockIdx.x * HT_TILE + threadIdx.x; i < perRank * g.numRanks;
       i += (long long)gridDim.x * HT_TILE) {
    const int d = (int)((g.rank + 1 + i / perRank) % g.numRanks);
    const long long word = i % perRank, t = word / V;
    const unsigned long long data = packIds(a, t, (int)(word - t * V), d);
    storeSys(wordAt(g, d, g.rank, t, buf) + (word - t * V) * 16, packFlagged(data, number));
  }
}

// Which token of which source this thread looks at, and its experts.
struct Look {
  static constexpr int MOST = 128;
  int src, t;
  bool is;                  // there is such a token
  int numHere;              // flat: its entries that are local experts
  unsigned bits[MOST / 32]; // which, as far as there are bits

  EP_DEV void add(int local) {
    numHere++;
#pragma unroll
    for (int w = 0; w < MOST / 32; w++) bits[w] |= local >> 5 == w ? 1u << (local & 31) : 0;
  }
  EP_DEV int before(int local) const {
    int n = 0;
#pragma unroll
    for (int w = 0; w < MOST / 32; w++) {
      const unsigned below = local >> 5 > w ? ~0u : local >> 5 < w ? 0 : (1u << (local & 31)) - 1;
      n += __popc(bits[w] & below);
    }
    return n;
  }
};

template <class F>
EP_DEV void forIds(const UpdateArgs &a, const Look &l, unsigned long long number, F f) {
  const ep_ht_group_t &g = a.op.group;
  const unsigned long long field = ~0ull >> (64 - a.idBits);
  const char *at = wordAt(g, g.rank, l.src, l.t, (int)(number & 1));
  for (int k = 0; k < a.op.handle.numTopk; k += a.perWord) {
    unsigned long long data;
    const Awaited w = awaited(EP_WAIT_ROUTING, l.src, l.t);
    if (!waitFlagged(g, at + k / a.perWord * 16, number, w, data)) return;
#pragma unroll 4
    for (int j = 0; j < a.perWord && k + j < a.op.handle.numTopk; j++) {
      const unsigned long long e = data >> (j * a.idBits) & field;
      f(k + j, e == field ? -1 : (int)e);
    }
  }
}

// All threads: the bits of a tile.
template <class Reach>
EP_DEV Look readTile(const UpdateArgs &a, const UpdateShared &s, const Reach &reach, int tile,
                     unsigned long long number) {
  EP_SHARED(int, numTokens);
  const ep_ht_group_t &g = a.op.group;
  Look l = {tile / a.perSource, tile % a.perSource * HT_TILE + (int)threadIdx.x, false, 0, {}};
  __syncthreads();
  for (int i = threadIdx.x; i < a.sets * HT_TILE_WORDS; i += HT_TILE) s.bits[i] = 0;
  if (threadIdx.x == 0) {
    unsigned long long n = 0;
    const bool ok = waitFlagged(g, headerAt(g, g.rank, l.src, (int)(number & 1)), number,
                                awaited(EP_WAIT_ANNOUNCE, l.src, -1), n);
    numTokens = ok ? min((int)n, g.maxTokens) : 0;
  }
  __syncthreads();
  l.is = l.t < numTokens;
  if (l.is) {
    const int first = g.rank * g.numLocal, w = threadIdx.x >> 5;
    const unsigned bit = 1u << (threadIdx.x & 31);
    forIds(a, l, number, [&](int, int e) {
      if (e < 0) return;
      if (e >= first && e < first + g.numLocal) {
        atomicOr(&s.bits[(e - first) * HT_TILE_WORDS + w], bit);
        atomicOr(&s.bits[g.numLocal * HT_TILE_WORDS + w], bit);
        if (!a.op.handle.expertMajor) l.add(e - first);
      }
      reach.eachSet(a, l.src, e, [&](int set) {
        atomicOr(&s.bits[(g.numLocal + 1 + set) * HT_TILE_WORDS + w], bit);
      });
    });
  }
  __syncthreads();
  return l;
}

EP_DEV int countSet(const unsigned *bits) {
  int n = 0;
#pragma unroll
  for (int w = 0; w < HT_TILE_WORDS; w++) n += __popc(bits[w]);
  return n;
}
EP_DEV int countBefore(const unsigned *bits, int thread) {
  int n = __popc(bits[thread >> 5] & ((1u << (thread & 31)) - 1));
  for (int w = 0; w < thread >> 5; w++) n += __popc(bits[w]);
  return n;
}

// One thread: the limit of a grid barrier has passed.
EP_DEV void missBlocks(const ep_ht_group_t &g, unsigned turn, unsigned long long since) {
  HtControl &c = htControl(g);
  const Awaited w = {EP_HT_KIND_UPDATE, EP_WAIT_BLOCKS, g.rank, turn - 1, blockIdx.x};
  if (atomicCAS(&c.wait.failed, 0u, 1u) != 0) return;
  recordTimeout(c.wait, [&] {
    writeRecord(g.record, w, loadVolatile(&c.numbers[2]) + 1, turn, since, clockNs(), true);
  });
}

// All threads of all blocks; false: the group has failed, or some block was not there in twice the limit.
EP_DEV bool gridBarrier(const ep_ht_group_t &g, int blocks) {
  HtControl &c = htControl(g);
  int failed = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    const unsigned turn = loadVolatile(&c.barrierTurn);
    __threadfence();
    if (atomicAdd(&c.barrierCount, 1u) == blocks - 1) {
      c.barrierCount = 0;
      __threadfence();
      atomicAdd(&c.barrierTurn, 1u);
    } else {
      const unsigned long long since = clockNs();
      while (!failed && loadVolatile(&c.barrierTurn) == turn) {
        if (clockNs() - since > 2 * g.timeoutNs) missBlocks(g, turn + 1, since);
        failed = loadVolatile(&c.wait.failed) != 0;
      }
    }
    __threadfence();
  }
  return !__syncthreads_or(failed);
}

// One warp a set: the counts of the tiles before `tile`, and of all.
EP_DEV void sumSets(const UpdateArgs &a, const UpdateShared &s, int tile) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  for (int set = warp; set < a.sets; set += HT_TILE / 32) {
    int before = 0, total = 0;
    for (int c = lane; c < a.tiles; c += 32) {
      const int n = __ldcg(a.counts + (size_t)set * a.tiles + c);
      total += n;
      before += c < tile ? n : 0;
    }
    before = __reduce_add_sync(FULL_WARP, before);
    total = __reduce_add_sync(FULL_WARP, total);
    if (lane == 0) {
      s.before[set] = before;
      s.total[set] = total;
    }
  }
  __syncthreads();
}

// One warp: exclusive sums of f(0), f(1), ... f(n - 1) into out[0, n].
template <class F> EP_DEV void scan(int *out, int n, F f) {
  const int lane = threadIdx.x & 31;
  int carry = 0;
  for (int i0 = 0; i0 < n; i0 += 32) {
    const int v = i0 + lane < n ? f(i0 + lane) : 0;
    int sum = v;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const int up = __shfl_up_sync(FULL_WARP, sum, d);
      if (lane >= d) sum += up;
    }
    if (i0 + lane < n) out[i0 + lane] = carry + sum - v;
    carry += __shfl_sync(FULL_WARP, sum, 31);
  }
  if (lane == 0) out[n] = carry;
}

EP_DEV int paddedCount(const ep_ht_handle_t &h, int n) {
  const int align = h.alignment > 1 ? (int)h.alignment : 1;
  return (n + align - 1) & -align;
}

EP_DEV void findZones(const UpdateArgs &a, const UpdateShared &s) {
  const ep_ht_handle_t &h = a.op.handle;
  if (threadIdx.x < 32) {
    scan(s.zone, a.op.group.numLocal, [&](int e) { return paddedCount(h, s.total[e]); });
  }
  __syncthreads();
}

// One thread, flat: the columns of a token's entries (ht_control.cuh) where there are more local experts than
// Look has bits.
EP_DEV void findColumns(int *entries, int topk) {
  int numHere = 0, numNone = 0;
  for (int k = 0; k < topk; k++) numHere += entries[k] >= 0;
  for (int k = 0; k < topk; k++) {
    const int local = expertOf(entries[k]);
    int before = 0;
    for (int j = 0; j < topk; j++) {
      const int other = expertOf(entries[j]);
      before += other >= 0 && other < local;
    }
    entries[k] = local < 0 ? flatNone(numHere + numNone++) : flatEntry(local, before);
  }
}

// This thread's token of the tile: its number in a set that it is in, or -1.
EP_DEV int numberIn(const UpdateShared &s, int set) {
  const unsigned *bits = s.bits + set * HT_TILE_WORDS;
  const int thread = threadIdx.x;
  if (!(bits[thread >> 5] >> (thread & 31) & 1)) return -1;
  return s.before[set] + countBefore(bits, thread);
}

// What differs if all ranks are in one NVLink domain, and if not (ht_far_update.cuh).
struct OneDomain {
  using Reach = OneDomain;
  OneDomain() = default;
  EP_DEV OneDomain(const ep_ht_group_t &, const OneDomain &) {}

  EP_DEV void exchange(const UpdateArgs &a, unsigned long long number) const { sendIds(a, number); }
  // Sets of tokens behind those of experts and "comes here": own tokens that go to a rank.
  template <class F> EP_DEV void eachSet(const UpdateArgs &a, int src, int expert, F f) const {
    if (src == a.op.group.rank) f(expert / a.op.group.numLocal);
  }
  // Where own token t goes.
  EP_DEV void listDests(const UpdateArgs &a, const UpdateShared &s, const HtTables &tables,
                        int t) const {
    const ep_ht_group_t &g = a.op.group;
    const int L = g.numLocal, thread = threadIdx.x;
    int n = 0;
    int2 *dests = tables.dests + (size_t)t * tables.width;
    for (int r = 0; r < g.numRanks; r++) {
      const unsigned *set = s.bits + (L + 1 + r) * HT_TILE_WORDS;
      if (!(set[thread >> 5] >> (thread & 31) & 1)) continue;
      dests[n++] = make_int2(r, s.before[L + 1 + r] + countBefore(set, thread));
    }
    for (; n < tables.width; n++) dests[n] = make_int2(-1, 0);
  }
  EP_DEV void fillMore(const UpdateArgs &, const UpdateShared &, const HtTables &, const Look &,
                       unsigned long long) const {}
  EP_DEV void reportMore(const UpdateArgs &, const UpdateShared &, const HtTables &) const {}
};

// All threads: what the tables say of a tile's tokens, and for DROP how many of each expert stay.
template <class Reach>
EP_DEV void fillTables(const UpdateArgs &a, const UpdateShared &s, const Reach &reach,
                       const Look &l, unsigned long long number) {
  const ep_ht_group_t &g = a.op.group;
  const ep_ht_handle_t &h = a.op.handle;
  const HtTables tables = htTables(g, h);
  const int L = g.numLocal, K = h.numTopk, first = g.rank * L, thread = threadIdx.x;
  const bool here = s.bits[L * HT_TILE_WORDS + (thread >> 5)] >> (thread & 31) & 1;
  int flat = -1;
  if (here) flat = s.before[L] + countBefore(s.bits + L * HT_TILE_WORDS, thread);
  const bool stays = here && !(h.drop && !h.zeroCopyOn && h.maxRecv && flat >= h.maxRecv);
  if (l.t < g.maxTokens) {
    const size_t at = (size_t)l.src * g.maxTokens + l.t;
    tables.index[at] = here ? flat - s.firstOf[l.src] : -1;
    unsigned firstRow = HT_NOWHERE;
    if (l.is) {
      int numNone = 0;
      forIds(a, l, number, [&](int k, int e) {
        const bool mine = e >= first && e < first + L;
        int entry = -1;
        if (!h.expertMajor) {
          entry =
              mine ? flatEntry(e - first, l.before(e - first)) : flatNone(l.numHere + numNone++);
        } else if (mine) {
          entry = s.zone[e - first] + s.before[e - first] +
                  countBefore(s.bits + (e - first) * HT_TILE_WORDS, thread);
          if (!stays || (h.drop && h.maxRecv && entry >= h.maxRecv)) entry = -1;
        }
        tables.entries[at * K + k] = entry;
        if (entry >= 0) firstRow = firstRow == HT_NOWHERE ? 2 * (unsigned)entry : firstRow | 1;
        if (l.src == g.rank) tables.ids[(size_t)l.t * K + k] = e;
      });
      if (!h.expertMajor && L > Look::MOST) findColumns(tables.entries + at * K, K);
      if (l.src == g.rank) reach.listDests(a, s, tables, l.t);
    }
    reach.fillMore(a, s, tables, l, number);
    if (h.expertMajor) tables.first[at] = firstRow;
  }
  if (!h.drop) return;
  const unsigned mask = __ballot_sync(FULL_WARP, stays);
  if ((thread & 31) == 0) s.kept[thread >> 5] = mask;
  __syncthreads();
  for (int e = thread; e < L; e += HT_TILE) {
    int n = 0;
    for (int w = 0; w < HT_TILE_WORDS; w++) n += __popc(s.bits[e * HT_TILE_WORDS + w] & s.kept[w]);
    if (n) atomicAdd(&a.keptOf[e], n);
  }
}

EP_DEV void count(const ep_ht_counter_t &c, int i, long long v) {
  if (!c.data) return;
  if (c.is64)
    ((long long *)c.data)[i] = v;
  else
    ((int *)c.data)[i] = (int)v;
}

// One block: the head, the zones, the caller's counters.
template <class Reach>
EP_DEV void report(const UpdateArgs &a, const UpdateShared &s, const Reach &reach) {
  const ep_ht_update_t &o = a.op;
  const ep_ht_group_t &g = o.group;
  const ep_ht_handle_t &h = o.handle;
  const HtTables tables = htTables(g, h);
  const int L = g.numLocal;
  const long long flat = s.total[L], rows = h.expertMajor ? s.zone[L] : flat;
  const bool over = h.maxRecv && rows > h.maxRecv;
  const long long limit = h.drop && h.maxRecv ? h.maxRecv : rows;
  for (int e = threadIdx.x; e < L; e += HT_TILE) {
    const int n = h.drop ? __ldcg(a.keptOf + e) : s.total[e];
    if (h.expertMajor) {
      const long long at = s.zone[e], padded = s.zone[e + 1] - at, room = max(limit - at, 0ll);
      tables.zones[e] = make_int2((int)at, (int)min((long long)n, room));
      count(o.expertOffsets, e, min(at, limit));
      count(o.expertCounters, e, min(padded, room));
    } else {
      tables.zones[e] = make_int2(0, n);
      count(o.expertCounters, e, n);
    }
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    scan(tables.pads, L, [&](int e) {
      if (!h.expertMajor) return 0;
      const long long end = min((long long)s.zone[e + 1], limit);
      const int2 z = tables.zones[e];
      return max((int)(end - z.x - z.y), 0);
    });
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    ep_ht_head_t *head = tables.head;
    head->flatTotal = flat;
    head->rowTotal = rows;
    head->trapped = over && !h.drop;
    head->numRows = head->trapped ? 0 : min(rows, limit);
    head->numTokens = o.numTokens;
    head->badIds = (int)atomicExch(&htControl(g).badIds, 0u);
    head->numTopk = h.numTopk;
    head->expertMajor = h.expertMajor;
    head->numPads = head->trapped ? 0 : tables.pads[L];
    count(o.total, 0, rows);
    for (int i = 0; o.identityAt && i < EP_HT_IDENTITY_WORDS; i++) o.identityAt[i] = o.identity[i];
    volatile ep_ht_status_t *status = g.status;
    if (status && head->badIds) status->badIds = status->badIds + (unsigned)head->badIds;
  }
  for (int r = threadIdx.x; r < g.numRanks; r += HT_TILE) {
    tables.head->sendCount[r] = s.total[L + 1 + r];
    tables.head->recvBase[r] = s.firstOf[r];
    tables.head->recvCount[r] = s.firstOf[r + 1] - s.firstOf[r];
  }
  reach.reportMore(a, s, tables);
}

// All threads: flat row of each source's first token.
EP_DEV void findSources(const UpdateArgs &a, int *out) {
  const ep_ht_group_t &g = a.op.group;
  const int *here = a.counts + (size_t)g.numLocal * a.tiles;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  for (int r = warp; r < g.numRanks; r += HT_TILE / 32) {
    int n = 0;
    for (int c = lane; c < a.perSource; c += 32) n += __ldcg(here + r * a.perSource + c);
    n = __reduce_add_sync(FULL_WARP, n);
    if (lane == 0) out[r] = n;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int sum = 0;
    for (int r = 0; r <= g.numRanks; r++) {
      const int n = r < g.numRanks ? out[r] : 0;
      out[r] = sum;
      sum += n;
    }
  }
  __syncthreads();
}

// How: OneDomain, or what a Reach across domains is made of.
template <class How>
__global__ void __launch_bounds__(HT_TILE, 1)
    updateKernel(const __grid_constant__ UpdateArgs a, const __grid_constant__ How how) {
  const typename How::Reach reach(a.op.group, how);
  EP_DYNAMIC_SHARED(16, memory);
  EP_SHARED_ARRAY(int, firstOf, EP_HT_MAX_RANKS + 1);
  const ep_ht_group_t &g = a.op.group;
  HtControl &c = htControl(g);
  const uint64_t began = g.stamps && threadIdx.x == 0 ? clockNs() : 0;
  const unsigned long long number = loadVolatile(&c.numbers[2]) + 1;
  if (loadVolatile(&c.wait.failed)) return;
  UpdateShared s;
  s.bits = (unsigned *)memory;
  s.before = (int *)(s.bits + a.sets * HT_TILE_WORDS);
  s.total = s.before + a.sets;
  s.zone = s.total + a.sets;
  s.kept = (unsigned *)(s.zone + g.numLocal + 1);
  s.firstOf = firstOf;
  const HtTables tables = htTables(g, a.op.handle);

  if (blockIdx.x == 0 && threadIdx.x == 0) tables.head->mostTokens = 0;
  if (blockIdx.x == 0) {
    for (int e = threadIdx.x; e < g.numLocal; e += HT_TILE) a.keptOf[e] = 0;
  }
  reach.exchange(a, number);
  Look look = {};
  for (int tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) {
    look = readTile(a, s, reach, tile, number);
    for (int set = threadIdx.x; set < a.sets; set += HT_TILE) {
      a.counts[(size_t)set * a.tiles + tile] = countSet(s.bits + set * HT_TILE_WORDS);
    }
  }
  if (!gridBarrier(g, gridDim.x)) return;
  findSources(a, firstOf);
  const bool once = a.tiles <= (int)gridDim.x, reports = blockIdx.x == gridDim.x - 1;
  bool hasSums = false; // the totals and the zones, which are the same for all tiles
  for (int tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) {
    if (!once) look = readTile(a, s, reach, tile, number);
    sumSets(a, s, tile);
    findZones(a, s);
    hasSums = true;
    fillTables(a, s, reach, look, number);
    const int tokens = __syncthreads_count(look.is);
    if (threadIdx.x == 0 && tokens) {
      atomicMax(&tables.head->mostTokens, tile % a.perSource * HT_TILE + tokens);
    }
  }
  if (a.op.handle.drop && !gridBarrier(g, gridDim.x)) return;
  if (reports) {
    if (!hasSums) {
      sumSets(a, s, 0);
      findZones(a, s);
    }
    report(a, s, reach);
    if (threadIdx.x == 0) c.numbers[2] = number;
  }
  if (g.stamps && threadIdx.x == 0) {
    g.stamps[blockIdx.x * 2] = began;
    g.stamps[blockIdx.x * 2 + 1] = clockNs();
  }
}

#endif
