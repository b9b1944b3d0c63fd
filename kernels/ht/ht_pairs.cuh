// Zero-copy dispatch: which pairs of ranks do without FIFOs, and when they are done (ht_handshake.cuh).
//
//   start  a rank announces what of the dispatch lies in a window (sendAnnounces): its output, into which
//          peers may push, or its input, out of which they may pull. A pair pushes if both have announced
//          outputs in the same windows (ht_push.cuh), pulls if both have announced inputs, else uses its
//          FIFOs. An announcement implies that the rank's earlier work on the output is done and that the
//          input is ready.
//   pull   the receiver loads each row where it lies, and stores it to all of the token's rows.
//   end    when the peers' last blocks have sent (push), or read (pull), their last chunks, the rank's output
//          is complete, its input may be overwritten.
//
// Memory order: what wrote an input has ended before the launch; a system fence stands before the word,
// another behind it at the reader, which loads by asynchronous copies. A word is a flagged 16-byte store.
#ifndef TREFOIL_KERNELS_HT_PAIRS_CUH
#define TREFOIL_KERNELS_HT_PAIRS_CUH

#include "kernels/ht/ht_handshake.cuh"
#include "kernels/ht/ht_pipe.cuh"

// A block's table of its peers, in shared memory.
struct HtPairs {
  char *tokens
      [EP_HT_MAX_RANKS]; // push: start of rank r's rows from here; pull: its input. NULL: FIFO
  char *scales[EP_HT_MAX_RANKS];
  int numFifos; // pairs that use FIFOs; the own rank's counted too
};
static_assert(sizeof(HtPairs) == HT_PAIRS_BYTES, "shared memory");

// Whether this rank does without FIFOs where a peer does. Overflow goes the way of the FIFOs.
EP_DEV bool isOpen(const HtDispatchArgs &a, const HtTables &t) {
  const long long most = a.op.handle.maxRecv;
  return !t.head->trapped && !(most && t.head->rowTotal > most);
}
// Rows of an output before those of source r; 0 if peers get each row's number in the whole output.
EP_DEV size_t rowsBefore(const HtDispatchArgs &a, const HtTables &t, int r) {
  return a.op.handle.expertMajor ? 0 : (size_t)t.head->recvBase[r];
}

// The tag of an announcement.
EP_DEV unsigned tagOf(HtWay way) {
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
    if (!open) {
      sendAnnounce<EP_HT_KIND_DISPATCH>(g, r, number);
    } else if (WAY == HT_PUSH) {
      const size_t row = rowsBefore(a, t, r);
      sendAnnounce<EP_HT_KIND_DISPATCH, 3>(
          g, r, number, tagOf(WAY),
          {w.tokensOffset + row * a.row.tokenBytes, w.scalesOffset + row * a.row.scaleBytes, w.id});
    } else {
      sendAnnounce<EP_HT_KIND_DISPATCH, 2>(
          g, r, number, tagOf(WAY),
          {(unsigned long long)a.op.input.tokens, (unsigned long long)a.op.input.scales});
    }
  }
}

// One thread a rank: how the pair exchanges rows, once its announcement is here.
template <HtWay WAY>
EP_DEV HtAgreed waitPeer(const HtDispatchArgs &a, const HtTables &t, int r,
                         unsigned long long number, HtPairs &pairs) {
  const ep_ht_group_t &g = a.op.group;
  const ep_ht_window_t &w = a.op.window;
  constexpr bool PULLS = WAY == HT_PULL;
  unsigned long long data[PULLS ? 2 : 3];
  pairs.tokens[r] = pairs.scales[r] = nullptr;
  const HtAgreed agreed =
      waitAnnounce<EP_HT_KIND_DISPATCH>(g, r, number, isOpen(a, t) ? tagOf(WAY) : 0, data);
  if (agreed != HT_ZERO_COPY) return agreed;
  if constexpr (!PULLS) {
    if (data[2] != w.id) return HT_BY_FIFOS;
  }
  pairs.tokens[r] = (PULLS ? g.peers[r] : w.tokens[r]) + (long long)data[0];
  pairs.scales[r] = (PULLS ? g.peers[r] : w.scales[r]) + (long long)data[1];
  return agreed;
}

// All threads of a block, as soon as it starts: false if some rank does not come.
template <HtWay WAY>
EP_DEV bool waitPeers(const HtDispatchArgs &a, const HtTables &t, unsigned long long number,
                      HtPairs &pairs) {
  return waitAnnounces<WAY == HT_PULL>(
      a.op.group, pairs.numFifos, [&](int r) { return waitPeer<WAY>(a, t, r, number, pairs); });
}

EP_DEV bool isZeroCopy(const ep_ht_group_t &g, const HtPairs &pairs, int r) {
  return r < g.numRanks && r != g.rank && pairs.tokens[r];
}
// All threads of a block that no longer uses its peers' memory, after a barrier.
EP_DEV void sendDones(const ep_ht_group_t &g, const HtPairs &pairs) {
  if (isZeroCopy(g, pairs, threadIdx.x)) sendDone<EP_HT_KIND_DISPATCH>(g, threadIdx.x);
}
// All threads of the last block.
template <HtWay WAY>
EP_DEV void waitDones(const HtDispatchArgs &a, const HtTables &t, const HtPairs &pairs) {
  const ep_ht_group_t &g = a.op.group;
  const int r = threadIdx.x;
  if (!isZeroCopy(g, pairs, r)) return;
  constexpr ep_wait_phase_t PHASE = WAY == HT_PULL ? EP_WAIT_READ : EP_WAIT_ROWS;
  if (!waitDone<EP_HT_KIND_DISPATCH>(g, r, PHASE)) return;
  // Each rank counts what it sends, so the owner counts what has been read.
  if (WAY == HT_PULL && g.bytes)
    g.bytes[r] += (unsigned long long)t.head->sendCount[r] * a.row.rowBytes;
}

#endif
