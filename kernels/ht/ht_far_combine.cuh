// High-throughput combine across NVLink domains: the rank that a token came by sums up its rows of the node,
// rounds the sum, and returns it over the network; the owner adds its own node's, rounded too, and the rest.
//
//   senders    a row, or expert-major the sum of a token's rows here -> the FIFO of the rank that the token
//              came by
//   reducers   the rows of a token of the rail's rank in another node -> their sum, a ring slot
//   receivers  own token: rows of the own node's ranks, slots of other nodes -> the sum, nodes ascending
//   poster     ht_far_poster.cuh
//
// What a rank has dropped or was trapped with travels as a flag, and so does a sum of nothing, as a word of
// its slot. As in dispatch all take work in the order (token, chunk, rank or node).
#ifndef TREFOIL_KERNELS_HT_FAR_COMBINE_CUH
#define TREFOIL_KERNELS_HT_FAR_COMBINE_CUH

#include "kernels/ht/ht_combine_roles.cuh"
#include "kernels/ht/ht_far_candidates.cuh"
#include "kernels/ht/ht_far_poster.cuh"

// A near rank that is not in the flat combine yet.
template <bool EXPERT_MAJOR> EP_DEV int missingNearInput(const HtFar &far) {
  return EXPERT_MAJOR ? -1 : missingAnnounce<EP_HT_KIND_COMBINE>(far.g, far.near(0), far.per);
}

template <bool EXPERT_MAJOR> struct FarCombineSender : CombineSender<EXPERT_MAJOR, false> {
  using Base = CombineSender<EXPERT_MAJOR, false>;
  const HtFar &far;

  EP_DEV FarCombineSender(const HtCombineArgs &a, const HtTables &t, const HtFar &at)
      : Base{a,
             t,
             htControl(a.op.group).fifos[1].sent,
             Divisor::of(a.row.numChunks),
             Divisor::of(a.op.group.numRanks),
             nullptr},
        far(at) {}

  EP_DEV int missing() const { return missingNearInput<EXPERT_MAJOR>(far); }
  EP_DEV long long candidates() const {
    return (long long)this->t.head->mostTokens * far.g.numRanks * this->a.row.numChunks;
  }
  EP_DEV void which(int c, HtItem &item) const {
    const int R = far.g.numRanks, i = this->byOwners.quotient(c);
    item.token = this->byChunks.quotient(i);
    item.chunk = i - item.token * this->a.row.numChunks;
    const int o = far.g.rank + 1 + c - i * R;
    item.source = o < R ? o : o - R;
  }
  // Flat rows for this rank itself its receivers and reducers read in place.
  EP_DEV int index(int c) const {
    HtItem item;
    which(c, item);
    if (!EXPERT_MAJOR && far.railOf(item.source) == far.rail) return -1;
    return this->t.index[(size_t)item.source * far.g.maxTokens + item.token];
  }
  EP_DEV HtAhead ahead(int c, int l) const {
    HtItem item;
    which(c, item);
    return HtAhead{index(c), l < this->bound() ? this->load(item, l) : make_int2(-1, 0)};
  }
  EP_DEV int begin(int c, int index, HtItem &item) const {
    which(c, item);
    item.index = index;
    const HtLocation u = fifoSlotOf(
        far.via(item.source),
        this->sent[item.source] + (unsigned long long)index * this->a.row.numChunks + item.chunk,
        this->a.fifoBits);
    item.code = u.code;
    item.epoch = u.epoch;
    return this->bound();
  }
  EP_DEV HtWatch watchOne(const HtItem &item) const {
    return HtWatch{creditAt(far.g, 1, far.g.rank, item.source, item.code),
                   (item.epoch - 1) & 0x7fffffff, fifoRank(item.code)};
  }
  EP_DEV HtEntry entry(const HtItem &item, int i, int2 loaded) const {
    HtEntry e = Base::entry(item, i, loaded);
    if (!EXPERT_MAJOR) e.watch = watchOne(item);
    return e;
  }
  EP_DEV uint32_t *flagOf(const HtItem &item) const {
    return flagAt(far.g, 1, fifoRank(item.code), far.streamOf(item.source), item.code);
  }
  EP_DEV char *to(const HtItem &item) const {
    return fifoSlotAt(far.g, 1, fifoRank(item.code), far.streamOf(item.source), item.code);
  }
  EP_DEV void isEmpty(const HtItem &item) const {
    storeRelaxed(flagOf(item), (uint32_t)item.epoch << 1 | 1);
  }
  EP_DEV void store(const HtItem &item, int2, uint32_t stage) const {
    bulkStore(to(item), stage, chunkBytes(this->a.row, item.chunk));
  }
  EP_DEV void give(const HtItem &item, const int2 *, int k,
                   const typename Base::Metadata &n) const {
    fifoWeights(far.g, to(item))[k] = n.weight;
  }
  EP_DEV void raise(const HtItem &item, const int2 *, int l) const {
    if (l || item.n <= 0) return;
    storeRelaxed(flagOf(item), (uint32_t)item.epoch << 1);
    if (far.g.bytes) {
      atomicAdd((unsigned long long *)&far.g.bytes[far.g.numRanks + fifoRank(item.code)],
                (unsigned long long)chunkBytes(this->a.row, item.chunk));
    }
  }
};

template <bool EXPERT_MAJOR> struct Reducer : HtFarCandidates<1, HtCombineArgs> {
  static constexpr unsigned KIND = EP_HT_KIND_COMBINE;
  static constexpr ep_wait_phase_t PHASE = EP_WAIT_ROWS;
  const Divisor byLocal;

  EP_DEV Reducer(const HtCombineArgs &args, const HtTables &tables, const HtFar &at)
      : HtFarCandidates(args, tables, at), byLocal(Divisor::of(at.g.numLocal)) {}

  EP_DEV const HtRow &row() const { return a.row; }
  EP_DEV int missing() const { return missingNearInput<EXPERT_MAJOR>(far); }
  // Rows of near ranks; the rank of a FIFO slot's code is the stream.
  EP_DEV HtEntry entry(const HtItem &item, int i, int2 hop) const {
    if (i == 0) return slot(item);
    HtEntry e = {};
    if (hop.x < 0) return e;
    if (!EXPERT_MAJOR && hop.x == far.g.rank) {
      const int row = (int)t.head->recvBase[far.railRank(item.source)] + hop.y;
      e.is = row < t.head->numRows && !t.head->trapped;
      e.location = HtLocation{HT_OWN, row};
      return e;
    }
    const int stream = streamTo(item, hop.x);
    e.is = true;
    e.location = fifoSlotOf(stream,
                            htControl(far.g).fifos[1].received[stream] +
                                (unsigned long long)hop.y * a.row.numChunks + item.chunk,
                            a.fifoBits);
    e.watch =
        HtWatch{flagAt(far.g, 1, far.g.rank, stream, e.location.code), e.location.epoch, hop.x};
    return e;
  }
  EP_DEV void free(int code, int epoch) const {
    const int stream = fifoRank(code), owner = stream / far.per * far.per + far.rail;
    storeRelaxed(creditAt(far.g, 1, far.via(stream), owner, code), (uint32_t)epoch << 1);
  }
  EP_DEV void isVoid(const HtLocation &u) const { free(u.code, u.epoch); }
  EP_DEV void isEmpty(const HtItem &item) const {
    far.setWord(1, HT_FILLED, HtLocation{item.code, item.epoch}, true);
  }
  EP_DEV const char *from(const HtItem &item, int2 e) const {
    return e.x == HT_OWN ? chunkAt(a, e.y, item.chunk)
                         : fifoSlotAt(far.g, 1, far.g.rank, fifoRank(e.x), e.x);
  }
  EP_DEV char *to(const HtItem &item) const { return far.ringSlotAt(1, false, item.code); }

  // Backward: the gradient of each of the token's weights that is known in this node, at its k.
  struct Metadata {
    float weight;
    bool is;
  };
  EP_DEV int numMetadata() const { return a.op.rowWeights ? a.op.handle.numTopk : 0; }
  EP_DEV Metadata take(const HtItem &item, const int2 *entries, int k) const {
    const int K = a.op.handle.numTopk;
    Metadata n = {0.0f, !item.chunk && item.n > 0};
    const int e = n.is ? ft.ids[far.at(item.source, item.token) * K + k] : -1;
    if (e < 0) return n;
    const int rank = byLocal.quotient(e), source = far.railRank(item.source);
    if (!far.isNear(rank)) return n;
    const int stream = streamTo(item, rank);
    for (int i = 0; i < item.n; i++) {
      const int2 from = entries[i];
      if (from.x == HT_OWN) {
        if (rank != far.g.rank) continue;
        const size_t at = (size_t)source * far.g.maxTokens + item.token;
        n.weight = weightOfRow(a, t.entries[at * K + k], from.y);
      } else if (fifoRank(from.x) == stream) {
        char *slot = fifoSlotAt(far.g, 1, far.g.rank, stream, from.x);
        n.weight = __ldcv(fifoWeights(far.g, slot) + k);
      }
    }
    return n;
  }
  EP_DEV void give(const HtItem &item, const int2 *, int k, const Metadata &n) const {
    fifoWeights(far.g, to(item))[k] = n.weight;
  }
  EP_DEV void countBytes(int rank, int bytes) const {
    if (!far.g.bytes) return;
    atomicAdd((unsigned long long *)&far.g.bytes[far.g.numRanks + rank], (unsigned long long)bytes);
  }
  EP_DEV void raise(const HtItem &item, const int2 *entries, int l) const {
    const int bytes = chunkBytes(a.row, item.chunk);
    for (int i = l; i < item.n; i += 8) {
      if (entries[i].x == HT_OWN)
        countBytes(far.g.rank, bytes);
      else
        free(entries[i].x, entries[i].y);
    }
    if (l || item.n <= 0) return;
    far.setWord(1, HT_FILLED, HtLocation{item.code, item.epoch}, false);
    countBytes(far.railRank(item.source), bytes);
  }
};

// In the producer: of a wait for room in the ring, or for a row.
template <bool EXPERT_MAJOR>
EP_DEV void nameCulprit(const Reducer<EXPERT_MAJOR> &p, Awaited &w, unsigned &expected) {
  p.far.nameCulprit(p.missing(), EP_WAIT_CREDIT, w, expected);
}

template <bool EXPERT_MAJOR> struct FarCombineReceiver : CombineReceiver<EXPERT_MAJOR, false> {
  using Base = CombineReceiver<EXPERT_MAJOR, false>;
  const HtFar &far;

  EP_DEV FarCombineReceiver(const HtCombineArgs &a, const HtTables &t, const HtFar &at,
                            unsigned long long number)
      : Base{a,
             t,
             htControl(a.op.group).fifos[1].received,
             Divisor::of(a.row.numChunks),
             Divisor::of(a.op.group.numLocal),
             nullptr,
             number},
        far(at) {}

  EP_DEV int missing() const { return missingNearInput<EXPERT_MAJOR>(far); }
  EP_DEV HtEntry entry(const HtItem &item, int i, int2 d) const {
    if (d.x < HT_RING_PEER) return Base::entry(item, i, d);
    HtEntry e = {};
    const int ring = d.x - HT_RING_PEER;
    e.is = true;
    e.location = far.ringSlotOf(1, ring,
                                far.c.rings[1][ring].received +
                                    (unsigned long long)d.y * this->a.row.numChunks + item.chunk);
    e.watch = far.landingOf(1, e.location);
    return e;
  }
  EP_DEV void isVoid(const HtLocation &u) const {
    if (isRingSlot(u.code))
      far.setWord(1, HT_CONSUMED, u, false);
    else
      Base::isVoid(u);
  }
  EP_DEV const char *from(const HtItem &item, int2 e) const {
    return isRingSlot(e.x) ? far.ringSlotAt(1, true, e.x) : Base::from(item, e);
  }
  EP_DEV void release(const HtItem &item, const int2 *entries) const {
    Base::release(item, entries);
    for (int i = 0; i < item.n; i++) {
      if (!isRingSlot(entries[i].x)) continue;
      far.setWord(1, HT_CONSUMED, HtLocation{entries[i].x, entries[i].y}, false);
    }
  }
  EP_DEV typename Base::Metadata take(const HtItem &item, const int2 *entries, int k) const {
    typename Base::Metadata n = Base::take(item, entries, k);
    const int K = this->a.op.handle.numTopk;
    const int e = n.is ? this->t.ids[(size_t)item.token * K + k] : -1;
    if (e < 0) return n;
    const int rank = this->byLocal.quotient(e);
    if (far.isNear(rank)) return n;
    for (int i = 0; i < item.n; i++) {
      const int code = entries[i].x;
      if (!isRingSlot(code) || far.nodeOf(ringOf(code)) != rank / far.per) continue;
      n.weight = __ldcv(fifoWeights(far.g, far.ringSlotAt(1, true, code)) + k);
    }
    return n;
  }
};

// With one more level: the entries of the own node, which stand side by side, are summed and rounded first,
// and that is one term.
template <Elem T> struct HtNodeSum {
  Sum<T> sum[HT_ROW_VECTORS], ofNode[HT_ROW_VECTORS];

  EP_DEV void clear() {
#pragma unroll
    for (int j = 0; j < HT_ROW_VECTORS; j++) {
      sum[j].clear();
      ofNode[j].clear();
    }
  }
  EP_DEV void add(const HtRowVectors &in, const int2 *entries, int i, int n) {
    const bool isOwn = !isRingSlot(entries[i].x);
    const bool ends = isOwn && (i + 1 == n || isRingSlot(entries[i + 1].x));
#pragma unroll
    for (int j = 0; j < HT_ROW_VECTORS; j++) {
      if (isOwn)
        ofNode[j].add(in.v[j]);
      else
        sum[j].add(in.v[j]);
      if (ends) sum[j].add(ofNode[j].round());
    }
  }
  EP_DEV uint4 round(int j) const {
    return sum[j].round();
  }
};

// All threads of a launch's blocks, of which the last is the poster.
template <class Network, Elem T, bool EXPERT_MAJOR>
EP_DEV void runFarCombine(const HtCombineArgs &a, const HtFarArgs &f, char *shared) {
  const ep_ht_group_t &g = a.op.group;
  const uint64_t began = g.stamps && threadIdx.x == 0 ? clockNs() : 0;
  HtControl &c = htControl(g);
  if (loadVolatile(&c.wait.failed)) return;
  const HtTables t = htTables(g, a.op.handle);
  const HtFar far(g, f);
  const HtFarTables ft = far.tables(a.op.handle);
  const unsigned long long number = loadVolatile(&c.numbers[1]) + 1;
  const int block = blockIdx.x, numBlocks = gridDim.x - 1;
  if (!EXPERT_MAJOR && block == 0 && threadIdx.x >> 5 == 3) {
    for (int l = threadIdx.x & 31; l < far.per; l += 32) {
      sendAnnounce<EP_HT_KIND_COMBINE>(g, far.near(l), number);
    }
  }
  if (block == numBlocks) {
    Poster<Network>(far, EP_HT_KIND_COMBINE, (HtPosted *)shared).run(ft, a.row.numChunks);
  } else {
    const bool sends = block < f.split, reduces = block < f.endMiddle;
    if (sends) {
      const HtBlock b = EXPERT_MAJOR ? rowBlockOf(shared, a.sender)
                                     : blockOf(shared, a.sender, a.room, a.stageStride);
      const FarCombineSender<EXPERT_MAJOR> sender(a, t, far);
      arm(b);
      if constexpr (EXPERT_MAJOR)
        rowPipe<HtPlainSum<T>>(b, sender, a.sender, &c.work[1][0]);
      else
        scatterPipe(b, sender, a.sender, &c.work[1][0]);
      disarm(b);
    }
    if (reduces) {
      const HtBlock b = rowBlockOf(shared, f.middle);
      arm(b);
      rowPipe<HtPlainSum<T>>(b, Reducer<EXPERT_MAJOR>(a, t, far), f.middle, &far.c.work[1]);
      disarm(b);
    }
    const HtBlock b = rowBlockOf(shared, a.receiver);
    arm(b);
    rowPipe<HtNodeSum<T>>(b, FarCombineReceiver<EXPERT_MAJOR>(a, t, far, number), a.receiver,
                          &c.work[1][1]);
  }
  leave<true>(
      g, t, a.row.numChunks, began,
      [&](int r) { return EXPERT_MAJOR || far.railOf(r) != far.rail; },
      [&] { far.countRingSlots(1, ft, a.row.numChunks); });
}

#endif
