// Zero-copy push of dispatch into the receivers' outputs (pairs: ht_pairs.cuh): where rows belong, and when
// they are there.
//
//   flat          a source's rows are one range, whose start the announcement has.
//   expert-major  the receiver sends each source its tokens' first rows (sendRemoteRows). A row crosses the
//                 link to the first only; once its flag in `arrivals` is raised, the receiver copies it to
//                 the token's others.
//
// Memory order: rows are bulk stores; the storer waits for them, a block barrier, a system fence, the add.
// The words of row numbers are flagged 16-byte stores.
#ifndef TREFOIL_KERNELS_HT_PUSH_CUH
#define TREFOIL_KERNELS_HT_PUSH_CUH

#include "kernels/ht/ht_pairs.cuh"

// Of tokens 2 i and 2 i + 1 of rank `at`: their first rows at rank `by`.
EP_DEV char *remoteRowAt(const ep_ht_group_t &g, int at, int by, int i) {
  return g.peers[at] + g.at.remoteRows + ((size_t)by * g.at.remoteRowWords + i) * 16;
}
EP_DEV uint32_t *arrivalAt(const ep_ht_group_t &g, int at, int from, int token, int chunk) {
  return (uint32_t *)(g.peers[at] + g.at.arrivals) +
         ((size_t)from * g.maxTokens + token) * g.at.rowChunks + chunk;
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
    storeSys(remoteRowAt(g, s, g.rank, i),
             packFlagged(first[0] | (unsigned long long)next << 32, number));
  }
}

// What the receiver has announced of an own token's first row; HT_NOWHERE: nothing yet.
EP_DEV unsigned readRemoteRow(const ep_ht_group_t &g, int by, int token,
                              unsigned long long number) {
  const uint4 q = loadSys(remoteRowAt(g, g.rank, by, token >> 1));
  return !isFlagged(q, number) ? HT_NOWHERE : token & 1 ? q.y : q.x;
}
static __device__ __noinline__ unsigned waitForRow(const ep_ht_group_t &g, int by, int token,
                                                   unsigned long long number) {
  const Awaited w = {EP_HT_KIND_DISPATCH, EP_WAIT_ROUTING, by, 0, token};
  unsigned long long both = ~0ull;
  waitFlagged(g, remoteRowAt(g, g.rank, by, token >> 1), number, w, both);
  return (unsigned)(both >> (token & 1) * 32);
}

#endif
