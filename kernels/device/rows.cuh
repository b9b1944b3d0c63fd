// Rows of a dispatch: tokens, scales and rank-major weights, side by side on the wire, apart in the
// caller's tensors.
#ifndef TREFOIL_KERNELS_DEVICE_ROWS_CUH
#define TREFOIL_KERNELS_DEVICE_ROWS_CUH

#include "kernels/device/args.cuh"

// Where the parts of a row come from. A row of tokens alone is moved whole; one with scales or weights
// (SEGMENTS) word by word where a vector may lie across two parts.
struct RowSource {
  const char *tokens, *scales;
  const float *weights;
};

EP_DEV unsigned wordOf(const DispatchArgs &a, const RowSource &r, int off) {
  if (off < a.op.tokenBytes) return *(const unsigned *)(r.tokens + off);
  off -= a.op.tokenBytes;
  if (off < a.op.scaleBytes) return *(const unsigned *)(r.scales + off);
  off -= a.op.scaleBytes;
  return off < a.op.handle.numTopk * 4 ? *(const unsigned *)((const char *)r.weights + off) : 0u;
}

template <bool SEGMENTS, bool SHARED>
EP_DEV uint4 readRow(const DispatchArgs &a, const RowSource &r, const Piece &p, int lane,
                     unsigned mark) {
  if (!SEGMENTS) return readPiece(r.tokens, p, lane, mark);
  uint4 v = make_uint4(0, 0, 0, mark);
  if (!isMarkLane(lane) && p.off + 16 <= a.op.tokenBytes) {
    if (p.words == 4)
      v = SHARED ? *(const uint4 *)(r.tokens + p.off) : loadStream(r.tokens + p.off);
  } else {
    unsigned w[4] = {0, 0, 0, isMarkLane(lane) ? mark : 0u};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i < p.words) w[i] = wordOf(a, r, p.off + 4 * i);
    }
    v = make_uint4(w[0], w[1], w[2], w[3]);
  }
  return v;
}

EP_DEV void putWord(const DispatchArgs &a, int row, int off, unsigned x) {
  const ep_ll_dispatch_t &o = a.op;
  if (off < o.tokenBytes) {
    *(unsigned *)((char *)o.outTokens + (size_t)row * o.tokenBytes + off) = x;
    return;
  }
  off -= o.tokenBytes;
  if (off < o.scaleBytes) {
    *(unsigned *)((char *)o.outScales + (size_t)row * o.scaleBytes + off) = x;
    return;
  }
  off -= o.scaleBytes;
  if (off < o.handle.numTopk * 4) {
    *(unsigned *)((char *)(o.outWeights + (size_t)row * o.handle.numTopk) + off) = x;
  }
}

template <bool SEGMENTS>
EP_DEV void writeRow(const DispatchArgs &a, int row, const Piece &p, int lane, uint4 v) {
  if (!SEGMENTS) {
    writePiece((char *)a.op.outTokens + (size_t)row * a.op.tokenBytes, p, lane, v);
    return;
  }
  if (!isMarkLane(lane) && p.off + 16 <= a.op.tokenBytes) {
    if (p.words == 4) {
      storeStream((char *)a.op.outTokens + (size_t)row * a.op.tokenBytes + p.off, v);
    }
  } else {
    if (p.words > 0) putWord(a, row, p.off, v.x);
    if (p.words > 1) putWord(a, row, p.off + 4, v.y);
    if (p.words > 2) putWord(a, row, p.off + 8, v.z);
    if (p.words > 3) putWord(a, row, p.off + 12, v.w);
  }
}

EP_DEV RowSource inputRow(const DispatchArgs &a, int t) {
  const ep_ll_dispatch_t &o = a.op;
  return RowSource{(const char *)o.tokens + (size_t)t * o.tokenBytes,
                   (const char *)o.scales + (size_t)t * o.scaleBytes,
                   o.weights + (size_t)t * o.handle.numTopk};
}

EP_DEV char *routingAt(const DispatchArgs &a, int at, int from, int t, int buf) {
  const ep_ll_group_t &g = a.op.group;
  return g.peers[at] + g.at.routing + buf * ((g.at.weights - g.at.routing) >> 1) +
         ((size_t)from * g.maxTokens + t) * a.idVectors * 16;
}

#endif
