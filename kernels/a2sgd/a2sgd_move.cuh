// The second pass: every element moves by as much as its sign's mean does.
#ifndef TREFOIL_KERNELS_A2SGD_A2SGD_MOVE_CUH
#define TREFOIL_KERNELS_A2SGD_A2SGD_MOVE_CUH

#include "kernels/a2sgd/a2sgd_sum.cuh"

EP_DEV float moved(float x, float2 by) {
  return x + (x < 0 ? -by.y : by.x);
}

template <Elem T> EP_DEV uint4 movedVector(uint4 v, float2 by) {
  Sum<T> s;
  s.clear();
  s.each(v, [by](float &a, float x) { a = moved(x, by); });
  return s.round();
}

template <Elem T> EP_DEV void storeBits(void *array, int64_t i, unsigned bits) {
  if constexpr (T == Elem::F32)
    ((unsigned *)array)[i] = bits;
  else
    ((unsigned short *)array)[i] = (unsigned short)bits;
}

// Elements [from, to), a thread each.
template <Elem T>
EP_DEV void moveElements(const ep_a2sgd_step_t &s, int64_t from, int64_t to, float2 by) {
  for (int64_t i = from + threadIdx.x; i < to; i += blockDim.x) {
    const uint4 v = make_uint4(loadBits<T>(s.grad, i), 0, 0, 0);
    storeBits<T>(s.update, i, movedVector<T>(v, by).x);
  }
}

// Whole vectors from element `from` on, which lies at 16 bytes in both arrays.
template <Elem T>
EP_DEV void moveVectors(const ep_a2sgd_step_t &s, int64_t from, int64_t vectors, float2 by) {
  constexpr int AT_ONCE = 4;
  const char *in = (const char *)s.grad + from * ELEM_BYTES<T>;
  char *out = (char *)s.update + from * ELEM_BYTES<T>;
  int64_t i = threadIdx.x;
  for (; i + (AT_ONCE - 1) * EP_A2SGD_THREADS < vectors; i += AT_ONCE * EP_A2SGD_THREADS) {
    uint4 v[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) v[k] = loadStream(in + (i + k * EP_A2SGD_THREADS) * 16);
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++)
      storeStream(out + (i + k * EP_A2SGD_THREADS) * 16, movedVector<T>(v[k], by));
  }
  for (; i < vectors; i += EP_A2SGD_THREADS)
    storeStream(out + i * 16, movedVector<T>(loadStream(in + i * 16), by));
}

template <Elem T>
EP_DEV void movePart(const ep_a2sgd_step_t &s, const ep_a2sgd_group_t &g, uint32_t idx, float2 by) {
  constexpr int PER = 16 / ELEM_BYTES<T>;
  const int64_t size = (int64_t)EP_A2SGD_TILE << s.at.partShift;
  const int64_t from = g.first + idx * size, to = min(from + size, g.first + g.count);
  const uintptr_t in = (uintptr_t)s.grad, out = (uintptr_t)s.update;
  if ((in ^ out) & 15) return moveElements<T>(s, from, to, by);
  const unsigned past = (unsigned)(in + from * ELEM_BYTES<T>)&15; // bytes past a whole vector
  const int64_t first = min(from + (16 - past) % 16 / ELEM_BYTES<T>, to);
  const int64_t vectors = (to - first) / PER;
  moveElements<T>(s, from, first, by);
  moveVectors<T>(s, first, vectors, by);
  moveElements<T>(s, first + vectors * PER, to, by);
}

#endif
