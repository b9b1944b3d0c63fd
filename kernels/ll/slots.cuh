// Slots: which row of the output a received token gets. A block keeps one bit per (local expert, source,
// token), set while it reads the routing words; a slot is the number of set bits before its own, so
// every block finds the same slots without communication, and rows ascend by (source, token).
//
//     bits[e]: source 0 token 0, 1, .., N' - 1 | source 1 token 0, .. | ...      N' = N rounded up to 32
//
// A count looks at one span of 512 bits; with more than one span, `before` holds the counts of the
// spans in front. Rank-major uses one bitmap and counts from its source's first.
#ifndef TREFOIL_KERNELS_LL_SLOTS_CUH
#define TREFOIL_KERNELS_LL_SLOTS_CUH

#include "kernels/common/ptx.cuh"

struct SlotMap {
  unsigned *bits;   // [numBitmaps][stride]
  unsigned *before; // [numBitmaps][spans], if spans > 1
  int numBitmaps, spans, stride, perSource;

  static __host__ __device__ int spansOf(int numRanks, int perSource) {
    return (int)(((long long)numRanks * perSource + 511) / 512);
  }
  static __host__ __device__ int strideOf(int spans) { return spans * 16 + 4; } // off the banks

  EP_DEV int bitOf(int src, int t) const { return src * perSource + t; }

  EP_DEV void set(int bitmap, int bit) const {
    atomicOr(&bits[bitmap * stride + (bit >> 5)], 1u << (bit & 31));
  }

  // The lowest n bits, n of any size.
  static EP_DEV int countLow(unsigned bits, int n) {
    return __popc(__funnelshift_lc(0u, bits, max(32 - n, 0)));
  }

  // Set bits of the bitmap before this one.
  EP_DEV int countBefore(int bitmap, int bit) const {
    const int span = bit >> 9;
    const uint4 *w = (const uint4 *)(bits + bitmap * stride + span * 16);
    int n = spans > 1 ? (int)before[bitmap * spans + span] : 0;
#pragma unroll 2
    for (int left = bit & 511; left > 0; left -= 128) {
      const uint4 q = *w++;
      n += countLow(q.x, left) + countLow(q.y, left - 32);
      n += countLow(q.z, left - 64) + countLow(q.w, left - 96);
    }
    return n;
  }

  // Set bits of the only bitmap in [from, bit), from a multiple of 32.
  EP_DEV int countBetween(int from, int bit) const {
    int n = __popc(bits[bit >> 5] & ((1u << (bit & 31)) - 1));
#pragma unroll 1
    for (int w = from >> 5; w < bit >> 5; w++) n += __popc(bits[w]);
    return n;
  }

  // Set bits of the whole bitmap. All lanes of a warp.
  EP_DEV int countAll(int bitmap, int lane) const {
    int n = 0;
#pragma unroll 1
    for (int i = lane; i < spans * 16; i += 32) n += __popc(bits[bitmap * stride + i]);
    return __reduce_add_sync(FULL_WARP, n);
  }

  // Fills `before`: one warp a bitmap.
  EP_DEV void scan(int warp, int numWarps, int lane) const {
#pragma unroll 1
    for (int bitmap = warp; bitmap < numBitmaps; bitmap += numWarps) {
      int carry = 0;
#pragma unroll 1
      for (int c0 = 0; c0 < spans; c0 += 32) {
        const int c = c0 + lane;
        int n = 0;
        if (c < spans) {
#pragma unroll 4
          for (int i = 0; i < 16; i++) n += __popc(bits[bitmap * stride + c * 16 + i]);
        }
        int sum = n;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
          const int up = __shfl_up_sync(FULL_WARP, sum, d);
          if (lane >= d) sum += up;
        }
        if (c < spans) before[bitmap * spans + c] = (unsigned)(carry + sum - n);
        carry += __shfl_sync(FULL_WARP, sum, 31);
      }
    }
  }
};

// The tables that dispatch leaves in a handle for combine.
//   returns  rows to send back, in the order in which combine partitions them over its blocks
//   slots    [R, N, K] (rank-major [R, N]): the slot of each received entry, -1 where there is none
struct ReturnEntry {
  int slot;      // partial sums: not used
  unsigned from; // source << 26 | k << 20 | token

  static EP_DEV unsigned pack(int src, int k, int t) { return (unsigned)src << 26 | k << 20 | t; }
  EP_DEV int source() const { return (int)(from >> 26); }
  EP_DEV int k() const { return (int)(from >> 20 & 63); }
  EP_DEV int token() const { return (int)(from & 0xfffff); }
};

#endif
