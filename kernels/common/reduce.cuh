// Sums of row pieces in f32: a 16-byte vector of f32, f16 or bf16 at a time, rounded once at the end.
// docs/spec.md, rules S1 to S5: the first term starts the sum (its product is rounded, then the chain is
// fma), a NaN result is the one NaN of the format, and subnormals are kept. The build forbids contraction,
// so every fma here is written out.
#ifndef TREFOIL_KERNELS_COMMON_REDUCE_CUH
#define TREFOIL_KERNELS_COMMON_REDUCE_CUH

#include "kernels/common/ptx.cuh"
#include "trefoil/base.h"

#include <type_traits>

enum class Elem { F32, F16, BF16 };
template <Elem T> using ElemTag = std::integral_constant<Elem, T>;

// The datatypes of rows that are summed.
constexpr trefoil_dtype_t SUMMED[] = {TREFOIL_F32, TREFOIL_F16, TREFOIL_BF16};
constexpr int NUM_SUMMED = sizeof SUMMED / sizeof SUMMED[0];

// kernelOf(ElemTag) of a datatype; NULL: it is not summed.
template <class F> const void *kernelOfDtype(trefoil_dtype_t dtype, F kernelOf) {
  switch (dtype) {
  case TREFOIL_F32:
    return kernelOf(ElemTag<Elem::F32>{});
  case TREFOIL_F16:
    return kernelOf(ElemTag<Elem::F16>{});
  case TREFOIL_BF16:
    return kernelOf(ElemTag<Elem::BF16>{});
  default:
    return nullptr;
  }
}

template <Elem T> struct Vec { static constexpr int N = T == Elem::F32 ? 4 : 8; };

// Elements of word i.
template <Elem T> EP_DEV void widenWord(unsigned q, float *f) {
  if constexpr (T == Elem::F32) {
    f[0] = __uint_as_float(q);
  } else if constexpr (T == Elem::BF16) {
    f[0] = __uint_as_float(q << 16);
    f[1] = __uint_as_float(q & 0xffff0000u);
  } else {
    static_assert(T == Elem::F16, "how is it widened?");
    const float2 p = unpackF16(q);
    f[0] = p.x;
    f[1] = p.y;
  }
}

template <Elem T> struct Sum {
  static constexpr int PER = T == Elem::F32 ? 1 : 2;
  float acc[Vec<T>::N];

  // x + -0 is x and fma(y, w, -0) is the rounded product, signs of zero included: the first term needs
  // no instructions of its own.
  EP_DEV void clear() {
#pragma unroll
    for (int i = 0; i < Vec<T>::N; i++) acc[i] = -0.0f;
  }

  template <typename F> EP_DEV void each(uint4 v, F f) {
    const unsigned q[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float e[2];
      widenWord<T>(q[i], e);
#pragma unroll
      for (int j = 0; j < PER; j++) f(acc[i * PER + j], e[j]);
    }
  }

  EP_DEV void add(uint4 v) {
    each(v, [](float &a, float y) { a = __fadd_rn(a, y); });
  }
  EP_DEV void addWeighted(uint4 v, float w) {
    each(v, [w](float &a, float y) { a = __fmaf_rn(y, w, a); });
  }

  EP_DEV uint4 round() const {
    unsigned q[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (T == Elem::F32) {
        q[i] = acc[i] != acc[i] ? 0x7FFFFFFFu : __float_as_uint(acc[i]);
      } else if constexpr (T == Elem::BF16) {
        q[i] = packBf16(acc[2 * i], acc[2 * i + 1]);
      } else {
        static_assert(T == Elem::F16, "how is it rounded?");
        q[i] = packF16(acc[2 * i], acc[2 * i + 1]);
      }
    }
    return make_uint4(q[0], q[1], q[2], q[3]);
  }
};

#endif
