// Sums of both signs' magnitudes in the order of rule A3: runs of 8 elements from left to right, then
// adjacent sums pairwise. A lane has a run, a warp 4 * 32 of them, a block a part; each is a whole subtree.
// Missing runs count as +0, which changes no sum of magnitudes.
#ifndef TREFOIL_KERNELS_A2SGD_A2SGD_SUM_CUH
#define TREFOIL_KERNELS_A2SGD_A2SGD_SUM_CUH

#include "kernels/a2sgd/a2sgd_control.cuh"
#include "kernels/common/reduce.cuh"

constexpr int ROUNDS = EP_A2SGD_WARP_TILE / EP_A2SGD_RUN / 32;

template <Elem T> constexpr int ELEM_BYTES = T == Elem::F32 ? 4 : 2;
template <Elem T> constexpr int RUN_VECTORS = EP_A2SGD_RUN *ELEM_BYTES<T> / 16;

struct Sums {
  float plus, minus; // of elements that are not negative, NaN among them; of the others' magnitudes
  unsigned long long numNegative;
};

EP_DEV Sums addSums(const Sums &a, const Sums &b) {
  return Sums{a.plus + b.plus, a.minus + b.minus, a.numNegative + b.numNegative};
}

// Adjacent lanes' sums pairwise; all lanes get the sum.
EP_DEV Sums warpTree(Sums s) {
#pragma unroll
  for (int with = 1; with < 32; with *= 2) {
    s = addSums(s, Sums{__shfl_xor_sync(FULL_WARP, s.plus, with),
                        __shfl_xor_sync(FULL_WARP, s.minus, with),
                        __shfl_xor_sync(FULL_WARP, s.numNegative, with)});
  }
  return s;
}

// The same of a block; all threads get the sum.
EP_DEV Sums blockTree(Sums s) {
  EP_SHARED_ARRAY(Sums, ofWarp, EP_A2SGD_WARPS);
  s = warpTree(s);
  __syncthreads();
  if (threadIdx.x % 32 == 0) ofWarp[threadIdx.x / 32] = s;
  __syncthreads();
  static_assert(EP_A2SGD_WARPS == 8, "the tree of the warps");
  return addSums(addSums(addSums(ofWarp[0], ofWarp[1]), addSums(ofWarp[2], ofWarp[3])),
                 addSums(addSums(ofWarp[4], ofWarp[5]), addSums(ofWarp[6], ofWarp[7])));
}

// ---- Loads of a run

// 16 bytes from a position `by` bytes (1 to 15, even) into the two vectors.
EP_DEV uint4 shiftBytes(uint4 a, uint4 b, unsigned by) {
  if (by & 8) {
    a = make_uint4(a.z, a.w, b.x, b.y);
    b = make_uint4(b.z, b.w, 0, 0);
  }
  if (by & 4) {
    a = make_uint4(a.y, a.z, a.w, b.x);
    b.x = b.y;
  }
  if (by & 2) {
    a = make_uint4(__funnelshift_r(a.x, a.y, 16), __funnelshift_r(a.y, a.z, 16),
                   __funnelshift_r(a.z, a.w, 16), __funnelshift_r(a.w, b.x, 16));
  }
  return a;
}

template <Elem T> EP_DEV void loadRun(uint4 *v, const char *p) {
#pragma unroll
  for (int i = 0; i < RUN_VECTORS<T>; i++) v[i] = loadStream(p + i * 16);
}

template <Elem T> EP_DEV void loadRunShifted(uint4 *v, const char *p, unsigned by) {
  uint4 w[RUN_VECTORS<T> + 1];
#pragma unroll
  for (int i = 0; i <= RUN_VECTORS<T>; i++) w[i] = loadEarly(p - by + i * 16);
#pragma unroll
  for (int i = 0; i < RUN_VECTORS<T>; i++) v[i] = shiftBytes(w[i], w[i + 1], by);
}

template <Elem T> EP_DEV unsigned loadBits(const void *array, int64_t i) {
  if constexpr (T == Elem::F32) return ((const unsigned *)array)[i];
  return ((const unsigned short *)array)[i];
}

// Elements from i on, at most `left` of them, +0 for the others.
template <Elem T> EP_DEV uint4 loadVectorPart(const void *array, int64_t i, int64_t left) {
  constexpr int PER = 4 / ELEM_BYTES<T>;
  unsigned w[4] = {0, 0, 0, 0};
#pragma unroll
  for (int k = 0; k < 4 * PER; k++) {
    if (k < left) w[k / PER] |= loadBits<T>(array, i + k) << k % PER * 16;
  }
  return make_uint4(w[0], w[1], w[2], w[3]);
}
template <Elem T> EP_DEV void loadRunPart(uint4 *v, const void *array, int64_t i, int64_t left) {
  constexpr int N = Vec<T>::N;
#pragma unroll
  for (int q = 0; q < RUN_VECTORS<T>; q++) v[q] = loadVectorPart<T>(array, i + q * N, left - q * N);
}

// ---- Sums of a run, of a warp's tile, of a part

template <Elem T>
EP_DEV void sumRun(const uint4 *v, float &plus, float &minus, unsigned &numNegative) {
  constexpr int PER = 4 / ELEM_BYTES<T>;
#pragma unroll
  for (int q = 0; q < RUN_VECTORS<T>; q++) {
    const unsigned w[4] = {v[q].x, v[q].y, v[q].z, v[q].w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float x[2];
      widenWord<T>(w[i], x);
#pragma unroll
      for (int j = 0; j < PER; j++) {
        if (x[j] < 0) {
          minus -= x[j];
          numNegative++;
        } else {
          plus += x[j];
        }
      }
    }
  }
}

// The rounds' runs of all lanes. Lanes exchange halves of what they have: in each of the first steps a
// bit of the lane selects the sign, then the rounds that it goes on with.
EP_DEV float2 tileTree(const float (&plus)[ROUNDS], const float (&minus)[ROUNDS], int lane) {
  static_assert(ROUNDS == 4, "the exchanged halves");
  const bool isMinus = lane & 1, isLate = lane & 2, isOdd = lane & 4;
  float a[4], b[2];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const float given = __shfl_xor_sync(FULL_WARP, isMinus ? plus[j] : minus[j], 1);
    a[j] = (isMinus ? minus[j] : plus[j]) + given;
  }
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const float given = __shfl_xor_sync(FULL_WARP, isLate ? a[j] : a[j + 2], 2);
    b[j] = (isLate ? a[j + 2] : a[j]) + given;
  }
  float c = __shfl_xor_sync(FULL_WARP, isOdd ? b[0] : b[1], 4);
  c += isOdd ? b[1] : b[0];
  c += __shfl_xor_sync(FULL_WARP, c, 8);
  c += __shfl_xor_sync(FULL_WARP, c, 16);
  c += __shfl_xor_sync(FULL_WARP, c, 4); // rounds 0 and 1, 2 and 3
  c += __shfl_xor_sync(FULL_WARP, c, 2);
  const float other = __shfl_xor_sync(FULL_WARP, c, 1);
  return isMinus ? make_float2(other, c) : make_float2(c, other);
}

template <Elem T> constexpr int ROUND_BYTES = 32 * EP_A2SGD_RUN *ELEM_BYTES<T>;
template <Elem T> constexpr int TILE_BYTES = ROUNDS *ROUND_BYTES<T>;

// What a warp sums of a part: its tiles [0, num), of which [whole, ragged) are read as vectors.
struct WarpTiles {
  int64_t at; // element of the group
  int num, whole, ragged;
};

template <Elem T>
EP_DEV WarpTiles tilesOf(const ep_a2sgd_step_t &s, const ep_a2sgd_group_t &g, uint32_t idx,
                         int warp) {
  const int most = 1 << s.at.partShift;
  const int64_t at = ((int64_t)idx * EP_A2SGD_WARPS + warp) * most * EP_A2SGD_WARP_TILE;
  const int64_t left = g.count - at;
  if (left <= 0) return WarpTiles{at, 0, 0, 0};
  const int num = (int)min((left + EP_A2SGD_WARP_TILE - 1) / EP_A2SGD_WARP_TILE, (int64_t)most);
  int full = (int)min(left / EP_A2SGD_WARP_TILE, (int64_t)most);
  // Where elements lie across vectors, those at the ends are shared with what is not the gradient's.
  const int64_t first = g.first + at;
  const unsigned by = (unsigned)((uintptr_t)s.grad + first * ELEM_BYTES<T>)&15;
  const int64_t rest = s.at.elements - first - (int64_t)full * EP_A2SGD_WARP_TILE;
  if (by && full && rest * ELEM_BYTES<T> < 16 - by) full--;
  const int whole = by && first * ELEM_BYTES<T> < by ? 1 : 0;
  return WarpTiles{at, num, min(whole, full), full};
}

// A tile's sums; `next(j)` is called when the vectors of round j are summed.
template <Elem T, class F>
EP_DEV Sums sumTile(uint4 (&v)[ROUNDS][RUN_VECTORS<T>], int lane, F next) {
  float plus[ROUNDS] = {}, minus[ROUNDS] = {};
  unsigned numNegative = 0;
#pragma unroll
  for (int j = 0; j < ROUNDS; j++) {
    sumRun<T>(v[j], plus[j], minus[j], numNegative);
    next(j);
  }
  const float2 sums = tileTree(plus, minus, lane);
  return Sums{sums.x, sums.y, numNegative};
}

// The counts of a tile lie in all lanes; its sums are kept by one.
EP_DEV void keepTile(Sums &mine, const Sums &tile, bool isMine) {
  mine.numNegative += tile.numNegative;
  mine.plus = isMine ? tile.plus : mine.plus;
  mine.minus = isMine ? tile.minus : mine.minus;
}

// Tiles [from, to) of whole vectors: each round of the next one is loaded when this one's is summed.
template <Elem T> EP_DEV void sumWhole(const char *p, int from, int to, int lane, Sums &mine) {
  uint4 v[ROUNDS][RUN_VECTORS<T>];
#pragma unroll
  for (int j = 0; j < ROUNDS; j++) loadRun<T>(v[j], p + j * ROUND_BYTES<T>);
  for (int t = from; t < to; t++) {
    p += TILE_BYTES<T>;
    const bool isLast = t + 1 == to;
    const Sums tile = sumTile<T>(v, lane, [&](int j) {
      if (!isLast) loadRun<T>(v[j], p + j * ROUND_BYTES<T>);
    });
    keepTile(mine, tile, lane == t);
  }
}

// The same where elements lie `by` bytes past whole vectors.
template <Elem T>
EP_DEV void sumShifted(const char *p, unsigned by, int from, int to, int lane, Sums &mine) {
  for (int t = from; t < to; t++) {
    uint4 v[ROUNDS][RUN_VECTORS<T>];
#pragma unroll
    for (int j = 0; j < ROUNDS; j++) loadRunShifted<T>(v[j], p + j * ROUND_BYTES<T>, by);
    keepTile(mine, sumTile<T>(v, lane, [](int) {}), lane == t);
    p += TILE_BYTES<T>;
  }
}

// A tile at an end of the group or of the gradient.
template <Elem T>
static __device__ __noinline__ Sums sumRagged(const ep_a2sgd_step_t &s, int64_t first, int64_t left,
                                              int lane) {
  constexpr int STRIDE = 32 * EP_A2SGD_RUN;
  uint4 v[ROUNDS][RUN_VECTORS<T>];
  const int64_t i = lane * EP_A2SGD_RUN;
#pragma unroll
  for (int j = 0; j < ROUNDS; j++)
    loadRunPart<T>(v[j], s.grad, first + i + j * STRIDE, left - i - j * STRIDE);
  return sumTile<T>(v, lane, [](int) {});
}

// Part `idx` of a group: all threads of a block, and all get the sums.
template <Elem T>
EP_DEV Sums sumPart(const ep_a2sgd_step_t &s, const ep_a2sgd_group_t &g, uint32_t idx, int warp,
                    int lane) {
  const WarpTiles w = tilesOf<T>(s, g, idx, warp);
  const int64_t first = g.first + w.at;
  Sums mine = {0, 0, 0};
  for (int t = 0; t < w.num; t++) {
    if (t == w.whole && t < w.ragged) {
      const int64_t run = first + (int64_t)t * EP_A2SGD_WARP_TILE + lane * EP_A2SGD_RUN;
      const char *p = (const char *)s.grad + run * ELEM_BYTES<T>;
      const unsigned by = (unsigned)((uintptr_t)p & 15);
      if (by == 0)
        sumWhole<T>(p, t, w.ragged, lane, mine);
      else
        sumShifted<T>(p, by, t, w.ragged, lane, mine);
      t = w.ragged - 1;
      continue;
    }
    const int64_t past = (int64_t)t * EP_A2SGD_WARP_TILE;
    keepTile(mine, sumRagged<T>(s, first + past, g.count - w.at - past, lane), lane == t);
  }
  return blockTree(mine);
}

// ---- Parts of a group

EP_DEV void storePart(const ep_a2sgd_step_t &s, uint32_t part, const Sums &sums) {
  storeStream(s.scratch + s.at.parts + (size_t)part * 16,
              make_uint4(__float_as_uint(sums.plus), __float_as_uint(sums.minus),
                         (unsigned)sums.numNegative, 0));
}

EP_DEV Sums loadPart(const ep_a2sgd_step_t &s, const ep_a2sgd_group_t &g, uint32_t idx) {
  if (idx >= g.numParts) return Sums{0, 0, 0};
  const uint4 v = loadSys(s.scratch + s.at.parts + (size_t)(g.firstPart + idx) * 16);
  return Sums{__uint_as_float(v.x), __uint_as_float(v.y), v.z};
}

// All parts of a group: a thread adds up to 8 of them, a block 2048 at a time, and keeps those sums a
// thread each.
EP_DEV Sums sumParts(const ep_a2sgd_step_t &s, const ep_a2sgd_group_t &g) {
  constexpr int EACH = 8;
  constexpr uint32_t AT_ONCE = EACH * EP_A2SGD_THREADS;
  Sums mine = {0, 0, 0};
  for (uint32_t t = 0; t * AT_ONCE < g.numParts; t++) {
    Sums part[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) part[i] = loadPart(s, g, t * AT_ONCE + threadIdx.x * EACH + i);
#pragma unroll
    for (int n = EACH / 2; n > 0; n /= 2) {
#pragma unroll
      for (int i = 0; i < n; i++) part[i] = addSums(part[2 * i], part[2 * i + 1]);
    }
    const Sums sum = blockTree(part[0]);
    if (g.numParts <= AT_ONCE) return sum;
    if (threadIdx.x == t) mine = sum;
  }
  return blockTree(mine);
}

#endif
