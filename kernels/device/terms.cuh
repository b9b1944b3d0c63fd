// The receiving half of every combine: out[t] = sum of terms, each a row in the exchange memory or, for
// own rows, in the caller's tensor.
//
// The warp lists a token's terms in the order of the sum, waits for all of a group of eight at once
// (one after the other would cost a round trip each, the first loads being stale by then), and adds. A
// term whose rank was given up is left out.
#ifndef TREFOIL_KERNELS_DEVICE_TERMS_CUH
#define TREFOIL_KERNELS_DEVICE_TERMS_CUH

#include "kernels/device/args.cuh"

// How terms follow from the routing: EXACT by ascending k; RANKS and PARTIAL one a rank, in the slot of
// the k that names the rank first, RANKS in the order of k, PARTIAL by ascending rank.
struct Term {
  int where; // own row, or ~(rank << 8 | k)
  float weight;
};

constexpr int AT_ONCE = 8;

template <Elem T, ep_ll_sum_t SUM> struct TermSum {
  const CombineArgs &a;
  const ep_ll_group_t &g;
  const Op op;
  const unsigned long long live; // ranks that took part in the dispatch and are active now
  const int lane;
  Term *terms; // the warp's, [K]

  // All lanes: ranks of the token, for the order of PARTIAL.
  EP_DEV unsigned long long ranksOf(int t) const {
    return SUM == EP_LL_SUM_PARTIAL ? ranksOfToken(g, a.op.handle, t, lane) & live : 0;
  }

  // All lanes: lists the terms of token t, returns how many.
  EP_DEV int list(int t) {
    const ep_ll_handle_t &h = a.op.handle;
    const int K = h.numTopk;
    const int *table =
        rowOfTable(g, h) + ((size_t)g.rank * g.maxTokens + t) * (h.rankMajor ? 1 : K);
    const unsigned long long all = ranksOf(t);
    unsigned long long seen = 0;
    int n = 0;
    __syncwarp();
#pragma unroll 1
    for (int k0 = 0; k0 < K; k0 += 32) {
      const int k = k0 + lane, e = k < K ? expertAt(h, t, k) : -1;
      const int own = k < K ? table[h.rankMajor ? 0 : k] : -1;
      const float w = SUM == EP_LL_SUM_EXACT && k < K ? a.op.weights[(size_t)t * K + k] : 1.0f;
      const int rank = e < 0 ? -1 : rankOf(g, e);
      bool is = rank >= 0 && (live >> rank & 1);
      if (SUM != EP_LL_SUM_EXACT) {
        const unsigned same = __match_any_sync(FULL_WARP, rank);
        is = is && __ffs(same) - 1 == lane && !(seen >> rank & 1);
        if (K > 32) seen |= warpRankSet(rank, g.numRanks);
      }
      const unsigned m = __ballot_sync(FULL_WARP, is);
      if (is) {
        const int at = SUM == EP_LL_SUM_PARTIAL ? __popcll(all & ((1ull << rank) - 1))
                                                : n + __popc(m & ((1u << lane) - 1));
        const bool inPlace = rank == g.rank && SUM != EP_LL_SUM_PARTIAL;
        terms[at] = Term{inPlace ? own : ~(rank << 8 | k), w};
      }
      n += __popc(m);
    }
    __syncwarp();
    return n;
  }

  EP_DEV uint4 load(int where, int t, const Piece &p, int s) const {
    if (where >= 0) {
      return readPiece((const char *)a.op.tokens + (size_t)where * a.op.rowBytes, p, lane, op.mark);
    }
    return loadStep(combineSlot(g, a.op.handle.numTopk, g.rank, t, ~where & 255, op.buf), p, s,
                    lane);
  }

  // All lanes: loads terms [i, i + n) and waits for them; returns those that will not come, as bits.
  EP_DEV unsigned take(uint4 (&v)[AT_ONCE], int i, int n, int t, const Piece &p, int s) {
    unsigned need = (1u << n) - 1, gone = 0;
    Spin spin;
    for (;;) {
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        if (need >> j & 1) v[j] = load(terms[i + j].where, t, p, s);
      }
      unsigned missing = 0;
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        if (need >> j & 1 && isMissing(v[j], p, lane, op.mark)) missing |= 1u << j;
      }
      need = __reduce_or_sync(FULL_WARP, missing);
      if (!need) return gone;
      const int q = __ffs(need) - 1;
      const Awaited w = {EP_LL_COMBINE, EP_LL_PHASE_ROWS, ~terms[i + q].where >> 8, 0u, t};
      if (!keepWarpWaiting(g, op, w, spin, lane)) {
        gone |= 1u << q;
        need &= need - 1;
        if (!need) return gone;
      }
    }
  }

  // All lanes: one step of the result of token t with n listed terms.
  EP_DEV void step(int t, int n, int s) {
    const Piece p = pieceOf(a.wire, s, lane);
    Sum<T> sum;
    uint4 only = make_uint4(0, 0, 0, 0);
    int added = 0;
    sum.clear();
#pragma unroll 1
    for (int i = 0; i < n; i += AT_ONCE) {
      const int m = min(n - i, AT_ONCE);
      uint4 v[AT_ONCE];
      const unsigned gone = take(v, i, m, t, p, s);
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        if (j >= m || gone >> j & 1) continue;
        if (SUM == EP_LL_SUM_EXACT) {
          sum.addWeighted(v[j], terms[i + j].weight);
        } else {
          if (!added) only = v[j];
          sum.add(v[j]);
        }
        added++;
      }
    }
    // One unweighted row is copied, NaN payloads included; no row gives zeros.
    if (added && (SUM == EP_LL_SUM_EXACT || added > 1)) only = sum.round();
    writePiece((char *)a.op.out + (size_t)t * a.op.rowBytes, p, lane, only);
  }

  EP_DEV void countOwn(int n) {
    if (!g.bytes || SUM == EP_LL_SUM_PARTIAL) return;
#pragma unroll 1
    for (int i = lane; i < n; i += 32) {
      if (terms[i].where >= 0) countBytes(g, EP_LL_COMBINE, g.rank, a.op.rowBytes);
    }
  }

  EP_DEV void run(int warp, int numWarps) {
    int last = -1, n = 0;
#pragma unroll 1
    for (int s0 = 0; s0 < a.wire.steps; s0 += a.chunk) {
      const int len = min(a.chunk, a.wire.steps - s0);
      const Share share = shareOf(a.op.numTokens * len, blockIdx.x, gridDim.x);
#pragma unroll 1
      for (int u = share.first + warp; u < share.end; u += numWarps) {
        const int t = u / len, s = s0 + u - t * len;
        if (t != last) n = list(t);
        last = t;
        if (s == 0) countOwn(n);
        step(t, n, s);
      }
    }
  }
};

#endif
