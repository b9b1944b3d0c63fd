// The host runtime's header, and beside it what nvcc knows by itself: qualifiers, vector types, built-in
// variables and functions of a CUDA thread.
#ifndef TREFOIL_TESTS_EMULATOR_CUDA_RUNTIME_H
#define TREFOIL_TESTS_EMULATOR_CUDA_RUNTIME_H

#include_next <cuda_runtime.h>

#include "tests/emulator/machine.h"

#include <cmath>
#include <tuple>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};
static inline int2 make_int2(int x, int y) {
  return int2{x, y};
}
static inline uint2 make_uint2(unsigned x, unsigned y) {
  return uint2{x, y};
}
static inline float2 make_float2(float x, float y) {
  return float2{x, y};
}
static inline int4 make_int4(int x, int y, int z, int w) {
  return int4{x, y, z, w};
}
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return uint4{x, y, z, w};
}
static inline float4 make_float4(float x, float y, float z, float w) {
  return float4{x, y, z, w};
}

// ---- Built-in variables

namespace emulator {
template <unsigned Place::*FIELD> struct Component {
  operator unsigned() const { return place().*FIELD; }
};
struct One {
  operator unsigned() const { return 1; }
};
struct Zero {
  operator unsigned() const { return 0; }
};
template <unsigned Place::*FIELD> struct Index {
  Component<FIELD> x;
  Zero y, z;
};
template <unsigned Place::*FIELD> struct Extent {
  Component<FIELD> x;
  One y, z;
};
} // namespace emulator
static const emulator::Index<&emulator::Place::thread> threadIdx __attribute__((unused)) = {};
static const emulator::Index<&emulator::Place::block> blockIdx __attribute__((unused)) = {};
static const emulator::Extent<&emulator::Place::numThreads> blockDim __attribute__((unused)) = {};
static const emulator::Extent<&emulator::Place::numBlocks> gridDim __attribute__((unused)) = {};

// ---- Warps

template <class T> static inline uint64_t emuBits(T v) {
  static_assert(sizeof(T) <= 8, "values of meetings");
  uint64_t q = 0;
  memcpy(&q, &v, sizeof v);
  return q;
}
template <class T> static inline T emuValue(uint64_t q) {
  T v;
  memcpy(&v, &q, sizeof v);
  return v;
}
static inline void __syncwarp(unsigned mask = ~0u) {
  emulator::meet(mask, emulator::Meeting::SYNC, 0);
}
template <class T> static inline T __shfl_sync(unsigned mask, T v, int from, int width = 32) {
  const emulator::Met m = emulator::meet(mask, emulator::Meeting::SHUFFLE, emuBits(v));
  const int base = (int)emulator::lane() / width * width;
  return emuValue<T>(m.values[base + (from & (width - 1))]);
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T v, int with) {
  return emuValue<T>(emulator::meet(mask, emulator::Meeting::SHUFFLE, emuBits(v))
                         .values[(emulator::lane() ^ (unsigned)with) & 31]);
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T v, unsigned by) {
  const unsigned l = emulator::lane();
  return emuValue<T>(
      emulator::meet(mask, emulator::Meeting::SHUFFLE, emuBits(v)).values[l < by ? l : l - by]);
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T v, unsigned by) {
  const unsigned l = emulator::lane();
  return emuValue<T>(emulator::meet(mask, emulator::Meeting::SHUFFLE, emuBits(v))
                         .values[l + by > 31 ? l : l + by]);
}
static inline unsigned __ballot_sync(unsigned mask, int is) {
  const emulator::Met m = emulator::meet(mask, emulator::Meeting::VOTE, is != 0);
  unsigned bits = 0;
  for (int i = 0; i < 32; i++) {
    if (m.came >> i & 1 && m.values[i]) bits |= 1u << i;
  }
  return bits;
}
static inline int __any_sync(unsigned mask, int is) {
  return __ballot_sync(mask, is) != 0;
}
static inline int __all_sync(unsigned mask, int is) {
  return __ballot_sync(mask, !is) == 0;
}
template <class T, class F> static inline T emuReduce(unsigned mask, T v, F f) {
  const emulator::Met m = emulator::meet(mask, emulator::Meeting::REDUCE, emuBits(v));
  bool any = false;
  T sum = v;
  for (int i = 0; i < 32; i++) {
    if (!(m.came >> i & 1)) continue;
    sum = any ? f(sum, emuValue<T>(m.values[i])) : emuValue<T>(m.values[i]);
    any = true;
  }
  return sum;
}
template <class T> static inline T __reduce_add_sync(unsigned mask, T v) {
  return emuReduce(mask, v, [](T a, T b) { return (T)(a + b); });
}
template <class T> static inline T __reduce_or_sync(unsigned mask, T v) {
  return emuReduce(mask, v, [](T a, T b) { return (T)(a | b); });
}
template <class T> static inline T __reduce_max_sync(unsigned mask, T v) {
  return emuReduce(mask, v, [](T a, T b) { return a > b ? a : b; });
}
template <class T> static inline T __reduce_min_sync(unsigned mask, T v) {
  return emuReduce(mask, v, [](T a, T b) { return a < b ? a : b; });
}
template <class T> static inline unsigned __match_any_sync(unsigned mask, T v) {
  const emulator::Met m = emulator::meet(mask, emulator::Meeting::MATCH, emuBits(v));
  unsigned bits = 0;
  for (int i = 0; i < 32; i++) {
    if (m.came >> i & 1 && m.values[i] == emuBits(v)) bits |= 1u << i;
  }
  return bits;
}

// ---- Blocks, fences, atomics

static inline void __syncthreads() {
  emulator::syncThreads(0, 0, true);
}
static inline int __syncthreads_count(int is) {
  return emulator::syncCount(is != 0);
}
static inline int __syncthreads_or(int is) {
  return emulator::syncCount(is != 0) > 0;
}
static inline void __threadfence_block() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
static inline void __threadfence() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
static inline void __threadfence_system() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
static inline void __nanosleep(unsigned) {
  emulator::poll();
}
[[noreturn]] static inline void __trap() {
  emulator::fail("__trap");
}
template <class T> using EmuSame = typename std::enable_if<true, T>::type;
template <class T> static inline T atomicAdd(T *p, EmuSame<T> v) {
  return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);
}
template <class T> static inline T atomicAdd_system(T *p, EmuSame<T> v) {
  return atomicAdd(p, v);
}
template <class T> static inline T atomicOr(T *p, EmuSame<T> v) {
  return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST);
}
template <class T> static inline T atomicExch(T *p, EmuSame<T> v) {
  return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);
}
template <class T> static inline T atomicCAS(T *p, EmuSame<T> expected, EmuSame<T> v) {
  __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
template <class T> static inline T atomicMax(T *p, EmuSame<T> v) {
  T old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
  while (old < v &&
         !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return old;
}
template <class T> static inline T __ldcg(const T *p) {
  return *(const volatile T *)p;
}
template <class T> static inline T __ldcv(const T *p) {
  return *(const volatile T *)p;
}
template <class T> static inline T __ldg(const T *p) {
  return *p;
}

// ---- Arithmetic

static inline int __popc(unsigned v) {
  return __builtin_popcount(v);
}
static inline int __popcll(unsigned long long v) {
  return __builtin_popcountll(v);
}
static inline int __clz(int v) {
  return v ? __builtin_clz((unsigned)v) : 32;
}
static inline int __ffs(int v) {
  return __builtin_ffs(v);
}
static inline int __ffsll(long long v) {
  return __builtin_ffsll(v);
}
static inline unsigned __umulhi(unsigned a, unsigned b) {
  return (unsigned)((unsigned long long)a * b >> 32);
}
static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned by) {
  return (unsigned)(((unsigned long long)hi << 32 | lo) >> (by & 31));
}
static inline unsigned __funnelshift_lc(unsigned lo, unsigned hi, unsigned by) {
  const unsigned long long v = (unsigned long long)hi << 32 | lo;
  return by >= 32 ? lo : (unsigned)(v << by >> 32);
}
static inline unsigned __vcmpeq4(unsigned a, unsigned b) {
  unsigned v = 0;
  for (int i = 0; i < 32; i += 8) v |= (a >> i & 255) == (b >> i & 255) ? 255u << i : 0;
  return v;
}
static inline unsigned __float_as_uint(float f) {
  return (unsigned)emuBits(f);
}
static inline int __float_as_int(float f) {
  return (int)emuBits(f);
}
static inline float __uint_as_float(unsigned v) {
  return emuValue<float>(v);
}
static inline float __int_as_float(int v) {
  return emuValue<float>((unsigned)v);
}
static inline float __fadd_rn(float a, float b) {
  return a + b;
}
static inline float __fmul_rn(float a, float b) {
  return a * b;
}
static inline float __fmaf_rn(float a, float b, float c) {
  return fmaf(a, b, c);
}
static inline float __fdiv_rn(float a, float b) {
  return a / b;
}
template <class A, class B> static inline std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return (T)a < (T)b ? (T)a : (T)b;
}
template <class A, class B> static inline std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return (T)a < (T)b ? (T)b : (T)a;
}

// ---- Launches

template <class... P, class... A>
static inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(P...),
                                             A &&...args) {
  std::tuple<P...> values(static_cast<P>(args)...);
  void *params[sizeof...(P) + 1];
  size_t i = 0;
  std::apply([&](P &...p) { ((params[i++] = (void *)&p), ...); }, values);
  return cudaLaunchKernelExC(config, emulator::addressOf(kernel), params);
}

// ---- The driver's way: a kernel is known by its address, and one function is there

typedef const void *cudaKernel_t;
static inline cudaError_t cudaGetKernel(cudaKernel_t *kernel, const void *symbol) {
  *kernel = symbol;
  return cudaSuccess;
}

namespace emulator {
static inline int launchAsDriver(void *kernel, unsigned gridX, unsigned gridY, unsigned gridZ,
                                 unsigned blockX, unsigned blockY, unsigned blockZ, unsigned shared,
                                 void *stream, void **params, void **) {
  return (int)cudaLaunchKernel(kernel, dim3(gridX, gridY, gridZ), dim3(blockX, blockY, blockZ),
                               params, shared, (cudaStream_t)stream);
}

static inline cudaError_t entryPoint(const char *name, void **function, unsigned,
                                     unsigned long long, cudaDriverEntryPointQueryResult *found) {
  const bool is = !strcmp(name, "cuLaunchKernel");
  *function = is ? (void *)emulator::launchAsDriver : nullptr;
  *found = is ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
} // namespace emulator
#define cudaGetDriverEntryPointByVersion emulator::entryPoint

#endif
