// kernels/common/ptx.cuh for the emulator: what the instructions mean.
#ifndef TREFOIL_TESTS_EMULATOR_PTX_CUH
#define TREFOIL_TESTS_EMULATOR_PTX_CUH

#include "kernels/common/machine.cuh"

#include "trefoil/numerics.h"

#define EP_DEV inline

constexpr unsigned FULL_WARP = ~0u;

EP_DEV uint4 loadSys(const void *p) {
  uint4 v;
  emulator::together(emulator::Access::LOAD, (void *)p, &v, true);
  return v;
}
EP_DEV void loadSysIf(uint4 &v, const void *p, bool on) {
  emulator::together(emulator::Access::LOAD, (void *)p, &v, on);
}
EP_DEV void loadSysIf(uint4 &v, const void *base, unsigned i, unsigned stride, bool on) {
  loadSysIf(v, (const char *)base + (size_t)i * stride, on);
}
EP_DEV void storeSys(void *p, uint4 v) {
  emulator::together(emulator::Access::STORE, p, &v, true);
}

EP_DEV uint4 loadStream(const void *p) {
  return *(const uint4 *)p;
}
EP_DEV uint4 loadEarly(const void *p) {
  return *(const uint4 *)p;
}
EP_DEV unsigned loadEarlyWordIf(const void *p, bool on, unsigned otherwise) {
  return on ? *(const unsigned *)p : otherwise;
}
EP_DEV void loadStreamIf(uint4 &v, const void *p, bool on) {
  if (on) v = *(const uint4 *)p;
}
EP_DEV void storeStreamIf(void *p, uint4 v, bool on) {
  if (on) *(uint4 *)p = v;
}
EP_DEV void storeStream(void *p, uint4 v) {
  *(uint4 *)p = v;
}

EP_DEV uint64_t clockNs() {
  emulator::poll();
  return emulator::clock();
}

EP_DEV void syncWarps(int id, int threads) {
  emulator::syncThreads(id, threads, true);
}
EP_DEV void arriveWarps(int id, int threads) {
  emulator::syncThreads(id, threads, false);
}

EP_DEV void orShared(bool is, unsigned *word, unsigned bits) {
  if (is) *word |= bits;
}
EP_DEV void settle(unsigned) {}

EP_DEV unsigned packBf16(float lo, float hi) {
  return trefoilF32ToBf16(lo) | (unsigned)trefoilF32ToBf16(hi) << 16;
}
EP_DEV unsigned packF16(float lo, float hi) {
  return trefoilF32ToF16(lo) | (unsigned)trefoilF32ToF16(hi) << 16;
}
EP_DEV float2 unpackF16(unsigned q) {
  return float2{trefoilF16ToF32((uint16_t)q), trefoilF16ToF32((uint16_t)(q >> 16))};
}
EP_DEV unsigned packE4m3(float a, float b, float c, float d) {
  return trefoilF32ToE4m3(a) | (unsigned)trefoilF32ToE4m3(b) << 8 |
         (unsigned)trefoilF32ToE4m3(c) << 16 | (unsigned)trefoilF32ToE4m3(d) << 24;
}

#endif
