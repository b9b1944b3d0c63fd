// Which dispatches the short kernel takes, and what the host works out for it. Host only.
#ifndef TREFOIL_KERNELS_DEVICE_QUICK_HOST_CUH
#define TREFOIL_KERNELS_DEVICE_QUICK_HOST_CUH

#include "kernels/device/quick.cuh"

static inline Deal dealOf(int units, int blocks) {
  return Deal{units / blocks, units % blocks};
}

static inline int quickShared(QuickArgs &q) {
  const size_t R = q.numRanks, N = q.maxTokens, rows = q.op.handle.rankMajor ? 1 : q.numLocal;
  size_t at = ((R + 1) * 4 + 15) / 16 * 16;
  q.rowAt = (int)at;
  at += q.op.quant ? (size_t)(q.wire.rowBytes + 15) / 16 * 16 : 0;
  q.mapAt = (int)at;
  at += rows * SlotMap::strideOf(q.chunks) * 4;
  q.beforeAt = (int)at;
  at += q.chunks > 1 ? rows * q.chunks * 4 : 0;
  q.owedAt = (int)at;
  at = (at + N * q.groups * 4 + 7) / 8 * 8;
  q.routeAt = (int)at;
  at += R * N * 8;
  return at < INT32_MAX ? (int)at : INT32_MAX;
}

// True if the short kernel takes this launch: one routing word a token, rows of several steps whose scales
// and weights travel beside the marks, slot map in shared memory, both parts at once. Fills
// everything but the roles and `shared`, the bytes of shared memory.
static inline bool quickArgs(const DispatchArgs &a, QuickArgs &q, int &shared, int maxShared) {
  const ep_ll_dispatch_t &op = a.op;
  const ep_ll_group_t &g = op.group;
  const int L = g.numLocal, R = g.numRanks, steps = a.wire.steps, blocks = g.numSms;
  const long long units = (long long)g.maxTokens * a.groups * steps;
  if (op.general || a.roles.parts != EP_LL_BOTH || R >= 32 || a.idBytes != 1 || a.idVectors != 1 ||
      steps < 2 || a.wire.lines * 112 > op.tokenBytes || units * steps >= 1ll << 32 ||
      (long long)R * g.maxTokens >= 1 << 20) {
    return false;
  }
  q = QuickArgs{};
  q.op = op;
  q.wire = a.wire;
  q.control = &((Control *)g.control)->kind[EP_LL_DISPATCH];
  q.mask = g.enableMask ? g.mask : nullptr;
  q.topkIdx = op.handle.topkIdx;
  q.tokens = (const char *)op.tokens;
  q.mine = g.peers[g.rank];
  q.routing = g.at.routing;
  q.routingHalf = (g.at.weights - g.at.routing) / 2;
  q.rows = g.at.rows[0];
  q.rowsHalf = g.at.half[0];
  q.rowStride = (int)g.at.rowStride[0];
  q.rank = g.rank;
  q.numRanks = R;
  q.numTokens = op.numTokens;
  q.maxTokens = g.maxTokens;
  q.topk = op.handle.numTopk;
  q.idx64 = op.handle.idx64;
  q.numLocal = L;
  q.numExperts = g.numExperts;
  q.rankTimes = ((1u << 24) + L - 1) / L;
  q.stepTimes = (unsigned)(((1ull << 32) + steps - 1) / steps);
  q.tokenBytes = op.tokenBytes;
  q.scaleBytes = op.scaleBytes;
  q.inputBytes = op.quant ? op.tokenBytes * 2 : op.tokenBytes;
  q.groups = a.groups;
  q.perSource = a.perSource;
  q.chunks = a.chunks;
  q.send = dealOf(op.numTokens * steps, blocks);
  q.recv = dealOf(op.numTokens * a.groups * steps, blocks);
  while (op.numTokens > 1 << q.guess) q.guess++;
  q.perToken = op.numTokens ? blocks / op.numTokens : 1;
  if (q.perToken > steps) q.perToken = steps;
  if (q.perToken < 1) q.perToken = 1;
  q.tokenStride = blocks / q.perToken;
  q.perTokenTimes = (unsigned)(((1ull << 32) + q.perToken - 1) / q.perToken);
  shared = quickShared(q);
  return shared <= maxShared;
}

#endif
