// What the blocks of a combine do (ht_combine.cu): senders and receivers.
#ifndef TREFOIL_KERNELS_HT_COMBINE_ROLES_CUH
#define TREFOIL_KERNELS_HT_COMBINE_ROLES_CUH

#include "kernels/ht/ht_pull.cuh"
#include "kernels/ht/ht_rows.cuh"
#include "kernels/ht/ht_scatter.cuh"

// A chunk of a row of the caller's: what combine takes has no scales.
EP_DEV const char *chunkAt(const HtCombineArgs &a, int row, int chunk) {
  return (const char *)a.op.tokens + (size_t)row * a.row.rowBytes + chunk * a.row.chunkBytes;
}

template <bool EXPERT_MAJOR, bool PULLS> struct CombineSender {
  static constexpr bool SENDS = true, WATCH_ONE = EXPERT_MAJOR, FENCE = false, SIDE_DATA = false,
                        ZERO_ROW = false;
  static constexpr unsigned KIND = EP_HT_KIND_COMBINE;
  static constexpr ep_wait_phase_t PHASE = EP_WAIT_CREDIT;
  const HtCombineArgs &a;
  const HtTables &t;
  const unsigned long long *sent;
  const Divisor byChunks, byOwners;
  const HtPullSources *sources; // PULLS

  EP_DEV const ep_ht_group_t &group() const { return a.op.group; }
  EP_DEV int missing() const {
    return EXPERT_MAJOR ? -1 : missingAnnounce<KIND>(group(), 0, group().numRanks);
  }
  EP_DEV const HtRow &row() const { return a.row; }
  EP_DEV int owners() const { return group().numRanks - (EXPERT_MAJOR ? 0 : 1); }
  EP_DEV int lanes() const { return EXPERT_MAJOR ? 4 : 1; }
  EP_DEV long long candidates() const {
    return (long long)t.head->mostTokens * owners() * a.row.numChunks;
  }
  EP_DEV void which(int c, HtItem &item) const {
    const int turns = owners(), i = byOwners.quotient(c);
    item.token = byChunks.quotient(i);
    item.chunk = i - item.token * a.row.numChunks;
    const int o = group().rank + 1 + c - i * turns;
    item.source = o < group().numRanks ? o : o - group().numRanks;
  }
  EP_DEV int index(int c) const {
    HtItem item;
    which(c, item);
    if (PULLS && sources->rows[item.source]) return -1;
    return t.index[(size_t)item.source * group().maxTokens + item.token];
  }
  EP_DEV int bound() const { return EXPERT_MAJOR ? a.op.handle.numTopk : 1; }
  EP_DEV HtAhead ahead(int c, int l) const {
    HtItem item;
    which(c, item);
    return HtAhead{index(c), l < bound() ? load(item, l) : make_int2(-1, 0)};
  }
  EP_DEV int begin(int c, int index, HtItem &item) const {
    which(c, item);
    item.index = index;
    const HtLocation u = fifoSlotOf(
        item.source, sent[item.source] + (unsigned long long)index * a.row.numChunks + item.chunk,
        a.fifoBits);
    item.code = u.code;
    item.epoch = u.epoch;
    return bound();
  }
  EP_DEV HtWatch watchOne(const HtItem &item) const {
    return HtWatch{creditAt(group(), 1, group().rank, item.source, item.code),
                   (item.epoch - 1) & 0x7fffffff, item.source};
  }
  // Expert-major: a row to add. Flat: the row to copy, which waits for the FIFO slot's credit.
  EP_DEV int2 load(const HtItem &item, int i) const {
    if (!EXPERT_MAJOR) return make_int2(0, 0);
    return make_int2(
        t.entries[((size_t)item.source * group().maxTokens + item.token) * a.op.handle.numTopk + i],
        0);
  }
  EP_DEV HtEntry entry(const HtItem &item, int, int2 loaded) const {
    HtEntry e = {};
    if (EXPERT_MAJOR) {
      e.location.code = loaded.x;
      e.is = loaded.x >= 0 && !t.head->trapped;
    } else {
      e.location.code = (int)t.head->recvBase[item.source] + item.index;
      e.is = e.location.code < t.head->numRows && !t.head->trapped;
      e.watch = watchOne(item);
    }
    return e;
  }
  EP_DEV void isVoid(const HtLocation &) const {}
  EP_DEV bool flags() const { return true; }
  EP_DEV void isEmpty(const HtItem &item) const {
    storeRelaxed(flagAt(group(), 1, item.source, group().rank, item.code),
                 (uint32_t)item.epoch << 1 | 1);
  }

  EP_DEV const char *from(const HtItem &item, int2 e) const { return chunkAt(a, e.x, item.chunk); }
  EP_DEV char *to(const HtItem &item) const {
    return fifoSlotAt(group(), 1, item.source, group().rank, item.code);
  }
  EP_DEV void load(const HtItem &item, uint32_t stage,
                   uint64_t *full) const { // flat: the one entry
    const int bytes = chunkBytes(a.row, item.chunk);
    barrierExpect(full, bytes);
    bulkLoad(stage, from(item, *(const int2 *)(&item + 1)), bytes, full);
  }
  EP_DEV void store(const HtItem &item, int2, uint32_t stage) const {
    bulkStore(to(item), stage, chunkBytes(a.row, item.chunk));
  }

  // Backward: the gradient of each of the token's weights that is known here, at its k.
  struct Metadata {
    float weight;
    bool is;
  };
  EP_DEV int numMetadata() const { return a.op.rowWeights ? a.op.handle.numTopk : 0; }
  EP_DEV Metadata take(const HtItem &item, const int2 *entries, int k) const {
    Metadata n = {0.0f, !item.chunk && item.n > 0};
    if (!n.is) return n;
    const size_t at = (size_t)item.source * group().maxTokens + item.token;
    n.weight =
        weightOfRow(a, t.entries[at * a.op.handle.numTopk + k], EXPERT_MAJOR ? -1 : entries[0].x);
    return n;
  }
  EP_DEV void give(const HtItem &item, const int2 *, int k, const Metadata &n) const {
    fifoWeights(group(), to(item))[k] = n.weight;
  }
  EP_DEV void raise(const HtItem &item, const int2 *, int l) const {
    if (l || item.n <= 0) return;
    storeRelaxed(flagAt(group(), 1, item.source, group().rank, item.code),
                 (uint32_t)item.epoch << 1);
    if (group().bytes) {
      atomicAdd((unsigned long long *)&group().bytes[group().numRanks + item.source],
                (unsigned long long)chunkBytes(a.row, item.chunk));
    }
  }
};

template <bool EXPERT_MAJOR, bool PULLS> struct CombineReceiver {
  static constexpr bool SENDS = false, WATCH_ONE = false, ZERO_ROW = true;
  static constexpr unsigned KIND = EP_HT_KIND_COMBINE;
  static constexpr ep_wait_phase_t PHASE = EP_WAIT_ROWS;
  const HtCombineArgs &a;
  const HtTables &t;
  const unsigned long long *received;
  const Divisor byChunks, byLocal;
  const HtPullSources *sources; // PULLS
  unsigned long long number;

  EP_DEV const ep_ht_group_t &group() const { return a.op.group; }
  EP_DEV int missing() const {
    return EXPERT_MAJOR ? -1 : missingAnnounce<KIND>(group(), 0, group().numRanks);
  }
  EP_DEV const HtRow &row() const { return a.row; }
  EP_DEV int lanes() const { return 4; }
  EP_DEV long long candidates() const { return (long long)t.head->numTokens * a.row.numChunks; }
  EP_DEV int index(int) const { return 0; }
  EP_DEV HtAhead ahead(int c, int l) const {
    HtItem item;
    item.token = byChunks.quotient(c);
    return HtAhead{0, l < t.width ? load(item, l) : make_int2(-1, 0)};
  }
  EP_DEV int begin(int c, int, HtItem &item) const {
    item.token = byChunks.quotient(c);
    item.chunk = c - item.token * a.row.numChunks;
    return t.width;
  }
  EP_DEV int2 load(const HtItem &item, int i) const {
    return t.dests[(size_t)item.token * t.width + i];
  }
  EP_DEV HtEntry entry(const HtItem &item, int, int2 d) const {
    HtEntry e = {};
    if (d.x < 0) return e;
    if (!EXPERT_MAJOR && d.x == group().rank) {
      const int row = (int)t.head->recvBase[d.x] + d.y;
      e.is = row < t.head->numRows && !t.head->trapped;
      e.location = HtLocation{HT_OWN, row};
      return e;
    }
    if (PULLS && sources->rows[d.x]) {
      e.is = d.y < sources->count[d.x];
      e.location = HtLocation{pulledFrom(d.x), d.y};
      return e;
    }
    e.is = true;
    e.location = fifoSlotOf(
        d.x, received[d.x] + (unsigned long long)d.y * a.row.numChunks + item.chunk, a.fifoBits);
    e.watch =
        HtWatch{flagAt(group(), 1, group().rank, d.x, e.location.code), e.location.epoch, d.x};
    return e;
  }
  EP_DEV void isVoid(const HtLocation &u) const { giveCredit(group(), 1, u.code, u.epoch); }
  EP_DEV void isEmpty(const HtItem &) const {}

  EP_DEV const char *from(const HtItem &item, int2 e) const {
    if (e.x == HT_OWN) return chunkAt(a, e.y, item.chunk);
    if (PULLS && isPulled(e.x)) return pulledAt(a.row, *sources, pulledRank(e.x), e.y, item.chunk);
    return fifoSlotAt(group(), 1, group().rank, fifoRank(e.x), e.x);
  }
  EP_DEV char *to(const HtItem &item) const {
    return (char *)a.op.out + (size_t)item.token * a.row.rowBytes + item.chunk * a.row.chunkBytes;
  }
  EP_DEV void release(const HtItem &item, const int2 *entries) const {
    const int bytes = chunkBytes(a.row, item.chunk);
    for (int i = 0; i < item.n; i++) {
      const int code = entries[i].x;
      if (isFifoSlot(code)) giveCredit(group(), 1, code, entries[i].y);
      if (code == HT_OWN && group().bytes) {
        atomicAdd((unsigned long long *)&group().bytes[group().numRanks + group().rank],
                  (unsigned long long)bytes);
      }
    }
  }
  // Backward: the gradient of each of the token's weights, from the rank of its expert.
  struct Metadata {
    float weight;
    int pulled; // the rank that a word comes from; -1: none does
    uint4 seen;
    bool is;
  };
  EP_DEV int numMetadata() const { return a.op.outWeights ? a.op.handle.numTopk : 0; }
  EP_DEV Metadata take(const HtItem &item, const int2 *entries, int k) const {
    const int K = a.op.handle.numTopk;
    Metadata n = {0.0f, -1, make_uint4(0, 0, 0, 0), item.chunk == 0};
    const int e = n.is ? t.ids[(size_t)item.token * K + k] : -1;
    if (e < 0) return n;
    const int rank = byLocal.quotient(e);
    for (int i = 0; i < item.n; i++) {
      const int2 from = entries[i];
      if (from.x == HT_OWN) {
        if (rank == group().rank) n.weight = own(item.token, k, from.y);
      } else if (PULLS && isPulled(from.x)) {
        if (rank != pulledRank(from.x)) continue;
        n.pulled = rank;
        n.seen = readGradient(group(), rank, item.token, k);
      } else if (fifoRank(from.x) == rank) {
        const char *fifoSlot = fifoSlotAt(group(), 1, group().rank, rank, from.x);
        n.weight = __ldcv(fifoWeights(group(), (char *)fifoSlot) + k);
      }
    }
    return n;
  }
  EP_DEV void give(const HtItem &item, const int2 *, int k, const Metadata &n) const {
    float weight = n.weight;
    if (PULLS && n.pulled >= 0)
      weight = waitGradient(group(), n.seen, n.pulled, item.token, k, number);
    a.op.outWeights[(size_t)item.token * a.op.handle.numTopk + k] = weight;
  }
  EP_DEV float own(int token, int k, long long row) const {
    const size_t at = (size_t)group().rank * group().maxTokens + token;
    return weightOfRow(a, t.entries[at * a.op.handle.numTopk + k], row);
  }
};

#endif
