// kernels/common/bulk.cuh for the emulator.
#ifndef TREFOIL_TESTS_EMULATOR_BULK_CUH
#define TREFOIL_TESTS_EMULATOR_BULK_CUH

#include "kernels/common/ptx.cuh"

EP_DEV uint32_t sharedAddress(const void *p) {
  return emulator::sharedOffset(p);
}

EP_DEV void barrierInit(uint64_t *b, int arrivals) {
  emulator::barrierStart(b, arrivals);
}
EP_DEV void barrierDrop(uint64_t *b) {
  emulator::barrierEnd(b);
}
EP_DEV void barrierInitFence() {}
EP_DEV void barrierArrive(uint64_t *b, int count) {
  emulator::barrierCount(b, count, 0);
}
EP_DEV void barrierExpect(uint64_t *b, int bytes) {
  emulator::barrierCount(b, 1, bytes);
}
EP_DEV bool barrierTest(uint64_t *b, uint32_t parity) {
  emulator::poll();
  return emulator::barrierPassed(b, parity);
}
EP_DEV bool barrierTry(uint64_t *b, uint32_t parity) {
  return barrierTest(b, parity);
}

EP_DEV void bulkLoad(uint32_t to, const void *from, int bytes, uint64_t *b) {
  emulator::startLoad(to, from, bytes, b);
}
EP_DEV void bulkStore(void *to, uint32_t from, int bytes) {
  emulator::startStore(to, from, bytes);
}
EP_DEV void bulkCommit() {
  emulator::commitStores();
}
template <int N> EP_DEV void bulkRead() {
  emulator::awaitStores(N, true);
}
template <int N> EP_DEV void bulkDone() {
  emulator::awaitStores(N, false);
}
EP_DEV void copyAsync(uint32_t to, const void *from) {
  emulator::startCopy(to, from);
}
EP_DEV void copyCommit() {
  emulator::commitCopies();
}
template <int N> EP_DEV void copyWait() {
  emulator::awaitCopies(N);
}
EP_DEV void proxyFence() {}

EP_DEV uint32_t loadAcquire(const uint32_t *p) {
  emulator::poll();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
EP_DEV void storeRelaxed(uint32_t *p, uint32_t v) {
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
}

EP_DEV void addRelaxed(uint32_t *p, uint32_t v) {
  __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL);
}

EP_DEV void storeReleaseShared(uint32_t *p, uint32_t v) {
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
EP_DEV uint32_t loadAcquireShared(const uint32_t *p) {
  emulator::poll();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

#endif
