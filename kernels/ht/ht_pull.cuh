// Zero-copy pull of a flat combine: rows are read where the experts have left them, by the rank that sums
// them, instead of going through its FIFO (ht_handshake.cuh).
//
//   start  a rank announces whether its input is in a window, and if so where each peer's tokens begin in it
//          and how many of them there are (announceInput). Two ranks that have both announced a window read
//          each other's rows; an announcement implies that the rows are ready.
//   end    when the peers' last blocks have read their last chunks the caller may overwrite its input.
//   gradients of weights travel as flagged words of two, at once.
//
// Memory order: what wrote the rows has ended before the launch; a system fence stands before the word,
// another behind it at the reader, which loads by asynchronous copies.
#ifndef TREFOIL_KERNELS_HT_PULL_CUH
#define TREFOIL_KERNELS_HT_PULL_CUH

#include "kernels/ht/ht_handshake.cuh"
#include "kernels/ht/ht_pipe.cuh"

// A block's table of its peers, in shared memory.
struct HtPullSources {
  const char *rows[EP_HT_MAX_RANKS]; // where this rank's rows begin at rank r; NULL: in the FIFO
  int count[EP_HT_MAX_RANKS];        // how many of them there are
  int numFifos;                      // peers whose rows come through FIFOs
};
static_assert(sizeof(HtPullSources) == HT_PULL_SOURCES_BYTES, "shared memory");

// Row `index` of this rank's at a peer.
EP_DEV const char *pulledAt(const HtRow &row, const HtPullSources &sources, int from, int index,
                            int chunk) {
  return sources.rows[from] + (size_t)index * row.rowBytes + chunk * row.chunkBytes;
}

// Gradients of weights 2 j and 2 j + 1 of a token of rank `at`, by the rank of their experts.
EP_DEV char *gradientsAt(const ep_ht_group_t &g, int at, int by, int token, int j) {
  return g.peers[at] + g.at.gradients +
         (((size_t)by * g.maxTokens + token) * g.at.weightWords + j) * 16;
}

// Rows of rank r's tokens that are here.
EP_DEV int rowsFor(const HtTables &t, int r) {
  const long long here = t.head->numRows - t.head->recvBase[r];
  return t.head->trapped ? 0 : (int)max(0ll, min(here, (long long)t.head->recvCount[r]));
}

// One warp of the first block.
template <bool PULLS>
EP_DEV void announceInput(const HtCombineArgs &a, const HtTables &t, unsigned long long number) {
  const ep_ht_group_t &g = a.op.group;
  if (PULLS) __threadfence_system();
  for (int r = threadIdx.x & 31; r < g.numRanks; r += 32) {
    if (PULLS) {
      const long long first = a.op.input.tokens + t.head->recvBase[r] * a.row.rowBytes;
      sendAnnounce<EP_HT_KIND_COMBINE, 2>(
          g, r, number, 1, {(unsigned long long)first, (unsigned long long)rowsFor(t, r)});
    } else {
      sendAnnounce<EP_HT_KIND_COMBINE>(g, r, number);
    }
  }
}

// One thread a rank: how the pair exchanges rows, once its announcement is here.
EP_DEV HtAgreed waitInput(const ep_ht_group_t &g, int r, unsigned long long number,
                          HtPullSources &sources) {
  unsigned long long data[2];
  const HtAgreed agreed = waitAnnounce<EP_HT_KIND_COMBINE>(g, r, number, 1, data);
  const bool pulls = agreed == HT_ZERO_COPY;
  sources.rows[r] = pulls ? g.peers[r] + (long long)data[0] : nullptr;
  sources.count[r] = pulls ? (int)data[1] : 0;
  return agreed;
}

// All threads of a block, as soon as it starts: false if some rank does not come.
EP_DEV bool waitInputs(const HtCombineArgs &a, unsigned long long number, HtPullSources &sources) {
  return waitAnnounces<true>(a.op.group, sources.numFifos,
                             [&](int r) { return waitInput(a.op.group, r, number, sources); });
}

// ---------------------------------------------------------------------------------------- gradients

// The gradient of the weight of a token's expert, by its entry; 0 if it is none here. flatRow -1:
// expert-major, where entries are rows.
EP_DEV float weightOfRow(const HtCombineArgs &a, int entry, long long flatRow) {
  if (entry < 0) return 0.0f;
  const long long at = flatRow < 0 ? entry : flatRow * a.op.handle.numTopk + columnOf(entry);
  return a.op.rowWeights[at];
}

// All threads of all blocks: of every token that is summed up by a rank that reads here.
EP_DEV void sendGradients(const HtCombineArgs &a, const HtTables &t, const HtPullSources &sources,
                          unsigned long long number) {
  const ep_ht_group_t &g = a.op.group;
  const int K = a.op.handle.numTopk, per = (K + 1) / 2;
  const long long ofRank = (long long)t.head->mostTokens * per, total = ofRank * g.numRanks;
  for (long long q = (long long)blockIdx.x * blockDim.x + threadIdx.x; q < total;
       q += (long long)gridDim.x * blockDim.x) {
    const int r = (int)(q / ofRank), rest = (int)(q - r * ofRank);
    const int token = rest / per, k = (rest - token * per) * 2;
    if (r == g.rank || !sources.rows[r]) continue;
    const size_t at = (size_t)r * g.maxTokens + token;
    const int index = t.index[at];
    if (index < 0 || index >= rowsFor(t, r)) continue;
    const int *here = t.entries + at * K;
    const long long row = t.head->recvBase[r] + index;
    const unsigned lo = __float_as_uint(weightOfRow(a, here[k], row));
    const unsigned hi = k + 1 < K ? __float_as_uint(weightOfRow(a, here[k + 1], row)) : 0;
    storeSys(gradientsAt(g, r, g.rank, token, k / 2),
             packFlagged(lo | (unsigned long long)hi << 32, number));
  }
}

// What lies where an own token's k-th gradient comes from the rank of its expert, and its half of that.
EP_DEV uint4 readGradient(const ep_ht_group_t &g, int rank, int token, int k) {
  return loadSys(gradientsAt(g, g.rank, rank, token, k / 2));
}
EP_DEV float gradientOf(unsigned long long both, int k) {
  return __uint_as_float((unsigned)(both >> (k & 1) * 32));
}
// The same when it has come; 0 if it does not.
EP_DEV float waitGradient(const ep_ht_group_t &g, uint4 seen, int rank, int token, int k,
                          unsigned long long number) {
  if (isFlagged(seen, number)) return gradientOf(flaggedData(seen), k);
  const Awaited w = {EP_HT_KIND_COMBINE, EP_WAIT_WEIGHTS, rank, 0, token};
  unsigned long long both = 0;
  waitFlagged(g, gradientsAt(g, g.rank, rank, token, k / 2), number, w, both);
  return gradientOf(both, k);
}

// ---------------------------------------------------------------------------------------------- end

EP_DEV bool isPulled(const ep_ht_group_t &g, const HtPullSources &sources, int r) {
  return r < g.numRanks && r != g.rank && sources.rows[r];
}
// All threads of a block that will read no more, after its pipeline.
EP_DEV void sendReadDones(const ep_ht_group_t &g, const HtPullSources &sources) {
  __syncthreads();
  if (isPulled(g, sources, threadIdx.x)) sendDone<EP_HT_KIND_COMBINE>(g, threadIdx.x);
}
// One thread a rank, of the last block.
EP_DEV void waitReadDones(const HtCombineArgs &a, const HtTables &t, const HtPullSources &sources) {
  const ep_ht_group_t &g = a.op.group;
  const int r = threadIdx.x;
  if (!isPulled(g, sources, r) || !waitDone<EP_HT_KIND_COMBINE>(g, r, EP_WAIT_READ)) return;
  // Bytes are counted by the rank whose memory is read: it knows the count from its announcement.
  if (g.bytes) g.bytes[g.numRanks + r] += (unsigned long long)rowsFor(t, r) * a.row.rowBytes;
}

#endif
