// What a dispatch sends ahead of its rows: the routing words, and one step of a row as lines. Of the kernel
// that takes any shape (ll_dispatch.cu). The first word of a token is {B | lag << 21, ids ..., mark}.
#ifndef TREFOIL_KERNELS_DEVICE_ANNOUNCE_CUH
#define TREFOIL_KERNELS_DEVICE_ANNOUNCE_CUH

#include "kernels/device/rows.cuh"

// One warp: the routing word of token t to every active rank, itself included. firstId is the lane's
// entry of the first 32, `mine` is the warp's shared memory, K words.
EP_DEV void sendRouting(const DispatchArgs &a, const Op &op, unsigned long long active, int t,
                        int firstId, unsigned *mine, int lane) {
  const ep_ll_group_t &g = a.op.group;
  const int K = a.op.handle.numTopk, perWord = 4 / a.idBytes, bits = 8 * a.idBytes;
  __syncwarp();
#pragma unroll 1
  for (int k = lane; k < K; k += 32) {
    const int e = k == lane            ? firstId
                  : t < a.op.numTokens ? expertAt(a.op.handle, t, k)
                                       : -1,
              r = isExpert(g, e) ? rankOf(g, e) : 0xffff;
    mine[k] = (unsigned)r << 16 | (isExpert(g, e) ? e - r * g.numLocal : 0);
  }
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i < g.numRanks * a.idVectors; i += 32) {
    const int d = i / a.idVectors, v = i - d * a.idVectors;
    if (!(active >> d & 1)) continue;
    unsigned w[3];
#pragma unroll
    for (int q = 0; q < 3; q++) {
      w[q] = ~0u;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int k = (v * 3 + q - 1) * perWord + j;
        if (j < perWord && k >= 0 && k < K && mine[k] >> 16 == d) {
          w[q] ^= ((mine[k] ^ ~0u) & ((1u << bits) - 1)) << (j * bits);
        }
      }
    }
    if (v == 0) w[0] = (unsigned)a.op.numTokens | op.lag << EP_LL_LAG_SHIFT;
    storeSys(routingAt(a, d, g.rank, t, op.buf) + v * 16, make_uint4(w[0], w[1], w[2], op.mark));
  }
  if (g.bytes && t < a.op.numTokens) {
    const unsigned long long to = ranksOfToken(g, a.op.handle, t, lane) & active;
#pragma unroll 1
    for (int d = lane; d < g.numRanks; d += 32) {
      if (to >> d & 1) countBytes(g, EP_LL_DISPATCH, d, a.op.tokenBytes + a.op.scaleBytes);
    }
  }
}

// Routing words of this block's tokens, by the first warps of a role.
EP_DEV void announce(const DispatchArgs &a, const Op &op, unsigned long long active, int warp,
                     int numWarps, unsigned *mine, int lane) {
  const bool has = lane < a.op.handle.numTopk;
  int t = blockIdx.x + gridDim.x * warp;
  int id = has && t < a.op.numTokens ? expertAt(a.op.handle, t, lane) : -1; // before the first wait
  awaitFree(a.op.group, EP_LL_DISPATCH, op, active, lane);
  if (blockIdx.x == 0 && warp == 0 && lane == 0) headOf(a.op.handle).reached = active;
#pragma unroll 1
  while (t < max(1, a.op.numTokens)) {
    sendRouting(a, op, active, t, id, mine, lane);
    t += gridDim.x * numWarps;
    id = has && t < a.op.numTokens ? expertAt(a.op.handle, t, lane) : -1;
  }
  if (blockIdx.x == 0 && warp == 0) {
    tellReceived(a.op.group, EP_LL_DISPATCH, op, active, lane);
  }
}

EP_DEV void sendStep(const DispatchArgs &a, const Op &op, unsigned long long to, int t, int s,
                     uint4 v, int lane) {
  const ep_ll_group_t &g = a.op.group;
  const Piece p = pieceOf(a.wire, s, lane);
  const int first = g.rank + 1 == g.numRanks ? 0 : g.rank + 1;
  forRanks(to, first, g.numRanks,
           [&](int d) { storeStep(dispatchSlot(g, d, g.rank, t, op.buf), p, s, lane, v); });
}

#endif
