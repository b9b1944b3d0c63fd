// High throughput: what the kernels of a rank share in control memory, the tables that an Update leaves
// in a handle, and waiting for peers.
//
// Every wait for a peer is made by a thread that may give up (common/wait_record.cuh). A group that failed is
// lost: its later launches return at once.
#ifndef TREFOIL_KERNELS_HT_CONTROL_CUH
#define TREFOIL_KERNELS_HT_CONTROL_CUH

#include "kernels/common/wait_record.cuh"
#include "kernels/ht/ht.h"

// Chunks sent to and received from each rank since the group began; a chunk's FIFO slot and its
// epoch follow from its number, so nothing is reset between operations.
struct HtFifos {
  unsigned long long sent[EP_HT_MAX_RANKS], received[EP_HT_MAX_RANKS];
};
struct HtControl {
  WaitControl wait;
  unsigned barrierCount, barrierTurn; // blocks of an Update
  unsigned arrived[2];                // blocks at the end of a dispatch, a combine
  unsigned work[2][2];                // next candidate: [kind][senders, receivers]
  unsigned badIds;                    // of the running Update
  unsigned long long numbers[3];      // operations finished: dispatch, combine, Update
  HtFifos fifos[2];
  unsigned doneBefore[2][EP_HT_MAX_RANKS]; // each peer's count at the start (ht_handshake.cuh)
};
static_assert(sizeof(HtControl) <= EP_HT_CONTROL_BYTES, "control memory");

EP_DEV HtControl &htControl(const ep_ht_group_t &g) {
  return *(HtControl *)g.control;
}

// The tables behind the head of a handle's memory (ht_layout.c has the sizes). W = min(R, K).
//   dests    [N, W] own token: {rank, ordinal among own tokens to that rank}, ranks ascending; rank -1 ends
//   ids      [N, K] own token: experts, -1 = none
//   index    [R, N] received token: ordinal among its source's; -1 = does not come here. Flat: its row
//            is head->recvBase[source] + index
//   first    [R, N] received token, expert-major: twice its first row, by ascending k, + 1 if it has more;
//            HT_NOWHERE = none
//   entries  [R, N, K] received token: expert-major the row, -1 = none; flat the local expert and its column
//            (below)
//   zones    [L] {first row, rows in use}; pads [L + 1] rows to be zeroed before each zone's
constexpr unsigned HT_NOWHERE = ~0u;
struct HtTables {
  ep_ht_head_t *head;
  int2 *dests;
  int *ids, *index;
  unsigned *first;
  int *entries;
  int2 *zones;
  int *pads;
  int width; // W
};

// Flat: an entry of a token holds the local expert, and its column in the row of K
// weights and ids: local experts by ascending id, then the entries that are none here.
EP_DEV int flatEntry(int expert, int column) {
  return expert | column << 16;
}
EP_DEV int flatNone(int column) {
  return -1 - column;
}
EP_DEV int expertOf(int entry) { // -1: none
  return entry < 0 ? -1 : entry & 0xffff;
}
EP_DEV int columnOf(int entry) {
  return entry < 0 ? -1 - entry : entry >> 16;
}

__host__ __device__ inline size_t htAlign(size_t n) {
  return (n + 255) & ~(size_t)255;
}

EP_DEV HtTables htTables(const ep_ht_group_t &g, const ep_ht_handle_t &h) {
  const size_t N = g.maxTokens, R = g.numRanks, K = h.numTopk;
  HtTables t;
  char *p = (char *)h.memory;
  t.width = min(g.numRanks, h.numTopk);
  t.head = (ep_ht_head_t *)p;
  p += htAlign(sizeof(ep_ht_head_t));
  t.dests = (int2 *)p;
  p += htAlign(N * t.width * 8);
  t.ids = (int *)p;
  p += htAlign(N * K * 4);
  t.index = (int *)p;
  p += htAlign(R * N * 4);
  t.first = (unsigned *)p;
  p += htAlign(R * N * 4);
  t.entries = (int *)p;
  p += htAlign(R * N * K * 4);
  t.zones = (int2 *)p;
  p += htAlign((size_t)g.numLocal * 8);
  t.pads = (int *)p;
  return t;
}

// 0 dispatch, 1 combine, 2 Update.
EP_DEV constexpr unsigned indexOfKind(unsigned kind) {
  return kind - EP_HT_KIND_DISPATCH;
}

static __device__ __noinline__ bool htCheckLimit(const ep_ht_group_t &g, Awaited w,
                                                 unsigned expected, Spin &spin) {
  return checkWait(htControl(g).wait, nullptr, w.rank, g.timeoutNs, spin.since,
                   [&](uint64_t now, bool gaveUp) {
                     const unsigned long long *numbers = htControl(g).numbers;
                     const unsigned long long ended = loadVolatile(&numbers[indexOfKind(w.kind)]);
                     writeRecord(g.record, w, ended + 1, expected, spin.since, now, gaveUp);
                   });
}

// One thread: true to poll again.
EP_DEV bool htKeepWaiting(const ep_ht_group_t &g, const Awaited &w, unsigned expected, Spin &s) {
  if (++s.polls & 255) return true;
  return htCheckLimit(g, w, expected, s);
}

// Flagged 16-byte words: 8 bytes of data, and an operation's number as the flag.
EP_DEV uint4 packFlagged(unsigned long long data, unsigned long long number) {
  return make_uint4((unsigned)data, (unsigned)(data >> 32), (unsigned)number,
                    (unsigned)(number >> 32));
}
EP_DEV unsigned long long flaggedData(uint4 q) {
  return q.x | (unsigned long long)q.y << 32;
}
EP_DEV unsigned long long flagOf(uint4 q) {
  return q.z | (unsigned long long)q.w << 32;
}
EP_DEV bool isFlagged(uint4 q, unsigned long long number) {
  return flagOf(q) == number;
}

// Of n ranks from rank `first`, the first whose word of operation `number` is not here; -1: all are. A wait
// for something else then names that rank: other ranks may be waiting for it, too. at(rank): where the word
// is.
template <class At> EP_DEV int firstMissing(int first, int n, unsigned long long number, At at) {
  for (int r = first; r < first + n; r++) {
    if (flagOf(loadSys(at(r))) < number) return r;
  }
  return -1;
}

// One thread: waits for a word of operation `number`; false if it will not come. w: received is filled in.
EP_DEV bool waitFlagged(const ep_ht_group_t &g, const char *at, unsigned long long number,
                        Awaited w, unsigned long long &data) {
  Spin spin;
  for (;;) {
    const uint4 q = loadSys(at);
    if (isFlagged(q, number)) {
      data = flaggedData(q);
      return true;
    }
    w.received = q.z;
    if (!htKeepWaiting(g, w, (unsigned)number, spin)) return false;
  }
}

#endif
