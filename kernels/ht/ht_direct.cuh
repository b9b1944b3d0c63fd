// Dispatch straight into the receivers' outputs: which pairs of ranks do it, where their rows belong, and
// when all are there.
//
//   start  every rank tells every rank in every dispatch that it is in it, and where its output lies, if
//          that is in a window (sayHello). A pair goes direct if both have said so, of the same windows.
//          Who has said it has finished what it did with the output before, so it may be written.
//   slots  flat: a source's rows are one range, whose start the hello tells. Expert-major: the receiver
//          tells each source its tokens' first slots (givePlaces); only there does the row cross the link,
//          the receiver copies it to the token's others once `arrivals` says that it is there.
//   end    a block that has fed its last piece adds to the peers' `dones`; what the blocks of a launch
//          add up to does not depend on their number. The last block of the receiver waits for it.
//
// Words of dispatch e lie in buffer e mod 2. A rank leaves e when it has heard the hellos of e of all ranks,
// with windows or without, so it says e + 2 when all have left e. What a source writes once it has heard the
// receiver's hello needs one buffer only.
//
// Memory order: rows are bulk stores; the storer waits for them, the block meets, a system fence, the add.
// The words of hellos and slots are 16 bytes that say themselves that they are there.
#ifndef TREFOIL_KERNELS_HT_DIRECT_CUH
#define TREFOIL_KERNELS_HT_DIRECT_CUH

#include "kernels/ht/ht_pipe.cuh"
#include "kernels/common/protocol.h"

constexpr int HT_DONE = 65536; // what a launch adds to `dones`: the sum of epLlTick

// What a block knows of its peers, in shared memory.
struct HtPairs {
  char *tokens[EP_HT_MAX_RANKS]; // where rank r's rows from here begin; NULL: through the ring
  char *scales[EP_HT_MAX_RANKS];
  int numRings; // pairs that are not direct, the own rank's counted too
};
static_assert(sizeof(HtPairs) == HT_PAIRS_BYTES, "shared memory");

EP_DEV char *helloAt(const ep_ht_group_t &g, int at, int from, unsigned long long number) {
  return g.peers[at] + g.at.hellos + ((number & 1) * g.numRanks + from) * 64;
}
// Of tokens 2 i and 2 i + 1 of rank `at`: their first slots at rank `by`.
EP_DEV char *placeAt(const ep_ht_group_t &g, int at, int by, int i, unsigned long long number) {
  return g.peers[at] + g.at.places + (((number & 1) * g.numRanks + by) * g.at.placeWords + i) * 16;
}
EP_DEV uint32_t *arrivalAt(const ep_ht_group_t &g, int at, int from, int token, int piece) {
  return (uint32_t *)(g.peers[at] + g.at.arrivals) +
         ((size_t)from * g.maxTokens + token) * g.at.rowPieces + piece;
}
EP_DEV uint32_t *doneAt(const ep_ht_group_t &g, int at, int from) {
  return (uint32_t *)(g.peers[at] + g.at.dones) + from;
}

// Whether this rank's output may be written by its peers. Overflow goes the way of the rings.
EP_DEV bool isOpen(const HtDispatchArgs &a, const HtTables &t) {
  const long long most = a.op.handle.maxRecv;
  return a.op.window.is && !t.head->trapped && !(most && t.head->slotTotal > most);
}
// Bytes from the start of an output to the first row of source r; rows are placed in the whole of it if
// they have slots of their own.
EP_DEV size_t rowsBefore(const HtDispatchArgs &a, const HtTables &t, int r) {
  return a.op.handle.expertMajor ? 0 : (size_t)t.head->recvBase[r];
}

// One warp of the first block.
EP_DEV void sayHello(const HtDispatchArgs &a, const HtTables &t, unsigned long long number) {
  const ep_ht_group_t &g = a.op.group;
  const ep_ht_window_t &w = a.op.window;
  const bool open = isOpen(a, t);
  for (int r = threadIdx.x & 31; r < g.numRanks; r += 32) {
    char *to = helloAt(g, r, g.rank, number);
    if (open) {
      htControl(g).doneBefore[r] = loadAcquire(doneAt(g, g.rank, r));
      const size_t row = rowsBefore(a, t, r);
      storeSys(to + 16, packWord(w.scalesOffset + row * a.row.scaleBytes, number));
      storeSys(to + 32, packWord(w.id, number));
      storeSys(to, packWord((w.tokensOffset + row * a.row.tokenBytes) | 1, number));
    } else {
      storeSys(to, packWord(0, number));
    }
  }
}

// The first rank of which this dispatch has no hello yet; -1: all are in it (as missingInput, ht_pull.cuh).
EP_DEV int missingHello(const ep_ht_group_t &g) {
  const unsigned long long number = htVolatile(&htControl(g).numbers[0]) + 1;
  for (int r = 0; r < g.numRanks; r++) {
    if (!isWordOf(loadSys(helloAt(g, g.rank, r, number)), number)) return r;
  }
  return -1;
}

EP_DEV HtAwaited awaitedHello(int r, unsigned long long number) {
  return HtAwaited{EP_HT_KIND_DISPATCH, EP_LL_PHASE_HELLO, r, (unsigned)number, 0, -1};
}

// One thread a rank: whether its hello comes. Its words are asked for together.
EP_DEV bool hearOne(const HtDispatchArgs &a, const HtTables &t, int r, unsigned long long number,
                    HtPairs &pairs) {
  const ep_ht_group_t &g = a.op.group;
  const ep_ht_window_t &w = a.op.window;
  const char *at = helloAt(g, g.rank, r, number);
  const bool open = isOpen(a, t);
  pairs.tokens[r] = pairs.scales[r] = nullptr;
  HtSpin spin;
  for (;;) {
    const uint4 tokens = loadSys(at), scales = loadSys(at + 16), id = loadSys(at + 32);
    const bool is = isWordOf(tokens, number), both = open && (tokens.x & 1);
    if (is && (!both || (isWordOf(scales, number) && isWordOf(id, number)))) {
      if (!both || wordData(id) != w.id) return true;
      pairs.tokens[r] = w.tokens[r] + (wordData(tokens) - 1);
      pairs.scales[r] = w.scales[r] + wordData(scales);
      return true;
    }
    HtAwaited waited = awaitedHello(r, number);
    waited.received = tokens.z;
    if (!htKeepWaiting(g, waited, spin)) return false;
  }
}

// All threads of a block, as soon as it starts: false if some rank does not come.
EP_DEV bool hearPeers(const HtDispatchArgs &a, const HtTables &t, unsigned long long number,
                      HtPairs &pairs) {
  const int R = a.op.group.numRanks, r = threadIdx.x;
  const bool ok = r >= R || hearOne(a, t, r, number, pairs);
  const int gone = __syncthreads_count(!ok);
  const int rings = __syncthreads_count(r < R && !pairs.tokens[r]);
  if (r == 0) pairs.numRings = rings;
  __syncthreads();
  return gone == 0;
}

// All threads of all blocks, expert-major: every source is told where its tokens' rows belong here.
EP_DEV void givePlaces(const HtDispatchArgs &a, const HtTables &t, unsigned long long number) {
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
    storeSys(placeAt(g, s, g.rank, i, number),
             packWord(first[0] | (unsigned long long)next << 32, number));
  }
}

// What the receiver has said of an own token's slot; HT_NOWHERE: nothing yet.
EP_DEV unsigned lookForPlace(const ep_ht_group_t &g, int by, int token, unsigned long long number) {
  const uint4 q = loadSys(placeAt(g, g.rank, by, token >> 1, number));
  return !isWordOf(q, number) ? HT_NOWHERE : token & 1 ? q.y : q.x;
}
static __device__ __noinline__ unsigned awaitPlace(const ep_ht_group_t &g, int by, int token,
                                                   unsigned long long number) {
  const HtAwaited w = {EP_HT_KIND_DISPATCH, EP_LL_PHASE_ROUTING, by, (unsigned)number, 0, token};
  unsigned long long both = ~0ull;
  takeWord(g, placeAt(g, g.rank, by, token >> 1, number), number, w, both);
  return (unsigned)(both >> (token & 1) * 32);
}

// All threads of a block that will feed no more, after they have met.
EP_DEV void tellDone(const ep_ht_group_t &g, const HtPairs &pairs) {
  const int r = threadIdx.x;
  if (r >= g.numRanks || r == g.rank || !pairs.tokens[r]) return;
  __threadfence_system();
  addRelaxed(doneAt(g, r, g.rank), (uint32_t)epLlTick(blockIdx.x, gridDim.x));
}

// All threads of the last block.
EP_DEV void awaitDone(const ep_ht_group_t &g, const HtPairs &pairs) {
  const int r = threadIdx.x;
  if (r >= g.numRanks || r == g.rank || !pairs.tokens[r]) return;
  const unsigned before = htVolatile(&htControl(g).doneBefore[r]);
  HtSpin spin;
  for (;;) {
    const unsigned n = loadAcquire(doneAt(g, g.rank, r)) - before;
    if (n == HT_DONE) return;
    const HtAwaited w = {EP_HT_KIND_DISPATCH, EP_LL_PHASE_ROWS, r, HT_DONE, n, -1};
    if (!htKeepWaiting(g, w, spin)) return;
  }
}

#endif
