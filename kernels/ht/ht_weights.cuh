// Weights and ids of a dispatch in the caller's outputs, and, of pairs without FIFOs (ht_pairs.cuh), their
// way there: flagged words of two weights, sent by warps that do nothing else as soon as the peers have
// announced, and written by the receiver's while rows are still under way.
#ifndef TREFOIL_KERNELS_HT_WEIGHTS_CUH
#define TREFOIL_KERNELS_HT_WEIGHTS_CUH

#include "kernels/ht/ht_pairs.cuh"

// Flat: an entry of row `row`.
EP_DEV void giveFlat(const HtDispatchArgs &a, long long row, int entry, float weight) {
  const ep_ht_group_t &g = a.op.group;
  const long long at = row * a.op.handle.numTopk + columnOf(entry);
  const int expert = expertOf(entry);
  a.op.outWeights[at] = expert >= 0 ? weight : 0.0f;
  a.op.outIdx[at] = expert >= 0 ? (a.op.globalIds ? g.rank * g.numLocal : 0) + expert : -1;
}

// Weights 0 and ids -1 past the rows that arrived, as far as the tensor goes. i: of `step` threads.
EP_DEV void clearTail(const HtDispatchArgs &a, const HtTables &t, long long i, long long step) {
  const ep_ht_dispatch_t &o = a.op;
  if (!o.outWeights || t.head->trapped) return;
  const long long per = o.handle.expertMajor ? 1 : o.handle.numTopk;
  const long long rows = o.handle.maxRecv ? min((long long)o.topkRows, (long long)o.handle.maxRecv)
                                          : (long long)o.topkRows;
  for (i += t.head->numRows * per; i < rows * per; i += step) {
    o.outWeights[i] = 0.0f;
    if (!o.handle.expertMajor) o.outIdx[i] = -1;
  }
}

// One thread, if the rank is trapped by maxRecv (any other trap is reported by the caller).
EP_DEV void recordTrap(const ep_ht_group_t &g, const HtTables &t) {
  volatile ep_ht_status_t *status = g.status;
  if (!status || t.head->trapped != 1) return;
  status->neededRows = t.head->rowTotal;
  __threadfence_system();
  status->traps = status->traps + 1;
}

// Weights 2 j and 2 j + 1 of a token of rank `from`.
EP_DEV char *weightsAt(const ep_ht_group_t &g, int at, int from, int token, int j) {
  return g.peers[at] + g.at.weights +
         (((size_t)from * g.maxTokens + token) * g.at.weightWords + j) * 16;
}
EP_DEV unsigned long long ownWeights(const HtDispatchArgs &a, int token, int j) {
  const int K = a.op.handle.numTopk;
  const float *w = a.op.weights + (size_t)token * K + 2 * j;
  const unsigned next = 2 * j + 1 < K ? __float_as_uint(w[1]) : 0;
  return __float_as_uint(w[0]) | (unsigned long long)next << 32;
}

// A thread among `step` of them, of all blocks.
struct HtWeights {
  const HtDispatchArgs &a;
  const HtTables &t;
  const HtPairs &pairs;
  unsigned long long number;
  long long i, step;

  // A flat dispatch that pushes has no receivers for the own rank's.
  EP_DEV bool ownByReceivers() const { return a.op.handle.expertMajor || a.op.input.is; }
  EP_DEV int words() const { return (a.op.handle.numTopk + 1) / 2; }

  EP_DEV void send() const {
    const ep_ht_group_t &g = a.op.group;
    const int per = words();
    const long long total = (long long)t.head->numTokens * per;
    for (long long q = i; q < total; q += step) {
      const int token = (int)(q / per), j = (int)(q - (long long)token * per);
      const uint4 word = packFlagged(ownWeights(a, token, j), number);
      const int2 *dests = t.dests + (size_t)token * t.width;
      for (int n = 0; n < t.width; n++) {
        const int r = dests[n].x;
        if (r < 0) break;
        if (r != g.rank && pairs.tokens[r]) storeSys(weightsAt(g, r, g.rank, token, j), word);
      }
    }
  }

  // A word to come: of which token, and where the token is among its source's.
  struct Due {
    int source, token, j, index;
    uint4 word;
  };
  EP_DEV Due due(long long q, long long total) const {
    const ep_ht_group_t &g = a.op.group;
    const int per = words();
    const long long ofSource = (long long)t.head->mostTokens * per;
    Due d = {0, 0, 0, -1, make_uint4(0, 0, 0, 0)};
    if (q >= total) return d;
    const int turn = (int)(q / ofSource), rest = (int)(q - turn * ofSource);
    const int s = g.rank - turn;
    d.source = s < 0 ? s + g.numRanks : s;
    d.token = rest / per;
    d.j = rest - d.token * per;
    if (pairs.tokens[d.source] && !(ownByReceivers() && d.source == g.rank)) {
      d.index = t.index[(size_t)d.source * g.maxTokens + d.token];
    }
    return d;
  }
  EP_DEV void look(Due &d) const {
    const ep_ht_group_t &g = a.op.group;
    if (d.index < 0) return;
    d.word = d.source == g.rank ? packFlagged(ownWeights(a, d.token, d.j), number)
                                : loadSys(weightsAt(g, g.rank, d.source, d.token, d.j));
  }
  EP_DEV bool write(const Due &d) const {
    const ep_ht_group_t &g = a.op.group;
    if (d.index < 0) return true;
    unsigned long long both = flaggedData(d.word);
    if (!isFlagged(d.word, number)) {
      const Awaited w = {EP_HT_KIND_DISPATCH, EP_WAIT_WEIGHTS, d.source, 0, d.token};
      if (!waitFlagged(g, weightsAt(g, g.rank, d.source, d.token, d.j), number, w, both))
        return false;
    }
    const int K = a.op.handle.numTopk;
    const int *here = t.entries + ((size_t)d.source * g.maxTokens + d.token) * K;
    for (int k = 2 * d.j; k < min(2 * d.j + 2, K); k++) {
      const float weight = __uint_as_float((unsigned)(both >> (k & 1) * 32));
      if (!a.op.handle.expertMajor) {
        giveFlat(a, t.head->recvBase[d.source] + d.index, here[k], weight);
      } else if (here[k] >= 0) {
        a.op.outWeights[here[k]] = weight;
      }
    }
    return true;
  }
  // Four words at a time, so that their loads are all under way before the first is looked at.
  EP_DEV void receive() const {
    const long long total = (long long)t.head->mostTokens * words() * a.op.group.numRanks;
    for (long long q = i; q < total; q += 4 * step) {
      Due d[4];
#pragma unroll
      for (int u = 0; u < 4; u++) d[u] = due(q + u * step, total);
#pragma unroll
      for (int u = 0; u < 4; u++) look(d[u]);
#pragma unroll
      for (int u = 0; u < 4; u++) {
        if (!write(d[u])) return;
      }
    }
  }
};

// All threads of the warps that a dispatch with windows has for this.
EP_DEV void passWeights(const HtDispatchArgs &a, const HtTables &t, const HtPairs &pairs,
                        unsigned long long number, int firstThread) {
  const int each = blockDim.x - firstThread;
  const HtWeights w = {a,
                       t,
                       pairs,
                       number,
                       (long long)blockIdx.x * each + threadIdx.x - firstThread,
                       (long long)gridDim.x * each};
  clearTail(a, t, w.i, w.step);
  if (a.op.weights) w.send();
  if (a.op.outWeights) w.receive();
}

#endif
