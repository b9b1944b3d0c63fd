// Packets (LL128): how a row travels. Each carries a flag: where it is, the data is; no fence, no
// separate signal.
//
// A row of W bytes (a multiple of 4) becomes n = ceil(W / 124) packets of 128 bytes, each the work of 8
// lanes, four packets a warp step:
//
//     lane of the packet   0      1     ...    6        7
//     packet i, 128 bytes  16 B   16 B  ...   16 B    | 12 B | flag
//     bytes of the row     [112 i, 112 i + 112)         [112 n + 12 i, +12)
//
// The flag is the operation's number, never 0 (signal.cuh). Lanes 0 to 6 move whole 16-byte vectors;
// what does not fit in front, at most 12 bytes a packet, is the row's tail and travels beside the flags.
// A reader takes a packet once its lane 7 sees the flag. That needs a packet to be stored and loaded as a
// whole: one warp-wide store of 128 aligned bytes. NVLink and L2 do so in practice; PTX promises 16
// bytes. tests/kernels looks for torn packets in every run.
#ifndef TREFOIL_KERNELS_LL_PACKET_CUH
#define TREFOIL_KERNELS_LL_PACKET_CUH

#include "kernels/common/ptx.cuh"

struct Wire {
  int rowBytes, packets, steps;
};

__host__ __device__ inline Wire wireOf(int rowBytes) {
  const int packets = (rowBytes + 123) / 124;
  return Wire{rowBytes, packets, (packets + 3) / 4};
}

// The part of a row that one lane moves in one step.
struct RowVector {
  int off;   // byte of the row
  int words; // 4-byte words of the row, 0 to 4
  bool on;   // this lane's packet exists
};

EP_DEV RowVector vectorOf(const Wire &w, int step, int lane) {
  const int packet = step * 4 + (lane >> 3), j = lane & 7;
  RowVector p;
  p.on = packet < w.packets;
  p.off = j < 7 ? packet * 112 + j * 16 : w.packets * 112 + packet * 12;
  p.words = p.on ? min(max((w.rowBytes - p.off) >> 2, 0), j < 7 ? 4 : 3) : 0;
  return p;
}

EP_DEV bool isFlagLane(int lane) {
  return (lane & 7) == 7;
}

// This lane sees that its packet has not arrived; a warp vote makes it the step's answer.
EP_DEV bool isMissing(uint4 v, const RowVector &p, int lane, unsigned flag) {
  return p.on && isFlagLane(lane) && v.w != flag;
}

#endif
