// The only inline PTX of the LL kernels. sm_70 semantics throughout except the fp8 conversion (sm_89).
//
// Memory order: "sys" accesses are relaxed, single-copy atomic (16 bytes) and go past L1, so peers see
// each other's words; nothing here orders two accesses. "stream" accesses are plain ones that leave L1
// alone, for memory that no other SM writes during the kernel.
#ifndef TREFOIL_KERNELS_COMMON_PTX_CUH
#define TREFOIL_KERNELS_COMMON_PTX_CUH

#include "kernels/common/machine.cuh"

#include <cstdint>

#define EP_DEV __device__ __forceinline__

constexpr unsigned FULL_WARP = ~0u;

// Volatile, which is relaxed.sys that may not be split: of an ld.relaxed.sys.b128 whose consumer looks
// at two of the four words, ptxas 13.0 makes two 4-byte loads, and the word is torn.
EP_DEV uint4 loadSys(const void *p) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

EP_DEV void storeSys(void *p, uint4 v) {
  const uint64_t a = v.x | (uint64_t)v.y << 32, b = v.z | (uint64_t)v.w << 32;
  asm volatile("{.reg .b128 q; mov.b128 q,{%1,%2}; st.relaxed.sys.global.b128 [%0],q;}" ::"l"(p),
               "l"(a), "l"(b)
               : "memory");
}

EP_DEV uint4 loadStream(const void *p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// A plain load that stays where it is written, in front of whatever uses it.
EP_DEV uint4 loadEarly(const void *p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// The same where `on`; elsewhere v stays. Predicates instead of branches: lanes of a warp differ.
EP_DEV void loadSysIf(uint4 &v, const void *p, bool on) {
  asm volatile(
      "{.reg .pred q; setp.ne.b32 q,%5,0; @q ld.volatile.global.v4.u32 {%0,%1,%2,%3},[%4];}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(p), "r"((int)on)
      : "memory");
}
// The address is worked out in place: eight of them kept over a polling loop would cost 16 registers.
EP_DEV void loadSysIf(uint4 &v, const void *base, unsigned i, unsigned stride, bool on) {
  asm volatile("{.reg .pred q; .reg .u64 p; setp.ne.b32 q,%7,0; mad.wide.u32 p,%5,%6,%4; "
               "@q ld.volatile.global.v4.u32 {%0,%1,%2,%3},[p];}"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "l"(base), "r"(i), "r"(stride), "r"((int)on)
               : "memory");
}
EP_DEV unsigned loadEarlyWordIf(const void *p, bool on, unsigned otherwise) {
  asm volatile("{.reg .pred q; setp.ne.b32 q,%2,0; @q ld.global.u32 %0,[%1];}"
               : "+r"(otherwise)
               : "l"(p), "r"((int)on));
  return otherwise;
}
EP_DEV void loadStreamIf(uint4 &v, const void *p, bool on) {
  asm volatile("{.reg .pred q; setp.ne.b32 q,%5,0; "
               "@q ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];}"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "l"(p), "r"((int)on));
}
EP_DEV void storeStreamIf(void *p, uint4 v, bool on) {
  asm volatile("{.reg .pred q; setp.ne.b32 q,%5,0; "
               "@q st.global.L1::no_allocate.v4.u32 [%0],{%1,%2,%3,%4};}" ::"l"(p),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"((int)on)
               : "memory");
}
EP_DEV void storeStream(void *p, uint4 v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0],{%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

EP_DEV uint64_t clockNs() {
  uint64_t t;
  asm volatile("mov.u64 %0,%globaltimer;" : "=l"(t));
  return t;
}

// All threads of the named group of warps; orders their shared and global accesses. bar.sync wants whole
// warps, and lanes that left a polling loop apart need not have converged.
EP_DEV void syncWarps(int id, int threads) {
  __syncwarp();
  asm volatile("bar.sync %0,%1;" ::"r"(id), "r"(threads) : "memory");
}

// The same for warps that do not wait: what they wrote is seen by those that wait.
EP_DEV void arriveWarps(int id, int threads) {
  __syncwarp();
  asm volatile("bar.arrive %0,%1;" ::"r"(id), "r"(threads) : "memory");
}

// Sets bits of a word of shared memory if `is`: a branch would cost more.
EP_DEV void orShared(bool is, unsigned *word, unsigned bits) {
  asm volatile(
      "{.reg .pred p; setp.ne.u32 p,%0,0; @p red.shared.or.b32 [%1],%2;}" ::"r"((unsigned)is),
      "r"((unsigned)__cvta_generic_to_shared(word)), "r"(bits)
      : "memory");
}

// Waits until a word loaded before is here, and uses it for nothing.
EP_DEV void settle(unsigned word) {
  asm volatile("{.reg .pred p; setp.eq.u32 p,%0,0x80000001; @p nanosleep.u32 1;}" ::"r"(word));
}

// Rounds to nearest even; NaN becomes 0x7FFF in both types. lo is the element at the lower address.
EP_DEV unsigned packBf16(float lo, float hi) {
  unsigned q;
  asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(q) : "f"(hi), "f"(lo));
  return q;
}
EP_DEV unsigned packF16(float lo, float hi) {
  unsigned q;
  asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(q) : "f"(hi), "f"(lo));
  return q;
}
EP_DEV float2 unpackF16(unsigned q) {
  float2 f;
  asm("{.reg .f16 a,b; mov.b32 {a,b},%2; cvt.f32.f16 %0,a; cvt.f32.f16 %1,b;}"
      : "=f"(f.x), "=f"(f.y)
      : "r"(q));
  return f;
}

// Four E4M3 bytes, first at the lowest address: nearest even, saturating, NaN becomes 0x7F.
EP_DEV unsigned packE4m3(float a, float b, float c, float d) {
  unsigned short lo, hi;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0,%1,%2;" : "=h"(lo) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0,%1,%2;" : "=h"(hi) : "f"(d), "f"(c));
  return lo | (unsigned)hi << 16;
}

#endif
