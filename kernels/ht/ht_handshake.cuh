// The handshake of zero-copy operations: dispatches that push or pull (ht_pairs.cuh), flat combines that pull
// (ht_pull.cuh). KIND: EP_HT_KIND_DISPATCH or EP_HT_KIND_COMBINE.
//
//   announce  every rank announces to every rank, in every dispatch and flat combine, that it takes part, and
//             with a tag and up to three words of data that it can do without FIFOs. Two ranks that have
//             announced the same tag do. Such an announcement implies that the rank's earlier work on
//             the memory in question is done.
//   done      a rank has a count for each peer. Each block of the peer's launch that no longer uses this
//             rank's memory adds its part of EP_BLOCKS_DONE; the sum does not depend on the number of
//             blocks. Nothing is reset: a rank looks the count up when it announces the operation,
//             before any peer can add to it, and its last block waits until it has grown by
//             EP_BLOCKS_DONE.
//
// Words of all operations lie in one place. A combine of a rank without a tag waits for no announcement: that
// rank may be operations ahead. A dispatch ends with all announcements: it names a rank that does not come
// even if no rows are due from it. A word with a greater number than this operation's means that its
// writer had no tag in it, or another one: if two ranks agree, each waits for the other's blocks before
// it leaves.
//
// Memory order: a word is a flagged 16-byte store.
#ifndef TREFOIL_KERNELS_HT_HANDSHAKE_CUH
#define TREFOIL_KERNELS_HT_HANDSHAKE_CUH

#include "kernels/common/bulk.cuh"
#include "kernels/common/protocol.h"
#include "kernels/ht/ht_control.cuh"

// ----------------------------------------------------------------------------------------- announce

template <unsigned KIND> EP_DEV char *announceAt(const ep_ht_group_t &g, int at, int from) {
  return g.peers[at] + g.at.announces[indexOfKind(KIND)] + from * 64;
}

// The count of blocks of rank `by` at rank `at`.
template <unsigned KIND> EP_DEV uint32_t *doneAt(const ep_ht_group_t &g, int at, int by) {
  return (uint32_t *)(g.peers[at] + g.at.dones[indexOfKind(KIND)]) + by;
}
EP_DEV unsigned &doneBefore(const ep_ht_group_t &g, unsigned kind, int by) {
  return htControl(g).doneBefore[indexOfKind(kind)][by];
}

// One thread a rank r: this rank takes part, without a tag.
template <unsigned KIND>
EP_DEV void sendAnnounce(const ep_ht_group_t &g, int r, unsigned long long number) {
  storeSys(announceAt<KIND>(g, r, g.rank), packFlagged(0, number));
}
// The same with a tag, in the low bits of data[0], which is a multiple of 16.
template <unsigned KIND, int WORDS>
EP_DEV void sendAnnounce(const ep_ht_group_t &g, int r, unsigned long long number, unsigned tag,
                         const unsigned long long (&data)[WORDS]) {
  doneBefore(g, KIND, r) = loadAcquire(doneAt<KIND>(g, g.rank, r));
  char *to = announceAt<KIND>(g, r, g.rank);
#pragma unroll
  for (int i = WORDS - 1; i > 0; i--) storeSys(to + i * 16, packFlagged(data[i], number));
  storeSys(to, packFlagged(data[0] | tag, number));
}

// Of n ranks from `first`, one that has not announced the running operation yet; -1: none.
template <unsigned KIND> EP_DEV int missingAnnounce(const ep_ht_group_t &g, int first, int n) {
  const unsigned long long number = loadVolatile(&htControl(g).numbers[indexOfKind(KIND)]) + 1;
  return firstMissing(first, n, number, [&](int r) { return announceAt<KIND>(g, g.rank, r); });
}

// One thread: waits until rank r has announced the operation, with a tag or without; seen: its first word, if
// it was loaded before.
template <unsigned KIND>
EP_DEV void waitAnnounce(const ep_ht_group_t &g, int r, unsigned long long number, uint4 seen) {
  Spin spin;
  while (flagOf(seen) < number) {
    seen = loadSys(announceAt<KIND>(g, g.rank, r));
    const Awaited w = {KIND, EP_WAIT_ANNOUNCE, r, seen.z, -1};
    if (!htKeepWaiting(g, w, (unsigned)number, spin)) return;
  }
}

enum HtAgreed { HT_ABSENT, HT_BY_FIFOS, HT_ZERO_COPY };

// One thread a rank r: whether it has announced `tag` (0: this rank has none), and with which data. Its words
// are loaded together.
template <unsigned KIND, int WORDS>
EP_DEV HtAgreed waitAnnounce(const ep_ht_group_t &g, int r, unsigned long long number, unsigned tag,
                             unsigned long long (&data)[WORDS]) {
  const char *at = announceAt<KIND>(g, g.rank, r);
  Spin spin;
  for (;;) {
    uint4 words[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; i++) words[i] = loadSys(at + i * 16);
    const unsigned long long flag = flagOf(words[0]);
    if (flag > number || (flag == number && !(words[0].x & tag))) return HT_BY_FIFOS;
    bool all = flag == number;
#pragma unroll
    for (int i = 1; i < WORDS; i++) all = all && isFlagged(words[i], number);
    if (all) {
#pragma unroll
      for (int i = 0; i < WORDS; i++) data[i] = flaggedData(words[i]);
      data[0] -= tag;
      return HT_ZERO_COPY;
    }
    const Awaited w = {KIND, EP_WAIT_ANNOUNCE, r, words[0].z, -1};
    if (!htKeepWaiting(g, w, (unsigned)number, spin)) return HT_ABSENT;
  }
}

// All threads of a block, as soon as it starts; wait(r): one thread a rank. False if some rank does not come.
// numFifos: ranks with which FIFOs are used. PULLS: what the peers wrote before they announced is read.
template <bool PULLS, class Wait>
EP_DEV bool waitAnnounces(const ep_ht_group_t &g, int &numFifos, Wait wait) {
  const int r = threadIdx.x;
  const HtAgreed agreed = r < g.numRanks ? wait(r) : HT_ZERO_COPY;
  if (PULLS && r < g.numRanks) __threadfence_system();
  const int gone = __syncthreads_count(agreed == HT_ABSENT);
  const int fifos = __syncthreads_count(agreed == HT_BY_FIFOS);
  if (r == 0) numFifos = fifos;
  __syncthreads();
  return gone == 0;
}

// --------------------------------------------------------------------------------------------- done

// One thread of every block, after a barrier of the block: the block no longer uses the memory of rank r.
template <unsigned KIND> EP_DEV void sendDone(const ep_ht_group_t &g, int r) {
  __threadfence_system();
  addRelaxed(doneAt<KIND>(g, r, g.rank), (uint32_t)epBlockTick(blockIdx.x, gridDim.x));
}

// One thread of the last block: until rank r no longer uses this rank's memory; false: gave up.
template <unsigned KIND>
EP_DEV bool waitDone(const ep_ht_group_t &g, int r, ep_wait_phase_t phase) {
  const unsigned before = loadVolatile(&doneBefore(g, KIND, r));
  Spin spin;
  for (;;) {
    const unsigned n = loadAcquire(doneAt<KIND>(g, g.rank, r)) - before;
    if (n == EP_BLOCKS_DONE) return true;
    if (!htKeepWaiting(g, Awaited{KIND, phase, r, n, -1}, EP_BLOCKS_DONE, spin)) return false;
  }
}

#endif
