// High-throughput dispatch, flat and expert-major, forward and backward: one launch, two scatter pipelines.
//
//   feeders    own token -> the rings of the ranks that need it (one copy a rank crosses the link), with its
//              weights; flags
//   followers  received piece, or own token -> all its slots here; weights and ids; rows of padding
//
// A rank that is trapped writes nothing, but empties its rings.
#include "kernels/device/ht_scatter.cuh"

namespace {

struct Feed {
  static constexpr bool FEEDS = true, WATCH_ONE = false, FENCE = false, GATHERS = false;
  static constexpr bool ZERO_ROW = false;
  static constexpr int LANES = 4; // of the scout, for an item
  static constexpr unsigned KIND = EP_HT_KIND_DISPATCH;
  static constexpr ep_ll_phase_t PHASE = EP_LL_PHASE_BUFFER;
  const HtDispatchArgs &a;
  const HtTables &t;
  const unsigned long long *sent; // pieces to each rank so far
  const HtDivisor byPieces;

  EP_DEV const ep_ht_group_t &group() const { return a.op.group; }
  EP_DEV long long candidates() const { return (long long)t.head->numTokens * a.row.numPieces; }
  EP_DEV int index(int) const { return 0; }
  EP_DEV HtAhead ahead(int c, int l) const {
    HtItem item;
    item.token = byPieces.quotient(c);
    return HtAhead{0, l < t.width ? load(item, l) : make_int2(-1, 0)};
  }
  EP_DEV int begin(int c, int, HtItem &item) const {
    item.token = byPieces.quotient(c);
    item.piece = c - item.token * a.row.numPieces;
    return t.width;
  }
  EP_DEV int2 load(const HtItem &item, int i) const {
    return t.dests[(size_t)item.token * t.width + i];
  }
  EP_DEV HtEntry entry(const HtItem &item, int, int2 d) const {
    HtEntry e = {};
    if (d.x < 0 || d.x == group().rank) return e;
    e.is = true;
    e.unit =
        unitOf(d.x, sent[d.x] + (unsigned long long)d.y * a.row.numPieces + item.piece, a.ringBits);
    e.watch = HtWatch{creditAt(group(), 0, group().rank, d.x, e.unit.code),
                      (e.unit.gen - 1) & 0x7fffffff, d.x};
    return e;
  }
  EP_DEV HtWatch watchOne(const HtItem &) const { return HtWatch{}; }
  EP_DEV void isVoid(const HtUnit &) const {}
  EP_DEV void isEmpty(const HtItem &) const {}

  EP_DEV void load(const HtItem &item, uint32_t slot, uint64_t *full) const {
    loadRow(a.row, item.token, item.piece, a.op.tokens, a.op.scales, slot, full);
  }
  EP_DEV void store(const HtItem &item, int2 e, uint32_t slot) const {
    bulkStore(unitAt(group(), 0, unitRank(e.x), group().rank, e.x), slot,
              pieceBytes(a.row, item.piece));
  }
  // Eight lanes: the token's weights beside its first piece.
  EP_DEV void sendWeights(const HtItem &item, const int2 *entries, int l) const {
    if (!a.op.weights || item.piece) return;
    const int K = a.op.handle.numTopk;
    for (int i = 0; i < item.n; i++) {
      const int code = entries[i].x;
      float *to = unitWeights(group(), unitAt(group(), 0, unitRank(code), group().rank, code));
      for (int k = l; k < K; k += 8) to[k] = a.op.weights[(size_t)item.token * K + k];
    }
  }
  EP_DEV void raise(const HtItem &item, const int2 *entries, int l) const {
    for (int i = l; i < item.n; i += 8) {
      const int2 e = entries[i];
      storeRelaxed(flagAt(group(), 0, unitRank(e.x), group().rank, e.x), (uint32_t)e.y << 1);
      if (group().bytes) {
        atomicAdd((unsigned long long *)&group().bytes[unitRank(e.x)],
                  (unsigned long long)pieceBytes(a.row, item.piece));
      }
    }
  }
};

// item.code: the ring unit, HT_LOCAL for an own token, HT_LOCAL + 1 for zeros.
constexpr int HT_ZEROS = HT_LOCAL + 1;

template <bool EXPERT_MAJOR> struct Follow {
  static constexpr bool FEEDS = false, WATCH_ONE = true, FENCE = true, GATHERS = false;
  static constexpr bool ZERO_ROW = false;
  static constexpr int LANES = EXPERT_MAJOR ? 4 : 1;
  static constexpr unsigned KIND = EP_HT_KIND_DISPATCH;
  static constexpr ep_ll_phase_t PHASE = EP_LL_PHASE_ROWS;
  const HtDispatchArgs &a;
  const HtTables &t;
  const unsigned long long *received; // pieces from each rank so far
  int padGroups;                      // of eight rows, a candidate each, spread over the tokens
  int perToken;                       // candidates
  const HtDivisor byPieces, byToken;

  EP_DEV const ep_ht_group_t &group() const { return a.op.group; }
  EP_DEV long long candidates() const {
    return (long long)max(t.head->mostTokens, padGroups ? 1 : 0) * perToken * a.row.numPieces;
  }

  struct Which {
    int token, turn, piece;
  };
  EP_DEV Which which(int c) const {
    Which w;
    const int i = byToken.quotient(c);
    w.turn = c - i * perToken;
    w.token = byPieces.quotient(i);
    w.piece = i - w.token * a.row.numPieces;
    return w;
  }
  EP_DEV int sourceOf(int turn) const {
    const int s = group().rank - 1 - turn;
    return s < 0 ? s + group().numRanks : s;
  }
  EP_DEV int padsPerToken() const { return perToken - group().numRanks; }

  EP_DEV bool isPad(const Which &w) const { return w.turn >= group().numRanks; }
  EP_DEV int padGroup(const Which &w) const {
    return w.token * padsPerToken() + w.turn - group().numRanks;
  }

  EP_DEV int index(int c) const {
    const Which w = which(c);
    if (isPad(w)) return padGroup(w) < padGroups ? 0 : -1;
    return t.index[(size_t)sourceOf(w.turn) * group().maxTokens + w.token];
  }
  EP_DEV HtAhead ahead(int c, int l) const {
    const Which w = which(c);
    if (isPad(w)) return HtAhead{0, make_int2(0, 0)};
    HtItem item;
    item.token = w.token;
    item.source = sourceOf(w.turn);
    item.code = 0;
    return HtAhead{index(c), l < bound() ? load(item, l) : make_int2(-1, 0)};
  }
  EP_DEV int bound() const { return EXPERT_MAJOR ? a.op.handle.numTopk : 1; }
  EP_DEV int begin(int c, int index, HtItem &item) const {
    const Which w = which(c);
    item.piece = w.piece;
    item.token = w.token;
    item.index = index;
    if (isPad(w)) {
      item.code = HT_ZEROS;
      item.source = padGroup(w);
      return 8;
    }
    item.source = sourceOf(w.turn);
    item.code = HT_LOCAL;
    if (item.source != group().rank) {
      const HtUnit u =
          unitOf(item.source,
                 received[item.source] + (unsigned long long)index * a.row.numPieces + item.piece,
                 a.ringBits);
      item.code = u.code;
      item.gen = u.gen;
    }
    return bound();
  }
  EP_DEV HtWatch watchOne(const HtItem &item) const {
    if (item.code >= HT_LOCAL) return HtWatch{};
    return HtWatch{flagAt(group(), 0, group().rank, item.source, item.code), item.gen, item.source};
  }
  // Expert-major: the slot of the k-th expert.
  EP_DEV int2 load(const HtItem &item, int i) const {
    if (!EXPERT_MAJOR || item.code == HT_ZEROS) return make_int2(0, 0);
    return make_int2(
        t.entries[((size_t)item.source * group().maxTokens + item.token) * a.op.handle.numTopk + i],
        0);
  }
  EP_DEV HtEntry entry(const HtItem &item, int i, int2 loaded) const {
    HtEntry e = {};
    if (t.head->trapped) return e;
    if (item.code == HT_ZEROS) {
      e.unit.code = padRow(item.source * 8 + i);
      e.is = e.unit.code >= 0;
    } else if (EXPERT_MAJOR) {
      e.unit.code = loaded.x;
      e.is = loaded.x >= 0;
    } else {
      e.unit.code = (int)t.head->recvBase[item.source] + item.index;
      e.is = e.unit.code < t.head->numRows;
    }
    return e;
  }
  // The i-th row of padding: its zone is the last whose rows of padding begin at or before i.
  EP_DEV int padRow(int i) const {
    if (i >= t.head->numPads) return -1;
    int lo = 0, hi = group().numLocal;
    while (hi - lo > 1) {
      const int mid = (lo + hi) / 2;
      if (t.pads[mid] <= i)
        lo = mid;
      else
        hi = mid;
    }
    const int2 zone = t.zones[lo];
    return zone.x + zone.y + i - t.pads[lo];
  }
  EP_DEV void isVoid(const HtUnit &) const {}
  // Dropped or trapped: the unit is free at once.
  EP_DEV void isEmpty(const HtItem &item) const { release(item); }

  EP_DEV void load(const HtItem &item, uint32_t slot, uint64_t *full) const {
    const int bytes = pieceBytes(a.row, item.piece);
    if (item.code == HT_LOCAL) {
      loadRow(a.row, item.token, item.piece, a.op.tokens, a.op.scales, slot, full);
    } else {
      barrierExpect(full, bytes);
      const char *from = item.code == HT_ZEROS
                             ? a.zeros
                             : unitAt(group(), 0, group().rank, item.source, item.code);
      bulkLoad(slot, from, bytes, full);
    }
  }
  EP_DEV void store(const HtItem &item, int2 e, uint32_t slot) const {
    storeRow(a.row, e.x, item.piece, a.op.outTokens, a.op.outScales, slot);
  }
  EP_DEV void release(const HtItem &item) const {
    if (item.code < HT_LOCAL) giveCredit(group(), 0, item.code, item.gen);
  }

  // A lane: what the k-th expert of an item's token has to be told. Loads and stores apart, so that a lane's
  // loads are all under way before its first store.
  struct Note {
    int here, at;
    float weight;
    bool is;
  };
  EP_DEV int numNotes() const { return a.op.outWeights ? max(a.op.handle.numTopk, 8) : 0; }
  EP_DEV Note take(const HtItem &item, int k) const {
    const int K = a.op.handle.numTopk;
    Note n = {-1, 0, 0.0f, false};
    if (item.piece || item.n <= 0) return n;
    n.is = k < (item.code == HT_ZEROS ? item.n : K);
    if (!n.is || item.code == HT_ZEROS) return n;
    const int *here = t.entries + ((size_t)item.source * group().maxTokens + item.token) * K;
    const float *weights =
        item.code == HT_LOCAL
            ? a.op.weights + (size_t)item.token * K
            : unitWeights(group(), unitAt(group(), 0, group().rank, item.source, item.code));
    n.here = here[k];
    n.weight = __ldcv(weights + k);
    // Flat: local experts by ascending id, then the entries that are none.
    for (int j = 0; j < K && !EXPERT_MAJOR; j++) {
      const int other = here[j];
      n.at += n.here >= 0 ? other >= 0 && other < n.here : other >= 0 || j < k;
    }
    return n;
  }
  EP_DEV void give(const HtItem &item, const int2 *entries, int k, const Note &n) const {
    if (!n.is) return;
    if (item.code == HT_ZEROS) {
      a.op.outWeights[entries[k].x] = 0.0f;
    } else if (EXPERT_MAJOR) {
      if (n.here >= 0) a.op.outWeights[n.here] = n.weight;
    } else {
      const long long at = (long long)entries[0].x * a.op.handle.numTopk + n.at;
      const int first = a.op.globalIds ? group().rank * group().numLocal : 0;
      a.op.outWeights[at] = n.here >= 0 ? n.weight : 0.0f;
      a.op.outIdx[at] = n.here >= 0 ? first + n.here : -1;
    }
  }
  EP_DEV void countOwn(const HtItem &item) const {
    if (item.code != HT_LOCAL || !group().bytes) return;
    atomicAdd((unsigned long long *)&group().bytes[group().rank],
              (unsigned long long)pieceBytes(a.row, item.piece));
  }
};

// Weights 0 and ids -1 past the rows that arrived, as far as the tensor goes, by the followers' clerks.
EP_DEV void clearTail(const HtDispatchArgs &a, const HtTables &t) {
  const ep_ht_dispatch_t &o = a.op;
  if (!o.outWeights || t.head->trapped) return;
  const long long per = o.handle.expertMajor ? 1 : o.handle.numTopk;
  const long long rows = o.handle.maxRecv ? min((long long)o.topkRows, (long long)o.handle.maxRecv)
                                          : (long long)o.topkRows;
  const long long step = (long long)(gridDim.x - a.split) * 32;
  for (long long i = t.head->numRows * per + (blockIdx.x - a.split) * 32 + (threadIdx.x & 31);
       i < rows * per; i += step) {
    o.outWeights[i] = 0.0f;
    if (!o.handle.expertMajor) o.outIdx[i] = -1;
  }
}

template <bool EXPERT_MAJOR>
__global__ void __launch_bounds__(HT_SCATTER_THREADS, 1)
    dispatchKernel(const __grid_constant__ HtDispatchArgs a) {
  EP_DYNAMIC_SHARED(128, shared);
  const ep_ht_group_t &g = a.op.group;
  HtControl &c = htControl(g);
  const uint64_t began = g.stamps && threadIdx.x == 0 ? clockNs() : 0;
  const HtTables t = htTables(g, a.op.handle);
  if (htVolatile(&c.failed)) return;
  const bool feeds = (int)blockIdx.x < a.split;
  if (feeds) {
    const HtBlock b = blockOf(shared, a.feed, a.room, a.slotStride);
    arm(b, HT_SCATTER_READERS, 1, false);
    scatterPipe(b, Feed{a, t, c.rings[0].sent, HtDivisor(a.row.numPieces)}, a.feed, &c.work[0][0]);
  } else if (threadIdx.x >> 5 == 3) {
    clearTail(a, t);
  }
  const HtBlock b = blockOf(shared, a.follow, a.room, a.slotStride);
  arm(b, HT_SCATTER_READERS, 1, feeds);
  const int padGroups = (t.head->numPads + 7) / 8, tokens = max(t.head->mostTokens, 1);
  const int perToken = g.numRanks + (padGroups + tokens - 1) / tokens;
  scatterPipe(b,
              Follow<EXPERT_MAJOR>{a, t, c.rings[0].received, padGroups, perToken,
                                   HtDivisor(a.row.numPieces), HtDivisor(perToken)},
              a.follow, &c.work[0][1]);
  leave<false>(g, t, a.row.numPieces, false, began);
}

} // namespace

const void *epHtDispatchKernel(bool expertMajor) {
  return expertMajor ? EP_KERNEL(dispatchKernel<true>) : EP_KERNEL(dispatchKernel<false>);
}
