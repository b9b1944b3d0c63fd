// What the senders of a dispatch do: own token -> the ranks that need it, one copy a rank crosses the
// link. Into its FIFO, with its weights and a flag; or pushed into its output (HT_PUSH, ht_push.cuh),
// the own rank's too if flat. A rank that pulls reads it where it lies (ht_pairs.cuh).
#ifndef TREFOIL_KERNELS_HT_DISPATCH_SEND_CUH
#define TREFOIL_KERNELS_HT_DISPATCH_SEND_CUH

#include "kernels/ht/ht_push.cuh"
#include "kernels/ht/ht_scatter.cuh"

template <bool EXPERT_MAJOR, HtWay WAY> struct Sender {
  static constexpr bool PUSHES = WAY == HT_PUSH;
  static constexpr bool WATCH_ONE = false, FENCE = false, SIDE_DATA = PUSHES;
  static constexpr unsigned KIND = EP_HT_KIND_DISPATCH;
  static constexpr ep_wait_phase_t PHASE = EP_WAIT_CREDIT;
  const HtDispatchArgs &a;
  const HtTables &t;
  const unsigned long long *sent; // chunks to each rank so far
  const Divisor byChunks;
  const HtPairs *pairs; // not HT_FIFOS
  unsigned long long number;

  EP_DEV const ep_ht_group_t &group() const { return a.op.group; }
  EP_DEV int missing() const { return missingAnnounce<KIND>(group(), 0, group().numRanks); }
  EP_DEV bool isZeroCopy(int rank) const { return WAY != HT_FIFOS && pairs->tokens[rank]; }
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
  // A rank, and the token's ordinal there; push and expert-major: its first row there, * 2 + more.
  EP_DEV int2 load(const HtItem &item, int i) const {
    int2 d = t.dests[(size_t)item.token * t.width + i];
    if (PUSHES && EXPERT_MAJOR && d.x >= 0 && d.x != group().rank && isZeroCopy(d.x)) {
      d.y = (int)readRemoteRow(group(), d.x, item.token, number);
    }
    return d;
  }
  EP_DEV HtEntry entry(const HtItem &item, int, int2 d) const {
    HtEntry e = {};
    if (d.x < 0) return e;
    if (isZeroCopy(d.x)) return PUSHES ? push(item, d) : e;
    if (d.x == group().rank) return e;
    e.is = true;
    e.location = fifoSlotOf(d.x, sent[d.x] + (unsigned long long)d.y * a.row.numChunks + item.chunk,
                            a.fifoBits);
    e.watch = HtWatch{creditAt(group(), 0, group().rank, d.x, e.location.code),
                      (e.location.epoch - 1) & 0x7fffffff, d.x};
    return e;
  }
  EP_DEV HtEntry push(const HtItem &item, int2 d) const {
    HtEntry e = {};
    if (!EXPERT_MAJOR) {
      e.is = true;
      e.location = HtLocation{pushedTo(d.x, false), d.y};
      return e;
    }
    if (d.x == group().rank) return e; // a receiver's
    unsigned remoteRow = (unsigned)d.y;
    if (remoteRow == HT_NOWHERE) remoteRow = waitForRow(group(), d.x, item.token, number);
    e.is = remoteRow != HT_NOWHERE;
    if (!e.is)
      e.watch = HtWatch{&htControl(group()).wait.failed, -1, d.x}; // the scheduler gives up
    e.location = HtLocation{pushedTo(d.x, remoteRow & 1), (int)(remoteRow >> 1)};
    return e;
  }
  EP_DEV void isVoid(const HtLocation &) const {}
  EP_DEV void isEmpty(const HtItem &) const {}

  EP_DEV void load(const HtItem &item, uint32_t stage, uint64_t *full) const {
    loadRow(a.row, item.token, item.chunk, a.op.tokens, a.op.scales, stage, full);
  }
  EP_DEV void store(const HtItem &item, int2 e, uint32_t stage) const {
    if (PUSHES && isPushed(e.x)) {
      const int r = pushedRank(e.x);
      storeRow(a.row, e.y, item.chunk, pairs->tokens[r], pairs->scales[r], stage);
      return;
    }
    bulkStore(fifoSlotAt(group(), 0, fifoRank(e.x), group().rank, e.x), stage,
              chunkBytes(a.row, item.chunk));
  }
  EP_DEV void storeSideData(const HtItem &item, const int2 *entries, const char *stage,
                            int l) const {
    if (a.row.scaleBytes > 0)
      storeScales(a.row, item.chunk, stage, item.n, l, [&](int j) -> char * {
        const int2 e = entries[j];
        if (!isPushed(e.x)) return nullptr; // its FIFO slot has them
        return pairs->scales[pushedRank(e.x)] + (size_t)e.y * a.row.scaleBytes;
      });
  }
  // The token's weights beside its first chunk; of pairs without FIFOs: ht_weights.cuh.
  struct Metadata {
    float weight;
    bool is;
  };
  EP_DEV int numMetadata() const {
    return a.op.weights && (WAY == HT_FIFOS || pairs->numFifos > 0) ? a.op.handle.numTopk : 0;
  }
  EP_DEV Metadata take(const HtItem &item, const int2 *, int k) const {
    Metadata n = {0.0f, !item.chunk && item.n > 0};
    if (n.is) n.weight = a.op.weights[(size_t)item.token * a.op.handle.numTopk + k];
    return n;
  }
  EP_DEV void give(const HtItem &item, const int2 *entries, int k, const Metadata &n) const {
    for (int i = 0; i < item.n; i++) {
      const int code = entries[i].x;
      if (PUSHES && isPushed(code)) continue;
      fifoWeights(group(), fifoSlotAt(group(), 0, fifoRank(code), group().rank, code))[k] =
          n.weight;
    }
  }
  // Whether any chunk is announced to its receiver: flat and pushed, none is.
  EP_DEV bool flags() const { return !PUSHES || EXPERT_MAJOR || pairs->numFifos > 0; }
  EP_DEV void raise(const HtItem &item, const int2 *entries, int l) const {
    for (int i = l; i < item.n; i += 8) {
      const int2 e = entries[i];
      const bool pushed = PUSHES && isPushed(e.x);
      const int r = fifoRank(pushed ? e.x & ~HT_NO_FIFO_SLOT : e.x);
      if (!pushed) {
        storeRelaxed(flagAt(group(), 0, r, group().rank, e.x), (uint32_t)e.y << 1);
      } else if (hasSignal(e.x)) {
        storeRelaxed(arrivalAt(group(), r, group().rank, item.token, item.chunk),
                     (uint32_t)number << 1);
      }
      if (group().bytes) {
        atomicAdd((unsigned long long *)&group().bytes[r],
                  (unsigned long long)chunkBytes(a.row, item.chunk));
      }
    }
  }
};

#endif
