// Zero-copy push of dispatch into the receivers' outputs: which pairs of ranks do it, where their rows
// belong, and when all are there.
//
//   start  every rank announces to every rank in every dispatch that it takes part, and where its output
//          lies, if that is in a window (sendAnnounces). A pair pushes if both announced the same windows.
//          An announcement implies that the rank's earlier work on the output is done, so it may be written.
//   rows   flat: a source's rows are one range, whose start the announcement has. Expert-major: the receiver
//          tells each source its tokens' first rows (sendRemoteRows); only there does the row cross the
//          link, the receiver copies it to the token's others once `arrivals` says that it is there.
//   end    a block that has sent its last chunk adds to the peers' `dones` (ht_done.cuh).
//
// Words of dispatch e lie in buffer e mod 2. A rank leaves e when it has the announcements of e of all ranks,
// with windows or without, so it announces e + 2 when all have left e. What a source writes after the
// receiver's announcement needs one buffer only.
//
// Memory order: rows are bulk stores; the storer waits for them, the block meets, a system fence, the add.
// The words of announcements and of row numbers are flagged 16-byte stores.
#ifndef TREFOIL_KERNELS_HT_PUSH_CUH
#define TREFOIL_KERNELS_HT_PUSH_CUH

#include "kernels/ht/ht_done.cuh"
#include "kernels/ht/ht_pipe.cuh"

// A block's table of its peers, in shared memory.
struct HtPushTargets {
  char *tokens[EP_HT_MAX_RANKS]; // where rank r's rows from here begin; NULL: through the FIFO
  char *scales[EP_HT_MAX_RANKS];
  int numFifos; // pairs that do not push, the own rank's counted too
};
static_assert(sizeof(HtPushTargets) == HT_PUSH_TARGETS_BYTES, "shared memory");

EP_DEV char *announceAt(const ep_ht_group_t &g, int at, int from, unsigned long long number) {
  return g.peers[at] + g.at.announces + ((number & 1) * g.numRanks + from) * 64;
}
// Of tokens 2 i and 2 i + 1 of rank `at`: their first rows at rank `by`.
EP_DEV char *remoteRowAt(const ep_ht_group_t &g, int at, int by, int i, unsigned long long number) {
  return g.peers[at] + g.at.remoteRows +
         (((number & 1) * g.numRanks + by) * g.at.remoteRowWords + i) * 16;
}
EP_DEV uint32_t *arrivalAt(const ep_ht_group_t &g, int at, int from, int token, int chunk) {
  return (uint32_t *)(g.peers[at] + g.at.arrivals) +
         ((size_t)from * g.maxTokens + token) * g.at.rowChunks + chunk;
}

// Whether this rank's output may be written by its peers. Overflow goes the way of the FIFOs.
EP_DEV bool isOpen(const HtDispatchArgs &a, const HtTables &t) {
  const long long most = a.op.handle.maxRecv;
  return a.op.window.is && !t.head->trapped && !(most && t.head->rowTotal > most);
}
// Rows of an output before those of source r; 0 if peers are told the number of each row in the whole output.
EP_DEV size_t rowsBefore(const HtDispatchArgs &a, const HtTables &t, int r) {
  return a.op.handle.expertMajor ? 0 : (size_t)t.head->recvBase[r];
}

// One warp of the first block.
EP_DEV void sendAnnounces(const HtDispatchArgs &a, const HtTables &t, unsigned long long number) {
  const ep_ht_group_t &g = a.op.group;
  const ep_ht_window_t &w = a.op.window;
  const bool open = isOpen(a, t);
  for (int r = threadIdx.x & 31; r < g.numRanks; r += 32) {
    char *to = announceAt(g, r, g.rank, number);
    if (open) {
      htControl(g).doneBefore[r] = doneBefore(g, g.at.dones, r);
      const size_t row = rowsBefore(a, t, r);
      storeSys(to + 16, packFlagged(w.scalesOffset + row * a.row.scaleBytes, number));
      storeSys(to + 32, packFlagged(w.id, number));
      storeSys(to, packFlagged((w.tokensOffset + row * a.row.tokenBytes) | 1, number));
    } else {
      storeSys(to, packFlagged(0, number));
    }
  }
}

// The first rank of which this dispatch has no announcement yet; -1: all are in it (as missingInput,
// ht_pull.cuh).
EP_DEV int missingAnnounce(const ep_ht_group_t &g) {
  const unsigned long long number = loadVolatile(&htControl(g).numbers[0]) + 1;
  for (int r = 0; r < g.numRanks; r++) {
    if (!isFlagged(loadSys(announceAt(g, g.rank, r, number)), number)) return r;
  }
  return -1;
}

// One thread a rank: whether its announcement comes. Its words are loaded together.
EP_DEV bool waitPeer(const HtDispatchArgs &a, const HtTables &t, int r, unsigned long long number,
                     HtPushTargets &targets) {
  const ep_ht_group_t &g = a.op.group;
  const ep_ht_window_t &w = a.op.window;
  const char *at = announceAt(g, g.rank, r, number);
  const bool open = isOpen(a, t);
  targets.tokens[r] = targets.scales[r] = nullptr;
  Spin spin;
  for (;;) {
    const uint4 tokens = loadSys(at), scales = loadSys(at + 16), id = loadSys(at + 32);
    const bool is = isFlagged(tokens, number), both = open && (tokens.x & 1);
    if (is && (!both || (isFlagged(scales, number) && isFlagged(id, number)))) {
      if (!both || flaggedData(id) != w.id) return true;
      targets.tokens[r] = w.tokens[r] + (flaggedData(tokens) - 1);
      targets.scales[r] = w.scales[r] + flaggedData(scales);
      return true;
    }
    const Awaited wait = {EP_HT_KIND_DISPATCH, EP_WAIT_ANNOUNCE, r, tokens.z, -1};
    if (!htKeepWaiting(g, wait, (unsigned)number, spin)) return false;
  }
}

// All threads of a block, as soon as it starts: false if some rank does not come.
EP_DEV bool waitPeers(const HtDispatchArgs &a, const HtTables &t, unsigned long long number,
                      HtPushTargets &targets) {
  const int R = a.op.group.numRanks, r = threadIdx.x;
  const bool ok = r >= R || waitPeer(a, t, r, number, targets);
  const int gone = __syncthreads_count(!ok);
  const int fifos = __syncthreads_count(r < R && !targets.tokens[r]);
  if (r == 0) targets.numFifos = fifos;
  __syncthreads();
  return gone == 0;
}

// All threads of all blocks, expert-major: every source gets its tokens' first rows here.
EP_DEV void sendRemoteRows(const HtDispatchArgs &a, const HtTables &t, unsigned long long number) {
  const ep_ht_group_t &g = a.op.group;
  if (!isOpen(a, t)) return;
  const int words = (t.head->mostTokens + 1) / 2;
  const long long total = (long long)words * g.numRanks;
  for (long long q = (long long)blockIdx.x * blockDim.x + threadIdx.x; q < total;
       q += (long long)gridDim.x * blockDim.x) {
    const int s = (int)(q / words), i = (int)(q - (long long)s * words);
    if (s == g.rank) continue;
    const unsigned *first = t.first + (size_t)s * g.maxTokens + 2 * i;
    const unsigned next = 2 * i + 1 < g.maxTokens ? first[1] : HT_NOWHERE;
    storeSys(remoteRowAt(g, s, g.rank, i, number),
             packFlagged(first[0] | (unsigned long long)next << 32, number));
  }
}

// What the receiver has announced of an own token's first row; HT_NOWHERE: nothing yet.
EP_DEV unsigned readRemoteRow(const ep_ht_group_t &g, int by, int token,
                              unsigned long long number) {
  const uint4 q = loadSys(remoteRowAt(g, g.rank, by, token >> 1, number));
  return !isFlagged(q, number) ? HT_NOWHERE : token & 1 ? q.y : q.x;
}
static __device__ __noinline__ unsigned waitForRow(const ep_ht_group_t &g, int by, int token,
                                                   unsigned long long number) {
  const Awaited w = {EP_HT_KIND_DISPATCH, EP_WAIT_ROUTING, by, 0, token};
  unsigned long long both = ~0ull;
  waitFlagged(g, remoteRowAt(g, g.rank, by, token >> 1, number), number, w, both);
  return (unsigned)(both >> (token & 1) * 32);
}

EP_DEV bool isPushed(const ep_ht_group_t &g, const HtPushTargets &targets, int r) {
  return r < g.numRanks && r != g.rank && targets.tokens[r];
}
// All threads of a block that will send no more, after they have met.
EP_DEV void sendDone(const ep_ht_group_t &g, const HtPushTargets &targets) {
  if (isPushed(g, targets, threadIdx.x)) addDone(g, g.at.dones, threadIdx.x);
}
// All threads of the last block.
EP_DEV void waitDone(const ep_ht_group_t &g, const HtPushTargets &targets) {
  const int r = threadIdx.x;
  if (!isPushed(g, targets, r)) return;
  const unsigned before = loadVolatile(&htControl(g).doneBefore[r]);
  waitDone(g, g.at.dones, r, before, EP_HT_KIND_DISPATCH, EP_WAIT_ROWS);
}

#endif
