// What the feeders of a dispatch do: own token -> the ranks that need it, one copy a rank crosses the
// link. Into its ring, with its weights and a flag; or straight into its slot (DIRECT, ht_direct.cuh),
// the own rank's too if flat.
#ifndef TREFOIL_KERNELS_HT_FEED_CUH
#define TREFOIL_KERNELS_HT_FEED_CUH

#include "kernels/ht/ht_direct.cuh"
#include "kernels/ht/ht_scatter.cuh"

template <bool EXPERT_MAJOR, bool DIRECT> struct Feed {
  static constexpr bool FEEDS = true, WATCH_ONE = false, FENCE = false, GATHERS = false;
  static constexpr bool ZERO_ROW = false;
  static constexpr int LANES = 4; // of the scout, for an item
  static constexpr unsigned KIND = EP_HT_KIND_DISPATCH;
  static constexpr ep_ll_phase_t PHASE = EP_LL_PHASE_BUFFER;
  const HtDispatchArgs &a;
  const HtTables &t;
  const unsigned long long *sent; // pieces to each rank so far
  const HtDivisor byPieces;
  const HtPairs *pairs; // DIRECT
  unsigned long long number;

  EP_DEV const ep_ht_group_t &group() const { return a.op.group; }
  EP_DEV int missing() const { return missingHello(group()); }
  EP_DEV bool isDirect(int rank) const { return DIRECT && pairs->tokens[rank]; }
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
  // A rank, and how many-th own token it is there; direct and expert-major: its first slot there, * 2 + more.
  EP_DEV int2 load(const HtItem &item, int i) const {
    int2 d = t.dests[(size_t)item.token * t.width + i];
    if (DIRECT && EXPERT_MAJOR && d.x >= 0 && d.x != group().rank && isDirect(d.x)) {
      d.y = (int)lookForPlace(group(), d.x, item.token, number);
    }
    return d;
  }
  EP_DEV HtEntry entry(const HtItem &item, int, int2 d) const {
    HtEntry e = {};
    if (d.x < 0) return e;
    if (isDirect(d.x)) return push(item, d);
    if (d.x == group().rank) return e;
    e.is = true;
    e.unit =
        unitOf(d.x, sent[d.x] + (unsigned long long)d.y * a.row.numPieces + item.piece, a.ringBits);
    e.watch = HtWatch{creditAt(group(), 0, group().rank, d.x, e.unit.code),
                      (e.unit.gen - 1) & 0x7fffffff, d.x};
    return e;
  }
  EP_DEV HtEntry push(const HtItem &item, int2 d) const {
    HtEntry e = {};
    if (!EXPERT_MAJOR) {
      e.is = true;
      e.unit = HtUnit{pushedTo(d.x, false), d.y};
      return e;
    }
    if (d.x == group().rank) return e; // a follower's
    unsigned place = (unsigned)d.y;
    if (place == HT_NOWHERE) place = awaitPlace(group(), d.x, item.token, number);
    e.is = place != HT_NOWHERE;
    if (!e.is) e.watch = HtWatch{&htControl(group()).failed, -1, d.x}; // the scout gives up
    e.unit = HtUnit{pushedTo(d.x, place & 1), (int)(place >> 1)};
    return e;
  }
  EP_DEV HtWatch watchOne(const HtItem &) const { return HtWatch{}; }
  EP_DEV void isVoid(const HtUnit &) const {}
  EP_DEV void isEmpty(const HtItem &) const {}

  EP_DEV void load(const HtItem &item, uint32_t slot, uint64_t *full) const {
    loadRow(a.row, item.token, item.piece, a.op.tokens, a.op.scales, slot, full);
  }
  EP_DEV void store(const HtItem &item, int2 e, uint32_t slot) const {
    if (DIRECT && isPushed(e.x)) {
      const int r = pushedRank(e.x);
      storeRow(a.row, e.y, item.piece, pairs->tokens[r], pairs->scales[r], slot);
      return;
    }
    bulkStore(unitAt(group(), 0, unitRank(e.x), group().rank, e.x), slot,
              pieceBytes(a.row, item.piece));
  }
  EP_DEV bool hasScales() const { return DIRECT && a.row.scaleBytes > 0; }
  EP_DEV void storeBeside(const HtItem &item, const int2 *entries, const char *place, int l) const {
    storeScales(a.row, item.piece, place, item.n, l, [&](int j) -> char * {
      const int2 e = entries[j];
      if (!isPushed(e.x)) return nullptr; // its unit has them
      return pairs->scales[pushedRank(e.x)] + (size_t)e.y * a.row.scaleBytes;
    });
  }
  // The token's weights beside its first piece; of direct pairs: ht_weights.cuh.
  struct Note {
    float weight;
    bool is;
  };
  EP_DEV int numNotes() const {
    return a.op.weights && (!DIRECT || pairs->numRings > 0) ? a.op.handle.numTopk : 0;
  }
  EP_DEV Note take(const HtItem &item, const int2 *, int k) const {
    Note n = {0.0f, !item.piece && item.n > 0};
    if (n.is) n.weight = a.op.weights[(size_t)item.token * a.op.handle.numTopk + k];
    return n;
  }
  EP_DEV void give(const HtItem &item, const int2 *entries, int k, const Note &n) const {
    for (int i = 0; i < item.n; i++) {
      const int code = entries[i].x;
      if (DIRECT && isPushed(code)) continue;
      unitWeights(group(), unitAt(group(), 0, unitRank(code), group().rank, code))[k] = n.weight;
    }
  }
  // Whether any piece is announced to its receiver: flat and direct, none is.
  EP_DEV bool flags() const { return !DIRECT || EXPERT_MAJOR || pairs->numRings > 0; }
  EP_DEV void raise(const HtItem &item, const int2 *entries, int l) const {
    for (int i = l; i < item.n; i += 8) {
      const int2 e = entries[i];
      const bool pushed = DIRECT && isPushed(e.x);
      const int r = unitRank(pushed ? e.x & ~HT_NO_UNIT : e.x);
      if (!pushed) {
        storeRelaxed(flagAt(group(), 0, r, group().rank, e.x), (uint32_t)e.y << 1);
      } else if (isTold(e.x)) {
        storeRelaxed(arrivalAt(group(), r, group().rank, item.token, item.piece),
                     (uint32_t)number << 1);
      }
      if (group().bytes) {
        atomicAdd((unsigned long long *)&group().bytes[r],
                  (unsigned long long)pieceBytes(a.row, item.piece));
      }
    }
  }
};

#endif
