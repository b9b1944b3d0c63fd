// E4M3 per 128 elements, made on the way out (docs/spec.md, rules Q2 and Q3). 16 lanes a group, 8
// elements each; the block's sending warps write the row into shared memory as it will travel: H bytes
// of E4M3, then H / 128 scales of f32. A block's magnitude leaves NaN out and is at least 1e-4; an
// infinite one gives scale infinity and factor 0.
#ifndef TREFOIL_KERNELS_LL_QUANTISE_CUH
#define TREFOIL_KERNELS_LL_QUANTISE_CUH

#include "kernels/common/ptx.cuh"

EP_DEV unsigned magnitudeBits(unsigned bf16) {
  const unsigned u = (bf16 & 0x7fffu) << 16;
  return u > 0x7f800000u ? 0u : u;
}

struct Scale {
  float scale, times;
};

EP_DEV Scale scaleOf(unsigned magnitude, bool pow2) {
  const float a = __uint_as_float(max(magnitude, __float_as_uint(1e-4f)));
  Scale s = {__fmul_rn(a, 1.0f / 448.0f), __fdiv_rn(448.0f, a)};
  if (pow2) {
    s.scale = __uint_as_float((__float_as_uint(s.scale) + 0x007fffffu) & 0x7f800000u);
    // 1 / 2^k is 2^-k, and 1 / infinity is 0.
    s.times = __uint_as_float(max(0x7f000000 - __float_as_int(s.scale), 0));
  }
  return s;
}

// One lane's 8 elements.
EP_DEV void quantiseVector(uint4 v, int i, bool keep, bool pow2, char *row, int hidden) {
  const unsigned q[4] = {v.x, v.y, v.z, v.w};
  unsigned m = 0;
#pragma unroll
  for (int j = 0; j < 4; j++) m = max(m, max(magnitudeBits(q[j]), magnitudeBits(q[j] >> 16)));
#pragma unroll
  for (int d = 8; d; d >>= 1) m = max(m, __shfl_xor_sync(FULL_WARP, m, d));
  const Scale s = scaleOf(m, pow2);
  float f[8];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    f[2 * j] = __fmul_rn(__uint_as_float(q[j] << 16), s.times);
    f[2 * j + 1] = __fmul_rn(__uint_as_float(q[j] & 0xffff0000u), s.times);
  }
  const uint2 out = make_uint2(packE4m3(f[0], f[1], f[2], f[3]), packE4m3(f[4], f[5], f[6], f[7]));
  if (keep) *(uint2 *)(row + (size_t)i * 8) = out;
  if (keep && i % 16 == 0) *(float *)(row + hidden + i / 16 * 4) = s.scale;
}

// Threads 0 .. n-1, n a multiple of 32; hidden a multiple of 512, so warps stay whole. Vectors past the
// end are worked on like the last one and not stored: branches would keep the work of several from
// overlapping.
template <int AHEAD>
EP_DEV void quantiseRow(const char *x, int hidden, bool pow2, char *row, int thread, int n) {
  const int vectors = hidden / 8;
#pragma unroll 1
  for (int i0 = thread; i0 < vectors; i0 += n * AHEAD) {
    uint4 v[AHEAD];
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
      const int i = i0 + j * n;
      v[j] = loadStream(x + (size_t)(i < vectors ? i : i0) * 16);
    }
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
      quantiseVector(v[j], i0 + j * n, i0 + j * n < vectors, pow2, row, hidden);
    }
  }
}

#endif
