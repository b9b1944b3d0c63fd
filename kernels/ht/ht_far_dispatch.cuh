// High-throughput dispatch across NVLink domains: a token crosses the network once for each other node that
// needs it, to the rank on its source's rail, which passes it on inside its node in the source's name.
//
//   senders     own token -> the FIFOs of the own node's ranks, and a ring slot for each other node; weights
//   forwarders  slot that has landed -> the FIFOs of the own node's ranks, this rank's included, as a stream
//               of the source
//   receivers   as in one domain; a credit goes to the rank that the row came by
//   poster      ht_far_poster.cuh
//
// All take work in the order (token, chunk, rank or node), and at least one block of each role from the
// start: then rings and FIFOs that are full cannot deadlock (docs/kernels_ht.md).
#ifndef TREFOIL_KERNELS_HT_FAR_DISPATCH_CUH
#define TREFOIL_KERNELS_HT_FAR_DISPATCH_CUH

#include "kernels/ht/ht_dispatch_receive.cuh"
#include "kernels/ht/ht_dispatch_send.cuh"
#include "kernels/ht/ht_far_candidates.cuh"
#include "kernels/ht/ht_far_poster.cuh"

// A near rank that is not in the dispatch yet.
EP_DEV int missingNear(const HtFar &far) {
  return missingAnnounce<EP_HT_KIND_DISPATCH>(far.g, far.near(0), far.per);
}

template <bool EXPERT_MAJOR> struct FarSender : Sender<EXPERT_MAJOR, HT_FIFOS> {
  using Base = Sender<EXPERT_MAJOR, HT_FIFOS>;
  const HtFar &far;

  EP_DEV FarSender(const HtDispatchArgs &a, const HtTables &t, const HtFar &at,
                   unsigned long long number)
      : Base{a,       t,     htControl(a.op.group).fifos[0].sent, Divisor::of(a.row.numChunks),
             nullptr, number},
        far(at) {}

  EP_DEV int missing() const { return missingNear(far); }
  EP_DEV HtEntry entry(const HtItem &item, int i, int2 d) const {
    if (d.x < HT_RING_PEER) return Base::entry(item, i, d);
    HtEntry e = {};
    const int ring = d.x - HT_RING_PEER;
    e.is = true;
    e.location = far.ringSlotOf(0, ring,
                                far.c.rings[0][ring].sent +
                                    (unsigned long long)d.y * this->a.row.numChunks + item.chunk);
    e.watch = far.refillOf(0, e.location);
    return e;
  }
  EP_DEV char *slotAt(int code) const {
    return isRingSlot(code) ? far.ringSlotAt(0, false, code)
                            : fifoSlotAt(far.g, 0, fifoRank(code), far.g.rank, code);
  }
  EP_DEV void store(const HtItem &item, int2 e, uint32_t stage) const {
    bulkStore(slotAt(e.x), stage, chunkBytes(this->a.row, item.chunk));
  }
  EP_DEV void give(const HtItem &item, const int2 *entries, int k,
                   const typename Base::Metadata &n) const {
    for (int i = 0; i < item.n; i++) fifoWeights(far.g, slotAt(entries[i].x))[k] = n.weight;
  }
  EP_DEV void raise(const HtItem &item, const int2 *entries, int l) const {
    for (int i = l; i < item.n; i += 8) {
      const int2 e = entries[i];
      const bool isFar = isRingSlot(e.x);
      const int r = isFar ? far.railRank(ringOf(e.x)) : fifoRank(e.x);
      if (isFar)
        far.setWord(0, HT_FILLED, HtLocation{e.x, e.y}, false);
      else
        storeRelaxed(flagAt(far.g, 0, r, far.g.rank, e.x), (uint32_t)e.y << 1);
      if (far.g.bytes) {
        atomicAdd((unsigned long long *)&far.g.bytes[r],
                  (unsigned long long)chunkBytes(this->a.row, item.chunk));
      }
    }
  }
};

struct Forwarder : HtFarCandidates<0, HtDispatchArgs> {
  static constexpr unsigned KIND = EP_HT_KIND_DISPATCH;
  static constexpr ep_wait_phase_t PHASE = EP_WAIT_CREDIT;
  using HtFarCandidates::HtFarCandidates;

  EP_DEV int missing() const { return missingNear(far); }
  // FIFO slots of near ranks.
  EP_DEV HtEntry entry(const HtItem &item, int i, int2 hop) const {
    if (i == 0) return slot(item);
    HtEntry e = {};
    if (hop.x < 0) return e;
    const int stream = streamTo(item, hop.x);
    e.is = true;
    e.location = fifoSlotOf(hop.x,
                            htControl(far.g).fifos[0].sent[stream] +
                                (unsigned long long)hop.y * a.row.numChunks + item.chunk,
                            a.fifoBits);
    e.watch = HtWatch{creditAt(far.g, 0, far.g.rank, stream, e.location.code),
                      (e.location.epoch - 1) & 0x7fffffff, hop.x};
    return e;
  }
  EP_DEV void isVoid(const HtLocation &) const {}
  EP_DEV void isEmpty(const HtItem &) const {}

  EP_DEV const char *ringSlotAt(const HtItem &item) const {
    return far.ringSlotAt(0, true, item.code);
  }
  EP_DEV char *slotAt(const HtItem &item, int code) const {
    return fifoSlotAt(far.g, 0, fifoRank(code), far.railRank(item.source), code);
  }
  using HtFarCandidates::load;
  EP_DEV void load(const HtItem &item, uint32_t stage, uint64_t *full) const {
    const int bytes = chunkBytes(a.row, item.chunk);
    barrierExpect(full, bytes);
    bulkLoad(stage, ringSlotAt(item), bytes, full);
  }
  EP_DEV void store(const HtItem &item, int2 e, uint32_t stage) const {
    bulkStore(slotAt(item, e.x), stage, chunkBytes(a.row, item.chunk));
  }
  struct Metadata {
    float weight;
    bool is;
  };
  EP_DEV int numMetadata() const { return a.op.weights ? a.op.handle.numTopk : 0; }
  EP_DEV Metadata take(const HtItem &item, const int2 *, int k) const {
    Metadata n = {0.0f, !item.chunk && item.n > 0};
    if (n.is) n.weight = __ldcv(fifoWeights(far.g, (char *)ringSlotAt(item)) + k);
    return n;
  }
  EP_DEV void give(const HtItem &item, const int2 *entries, int k, const Metadata &n) const {
    for (int i = 0; i < item.n; i++) fifoWeights(far.g, slotAt(item, entries[i].x))[k] = n.weight;
  }
  EP_DEV void raise(const HtItem &item, const int2 *entries, int l) const {
    for (int i = l; i < item.n; i += 8) {
      const int2 e = entries[i];
      const int r = fifoRank(e.x);
      storeRelaxed(flagAt(far.g, 0, r, far.railRank(item.source), e.x), (uint32_t)e.y << 1);
      if (far.g.bytes) {
        atomicAdd((unsigned long long *)&far.g.bytes[r],
                  (unsigned long long)chunkBytes(a.row, item.chunk));
      }
    }
    if (l == 0) far.setWord(0, HT_CONSUMED, HtLocation{item.code, item.epoch}, false);
  }
};

// In the producer: of a wait for the slot, or for room in a FIFO.
EP_DEV void nameCulprit(const Forwarder &p, Awaited &w, unsigned &expected) {
  p.far.nameCulprit(p.missing(), EP_WAIT_ROWS, w, expected);
}

template <bool EXPERT_MAJOR> struct FarReceiver : Receiver<EXPERT_MAJOR, HT_FIFOS> {
  using Base = Receiver<EXPERT_MAJOR, HT_FIFOS>;
  const HtFar &far;

  EP_DEV FarReceiver(const HtDispatchArgs &a, const HtTables &t, const HtFar &at,
                     const HtCandidates &all, unsigned long long number)
      : Base{a,
             t,
             htControl(a.op.group).fifos[0].received,
             all,
             Divisor::of(a.row.numChunks),
             nullptr,
             number},
        far(at) {}

  EP_DEV int missing() const { return missingNear(far); }
  // The rank that the row comes by, but for this rank: then its source.
  EP_DEV HtWatch watchOne(const HtItem &item) const {
    HtWatch watch = Base::watchOne(item);
    if (watch.word && far.via(item.source) != far.g.rank) watch.rank = far.via(item.source);
    return watch;
  }
  EP_DEV void free(const HtItem &item) const {
    if (!isFifoSlot(item.code)) return;
    storeRelaxed(creditAt(far.g, 0, far.via(item.source), far.streamOf(item.source), item.code),
                 (uint32_t)item.epoch << 1);
  }
  EP_DEV void isEmpty(const HtItem &item) const { free(item); }
  EP_DEV void release(const HtItem &item, const int2 *) const {
    if (item.n <= 0) return;
    if (item.code == HT_OWN && far.g.bytes) {
      atomicAdd((unsigned long long *)&far.g.bytes[far.g.rank],
                (unsigned long long)chunkBytes(this->a.row, item.chunk));
    }
    free(item);
  }
};

// In the producer, of a row that this rank's own forwarders pass on: they wait for its slot, or for another
// one before it, and name whose within the limit. So here the limit counts from then on.
template <bool EXPERT_MAJOR>
EP_DEV bool keepWaiting(const FarReceiver<EXPERT_MAJOR> &p, const Awaited &w, unsigned expected,
                        Spin &spin) {
  const ep_ht_group_t &g = p.far.g;
  if (p.far.isNear(w.rank)) return htKeepWaiting(g, w, expected, spin);
  if (++spin.polls & 255) return true;
  if (!spin.since) spin.since = clockNs();
  Spin second = {0, spin.since + g.timeoutNs};
  if (clockNs() < second.since) return !loadVolatile(&htControl(g).wait.failed);
  return htCheckLimit(g, w, expected, second);
}

// All threads of a launch's blocks, of which the last is the poster.
template <class Network, bool EXPERT_MAJOR>
EP_DEV void runFarDispatch(const HtDispatchArgs &a, const HtFarArgs &f, char *shared) {
  const ep_ht_group_t &g = a.op.group;
  const uint64_t began = g.stamps && threadIdx.x == 0 ? clockNs() : 0;
  HtControl &c = htControl(g);
  if (loadVolatile(&c.wait.failed)) return;
  const HtTables t = htTables(g, a.op.handle);
  const HtFar far(g, f);
  const HtFarTables ft = far.tables(a.op.handle);
  const unsigned long long number = loadVolatile(&c.numbers[0]) + 1;
  const int block = blockIdx.x, numBlocks = gridDim.x - 1, lane = threadIdx.x & 31;
  if (block == 0 && threadIdx.x >> 5 == 3) {
    for (int l = lane; l < far.per; l += 32) {
      sendAnnounce<EP_HT_KIND_DISPATCH>(g, far.near(l), number);
    }
  }
  if (block == 0 && threadIdx.x == 0) recordTrap(g, t);
  if (block == numBlocks) {
    Poster<Network>(far, EP_HT_KIND_DISPATCH, (HtPosted *)shared).run(ft, a.row.numChunks);
  } else {
    const bool sends = block < f.split, forwards = block < f.endMiddle;
    if (sends) {
      const HtBlock b = blockOf(shared, a.sender, a.room, a.stageStride);
      arm(b);
      scatterPipe(b, FarSender<EXPERT_MAJOR>(a, t, far, number), a.sender, &c.work[0][0]);
      disarm(b);
    } else if (threadIdx.x >> 5 == 3) {
      clearTail(a, t, (block - f.split) * 32 + lane, (long long)(numBlocks - f.split) * 32);
    }
    if (forwards) {
      const HtBlock b = blockOf(shared, f.middle, a.room, a.stageStride);
      arm(b);
      scatterPipe(b, Forwarder(a, t, far), f.middle, &far.c.work[0]);
      disarm(b);
    }
    const HtBlock b = rowBlockOf(shared, a.receiver);
    arm(b);
    rowPipe<HtCopies>(b, FarReceiver<EXPERT_MAJOR>(a, t, far, HtCandidates(a, t, false), number),
                      a.receiver, &c.work[0][1]);
  }
  leave<false>(
      g, t, a.row.numChunks, began, [&](int r) { return r != g.rank; },
      [&] {
        const int l = threadIdx.x;
        if (l < far.per)
          waitAnnounce<EP_HT_KIND_DISPATCH>(g, far.near(l), number, packFlagged(0, 0));
        far.countRingSlots(0, ft, a.row.numChunks);
        __syncthreads(); // the operation's number stays until no thread waits any more
      });
}

#endif
