// Rows of high throughput as they lie in the caller's tensors, and the FIFOs between ranks: FIFO slots,
// flags and credits, and the codes of a chunk's location.
#ifndef TREFOIL_KERNELS_HT_FIFO_CUH
#define TREFOIL_KERNELS_HT_FIFO_CUH

#include "kernels/common/bulk.cuh"
#include "kernels/ht/ht_control.cuh"
#include "kernels/ht/ht_kernels.cuh"

constexpr int HT_FEW_BYTES = 1024; // of scales, that are no bulk store of their own

struct HtSegment {
  const char *at;    // in the caller's tensor
  int offset, bytes; // in the chunk
};

// The part of a chunk that lies in the tokens (which 0) or the scales (1); bytes 0: none.
EP_DEV HtSegment segmentOf(const HtRow &r, int which, long long row, int chunk, const void *tokens,
                           const void *scales) {
  const int from = chunk * r.chunkBytes, to = min(r.rowBytes, from + r.chunkBytes);
  const int lo = which ? max(from, r.tokenBytes) : from, hi = which ? to : min(to, r.tokenBytes);
  HtSegment s;
  s.bytes = max(hi - lo, 0);
  s.offset = lo - from;
  s.at = which ? (const char *)scales + row * r.scaleBytes + (lo - r.tokenBytes)
               : (const char *)tokens + row * r.tokenBytes + lo;
  return s;
}

// Where a chunk lies, as its bytes are counted: below `split` from `tokens` on, else from `scales` on.
struct HtChunkPlace {
  char *tokens, *scales;
  int split;
  EP_DEV char *at(int byte) const { return (byte < split ? tokens : scales) + byte; }
};
EP_DEV HtChunkPlace contiguous(const char *at) {
  return HtChunkPlace{(char *)at, nullptr, INT32_MAX};
}
// A chunk of a row of the caller's.
EP_DEV HtChunkPlace placeOf(const HtRow &r, long long row, int chunk, const void *tokens,
                            const void *scales) {
  const HtSegment t = segmentOf(r, 0, row, chunk, tokens, scales);
  if (!r.scaleBytes) return contiguous(t.at);
  const HtSegment s = segmentOf(r, 1, row, chunk, tokens, scales);
  return HtChunkPlace{(char *)t.at, (char *)s.at - s.offset, t.bytes};
}

EP_DEV int chunkBytes(const HtRow &r, int chunk) {
  return min(r.rowBytes - chunk * r.chunkBytes, r.chunkBytes);
}

// One thread: a chunk of a row of the caller's into a stage of the ring.
EP_DEV void loadRow(const HtRow &r, long long row, int chunk, const void *tokens,
                    const void *scales, uint32_t stage, uint64_t *full) {
  barrierExpect(full, chunkBytes(r, chunk));
  const HtSegment t = segmentOf(r, 0, row, chunk, tokens, scales);
  if (t.bytes) bulkLoad(stage, t.at, t.bytes, full);
  if (r.scaleBytes) {
    const HtSegment s = segmentOf(r, 1, row, chunk, tokens, scales);
    if (s.bytes) bulkLoad(stage + s.offset, s.at, s.bytes, full);
  }
}
EP_DEV void storeRow(const HtRow &r, long long row, int chunk, void *tokens, void *scales,
                     uint32_t stage) {
  const HtSegment t = segmentOf(r, 0, row, chunk, tokens, scales);
  if (t.bytes) bulkStore((char *)t.at, stage, t.bytes);
  if (r.scaleBytes > HT_FEW_BYTES) {
    const HtSegment s = segmentOf(r, 1, row, chunk, tokens, scales);
    if (s.bytes) bulkStore((char *)s.at, stage + s.offset, s.bytes);
  }
}
// Eight lanes, l is the lane's number: few scales as ordinary stores, which cost a warp less than to issue
// one more bulk store (115 ns).
// scalesOf(j): where the scales of copy j of the row begin, or NULL.
template <class ScalesOf>
EP_DEV void storeScales(const HtRow &r, int chunk, const char *stage, int copies, int l,
                        ScalesOf scalesOf) {
  if (!r.scaleBytes || r.scaleBytes > HT_FEW_BYTES) return;
  const int from = max(chunk * r.chunkBytes, r.tokenBytes);
  const int to = min(r.rowBytes, (chunk + 1) * r.chunkBytes);
  for (int at = from + l * 16; at < to; at += 8 * 16) {
    const uint4 v = *(const uint4 *)(stage + (at - chunk * r.chunkBytes));
    for (int j = 0; j < copies; j++) {
      char *row = scalesOf(j);
      if (row) *(uint4 *)(row + (at - r.tokenBytes)) = v;
    }
  }
}

// ------------------------------------------------------------------------------------------- locations

// Where a chunk lies: a code, and a number that goes with it. What is no FIFO slot has a bit of its own;
// the policy tells those apart.
//
//   a FIFO slot         rank << 24 | its number           its epoch
//   dispatch, senders   pushedTo(rank, signals)           a row of a rank's output
//   dispatch, receivers HT_OWN, HT_ZEROS, HT_FIRST,       -
//                       HT_REMOTE
//   combine, receivers  HT_OWN, pulledFrom(rank)          a row of the own input, of this rank's at a peer
constexpr int HT_NO_FIFO_SLOT = 64 << 24;
constexpr int HT_OWN = HT_NO_FIFO_SLOT;        // the caller's own tensor
constexpr int HT_ZEROS = HT_NO_FIFO_SLOT + 1;  // padding
constexpr int HT_FIRST = HT_NO_FIFO_SLOT + 2;  // the token's first row: its sender has put it there
constexpr int HT_REMOTE = HT_NO_FIFO_SLOT + 3; // the input of the item's source
constexpr int HT_PULLED = HT_NO_FIFO_SLOT + (1 << 24);

EP_DEV bool isFifoSlot(int code) {
  return code < HT_NO_FIFO_SLOT;
}
// signals: an arrival flag is raised for the row.
EP_DEV int pushedTo(int rank, bool signals) {
  return HT_NO_FIFO_SLOT | rank << 24 | (int)signals;
}
EP_DEV bool isPushed(int code) {
  return code & HT_NO_FIFO_SLOT;
}
EP_DEV bool hasSignal(int code) {
  return code & 1;
}
EP_DEV int pulledFrom(int rank) {
  return HT_PULLED + rank;
}
EP_DEV bool isPulled(int code) {
  return code >= HT_PULLED;
}
// The peer of a FIFO slot, of a pushed row or of a pulled one.
EP_DEV int fifoRank(int code) {
  return code >> 24;
}
EP_DEV int pushedRank(int code) {
  return fifoRank(code & ~HT_NO_FIFO_SLOT);
}
EP_DEV int pulledRank(int code) {
  return code - HT_PULLED;
}

// ------------------------------------------------------------------------------------------- FIFOs

// Chunk number q of a stream from one rank to another: its FIFO slot and epoch. Words hold epoch << 1, and
// | 1 for a chunk that stands for nothing.
struct HtLocation {
  int code, epoch;
};
EP_DEV HtLocation fifoSlotOf(int rank, unsigned long long q, int fifoBits) {
  return HtLocation{rank << 24 | (int)(q & ((1u << fifoBits) - 1)),
                    (int)((q >> fifoBits) + 1 & 0x7fffffff)};
}
// The FIFO slot `code` of rank `from`'s stream to rank `at`; code's rank is the other end.
EP_DEV size_t fifoSlotIndex(const ep_ht_group_t &g, int kind, int rank, int code) {
  return (size_t)rank * g.at.fifoSlots[kind] + (code & 0xffffff);
}
EP_DEV char *fifoSlotAt(const ep_ht_group_t &g, int kind, int at, int from, int code) {
  return g.peers[at] + g.at.fifos[kind] + fifoSlotIndex(g, kind, from, code) * g.at.fifoSlotStride;
}
EP_DEV uint32_t *flagAt(const ep_ht_group_t &g, int kind, int at, int from, int code) {
  return (uint32_t *)(g.peers[at] + g.at.flags[kind]) + fifoSlotIndex(g, kind, from, code);
}
// Kept by the sender `at`, written by the receiver `by`.
EP_DEV uint32_t *creditAt(const ep_ht_group_t &g, int kind, int at, int by, int code) {
  return (uint32_t *)(g.peers[at] + g.at.credits[kind]) + fifoSlotIndex(g, kind, by, code);
}
EP_DEV float *fifoWeights(const ep_ht_group_t &g, char *fifoSlot) {
  return (float *)(fifoSlot + ((g.at.fifoSlotBytes + 15) & ~(size_t)15));
}
EP_DEV void giveCredit(const ep_ht_group_t &g, int kind, int code, int epoch) {
  storeRelaxed(creditAt(g, kind, fifoRank(code), g.rank, code), (uint32_t)epoch << 1);
}

#endif
