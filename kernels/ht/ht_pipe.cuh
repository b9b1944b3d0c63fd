// A block of dispatch or combine: row chunks in shared memory, and warps with roles around them.
//
//   scatter  1 chunk -> n locations  scheduler -> loader -> storer -> signal warp   senders' and forwarders'
//                                    copies (ht_scatter.cuh)
//   rows     n chunks -> 1 location  scheduler -> reducers -> completion warp       sums (ht_rows.cuh)
//            1 chunk -> n locations  the same                                       a dispatch receiver's
//                                                                                   copies
//
//   scheduler   takes candidates off the operation's counter, waits for their flags or credits, describes
//               them
//   loader      bulk loads into a ring of stages; a lane a chunk
//   storer      bulk stores out of it, and gives the stages back once they have been read
//   reducers    each sums, or copies, an item's chunks, which it streams through shared memory of its own
//   signal      for what has been written: weights, one system fence, then the flags on the peers
//   completion  the same of a sender that sums; of a receiver: for what has been loaded, weights and ids, the
//               credits on the peers
//
// Senders send to the peers' FIFOs, receivers empty the own FIFOs; a sender without further work becomes a
// receiver. Candidates are taken off one counter a role, because SMs get unequal shares of the link, and
// in the order (token, chunk, rank), but for own rows, which wait for nothing. So FIFOs that are full cannot
// deadlock: a wait for a credit of (token, chunk) is for a receiver of an earlier one, which waits for a
// sender of at most that one. Senders' queues are short for the same reason. At least one block must
// receive from the start.
//
// A stage of the ring (chunk number c, stage c mod S): `empty` counts its readers, `full` its bytes. A
// parity test is ambiguous two phases behind, so no warp tests `full` of c before `issued` > c.
//
// What policy P must provide, in the order of a chunk's way. Dispatch: Sender
// (ht_dispatch_send.cuh), Receiver (ht_dispatch_receive.cuh); combine: both in ht_combine_roles.cuh.
//
//   constants  WATCH_ONE  the one side (a copy's source, a sum's destination) is waited for: watchOne()
//              FENCE, SIDE_DATA   scatter: chunks may have come over the link; there is storeSideData()
//              SENDS, ZERO_ROW    rows: a sender, else a receiver; a sum of nothing is a row of zeros
//              KIND, PHASE   of the record, should a wait for a peer be given up
//   group(), row()        the operation's; row(): rows only
//   missing()             a rank that is not in the operation yet, which any wait is for; or -1
//   scheduler  lanes()                    of it, for an item: a power of 2
//              candidates(), index(c)     how many there are; whether c is an item (its index, or -1)
//              ahead(c, l), load(item, i) what lane l, entry i needs of the tables, loaded a batch ahead
//              begin(c, index, item)      fills an item in; returns how many entries it may have
//              watchOne(item)             what its one side waits for
//              entry(item, i, loaded)     entry i: where it lies, what it waits for, whether it is one
//              isVoid(location)           an entry turned out to stand for nothing
//              isEmpty(item)              so did all of them
//   reducers   from(item, entry), to(item) where a chunk begins, and where the sum belongs; or
//              source(item), place(item, entry) where the chunk lies, and where a copy belongs
//   loader     load(item, stage, full)    the chunk
//   storer     store(item, entry, stage)  a copy
//              storeSideData()            few scales, by ordinary stores
//   completion numMetadata()              how many weights and ids of an item, each a Metadata
//              take(), give()             loads one, stores it
//              release(item, entries)     receivers: the FIFO slots are free
//              flags(), raise()           senders: whether there are flags; raises an item's
//
// In the pipeline the scheduler waits for peers (a pulling combine's completion warp, too, for gradients);
// across domains some policies overload its nameCulprit() and keepWaiting(). When it gives up it describes
// the end, and the pipeline drains.
// Techniques and figures: docs/kernels_ht.md, "Facts behind the choices".
#ifndef TREFOIL_KERNELS_HT_PIPE_CUH
#define TREFOIL_KERNELS_HT_PIPE_CUH

#include "kernels/common/divide.cuh"
#include "kernels/ht/ht_fifo.cuh"

// Work item k as its block's warps see it, in desc[k mod D]. Entry: {code, epoch}; the code says
// where, as the policy understands it (ht_fifo.cuh).
struct alignas(8) HtItem {
  int n;     // entries; -1: there are no more items
  int code;  // the one side
  int epoch; // of the one side, if it is a FIFO slot
  int chunk; // of the row
  int token, source;
  int index; // the policy's
};
static_assert(sizeof(HtItem) == HT_DESC_HEAD * 4, "description");

constexpr int HT_DESCS = 64; // work items described at a time
constexpr int HT_IDLE = 32;  // polls after which a storer has nothing to do

struct HtProgress {
  uint32_t head;            // items described
  uint32_t loaded;          // items whose loads are out; rows: items that reducers have taken
  uint32_t issued;          // chunks whose loads are out
  uint32_t complete;        // scatter: items written for good
  uint32_t ended;           // scatter: no more will be
  uint32_t stored, retired; // items that the last warp has finished, in both
  uint32_t end;             // items and the end, once it is described; before `head` says so
};

struct HtBlock {
  char *ring;
  uint64_t *full, *empty, *done;
  HtProgress *at;
  int *desc;
  int S, room, descInts, stageStride; // room: stages (rows: rings) that there is memory for
  Divisor byStages;

  EP_DEV HtItem &item(int k) const { return *(HtItem *)(desc + (k & (HT_DESCS - 1)) * descInts); }
  EP_DEV int2 *entries(int k) const { return (int2 *)(&item(k) + 1); }
  // Item k's sum is where it belongs.
  EP_DEV uint64_t *isDone(int k) const { return done + (k & (HT_DESCS - 1)); }
  EP_DEV uint32_t donePhase(int k) const { return k / HT_DESCS & 1; }
  EP_DEV int stage(int c) const { return c - byStages.quotient(c) * S; }
  EP_DEV uint32_t phase(int c) const { return byStages.quotient(c) & 1; }
  EP_DEV char *stageAt(int c) const { return ring + stage(c) * stageStride; }
};

// A wait inside the block, for other warps of it. The limit is for errors in here: twice what the scheduler,
// for which they all wait, may wait for a peer (EP_HT_MAX_TIMEOUT_NS).
struct HtWatchdog {
  unsigned polls = 0;
  unsigned long long since = 0;
  EP_DEV void operator()() {
    if (++polls & 0xfff) return;
    const unsigned long long t = clockNs();
    if (!since) since = t;
    if (t - since > 2 * EP_HT_MAX_TIMEOUT_NS) __trap();
  }
};

EP_DEV void waitPhase(uint64_t *b, uint32_t parity) {
  HtWatchdog p;
  while (!barrierTry(b, parity)) p();
}
// Waits until the counter is past k; returns by how much.
EP_DEV int waitPast(const uint32_t *counter, int k) {
  HtWatchdog p;
  int n;
  while ((n = (int)(loadAcquireShared(counter) - (uint32_t)k)) <= 0) p();
  return n;
}

// All threads: before a pipeline, and after it if another one follows in the same block.
EP_DEV void arm(const HtBlock &b) {
  const int i = threadIdx.x;
  if (i < b.room) {
    barrierInit(&b.full[i], 1);
    barrierInit(&b.empty[i], 1);
  }
  if (i < HT_DESCS) barrierInit(&b.done[i], 1);
  if (i == 0) *b.at = HtProgress{};
  barrierInitFence();
  __syncthreads();
}
EP_DEV void disarm(const HtBlock &b) {
  const int i = threadIdx.x;
  __syncthreads();
  if (i < b.room) {
    barrierDrop(&b.full[i]);
    barrierDrop(&b.empty[i]);
  }
  if (i < HT_DESCS) barrierDrop(&b.done[i]);
  __syncthreads();
}

// Where the block's shared memory holds what. The ring comes first: bulk copies want 128-byte alignment.
EP_DEV HtBlock blockOf(char *shared, const HtShape &shape, int room, int stageStride) {
  HtBlock b;
  b.byStages = Divisor::of(shape.stages);
  b.ring = shared;
  b.full = (uint64_t *)(shared + (size_t)room * stageStride);
  b.empty = b.full + room;
  b.done = b.empty + room;
  b.at = (HtProgress *)(b.done + HT_DESCS);
  b.desc = (int *)(b.at + 1);
  b.S = shape.stages;
  b.room = room;
  b.descInts = shape.descInts;
  b.stageStride = stageStride;
  return b;
}
// Of a row pipeline: a ring for each reducing warp.
EP_DEV HtBlock rowBlockOf(char *shared, const HtShape &shape) {
  return blockOf(shared, shape, shape.stages, HT_ROW_RING);
}

// All threads of a block, last. The last block of the launch waits for what has to be waited for at the
// end, counts its chunks and makes ready for the next. usesFifo(r): chunks to and from rank r go through
// FIFOs. settle(): all threads. COMBINE: rows go where they came from.
template <bool COMBINE, class UsesFifo, class Settle>
EP_DEV void leave(const ep_ht_group_t &g, const HtTables &t, int numChunks, uint64_t began,
                  UsesFifo usesFifo, Settle settle) {
  HtControl &c = htControl(g);
  EP_SHARED(bool, last);
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(&c.arrived[COMBINE], 1u) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (last) {
    settle();
    HtFifos &fifos = c.fifos[COMBINE];
    for (int r = threadIdx.x; r < g.numRanks; r += blockDim.x) {
      if (!usesFifo(r)) continue;
      const unsigned long long to = COMBINE ? t.head->recvCount[r] : t.head->sendCount[r];
      const unsigned long long from = COMBINE ? t.head->sendCount[r] : t.head->recvCount[r];
      fifos.sent[r] += to * numChunks;
      fifos.received[r] += from * numChunks;
    }
    if (threadIdx.x == 0) {
      c.work[COMBINE][0] = c.work[COMBINE][1] = 0;
      c.arrived[COMBINE] = 0;
      c.numbers[COMBINE]++;
    }
  }
  if (g.stamps && threadIdx.x == 0) {
    g.stamps[blockIdx.x * 2] = began;
    g.stamps[blockIdx.x * 2 + 1] = clockNs();
  }
}

#endif
