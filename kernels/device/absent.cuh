// The other wire, for machines on which only 16-byte accesses are whole: a row travels as it is,
// 512 bytes a step, and a 16-byte vector has arrived once it differs from ABSENT, which the reader
// puts back. A vector that equals ABSENT travels as its stand-in; where a step has either, a word
// {lanes, 0, 0, mark} beside it says in which lanes the stand-in means itself. So rows may hold any
// bits.
//
//     sender     v == ABSENT -> stand-in; a word beside, if the step has either; then the vectors
//     reader     polls until no vector is ABSENT; sees a stand-in: waits for the word; puts
//                ABSENT back
//
// What is not taken stays, so all places must hold ABSENT before the first operation and after one
// that was given up (epLlClearRows).
#ifndef TREFOIL_KERNELS_DEVICE_ABSENT_CUH
#define TREFOIL_KERNELS_DEVICE_ABSENT_CUH

#include "kernels/device/line.cuh"
#include "kernels/ll.h"

constexpr unsigned FLIP = 1; // makes the stand-in of ABSENT

EP_DEV uint4 absent() {
  return make_uint4(EP_LL_ABSENT_X, EP_LL_ABSENT_Y, EP_LL_ABSENT_Z, EP_LL_ABSENT_W);
}
EP_DEV bool isAbsent(uint4 v, unsigned flip) {
  return ((v.x ^ EP_LL_ABSENT_X ^ flip) | (v.y ^ EP_LL_ABSENT_Y) | (v.z ^ EP_LL_ABSENT_Z) |
          (v.w ^ EP_LL_ABSENT_W)) == 0;
}

// All lanes: what is stored, and whether a word must go beside it.
EP_DEV bool escape(uint4 &v, unsigned &lanes) {
  if (!__any_sync(FULL_WARP, isAbsent(v, 0) || isAbsent(v, FLIP))) return false;
  lanes = __ballot_sync(FULL_WARP, isAbsent(v, FLIP));
  if (isAbsent(v, 0)) v.x ^= FLIP;
  return true;
}

#endif
