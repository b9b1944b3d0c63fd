// Lines: how a row travels. The data says when it is there, so nothing is fenced or flagged.
//
// A row of W bytes (a multiple of 4) becomes n = ceil(W / 124) lines of 128 bytes, each the work of 8
// lanes, four lines a warp step:
//
//     lane of the line     0      1     ...    6        7
//     line i, 128 bytes    16 B   16 B  ...   16 B    | 12 B | mark
//     bytes of the row     [112 i, 112 i + 112)         [112 n + 12 i, +12)
//
// The mark is the operation's number, never 0 (signal.cuh). Lanes 0 to 6 move whole 16-byte vectors;
// what does not fit in front, at most 12 bytes a line, is the row's tail and travels beside the marks.
// A reader takes a line once its lane 7 sees the mark. That needs a line to be stored and loaded in one
// piece: one warp-wide store of 128 aligned bytes. NVLink and L2 do so in practice; PTX promises 16
// bytes. tests/kernels looks for torn lines in every run.
#ifndef TREFOIL_KERNELS_LL_LINE_CUH
#define TREFOIL_KERNELS_LL_LINE_CUH

#include "kernels/common/ptx.cuh"

struct Wire {
  int rowBytes, lines, steps;
};

__host__ __device__ inline Wire wireOf(int rowBytes) {
  const int lines = (rowBytes + 123) / 124;
  return Wire{rowBytes, lines, (lines + 3) / 4};
}

// The part of a row that one lane moves in one step.
struct Piece {
  int off;   // byte of the row
  int words; // 4-byte words of the row, 0 to 4
  bool on;   // this lane's line exists
};

EP_DEV Piece pieceOf(const Wire &w, int step, int lane) {
  const int line = step * 4 + (lane >> 3), j = lane & 7;
  Piece p;
  p.on = line < w.lines;
  p.off = j < 7 ? line * 112 + j * 16 : w.lines * 112 + line * 12;
  p.words = p.on ? min(max((w.rowBytes - p.off) >> 2, 0), j < 7 ? 4 : 3) : 0;
  return p;
}

EP_DEV bool isMarkLane(int lane) {
  return (lane & 7) == 7;
}

// This lane sees that its line has not arrived; a warp vote makes it the step's answer.
EP_DEV bool isMissing(uint4 v, const Piece &p, int lane, unsigned mark) {
  return p.on && isMarkLane(lane) && v.w != mark;
}

#endif
