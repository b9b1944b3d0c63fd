// What the host works out for a dispatch, and which shapes take the fast path. Host only.
#ifndef TREFOIL_KERNELS_LL_DISPATCH_HOST_CUH
#define TREFOIL_KERNELS_LL_DISPATCH_HOST_CUH

#include "kernels/ll/dispatch.cuh"

static inline Partitioning partitioningOf(int items, int blocks) {
  return Partitioning{items / blocks, items % blocks};
}

// Partitions shared memory; returns how many bytes it takes, with all of it in shared memory.
static inline size_t layOutShared(DispatchArgs &a, bool generic) {
  const size_t R = a.numRanks, N = a.maxTokens, rows = a.op.handle.rankMajor ? 1 : a.numLocal;
  size_t at = ((R + 1) * 4 + 15) / 16 * 16;
  a.rowAt = (int)at;
  at += a.op.quant ? (size_t)(a.wire.rowBytes + 15) / 16 * 16 : 0;
  a.mapAt = a.bigAt = (int)at;
  at += rows * SlotMap::strideOf(a.spans) * 4;
  a.beforeAt = (int)at;
  at += a.spans > 1 ? rows * a.spans * 4 : 0;
  a.returnsAt = (int)at;
  at = (at + N * a.groups * 4 + 7) / 8 * 8;
  a.routeAt = (int)at;
  at += R * N * (generic ? a.idVectors * 12 : 8);
  a.bigBytes = (at - a.bigAt + 15) / 16 * 16;
  return a.bigAt + a.bigBytes;
}

// How blocks quantise: on so many tokens at once, each token by so many.
static inline void shareTokens(DispatchArgs &a, int blocks) {
  const int tokens = a.numTokens;
  int perToken = tokens ? blocks / tokens : 1;
  if (perToken > a.wire.steps) perToken = a.wire.steps;
  if (perToken < 1) perToken = 1;
  a.perToken = Divisor::of((unsigned)perToken);
  a.tokenStride = blocks / perToken;
}

static inline void describeRows(DispatchArgs &a) {
  const ep_ll_dispatch_t &op = a.op;
  const int K = op.handle.numTopk, weights = op.handle.rankMajor ? (K * 4 + 15) / 16 * 16 : 0;
  a.wire = wireOf(op.tokenBytes + op.scaleBytes + weights);
  a.tokenBytes = op.tokenBytes;
  a.scaleBytes = op.scaleBytes;
  a.inputBytes = op.quant ? op.tokenBytes * 2 : op.tokenBytes;
  a.perRow = Divisor::of((unsigned)a.wire.steps);
}

static inline void describeGroup(DispatchArgs &a) {
  const ep_ll_group_t &g = a.op.group;
  a.control = &((Control *)g.control)->kind[EP_LL_DISPATCH];
  a.mask = g.enableMask ? g.mask : nullptr;
  a.mine = g.peers[g.rank];
  a.routing = g.at.routing;
  a.routingHalf = (g.at.weights - g.at.routing) / 2;
  a.rows = g.at.rows[0];
  a.rowsHalf = g.at.half[0];
  a.rowStride = (int)g.at.rowStride[0];
  a.rank = g.rank;
  a.numRanks = g.numRanks;
  a.maxTokens = g.maxTokens;
  a.numLocal = g.numLocal;
  a.numExperts = g.numExperts;
  a.numSms = g.numSms;
  a.perRank = Divisor::of((unsigned)g.numLocal);
  a.groups = (g.numRanks + SOURCES - 1) / SOURCES;
  a.perSource = (g.maxTokens + 31) / 32 * 32;
  a.spans = SlotMap::spansOf(g.numRanks, a.perSource);
}

// All but the roles of the warps and shared memory.
static inline DispatchArgs dispatchArgs(const ep_ll_dispatch_t &op, unsigned parts) {
  DispatchArgs a = {};
  a.op = op;
  a.parts = parts;
  describeGroup(a);
  describeRows(a);
  a.topkIdx = op.handle.topkIdx;
  a.tokens = (const char *)op.tokens;
  a.numTokens = op.numTokens;
  a.topk = op.handle.numTopk;
  a.idx64 = op.handle.idx64;
  a.idBytes = a.numLocal < 0xff ? 1 : 2;
  a.idVectors = (4 + a.topk * a.idBytes + 11) / 12;
  a.send = partitioningOf(a.numTokens * a.wire.steps, a.numSms);
  a.recv = partitioningOf(a.numTokens * a.groups * a.wire.steps, a.numSms);
  while (a.numTokens > 1 << a.guess) a.guess++;
  shareTokens(a, a.numSms);
  return a;
}

// Whether the fast path takes this launch: one routing word a token, rows of several steps whose scales and
// weights travel beside the flags, both parts at once, slot map in shared memory, which is then partitioned.
static inline bool isFast(DispatchArgs &a, size_t maxShared) {
  const int steps = a.wire.steps;
  const long long items = (long long)a.maxTokens * a.groups * steps;
  return !a.op.generic && a.parts == EP_LL_BOTH && a.numRanks < 32 && a.idBytes == 1 &&
         a.idVectors == 1 && steps >= 2 && a.wire.packets * 112 <= a.tokenBytes &&
         items * steps < 1ll << 31 && (long long)a.numRanks * a.maxTokens < 1 << 20 &&
         layOutShared(a, false) <= maxShared;
}

#endif
