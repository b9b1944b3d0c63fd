// Zero-copy dispatch: which pairs of ranks do without FIFOs, and when they are done.
//
//   start  every rank announces to every rank in every dispatch that it takes part, and what of it lies in a
//          window (sendAnnounces): its output, into which peers may push, or its input, out of which they may
//          pull. A pair pushes if both have announced outputs in the same windows (ht_push.cuh), pulls if
//          both have announced inputs, else uses its FIFOs. An announcement implies that the rank's earlier
//          work on the output is done and that the input is ready.
//   pull   the receiver loads each row where it lies, and stores it to all of the token's rows.
//   end    a block that has sent (push), or read (pull), its last chunk adds to the peers' `dones`
//          (ht_done.cuh). The last block of a rank waits for all of them: its output is
//          complete, its input may be overwritten.
//
// Words of dispatch e lie in buffer e mod 2. A rank leaves e when it has the announcements of e of all ranks,
// with windows or without, so it announces e + 2 when all have left e. What a source writes after the
// receiver's announcement needs one buffer only.
//
// Memory order: what wrote an input has ended before the launch; a system fence stands before the word,
// another behind it at the reader, and each bulk load has its proxy fence. A word is a flagged 16-byte store.
#ifndef TREFOIL_KERNELS_HT_PAIRS_CUH
#define TREFOIL_KERNELS_HT_PAIRS_CUH

#include "kernels/ht/ht_done.cuh"
#include "kernels/ht/ht_pipe.cuh"

// A block's table of its peers, in shared memory.
struct HtPairs {
  char *tokens
      [EP_HT_MAX_RANKS]; // push: start of rank r's rows from here; pull: its input. NULL: FIFO
  char *scales[EP_HT_MAX_RANKS];
  int numFifos; // pairs that use FIFOs; the own rank's counted too
};
static_assert(sizeof(HtPairs) == HT_PAIRS_BYTES, "shared memory");

EP_DEV char *announceAt(const ep_ht_group_t &g, int at, int from, unsigned long long number) {
  return g.peers[at] + g.at.announces + ((number & 1) * g.numRanks + from) * 64;
}

// Whether this rank does without FIFOs where a peer does. Overflow goes the way of the FIFOs.
EP_DEV bool isOpen(const HtDispatchArgs &a, const HtTables &t) {
  const long long most = a.op.handle.maxRecv;
  return !t.head->trapped && !(most && t.head->rowTotal > most);
}
// Rows of an output before those of source r; 0 if peers get each row's number in the whole output.
EP_DEV size_t rowsBefore(const HtDispatchArgs &a, const HtTables &t, int r) {
  return a.op.handle.expertMajor ? 0 : (size_t)t.head->recvBase[r];
}

// In the first word of an announcement, in the low bits of an address that is a multiple of 16.
EP_DEV unsigned announcedAs(HtWay way) {
  return way == HT_PUSH ? 1 : 2;
}

// One warp of the first block.
template <HtWay WAY>
EP_DEV void sendAnnounces(const HtDispatchArgs &a, const HtTables &t, unsigned long long number) {
  const ep_ht_group_t &g = a.op.group;
  const ep_ht_window_t &w = a.op.window;
  const bool open = WAY != HT_FIFOS && isOpen(a, t);
  if (WAY == HT_PULL) __threadfence_system();
  for (int r = threadIdx.x & 31; r < g.numRanks; r += 32) {
    char *to = announceAt(g, r, g.rank, number);
    if (!open) {
      storeSys(to, packFlagged(0, number));
      continue;
    }
    htControl(g).doneBefore[r] = doneBefore(g, g.at.dones, r);
    unsigned long long tokens = (unsigned long long)a.op.input.tokens,
                       scales = (unsigned long long)a.op.input.scales;
    if (WAY == HT_PUSH) {
      const size_t row = rowsBefore(a, t, r);
      tokens = w.tokensOffset + row * a.row.tokenBytes;
      scales = w.scalesOffset + row * a.row.scaleBytes;
      storeSys(to + 32, packFlagged(w.id, number));
    }
    storeSys(to + 16, packFlagged(scales, number));
    storeSys(to, packFlagged(tokens | announcedAs(WAY), number));
  }
}

// Of n ranks from `first`, one that has not announced this dispatch yet; -1: none.
EP_DEV int missingAnnounce(const ep_ht_group_t &g, int first, int n) {
  const unsigned long long number = loadVolatile(&htControl(g).numbers[0]) + 1;
  return firstMissing(first, n, number, [&](int r) { return announceAt(g, g.rank, r, number); });
}

// One thread of the last block of a dispatch through FIFOs only: rank r is in this dispatch (buffers, above).
EP_DEV void waitAnnounce(const ep_ht_group_t &g, int r, unsigned long long number) {
  const Awaited w = {EP_HT_KIND_DISPATCH, EP_WAIT_ANNOUNCE, r, 0, -1};
  unsigned long long ignored;
  waitFlagged(g, announceAt(g, g.rank, r, number), number, w, ignored);
}

// One thread a rank: whether its announcement comes. Its words are loaded together.
template <HtWay WAY>
EP_DEV bool waitPeer(const HtDispatchArgs &a, const HtTables &t, int r, unsigned long long number,
                     HtPairs &pairs) {
  const ep_ht_group_t &g = a.op.group;
  const ep_ht_window_t &w = a.op.window;
  const char *at = announceAt(g, g.rank, r, number);
  const bool open = isOpen(a, t);
  pairs.tokens[r] = pairs.scales[r] = nullptr;
  Spin spin;
  for (;;) {
    const uint4 tokens = loadSys(at), scales = loadSys(at + 16), id = loadSys(at + 32);
    const bool is = isFlagged(tokens, number), both = open && (tokens.x & announcedAs(WAY));
    if (is && (!both || (isFlagged(scales, number) && (WAY == HT_PULL || isFlagged(id, number))))) {
      if (!both || (WAY == HT_PUSH && flaggedData(id) != w.id)) return true;
      const bool pull = WAY == HT_PULL;
      pairs.tokens[r] =
          (pull ? g.peers[r] : w.tokens[r]) + (long long)(flaggedData(tokens) - announcedAs(WAY));
      pairs.scales[r] = (pull ? g.peers[r] : w.scales[r]) + (long long)flaggedData(scales);
      return true;
    }
    const Awaited wait = {EP_HT_KIND_DISPATCH, EP_WAIT_ANNOUNCE, r, tokens.z, -1};
    if (!htKeepWaiting(g, wait, (unsigned)number, spin)) return false;
  }
}

// All threads of a block, as soon as it starts: false if some rank does not come.
template <HtWay WAY>
EP_DEV bool waitPeers(const HtDispatchArgs &a, const HtTables &t, unsigned long long number,
                      HtPairs &pairs) {
  const int R = a.op.group.numRanks, r = threadIdx.x;
  const bool ok = r >= R || waitPeer<WAY>(a, t, r, number, pairs);
  if (WAY == HT_PULL && r < R) __threadfence_system();
  const int gone = __syncthreads_count(!ok);
  const int fifos = __syncthreads_count(r < R && !pairs.tokens[r]);
  if (r == 0) pairs.numFifos = fifos;
  __syncthreads();
  return gone == 0;
}

EP_DEV bool isZeroCopy(const ep_ht_group_t &g, const HtPairs &pairs, int r) {
  return r < g.numRanks && r != g.rank && pairs.tokens[r];
}
// All threads of a block that no longer uses its peers' memory, after a barrier.
EP_DEV void sendDone(const ep_ht_group_t &g, const HtPairs &pairs) {
  if (isZeroCopy(g, pairs, threadIdx.x)) addDone(g, g.at.dones, threadIdx.x);
}
// All threads of the last block.
template <HtWay WAY>
EP_DEV void waitDone(const HtDispatchArgs &a, const HtTables &t, const HtPairs &pairs) {
  const ep_ht_group_t &g = a.op.group;
  const int r = threadIdx.x;
  if (!isZeroCopy(g, pairs, r)) return;
  const unsigned before = loadVolatile(&htControl(g).doneBefore[r]);
  constexpr ep_wait_phase_t PHASE = WAY == HT_PULL ? EP_WAIT_READ : EP_WAIT_ROWS;
  if (!waitDone(g, g.at.dones, r, before, EP_HT_KIND_DISPATCH, PHASE)) return;
  // Each rank counts what it sends, so the owner counts what has been read.
  if (WAY == HT_PULL && g.bytes)
    g.bytes[r] += (unsigned long long)t.head->sendCount[r] * a.row.rowBytes;
}

#endif
