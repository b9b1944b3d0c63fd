// How a row of combine travels: packets that carry their own flag, as in packet.cuh, but always four of
// them a step, and the row's tail lies where whole 16-byte vectors can be moved without a branch.
//
// Step s of a row of W bytes, n = 4 steps packets in all:
//
//     lanes of a packet 0 .. 6                    7 (15, 23)               31
//     of the row        7 x 16 B a packet:        3 x 16 B of the tail:    -
//                       [448 s, 448 s + 448)      [112 n + 48 s, +48)
//     on the wire       the same                  x, y, z and the flag     w of 7, 15, 23; flag
//
// So between memory and wire only the fourth words of three vectors are exchanged. All that depends
// on the lane alone is worked out once, and every access is one predicated instruction: two that
// fill the same register would wait for each other.
#ifndef TREFOIL_KERNELS_LL_COMBINE_PACKET_CUH
#define TREFOIL_KERNELS_LL_COMBINE_PACKET_CUH

#include "kernels/ll/packet.cuh"

// Where some steps of a row are kept together: their front parts, then their tail parts.
constexpr int FRONT = 448, TAIL = 48; // bytes a step

struct Lane {
  int lane;
  int off, stride; // this lane's vector of the row in step 0, and how far it moves a step
  int end;         // where this lane's part of the row ends
};

EP_DEV int frontBytes(const Wire &w) {
  return w.steps * FRONT;
}

EP_DEV Lane laneOf(const Wire &w, int lane) {
  const int i = lane >> 3, j = lane & 7, front = frontBytes(w);
  const bool tail = isFlagLane(lane);
  return Lane{lane, tail ? front + i * 16 : i * 112 + j * 16, tail ? TAIL : FRONT,
              lane == 31 ? 0
              : tail     ? w.rowBytes
                         : min(w.rowBytes, front)};
}

EP_DEV bool hasPart(const Lane &l, int step) {
  return l.off + step * l.stride < l.end;
}

// A contiguous row, 16-byte aligned: as it lies in memory, or there.
EP_DEV uint4 readRow(const char *row, const Lane &l, int step) {
  uint4 v = make_uint4(0, 0, 0, 0);
  loadStreamIf(v, row + l.off + step * l.stride, hasPart(l, step));
  return v;
}
EP_DEV void writeRow(char *row, const Lane &l, int step, uint4 v) {
  storeStreamIf(row + l.off + step * l.stride, v, hasPart(l, step));
}

// All lanes: from memory's order to the wire's, and back.
EP_DEV uint4 toWire(uint4 v, const Lane &l, unsigned flag) {
  const unsigned a = __shfl_sync(FULL_WARP, v.w, 7), b = __shfl_sync(FULL_WARP, v.w, 15),
                 c = __shfl_sync(FULL_WARP, v.w, 23);
  if (l.lane == 31) v = make_uint4(a, b, c, flag);
  if (isFlagLane(l.lane)) v.w = flag;
  return v;
}
EP_DEV uint4 fromWire(uint4 v, const Lane &l) {
  const unsigned a = __shfl_sync(FULL_WARP, v.x, 31), b = __shfl_sync(FULL_WARP, v.y, 31),
                 c = __shfl_sync(FULL_WARP, v.z, 31);
  if (isFlagLane(l.lane)) v.w = l.lane == 7 ? a : l.lane == 15 ? b : c;
  return v;
}

EP_DEV void storeStep(char *row, const Lane &l, int step, uint4 v) {
  storeSys(row + step * 512 + l.lane * 16, v);
}

#endif
