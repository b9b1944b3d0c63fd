// What the receivers of a dispatch do: received chunk, or own token -> all its rows here; weights and
// ids; rows of padding. Of a pair that pushes (ht_push.cuh) a chunk lies in the token's first row already; of
// one that pulls (ht_pairs.cuh) it is loaded out of the source's input.
//
// In one domain, without pulls, own tokens are ahead of the peers' (leadOf): at the start the first rows of
// those are still under way. Own rows wait for nothing, so the order that FIFOs need (ht_pipe.cuh) is that of
// the peers' rows alone.
#ifndef TREFOIL_KERNELS_HT_DISPATCH_RECEIVE_CUH
#define TREFOIL_KERNELS_HT_DISPATCH_RECEIVE_CUH

#include "kernels/ht/ht_push.cuh"
#include "kernels/ht/ht_rows.cuh"
#include "kernels/ht/ht_weights.cuh"

// The candidates of receivers: of each chunk of a token one for each source, and for rows of padding. The
// own rank's are `lead` chunks ahead: first `lead` of them alone, then with chunk i of the others chunk
// i + lead of the own rank, at last the others' last `lead` chunks.
struct HtCandidates {
  int padGroups; // of eight rows, a candidate each, spread over the tokens
  int perChunk;  // candidates
  int numChunks; // of a source, at most
  int lead;      // of the own tokens, in chunks
  Divisor byAll;

  EP_DEV HtCandidates(const HtDispatchArgs &a, const HtTables &t, bool leads) {
    padGroups = (t.head->numPads + 7) / 8;
    const int tokens = max(t.head->mostTokens, padGroups ? 1 : 0), most = max(tokens, 1);
    perChunk = a.op.group.numRanks + (padGroups + most - 1) / most;
    numChunks = tokens * a.row.numChunks;
    lead = leads && perChunk > 1 ? min(a.lead, tokens) * a.row.numChunks : 0;
    byAll = Divisor::of(perChunk);
  }
  EP_DEV long long count() const { return (long long)numChunks * perChunk; }

  // The chunk of candidate c; turn: which of its candidates. own: the own rank's turn.
  template <bool LEADS> EP_DEV int chunkOf(int c, int own, int &turn) const {
    if (LEADS) {
      turn = own;
      if (c < lead) return c;
      c -= lead;
      const int rest = c - (numChunks - lead) * perChunk;
      if (rest >= 0) { // few: divided without an inverse, which would take registers throughout
        const int i = rest / (perChunk - 1);
        turn = rest - i * (perChunk - 1);
        if (turn >= own) turn++;
        return numChunks - lead + i;
      }
    }
    const int i = byAll.quotient(c);
    turn = c - i * perChunk;
    return LEADS && turn == own ? i + lead : i;
  }
};

template <bool EXPERT_MAJOR, HtWay WAY> struct Receiver {
  static constexpr bool PUSHES = WAY == HT_PUSH, PULLS = WAY == HT_PULL;
  static constexpr bool SENDS = false, WATCH_ONE = true;
  static constexpr unsigned KIND = EP_HT_KIND_DISPATCH;
  static constexpr ep_wait_phase_t PHASE = EP_WAIT_ROWS;
  const HtDispatchArgs &a;
  const HtTables &t;
  const unsigned long long *received; // chunks from each rank so far
  const HtCandidates all;
  const Divisor byChunks;
  const HtPairs *pairs; // not HT_FIFOS
  unsigned long long number;

  EP_DEV const ep_ht_group_t &group() const { return a.op.group; }
  EP_DEV int missing() const { return missingAnnounce<KIND>(group(), 0, group().numRanks); }
  EP_DEV bool isZeroCopy(int rank) const { return WAY != HT_FIFOS && pairs->tokens[rank]; }
  EP_DEV int lanes() const { return EXPERT_MAJOR ? a.receiver.lanes : 1; }
  EP_DEV long long candidates() const { return all.count(); }

  struct Which {
    int token, turn, chunk;
  };
  EP_DEV Which which(int c) const {
    Which w;
    const int i = all.template chunkOf<!PULLS>(c, group().numRanks - 1, w.turn);
    w.token = byChunks.quotient(i);
    w.chunk = i - w.token * a.row.numChunks;
    return w;
  }
  EP_DEV int sourceOf(int turn) const {
    const int s = group().rank - 1 - turn;
    return s < 0 ? s + group().numRanks : s;
  }
  EP_DEV int padsPerToken() const { return all.perChunk - group().numRanks; }

  EP_DEV bool isPad(const Which &w) const { return w.turn >= group().numRanks; }
  EP_DEV int padGroup(const Which &w) const {
    return w.token * padsPerToken() + w.turn - group().numRanks;
  }

  EP_DEV int index(int c) const {
    const Which w = which(c);
    if (isPad(w)) return padGroup(w) < all.padGroups ? 0 : -1;
    const int source = sourceOf(w.turn);
    const size_t at = (size_t)source * group().maxTokens + w.token;
    if (PULLS || !isZeroCopy(source)) return t.index[at];
    if (!EXPERT_MAJOR) return -1;
    if (source == group().rank) return t.index[at];
    const unsigned first = t.first[at];
    return first != HT_NOWHERE && (first & 1) ? (int)(first >> 1) : -1;
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
    item.chunk = w.chunk;
    item.token = w.token;
    item.index = index;
    if (isPad(w)) {
      item.code = HT_ZEROS;
      item.source = padGroup(w);
      return 8;
    }
    item.source = sourceOf(w.turn);
    item.code = HT_OWN;
    if (item.source == group().rank) return bound();
    if (isZeroCopy(item.source)) {
      item.code = PULLS ? HT_REMOTE : HT_FIRST;
    } else {
      const HtLocation u = fifoSlotOf(item.source,
                                      received[item.source] +
                                          (unsigned long long)index * a.row.numChunks + item.chunk,
                                      a.fifoBits);
      item.code = u.code;
      item.epoch = u.epoch;
    }
    return bound();
  }
  EP_DEV HtWatch watchOne(const HtItem &item) const {
    if (PUSHES && item.code == HT_FIRST) {
      return HtWatch{arrivalAt(group(), group().rank, item.source, item.token, item.chunk),
                     (int)(number & 0x7fffffff), item.source};
    }
    if (!isFifoSlot(item.code)) return HtWatch{};
    return HtWatch{flagAt(group(), 0, group().rank, item.source, item.code), item.epoch,
                   item.source};
  }
  // Expert-major: the row of the k-th expert.
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
      e.location.code = padRow(item.source * 8 + i);
      e.is = e.location.code >= 0;
    } else if (EXPERT_MAJOR) {
      e.location.code = loaded.x;
      e.is = loaded.x >= 0 && !(PUSHES && item.code == HT_FIRST && loaded.x == item.index);
    } else {
      e.location.code = (int)t.head->recvBase[item.source] + item.index;
      e.is = e.location.code < t.head->numRows;
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
  EP_DEV void isVoid(const HtLocation &) const {}
  // Dropped or trapped: the FIFO slot is free at once.
  EP_DEV void isEmpty(const HtItem &item) const { free(item); }

  EP_DEV const HtRow &row() const { return a.row; }
  EP_DEV HtChunkPlace source(const HtItem &item) const {
    if (item.code == HT_OWN)
      return placeOf(a.row, item.token, item.chunk, a.op.tokens, a.op.scales);
    if (PULLS && item.code == HT_REMOTE)
      return placeOf(a.row, item.token, item.chunk, pairs->tokens[item.source],
                     pairs->scales[item.source]);
    if (PUSHES && item.code == HT_FIRST)
      return placeOf(a.row, item.index, item.chunk, a.op.outTokens, a.op.outScales);
    if (item.code == HT_ZEROS) return contiguous(a.zeros);
    return contiguous(fifoSlotAt(group(), 0, group().rank, item.source, item.code));
  }
  EP_DEV HtChunkPlace place(const HtItem &item, int2 e) const {
    return placeOf(a.row, e.x, item.chunk, a.op.outTokens, a.op.outScales);
  }
  EP_DEV void free(const HtItem &item) const {
    if (isFifoSlot(item.code)) giveCredit(group(), 0, item.code, item.epoch);
  }
  EP_DEV void release(const HtItem &item, const int2 *) const {
    if (item.n <= 0) return;
    if (item.code == HT_OWN && group().bytes) {
      atomicAdd((unsigned long long *)&group().bytes[group().rank],
                (unsigned long long)chunkBytes(a.row, item.chunk));
    }
    free(item);
  }

  // The metadata of the k-th expert of an item's token.
  struct Metadata {
    int entry;
    float weight;
    bool is;
  };
  EP_DEV int numMetadata() const { return a.op.outWeights ? max(a.op.handle.numTopk, 8) : 0; }
  EP_DEV Metadata take(const HtItem &item, const int2 *, int k) const {
    const int K = a.op.handle.numTopk;
    Metadata n = {-1, 0.0f, false};
    if (item.chunk || item.n <= 0) return n;
    if (PUSHES && item.code == HT_FIRST) return n; // ht_weights.cuh
    if (PULLS && item.code == HT_REMOTE) return n;
    n.is = k < (item.code == HT_ZEROS ? item.n : K);
    if (!n.is || item.code == HT_ZEROS) return n;
    const int *here = t.entries + ((size_t)item.source * group().maxTokens + item.token) * K;
    const float *weights =
        item.code == HT_OWN
            ? a.op.weights + (size_t)item.token * K
            : fifoWeights(group(), fifoSlotAt(group(), 0, group().rank, item.source, item.code));
    n.entry = here[k];
    n.weight = __ldcv(weights + k);
    return n;
  }
  EP_DEV void give(const HtItem &item, const int2 *entries, int k, const Metadata &n) const {
    if (item.code == HT_ZEROS) {
      a.op.outWeights[entries[k].x] = 0.0f;
    } else if (EXPERT_MAJOR) {
      if (n.entry >= 0) a.op.outWeights[n.entry] = n.weight;
    } else {
      giveFlat(a, entries[0].x, n.entry, n.weight);
    }
  }
};

#endif
