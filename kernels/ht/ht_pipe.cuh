// A block of dispatch or combine: a ring of row pieces in shared memory, and one warp a role around it.
//
//   scatter  1 piece -> n places   scout -> loader -> storer -> clerk               copies
//   gather   n pieces -> 1 place   scout -> loader -> reducers -> storer -> clerk   sums
//
//   scout    takes candidates off the operation's counter, waits for their flags or credits, describes them
//   loader   bulk loads into the ring; a lane a piece
//   storer   bulk stores out of it, and gives the slots back once they have been read
//   clerk    of a feeder: for what has been written, one system fence, then the flags on the peers
//            of a follower: for what has been loaded, the credits on the peers, weights and ids
//
// Feeders send to the peers' rings, followers empty the own ring; a feeder that has run dry becomes a
// follower. Candidates are taken off one counter a role, because SMs get unequal shares of the link, and
// in the order (token, piece, rank) everywhere, which is why rings that are full cannot deadlock: whoever
// waits for a credit of (token, piece) waits for a follower of an earlier one, who waits for a feeder of at
// most that one. Queues are short for the same reason. At least one
// block must follow from the start.
//
// A slot of the ring (piece number c, slot c mod S): `empty` counts its readers, `full` its bytes. A
// barrier's parity lies to whoever is two phases behind, so nobody looks at `full` of c before `issued` > c.
//
// Only the scout waits for peers. When it gives up it describes the end, and the pipeline drains.
// Techniques and figures: notes on bulk copies in docs/kernels_ht.md.
#ifndef TREFOIL_KERNELS_HT_PIPE_CUH
#define TREFOIL_KERNELS_HT_PIPE_CUH

#include "kernels/common/bulk.cuh"
#include "kernels/ht/ht_control.cuh"
#include "kernels/ht/ht_kernels.cuh"

// Work item k as its block's warps see it, in desc[k mod D]. Entry: {code, generation}; the code is a place
// that the policy understands (ring unit: rank << 24 | unit).
struct HtItem {
  int n;     // entries; -1: there are no more items
  int code;  // the one side
  int gen;   // of the one side, if it is a ring unit
  int piece; // of the row
  int token, source;
  int index; // the policy's
  int first; // gather: number of its first piece in the block
};
static_assert(sizeof(HtItem) == HT_DESC_HEAD * 4, "description");

constexpr int HT_LOCAL = 64 << 24; // an entry that is no ring unit
constexpr int HT_DESCS = 64;       // work items described at a time
constexpr int HT_FEW_BYTES = 1024; // of scales, that are no bulk store of their own
constexpr int HT_IDLE = 32;        // polls after which a storer has nothing to do

struct HtProgress {
  uint32_t head;          // items described
  uint32_t loaded;        // items whose loads are out
  uint32_t issued;        // pieces whose loads are out
  uint32_t complete;      // items written for good (feeders)
  uint32_t ended;         // no more will be
  uint32_t stored, noted; // items that the storer, the clerk is through with
  uint32_t end;           // items and the end, once it is described; before `head` says so
};

// n / d by a product, for n below 2^31: at most one too great, then put right.
struct HtDivisor {
  unsigned d, magic;
  HtDivisor() = default;
  EP_DEV explicit HtDivisor(int by) : d((unsigned)by), magic(0xffffffffu / (unsigned)by + 1) {}
  EP_DEV int quotient(int n) const {
    if (d == 1) return n;
    const unsigned q = __umulhi((unsigned)n, magic);
    return (int)(q - (q * d > (unsigned)n));
  }
};

struct HtBlock {
  char *ring;
  uint64_t *full, *empty, *done;
  HtProgress *at;
  int *desc;
  int S, room, descInts, pieceStride; // room: slots that there is memory for, >= S
  HtDivisor bySlots;

  EP_DEV HtItem &item(int k) const { return *(HtItem *)(desc + (k & (HT_DESCS - 1)) * descInts); }
  EP_DEV int2 *entries(int k) const { return (int2 *)(&item(k) + 1); }
  // Item k's sum is there: not by slots, for items without pieces take none.
  EP_DEV uint64_t *isDone(int k) const { return done + (k & (HT_DESCS - 1)); }
  EP_DEV uint32_t donePhase(int k) const { return k / HT_DESCS & 1; }
  EP_DEV int slot(int c) const { return c - bySlots.quotient(c) * S; }
  EP_DEV uint32_t phase(int c) const { return bySlots.quotient(c) & 1; }
  EP_DEV char *place(int c) const { return ring + slot(c) * pieceStride; }
};

// A wait inside the block: others of its warps will make it come true. The limit is for errors in here: twice
// what the scout, whom they all wait for, may wait for a peer (EP_HT_MAX_TIMEOUT_NS).
struct HtPatience {
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
  HtPatience p;
  while (!barrierTry(b, parity)) p();
}
// Waits until the counter is past k; returns by how much.
EP_DEV int waitPast(const uint32_t *counter, int k) {
  HtPatience p;
  int n;
  while ((n = (int)(told(counter) - (uint32_t)k)) <= 0) p();
  return n;
}

// All threads. `again`: for a second pipeline in the same block.
EP_DEV void arm(const HtBlock &b, int readers, int reducers, bool again) {
  const int i = threadIdx.x;
  if (again) {
    __syncthreads();
    if (i < b.room) {
      barrierDrop(&b.full[i]);
      barrierDrop(&b.empty[i]);
    }
    if (i < HT_DESCS) barrierDrop(&b.done[i]);
    __syncthreads();
  }
  if (i < b.room) {
    barrierInit(&b.full[i], 1);
    barrierInit(&b.empty[i], readers);
  }
  if (i < HT_DESCS) barrierInit(&b.done[i], reducers);
  if (i == 0) *b.at = HtProgress{};
  barrierInitFence();
  __syncthreads();
}

// Where the block's shared memory holds what. The ring comes first: bulk copies want 128-byte alignment.
EP_DEV HtBlock blockOf(char *shared, const HtShape &shape, int room, int pieceStride) {
  HtBlock b;
  b.bySlots = HtDivisor(shape.slots);
  b.ring = shared;
  b.full = (uint64_t *)(shared + (size_t)room * pieceStride);
  b.empty = b.full + room;
  b.done = b.empty + room;
  b.at = (HtProgress *)(b.done + HT_DESCS);
  b.desc = (int *)(b.at + 1);
  b.S = shape.slots;
  b.room = room;
  b.descInts = shape.descInts;
  b.pieceStride = pieceStride;
  return b;
}

// All threads of a block, last. The last block of the launch waits for what has to be waited for at the
// end, counts its pieces and makes ready for the next. ringed(r): pieces to and from rank r go through
// rings. settle(): all threads. COMBINE: rows go where they came from.
template <bool COMBINE, class Ringed, class Settle>
EP_DEV void leave(const ep_ht_group_t &g, const HtTables &t, int numPieces, uint64_t began,
                  Ringed ringed, Settle settle) {
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
    HtRings &rings = c.rings[COMBINE];
    for (int r = threadIdx.x; r < g.numRanks; r += blockDim.x) {
      if (!ringed(r)) continue;
      const unsigned long long to = COMBINE ? t.head->recvCount[r] : t.head->sendCount[r];
      const unsigned long long from = COMBINE ? t.head->sendCount[r] : t.head->recvCount[r];
      rings.sent[r] += to * numPieces;
      rings.received[r] += from * numPieces;
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

// ------------------------------------------------------------------------------------------- rows

struct HtSegment {
  const char *at;    // in the caller's tensor
  int offset, bytes; // in the piece
};

// The part of a piece that lies in the tokens (which 0) or the scales (1); bytes 0: none.
EP_DEV HtSegment segmentOf(const HtRow &r, int which, long long row, int piece, const void *tokens,
                           const void *scales) {
  const int from = piece * r.pieceBytes, to = min(r.rowBytes, from + r.pieceBytes);
  const int lo = which ? max(from, r.tokenBytes) : from, hi = which ? to : min(to, r.tokenBytes);
  HtSegment s;
  s.bytes = max(hi - lo, 0);
  s.offset = lo - from;
  s.at = which ? (const char *)scales + row * r.scaleBytes + (lo - r.tokenBytes)
               : (const char *)tokens + row * r.tokenBytes + lo;
  return s;
}

EP_DEV int pieceBytes(const HtRow &r, int piece) {
  return min(r.rowBytes - piece * r.pieceBytes, r.pieceBytes);
}

// One thread: a piece of a row of the caller's into a slot.
EP_DEV void loadRow(const HtRow &r, long long row, int piece, const void *tokens,
                    const void *scales, uint32_t slot, uint64_t *full) {
  barrierExpect(full, pieceBytes(r, piece));
  const HtSegment t = segmentOf(r, 0, row, piece, tokens, scales);
  if (t.bytes) bulkLoad(slot, t.at, t.bytes, full);
  if (r.scaleBytes) {
    const HtSegment s = segmentOf(r, 1, row, piece, tokens, scales);
    if (s.bytes) bulkLoad(slot + s.offset, s.at, s.bytes, full);
  }
}
EP_DEV void storeRow(const HtRow &r, long long row, int piece, void *tokens, void *scales,
                     uint32_t slot) {
  const HtSegment t = segmentOf(r, 0, row, piece, tokens, scales);
  if (t.bytes) bulkStore((char *)t.at, slot, t.bytes);
  if (r.scaleBytes > HT_FEW_BYTES) {
    const HtSegment s = segmentOf(r, 1, row, piece, tokens, scales);
    if (s.bytes) bulkStore((char *)s.at, slot + s.offset, s.bytes);
  }
}
// Eight lanes, l is the lane's number: few scales as ordinary stores, which cost a warp less than to issue
// one more bulk store (115 ns).
// rowOf(j): where the scales of copy j of the row begin, or NULL.
template <class RowOf>
EP_DEV void storeScales(const HtRow &r, int piece, const char *place, int copies, int l,
                        RowOf rowOf) {
  if (!r.scaleBytes || r.scaleBytes > HT_FEW_BYTES) return;
  const int from = max(piece * r.pieceBytes, r.tokenBytes);
  const int to = min(r.rowBytes, (piece + 1) * r.pieceBytes);
  for (int at = from + l * 16; at < to; at += 8 * 16) {
    const uint4 v = *(const uint4 *)(place + (at - piece * r.pieceBytes));
    for (int j = 0; j < copies; j++) {
      char *row = rowOf(j);
      if (row) *(uint4 *)(row + (at - r.tokenBytes)) = v;
    }
  }
}

// ------------------------------------------------------------------------------------------- rings

// Piece number q of a stream from one rank to another: its unit and generation. Words say gen << 1, and
// | 1 for a piece that stands for nothing.
struct HtUnit {
  int code, gen;
};
EP_DEV HtUnit unitOf(int rank, unsigned long long q, int ringBits) {
  return HtUnit{rank << 24 | (int)(q & ((1u << ringBits) - 1)),
                (int)((q >> ringBits) + 1 & 0x7fffffff)};
}
EP_DEV int unitRank(int code) {
  return code >> 24;
}
// The unit `code` of rank `from`'s stream to rank `at`; code's rank is the other end.
EP_DEV size_t unitIndex(const ep_ht_group_t &g, int kind, int rank, int code) {
  return (size_t)rank * g.at.ringUnits[kind] + (code & 0xffffff);
}
EP_DEV char *unitAt(const ep_ht_group_t &g, int kind, int at, int from, int code) {
  return g.peers[at] + g.at.rings[kind] + unitIndex(g, kind, from, code) * g.at.unitStride;
}
EP_DEV uint32_t *flagAt(const ep_ht_group_t &g, int kind, int at, int from, int code) {
  return (uint32_t *)(g.peers[at] + g.at.flags[kind]) + unitIndex(g, kind, from, code);
}
// Kept by the sender `at`, written by the receiver `by`.
EP_DEV uint32_t *creditAt(const ep_ht_group_t &g, int kind, int at, int by, int code) {
  return (uint32_t *)(g.peers[at] + g.at.credits[kind]) + unitIndex(g, kind, by, code);
}
EP_DEV float *unitWeights(const ep_ht_group_t &g, char *unit) {
  return (float *)(unit + ((g.at.unitBytes + 15) & ~(size_t)15));
}
EP_DEV void giveCredit(const ep_ht_group_t &g, int kind, int code, int gen) {
  storeRelaxed(creditAt(g, kind, unitRank(code), g.rank, code), (uint32_t)gen << 1);
}

// What an entry, or the one side, waits for before its item may run.
struct HtWatch {
  const uint32_t *word; // NULL: nothing
  int want;             // generation
  int rank;
};
struct HtEntry {
  HtWatch watch;
  HtUnit unit;
  bool is;
};

// ------------------------------------------------------------------------------------------- scout

// What a lane has loaded of the tables for its candidate, one batch ahead of its use.
struct HtAhead {
  int index; // of the token among its source's, -1: no item
  int2 entry;
};

EP_DEV void awaitRoom(const HtBlock &b, int k, int ahead) {
  HtPatience p;
  while ((int)(k - min((int)told(&b.at->stored), (int)told(&b.at->noted))) > HT_DESCS ||
         (int)(k - told(&b.at->loaded)) > ahead) {
    p();
  }
  __syncwarp();
}

EP_DEV void finish(const HtBlock &b, int k, int lane) {
  awaitRoom(b, k + 1, HT_DESCS);
  if (lane == 0) {
    b.item(k).n = -1;
    tell(&b.at->end, k + 1);
    tell(&b.at->head, k + 1);
  }
}

// Slots that an item of a gather pipeline takes.
template <class P> EP_DEV int piecesOf(int n) {
  return n == 0 && P::ZERO_ROW ? 1 : n;
}

// Who is not in the operation at all is what everybody waits for.
template <class P> EP_DEV void blameMissing(const P &p, HtAwaited &w) {
  const int r = p.missing();
  if (r < 0) return;
  w.phase = EP_LL_PHASE_HELLO;
  w.rank = r;
  w.expected = w.received = 0;
  w.item = -1;
}

// Describes items [k, k + m): the groups of P::LANES lanes that have one, in their order. Items are shown
// as soon as all before them are. False: gave up.
template <class P>
EP_DEV bool describe(const HtBlock &b, const P &p, int k, int c, const HtAhead &ahead, int &pieces,
                     int lane) {
  constexpr unsigned GROUP = (1u << P::LANES) - 1;
  const int first = lane & -P::LANES, l = lane - first;
  const bool mine = c >= 0;
  const unsigned heads = __ballot_sync(FULL_WARP, mine && l == 0);
  const int m = __popc(heads), at = k + __popc(heads & ((1u << first) - 1));
  HtItem item = {};
  int bound = 0, i0 = 0, n = 0, shown = 0;
  HtEntry e = {};
  if (mine) {
    bound = p.begin(c, ahead.index, item);
    if (l < bound) e = p.entry(item, l, ahead.entry);
    if (P::WATCH_ONE && l == 0) e.watch = p.watchOne(item);
  }
  bool fin = !mine;
  HtSpin spin;
  for (;;) {
    bool alive = true;
    if (e.watch.word) {
      const uint32_t v = loadAcquire(e.watch.word);
      if ((int)(v >> 1) == e.watch.want) {
        e.watch.word = nullptr;
        if ((v & 1) && e.is) {
          e.is = false;
          p.isVoid(e.unit);
        }
      } else {
        HtAwaited w = {P::KIND, P::PHASE, e.watch.rank, (unsigned)e.watch.want, v >> 1, item.token};
        if (!((spin.polls + 1) & 255)) blameMissing(p, w);
        alive = htKeepWaiting(p.group(), w, spin);
      }
    }
    if (__any_sync(FULL_WARP, !alive)) return false;
    const unsigned waits = __ballot_sync(FULL_WARP, e.watch.word != nullptr);
    const bool ready = !fin && !(waits >> first & GROUP);
    const unsigned in = __ballot_sync(FULL_WARP, ready && e.is) >> first & GROUP;
    if (ready) {
      if (e.is) {
        b.entries(at)[n + __popc(in & ((1u << l) - 1))] = make_int2(e.unit.code, e.unit.gen);
      }
      n += __popc(in);
      i0 += P::LANES;
      e = HtEntry{};
      if (i0 + l < bound) e = p.entry(item, i0 + l, p.load(item, i0 + l));
      if (i0 >= bound) {
        fin = true;
        if (l == 0) {
          if (n == 0) p.isEmpty(item);
          item.n = n;
          b.item(at) = item;
        }
      }
    }
    const unsigned pending = __ballot_sync(FULL_WARP, !fin);
    const int now = __popc(pending ? heads & ((1u << (__ffs(pending) - 1)) - 1) : heads);
    __syncwarp();
    if (now > shown && lane == 0) {
      for (int i = k + shown; P::GATHERS && i < k + now; i++) {
        b.item(i).first = pieces;
        pieces += piecesOf<P>(b.item(i).n);
      }
      tell(&b.at->head, k + now);
    }
    shown = now;
    if (now == m) return true;
  }
}

// The loads of a batch go out before the batch in front of it is waited for, and so do those that tell
// which candidates of the next window are items.
template <class P>
EP_DEV void scout(const HtBlock &b, const P &p, const HtShape &shape, unsigned *work, int lane) {
  const long long total = p.candidates();
  const int group = lane / P::LANES, l = lane % P::LANES;
  long long base = 0, nextBase = 0;
  unsigned taken = 0, mask = 0;
  int nextIndex = -1, k = 0, pieces = 0;
  const auto take = [&] {
    if (lane == 0) taken = atomicAdd(work, (unsigned)shape.take);
  };
  const auto openWindow = [&] { // the window whose candidates are being looked up
    nextBase = __shfl_sync(FULL_WARP, taken, 0);
    nextIndex = lane < shape.take && nextBase + lane < total ? p.index((int)(nextBase + lane)) : -1;
    take();
  };
  const auto nextBatch = [&](HtAhead &ahead) { // this lane's candidate or -1; -2 for all: no more
    while (!mask) {
      if (nextBase >= total) return -2;
      base = nextBase;
      mask = __ballot_sync(FULL_WARP, nextIndex >= 0);
      openWindow();
    }
    int c = -1;
    for (int i = 0; mask && i < shape.batch; i++, mask &= mask - 1) {
      if (i == group) c = (int)base + __ffs(mask) - 1;
    }
    ahead = HtAhead{-1, make_int2(-1, 0)};
    if (c >= 0) ahead = p.ahead(c, l);
    return c;
  };
  take();
  openWindow();
  HtAhead ahead, nextAhead;
  int c = nextBatch(ahead);
  while (c != -2) {
    const int m = __popc(__ballot_sync(FULL_WARP, c >= 0 && l == 0));
    const int next = nextBatch(nextAhead);
    awaitRoom(b, k + m, shape.batch + 4);
    if (!describe(b, p, k, c, ahead, pieces, lane)) {
      k = (int)told(&b.at->head);
      break;
    }
    k += m;
    c = next;
    ahead = nextAhead;
  }
  finish(b, k, lane);
}

#endif
